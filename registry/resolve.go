package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

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
	route := tunnel.Route{
		Service:           f.entry.Name,
		Pattern:           f.pattern,
		Generation:        s.table.Generation(),
		IdleTimeout:       f.entry.IdleTimeout,
		HalfClosedTimeout: f.entry.HalfClosedTimeout,
		Report:            r.health.report,
	}
	turn := f.entry.index
	if f.rule != nil {
		turn, route.Service = f.turn, f.rule.Name
		if f.rule.IdleTimeout != 0 {
			route.IdleTimeout = f.rule.IdleTimeout
		}
	}
	if r.Dialer != nil {
		way, err := r.Dialer(f.entry.Service)
		if err != nil {
			return tunnel.Route{}, &tunnel.Error{Reason: tunnel.Internal, Err: fmt.Errorf("registry: the way to service %q of %s: %w", f.entry.Name, orUnknown(f.entry.Origin), err)}
		}
		route.Dialer = way
	}
	if f.endpoint.IsValid() {
		route.Pattern = f.endpoint.String()
	}
	n := s.turns[turn].Add(1) - 1
	if len(f.entry.Via) > 0 {
		return r.resolveVia(req, f, route, f.entry.servingPort(f.entry.Endpoints, f.port), n)
	}
	configured, beyond := s.table.reach(f, s.table.here)
	if len(beyond) > 0 {
		return r.resolveRemote(ctx, req, s.table, f, route, n)
	}
	if f.endpoint.IsValid() {
		route.Endpoints = []tunnel.Endpoint{{Addr: f.endpoint, Named: true}}
		return route, s.table.protect(req, f, nil, &route)
	}
	if f.endpoints == nil {
		configured = f.entry.servingPort(configured, f.port)
	}
	eps, err := r.candidates(ctx, req, f, configured, n)
	if err != nil {
		return tunnel.Route{}, err
	}
	r.health.order(eps)
	route.Endpoints = eps
	if err := s.table.protect(req, f, configured, &route); err != nil {
		return tunnel.Route{}, err
	}
	return route, nil
}

// find finds the service of a request: of all, or of those of a section.
func (s *state) find(req *tunnel.Request) (match, *tunnel.Error) {
	if s.table.listenerOnly(req) {
		return s.findByRule(req)
	}
	return s.table.findVisible(req)
}

// resolveVia completes the route of a service behind further gateways. Its
// endpoints are names and addresses there, so nothing is looked up, and what
// becomes of a dial says nothing of an address.
func (r *Registry) resolveVia(req *tunnel.Request, f match, route tunnel.Route, configured []Endpoint, turn uint32) (tunnel.Route, error) {
	if route.Dialer == nil {
		return tunnel.Route{}, tunnel.Refusef(tunnel.Unsupported, "registry: service %q of %s is behind another gateway, and there is no way there", f.entry.Name, orUnknown(f.entry.Origin))
	}
	route.Report = nil
	if to, clear := InsecureVia(f.entry.Via); clear { // of the service's own, and not its network's
		refusal, inside := insecureHop(req, f, to), payloadOf(req, f.entry.Service)
		if inside == plaintext {
			return tunnel.Route{}, refusal
		}
		route.TLSOnly = inside.tlsOnly(refusal)
	}
	if f.endpoints != nil {
		configured = f.endpoints
	}
	if len(configured) == 0 {
		configured = []Endpoint{{Host: req.Host(), Addr: req.Addr}}
		if f.vip || f.rule != nil {
			name, ok := f.entry.primaryName()
			if !ok {
				return tunnel.Route{}, tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: service %q has no name to ask the next gateway for", req.Target(), f.entry.Name)
			}
			configured[0] = Endpoint{Host: name.String()}
		}
	}
	n := uint32(len(configured))
	for i := range n {
		c := &configured[(turn+i)%n]
		port := cmp.Or(c.Port, f.port)
		if port == 0 {
			return tunnel.Route{}, tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: service %q has no port to ask the next gateway for and none was asked for: list the service's ports", req.Target(), f.entry.Name)
		}
		ep := tunnel.Endpoint{Addr: netip.AddrPortFrom(c.Addr.Unmap(), port), Named: true}
		if !c.Addr.IsValid() {
			ep.Host = c.Host
		}
		route.Endpoints = append(route.Endpoints, ep)
	}
	return route, nil
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

// rotateByWeight returns the addresses of the gateways that can be asked in some way,
// beginning with the one whose turn it is by weight.
func rotateByWeight(entries []GatewayHop, by func(*GatewayHop) string, turn uint32) []Endpoint {
	var eps []Endpoint
	var weights []uint32
	total := uint32(0)
	for i := range entries {
		e := &entries[i]
		if by(e) == "" {
			continue
		}
		w := uint32(cmp.Or(e.Gateway.Weight, 1))
		eps, weights, total = append(eps, e.Address), append(weights, w), total+w
	}
	if len(eps) < 2 {
		return eps
	}
	first, at := 0, turn%total
	for at >= weights[first] {
		at -= weights[first]
		first++
	}
	return append(eps[first:len(eps):len(eps)], eps[:first]...)
}

// candidates returns every address of the service, beginning with the
// endpoint whose turn it is. The second address of a DNS name comes after the
// first of every other endpoint, so that few tries reach many hosts.
func (r *Registry) candidates(ctx context.Context, req *tunnel.Request, f match, configured []Endpoint, turn uint32) ([]tunnel.Endpoint, error) {
	n := uint32(len(configured))
	if n == 0 {
		return nil, tunnel.Refusef(tunnel.NoEndpoint, "registry: service %q of %s has no endpoint", f.entry.Name, orUnknown(f.entry.Origin))
	}
	answers, failed := r.lookupAll(ctx, configured)
	var refused error
	for i, a := range answers {
		if configured[i].Guarded {
			var err error
			if a, err = r.guard(&configured[i], a); err != nil {
				refused = err
			}
		}
		answers[i] = arrange(a, turn/n, IsLocalhost(configured[i].Host))
	}
	eps := make([]tunnel.Endpoint, 0, n)
	portless := false
	for row, more := 0, true; more; row++ {
		more = false
		for i := range n {
			at := (turn + i) % n
			c := &configured[at]
			port := cmp.Or(c.Port, f.port)
			switch {
			case port == 0:
				portless = true
			case c.Addr.IsValid():
				if row == 0 {
					eps = append(eps, tunnel.Endpoint{Addr: netip.AddrPortFrom(c.Addr.Unmap(), port), Named: true})
				}
			case row < len(answers[at]):
				eps = append(eps, tunnel.Endpoint{
					Addr:  netip.AddrPortFrom(answers[at][row], port),
					Host:  c.Host,
					Named: IsLocalhost(c.Host),
				})
				more = more || row+1 < len(answers[at])
			}
		}
	}
	switch {
	case len(eps) > 0:
		return eps, nil
	case refused != nil:
		return nil, tunnel.Refusef(tunnel.Prohibited, "registry: service %q of %s: %w", f.entry.Name, orUnknown(f.entry.Origin), refused)
	case portless:
		return nil, tunnel.Refusef(tunnel.NoEndpoint, "registry: %q: the endpoints of service %q have no port and none was asked for: give them one, or list the service's ports", req.Target(), f.entry.Name)
	}
	reason := tunnel.LookupError
	if failed.timeouts == failed.all && failed.all > 0 {
		reason = tunnel.LookupTime
	}
	return nil, tunnel.Refusef(reason, "registry: no endpoint of service %q has an address: %w", f.entry.Name, errors.Join(failed.errs...))
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

// failures are the lookups that went wrong.
type failures struct {
	errs          []error
	all, timeouts int
}

func (f *failures) add(host string, err error) {
	f.errs = append(f.errs, fmt.Errorf("lookup of %q: %w", host, err))
	f.all++
	var t interface{ Timeout() bool }
	if errors.As(err, &t) && t.Timeout() {
		f.timeouts++
	}
}

// lookupAll looks up each DNS name once. The answers are in the order of their
// endpoints; there are none if no endpoint has a DNS name.
func (r *Registry) lookupAll(ctx context.Context, eps []Endpoint) (answers [][]netip.Addr, failed failures) {
	type lookup struct {
		addrs []netip.Addr
		err   error
	}
	var byHost map[string]*lookup
	for _, ep := range eps {
		if ep.Addr.IsValid() {
			continue
		}
		if byHost == nil {
			byHost = map[string]*lookup{}
		}
		byHost[ep.Host] = &lookup{}
	}
	if len(byHost) == 0 {
		return nil, failed
	}
	var wg sync.WaitGroup
	for host, l := range byHost {
		if len(byHost) == 1 {
			l.addrs, l.err = r.lookup(ctx, host)
			break
		}
		wg.Go(func() {
			defer func() {
				if v := recover(); v != nil {
					l.err = tunnel.Caught(v)
				}
			}()
			l.addrs, l.err = r.lookup(ctx, host)
		})
	}
	wg.Wait()

	answers = make([][]netip.Addr, len(eps))
	for i, ep := range eps {
		l := byHost[ep.Host]
		if ep.Addr.IsValid() || l == nil {
			continue
		}
		answers[i] = l.addrs
		if l.err != nil {
			failed.add(ep.Host, l.err)
			l.err = nil // once is enough
		}
	}
	return answers, failed
}

var localhost = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}

// IsLocalhost reports whether host is a loopback address by definition, RFC 6761
// section 6.3. DNS is not asked, which could answer anything.
func IsLocalhost(host string) bool {
	return host == "localhost" || strings.HasSuffix(host, ".localhost")
}

func (r *Registry) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	if IsLocalhost(host) {
		return localhost, nil
	}
	if r.Lookup == nil {
		return nil, errors.New("no DNS resolver is configured")
	}
	addrs, err := r.Lookup(ctx, host)
	if err == nil && len(addrs) == 0 {
		err = errors.New("the name has no address")
	}
	return addrs, err
}

// arrange orders the addresses of one answer: those of a family take turns,
// and the families alternate, beginning with that of the first address. The
// answer itself belongs to the cache and stays as it is.
func arrange(answer []netip.Addr, turn uint32, fixed bool) []netip.Addr {
	if len(answer) < 2 && !slices.ContainsFunc(answer, netip.Addr.Is4In6) || fixed {
		return answer
	}
	var families [2][]netip.Addr // the first address's, the other
	for _, a := range answer {
		a = a.Unmap()
		i := 0
		if a.Is4() != answer[0].Unmap().Is4() {
			i = 1
		}
		families[i] = append(families[i], a)
	}
	out := make([]netip.Addr, 0, len(answer))
	for i := uint32(0); len(out) < len(answer); i++ {
		for _, f := range families {
			if n := uint32(len(f)); i < n {
				out = append(out, f[(turn+i)%n])
			}
		}
	}
	return out
}
