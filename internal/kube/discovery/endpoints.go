package discovery

import (
	"cmp"
	"net/netip"
	"slices"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
)

// A target is an address that serves some of a service's ports.
type target struct {
	*endpoints.Endpoint
	ports []uint16 // by the index of the service's TCP port: the port where the address serves it, or 0
}

// endpoints returns the endpoints of a service, in an order that depends on nothing but the
// endpoints.
func (v *view) endpoints(s *service, of []*endpoints.Slice) []registry.Endpoint {
	var ports []uint16
	var names []string
	for _, p := range s.ports {
		if p.protocol == corev1.ProtocolTCP {
			ports, names = append(ports, p.port), append(names, p.name)
		}
	}
	targets := map[netip.Addr]*target{}
	if len(ports) == 0 { // headless: any port will do
		v.choose(s, of, targets, 0, 1, func(*endpoints.Slice) (uint16, bool) { return 0, true })
	}
	for i, name := range names {
		v.choose(s, of, targets, i, len(ports), func(sl *endpoints.Slice) (uint16, bool) { return portOf(sl, name, ports[i]) })
	}
	v.oneOfEachPod(s, targets)

	out := make([]registry.Endpoint, 0, len(targets))
	for addr, t := range targets {
		ep := registry.Endpoint{Addr: addr, Zone: t.Zone, Network: v.network, Cluster: v.cluster, Workload: t.Workload}
		if s.headless {
			ep.Name = t.Host
		}
		if slices.Equal(t.ports, ports) || len(ports) == 0 {
			out = append(out, ep)
			continue
		}
		for i, p := range t.ports {
			if p != 0 {
				ep.Port, ep.ServicePort = p, ports[i]
				out = append(out, ep)
			}
		}
	}
	slices.SortFunc(out, func(a, b registry.Endpoint) int {
		return cmp.Or(
			cmp.Compare(len(a.Name), len(b.Name)), // db-2 before db-10
			cmp.Compare(a.Name, b.Name),
			a.Addr.Compare(b.Addr),
			cmp.Compare(a.ServicePort, b.ServicePort),
		)
	})
	if len(out) == 0 {
		return nil
	}
	return out
}

// portOf returns the port at which the endpoints of sl serve a service's port, and whether they do.
func portOf(sl *endpoints.Slice, name string, port uint16) (uint16, bool) {
	for i := range sl.Ports {
		if p := &sl.Ports[i]; p.Protocol == corev1.ProtocolTCP && p.Name == name {
			return cmp.Or(p.Number, port), true
		}
	}
	return 0, false
}

// choose adds the endpoints that are used for the i-th of n ports.
func (v *view) choose(s *service, of []*endpoints.Slice, targets map[netip.Addr]*target, i, n int, at func(*endpoints.Slice) (uint16, bool)) {
	parts := make([]endpoints.Part, 0, len(of))
	for _, sl := range of {
		if port, ok := at(sl); ok {
			parts = append(parts, endpoints.Part{Endpoints: sl.Endpoints, Port: port})
		}
	}
	v.choice(s).Choose(parts, func(e *endpoints.Endpoint, port uint16) {
		t := targets[e.Addr]
		if t == nil {
			t = &target{Endpoint: e, ports: make([]uint16, n)}
			targets[e.Addr] = t
		}
		// An endpoint that moves from one slice to another is in both for a moment, and the order of
		// slices must not matter.
		if before := t.ports[i]; before == 0 || port != 0 && port < before {
			t.ports[i] = port
		}
		if e.Before(t.Endpoint) {
			t.Endpoint = e
		}
	})
}

// choice returns what the choice of a service's endpoints depends on.
func (v *view) choice(s *service) endpoints.Choice {
	return endpoints.Choice{Zone: v.zone, Prefer: v.prefer, V6: s.v6, Headless: s.headless}
}

// oneOfEachPod leaves each pod with its address of the preferred family.
func (v *view) oneOfEachPod(s *service, targets map[netip.Addr]*target) {
	for _, addr := range v.choice(s).Doubles(func(yield func(netip.Addr, uint64) bool) {
		for addr, t := range targets {
			if !yield(addr, t.Pod) {
				return
			}
		}
	}) {
		delete(targets, addr)
	}
}
