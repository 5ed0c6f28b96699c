package mcs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	mcsfake "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned/fake"
)

// A site is a cluster with an API server that can be made to fail. It is for use
// in a bubble of synctest.
type site struct {
	t      *testing.T
	core   *fake.Clientset
	api    *mcsfake.Clientset
	remove func()

	mu     sync.Mutex // guards the following
	fail   func(verb, resource string) error
	writes []string
}

// unstreamed says what the fake leaves out: that it can't stream lists.
type unstreamed struct{ *mcsfake.Clientset }

func (unstreamed) IsWatchListSemanticsUnSupported() bool { return true }

func newSite(t *testing.T) *site {
	s := &site{t: t, core: fake.NewSimpleClientset(), api: mcsfake.NewSimpleClientset()}
	react := func(a ktesting.Action) (bool, runtime.Object, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		resource := a.GetResource().Resource
		if sub := a.GetSubresource(); sub != "" {
			resource += "/" + sub
		}
		if s.fail != nil {
			if err := s.fail(a.GetVerb(), resource); err != nil {
				return true, nil, err
			}
		}
		switch a.GetVerb() {
		case "create", "update", "delete":
			s.writes = append(s.writes, a.GetVerb()+" "+resource)
		}
		return false, nil, nil
	}
	s.core.PrependReactor("*", "*", react)
	s.api.PrependReactor("*", "*", react)
	// A watch of the fake API server begins now, and not where the list before it has ended:
	// it brings all there is, so that nothing is missed that came between the two.
	s.api.PrependWatchReactor("serviceimports", func(a ktesting.Action) (bool, apiwatch.Interface, error) {
		w, err := s.api.Tracker().Watch(a.GetResource(), a.GetNamespace())
		if err != nil {
			return true, nil, err
		}
		l, err := s.api.Tracker().List(a.GetResource(), a.GetResource().GroupVersion().WithKind("ServiceImport"), a.GetNamespace())
		if err != nil {
			return true, nil, err
		}
		return true, w, meta.EachListItem(l, func(o runtime.Object) error {
			w.(*apiwatch.RaceFreeFakeWatcher).Modify(o)
			return nil
		})
	})
	return s
}

func (s *site) setFail(f func(verb, resource string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = f
}

func (s *site) written() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := strings.Join(s.writes, ", ")
	s.writes = nil
	return out
}

func (s *site) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// export puts a Service and its ServiceExport there; it is older the less days.
func (s *site) export(name Name, days int, change ...func(*corev1.Service)) {
	s.t.Helper()
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.7", Ports: []corev1.ServicePort{{Name: "https", Port: 443}}},
	}
	for _, f := range change {
		f(svc)
	}
	s.must(s.core.Tracker().Add(svc))
	s.must(s.api.Tracker().Add(&mcsv1.ServiceExport{ObjectMeta: metav1.ObjectMeta{
		Namespace: name.Namespace, Name: name.Name, Generation: 1, CreationTimestamp: metav1.NewTime(epoch.AddDate(0, 0, days)),
	}}))
}

func (s *site) unexport(name Name) {
	s.t.Helper()
	s.must(s.api.Tracker().Delete(resourceOf("serviceexports"), name.Namespace, name.Name))
}

func (s *site) imports() (out []string) {
	s.t.Helper()
	l, err := s.api.MulticlusterV1beta1().ServiceImports("").List(context.Background(), metav1.ListOptions{})
	s.must(err)
	for _, i := range l.Items {
		text := i.Namespace + "/" + i.Name + " " + string(i.Spec.Type) + fmt.Sprint(i.Spec.IPs)
		for _, c := range i.Status.Clusters {
			text += " " + c.Cluster
		}
		if c := meta.FindStatusCondition(i.Status.Conditions, "Ready"); c != nil {
			text += " " + c.Reason
		}
		out = append(out, text)
	}
	slices.Sort(out)
	return out
}

func (s *site) conditions(name Name) string {
	s.t.Helper()
	e, err := s.api.MulticlusterV1beta1().ServiceExports(name.Namespace).Get(context.Background(), name.Name, metav1.GetOptions{})
	s.must(err)
	return conditions(e.Status.Conditions)
}

// A world is sites with a controller.
type world struct {
	t     *testing.T
	c     *Controller
	log   bytes.Buffer
	mu    sync.Mutex
	told  map[string]string
	leads bool
	vips  []netip.Addr
	ctx   context.Context

	cancel context.CancelFunc
}

func (w *world) locked(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func newWorld(t *testing.T) *world { return newWorldOf(t, "") }

// newWorldOf is newWorld of the gateway of a cluster.
func newWorldOf(t *testing.T, cluster string) *world {
	w := &world{t: t, told: map[string]string{}, leads: true}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.c = &Controller{
		Cluster: cluster, ID: "culvert-system/culvert",
		Leads: func() (l bool) { w.locked(func() { l = w.leads }); return l },
		VIPs:  func(string, string) (v []netip.Addr) { w.locked(func() { v = w.vips }); return v },
		OnExports: func(cluster string, exports map[Name]bool) {
			var all []string
			for n := range maps.Keys(exports) {
				all = append(all, n.String())
			}
			slices.Sort(all)
			w.locked(func() { w.told[cluster] = strings.Join(all, ",") })
		},
		Log: slog.New(slog.NewTextHandler(&w.log, nil)),
	}
	done := make(chan error, 1)
	go func() { done <- w.c.Run(w.ctx) }()
	t.Cleanup(func() {
		w.cancel()
		<-done
	})
	return w
}

func (w *world) add(name string, s *site, namespaces ...string) {
	s.remove = w.c.Add(w.ctx, name, Cluster{Core: s.core, API: unstreamed{s.api}, Namespaces: namespaces})
	w.t.Cleanup(s.remove)
}

func (w *world) settle() {
	time.Sleep(3 * time.Second)
	synctest.Wait()
}

func (w *world) toldOf(cluster string) (s string) {
	w.locked(func() {
		var ok bool
		if s, ok = w.told[cluster]; !ok {
			s = "nothing"
		}
	})
	return s
}

func want[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func TestExportsBecomeImports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		east, west := newSite(t), newSite(t)
		east.export(web, 0)
		w.add("east", east)
		w.add("west", west)
		w.settle()
		for _, s := range []*site{east, west} {
			want(t, "imports", strings.Join(s.imports(), "; "), "shop/web ClusterSetIP[] east Pending")
		}
		want(t, "conditions", east.conditions(web), "Valid Ready !Conflict")
		want(t, "told of east", w.toldOf("east"), "shop/web")
		want(t, "told of west", w.toldOf("west"), "")
		want(t, "writes in west", west.written(), "create serviceimports, update serviceimports/status")
		want(t, "writes in east", east.written(), "update serviceexports/status, create serviceimports, update serviceimports/status")

		w.locked(func() { w.vips = []netip.Addr{netip.MustParseAddr("240.0.0.7")} })
		w.c.Changed()
		w.settle()
		want(t, "with an address", strings.Join(west.imports(), "; "), "shop/web ClusterSetIP[240.0.0.7] east Ready")

		west.export(web, 1, func(s *corev1.Service) { s.Spec.ClusterIP = "None" })
		w.settle()
		want(t, "conditions of the younger", west.conditions(web), "Valid Ready Conflict/TypeConflict")
		want(t, "conditions of the older", east.conditions(web), "Valid Ready Conflict/TypeConflict")
		want(t, "told of west", w.toldOf("west"), "")
		west.unexport(web)
		w.settle()
		want(t, "conditions without the younger", east.conditions(web), "Valid Ready !Conflict")

		east.written()
		west.written()
		time.Sleep(24 * time.Hour)
		want(t, "writes in a quiet day", east.written()+west.written(), "")

		east.unexport(web)
		w.settle()
		want(t, "imports in east", len(east.imports()), 0)
		want(t, "imports in west", len(west.imports()), 0)
		want(t, "told of east", w.toldOf("east"), "")
	})
}

func TestTheServiceOfAnExportComesAndGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		east := newSite(t)
		east.export(web, 0)
		svcs := corev1.SchemeGroupVersion.WithResource("services")
		o, err := east.core.Tracker().Get(svcs, "shop", "web")
		east.must(err)
		east.must(east.core.Tracker().Delete(svcs, "shop", "web"))
		w.add("east", east)
		w.settle()
		want(t, "without", east.conditions(web), "!Valid/NoService !Ready/Pending")
		want(t, "imports", len(east.imports()), 0)
		east.must(east.core.Tracker().Add(o))
		w.settle()
		want(t, "with", east.conditions(web), "Valid Ready !Conflict")
		want(t, "imports", len(east.imports()), 1)
	})
}

func TestObjectsOfOthersAreNotTouched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		east := newSite(t)
		east.export(web, 0)
		foreign := &mcsv1.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: mcsv1.ServiceImportSpec{Type: mcsv1.Headless}}
		lost := &mcsv1.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "lost", Labels: map[string]string{LabelManagedBy: "somebody"}}, Spec: mcsv1.ServiceImportSpec{Type: mcsv1.Headless}}
		orphan := &mcsv1.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "orphan", Labels: map[string]string{LabelManagedBy: ManagedBy}}, Spec: mcsv1.ServiceImportSpec{Type: mcsv1.Headless}}
		for _, o := range []runtime.Object{foreign, lost, orphan} {
			east.must(east.api.Tracker().Add(o))
		}
		e, err := east.api.MulticlusterV1beta1().ServiceExports("shop").Get(w.ctx, "web", metav1.GetOptions{})
		east.must(err)
		e.Status.Conditions = []metav1.Condition{{Type: "example.com/Audited", Status: metav1.ConditionTrue, Reason: "Yes"}}
		east.must(east.api.Tracker().Update(resourceOf("serviceexports"), e, "shop"))
		w.add("east", east)
		w.settle()
		want(t, "imports", strings.Join(east.imports(), "; "), "shop/lost Headless[]; shop/web Headless[]")
		want(t, "conditions", east.conditions(web), "example.com/Audited/Yes Valid Ready !Conflict")
		want(t, "lines of the log", strings.Count(w.log.String(), "another owner"), 1)
	})
}

func TestWhoDoesNotLeadDoesNotWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.leads = false
		east := newSite(t)
		east.export(web, 0)
		w.add("east", east)
		w.settle()
		want(t, "writes", east.written(), "")
		want(t, "told", w.toldOf("east"), "shop/web")
		w.locked(func() { w.leads = true })
		time.Sleep(2 * retryInterval)
		want(t, "imports of who leads now", len(east.imports()), 1)
	})
}

// What a cluster exported stays in force while it can't be seen, also after our
// own restart; a cluster that is no member any more exports nothing.
func TestAClusterThatIsNotSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		east, west := newSite(t), newSite(t)
		east.export(web, 0)
		other := Name{Namespace: "shop", Name: "other"}
		west.export(other, 0)
		w.add("east", east)
		w.add("west", west)
		w.settle()
		want(t, "imports", strings.Join(west.imports(), "; "), "shop/other ClusterSetIP[] west Pending; shop/web ClusterSetIP[] east Pending")

		w.cancel()
		w.settle()
		w = newWorld(t) // as if in a new process
		east.setFail(func(verb, _ string) error {
			return fmt.Errorf("dial tcp: %w", syscall.ECONNREFUSED)
		})
		w.add("east", east)
		w.add("west", west)
		w.settle()
		want(t, "imports of who is not seen", strings.Join(west.imports(), "; "), "shop/other ClusterSetIP[] west Pending; shop/web ClusterSetIP[] east Pending")
		want(t, "told of who is not seen", w.toldOf("east"), "nothing")
		west.unexport(other)
		w.settle()
		want(t, "imports of who is seen", strings.Join(west.imports(), "; "), "shop/web ClusterSetIP[] east Pending")

		east.remove()
		w.settle()
		want(t, "imports of who is no member", len(west.imports()), 0)
	})
}

func TestNamespacesThatAreNotThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		east, west := newSite(t), newSite(t)
		east.export(web, 0)
		west.setFail(func(verb, resource string) error {
			if verb == "create" {
				return apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, "shop")
			}
			return nil
		})
		w.add("east", east)
		w.add("west", west)
		w.settle()
		want(t, "imports", len(west.imports()), 0)
		want(t, "log", w.log.String(), "")
		west.setFail(nil)
		time.Sleep(2 * namespaceRetries * retryInterval)
		want(t, "imports when it is there", len(west.imports()), 1)

		north := newSite(t) // where we look at another one only
		w.add("north", north, "stock")
		w.settle()
		want(t, "writes elsewhere", north.written(), "")
	})
}

func TestDenied(t *testing.T) {
	for _, tt := range []struct {
		name string
		fail func(verb, resource string) error
		log  []string
	}{
		{"no CRDs", func(verb, resource string) error {
			if strings.HasPrefix(resource, "service") && resource != "services" {
				return apierrors.NewGenericServerResponse(404, verb, schema.GroupResource{Group: mcsv1.GroupName, Resource: resource}, "", "404 page not found", 0, true)
			}
			return nil
		}, []string{"can't list serviceexports.multicluster.x-k8s.io", "is its CRD installed?", "cluster=west"}},
		{"not to be listed", func(verb, resource string) error {
			if verb == "list" && resource == "serviceexports" {
				return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("RBAC says no"))
			}
			return nil
		}, []string{"may not list serviceexports", "cluster=west"}},
		{"not to be written", func(verb, resource string) error {
			if verb == "create" {
				return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("RBAC says no"))
			}
			return nil
		}, []string{"may not create serviceimports", "cluster=west", "object=shop/web"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				east, west := newSite(t), newSite(t)
				east.export(web, 0)
				west.setFail(tt.fail)
				w.add("east", east)
				w.add("west", west)
				time.Sleep(time.Hour)
				synctest.Wait()
				want(t, "imports of the other", len(east.imports()), 1)
				n := 0
				for line := range strings.Lines(w.log.String()) {
					all := true
					for _, text := range tt.log {
						all = all && strings.Contains(line, text)
					}
					if all {
						n++
					}
				}
				if n != 1 {
					t.Errorf("the log has %d lines with %q, want 1:\n%s", n, tt.log, w.log.String())
				}
				west.setFail(nil)
				time.Sleep(10 * time.Minute) // a kind that was not there is left alone for 7 and a half at the most
				want(t, "imports with permission", len(west.imports()), 1)
			})
		})
	}
}

func resourceOf(name string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: mcsv1.GroupName, Version: mcsv1.GroupVersion.Version, Resource: name}
}
