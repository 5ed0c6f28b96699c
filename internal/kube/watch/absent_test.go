package watch

import (
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// A reflector asks for a kind without a CRD some twenty times an hour, and takes it
// up when it is there.
func TestMissingTypeIsAskedForRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		res := schema.GroupResource{Group: "multicluster.x-k8s.io", Resource: "serviceimports"}
		var mu sync.Mutex // guards the following
		var answer error = apierrors.NewGenericServerResponse(404, "list", res, "", "", 0, true)
		asked, watched := 0, 0
		list := whenDefined(&cache.ListWatch{
			ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
				mu.Lock()
				defer mu.Unlock()
				asked++
				return &mcsv1.ServiceImportList{}, answer
			},
			WatchFuncWithContext: func(_ context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
				mu.Lock()
				defer mu.Unlock()
				asked++
				switch {
				case answer != nil:
					return nil, answer
				case o.SendInitialEvents != nil:
					return nil, apierrors.NewInvalid(schema.GroupKind{}, "", nil)
				}
				watched++
				return apiwatch.NewFake(), nil
			},
		}, nil, res)
		count := func(err error) (int, int) {
			mu.Lock()
			defer mu.Unlock()
			answer = err
			return asked, watched
		}
		absent := answer
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			r := cache.NewReflector(list, &mcsv1.ServiceImport{}, cache.NewStore(cache.MetaNamespaceKeyFunc), 0)
			for ctx.Err() == nil { // client-go's own errors sleep by the clock that was before the bubble's
				_ = r.ListAndWatchWithContext(ctx)
				select {
				case <-ctx.Done():
				case <-time.After(time.Second):
				}
			}
		}()
		time.Sleep(time.Second)
		if n, _ := count(absent); n == 0 {
			t.Fatal("it is not asked for at all")
		}
		time.Sleep(time.Hour)
		first, _ := count(absent)
		if first > 40 {
			t.Errorf("asked %d times in the first hour", first)
		}
		time.Sleep(time.Hour)
		second, _ := count(nil)
		if n := second - first; n > 24 || n < 8 {
			t.Errorf("asked %d times in the second hour, want 24 at most", n)
		}
		time.Sleep(absentMost + absentMost/2 + time.Minute)
		if _, n := count(nil); n != 1 {
			t.Errorf("watched %d times when it is there, want once", n)
		}
		cancel()
		<-done

		// What is forbidden, or away, is no reason to wait.
		for _, err := range []error{apierrors.NewForbidden(res, "", errors.New("no right")), apierrors.NewNotFound(res, "web"), io.EOF} {
			count(err)
			begun := time.Now()
			for range 5 {
				_, _ = list.ListWithContextFunc(t.Context(), metav1.ListOptions{})
			}
			if d := time.Since(begun); d > 0 {
				t.Errorf("after %v it waits %v", err, d)
			}
		}
	})
}
