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
	if !s.on.Load() {
		return false
	}
	for _, away := range []error{syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ENETDOWN} {
		if errors.Is(err, away) {
			return true
		}
	}
	return false
}
