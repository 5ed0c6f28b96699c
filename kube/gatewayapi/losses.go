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

// lose notes that of what r asks for at l, what goes to another route.
func (l *listener) lose(r *route, what string, to *route, why string) {
	if l.losses == nil {
		l.losses = map[*route][]string{}
	}
	l.losses[r] = append(l.losses[r], what+" goes to "+to.kind+" "+key(to).String()+", "+why)
}

// before says why first comes before r, as sorted has them.
func before(first, r *route) string {
	if first.GetCreationTimestamp().Unix() < r.GetCreationTimestamp().Unix() {
		return "which is older"
	}
	return "which is as old and comes first by name"
}

// noteLosses says of routes that others come before who they are.
func (t *translation) noteLosses() {
	for _, g := range t.order {
		for _, l := range g.all() {
			for r := range l.losses {
				if _, done := t.res.Notes[r.key()]; !done {
					t.noteLossesOf(r)
				}
			}
		}
	}
}

func (t *translation) noteLossesOf(r *route) {
	parents := t.res.Routes[r.key()].Parents
	for i := range parents {
		_, listeners, _ := t.parent(r, parents[i].ParentRef)
		var lost []string
		for _, l := range listeners {
			if l.isOf(parents[i].ParentRef) {
				lost = append(lost, l.losses[r]...)
			}
		}
		if lost == nil {
			continue
		}
		text := strings.Join(lost, "; ")
		if n := (note{reasonShadowed, clip(text)}); !slices.Contains(t.res.Notes[r.key()], n) {
			t.res.Notes[r.key()] = append(t.res.Notes[r.key()], n)
		}
		cs := parents[i].Conditions
		j := slices.IndexFunc(cs, func(c metav1.Condition) bool { return c.Type == string(gwv1.RouteConditionAccepted) })
		cs[j].Message = clip(cs[j].Message + ", but " + text)
	}
}

// namesOf is what people read of a pattern.
func namesOf(p tunnel.Pattern) string {
	if p == (tunnel.Pattern{}) {
		return "every name"
	}
	return p.String()
}
