package gateway

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/socks5"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// everything is what a gateway of these tests speaks on its one port.
func everything(name string) []tunnel.Protocol {
	return []tunnel.Protocol{&sni.Protocol{}, &connect.Protocol{Via: name}, &h2.Protocol{Via: name}, &socks5.Protocol{}}
}

// at is a gateway of a network, by what it takes.
func at(addr string, transports ...string) registry.Gateway {
	ap := netip.MustParseAddrPort(addr)
	return registry.Gateway{Address: registry.Endpoint{Addr: ap.Addr(), Port: ap.Port()}, Transports: registry.HopsBy(transports...)}
}

// inWest is a gateway in the network west, which knows svc.test in east and the
// gateways there.
func inWest(gateways ...registry.Gateway) Config {
	s := service(closed) // where nobody gets from here
	s.Endpoints[0].Network = "east"
	return Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: everything("west")}},
		Sources: []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{
			Networks: []registry.Network{{Name: "west"}, {Name: "east", Gateways: gateways}},
			Services: []*registry.Service{s},
		}}},
		Mesh: registry.Mesh{Network: "west"},
		Via:  "west",
	}
}

// pooling closes in the end what keeps connections.
func pooling(t *testing.T, d *h2.Dialer) *h2.Dialer {
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// A client of one network's gateway reaches a service of another's, whatever
// both gateways are asked by, and TLS is between the two of them alone.
func TestAcross(t *testing.T) {
	ca := newCA(t)
	issue := func(o testca.Options) *testca.Pair {
		pair, err := ca.Issue(o)
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	server := issue(testca.Options{SPIFFEID: "spiffe://example.test/svc", DNSNames: []string{"svc.test"}})
	client := issue(testca.Options{SPIFFEID: "spiffe://example.test/client"})
	backend := testnet.ServeTLS(t, server.ServerConfig(), func(c *tls.Conn) {
		id, err := testca.PeerID(c.ConnectionState().PeerCertificates[0])
		if err != nil {
			id = err.Error()
		}
		_, _ = io.WriteString(c, id)
		_ = c.CloseWrite()
		_, _ = io.Copy(io.Discard, c)
	})
	for transport, far := range map[string]tunnel.Protocol{"connect": &connect.Protocol{}, "connect-h2": &h2.Protocol{}, "socks5": &socks5.Protocol{}, "sni": &sni.Protocol{}} {
		east := startWith(t, "east", []tunnel.Protocol{far}, service(backend.Addr())) // and nothing else
		west := startConfig(t, inWest(at(east, transport)))
		for how, d := range map[string]tunnel.Dialer{
			"connect":    &connect.Dialer{Proxy: west},
			"connect-h2": pooling(t, &h2.Dialer{Proxy: west}),
			"socks5":     &socks5.Dialer{Proxy: west},
			"sni":        straight(west),
		} {
			got, err := whoAmI(t, d, client.ClientConfig("svc.test"))
			switch {
			case transport == "sni" && how != "sni":
				if tunnel.ReasonOf(err) != noEndpointBy(how) {
					t.Errorf("by %s to a gateway that takes sni alone: got %q, %v, want %s", how, got, err, noEndpointBy(how))
				}
			case got != "spiffe://example.test/client" || err != nil:
				t.Errorf("by %s to a gateway that takes %s: the service sees %q, %v, want the client", how, transport, got, err)
			}
		}
	}
}

// noEndpointBy is what is left of no-endpoint, as a protocol has words for it.
func noEndpointBy(how string) tunnel.Reason {
	if how == "socks5" {
		return tunnel.DialFailed
	}
	return tunnel.NoEndpoint
}

// straight dials one address, whatever is asked for.
type straight string

func (s straight) DialContext(ctx context.Context, network, _ string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, string(s))
}

// whoAmI is what svc.test by d says of its client.
func whoAmI(t *testing.T, d tunnel.Dialer, cfg *tls.Config) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	raw, err := d.DialContext(ctx, "tcp", "svc.test:443")
	if err != nil {
		return "", err
	}
	c := tls.Client(raw, cfg)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	said, err := io.ReadAll(c)
	return string(said), err
}

// The next gateway is asked where one can't be used, and a no stands.
func TestAcrossToTheNext(t *testing.T) {
	t.Parallel()
	far := startConfig(t, Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: everything("east")}},
		Sources:   []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []*registry.Service{service(testnet.Echo(t).Addr())}}}},
		Via:       "east",
	})
	ignorant := start(t, "ignorant")
	unasked := testnet.Serve(t, func(net.Conn) {})
	first := func(addr string, transports ...string) registry.Gateway {
		g := at(addr, transports...)
		g.Weight = 1000 // so that it is its turn for long
		return g
	}
	rows := []struct {
		name     string
		gateways []registry.Gateway
		want     tunnel.Reason // Done if it works
	}{
		{"the first is down", []registry.Gateway{first(closed, "connect"), at(far, "connect")}, tunnel.Done},
		{"the first is down, by HTTP/2", []registry.Gateway{first(closed, "connect-h2"), at(far, "connect-h2")}, tunnel.Done},
		{"the first is down, and another is asked otherwise", []registry.Gateway{first(closed, "socks5"), at(far, "connect-h2")}, tunnel.Done},
		{"the first is silent", []registry.Gateway{first(silent(t), "connect"), at(far, "socks5")}, tunnel.Done},
		{"the first takes sni alone", []registry.Gateway{first(unasked.Addr()), at(far, "connect")}, tunnel.Done},
		{"all are down", []registry.Gateway{first(closed, "connect"), at(alsoClosed, "socks5")}, tunnel.DialFailed},
		{"all are silent", []registry.Gateway{first(silent(t), "connect"), at(silent(t), "connect-h2")}, tunnel.DialTimeout},
		{"the first knows no such service", []registry.Gateway{first(ignorant, "connect"), at(unasked.Addr(), "connect")}, tunnel.NoRoute},
		{"there are none but for sni", []registry.Gateway{first(unasked.Addr()), at(unasked.Addr(), "sni", "quic", "hbone")}, tunnel.NoEndpoint},
	}
	for _, row := range rows {
		west := startConfig(t, inWest(row.gateways...))
		tries := 2 // the second knows what the first has learnt
		if strings.Contains(row.name, "silent") {
			tries = 1
		}
		for range tries {
			if err := check(t, &connect.Dialer{Proxy: west}); tunnel.ReasonOf(err) != row.want {
				t.Errorf("%s: got %v, want %s", row.name, err, row.want)
			}
		}
	}
	if n := unasked.Accepted(); n != 0 {
		t.Errorf("%d connections to gateways that nobody has a reason to ask, want none", n)
	}
}

// A gateway that is down stands last, and what a gateway says of a request is
// not held against the gateway.
func TestAcrossIsHealth(t *testing.T) {
	ignorant := start(t, "ignorant")
	for _, transport := range []string{"connect", "connect-h2"} {
		down, g := startGateway(t, inWest(at(closed, transport)))
		if err := check(t, &connect.Dialer{Proxy: down}); tunnel.ReasonOf(err) != tunnel.DialFailed {
			t.Fatalf("got %v, want %s", err, tunnel.DialFailed)
		}
		if g.registry.Healthy(netip.MustParseAddrPort(closed)) {
			t.Errorf("by %s: a gateway that is down counts as healthy", transport)
		}
	}
	up, g := startGateway(t, inWest(at(ignorant, "connect")))
	if err := check(t, &connect.Dialer{Proxy: up}); tunnel.ReasonOf(err) != tunnel.NoRoute {
		t.Fatalf("got %v, want %s", err, tunnel.NoRoute)
	}
	if !g.registry.Healthy(netip.MustParseAddrPort(ignorant)) {
		t.Error("a gateway that refused a request counts as failing")
	}
}

// Two gateways that each think that the service is the other's.
func TestAcrossLoop(t *testing.T) {
	for _, transport := range []string{"connect", "connect-h2"} {
		ln := testnet.Listen(t) // a port for the one that is not there yet
		west := startConfig(t, inWest(at(ln.Addr().String(), transport)))
		cfg := inWest(at(west, transport)) // from where it is, the other is in another network too
		cfg.Via = "east"
		cfg.Listeners[0].Protocols = everything("east")
		forward(t, ln, startConfig(t, cfg))
		if err := check(t, &connect.Dialer{Proxy: west}); tunnel.ReasonOf(err) != tunnel.Loop {
			t.Errorf("by %s: got %v, want %s", transport, err, tunnel.Loop)
		}
	}
}

// What a gateway's name leads to is judged, as what a service's name leads to is,
// and a gateway never asks itself.
func TestAcrossIsGuarded(t *testing.T) {
	named := registry.Gateway{Address: registry.Endpoint{Host: "gw.test", Port: 443}, Transports: registry.HopsBy("connect")}
	for _, a := range []string{"127.0.0.1", "169.254.169.254"} {
		cfg := inWest(named)
		cfg.Lookup = func(context.Context, string) ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr(a)}, nil }
		if err := check(t, &connect.Dialer{Proxy: startConfig(t, cfg)}); tunnel.ReasonOf(err) != tunnel.Prohibited {
			t.Errorf("a gateway whose name is of %s: got %v, want %s", a, err, tunnel.Prohibited)
		}
	}
	own := testnet.Listen(t)
	guard := &tunnel.Guard{}
	guard.OwnListener(own.Addr())
	self := registry.Endpoint{Addr: netip.MustParseAddrPort(own.Addr().String()).Addr(), Port: netip.MustParseAddrPort(own.Addr().String()).Port()}
	way, err := (&upstream.Transports{Direct: &tunnel.NetDialer{Guard: guard}}).New(&registry.Service{}, &self, &registry.Gateway{Transports: registry.HopsBy("socks5")})
	if err != nil {
		t.Fatal(err)
	}
	ep := &tunnel.Endpoint{Host: "svc.test", Addr: netip.AddrPortFrom(netip.Addr{}, 443)}
	if _, err := way.Dial(t.Context(), ep, &tunnel.Request{}); tunnel.ReasonOf(err) != tunnel.Loop {
		t.Errorf("a gateway that is asked to ask itself: got %v, want %s", err, tunnel.Loop)
	}
	if err := way.Check(ep); tunnel.ReasonOf(err) != tunnel.Loop {
		t.Errorf("Check of a gateway that is asked to ask itself: got %v, want %s", err, tunnel.Loop)
	}
}

// What may be plaintext does not go to a gateway without TLS, unless its network says
// so or nothing leaves the host.
func TestAcrossInTheClear(t *testing.T) {
	far := startWith(t, "east", []tunnel.Protocol{&connect.Protocol{}}, service(testnet.Echo(t).Addr()))
	named := registry.Gateway{Address: registry.Endpoint{Host: "gw.test", Port: 443}, Transports: registry.HopsBy("connect")}
	for _, row := range []struct {
		name     string
		gateway  registry.Gateway
		insecure bool
		plain    bool
		want     tunnel.Reason // as Explain has it
		works    bool
	}{
		{"elsewhere", named, false, true, "", false},              // as the next
		{"elsewhere, by CONNECT", named, false, false, "", false}, // asked, but for its address
		{"elsewhere, and that may be", named, true, true, "", false},
		{"on this host", at(far, "connect"), false, true, "", true},
	} {
		cfg := inWest(row.gateway)
		cfg.Sources[0].(registry.Static).Networks[1].Insecure = row.insecure
		cfg.Lookup = func(context.Context, string) ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("169.254.169.254")}, nil
		}
		q := Query{Host: "svc.test", Port: 443, Proto: "connect"}
		if row.plain {
			q = Query{}
			cfg.Listeners[0].Protocols = []tunnel.Protocol{&tunnel.Fixed{To: tunnel.MustParseName("svc.test"), Port: 443}}
		}
		west, g := startGateway(t, cfg)
		d := tunnel.Dialer(&connect.Dialer{Proxy: west})
		if row.plain {
			d = straight(west)
		}
		if err := check(t, d); (err == nil) != row.works {
			t.Errorf("%s: got %v", row.name, err)
		}
		q.Listener = g.cfg.Listeners[0].Address
		if x := Explain(t.Context(), g.router, g.cfg.Listeners, q); x.Reason != row.want {
			t.Errorf("%s: got %q (%s), want %q", row.name, x.Reason, x.Detail, row.want)
		}
	}
}

// Explain says which gateways are asked, how, and for what; or what to write.
func TestAcrossIsExplained(t *testing.T) {
	_, g := startGateway(t, inWest(at(closed, "connect-h2"), at("127.0.0.1:3", "sni")))
	ask := func(proto string) *Explanation {
		testnet.Eventually(t, patience, func() bool { return g.registry.Table() != nil }, "no table")
		q := Query{Host: "svc.test", Listener: g.cfg.Listeners[0].Address, Proto: proto}
		if proto != "sni" {
			q.Port = 443
		}
		return Explain(t.Context(), g.router, g.cfg.Listeners, q)
	}
	byName := ExplanationEndpoint{Address: "svc.test:443", Via: []string{"connect-h2 " + closed}, Security: "plain"}
	if x := ask("socks5"); !reflect.DeepEqual(x.Endpoints, []ExplanationEndpoint{byName}) || x.Reason != "" {
		t.Errorf("by socks5: %+v, want %+v", x, byName)
	}
	want := []ExplanationEndpoint{{Address: "127.0.0.1:3"}, byName}
	x := ask("sni")
	slices.SortFunc(x.Endpoints, func(a, b ExplanationEndpoint) int { return strings.Compare(a.Address, b.Address) }) // whose turn it is
	for i := range x.Endpoints {
		x.Endpoints[i].Why = ""
	}
	if !reflect.DeepEqual(x.Endpoints, want) {
		t.Errorf("by sni: %+v, want %+v", x.Endpoints, want)
	}
	_, g = startGateway(t, inWest(at(closed)))
	if x := ask("connect"); x.Reason != tunnel.NoEndpoint || !strings.Contains(x.Detail, "unless one of them has connect-h2, connect or socks5 among its transports, or the network a via") {
		t.Errorf("to a gateway that takes sni alone: %+v", x)
	}
}
