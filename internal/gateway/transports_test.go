package gateway

import (
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
)

// Status, metrics and explain show which of several transports to a gateway are down.
func TestTransportsAreShown(t *testing.T) {
	addr, g := startGateway(t, inWest(at(closed, "sni", "connect-h2", "connect"), at("127.0.0.1:2", "connect")))
	metrics := func() string {
		rec := httptest.NewRecorder()
		g.metrics.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
		return rec.Body.String()
	}
	testnet.Eventually(t, patience, func() bool { return len(g.Status().Transports) == 3 }, "the transports are not in the status")
	for _, s := range g.Status().Transports {
		if only := s.Gateway == "127.0.0.1:2" && s.Carrier == "connect"; s.Gateway != closed && !only || !s.Up || s.Error != "" {
			t.Errorf("before any request, a transport is %+v, want up", s)
		}
	}
	if got, want := metrics(), `culvert_transport_up{carrier="connect-h2",gateway="`+closed+`"} 1`; !strings.Contains(got, want) {
		t.Errorf("the metrics lack %q", want)
	}
	if c, err := (&connect.Dialer{Proxy: addr}).DialContext(t.Context(), "tcp", "svc.test:443"); err == nil {
		_ = c.Close()
		t.Fatal("a gateway that is not there was reached")
	}
	for i, carrier := range []string{"connect-h2", "connect"} {
		states := slices.DeleteFunc(g.Status().Transports, func(s StatusTransport) bool { return s.Gateway != closed })
		if s := states[i]; s.Carrier != carrier || s.Up || !strings.Contains(s.Error, "refused") || !s.RetryAt.After(s.Since) {
			t.Errorf("after a refusal, transport %d is %+v, want %s, down", i, s, carrier)
		}
		if got, want := metrics(), `culvert_transport_up{carrier="`+carrier+`",gateway="`+closed+`"} 0`; !strings.Contains(got, want) {
			t.Errorf("the metrics lack %q", want)
		}
	}
	// Where its failure may be that of what is behind it, a probe finds out, which a request does not wait for.
	testnet.Eventually(t, patience, func() bool {
		if c, err := (&connect.Dialer{Proxy: addr}).DialContext(t.Context(), "tcp", "svc.test:443"); err == nil {
			_ = c.Close()
		}
		return strings.Contains(metrics(), `culvert_transport_up{carrier="connect",gateway="127.0.0.1:2"} 0`)
	}, "the metrics say that the gateway with one transport is away, too; after the request the status was %+v", g.Status().Transports)
	x := Explain(t.Context(), g.router, g.cfg.Listeners, Query{Host: "svc.test", Listener: g.cfg.Listeners[0].Address, Proto: "connect", Port: 443})
	want := []string{"connect-h2 " + closed + " (down) or connect " + closed + " (down)"}
	if !slices.ContainsFunc(x.Endpoints, func(ep ExplanationEndpoint) bool { return slices.Equal(ep.Via, want) }) {
		t.Errorf("explain has the endpoints %+v, want one by %q", x.Endpoints, want)
	}
}
