package gateway

import (
	"context"

	"culvert.dev/tunnel"
)

// reservedNames is the Handler of all streams: it serves the names below
// tunnel.ReservedZone by handlers of their own, and leaves the others to the Router.
type reservedNames struct {
	router   *tunnel.Router
	handlers map[tunnel.Name]reservedName // not changed once the gateway serves
	arrived  func(tunnel.Name)            // told of each reserved name that is asked for; nil is not called
	restore  func(*tunnel.Request)        // changes requests that another replica has passed on; nil is not called
}

// A reservedName is what serves one reserved name.
type reservedName struct {
	tunnel.Handler

	// Anonymous has it serve callers without an identity, too. It then sees to that itself.
	Anonymous bool
}

// ServeTunnel implements tunnel.Handler.
func (h *reservedNames) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	if !req.Name.IsReserved() {
		if h.restore != nil {
			h.restore(req)
		}
		h.router.ServeTunnel(ctx, req)
		return
	}
	if h.arrived != nil {
		h.arrived(req.Name)
	}
	n, ok := h.handlers[req.Name]
	if err := h.check(req, n, ok); err != nil {
		h.router.Refuse(req, err)
		return
	}
	n.ServeTunnel(ctx, req)
}

// check returns why req is not served, where n is what serves its name, if ok.
func (h *reservedNames) check(req *tunnel.Request, n reservedName, ok bool) error {
	if err := req.Peer.Revoked(); err != nil { // of a connection from before
		return err
	}
	switch {
	case !ok:
		return tunnel.Refusef(tunnel.NoRoute, "gateway: %q is reserved, and nothing is served by that name", req.Name)
	case req.Proto == "sni" || req.Proto == "quic":
		return tunnel.Refusef(tunnel.NoRoute, "gateway: %q is reached by CONNECT or SOCKS5, not by the name in a ClientHello", req.Name)
	case !n.Anonymous && req.Peer.Method == "":
		return tunnel.Refusef(tunnel.Denied, "gateway: %q is for callers with an identity: connect to a listener that asks for client certificates or credentials", req.Name)
	}
	return nil
}

var _ tunnel.Handler = (*reservedNames)(nil)
