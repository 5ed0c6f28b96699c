package gatewayapi

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/kube/client"
)

// A note is what an operator should hear of, beside the condition that says it.
type note struct{ reason, message string }

// notesOf are refusals that are in after and were not in before.
func notesOf(before, after []metav1.Condition) []note {
	var ns []note
	for _, c := range after {
		if c.Status != metav1.ConditionFalse || c.Reason == string(gwv1.GatewayReasonPending) {
			continue
		}
		if !slices.Contains([]string{"Accepted", "Programmed", "ResolvedRefs", "SupportedVersion"}, c.Type) {
			continue
		}
		same := func(b metav1.Condition) bool {
			return b.Type == c.Type && b.Status == c.Status && b.Reason == c.Reason && b.Message == c.Message
		}
		n := note{c.Reason, c.Type + ": " + c.Message}
		if !slices.ContainsFunc(before, same) && !slices.Contains(ns, n) {
			ns = append(ns, n)
		}
	}
	return ns
}

// notesOfListeners are those of all of an object's listeners.
func notesOfListeners[L gwv1.ListenerStatus | gwv1.ListenerEntryStatus](before, after []L) (ns []note) {
	for _, l := range after {
		l := gwv1.ListenerStatus(l)
		for _, n := range notesOf(conditionsOf(before, l.Name), l.Conditions) {
			n.message = "listener " + string(l.Name) + ": " + n.message
			ns = append(ns, n)
		}
	}
	return ns
}

// note makes Events of what happened to an object. An Event's name is made of
// what it says, so that no replica says it again while it is there.
func (w *writer) note(ctx context.Context, o metav1.Object, notes []note) {
	kind := kindOf(o)
	// Where those of objects without a namespace are.
	namespace := cmp.Or(o.GetNamespace(), metav1.NamespaceDefault)
	if len(w.cfg.Namespaces) > 0 && !slices.Contains(w.cfg.Namespaces, namespace) {
		return // where there are no rights to have
	}
	for _, n := range notes {
		sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%s", o.GetUID(), n.reason, n.message))
		now := metav1.NewTime(time.Now())
		e := &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{Namespace: namespace, Name: short(o.GetName(), 200) + "." + hex.EncodeToString(sum[:8])},
			InvolvedObject: corev1.ObjectReference{APIVersion: gwv1.GroupVersion.String(), Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName(), UID: o.GetUID()},
			Type:           corev1.EventTypeWarning, Reason: n.reason, Message: n.message, Count: 1,
			FirstTimestamp: now, LastTimestamp: now,
			Source: corev1.EventSource{Component: fieldManager}, ReportingController: cmp.Or(w.cfg.Controller, DefaultController),
		}
		_, err := w.core.CoreV1().Events(namespace).Create(ctx, e, metav1.CreateOptions{FieldManager: fieldManager})
		if err == nil || apierrors.IsAlreadyExists(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) || ctx.Err() != nil {
			continue
		}
		if text, ok := client.Denied("create", corev1.Resource("events"), err); ok {
			if w.said.New("create events "+w.part(namespace), "denied") {
				w.log.Warn("kubernetes: " + text)
			}
			return
		}
		w.log.Debug("kubernetes: no event", "err", err)
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
	}
	return "BackendTLSPolicy"
}
