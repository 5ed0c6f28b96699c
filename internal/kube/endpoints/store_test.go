package endpoints

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/internal/kube/watch"
)

// settle lets everything happen that will, within a bubble of synctest.
func settle() {
	time.Sleep(5 * time.Second)
	synctest.Wait()
}

// A recorder is a User that keeps what it is told.
type recorder struct {
	owners []Owner
	states int
}

func (r *recorder) user() *User {
	return &User{
		Changed:      func(o []Owner) { r.owners = append(r.owners, o...) },
		StateChanged: func(_, _ watch.State) { r.states++ },
	}
}

// told returns the owners since it was asked last.
func (r *recorder) told() []Owner {
	out := r.owners
	r.owners = nil
	return out
}

// run runs a store until the function that it returns is called.
func run(s *Store) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Run(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// Several use one store: there is one list and one watch, each change is told once to each of them,
// and both get the very same Slice.
func TestStoreIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := fake.NewClientset(sliceOf("web-1", "web", "10.0.0.1"))
		s := NewStore(Config{Client: api})
		var first, second recorder
		defer s.Use(first.user())()
		end := s.Use(second.user())
		defer run(s)()
		settle()
		web := OfService("a", "web")
		if got := first.told(); !reflect.DeepEqual(got, []Owner{web}) || !reflect.DeepEqual(second.told(), got) || first.states == 0 || first.states != second.states {
			t.Fatalf("the first is told of %v and %d states, the second of %d, want the one Service for both", got, first.states, second.states)
		}
		if !s.Scopes()[0].State().Synced {
			t.Error("it is not known that all have been listed")
		}
		update := func(o *discoveryv1.EndpointSlice) {
			t.Helper()
			if _, err := api.DiscoveryV1().EndpointSlices("a").Update(t.Context(), o, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			settle()
		}
		update(sliceOf("web-1", "web", "10.0.0.2"))
		if got, also := first.told(), second.told(); !reflect.DeepEqual(got, []Owner{web}) || !reflect.DeepEqual(also, got) {
			t.Errorf("the first is told of %v, the second of %v, want one change of the Service", got, also)
		}
		one := s.Of(web)
		if len(one) != 1 || one[0].Endpoints[0].Addr.String() != "10.0.0.2" {
			t.Fatalf("got %+v, want the new address", one)
		}
		same := sliceOf("web-1", "web", "10.0.0.2")
		same.ResourceVersion, same.Annotations = "9", map[string]string{"endpoints.kubernetes.io/last-change-trigger-time": "now"}
		update(same)
		if got := first.told(); got != nil || s.Of(web)[0] != one[0] {
			t.Errorf("told of %v where nothing has changed that is used, want nothing, and the same Slice", got)
		}

		end()
		var third recorder
		if s.Use(third.user()); s.Of(web)[0] != one[0] {
			t.Error("one that comes late does not find what was received before")
		}
		update(sliceOf("web-1", "other", "10.0.0.2"))
		if got := first.told(); !reflect.DeepEqual(got, []Owner{web, OfService("a", "other")}) || !reflect.DeepEqual(third.told(), got) || second.told() != nil {
			t.Errorf("told of %v when it belongs to another Service, want both, and nobody who has ended", got)
		}
		if got := s.At(netip.MustParseAddr("10.0.0.2")); !reflect.DeepEqual(got, []Owner{OfService("a", "other")}) || s.At(netip.MustParseAddr("10.0.0.1")) != nil {
			t.Errorf("got %v at the address, want the Service that it is of now", got)
		}
		if got := s.Of(web); got != nil {
			t.Errorf("got %v of the Service that it was of, want none", got)
		}
		if err := api.DiscoveryV1().EndpointSlices("a").Delete(t.Context(), "web-1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		settle() // it was the last one, which must be confirmed
		if got := s.Of(OfService("a", "other")); got != nil || len(s.slices)+len(s.owned) != 0 {
			t.Errorf("got %v once it is deleted, want that nothing is left", got)
		}
		lists, watches := 0, 0
		for _, a := range api.Actions() {
			switch a.GetVerb() {
			case "list":
				lists++
			case "watch":
				watches++
			}
		}
		if lists > 2 || watches != 1 { // the second list confirms that all are gone
			t.Errorf("%d lists and %d watches, want one, the question whether all are gone, and one watch", lists, watches)
		}
	})
}

// Only those of Services are asked for, unless those of ServiceImports are used, too.
func TestStoreSelectsByLabel(t *testing.T) {
	for imports, want := range map[bool]string{false: discoveryv1.LabelServiceName, true: ""} {
		synctest.Test(t, func(t *testing.T) {
			api := fake.NewClientset()
			defer run(NewStore(Config{Client: api, Imports: imports}))()
			settle()
			if len(api.Actions()) == 0 {
				t.Fatal("nothing was asked for")
			}
			for _, a := range api.Actions() {
				got := ""
				switch a := a.(type) {
				case ktesting.ListAction:
					got = a.GetListRestrictions().Labels.String()
				case ktesting.WatchAction:
					got = a.GetWatchRestrictions().Labels.String()
				}
				if got != want {
					t.Errorf("imports %t: %s with selector %q, want %q", imports, a.GetVerb(), got, want)
				}
			}
		})
	}
}

// A permission that is missing in one namespace is logged once, and affects that namespace alone.
func TestStoreWithoutPermissionInANamespace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		other := sliceOf("web-1", "web", "10.0.0.1")
		other.Namespace = "b"
		api := fake.NewClientset(sliceOf("web-1", "web", "10.0.0.1"), other)
		for _, verb := range []string{"list", "watch"} {
			api.PrependReactor(verb, "endpointslices", func(a ktesting.Action) (bool, runtime.Object, error) {
				return a.GetNamespace() == "b", nil, apierrors.NewForbidden(discoveryv1.Resource("endpointslices"), "", errors.New("RBAC says no"))
			})
		}
		var log bytes.Buffer
		s := NewStore(Config{Client: api, Namespaces: []string{"a", "b"}, Log: slog.New(slog.NewTextHandler(&log, nil))})
		stop := run(s)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		stop()
		for _, sc := range s.Scopes() {
			if got, want := sc.State().Forbidden(), sc.Namespace == "b"; got != want || sc.State().Synced == want {
				t.Errorf("namespace %s: %+v, want that it is forbidden: %t", sc.Namespace, sc.State(), want)
			}
		}
		if len(s.Of(OfService("a", "web"))) != 1 || s.Of(OfService("b", "web")) != nil {
			t.Errorf("got %v and %v, want the one of a", s.Of(OfService("a", "web")), s.Of(OfService("b", "web")))
		}
		if n := strings.Count(log.String(), "cannot read a Kubernetes resource"); n != 1 {
			t.Errorf("it is logged %d times, want once:\n%s", n, &log)
		}
	})
}

// Whatever happens in whatever order, what is there is what a new list of the same objects would
// give, and every change is told.
func TestStoreIsAsAFreshList(t *testing.T) {
	api := fake.NewClientset()
	for seed := range uint64(100) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		s := NewStore(Config{Client: api})
		var told recorder
		s.Use(told.user())
		objects := map[string]*discoveryv1.EndpointSlice{}
		for step := range 100 {
			before := contents(s)
			o := sliceOf(fmt.Sprint("s", rnd.IntN(4)), fmt.Sprint("w", rnd.IntN(3)), []string{"10.0.0.1", "10.0.0.2", "::1"}[rnd.IntN(3)])
			switch rnd.IntN(4) {
			case 0:
				o.Labels[mcsv1.LabelServiceName] = fmt.Sprint("w", rnd.IntN(3))
			case 1:
				o.Labels = nil
			}
			if rnd.IntN(4) == 0 {
				delete(objects, o.Name)
				s.Apply(nil, []types.NamespacedName{{Namespace: o.Namespace, Name: o.Name}})
			} else {
				objects[o.Name] = o
				s.Apply([]any{o}, nil)
			}
			fresh := NewStore(Config{Client: api})
			for _, o := range objects {
				fresh.Apply([]any{o}, nil)
			}
			after := contents(s)
			if want := contents(fresh); !reflect.DeepEqual(after, want) {
				t.Fatalf("seed %d, step %d: got %v, want %v", seed, step, after, want)
			}
			owners := told.told()
			for _, o := range slices.Concat(keys(before), keys(after)) {
				if !reflect.DeepEqual(before[o], after[o]) && !slices.Contains(owners, o) {
					t.Fatalf("seed %d, step %d: nobody is told that the Slices of %v have changed", seed, step, o)
				}
			}
		}
	}
}

// contents are the Slices of each owner, in an order.
func contents(s *Store) map[Owner][]string {
	out := map[Owner][]string{}
	for o, list := range s.owned {
		for _, sl := range list {
			out[o] = append(out[o], fmt.Sprintf("%+v", *sl))
		}
		slices.Sort(out[o])
	}
	return out
}

func keys(m map[Owner][]string) (all []Owner) {
	for o := range m {
		all = append(all, o)
	}
	return all
}
