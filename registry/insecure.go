package registry

import (
	"net/netip"
	"slices"

	"culvert.dev/tunnel"
)

// A payload says what a tunnel is known to carry before it is dialed.
type payload int

const (
	encrypted payload = iota // a hello was read, or the gateway speaks TLS to the service
	unknown                  // what the client of a proxy protocol sends is its own to protect
	plaintext                // TLS ended here, or nothing is ever read
)

// payloadOf returns the payload of a request for s.
func payloadOf(req *tunnel.Request, s *Service) payload {
	switch {
	case s.TLS != nil:
		return encrypted
	case req.Proto == "sni" || req.Proto == "quic":
		return encrypted
	case req.Proto == "tls" || req.Proto == "tcp" || req.Proto == "hbone" || req.Proto == "udp":
		return plaintext
	}
	return unknown
}

// tlsOnly is the Route.TLSOnly of a way that is unencrypted for all its endpoints.
func (p payload) tlsOnly(refusal *tunnel.Error) func(tunnel.Endpoint) error {
	if p != unknown {
		return nil
	}
	return func(tunnel.Endpoint) error { return refusal }
}

// InsecureVia returns the last hop of via where it has no TLS and is not said to be insecure. It
// protects the way from here on, whatever hops are before it.
func InsecureVia(via []Hop) (to string, ok bool) {
	if len(via) == 0 || via[len(via)-1].Insecure {
		return "", false
	}
	here := true // up to the last hop, nothing has left this host
	for i := range via[:len(via)-1] {
		here = here && via[i].onHost()
	}
	return via[len(via)-1].CleartextAddress(here)
}

// cleartextVia is InsecureVia of a network that may itself be insecure.
func (n *networkState) cleartextVia() (to string, ok bool) {
	if n.Insecure {
		return "", false
	}
	return InsecureVia(n.Via)
}

// loopback reports whether bytes sent to e stay on this host.
func (e *Endpoint) loopback() bool {
	return IsLocalhost(e.Host) || e.Addr.Unmap().IsLoopback()
}

func insecure(req *tunnel.Request, f match, n *networkState, to string) *tunnel.Error {
	return tunnel.Refusef(tunnel.Insecure, "registry: %q: service %q is in network %q, and what may be plaintext would go to gateway %q there without TLS: give the network a via with TLS, or say insecure: true of it",
		req.Target(), f.entry.Name, n.Name, to)
}

func insecureHop(req *tunnel.Request, f match, to string) *tunnel.Error {
	return tunnel.Refusef(tunnel.Insecure, "registry: %q: service %q is behind gateway %q, and what may be plaintext would go there without TLS: use TLS in the service's via, or say insecure: true of that hop",
		req.Target(), f.entry.Name, to)
}

func insecureEndpoint(req *tunnel.Request, f match, n *networkState, to string) *tunnel.Error {
	return tunnel.Refusef(tunnel.Insecure, "registry: %q: endpoint %s of service %q is in network %q, and what may be plaintext would go there unencrypted: have clients speak TLS to the service, give the network a via with TLS, or say insecure: true of it",
		req.Target(), to, f.entry.Name, n.Name)
}

// plaintextRefusal says why a stream whose TLS ends here can't go on to f: all ways there are
// without TLS. It is nil for any other.
func (t *Table) plaintextRefusal(req *tunnel.Request, f match) *tunnel.Error {
	if f.entry.TLS != nil {
		return nil
	}
	if len(f.entry.Via) > 0 {
		if to, clear := InsecureVia(f.entry.Via); clear {
			return insecureHop(req, f, to)
		}
		return nil
	}
	direct, beyond := t.reach(f, t.here)
	if len(beyond) == 0 {
		_, refusal := t.plaintextEndpoints(req, f, direct)
		return refusal
	}
	p := t.locate(f, t.here)
	if len(p.remote.Via) > 0 {
		if to, clear := p.remote.cleartextVia(); clear {
			return insecure(req, f, p.remote, to)
		}
		return nil
	}
	if to, clear := p.cleartextGateway(); clear {
		return insecure(req, f, p.remote, to)
	}
	return nil
}

// hasForeignNetworks reports whether there are networks that are known to be others than the
// gateway's own.
func (t *Table) hasForeignNetworks() bool { return t.here >= 0 && len(t.networks) > 1 }

// foreignNetwork returns the network of index i if plaintext may not go there unencrypted.
func (t *Table) foreignNetwork(i int32) *networkState {
	if i < 0 || i == t.here || t.here < 0 || t.networks[i].Insecure {
		return nil
	}
	return &t.networks[i]
}

// plaintextEndpoints returns those of eps that plaintext may be sent to, and a refusal where there
// is none of them. It allocates where it leaves some out.
func (t *Table) plaintextEndpoints(req *tunnel.Request, f match, eps []Endpoint) ([]Endpoint, *tunnel.Error) {
	if !t.hasForeignNetworks() || len(eps) == 0 {
		return eps, nil
	}
	elsewhere := func(ep Endpoint) bool { return !ep.loopback() && t.foreignNetwork(t.network(&ep)) != nil }
	if !slices.ContainsFunc(eps, elsewhere) {
		return eps, nil
	}
	some := slices.DeleteFunc(slices.Clone(eps), elsewhere)
	if len(some) == 0 {
		return nil, insecureEndpoint(req, f, t.foreignNetwork(t.network(&eps[0])), eps[0].String())
	}
	return some, nil
}

// crosses says why nothing but TLS may go to ep, an address that a request has come
// to without a gateway in between: it is one of configured, or of a name of these.
func (t *Table) crosses(req *tunnel.Request, f match, configured []Endpoint, ep tunnel.Endpoint) error {
	if ep.Addr.Addr().IsLoopback() {
		return nil
	}
	in := t.prefixes.find(ep.Addr.Addr())
	for i := range configured {
		c := &configured[i]
		if c.Network != "" && (c.Host != "" && c.Host == ep.Host || c.Host == "" && c.Addr.Unmap() == ep.Addr.Addr()) {
			in = t.network(c)
			break
		}
	}
	if n := t.foreignNetwork(in); n != nil {
		return insecureEndpoint(req, f, n, ep.String())
	}
	return nil
}

// protect has route carry nothing to other networks that may be plaintext, where its
// endpoints, those of configured, are reached without a gateway.
func (t *Table) protect(req *tunnel.Request, f match, configured []Endpoint, route *tunnel.Route) error {
	inside := payloadOf(req, f.entry.Service)
	if inside == encrypted || !t.hasForeignNetworks() {
		return nil
	}
	crosses := func(ep tunnel.Endpoint) error { return t.crosses(req, f, configured, ep) }
	if inside == unknown {
		if slices.ContainsFunc(route.Endpoints, func(ep tunnel.Endpoint) bool { return crosses(ep) != nil }) {
			route.TLSOnly = crosses
		}
		return nil
	}
	all := route.Endpoints
	route.Endpoints = slices.DeleteFunc(slices.Clone(all), func(ep tunnel.Endpoint) bool { return crosses(ep) != nil })
	if len(route.Endpoints) == 0 && len(all) > 0 {
		return crosses(all[0])
	}
	return nil
}

// acceptsPlaintext reports whether plaintext may be sent to the gateway e, which is
// asked without TLS.
func (e *GatewayHop) acceptsPlaintext() bool { return e.insecure || e.Address.loopback() }

// cleartextGateway returns a gateway of p that can be asked for more than a hello, and not for
// plaintext, where there is no other.
func (p *Location) cleartextGateway() (to string, ok bool) {
	for i := range p.Gateways {
		e := &p.Gateways[i]
		switch {
		case e.via || e.Gateway.ProxyTransport() == "":
		case e.acceptsPlaintext():
			return "", false
		case to == "":
			to = e.Address.String()
		}
	}
	return to, to != ""
}

// tlsOnly is the Route.TLSOnly of a request that is passed on to the gateways of p.
func (p *Location) tlsOnly(req *tunnel.Request, f match, by func(*GatewayHop) string) func(tunnel.Endpoint) error {
	if !slices.ContainsFunc(p.Gateways, func(e GatewayHop) bool { return !e.acceptsPlaintext() }) {
		return nil
	}
	return func(ep tunnel.Endpoint) error {
		if e := p.gatewayAt(ep, by); e == nil || e.acceptsPlaintext() {
			return nil
		}
		return insecure(req, f, p.remote, ep.String())
	}
}

// onHost reports whether h does not leave the host that asks it.
func (h *Hop) onHost() bool {
	for _, to := range h.Addresses {
		if !loopbackHost(h.hostPort(to)) {
			return false
		}
	}
	return true
}

// loopbackHost reports whether the host of a HOST:PORT is loopback for all that its
// text says.
func loopbackHost(hostport string) bool {
	host := hostOf(hostport)
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.Unmap().IsLoopback()
}
