package gatewayapi

import (
	"cmp"
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// A note is reported to operators, beside the condition that says it.
type note struct{ reason, message string }

// A finding is a condition that is False, on the way to a note.
type finding struct {
	kind, reason string
	message      string
	listeners    []string // that say so; of the object itself there are none
	fresh        bool     // it was not there before
}

// reportedConditions are the types of conditions that are reported to operators. Programmed is the
// last: it repeats what the others say.
var reportedConditions = []string{"Accepted", "ResolvedRefs", "SupportedVersion", "Programmed"}

// derived are reasons that only sum up what the listeners of an object say.
var derived = []string{string(gwv1.GatewayReasonListenersNotValid), string(gwv1.GatewayReasonListenersNotResolved)}

// find collects the conditions that are False, of an object or of one of its listeners.
func find(all []finding, listener string, before, after []metav1.Condition) []finding {
	for _, kind := range reportedConditions {
		for _, c := range after {
			if c.Type != kind || c.Status != metav1.ConditionFalse || c.Reason == string(gwv1.GatewayReasonPending) || slices.Contains(derived, c.Reason) {
				continue
			}
			same := func(b metav1.Condition) bool {
				return b.Type == c.Type && b.Status == c.Status && b.Reason == c.Reason && b.Message == c.Message
			}
			f := finding{kind: kind, reason: c.Reason, message: c.Message, fresh: !slices.ContainsFunc(before, same)}
			if listener != "" {
				f.listeners = []string{listener}
			}
			all = append(all, f)
		}
	}
	return all
}

// notes returns what is new among the findings of one object: of those that say the same, or repeat
// what another one says, only one.
func notes(all []finding) (ns []note) {
	for i := range all {
		f := &all[i]
		if slices.ContainsFunc(all[:i], func(o finding) bool { return o.repeats(f) && o.message == f.message }) {
			continue // it is told of with an earlier one
		}
		if slices.ContainsFunc(all, func(o finding) bool { return o.message != f.message && strings.Contains(o.message, f.message) }) {
			continue // it is a part of another one
		}
		fresh, listeners := f.fresh, slices.Clone(f.listeners)
		for _, o := range all[i+1:] {
			if o.message == f.message && len(f.listeners) > 0 {
				fresh, listeners = fresh || o.fresh && o.kind == f.kind, append(listeners, o.listeners...)
			}
		}
		if !fresh {
			continue
		}
		n := note{f.reason, f.kind + ": " + f.message}
		slices.Sort(listeners)
		switch listeners = slices.Compact(listeners); len(listeners) {
		case 0:
		case 1:
			n.message = "listener " + listeners[0] + ": " + n.message
		default:
			n.message = "listeners " + strings.Join(listeners, ", ") + ": " + n.message
		}
		if !slices.Contains(ns, n) {
			ns = append(ns, n)
		}
	}
	return ns
}

// repeats reports whether f is reported with o, if they say the same.
func (o *finding) repeats(f *finding) bool {
	return len(o.listeners) == 0 || len(f.listeners) > 0
}

// notesOf returns the refusals that are in after and were not in before.
func notesOf(before, after []metav1.Condition) []note { return notes(find(nil, "", before, after)) }

// notesOfOwner is notesOf for an object with listeners.
func notesOfOwner[L gwv1.ListenerStatus | gwv1.ListenerEntryStatus](before, after []metav1.Condition, listenersBefore, listenersAfter []L) []note {
	var all []finding
	for _, f := range find(nil, "", before, after) {
		if f.kind == "Programmed" && f.reason == string(gwv1.GatewayReasonInvalid) {
			continue // it is not accepted, or its listeners are not in force, which they say
		}
		all = append(all, f)
	}
	for _, l := range listenersAfter {
		l := gwv1.ListenerStatus(l)
		for _, f := range find(nil, string(l.Name), conditionsOf(listenersBefore, l.Name), l.Conditions) {
			if f.message != notAccepted {
				all = append(all, f)
			}
		}
	}
	return notes(all)
}

// note writes Events of what happened to an object.
func (w *writer) note(ctx context.Context, o metav1.Object, notes []note) {
	namespace := cmp.Or(o.GetNamespace(), metav1.NamespaceDefault)
	if len(w.cfg.Namespaces) > 0 && !slices.Contains(w.cfg.Namespaces, namespace) {
		return // there are no permissions to be expected in it
	}
	ref := corev1.ObjectReference{APIVersion: gwv1.GroupVersion.String(), Kind: kindOf(o), Namespace: o.GetNamespace(), Name: o.GetName(), UID: o.GetUID()}
	for _, n := range notes {
		if err := w.events.Warn(ctx, ref, n.reason, n.message, w.scope(namespace)); apierrors.IsForbidden(err) {
			return
		}
	}
}

func kindOf(o metav1.Object) string {
	switch o.(type) {
	case *gwv1.GatewayClass:
		return "GatewayClass"
	case *gwv1.Gateway:
		return "Gateway"
	case *gwv1.ListenerSet:
		return "ListenerSet"
	case *gwv1.TLSRoute:
		return tlsRoute
	case *gwv1.TCPRoute:
		return tcpRoute
	case *gwv1.UDPRoute:
		return udpRoute
	case *gwv1.HTTPRoute:
		return httpRoute
	case *gwv1.GRPCRoute:
		return grpcRoute
	}
	return "BackendTLSPolicy"
}
