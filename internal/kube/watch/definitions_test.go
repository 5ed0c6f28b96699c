package watch

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"culvert.dev/internal/testnet"
)

func definition(name, version string) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: "apiextensions.k8s.io/v1", Kind: "CustomResourceDefinition"},
		ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: version},
	}
}

var routes = schema.GroupResource{Group: "gateway.networking.k8s.io", Resource: "tlsroutes"}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// A definition that comes, changes or goes is told to those who wait for it, and to
// nobody else.
func TestDefinitions(t *testing.T) {
	scheme := fake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	c := fake.NewSimpleMetadataClient(scheme, definition("gateways.gateway.networking.k8s.io", "1"))
	watching := make(chan struct{})
	c.PrependWatchReactor("*", func(a clienttesting.Action) (bool, apiwatch.Interface, error) {
		w, err := c.Tracker().Watch(a.GetResource(), a.GetNamespace())
		close(watching)
		return true, w, err
	})
	d := newDefinitions(c, nil)
	other := d.Changed(schema.GroupResource{Group: "gateway.networking.k8s.io", Resource: "udproutes"})
	first := d.Changed(schema.GroupResource{Group: "gateway.networking.k8s.io", Resource: "gateways"})
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	running.Go(func() { d.Run(ctx) })
	defer running.Wait()
	defer cancel()
	testnet.Eventually(t, time.Minute, func() bool { return closed(first) }, "the definition that was there is not told of")
	<-watching
	crds := c.Tracker()
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"created", func() error { return crds.Create(CustomResourceDefinitions, definition(routes.String(), "2"), "") }},
		{"updated", func() error { return crds.Update(CustomResourceDefinitions, definition(routes.String(), "3"), "") }},
		{"deleted", func() error { return crds.Delete(CustomResourceDefinitions, "", routes.String()) }},
	} {
		turn := d.Changed(routes)
		if closed(turn) {
			t.Fatalf("%s: told of before", step.name)
		}
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		testnet.Eventually(t, time.Minute, func() bool { return closed(turn) }, "%s: not told of", step.name)
	}
	if closed(other) {
		t.Error("told of a definition that did not change")
	}
}

// A process that may not read definitions asks for them every five minutes or less
// often.
func TestDefinitionsDenied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fake.NewSimpleMetadataClient(fake.NewTestScheme())
		var asked atomic.Int32
		c.PrependReactor("list", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
			asked.Add(1)
			return true, nil, apierrors.NewForbidden(CustomResourceDefinitions.GroupResource(), "", errors.New("no right"))
		})
		d := newDefinitions(c, nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		d.Run(ctx)
		if n := asked.Load(); n == 0 || n > 15 {
			t.Errorf("asked %d times in an hour, want 1 to 15", n)
		}
	})
}

// A kind whose definition comes late is asked for at once, and again soon while the
// API server does not serve it yet.
func TestWhenDefined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDefinitions(nil, nil)
		var there atomic.Pointer[time.Time] // when the API server serves it; nil is never
		list := whenDefined(&cache.ListWatch{
			ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
				if at := there.Load(); at != nil && !time.Now().Before(*at) {
					return &metav1.PartialObjectMetadataList{}, nil
				}
				return nil, apierrors.NewGenericServerResponse(404, "list", routes, "", "", 0, true)
			},
		}, d, routes)
		for i := range minDenials - 1 {
			begun := time.Now()
			if _, err := list.ListWithContextFunc(t.Context(), metav1.ListOptions{}); !apierrors.IsNotFound(err) || time.Since(begun) > 0 {
				t.Fatalf("list %d: got %v after %v, want not found at once", i, err, time.Since(begun))
			}
		}
		begun := time.Now()
		const defined, served = 2 * time.Hour, 4 * time.Second
		time.AfterFunc(defined, func() {
			at := time.Now().Add(served)
			there.Store(&at)
			_ = (*definitionStore)(d).Add(definition(routes.String(), "7"))
		})
		if _, err := list.ListWithContextFunc(t.Context(), metav1.ListOptions{}); err != nil {
			t.Fatal(err)
		}
		if late := time.Since(begun) - defined - served; late < 0 || late > 6*time.Second {
			t.Errorf("taken up %v after it is served", late)
		}
	})
}
