// Package endpoints keeps the EndpointSlices of a cluster, and says which of a Service's endpoints
// are to be used.
//
//	store := endpoints.NewStore(endpoints.Config{Client: c})
//	go store.Run(ctx)
//	...
//	var parts []endpoints.Part
//	for _, s := range store.Of(endpoints.OfService("shop", "web")) {
//		parts = append(parts, endpoints.Part{Endpoints: s.Endpoints, Port: portOf(s)})
//	}
//	c := endpoints.Choice{Zone: "west-1a"}
//	c.Choose(parts, func(e *endpoints.Endpoint, port uint16) { ... })
//
// Discovery and Gateway API choose endpoints by the same rules: those that are ready, or, if there
// are none, those that still serve while they terminate; those that hints name for our zone, if all
// have hints; and one address of each pod, not both families.
//
// They share one Store for each cluster: an EndpointSlice is received, decoded and kept once.
package endpoints

import (
	"cmp"
	"hash/fnv"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// An Endpoint has the fields of an EndpointSlice's endpoint that culvert uses.
// Strings that many have are there once.
type Endpoint struct {
	Addr  netip.Addr
	Pod   uint64   // a hash of who it is; 0 where that is not said
	Host  string   // its hostname, in lower case; "" where there is none, or it is no label
	Node  string   // that it is on
	Zone  string   // that it is in; "" where that is not said
	Hints []string // the zones that it is for; nil where that is not said
	State State

	// Workload is who serves it; nil before Store.SelectPods is called.
	Workload *policy.Workload
}

// A State is what may be done with an endpoint.
type State uint8

// States, the better ones higher.
const (
	NotReady State = iota
	Draining       // terminating, but it still serves
	Ready
)

// Of returns the Endpoint of e. It is false where there is nothing to be dialed: no address, a name
// in place of one, or one that is never a pod's. The API server refuses those as well, but culvert
// would dial whatever is in the table.
func Of(e *discoveryv1.Endpoint) (out Endpoint, ok bool) {
	if len(e.Addresses) == 0 {
		return out, false
	}
	// The others of the list are the same by definition: "fungible".
	a, err := netip.ParseAddr(e.Addresses[0])
	if err != nil {
		return out, false
	}
	out.Addr = a.Unmap()
	if _, never := tunnel.Forbidden(out.Addr); never {
		return out, false
	}
	out.State = stateOf(e.Conditions)
	if e.Hostname != nil && IsLabel(*e.Hostname) {
		out.Host = strings.ToLower(*e.Hostname)
	}
	if e.NodeName != nil {
		out.Node = Shared(*e.NodeName)
	}
	if e.Zone != nil && isZone(*e.Zone) {
		out.Zone = Shared(*e.Zone)
	}
	if e.Hints != nil {
		for _, z := range e.Hints.ForZones {
			out.Hints = append(out.Hints, Shared(z.Name))
		}
	}
	if t := e.TargetRef; t != nil {
		if t.UID != "" {
			out.Pod = podID(t.UID)
		} else {
			out.Pod = podID(types.UID(t.Kind + "/" + t.Namespace + "/" + t.Name))
		}
	}
	return out, true
}

// podID returns the Endpoint.Pod of a pod.
func podID(uid types.UID) uint64 {
	h := fnv.New64a()
	h.Write([]byte(uid))
	return h.Sum64()
}

func stateOf(c discoveryv1.EndpointConditions) State {
	isReady := c.Ready == nil || *c.Ready
	serving := isReady
	if c.Serving != nil {
		serving = *c.Serving
	}
	switch {
	case isReady:
		return Ready
	case serving && c.Terminating != nil && *c.Terminating:
		return Draining
	}
	return NotReady
}

// Shared returns s, in the one copy that there is of it.
func Shared(s string) string {
	if s == "" {
		return ""
	}
	return unique.Make(s).Value()
}

// IsLabel reports whether s is one label of a name as Kubernetes has them.
func IsLabel(s string) bool {
	if s == "" || len(s) > tunnel.MaxLabelLen || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-':
		default:
			return false
		}
	}
	return true
}

// isZone reports whether s has the characters and the length of a label's value, as the zone of a node
// has. An EndpointSlice that somebody made by hand may say anything else.
func isZone(s string) bool {
	const most = 63
	if s == "" || len(s) > most {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_', c == '.':
		default:
			return false
		}
	}
	return true
}

// CompareZones is an order of the zones that two slices say of one address: an address has the first
// one, so that it does not matter which slice is read first. Known zones come before "".
func CompareZones(a, b string) int {
	if (a == "") != (b == "") {
		return strings.Compare(b, a)
	}
	return strings.Compare(a, b)
}

// Before is an order of what two slices say of one address.
func (e *Endpoint) Before(o *Endpoint) bool {
	if (e.Host == "") != (o.Host == "") {
		return e.Host != ""
	}
	return cmp.Or(cmp.Compare(e.Host, o.Host), cmp.Compare(e.Pod, o.Pod), CompareZones(e.Zone, o.Zone)) < 0
}

// The values of Choice.Prefer.
const (
	PreferIPv4 = "ipv4"
	PreferIPv6 = "ipv6"
	PreferBoth = "both" // each pod by both of its addresses
)

// A Choice has what the choice of endpoints depends on: the Service, and the
// gateway's own place.
type Choice struct {
	Zone     string // that we are in; "" ignores hints
	Prefer   string // a family; "" means the Service's first
	V6       bool   // that is IPv6
	Headless bool   // all endpoints are meant, each by its name: hints are ignored
}

// ChoiceOf returns the choice for a Service.
func ChoiceOf(s *corev1.Service, zone, prefer string) Choice {
	return Choice{
		Zone: zone, Prefer: prefer,
		V6:       len(s.Spec.IPFamilies) > 0 && s.Spec.IPFamilies[0] == corev1.IPv6Protocol,
		Headless: s.Spec.ClusterIP == corev1.ClusterIPNone,
	}
}

// A Part is a slice as far as it is of one port.
type Part struct {
	Endpoints []Endpoint
	Port      uint16 // of those
}

// Choose calls use with those of one port's endpoints that are to be used, each as
// often as it is in parts, and with both families of a pod: see Doubles.
func (c Choice) Choose(parts []Part, use func(e *Endpoint, port uint16)) {
	best, hinted, here := NotReady, true, false
	for _, p := range parts {
		for i := range p.Endpoints {
			e := &p.Endpoints[i]
			best = max(best, e.State)
			if e.State == Ready {
				hinted = hinted && len(e.Hints) > 0
				here = here || slices.Contains(e.Hints, c.Zone)
			}
		}
	}
	if best == NotReady {
		return
	}
	near := best == Ready && c.Zone != "" && hinted && here && !c.Headless
	for _, p := range parts {
		for i := range p.Endpoints {
			if e := &p.Endpoints[i]; e.State == best && (!near || slices.Contains(e.Hints, c.Zone)) {
				use(e, p.Port)
			}
		}
	}
}

// Doubles returns those of addresses, which come with their Endpoint.Pod, that are
// of a pod which has an address of the preferred family among them.
func (c Choice) Doubles(addresses iter.Seq2[netip.Addr, uint64]) (doubles []netip.Addr) {
	v6 := c.V6
	switch c.Prefer {
	case PreferBoth:
		return nil
	case PreferIPv4:
		v6 = false
	case PreferIPv6:
		v6 = true
	}
	one, other := false, false
	for addr := range addresses {
		if addr.Is6() == v6 {
			one = true
		} else {
			other = true
		}
	}
	if !one || !other {
		return nil
	}
	has := map[uint64]bool{} // pods with an address of the family
	for addr, pod := range addresses {
		if addr.Is6() == v6 && pod != 0 {
			has[pod] = true
		}
	}
	for addr, pod := range addresses {
		if addr.Is6() != v6 && has[pod] {
			doubles = append(doubles, addr)
		}
	}
	return doubles
}
