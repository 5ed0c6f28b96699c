package discovery

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A report counts what there is, and says since when that is old.
func TestReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "good", "expose", "true"), svc("shop", "bad", "expose", "maybe"), svc("shop", "shy"))
		src := &Source{Client: r.api, Cluster: "west"}
		if got := src.Report(); got.Known || got.Cluster != "west" || got.Lost != nil {
			t.Errorf("before it runs: %+v", got)
		}
		r.start(src)
		r.one(moment)
		got := src.Report()
		if !got.Known || got.Services != 3 || got.Exposed != 1 || got.Problems != 1 || got.Lost != nil {
			t.Errorf("got %+v, want 3 services, 1 exposed, 1 problem", got)
		}
		if len(got.Refusals) != 1 || !strings.HasPrefix(got.Refusals[0], "Service shop/bad: annotation culvert.dev/expose: ") {
			t.Errorf("refusals %q", got.Refusals)
		}
		began := time.Now()
		r.setFail(func(string, string, string) error { return errors.New("out of reach") })
		r.after(time.Minute)
		if got = src.Report(); got.Lost == nil || got.Lost.Sub(began) > 10*time.Second || !strings.Contains(got.Error, "out of reach") || !got.Known || got.Services != 3 {
			t.Errorf("got %+v when it is lost", got)
		}
		r.setFail(nil)
		r.after(time.Minute)
		if got = src.Report(); got.Lost != nil || got.Error != "" {
			t.Errorf("got %+v when it is back", got)
		}
	})
}
