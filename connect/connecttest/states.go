package connecttest

import (
	"context"

	"culvert.dev/tunnel"
)

// Ports for which ServeByPort does not accept the request.
const (
	RefusedPort   = 2
	PanickingPort = 4
	WaitingPort   = 7 // until the client has gone
)

// A PlannedPanic is the value that ServeByPort panics with.
type PlannedPanic struct{}

// ServeByPort does what a Handler may do with req. Its port selects what: see
// the constants. Any other port accepts the request. ServeByPort returns nil
// where there is no stream.
func ServeByPort(ctx context.Context, req *tunnel.Request) tunnel.Stream {
	switch req.Port {
	case RefusedPort:
		req.Refuse(tunnel.Refusef(tunnel.NoRoute, "no"))
		return nil
	case PanickingPort:
		panic(PlannedPanic{})
	case WaitingPort:
		<-ctx.Done()
		return nil
	}
	s, err := req.Accept()
	if err != nil {
		return nil
	}
	return s
}
