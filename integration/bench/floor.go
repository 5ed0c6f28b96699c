//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"runtime"
	"syscall"
	"unsafe"
)

// floor is the least that round trips through a proxy can cost: one thread
// that waits in epoll_wait(2), reads once and writes once for each event, to
// the one backend there is, and does nothing else. It looks at nothing and
// keeps no rules, so that nobody else should be compared with it.
func floor(listen, to string) error {
	runtime.LockOSThread()
	at, err := netip.ParseAddrPort(listen)
	if err != nil {
		return err
	}
	backend, err := netip.ParseAddrPort(to)
	if err != nil {
		return err
	}
	ln, _, err := listenFD(at)
	if err != nil {
		return err
	}
	ep, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("epoll_create: %w", err)
	}
	set := poller{fd: ep}
	set.add(ln, syscall.EPOLLIN)
	others := make(map[int]int)
	buf := make([]byte, 64<<10)
	for serial := 0; ; {
		// Raw: the runtime is not told of the wait, or it would be measured, too.
		n, _, errno := syscall.RawSyscall6(syscall.SYS_EPOLL_PWAIT, uintptr(ep), uintptr(unsafe.Pointer(&set.events[0])), uintptr(len(set.events)), 1000, 0, 0)
		if errno != 0 {
			continue // EINTR
		}
		for _, ev := range set.events[:n] {
			fd := int(ev.Fd)
			if fd == ln {
				client, errno := acceptFD(ln)
				if errno != 0 {
					continue
				}
				serial++
				server, err := connectFD(sockaddr(backend), serial)
				if err != nil {
					return err
				}
				noDelay(client)
				others[client], others[server] = server, client
				set.add(server, syscall.EPOLLIN)
				set.add(client, syscall.EPOLLIN)
				continue
			}
			other, open := others[fd]
			if !open {
				continue
			}
			n, errno := readFD(fd, buf)
			for wrote := false; n > 0 && !wrote; { // whole, of so little, once it is connected
				_, errno := writeFD(other, buf[:n])
				wrote = errno != syscall.EAGAIN
			}
			if n > 0 || errno == syscall.EAGAIN {
				continue
			}
			delete(others, fd)
			delete(others, other)
			closeFD(fd)
			closeFD(other)
		}
	}
}
