package discovery

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Events are for people who look at one object. Of more than these at once, and
// more than one in eventEvery after that, the rest is in the log only: a bad
// template must not fill etcd.
const (
	maxEvents  = 32
	eventEvery = time.Second
)

// An event is a Problem of an object that is known.
type event struct {
	Problem
	uid types.UID
}

// eventOf has an Event written of p, if there is room for it.
func (r *run) eventOf(p Problem) {
	if r.src.Events == nil || !r.src.Events() {
		return
	}
	e := event{Problem: p}
	r.mu.Lock()
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
	r.mu.Unlock()
	select {
	case r.events <- e:
	default:
	}
}

// writeEvents writes Events until ctx is done.
func (r *run) writeEvents(ctx context.Context) {
	denied := false
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-r.events:
			o := e.object(r.src.name(), time.Now())
			if _, err := r.src.Client.CoreV1().Events(o.Namespace).Create(ctx, o, metav1.CreateOptions{}); err != nil && ctx.Err() == nil && !denied {
				denied = true
				r.log.Warn("discovery: an Event could not be written; what it says is in the log", "verb", "create", "resource", "events", "namespace", o.Namespace, "err", err)
			}
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
	return &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{GenerateName: "culvert-", Namespace: namespace},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: e.Kind, Namespace: e.Namespace, Name: e.Name, UID: e.uid},
		Type:           corev1.EventTypeWarning, Reason: "Refused", Message: e.Problem.String(),
		Source: corev1.EventSource{Component: "culvert"}, ReportingController: "culvert.dev/discovery", ReportingInstance: instance,
		FirstTimestamp: at, LastTimestamp: at, Count: 1,
	}
}
