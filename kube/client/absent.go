package client

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// How long a kind that the API server does not have is left alone: soon after a
// start its CRD may be about to come, and later it is nothing to ask for all day.
// It is half as long again at most, for kinds and replicas not to ask at once.
const (
	absentSure  = 3               // times in a row that it is asked for without a pause: who has just started knows little
	absentFirst = 5 * time.Second // the next time twice that
	absentMost  = 5 * time.Minute
)

// WhenThere returns list for a kind that the API server may not have. A list that
// is answered so returns at once, and the next request waits: reflectors ask again
// every half a minute, twice each time, for as long as they live.
func WhenThere(list *cache.ListWatch) *cache.ListWatch {
	var a absence
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			if err := a.wait(ctx); err != nil {
				return nil, err
			}
			l, err := list.ListWithContextFunc(ctx, o)
			a.heard(err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			if err := a.wait(ctx); err != nil {
				return nil, err
			}
			return list.WatchFuncWithContext(ctx, o) // a list follows, if it is not there
		},
	}
}

// An absence is how long there has been no such kind.
type absence struct {
	mu    sync.Mutex // guards the rest
	times int        // in a row that it was not there
	pause time.Duration
	until time.Time // zero while the kind is there
}

func (a *absence) heard(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !apierrors.IsNotFound(err) || named(err) {
		a.times, a.pause, a.until = 0, 0, time.Time{}
		return
	}
	if a.times++; a.times < absentSure {
		return
	}
	a.pause = min(max(2*a.pause, absentFirst), absentMost)
	a.until = time.Now().Add(a.pause + rand.N(a.pause/2))
}

// wait waits until it may be asked for again.
func (a *absence) wait(ctx context.Context) error {
	a.mu.Lock()
	pause := time.Until(a.until)
	a.mu.Unlock()
	if pause <= 0 {
		return nil
	}
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
