package gatewayapi

import (
	"slices"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A claim is of one hostname of a TLSRoute to its share of a listener's names.
type claim struct {
	own   tunnel.Pattern // as the route has it
	names tunnel.Pattern // what it has in common with the listener
	route *route
	turn  int // of the route among all: the lower was there before
}

// tlsRules are the rules of a TLS listener, each with names that no other has.
// Of several routes with the same names only one is in force: that whose own
// hostname is the more specific, and not its intersection with the listener's;
// then the oldest.
func (t *translator) tlsRules(l *listener) []*registry.Rule {
	var claims []claim
	for i, a := range l.rules {
		for _, h := range a.hosts {
			if names, ok := intersect(h, l.host); ok {
				claims = append(claims, claim{h, names, a.route, i})
			}
		}
	}
	slices.SortStableFunc(claims, func(a, b claim) int {
		if n := rank(b.own) - rank(a.own); n != 0 {
			return n
		}
		return a.turn - b.turn
	})
	won := map[tunnel.Pattern]*claim{}
	var rules []*registry.Rule
	var last *claim
	for i := range claims {
		c := &claims[i]
		if first := won[c.names]; first != nil {
			if first.route != c.route {
				why := before(first.route, c.route)
				if rank(first.own) != rank(c.own) {
					why = "whose hostname is more specific"
				}
				l.addShadowed(c.route, namesOf(c.names)+" of listener "+string(l.spec.Name), first.route, why)
			}
			continue
		}
		won[c.names] = c
		// Names of one route and rank stand together: none of them is within another.
		if last != nil && last.route == c.route && rank(last.names) == rank(c.names) {
			r := rules[len(rules)-1]
			r.Names = append(r.Names, c.names)
			continue
		}
		last = c
		if c.names == (tunnel.Pattern{}) {
			rules = append(rules, t.rule(l, c.route)) // no names are any
			continue
		}
		rules = append(rules, t.rule(l, c.route, c.names))
	}
	return rules
}

// rank says how specific a pattern is: any exact name before the longest
// wildcard, any of those before all.
func rank(p tunnel.Pattern) int {
	switch {
	case p == (tunnel.Pattern{}):
		return 0
	case p.Wildcard:
		return 1 + strings.Count(p.Suffix.String(), ".")
	}
	return 1 << 20
}

// rule makes the rule of a route at a listener.
func (t *translator) rule(l *listener, r *route, names ...tunnel.Pattern) *registry.Rule {
	rule := &registry.Rule{Name: r.String(), Names: names, Clients: r.clients, Origin: r.kind + " " + r.GetNamespace() + "/" + r.GetName()}
	tls := r.kind == tcpRoute || r.kind == tlsRoute && l.terminates()
	for _, b := range r.backends {
		rule.Backends = append(rule.Backends, t.forRule(l.gw, b, tls))
	}
	return rule
}
