//go:build amd64 || arm64

package tunnel

import (
	"context"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// A sockListener accepts socks. Go's poller learns of it only where no loop
// watches it.
type sockListener struct {
	addr *net.TCPAddr
	done chan struct{} // closed by Close

	mu   sync.RWMutex // guards what follows; read-held over calls that don't block
	fd   int32        // -1 once closed
	file *os.File     // in Go's poller; nil until Accept
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
	_ = tl.Close() // the duplicate listens on
	return &sockListener{fd: fd, addr: tl.Addr().(*net.TCPAddr), done: make(chan struct{})}
}

func (l *sockListener) Addr() net.Addr { return l.addr }

// Close stops listening. Accept returns net.ErrClosed then.
func (l *sockListener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fd < 0 {
		return net.ErrClosed
	}
	if l.file != nil {
		_ = l.file.Close()
	} else {
		closeFD(l.fd)
	}
	l.fd, l.file = -1, nil
	close(l.done)
	return nil
}

func (l *sockListener) control(f func(fd int32) error) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.fd < 0 {
		return net.ErrClosed
	}
	return f(l.fd)
}

// accept returns a connection that is there, and none without an error where
// there is none or the listener is closed.
func (l *sockListener) accept() (*sock, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	var from syscall.RawSockaddrAny
	for l.fd >= 0 {
		size := uint32(unsafe.Sizeof(from))
		n, _, errno := syscall.RawSyscall6(syscall.SYS_ACCEPT4, uintptr(l.fd), uintptr(unsafe.Pointer(&from)), uintptr(unsafe.Pointer(&size)),
			syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0, 0)
		switch errno {
		case 0:
			return newSock(int32(n), l.addr.AddrPort(), rawAddrPort(&from)), nil
		case syscall.EAGAIN:
			return nil, nil
		case syscall.EINTR, syscall.ECONNABORTED: // it was gone before we had it
		default:
			return nil, os.NewSyscallError("accept4", errno)
		}
	}
	return nil, nil
}

// Accept waits for a connection.
func (l *sockListener) Accept() (net.Conn, error) {
	l.mu.Lock()
	if l.fd >= 0 && l.file == nil {
		l.file = os.NewFile(uintptr(l.fd), "listener") // non-blocking, so it goes to the poller
	}
	file := l.file
	l.mu.Unlock()
	fail := func(err error) (net.Conn, error) {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.addr, Err: err}
	}
	if file == nil {
		return fail(net.ErrClosed)
	}
	raw, err := file.SyscallConn()
	if err != nil {
		return fail(fileError(err))
	}
	var s *sock
	var failed error
	err = raw.Read(func(uintptr) bool {
		s, failed = l.accept()
		return s != nil || failed != nil
	})
	switch {
	case s != nil:
		return s, nil
	case failed != nil:
		return fail(failed)
	case l.closed():
		return fail(net.ErrClosed)
	}
	return fail(err)
}

func (l *sockListener) closed() bool {
	select {
	case <-l.done:
		return true
	default:
		return false
	}
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
	s.slot, _ = ctx.Value(slotKey{}).(*slot)
	noDelay(s.fd)
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
	decided, failed := connected(s.fd)
	if !decided {
		if err := s.await(ctx); err != nil {
			return err
		}
		failed = true // for all we know
	}
	if failed {
		if errno := socketError(s.fd); errno != 0 {
			return os.NewSyscallError("connect", errno)
		}
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
	err = raw.Write(func(fd uintptr) bool { decided, _ := connected(int32(fd)); return decided })
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

// connected reports whether a connect on fd is decided, and whether it may
// have failed then.
func connected(fd int32) (decided, failed bool) {
	const out = 0x4 // POLLOUT
	p := struct {
		fd      int32
		events  int16
		revents int16
	}{fd: fd, events: out}
	var now syscall.Timespec
	n, _, errno := syscall.RawSyscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&now)), 0, 0, 0)
	return errno == 0 && n == 1, p.revents != out
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
