//go:build unix

package udp

import (
	"net"
	"sync"
	"syscall"
)

// A socket is a connected socket that is read without holding a buffer while
// nothing comes, and written without waiting: what the kernel has no room for
// is lost, as it would be further on.
type socket struct {
	*net.UDPConn
	raw syscall.RawConn

	// receive's, which one goroutine calls.
	in      *buffer
	n       int
	readErr error
	tryRead func(fd uintptr) bool

	mu       sync.Mutex // guards SendDatagram's
	out      []byte
	writeErr error
	tryWrite func(fd uintptr) bool
}

func newSocket(c *net.UDPConn) (*socket, error) {
	raw, err := c.SyscallConn()
	s := &socket{UDPConn: c, raw: raw}
	s.tryRead, s.tryWrite = s.read, s.write // made once, and not for each datagram
	return s, err
}

// receive waits for a datagram. The buffer is the caller's to give back.
func (s *socket) receive() (b *buffer, n int, err error) {
	err = s.raw.Read(s.tryRead)
	b, s.in = s.in, nil
	if err == nil {
		err = s.readErr
	}
	if err != nil && b != nil {
		buffers.Put(b)
		b = nil
	}
	return b, s.n, err
}

func (s *socket) read(fd uintptr) bool {
	s.in = buffers.Get().(*buffer)
	for {
		s.n, s.readErr = syscall.Read(int(fd), s.in[:])
		if s.readErr != syscall.EINTR {
			break
		}
	}
	if s.readErr == syscall.EAGAIN {
		buffers.Put(s.in)
		s.in = nil
		return false
	}
	return true
}

// SendDatagram implements tunnel.DatagramConn.
func (s *socket) SendDatagram(b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out = b
	err := s.raw.Write(s.tryWrite)
	s.out = nil
	switch {
	case err != nil:
		return err
	case s.writeErr == syscall.EAGAIN, s.writeErr == syscall.ENOBUFS, s.writeErr == syscall.EMSGSIZE:
		return nil
	}
	return s.writeErr
}

func (s *socket) write(fd uintptr) bool {
	_, s.writeErr = syscall.Write(int(fd), s.out)
	return true
}
