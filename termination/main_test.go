package termination

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/internal/testca"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long anything in these tests may take.
const patience = 20 * time.Second

// A gateway is a whole one: a Server with protocols, a Router and a Relay.
type gateway struct {
	addr  string
	relay *tunnel.Relay
	srv   *tunnel.Server

	mu       sync.Mutex // guards outcomes
	outcomes []*tunnel.Outcome
	changed  chan struct{}
}

// A table is a Resolver: from the name, or "*", to the address.
type table map[string]string

func (t table) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	to, ok := t[req.Host()]
	if !ok {
		if to, ok = t["*"]; !ok {
			return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no route for %q", req.Target())
		}
	}
	return tunnel.Route{Service: "svc", Endpoints: []tunnel.Endpoint{{Addr: netip.MustParseAddrPort(to), Named: true}}}, nil
}

func serve(t testing.TB, routes tunnel.Resolver, limits tunnel.Limits, protocols ...tunnel.Protocol) *gateway {
	t.Helper()
	return serveListener(t, routes, limits, tunnel.Listener{Protocols: protocols})
}

// serveListener is serve for a Listener whose socket is to be opened.
func serveListener(t testing.TB, routes tunnel.Resolver, limits tunnel.Limits, l tunnel.Listener) *gateway {
	t.Helper()
	limits.NewPerSource, limits.OpenPerSource = -1, -1
	ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Listener = ln
	g := &gateway{addr: ln.Addr().String(), relay: &tunnel.Relay{}, changed: make(chan struct{}, 1)}
	observe := func(o *tunnel.Outcome) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.outcomes = append(g.outcomes, o)
		select {
		case g.changed <- struct{}{}:
		default:
		}
	}
	g.srv = &tunnel.Server{
		Handler: &tunnel.Router{Relay: g.relay, Dialer: &tunnel.NetDialer{}, Resolver: routes, Observe: observe},
		Observe: observe, Limits: limits,
	}
	served := make(chan error, 1)
	go func() {
		served <- g.srv.Serve(context.WithoutCancel(t.Context()), l)
	}()
	t.Cleanup(func() {
		_ = g.relay.Close()
		_ = g.srv.Close()
		if err := g.srv.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		if err := <-served; err != tunnel.ErrServerClosed {
			t.Error(err)
		}
	})
	return g
}

// outcome waits for the first outcome that f likes.
func (g *gateway) outcome(t testing.TB, what string, f func(*tunnel.Outcome) bool) *tunnel.Outcome {
	t.Helper()
	limit := time.After(patience)
	for {
		g.mu.Lock()
		seen := g.outcomes
		g.mu.Unlock()
		for _, o := range seen {
			if f(o) {
				return o
			}
		}
		select {
		case <-g.changed:
		case <-limit:
			for _, o := range seen {
				t.Logf("outcome: %s %s %v", o.Proto, o.Reason, o.Err)
			}
			t.Fatalf("no outcome %s", what)
		}
	}
}

func (g *gateway) reason(t testing.TB, want tunnel.Reason) *tunnel.Outcome {
	t.Helper()
	return g.outcome(t, "with reason "+string(want), func(o *tunnel.Outcome) bool { return o.Reason == want })
}

func (g *gateway) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.outcomes)
}

// backend accepts connections and gives each to f.
func backend(t testing.TB, f func(*net.TCPConn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(2 * patience))
				f(c.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait()
	})
	return ln.Addr().String()
}

func echo(c *net.TCPConn) { _, _ = io.Copy(c, c) }

func newCA(t testing.TB, domain string) *testca.CA {
	t.Helper()
	ca, err := testca.New(domain, nil)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// issue makes a certificate of the workload name, for the DNS names.
func issue(t testing.TB, ca *testca.CA, name string, names ...string) *testca.Pair {
	t.Helper()
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + ca.TrustDomain + "/ns/test/sa/" + name, DNSNames: names})
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// terminating makes a Protocol that carries CONNECT, of both versions.
func terminating(t testing.TB, k *Keys, all bool) *Protocol {
	t.Helper()
	p := &Protocol{
		Hello: &sni.Protocol{Nameless: all}, All: all,
		Inner: []tunnel.Protocol{&connect.Protocol{}, &h2.Protocol{}}, ALPN: []string{"h2", "http/1.1"},
	}
	if err := p.Use(k); err != nil {
		t.Fatal(err)
	}
	return p
}

// A tlsDialer speaks TLS to whom it dials, and gives what this package's own
// end is.
type tlsDialer struct{ cfg *tls.Config }

func (d tlsDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	raw, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	b := &below{Conn: raw, left: MaxHandshake}
	t := tls.Client(b, d.cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, err
	}
	b.carry()
	return &stream{Conn: t, below: b}, nil
}

// roots returns what a client trusts.
func roots(ca *testca.CA, name string, alpn ...string) *tls.Config {
	return &tls.Config{RootCAs: ca.Pool(), ServerName: name, NextProtos: alpn}
}

func dial(t testing.TB, d tunnel.Dialer, addr string) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

// ping writes s and reads the same.
func ping(t testing.TB, c net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(s))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != s {
		t.Fatalf("got %q and %v back, want %q", got, err, s)
	}
}
