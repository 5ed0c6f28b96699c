//go:build amd64 || arm64

package tunnel

import (
	"context"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// A sockListener accepts socks. It listens on a descriptor of its own: package
// net doesn't let anyone wait on one of its listeners.
type sockListener struct {
	file   *os.File
	raw    syscall.RawConn
	addr   *net.TCPAddr
	closed atomic.Bool
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
	return &sockListener{file: file, raw: raw, addr: tl.Addr().(*net.TCPAddr)}
}

func (l *sockListener) Addr() net.Addr { return l.addr }

// Close stops listening. Accept returns net.ErrClosed then.
func (l *sockListener) Close() error {
	l.closed.Store(true)
	return fileError(l.file.Close())
}

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
	switch {
	case err != nil && l.closed.Load():
		err = net.ErrClosed
	case err == nil:
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
	return s.waitError(err)
}

// waitError says what ended a wait in the poller: where that was our own close
// it has a word of its own for it, which errors.Is does not know.
func (s *sock) waitError(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && s.fd < 0 {
		return net.ErrClosed
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
