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
func (t *Table) services(q dns.Question, a *dns.Answer, places []registry.Location, port, protocol, name string) {
	for i := range places {
		p := &places[i]
		n := named(p, port, protocol)
		if n == nil {
			continue
		}
		a.Status = dns.Exists
		switch {
		case t.vips(q.View, p):
			a.Services = append(a.Services, dns.Service{Weight: 1, Port: n.Port, Target: name})
		case len(p.Gateways) > 0:
			alike := t.alike(q.View, places)
			for _, e := range t.ways(p) {
				s := dns.Service{Priority: uint16(e.Rank), Weight: 1, Port: e.Address.Port, Target: name}
				if !alike {
					s.Target, s.Weight = way(e, name), cmp.Or(e.Gateway.Weight, 1)
				}
				if !slices.ContainsFunc(a.Services, func(have dns.Service) bool { return have.Port == s.Port && have.Target == s.Target }) {
					a.Services = append(a.Services, s)
				}
			}
		case p.Service.Headless && !p.Single:
			t.each(a, p, n.Port, name)
		default:
			a.Services = append(a.Services, dns.Service{Weight: 1, Port: endpointPort(p, n.Port), Target: name})
		}
	}
}

// each adds the endpoints of a headless service that serve a port. As among its
// addresses, what does not work is left out as long as something else remains.
func (t *Table) each(a *dns.Answer, p *registry.Location, port uint16, name string) {
	for _, all := range []bool{false, true} {
		before := len(a.Services)
		for i := range p.Endpoints {
			ep := &p.Endpoints[i]
			label := registry.EndpointName(p.Service, ep, name)
			if label == "" || !ep.Serves(port) {
				continue
			}
			if to := cmp.Or(ep.Port, port); all || t.works(ep, to) {
				a.Services = append(a.Services, dns.Service{Weight: 1, Port: to, Target: label})
			}
		}
		if len(a.Services) > before {
			return
		}
	}
}

// works reports whether nobody says that ep does not. Of what has a DNS name the
// server finds out when it has looked up the addresses.
func (t *Table) works(ep *registry.Endpoint, port uint16) bool {
	return !ep.Addr.IsValid() || t.source.Registry.Healthy(netip.AddrPortFrom(ep.Addr, port))
}

// ways returns the gateways in front of p that are among its addresses: those
// that take SNI and work, or all of them where none works.
func (t *Table) ways(p *registry.Location) []*registry.GatewayHop {
	var all, some []*registry.GatewayHop
	for i := range p.Gateways {
		e := &p.Gateways[i]
		if !e.Gateway.Supports("sni") {
			continue
		}
		all = append(all, e)
		if t.works(&e.Address, e.Address.Port) {
			some = append(some, e)
		}
	}
	if len(some) == 0 {
		return all
	}
	return some
}

// alike reports whether every address that a name of places has is a gateway's,
// and all at one port: then a record may have that port and the name itself.
// Otherwise each gateway has a name to itself, or who asks would go to the port of
// one at the address of another.
func (t *Table) alike(view string, places []registry.Location) bool {
	port := uint16(0)
	for i := range places {
		p := &places[i]
		if len(p.Endpoints) > 0 || t.vips(view, p) {
			return false
		}
		for _, e := range t.ways(p) {
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

// way is the name of one gateway where it stands for what is called name.
func way(e *registry.GatewayHop, name string) string {
	return cmp.Or(registry.GatewayName(&e.Address, name), e.Address.Host, name)
}

// bind answers HTTPS, RFC 9460, for https://NAME with a port. Every record leads
// to what the name has addresses of, or to a target of its own. Of the types only
// HTTPS is meant: a SVCB record is for schemes that say so (section 2.4.1), and
// for the scheme https none does.
func (t *Table) bind(q dns.Question, a *dns.Answer, places []registry.Location, name string, port uint16) {
	if q.Type != dns.TypeHTTPS {
		return
	}
	target := ""
	if name != q.Name {
		target = name
	}
	for i := range places {
		p := &places[i]
		switch {
		case !has(p, port):
		case t.vips(q.View, p):
			b := dns.Binding{Target: target, ALPN: p.Service.ALPN} // at the port of the URL
			for _, v := range p.VIPs {
				if v.IsValid() {
					b.Hints = append(b.Hints, v)
				}
			}
			a.Bindings = append(a.Bindings, b)
		case len(p.Gateways) == 0:
			a.Bindings = append(a.Bindings, dns.Binding{Target: target, ALPN: p.Service.ALPN, Port: other(endpointPort(p, port), port)})
		case t.alike(q.View, places):
			t.bindAll(a, p, target, port)
		default:
			for _, e := range t.ways(p) {
				b := dns.Binding{Priority: uint16(e.Rank) + 1, Target: way(e, name), ALPN: p.Service.ALPN, Port: other(e.Address.Port, port)}
				if e.Address.Addr.IsValid() {
					b.Hints = []netip.Addr{e.Address.Addr}
				}
				a.Bindings = append(a.Bindings, b)
			}
		}
	}
}

// bindAll adds the one record of gateways that are alike.
func (t *Table) bindAll(a *dns.Answer, p *registry.Location, target string, port uint16) {
	b := dns.Binding{Priority: 1, Target: target, ALPN: p.Service.ALPN}
	ways := t.ways(p)
	for _, e := range ways {
		b.Port = other(e.Address.Port, port)
		if e.Address.Addr.IsValid() {
			b.Hints = append(b.Hints, e.Address.Addr)
		}
	}
	if len(ways) > 0 {
		a.Bindings = append(a.Bindings, b)
	}
}

// other is to as a Binding has it, for a URL with a port.
func other(to, port uint16) uint16 {
	if to == port {
		return 0
	}
	return to
}

// endpointPort returns where a port of p's is at its endpoints.
func endpointPort(p *registry.Location, port uint16) uint16 {
	for i := range p.Endpoints {
		if ep := &p.Endpoints[i]; ep.Serves(port) {
			return cmp.Or(ep.Port, port)
		}
	}
	return port
}
