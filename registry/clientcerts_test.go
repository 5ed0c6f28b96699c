package registry

import (
	"testing"

	"culvert.dev/tunnel"
)

// Services that a listener ends TLS for with client certificates required are found by
// the names that lead to them, and their other ways in are closed.
func TestClientCertsOfServices(t *testing.T) {
	item := func(ca string, protocol string, names ...string) ListenerTLS {
		return ListenerTLS{TLSTermination: TLSTermination{ClientCAs: ca}, Protocols: []string{protocol}, Names: patterns(t, names...)}
	}
	optional := item("ca", PlainTCP, "optional.test")
	optional.ClientCertOptional = true
	anyName := item("ca", "hbone")
	anyName.Any = true
	listener := func(port uint16, items ...ListenerTLS) *Listener {
		return &Listener{Name: "l" + string(rune('0'+port)), Protocol: Streams, Port: port, Settings: &ListenerSettings{TLS: items}}
	}
	alpn := service(t, "exact.test")
	alpn.Name, alpn.Match.ALPN = "by alpn", []string{"acme-tls/1"}
	exact := service(t, "exact.test")
	exact.Names = patterns(t, "exact.test", "alias.test")
	all := service(t, "all.test")
	all.Names = []tunnel.Pattern{tunnel.AnyName}
	tab, err := Merge(Snapshot{
		Services: []*Service{
			exact, service(t, "*.wild.test"), service(t, "deep.wild.test"), service(t, "optional.test"),
			service(t, "free.test"), service(t, "*.below.test"), service(t, "a.below.test"), alpn, all,
		},
		Listeners: []*Listener{
			listener(1,
				item("ca", PlainTCP, "exact.test", "one.wild.test", "nowhere.test"), optional,
				item("ca", "connect", "sure.test"), item("other", "connect", "other.test"), item("", "connect", "gw.test"),
				item("ca", PlainTCP, "*.below.test"), anyName),
			listener(2, item("ca", "connect", "exact.test")),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	const certified, alike = "mtls", "sure.test"
	for _, row := range []struct {
		listener, proto, name, alpn string
		by, method                  string // of the TLS that has ended; "" for none
		denied                      bool
	}{
		{"l1", "connect", "exact.test", "", "", "", true},
		{"l1", "connect", "alias.test", "", "", "", true},
		{"l1", "sni", "alias.test", "", "", "", true},
		{"l1", "sni", "exact.test", "acme-tls/1", "", "", true},
		{"l1", "tls", "exact.test", "", "", "", false}, // the listener has seen to it
		{"l1", "connect", "exact.test", "", alike, certified, false},
		{"l1", "connect", "exact.test", "", alike, "basic", true},
		{"l1", "connect", "exact.test", "", "gw.test", certified, true},
		{"l1", "connect", "exact.test", "", "other.test", certified, true},
		{"l1", "connect", "exact.test", "", "optional.test", certified, true}, // which shows nothing of what it would take
		{"l1", "hbone", "exact.test", "", "nobody.test", certified, false},    // by the one for any name
		{"l1", "connect", "two.wild.test", "", "", "", true},                  // it is the service of one.wild.test
		{"l1", "connect", "deep.wild.test", "", "", "", false},
		{"l1", "connect", "optional.test", "", "", "", false},
		{"l1", "connect", "free.test", "", "", "", false},
		{"l1", "connect", "a.below.test", "", "", "", true},
		{"l1", "connect", "b.below.test", "", "", "", true},
		{"l1", "sni", "whatever.test", "", "", "", false}, // the catch-all is not nowhere.test alone
		{"l2", "connect", "exact.test", "", "", "", false},
		{"l3", "connect", "exact.test", "", "", "", false},
	} {
		req := &tunnel.Request{Proto: row.proto, Listener: row.listener, Name: tunnel.MustParseName(row.name), Port: 443}
		if row.alpn != "" {
			req.ALPN = []string{row.alpn}
		}
		if row.by != "" {
			req.Peer = tunnel.Peer{ID: "somebody", Method: row.method}
			req.TLS = &tunnel.EndedTLS{ServerName: tunnel.MustParseName(row.by), Peer: req.Peer}
		}
		if row.method == certified { // and says by a token who its user is
			req.Peer = tunnel.Peer{ID: "alice", Method: "jwt"}.WithActor(req.Peer)
		}
		f, refusal := tab.findVisible(req)
		if denied := refusal != nil; denied != row.denied || denied && refusal.Reason != tunnel.Denied {
			t.Errorf("%+v: found %v, refused %v", row, f.entry, refusal)
		}
		if !row.denied {
			if n := testing.AllocsPerRun(10, func() { _, _ = tab.findVisible(req) }); n > 0 {
				t.Errorf("%+v: %v allocations", row, n)
			}
		}
	}
	if (&TLSTermination{}).ClientCertificates() != "ignored" || optional.ClientCertificates() != "optional" || anyName.ClientCertificates() != "required" {
		t.Error("what is asked of clients is told wrongly")
	}
}
