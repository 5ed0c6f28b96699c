//go:build !linux || !(amd64 || arm64)

package tunnel

import (
	"context"
	"net"
	"sync/atomic"
)

// Event loops are not to be had here: connections wait on goroutines.
type kernelLoops struct{ stalls atomic.Uint64 }

type loop struct{}

type guest struct{}

func (*kernelLoops) stop()       {}
func (*kernelLoops) watch() bool { return false }

func (k *slot) passOn()     {}
func (k *slot) leaveLobby() {}

func giveScratch(net.Conn) {}

// attend is false: nobody but the caller accepts.
func (s *Server) attend(context.Context, *Listener) (error, bool) { return nil, false }
