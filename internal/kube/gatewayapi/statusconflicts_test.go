package gatewayapi

import (
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/registry"
)

// Two controllers of one class with different settings undo each other's status.
// That is said once by each, and goes on slowly; when one of them is gone the other
// has the last word, and what is new is never late.
func TestTwoControllersWithDifferentSettings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough)+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"))
		second := *b
		second.log = &lockedBuffer{}
		cfg := b.c.cfg
		cfg.Log, cfg.PublicAddresses = slog.New(slog.NewTextHandler(second.log, nil)), addrs("192.0.2.2")
		second.c, second.updates = &Controller{cfg: cfg, clients: b.c.clients, memo: newMemo()}, make(chan registry.Update, 100)
		defer b.start()()
		stop := second.start()
		defer stop()
		calm()
		time.Sleep(time.Minute)
		synctest.Wait()
		for minute := range 10 {
			_, before := b.requests()
			time.Sleep(time.Minute)
			synctest.Wait()
			if _, after := b.requests(); after-before > 6 {
				t.Errorf("got %d writes in minute %d, want 6 at most", after-before, minute+1)
			}
		}
		for name, log := range map[string]*lockedBuffer{"the first": b.log, "the second": second.log} {
			if n := strings.Count(log.String(), `msg="another controller writes the same status" object="Gateway a/edge" reason=StatusContested`); n != 1 {
				t.Errorf("%s says it %d times, want once:\n%s", name, n, log)
			}
		}
		isContested := func(r Refusal) bool { return r.Object == "Gateway a/edge" && r.Reason == reasonStatusContested }
		if rs := b.c.Report().Refusals; !slices.ContainsFunc(rs, isContested) {
			t.Errorf("got report %+v", rs)
		}
		events, err := b.core.CoreV1().Events("a").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if n := len(slices.DeleteFunc(events.Items, func(e corev1.Event) bool { return e.Reason != reasonStatusContested })); n != 1 {
			t.Errorf("got %d Events of it, want one", n)
		}

		// What is new is written at once.
		g := b.gateway("edge")
		if _, err := b.gw.GatewayV1().Gateways("a").Update(t.Context(), g, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if c := b.gateway("edge").Status.Conditions; len(c) == 0 || c[0].ObservedGeneration != g.Generation+1 {
			t.Errorf("got %+v a second after a change, want generation %d", c, g.Generation+1)
		}

		stop()
		time.Sleep(conflictPause + 5*time.Second)
		synctest.Wait()
		if as := b.gateway("edge").Status.Addresses; len(as) != 1 || as[0].Value != "192.0.2.1" {
			t.Errorf("got %+v of the one that is left", as)
		}
		time.Sleep(2 * conflictOver)
		synctest.Wait()
		r := b.route("r") // anything
		r.Generation++
		if _, err := b.gw.GatewayV1().TLSRoutes("a").Update(t.Context(), r, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		r.Generation++
		if _, err := b.gw.GatewayV1().TLSRoutes("a").Update(t.Context(), r, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		if rs := b.c.Report().Refusals; slices.ContainsFunc(rs, isContested) {
			t.Errorf("got report %+v long after", rs)
		}
	})
}

// Our own changes are no contest, and many objects are written as slowly as few.
func TestContests(t *testing.T) {
	now := time.Unix(0, 0)
	var c statusConflicts
	for i := range 100 { // a backend that flaps
		now = now.Add(time.Second)
		if want := i % 2; c.wrote("a", "TLSRoute a/r", want, now) || !c.notBefore("a", want).IsZero() {
			t.Fatalf("got a contest after %d writes of our own", i)
		}
	}
	for i := range conflictAfter + 3 {
		if told := c.wrote("b", "TLSRoute a/s", "x", now); told != (i == conflictAfter) {
			t.Errorf("write %d: told is %v", i, told)
		}
	}
	if got, want := c.notBefore("b", "x"), now.Add(conflictPause); !got.Equal(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := c.notBefore("b", "y"); !got.IsZero() {
		t.Errorf("got %v for what is new, want at once", got)
	}
	for i := range 3599 {
		for range conflictAfter + 1 {
			c.wrote(types.UID(rune(0x1000+i)), "TLSRoute a/x", "x", now)
		}
	}
	if got, want := c.notBefore("b", "x"), now.Add(time.Hour); !got.Equal(want) {
		t.Errorf("of 3600 objects: got %v, want %v", got, want)
	}
	c.forget(now.Add(time.Hour))
	if len(c.of) != 3601 {
		t.Errorf("got %d after an hour, want all: they are written once in that", len(c.of))
	}
	c.forget(now.Add(3 * time.Hour))
	if len(c.of) != 0 || c.refusals("x") != nil {
		t.Errorf("got %d after three hours, want none", len(c.of))
	}
}
