package reverse

import (
	"slices"
	"strings"

	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// listedGroup returns which of the groups of a service r is for.
func listedGroup(r *Registration, groups []string) (string, error) {
	switch {
	case len(r.Allow) > 0:
		return "", tunnel.Refusef(tunnel.Denied, "reverse: %q is a service of the gateway's configuration, whose policies say who may connect: leave allow out", r.Name)
	case r.Group == "" && len(groups) == 1:
		return groups[0], nil
	case !slices.Contains(groups, r.Group):
		return "", tunnel.Refusef(tunnel.Denied, "reverse: %q: the service has no endpoint with group %q, it has %q", r.Name, r.Group, groups)
	}
	return r.Group, nil
}

// liveGroup is the group of a name that no service of the table has. No group that is
// written in a configuration begins like this.
func liveGroup(name tunnel.Pattern) string { return "@" + name.String() }

// policies returns what Allow says.
func (r *Registration) policies(owner string) []*policy.Policy {
	if len(r.Allow) == 0 {
		return nil
	}
	var sources []policy.Source
	for _, id := range r.Allow {
		if strings.HasPrefix(id, "spiffe://") {
			sources = append(sources, policy.Source{SPIFFE: []string{id}})
		} else {
			sources = append(sources, policy.Source{Users: []string{id}})
		}
	}
	return []*policy.Policy{{Name: "allow of " + r.Name.String(), Origin: "reverse session of " + owner, Rules: []policy.Rule{{Sources: &sources}}}}
}

// connectors returns how many connectors have the name by sessions of this replica. The caller
// holds mu.
func (h *heldName) connectors() int {
	if len(h.members) < 2 {
		return len(h.members)
	}
	all := make(map[any]struct{}, len(h.members))
	for _, m := range h.members {
		all[m.connector()] = struct{}{}
	}
	return len(all)
}

// connector returns what two memberships of one connector have in common.
func (m *Membership) connector() any {
	if m.process != "" {
		return m.process
	}
	return m.session
}

// isShared reports whether another connector has m's name, too.
func (g *Groups) isShared(m *Membership) bool {
	g.mu.RLock()
	defer g.mu.RUnlock()
	h, own := g.names[m.Name], m.connector()
	return h != nil && slices.ContainsFunc(h.members, func(o *Membership) bool { return o.connector() != own })
}

// logShared logs that a name that m has just joined has other connectors, too: they may be
// replicas, and they may be there by mistake.
func (g *Groups) logShared(m *Membership) {
	g.mu.RLock()
	n := 0
	if h := g.names[m.Name]; h != nil {
		n = h.connectors()
	}
	g.mu.RUnlock()
	g.log().Info("name has several connectors, which share its requests", "name", m.Name.String(), "connectors", n, "owner", m.Owner, "source", m.Source.String())
}

// setLive sets the service of h to what the sessions of a group serve once one has joined it
// by reg. The caller holds mu.
func (g *Groups) setLive(h *heldName, reg *Registration, group string, listed bool) {
	if h.listed = listed; listed {
		h.live, h.ports, h.allow = nil, nil, nil
		return
	}
	var ports []uint16
	for _, o := range g.groups[group] {
		ports = append(ports, o.Port)
	}
	for _, o := range g.remote[group] {
		ports = append(ports, o.Port)
	}
	slices.Sort(ports)
	if ports = slices.Compact(ports); len(ports) > 0 && ports[0] == 0 { // any port
		ports = nil
	}
	if h.live != nil && slices.Equal(ports, h.ports) && slices.Equal(reg.Allow, h.allow) {
		return
	}
	h.ports, h.allow = ports, slices.Clone(reg.Allow)
	h.live = &registry.LiveService{
		Service: registry.Service{
			Name: reg.Name.String(), Names: []tunnel.Pattern{reg.Name}, Ports: ports, Exposed: true,
			Endpoints: []registry.Endpoint{{Group: group}}, Origin: "a reverse session of " + h.owner,
		},
		Policies: reg.policies(h.owner),
	}
}
