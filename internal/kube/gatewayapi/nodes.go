package gatewayapi

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/internal/kube/watch"
)

// maxAddresses is how many addresses a Gateway's status may have.
const maxAddresses = 16

// nodes has the Nodes of the cluster, for a Service of type NodePort in front of the gateway. The watch
// starts when they are first asked for, because without such a Service it needs no permission.
type nodes struct {
	kindWatch
	once  sync.Once
	asked chan struct{}
}

func newNodes(c clients, s *store, log *slog.Logger) *nodes {
	n := &nodes{asked: make(chan struct{})}
	n.Cache = watch.NewCache(func(before, after metav1.Object) {
		if before != nil && after != nil { // nodes write their status all the time
			a, b := *before.(*corev1.Node), *after.(*corev1.Node)
			if a.ResourceVersion = b.ResourceVersion; equality.Semantic.DeepEqual(&a, &b) {
				return
			}
		}
		s.dirty()
	})
	n.Watch = watch.New(watch.Config{
		Name: "gatewayapi", Resource: corev1.Resource("nodes"), Object: &corev1.Node{}, Source: watch.Source(c.core.CoreV1().Nodes(), nil), Client: c.core,
		Store: n.Cache, Transform: slimNode, Pulse: c.pulse, OnChange: s.onState, Log: log,
	})
	return n
}

// slimNode drops all fields that endpoints.NodeOf does not use.
func slimNode(o any) (any, error) {
	n, ok := o.(*corev1.Node)
	if !ok {
		return o, nil
	}
	out := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion}}
	if v, no := n.Labels[corev1.LabelNodeExcludeBalancers]; no {
		out.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: v}
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			out.Status.Conditions = []corev1.NodeCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	out.Status.Addresses = n.Status.Addresses
	return out, nil
}

// run watches from the first call of Nodes until ctx is done.
func (n *nodes) run(ctx context.Context) {
	select {
	case <-n.asked:
		n.Run(ctx)
	case <-ctx.Done():
	}
}

// Nodes implements Objects.
func (s *store) Nodes() ([]*corev1.Node, bool) {
	n := s.nodes
	n.once.Do(func() { close(n.asked) })
	if !n.State().Known() {
		return nil, false
	}
	var out []*corev1.Node
	for _, o := range n.All() {
		out = append(out, o.(*corev1.Node))
	}
	return out, true
}

// atNodes returns the addresses of a Service of type NodePort: those of the nodes that are ready and, if
// traffic stays on the node that it came to, have an endpoint. It is false while they are not known.
func (t *translator) atNodes(s *corev1.Service) ([]netip.Addr, bool) {
	all, known := t.in.Objects.Nodes()
	if !known {
		return nil, false
	}
	slices.SortFunc(all, func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	on := map[string]bool{}
	local := s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	if local {
		for _, slice := range t.slices(endpoints.OfService(s.Namespace, s.Name)) {
			for i := range slice.Endpoints {
				if e := &slice.Endpoints[i]; e.State == endpoints.Ready {
					on[e.Node] = true
				}
			}
		}
	}
	var out []netip.Addr
	for _, o := range all {
		n := endpoints.NodeOf(o)
		if !n.Ready || local && !on[o.Name] {
			continue
		}
		if len(n.Outer) > 0 {
			out = append(out, n.Outer...)
		} else {
			out = append(out, n.Own...)
		}
	}
	return out, true
}

// A publicService is the Service in front of the gateway.
type publicService struct {
	types.NamespacedName
	nodes bool              // clients dial ports of nodes
	ports map[portKey]int32 // for each port of ours, the one that clients dial
	only  bool              // clients know no other address
}

// findPorts finds the port of the Service, or of the nodes, that leads to each of our listeners.
func (t *translator) findPorts(s *corev1.Service, nodes bool) {
	front := &publicService{key(s), nodes, map[portKey]int32{}, len(t.in.PublicAddresses) == 0 && !slices.ContainsFunc(t.in.Addresses, func(a Address) bool { return a.Public.IsValid() })}
	for _, p := range s.Spec.Ports {
		port := p.Port
		if nodes {
			port = p.NodePort
		}
		if port == 0 {
			continue
		}
		protocol := cmp.Or(p.Protocol, corev1.ProtocolTCP)
		target := cmp.Or(p.TargetPort.IntVal, p.Port)
		for _, slice := range t.slices(endpoints.OfService(s.Namespace, s.Name)) {
			for _, at := range slice.Ports {
				if at.Name == p.Name && at.Protocol == protocol {
					target = cmp.Or(int32(at.Number), target) // the number of a target port that has a name
				}
			}
		}
		// Of several ports, clients expect the one with the same number.
		if at := (portKey{protocol == corev1.ProtocolUDP, target}); front.ports[at] != target {
			front.ports[at] = port
		}
	}
	t.front = front
}

// unreached returns why clients can't reach l by the Service in front of the gateway, or "".
func (t *translator) unreached(l *listener) string {
	if t.front == nil || !t.front.only || t.front.ports[l.portKey()] != 0 {
		return ""
	}
	transport := "TCP"
	if l.portKey().udp {
		transport = "UDP"
	}
	return fmt.Sprintf("clients can't reach port %d: Service %s, through which clients connect, has no %s port that leads to it; add the port to the Service", l.spec.Port, t.front, transport)
}

// portRemark returns a text with the ports at which clients reach a Gateway, for which the API has no
// field, or "" if they are its own.
func (t *translator) portRemark(g *gateway) string {
	if t.front == nil {
		return ""
	}
	var said, missing []string
	for _, l := range g.all() {
		if !l.isAccepted() {
			continue
		}
		switch port := t.front.ports[l.portKey()]; port {
		case l.spec.Port:
		case 0:
			missing = append(missing, fmt.Sprint(l.spec.Port))
		default:
			said = append(said, fmt.Sprintf("%d is %d", l.spec.Port, port))
		}
	}
	text := ""
	if said = dedupe(said); len(said) > 0 {
		of := "nodes"
		if !t.front.nodes {
			of = "Service " + t.front.String()
		}
		text = "; of " + of + ", port " + strings.Join(said, ", ")
	}
	if missing = dedupe(missing); len(missing) > 0 {
		text += "; Service " + t.front.String() + " has no port for " + strings.Join(missing, ", ")
	}
	return text
}

func dedupe(list []string) []string {
	slices.Sort(list)
	return slices.Compact(list)
}

// truncateAddresses drops addresses beyond maxAddresses.
func truncateAddresses(as []gwv1.GatewayStatusAddress) []gwv1.GatewayStatusAddress {
	return as[:min(len(as), maxAddresses)]
}
