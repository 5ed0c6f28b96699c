package watch

import (
	"context"
	"math/rand/v2"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"culvert.dev/internal/kube/client"
)

// A Signal collapses changes into one notification, until it is received.
type Signal chan struct{}

// NewSignal returns a Signal.
func NewSignal() Signal { return make(Signal, 1) }

// Notify has the next receive return. It does not block.
func (s Signal) Notify() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// Sleep waits for d, and reports whether that has passed: it returns false as soon as ctx is done.
func Sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// silenceReported is how long the API server must not have answered for that to be reported.
const silenceReported = 2 * time.Second

// Reachability calls report with an error when the API server has stopped answering, and with nil
// when it answers again, until ctx is done.
func Reachability(ctx context.Context, p *client.Pulse, report func(error)) {
	reported := false
	for {
		turn, err := p.State()
		if err != nil && !reported {
			t := time.NewTimer(silenceReported)
			select {
			case <-ctx.Done():
				t.Stop()
				return
			case <-turn:
				t.Stop()
				continue
			case <-t.C:
			}
		}
		if (err != nil) != reported {
			reported = err != nil
			report(err)
		}
		select {
		case <-ctx.Done():
			return
		case <-turn:
		}
	}
}

// unansweredPause is how long an API server that does not answer is left alone; it is doubled at
// most.
const unansweredPause = time.Second

// whenAnswered repeats requests of list until the API server answers. A reflector would as well,
// but after pauses that grow to half a minute and more: for so long a route that was made after an
// outage would lead nowhere, and a replica that was started during one would not be ready.
func whenAnswered(p *client.Pulse, list *cache.ListWatch) *cache.ListWatch {
	if p == nil {
		return list
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return answer(ctx, p, func() (runtime.Object, error) { return list.ListWithContextFunc(ctx, o) })
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			return answer(ctx, p, func() (apiwatch.Interface, error) { return list.WatchFuncWithContext(ctx, o) })
		},
	}
}

// answer calls ask until the API server answers, or ctx is done. That the server does not know us
// is an answer.
func answer[T any](ctx context.Context, p *client.Pulse, ask func() (T, error)) (T, error) {
	for {
		out, err := ask()
		if err == nil || apierrors.IsUnauthorized(err) || ctx.Err() != nil {
			return out, err
		}
		turn, lost := p.State()
		if lost == nil {
			return out, err
		}
		t := time.NewTimer(unansweredPause + rand.N(unansweredPause))
		select {
		case <-ctx.Done():
			t.Stop()
			return out, err
		case <-turn:
			t.Stop()
		case <-t.C:
		}
	}
}
