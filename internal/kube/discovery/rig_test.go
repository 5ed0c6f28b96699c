package discovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
)

// A rig is a Source that runs, with an API server that can be made to fail. It
// is for use within a bubble of synctest, where time stands still until all
// wait.
type rig struct {
	t      *testing.T
	api    *fake.Clientset
	src    registry.Source
	cancel context.CancelFunc
	log    bytes.Buffer // to be read when all wait

	mu         sync.Mutex // guards the following
	fail       func(verb, resource, namespace string) error
	watches    []apiwatch.Interface
	byResource map[string]apiwatch.Interface
	lists      int
	updates    []registry.Update
}

var errRefused = fmt.Errorf("dial tcp 10.96.0.1:443: connect: %w", syscall.ECONNREFUSED)

func denied(verb, resource string) error {
	return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("RBAC says no"))
}

// newRig makes an API server with objects.
func newRig(t *testing.T, objects ...runtime.Object) *rig {
	r := &rig{t: t, api: fake.NewSimpleClientset(objects...), byResource: map[string]apiwatch.Interface{}}
	r.api.PrependReactor("*", "*", func(a ktesting.Action) (bool, runtime.Object, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if a.GetVerb() == "list" {
			r.lists++
		}
		if r.fail == nil {
			return false, nil, nil
		}
		err := r.fail(a.GetVerb(), a.GetResource().Resource, a.GetNamespace())
		return err != nil, nil, err
	})
	r.api.PrependWatchReactor("*", func(a ktesting.Action) (bool, apiwatch.Interface, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.fail != nil {
			if err := r.fail("watch", a.GetResource().Resource, a.GetNamespace()); err != nil {
				return true, nil, err
			}
		}
		w, err := r.api.Tracker().Watch(a.GetResource(), a.GetNamespace())
		r.watches = append(r.watches, w)
		r.byResource[a.GetResource().Resource] = w
		return true, w, err
	})
	return r
}

// start runs src until the bubble's end.
func (r *rig) start(src registry.Source) {
	r.src = src
	var ctx context.Context
	ctx, r.cancel = context.WithCancel(context.Background())
	ch := make(chan registry.Update)
	done := make(chan error, 1)
	go func() { done <- src.Run(ctx, ch) }()
	go func() {
		for {
			select {
			case u := <-ch:
				r.mu.Lock()
				r.updates = append(r.updates, u)
				r.mu.Unlock()
			case <-ctx.Done():
				return
			}
		}
	}()
	r.t.Cleanup(func() {
		r.cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			r.t.Errorf("Run returned %v, want that it was canceled", err)
		}
	})
}

func (r *rig) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(&lockedWriter{w: &r.log}, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

type lockedWriter struct {
	mu sync.Mutex
	w  *bytes.Buffer
}

func (w *lockedWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.w.Write(b)
}

// setFail makes requests fail from now on; nil ends it. Watches that stand are
// cut.
func (r *rig) setFail(f func(verb, resource, namespace string) error) {
	r.mu.Lock()
	r.fail = f
	watches := r.watches
	r.watches = nil
	r.mu.Unlock()
	for _, w := range watches {
		w.Stop()
	}
}

// after lets time pass, and returns what was sent meanwhile.
func (r *rig) after(d time.Duration) []registry.Update {
	time.Sleep(d)
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.updates
	r.updates = nil
	return out
}

// one is after, for when it must be one Update.
func (r *rig) one(d time.Duration) registry.Update {
	r.t.Helper()
	list := r.after(d)
	if len(list) != 1 {
		r.t.Fatalf("%d updates, want 1: %v", len(list), list)
	}
	return list[0]
}

// none is after, for when there must be none.
func (r *rig) none(d time.Duration) {
	r.t.Helper()
	if list := r.after(d); len(list) != 0 {
		r.t.Fatalf("%d updates, want none: %v", len(list), list)
	}
}

// logged returns how many lines of the log have all of the texts.
func (r *rig) logged(texts ...string) (n int) {
next:
	for line := range strings.Lines(r.log.String()) {
		for _, text := range texts {
			if !strings.Contains(line, text) {
				continue next
			}
		}
		n++
	}
	return n
}

// put writes an object as it is, be it new or not.
func (r *rig) put(o runtime.Object) {
	r.t.Helper()
	m := o.(metav1.Object)
	gvk, err := gvkOf(o)
	if err != nil {
		r.t.Fatal(err)
	}
	tracker := r.api.Tracker()
	if _, err = tracker.Get(gvk, m.GetNamespace(), m.GetName()); err != nil {
		err = tracker.Create(gvk, o, m.GetNamespace())
	} else {
		err = tracker.Update(gvk, o, m.GetNamespace())
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) remove(o runtime.Object) {
	r.t.Helper()
	m := o.(metav1.Object)
	gvk, err := gvkOf(o)
	if err == nil {
		err = r.api.Tracker().Delete(gvk, m.GetNamespace(), m.GetName())
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// listing is how a test has what a snapshot's services are.
func listing(s registry.Snapshot) string {
	var all []string
	for _, s := range s.Services {
		all = append(all, s.Name+" to "+exposedTo(s)+" at ["+written(s.Endpoints)+"]")
	}
	return strings.Join(all, "; ")
}

// watchOf returns the newest watch of a resource, to say things by that are not so.
func (r *rig) watchOf(resource string) *apiwatch.RaceFreeFakeWatcher {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	w, ok := r.byResource[resource].(*apiwatch.RaceFreeFakeWatcher)
	if !ok {
		r.t.Fatalf("the watch of %s is a %T", resource, r.byResource[resource])
	}
	return w
}

func (r *rig) events() []corev1.Event {
	r.t.Helper()
	l, err := r.api.CoreV1().Events("").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return l.Items
}
