package watch

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/internal/kube/client"
)

type unreliable func() (*http.Response, error)

func (f unreliable) RoundTrip(*http.Request) (*http.Response, error) { return f() }

// What an informer asks is asked again until the API server answers, and the
// informer hears of answers alone, so that its own pauses don't grow.
func TestWhenAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		back := time.Now().Add(time.Hour)
		down := errors.New("refused")
		asked := 0
		p := client.NewPulse()
		rt := p.Wrap(unreliable(func() (*http.Response, error) {
			if asked++; time.Now().Before(back) {
				return nil, down
			}
			return &http.Response{StatusCode: http.StatusOK}, nil
		}))
		list := whenAnswered(p, &cache.ListWatch{ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://api/", nil)
			if err != nil {
				return nil, err
			}
			if _, err := rt.RoundTrip(req); err != nil {
				return nil, err
			}
			return &gwv1.GatewayList{}, nil
		}})
		if _, err := list.ListWithContextFunc(t.Context(), metav1.ListOptions{}); err != nil {
			t.Errorf("got %v, want the list", err)
		}
		if late := time.Since(back); late > 2*unansweredPause {
			t.Errorf("it took %v from when the API server was back, want %v", late, 2*unansweredPause)
		}
		if asked > 3600 {
			t.Errorf("asked %d times in an hour", asked)
		}

		back = time.Now().Add(time.Hour)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := list.ListWithContextFunc(ctx, metav1.ListOptions{}); err != down {
			t.Errorf("got %v at the end, want why", err)
		}
		if whenAnswered(nil, list) != list {
			t.Error("without a pulse it is another list")
		}
	})
}
