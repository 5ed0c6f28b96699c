package reverse

import (
	"net"
	"sync"

	"culvert.dev/tunnel"
)

// A poolStream is a pool connection that a request has taken. The relay unwraps it.
type poolStream struct {
	tunnel.Stream
	ended func(tunnel.End) // called once
	once  sync.Once

	mu     sync.Mutex // guards what follows
	abort  func(why tunnel.Reason)
	killed tunnel.Reason // "" if it was not
}

func (s *poolStream) end(e tunnel.End) { s.once.Do(func() { s.ended(e) }) }

// Unwrap implements tunnel.Unwrapper.
func (s *poolStream) Unwrap() (net.Conn, []byte) { return s.Stream, nil }

// Close implements net.Conn.
func (s *poolStream) Close() error {
	s.end(tunnel.End{})
	return s.Stream.Close()
}

// Abort implements tunnel.Aborter.
func (s *poolStream) Abort() error {
	s.end(tunnel.End{})
	return tunnel.Abort(s.Stream)
}

// TunnelBegan implements tunnel.TunnelWatcher.
func (s *poolStream) TunnelBegan(kill func(why tunnel.Reason)) {
	s.mu.Lock()
	s.abort = kill
	why := s.killed
	s.mu.Unlock()
	if why != "" {
		kill(why)
	}
}

// TunnelEnded implements tunnel.TunnelWatcher.
func (s *poolStream) TunnelEnded(e tunnel.End) { s.end(e) }

// kill aborts the tunnel, now or as it begins.
func (s *poolStream) kill(why tunnel.Reason) {
	s.mu.Lock()
	abort := s.abort
	s.killed = why
	s.mu.Unlock()
	if abort != nil {
		abort(why)
		return
	}
	_ = tunnel.Abort(s.Stream) // a request that waits for the client's first bytes fails
}

var (
	_ tunnel.Stream        = (*poolStream)(nil)
	_ tunnel.Unwrapper     = (*poolStream)(nil)
	_ tunnel.Aborter       = (*poolStream)(nil)
	_ tunnel.TunnelWatcher = (*poolStream)(nil)
)
