//go:build !linux || !(amd64 || arm64)

package poll

import (
	"context"
	"net"
	"net/netip"
)

// There are no event loops here: connections are those of package net, and wait
// on goroutines.

// A Task does nothing here.
type Task struct{}

// HandOff does nothing here.
func (*Task) HandOff() {}

// NewListener returns ln.
func NewListener(ln net.Listener) net.Listener { return ln }

// Dial connects to addr by TCP. The socket has the mark, unless that is 0. Keepalive is off.
func Dial(ctx context.Context, addr netip.AddrPort, mark uint32, _ *Task) (net.Conn, error) {
	return dialNet(ctx, addr, mark)
}

// PendingError knows nothing here: the idle limit finds out.
func PendingError(net.Conn) error { return nil }

// LimitUnsent does nothing here.
func LimitUnsent(net.Conn, int) {}

// RoomCheck knows nothing here: what writes may have to wait.
func RoomCheck(net.Conn) func() bool { return nil }

// KernelMemory knows nothing here.
func KernelMemory(net.Conn) int64 { return 0 }

// A PeerCheck knows nothing here: keepalive finds a dead peer.
type PeerCheck uint8

// DeadConn is false.
func (*PeerCheck) DeadConn(net.Conn) bool { return false }

// Scratch is not used here.
type Scratch struct{}

// Free does nothing.
func (*Scratch) Free() {}
