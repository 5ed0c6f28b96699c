package gatewayapi

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// A listenerSet is one whose Gateway is ours.
type listenerSet struct {
	*gwv1.ListenerSet
	gw      *gateway
	denied  string // why the Gateway does not take it; "" if it does
	entries []*listener
}

// readListenerSets finds the sets of our Gateways, and which of them may be theirs.
func (t *translator) readListenerSets() {
	for _, o := range sorted(t.in.ListenerSets) {
		ref := o.Spec.ParentRef
		if ptr.Deref(ref.Group, gwv1.GroupName) != gwv1.GroupName || ptr.Deref(ref.Kind, "Gateway") != "Gateway" {
			continue
		}
		name := types.NamespacedName{Namespace: string(ptr.Deref(ref.Namespace, gwv1.Namespace(o.Namespace))), Name: string(ref.Name)}
		g := t.gateways[name]
		if g == nil {
			t.unheld[key(o)] = t.foreign[name]
			if t.isOrphan(o, name) {
				t.orphans = append(t.orphans, o)
			}
			continue
		}
		s := &listenerSet{ListenerSet: o, gw: g}
		s.denied = t.denySet(g, o)
		t.sets[key(o)] = s
		if s.denied != "" {
			g.held = append(g.held, s)
			continue
		}
		for i := range o.Spec.Listeners {
			e := o.Spec.Listeners[i]
			s.entries = append(s.entries, t.newListener(g, s, gwv1.Listener(e)))
		}
		g.sets = append(g.sets, s)
	}
}

// isOrphan reports whether the Gateway of a set is gone, and the set's status is ours to correct: a
// ListenerSet does not name its controller, but its managedFields name the writer of its status.
func (t *translator) isOrphan(o *gwv1.ListenerSet, gateway types.NamespacedName) bool {
	if _, there := t.foreign[gateway]; there || len(t.in.Namespaces) != 0 && !slices.Contains(t.in.Namespaces, gateway.Namespace) {
		return false
	}
	if t.in.Unread != nil && t.in.Unread("gateways", gateway.Namespace) {
		return false
	}
	return slices.ContainsFunc(o.ManagedFields, func(m metav1.ManagedFieldsEntry) bool { return m.Manager == fieldManager })
}

// orphanStatus is the status of a set whose Gateway is gone.
func orphanStatus(o *gwv1.ListenerSet) gwv1.ListenerSetStatus {
	gateway := types.NamespacedName{Namespace: string(ptr.Deref(o.Spec.ParentRef.Namespace, gwv1.Namespace(o.Namespace))), Name: string(o.Spec.ParentRef.Name)}
	message := "there is no Gateway " + gateway.String() + ": nothing is served"
	return gwv1.ListenerSetStatus{Conditions: observe(o.Generation, []metav1.Condition{
		condition(string(gwv1.ListenerSetConditionAccepted), false, string(gwv1.ListenerSetReasonParentNotAccepted), message),
		condition(string(gwv1.ListenerSetConditionProgrammed), false, reasonParentNotProgrammed, message),
	})}
}

// reasonParentNotProgrammed is that of sets whose Gateway is not in force.
const reasonParentNotProgrammed = "ParentNotProgrammed"

func (t *translator) denySet(g *gateway, o *gwv1.ListenerSet) string {
	var from gwv1.FromNamespaces
	var selector *metav1.LabelSelector
	if a := g.Spec.AllowedListeners; a != nil && a.Namespaces != nil {
		from, selector = ptr.Deref(a.Namespaces.From, gwv1.NamespacesFromNone), a.Namespaces.Selector
	}
	if from == "" || from == gwv1.NamespacesFromNone {
		return "the Gateway takes no ListenerSets: see its allowedListeners"
	}
	if !t.selects(from, selector, g.Namespace, o.Namespace) {
		text := fmt.Sprintf("the Gateway takes no ListenerSets of namespace %q: see its allowedListeners", o.Namespace)
		if why := t.unread("namespaces", "Namespaces", ""); why != "" && from == gwv1.NamespacesFromSelector {
			text += "; " + why + ", and they are selected by their labels"
		}
		return text
	}
	return ""
}

// selects reports whether an object of namespace home takes those of namespace.
func (t *translator) selects(from gwv1.FromNamespaces, selector *metav1.LabelSelector, home, namespace string) bool {
	switch from {
	case gwv1.NamespacesFromAll:
		return true
	case gwv1.NamespacesFromSame:
		return home == namespace
	case gwv1.NamespacesFromSelector:
		// No selector selects nothing, an empty one everything, and one that can't be
		// read nothing.
		s, err := metav1.LabelSelectorAsSelector(selector)
		if err != nil {
			return false
		}
		n := t.namespace(namespace)
		return n != nil && s.Matches(labels.Set(n.Labels))
	}
	return false
}

// valid reports whether an entry is good for anything: it is accepted, and has
// what it needs.
func (l *listener) valid() bool { return l.isAccepted() && !l.broken }

// accepted is the set's condition Accepted.
func (s *listenerSet) accepted() metav1.Condition {
	const kind = string(gwv1.ListenerSetConditionAccepted)
	if s.denied != "" {
		return condition(kind, false, string(gwv1.ListenerSetReasonNotAllowed), s.denied)
	}
	if !s.gw.isAccepted() {
		return condition(kind, false, string(gwv1.ListenerSetReasonParentNotAccepted), "the Gateway is not accepted")
	}
	var bad []string
	for _, l := range s.entries {
		if !l.valid() {
			bad = append(bad, string(l.spec.Name))
		}
	}
	switch {
	case len(bad) == 0:
		return condition(kind, true, string(gwv1.ListenerSetReasonAccepted), "all listeners are accepted")
	case len(bad) == len(s.entries):
		return condition(kind, false, string(gwv1.ListenerSetReasonListenersNotValid), "no listener is valid: "+strings.Join(bad, ", "))
	}
	return condition(kind, true, string(gwv1.ListenerSetReasonListenersNotValid), "these listeners are not valid, the others are: "+strings.Join(bad, ", "))
}

func (t *translator) setProgrammed(s *listenerSet) metav1.Condition {
	const kind = string(gwv1.ListenerSetConditionProgrammed)
	if c := s.accepted(); c.Status != metav1.ConditionTrue {
		reason := c.Reason
		if reason == string(gwv1.ListenerSetReasonParentNotAccepted) {
			reason = reasonParentNotProgrammed
		}
		return condition(kind, false, reason, c.Message)
	}
	var last metav1.Condition
	for _, l := range s.entries {
		if !l.valid() {
			continue
		}
		if last = t.programmed(l); last.Status == metav1.ConditionTrue {
			return condition(kind, true, string(gwv1.ListenerSetReasonProgrammed), "in force")
		}
	}
	if len(s.gw.bound) == 0 {
		return condition(kind, false, reasonParentNotProgrammed, "the Gateway has no address")
	}
	return condition(kind, false, last.Reason, last.Message)
}

func (t *translator) setStatus(s *listenerSet) gwv1.ListenerSetStatus {
	st := gwv1.ListenerSetStatus{Conditions: observe(s.Generation, []metav1.Condition{s.accepted(), t.setProgrammed(s)})}
	for _, l := range s.entries {
		st.Listeners = append(st.Listeners, gwv1.ListenerEntryStatus{
			Name: l.spec.Name, SupportedKinds: l.kinds, AttachedRoutes: int32(len(l.attached)),
			Conditions: observe(s.Generation, t.listenerConditions(l)),
		})
	}
	return st
}
