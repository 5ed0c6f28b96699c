package proxyproto

import (
	"context"

	"culvert.dev/tunnel"
)

// A Protocol takes the AUTHORITY of a connection's header for the name of its
// destination, and reads nothing of the client: the server may speak first. A
// listener is pinned to it and has a ConnHeader. The zero value is ready to use.
//
// The header carries no port that the client asked for; as with TLS, a name
// with several ports goes to the one the listener has. There is no way to tell
// the client no but a reset.
type Protocol struct{}

var _ tunnel.Protocol = (*Protocol)(nil)

// Name returns "proxy".
func (*Protocol) Name() string { return "proxy" }

// Sniff says Yes to anything.
func (*Protocol) Sniff([]byte) tunnel.Verdict { return tunnel.Yes }

// ServeConn makes the one Request.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	said := FromContext(ctx)
	switch {
	case said == nil:
		_ = c.Abort()
		return tunnel.Refusef(tunnel.Internal, "proxyproto: the listener has no ConnHeader to take a name from")
	case said.Local:
		_ = c.Close() // in order, for the health check that it is
		return tunnel.Refusef(tunnel.NoHello, "proxyproto: the proxy's own connection, which asks for nothing")
	case said.Authority == "":
		_ = c.Abort()
		return tunnel.Refusef(tunnel.NoSNI, "proxyproto: the header has no authority")
	}
	name, err := tunnel.ParseName(said.Authority)
	if err != nil {
		_ = c.Abort()
		return tunnel.Refusef(tunnel.NoSNI, "proxyproto: the authority is no name: %w", err)
	}
	req := c.NewRequest(p.Name())
	req.Name = name
	if said.ALPN != "" {
		req.ALPN = []string{said.ALPN}
	}
	h.ServeTunnel(ctx, req)
	return nil
}
