package discovery

import (
	"cmp"
	"net/netip"
	"slices"

	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
)

// A target is an address that serves some of a service's ports.
type target struct {
	*endpoint
	ports []uint16 // by the index of the service's ports of TCP: where it serves that; 0 for not at all
}

// endpoints returns where a service is served, in an order that depends on
// nothing but what is there.
func (v *view) endpoints(s *service, of []*slice) []registry.Endpoint {
	var ports []uint16
	var names []string
	for _, p := range s.ports {
		if p.protocol == corev1.ProtocolTCP {
			ports, names = append(ports, p.port), append(names, p.name)
		}
	}
	targets := map[netip.Addr]*target{}
	if len(ports) == 0 { // headless, and any port is it
		v.choose(s, of, targets, 0, 1, func(*slice) (uint16, bool) { return 0, true })
	}
	for i, name := range names {
		v.choose(s, of, targets, i, len(ports), func(sl *slice) (uint16, bool) { return sl.target(name, ports[i]) })
	}
	v.oneOfEachPod(s, targets)

	out := make([]registry.Endpoint, 0, len(targets))
	for addr, t := range targets {
		ep := registry.Endpoint{Addr: addr, Network: v.network, Cluster: v.cluster}
		if s.headless {
			ep.Name = t.host
		}
		if slices.Equal(t.ports, ports) || len(ports) == 0 {
			out = append(out, ep)
			continue
		}
		for i, p := range t.ports {
			if p != 0 {
				ep.Port, ep.For = p, ports[i]
				out = append(out, ep)
			}
		}
	}
	slices.SortFunc(out, func(a, b registry.Endpoint) int {
		return cmp.Or(
			cmp.Compare(len(a.Name), len(b.Name)), // db-2 before db-10
			cmp.Compare(a.Name, b.Name),
			a.Addr.Compare(b.Addr),
			cmp.Compare(a.For, b.For),
		)
	})
	if len(out) == 0 {
		return nil
	}
	return out
}

// target returns where the endpoints of sl serve a service's port, and whether
// they do.
func (sl *slice) target(name string, port uint16) (uint16, bool) {
	for i := range sl.ports {
		if p := &sl.ports[i]; p.tcp && p.name == name {
			return cmp.Or(p.port, port), true
		}
	}
	return 0, false
}

// choose adds those endpoints that are to be used for the i-th of n ports.
func (v *view) choose(s *service, of []*slice, targets map[netip.Addr]*target, i, n int, at func(*slice) (uint16, bool)) {
	best, hinted, here := notReady, true, false
	for _, sl := range of {
		if _, ok := at(sl); !ok {
			continue
		}
		for j := range sl.endpoints {
			e := &sl.endpoints[j]
			best = max(best, e.state)
			if e.state == ready {
				hinted = hinted && len(e.zones) > 0
				here = here || slices.Contains(e.zones, v.zone)
			}
		}
	}
	if best == notReady {
		return
	}
	// A headless service's endpoints are all meant, each by its name.
	near := best == ready && v.zone != "" && hinted && here && !s.headless
	for _, sl := range of {
		port, ok := at(sl)
		if !ok {
			continue
		}
		for j := range sl.endpoints {
			e := &sl.endpoints[j]
			if e.state != best || near && !slices.Contains(e.zones, v.zone) {
				continue
			}
			t := targets[e.addr]
			if t == nil {
				t = &target{endpoint: e, ports: make([]uint16, n)}
				targets[e.addr] = t
			}
			// One that moves from slice to slice is in both for a moment, and
			// the order of slices must not matter.
			if before := t.ports[i]; before == 0 || port != 0 && port < before {
				t.ports[i] = port
			}
			if e.before(t.endpoint) {
				t.endpoint = e
			}
		}
	}
}

// before is an order of what two slices say of one address.
func (e *endpoint) before(o *endpoint) bool {
	if (e.host == "") != (o.host == "") {
		return e.host != ""
	}
	return cmp.Or(cmp.Compare(e.host, o.host), cmp.Compare(e.pod, o.pod)) < 0
}

// oneOfEachPod leaves a pod the address of the family that is preferred.
func (v *view) oneOfEachPod(s *service, targets map[netip.Addr]*target) {
	v6 := s.v6
	switch v.prefer {
	case PreferBoth:
		return
	case PreferIPv4:
		v6 = false
	case PreferIPv6:
		v6 = true
	}
	families := [2]bool{}
	for addr := range targets {
		families[b2i(addr.Is6())] = true
	}
	if !families[0] || !families[1] {
		return
	}
	has := map[uint64]bool{} // pods with an address of the family
	for addr, t := range targets {
		if addr.Is6() == v6 && t.pod != 0 {
			has[t.pod] = true
		}
	}
	for addr, t := range targets {
		if addr.Is6() != v6 && has[t.pod] {
			delete(targets, addr)
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}
