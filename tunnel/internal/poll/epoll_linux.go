//go:build amd64 || arm64

package poll

import (
	"syscall"
	"time"
	"unsafe"
)

// Events of a descriptor, as in epoll_ctl(2).
const (
	In            = syscall.EPOLLIN
	Out           = syscall.EPOLLOUT
	Err           = syscall.EPOLLERR
	Hup           = syscall.EPOLLHUP
	EdgeTriggered = 1 << 31 // EPOLLET; syscall's is negative
	Exclusive     = 1 << 28 // EPOLLEXCLUSIVE
)

const (
	sysEpollWait2 = 441 // epoll_pwait2, Linux 5.11
	efdNonblock   = syscall.O_NONBLOCK | syscall.O_CLOEXEC
)

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
