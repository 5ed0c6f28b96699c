package checks

import (
	"cmp"
	"net/netip"

	"culvert.dev/registry"
)

// follow sets the probed addresses to those of the current table.
func (c *Checker) follow() {
	t := c.Registry.Table()
	generation := t.Generation()
	want := func(s *registry.Service) {
		if s.Check.Kind == "" || len(s.Via) > 0 {
			return
		}
		layer, err := c.layerOf(s)
		if err != nil {
			return // every request for it is refused
		}
		name := ""
		for _, p := range s.Names {
			if !p.Wildcard {
				name = p.Suffix.String()
				break
			}
		}
		for j := range s.Endpoints {
			ep := &s.Endpoints[j]
			if !t.Reaches(ep) {
				continue // whoever is there asks it
			}
			for _, port := range ep.PortsFor(s) {
				target := registry.Target{
					Addr: netip.AddrPortFrom(ep.Addr.Unmap(), port), Host: cmp.Or(ep.Host, ep.Group), Guarded: ep.Guarded, Check: s.Check, ProxyProtocol: s.ProxyProtocol, ProxyInsideTLS: s.ForwardsInsideTLS(), TLS: layer,
				}
				checked := true
				if ep.Group != "" || len(ep.Hops()) > 0 {
					target.Transport, target.HealthKey, checked = ep.CheckedBehind(port)
				}
				if checked {
					c.want(generation, target, name, s.Name)
				}
			}
		}
	}
	for s := range t.Services() {
		want(s)
	}
	for s := range t.Backends() {
		want(s)
	}
	for n := range t.Networks() {
		for j := range n.Gateways {
			g := &n.Gateways[j]
			if ep := g.AddressFrom(n.Name, t.Mesh().Network); g.Check.Kind != "" && ep.Port != 0 {
				c.want(generation, registry.Target{Addr: netip.AddrPortFrom(ep.Addr.Unmap(), ep.Port), Host: ep.Host, Check: g.Check}, "", "the gateways of "+n.Name)
			}
		}
	}
	for _, it := range c.items {
		if it.generation != generation && (it.Host == "" || it.isName() || it.Transport != nil) { // else it is its name's
			c.drop(it)
		}
	}
}

// layerOf returns what speaks TLS to the endpoints of s before a check of it, nil for
// nothing. At another port than theirs there is another server.
func (c *Checker) layerOf(s *registry.Service) (registry.TLSLayer, error) {
	if s.TLS == nil || s.Check.Kind == "tcp" || s.Check.Port != 0 || c.TLS == nil {
		return nil, nil
	}
	return c.TLS(s.TLS)
}

// want notes that t is to be asked. The first service that has the check gives
// its name.
func (c *Checker) want(generation uint64, t registry.Target, name, what string) {
	it, ok := c.items[t]
	if !ok {
		it = &item{Target: t}
		c.add(it)
	}
	if it.generation == generation && ok {
		return
	}
	it.generation, it.name, it.what = generation, name, what
	for _, child := range it.children {
		child.name, child.what = name, what
	}
}
