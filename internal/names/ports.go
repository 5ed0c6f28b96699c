package names

import (
	"cmp"
	"net/netip"
	"slices"

	"culvert.dev/dns"
	"culvert.dev/registry"
)

// services answers _PORT._PROTO.NAME, RFC 2782: also where the question is for
// another type, as the name exists.
func (t *Table) services(q dns.Question, a *dns.Answer, locations []registry.Location, port, protocol, name string) {
	for i := range locations {
		p := &locations[i]
		n := namedPort(p, port, protocol)
		if n == nil {
			continue
		}
		a.Status = dns.Exists
		switch {
		case len(t.ownAddresses(q.View, p)) > 0:
			a.Services = append(a.Services, dns.Service{Weight: 1, Port: n.Port, Target: name})
		case len(p.Gateways) > 0:
			alike := t.oneGatewayPort(q.View, locations)
			for _, e := range t.usableGateways(p) {
				s := dns.Service{Priority: uint16(e.Rank), Weight: 1, Port: e.Address.Port, Target: name}
				if !alike {
					s.Target, s.Weight = gatewayName(e, name), cmp.Or(e.Gateway.Weight, 1)
				}
				if !slices.ContainsFunc(a.Services, func(have dns.Service) bool { return have.Port == s.Port && have.Target == s.Target }) {
					a.Services = append(a.Services, s)
				}
			}
		case p.Service.Headless && !p.Single:
			t.addHeadless(a, p, n.Port, name)
		default:
			a.Services = append(a.Services, dns.Service{Weight: 1, Port: endpointPort(p, n.Port), Target: name})
		}
	}
}

// addHeadless adds the endpoints of a headless service that serve a port. Unhealthy
// ones are left out, unless all are.
func (t *Table) addHeadless(a *dns.Answer, p *registry.Location, port uint16, name string) {
	for _, all := range []bool{false, true} {
		before := len(a.Services)
		for i := range p.Endpoints {
			ep := &p.Endpoints[i]
			label := registry.EndpointName(p.Service, ep, name)
			if label == "" || !ep.Serves(port) {
				continue
			}
			if to := cmp.Or(ep.Port, port); all || t.isHealthy(ep, to) {
				a.Services = append(a.Services, dns.Service{Weight: 1, Port: to, Target: label})
			}
		}
		if len(a.Services) > before {
			return
		}
	}
}

// isHealthy reports whether ep is not known to be unhealthy. For an endpoint with a
// DNS name, the server checks the addresses after it has looked them up.
func (t *Table) isHealthy(ep *registry.Endpoint, port uint16) bool {
	return !ep.Addr.IsValid() || t.source.Registry.Healthy(netip.AddrPortFrom(ep.Addr, port))
}

// usableGateways returns the gateways in front of p that are among its addresses: those
// that take SNI and are healthy, or all that take SNI where none is.
func (t *Table) usableGateways(p *registry.Location) []*registry.GatewayHop {
	var all, some []*registry.GatewayHop
	for i := range p.Gateways {
		e := &p.Gateways[i]
		if !e.Gateway.Supports("sni") {
			continue
		}
		all = append(all, e)
		if t.isHealthy(&e.Address, e.Address.Port) {
			some = append(some, e)
		}
	}
	if len(some) == 0 {
		return all
	}
	return some
}

// oneGatewayPort reports whether all addresses of the locations are gateways', at one
// port: then a record may have that port and the name itself. Otherwise each gateway
// has a name of its own, or clients would combine the port of one with the address of
// another.
func (t *Table) oneGatewayPort(view string, locations []registry.Location) bool {
	port := uint16(0)
	for i := range locations {
		p := &locations[i]
		if len(p.Endpoints) > 0 || len(t.ownAddresses(view, p)) > 0 {
			return false
		}
		for _, e := range t.usableGateways(p) {
			if port == 0 {
				port = e.Address.Port
			}
			if e.Address.Port != port {
				return false
			}
		}
	}
	return true
}

// gatewayName returns the name of one gateway of the service called name.
func gatewayName(e *registry.GatewayHop, name string) string {
	return cmp.Or(registry.GatewayName(&e.Address, name), e.Address.Host, name)
}

// bind answers questions for HTTPS, RFC 9460, for https://NAME with a port. Every
// record leads to the addresses of the name, or to a target of its own. SVCB records
// are only for schemes that use them (section 2.4.1), and the scheme https does not.
func (t *Table) bind(q dns.Question, a *dns.Answer, locations []registry.Location, name string, port uint16) {
	if q.Type != dns.TypeHTTPS {
		return
	}
	target := ""
	if name != q.Name {
		target = name
	}
	for i := range locations {
		p := &locations[i]
		switch {
		case !takesPort(p, port):
		case len(t.ownAddresses(q.View, p)) > 0:
			b := dns.Binding{Target: target, ALPN: p.Service.ALPN} // at the port of the URL
			b.Hints = append(b.Hints, t.ownAddresses(q.View, p)...)
			a.Bindings = append(a.Bindings, b)
		case len(p.Gateways) == 0:
			a.Bindings = append(a.Bindings, dns.Binding{Target: target, ALPN: p.Service.ALPN, Port: portChange(endpointPort(p, port), port)})
		case t.oneGatewayPort(q.View, locations):
			t.bindAll(a, p, target, port)
		default:
			for _, e := range t.usableGateways(p) {
				b := dns.Binding{Priority: uint16(e.Rank) + 1, Target: gatewayName(e, name), ALPN: p.Service.ALPN, Port: portChange(e.Address.Port, port)}
				if e.Address.Addr.IsValid() {
					b.Hints = []netip.Addr{e.Address.Addr}
				}
				a.Bindings = append(a.Bindings, b)
			}
		}
	}
}

// bindAll adds the one record of gateways at one port.
func (t *Table) bindAll(a *dns.Answer, p *registry.Location, target string, port uint16) {
	b := dns.Binding{Priority: 1, Target: target, ALPN: p.Service.ALPN}
	usableGateways := t.usableGateways(p)
	for _, e := range usableGateways {
		b.Port = portChange(e.Address.Port, port)
		if e.Address.Addr.IsValid() {
			b.Hints = append(b.Hints, e.Address.Addr)
		}
	}
	if len(usableGateways) > 0 {
		a.Bindings = append(a.Bindings, b)
	}
}

// portChange returns to as the Port of a Binding, for a URL with a port: 0 where the
// two are the same.
func portChange(to, port uint16) uint16 {
	if to == port {
		return 0
	}
	return to
}

// endpointPort returns the port of the endpoints of p for the service's port.
func endpointPort(p *registry.Location, port uint16) uint16 {
	for i := range p.Endpoints {
		if ep := &p.Endpoints[i]; ep.Serves(port) {
			return cmp.Or(ep.Port, port)
		}
	}
	return port
}
