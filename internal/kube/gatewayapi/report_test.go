package gatewayapi

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
)

// A report has each listener's state, and what is refused.
func TestReport(t *testing.T) {
	w := inputsOf(t, base, edge(passthrough+tcp)+
		testRoute("TLSRoute", "good", "abc.example.com", "{name: web, port: 443}")+
		testRoute("TLSRoute", "lost", "abc.example.com", "{name: web, port: 443}", "{name: edge, sectionName: none}"))
	w.Plane = map[string]error{"a/edge/tls/443": nil, "a/edge/tcp/9000": syscall.EACCES}
	got := report(w, Translate(w))
	if len(got.Gateways) != 1 || got.Gateways[0].Name != "a/edge" || got.Routes != 2 {
		t.Fatalf("got %+v, want one Gateway and two routes", got)
	}
	var ls []string
	for _, l := range got.Gateways[0].Listeners {
		ls = append(ls, fmt.Sprintf("%s %s/%d %s %d %v", l.Name, l.Protocol, l.Port, l.State, l.Routes, strings.HasPrefix(l.Why, "PortUnavailable: ")))
	}
	if want := []string{"tls TLS/443 open 1 false", "tcp TCP/9000 failed 0 true"}; !slices.Equal(ls, want) {
		t.Errorf("got listeners %q, want %q", ls, want)
	}
	var refused []string
	for _, r := range got.Refusals {
		refused = append(refused, r.Object+" "+r.Reason)
	}
	for _, want := range []string{"Gateway a/edge PortUnavailable", "TLSRoute a/lost NoMatchingParent"} {
		if !slices.Contains(refused, want) {
			t.Errorf("%q is not among %q", want, refused)
		}
	}
	w.Plane = map[string]error{"a/edge/tls/443": nil}
	if l := report(w, Translate(w)).Gateways[0].Listeners[1]; l.State != ListenerPending {
		t.Errorf("got %+v of one that has not been tried, want %s", l, ListenerPending)
	}
}

// A listener that can't be opened is an Event of its Gateway, once.
func TestEventOfAListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge("  - {name: tls, port: 443, protocol: TLS, tls: {mode: Terminate, certificateRefs: [{name: none}]}}\n"))
		if got := b.c.Report(); got.Known {
			t.Errorf("before it runs: %+v", got)
		}
		defer b.start()()
		calm()
		events := 0
		for _, a := range b.core.Actions() {
			if a.Matches("create", "events") {
				events++
			}
		}
		if events == 0 {
			t.Error("no event")
		}
		if got := b.c.Report(); !got.Known || len(got.Gateways) != 1 || got.Gateways[0].Listeners[0].State != ListenerFailed {
			t.Errorf("got %+v", got)
		}
	})
}
