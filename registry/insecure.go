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

// An insecureError says why nothing but TLS may be carried to an endpoint: a hop, or
// the endpoint itself where hop is "", is reached unencrypted.
type insecureError struct {
	service, network string // network is "" where the service has the hop itself
	hop, endpoint    string
}

func (e *insecureError) Error() string {
	switch {
	case e.hop == "":
		return fmt.Sprintf("registry: endpoint %s of service %q is in network %q, and what may be plaintext would go there unencrypted: have clients speak TLS to the service, give the network a via with TLS, or say insecure: true of it", e.endpoint, e.service, e.network)
	case e.network == "":
		return fmt.Sprintf("registry: service %q is behind gateway %q, and what may be plaintext would go there without TLS: use TLS in the service's via, or say insecure: true of that hop", e.service, e.hop)
	}
	return fmt.Sprintf("registry: service %q is in network %q, and what may be plaintext would go to gateway %q there without TLS: give the network a via with TLS, or say insecure: true of it", e.service, e.network, e.hop)
}

// protect leaves out the endpoints to which plaintext may not go, where the payload is
// plaintext.
func (x *resolution) protect(eps []tunnel.Endpoint) ([]tunnel.Endpoint, error) {
	if x.payload != plaintext {
		return eps, nil
	}
	why := eps[0].TLSOnly
	eps = slices.DeleteFunc(eps, func(ep tunnel.Endpoint) bool { return ep.TLSOnly != nil })
	if len(eps) == 0 {
		return nil, &tunnel.Error{Reason: tunnel.Insecure, Err: why}
	}
	return eps, nil
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

// plaintextRefusal says why a stream whose TLS ends here can't go on to f: all ways there are
// without TLS. It is nil for any other.
func (t *Table) plaintextRefusal(f match) error {
	e := f.entry
	if e.TLS != nil {
		return nil
	}
	if len(e.Via) > 0 {
		if to, clear := InsecureVia(e.Via); clear {
			return &insecureError{service: e.Name, hop: to}
		}
		return nil
	}
	direct, beyond := t.reach(f, t.here)
	if len(beyond) == 0 {
		return t.plaintextEndpoints(e, direct)
	}
	p := t.locate(f, t.here)
	to, clear := p.cleartextGateway()
	if len(p.remote.Via) > 0 {
		to, clear = p.remote.cleartextVia()
	}
	if clear {
		return &insecureError{service: e.Name, network: p.remote.Name, hop: to}
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

// plaintextEndpoints returns why plaintext may go to none of eps, which are e's.
func (t *Table) plaintextEndpoints(e *serviceEntry, eps []Endpoint) error {
	if !t.hasForeignNetworks() || len(eps) == 0 {
		return nil
	}
	for i := range eps {
		if eps[i].loopback() || t.foreignNetwork(t.network(&eps[i])) == nil {
			return nil
		}
	}
	return &insecureError{service: e.Name, network: t.foreignNetwork(t.network(&eps[0])).Name, endpoint: eps[0].String()}
}

// crosses says why nothing but TLS may go to ep at addr, which is reached without a
// gateway in between: it is configured, or an address of its name.
func (x *resolution) crosses(configured *Endpoint, addr netip.Addr, ep *tunnel.Endpoint) error {
	if x.payload == encrypted || !x.table.hasForeignNetworks() || addr.IsLoopback() {
		return nil
	}
	in := x.table.prefixes.find(addr)
	if configured != nil && configured.Network != "" {
		in = x.table.network(configured)
	}
	if n := x.table.foreignNetwork(in); n != nil {
		return &insecureError{service: x.entry.Name, network: n.Name, endpoint: ep.String()}
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

// onHost reports whether h does not leave the host that asks it.
func (h *Hop) onHost() bool {
	for _, to := range h.Addresses {
		if !loopbackHost(h.HostPort(to)) {
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
