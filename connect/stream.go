package connect

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"culvert.dev/tunnel"
)

// newStream returns a stream that begins with early and goes on with c. Without early
// bytes it is c itself, so that the kernel can move its bytes even for a caller that
// does not use Unwrapper.
func newStream(c net.Conn, early []byte) net.Conn {
	if _, ok := c.(tlsConn); ok {
		return &prefixedConn{Conn: c, early: early}
	}
	if _, ok := c.(tunnel.Stream); ok && len(early) == 0 {
		return c
	}
	return &stream{prefixedConn{Conn: c, early: early}}
}

// A prefixedConn is a connection whose first bytes have been read.
type prefixedConn struct {
	net.Conn

	mu    sync.Mutex // guards early
	early []byte
}

var (
	_ tunnel.Stream  = (*prefixedConn)(nil)
	_ tunnel.Aborter = (*prefixedConn)(nil)
)

// Read returns the early bytes first.
func (f *prefixedConn) Read(p []byte) (int, error) {
	if n := f.take(p); n > 0 {
		return n, nil
	}
	return f.Conn.Read(p)
}

func (f *prefixedConn) take(p []byte) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := copy(p, f.early)
	if f.early = f.early[n:]; len(f.early) == 0 {
		f.early = nil // lets the buffer go
	}
	return n
}

// forget returns the early bytes and drops them.
func (f *prefixedConn) forget() []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	early := f.early
	f.early = nil
	return early
}

// NetConn returns the connection, for what looks at its socket.
func (f *prefixedConn) NetConn() net.Conn { return f.Conn }

// CloseWrite implements tunnel.Stream.
func (f *prefixedConn) CloseWrite() error {
	if w, ok := f.Conn.(tunnel.Stream); ok {
		return w.CloseWrite()
	}
	return fmt.Errorf("connect: the connection to the proxy cannot half-close: %w", errors.ErrUnsupported)
}

// Close closes the connection and forgets the early bytes.
func (f *prefixedConn) Close() error {
	f.forget()
	return f.Conn.Close()
}

// Abort implements tunnel.Aborter.
func (f *prefixedConn) Abort() error {
	f.forget()
	return Abort(f.Conn)
}

// A tlsConn is a *tls.Conn, or one of package records.
type tlsConn interface {
	NetConn() net.Conn
	ConnectionState() tls.ConnectionState
}

// Abort is tunnel.Abort. A TLS connection is reset below TLS: its own Close sends
// close_notify, which is an orderly end.
func Abort(c io.Closer) error {
	if t, ok := c.(tlsConn); ok {
		return Abort(t.NetConn())
	}
	return tunnel.Abort(c)
}

// A stream is a prefixedConn whose connection may be used directly. TLS stays a
// prefixedConn: unwrapped, it would lose its Abort.
type stream struct{ prefixedConn }

var _ tunnel.Unwrapper = (*stream)(nil)

// Unwrap implements tunnel.Unwrapper.
func (s *stream) Unwrap() (net.Conn, []byte) { return s.Conn, s.forget() }
