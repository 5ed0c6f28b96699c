package watch

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// A Store takes the objects of a Watch.
type Store interface {
	// Apply takes the new state of objects that were added or changed, and the names of those
	// that are gone. It is called by one goroutine at a time.
	Apply(changed []any, gone []types.NamespacedName)
}

// A store is a Watch as a reflector sees it.
type store struct{ *Watch }

// Transformer implements cache.TransformingStore, for lists that are streamed not to be held whole.
func (w store) Transformer() cache.TransformFunc { return w.cfg.Transform }

// Add implements cache.ReflectorStore.
func (w store) Add(o any) error {
	o = w.transform(o)
	name := nameOf(o)
	w.storing.Lock()
	confirmed := w.vanished
	var gone []types.NamespacedName
	if w.vanished { // the server has something: what did not come back is gone
		w.vanished = false
		gone = w.drop(func(n types.NamespacedName) bool { return n != name })
	}
	w.names[name] = struct{}{}
	w.cfg.Store.Apply([]any{o}, gone)
	w.storing.Unlock()
	if confirmed {
		w.setUnconfirmed(nil)
	}
	return nil
}

// Update implements cache.ReflectorStore.
func (w store) Update(o any) error { return w.Add(o) }

// Delete implements cache.ReflectorStore.
func (w store) Delete(o any) error {
	name := nameOf(o)
	w.storing.Lock()
	defer w.storing.Unlock()
	if _, there := w.names[name]; there && len(w.names) == 1 {
		w.vanished = true
		w.suspect.Notify()
		return nil
	}
	delete(w.names, name)
	w.cfg.Store.Apply(nil, []types.NamespacedName{name})
	return nil
}

// Replace implements cache.ReflectorStore: all is a list of everything.
func (w store) Replace(all []any, _ string) error {
	w.storing.Lock()
	if len(all) == 0 && len(w.names) > 0 {
		w.vanished = true
		w.suspect.Notify()
		w.storing.Unlock()
		w.change(func() { w.synced = true })
		return nil
	}
	listed := make(map[types.NamespacedName]struct{}, len(all))
	for i, o := range all {
		all[i] = w.transform(o)
		listed[nameOf(o)] = struct{}{}
	}
	gone := w.drop(func(n types.NamespacedName) bool {
		_, there := listed[n]
		return !there
	})
	w.names, w.vanished = listed, false
	w.cfg.Store.Apply(all, gone)
	w.storing.Unlock()
	w.change(func() { w.synced, w.unconfirmed = true, nil })
	return nil
}

// Resync implements cache.ReflectorStore.
func (w store) Resync() error { return nil }

// transform drops what the Store does not need of an object.
func (w store) transform(o any) any {
	if w.cfg.Transform == nil {
		return o
	}
	out, err := w.cfg.Transform(o)
	if err != nil {
		return o
	}
	return out
}

// drop forgets the names for which f is true, and returns them. storing is held.
func (w *Watch) drop(f func(types.NamespacedName) bool) (gone []types.NamespacedName) {
	for n := range w.names {
		if f(n) {
			delete(w.names, n)
			gone = append(gone, n)
		}
	}
	return gone
}

func nameOf(o any) types.NamespacedName {
	m, err := meta.Accessor(o)
	if err != nil {
		return types.NamespacedName{}
	}
	return types.NamespacedName{Namespace: m.GetNamespace(), Name: m.GetName()}
}

// Pauses between one question whether there is nothing and the next, and the time for an answer.
const (
	confirmFirst   = time.Second
	confirmMost    = 10 * time.Second
	confirmTimeout = 10 * time.Second
)

// confirm asks the API server, whenever all objects have vanished, until it says that there are
// none or one is seen. It ends with ctx.
func (w *Watch) confirm(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.suspect:
		}
		for pause := confirmFirst; w.hasVanished(); pause = min(2*pause, confirmMost) {
			err := w.confirmEmpty(ctx)
			if ctx.Err() != nil {
				return
			}
			w.storing.Lock()
			if w.vanished && err == nil {
				w.vanished = false
				w.cfg.Store.Apply(nil, w.drop(func(types.NamespacedName) bool { return true }))
			}
			vanished := w.vanished
			w.storing.Unlock()
			if !vanished {
				w.setUnconfirmed(nil)
				break
			}
			w.setUnconfirmed(err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		}
	}
}

func (w *Watch) hasVanished() bool {
	w.storing.Lock()
	defer w.storing.Unlock()
	return w.vanished
}

// setUnconfirmed sets State.Unconfirmed, and logs that once.
func (w *Watch) setUnconfirmed(err error) {
	w.change(func() {
		w.unconfirmed = err
		if w.logged.New("unconfirmed", text(err)) {
			w.cfg.Log.Warn("all objects of a Kubernetes resource vanished; keeping them until that is confirmed",
				"resource", w.cfg.Resource.String(), "namespace", namespaceName(w.cfg.Namespace), "err", err)
		}
	})
}

// confirmEmpty lists one object, past the API server's cache, and returns nil if there is none.
func (w *Watch) confirmEmpty(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, confirmTimeout)
	defer cancel()
	l, err := w.cfg.Source.ListWithContext(ctx, metav1.ListOptions{Limit: 1})
	switch {
	case apierrors.IsNotFound(err): // the resource type was removed, and its objects with it
		return nil
	case err != nil:
		return fmt.Errorf("cannot confirm that all %s are gone: %w", w, err)
	case meta.LenList(l) > 0:
		return fmt.Errorf("all %s were reported gone, but the API server lists some", w)
	}
	return nil
}
