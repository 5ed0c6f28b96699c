package gatewayapi

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/tunnel"
)

// A portKey is a port of a transport, for which listeners can conflict.
type portKey struct {
	udp  bool
	port int32
}

func (l *listener) portKey() portKey { return portKey{l.family() == familyUDP, l.spec.Port} }

// A portClaim says which listeners have a port, or a part of it by hostname.
type portClaim struct {
	family string
	first  *listener                    // that claimed the port
	hosts  map[tunnel.Pattern]*listener // by the hostname that they claimed
}

// findConflicts finds listeners that cannot be told apart. Of those of one object none is served,
// because it is not known which one was meant. Between objects the first one keeps what it has: the
// Gateway, and then the oldest ListenerSet.
func (g *gateway) findConflicts() {
	taken := map[portKey]*portClaim{}
	claimPorts(taken, g.own)
	for _, s := range g.sets {
		claimPorts(taken, s.entries)
	}
}

// claimPorts adds the claims of the listeners of one object.
func claimPorts(taken map[portKey]*portClaim, ls []*listener) {
	var new []*listener
	for _, l := range ls {
		if l.refused.Type != "" {
			continue
		}
		if o := taken[l.portKey()]; o != nil {
			if reason, message := o.against(l); reason != "" {
				l.setConflict(reason, message)
				continue
			}
		}
		new = append(new, l)
	}
	// Conflicts among themselves: each with any other counts, not only with one before.
	for i, a := range new {
		for _, b := range new[i+1:] {
			if a.portKey() != b.portKey() {
				continue
			}
			o := &portClaim{family: a.family(), first: a, hosts: map[tunnel.Pattern]*listener{a.host: a}}
			reason, _ := o.against(b)
			if reason == "" {
				continue
			}
			for _, pair := range [][2]*listener{{a, b}, {b, a}} {
				if pair[0].conflict.Type == "" {
					pair[0].setConflict(reason, fmt.Sprintf("this %s listener conflicts with listener %s of port %d, and neither is served", pair[0].spec.Protocol, pair[1].spec.Name, pair[1].spec.Port))
				}
			}
		}
	}
	for _, l := range new {
		o := taken[l.portKey()]
		if o == nil {
			o = &portClaim{family: l.family(), first: l, hosts: map[tunnel.Pattern]*listener{}}
			taken[l.portKey()] = o
		}
		if o.family != l.family() {
			o.family = "several" // which no listener matches: a ListenerSet does not decide a conflict within the Gateway
		}
		if o.hosts[l.host] == nil {
			o.hosts[l.host] = l
		}
	}
}

// against says why l conflicts with the claim, or is "".
func (o *portClaim) against(l *listener) (reason, message string) {
	switch {
	case o.family != l.family():
		return string(gwv1.ListenerReasonProtocolConflict), fmt.Sprintf("port %d is already used by %s for protocol %s, which can't share it with %s", l.spec.Port, o.first.holder(), o.first.spec.Protocol, l.spec.Protocol)
	case !l.hasHost():
		// Two that have nothing but the port to be told by.
		return string(gwv1.ListenerEntryReasonListenerConflict), fmt.Sprintf("port %d of %s is already used by %s", l.spec.Port, l.spec.Protocol, o.first.holder())
	case o.hosts[l.host] != nil:
		return string(gwv1.ListenerReasonHostnameConflict), fmt.Sprintf("hostname %q of port %d is already used by %s", ptr.Deref(l.spec.Hostname, ""), l.spec.Port, o.hosts[l.host].holder())
	}
	return "", ""
}

// holder is what people read of a listener that has what another one wants.
func (l *listener) holder() string {
	return "listener " + string(l.spec.Name) + " of " + l.ownerKind() + " " + key(l.owner()).String()
}

func (l *listener) setConflict(reason, message string) {
	l.conflict = condition(string(gwv1.ListenerConditionConflicted), true, reason, message)
}

// findOverlaps finds listeners that terminate or pass TLS for names that another listener of the port
// has, too. It is legal, but a client that uses one connection for several names may reach the wrong
// one.
func findOverlaps(all []*listener) {
	at := map[portKey]map[tunnel.Pattern]*listener{} // no two have the same host
	for _, l := range all {
		if l.family() == familyTLS && l.isAccepted() {
			if at[l.portKey()] == nil {
				at[l.portKey()] = map[tunnel.Pattern]*listener{}
			}
			at[l.portKey()][l.host] = l
		}
	}
	for _, l := range all {
		hosts := at[l.portKey()]
		if l.family() != familyTLS || !l.isAccepted() || l.host == (tunnel.Pattern{}) {
			continue
		}
		for _, host := range including(l.host) {
			if other := hosts[host]; other != nil {
				l.setOverlap(other)
				other.setOverlap(l)
			}
		}
	}
}

func (l *listener) setOverlap(other *listener) {
	if l.overlap.Type != "" {
		return
	}
	message := fmt.Sprintf("hostnames overlap with those of listener %s", other.spec.Name)
	if other.set != l.set || other.gw != l.gw {
		message = "hostnames overlap with those of a listener of another object"
	}
	l.overlap = metav1.Condition{
		Type: string(gwv1.ListenerConditionOverlappingTLSConfig), Status: metav1.ConditionTrue,
		Reason: string(gwv1.ListenerReasonOverlappingHostnames), Message: message,
	}
}

// intersect returns the names that two patterns have in common: always all of one of
// them, or none. The zero Pattern is every name.
func intersect(a, b tunnel.Pattern) (tunnel.Pattern, bool) {
	switch any := (tunnel.Pattern{}); {
	case a == any:
		return b, true
	case b == any, a == b:
		return a, true
	case within(a, b):
		return a, true
	case within(b, a):
		return b, true
	}
	return tunnel.Pattern{}, false
}

// within reports whether every name of a is one of the wildcard b.
func within(a, b tunnel.Pattern) bool { return b.Wildcard && b.Matches(a.Suffix) }
