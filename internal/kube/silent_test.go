package kube

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// An API server that takes connections and says nothing is noticed within 25
// seconds by every source, although nothing of theirs fails; what they had said
// stands. Nobody asks more than 15 times a minute for that, at rest.
func TestAnAPIServerThatSaysNothing(t *testing.T) {
	for name, lease := range map[string]Object{"with a lease": {"culvert-system", "culvert"}, "without": {}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPI()
				var said lines
				last := a.begin(t, lease, slog.New(slog.NewTextHandler(&said, nil)))
				time.Sleep(20 * time.Minute)
				sources := []string{"cluster/west", "gateway-api"}
				for _, src := range sources {
					if u := last(src); u.Source == "" || u.Err != nil {
						t.Fatalf("source %s at first: %+v", src, u)
					}
				}
				first, before := a.asked()
				time.Sleep(10 * time.Minute)
				all, after := a.asked()
				if after-before > 150 {
					t.Errorf("%d requests in ten minutes at rest, want 150 at most: %v", after-before, all)
				}
				if n := all["serviceimports"] - first["serviceimports"]; n > 6 {
					t.Errorf("%d of them are for a kind that is not there, want 6 at most", n)
				}
				a.set(true, 0)
				time.Sleep(25 * time.Second)
				for _, src := range sources {
					if u := last(src); u.Err == nil || !strings.Contains(u.Err.Error(), "does not answer") {
						t.Errorf("source %s after 25 s of silence: %v", src, u.Err)
					}
				}
				for _, want := range []string{"API server is unreachable; serving the last known Gateways", "API server is unreachable; keeping the last snapshot"} {
					if n := strings.Count(said.String(), want); n != 1 {
						t.Errorf("%q is in the log %d times", want, n)
					}
				}
				time.Sleep(10 * time.Minute)
				a.set(false, 0)
				time.Sleep(5 * time.Second)
				for _, src := range sources {
					if u := last(src); u.Err != nil || src == "gateway-api" && len(u.Listeners) != 1 {
						t.Errorf("source %s when it answers again: %+v", src, u)
					}
				}
			})
		})
	}
}

// An API server that takes 5 seconds for everything is not lost, and no change is.
func TestASlowAPIServerLosesNoChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		a.set(false, 5*time.Second)
		last := a.begin(t, Object{"culvert-system", "culvert"}, slog.New(slog.DiscardHandler))
		time.Sleep(5 * time.Minute)
		if u := last("gateway-api"); u.Err != nil || len(u.Listeners) != 1 {
			t.Fatalf("at first: %+v", u)
		}
		const n = 20
		for i := range n {
			a.add("tlsroutes", route(fmt.Sprintf("r%d", i)))
			time.Sleep(time.Second)
		}
		time.Sleep(10 * time.Second)
		if u := last("gateway-api"); u.Err != nil || len(u.Listeners[0].Sections[0].Rules) != n {
			t.Errorf("after %d routes: %+v", n, u)
		}
		time.Sleep(10 * time.Minute)
		for _, src := range []string{"cluster/west", "gateway-api"} {
			if u := last(src); u.Err != nil {
				t.Errorf("source %s is lost: %v", src, u.Err)
			}
		}
	})
}
