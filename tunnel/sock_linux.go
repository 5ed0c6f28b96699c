//go:build amd64 || arm64

package tunnel

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"
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

	mu          sync.Mutex // guards what follows; held over system calls that don't block
	fd          int32      // -1 once closed or taken
	file        *os.File   // in Go's poller; nil until somebody had to wait
	read, write time.Time  // deadlines, for the file to come
}

func newSock(fd int32, local, remote netip.AddrPort) *sock {
	return &sock{fd: fd, local: local, remote: remote}
}

// wait returns the file to wait with. The caller holds mu.
func (s *sock) wait() (*os.File, error) {
	if s.fd < 0 {
		return nil, net.ErrClosed
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
	if s.file != nil {
		return 0, 0, s.file, nil
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
		return buf, fileError(err)
	}
	return buf, result
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

// A sockListener accepts socks. It listens on a descriptor of its own: package
// net doesn't let anyone wait on one of its listeners.
type sockListener struct {
	file *os.File
	raw  syscall.RawConn
	addr *net.TCPAddr
}

// listenSocks makes ln's connections socks. They inherit TCP_NODELAY.
func listenSocks(ln net.Listener) net.Listener {
	tl, ok := ln.(*net.TCPListener)
	if !ok {
		return ln
	}
	fd, err := duplicate(tl)
	if err != nil {
		return ln
	}
	_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
	file := os.NewFile(uintptr(fd), "listener")
	raw, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		return ln
	}
	_ = tl.Close() // the duplicate listens on
	return &sockListener{file, raw, tl.Addr().(*net.TCPAddr)}
}

func (l *sockListener) Addr() net.Addr { return l.addr }
func (l *sockListener) Close() error   { return fileError(l.file.Close()) }

func (l *sockListener) Accept() (net.Conn, error) {
	var s *sock
	var failed error
	err := l.raw.Read(func(fd uintptr) bool {
		var from syscall.RawSockaddrAny
		size := uint32(unsafe.Sizeof(from))
		for {
			n, _, errno := syscall.RawSyscall6(syscall.SYS_ACCEPT4, fd, uintptr(unsafe.Pointer(&from)), uintptr(unsafe.Pointer(&size)),
				syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0, 0)
			switch errno {
			case 0:
				s = newSock(int32(n), l.addr.AddrPort(), rawAddrPort(&from))
			case syscall.EAGAIN:
				return false
			case syscall.EINTR, syscall.ECONNABORTED: // it was gone before we had it
				continue
			default:
				failed = os.NewSyscallError("accept4", errno)
			}
			return true
		}
	})
	if err = fileError(err); err == nil {
		err = failed
	}
	if err != nil {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.addr, Err: err}
	}
	return s, nil
}

// dialTCP connects to addr.
func dialTCP(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
	if addr.Addr().Zone() != "" { // rare, and an interface to look up
		return (&net.Dialer{KeepAlive: -1}).DialContext(ctx, "tcp", addr.String())
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	domain, sa := sockaddr(addr)
	fd, _, errno := syscall.RawSyscall(syscall.SYS_SOCKET, uintptr(domain), syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
	if errno != 0 {
		return nil, os.NewSyscallError("socket", errno)
	}
	s := newSock(int32(fd), netip.AddrPort{}, addr)
	_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
	if err := s.connect(ctx, sa); err != nil {
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

// connect connects s, and looks whether it is done before it waits.
func (s *sock) connect(ctx context.Context, sa []byte) error {
	_, _, errno := syscall.RawSyscall(syscall.SYS_CONNECT, uintptr(s.fd), uintptr(unsafe.Pointer(&sa[0])), uintptr(len(sa)))
	switch errno {
	case 0:
		return nil
	case syscall.EINPROGRESS, syscall.EINTR, syscall.EALREADY:
	default:
		return os.NewSyscallError("connect", errno)
	}
	if !writable(s.fd) {
		if err := s.await(ctx); err != nil {
			return err
		}
	}
	if errno := socketError(s.fd); errno != 0 {
		return os.NewSyscallError("connect", errno)
	}
	return nil
}

// await waits in Go's poller until the connect is decided or ctx is done.
func (s *sock) await(ctx context.Context) error {
	s.mu.Lock()
	f, err := s.wait()
	s.mu.Unlock()
	if err != nil {
		return err
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	past := time.Unix(1, 0)
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(past) })
	err = raw.Write(func(fd uintptr) bool { return writable(int32(fd)) })
	if !stop() && ctx.Err() != nil {
		return ctx.Err()
	}
	return fileError(err)
}

// writable reports whether a connect on fd is decided, one way or the other.
func writable(fd int32) bool {
	p := struct {
		fd      int32
		events  int16
		revents int16
	}{fd: fd, events: 0x4} // POLLOUT
	var now syscall.Timespec
	n, _, errno := syscall.RawSyscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&now)), 0, 0, 0)
	return errno == 0 && n == 1
}

// sockaddr returns addr as connect(2) takes it.
func sockaddr(addr netip.AddrPort) (domain int, sa []byte) {
	port := []byte{byte(addr.Port() >> 8), byte(addr.Port())}
	if ip := addr.Addr().Unmap(); ip.Is4() {
		b := ip.As4()
		sa := append([]byte{syscall.AF_INET, 0}, port...)
		return syscall.AF_INET, append(append(sa, b[:]...), make([]byte, 8)...)
	}
	b := addr.Addr().As16()
	sa = append(append([]byte{syscall.AF_INET6, 0}, port...), 0, 0, 0, 0)
	return syscall.AF_INET6, append(append(sa, b[:]...), 0, 0, 0, 0)
}

// rawAddrPort reads what accept(2) filled in.
func rawAddrPort(any *syscall.RawSockaddrAny) netip.AddrPort {
	b := (*[28]byte)(unsafe.Pointer(any))
	port := uint16(b[2])<<8 | uint16(b[3])
	switch any.Addr.Family {
	case syscall.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), port)
	case syscall.AF_INET6:
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])).Unmap(), port)
	}
	return netip.AddrPort{}
}

func addrPortOf(sa syscall.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *syscall.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *syscall.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}
