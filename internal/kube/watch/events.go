package watch

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"culvert.dev/internal/kube/client"
)

// component is what Events and field managers say that they are of.
const component = "culvert"

// Events writes Events, which are for people who look at one object.
type Events struct {
	Client     kubernetes.Interface
	Controller string // that reports them
	Instance   string // of it; may be ""
	Log        *slog.Logger

	denied client.Once // by Part
}

// Warn writes an Event of an object that needs attention. Its name is derived from what it says, so
// that no replica repeats it while it exists: the error is then apierrors.IsAlreadyExists. Events of
// objects without a namespace are in namespace "default". A missing permission is logged once for
// each scope, a namespace or "" for all.
func (e *Events) Warn(ctx context.Context, o corev1.ObjectReference, reason, message, scope string) error {
	now := metav1.NewTime(time.Now())
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%s", o.UID, reason, message))
	namespace := cmp.Or(o.Namespace, metav1.NamespaceDefault)
	_, err := e.Client.CoreV1().Events(namespace).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%.200s.%x", o.Name, sum[:8])},
		InvolvedObject: o,
		Type:           corev1.EventTypeWarning, Reason: reason, Message: message, Count: 1,
		FirstTimestamp: now, LastTimestamp: now,
		Source: corev1.EventSource{Component: component}, ReportingController: e.Controller, ReportingInstance: e.Instance,
	}, metav1.CreateOptions{FieldManager: component})
	switch {
	case err == nil, apierrors.IsAlreadyExists(err), apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause), ctx.Err() != nil:
	default:
		if why, denied := client.Denied("create", corev1.Resource("events"), err); denied {
			if e.denied.New(scope, "denied") {
				e.Log.Warn("cannot write Events; what they would say is logged", "namespace", namespaceName(scope), "reason", why)
			}
		} else {
			e.Log.Debug("cannot write an Event", "namespace", namespace, "err", err)
		}
	}
	return err
}
