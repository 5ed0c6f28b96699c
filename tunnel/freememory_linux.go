//go:build amd64 || arm64

package tunnel

import (
	"net"
	"syscall"
	"time"
	"unsafe"
)

// A survey asks a loop what its tunnels keep, since only the loop's goroutine may
// look at them.
type survey struct {
	relay  *Relay
	kernel bool
	answer chan<- []heldTunnel // with room for the answer
}

// surveyTime is how long a loop may take for it.
const surveyTime = 300 * time.Millisecond

// held returns what each tunnel of relay keeps, and false where the loop does not
// answer in time.
func (l *loop) held(relay *Relay, kernel bool) (all []heldTunnel, ok bool) {
	answer := make(chan []heldTunnel, 1)
	l.mu.Lock()
	l.asked = append(l.asked, survey{relay, kernel, answer})
	l.notify()
	l.mu.Unlock()
	timer := time.NewTimer(surveyTime)
	defer timer.Stop()
	select {
	case all := <-answer:
		return all, true
	case <-timer.C:
		return nil, false
	}
}

// survey is called on the loop's goroutine.
func (l *loop) survey(s survey) (all []heldTunnel) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.seats {
		f, ok := w.(*flow)
		if !ok || f.relay != s.relay || f.sides[0].out == nil && f.sides[1].out == nil {
			continue
		}
		t := heldTunnel{listed: &listedFlow{f, l}, quiet: l.now-f.moved >= int64(quietAfter)}
		for i := range f.sides {
			if o := f.sides[i].out; o != nil {
				t.held += int64(o.held + o.n)
			}
			if s.kernel {
				t.held += socketMemory(f.sides[i].fd)
			}
		}
		all = append(all, t)
	}
	return all
}

// socketKeeps returns what the kernel keeps for c, where it is a socket.
func socketKeeps(c net.Conn) (n int64) {
	if !isSocket(c) {
		return 0
	}
	_ = control(c, func(fd int32) error {
		n = socketMemory(fd)
		return nil
	})
	return n
}

// socketMemory returns what the kernel keeps for fd: what has come and what is to
// be sent.
func socketMemory(fd int32) int64 {
	const (
		memInfo = 55 // SO_MEMINFO, Linux 4.12: the numbers of sock_diag(7)
		come    = 0  // SK_MEMINFO_RMEM_ALLOC
		queued  = 5  // SK_MEMINFO_WMEM_QUEUED
	)
	var info [9]uint32
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := syscall.RawSyscall6(syscall.SYS_GETSOCKOPT, uintptr(fd), syscall.SOL_SOCKET, memInfo, uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0
	}
	return int64(info[come]) + int64(info[queued])
}
