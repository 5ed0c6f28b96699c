package hbone

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"culvert.dev/internal/testca"
	"culvert.dev/sni"
	"culvert.dev/termination"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long anything in these tests may take.
const patience = 20 * time.Second

// A gateway is a whole one, that ends TLS and speaks HBONE inside.
type gateway struct {
	addr string

	mu       sync.Mutex // guards what follows
	outcomes []*tunnel.Outcome
	changed  chan struct{}
}

// A table is a Resolver: from the target to the address.
type table map[string]string

func (t table) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	to, ok := t[req.Target()]
	if to == "private" {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NotExposed, "%q is private", req.Target())
	}
	if !ok {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no route for %q", req.Target())
	}
	return tunnel.Route{Service: "svc", Endpoints: []tunnel.Endpoint{{Addr: netip.MustParseAddrPort(to), Named: true}}}, nil
}

func serve(t testing.TB, keys *termination.Keys, routes tunnel.Resolver) *gateway {
	t.Helper()
	p := &termination.Protocol{
		Hello: &sni.Protocol{Nameless: true}, All: true,
		Inner: []tunnel.Protocol{&Protocol{}}, ALPN: []string{"h2"},
	}
	if err := p.Use(keys); err != nil {
		t.Fatal(err)
	}
	ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gateway{addr: ln.Addr().String(), changed: make(chan struct{}, 1)}
	observe := func(o *tunnel.Outcome) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.outcomes = append(g.outcomes, o)
		select {
		case g.changed <- struct{}{}:
		default:
		}
	}
	relay := &tunnel.Relay{}
	srv := &tunnel.Server{
		Handler: &tunnel.Router{Relay: relay, Dialer: &tunnel.NetDialer{}, Resolver: routes, Observe: observe},
		Observe: observe, Limits: tunnel.Limits{NewPerSource: -1, OpenPerSource: -1},
	}
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{p}})
	}()
	t.Cleanup(func() {
		_ = relay.Close()
		_ = srv.Close()
		if err := srv.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		if err := <-served; err != tunnel.ErrServerClosed {
			t.Error(err)
		}
	})
	return g
}

// reason waits for an outcome with that Reason.
func (g *gateway) reason(t testing.TB, want tunnel.Reason) *tunnel.Outcome {
	t.Helper()
	limit := time.After(patience)
	for {
		g.mu.Lock()
		seen := g.outcomes
		g.mu.Unlock()
		for _, o := range seen {
			if o.Reason == want {
				return o
			}
		}
		select {
		case <-g.changed:
		case <-limit:
			for _, o := range seen {
				t.Logf("outcome: %s %s %v", o.Proto, o.Reason, o.Err)
			}
			t.Fatalf("no outcome with reason %s", want)
		}
	}
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

// A mesh is a CA and the keys of its workloads.
type mesh struct {
	*testca.CA
	t testing.TB
}

func newMesh(t testing.TB) *mesh {
	t.Helper()
	ca, err := testca.New("cluster.local", nil)
	if err != nil {
		t.Fatal(err)
	}
	return &mesh{ca, t}
}

func (m *mesh) issue(name string, more ...string) tls.Certificate {
	m.t.Helper()
	pair, err := m.Issue(testca.Options{SPIFFEID: id(name), DNSNames: more})
	if err != nil {
		m.t.Fatal(err)
	}
	return pair.TLS
}

func id(name string) string { return "spiffe://cluster.local/ns/test/sa/" + name }

// server returns the keys of a server that asks its clients who they are.
func (m *mesh) server(name string, more ...string) *termination.Keys {
	return &termination.Keys{Certificates: []tls.Certificate{m.issue(name, more...)}, ClientCAs: m.Pool(), TrustDomains: []string{"cluster.local"}}
}

// client returns what a workload dials with.
func (m *mesh) client(name string) *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{m.issue(name)}, RootCAs: m.Pool()}
}

// newDialer returns a Dialer that ends with the test.
func (m *mesh) newDialer(addr string, peers ...string) *Dialer {
	d := &Dialer{Gateway: addr, TLS: m.client("alice"), Peers: peers}
	d.inner().Idle = 100 * time.Millisecond // the suites count what is left
	m.t.Cleanup(func() { _ = d.Close() })
	return d
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

// pingPong writes s and reads the same.
func pingPong(t testing.TB, c net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(s))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != s {
		t.Fatalf("got %q and %v back, want %q", got, err, s)
	}
}

func wantReason(t testing.TB, err error, want tunnel.Reason) {
	t.Helper()
	var te *tunnel.Error
	if !errors.As(err, &te) || te.Reason != want {
		t.Errorf("got error %v (reason %q), want reason %q", err, tunnel.ReasonOf(err), want)
	}
}
