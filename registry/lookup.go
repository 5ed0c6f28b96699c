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

// A match is the service that a table has for a request.
type match struct {
	entry     *serviceEntry
	pattern   string
	port      uint16         // of the request, or the only port of the service; 0 if it is not known
	endpoint  netip.AddrPort // of the request if it names an endpoint by address, or zero
	endpoints []Endpoint     // the one endpoint of the entry that the request names; nil for all
	vip       bool           // the request names the service's VIP, which no other gateway knows
	rule      *compiledRule  // that has the entry as a backend; nil for none
	turn      int32          // the index of the backend's turn in the state
	policies  *policySets    // that decide on the request; nil where it was not asked for

	// passthrough says that the client speaks TLS with the service itself: the
	// gateway adds none of its own.
	passthrough bool
}

// Find returns the service of a request, whether or not its client may reach it. The
// error is a *tunnel.Error.
func (t *Table) Find(req *tunnel.Request) (Service, error) {
	f, err := t.find(req)
	if err != nil {
		return Service{}, err
	}
	return *f.entry.Service, nil
}

// findVisible finds the service of a request, and refuses a client that may not reach
// it. It does not allocate, errors apart.
func (t *Table) findVisible(req *tunnel.Request) (match, *tunnel.Error) {
	f, err := t.find(req)
	if err != nil {
		return match{}, err
	}
	if err := t.visible(f.entry, req); err != nil {
		return f, err
	}
	f.policies = &f.entry.policies
	return f, t.clientCerts.admits(f.entry, req)
}

// find finds the service of a request, without regard to the client.
func (t *Table) find(req *tunnel.Request) (match, *tunnel.Error) {
	switch {
	case t == nil:
		return match{}, tunnel.Refusef(tunnel.NoRoute, "registry: %q: no table is loaded yet", req.Target())
	case req.Addr.IsValid():
		return t.findAddr(req)
	case namesNothing(req) && readHello(req):
		return t.findNoSNI(req)
	case req.Name.IsZero():
		return match{}, tunnel.Refusef(tunnel.NoRoute, "registry: the request names no destination")
	}
	return t.findName(req)
}

func (t *Table) findName(req *tunnel.Request) (match, *tunnel.Error) {
	if req.Name.IsReserved() {
		return match{}, tunnel.Refusef(tunnel.NoRoute, "registry: %q: %s", req.Name, ReservedName)
	}
	m, ok, refusal := t.findHello(req)
	if refusal != nil {
		return match{}, refusal
	}
	if !ok {
		m, ok = t.matchName(req.Name)
	}
	if ok {
		return t.pick(m, req)
	}
	if f, ok, refusal := t.live.match(t, req); ok {
		return f, refusal
	}
	if len(t.catchAll) > 0 {
		return t.pick(nameMatch{claims: t.catchAll}, req)
	}
	return match{}, tunnel.Refusef(tunnel.NoRoute, "registry: no service is named %q; the routing table has %s", req.Name, count(len(t.services)))
}

// readHello reports whether a request was made of a ClientHello.
func readHello(req *tunnel.Request) bool {
	return req.Proto == "sni" || req.Proto == "quic" || req.Proto == "tls"
}

func (t *Table) findAddr(req *tunnel.Request) (match, *tunnel.Error) {
	a := normalAddr(req.Addr)
	if c, ok := t.byAddress[a]; ok {
		return t.pick(nameMatch{claims: c}, req)
	}
	if f, err, ok := t.findVIP(a, req); ok {
		return f, err
	}
	// Before endpoints: a client may not name loopback, even where a service has an
	// endpoint there.
	if why, bad := tunnel.Forbidden(req.Addr); bad {
		return match{}, tunnel.Refusef(tunnel.Prohibited, "registry: %q is prohibited: %s", req.Target(), why)
	}
	at := addrPortKeyOf(a, req.Port)
	first, ok := t.byEndpoint[at]
	if !ok {
		return match{}, tunnel.Refusef(tunnel.NoRoute, "registry: no service has the address %q; %s registered", req.Target(), count(len(t.services)))
	}
	e := &t.services[first]
	if t.visible(e, req) != nil {
		for _, i := range t.sharedEndpoints[at] {
			if t.visible(&t.services[i], req) == nil {
				e = &t.services[i]
				break
			}
		}
	}
	f := match{entry: e, port: req.Port, endpoint: netip.AddrPortFrom(a, req.Port)}
	for i := range e.Endpoints {
		if ep := &e.Endpoints[i]; ep.Addr.IsValid() && normalAddr(ep.Addr) == a && cmp.Or(ep.Port, ep.ServicePort, req.Port) == req.Port {
			f.endpoints = e.Endpoints[i : i+1 : i+1]
			break
		}
	}
	return f, nil
}

// pick chooses among the services of one pattern by port.
func (t *Table) pick(m nameMatch, req *tunnel.Request) (match, *tunnel.Error) {
	c, port := m.claims, req.Port
	if port == 0 {
		if len(c) == 1 {
			return t.resolveClaim(m, c[0], c[0].port, req)
		}
		port = req.LocalPort
	}
	at, ok := c.find(port)
	if ok && port != 0 {
		return t.resolveClaim(m, c[at], port, req)
	}
	if c[0].port == 0 {
		return t.resolveClaim(m, c[0], port, req)
	}
	ports := make([]string, 0, 8)
	for i := range c {
		if i == 8 {
			ports = append(ports, "...")
			break
		}
		ports = append(ports, fmt.Sprint(c[i].port))
	}
	list := strings.Join(ports, ", ")
	if req.Port == 0 {
		return match{}, tunnel.Refusef(tunnel.NoRoute, "registry: %q has the ports %s and none was asked for: listen on one of them (this is %d), or use a protocol that names the port", req.Host(), list, req.LocalPort)
	}
	return match{}, tunnel.Refusef(tunnel.NoRoute, "registry: %q has no port %d, it has %s", req.Host(), req.Port, list)
}

// matchOf returns the match of one claim. It is false where the name asks for an
// endpoint that the service does not have.
func (t *Table) matchOf(m nameMatch, c claim, port uint16) (match, bool) {
	f := match{entry: &t.services[c.service], pattern: c.pattern, port: port}
	if m.label != "" {
		f.endpoints = f.entry.endpointNamed(m.label, m.cluster, port)
		return f, f.endpoints != nil
	}
	return f, true
}

// resolveClaim returns the match of one claim, or refuses the request.
func (t *Table) resolveClaim(m nameMatch, c claim, port uint16, req *tunnel.Request) (match, *tunnel.Error) {
	f, ok := t.matchOf(m, c, port)
	if !ok {
		return match{}, tunnel.Refusef(tunnel.NoRoute, "registry: service %q has no endpoint %q at port %d", f.entry.Name, m.label, port)
	}
	return f, nil
}

// visible returns nil if e is exposed to the client and admits it, and the refusal
// otherwise.
func (t *Table) visible(e *serviceEntry, req *tunnel.Request) *tunnel.Error {
	if !e.Exposed {
		return tunnel.Refusef(tunnel.NotExposed, "registry: %q is service %q of %s, which is not exposed", req.Target(), e.Name, orUnknown(e.Origin))
	}
	if len(e.ExposedTo) > 0 {
		if network := t.prefixes.find(req.Source.Addr()); !t.exposedTo(e, network) {
			return tunnel.Refusef(tunnel.NotExposed, "registry: %q is service %q of %s, which is exposed to %q; the source %s is in %s",
				req.Target(), e.Name, orUnknown(e.Origin), e.ExposedTo, req.Source.Addr(), t.describeNetwork(network))
		}
	}
	return e.clients.admits(req, "service", e.Name, e.Origin)
}

// describeNetwork names the network of a client for people; -1 is none.
func (t *Table) describeNetwork(network int32) string {
	if network < 0 {
		return "no network"
	}
	return fmt.Sprintf("network %q", t.prefixes.names[network])
}

func count(n int) string {
	if n == 1 {
		return "1 service"
	}
	return fmt.Sprintf("%d services", n)
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
		if ep.Host == "" || ep.isBehind() {
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
		if ep.Host == "" || ep.isBehind() || l == nil {
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
