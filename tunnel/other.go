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

func (*kernelRelay) carry(*job) bool                        { return false }
func (*kernelRelay) all(*Relay) []listed                    { return nil }
func (*kernelRelay) held(*Relay, bool) ([]heldTunnel, bool) { return nil, true }
func (*kernelRelay) wait()                                  {}

type guest struct{}

func (k *slot) leaveLobby() {}

func (s *Server) attend(context.Context, *Listener) (error, bool) { return nil, false }

type perch struct{}

func (*pump) findPerch(net.Conn) {}
func (*pump) perches() bool      { return false }
func (*pump) copySocket() error  { panic("unreachable") }
func (*pump) settle() bool       { return false }
func (*pump) leave()             {}
func (*pump) fell() bool         { return false }
