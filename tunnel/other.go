//go:build !linux || !(amd64 || arm64)

package tunnel

import (
	"context"
	"net"
	"sync/atomic"
)

// There are no event loops here: connections wait on goroutines, and every tunnel
// is copied.

type loop struct{}

type kernelLoops struct{ stalls atomic.Uint64 }

func (*kernelLoops) stop()                {}
func (*kernelLoops) handOffStalled() bool { return false }

type kernelRelay struct{}

func (*kernelRelay) carry(*carryArgs) bool                  { return false }
func (*kernelRelay) all(*Relay) []liveTunnel                { return nil }
func (*kernelRelay) held(*Relay, bool) ([]heldTunnel, bool) { return nil, true }
func (*kernelRelay) wait()                                  {}

type pendingConn struct{}

func (k *slot) servePending() {}

func (s *Server) serveOnLoops(context.Context, *Listener) (error, bool) { return nil, false }

type poller struct{}

func (*pump) initPoller(net.Conn) {}
func (*pump) pollable() bool      { return false }
func (*pump) copySocket() error   { panic("unreachable") }
func (*pump) watchSocket() bool   { return false }
func (*pump) unwatchSocket()      {}
func (*pump) socketClosed() bool  { return false }
