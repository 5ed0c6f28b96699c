//go:build !linux || !(amd64 || arm64)

package tunnel

import (
	"context"
	"net"
)

// There are no event loops here: connections wait on goroutines.

// DeferAccept does nothing here: a client is accepted as soon as it connects.
func DeferAccept(net.Listener, []Protocol) {}

type pendingConn struct{}

func (k *slot) servePending() {}

func (s *Server) serveOnLoops(context.Context, *Listener) (error, bool) { return nil, false }
