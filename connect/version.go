package connect

import (
	"context"

	"culvert.dev/tunnel"
)

// This file is what the other versions of HTTP have in common with this one.

// Admit judges a CONNECT for target, whichever version of HTTP it came by:
// credentials, target, loops. It says in req who asks and where to, and
// returns the context for the Handler, from which a Dialer learns the proxies
// the request came through. Its errors are *tunnel.Error.
//
// The strings of target and fields may go on being used.
func (p *Protocol) Admit(ctx context.Context, req *tunnel.Request, target string, fields Fields) (context.Context, error) {
	hops, err := p.admit(ctx, req, target, fields)
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
