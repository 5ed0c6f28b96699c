package tunneltest

import (
	"context"
	"net"

	"culvert.dev/tunnel"
)

// A Transport dials endpoints by a Dialer.
type Transport struct{ tunnel.Dialer }

// Dial implements tunnel.Transport.
func (t Transport) Dial(ctx context.Context, ep *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	if d, ok := t.Dialer.(tunnel.EndpointDialer); ok {
		return d.DialEndpoint(ctx, *ep)
	}
	return t.DialContext(ctx, "tcp", ep.String())
}

// Check implements tunnel.Transport.
func (Transport) Check(*tunnel.Endpoint) error { return nil }

// Info implements tunnel.Transport.
func (Transport) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }

// WithTransport returns eps with t for each.
func WithTransport(eps []tunnel.Endpoint, t tunnel.Transport) []tunnel.Endpoint {
	for i := range eps {
		eps[i].Transport = t
	}
	return eps
}
