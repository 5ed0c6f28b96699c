package registry

import (
	"fmt"
	"time"

	"culvert.dev/tunnel"
)

// A Choice says how the endpoints of a route came to be in their order.
type Choice struct {
	Policy    string
	Client    string        // whose hash counts, or who keeps an endpoint; "" where neither is so
	StickyFor time.Duration // 0 where clients keep no endpoint
	Zone      string        // the gateway's own, where its endpoints are preferred
	Endpoints []EndpointChoice
}

// An EndpointChoice is what counted for one endpoint of a route.
type EndpointChoice struct {
	Weight  int    // 0 where there are no weights
	Tunnels int64  // open or being dialed; -1 where they are not counted
	Why     string // what speaks for the endpoint, or against it; "" for nothing
}

// Explain says how the endpoints of a route, which Resolve has returned for req, came to
// be in their order. It is for people.
func (r *Registry) Explain(req *tunnel.Request, route *tunnel.Route) Choice {
	c := Choice{Policy: RoundRobin, Endpoints: make([]EndpointChoice, len(route.Endpoints))}
	unhealthy := make([]bool, len(route.Endpoints))
	r.health.unhealthy(route.Endpoints, r.checkOf(req), func(i int) { unhealthy[i] = true })
	isEjected := make([]bool, len(route.Endpoints))
	eachEjected(route.Endpoints, func(i int) { isEjected[i] = true })
	b, ok := route.Balancer.(*balance)
	if !ok {
		b = &balance{policy: RoundRobin, service: &Service{}}
	}
	c.Policy, c.StickyFor, c.Zone = b.policy, b.stickyFor, b.zone
	client, known := clientOf(req)
	var kept uint64
	var left time.Duration
	if known && (b.policy == SourceHash || b.stickyFor > 0) {
		c.Client = clientText(req)
		if b.stickyFor > 0 {
			now := time.Now()
			kept, left = b.state.sticky.find(client, b.stickyFor, now), b.state.sticky.left(client, b.stickyFor, now)
		}
	}
	for i := range route.Endpoints {
		ep, to := &route.Endpoints[i], &c.Endpoints[i]
		configured := b.configured(ep)
		to.Tunnels = -1
		if ep.Load != nil {
			to.Tunnels = ep.Load.Tunnels()
		}
		if configured != nil {
			to.Weight = int(configured.weight())
		}
		switch {
		case isEjected[i]:
			to.Why = "ejected"
		case unhealthy[i]:
			to.Why = "unhealthy"
		case kept != 0 && kept == hashOf(ep):
			to.Why = fmt.Sprintf("the client's endpoint, for %v more", left.Round(time.Second))
		case b.spread.isLater(configured):
			to.Why = "in another network"
		case b.zone != "" && configured != nil && configured.Zone == b.zone:
			to.Why = "in the gateway's zone"
		case b.zone != "" && configured != nil && configured.Zone != "":
			to.Why = "in zone " + configured.Zone
		}
		if i > 0 || unhealthy[i] || kept != 0 && kept == hashOf(ep) || len(route.Endpoints) < 2 {
			continue
		}
		why := map[string]string{RoundRobin: "its turn", LeastConnections: "fewest tunnels for its weight", SourceHash: "first by the client's hash"}[b.policy]
		switch {
		case b.policy == SourceHash && !known:
			why = "its turn, as the client's address is not known"
		case b.policy == LeastConnections && len(route.Endpoints) > maxCompared:
			why = "fewer tunnels for its weight than another one at random"
		}
		if to.Why != "" {
			why += ", " + to.Why
		}
		to.Why = why
	}
	return c
}

// checkOf returns the check of the service of req; that of a rule's backend is not known.
func (r *Registry) checkOf(req *tunnel.Request) Check {
	t := r.Table()
	if t.listenerOnly(req) {
		return Check{}
	}
	m, err := t.findVisible(req)
	if err == nil && m.entry.spread != nil {
		return m.entry.Check
	}
	if err != nil || t.here >= 0 && len(m.entry.Via) == 0 && !t.direct(m.entry.home, t.here) { // behind gateways
		return Check{}
	}
	return m.entry.Check
}

// configured returns the endpoint that ep is an address of; nil for none.
func (b *balance) configured(ep *tunnel.Endpoint) *Endpoint {
	for i := range b.service.Endpoints {
		c := &b.service.Endpoints[i]
		if c.Port != 0 && c.Port != ep.Addr.Port() {
			continue
		}
		if c.transports != nil || isBehind(ep.HealthKey) {
			if c.transports != nil && c.healthKey(ep.Addr.Port()) == ep.HealthKey {
				return c
			}
			continue
		}
		if c.Host != "" && c.Host == ep.Host || c.Addr.IsValid() && c.Addr.Unmap() == ep.Addr.Addr() {
			return c
		}
	}
	return nil
}

// clientText is clientOf for people.
func clientText(req *tunnel.Request) string {
	addr := req.Source.Addr().Unmap()
	bits := 32
	if addr.Is6() {
		bits = 64
	}
	p, _ := addr.WithZone("").Prefix(bits)
	return p.String()
}
