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
// sweep asks the kernel what it knows instead, of flows that have bytes under
// way and of no others: while there are none, keepalive does it.

const (
	askEvery = 5 * time.Second
	askMost  = 6 // looks in a row that find bytes under way and nothing acknowledged: the last is 25 to 30 s after they were sent

	// deadProbes in a row without an answer are a dead peer's. They are sent
	// while nothing moves or the window is closed; it answers them when it lives.
	deadProbes = 3
)

// ask looks at both sides of f and returns which one is dead, or -1. It is
// called by each sweep, last being when the one before was, and mostly does
// nothing.
func (f *flow) ask(last, now int64) int {
	every := int64(askEvery)
	if (last-f.born)/every == (now-f.born)/every {
		return -1
	}
	if now-f.moved > 2*every && f.sides[0].asked == 0 && f.sides[1].asked == 0 {
		return -1
	}
	for i := range f.sides {
		under, quiet, probes := underWay(f.sides[i].fd)
		switch {
		case probes >= deadProbes:
			return i
		case under == nothing:
			f.sides[i].asked = 0
			continue
		case under == unanswered && quiet >= askEvery:
			f.sides[i].asked++
		default: // acknowledged of late, or held back by a window that is closed
			f.sides[i].asked = 1
		}
		if f.sides[i].asked >= askMost {
			return i
		}
	}
	return -1
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
