package registry_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// mesh is three networks: east and west with gateways, the office with none, and
// everyone else.
func mesh() registry.Snapshot {
	gw := func(address, public string, weight uint16, transports ...string) registry.Gateway {
		g := registry.Gateway{Address: addrPort(address), Weight: weight, Transports: registry.HopsBy(transports...)}
		if public != "" {
			g.Public = addrPort(public)
		}
		return g
	}
	return registry.Snapshot{
		Networks: []registry.Network{
			{Name: "east", CIDRs: prefixes("10.1.0.0/16"), Near: []string{"south", "west"}, Gateways: []registry.Gateway{
				gw("10.1.0.2:443", "192.0.2.1:443", 0), gw("10.1.0.3:443", "192.0.2.2:443", 0)}},
			{Name: "west", CIDRs: prefixes("10.2.0.0/16"), Gateways: []registry.Gateway{gw("198.51.100.1:15443", "", 3), gw("198.51.100.2:15443", "", 1)}},
			{Name: "south", CIDRs: prefixes("10.3.0.0/16"), Gateways: []registry.Gateway{gw("203.0.113.1:443", "", 0), gw("203.0.113.2:8443", "", 0, "connect")}},
			{Name: "office", CIDRs: prefixes("10.9.0.0/16")},
		},
		Services: []*registry.Service{
			{Name: "web", Names: patterns("web.example.com"), Ports: []uint16{443}, Endpoints: endpoints("10.1.5.1:443", "10.1.5.2:443"), Exposed: true,
				ID: registry.ID{Service: "web", Cluster: "one", Namespace: "shop"}, Exported: true},
			{Name: "db", Names: patterns("db.example.com"), Ports: []uint16{5432}, Headless: true, Exposed: true, Exported: true,
				ID:         registry.ID{Service: "db", Cluster: "one"},
				NamedPorts: []registry.NamedPort{{Name: "postgres", Protocol: "tcp", Port: 5432}},
				Endpoints: []registry.Endpoint{
					{Addr: netip.MustParseAddr("10.2.5.1"), Port: 5432, Name: "db-0"},
					{Addr: netip.MustParseAddr("10.2.5.2"), Port: 5432, Name: "db-1"},
					{Addr: netip.MustParseAddr("fd00::1"), Port: 5432, Name: "db-2", Network: "west"},
				}},
			{Name: "both", Names: patterns("both.example.com"), Ports: []uint16{443}, Endpoints: endpoints("10.2.6.1:443", "10.3.6.1:443"), Exposed: true},
			{Name: "printer", Names: patterns("printer.example.com"), Ports: []uint16{443}, Endpoints: endpoints("10.9.1.1:443"), Exposed: true},
			{Name: "secret", Names: patterns("secret.example.com"), Ports: []uint16{443}, Endpoints: endpoints("10.1.5.9:443"), Exposed: true, ExposedTo: []string{"west"}},
			{Name: "db of two", Names: patterns("db2.example.com"), Ports: []uint16{5432}, Headless: true, Exposed: true, Exported: true,
				ID:        registry.ID{Service: "db", Cluster: "two"},
				Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("10.3.5.1"), Name: "db-0"}}},
		},
	}
}

func addrPort(s string) registry.Endpoint {
	ap := netip.MustParseAddrPort(s)
	return registry.Endpoint{Addr: ap.Addr(), Port: ap.Port()}
}

func endpoints(list ...string) (eps []registry.Endpoint) {
	for _, s := range list {
		eps = append(eps, addrPort(s))
	}
	return eps
}

func prefixes(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func patterns(list ...string) (out []tunnel.Pattern) {
	for _, s := range list {
		out = append(out, tunnel.Pattern{Suffix: tunnel.MustParseName(s)})
	}
	return out
}

func table(t *testing.T, m registry.Mesh, snapshots ...registry.Snapshot) *registry.Table {
	t.Helper()
	tab, err := m.Merge(snapshots...)
	if err != nil {
		t.Fatal(err)
	}
	return tab
}

// said is a Location in a line.
func said(places []registry.Location) string {
	var all []string
	for _, p := range places {
		var s []string
		for _, ep := range p.Endpoints {
			s = append(s, ep.String())
		}
		for _, e := range p.Gateways {
			s = append(s, fmt.Sprintf("%d:%s@%s", e.Rank, e.Network, e.Address))
		}
		all = append(all, strings.Join(s, " "))
	}
	return strings.Join(all, " | ")
}

// One name means the endpoints to those who can reach them, and the gateways to
// those who can't.
func TestPlaces(t *testing.T) {
	tab := table(t, registry.Mesh{Network: "east"}, mesh())
	for _, c := range []struct{ name, from, want string }{
		{"web.example.com", "east", "10.1.5.1:443 10.1.5.2:443"},
		{"web.example.com", "west", "0:east@192.0.2.1:443 0:east@192.0.2.2:443"},
		{"web.example.com", "office", "0:east@192.0.2.1:443 0:east@192.0.2.2:443"},
		{"web.example.com", "", "0:east@192.0.2.1:443 0:east@192.0.2.2:443"},
		{"web.shop.svc.one.mesh.internal", "east", "10.1.5.1:443 10.1.5.2:443"},
		{"web.shop.svc.clusterset.local", "west", "0:east@192.0.2.1:443 0:east@192.0.2.2:443"},

		// A network without a gateway is reached from everywhere.
		{"printer.example.com", "", "10.9.1.1:443"},

		// Who is near comes first, and what is local comes alone.
		{"both.example.com", "west", "10.2.6.1:443"},
		{"both.example.com", "east", "0:south@203.0.113.1:443 0:south@203.0.113.2:8443 1:west@198.51.100.1:15443 1:west@198.51.100.2:15443"},
		{"both.example.com", "", "0:west@198.51.100.1:15443 0:west@198.51.100.2:15443 1:south@203.0.113.1:443 1:south@203.0.113.2:8443"},

		{"db.example.com", "west", "10.2.5.1:5432 10.2.5.2:5432 [fd00::1]:5432"},
		{"db.one", "west", "10.2.5.1:5432 10.2.5.2:5432 [fd00::1]:5432"},
		{"db.default.svc.one.mesh.internal", "west", "10.2.5.1:5432 10.2.5.2:5432 [fd00::1]:5432"},
		{"web.one", "east", ""}, // not of the default namespace

		// One endpoint: by name, by index, by address.
		{"db-1.db.example.com", "west", "10.2.5.2:5432"},
		{"1.db.example.com", "west", "10.2.5.2:5432"},
		{"10-2-5-2.db.one", "west", "10.2.5.2:5432"},
		{"fd00--1.db.default.svc.one.mesh.internal", "west", "[fd00::1]:5432"},
		{"db-1.db.example.com", "east", "0:west@198.51.100.1:15443 0:west@198.51.100.2:15443"},
		{"3.db.example.com", "west", ""},
		{"01.db.example.com", "west", ""},
		{"10-2-5-9.db.one", "west", ""},
		{"db-9.db.example.com", "west", ""},
		{"x.db-1.db.example.com", "west", ""},
		{"0.web.example.com", "east", ""}, // not headless

		// By way of one gateway: as who asks knows it, if it leads there.
		{"192-0-2-2.web.example.com", "west", "0:east@192.0.2.2:443"},
		{"192-0-2-2.web.shop.svc.clusterset.local", "west", "0:east@192.0.2.2:443"},
		{"198-51-100-1.db-1.db.example.com", "east", "0:west@198.51.100.1:15443"},
		{"198-51-100-2.both.example.com", "", "0:west@198.51.100.2:15443"},
		{"192-0-2-2.secret.example.com", "west", "0:east@192.0.2.2:443"},
		{"192-0-2-2.secret.example.com", "", ""},
		{"192-0-2-2.web.example.com", "east", ""},
		{"10-1-0-2.web.example.com", "west", ""},
		{"198-51-100-1.web.example.com", "west", ""},
		{"203-0-113-2.both.example.com", "", ""}, // it takes no SNI
		{"192-0-2-9.web.example.com", "west", ""},
		{"192-0-2-2.192-0-2-2.web.example.com", "west", ""},
		{"192-0-2-2.nobody.example.com", "west", ""},

		// The cluster set has those of all clusters, and one of them by its cluster.
		{"db.default.svc.clusterset.local", "west", "10.2.5.1:5432 10.2.5.2:5432 [fd00::1]:5432"},
		{"db.default.svc.clusterset.local", "south", "10.3.5.1:5432"},
		{"db-0.two.db.default.svc.clusterset.local", "south", "10.3.5.1:5432"},
		{"db-0.one.db.default.svc.clusterset.local", "west", "10.2.5.1:5432"},
		{"db-0.three.db.default.svc.clusterset.local", "west", ""},
		{"two.db.default.svc.clusterset.local", "south", ""},
		{"db-0.db.default.svc.clusterset.local", "west", ""},
		{"0.one.db.default.svc.clusterset.local", "west", ""},

		// Who may not have it does not hear of it.
		{"secret.example.com", "west", "0:east@192.0.2.1:443 0:east@192.0.2.2:443"},
		{"secret.example.com", "east", ""},
		{"secret.example.com", "", ""},
		{"secret.example.com", "nowhere", ""},
	} {
		places, ok := tab.Locations(tunnel.MustParseName(c.name), c.from)
		if got := said(places); got != c.want || ok != (c.want != "") {
			t.Errorf("%s from %q: %q, %t, want %q", c.name, c.from, got, ok, c.want)
		}
	}
	for name, want := range map[string]bool{
		"mesh.internal": true, "svc.one.mesh.internal": true, "example.com": true, "com": true, "default.svc.clusterset.local": true,
		"clusterset.local": true, "other.mesh.internal": false, "example.org": false, "db.example.com": true, "web.example.com": false,
		"two.db.default.svc.clusterset.local": true,
	} {
		if got := tab.HasNamesBelow(name, "", &tunnel.Request{}); got != want {
			t.Errorf("names below %s: %t, want %t", name, got, want)
		}
	}
}

// What is only there for others is refused with the reason.
func TestRefusalOfAGateway(t *testing.T) {
	tab := table(t, registry.Mesh{Network: "east"}, mesh())
	for name, want := range map[string]string{
		"192-0-2-2.web.example.com":    `no-route: registry: "192-0-2-2.web.example.com" is service "web" of an unnamed source by way of a gateway that leads there for others; the client is in "east"`,
		"192-0-2-2.secret.example.com": `not-exposed: registry: "192-0-2-2.secret.example.com" is service "secret" of an unnamed source, which is exposed to ["west"]; the client is in "east"`,
	} {
		err := tab.Refusal(tunnel.MustParseName(name), "east")
		if got := string(tunnel.ReasonOf(err)) + ": " + err.Error(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// A gateway's label is its address, or its DNS name, as far as that fits.
func TestGatewayName(t *testing.T) {
	long := strings.Repeat("a", 59) + ".com"
	for _, c := range []struct {
		at   registry.Endpoint
		name string
		want string
	}{
		{addrPort("192.0.2.1:443"), "web.test", "192-0-2-1.web.test"},
		{addrPort("[2001:db8::]:443"), "web.test", "2001-db8--0.web.test"},
		{registry.Endpoint{Host: "GW.example.net."}, "web.test", "gw-example-net.web.test"},
		{registry.Endpoint{Host: long}, "web.test", strings.ReplaceAll(long, ".", "-") + ".web.test"},
		{registry.Endpoint{Host: "a" + long}, "web.test", ""},
		{addrPort("192.0.2.1:443"), strings.Repeat("a.", 121) + "b", "192-0-2-1." + strings.Repeat("a.", 121) + "b"},
		{addrPort("192.0.2.1:443"), strings.Repeat("a.", 121) + "bb", ""},
		{registry.Endpoint{}, "web.test", ""},
	} {
		if got := registry.GatewayName(&c.at, c.name); got != c.want {
			t.Errorf("%s of %s: %q, want %q", c.name, c.at, got, c.want)
		}
	}
}

// The gateway goes where the same function says, by what is asked of it.
func TestResolveOverNetworks(t *testing.T) {
	reg := &registry.Registry{Mesh: registry.Mesh{Network: "east"}}
	reg.Swap(table(t, reg.Mesh, mesh()))
	for _, c := range []struct{ proto, name, from, want string }{
		{"sni", "web.example.com", "10.9.0.1", "10.1.5.1:443 10.1.5.2:443"},
		{"sni", "db-1.db.example.com", "10.9.0.1", "198.51.100.1:15443 198.51.100.2:15443"},
		{"sni", "192-0-2-2.web.example.com", "10.9.0.1", "10.1.5.2:443 10.1.5.1:443"}, // as those outside know this gateway
		{"sni", "10-1-0-2.db-1.db.example.com", "10.9.0.1", "198.51.100.1:15443 198.51.100.2:15443"},
		{"sni", "192-0-2-2.secret.example.com", "10.9.0.1", `not-exposed: registry: "192-0-2-2.secret.example.com" is service "secret" of an unnamed source, which is exposed to ["west"]; the source 10.9.0.1 is in network "office"`},
		{"sni", "both.example.com", "10.9.0.1", "203.0.113.1:443 198.51.100.1:15443 198.51.100.2:15443"},
		{"connect", "db.example.com", "10.9.0.1", `no-endpoint: registry: "db.example.com:5432": service "db" is in network "west", whose gateways take sni: a connect request can't go there unless one of them has connect-h2, connect or socks5 among its transports, or the network a via`},
		{"connect", "both.example.com", "10.9.0.1", `unsupported: registry: "both.example.com:443": service "both" is in network "south", and there is no way to its gateways but by SNI`},
		{"sni", "both.example.com", "203.0.113.1", `loop: registry: "both.example.com": service "both" is in network "south", whose gateway 203.0.113.1 asks for it here`},
	} {
		req := &tunnel.Request{Proto: c.proto, Name: tunnel.MustParseName(c.name), Source: netip.AddrPortFrom(netip.MustParseAddr(c.from), 1)}
		if c.proto == "connect" {
			req.Port = 443
			if c.name == "db.example.com" {
				req.Port = 5432
			}
		}
		route, err := reg.Resolve(context.Background(), req)
		got := ""
		for _, ep := range route.Endpoints {
			got = strings.TrimSpace(got + " " + ep.Addr.String())
		}
		if err != nil {
			got = string(tunnel.ReasonOf(err)) + ": " + err.Error()
		}
		if got != c.want {
			t.Errorf("%s %s from %s:\n got %s\nwant %s", c.proto, c.name, c.from, got, c.want)
		}
	}
}

// Gateways of one network share by weight.
func TestGatewaysTakeTurns(t *testing.T) {
	reg := &registry.Registry{Mesh: registry.Mesh{Network: "east"}}
	reg.Swap(table(t, reg.Mesh, mesh()))
	count := map[string]int{}
	for range 40 {
		route, err := reg.Resolve(context.Background(), &tunnel.Request{Proto: "sni", Name: tunnel.MustParseName("db.example.com")})
		if err != nil {
			t.Fatal(err)
		}
		count[route.Endpoints[0].Addr.String()]++
		if len(route.Endpoints) != 2 {
			t.Fatalf("endpoints %v, want both gateways", route.Endpoints)
		}
	}
	if count["198.51.100.1:15443"] != 30 || count["198.51.100.2:15443"] != 10 {
		t.Errorf("of 40 requests %v, want 30 and 10", count)
	}
}

// What cannot be one in the cluster set is said, and the first one kept.
func TestClusterSetConflicts(t *testing.T) {
	s := mesh()
	s.Services[5].Headless = false
	tab, err := registry.Mesh{}.Merge(s)
	if err == nil || !strings.Contains(err.Error(), "one of them is headless") {
		t.Errorf("error %v, want the conflict", err)
	}
	places, _ := tab.Locations(tunnel.MustParseName("db.default.svc.clusterset.local"), "south")
	if got := said(places); !strings.HasPrefix(got, "0:west@") {
		t.Errorf("places %q, want those of the first cluster", got)
	}
}

// What a name leads to costs nothing where its endpoints are in one network.
func TestPlacesAllocate(t *testing.T) {
	reg := &registry.Registry{Mesh: registry.Mesh{Network: "east"}}
	reg.Swap(table(t, reg.Mesh, mesh()))
	name := tunnel.MustParseName("web.example.com")
	var places []registry.Location
	if n := testing.AllocsPerRun(100, func() { places, _ = reg.Table().Locations(name, "east") }); n > 1 {
		t.Errorf("%v allocations for a name with one service, want 1", n)
	}
	if !slices.Equal(places[0].Endpoints, mesh().Services[0].Endpoints) {
		t.Errorf("endpoints %v", places[0].Endpoints)
	}
}

func TestDashed(t *testing.T) {
	for in, want := range map[string]string{"10.1.2.3": "10-1-2-3", "fd00::1": "fd00--1", "::1": "0--1", "fd00::": "fd00--0", "2001:db8:1:2:3:4:5:6": "2001-db8-1-2-3-4-5-6"} {
		if got := registry.Dashed(netip.MustParseAddr(in)); got != want {
			t.Errorf("%s is written %q, want %q", in, got, want)
		}
	}
}
