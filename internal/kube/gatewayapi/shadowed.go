package gatewayapi

import (
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/tunnel"
)

// reasonShadowed is of routes that others come before. It is no reason of a
// condition: Gateway API wants those routes accepted.
const reasonShadowed = "Shadowed"

// addShadowed records which of the names that r asks for at l go to another route.
func (l *listener) addShadowed(r *route, what string, to *route, why string) {
	if l.shadowed == nil {
		l.shadowed = map[*route][]string{}
	}
	l.shadowed[r] = append(l.shadowed[r], what+" goes to "+to.kind+" "+key(to).String()+", "+why)
}

// before says why first comes before r, as sorted has them.
func before(first, r *route) string {
	if first.GetCreationTimestamp().Unix() < r.GetCreationTimestamp().Unix() {
		return "which is older"
	}
	return "which is as old and comes first by name"
}

// noteShadowed notes of routes which others come before them.
func (t *translator) noteShadowed() {
	for _, g := range t.order {
		for _, l := range g.all() {
			for r := range l.shadowed {
				if _, done := t.res.Notes[r.key()]; !done {
					t.noteShadowedOf(r)
				}
			}
		}
	}
}

func (t *translator) noteShadowedOf(r *route) {
	parents := t.res.Routes[r.key()].Parents
	for i := range parents {
		_, listeners, _ := t.parent(r, parents[i].ParentRef)
		var unreachable []string
		for _, l := range listeners {
			if l.isOf(parents[i].ParentRef) {
				unreachable = append(unreachable, l.shadowed[r]...)
			}
		}
		if unreachable == nil {
			continue
		}
		text := strings.Join(unreachable, "; ")
		if n := (note{reasonShadowed, truncate(text)}); !slices.Contains(t.res.Notes[r.key()], n) {
			t.res.Notes[r.key()] = append(t.res.Notes[r.key()], n)
		}
		cs := parents[i].Conditions
		j := slices.IndexFunc(cs, func(c metav1.Condition) bool { return c.Type == string(gwv1.RouteConditionAccepted) })
		cs[j].Message = truncate(cs[j].Message + ", but " + text)
	}
}

// namesOf is what people read of a pattern.
func namesOf(p tunnel.Pattern) string {
	if p == (tunnel.Pattern{}) {
		return "every name"
	}
	return p.String()
}
