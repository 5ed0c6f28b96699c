package gateway

import (
	"context"

	"culvert.dev/connect/h2"
	"culvert.dev/connect/ws"
	"culvert.dev/tunnel"
)

// Here WebSocket and HTTP/2, which know nothing of each other, become RFC 8441.

// AcceptWebSockets has carrier take extended CONNECT for "websocket" by the rules
// of p: its paths, hosts, origins and credentials. It is to be called before
// carrier serves.
func AcceptWebSockets(carrier *h2.Protocol, p *ws.Protocol) {
	carrier.Extended = func(ctx context.Context, req *tunnel.Request, head *h2.Head) (context.Context, error) {
		if head.Protocol != "websocket" {
			return nil, tunnel.Refusef(tunnel.Unsupported, "extended CONNECT for %.80q", head.Protocol)
		}
		req.Proto = p.Name()
		head.Refusal = p.Answer
		ctx, subprotocol, answer, err := p.AdmitExtended(ctx, req, &ws.Extended{
			Scheme: head.Scheme, Host: head.Authority, Path: head.Path, Fields: head.Fields,
		})
		head.Answer = answer
		head.Stream = func(s tunnel.Stream) tunnel.Stream { return ws.NewStream(s, ws.Server, subprotocol, p.Options) }
		return ctx, err
	}
}
