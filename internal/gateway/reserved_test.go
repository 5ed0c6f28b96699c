package gateway

import (
	"context"
	"testing"

	"culvert.dev/tunnel"
)

// Names below culvert.alt are served by their handlers alone, for callers with an identity.
func TestReservedNames(t *testing.T) {
	served := ""
	note := func(name string) tunnel.Handler {
		return tunnel.HandlerFunc(func(context.Context, *tunnel.Request) { served = name })
	}
	var outcome *tunnel.Outcome
	h := &reservedNames{
		router: &tunnel.Router{Observe: func(o *tunnel.Outcome) { outcome = o }},
		handlers: map[tunnel.Name]reservedName{
			tunnel.MustParseName("reverse.culvert.alt"): {Handler: note("reverse")},
			tunnel.MustParseName("join.culvert.alt"):    {Handler: note("join"), Anonymous: true},
		},
	}
	known := tunnel.Peer{ID: "spiffe://corp.example/a", Method: "mtls"}
	for _, c := range []struct {
		name, proto string
		peer        tunnel.Peer
		want        string
		refused     tunnel.Reason
	}{
		{"reverse.culvert.alt", "connect-h2", known, "reverse", ""},
		{"reverse.culvert.alt", "connect", tunnel.Peer{}, "", tunnel.Denied},
		{"reverse.culvert.alt", "sni", known, "", tunnel.NoRoute},
		{"join.culvert.alt", "connect", tunnel.Peer{}, "join", ""},
		{"other.culvert.alt", "connect", known, "", tunnel.NoRoute},
		{"culvert.alt", "connect", known, "", tunnel.NoRoute},
	} {
		served, outcome = "", nil
		var refusal error
		h.ServeTunnel(t.Context(), &tunnel.Request{
			Proto: c.proto, Name: tunnel.MustParseName(c.name), Port: 443, Peer: c.peer, Refuse: func(err error) { refusal = err },
		})
		got := tunnel.Reason("")
		if refusal != nil {
			got = tunnel.ReasonOf(refusal)
		}
		if served != c.want || got != c.refused {
			t.Errorf("%s by %s as %q: served by %q and refused with %q, want %q and %q", c.name, c.proto, c.peer.ID, served, got, c.want, c.refused)
		}
		if c.refused != "" && (outcome == nil || outcome.Reason != c.refused) {
			t.Errorf("%s by %s as %q: the outcome is %+v, want %q", c.name, c.proto, c.peer.ID, outcome, c.refused)
		}
	}
}
