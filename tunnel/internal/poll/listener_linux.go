//go:build amd64 || arm64

package poll

import (
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// A Listener accepts Conns. It is not in Go's poller unless Accept is called: an
// event loop can watch it instead.
type Listener struct {
	addr *net.TCPAddr
	done chan struct{} // closed by Close

	deferred atomic.Bool

	mu   sync.RWMutex // guards what follows; read-held over calls that don't block
	fd   int32        // -1 once closed
	file *os.File     // in Go's poller; nil until Accept
}

// NewListener returns a Listener on the socket of ln, or ln where that is not a
// TCP listener. The connections inherit TCP_NODELAY.
func NewListener(ln net.Listener) net.Listener {
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
	return &Listener{fd: fd, addr: tl.Addr().(*net.TCPAddr), done: make(chan struct{})}
}

// Done returns a channel that Close closes.
func (l *Listener) Done() <-chan struct{} { return l.done }

// DeferAccept has the kernel keep a connection that has sent nothing for up to d,
// in whole seconds, before it can be accepted.
func (l *Listener) DeferAccept(d time.Duration) {
	l.deferred.Store(d > 0)
	const tcpDeferAccept = 9 // TCP_DEFER_ACCEPT
	_ = l.Control(func(fd int32) error {
		return syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpDeferAccept, int(d/time.Second))
	})
}

// Deferred reports whether DeferAccept is in force.
func (l *Listener) Deferred() bool { return l.deferred.Load() }

func (l *Listener) Addr() net.Addr { return l.addr }

// Close stops listening. Accept returns net.ErrClosed then.
func (l *Listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fd < 0 {
		return net.ErrClosed
	}
	if l.file != nil {
		_ = l.file.Close()
	} else {
		CloseFD(l.fd)
	}
	l.fd, l.file = -1, nil
	close(l.done)
	return nil
}

// Control calls f with the descriptor, unless that is closed. f must not block.
func (l *Listener) Control(f func(fd int32) error) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.fd < 0 {
		return net.ErrClosed
	}
	return f(l.fd)
}

// TryAccept returns a connection without waiting: nil and no error where there is
// none, or the listener is closed.
func (l *Listener) TryAccept() (*Conn, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	var from syscall.RawSockaddrAny
	for l.fd >= 0 {
		size := uint32(unsafe.Sizeof(from))
		n, _, errno := syscall.RawSyscall6(syscall.SYS_ACCEPT4, uintptr(l.fd), uintptr(unsafe.Pointer(&from)), uintptr(unsafe.Pointer(&size)),
			syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0, 0)
		switch errno {
		case 0:
			return newConn(int32(n), l.addr.AddrPort(), rawAddrPort(&from)), nil
		case syscall.EAGAIN:
			return nil, nil
		case syscall.EINTR, syscall.ECONNABORTED: // the client left before it was accepted
		default:
			return nil, os.NewSyscallError("accept4", errno)
		}
	}
	return nil, nil
}

// Accept waits for a connection.
func (l *Listener) Accept() (net.Conn, error) {
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
	var s *Conn
	var failed error
	err = raw.Read(func(uintptr) bool {
		s, failed = l.TryAccept()
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

func (l *Listener) closed() bool {
	select {
	case <-l.done:
		return true
	default:
		return false
	}
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
