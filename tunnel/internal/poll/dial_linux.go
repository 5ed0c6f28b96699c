//go:build amd64 || arm64

package poll

import (
	"context"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"
	"unsafe"
)

// Dial connects to addr by TCP, for task, which may be nil. The socket has the mark, unless
// that is 0. Keepalive is off.
func Dial(ctx context.Context, addr netip.AddrPort, mark uint32, task *Task) (net.Conn, error) {
	if addr.Addr().Zone() != "" { // rare, and an interface to look up
		return dialNet(ctx, addr, mark)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	domain, sa := sockaddr(addr)
	fd, _, errno := syscall.RawSyscall(syscall.SYS_SOCKET, uintptr(domain), syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
	if errno != 0 {
		return nil, os.NewSyscallError("socket", errno)
	}
	c := newConn(int32(fd), netip.AddrPort{}, addr)
	c.Task = task
	setNoDelay(c.fd)
	if mark != 0 {
		if err := optionError("SO_MARK", syscall.SetsockoptInt(int(c.fd), syscall.SOL_SOCKET, syscall.SO_MARK, int(mark))); err != nil {
			_ = c.Close()
			return nil, err
		}
	}
	if err := c.connect(ctx, sa); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// connect connects c, and looks whether it is done before it waits.
func (c *Conn) connect(ctx context.Context, sa []byte) error {
	_, _, errno := syscall.RawSyscall(syscall.SYS_CONNECT, uintptr(c.fd), uintptr(unsafe.Pointer(&sa[0])), uintptr(len(sa)))
	switch errno {
	case 0:
		return nil
	case syscall.EINPROGRESS, syscall.EINTR, syscall.EALREADY:
	default:
		return os.NewSyscallError("connect", errno)
	}
	decided, failed := connected(c.fd)
	if !decided {
		if err := c.await(ctx); err != nil {
			return err
		}
		failed = true // for all we know
	}
	if failed {
		if errno := SocketError(c.fd); errno != 0 {
			return os.NewSyscallError("connect", errno)
		}
	}
	return nil
}

// await waits in Go's poller until the connect is decided or ctx is done.
func (c *Conn) await(ctx context.Context) error {
	c.mu.Lock()
	f, err := c.wait()
	c.mu.Unlock()
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
	return c.waitError(err)
}

// waitError returns the error of a wait in the poller. Where Close ended the wait,
// the poller has an error of its own for it, which errors.Is does not know.
func (c *Conn) waitError(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil && c.fd < 0 {
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
