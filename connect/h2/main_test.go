package h2

import (
	"context"
	"errors"
	"io"
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
const patience = 20 * time.Second

// A gateway is a whole one: a Server with a Protocol, a Router and a Relay.
type gateway struct {
	addr  string
	relay *tunnel.Relay
	srv   *tunnel.Server

	mu       sync.Mutex // guards outcomes
	outcomes []*tunnel.Outcome
	changed  chan struct{}
}

// A table is a Resolver: from "name:port" to the address.
type table map[string]string

func (t table) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	to, ok := t[req.Target()]
	if !ok && req.Addr.IsValid() {
		to, ok = t["*"]
	}
	if !ok {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no route for %q", req.Target())
	}
	return tunnel.Route{Service: "svc", Endpoints: []tunnel.Endpoint{{Addr: netip.MustParseAddrPort(to), Named: true}}}, nil
}

func serve(t testing.TB, routes tunnel.Resolver, protocols ...tunnel.Protocol) *gateway {
	t.Helper()
	return serveWith(t, routes, tunnel.Limits{NewPerSource: -1, OpenPerSource: -1}, protocols...)
}

func serveWith(t testing.TB, routes tunnel.Resolver, limits tunnel.Limits, protocols ...tunnel.Protocol) *gateway {
	t.Helper()
	ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
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
		served <- g.srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{Listener: ln, Protocols: protocols})
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
		for _, o := range g.outcomes {
			if f(o) {
				g.mu.Unlock()
				return o
			}
		}
		g.mu.Unlock()
		select {
		case <-g.changed:
		case <-limit:
			t.Fatalf("no outcome %s", what)
		}
	}
}

// reason waits for an outcome with that Reason.
func (g *gateway) reason(t testing.TB, want tunnel.Reason) *tunnel.Outcome {
	t.Helper()
	return g.outcome(t, "with reason "+string(want), func(o *tunnel.Outcome) bool { return o.Reason == want })
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

func echo(c net.Conn) { _, _ = io.Copy(c, c) }

// newDialer returns a Dialer that ends with the test.
func newDialer(t testing.TB, proxy string) *Dialer {
	d := &Dialer{Proxy: proxy, Idle: 50 * time.Millisecond}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// open dials addr.
func open(t testing.TB, d tunnel.Dialer, addr string) *Stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c.(*Stream)
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

func wantReason(t testing.TB, err error, want tunnel.Reason) {
	t.Helper()
	var te *tunnel.Error
	if !errors.As(err, &te) || te.Reason != want {
		t.Errorf("got error %v (reason %q), want reason %q", err, tunnel.ReasonOf(err), want)
	}
}

// until polls ok.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// backend accepts connections and gives each to f.
func backend(t testing.TB, f func(net.Conn)) string {
	t.Helper()
	return testnet.Serve(t, f).Addr()
}
