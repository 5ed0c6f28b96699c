// Package upstream opens the connections that the requests of a gateway lead to: to
// endpoints, directly or over next hops, among them the gateways of other networks. It
// adds a PROXY header and TLS where the service asks for them.
//
//	up := &upstream.Transports{Direct: &tunnel.NetDialer{Guard: guard}, Lookup: lookup, Budget: budget, CurrentVia: via}
//	reg := &registry.Registry{NewTransport: up.New}
//	defer up.Close()
//
// It does not choose endpoints: the registry and the Router do.
package upstream

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"culvert.dev/connect/proxyproto"
	"culvert.dev/identity"
	"culvert.dev/internal/postgres"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Transports makes the transports of a gateway. Equal settings share one, also across
// tables, so that its carriers share connections.
type Transports struct {
	// Direct dials the addresses of the first hop; its guard judges them.
	Direct *tunnel.NetDialer

	// Lookup finds the addresses of the first hop's name; nil means it has none.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	// Budget counts the connections that carry many tunnels; those tunnels do
	// not count for anything themselves (tunnel.Multiplexed). May be nil.
	Budget *tunnel.Budget

	// CurrentVia returns the pseudonym of this gateway, which every request carries. Where
	// it has changed, New makes other transports. Nil means that there is none.
	CurrentVia func() string

	// Identity has the keys and the trust that hops and backend TLS name; nil means that
	// none is known.
	Identity *identity.Store

	// ReadFile reads the token files of hops, and JWTSVID returns the JWT-SVID of a SPIFFE
	// id, or of the agent's default for "". Nil means that there are none.
	ReadFile func(name string) ([]byte, error)
	JWTSVID  func(ctx context.Context, id string, audience ...string) (string, error)

	// RunCommand returns what the command argv writes, of at most limit bytes. It has no
	// other side than that of ctx, and its error has nothing of what was written. Nil means
	// that there are no commands.
	RunCommand func(ctx context.Context, argv []string, limit int) ([]byte, error)

	// Group returns the transport to the connectors of a group, for streams to which a layer
	// adds something where added is true. Nil means that there are none.
	Group func(name string, added bool) tunnel.Transport

	// Log is told what services are not told; nil discards it.
	Log *slog.Logger

	// DroppedDatagrams counts those that were lost on the way to next hops.
	DroppedDatagrams atomic.Uint64

	hops      shared[NextHop]
	layers    shared[tlsLayer]
	fallbacks shared[FallbackDialer]
	proxy     atomic.Pointer[proxyDialer] // of UseProxy

	mu    sync.Mutex
	pools map[io.Closer]struct{} // carriers that keep connections; guarded by mu
}

// New returns the transport to the endpoints of s: through the gateways of its Via or of
// ep's, or, where g is not nil, over g at ep, with a PROXY header and TLS where s asks for them.
// It is nil where the Router's own dialer does. It is registry.Registry.NewTransport.
func (t *Transports) New(s *registry.Service, ep *registry.Endpoint, g *registry.Gateway) (tunnel.Transport, error) {
	var layers []Layer
	inside := s.ForwardsInsideTLS()
	if s.ProxyProtocol != 0 && !inside {
		layers = append(layers, proxyproto.Layer{Version: s.ProxyProtocol, Identity: s.ForwardIdentity != nil, TooLarge: t.certificateTooLarge(s)})
	}
	postgreSQL := s.StartTLS == "postgres"
	if postgreSQL && g == nil && (s.TLS == nil || !s.TLS.PassClientTLS) { // the gateway of another network does it there
		layers = append(layers, postgres.Layer{})
	}
	if s.TLS != nil {
		layer, err := t.tlsLayer(s.TLS)
		if err != nil {
			return nil, err
		}
		if inside {
			told, err := t.newIdentityLayer(s, layer)
			if err != nil {
				return nil, err
			}
			layers = append(layers, told)
		} else if s.TLS.PassClientTLS {
			layers = append(layers, &passingLayer{tls: layer, answersPostgres: postgreSQL, asksPostgres: postgreSQL && g == nil})
		} else {
			layers = append(layers, layer)
		}
	} else if inside {
		// The client's own TLS is passed on. The service would take its hello for the header.
		return cannotForward{}, nil
	}
	via := s.Via
	if len(via) == 0 && ep != nil {
		via = ep.Hops()
	}
	switch {
	case g != nil:
		carriers, err := t.toGateway(ep, g)
		if err != nil {
			return nil, err
		}
		return WithLayers(carriers, layers...), nil
	case ep != nil && ep.Group != "" && len(s.Via) == 0:
		if t.Group == nil {
			return nil, fmt.Errorf("gateway: endpoint group %q: this gateway takes no reverse sessions", ep.Group)
		}
		return WithLayers(registry.NotFinal(t.Group(ep.Group, len(layers) > 0)), layers...), nil
	case len(via) > 0:
		hop, err := t.NextHop(via)
		if err != nil {
			return nil, err
		}
		if len(s.Via) == 0 {
			return WithLayers(registry.NotFinal(hop), layers...), nil
		}
		return WithLayers(hop, layers...), nil
	case len(layers) > 0:
		return WithLayers(Direct{t.Direct}, layers...), nil
	}
	return nil, nil
}

// toGateway returns the transport to g at ep: by the first of its carriers that works.
func (t *Transports) toGateway(ep *registry.Endpoint, g *registry.Gateway) (tunnel.Transport, error) {
	hops := g.Carriers(*ep)
	if weak := g.Downgrade(); weak != nil {
		return nil, fmt.Errorf("gateway: %s to %q has no TLS and comes after a transport that has, and it is not said to be insecure", weak.Proto, ep)
	}
	carriers := make([]fallbackCarrier, len(hops))
	for i := range hops {
		hop, err := t.NextHop(hops[i : i+1])
		if err != nil {
			return nil, err
		}
		carriers[i] = fallbackCarrier{Transport: hop, name: hops[i].Proto, probe: t.prober(hops[i])}
	}
	return t.fallbacks.get(func() (*FallbackDialer, error) {
		f := newFallbackDialer(ep.String(), carriers...)
		keepOpen(t, f, []io.Closer{f.probes})
		return f, nil
	}, append(hopSettings(hops), ep.String(), t.via())...)
}

// via returns the pseudonym of this gateway.
func (t *Transports) via() string {
	if t.CurrentVia == nil {
		return ""
	}
	return t.CurrentVia()
}

// Close ends the connections that carriers keep, with the streams on them.
func (t *Transports) Close() {
	t.mu.Lock()
	pools := t.pools
	t.pools = nil
	t.mu.Unlock()
	if p := t.proxy.Load(); p != nil {
		p.close()
	}
	for c := range pools {
		_ = c.Close()
	}
}

// Direct dials endpoints without a next hop.
type Direct struct{ *tunnel.NetDialer }

// Dial implements tunnel.Transport.
func (d Direct) Dial(ctx context.Context, ep *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	return d.DialEndpoint(ctx, *ep)
}

// Check implements tunnel.Transport.
func (d Direct) Check(ep *tunnel.Endpoint) error { return d.NetDialer.Check(*ep) }

// Info implements tunnel.Transport.
func (Direct) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }

// A Layer is a handshake on a connection that was dialed. Handshake returns the
// connection that takes the place of c, and closes c where it fails.
type Layer interface {
	Handshake(ctx context.Context, c net.Conn, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error)
}

// WithLayers returns t with layers on its connections, in order: the PROXY header
// first, then the request to begin TLS, TLS behind it.
func WithLayers(t tunnel.Transport, layers ...Layer) tunnel.Transport {
	if len(layers) == 0 {
		return t
	}
	return &layered{t, layers}
}

// layered is a Transport with layers.
type layered struct {
	tunnel.Transport
	layers []Layer
}

// Dial implements tunnel.Transport.
func (l *layered) Dial(ctx context.Context, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	c, err := l.Transport.Dial(ctx, ep, req)
	for i := 0; err == nil && i < len(l.layers); i++ {
		if c, err = l.layers[i].Handshake(ctx, c, ep, req); err != nil {
			// A next hop has carried the connection as far as the endpoint.
			return nil, &tunnel.Error{Reason: tunnel.ReasonOf(err), Err: err, BehindHop: len(l.Info().Hops) > 0}
		}
	}
	return c, err
}

// Info implements tunnel.Transport.
func (l *layered) Info() tunnel.TransportInfo {
	info := l.Transport.Info()
	info.Datagrams = false // a layer is a handshake on a stream
	for _, layer := range l.layers {
		if s, ok := layer.(interface{ security() tunnel.Security }); ok {
			info.Security = max(info.Security, s.security())
		}
		switch layer := layer.(type) {
		case proxyproto.Layer:
			if layer.Identity {
				info.Identity = "in a PROXY header before TLS"
			}
		case *identityLayer:
			info.Identity = layer.describe()
		case *passingLayer:
			info.PassesClientTLS = true
		}
	}
	return info
}
