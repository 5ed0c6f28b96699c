package tunnel_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// A resolverFunc is a Resolver made of a function.
type resolverFunc func(context.Context, *tunnel.Request) (tunnel.Route, error)

func (f resolverFunc) Resolve(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
	return f(ctx, req)
}

// endpoints makes endpoints of addresses.
func endpoints(addrs ...string) (eps []tunnel.Endpoint) {
	for _, a := range addrs {
		eps = append(eps, tunnel.Endpoint{Addr: netip.MustParseAddrPort(a)})
	}
	return eps
}

// routeTo resolves everything to the given addresses.
func routeTo(addrs ...string) resolverFunc {
	return func(context.Context, *tunnel.Request) (tunnel.Route, error) {
		return tunnel.Route{Service: "svc", Pattern: "*.example", Endpoints: endpoints(addrs...)}, nil
	}
}

// errRefused is what a Dialer that knows no reasons says.
var errRefused = errors.New("connection refused")

// A fakeDialer dials in memory. What an address does is in answers: nil or
// nothing connects, an error fails, a duration fails when it has passed or the
// context ends, and a function does anything.
type fakeDialer struct {
	answers map[string]any

	mu      sync.Mutex // guards what follows
	dialed  []string
	servers []*fakeConn // the services' ends
	gateway []*fakeConn // ours
}

func (d *fakeDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	d.mu.Lock()
	d.dialed = append(d.dialed, addr)
	answer := d.answers[addr]
	d.mu.Unlock()
	if network != "tcp" {
		return nil, fmt.Errorf("network %q", network)
	}
	switch a := answer.(type) {
	case error:
		return nil, a
	case time.Duration:
		t := time.NewTimer(a)
		defer t.Stop()
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-t.C:
			return nil, errRefused
		}
	case func():
		a()
	}
	a, b := net.Pipe()
	ours, theirs := &fakeConn{Conn: a}, &fakeConn{Conn: b}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gateway, d.servers = append(d.gateway, ours), append(d.servers, theirs)
	return ours, nil
}

// ends returns the services' ends of what was dialed.
func (d *fakeDialer) ends() []*fakeConn {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.servers)
}

func (d *fakeDialer) closeAll() {
	for _, c := range d.ends() {
		_ = c.Close()
	}
}

// calls returns the addresses dialed so far.
func (d *fakeDialer) calls() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.dialed)
}

// A plainStream is a Stream of a carrier without half-close.
type plainStream struct{ *fakeConn }

func (plainStream) CloseWrite() error { return errors.ErrUnsupported }

// An asker makes a request and watches what is answered.
type asker struct {
	client net.Conn  // the client's end
	conn   *fakeConn // ours
	broken error     // what Accept says; nil accepts

	mu       sync.Mutex // guards what follows
	accepted int
	refused  []error
	onAccept func()
}

func (a *asker) request() *tunnel.Request {
	a.client, a.conn = fakePair("198.51.100.7:1000")
	return &tunnel.Request{
		Proto: "fake", Listener: "edge", Name: tunnel.MustParseName("svc.example"), Port: 443, ALPN: []string{"h2"},
		Source: netip.MustParseAddrPort("198.51.100.7:1000"), Peer: tunnel.Peer{ID: "alice", Method: "basic"},
		Accept: func() (tunnel.Stream, error) {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.accepted++
			if a.onAccept != nil {
				a.onAccept()
			}
			if a.broken != nil {
				_ = a.conn.Close()
				return nil, a.broken
			}
			return plainStream{a.conn}, nil
		},
		Refuse: func(err error) {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.refused = append(a.refused, err)
			_ = a.conn.Abort()
		},
	}
}

func (a *asker) answers() (accepted, refused int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.accepted, len(a.refused)
}
