package registry

import (
	"context"
	"errors"
	"net"
	"slices"

	"culvert.dev/tunnel"
)

// A spread is the endpoints of a service that are in several networks, as this gateway uses
// them: one list, in which those of a network are chosen where no nearer one is healthy.
type spread struct {
	endpoints []Endpoint // that are dialed from here: those used first, and then those of other networks
	first     int        // how many of endpoints are used first
	beyond    []int32    // the networks behind gateways, the nearest first
}

// spreadEndpoints sets e.spread, once e's endpoints are grouped. A choice among its
// endpoints needs a balance, also where they take turns.
func (b *builder) spreadEndpoints(e *serviceEntry) {
	if len(e.groups) == 0 && !e.hasVias {
		return
	}
	s := &spread{}
	s.endpoints, _ = b.reach(match{entry: e}, b.here)
	s.first, s.endpoints = len(s.endpoints), slices.Clip(s.endpoints)
	isFirst := func(in int32) bool {
		return slices.ContainsFunc(s.endpoints[:s.first], func(ep Endpoint) bool { return !ep.isBehind() && b.network(&ep) == in })
	}
	for i := range e.Endpoints {
		ep := &e.Endpoints[i]
		in := b.network(ep)
		switch {
		case ep.isBehind():
		case !b.direct(in, b.here):
			if !slices.Contains(s.beyond, in) {
				s.beyond = append(s.beyond, in)
			}
		case !isFirst(in):
			s.endpoints = append(s.endpoints, *ep)
		}
	}
	if s.first == 0 || s.first == len(s.endpoints) && len(s.beyond) == 0 {
		return
	}
	b.sortByDistance(s.beyond, b.here)
	e.spread = s
	if e.balance == nil {
		e.balance = &balance{policy: RoundRobin, service: e.Service}
	}
	e.balance.spread = s
}

// isLater reports whether c, or a gateway where it is nil, is used where nothing nearer is
// healthy.
func (s *spread) isLater(c *Endpoint) bool {
	return s != nil && (c == nil || !slices.ContainsFunc(s.endpoints[:s.first], func(ep Endpoint) bool {
		return ep.String() == c.String() && ep.Network == c.Network && ep.Via == c.Via
	}))
}

// spreadOut returns the endpoints of a service in several networks, of the nearest that
// has a healthy one first. The others follow, behind their gateways or directly.
func (x *resolution) spreadOut(ctx context.Context) ([]tunnel.Endpoint, error) {
	s := x.entry.spread
	near := x.entry.servingPort(s.endpoints[:s.first], x.port)
	n := len(near)
	configured := append(near[:n:n], x.entry.servingPort(s.endpoints[s.first:], x.port)...)
	targets, hops := make([]tunnel.Endpoint, len(configured)), make([]*GatewayHop, len(configured))
	if len(s.beyond) > 0 {
		p := x.table.locateBeyond(x.match, x.table.here, nil, s.beyond)
		if !p.hasGatewayAt(x.req.Source.Addr()) { // else it is asked for what is here
			x.appendRemote(&p, &configured, &targets, &hops)
		}
	}
	x.near = n
	return x.candidates(ctx, configured, targets, hops, 0)
}

// appendRemote appends what leads to the service in the networks of p. What cannot be used
// for the request is left out.
func (x *resolution) appendRemote(p *Location, configured *[]Endpoint, targets *[]tunnel.Endpoint, hops *[]*GatewayHop) {
	asked, known := x.remoteName(p)
	key := joinPort(x.entry.Name, x.port) + behindWord
	add := func(c Endpoint, target tunnel.Endpoint, hop *GatewayHop) {
		*configured, *targets, *hops = append(*configured, c), append(*targets, target), append(*hops, hop)
	}
	if len(p.remote.Via) > 0 {
		if t := p.remoteVia; known && x.port != 0 && t != nil && t.Transport != nil {
			target := x.target(&asked, x.port, NotFinal(t.Transport))
			target.HealthKey = key + hopsText(p.remote.Via)
			if permitted, why := x.insecureBehind(&p.remote.Network); why != nil {
				x.restrict(&target, permitted, why)
			}
			add(Endpoint{}, target, nil)
		}
		return
	}
	for _, e := range x.remoteHops(p, known) {
		if x.readsHello(e, known) {
			add(e.Address, tunnel.Endpoint{}, e)
			continue
		}
		if e.transport.Transport == nil {
			continue
		}
		target := x.targetOver(e, &asked)
		target.Transport, target.HealthKey = NotFinal(target.Transport), key+e.Address.String()
		add(Endpoint{}, target, e)
	}
}

// A notFinal is a Transport whose next hops refuse an endpoint, and not the request.
type notFinal struct{ tunnel.Transport }

// NotFinal returns t as the way to one of several endpoints that are reached in different
// ways. A gateway that refuses that one says nothing of the others, so they are tried.
// Equal transports have equal ones.
func NotFinal(t tunnel.Transport) tunnel.Transport { return notFinal{t} }

// Dial implements tunnel.Transport.
func (t notFinal) Dial(ctx context.Context, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	c, err := t.Transport.Dial(ctx, ep, req)
	if e, ok := errors.AsType[*tunnel.Error](err); ok && e.Final {
		switch e.Reason {
		case tunnel.NoRoute, tunnel.NotExposed, tunnel.Denied, tunnel.Prohibited, tunnel.Insecure:
			return nil, &tunnel.Error{Reason: e.Reason, Err: err, BehindHop: e.BehindHop}
		}
	}
	return c, err
}
