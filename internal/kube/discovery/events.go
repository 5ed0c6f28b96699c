package discovery

import (
	"context"
	"time"

	"culvert.dev/internal/kube/watch"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// If there are more than maxEvents at once, or afterwards more than one in eventInterval, the rest is
// only logged: a bad template must not fill etcd.
const (
	maxEvents     = 32
	eventInterval = time.Second

	leaderInterval = 5 * time.Second // from one check of leadership to the next
)

// queueEvent queues an Event of p, if there is room in the queue and p is about an object.
func (r *run) queueEvent(p Problem) {
	if r.src.Events == nil || p.Name == "" {
		return
	}
	select {
	case r.events <- p:
	default:
	}
}

// objectOf returns the UID of the object that has a problem. It is false if the problem has been
// fixed in the meantime.
func (r *run) objectOf(p Problem) (uid types.UID, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch p.Kind {
	case "Service":
		if s := r.services[key{Namespace: p.Namespace, Name: p.Name}]; s != nil {
			uid = s.uid
		}
	case "Namespace":
		if n := r.spaces[p.Name]; n != nil {
			uid = n.uid
		}
	}
	return uid, r.problemCounts[p] > 0
}

// writeEvents writes Events until ctx is done. Events from before a leader is elected, as at the
// start, wait until there is one. If that is another replica, it writes the same Events.
func (r *run) writeEvents(ctx context.Context) {
	if r.src.Events == nil {
		return
	}
	events := watch.Events{Client: r.src.Client, Controller: "culvert.dev/discovery", Instance: r.src.name(), Log: r.log}
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
			case <-time.After(leaderInterval):
			}
		}
		uid, ok := r.objectOf(p)
		if !ok {
			continue
		}
		object := corev1.ObjectReference{APIVersion: "v1", Kind: p.Kind, Namespace: p.Namespace, Name: p.Name, UID: uid}
		if err := events.Warn(ctx, object, "Refused", p.String(), metav1.NamespaceAll); apierrors.IsAlreadyExists(err) {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(eventInterval):
		}
	}
}
