package gateway

import (
	"fmt"
	"iter"
	"slices"
	"strings"

	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// listPolicies yields the services of t, those of rules too, with the listeners that lead
// there and the policies that decide.
func listPolicies(t *registry.Table, wanted func(*registry.Service) bool) iter.Seq[*ListedService] {
	return func(yield func(*ListedService) bool) {
		open, pinned, routed := leadingListeners(t)
		for s, set := range t.ServicesWithPolicies() {
			if !wanted(s) {
				continue
			}
			l := listService(t, s)
			if l.Listeners = routed[s]; len(l.Listeners) == 0 { // no backend of a rule
				l.Listeners = slices.Clone(open)
				for _, p := range s.Names {
					l.Listeners = append(l.Listeners, pinned[p.Suffix]...)
				}
			} else {
				l.Exposed = true
			}
			for _, p := range set.Policies() {
				if p.Verb == policy.Connect {
					l.Policies = append(l.Policies, listPolicy(p))
				}
			}
			if !yield(l) {
				return
			}
		}
	}
}

// leadingListeners returns the listeners that lead to every service, those that are for a
// name alone, and those with rules for a backend.
func leadingListeners(t *registry.Table) (open []string, pinned map[tunnel.Name][]string, routed map[*registry.Service][]string) {
	pinned, routed = map[tunnel.Name][]string{}, map[*registry.Service][]string{}
	for l := range t.Listeners() {
		switch {
		case l.Settings != nil && l.Settings.Service.IsZero():
			open = append(open, l.Name)
		case l.Settings != nil:
			pinned[l.Settings.Service] = append(pinned[l.Settings.Service], l.Name)
		}
		for _, s := range l.Sections {
			for _, r := range s.Rules {
				for i := range r.Backends {
					if to := r.Backends[i].Service; to != nil && !slices.Contains(routed[to], s.Name) {
						routed[to] = append(routed[to], s.Name)
					}
				}
			}
		}
	}
	return open, pinned, routed
}

func listPolicy(p *policy.Policy) ListedPolicy {
	l := ListedPolicy{Name: p.Name, Origin: p.Origin, Tier: p.Tier.String(), Action: p.Action.String(), DryRun: p.DryRun, Callers: []string{}}
	for i := range p.Rules {
		r, note := &p.Rules[i], ""
		if r.Ports != nil {
			note += fmt.Sprintf(" at ports %s", portsText(*r.Ports))
		}
		if r.Protocols != nil {
			note += " by " + orNothing(*r.Protocols)
		}
		if r.Sources == nil {
			l.Callers = append(l.Callers, "everybody"+note)
			continue
		}
		for j := range *r.Sources {
			l.Callers = append(l.Callers, sourceText(&(*r.Sources)[j])+note)
		}
	}
	return l
}

func orNothing(list []string) string {
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, " or ")
}

func portsText(ranges []policy.PortRange) string {
	var list []string
	for _, r := range ranges {
		if text := fmt.Sprint(r.First); r.Last > r.First {
			list = append(list, fmt.Sprintf("%s-%d", text, r.Last))
		} else {
			list = append(list, text)
		}
	}
	return orNothing(list)
}

// sourceText names the callers of s.
func sourceText(s *policy.Source) string {
	var parts []string
	add := func(what string, list []string) {
		if len(list) > 0 {
			parts = append(parts, what+strings.Join(list, " or "))
		}
	}
	add("", s.SPIFFE)
	add("", s.Users)
	for i, a := range s.ServiceAccounts {
		if i == 0 {
			parts = append(parts, "account ")
		} else {
			parts[len(parts)-1] += " or "
		}
		parts[len(parts)-1] += a.Namespace + "/" + a.Name
	}
	add("namespace ", s.Namespaces)
	add("trust domain ", s.TrustDomains)
	for _, claim := range sortedKeys(s.Claims) {
		add("claim "+claim+" ", s.Claims[claim])
	}
	add("stated by ", s.Actors)
	add("network ", s.Networks)
	var ranges []string
	for _, p := range s.CIDRs {
		ranges = append(ranges, p.String())
	}
	add("", ranges)
	if len(parts) == 0 {
		return "everybody"
	}
	return strings.Join(parts, " and ")
}

func sortedKeys(m map[string][]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
