package registry

import (
	"context"
	"slices"
	"strings"

	"culvert.dev/tunnel"
)

// proxyTransportList suggests transports by which a gateway can be asked for a service
// when only its address is known. With connect-h2 connections are shared, and socks5 does
// not let a gateway see a loop.
const proxyTransportList = "connect-h2, connect or socks5"

// remote returns the endpoints of a service in other networks than ours: behind the
// Via of the nearest one, or behind its gateways. A gateway that reads the name in a
// hello again is an endpoint itself. Any other is asked for the destination, by its
// Carriers.
func (x *resolution) remote(ctx context.Context) ([]tunnel.Endpoint, error) {
	p := x.table.locate(x.match, x.table.here)
	asked, known := x.remoteName(&p)
	if !known && (x.rule == nil || len(p.remote.Via) > 0) {
		return nil, errNoName(x.req, x.match, &p)
	}
	if len(p.remote.Via) > 0 {
		return x.behind(p.remoteVia, &p.remote.Network, []Endpoint{asked})
	}
	hops := x.remoteHops(&p, known)
	if len(hops) == 0 && x.ofDatagrams() && known && x.port != 0 {
		return nil, tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: service %q is in network %q, and a %s request is of datagrams, which go to a gateway by connect-h2 or connect-h3: list connect-h2 among the transports of its gateways, or give the network a via", x.req.Target(), x.entry.Name, p.remote.Name, x.req.Proto)
	}
	if len(hops) == 0 {
		return nil, errNoGateway(x.req, x.match, &p, known)
	}
	if p.hasGatewayAt(x.req.Source.Addr()) {
		return nil, tunnel.Refusef(tunnel.Loop, "registry: %q: service %q is in network %q, whose gateway %s asks for it here", x.req.Target(), x.entry.Name, p.remote.Name, x.req.Source.Addr())
	}
	configured, targets := make([]Endpoint, len(hops)), make([]tunnel.Endpoint, len(hops))
	for i, e := range hops {
		if x.readsHello(e, known) {
			configured[i] = e.Address
			continue
		}
		if err := e.transport.refusal(x.entry); err != nil {
			return nil, err
		}
		targets[i] = x.targetOver(e, &asked)
	}
	return x.candidates(ctx, configured, targets, hops, 0)
}

// remoteName returns what the gateways of p are asked for, and whether that is known.
func (x *resolution) remoteName(p *Location) (asked Endpoint, known bool) {
	switch {
	case x.rule != nil || namesNothing(x.req) || x.req.Addr.IsValid() && x.match.endpoints == nil: // it has another name there; and of a VIP of ours nobody has heard
		name, known := x.entry.primaryName()
		return Endpoint{Host: name.String()}, known
	case x.req.Addr.IsValid():
		return Endpoint{Addr: x.req.Addr}, true
	}
	return Endpoint{Host: x.req.Host()}, true
}

// ofDatagrams reports whether the request is for datagrams.
func (x *resolution) ofDatagrams() bool {
	return x.req.Datagrams != nil || x.req.Proto == "quic" || x.req.Proto == "udp"
}

// asks reports whether the gateway e can be asked for the request; known says whether
// there is a name to ask for.
func (x *resolution) asks(e *GatewayHop, known bool) bool {
	return known && x.port != 0 && e.proxies() && (!x.ofDatagrams() || e.carriesDatagrams())
}

// readsHello reports whether e reads the name in the hello, which goes there as it came. Where
// a rule has chosen a backend, what the hello names may lead elsewhere there.
func (x *resolution) readsHello(e *GatewayHop, known bool) bool {
	return x.req.Proto == "sni" && e.Gateway.Supports("sni") && (x.rule == nil || !x.asks(e, known))
}

// remoteHops returns the gateways of p that can be used, those of the nearest network
// first, and of one network beginning with the one whose turn it is.
func (x *resolution) remoteHops(p *Location, known bool) (hops []*GatewayHop) {
	usable := func(e *GatewayHop) bool { return x.asks(e, known) || x.readsHello(e, known) }
	for from := 0; from < len(p.Gateways); {
		to := from
		for to < len(p.Gateways) && p.Gateways[to].Rank == p.Gateways[from].Rank {
			to++
		}
		hops = append(hops, rotateByWeight(p.Gateways[from:to], usable, x.turn)...)
		from = to
	}
	return hops
}

// targetOver returns what the gateway e is asked for.
func (x *resolution) targetOver(e *GatewayHop, asked *Endpoint) tunnel.Endpoint {
	target := x.target(asked, x.port, e.transport.Transport)
	target.HealthKey = e.Address.String()
	if x.payload == encrypted {
		return target
	}
	if hop, permitted := e.weak(); hop != nil {
		x.restrict(&target, permitted, &insecureError{service: x.entry.Name, network: e.Network, hop: hop})
	}
	return target
}

// errNoName refuses a request for which the gateways have no name to be asked for.
func errNoName(req *tunnel.Request, f match, p *Location) error {
	return tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: service %q has no name to ask the gateways of network %q for", req.Target(), f.entry.Name, p.remote.Name)
}

// errNoGateway refuses a request that no gateway of p can be asked for, and says why.
func errNoGateway(req *tunnel.Request, f match, p *Location, known bool) error {
	lead := slices.ContainsFunc(p.Gateways, func(e GatewayHop) bool { return !e.via && e.Gateway.HasCarriers() })
	switch {
	case lead && !known:
		return errNoName(req, f, p)
	case lead && f.port == 0:
		return tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: service %q has no port to ask the gateways of network %q for and none was asked for: list the service's ports", req.Target(), f.entry.Name, p.remote.Name)
	case lead:
		return tunnel.Refusef(tunnel.Unsupported, "registry: %q: service %q is in network %q, and there is no way to its gateways but by SNI", req.Target(), f.entry.Name, p.remote.Name)
	}
	var take []string
	for _, e := range p.Gateways {
		if e.Network != p.remote.Name {
			continue
		}
		take = union(take, e.Gateway.Protocols())
	}
	return tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: service %q is in network %q, whose gateways take %s: a %s request can't go there unless one of them has %s among its transports, or the network a via",
		req.Target(), f.entry.Name, p.remote.Name, strings.Join(take, ", "), req.Proto, proxyTransportList)
}
