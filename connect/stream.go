package connect

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"

	"culvert.dev/tunnel"
)

// newStream returns c with early in front. Where nothing needs to stand
// there it is c itself, so that the kernel can move its bytes even for a
// caller who knows nothing of Unwrapper.
func newStream(c net.Conn, early []byte) net.Conn {
	if _, ok := c.(*tls.Conn); ok {
		return &front{Conn: c, early: early}
	}
	if _, ok := c.(tunnel.Stream); ok && len(early) == 0 {
		return c
	}
	return &stream{front{Conn: c, early: early}}
}

// A front is a connection whose first bytes have been read.
type front struct {
	net.Conn

	mu    sync.Mutex // guards early
	early []byte
}

var (
	_ tunnel.Stream  = (*front)(nil)
	_ tunnel.Aborter = (*front)(nil)
)

// Read returns the early bytes first.
func (f *front) Read(p []byte) (int, error) {
	if n := f.take(p); n > 0 {
		return n, nil
	}
	return f.Conn.Read(p)
}

func (f *front) take(p []byte) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := copy(p, f.early)
	if f.early = f.early[n:]; len(f.early) == 0 {
		f.early = nil // lets the buffer go
	}
	return n
}

// forget returns the early bytes and has them no more.
func (f *front) forget() []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	early := f.early
	f.early = nil
	return early
}

// NetConn returns the connection, for what looks at its socket.
func (f *front) NetConn() net.Conn { return f.Conn }

// CloseWrite implements tunnel.Stream.
func (f *front) CloseWrite() error {
	if w, ok := f.Conn.(tunnel.Stream); ok {
		return w.CloseWrite()
	}
	return fmt.Errorf("connect: the way to the proxy cannot half-close: %w", errors.ErrUnsupported)
}

// Close closes the connection and forgets the early bytes.
func (f *front) Close() error {
	f.forget()
	return f.Conn.Close()
}

// Abort implements tunnel.Aborter.
func (f *front) Abort() error {
	f.forget()
	return abort(f.Conn)
}

// abort ends c so that its peer can tell. A TLS connection is cut below the
// TLS: its own Close says close_notify, which is an orderly end.
func abort(c net.Conn) error {
	switch c := c.(type) {
	case tunnel.Aborter:
		return c.Abort()
	case *tls.Conn:
		return abort(c.NetConn())
	case interface{ SetLinger(int) error }:
		_ = c.SetLinger(0)
	}
	return c.Close()
}

// A stream is a front that does not translate what is behind it. TLS is left
// a front: unwrapped, it would lose its Abort.
type stream struct{ front }

var _ tunnel.Unwrapper = (*stream)(nil)

// Unwrap implements tunnel.Unwrapper.
func (s *stream) Unwrap() (net.Conn, []byte) { return s.Conn, s.forget() }
