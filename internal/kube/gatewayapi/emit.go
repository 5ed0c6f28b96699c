package gatewayapi

import (
	"errors"
	"fmt"
	"slices"
	"syscall"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// An emitted is a listener of the table, and the Gateways that it is for.
type emitted struct {
	*registry.Listener
	gateways []*gateway
	hosts    map[tunnel.Pattern]bool // of Sections
	at       string                  // the end of names, "@192.0.2.1"
}

// emit makes the table's listeners: one for each address and port, with sections for the
// listeners of all Gateways that share it.
func (t *translator) emit() {
	made := map[addrPort]*emitted{}
	var all []*emitted
	for _, g := range t.order {
		t.res.Accounts[key(g)] = t.in.account(g.Gateway)
		t.noteInfrastructure(g)
		if !g.isAccepted() {
			continue
		}
		var ports []portKey
		at := map[portKey][]*listener{}
		for _, l := range g.all() {
			if l.isAccepted() || t.keepsShut(l) {
				if at[l.portKey()] == nil {
					ports = append(ports, l.portKey())
				}
				at[l.portKey()] = append(at[l.portKey()], l)
			}
		}
		for _, p := range ports {
			ls := at[p]
			if !slices.ContainsFunc(ls, (*listener).isAccepted) {
				continue
			}
			sections := t.sections(ls)
			for _, a := range g.bound {
				one := made[addrPort{a.Bind, p}]
				if one == nil {
					one = &emitted{hosts: map[tunnel.Pattern]bool{}}
					if a.Bind.IsValid() {
						one.at = "@" + a.Bind.String()
					}
					protocol := ls[0].family()
					one.Listener = &registry.Listener{
						// The oldest Gateway's name. Another name does not close the socket.
						Name:     fmt.Sprintf("%s/%s/%s/%d%s", g.Namespace, g.Name, protocol, p.port, one.at),
						Protocol: protocol, Address: a.Bind, Port: uint16(p.port),
					}
					made[addrPort{a.Bind, p}] = one
					all = append(all, one)
				}
				one.gateways = append(one.gateways, g)
				for _, s := range named(sections, one.at) {
					if !one.hosts[s.Host] { // two that refuse the same
						one.hosts[s.Host] = true
						one.Sections = append(one.Sections, s)
					}
				}
				for _, l := range ls {
					l.names = append(l.names, one.Name)
					err := t.in.Plane[one.Name]
					if err == nil {
						err = t.in.Plane[l.String()+one.at]
					}
					if err != nil && l.openErr == nil {
						l.openErr, l.unassigned = err, errors.Is(err, syscall.EADDRNOTAVAIL)
					}
				}
			}
		}
	}
	for _, one := range all {
		one.Origin = originOf(one.gateways)
		t.res.Snapshot.Listeners = append(t.res.Snapshot.Listeners, one.Listener)
	}
}

// keepsShut reports whether l, which is not accepted, is kept to refuse its hostname: there is a
// conflict about it within its Gateway, and a wildcard listener must not get the name instead. The
// names of other Gateways are not affected.
func (t *translator) keepsShut(l *listener) bool {
	if l.refused.Type != "" || l.outdone || l.conflict.Reason != string(gwv1.ListenerReasonHostnameConflict) || l.family() != familyTLS {
		return false
	}
	for _, a := range l.gw.bound {
		if by, _, _ := t.shares[addrPort{a.Bind, l.portKey()}].rival(l); by != nil {
			return false
		}
	}
	return true
}

// sections are those of the listeners of one port. Sections of one host are
// one: the first that is accepted.
func (t *translator) sections(ls []*listener) []*registry.Section {
	if ls[0].family() == familyHTTP {
		return nil
	}
	var out []*registry.Section
	taken := map[tunnel.Pattern]bool{}
	for _, accepted := range []bool{true, false} {
		for _, l := range ls {
			if l.isAccepted() != accepted || taken[l.host] {
				continue
			}
			taken[l.host] = true
			s := &registry.Section{Name: l.String(), Host: l.host, Clients: l.gw.clients}
			if accepted {
				t.fill(s, l)
			}
			out = append(out, s)
		}
	}
	return out
}

// named returns sections with a name of their own for each address.
func named(sections []*registry.Section, at string) []*registry.Section {
	if at == "" {
		return sections
	}
	out := make([]*registry.Section, len(sections))
	for i, s := range sections {
		one := *s
		one.Name += at
		out[i] = &one
	}
	return out
}

// fill says what a section does; one that does nothing refuses.
func (t *translator) fill(s *registry.Section, l *listener) {
	switch l.spec.Protocol {
	case gwv1.TLSProtocolType:
		if l.broken {
			return
		}
		s.TLS, s.Istio = l.ends, l.auto()
		s.Rules = t.tlsRules(l)
	case gwv1.TCPProtocolType, gwv1.UDPProtocolType:
		s.Rules = t.l4Rules(l)
	case gwv1.HTTPSProtocolType:
		// No HTTP is routed: TLS does not even end.
	}
}

// writeStatus has the status of all that is ours.
func (t *translator) writeStatus() {
	for _, g := range t.order {
		t.res.Gateways[key(g)] = t.gatewayStatus(g)
		for _, s := range append(g.sets[:len(g.sets):len(g.sets)], g.held...) {
			t.res.ListenerSets[key(s)] = t.setStatus(s)
		}
	}
	for _, o := range t.orphans {
		t.res.ListenerSets[key(o)] = orphanStatus(o)
	}
	for _, p := range t.all {
		t.res.Policies[key(p)] = t.policyStatus(p)
	}
}
