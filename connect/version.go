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
	return withVia(ctx, hops), nil
}

// Refusal is Answer with the challenges of p.Auth, and the field lines in
// p's name. Of no version of HTTP are connection-specific ones among them.
func (p *Protocol) Refusal(req *tunnel.Request, err error) (Refusal, Fields) {
	r := Answer(req, err)
	if r.Reason == tunnel.NoAuth && p.Auth != nil {
		for _, challenge := range p.Auth.Challenges() {
			r.Extra = append(r.Extra, Field{"Proxy-Authenticate", challenge})
		}
	}
	name := p.ProxyName
	if name == "" {
		name = "culvert"
	}
	return r, r.Fields(name)
}

// ReplyReason returns the Reason of a proxy's refusal: the word itself where a
// gateway of our kind sends it in Proxy-Status, else what its error type
// means, else what the status means.
func ReplyReason(status int, fields Fields) tunnel.Reason {
	r := reply{Head: Head{Fields: fields}, status: status}
	return r.reason()
}

// Hops returns the proxies that the request of ctx came through, nearest
// last, for the Via of a Dialer.
func Hops(ctx context.Context) []string { return viaOf(ctx) }

// CheckField refuses a field that could not be sent as it is. It does not
// quote the value, which may be a secret.
func CheckField(f Field) error { return checkField(f, true) }
