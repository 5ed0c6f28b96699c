package h3

import (
	"errors"
	"net"
	"sync/atomic"
	"syscall"
)

// A steady is a UDP socket whose datagrams are lost, and not refused, while the
// way is gone: a link that is down for seconds, or a route that changes. QUIC would
// end the connection at the first such error, and with it all its tunnels, though
// it has a time limit of its own for a peer that does not answer.
type steady struct {
	*net.UDPConn
	on atomic.Bool // from when errors count as loss; before, a dial fails by them
}

// WriteMsgUDP and WriteTo are those of the socket.
func (s *steady) WriteMsgUDP(b, oob []byte, to *net.UDPAddr) (n, oobn int, err error) {
	n, oobn, err = s.UDPConn.WriteMsgUDP(b, oob, to)
	if err != nil && s.lost(err) {
		return len(b), len(oob), nil
	}
	return n, oobn, err
}

func (s *steady) WriteTo(b []byte, to net.Addr) (int, error) {
	n, err := s.UDPConn.WriteTo(b, to)
	if err != nil && s.lost(err) {
		return len(b), nil
	}
	return n, err
}

func (s *steady) lost(err error) bool {
	return s.on.Load() && away(err)
}

// away reports whether err says that the way of a datagram is gone.
func away(err error) bool {
	for _, e := range []error{syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ENETDOWN} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// serverSocket returns pc for a server, which has many clients: what can't be sent
// to one of them is lost, from the beginning.
func serverSocket(pc net.PacketConn) net.PacketConn {
	if c, ok := pc.(*net.UDPConn); ok {
		s := &steady{UDPConn: c}
		s.on.Store(true)
		return s
	}
	if _, ok := pc.(syscall.Conn); ok {
		return pc // a socket of another kind, of which QUIC finds out what it can do
	}
	return steadyPart{pc}
}

// A steadyPart is a steady for what is a part of a socket.
type steadyPart struct{ net.PacketConn }

// WriteTo is that of the part.
func (s steadyPart) WriteTo(b []byte, to net.Addr) (int, error) {
	n, err := s.PacketConn.WriteTo(b, to)
	if err != nil && away(err) {
		return len(b), nil
	}
	return n, err
}

// SetReadBuffer is that of the part, if it has one: QUIC complains of what has none.
func (s steadyPart) SetReadBuffer(n int) error {
	if c, ok := s.PacketConn.(interface{ SetReadBuffer(n int) error }); ok {
		return c.SetReadBuffer(n)
	}
	return nil
}

// SetWriteBuffer is SetReadBuffer for the other direction.
func (s steadyPart) SetWriteBuffer(n int) error {
	if c, ok := s.PacketConn.(interface{ SetWriteBuffer(n int) error }); ok {
		return c.SetWriteBuffer(n)
	}
	return nil
}
