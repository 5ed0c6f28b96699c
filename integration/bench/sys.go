//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"syscall"
	"unsafe"
)

// The load generator and the backend are event loops on raw system calls: what
// they cost is taken from the proxy, which runs on the same cores. Calls that
// can't block go without the runtime's bookkeeping.

const (
	ipBindAddressNoPort = 24   // IP_BIND_ADDRESS_NO_PORT, ip(7)
	msgTrunc            = 0x20 // MSG_TRUNC: TCP throws the bytes away uncopied, tcp(7)
)

func readFD(fd int, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
	return int(n), errno
}

func writeFD(fd int, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
	return int(n), errno
}

// dropFD reads up to most bytes into nowhere.
func dropFD(fd, most int) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, uintptr(fd), 0, uintptr(most), msgTrunc, 0, 0)
	return int(n), errno
}

func closeFD(fd int) { _, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, uintptr(fd), 0, 0) }

func acceptFD(fd int) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(syscall.SYS_ACCEPT4, uintptr(fd), 0, 0, syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0, 0)
	return int(n), errno
}

func noDelay(fd int) {
	_ = syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
}

func sockaddr(a netip.AddrPort) *syscall.SockaddrInet4 {
	return &syscall.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

// connectFD starts a connection. The source address is one of eight, so that
// connections in TIME_WAIT don't use up the ports of one.
func connectFD(to *syscall.SockaddrInet4, serial int) (int, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	noDelay(fd)
	_ = syscall.SetsockoptInt(fd, syscall.IPPROTO_IP, ipBindAddressNoPort, 1)
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: loopback(serial)}); err != nil {
		closeFD(fd)
		return -1, fmt.Errorf("bind: %w", err)
	}
	if err := syscall.Connect(fd, to); err != nil && err != syscall.EINPROGRESS {
		closeFD(fd)
		return -1, fmt.Errorf("connect: %w", err)
	}
	return fd, nil
}

const addresses = 8 // of the load generator, and of the backend

// loopback returns one of the addresses 127.0.0.1 to 127.0.0.8.
func loopback(i int) [4]byte { return [4]byte{127, 0, 0, byte(1 + i%addresses)} }

func listenFD(a netip.AddrPort) (fd int, port uint16, err error) {
	fd, err = syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, 0, fmt.Errorf("socket: %w", err)
	}
	_ = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	if err := syscall.Bind(fd, sockaddr(a)); err != nil {
		return -1, 0, fmt.Errorf("bind %v: %w", a, err)
	}
	if err := syscall.Listen(fd, 4096); err != nil {
		return -1, 0, fmt.Errorf("listen %v: %w", a, err)
	}
	sa, err := syscall.Getsockname(fd)
	if err != nil {
		return -1, 0, fmt.Errorf("getsockname: %w", err)
	}
	in4, ok := sa.(*syscall.SockaddrInet4)
	if !ok {
		return -1, 0, fmt.Errorf("getsockname: a %T", sa)
	}
	return fd, uint16(in4.Port), nil
}

// A poller is an epoll set, level-triggered.
type poller struct {
	fd     int
	events [256]syscall.EpollEvent
}

func newPoller() (*poller, error) {
	fd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create: %w", err)
	}
	return &poller{fd: fd}, nil
}

func (p *poller) set(op, fd int, events uint32) {
	ev := syscall.EpollEvent{Events: events, Fd: int32(fd)}
	_, _, _ = syscall.RawSyscall6(syscall.SYS_EPOLL_CTL, uintptr(p.fd), uintptr(op), uintptr(fd), uintptr(unsafe.Pointer(&ev)), 0, 0)
}

func (p *poller) add(fd int, events uint32) { p.set(syscall.EPOLL_CTL_ADD, fd, events) }
func (p *poller) mod(fd int, events uint32) { p.set(syscall.EPOLL_CTL_MOD, fd, events) }
func (p *poller) del(fd int)                { p.set(syscall.EPOLL_CTL_DEL, fd, 0) }

// wait returns what is ready within ms milliseconds, -1 for any time.
func (p *poller) wait(ms int) []syscall.EpollEvent {
	n, err := syscall.EpollWait(p.fd, p.events[:], ms)
	if err != nil {
		return nil // EINTR
	}
	return p.events[:n]
}
