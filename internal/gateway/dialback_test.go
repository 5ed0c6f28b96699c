package gateway

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/nat"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// startNAT runs a gateway of one network that change may adapt before it serves.
func startNAT(t *testing.T, network string, s registry.Snapshot, change func(*Gateway)) (g *Gateway, at netip.AddrPort) {
	t.Helper()
	g, err := New(t.Context(), Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&sni.Protocol{}, &connect.Protocol{}}}},
		Sources:   []registry.Source{registry.Static{Name: "test", Snapshot: s}},
		Mesh:      registry.Mesh{Network: network}, DrainDelay: -1, DrainTimeout: -1,
	})
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(g)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ran := make(chan error, 1)
	go func() { ran <- g.Run(ctx, nil) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ran; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
	testnet.Eventually(t, patience, func() bool { ok, _ := g.Ready(); return ok }, "the gateway is ready")
	return g, netip.MustParseAddrPort(g.Addrs()[0].String())
}

// A gateway dials back to the address that its caller comes from, and to nothing else.
func TestDialBackGoesToTheCallerAlone(t *testing.T) {
	known := tunnel.Peer{ID: "spiffe://corp.example/a", Method: "mtls"}
	for _, c := range []struct {
		name, source string
		port         uint16
		datagrams    bool
		want         tunnel.Reason // "" for a route to source
	}{
		{"the internet", "203.0.113.7:50000", 443, false, ""},
		{"IPv6", "[2001:db8::7]:50000", 8443, false, ""},
		{"IPv4 in IPv6", "[::ffff:203.0.113.7]:50000", 443, false, ""},
		{"loopback", "127.0.0.1:50000", 443, false, tunnel.Prohibited},
		{"private", "10.0.0.1:50000", 443, false, tunnel.Prohibited},
		{"private in IPv6", "[::ffff:192.168.1.1]:50000", 443, false, tunnel.Prohibited},
		{"unique local", "[fd00::1]:50000", 443, false, tunnel.Prohibited},
		{"metadata", "169.254.169.254:50000", 80, false, tunnel.Prohibited},
		{"provider's NAT", "100.64.1.1:50000", 443, false, tunnel.Prohibited},
		{"multicast", "224.0.0.1:50000", 443, false, tunnel.Prohibited},
		{"broadcast", "255.255.255.255:50000", 443, false, tunnel.Prohibited},
		{"this network", "0.1.2.3:50000", 443, false, tunnel.Prohibited},
		{"link-local of IPv6", "[fe80::1%1]:50000", 443, false, tunnel.Prohibited},
		{"no address", "", 443, false, tunnel.Prohibited},
		{"no port", "203.0.113.7:50000", 0, false, tunnel.Prohibited},
		{"mail", "203.0.113.7:50000", 25, false, tunnel.Prohibited},
		{"datagrams", "203.0.113.7:50000", 443, true, tunnel.Unsupported},
	} {
		r := newDialBackResolver(&registry.Registry{})
		req := &tunnel.Request{Name: dialBackName, Port: c.port, Peer: known}
		if c.source != "" {
			req.Source = netip.MustParseAddrPort(c.source)
		}
		if c.datagrams {
			req.Datagrams = &tunnel.NetDialer{}
		}
		route, err := r.Resolve(t.Context(), req)
		switch {
		case c.want != "" && (err == nil || tunnel.ReasonOf(err) != c.want):
			t.Errorf("%s: got %v, %v; want %s", c.name, route.Endpoints, err, c.want)
		case c.want == "" && (err != nil || len(route.Endpoints) != 1 || route.Endpoints[0].Addr != netip.AddrPortFrom(req.Source.Addr().Unmap(), c.port) || route.Endpoints[0].Named || route.Limits == nil):
			t.Errorf("%s: got %+v, %v; want the source alone", c.name, route, err)
		}
	}
}

// One caller has a gateway dial back a few times a minute, and leaves others their share.
func TestDialBackIsLimited(t *testing.T) {
	r := newDialBackResolver(&registry.Registry{})
	ask := func(caller string) error {
		_, err := r.Resolve(t.Context(), &tunnel.Request{Name: dialBackName, Port: 443, Peer: tunnel.Peer{ID: caller, Method: "mtls"}, Source: netip.MustParseAddrPort("203.0.113.7:50000")})
		return err
	}
	for i := range dialBackPerCaller {
		if err := ask("a"); err != nil {
			t.Fatalf("call %d: %v", i+1, err)
		}
	}
	if err := ask("a"); tunnel.ReasonOf(err) != tunnel.Overload {
		t.Errorf("one call too many: got %v, want %s", err, tunnel.Overload)
	}
	if err := ask("b"); err != nil {
		t.Errorf("another caller: %v", err)
	}
	for i := range 2 * maxDialBackCallers {
		_ = ask(fmt.Sprint(i))
	}
	if len(r.calls) > maxDialBackCallers {
		t.Errorf("%d callers are told apart, want %d at most", len(r.calls), maxDialBackCallers)
	}
}

// A gateway finds itself behind a mapped port by another gateway, which connects back to it. What
// answers there instead is not taken for it.
func TestVerifyByAnotherGateway(t *testing.T) {
	peer, at := startNAT(t, "", registry.Snapshot{}, func(g *Gateway) {
		g.router.Resolver.(*dialBackResolver).permits = func(netip.Addr) bool { return true }
		g.handler.handlers[dialBackName] = reservedName{Handler: g.router, Anonymous: true}
	})
	site, own := startNAT(t, "home", registry.Snapshot{Networks: []registry.Network{
		{Name: "home", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}},
		{Name: "away", Gateways: []registry.Gateway{{Address: registry.Endpoint{Addr: at.Addr(), Port: at.Port()}, Transports: registry.HopsBy("connect")}}},
	}}, nil)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := site.nat.verify(ctx, nat.Port{Network: "tcp", Internal: own.Port()}, own); err != nil {
		t.Errorf("the gateway itself is not found: %v", err)
	}
	_, other := startNAT(t, "", registry.Snapshot{}, nil)
	for name, c := range map[string]struct {
		at   netip.AddrPort
		says string
	}{
		"another gateway":      {other, "this gateway did not answer there"},
		"a service that talks": {netip.MustParseAddrPort(testnet.Echo(t).Addr()), "this gateway did not answer there"},
		"nothing":              {netip.MustParseAddrPort(testnet.ClosedPort(t)), "gateway"},
	} {
		if err := site.nat.verify(ctx, nat.Port{Network: "tcp", Internal: own.Port()}, c.at); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v, want an error that says %q", name, err, c.says)
		}
	}
	if err := peer.nat.verify(ctx, nat.Port{Network: "tcp"}, own); err == nil || !strings.Contains(err.Error(), "no other network") {
		t.Errorf("without a gateway to ask: got %v", err)
	}
}

// What is verified becomes the public address of the gateway in the table, and goes again.
func TestVerifiedAddressIsPublished(t *testing.T) {
	inside := netip.MustParseAddrPort("192.168.1.10:443")
	g, _ := startNAT(t, "", registry.Snapshot{Networks: []registry.Network{{Name: "home", Gateways: []registry.Gateway{
		{Address: registry.Endpoint{Addr: inside.Addr(), Port: inside.Port()}},
		{Address: registry.Endpoint{Addr: inside.Addr(), Port: 8443}},
		{Address: registry.Endpoint{Addr: inside.Addr(), Port: inside.Port()}, Public: registry.Endpoint{Host: "gw.example.com", Port: 443}},
	}}}}, nil)
	publics := func() (all []string) {
		for n := range g.registry.Table().Networks() {
			for i := range n.Gateways {
				all = append(all, n.Gateways[i].AddressFrom(n.Name, "").String())
			}
		}
		return all
	}
	status := func(state, external string) nat.Status {
		return nat.Status{Route: &nat.Route{Local: inside.Addr()}, Mappings: []nat.Mapping{{Network: "tcp", Port: 443, State: state, External: netip.MustParseAddrPort(external)}}}
	}
	for _, c := range []struct{ state, external, want string }{
		{nat.Mapped, "203.0.113.7:443", "192.168.1.10:443"},
		{nat.Verified, "203.0.113.7:443", "203.0.113.7:443"},
		{nat.Verified, "203.0.113.99:444", "203.0.113.99:444"},
		{nat.Pending, "203.0.113.99:444", "192.168.1.10:443"},
	} {
		g.nat.changed(status(c.state, c.external))
		want := fmt.Sprint([]string{c.want, "192.168.1.10:8443", "gw.example.com:443"})
		testnet.Eventually(t, patience, func() bool { return fmt.Sprint(publics()) == want }, "the gateways are %s", want)
	}
}

// A listener of QUIC answers STUN where it is told to, and goes on with QUIC.
func TestListenerAnswersSTUN(t *testing.T) {
	listener := func(stun bool) *registry.Listener {
		return &registry.Listener{Name: "udp", Address: netip.MustParseAddr("127.0.0.1"), Protocol: registry.Datagrams, Settings: &registry.ListenerSettings{Protocols: []string{"quic"}, STUN: stun}}
	}
	for _, stun := range []bool{true, false} {
		g, _ := startNAT(t, "", registry.Snapshot{Listeners: []*registry.Listener{listener(stun)}}, nil)
		var at net.Addr
		testnet.Eventually(t, patience, func() bool {
			for _, l := range g.Status().Listeners {
				if address, ok := strings.CutPrefix(l.Address, "udp://"); ok {
					at = net.UDPAddrFromAddrPort(netip.MustParseAddrPort(address))
				}
			}
			return at != nil
		}, "the listener is open")
		wait := patience
		if !stun {
			wait = 500 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		got, err := nat.AskSTUN(ctx, nil, at.(*net.UDPAddr).AddrPort())
		cancel()
		if stun && (err != nil || got.Addr().String() != "127.0.0.1") || !stun && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("stun: %v: got %s, %v", stun, got, err)
		}
	}
}

// What looks like STUN and is none is left to QUIC.
func TestSTUNLeavesOtherDatagrams(t *testing.T) {
	b := make([]byte, 20)
	binary.BigEndian.PutUint32(b[4:], 0x2112A442)
	b[3] = 4
	if _, taken := new(nat.Responder).Answer(b, netip.AddrPort{}); taken {
		t.Error("a datagram whose length is wrong is taken for STUN")
	}
}
