package h3

import (
	"errors"
	"net"
	"sync/atomic"
	"syscall"
)

// A lossTolerant is a UDP socket that treats a datagram as lost, and not as failed,
// while there is no route: a link that is down for seconds, or a route that changes.
// QUIC would end the connection at the first such error, and with it all its
// tunnels, though it has a time limit of its own for a peer that does not answer.
type lossTolerant struct {
	*net.UDPConn
	on atomic.Bool // such errors count as loss; before, they fail the dial
}

// WriteMsgUDP is that of net.UDPConn, except for datagrams that are lost.
func (s *lossTolerant) WriteMsgUDP(b, oob []byte, to *net.UDPAddr) (n, oobn int, err error) {
	n, oobn, err = s.UDPConn.WriteMsgUDP(b, oob, to)
	if err != nil && s.lost(err) {
		return len(b), len(oob), nil
	}
	return n, oobn, err
}

func (s *lossTolerant) WriteTo(b []byte, to net.Addr) (int, error) {
	n, err := s.UDPConn.WriteTo(b, to)
	if err != nil && s.lost(err) {
		return len(b), nil
	}
	return n, err
}

func (s *lossTolerant) lost(err error) bool {
	return s.on.Load() && isUnreachable(err)
}

// isUnreachable reports whether err says that there is no route for a datagram.
func isUnreachable(err error) bool {
	for _, e := range []error{syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ENETDOWN} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// serverSocket returns pc for a server, which has many clients: a datagram that
// cannot be sent to one of them is lost, from the beginning.
func serverSocket(pc net.PacketConn) net.PacketConn {
	if c, ok := pc.(*net.UDPConn); ok {
		s := &lossTolerant{UDPConn: c}
		s.on.Store(true)
		return s
	}
	if _, ok := pc.(syscall.Conn); ok {
		return pc // a socket of another kind: QUIC finds out what it can do
	}
	return lossTolerantPart{pc}
}

// A lossTolerantPart is a lossTolerant for a part of a socket.
type lossTolerantPart struct{ net.PacketConn }

// WriteTo implements net.PacketConn.
func (s lossTolerantPart) WriteTo(b []byte, to net.Addr) (int, error) {
	n, err := s.PacketConn.WriteTo(b, to)
	if err != nil && isUnreachable(err) {
		return len(b), nil
	}
	return n, err
}

// SetReadBuffer calls that of the part, if it has one. QUIC logs a warning for a
// socket without the method.
func (s lossTolerantPart) SetReadBuffer(n int) error {
	if c, ok := s.PacketConn.(interface{ SetReadBuffer(n int) error }); ok {
		return c.SetReadBuffer(n)
	}
	return nil
}

// SetWriteBuffer is SetReadBuffer for the other direction.
func (s lossTolerantPart) SetWriteBuffer(n int) error {
	if c, ok := s.PacketConn.(interface{ SetWriteBuffer(n int) error }); ok {
		return c.SetWriteBuffer(n)
	}
	return nil
}
