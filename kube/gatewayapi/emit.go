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

// emit makes the table's listeners: for each Gateway one for each address and port.
func (t *translation) emit() {
	for _, g := range t.order {
		t.res.Accounts[key(g)] = account(g.Gateway)
		if !g.isAccepted() {
			continue
		}
		var places []place
		at := map[place][]*listener{}
		for _, l := range g.all() {
			// A listener that lost its hostname to a quarrel is there to refuse: a
			// wildcard beside it must not have the name now.
			if l.isAccepted() || l.refused.Type == "" && l.conflict.Reason == string(gwv1.ListenerReasonHostnameConflict) && l.family() == familyTLS {
				if at[l.place()] == nil {
					places = append(places, l.place())
				}
				at[l.place()] = append(at[l.place()], l)
			}
		}
		for _, p := range places {
			ls := at[p]
			if !slices.ContainsFunc(ls, (*listener).isAccepted) {
				continue
			}
			sections := t.sections(ls)
			for _, a := range g.bound {
				protocol, at := ls[0].family(), ""
				if a.Bind.IsValid() {
					at = "@" + a.Bind.String()
				}
				name := fmt.Sprintf("%s/%s/%s/%d%s", g.Namespace, g.Name, protocol, p.port, at)
				t.res.Snapshot.Listeners = append(t.res.Snapshot.Listeners, &registry.Listener{
					Name: name, Protocol: protocol, Address: a.Bind, Port: uint16(p.port), Sections: named(sections, at),
					Origin: "Gateway " + g.Namespace + "/" + g.Name,
				})
				for _, l := range ls {
					l.names = append(l.names, name)
					if err := t.w.Plane[name]; err != nil && l.openErr == nil {
						l.openErr, l.unassigned = err, errors.Is(err, syscall.EADDRNOTAVAIL)
					}
				}
			}
		}
	}
}

// sections are those of the listeners of one port. Sections of one host are
// one: the first that is accepted.
func (t *translation) sections(ls []*listener) []*registry.Section {
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
			s := &registry.Section{Name: l.String(), Host: l.host}
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
func (t *translation) fill(s *registry.Section, l *listener) {
	switch l.spec.Protocol {
	case gwv1.TLSProtocolType:
		if l.broken {
			return
		}
		s.Ends, s.Istio = l.ends, l.auto()
		s.Rules = t.tlsRules(l)
	case gwv1.TCPProtocolType, gwv1.UDPProtocolType:
		s.Rules = t.l4Rules(l)
	case gwv1.HTTPSProtocolType:
		// No HTTP is routed: TLS does not even end.
	}
}

// writeStatus has the status of all that is ours.
func (t *translation) writeStatus() {
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
