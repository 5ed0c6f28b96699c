//go:build amd64 || arm64

package poll

import (
	"net"
	"syscall"
	"time"
	"unsafe"
)

// TCP_USER_TIMEOUT (RFC 5482) is made for finding dead peers while bytes are
// under way, and can't tell one that is gone from one that is there and does
// not read: it also ends a connection whose window was closed for so long,
// though each probe is answered. A paused download is no dead peer. So a
// PeerCheck asks the kernel instead. It is for sockets that have bytes under way:
// while there are none, keepalive finds a dead peer.

const (
	// maxUnacked is how many checks in a row may find bytes under way and nothing
	// acknowledged: the last is 25 to 30 s after they were sent.
	maxUnacked = 6

	// maxProbes is how many probes a peer may leave unanswered. They are sent while
	// nothing moves or the window is closed, and a live peer answers them.
	maxProbes = 3
)

// A PeerCheck finds out whether the peer of one socket is gone. Its value is how
// many checks in a row have found bytes under way, and nothing acknowledged since
// the first. The zero value is ready.
type PeerCheck uint8

// Dead checks a socket, and reports whether its peer is gone. It is called every
// PeerCheckInterval.
func (a *PeerCheck) Dead(fd int32) bool { return a.update(sendInfo(fd)) }

// DeadConn is Dead for a connection, and false where that is no open socket.
func (a *PeerCheck) DeadConn(c net.Conn) (dead bool) {
	_ = Control(c, func(fd int32) error { dead = a.Dead(fd); return nil })
	return dead
}

// update counts one check, and reports whether the peer is gone.
func (a *PeerCheck) update(s sendState, sinceAck time.Duration, probes int) bool {
	switch {
	case probes >= maxProbes:
		return true
	case s == sendIdle:
		*a = 0
	case s == retransmitting && sinceAck >= PeerCheckInterval:
		*a++
	default: // acknowledged lately, or held back by a closed window
		*a = 1
	}
	return *a >= maxUnacked
}

// A sendState is what a socket has under way.
type sendState int

const (
	sendIdle       sendState = iota // nothing
	sending                         // something is sent and not acknowledged, or to be sent
	retransmitting                  // it was sent again, and is not acknowledged
)

// sendInfo returns what is under way on a socket, for how long its peer has
// acknowledged nothing, and how many probes went unanswered.
func sendInfo(fd int32) (s sendState, sinceAck time.Duration, probes int) {
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
		return sendIdle, 0, 0
	}
	switch {
	case info.unacked > 0 && info.retransmits > 0:
		s = retransmitting
	case info.unacked > 0 || info.notsent > 0:
		s = sending
	}
	return s, time.Duration(info.lastAck) * time.Millisecond, int(info.probes)
}
