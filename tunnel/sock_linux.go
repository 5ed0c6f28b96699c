//go:build amd64 || arm64

package tunnel

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
)

// A sock is a TCP socket that Go's poller learns of only when somebody has to
// wait for it. Most connections never wait before they belong to the Relay: the
// hello has come with the handshake, and a service nearby accepts at once.
// Each is spared four system calls and a goroutine switch or two, and goes to
// the event loop as it is.
//
// It is a net.Conn with half-close and may be used by many goroutines.
type sock struct {
	local, remote netip.AddrPort // local's address may be unspecified, its port is right
	slot          *slot          // whose loop must not wait for this socket: it accepted it, or dials it; nil for none

	mu          sync.Mutex // guards what follows; held over system calls that don't block
	fd          int32      // -1 once closed or taken
	file        *os.File   // in Go's poller; nil until somebody had to wait
	read, write time.Time  // deadlines, for the file to come
}

func newSock(fd int32, local, remote netip.AddrPort) *sock {
	return &sock{fd: fd, local: local, remote: remote}
}

// wait returns the file to wait with, and sees to it that no loop waits too.
// The caller holds mu.
func (s *sock) wait() (*os.File, error) {
	if s.fd < 0 {
		return nil, net.ErrClosed
	}
	if s.slot != nil {
		s.slot.passOn()
	}
	if s.file == nil {
		s.file = os.NewFile(uintptr(s.fd), "tcp") // non-blocking, so it goes to the poller
		if !s.read.IsZero() {
			_ = s.file.SetReadDeadline(s.read)
		}
		if !s.write.IsZero() {
			_ = s.file.SetWriteDeadline(s.write)
		}
	}
	return s.file, nil
}

// attempt makes one system call that doesn't block. It returns the file to go
// on with where the call would have had to wait.
func (s *sock) attempt(deadline *time.Time, call func(fd int32) (int, syscall.Errno)) (n int, errno syscall.Errno, f *os.File, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return 0, 0, nil, net.ErrClosed
	}
	if s.file != nil { // which may have to wait
		f, err = s.wait()
		return 0, 0, f, err
	}
	if !deadline.IsZero() && !time.Now().Before(*deadline) {
		return 0, 0, nil, os.ErrDeadlineExceeded
	}
	if n, errno = call(s.fd); errno == syscall.EAGAIN || errno == syscall.EINTR {
		f, err = s.wait()
		return 0, 0, f, err
	}
	return n, errno, nil, nil
}

func (s *sock) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, errno, f, err := s.attempt(&s.read, func(fd int32) (int, syscall.Errno) { return read(fd, p) })
	switch {
	case err != nil:
		return 0, err
	case f != nil:
		n, err := f.Read(p)
		return n, fileError(err)
	case errno != 0:
		return 0, errno
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

func (s *sock) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, errno, f, err := s.attempt(&s.write, func(fd int32) (int, syscall.Errno) { return send(fd, p) })
	switch {
	case err != nil:
		return 0, err
	case errno != 0:
		return 0, errno
	case f == nil && n == len(p):
		return n, nil
	case f == nil:
		s.mu.Lock()
		f, err = s.wait()
		s.mu.Unlock()
		if err != nil {
			return n, err
		}
	}
	m, err := f.Write(p[n:])
	return n + m, fileError(err)
}

// fill reads once into scratch memory and appends to buf.
func (s *sock) fill(buf []byte, limit int) ([]byte, error) {
	var result error
	once := func(fd int32) bool {
		p := scratch.Get().(*[scratchSize]byte)
		defer scratch.Put(p)
		n, errno := read(fd, p[:min(len(p), limit-len(buf))])
		switch {
		case errno == syscall.EAGAIN || errno == syscall.EINTR:
			return false
		case errno != 0:
			result = errno
		case n == 0:
			result = io.EOF
		default:
			buf = append(buf, p[:n]...)
		}
		return true
	}
	done := false
	_, _, f, err := s.attempt(&s.read, func(fd int32) (int, syscall.Errno) {
		if done = once(fd); done {
			return 0, 0
		}
		return 0, syscall.EAGAIN
	})
	switch {
	case err != nil:
		return buf, err
	case f == nil:
		return buf, result
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return buf, fileError(err)
	}
	if err := raw.Read(func(fd uintptr) bool { return once(int32(fd)) }); err != nil {
		return buf, s.waitError(err)
	}
	return buf, result
}

// readNow reads what there is, 0 bytes for nothing, and io.EOF at the end. It
// never waits and disregards the deadline.
func (s *sock) readNow(p []byte) (n int, err error) {
	err = s.control(func(fd int32) error {
		var errno syscall.Errno
		switch n, errno = read(fd, p); {
		case errno == syscall.EAGAIN || errno == syscall.EINTR:
			n = 0
		case errno != 0:
			n = 0
			return errno
		case n == 0:
			return io.EOF
		}
		return nil
	})
	return n, err
}

// take gives up the socket: a descriptor that is the caller's, and that Go's
// poller does not know.
func (s *sock) take() (int32, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fd := s.fd
	if fd < 0 {
		return -1, net.ErrClosed
	}
	if s.file != nil {
		dup, _, errno := syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fd), fDupCloexec, 0)
		if errno != 0 {
			return -1, errno
		}
		_ = s.file.Close()
		fd = int32(dup)
	}
	s.fd, s.file = -1, nil
	return fd, nil
}

func (s *sock) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return net.ErrClosed
	}
	if s.file != nil {
		_ = s.file.Close()
	} else {
		closeFD(s.fd)
	}
	s.fd, s.file = -1, nil
	return nil
}

// Abort closes the socket with a reset.
func (s *sock) Abort() error {
	_ = s.SetLinger(0)
	return s.Close()
}

// SetLinger is that of net.TCPConn.
func (s *sock) SetLinger(sec int) error {
	return s.control(func(fd int32) error {
		l := syscall.Linger{Onoff: 1, Linger: int32(sec)}
		if sec < 0 {
			l = syscall.Linger{}
		}
		return syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &l)
	})
}

func (s *sock) CloseWrite() error {
	return s.control(func(fd int32) error {
		if errno := shutdownWrite(fd); errno != 0 {
			return errno
		}
		return nil
	})
}

// keep sets the keepalive of a tunnel's socket.
func (s *sock) keep() {
	_ = s.control(func(fd int32) error { keepFD(fd); return nil })
}

func (s *sock) control(f func(fd int32) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return net.ErrClosed
	}
	return f(s.fd)
}

func (s *sock) LocalAddr() net.Addr {
	local := s.local
	if local.Addr().IsUnspecified() || !local.IsValid() {
		_ = s.control(func(fd int32) error {
			sa, err := syscall.Getsockname(int(fd))
			local = addrPortOf(sa)
			return err
		})
	}
	return net.TCPAddrFromAddrPort(local)
}

// addrs implements addresses.
func (s *sock) addrs() (netip.AddrPort, uint16) { return s.remote, s.local.Port() }

func (s *sock) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(s.remote) }

func (s *sock) SetDeadline(t time.Time) error {
	return errors.Join(s.SetReadDeadline(t), s.SetWriteDeadline(t))
}

func (s *sock) SetReadDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.read = t
	switch {
	case s.fd < 0:
		return net.ErrClosed
	case s.file != nil:
		return fileError(s.file.SetReadDeadline(t))
	}
	return nil
}

func (s *sock) SetWriteDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write = t
	switch {
	case s.fd < 0:
		return net.ErrClosed
	case s.file != nil:
		return fileError(s.file.SetWriteDeadline(t))
	}
	return nil
}

// fileError turns the words of package os into those of package net.
func fileError(err error) error {
	if pe, ok := err.(*os.PathError); ok {
		err = pe.Err // the path is one we made up
	}
	if errors.Is(err, os.ErrClosed) {
		return net.ErrClosed
	}
	return err
}
