package gatewayapi

import (
	"maps"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// ownWrites recognize the events of our own writes of status, which must not cause a translation:
// with thousands of routes nothing else would be done.
//
// Such an event leaves the generation as it was, and has the status that was written last. The
// generation alone would not do: status that another program removes is written again, and what a
// class or a Gateway was accepted for is read from its status.
//
// A translation that began during a write has seen the status of before. If it wants that one again,
// the writer finds nothing to do, though the write has replaced it. So once the writer is idle there
// is one more translation.
type ownWrites struct {
	mu           sync.Mutex
	wrote        map[types.UID]ownWrite
	translations int  // that have begun
	writing      bool // the writer is not idle
	overtaken    bool // a translation has begun between a write and its event
}

// An ownWrite is the last write of the status of an object.
type ownWrite struct {
	sum          uint64 // of the status
	translations int    // that had begun before
}

// record is called before the status of o is written, because the event may come before the answer.
func (w *ownWrites) record(o metav1.Object) {
	s := sum(statusOf(o))
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.wrote == nil {
		w.wrote = map[types.UID]ownWrite{}
	}
	w.wrote[o.GetUID()] = ownWrite{s, w.translations}
}

// isOwn reports whether an object has changed by our own write, and by nothing else, so that there
// is nothing to translate.
func (w *ownWrites) isOwn(before, after metav1.Object) bool {
	w.mu.Lock()
	wrote, ok := w.wrote[after.GetUID()]
	w.mu.Unlock()
	if !ok || before.GetUID() != after.GetUID() || before.GetGeneration() != after.GetGeneration() ||
		!maps.Equal(before.GetAnnotations(), after.GetAnnotations()) || !maps.Equal(before.GetLabels(), after.GetLabels()) ||
		sum(statusOf(after)) != wrote.sum {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if wrote.translations == w.translations {
		return true
	}
	w.overtaken = w.overtaken || w.writing
	return w.writing
}

// translate is called before a translation reads the objects.
func (w *ownWrites) translate() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.translations++
}

// begin is called before the writer writes, and end when it is idle. end reports whether there must
// be another translation.
func (w *ownWrites) begin() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.writing = true
}

func (w *ownWrites) end() (overtaken bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	overtaken = w.overtaken
	w.writing, w.overtaken = false, false
	return overtaken
}

// forget is called for objects that are gone.
func (w *ownWrites) forget(uid types.UID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.wrote, uid)
}

// statusOf returns the status of an object whose status culvert writes, nil for others.
func statusOf(o metav1.Object) any {
	switch o := o.(type) {
	case *gwv1.GatewayClass:
		return &o.Status
	case *gwv1.Gateway:
		return &o.Status
	case *gwv1.ListenerSet:
		return &o.Status
	case *gwv1.TLSRoute:
		return &o.Status
	case *gwv1.TCPRoute:
		return &o.Status
	case *gwv1.UDPRoute:
		return &o.Status
	case *gwv1.HTTPRoute:
		return &o.Status
	case *gwv1.GRPCRoute:
		return &o.Status
	case *gwv1.BackendTLSPolicy:
		return &o.Status
	}
	return nil
}
