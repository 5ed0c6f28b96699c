package registry

import (
	"net/netip"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

func patterns(t testing.TB, names ...string) []tunnel.Pattern {
	t.Helper()
	var ps []tunnel.Pattern
	for _, s := range names {
		p, err := tunnel.ParsePattern(s)
		if err != nil {
			t.Fatalf("pattern %q: %v", s, err)
		}
		ps = append(ps, p)
	}
	return ps
}

// service makes an exposed service with one endpoint.
func service(t testing.TB, name string, ports ...uint16) *Service {
	return &Service{
		Name: name, Names: patterns(t, name), Ports: ports, Exposed: true, Origin: name + ".yaml:1",
		Endpoints: []Endpoint{{Addr: netip.MustParseAddr("192.0.2.1"), Port: 8443}},
	}
}

func table(t testing.TB, services ...*Service) *Table {
	t.Helper()
	tab, err := Merge(Snapshot{Services: services})
	if err != nil {
		t.Fatalf("Merge: %v", err)
	}
	return tab
}

func byName(name string, port, local uint16) *tunnel.Request {
	return &tunnel.Request{Name: tunnel.MustParseName(name), Port: port, LocalPort: local, Source: netip.MustParseAddrPort("203.0.113.9:40000")}
}

func byAddr(addr string, port uint16) *tunnel.Request {
	return &tunnel.Request{Addr: netip.MustParseAddr(addr), Port: port, LocalPort: 443, Source: netip.MustParseAddrPort("203.0.113.9:40000")}
}
