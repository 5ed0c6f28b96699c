package gatewayapi

import (
	"fmt"
	"net/netip"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/tunnel"
)

// Gateways that are at one address share its ports where hostnames tell their listeners
// apart, as the listeners of one Gateway do. Of the Gateways of one namespace the more
// specific hostname has a name. Between namespaces no hostname may include another: a
// Gateway must not take names away from the Gateway of another owner.

// A share is a port of an address, and which listeners have it.
type share struct {
	first *listener
	hosts map[tunnel.Pattern]*listener
	// For each wildcard, the listeners with a hostname that it includes: the first one, and the first
	// one of another namespace. The zero Pattern includes every hostname.
	below map[tunnel.Pattern][2]*listener
	all   []*listener
	mixed bool // by several Gateways
}

// rival returns the listener that keeps l from having its part of s, and why; nil if there is none.
// The listeners of l's own Gateway are no rivals: see findConflicts.
func (s *share) rival(l *listener) (by *listener, reason gwv1.ListenerConditionReason, what string) {
	if s == nil {
		return nil, "", ""
	}
	if s.first.family() != l.family() || !l.hasHost() {
		if s.first.gw == l.gw {
			return nil, "", ""
		}
		return s.first, gwv1.ListenerReasonPortUnavailable, fmt.Sprintf("has port %d", l.spec.Port)
	}
	const conflict = gwv1.ListenerReasonHostnameConflict
	if o := s.hosts[l.host]; o != nil && o.gw != l.gw {
		return o, conflict, fmt.Sprintf("has %s at port %d", hostText(l), l.spec.Port)
	}
	stranger := func(o *listener) bool { return o != nil && o.gw.Namespace != l.gw.Namespace }
	for _, p := range including(l.host) {
		if o := s.hosts[p]; stranger(o) {
			return o, conflict, fmt.Sprintf("has %s at port %d, which includes %s", hostText(o), l.spec.Port, hostText(l))
		}
	}
	for _, o := range s.below[l.host] {
		if stranger(o) {
			return o, conflict, fmt.Sprintf("has %s at port %d, which is one of %s", hostText(o), l.spec.Port, hostText(l))
		}
	}
	return nil, "", ""
}

// add gives l its part of s, unless another listener has it.
func (s *share) add(l *listener) {
	if s.first == nil {
		s.first = l
	}
	s.mixed = s.mixed || s.first.gw != l.gw
	s.all = append(s.all, l)
	if s.hosts[l.host] == nil {
		s.hosts[l.host] = l
	}
	for _, p := range including(l.host) {
		switch two := s.below[p]; {
		case two[0] == nil:
			s.below[p] = [2]*listener{l}
		case two[1] == nil && two[0].gw.Namespace != l.gw.Namespace:
			s.below[p] = [2]*listener{two[0], l}
		}
	}
}

func newShare() *share {
	return &share{hosts: map[tunnel.Pattern]*listener{}, below: map[tunnel.Pattern][2]*listener{}}
}

// including are the other patterns that match all that p does: wildcards, and the zero
// Pattern, which is any name.
func including(p tunnel.Pattern) (all []tunnel.Pattern) {
	if p == (tunnel.Pattern{}) {
		return nil
	}
	for parent, more := p.Suffix.Parent(); more; parent, more = parent.Parent() {
		all = append(all, tunnel.Pattern{Suffix: parent, Wildcard: true})
	}
	return append(all, tunnel.Pattern{})
}

// hostText is a listener's hostname for people.
func hostText(l *listener) string {
	if l.host == (tunnel.Pattern{}) {
		return "every hostname (its listener names none)"
	}
	return fmt.Sprintf("hostname %q", l.host)
}

// shares are those of all addresses.
type shares map[addrPort]*share

func (all shares) add(s addrPort, l *listener) {
	if all[s] == nil {
		all[s] = newShare()
	}
	all[s].add(l)
}

// addAll adds what listeners of g want at an address.
func (all shares) addAll(g *gateway, at netip.Addr) {
	for _, l := range g.all() {
		if l.isAccepted() {
			all.add(addrPort{at, l.portKey()}, l)
		}
	}
}

// A holding is what a listener has had: another one is not that of before.
type holding struct {
	portKey portKey
	host    tunnel.Pattern
}

// A holder is a listener among all.
type holder struct {
	owner types.UID
	name  gwv1.SectionName
}

func (l *listener) key() holder { return holder{l.owner().GetUID(), l.spec.Name} }

// isIncumbent reports whether l is in force already as it is now, and so keeps what it has: its status
// says so of this generation, or of an earlier one in which it was the same.
func (t *translator) isIncumbent(l *listener) bool {
	if !l.gw.wasAt() {
		return false
	}
	c, ok := l.lastProgrammed()
	if !ok || c.Status != metav1.ConditionTrue {
		return false
	}
	had, known := t.memo.held[l.key()]
	return c.ObservedGeneration == l.owner().GetGeneration() || known && had == holding{l.portKey(), l.host}
}

// claimPorts settles who has a port of an address that several Gateways are at, or, where
// hostnames are told apart, which part of it: whose listener is in force, or else the
// oldest. The others hear who has it, and nothing changes for that one.
func (t *translator) claimPorts() {
	t.shares = shares{}
	settled := map[*listener]bool{}
	var order []addrPort
	for _, incumbents := range []bool{true, false} {
		for _, g := range t.order {
			for _, l := range g.all() {
				if !g.isAccepted() {
					break
				}
				if !l.isAccepted() || settled[l] || incumbents && !t.isIncumbent(l) {
					continue
				}
				settled[l] = true
				if t.losesTo(l) {
					continue
				}
				for _, a := range g.bound {
					s := addrPort{a.Bind, l.portKey()}
					if t.shares[s] == nil {
						order = append(order, s)
					}
					t.shares.add(s, l)
				}
				t.memo.holding[l.key()] = holding{l.portKey(), l.host}
			}
		}
	}
	for _, s := range order {
		if share := t.shares[s]; share.mixed {
			findOverlaps(share.all)
		}
	}
}

// losesTo has l refused where another Gateway has what it wants at one of its addresses.
func (t *translator) losesTo(l *listener) bool {
	for _, a := range l.gw.bound {
		by, reason, what := t.shares[addrPort{a.Bind, l.portKey()}].rival(l)
		if by == nil {
			continue
		}
		l.outdone = true
		who := "Gateway " + key(by.gw).String()
		const another = ": give this listener another port, or make it a listener of that Gateway, by a ListenerSet or in its spec"
		if reason == gwv1.ListenerReasonPortUnavailable {
			l.refused = condition(string(gwv1.ListenerConditionAccepted), false, string(reason), who+" "+what+" of "+whereOf(a)+another)
			return true
		}
		text := who + " " + what
		if by.host != l.host {
			text += ", and Gateways of different namespaces can't divide a hostname and the names that it includes: give this listener another hostname or port"
		} else {
			text += ": give this listener another hostname or port"
		}
		l.setConflict(string(reason), text+", or make it a listener of that Gateway, by a ListenerSet or in its spec")
		return true
	}
	return false
}

// fits reports whether every listener of g could be at an address where those of all are.
func (all shares) fits(g *gateway, at netip.Addr) bool {
	for _, l := range g.all() {
		if !l.isAccepted() {
			continue
		}
		if by, _, _ := all[addrPort{at, l.portKey()}].rival(l); by != nil {
			return false
		}
	}
	return true
}

// originOf says which Gateways a listener of the table is for.
func originOf(gs []*gateway) string {
	if len(gs) == 1 {
		return "Gateway " + key(gs[0]).String()
	}
	const most = 8
	text := "Gateways "
	for i, g := range gs {
		if i == most {
			return text + fmt.Sprintf(" and %d more", len(gs)-i)
		}
		if i > 0 {
			text += ", "
		}
		text += key(g).String()
	}
	return text
}
