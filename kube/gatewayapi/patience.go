package gatewayapi

import (
	"context"
	"math/rand/v2"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"culvert.dev/kube/client"
)

// tryAgain is how long an API server that does not answer is left alone, and up
// to twice that.
const tryAgain = time.Second

// whenBack makes requests of list again until the API server answers. An informer
// by itself would, too, but after pauses that grow to half a minute and more: for
// that long a route that is made after an outage led nowhere, and a replica that
// was started during it stayed out.
func whenBack(p *client.Pulse, list *cache.ListWatch) *cache.ListWatch {
	if p == nil {
		return list
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return answered(ctx, p, func() (runtime.Object, error) { return list.ListWithContextFunc(ctx, o) })
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return answered(ctx, p, func() (watch.Interface, error) { return list.WatchFuncWithContext(ctx, o) })
		},
	}
}

// answered calls ask until the API server answers, or ctx is done. That it does
// not know us is an answer to tell of.
func answered[T any](ctx context.Context, p *client.Pulse, ask func() (T, error)) (T, error) {
	for {
		out, err := ask()
		if err == nil || apierrors.IsUnauthorized(err) || ctx.Err() != nil {
			return out, err
		}
		turn, lost := p.State()
		if lost == nil {
			return out, err
		}
		select {
		case <-ctx.Done():
			return out, err
		case <-turn:
		case <-time.After(tryAgain + rand.N(tryAgain)):
		}
	}
}
