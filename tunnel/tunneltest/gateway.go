package tunneltest

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A Table is a Resolver: from "name:port", or "address:port", as it was asked
// to the address it leads to. The key "*" stands for every address that has no
// key of its own; a name without one has no route.
type Table map[string]string

// Resolve looks req's target up.
func (t Table) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	to, ok := t[req.Target()]
	if !ok && req.Addr.IsValid() {
		to, ok = t["*"]
	}
	if !ok {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no route for %q", req.Target())
	}
	return RouteTo(to), nil
}

// RouteTo is a route to addr, an address and a port that the guard lets through
// wherever it is.
func RouteTo(addr string) tunnel.Route {
	return tunnel.Route{Service: "svc", Endpoints: []tunnel.Endpoint{{Addr: netip.MustParseAddrPort(addr), Named: true}}}
}

// A Setup is what a Gateway is made of. Protocols and Resolver are needed.
type Setup struct {
	Protocols       []tunnel.Protocol // a Drainer among them serves this Gateway and no later one
	Resolver        tunnel.Resolver
	ConnHeader      tunnel.ConnHeader // nil means none
	Dialer          tunnel.Dialer     // nil means a NetDialer, whose dials are counted
	MaxHelloRepeats int               // the Router's
	Limits          tunnel.Limits     // the zero value is no limit for a source, for tests are a single one
	Socket          net.Listener      // the Gateway closes it; nil means what tunnel.Listen opens on loopback

	// Drained says that all connections have to end by themselves once the
	// gateway stops listening; otherwise they are cut when the test ends.
	Drained bool
}

// A Gateway is a whole one on loopback: a Server, a Router and a Relay. It
// ends with its test.
type Gateway struct {
	Record
	Addr   string // host:port
	Server *tunnel.Server
	Relay  *tunnel.Relay

	resolver tunnel.Resolver
	closed   chan struct{} // when it listens no more

	mu       sync.Mutex // guards what follows
	requests []tunnel.Request
	dials    int
}

// Serve starts a Gateway. That it does not stop with the test, or not for the
// reason that it was told to, is a failure.
func Serve(t testing.TB, s Setup) *Gateway {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	if s.Socket == nil {
		ln, err := tunnel.Listen(ctx, "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s.Socket = ln
	}
	if s.Limits == (tunnel.Limits{}) {
		s.Limits = tunnel.Limits{ConnectionRatePerClient: -1, MaxConnectionsPerClient: -1}
	}
	g := &Gateway{Addr: s.Socket.Addr().String(), Relay: &tunnel.Relay{}, resolver: s.Resolver, closed: make(chan struct{})}
	if s.Dialer == nil {
		s.Dialer = &counted{&tunnel.NetDialer{}, g}
	}
	g.Server = &tunnel.Server{
		Handler: &tunnel.Router{Resolver: noted{g}, Dialer: s.Dialer, Relay: g.Relay, Observe: g.Observe, MaxHelloRepeats: s.MaxHelloRepeats},
		Observe: g.Observe,
		Limits:  s.Limits,
	}
	served := make(chan error, 1)
	go func() {
		defer close(g.closed)
		served <- g.Server.Serve(ctx, tunnel.Listener{Listener: s.Socket, Protocols: s.Protocols, ConnHeader: s.ConnHeader})
	}()
	t.Cleanup(func() {
		if !s.Drained {
			_ = g.Server.Close()
			if err := g.Relay.Close(); err != nil {
				t.Errorf("close the relay: %v", err)
			}
		}
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if err := g.Server.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-served; err != tunnel.ErrServerClosed {
			t.Errorf("Serve returned %v", err)
		}
		if s.Drained {
			if err := g.Relay.Close(); err != nil {
				t.Errorf("close the relay: %v", err)
			}
		}
	})
	return g
}

// Requests returns copies of the requests so far that came to the Resolver.
func (g *Gateway) Requests() []tunnel.Request {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.requests)
}

// Dials returns how often was dialed, with or without success. A Dialer of the
// Setup is not counted.
func (g *Gateway) Dials() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.dials
}

// noted is the Gateway's Resolver, which notes what it is asked.
type noted struct{ g *Gateway }

func (n noted) Resolve(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
	n.g.mu.Lock()
	n.g.requests = append(n.g.requests, *req)
	n.g.mu.Unlock()
	return n.g.resolver.Resolve(ctx, req)
}

// counted is a NetDialer whose dials are counted: it can do all that one can,
// so that the Router treats it the same.
type counted struct {
	*tunnel.NetDialer
	g *Gateway
}

func (d *counted) count() {
	d.g.mu.Lock()
	defer d.g.mu.Unlock()
	d.g.dials++
}

func (d *counted) DialEndpoint(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
	d.count()
	return d.NetDialer.DialEndpoint(ctx, ep)
}

func (d *counted) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	d.count()
	return d.NetDialer.DialContext(ctx, network, addr)
}

// A Record keeps Outcomes for a test to wait for. The zero value is empty.
type Record struct {
	mu      sync.Mutex // guards what follows
	all     []*tunnel.Outcome
	taken   int
	changed chan struct{} // closed with the next; nil while nobody waits
}

// Observe keeps o.
func (r *Record) Observe(o *tunnel.Outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, o)
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}

// Outcomes returns all so far.
func (r *Record) Outcomes() []*tunnel.Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.all)
}

// Outcome waits for the next, in the order of their ends: each is returned
// once.
func (r *Record) Outcome(t testing.TB) *tunnel.Outcome {
	t.Helper()
	return r.wait(t, "next", func() *tunnel.Outcome {
		if r.taken == len(r.all) {
			return nil
		}
		r.taken++
		return r.all[r.taken-1]
	})
}

// Find waits for the first of all that ok likes. What says which that is.
func (r *Record) Find(t testing.TB, what string, ok func(*tunnel.Outcome) bool) *tunnel.Outcome {
	t.Helper()
	return r.wait(t, what, func() *tunnel.Outcome {
		if i := slices.IndexFunc(r.all, ok); i >= 0 {
			return r.all[i]
		}
		return nil
	})
}

// Reason waits for one with that Reason.
func (r *Record) Reason(t testing.TB, want tunnel.Reason) *tunnel.Outcome {
	t.Helper()
	return r.Find(t, "with reason "+string(want), func(o *tunnel.Outcome) bool { return o.Reason == want })
}

// wait waits until pick, which is called with mu held, has one. When it has
// none in time, the test ends and says what there was instead.
func (r *Record) wait(t testing.TB, what string, pick func() *tunnel.Outcome) *tunnel.Outcome {
	t.Helper()
	limit := time.After(patience)
	for {
		r.mu.Lock()
		o := pick()
		if o == nil && r.changed == nil {
			r.changed = make(chan struct{})
		}
		changed := r.changed
		r.mu.Unlock()
		if o != nil {
			return o
		}
		select {
		case <-changed:
		case <-limit:
			for _, o := range r.Outcomes() {
				t.Logf("outcome: %s %s %v", o.Proto, o.Reason, o.Err)
			}
			t.Fatalf("no outcome %s", what)
		}
	}
}

// WantReason checks that err is a *tunnel.Error with that Reason.
func WantReason(t testing.TB, err error, want tunnel.Reason) {
	t.Helper()
	var te *tunnel.Error
	if !errors.As(err, &te) || te.Reason != want {
		t.Errorf("got error %v (reason %q), want reason %q", err, tunnel.ReasonOf(err), want)
	}
}

// Dial dials addr by d. The connection has a deadline and is closed with the
// test.
func Dial(t testing.TB, d tunnel.Dialer, addr string) net.Conn {
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
