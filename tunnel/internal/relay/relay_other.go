//go:build !linux || !(amd64 || arm64)

package relay

import "net"

// There are no event loops here: every tunnel is copied, and each pump keeps its
// goroutine.

// Loops do nothing here.
type Loops struct {
	Count  int
	Budget Budget
}

// Stop does nothing here.
func (*Loops) Stop() {}

// Stalls returns 0.
func (*Loops) Stalls() uint64 { return 0 }

// HandOffStalled is false.
func (*Loops) HandOffStalled() bool { return false }

type socketRelay struct{}

func (*socketRelay) carry(*Relay, *Tunnel) bool                    { return false }
func (*socketRelay) all(*Relay) []Live                             { return nil }
func (*socketRelay) killFunc(*Relay, Reason, func(Owner) bool) int { return 0 }
func (*socketRelay) held(*Relay, bool) ([]heldTunnel, bool)        { return nil, true }
func (*socketRelay) wait()                                         {}

type poller struct{}

func (*pump) initPoller(net.Conn) {}
func (*pump) initPush()           {}
func (*pump) pollable() bool      { return false }
func (*pump) copySocket() error   { panic("unreachable") }
func (*pump) watchSocket() bool   { return false }
func (*pump) unwatchSocket()      {}
func (*pump) socketClosed() bool  { return false }

// A listedTunnel is a tunnel that a loop carries: there is none.
type listedTunnel struct{}

// Kill does nothing.
func (*listedTunnel) Kill(Reason, error) {}
