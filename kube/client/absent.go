package client

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// How long a kind that the API server does not have is left alone, unless its
// definition changes: soon after a start its CRD may be about to come, and later it is
// nothing to ask for all day. It is half as long again at most, for kinds and replicas
// not to ask at once.
const (
	absentSure  = 3               // times in a row that it is asked for without a pause: who has just started knows little
	absentFirst = 5 * time.Second // the next time twice that
	absentMost  = 5 * time.Minute
	absentSoon  = time.Second // the first pause after a definition has changed: the API server may not serve it yet
)

// WhenThere is WhenDefined without anybody who tells when the kind comes.
func WhenThere(list *cache.ListWatch) *cache.ListWatch {
	return WhenDefined(list, nil, schema.GroupResource{})
}

// WhenDefined returns list for a resource that the API server may not have. The first
// lists that are answered so return, for the caller to tell of it. Later ones wait, and
// ask again after pauses that grow, or at once when d says that the resource's
// definition has changed: reflectors by themselves would ask again every half a minute,
// twice each time, for as long as they live. A nil d says nothing.
func WhenDefined(list *cache.ListWatch, d *Definitions, resource schema.GroupResource) *cache.ListWatch {
	var a absence
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return whenThere(ctx, d, resource, a.heard, func() (runtime.Object, error) { return list.ListWithContextFunc(ctx, o) })
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			// Unless it is sure that there is none, a list follows.
			return whenThere(ctx, d, resource, a.still, func() (watch.Interface, error) { return list.WatchFuncWithContext(ctx, o) })
		},
	}
}

// whenThere calls ask until heard says that its answer will do, or ctx is done.
func whenThere[T any](ctx context.Context, d *Definitions, resource schema.GroupResource, heard func(err error, changed bool) time.Duration, ask func() (T, error)) (T, error) {
	changed := false
	for {
		turn := d.Changed(resource) // before the question: what changes after it is not missed
		out, err := ask()
		pause := heard(err, changed)
		if pause == 0 || ctx.Err() != nil {
			return out, err
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return out, err
		case <-t.C:
			changed = false
		case <-turn:
			t.Stop()
			changed = true
		}
	}
}

// An absence is how long there has been no such kind.
type absence struct {
	mu    sync.Mutex // guards the rest
	times int        // in a row that it was not there
	pause time.Duration
}

// heard takes an answer, and returns how long to wait before the next question; 0 is
// that the answer will do. It is told when that was asked because a definition has
// changed.
func (a *absence) heard(err error, changed bool) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !absent(err) {
		a.times, a.pause = 0, 0
		return 0
	}
	if a.times++; a.times < absentSure {
		return 0
	}
	switch {
	case changed:
		a.pause = absentSoon
	case a.pause == 0:
		a.pause = absentFirst
	default:
		a.pause = min(2*a.pause, absentMost)
	}
	return a.pause + rand.N(a.pause/2)
}

// still is heard of one who does not count.
func (a *absence) still(err error, changed bool) time.Duration {
	a.mu.Lock()
	sure := a.times >= absentSure
	a.mu.Unlock()
	if absent(err) && !sure {
		return 0
	}
	return a.heard(err, changed)
}

// absent reports whether err is that the API server has no such kind.
func absent(err error) bool { return apierrors.IsNotFound(err) && !named(err) }
