package watch

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"culvert.dev/internal/kube/client"
)

// The pauses between requests for a resource type that the API server does not have, unless its
// definition changes: soon after a start its CRD may be installed at any moment, and later it is
// not worth asking all day. Up to half of a pause is added at random, so that types and replicas do
// not ask at the same time.
const (
	absentFirst = 5 * time.Second // after minDenials answers without a pause; the next time twice that
	absentMost  = 5 * time.Minute
	absentSoon  = time.Second // the first pause after a definition has changed: the API server may not serve it yet
)

// whenDefined returns list for a resource type that the API server may not have. The first
// lists that are answered so return, for the caller to report it. Later ones wait, and
// ask again after growing pauses, or at once when d reports that the definition of the type has
// changed: a reflector by itself would ask every half a minute, twice each time, for as long as it
// lives. A nil d reports nothing.
func whenDefined(list *cache.ListWatch, d *Definitions, resource schema.GroupResource) *cache.ListWatch {
	var a absence
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return askUntilDefined(ctx, d, resource, a.afterList, func() (runtime.Object, error) { return list.ListWithContextFunc(ctx, o) })
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			// Unless it is sure that there is none, a list follows.
			return askUntilDefined(ctx, d, resource, a.afterWatch, func() (apiwatch.Interface, error) { return list.WatchFuncWithContext(ctx, o) })
		},
	}
}

// askUntilDefined calls ask until pauseAfter returns no pause for its answer, or ctx is done.
func askUntilDefined[T any](ctx context.Context, d *Definitions, resource schema.GroupResource, pauseAfter func(err error, changed bool) time.Duration, ask func() (T, error)) (T, error) {
	changed := false
	for {
		turn := d.Changed(resource) // before the question: what changes after it is not missed
		out, err := ask()
		pause := pauseAfter(err, changed)
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

// An absence says for how long a resource type has been missing.
type absence struct {
	mu    sync.Mutex // guards the rest
	times int        // lists in a row that were answered so
	pause time.Duration
}

// afterList takes the answer to a list, and returns how long to wait before the next one; 0 means
// that the answer is returned to the caller. changed says that the question was asked because a
// definition has changed.
func (a *absence) afterList(err error, changed bool) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !absent(err) {
		a.times, a.pause = 0, 0
		return 0
	}
	if a.times++; a.times < minDenials {
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

// afterWatch is afterList for a watch, which does not count as an answer of its own.
func (a *absence) afterWatch(err error, changed bool) time.Duration {
	a.mu.Lock()
	sure := a.times >= minDenials
	a.mu.Unlock()
	if absent(err) && !sure {
		return 0
	}
	return a.afterList(err, changed)
}

// absent reports whether err says that the API server has no such resource type.
func absent(err error) bool {
	_, denied := client.Denied("", schema.GroupResource{}, err)
	return denied && apierrors.IsNotFound(err)
}
