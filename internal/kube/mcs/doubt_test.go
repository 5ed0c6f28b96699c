package mcs

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	ktesting "k8s.io/client-go/testing"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// What a cluster exported is not taken away because we may not see it any more
// when we start again; but discovery does not wait for that.
func TestAClusterThatMayNotBeSeen(t *testing.T) {
	for _, resource := range []string{"serviceexports", "services"} {
		t.Run(resource, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				east, west := newSite(t), newSite(t)
				east.export(web, 0)
				other := Name{Namespace: "shop", Name: "other"}
				west.export(other, 0)
				w.add("east", east)
				w.add("west", west)
				w.settle()
				w.cancel()
				w.settle()
				w = newWorld(t) // as if in a new process
				east.setFail(func(verb, res string) error {
					if res == resource && (verb == "list" || verb == "watch") {
						return apierrors.NewForbidden(schema.GroupResource{Resource: res}, "", errors.New("RBAC says no"))
					}
					return nil
				})
				w.add("east", east)
				w.add("west", west)
				time.Sleep(time.Hour)
				synctest.Wait()
				for _, s := range []*site{east, west} {
					want(t, "imports", strings.Join(s.imports(), "; "), "shop/other ClusterSetIP[] west Pending; shop/web ClusterSetIP[] east Pending")
				}
				want(t, "told of east", w.toldOf("east"), "")
				west.unexport(other)
				w.settle()
				want(t, "imports of who is seen", strings.Join(west.imports(), "; "), "shop/web ClusterSetIP[] east Pending")
				east.setFail(nil)
				time.Sleep(5 * time.Minute)
				want(t, "told of east with permission", w.toldOf("east"), "shop/web")
				east.remove()
				w.settle()
				want(t, "imports of who is no member", len(west.imports()), 0)
			})
		})
	}
}

// An API server that lists nothing for a moment takes nothing from anybody.
func TestASuddenEndIsNotBelieved(t *testing.T) {
	for _, resource := range []string{"serviceexports", "services"} {
		for _, how := range []string{"a list", "watches"} {
			for _, namespaces := range [][]string{nil, {"shop", "stock"}} {
				t.Run(fmt.Sprint(resource, " by ", how, " ", namespaces), func(t *testing.T) { suddenEnd(t, resource, how, namespaces) })
			}
		}
	}
}

func suddenEnd(t *testing.T, resource, how string, namespaces []string) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		east, west := newSite(t), newSite(t)
		east.export(web, 0)
		far := Name{Namespace: "stock", Name: "far"} // in another namespace, by a list of its own
		if namespaces != nil && resource == "serviceexports" {
			east.export(far, 1)
		}
		var mu sync.Mutex
		var watch *apiwatch.FakeWatcher // of namespace shop
		if how == "a list" {
			f := func(a ktesting.Action) (bool, apiwatch.Interface, error) {
				mu.Lock()
				defer mu.Unlock()
				fw := apiwatch.NewFake()
				if a.GetNamespace() != "stock" {
					watch = fw
				}
				return true, fw, nil
			}
			east.api.PrependWatchReactor(resource, f)
			east.core.PrependWatchReactor(resource, f)
		}
		again := func() { // has it listed again
			mu.Lock()
			fw := watch
			mu.Unlock()
			expired := apierrors.NewResourceExpired("too old").Status()
			fw.Error(&expired)
		}
		w.add("east", east, namespaces...)
		w.add("west", west)
		w.settle()
		before := strings.Join(west.imports(), "; ")
		want(t, "imports have web", strings.Contains(before, "shop/web"), true)

		gvr, tracker := resourceOf(resource), east.api.Tracker()
		if resource == "services" {
			gvr, tracker = corev1.SchemeGroupVersion.WithResource(resource), east.core.Tracker()
		}
		object, err := tracker.Get(gvr, "shop", "web")
		east.must(err)
		var lists, bad atomic.Int32 // bad: what lists are like
		react := func(a ktesting.Action) (bool, runtime.Object, error) {
			if ns := a.GetNamespace(); ns != "" && ns != "shop" {
				return false, nil, nil
			}
			if how == "a list" && a.(ktesting.ListActionImpl).ListOptions.Limit == 0 {
				return false, nil, nil // what the cache has
			}
			lists.Add(1)
			switch bad.Load() {
			case hasSome:
				l := runtime.Object(&mcsv1.ServiceExportList{Items: make([]mcsv1.ServiceExport, 1)})
				if resource == "services" {
					l = &corev1.ServiceList{Items: make([]corev1.Service, 1)}
				}
				return true, l, nil
			case cantTell:
				return true, nil, errors.New("etcdserver: no leader")
			}
			return false, nil, nil
		}
		east.api.PrependReactor("list", resource, react)
		east.core.PrependReactor("list", resource, react)
		end := func() {
			bad.Store(hasSome)
			east.must(tracker.Delete(gvr, "shop", "web"))
			if how == "a list" {
				again()
			}
		}
		end()
		east.written()
		west.written()
		time.Sleep(time.Minute)
		synctest.Wait()
		want(t, "imports while lists have some", strings.Join(west.imports(), "; "), before)
		// Nor is one made, but for one that is there: fake watches miss what comes between a list and them.
		writes := east.written() + west.written()
		for _, verb := range []string{"update", "delete"} {
			if strings.Contains(writes, verb+" serviceimports") {
				t.Errorf("imports are written while lists have some: %s", writes)
			}
		}
		want(t, "told", strings.Contains(w.toldOf("east"), "shop/web"), true)
		want(t, "lines of the log", strings.Count(w.log.String(), "the API server lists some"), 1)
		if n := lists.Load(); n < 2 || n > 10 {
			t.Errorf("got %d requests in a minute, want some and few", n)
		}
		bad.Store(cantTell)
		time.Sleep(time.Minute)
		want(t, "imports while it can't be told", strings.Join(west.imports(), "; "), before)

		// It is back.
		east.must(tracker.Add(object))
		if how == "a list" {
			again()
		}
		time.Sleep(time.Minute)
		lists.Store(0)
		time.Sleep(time.Hour)
		want(t, "requests when it is back", lists.Load(), 0)
		want(t, "imports when it is back", strings.Join(west.imports(), "; "), before)

		// And gone for good.
		end()
		bad.Store(theTruth)
		time.Sleep(time.Minute)
		want(t, "imports in the end", strings.Contains(strings.Join(west.imports(), "; "), "shop/web"), false)
		want(t, "told in the end", strings.Contains(w.toldOf("east"), "shop/web"), false)
		want(t, "what lies elsewhere", strings.Contains(w.toldOf("east"), "stock/far"), strings.Contains(before, "stock/far"))
	})
}

// What lists may be like.
const (
	theTruth = iota
	hasSome
	cantTell
)
