package registry

import (
	"fmt"
	"net/netip"
	"testing"

	"culvert.dev/tunnel"
)

// A described transport says what it was made for.
type described struct {
	nowhere
	layers string
}

func newDescribed(s *Service, _ *Endpoint, g *Gateway) (tunnel.Transport, error) {
	return described{layers: fmt.Sprintf("tls=%t proxy=%d via=%d gateway=%t", s.TLS != nil, s.ProxyProtocol, len(s.Via), g != nil)}, nil
}

// The gateway adds its own TLS to what clients send, but not to the TLS that a client
// speaks with the service: all other layers stay, and so does the way there.
func TestTLSOfClientsIsPassedThrough(t *testing.T) {
	r := &Registry{NewTransport: newDescribed, Mesh: Mesh{Network: "home"}}
	own := &BackendTLS{ServerName: "inside.test"}
	service := func(name string, change func(*Service)) *Service {
		s := &Service{
			Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name)}}, Ports: []uint16{443}, Exposed: true, TLS: own,
			Endpoints: []Endpoint{{Addr: netip.MustParseAddr("192.0.2.1"), Port: 443}},
		}
		change(s)
		return s
	}
	table, err := r.Merge(Snapshot{
		Networks: []Network{{Name: "home"}, {Name: "east", Gateways: []Gateway{{Address: Endpoint{Addr: netip.MustParseAddr("198.51.100.1"), Port: 443}, Transports: HopsBy("connect")}}}},
		Services: []*Service{
			service("plain.test", func(s *Service) { s.TLS = nil }),
			service("tls.test", func(*Service) {}),
			service("told.test", func(s *Service) { s.ProxyProtocol = 2 }),
			service("via.test", func(s *Service) { s.Via = []Hop{{Proto: "connect", Addresses: []string{"gw.test:443"}}} }),
			service("east.test", func(s *Service) { s.Endpoints[0].Network = "east" }),
			service("east-told.test", func(s *Service) { s.Endpoints[0].Network, s.ProxyProtocol = "east", 1 }),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	r.Swap(table)
	for _, row := range []struct{ proto, name, want string }{
		{"connect", "plain.test", ""}, {"sni", "plain.test", ""},
		{"connect", "tls.test", "tls=true proxy=0 via=0 gateway=false"},
		{"tls", "tls.test", "tls=true proxy=0 via=0 gateway=false"},
		{"sni", "tls.test", ""},
		{"quic", "tls.test", ""},
		{"connect", "told.test", "tls=true proxy=2 via=0 gateway=false"},
		{"sni", "told.test", "tls=false proxy=2 via=0 gateway=false"},
		{"connect", "via.test", "tls=true proxy=0 via=1 gateway=false"},
		{"sni", "via.test", "tls=false proxy=0 via=1 gateway=false"},
		{"connect", "east.test", "tls=true proxy=0 via=0 gateway=true"},
		{"sni", "east.test", "tls=false proxy=0 via=0 gateway=true"},
		{"connect", "east-told.test", "tls=true proxy=1 via=0 gateway=true"},
		{"sni", "east-told.test", "tls=false proxy=1 via=0 gateway=true"},
	} {
		req := &tunnel.Request{Proto: row.proto, Name: tunnel.MustParseName(row.name), Port: 443}
		route, err := r.Resolve(t.Context(), req)
		if err != nil || len(route.Endpoints) != 1 {
			t.Errorf("%s for %s: got %+v, %v, want one endpoint", row.proto, row.name, route.Endpoints, err)
			continue
		}
		got := ""
		if transport, ok := route.Endpoints[0].Transport.(described); ok {
			got = transport.layers
		}
		if got != row.want {
			t.Errorf("%s for %s: the transport has %q, want %q", row.proto, row.name, got, row.want)
		}
		if ep := &route.Endpoints[0]; row.name != "plain.test" && (ep.TLSOnly != nil || ep.Insecure) {
			t.Errorf("%s for %s: plaintext is told of: %v, %t", row.proto, row.name, ep.TLSOnly, ep.Insecure)
		}
	}
}

func TestParseCipherSuite(t *testing.T) {
	for _, name := range CipherSuites() {
		if id, err := ParseCipherSuite(name); err != nil || id == 0 {
			t.Errorf("%s: got %d, %v", name, id, err)
		}
	}
	for name, want := range map[string]string{
		"TLS_RSA_WITH_RC4_128_SHA": "cipher suite TLS_RSA_WITH_RC4_128_SHA is insecure",
		"TLS_AES_128_GCM_SHA256":   "cipher suite TLS_AES_128_GCM_SHA256 is of TLS 1.3, whose suites are always those of the Go library",
		"AES128":                   `cipher suite "AES128" is not known`,
		"":                         `cipher suite "" is not known`,
	} {
		if _, err := ParseCipherSuite(name); err == nil || err.Error() != want {
			t.Errorf("%q: got %v, want %s", name, err, want)
		}
	}
}
