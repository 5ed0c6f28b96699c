package registry_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// crossed is a transport over a gateway that says how it was asked for.
type crossed struct{ service, by string }

func (crossed) Dial(context.Context, *tunnel.Endpoint, *tunnel.Request) (net.Conn, error) {
	return nil, errors.New("nobody dials here")
}
func (crossed) Check(*tunnel.Endpoint) error { return nil }
func (c crossed) Info() tunnel.TransportInfo {
	return tunnel.TransportInfo{Datagrams: c.by == "connect-h2" || c.by == "via"}
}

// newCrossed is a NewTransport that makes them.
func newCrossed(s *registry.Service, _ *registry.Endpoint, g *registry.Gateway) (tunnel.Transport, error) {
	switch {
	case len(s.Via) > 0:
		return crossed{s.Name, "via"}, nil
	case g != nil:
		return crossed{s.Name, g.Carriers(registry.Endpoint{})[0].Proto}, nil
	}
	return nil, nil
}

// crossing makes a registry of a table of snapshots, in the network home.
func crossing(t *testing.T, snapshots ...registry.Snapshot) *registry.Registry {
	t.Helper()
	reg := &registry.Registry{Mesh: registry.Mesh{Network: "home"}, NewTransport: newCrossed,
		Lookup: func(context.Context, string) ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")}, nil
		},
	}
	tab, err := reg.Merge(snapshots...)
	if err != nil {
		t.Fatal(err)
	}
	reg.Swap(tab)
	return reg
}

// proxyTransports is what Resolve says of a request, in a line: the endpoints, with
// the gateways that they are asked of and how.
func proxyTransports(reg *registry.Registry, req *tunnel.Request) string {
	route, err := reg.Resolve(context.Background(), req)
	if err != nil {
		return string(tunnel.ReasonOf(err)) + ": " + err.Error()
	}
	var s []string
	for _, ep := range route.Endpoints {
		one := ep.String() + " directly"
		if c, ok := ep.Transport.(crossed); ok {
			one = strings.TrimRight(fmt.Sprintf("%s by %s %s", ep, c.by, ep.HealthKey), " ")
			if c.service != "" {
				one += " of " + c.service
			}
		}
		s = append(s, one)
	}
	return strings.Join(s, ", ")
}

// refusedInClear is how a request is refused that may be of plaintext.
func refusedInClear(service, network, gateway string) string {
	return fmt.Sprintf("insecure: registry: service %q is in network %q, and what may be plaintext would go to gateway %q there without TLS: give the gateway transports, or the network a via, with TLS and credentials, or say insecure: true of the network or of the service", service, network, gateway)
}

// far is networks of which each is entered in another way, seen from home.
func far() registry.Snapshot {
	gw := func(address string, transports ...string) registry.Gateway {
		return registry.Gateway{Address: addrPort(address), Transports: registry.HopsBy(transports...)}
	}
	via := []registry.Hop{{Proto: "hbone", Addresses: []string{"gw.both.example:15008"}, Certificate: "of this gateway"}}
	one := func(name, network string, ports ...uint16) *registry.Service {
		return &registry.Service{Name: name, Names: patterns(name + ".test"), Ports: ports, Exposed: true,
			Endpoints: []registry.Endpoint{{Host: "inside.test", Port: 1, Network: network}}}
	}
	wide := one("wide", "h2", 443)
	wide.Names[0].Wildcard = true
	wide.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.99")}
	named := one("named", "h2", 443)
	named.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.98")}
	secret := one("secret", "h2", 443)
	secret.ExposedTo = []string{"home"}
	db := one("db", "h2", 5432)
	db.Headless = true
	db.Endpoints = []registry.Endpoint{{Addr: netip.MustParseAddr("10.7.0.1"), Port: 5432, Name: "db-0", Network: "h2"}}
	crypt := one("crypt", "h2", 443)
	crypt.TLS = &registry.BackendTLS{ServerName: "inside.test"}
	several := one("several", "sni", 443)
	several.Endpoints = append(several.Endpoints, registry.Endpoint{Host: "inside.test", Port: 1, Network: "via"}, registry.Endpoint{Host: "inside.test", Port: 1, Network: "connect"})
	return registry.Snapshot{
		Networks: []registry.Network{
			{Name: "home", CIDRs: prefixes("10.1.0.0/16"), Near: []string{"sni", "via", "connect"}},
			{Name: "sni", Gateways: []registry.Gateway{{Address: addrPort("198.51.100.1:443")}}},
			{Name: "all", Gateways: []registry.Gateway{gw("198.51.100.2:443", "connect-h2", "socks5", "sni", "connect")}},
			{Name: "h2", Gateways: []registry.Gateway{gw("198.51.100.3:443", "hbone", "connect-h2", "connect")}},
			{Name: "connect", Gateways: []registry.Gateway{gw("198.51.100.4:443", "quic", "connect", "socks5")}},
			{Name: "socks5", Gateways: []registry.Gateway{gw("198.51.100.5:443", "hbone", "socks5")}},
			{Name: "keys", Gateways: []registry.Gateway{gw("198.51.100.6:443", "hbone", "quic"), gw("198.51.100.7:443", "hbone")}},
			{Name: "mixed", Gateways: []registry.Gateway{gw("198.51.100.8:443"), gw("198.51.100.9:443", "connect"), {Address: registry.Endpoint{Host: "gw.test", Port: 443}, Transports: registry.HopsBy("socks5")}}},
			{Name: "open", Insecure: true, Gateways: []registry.Gateway{gw("198.51.100.11:443", "socks5")}},
			{Name: "local", Gateways: []registry.Gateway{gw("198.51.100.12:443", "connect"), gw("127.0.0.1:443", "connect")}},
			{Name: "plainvia", Via: []registry.Hop{{Proto: "connect", Addresses: []string{"https://gw.test:1"}}, {Proto: "connect", Addresses: []string{"gw.plain.example:1"}}}},
			{Name: "barevia", Via: []registry.Hop{{Proto: "connect", Addresses: []string{"https://gw.test:1"}}}},
			{Name: "via", Via: via, Gateways: []registry.Gateway{gw("198.51.100.10:443", "sni", "connect")}},
		},
		Services: []*registry.Service{
			one("a", "sni", 443), one("b", "all", 443), one("c", "h2", 443), one("d", "connect", 443), one("e", "socks5", 443),
			one("f", "keys", 443), one("g", "mixed", 443), one("h", "h2"), wide, named, secret, db, several, crypt,
			one("i", "local", 443), one("open", "open", 443), one("plain", "plainvia", 443), one("bare", "barevia", 443),
		},
	}
}

// Where a network has no via, its gateways are asked by the best of what they
// take; TLS goes on by its name where they read it.
func TestOnward(t *testing.T) {
	for _, c := range []struct{ proto, target, from, want string }{
		// Each by the first that can be asked for anything.
		{"connect", "b.test:443", "", "b.test:443 by connect-h2 198.51.100.2:443"},
		{"connect-h2", "c.test:443", "", "c.test:443 by connect-h2 198.51.100.3:443"},
		{"socks5", "d.test:443", "", "d.test:443 by connect 198.51.100.4:443"},
		{"connect", "e.test:443", "", "e.test:443 by socks5 198.51.100.5:443"},
		{"connect-h3", "e.test:443", "", "e.test:443 by socks5 198.51.100.5:443"},
		{"tcp", "open.test:443", "", "open.test:443 by socks5 198.51.100.11:443"},
		{"tls", "open.test:443", "", "open.test:443 by socks5 198.51.100.11:443"},

		// Plaintext goes nowhere in the clear but where the network says so.
		{"tls", "e.test:443", "", refusedInClear("e", "socks5", "198.51.100.5:443")},
		{"tls", "b.test:443", "", refusedInClear("b", "all", "198.51.100.2:443")},
		{"hbone", "c.test:443", "", refusedInClear("c", "h2", "198.51.100.3:443")},
		{"tls", "plain.test:443", "", refusedInClear("plain", "plainvia", "gw.plain.example:1")},
		{"connect", "plain.test:443", "", "plain.test:443 by via"},
		{"tls", "bare.test:443", "", strings.Replace(refusedInClear("bare", "barevia", "https://gw.test:1"), "without TLS", "without credentials", 1)},
		{"connect", "bare.test:443", "", "bare.test:443 by via"},
		{"tcp", "e.test:443", "", "e.test:443 by socks5 198.51.100.5:443"},                                        // TLS alone
		{"tcp", "i.test:443", "", "i.test:443 by connect 127.0.0.1:443, i.test:443 by connect 198.51.100.12:443"}, // nothing leaves the host at first
		{"tls", "i.test:443", "", "i.test:443 by connect 127.0.0.1:443"},
		{"tls", "crypt.test:443", "", "crypt.test:443 by connect-h2 198.51.100.3:443 of crypt"},
		{"tcp", "a.test:443", "", `no-endpoint: registry: "a.test:443": service "a" is in network "sni", whose gateways take sni: a tcp request can't go there unless one of them has connect-h2, connect or socks5 among its transports, or the network a via`},

		// A hello goes on as it is where that is read, and nothing else changes.
		{"sni", "a.test", "", "198.51.100.1:443 directly"},
		{"sni", "b.test", "", "198.51.100.2:443 directly"},
		{"sni", "c.test", "", "c.test:443 by connect-h2 198.51.100.3:443"},
		{"sni", "g.test", "", "198.51.100.8:443 directly, g.test:443 by connect 198.51.100.9:443, g.test:443 by socks5 gw.test:443"},
		{"connect", "g.test:443", "", "g.test:443 by connect 198.51.100.9:443, g.test:443 by socks5 gw.test:443"},

		// What is asked for is what the far gateway can know.
		{"connect", "x.wide.test:443", "", "x.wide.test:443 by connect-h2 198.51.100.3:443"},
		{"connect", "192.0.2.98:443", "", "named.test:443 by connect-h2 198.51.100.3:443"},
		{"connect", "192.0.2.99:443", "", `no-endpoint: registry: "192.0.2.99:443": service "wide" has no name to ask the gateways of network "h2" for`},
		{"connect", "db-0.db.test:5432", "", "db-0.db.test:5432 by connect-h2 198.51.100.3:443"},
		{"connect", "10.7.0.1:5432", "", "10.7.0.1:5432 by connect-h2 198.51.100.3:443"},
		{"connect", "h.test:8080", "", "h.test:8080 by connect-h2 198.51.100.3:443"},
		{"sni", "h.test", "", `no-endpoint: registry: "h.test": service "h" has no port to ask the gateways of network "h2" for and none was asked for: list the service's ports`},

		// Nothing else opens.
		{"connect", "a.test:443", "", `no-endpoint: registry: "a.test:443": service "a" is in network "sni", whose gateways take sni: a connect request can't go there unless one of them has connect-h2, connect or socks5 among its transports, or the network a via`},
		{"connect", "f.test:443", "", `no-endpoint: registry: "f.test:443": service "f" is in network "keys", whose gateways take hbone, quic: a connect request can't go there unless one of them has connect-h2, connect or socks5 among its transports, or the network a via`},
		{"sni", "f.test", "", `no-endpoint: registry: "f.test": service "f" is in network "keys", whose gateways take hbone, quic: a sni request can't go there unless one of them has connect-h2, connect or socks5 among its transports, or the network a via`},

		// Datagrams go by what carries them, and by no weaker transport than plaintext does.
		{"quic", "b.test", "", "b.test:443 by connect-h2 198.51.100.2:443"},
		{"quic", "plain.test", "", "plain.test:443 by via"},
		{"quic", "e.test", "", `no-endpoint: registry: "e.test": service "e" is in network "socks5", and a quic request is of datagrams, which go to a gateway by connect-h2 or connect-h3: list connect-h2 among the transports of its gateways, or give the network a via`},
		{"quic", "a.test", "", `no-endpoint: registry: "a.test": service "a" is in network "sni", and a quic request is of datagrams, which go to a gateway by connect-h2 or connect-h3: list connect-h2 among the transports of its gateways, or give the network a via`},
		{"quic", "h.test", "", `no-endpoint: registry: "h.test": service "h" has no port to ask the gateways of network "h2" for and none was asked for: list the service's ports`},
		{"udp", "b.test:443", "", refusedInClear("b", "all", "198.51.100.2:443")},
		{"connect-udp", "b.test:443", "", refusedInClear("b", "all", "198.51.100.2:443")},
		{"connect-udp", "plain.test:443", "", refusedInClear("plain", "plainvia", "gw.plain.example:1")},
		{"udp", "crypt.test:443", "", "crypt.test:443 by connect-h2 198.51.100.3:443 of crypt"},
		{"quic", "c.test", "198.51.100.3", `loop: registry: "c.test": service "c" is in network "h2", whose gateway 198.51.100.3 asks for it here`},

		// Who may have it is asked first.
		{"connect", "secret.test:443", "10.9.0.1", `not-exposed: registry: "secret.test:443" is service "secret" of an unnamed source, which is exposed to ["home"]; the source 10.9.0.1 is in no network`},
		{"connect", "secret.test:443", "10.1.0.1", "secret.test:443 by connect-h2 198.51.100.3:443"},
		{"connect", "c.test:80", "", `no-route: registry: "c.test" has no port 80, it has 443`},

		// Who asks from one of the gateways has another table.
		{"connect", "c.test:443", "198.51.100.3", `loop: registry: "c.test:443": service "c" is in network "h2", whose gateway 198.51.100.3 asks for it here`},
		{"socks5", "e.test:443", "198.51.100.5", `loop: registry: "e.test:443": service "e" is in network "socks5", whose gateway 198.51.100.5 asks for it here`},

		// A network's via is not gone around, though its gateways take connect.
		{"connect", "several.test:443", "", "several.test:443 by connect 198.51.100.4:443"},
		{"sni", "several.test", "", "198.51.100.1:443 directly, 198.51.100.10:443 directly, several.test:443 by connect 198.51.100.4:443"},
	} {
		reg := crossing(t, far())
		req := &tunnel.Request{Proto: c.proto}
		if ap, err := netip.ParseAddrPort(c.target); err == nil {
			req.Addr, req.Port = ap.Addr(), ap.Port()
		} else {
			host, port, _ := strings.Cut(c.target, ":")
			req.Name = tunnel.MustParseName(host)
			_, _ = fmt.Sscan(port, &req.Port)
		}
		if c.from != "" {
			req.Source = netip.AddrPortFrom(netip.MustParseAddr(c.from), 1)
		}
		if got := proxyTransports(reg, req); got != c.want {
			t.Errorf("%s %s from %q:\n got %s\nwant %s", c.proto, c.target, c.from, got, c.want)
		}
	}
}

// Gateways that are asked otherwise than by SNI share by weight, too, and stand
// last where they are down.
func TestOnwardTakesTurns(t *testing.T) {
	s := far()
	s.Networks[3].Gateways = []registry.Gateway{
		{Address: addrPort("198.51.100.1:443"), Transports: registry.HopsBy("connect"), Weight: 3},
		{Address: addrPort("198.51.100.2:443"), Transports: registry.HopsBy("connect-h2")},
		{Address: addrPort("198.51.100.3:443"), Weight: 1000}, // by SNI alone
	}
	reg := crossing(t, s)
	req := &tunnel.Request{Proto: "connect", Name: tunnel.MustParseName("c.test"), Port: 443}
	const (
		first  = "c.test:443 by connect 198.51.100.1:443, c.test:443 by connect-h2 198.51.100.2:443"
		second = "c.test:443 by connect-h2 198.51.100.2:443, c.test:443 by connect 198.51.100.1:443"
	)
	count := map[string]int{}
	at := tunnel.Endpoint{Host: "c.test", HealthKey: "198.51.100.1:443"}
	route, err := reg.Resolve(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	for _, ours := range []error{context.Canceled, syscall.EMFILE, syscall.ENFILE, syscall.EADDRNOTAVAIL, syscall.ENOBUFS} {
		// A lack of this host's says nothing of who was dialed.
		route.Report(at, &tunnel.Error{Reason: tunnel.DialFailed, Err: os.NewSyscallError("connect", ours)})
	}
	for range 40 {
		count[proxyTransports(reg, req)]++
	}
	if count[first] != 30 || count[second] != 10 {
		t.Errorf("of 40 requests %v, want 30 and 10", count)
	}
	route.Report(at, tunnel.Refusef(tunnel.DialFailed, "nobody there"))
	for range 8 {
		if got := proxyTransports(reg, req); got != second {
			t.Fatalf("with the first one down: %s, want %s", got, second)
		}
	}
	route.Report(at, tunnel.HopRefusedf(tunnel.DialFailed, "its own endpoint is down")) // so the gateway itself works
	clear(count)
	for range 4 {
		count[proxyTransports(reg, req)]++
	}
	if count[first] != 3 {
		t.Errorf("with all up again: %v, want 3 by the first", count)
	}
}

// A backend of a rule is asked for by its own name, wherever a gateway can be told
// one: the name in a hello is the rule's, and may mean another service there.
func TestOnwardOfBackends(t *testing.T) {
	s := far()
	in := func(name, network string) *registry.Service {
		s := &registry.Service{Name: "shop/db", Ports: []uint16{5432}, Exposed: true,
			Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("10.7.0.1"), Port: 15432, Network: network}}}
		if name != "" {
			s.Names = patterns(name)
		}
		return s
	}
	const name = "db.shop.svc.west.mesh.internal"
	set := tunnel.MustParseName("db.shop.svc.clusterset.local")
	for _, network := range []string{"h2", "connect"} { // both export it
		s.Services = append(s.Services, &registry.Service{Name: network, ID: registry.ID{Service: "db", Namespace: "shop", Cluster: network}, Ports: []uint16{5432}, Exposed: true, Exported: true,
			Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("10.8.0.1"), Port: 15432, Network: network}}})
	}
	backends := map[string]registry.Backend{
		"here":     {Service: in(name, "home")},
		"sni":      {Service: in(name, "sni")},
		"all":      {Service: in(name, "all")},
		"h2":       {Service: in(name, "h2")},
		"via":      {Service: in(name, "via")},
		"open":     {Service: in(name, "open")},
		"crypt":    {Service: in(name, "h2")},
		"nameless": {Service: in("", "all")},
		"set":      {Service: &registry.Service{Name: "import", Ports: []uint16{5432}}, ServiceName: set},
	}
	backends["crypt"].Service.TLS = &registry.BackendTLS{ServerName: "inside.test"}
	for name, b := range backends {
		b.Weight = 1
		s.Listeners = append(s.Listeners, &registry.Listener{Name: name, Protocol: registry.TCP, Port: uint16(1000 + len(s.Listeners)),
			Sections: []*registry.Section{{Name: name, Rules: []*registry.Rule{{Name: "to " + name, Backends: []registry.Backend{b}}}}}})
	}
	reg := crossing(t, s)
	for _, c := range []struct{ proto, listener, want string }{
		{"tcp", "here", "10.7.0.1:15432 directly"},
		{"sni", "all", name + ":5432 by connect-h2 198.51.100.2:443"},
		{"tls", "all", refusedInClear("shop/db", "all", "198.51.100.2:443")},
		{"tls", "h2", refusedInClear("shop/db", "h2", "198.51.100.3:443")},
		{"tcp", "open", name + ":5432 by socks5 198.51.100.11:443"},
		{"tls", "crypt", name + ":5432 by connect-h2 198.51.100.3:443 of shop/db"},
		{"tls", "set", refusedInClear(set.String(), "connect", "198.51.100.4:443")},
		{"sni", "set", set.String() + ":5432 by connect 198.51.100.4:443, " + set.String() + ":5432 by connect-h2 198.51.100.3:443"},

		// Who reads names alone is told the one in the hello.
		{"sni", "sni", "198.51.100.1:443 directly"},
		{"sni", "nameless", "198.51.100.2:443 directly"},
		{"tcp", "sni", `no-endpoint: registry: "": service "shop/db" is in network "sni", whose gateways take sni: a tcp request can't go there unless one of them has connect-h2, connect or socks5 among its transports, or the network a via`},
		{"tcp", "nameless", `no-endpoint: registry: "": service "shop/db" has no name to ask the gateways of network "all" for`},
		{"udp", "all", refusedInClear("shop/db", "all", "198.51.100.2:443")},
		{"udp", "sni", `no-endpoint: registry: "": service "shop/db" is in network "sni", and a udp request is of datagrams, which go to a gateway by connect-h2 or connect-h3: list connect-h2 among the transports of its gateways, or give the network a via`},
	} {
		req := &tunnel.Request{Proto: c.proto, Listener: c.listener, ListenerOnly: true}
		if got := proxyTransports(reg, req); got != c.want {
			t.Errorf("%s by listener %s:\n got %s\nwant %s", c.proto, c.listener, got, c.want)
		}
	}

	// A client of TLS that ends here is refused before it is shown a certificate.
	for listener, want := range map[string]tunnel.Reason{"here": tunnel.Done, "all": tunnel.Insecure, "h2": tunnel.Insecure, "open": tunnel.Done, "crypt": tunnel.Done, "via": tunnel.Done} {
		err := reg.Table().PrecheckRoute(&tunnel.Request{Proto: "sni", Listener: listener, ListenerOnly: true})
		if tunnel.ReasonOf(err) != want {
			t.Errorf("TLS that ends at listener %s: got %v, want %s", listener, err, want)
		}
	}

	route, err := reg.Resolve(t.Context(), &tunnel.Request{Proto: "tls", Listener: "via", ListenerOnly: true})
	if err != nil || len(route.Endpoints) != 1 || route.Endpoints[0].Host != name || route.Endpoints[0].Addr.Port() != 5432 {
		t.Errorf("by the network's via: %v (%v), want %s and its port", route.Endpoints, err, name)
	}
}

// A network that is only said to be insecure is what a later source makes of it.
func TestInsecureOfAnotherSource(t *testing.T) {
	s := far()
	file := registry.Snapshot{Networks: []registry.Network{{Name: "h2", Insecure: true}}}
	req := &tunnel.Request{Proto: "tls", Name: tunnel.MustParseName("c.test"), Port: 443}
	reg := crossing(t, file, s)
	if got, want := proxyTransports(reg, req), "c.test:443 by connect-h2 198.51.100.3:443"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	// It is no way to change one that an earlier source has.
	tab, err := reg.Merge(s, file)
	if err == nil {
		t.Error("a later source may say it of an earlier one's network")
	}
	reg.Swap(tab)
	if got, want := proxyTransports(reg, req), refusedInClear("c", "h2", "198.51.100.3:443"); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
