package gatewayapi

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/registry"
)

// A route that leads back to its own gateway is a loop without an end, because TLS that is passed on
// has no hop count. The process refuses to dial its own sockets (tunnel.Guard). The code here also
// knows the sockets of other replicas, and reports a loop before a client connects.

// routeReasonLoop is the reason of ResolvedRefs if a backend is this gateway. The API has no reason for
// that, and "not found" would be misleading.
const routeReasonLoop gwv1.RouteConditionReason = "Loop"

// An addrPort is a port of one address.
type addrPort struct {
	netip.Addr
	portKey
}

// own has the addresses and ports of Gateways, on this machine and for clients.
type own struct {
	ports     map[portKey]bool // of any address, because most endpoints have none of these ports
	addrPorts map[addrPort]bool
}

func (o *own) add(addr netip.Addr, p portKey) {
	if addr.IsValid() && !addr.IsUnspecified() {
		o.ports[p] = true
		o.addrPorts[addrPort{addr.Unmap(), p}] = true
	}
}

// findOwn finds the addresses and ports of our listeners: those that are bound, those that are
// published in status, and, if a Service is in front of the gateway, those of the Service and of the
// pods behind it, which are our replicas.
func (t *translator) findOwn() {
	t.own = own{map[portKey]bool{}, map[addrPort]bool{}}
	listening := map[portKey]bool{}
	for _, g := range t.order {
		if !g.isAccepted() {
			continue
		}
		for _, l := range g.all() {
			if !l.isAccepted() {
				continue
			}
			p := l.portKey()
			listening[p] = true
			for _, a := range g.bound {
				t.own.add(a.Bind, p)
			}
			// The addresses of a Service are at its ports, which differ from ours.
			if t.in.PublicService.Name == "" {
				for _, a := range slices.Concat(g.published, g.Status.Addresses) {
					if addr, err := netip.ParseAddr(a.Value); err == nil {
						t.own.add(addr, p)
					}
				}
			}
			for _, a := range t.in.PublicAddresses {
				t.own.add(a, p)
			}
		}
	}
	n := t.in.PublicService
	if n.Name == "" {
		return
	}
	for _, slice := range t.slices(endpoints.OfService(n.Namespace, n.Name)) {
		for i := range slice.Endpoints {
			for p := range listening {
				t.own.add(slice.Endpoints[i].Addr, p)
			}
		}
	}
	s := t.service(n.Namespace, n.Name)
	if s == nil {
		return
	}
	front := slices.Concat(endpoints.Addrs(s.Spec.ClusterIPs), endpoints.Addrs(s.Spec.ExternalIPs))
	for _, in := range s.Status.LoadBalancer.Ingress {
		front = append(front, endpoints.Addrs([]string{in.IP})...)
	}
	var at []netip.Addr
	if s.Spec.Type == corev1.ServiceTypeNodePort {
		at, _ = t.atNodes(s)
	}
	for _, port := range s.Spec.Ports {
		udp := port.Protocol == corev1.ProtocolUDP
		for _, a := range front {
			t.own.add(a, portKey{udp, port.Port})
		}
		for _, a := range at {
			t.own.add(a, portKey{udp, port.NodePort})
		}
	}
}

// isOwn reports whether an endpoint is this gateway, or a replica of it.
func (t *translator) isOwn(e registry.Endpoint, protocol corev1.Protocol) bool {
	p := portKey{protocol == corev1.ProtocolUDP, int32(e.Port)}
	return t.own.ports[p] && t.own.addrPorts[addrPort{e.Addr.Unmap(), p}]
}

// breakLoops drops the endpoints of a backend that lead back here. If there are no others, its share of
// requests is refused.
func (t *translator) breakLoops(b *backend) {
	i := slices.IndexFunc(b.service.Endpoints, func(e registry.Endpoint) bool { return t.isOwn(e, b.protocol) })
	if i < 0 {
		return
	}
	s := *b.service
	s.Endpoints = slices.DeleteFunc(slices.Clone(s.Endpoints), func(e registry.Endpoint) bool { return t.isOwn(e, b.protocol) })
	why := fmt.Sprintf("%s leads back to this gateway: %s is one of its listeners", b.targetKey, b.service.Endpoints[i])
	if len(s.Endpoints) == 0 {
		b.fail(routeReasonLoop, "%s", why)
		b.service = nil
		return
	}
	b.service, b.reason, b.why = &s, string(routeReasonLoop), why+", and is skipped"
}
