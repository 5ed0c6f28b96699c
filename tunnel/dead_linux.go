//go:build amd64 || arm64

package tunnel

import (
	"syscall"
	"time"
	"unsafe"
)

// TCP_USER_TIMEOUT (RFC 5482) is made for finding dead peers while bytes are
// under way, and can't tell one that is gone from one that is there and does
// not read: it also ends a connection whose window was closed for so long,
// though each probe is answered. A paused download is no dead peer. So the
// sweeps ask the kernel what it knows instead, of tunnels that have bytes under
// way and of no others: while there are none, keepalive does it.

const (
	askEvery = 5 * time.Second
	askMost  = 6 // looks in a row that find bytes under way and nothing acknowledged: the last is 25 to 30 s after they were sent

	// deadProbes in a row without an answer are a dead peer's. They are sent
	// while nothing moves or the window is closed; it answers them when it lives.
	deadProbes = 3
)

// asked is how many looks in a row at a socket have found bytes under way, and
// nothing acknowledged since the first.
type asked uint8

// due reports whether a sweep is to look at a tunnel that was born and moved
// its last byte then. It is asked by each sweep, last being when the one before
// was, and is mostly false.
func due(born, moved, last, now int64, a, b asked) bool {
	every := int64(askEvery)
	return (last-born)/every != (now-born)/every && (now-moved <= 2*every || a > 0 || b > 0)
}

// dead takes a look at a socket, and reports whether its peer is gone.
func (a *asked) dead(fd int32) bool { return a.judge(underWay(fd)) }

// judge is dead, by what underWay says.
func (a *asked) judge(under way, quiet time.Duration, probes int) bool {
	switch {
	case probes >= deadProbes:
		return true
	case under == nothing:
		*a = 0
	case under == unanswered && quiet >= askEvery:
		*a++
	default: // acknowledged of late, or held back by a window that is closed
		*a = 1
	}
	return *a >= askMost
}

// ask looks at both sides of f and returns which one is dead, or -1.
func (f *flow) ask() int {
	for i := range f.sides {
		if f.sides[i].asked.dead(f.sides[i].fd) {
			return i
		}
	}
	return -1
}

// nextAsk is when f's peers are to be asked for next: never while nothing moves
// and nothing was found under way.
func (f *flow) nextAsk(now int64) int64 {
	every := int64(askEvery)
	if now-f.moved > 2*every && f.sides[0].asked == 0 && f.sides[1].asked == 0 {
		return noLook
	}
	return f.born + ((now-f.born)/every+1)*every
}

// A pulse is what a copyTunnel needs for the same. It is the sweep's alone.
type pulse struct {
	born  int64
	asked [2]asked
}

// ask looks at the sockets of ct, or below its streams, and returns the name
// of the side that is dead, or "". Streams that share a socket have none: what
// they share looks after it by itself.
func (ct *copyTunnel) ask(last, now int64) string {
	p := &ct.pulse
	if p.born == 0 {
		p.born = now
	}
	if due(p.born, ct.moved.Load(), last, now, p.asked[0], p.asked[1]) {
		for i, who := range sideNames {
			gone := false
			_ = control(below(ct.pumps[i].src), func(fd int32) error { gone = p.asked[i].dead(fd); return nil })
			if gone {
				return who
			}
		}
	}
	return ""
}

type way int

const (
	nothing    way = iota
	waiting        // something is sent or to be sent
	unanswered     // it was sent again, and is not acknowledged
)

// underWay says what is under way on a socket, for how long its peer has
// acknowledged nothing, and how many probes went unanswered.
func underWay(fd int32) (w way, quiet time.Duration, probes int) {
	// The start of struct tcp_info (linux/tcp.h), whose layout never changes
	// but at its end.
	var info struct {
		_           [2]byte
		retransmits uint8 // of the oldest segment; none where the peer has closed its window on it
		probes      uint8
		_           [20]byte
		unacked     uint32 // segments
		_           [28]byte
		lastAck     uint32 // milliseconds ago
		_           [84]byte
		notsent     uint32 // bytes
	}
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := syscall.RawSyscall6(syscall.SYS_GETSOCKOPT, uintptr(fd), syscall.IPPROTO_TCP, syscall.TCP_INFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return nothing, 0, 0
	}
	switch {
	case info.unacked > 0 && info.retransmits > 0:
		w = unanswered
	case info.unacked > 0 || info.notsent > 0:
		w = waiting
	}
	return w, time.Duration(info.lastAck) * time.Millisecond, int(info.probes)
}
