//go:build amd64 || arm64

package tunnel

import (
	"net"
	"syscall"
	"time"
	"unsafe"
)

// The system calls of the event loop. Those that never block are made raw:
// they don't tell the scheduler, which would cost more than the call.

const (
	spliceFlags   = 0x1 | 0x2 // SPLICE_F_MOVE | SPLICE_F_NONBLOCK
	fDupCloexec   = 1030      // F_DUPFD_CLOEXEC
	fSetPipeSize  = 1031      // F_SETPIPE_SZ
	epollET       = 1 << 31   // syscall.EPOLLET is negative
	sysEpollWait2 = 441       // epoll_pwait2, Linux 5.11
	efdNonblock   = syscall.O_NONBLOCK | syscall.O_CLOEXEC
)

func read(fd int32, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
	return int(n), errno
}

// send writes without raising SIGPIPE.
func send(fd int32, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(syscall.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)), syscall.MSG_NOSIGNAL, 0, 0)
	return int(n), errno
}

func splice(from, to int32, most int) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(syscall.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(most), spliceFlags)
	return int(n), errno
}

func shutdownWrite(fd int32) syscall.Errno {
	_, _, errno := syscall.RawSyscall(syscall.SYS_SHUTDOWN, uintptr(fd), syscall.SHUT_WR, 0)
	return errno
}

// atEnd reports whether all that the peer of fd sent was read, and its end of
// stream comes next.
func atEnd(fd int32) bool {
	var b [1]byte
	n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	return errno == 0 && n == 0
}

func closeFD(fd int32) { _, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, uintptr(fd), 0, 0) }

// noDelay has fd send small pieces at once.
func noDelay(fd int32) {
	on := int32(1)
	_, _, _ = syscall.RawSyscall6(syscall.SYS_SETSOCKOPT, uintptr(fd), syscall.IPPROTO_TCP, syscall.TCP_NODELAY, uintptr(unsafe.Pointer(&on)), 4, 0)
}

// resetFD closes fd with a reset, whatever is unread or unsent.
func resetFD(fd int32) {
	_ = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
	closeFD(fd)
}

// socketError returns and clears what the socket has to report.
func socketError(fd int32) syscall.Errno {
	n, err := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_ERROR)
	if err != nil {
		return 0
	}
	return syscall.Errno(n)
}

// isSocket reports whether c is a TCP socket that takeFD can take.
func isSocket(c net.Conn) bool {
	switch c.(type) {
	case *sock, *net.TCPConn:
		return true
	}
	return false
}

// takeFD takes c's socket from it: c is closed, the descriptor is the
// caller's and nobody polls it. After an error c is as it was.
func takeFD(c net.Conn) (int32, error) {
	switch c := c.(type) {
	case *sock:
		return c.take()
	case *net.TCPConn:
		fd, err := duplicate(c)
		if err == nil {
			_ = c.Close() // the duplicate lives on
		}
		return fd, err
	}
	return -1, net.ErrClosed
}

// duplicate returns a second descriptor for c's socket, which stays
// non-blocking. The first one is c's and closes with c.
func duplicate(c syscall.Conn) (int32, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd, errno := int32(-1), syscall.Errno(0)
	if err := raw.Control(func(s uintptr) {
		var n uintptr
		n, _, errno = syscall.RawSyscall(syscall.SYS_FCNTL, s, fDupCloexec, 0)
		fd = int32(n)
	}); err != nil {
		return -1, err
	}
	if errno != 0 {
		return -1, errno
	}
	return fd, nil
}

// pipe is a kernel buffer to splice through, empty unless it stands in a
// backlog.
type pipe struct{ r, w int32 }

func newPipe(size int) (pipe, error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_NONBLOCK|syscall.O_CLOEXEC); err != nil {
		return pipe{}, err
	}
	// Beyond pipe-user-pages-soft the kernel refuses to enlarge: the pipe works all the same.
	_, _, _ = syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fds[1]), fSetPipeSize, uintptr(size))
	return pipe{r: int32(fds[0]), w: int32(fds[1])}, nil
}

func (p pipe) close() {
	closeFD(p.r)
	closeFD(p.w)
}

func newEventFD() (int32, error) {
	fd, _, errno := syscall.RawSyscall(syscall.SYS_EVENTFD2, 0, efdNonblock, 0)
	if errno != 0 {
		return -1, errno
	}
	return int32(fd), nil
}

func epollControl(ep int, op int, fd int32, events uint32, key, gen int32) error {
	ev := syscall.EpollEvent{Events: events, Fd: key, Pad: gen}
	_, _, errno := syscall.RawSyscall6(syscall.SYS_EPOLL_CTL, uintptr(ep), uintptr(op), uintptr(fd), uintptr(unsafe.Pointer(&ev)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// epollPoll returns what is ready without waiting.
func epollPoll(ep int, events []syscall.EpollEvent) int {
	n, _, errno := syscall.RawSyscall6(syscall.SYS_EPOLL_PWAIT, uintptr(ep), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}

// epollWait waits for at most d; a negative d waits for ever.
func epollWait(ep int, events []syscall.EpollEvent, d time.Duration) int {
	if d > 0 && d < time.Millisecond {
		ts := syscall.NsecToTimespec(int64(d))
		n, _, errno := syscall.Syscall6(sysEpollWait2, uintptr(ep), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), uintptr(unsafe.Pointer(&ts)), 0, 0)
		if errno != syscall.ENOSYS {
			if errno != 0 {
				return 0
			}
			return int(n)
		}
		d = time.Millisecond
	}
	ms := -1
	if d >= 0 {
		ms = int((d + time.Millisecond - 1) / time.Millisecond)
	}
	n, err := syscall.EpollWait(ep, events, ms)
	if err != nil {
		return 0
	}
	return n
}

// homeOf returns the loop that accepted c, nil where none did.
func homeOf(c net.Conn) *loop {
	if s, ok := c.(*sock); ok && s.slot != nil {
		return s.slot.loop
	}
	return nil
}
