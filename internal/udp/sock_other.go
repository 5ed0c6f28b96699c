//go:build !unix

package udp

import "net"

// A socket is a connected socket. It holds a buffer while it waits.
type socket struct{ *net.UDPConn }

func newSocket(c *net.UDPConn) (*socket, error) { return &socket{c}, nil }

// receive waits for a datagram. The buffer is the caller's to give back.
func (s *socket) receive() (b *buffer, n int, err error) {
	b = buffers.Get().(*buffer)
	n, err = s.Read(b[:])
	if err != nil {
		buffers.Put(b)
		b = nil
	}
	return b, n, err
}

// SendDatagram implements tunnel.DatagramConn.
func (s *socket) SendDatagram(b []byte) error {
	_, err := s.Write(b)
	return err
}
