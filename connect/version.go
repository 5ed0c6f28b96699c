package connect

import (
	"context"
	"strings"

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
	sent, n, err := p.Intermediary.Read(req, "Proxy-Authorization", fields)
	if err != nil {
		return ctx, tunnel.Refusef(tunnel.ReasonOf(err), "connect: %w", err)
	}
	to, wrong := ParseAuthority(target)
	if p.Auth != nil {
		if err := Authenticate(ctx, p.Auth, req, sent, n, Credentials{Authority: to, Fields: fields}); err != nil {
			return ctx, tunnel.Refusef(tunnel.ReasonOf(err), "connect: %w", err)
		}
	}
	if err := p.delegate(req, fields); err != nil {
		return ctx, err
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

// callerField is the field in which a gateway states the caller of a request.
const callerField = "Culvert-Peer"

// isField reports whether name is that of field, also for a recipient that takes "_" for "-".
func isField(name, field string) bool {
	return len(name) == len(field) && strings.EqualFold(strings.ReplaceAll(name, "_", "-"), field)
}

// delegate sets the Peer of req, whose client may be a gateway that states it, and its Source likewise.
func (p *Protocol) delegate(req *tunnel.Request, fields Fields) error {
	if p.Delegate == nil || req.TLS == nil || req.TLS.Peer.Method != "mtls" {
		return nil
	}
	var stated Stated
	for _, f := range fields {
		switch {
		case isField(f.Name, callerField):
			stated.Callers = append(stated.Callers, f.Value)
		case isField(f.Name, SourceField):
			stated.Sources = append(stated.Sources, f.Value)
		}
	}
	if len(stated.Callers)+len(stated.Sources) == 0 {
		return nil
	}
	peer, err := p.Delegate(req, stated)
	if err != nil {
		return tunnel.Refusef(tunnel.NoAuth, "connect: %w", err)
	}
	req.Peer = peer
	return nil
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
