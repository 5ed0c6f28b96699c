package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

// A Transport opens connections to endpoints: directly or over next hops, with
// or without TLS. It does not change, and all requests that use it share it.
type Transport interface {
	// Dial connects to ep on behalf of req. The caller closes the connection, which is a
	// DatagramConn where req is for datagrams.
	Dial(ctx context.Context, ep *Endpoint, req *Request) (net.Conn, error)

	// Check returns nil if ep may be dialed. It never waits.
	Check(ep *Endpoint) error

	// Info describes the transport for people, and says how it protects a stream.
	Info() TransportInfo
}

// A TransportInfo describes a Transport.
type TransportInfo struct {
	Hops     []string // the next hops, nearest first: "connect-h2 gw.example.com:443"
	Security Security // of what is between this gateway and the endpoint; the weakest hop counts

	// Datagrams says that the transport also carries datagrams. It must not be asked for
	// them otherwise.
	Datagrams bool

	Identity string // how the endpoint is told who the client is, for people; "" where it is not

	// PassesClientTLS says that this gateway adds TLS for clients that do not begin it
	// themselves, and that the TLS of others passes.
	PassesClientTLS bool
}

// Security says how a Transport protects what it carries.
type Security int

const (
	Plain          Security = iota // unencrypted, or to a server that is not verified
	ServerVerified                 // encrypted, to a server that is verified
	Mutual                         // ServerVerified, and this gateway shows a certificate or a token
)

func (s Security) String() string {
	switch s {
	case Plain:
		return "plain"
	case ServerVerified:
		return "server-verified"
	case Mutual:
		return "mutual"
	}
	return "unknown"
}

// A NetDialer dials TCP addresses that its Guard lets through. It resolves no
// names: that is the Resolver's part, so that the address that was looked at
// is the one that is dialed.
type NetDialer struct {
	Guard *Guard // nil refuses what Forbidden lists

	Sockets Sockets // opens the sockets
}

// Check returns nil if ep may be dialed.
func (d *NetDialer) Check(ep Endpoint) error { return d.Guard.Check(ep.Addr, ep.Named) }

// DialEndpoint dials ep.Addr. The caller closes the connection.
func (d *NetDialer) DialEndpoint(ctx context.Context, ep Endpoint) (net.Conn, error) {
	if err := d.Guard.Check(ep.Addr, ep.Named); err != nil {
		return nil, err
	}
	// The address is a literal: what was checked is what is dialed.
	c, err := poll.Dial(ctx, ep.Addr, d.Sockets.Mark, taskOf(ctx))
	if err != nil {
		return nil, unconnected(dialError(ep, err))
	}
	return c, nil
}

// DialContext dials addr, which must be an IP address and a port.
func (d *NetDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, fmt.Errorf("dial %q: an address and a port are needed: %w", addr, err)
	}
	return d.DialEndpoint(ctx, Endpoint{Addr: ap})
}

// unconnected marks err, of dialError, where it is a failure of the address.
func unconnected(err error) error {
	if e, ok := errors.AsType[*Error](err); ok && (e.Reason == DialFailed || e.Reason == DialTimeout) {
		e.Unconnected = true
	}
	return err
}

// dialError gives err its Reason.
func dialError(ep Endpoint, err error) error {
	var refused *Error
	if errors.As(err, &refused) {
		return refused
	}
	var op *net.OpError
	if errors.As(err, &op) {
		err = op.Err // the address stands in our own text
	}
	why := DialFailed
	var ne net.Error
	switch {
	case NoLocalPort(err):
		return &Error{Reason: Overload, Err: fmt.Errorf("dial %s: this host has no local port or address left for it (see net.ipv4.ip_local_port_range): %w", ep, err)}
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOBUFS):
		why = Overload // this host's own lack, which says nothing about the endpoint
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &ne) && ne.Timeout():
		why = DialTimeout
	}
	return &Error{Reason: why, Err: fmt.Errorf("dial %s: %w", ep, err)}
}

// NoLocalPort reports whether err is of a dial for which the kernel had no local
// port, or no local address.
func NoLocalPort(err error) bool {
	return errors.Is(err, syscall.EADDRNOTAVAIL) ||
		errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EADDRINUSE) // of UDP, by connect and by bind
}

// withLazyTimeout is context.WithTimeout for which 0 means no limit, and whose timer
// is made by the first call of Done: a dial that is answered at once, as most
// are, needs none. The time runs from now.
func withLazyTimeout(ctx context.Context, now time.Time, d time.Duration) (context.Context, context.CancelFunc) {
	deadline, limited := ctx.Deadline()
	if end := now.Add(d); d != 0 && (!limited || end.Before(deadline)) {
		deadline = end
	}
	c := &lazyTimeout{parent: ctx, deadline: deadline}
	return c, c.cancel
}

// A lazyTimeout is a context with a deadline and, until it is needed, no timer.
type lazyTimeout struct {
	parent   context.Context
	deadline time.Time // zero means none

	mu       sync.Mutex
	real     context.Context // nil until Done
	end      context.CancelFunc
	canceled bool
}

func (c *lazyTimeout) Deadline() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }

func (c *lazyTimeout) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.real == nil {
		if c.deadline.IsZero() {
			c.real, c.end = context.WithCancel(c.parent)
		} else {
			c.real, c.end = context.WithDeadline(c.parent, c.deadline)
		}
		if c.canceled {
			c.end()
		}
	}
	return c.real.Done()
}

func (c *lazyTimeout) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.real != nil && c.real.Err() != nil:
		return c.real.Err()
	case c.canceled:
		return context.Canceled
	case c.parent.Err() != nil:
		return c.parent.Err()
	case !c.deadline.IsZero() && !time.Now().Before(c.deadline): // whether or not the timer has run
		return context.DeadlineExceeded
	}
	return nil
}

// Value asks the real context where there is one: package context finds
// itself that way, and then needs no goroutine for a child of this.
func (c *lazyTimeout) Value(key any) any {
	c.mu.Lock()
	from := c.real
	c.mu.Unlock()
	if from == nil {
		from = c.parent
	}
	return from.Value(key)
}

func (c *lazyTimeout) cancel() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.canceled = true
	if c.end != nil {
		c.end()
	}
}

type handshakeKey struct{}

// WithHandshakeDone returns a context for the dial of a next hop. The dialer calls f when
// its handshakes with the hop are complete, and before it sends the request. If f fails,
// the request is not sent, and the dial fails with its error. So a caller may begin
// several dials and have one of them send the request. A dialer that tries again calls f
// again.
func WithHandshakeDone(ctx context.Context, f func() error) context.Context {
	return context.WithValue(ctx, handshakeKey{}, f)
}

// HandshakeDone calls the function of WithHandshakeDone. Without one it returns nil.
func HandshakeDone(ctx context.Context) error {
	if f, ok := ctx.Value(handshakeKey{}).(func() error); ok {
		return f()
	}
	return nil
}

// AwaitsHandshake reports whether ctx is one of WithHandshakeDone: then a dialer waits for
// an answer of the hop to its handshake even where it could send the request at once.
func AwaitsHandshake(ctx context.Context) bool { return ctx.Value(handshakeKey{}) != nil }
