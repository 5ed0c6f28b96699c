package registry

import (
	"fmt"
	"net/netip"
	"slices"

	"culvert.dev/tunnel"
)

// A payload says what a tunnel is known to carry before it is dialed.
type payload int

const (
	encrypted payload = iota // a hello was read, or the gateway speaks TLS to the service
	unknown                  // what the client of a proxy protocol sends is its own to protect
	plaintext                // TLS ended here, or nothing is ever read, as of datagrams
)

// payloadOf returns the payload of a request for s.
func payloadOf(req *tunnel.Request, s *Service) payload {
	switch {
	case s.TLS != nil || speaksTLS(req):
		return encrypted
	case req.Proto == "tls" || req.Proto == "hbone" || req.Proto == "udp" || req.Proto == "connect-udp", req.Proto == "proxy" && req.TLS != nil:
		return plaintext
	}
	return unknown
}

// speaksTLS reports whether the client of req speaks TLS with the service: its hello was
// read, and is passed on.
func speaksTLS(req *tunnel.Request) bool { return req.Proto == "sni" || req.Proto == "quic" }

// A WeakHop is a gateway to which what may be plaintext does not go, as it is not reached
// by a tunnel.Mutual transport.
type WeakHop struct {
	Address  string
	Security tunnel.Security // less than Mutual
}

// Lacks says what the transport to h is without.
func (h *WeakHop) Lacks() string {
	if h.Security == tunnel.Plain {
		return "TLS"
	}
	return "credentials"
}

// An insecureError says why nothing but TLS may be carried to an endpoint: a hop, or
// the endpoint itself where hop is nil, is reached by a weak transport.
type insecureError struct {
	service, network string // network is "" where the service or the endpoint has the hop itself
	hop              *WeakHop
	group            string // of connectors, whose session is weak; hop is then nil
	endpoint         string // that has the hop itself, or is not behind one
}

func (e *insecureError) Error() string {
	switch {
	case e.group != "":
		return fmt.Sprintf("registry: service %q is served by the connectors of group %q, and what may be plaintext would go there on a session without TLS: have them connect to a listener with TLS, or say insecure: true of the service", e.service, e.group)
	case e.hop == nil:
		return fmt.Sprintf("registry: endpoint %s of service %q is in network %q, and what may be plaintext would go there unencrypted: have clients speak TLS to the service, give the network a via with TLS and credentials, or say insecure: true of it or of the service", e.endpoint, e.service, e.network)
	case e.network == "" && e.endpoint != "":
		return fmt.Sprintf("registry: endpoint %s of service %q is behind gateway %q, and what may be plaintext would go there without %s: use TLS and credentials in the endpoint's via, or say insecure: true of that hop or of the service", e.endpoint, e.service, e.hop.Address, e.hop.Lacks())
	case e.network == "":
		return fmt.Sprintf("registry: service %q is behind gateway %q, and what may be plaintext would go there without %s: use TLS and credentials in the service's via, or say insecure: true of that hop or of the service", e.service, e.hop.Address, e.hop.Lacks())
	}
	return fmt.Sprintf("registry: service %q is in network %q, and what may be plaintext would go to gateway %q there without %s: give the gateway transports, or the network a via, with TLS and credentials, or say insecure: true of the network or of the service", e.service, e.network, e.hop.Address, e.hop.Lacks())
}

// restrict has ep, which is reached by a weak transport, carry TLS alone. Where the
// configuration permits plaintext, ep says so instead.
func (x *resolution) restrict(ep *tunnel.Endpoint, permitted bool, why *insecureError) {
	switch {
	case x.payload == encrypted:
	case permitted || x.entry.Insecure:
		ep.Insecure = true
	default:
		ep.TLSOnly = why
	}
}

// protect leaves out the endpoints to which plaintext may not go, where the payload is
// plaintext. Where that is not known, they come last.
func (x *resolution) protect(eps []tunnel.Endpoint) ([]tunnel.Endpoint, error) {
	if x.payload != plaintext {
		slices.SortStableFunc(eps, func(a, b tunnel.Endpoint) int {
			switch {
			case (a.TLSOnly == nil) == (b.TLSOnly == nil):
				return 0
			case a.TLSOnly == nil:
				return -1
			}
			return 1
		})
		return eps, nil
	}
	why := eps[0].TLSOnly
	eps = slices.DeleteFunc(eps, func(ep tunnel.Endpoint) bool { return ep.TLSOnly != nil })
	if len(eps) == 0 {
		return nil, &tunnel.Error{Reason: tunnel.Insecure, Err: why}
	}
	return eps, nil
}

// InsecureVia returns the last hop of via where it is weak and not said to be insecure,
// and nil otherwise. The last hop protects the way from here on, whatever hops are
// before it.
func InsecureVia(via []Hop) *WeakHop {
	if len(via) == 0 || via[len(via)-1].Insecure {
		return nil
	}
	return weakVia(via)
}

// weakVia returns the last hop of via where it is weak. Nothing is weak that does not
// leave this host.
func weakVia(via []Hop) *WeakHop {
	here := true // up to the last hop
	for i := range via[:len(via)-1] {
		here = here && via[i].onHost()
	}
	last := &via[len(via)-1]
	for _, to := range last.Addresses {
		if security := last.Security(to); security < tunnel.Mutual && (!here || !OnLoopback(last.HostPort(to))) {
			return &WeakHop{Address: to, Security: security}
		}
	}
	return nil
}

// insecureVia is InsecureVia of a network that may itself be insecure.
func (n *networkState) insecureVia() *WeakHop {
	if n.Insecure {
		return nil
	}
	return InsecureVia(n.Via)
}

// loopback reports whether bytes sent to e stay on this host.
func (e *Endpoint) loopback() bool {
	return IsLocalhost(e.Host) || e.Addr.Unmap().IsLoopback()
}

// plaintextRefusal says why a stream whose TLS ends here can't go on to f: all
// transports there are weak. It is nil for any other.
func (t *Table) plaintextRefusal(f match) error {
	e := f.entry
	if e.TLS != nil || e.Insecure {
		return nil
	}
	if len(e.Via) > 0 {
		if hop := InsecureVia(e.Via); hop != nil {
			return &insecureError{service: e.Name, hop: hop}
		}
		return nil
	}
	direct, beyond := t.reach(f, t.here)
	if len(beyond) == 0 {
		return t.plaintextEndpoints(e, direct)
	}
	p := t.locate(f, t.here)
	hop := p.insecureGateway()
	if len(p.remote.Via) > 0 {
		hop = p.remote.insecureVia()
	}
	if hop != nil {
		return &insecureError{service: e.Name, network: p.remote.Name, hop: hop}
	}
	return nil
}

// hasForeignNetworks reports whether there are networks that are known to be others than the
// gateway's own.
func (t *Table) hasForeignNetworks() bool { return t.here >= 0 && len(t.networks) > 1 }

// foreignNetwork returns the network of index i if it is not the gateway's own, and nil
// if it is or that is not known.
func (t *Table) foreignNetwork(i int32) *networkState {
	if i < 0 || i == t.here || t.here < 0 {
		return nil
	}
	return &t.networks[i]
}

// plaintextEndpoints returns why plaintext may go to none of eps, which are e's.
func (t *Table) plaintextEndpoints(e *serviceEntry, eps []Endpoint) error {
	if !t.hasForeignNetworks() && !e.hasVias || len(eps) == 0 {
		return nil
	}
	for i := range eps {
		if t.plaintextEndpoint(e, &eps[i]) == nil {
			return nil
		}
	}
	return t.plaintextEndpoint(e, &eps[0])
}

// plaintextEndpoint returns why plaintext may not go to ep, which is one of e's.
func (t *Table) plaintextEndpoint(e *serviceEntry, ep *Endpoint) *insecureError {
	if hops := ep.Hops(); len(hops) > 0 {
		if hop := InsecureVia(hops); hop != nil {
			return &insecureError{service: e.Name, hop: hop, endpoint: ep.String()}
		}
		return nil
	}
	n := t.foreignNetwork(t.network(ep))
	if n == nil || n.Insecure || ep.loopback() {
		return nil
	}
	return &insecureError{service: e.Name, network: n.Name, endpoint: ep.String()}
}

// restrictDirect is restrict for ep if it is in another network, which is reached
// without a gateway in between: it is configured, or an address of its name.
func (x *resolution) restrictDirect(configured *Endpoint, ep *tunnel.Endpoint) {
	addr := ep.Addr.Addr()
	if x.payload == encrypted || !x.table.hasForeignNetworks() || addr.IsLoopback() {
		return
	}
	in := x.table.prefixes.find(addr)
	if configured != nil && configured.Network != "" {
		in = x.table.network(configured)
	}
	if n := x.table.foreignNetwork(in); n != nil {
		x.restrict(ep, n.Insecure, &insecureError{service: x.entry.Name, network: n.Name, endpoint: ep.String()})
	}
}

// weak returns the gateway as a WeakHop, and whether plaintext may go there all the same.
// It returns nil where its transport is Mutual or does not leave the host.
func (e *GatewayHop) weak() (hop *WeakHop, permitted bool) {
	security, permitted := e.Gateway.protection()
	if e.transport != nil {
		security = e.transport.security
	}
	if security >= tunnel.Mutual || e.Address.loopback() {
		return nil, false
	}
	return &WeakHop{Address: e.Address.String(), Security: security}, permitted || e.insecure
}

// insecureGateway returns a gateway of p that can be asked for more than a hello, and not for
// plaintext, where there is no other.
func (p *Location) insecureGateway() (first *WeakHop) {
	for i := range p.Gateways {
		e := &p.Gateways[i]
		if e.via || !e.Gateway.HasCarriers() {
			continue
		}
		hop, permitted := e.weak()
		if hop == nil || permitted {
			return nil
		}
		if first == nil {
			first = hop
		}
	}
	return first
}

// onHost reports whether h does not leave the host that asks it.
func (h *Hop) onHost() bool {
	for _, to := range h.Addresses {
		if !OnLoopback(h.HostPort(to)) {
			return false
		}
	}
	return true
}

// OnLoopback reports whether the text of a HOST:PORT says that it is on loopback. No name but
// localhost is.
func OnLoopback(hostport string) bool {
	host := hostOf(hostport)
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.Unmap().IsLoopback()
}
