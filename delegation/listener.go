package delegation

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"
)

// A tlsConn is a *tls.Conn.
type tlsConn interface {
	HandshakeContext(ctx context.Context) error
	ConnectionState() tls.ConnectionState
}

// Listener returns a listener for connections on ln, which ends TLS: one that
// tls.NewListener has made. Each begins, inside TLS, with a PROXY header of version 2 that
// has an assertion. Accept does not wait for it: the connections, each a *Conn, read and
// verify it at first use. The tls.Config must ask for certificates, by
// tls.RequireAnyClientCert if it does not verify them itself, unless Keys of all gateways
// are known.
//
// As net/http sees no *tls.Conn there, it speaks HTTP/1 over them. See ConnContext.
func (v *Verifier) Listener(ln net.Listener) net.Listener { return &listener{ln, v} }

type listener struct {
	net.Listener
	v *Verifier
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &Conn{Conn: c, v: l.v}, nil
}

// A Conn is a connection through a gateway. Its first Read or Write waits for the TLS
// handshake and the header. If there is an error then, it is an *Error where the assertion is not
// believed; every later call returns the same, and the connection is closed. So no byte
// is exchanged with a caller that was not verified.
type Conn struct {
	net.Conn
	v *Verifier

	once      sync.Once
	err       error // these are set by once
	assertion *Assertion
	header    proxyHeader

	mu          sync.Mutex
	limit       time.Time // that of the header while it is read, zero before and after; guarded by mu
	read, write time.Time // the deadlines that were set; guarded by mu
}

// Assertion returns who calls, after the header was read. It is nil, without an error,
// where the Verifier's Optional permits that.
func (c *Conn) Assertion() (*Assertion, error) {
	err := c.Handshake(context.Background()) // HeaderTimeout and Close bound it, as in Read, Write and CloseWrite
	return c.assertion, err
}

// Client returns the address of the caller, as the gateway saw it, and the name that it
// asked for. They are zero where the gateway did not say, and where it was not verified.
// It is to be called after Assertion or Handshake.
func (c *Conn) Client() (addr netip.AddrPort, authority string) {
	return c.header.source, c.header.authority
}

// Handshake waits for the TLS handshake and the header, and verifies. Canceling ctx closes
// the connection. Calls after the first return the same.
func (c *Conn) Handshake(ctx context.Context) error {
	c.once.Do(func() {
		stop := context.AfterFunc(ctx, func() { _ = c.Conn.Close() })
		defer stop()
		c.begin()
		if c.err = c.handshake(ctx); c.err != nil {
			_ = c.Conn.Close()
			return
		}
		c.finish()
	})
	return c.err
}

func (c *Conn) handshake(ctx context.Context) error {
	var cs *tls.ConnectionState
	if t, ok := c.Conn.(tlsConn); ok {
		if err := t.HandshakeContext(ctx); err != nil {
			return err
		}
		state := t.ConnectionState()
		cs = &state
	}
	h, err := readHeader(c.Conn)
	if err != nil {
		return err
	}
	if h.assertion == "" && c.v.Optional {
		return nil // nothing in it is proven
	}
	if c.assertion, err = c.v.Verify(h.assertion, cs); err == nil {
		c.header = h
	}
	return err
}

// begin sets the deadline of the header.
func (c *Conn) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	wait := c.v.HeaderTimeout
	if wait <= 0 {
		wait = 10 * time.Second
	}
	c.limit = time.Now().Add(wait)
	_ = c.Conn.SetReadDeadline(earlier(c.read, c.limit))
	_ = c.Conn.SetWriteDeadline(earlier(c.write, c.limit))
}

// finish sets the deadlines that the service wants.
func (c *Conn) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.limit = time.Time{}
	_ = c.Conn.SetReadDeadline(c.read)
	_ = c.Conn.SetWriteDeadline(c.write)
}

func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	if err := c.Handshake(context.Background()); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (int, error) {
	if err := c.Handshake(context.Background()); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// CloseWrite ends the stream in one direction, where the connection below can.
func (c *Conn) CloseWrite() error {
	if err := c.Handshake(context.Background()); err != nil {
		return err
	}
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// SetDeadline implements net.Conn. Until the header was read, its own deadline holds, too.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read = t
	return c.Conn.SetReadDeadline(earlier(t, c.limit))
}

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.write = t
	return c.Conn.SetWriteDeadline(earlier(t, c.limit))
}
