package gatewayapi

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/internal/kube/endpoints"
)

// assignAddresses says at which addresses each Gateway listens, and then which
// of several Gateways at one address has which port.
func (t *translator) assignAddresses() {
	if t.wild() {
		public, known := t.public()
		for _, g := range t.order {
			if !known {
				public = g.Status.Addresses // until more is
			}
			t.everywhere(g, truncateAddresses(public))
		}
	} else {
		t.assignEach()
	}
	t.claimPorts()
}

// wild reports whether listeners are at all addresses of the machine: one at
// every address beside one at a particular one can't be.
func (t *translator) wild() bool {
	return len(t.in.Addresses) == 0 || slices.ContainsFunc(t.in.Addresses, func(a Address) bool { return a.Bind.IsUnspecified() })
}

// everywhere has g listen at all addresses, of which clients know public.
func (t *translator) everywhere(g *gateway, public []gwv1.GatewayStatusAddress) {
	g.bound = []Address{{}}
	if len(g.Spec.Addresses) == 0 || !slices.ContainsFunc(g.Spec.Addresses, func(a gwv1.GatewaySpecAddress) bool { return a.Value != "" }) {
		g.published = public
		if len(public) == 0 {
			g.unfound = cmp.Or(t.unled, "culvert listens on all addresses and does not know how clients reach them: configure its public addresses, or the Service in front of it")
		}
		return
	}
	var bad []string
	for _, a := range g.Spec.Addresses {
		i := slices.IndexFunc(public, func(p gwv1.GatewayStatusAddress) bool { return sameAddr(p.Value, a.Value) })
		if a.Value != "" && i < 0 {
			bad = append(bad, strconv.Quote(a.Value))
		} else if i >= 0 {
			g.published = append(g.published, public[i])
		}
	}
	if bad != nil {
		g.unusable = "not among the addresses of culvert: " + strings.Join(bad, ", ")
	}
	if g.published == nil {
		g.bound = nil
	}
}

// public are the addresses that clients know of a process that listens everywhere. It
// is false as long as they can't be told.
func (t *translator) public() (as []gwv1.GatewayStatusAddress, known bool) {
	for _, a := range t.in.Addresses {
		if a.Public.IsValid() {
			as = append(as, ipAddress(a.Public))
		}
	}
	for _, a := range t.in.PublicAddresses {
		as = append(as, ipAddress(a))
	}
	n := t.in.PublicService
	if n.Name == "" {
		return as, true
	}
	s := t.service(n.Namespace, n.Name)
	if s == nil {
		t.unled = t.absent("services", "Services", n.Namespace, "Service "+n.String()) + ", through which clients connect"
		return as, true
	}
	before := len(as)
	for _, in := range s.Status.LoadBalancer.Ingress {
		if ip, err := netip.ParseAddr(in.IP); err == nil {
			as = append(as, ipAddress(ip))
		} else if in.Hostname != "" {
			typ := gwv1.HostnameAddressType
			as = append(as, gwv1.GatewayStatusAddress{Type: &typ, Value: in.Hostname})
		}
	}
	for _, ip := range endpoints.Addrs(s.Spec.ExternalIPs) {
		as = append(as, ipAddress(ip))
	}
	if len(as) > before {
		t.findPorts(s, false)
		return as, true
	}
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
		t.unled = "Service " + n.String() + " of type LoadBalancer has no address yet: the load balancer controller of this cluster has not assigned one; see the Events of the Service"
		return as, true
	}
	if s.Spec.Type == corev1.ServiceTypeNodePort {
		at, known := t.atNodes(s)
		if !known {
			return as, false
		}
		for _, ip := range at {
			as = append(as, ipAddress(ip))
		}
		if len(at) > 0 {
			t.findPorts(s, true)
			return as, true
		}
	}
	for _, ip := range endpoints.Addrs(s.Spec.ClusterIPs) {
		as = append(as, ipAddress(ip))
	}
	if len(as) > before {
		t.findPorts(s, false)
	} else {
		t.unled = "Service " + n.String() + ", through which clients connect, has no address: it is headless"
	}
	return as, true
}

func ipAddress(a netip.Addr) gwv1.GatewayStatusAddress {
	typ := gwv1.IPAddressType
	return gwv1.GatewayStatusAddress{Type: &typ, Value: a.Unmap().String()}
}

// sameAddr compares addresses as people write them.
func sameAddr(a, b string) bool {
	x, errX := netip.ParseAddr(a)
	y, errY := netip.ParseAddr(b)
	if errX != nil || errY != nil {
		return a == b
	}
	return x.Unmap() == y.Unmap()
}

// find returns the address of ours that clients know as s.
func (t *translator) find(s string) (Address, bool) {
	for _, a := range t.in.Addresses {
		if sameAddr(a.public().String(), s) {
			return a, true
		}
	}
	return Address{}, false
}

func (a Address) public() netip.Addr {
	if a.Public.IsValid() {
		return a.Public
	}
	return a.Bind
}

// assignEach gives every Gateway addresses of its own: first to those whose status has some, which
// keep them, then to those that ask for particular ones, and then to the others, oldest first. An
// unused address is preferred to one that can be shared because the ports differ, and that to one
// where the hostnames differ.
func (t *translator) assignEach() {
	users := map[netip.Addr][]*gateway{}
	take := func(g *gateway, a Address) {
		if !slices.Contains(g.bound, a) {
			g.bound = append(g.bound, a)
			g.published = append(g.published, ipAddress(a.public()))
			users[a.Bind] = append(users[a.Bind], g)
		}
	}
	var taken shares    // what users have, from when it is asked for
	var open []*gateway // that are to get one
	for _, g := range t.order {
		wants, has := len(g.Spec.Addresses) == 0, false
		var bad []string
		for _, s := range g.Spec.Addresses {
			a, ok := t.find(s.Value)
			switch {
			case s.Value == "":
				wants = true
			case ok:
				take(g, a)
			default:
				bad = append(bad, strconv.Quote(s.Value))
			}
		}
		if bad != nil {
			g.unusable = "not among the addresses that culvert may use: " + strings.Join(bad, ", ")
		}
		if !wants {
			continue
		}
		for _, s := range g.Status.Addresses {
			a, ok := t.find(s.Value)
			if ok && !has && !slices.Contains(g.bound, a) {
				take(g, a)
				has = true
			}
		}
		if !has {
			open = append(open, g)
		}
	}
	for _, g := range open {
		a, ok := t.choose(g, users)
		if !ok {
			if taken == nil {
				taken = shares{}
				for at, gs := range users {
					for _, o := range gs {
						taken.addAll(o, at)
					}
				}
			}
			i := slices.IndexFunc(t.in.Addresses, func(a Address) bool { return taken.fits(g, a.Bind) })
			if ok = i >= 0; ok {
				a = t.in.Addresses[i]
			}
		}
		if ok {
			take(g, a)
			if taken != nil {
				taken.addAll(g, a.Bind)
			}
		} else if len(g.bound) == 0 {
			g.unfound = fmt.Sprintf("each of the %d addresses has another Gateway with one of these ports and hostnames; give culvert more, or this Gateway other ports or hostnames", len(t.in.Addresses))
		}
	}
}

// choose finds an address for a Gateway that has none, at which no other Gateway has one of
// its ports.
func (t *translator) choose(g *gateway, users map[netip.Addr][]*gateway) (Address, bool) {
	for _, a := range t.in.Addresses {
		if len(users[a.Bind]) == 0 {
			return a, true
		}
	}
	for _, a := range t.in.Addresses {
		if !slices.ContainsFunc(users[a.Bind], func(o *gateway) bool { return o != g && clash(o, g) }) {
			return a, true
		}
	}
	return Address{}, false
}

// clash reports whether two Gateways can't be at one address.
func clash(a, b *gateway) bool {
	at := map[portKey]bool{}
	for _, l := range a.all() {
		at[l.portKey()] = l.isAccepted() || at[l.portKey()]
	}
	return slices.ContainsFunc(b.all(), func(l *listener) bool { return l.isAccepted() && at[l.portKey()] })
}

// wasAt reports whether g's status has all the addresses that it is at.
func (g *gateway) wasAt() bool {
	for _, p := range g.published {
		if !slices.ContainsFunc(g.Status.Addresses, func(s gwv1.GatewayStatusAddress) bool { return sameAddr(s.Value, p.Value) }) {
			return false
		}
	}
	return true
}

// whereOf is what people read of an address that Gateways share.
func whereOf(a Address) string {
	if !a.Bind.IsValid() {
		return "all addresses"
	}
	return "address " + a.public().String()
}
