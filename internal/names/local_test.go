package names

import (
	"net/netip"
	"testing"

	"culvert.dev/dns"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Programs of this host are told addresses that lead to this process, and never those of
// endpoints, nor that a name is there without one.
func TestLocal(t *testing.T) {
	endpoints := []registry.Endpoint{{Addr: netip.MustParseAddr("10.1.0.1"), Port: 443}}
	table, err := registry.Merge(registry.Snapshot{Services: []*registry.Service{
		{Name: "behind", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("shop.test"), Wildcard: true}}, Exposed: true, Endpoints: endpoints},
		{Name: "vip", Names: pattern("vip.test"), Ports: []uint16{443}, VIP: true, Exposed: true, Endpoints: endpoints},
		{Name: "host", Names: pattern("host.test"), Exposed: true, Endpoints: endpoints},
		{Name: "local", Names: pattern("printer.local"), Exposed: true, Endpoints: endpoints},
		{Name: "single", Names: pattern("single"), Exposed: true, Endpoints: endpoints},
		{Name: "hidden", Names: pattern("hidden.test"), Endpoints: endpoints},
	}})
	if err != nil {
		t.Fatal(err)
	}
	reg := &registry.Registry{}
	reg.Swap(table)
	l := &Local{
		Addrs: func(n tunnel.Name) []netip.Addr {
			if n.String() == "host.test" {
				return nil
			}
			return []netip.Addr{netip.MustParseAddr("127.0.7.1")}
		},
		Own: func(n tunnel.Name) bool { return n.String() == "gw.shop.test" },
	}
	src := &Source{Registry: reg, Local: func() *Local { return l }}
	ask(t, src, []question{
		{"db.shop.test", dns.TypeA, "", "exists 0:127.0.7.1"},
		{"db.shop.test", dns.TypeAAAA, "", "exists 0:127.0.7.1"}, // of the other family: the server says NODATA
		{"db.shop.test", dns.TypeHTTPS, "", "exists 0:127.0.7.1"},
		{"a.b.shop.test", dns.TypeA, "", "exists 0:127.0.7.1"},
		{"shop.test", dns.TypeA, "", "above "},
		{"gw.shop.test", dns.TypeA, "", "unknown "},
		{"host.test", dns.TypeA, "", "absent "},
		{"hidden.test", dns.TypeA, "", "absent "},
		{"other.test", dns.TypeA, "", "absent "},
		{"_https._tcp.db.other.test", dns.TypeSRV, "", "absent "},
		{"printer.local", dns.TypeA, "", "absent "},
		{"single", dns.TypeA, "", "absent "},
		{"1.0.1.10.in-addr.arpa", dns.TypePTR, "", "absent "},
	})
	l.Any = true
	ask(t, src, []question{
		{"other.test", dns.TypeA, "", "exists 0:127.0.7.1"},
		{"gw.shop.test", dns.TypeA, "", "unknown "},
		{"printer.local", dns.TypeA, "", "absent "},
		{"single", dns.TypeA, "", "absent "},
	})
	l = nil
	ask(t, src, []question{{"host.test", dns.TypeA, "", "exists 0:10.1.0.1"}})
}
