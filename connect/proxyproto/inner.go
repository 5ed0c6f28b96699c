package proxyproto

import (
	"context"

	"culvert.dev/tunnel"
)

// An Inner is a Protocol inside TLS that ends here, for gateways as clients: a stream
// begins with a header of version 2, whose AUTHORITY is the name of its destination, and
// the rest is the client's. Nothing else is spoken in such a session, and there is no way
// to tell the gateway no but a reset.
type Inner struct {
	// Caller returns who has made req, whose TLS.Peer is the gateway: assertion is what
	// the header has, "" for none. An error refuses the request. Nil refuses all.
	Caller func(req *tunnel.Request, assertion string) (tunnel.Peer, error)
}

var _ tunnel.Protocol = (*Inner)(nil)

// Name returns "proxy".
func (*Inner) Name() string { return "proxy" }

// Asks reports that nobody is served without an identity.
func (*Inner) Asks() bool { return true }

// Sniff says Yes to the signature of version 2.
func (*Inner) Sniff(prefix []byte) tunnel.Verdict {
	switch {
	case !begins(prefix, signV2):
		return tunnel.No
	case len(prefix) < len(signV2):
		return tunnel.More
	}
	return tunnel.Yes
}

// ServeConn makes the one Request.
func (p *Inner) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	said, err := readHeader(c)
	if err != nil {
		return err
	}
	if said.Version != 2 {
		_ = c.Abort()
		return tunnel.Refusef(tunnel.BadPreamble, "proxyproto: a header of version %d, want version 2 inside TLS", said.Version)
	}
	req := c.NewRequest(p.Name())
	if err := p.admit(req, said); err != nil {
		if said.Local {
			_ = c.Close() // in order, for the health check that it is
			return err
		}
		req.Refuse(err)
		if r, ok := h.(tunnel.Refuser); ok {
			r.Refused(req, err) // the log knows whose connection it was
			return nil
		}
		return err
	}
	said.forget()
	h.ServeTunnel(context.WithValue(ctx, headerKey{}, said), req)
	return nil
}

// admit completes req by what the header has said.
func (p *Inner) admit(req *tunnel.Request, said *Header) error {
	switch {
	case req.TLS == nil || p.Caller == nil:
		return tunnel.Refusef(tunnel.Internal, "proxyproto: the header is in no TLS session that ended here")
	case said.Local:
		return tunnel.Refusef(tunnel.NoHello, "proxyproto: the gateway's own connection, which asks for nothing")
	}
	caller, err := p.Caller(req, said.Assertion)
	if err != nil {
		return tunnel.Refusef(tunnel.NoAuth, "proxyproto: %w", err)
	}
	req.Peer = caller
	if said.Source.IsValid() {
		req.Source = said.Source
	}
	if said.Authority == "" {
		return tunnel.Refusef(tunnel.NoSNI, "proxyproto: the header has no authority")
	}
	if req.Name, err = tunnel.ParseName(said.Authority); err != nil {
		return tunnel.Refusef(tunnel.NoSNI, "proxyproto: the authority is no name: %w", err)
	}
	if said.ALPN != "" {
		req.ALPN = []string{said.ALPN}
	}
	return nil
}
