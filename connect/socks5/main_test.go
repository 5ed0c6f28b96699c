package socks5

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long anything in these tests may take.
const patience = 10 * time.Second

// A gateway is a whole one that serves a Protocol on loopback.
type gateway struct {
	addr     string
	outcomes chan *tunnel.Outcome // one for each connection

	mu    sync.Mutex // guards what follows
	table map[string]tunnel.Route
	dials int
}

// serve starts a gateway. Its table has what asks for "host:port" lead to an
// address.
func serve(t *testing.T, table map[string]string, ps ...tunnel.Protocol) *gateway {
	t.Helper()
	ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gateway{addr: ln.Addr().String(), outcomes: make(chan *tunnel.Outcome, 1000), table: map[string]tunnel.Route{}}
	for asked, to := range table {
		g.table[asked] = tunnel.Route{Service: asked, Endpoints: []tunnel.Endpoint{{Addr: netip.MustParseAddrPort(to), Named: true}}}
	}
	observe := func(o *tunnel.Outcome) { g.outcomes <- o }
	relay := &tunnel.Relay{}
	srv := &tunnel.Server{
		Handler: &tunnel.Router{Resolver: g, Dialer: g, Relay: relay, Observe: observe},
		Observe: observe,
		Limits:  tunnel.Limits{NewPerSource: -1},
	}
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{Listener: ln, Protocols: ps})
	}()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := srv.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-served; err != tunnel.ErrServerClosed {
			t.Error(err)
		}
		_ = relay.Close()
	})
	return g
}

// Resolve is the gateway's table.
func (g *gateway) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	if why, bad := tunnel.Forbidden(req.Addr); req.Addr.IsValid() && bad && g.table[req.Target()].Service == "" {
		return tunnel.Route{}, tunnel.Refusef(tunnel.Prohibited, "%q is %s", req.Target(), why)
	}
	route, ok := g.table[req.Target()]
	if !ok {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no route for %q", req.Target())
	}
	return route, nil
}

// DialContext counts.
func (g *gateway) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	g.mu.Lock()
	g.dials++
	g.mu.Unlock()
	tunnel.WillWait(ctx)
	return new(net.Dialer).DialContext(ctx, network, addr)
}

func (g *gateway) dialed() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.dials
}

// outcome returns what became of the next connection.
func (g *gateway) outcome(t *testing.T) *tunnel.Outcome {
	t.Helper()
	select {
	case o := <-g.outcomes:
		return o
	case <-time.After(patience):
		t.Fatal("a connection has no outcome")
		return nil
	}
}

// closedPort returns an address nobody listens at.
func closedPort(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func dial(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c.(*net.TCPConn)
}

// backend accepts connections and gives each to f.
func backend(t testing.TB, f func(net.Conn)) string {
	t.Helper()
	return testnet.Serve(t, f).Addr()
}
