package discovery

import (
	"net/netip"
	"strings"
	"time"

	"culvert.dev/internal/kube/annotations"
	"culvert.dev/internal/kube/endpoints"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The stores keep only the fields of objects that are used, and one copy of each string that many of
// them share.

type key = types.NamespacedName

// A service has the fields of a Service that are used.
type service struct {
	key
	uid     types.UID
	created time.Time
	notes   map[string]string // annotations with the prefix culvert.dev/, without it; and the label gateway

	kind      corev1.ServiceType
	headless  bool
	local     bool   // traffic from outside stays on the node it came to
	external  string // ExternalName
	ports     []servicePort
	addresses []netip.Addr // ClusterIPs
	outer     []netip.Addr // externalIPs
	ingress   []string     // of a load balancer: addresses and names
	v6        bool         // the first family is IPv6
}

type servicePort struct {
	name     string
	protocol corev1.Protocol
	port     uint16
	node     uint16
}

// prefix is that of all our annotations and labels.
const prefix = annotations.Prefix

func ownNotes(annotations map[string]string) (notes map[string]string) {
	for k, v := range annotations {
		if short, ok := strings.CutPrefix(k, prefix); ok {
			if notes == nil {
				notes = map[string]string{}
			}
			notes[short] = v
		}
	}
	return notes
}

func serviceOf(s *corev1.Service) *service {
	out := &service{
		key:      key{Namespace: s.Namespace, Name: s.Name},
		uid:      s.UID,
		created:  s.CreationTimestamp.Time,
		notes:    ownNotes(s.Annotations),
		kind:     s.Spec.Type,
		headless: s.Spec.ClusterIP == corev1.ClusterIPNone,
		local:    s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal,
		v6:       len(s.Spec.IPFamilies) > 0 && s.Spec.IPFamilies[0] == corev1.IPv6Protocol,
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		out.external, out.headless = s.Spec.ExternalName, false
	}
	if network, ok := s.Labels[prefix+noteGateway]; ok && out.notes[noteGateway] == "" {
		if out.notes == nil {
			out.notes = map[string]string{}
		}
		out.notes[noteGateway] = network
	}
	for _, p := range s.Spec.Ports {
		if p.Port < 1 || p.Port > 65535 {
			continue
		}
		protocol := p.Protocol
		if protocol == "" {
			protocol = corev1.ProtocolTCP
		}
		port := servicePort{name: endpoints.Shared(p.Name), protocol: protocol, port: uint16(p.Port)}
		if p.NodePort > 0 && p.NodePort <= 65535 {
			port.node = uint16(p.NodePort)
		}
		out.ports = append(out.ports, port)
	}
	out.addresses = endpoints.Addrs(s.Spec.ClusterIPs)
	if len(s.Spec.ClusterIPs) == 0 {
		out.addresses = endpoints.Addrs([]string{s.Spec.ClusterIP})
	}
	out.outer = endpoints.Addrs(s.Spec.ExternalIPs)
	for _, in := range s.Status.LoadBalancer.Ingress {
		switch {
		case in.IP != "":
			out.ingress = append(out.ingress, in.IP)
		case in.Hostname != "":
			out.ingress = append(out.ingress, in.Hostname)
		}
	}
	return out
}

// A node has the fields of a Node that are used.
type node struct {
	name       string
	ready      bool // and not excluded from load balancers
	outer, own []netip.Addr
	pods       []netip.Prefix
}

func nodeOf(n *corev1.Node) *node {
	has := endpoints.NodeOf(n)
	out := &node{name: n.Name, ready: has.Ready, outer: has.Outer, own: has.Own}
	ranges := n.Spec.PodCIDRs
	if len(ranges) == 0 {
		ranges = []string{n.Spec.PodCIDR}
	}
	for _, r := range ranges {
		if p, err := netip.ParsePrefix(r); err == nil {
			out.pods = append(out.pods, p.Masked())
		}
	}
	return out
}

// A namespace has the fields of a Namespace that are used.
type namespace struct {
	name  string
	uid   types.UID
	notes map[string]string
}

func namespaceOf(n *corev1.Namespace) *namespace {
	return &namespace{name: n.Name, uid: n.UID, notes: ownNotes(n.Annotations)}
}
