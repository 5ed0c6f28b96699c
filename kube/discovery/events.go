package discovery

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Events are for people who look at one object. Of more than these at once, and
// more than one in eventEvery after that, the rest is in the log only: a bad
// template must not fill etcd.
const (
	maxEvents  = 32
	eventEvery = time.Second

	leadEvery = 5 * time.Second // how often it is looked whether we lead by now
)

// An event is a Problem of an object that is known.
type event struct {
	Problem
	uid types.UID
}

// eventOf has an Event written of p, if there is room for it and it is of an object.
func (r *run) eventOf(p Problem) {
	if r.src.Events == nil || p.Name == "" {
		return
	}
	select {
	case r.events <- p:
	default:
	}
}

// about returns p with the object that it is of. It is false if p has been
// mended meanwhile.
func (r *run) about(p Problem) (e event, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.Problem = p
	switch p.Kind {
	case "Service":
		if s := r.services[key{Namespace: p.Namespace, Name: p.Name}]; s != nil {
			e.uid = s.uid
		}
	case "Namespace":
		if n := r.spaces[p.Name]; n != nil {
			e.uid = n.uid
		}
	}
	return e, r.said[p] > 0
}

// writeEvents writes Events until ctx is done. What is there before anybody
// leads, as at the start, waits until it is known who does; where it is another
// replica, that has the same to write.
func (r *run) writeEvents(ctx context.Context) {
	if r.src.Events == nil {
		return
	}
	denied := false
	for {
		var p Problem
		select {
		case <-ctx.Done():
			return
		case p = <-r.events:
		}
		for !r.src.Events() {
			select {
			case <-ctx.Done():
				return
			case <-time.After(leadEvery):
			}
		}
		e, ok := r.about(p)
		if !ok {
			continue
		}
		o := e.object(r.src.name(), time.Now())
		_, err := r.src.Client.CoreV1().Events(o.Namespace).Create(ctx, o, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			continue
		}
		if err != nil && ctx.Err() == nil && !denied {
			denied = true
			r.log.Warn("cannot write an Event", "verb", "create", "resource", "events", "namespace", o.Namespace, "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(eventEvery):
		}
	}
}

func (e *event) object(instance string, now time.Time) *corev1.Event {
	namespace := e.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault // where those of objects without one are
	}
	at := metav1.NewTime(now)
	// The name is made of what is said, so that no replica says it again while it
	// is there, neither the next one that leads nor one that starts.
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%s", e.uid, e.Problem.String()))
	return &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprintf("%s.%x", e.Problem.Name, sum[:8]), Namespace: namespace},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: e.Kind, Namespace: e.Namespace, Name: e.Name, UID: e.uid},
		Type:           corev1.EventTypeWarning, Reason: "Refused", Message: e.Problem.String(),
		Source: corev1.EventSource{Component: "culvert"}, ReportingController: "culvert.dev/discovery", ReportingInstance: instance,
		FirstTimestamp: at, LastTimestamp: at, Count: 1,
	}
}
