//go:build !linux || !(amd64 || arm64)

package tunnel

import (
	"context"
)

// There are no event loops here: connections wait on goroutines.

type pendingConn struct{}

func (k *slot) servePending() {}

func (s *Server) serveOnLoops(context.Context, *Listener) (error, bool) { return nil, false }
