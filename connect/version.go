package connect

import (
	"context"

	"culvert.dev/tunnel"
)

// This file is what the other versions of HTTP have in common with this one.

// Admit checks a CONNECT for target that came by any version of HTTP: credentials,
// target, loops. It sets the destination and the client's identity in req, and returns
// the context for the Handler, from which a Dialer learns the proxies that the request
// came through. Its errors are *tunnel.Error.
//
// The strings of target and fields may go on being used.
func (p *Protocol) Admit(ctx context.Context, req *tunnel.Request, target string, fields Fields) (context.Context, error) {
	sent, n := fields.Get("Proxy-Authorization")
	if n > 1 {
		return ctx, badRequest("%d Proxy-Authorization fields", n)
	}
	to, wrong := ParseAuthority(target)
	if p.Auth != nil {
		if err := Authenticate(ctx, p.Auth, req, sent, n, Credentials{Authority: to, Fields: fields}); err != nil {
			return ctx, tunnel.Refusef(tunnel.ReasonOf(err), "connect: %w", err)
		}
	}
	if wrong != nil {
		return ctx, &tunnel.Error{Reason: tunnel.BadRequest, Err: wrong}
	}
	req.Name, req.Addr, req.Port = to.Name, to.Addr, to.Port
	hops, err := fields.Hops(p.via(), to)
	if err != nil {
		return ctx, err
	}
	return WithVia(ctx, hops), nil
}

// Refusal is Answer with the challenges of p.Auth.
func (p *Protocol) Refusal(req *tunnel.Request, err error) Refusal {
	r := Answer(req, err)
	if r.Reason == tunnel.NoAuth && p.Auth != nil {
		for _, challenge := range p.Auth.Challenges() {
			r.Extra = append(r.Extra, Field{"Proxy-Authenticate", challenge})
		}
	}
	return r
}

// ReplyReason returns the Reason of a proxy's refusal: the word itself where a
// gateway of our kind sends it in Proxy-Status, else what its error type
// means, else what the status means.
func ReplyReason(status int, fields Fields) tunnel.Reason {
	r := reply{Head: Head{Fields: fields}, status: status}
	return r.reason()
}
