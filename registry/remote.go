package registry

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/tunnel"
)

// proxyTransports are the transports by which a gateway can be asked for a service
// when only its address is known, the best first: connect-h2 shares connections, and
// socks5 does not let a gateway see a loop.
var proxyTransports = [...]string{"connect-h2", "connect", "socks5"}

const proxyTransportList = "connect-h2, connect or socks5"

// ProxyTransport returns the transport by which the gateway is asked for requests
// that do not come by SNI, where its network has no Via: the first that it supports
// of connect-h2, connect and socks5, or "".
func (g *Gateway) ProxyTransport() string {
	for _, transport := range proxyTransports {
		if g.Supports(transport) {
			return transport
		}
	}
	return ""
}

// A RemoteDial says how one request is dialed in another network: the endpoints of
// its route are gateways.
type RemoteDial struct {
	Target tunnel.Endpoint // that the gateways are asked for: a Host or an address, and a port

	// Transport returns how the gateway at an endpoint is asked: its ProxyTransport,
	// or "sni", where bytes are passed on as they come.
	Transport func(tunnel.Endpoint) string
}

// ReportDial reports the result of a dial of ep by another dialer than the Router's:
// nil for one that worked.
func (r *Registry) ReportDial(ep tunnel.Endpoint, err error) { r.health.report(ep, err) }

// resolveRemote completes the route of a service in other networks than ours: through
// the Via of the nearest one, or to its gateways, by SNI, where they read the name
// again, or by another transport that they support.
func (r *Registry) resolveRemote(ctx context.Context, req *tunnel.Request, t *Table, f match, route tunnel.Route, turn uint32) (tunnel.Route, error) {
	p := t.locate(f, t.here)
	asked, known := Endpoint{Host: req.Host()}, true
	if f.rule != nil || req.Addr.IsValid() && f.endpoints == nil { // it has another name there; and of a VIP of ours nobody has heard
		var name tunnel.Name
		if name, known = f.entry.primaryName(); !known && (f.rule == nil || len(p.remote.Via) > 0) {
			return tunnel.Route{}, errNoName(req, f, &p)
		}
		asked.Host = name.String()
	} else if req.Addr.IsValid() {
		asked = Endpoint{Addr: req.Addr}
	}
	inside := payloadOf(req, f.entry.Service)
	plain := inside == plaintext
	if len(p.remote.Via) > 0 {
		if to, clear := p.remote.cleartextVia(); clear {
			refusal := insecure(req, f, p.remote, to)
			if plain {
				return tunnel.Route{}, refusal
			}
			route.TLSOnly = inside.tlsOnly(refusal)
		}
		s := *f.entry.Service
		s.Via = p.remote.Via
		if r.Dialer != nil {
			way, err := r.Dialer(&s)
			if err != nil {
				return tunnel.Route{}, &tunnel.Error{Reason: tunnel.Internal, Err: fmt.Errorf("registry: the way to network %q: %w", p.remote.Name, err)}
			}
			route.Dialer = way
		}
		return r.resolveVia(req, f, route, []Endpoint{asked}, turn)
	}
	if req.Datagrams != nil || req.Proto == "quic" || req.Proto == "udp" {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: service %q is in network %q: gateways pass on streams, and a %s request is of datagrams", req.Target(), f.entry.Name, p.remote.Name, req.Proto)
	}
	hello, hops := req.Proto == "sni", r.RemoteDialer != nil && known && f.port != 0
	by := func(e *GatewayHop) string {
		if plain && !e.acceptsPlaintext() {
			return ""
		}
		hop := ""
		if hops && !e.via {
			hop = e.Gateway.ProxyTransport()
		}
		// A rule has chosen a backend, and what the hello names may lead elsewhere there.
		if hello && e.Gateway.Supports("sni") && (f.rule == nil || hop == "") {
			return "sni"
		}
		return hop
	}
	var gateways []Endpoint
	for from := 0; from < len(p.Gateways); {
		to := from
		for to < len(p.Gateways) && p.Gateways[to].Rank == p.Gateways[from].Rank {
			to++
		}
		gateways = append(gateways, rotateByWeight(p.Gateways[from:to], by, turn)...)
		from = to
	}
	if len(gateways) == 0 && plain && hops {
		if to, clear := p.cleartextGateway(); clear {
			return tunnel.Route{}, insecure(req, f, p.remote, to)
		}
	}
	if len(gateways) == 0 {
		return tunnel.Route{}, errNoGateway(req, f, &p, known)
	}
	if p.hasGatewayAt(req.Source.Addr()) {
		return tunnel.Route{}, tunnel.Refusef(tunnel.Loop, "registry: %q: service %q is in network %q, whose gateway %s asks for it here", req.Target(), f.entry.Name, p.remote.Name, req.Source.Addr())
	}
	eps, err := r.candidates(ctx, req, f, gateways, 0)
	if err != nil {
		return tunnel.Route{}, err
	}
	r.health.order(eps)
	route.Endpoints = eps
	byOf := func(ep tunnel.Endpoint) string { return p.transportOf(ep, by) }
	if inside == unknown {
		route.TLSOnly = p.tlsOnly(req, f, by)
	}
	if !slices.ContainsFunc(eps, func(ep tunnel.Endpoint) bool { return byOf(ep) != "sni" }) {
		return route, nil
	}
	target := tunnel.Endpoint{Addr: netip.AddrPortFrom(asked.Addr.Unmap(), f.port), Host: asked.Host, Named: true}
	if route.Dialer, err = r.RemoteDialer(f.entry.Service, RemoteDial{Target: target, Transport: byOf}); err != nil {
		return tunnel.Route{}, &tunnel.Error{Reason: tunnel.Internal, Err: fmt.Errorf("registry: the way to network %q: %w", p.remote.Name, err)}
	}
	route.Report = nil // a gateway that answers works, whatever it says: who dials it tells Dialed
	return route, nil
}

// transportOf returns how the gateway at ep, one of p's, is asked.
func (p *Location) transportOf(ep tunnel.Endpoint, transportOf func(*GatewayHop) string) string {
	if e := p.gatewayAt(ep, transportOf); e != nil {
		return transportOf(e)
	}
	return ""
}

// gatewayAt returns the gateway at ep if it can be asked, and nil otherwise.
func (p *Location) gatewayAt(ep tunnel.Endpoint, by func(*GatewayHop) string) *GatewayHop {
	for i := range p.Gateways {
		e := &p.Gateways[i]
		a := &e.Address
		if a.Host == ep.Host && a.Port == ep.Addr.Port() && (a.Host != "" || a.Addr.Unmap() == ep.Addr.Addr()) && by(e) != "" {
			return e
		}
	}
	return nil
}

// errNoName refuses a request for which the gateways have no name to be asked for.
func errNoName(req *tunnel.Request, f match, p *Location) error {
	return tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: service %q has no name to ask the gateways of network %q for", req.Target(), f.entry.Name, p.remote.Name)
}

// errNoGateway refuses a request that no gateway of p can be asked for, and says why.
func errNoGateway(req *tunnel.Request, f match, p *Location, known bool) error {
	lead := slices.ContainsFunc(p.Gateways, func(e GatewayHop) bool { return !e.via && e.Gateway.ProxyTransport() != "" })
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
		if len(e.Gateway.Transports) == 0 {
			take = union(take, []string{"sni"})
		}
		take = union(take, e.Gateway.Transports)
	}
	return tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: service %q is in network %q, whose gateways take %s: a %s request can't go there unless one of them has %s among its transports, or the network a via",
		req.Target(), f.entry.Name, p.remote.Name, strings.Join(take, ", "), req.Proto, proxyTransportList)
}
