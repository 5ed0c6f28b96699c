package gatewayapi

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// The types of conditions that culvert writes. Others belong to other controllers, and are neither
// changed nor removed.
var (
	ownGateway  = []string{"Accepted", "Programmed", "ResolvedRefs", "InsecureFrontendValidationMode"}
	ownListener = []string{"Accepted", "Programmed", "ResolvedRefs", "Conflicted", "OverlappingTLSConfig"}
	ownSet      = []string{"Accepted", "Programmed"}
	ownClass    = []string{"Accepted", "SupportedVersion"}
	ownRoute    = []string{"Accepted", "ResolvedRefs", "PartiallyInvalid"}
	ownPolicy   = []string{"Accepted", "ResolvedRefs"}
)

// Limits of lists in the API.
const (
	maxParents   = 32
	maxAncestors = 16
)

// mergeConditions returns have with want merged in. A condition keeps its position and, as long as
// its status is the same, the time of its last transition. One that was written for a newer
// generation than ours is not changed: we shall see that generation, too.
func mergeConditions(have, want []metav1.Condition, own []string, now metav1.Time) []metav1.Condition {
	out := make([]metav1.Condition, 0, len(have)+len(want))
	for _, h := range have {
		i := slices.IndexFunc(want, func(w metav1.Condition) bool { return w.Type == h.Type })
		switch {
		case i >= 0 && h.ObservedGeneration > want[i].ObservedGeneration:
			out = append(out, h)
		case i >= 0:
			w := want[i]
			w.LastTransitionTime = h.LastTransitionTime
			if w.Status != h.Status || h.LastTransitionTime.IsZero() {
				w.LastTransitionTime = now
			}
			out = append(out, w)
		case !slices.Contains(own, h.Type):
			out = append(out, h)
		}
	}
	for _, w := range want {
		if !slices.ContainsFunc(out, func(o metav1.Condition) bool { return o.Type == w.Type }) {
			w.LastTransitionTime = now
			out = append(out, w)
		}
	}
	return out
}

func mergeClass(have gwv1.GatewayClassStatus, want ClassStatus, now metav1.Time) gwv1.GatewayClassStatus {
	have.Conditions = mergeConditions(have.Conditions, want.Conditions, ownClass, now)
	have.SupportedFeatures = want.Features
	return have
}

// newer reports whether conditions that are ours are of a newer generation than
// the one that want is of: then nothing of want is written.
func newer(have, want []metav1.Condition, own []string) bool {
	if len(want) == 0 {
		return false
	}
	return slices.ContainsFunc(have, func(c metav1.Condition) bool {
		return slices.Contains(own, c.Type) && c.ObservedGeneration > want[0].ObservedGeneration
	})
}

func mergeGateway(have, want gwv1.GatewayStatus, now metav1.Time) gwv1.GatewayStatus {
	if newer(have.Conditions, want.Conditions, ownGateway) {
		return have
	}
	want.Conditions = mergeConditions(have.Conditions, want.Conditions, ownGateway, now)
	want.Listeners = mergeListeners(have.Listeners, want.Listeners, now)
	return want
}

func mergeSet(have, want gwv1.ListenerSetStatus, now metav1.Time) gwv1.ListenerSetStatus {
	if newer(have.Conditions, want.Conditions, ownSet) {
		return have
	}
	want.Conditions = mergeConditions(have.Conditions, want.Conditions, ownSet, now)
	want.Listeners = mergeListeners(have.Listeners, want.Listeners, now)
	return want
}

// mergeListeners returns want with the conditions that others wrote of the same listeners.
func mergeListeners[L gwv1.ListenerStatus | gwv1.ListenerEntryStatus](have, want []L, now metav1.Time) (out []L) {
	for _, l := range want {
		l := gwv1.ListenerStatus(l)
		l.Conditions = stamped(mergeConditions(conditionsOf(have, l.Name), l.Conditions, ownListener, now), now)
		out = append(out, L(l))
	}
	return out
}

// conditionsOf returns the conditions of the listener of that name.
func conditionsOf[L gwv1.ListenerStatus | gwv1.ListenerEntryStatus](all []L, name gwv1.SectionName) []metav1.Condition {
	for _, l := range all {
		if l := gwv1.ListenerStatus(l); l.Name == name {
			return l.Conditions
		}
	}
	return nil
}

// stamped sets the time of conditions that are new.
func stamped(cs []metav1.Condition, now metav1.Time) []metav1.Condition {
	cs = slices.Clone(cs)
	for i := range cs {
		if cs[i].LastTransitionTime.IsZero() {
			cs[i].LastTransitionTime = now
		}
	}
	return cs
}

// mergeParents keeps what others wrote of a route.
func mergeParents(have []gwv1.RouteParentStatus, want RouteStatus, controller gwv1.GatewayController, home string, now metav1.Time) []gwv1.RouteParentStatus {
	out := []gwv1.RouteParentStatus{}
	done := make([]bool, len(want.Parents))
	for _, h := range have {
		if h.ControllerName != controller {
			out = append(out, h)
			continue
		}
		i := slices.IndexFunc(want.Parents, func(w gwv1.RouteParentStatus) bool { return sameParent(w.ParentRef, h.ParentRef, home) })
		switch {
		case i >= 0 && !done[i]:
			done[i] = true
			w := want.Parents[i]
			w.Conditions = mergeConditions(h.Conditions, w.Conditions, ownRoute, now)
			out = append(out, w)
		case i < 0 && want.Others != nil && want.Others(h.ParentRef):
			out = append(out, h)
		}
	}
	for i, w := range want.Parents {
		if !done[i] && len(out) < maxParents {
			w.Conditions = stamped(w.Conditions, now)
			out = append(out, w)
		}
	}
	return out
}

// written reports whether a route has all that is wanted, and nothing else that
// is ours: then mergeParents would change nothing. It may be false even so; it is
// there because of thousands of routes all but one are as they were.
func written(have []gwv1.RouteParentStatus, want RouteStatus, controller gwv1.GatewayController) bool {
	n := 0
	for i := range have {
		h := &have[i]
		if h.ControllerName != controller {
			continue
		}
		if n == len(want.Parents) {
			return false
		}
		w := &want.Parents[n]
		if !identicalRefs(&h.ParentRef, &w.ParentRef) || !slices.EqualFunc(h.Conditions, w.Conditions, func(h, w metav1.Condition) bool {
			return h.Type == w.Type && h.Status == w.Status && h.Reason == w.Reason && h.Message == w.Message &&
				h.ObservedGeneration == w.ObservedGeneration && !h.LastTransitionTime.IsZero()
		}) {
			return false
		}
		n++
	}
	return n == len(want.Parents)
}

// identicalRefs compares references as they are written.
func identicalRefs(a, b *gwv1.ParentReference) bool {
	return a.Name == b.Name && equal(a.Group, b.Group) && equal(a.Kind, b.Kind) && equal(a.Namespace, b.Namespace) &&
		equal(a.SectionName, b.SectionName) && equal(a.Port, b.Port)
}

func equal[T comparable](a, b *T) bool { return a == b || a != nil && b != nil && *a == *b }

// mergeAncestors keeps what others wrote of a policy. The API permits sixteen entries; later ones
// are dropped.
func mergeAncestors(have, want []gwv1.PolicyAncestorStatus, controller gwv1.GatewayController, home string, now metav1.Time) []gwv1.PolicyAncestorStatus {
	out := []gwv1.PolicyAncestorStatus{}
	done := make([]bool, len(want))
	for _, h := range have {
		if h.ControllerName != controller {
			out = append(out, h)
			continue
		}
		i := slices.IndexFunc(want, func(w gwv1.PolicyAncestorStatus) bool { return sameParent(w.AncestorRef, h.AncestorRef, home) })
		if i >= 0 && !done[i] {
			done[i] = true
			w := want[i]
			w.Conditions = mergeConditions(h.Conditions, w.Conditions, ownPolicy, now)
			out = append(out, w)
		}
	}
	for i, w := range want {
		if !done[i] && len(out) < maxAncestors {
			w.Conditions = stamped(w.Conditions, now)
			out = append(out, w)
		}
	}
	return out
}
