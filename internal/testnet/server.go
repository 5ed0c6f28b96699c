package testnet

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
)

// A Server listens on loopback until its test ends. What is connected then is
// closed.
type Server struct {
	ln       *net.TCPListener
	accepted atomic.Int64
	received atomic.Int64

	mu     sync.Mutex
	conns  map[*net.TCPConn]struct{}
	closed bool
	wg     sync.WaitGroup
}

// Serve starts a server that calls handle for each connection, on a goroutine
// of its own, and closes the connection when it returns. The connection given
// to handle counts what it reads, can CloseWrite and can be given to Abort.
func Serve(t testing.TB, handle func(net.Conn)) *Server {
	t.Helper()
	return serve(t, func(s *Server, c *net.TCPConn) bool {
		handle(&countedConn{Conn: c, tcp: c, received: &s.received})
		return false
	})
}

// serve is Serve for handlers that may keep a connection for others to close.
func serve(t testing.TB, handle func(*Server, *net.TCPConn) (keep bool)) *Server {
	t.Helper()
	ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatalf("testnet: %v", err)
	}
	s := &Server{ln: ln, conns: make(map[*net.TCPConn]struct{})}
	s.wg.Go(func() {
		for {
			c, err := ln.AcceptTCP()
			if err != nil {
				return
			}
			s.accepted.Add(1)
			s.wg.Go(func() { s.run(c, handle) })
		}
	})
	t.Cleanup(s.Close)
	return s
}

func (s *Server) run(c *net.TCPConn, handle func(*Server, *net.TCPConn) bool) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		_ = c.Close()
		return
	}
	s.conns[c] = struct{}{}
	s.mu.Unlock()
	keep := handle(s, c)
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	if !keep {
		_ = c.Close()
	}
}

// Addr returns the address in the form host:port.
func (s *Server) Addr() string { return s.ln.Addr().String() }

// AddrPort returns the address.
func (s *Server) AddrPort() netip.AddrPort {
	ap := s.ln.Addr().(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// Accepted returns how many connections were accepted.
func (s *Server) Accepted() int64 { return s.accepted.Load() }

// Received returns how many bytes were received on all connections together.
func (s *Server) Received() int64 { return s.received.Load() }

// Close stops listening, closes the connections and waits for the handlers.
// It may be called before the test ends, to take the server away, and twice.
func (s *Server) Close() {
	_ = s.ln.Close()
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// A countedConn counts what is read. It hides TCPConn's WriteTo, which would
// read past it.
type countedConn struct {
	net.Conn
	tcp      *net.TCPConn
	received *atomic.Int64
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.received.Add(int64(n))
	return n, err
}

func (c *countedConn) CloseWrite() error       { return c.tcp.CloseWrite() }
func (c *countedConn) SetLinger(sec int) error { return c.tcp.SetLinger(sec) }

// Echo starts a server that sends back what it gets, and then the end of the
// stream.
func Echo(t testing.TB) *Server {
	t.Helper()
	return Serve(t, echo)
}

func echo(c net.Conn) {
	_, _ = io.Copy(c, c)
	_ = CloseWrite(c)
}

// Discard starts a server that reads and counts and says nothing; see
// Received.
func Discard(t testing.TB) *Server {
	t.Helper()
	return Serve(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
}

// Greeting starts a server that speaks first: it sends the greeting and is an
// echo after that.
func Greeting(t testing.TB, greeting string) *Server {
	t.Helper()
	return Serve(t, func(c net.Conn) {
		if _, err := io.WriteString(c, greeting); err == nil {
			echo(c)
		}
	})
}

// ServeTLS starts a server that calls handle after each successful handshake
// and closes the connection when it returns. With a configuration that asks
// for client certificates the peer's is in c.ConnectionState. A nil handle
// means an echo. A failed handshake is the client's to report.
func ServeTLS(t testing.TB, config *tls.Config, handle func(c *tls.Conn)) *Server {
	t.Helper()
	if handle == nil {
		handle = func(c *tls.Conn) { echo(c) }
	}
	return Serve(t, func(raw net.Conn) {
		c := tls.Server(raw, config)
		if c.Handshake() == nil {
			handle(c)
			_ = c.Close()
		}
	})
}

// A Tap is a server that says nothing and keeps all it gets, to show what a
// gateway let through. It closes a connection when its client's stream ended.
type Tap struct {
	*Server

	mu    sync.Mutex
	flows []*Tapped
}

// Tapped is what came in on one connection.
type Tapped struct {
	Data []byte
	End  Ending // Open while it has not ended
}

// NewTap starts a Tap.
func NewTap(t testing.TB) *Tap {
	t.Helper()
	tap := &Tap{}
	tap.Server = Serve(t, tap.record)
	return tap
}

func (tap *Tap) record(c net.Conn) {
	f := &Tapped{End: Open}
	tap.mu.Lock()
	tap.flows = append(tap.flows, f)
	tap.mu.Unlock()
	buf := make([]byte, 32<<10)
	for {
		n, err := c.Read(buf)
		tap.mu.Lock()
		f.Data = append(f.Data, buf[:n]...)
		if err != nil {
			f.End = EndingOf(err)
		}
		tap.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// Flows returns a copy of what came in so far, in the order of the accepts.
func (tap *Tap) Flows() []Tapped {
	tap.mu.Lock()
	defer tap.mu.Unlock()
	flows := make([]Tapped, len(tap.flows))
	for i, f := range tap.flows {
		flows[i] = Tapped{Data: bytes.Clone(f.Data), End: f.End}
	}
	return flows
}
