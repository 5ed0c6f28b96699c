package discovery

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	corev1 "k8s.io/api/core/v1"
)

// transports are the values of the annotation of that name, those over UDP last.
var transports = []string{"sni", "connect", "connect-h2", "websocket", "hbone", "socks5", "quic", "connect-h3"}

const firstUDP = 6

// A gatewayService has the annotations of a Service that is a gateway of the cluster.
type gatewayService struct {
	port       servicePort
	transports []string
	weight     uint16
}

// gatewayOf reads the annotations of a gateway. It is pure.
func gatewayOf(s *service) (e gatewayService, bad *Problem) {
	fail := func(key, text string) (gatewayService, *Problem) {
		return e, &Problem{Kind: "Service", Namespace: s.Namespace, Name: s.Name, Key: key, Value: clip(s.notes[key]), Text: text + "; it is not used as a gateway"}
	}
	if v, ok := s.notes[noteTransports]; ok {
		list, err := items(v, len(transports))
		if err != nil {
			return fail(noteTransports, err.Error())
		}
		for _, t := range list {
			if !slices.Contains(transports, t) {
				return fail(noteTransports, fmt.Sprintf("%q is none of %s", clip(t), strings.Join(transports, ", ")))
			}
		}
		e.transports = list
	}
	if v, ok := s.notes[noteWeight]; ok {
		n, err := strconv.ParseUint(v, 10, 16)
		if err != nil || n < 1 || n > 1000 {
			return fail(noteWeight, "write a number from 1 to 1000")
		}
		e.weight = uint16(n)
	}
	protocol := corev1.ProtocolTCP
	if e.onlyUDP() {
		protocol = corev1.ProtocolUDP
	}
	var ports []servicePort
	for _, p := range s.ports {
		if p.protocol == protocol {
			ports = append(ports, p)
		}
	}
	is := func(p servicePort) bool { return p.port == 443 }
	if v, ok := s.notes[notePort]; ok {
		is = func(p servicePort) bool { return p.name == v || strconv.Itoa(int(p.port)) == v }
	} else if len(ports) == 1 {
		is = func(servicePort) bool { return true }
	}
	at := slices.IndexFunc(ports, is)
	if at < 0 {
		return fail(notePort, fmt.Sprintf("which of its %d ports of %s is meant? Write the name or the number of one", len(ports), protocol))
	}
	e.port = ports[at]
	return e, nil
}

func (e *gatewayService) onlyUDP() bool {
	return len(e.transports) > 0 && !slices.ContainsFunc(e.transports, func(t string) bool { return slices.Index(transports, t) < firstUDP })
}

func (e *gatewayService) gateway(address, public registry.Endpoint) registry.Gateway {
	g := registry.Gateway{Address: address, Public: public, Transports: registry.HopsBy(e.transports...), Weight: e.weight, Check: registry.Check{Kind: "tcp"}}
	if e.onlyUDP() {
		g.Check = registry.Check{} // it may not answer by TCP
	}
	if g.Address == (registry.Endpoint{}) {
		g.Address, g.Public = public, registry.Endpoint{}
	}
	return g
}

// gateways returns the gateways that a Service stands for, one for each of its addresses. on has the
// names of the nodes with ready endpoints of it.
func (v *view) gateways(s *service, e gatewayService, nodes map[string]*node, on map[string]bool) (list []registry.Gateway) {
	port := e.port.port
	own := registry.Endpoint{}
	if a := v.pick(s.addresses, s.v6); a.IsValid() {
		own = registry.Endpoint{Addr: a, Port: port}
	}
	for _, in := range s.ingress {
		if ep, ok := host(in, port); ok {
			list = append(list, e.gateway(own, ep))
		}
	}
	for _, a := range s.outer {
		list = append(list, e.gateway(own, registry.Endpoint{Addr: a, Port: port}))
	}
	if s.kind != corev1.ServiceTypeNodePort || e.port.node == 0 {
		return list
	}
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		n := nodes[name]
		if !n.ready || s.local && !on[name] {
			continue
		}
		var in, out registry.Endpoint
		if a := v.pick(n.own, s.v6); a.IsValid() {
			in = registry.Endpoint{Addr: a, Port: e.port.node}
		}
		if a := v.pick(n.outer, s.v6); a.IsValid() {
			out = registry.Endpoint{Addr: a, Port: e.port.node}
		}
		if in == (registry.Endpoint{}) && out == (registry.Endpoint{}) {
			continue
		}
		list = append(list, e.gateway(in, out))
	}
	return list
}

// pick returns an address of the preferred family, or else any address, or the zero Addr if there is
// none.
func (v *view) pick(list []netip.Addr, v6 bool) netip.Addr {
	switch v.prefer {
	case PreferIPv4:
		v6 = false
	case PreferIPv6:
		v6 = true
	}
	var any netip.Addr
	for _, a := range list {
		if _, never := tunnel.Forbidden(a); never {
			continue
		}
		if a.Is6() == v6 {
			return a
		}
		if !any.IsValid() {
			any = a
		}
	}
	return any
}

// host returns the endpoint for an address or a name.
func host(s string, port uint16) (registry.Endpoint, bool) {
	if a, err := netip.ParseAddr(s); err == nil {
		_, never := tunnel.Forbidden(a.Unmap())
		return registry.Endpoint{Addr: a.Unmap(), Port: port}, !never
	}
	n, err := tunnel.ParseName(s)
	return registry.Endpoint{Host: n.String(), Port: port}, err == nil
}

// networkOf returns the cluster's network. Its gateways are those of the given Services, the oldest
// first.
func (v *view) networkOf(services []*service, at map[key][]*endpoints.Slice, nodes map[string]*node, pods bool) (registry.Network, []Problem) {
	out := registry.Network{Name: v.network}
	var problems []Problem
	for _, s := range services {
		e, bad := gatewayOf(s)
		if bad != nil {
			problems = append(problems, *bad)
			continue
		}
		on := map[string]bool{}
		if s.local {
			for _, sl := range at[s.key] {
				for i := range sl.Endpoints {
					if ep := &sl.Endpoints[i]; ep.State == endpoints.Ready {
						on[ep.Node] = true
					}
				}
			}
		}
		for _, g := range v.gateways(s, e, nodes, on) {
			if !slices.ContainsFunc(out.Gateways, func(o registry.Gateway) bool { return o.Address == g.Address && o.Public == g.Public }) {
				out.Gateways = append(out.Gateways, g)
			}
		}
	}
	if pods {
		for _, name := range slices.Sorted(maps.Keys(nodes)) {
			out.CIDRs = append(out.CIDRs, nodes[name].pods...)
		}
		slices.SortFunc(out.CIDRs, func(a, b netip.Prefix) int {
			return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
		})
		out.CIDRs = slices.Compact(out.CIDRs)
	}
	return out, problems
}
