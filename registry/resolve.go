package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"

	"culvert.dev/tunnel"
)

// Resolve implements tunnel.Resolver: it finds the service by one table, asks
// whether the caller may have it, and returns its endpoints in the order to
// try. Every DNS name among them is looked up once, side by side; those that
// fail are left out as long as any address remains. A refusal is an
// *tunnel.Error; its text is for the operator and tells more than a stranger
// should know.
func (r *Registry) Resolve(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
	s := r.current.Load()
	if s == nil {
		s = &state{}
	}
	f, refusal := s.find(req)
	if refusal != nil {
		route := tunnel.Route{}
		if f.rule != nil { // whose share it was
			route.Service = f.rule.Name
		}
		return route, refusal
	}
	decision, refusal := f.authorize(s.table, req)
	if refusal != nil {
		return deniedRoute(s.table, &f, decision), refusal
	}
	route := tunnel.Route{
		Policy:            decision,
		Service:           f.entry.Name,
		Pattern:           f.pattern,
		Generation:        s.table.Generation(),
		IdleTimeout:       f.entry.IdleTimeout,
		HalfClosedTimeout: f.entry.HalfClosedTimeout,
		Limits:            f.entry.Limits,
		Report:            r.health.report,
	}
	counter := f.entry.index
	if f.rule != nil {
		counter, route.Service, route.Backend = f.turn, f.rule.Name, f.entry.Name
		if f.rule.IdleTimeout != 0 {
			route.IdleTimeout = f.rule.IdleTimeout
		}
	}
	if f.endpoint.IsValid() {
		route.Pattern = f.endpoint.String()
	}
	f.passthrough = speaksTLS(req)
	if f.entry.balance != nil {
		route.Balancer = f.entry.balance
	}
	x := resolution{Registry: r, table: s.table, req: req, match: f, payload: payloadOf(req, f.entry.Service), turn: s.nextTurn(counter)}
	eps, err := x.endpoints(ctx)
	if err == nil {
		eps, err = x.protect(eps)
	}
	if err != nil {
		return tunnel.Route{}, err
	}
	route.Endpoints = eps
	if x.unreported {
		route.Report = nil
	} else if r.health.n.Load() > 0 {
		route.Circuit = r.health.circuit
	}
	return route, nil
}

// deniedRoute is what is known of a request that policy denies.
func deniedRoute(t *Table, f *match, d *tunnel.PolicyDecision) tunnel.Route {
	route := tunnel.Route{Service: f.entry.Name, Pattern: f.pattern, Generation: t.Generation(), Policy: d}
	if f.rule != nil {
		route.Service, route.Backend = f.rule.Name, f.entry.Name
	}
	return route
}

// A resolution is one call of Resolve, for which a service was found.
type resolution struct {
	*Registry
	table *Table
	req   *tunnel.Request
	match
	payload    payload
	turn       uint32
	unreported bool // what becomes of a dial is not counted
	near       int  // of a spread, how many of the configured endpoints are used first
}

// endpoints returns the endpoints of the service in the order to try.
func (x *resolution) endpoints(ctx context.Context) ([]tunnel.Endpoint, error) {
	if len(x.entry.Via) > 0 {
		configured := x.entry.servingPort(x.entry.Endpoints, x.port)
		x.match.endpoints = x.permitted(x.match.endpoints)
		return x.behind(x.transport(), nil, x.permitted(configured))
	}
	if x.entry.spread != nil && x.match.endpoints == nil && !x.endpoint.IsValid() {
		return x.spreadOut(ctx)
	}
	configured, beyond := x.table.reach(x.match, x.table.here)
	if len(beyond) > 0 {
		if n := len(x.entry.Endpoints); len(x.permitted(x.entry.Endpoints)) < n {
			return nil, x.errEndpointsDenied("at some endpoints, and a gateway of another network chooses among them")
		}
		return x.remote(ctx)
	}
	if x.endpoint.IsValid() {
		ep := tunnel.Endpoint{Addr: x.endpoint, Named: true, Datagrams: x.ofDatagrams(), Transport: x.transport().Transport}
		x.restrictDirect(nil, &ep)
		x.count(&ep, nil)
		return []tunnel.Endpoint{ep}, x.transport().refusal(x.entry)
	}
	if x.match.endpoints == nil {
		configured = x.entry.servingPort(configured, x.port)
	}
	if n := len(configured); n > 0 {
		if configured = x.permitted(configured); len(configured) == 0 {
			return nil, x.errEndpointsDenied("at all endpoints that are in reach")
		}
	}
	return x.candidates(ctx, configured, nil, nil, x.turn)
}

// find finds the service of a request: of all, or of those of a section.
func (s *state) find(req *tunnel.Request) (match, *tunnel.Error) {
	if s.table.listenerOnly(req) {
		return s.findByRule(req)
	}
	return s.table.findVisible(req)
}

// behind returns the endpoints of a service behind further gateways, which transport
// leads over: those of its own via or, where network is not nil, of the network's. They
// are names and addresses there, so nothing is looked up, and what becomes of a dial
// says nothing of an address.
func (x *resolution) behind(transport *madeTransport, network *Network, configured []Endpoint) ([]tunnel.Endpoint, error) {
	x.unreported = true
	if err := transport.refusal(x.entry); err != nil {
		return nil, err
	}
	if transport == nil || transport.Transport == nil {
		return nil, tunnel.Refusef(tunnel.Unsupported, "registry: service %q of %s is behind another gateway, and there is no way there", x.entry.Name, orUnknown(x.entry.Origin))
	}
	if x.match.endpoints != nil {
		configured = x.match.endpoints
	}
	if len(configured) == 0 {
		configured = []Endpoint{{Host: x.req.Host(), Addr: x.req.Addr}}
		if x.vip || x.rule != nil || namesNothing(x.req) {
			name, ok := x.entry.primaryName()
			if !ok {
				return nil, tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: service %q has no name to ask the next gateway for", x.req.Target(), x.entry.Name)
			}
			configured[0] = Endpoint{Host: name.String()}
		}
	}
	permitted, why := x.insecureBehind(network)
	n := uint32(len(configured))
	eps := make([]tunnel.Endpoint, n)
	turn := x.turn
	var few [16]contender
	var all []contender // nil where the endpoints take turns
	if x.balanced() && n > 1 {
		if turn, all = 0, few[:0]; n > uint32(len(few)) {
			all = make([]contender, 0, n)
		}
	}
	for i := range n {
		c := &configured[(turn+i)%n]
		port := cmp.Or(c.Port, x.port)
		if port == 0 {
			return nil, tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: service %q has no port to ask the next gateway for and none was asked for: list the service's ports", x.req.Target(), x.entry.Name)
		}
		eps[i] = x.target(c, port, transport.Transport)
		x.count(&eps[i], c)
		if why != nil {
			x.restrict(&eps[i], permitted, why)
		}
		if all != nil {
			all = append(all, x.entry.balance.contenderOf(c, nil))
		}
	}
	if all != nil {
		if eps = eps[:x.choose(eps, all, x.check(false))]; len(eps) == 0 {
			return nil, x.errAllDraining()
		}
	}
	return eps, nil
}

// insecureBehind returns why plaintext must not go over the hops of the service or, where
// it is not nil, of network, and whether they or the network permit it all the same. It
// is nil where there is no such reason.
func (x *resolution) insecureBehind(network *Network) (permitted bool, why *insecureError) {
	if x.payload == encrypted {
		return false, nil
	}
	why = &insecureError{service: x.entry.Name}
	via := x.entry.Via
	if network != nil {
		via, why.network, permitted = network.Via, network.Name, network.Insecure
	}
	if why.hop = weakVia(via); why.hop == nil {
		return false, nil
	}
	return permitted || via[len(via)-1].Insecure, why
}

// target returns the endpoint c as a next hop is asked for it.
func (x *resolution) target(c *Endpoint, port uint16, transport tunnel.Transport) tunnel.Endpoint {
	ep := tunnel.Endpoint{Addr: netip.AddrPortFrom(c.Addr.Unmap(), port), Named: true, Transport: transport}
	switch {
	case c.Group != "":
		ep.Host = c.Group
	case !c.Addr.IsValid():
		ep.Host = c.Host
	}
	return ep
}

// primaryName returns a name of e that is no wildcard. A service that several clusters export has
// the name of the cluster set only.
func (e *serviceEntry) primaryName() (tunnel.Name, bool) {
	for _, p := range e.Names {
		if !p.Wildcard {
			return p.Suffix, true
		}
	}
	if e.ID.Service != "" && e.ID.Cluster == "" {
		name, err := e.ID.SetName()
		return name, err == nil
	}
	return tunnel.Name{}, false
}

// rotateByWeight returns the gateways that usable accepts, beginning with the one
// whose turn it is by weight.
func rotateByWeight(entries []GatewayHop, usable func(*GatewayHop) bool, turn uint32) []*GatewayHop {
	var hops []*GatewayHop
	var weights []uint32
	total := uint32(0)
	for i := range entries {
		e := &entries[i]
		if !usable(e) {
			continue
		}
		w := uint32(cmp.Or(e.Gateway.Weight, 1))
		hops, weights, total = append(hops, e), append(weights, w), total+w
	}
	if len(hops) < 2 {
		return hops
	}
	first, at := 0, turn%total
	for at >= weights[first] {
		at -= weights[first]
		first++
	}
	return append(hops[first:len(hops):len(hops)], hops[:first]...)
}

// candidates returns every address of the configured endpoints, beginning with the
// one whose turn it is. The second address of a DNS name comes after the
// first of every other endpoint, so that few tries reach many hosts. Those that
// have failed come last.
//
// A service with a balance has the order of that instead.
//
// For a zero Endpoint stands that of the same index in targets, which a next hop is
// asked for. Where there are targets, there are hops: the gateways that configured are,
// or that targets lead over; nil for an endpoint.
func (x *resolution) candidates(ctx context.Context, configured []Endpoint, targets []tunnel.Endpoint, hops []*GatewayHop, turn uint32) ([]tunnel.Endpoint, error) {
	n := uint32(len(configured))
	if n == 0 {
		return nil, tunnel.Refusef(tunnel.NoEndpoint, "registry: service %q of %s has no endpoint", x.entry.Name, orUnknown(x.entry.Origin))
	}
	if err := x.transport().refusal(x.entry); err != nil {
		return nil, err
	}
	answers, failed, refused := x.allowedAnswers(ctx, configured, turn/n)
	eps := make([]tunnel.Endpoint, 0, n)
	var few [16]contender
	var all []contender // nil where the endpoints take turns
	if x.balanced() {
		if turn, all = 0, few[:0]; n > uint32(len(few)) {
			all = make([]contender, 0, n)
		}
	}
	portless := false
	for row, more := 0, true; more; row++ {
		more = false
		for i := range n {
			at := (turn + i) % n
			c := &configured[at]
			var hop *GatewayHop
			if hops != nil {
				hop = hops[at]
			}
			if *c == (Endpoint{}) {
				if row == 0 {
					eps = append(eps, targets[at])
					x.count(&eps[len(eps)-1], nil)
					if all != nil {
						all = append(all, x.contenderOf(c, hop, int(at)))
					}
				}
				continue
			}
			var found []netip.Addr
			if answers != nil {
				found = answers[at]
			}
			ep, ok, err := x.endpointOf(c, hop, found, row)
			switch {
			case err != nil:
				return nil, err
			case !ok:
				portless = portless || ep.Addr.Port() == 0
				continue
			}
			more = more || row+1 < len(found)
			x.count(&ep, c)
			eps = append(eps, ep)
			if all != nil {
				one := x.contenderOf(c, hop, int(at))
				if !c.Addr.IsValid() && !c.isBehind() {
					one.divide(found, row, IsLocalhost(c.Host))
				}
				all = append(all, one)
			}
		}
	}
	if all != nil && len(eps) > 0 {
		if eps = eps[:x.choose(eps, all, x.check(hops != nil && x.near == 0))]; len(eps) == 0 {
			return nil, x.errAllDraining()
		}
	}
	if len(eps) > 0 {
		x.health.order(eps, x.check(hops != nil && x.near == 0))
		return eps, nil
	}
	return nil, x.errNoCandidate(refused, portless, failed)
}

// allowedAnswers looks up the names of endpoints. It returns the addresses of each in the order to
// dial, without those that a guard refuses, and the error of the last refusal.
func (x *resolution) allowedAnswers(ctx context.Context, configured []Endpoint, turn uint32) (answers [][]netip.Addr, failed failures, refused error) {
	answers, failed = x.lookupAll(ctx, configured)
	for i, a := range answers {
		if configured[i].Guarded {
			var err error
			if a, err = x.guard(&configured[i], a); err != nil {
				refused = err
			}
		}
		answers[i] = arrange(a, turn, IsLocalhost(configured[i].Host))
	}
	return answers, failed, refused
}

// endpointOf returns c as it is dialed. An endpoint by name has the address with the number row among
// those that were found for its name; all others have one address, of row 0. It is not ok where there
// is none of that number, or no port.
func (x *resolution) endpointOf(c *Endpoint, hop *GatewayHop, found []netip.Addr, row int) (ep tunnel.Endpoint, ok bool, err error) {
	ep = tunnel.Endpoint{Addr: netip.AddrPortFrom(c.Addr.Unmap(), cmp.Or(c.Port, x.port)), Named: true, Datagrams: x.ofDatagrams(), Transport: x.transport().Transport}
	if c.Group != "" && ep.Addr.Port() == 0 { // a hello has no port, and a connector may not care
		ep.Addr = netip.AddrPortFrom(netip.Addr{}, x.req.LocalPort)
	}
	behind := c.isBehind()
	rows := 1
	if !behind && !c.Addr.IsValid() {
		rows = len(found)
	}
	switch {
	case ep.Addr.Port() == 0 || row >= rows:
		return ep, false, nil
	case behind:
		if ep, err = x.endpointBehind(c, ep.Addr.Port()); err != nil {
			return ep, false, err
		}
	case !c.Addr.IsValid():
		ep.Addr, ep.Host, ep.Named = netip.AddrPortFrom(found[row], ep.Addr.Port()), c.Host, IsLocalhost(c.Host)
	}
	switch {
	case hop == nil && !behind:
		x.restrictDirect(c, &ep)
	case hop != nil && x.near > 0:
		ep.HealthKey = ep.Addr.String()
	}
	return ep, true, nil
}

// errNoCandidate is the refusal of a service that has endpoints, of which none can be dialed.
func (x *resolution) errNoCandidate(refused error, portless bool, failed failures) error {
	switch {
	case refused != nil:
		return tunnel.Refusef(tunnel.Prohibited, "registry: service %q of %s: %w", x.entry.Name, orUnknown(x.entry.Origin), refused)
	case portless:
		return tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: the endpoints of service %q have no port and none was asked for: give them one, or list the service's ports", x.req.Target(), x.entry.Name)
	}
	reason := tunnel.LookupError
	if failed.timeouts == failed.all && failed.all > 0 {
		reason = tunnel.LookupTime
	}
	return tunnel.Refusef(reason, "registry: no endpoint of service %q has an address: %w", x.entry.Name, errors.Join(failed.errs...))
}

// guard returns those addresses of a Guarded endpoint's name that are not
// refused, and why the first of the others is.
func (r *Registry) guard(ep *Endpoint, addrs []netip.Addr) (allowed []netip.Addr, err error) {
	for _, a := range addrs {
		why := r.RefusesGuarded(a)
		if why == "" {
			allowed = append(allowed, a)
		} else if err == nil {
			err = fmt.Errorf("%q has the address %s: %s", ep.Host, a, why)
		}
	}
	return allowed, err
}

// RefusesGuarded returns why an endpoint that is Guarded may not be at a, or "".
func (r *Registry) RefusesGuarded(a netip.Addr) string {
	if r.Refuses == nil {
		return "it is not known which addresses are allowed"
	}
	return r.Refuses(a.Unmap())
}
