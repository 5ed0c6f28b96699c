package mcs

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"time"

	"culvert.dev/kube/client"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	mcsclient "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned"
)

// again is how what failed is tried again; see client.WhenThere for a cluster
// without the CRDs.
var again = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 9, Cap: time.Minute}

// A Cluster is how a member is reached.
type Cluster struct {
	Core       kubernetes.Interface
	API        mcsclient.Interface
	Namespaces []string // that are looked at; empty means all
}

// A member is a cluster that is looked at.
type member struct {
	name string
	Cluster
	c *Controller

	// What Controller.mu guards.
	exports  map[Name]*mcsv1.ServiceExport
	imports  map[Name]*mcsv1.ServiceImport
	services map[Name]Service
	waiting  map[*watched]bool // what has not been listed yet
	absent   bool              // it has no such API, or we may not read it: it takes no part
}

// watched is one resource of a member in one namespace, or in all.
type watched struct {
	*member
	resource  schema.GroupResource
	namespace string
	put       func(o any)
	drop      func(Name)
	keys      func() []Name
	refused   map[string]int // times in a row, by verb; guarded by Controller.mu
}

// believe is how often in a row something must be forbidden or not there: an API
// server that has just started knows of no roles for a moment.
const believe = 3

// start begins to look at the member, until ctx is done.
func (m *member) start(ctx context.Context, running *sync.WaitGroup) {
	namespaces := m.Namespaces
	if len(namespaces) == 0 {
		namespaces = []string{""}
	}
	var all []*cache.Reflector
	for _, ns := range namespaces {
		exports, imports, services := m.API.MulticlusterV1beta1().ServiceExports(ns), m.API.MulticlusterV1beta1().ServiceImports(ns), m.Core.CoreV1().Services(ns)
		all = append(all,
			reflector(&watched{member: m, resource: groupResource("serviceexports"), namespace: ns, put: func(o any) {
				e := o.(*mcsv1.ServiceExport)
				e.ManagedFields = nil
				m.exports[nameOf(e)] = e
			}, drop: func(n Name) { delete(m.exports, n) }, keys: func() []Name { return keysIn(m.exports, ns) }}, &mcsv1.ServiceExport{}, m.API, anyList(exports.List), exports.Watch),
			reflector(&watched{member: m, resource: groupResource("serviceimports"), namespace: ns, put: func(o any) {
				i := o.(*mcsv1.ServiceImport)
				i.ManagedFields = nil
				m.imports[nameOf(i)] = i
			}, drop: func(n Name) { delete(m.imports, n) }, keys: func() []Name { return keysIn(m.imports, ns) }}, &mcsv1.ServiceImport{}, m.API, anyList(imports.List), imports.Watch),
			reflector(&watched{member: m, resource: corev1.Resource("services"), namespace: ns, put: func(o any) {
				m.services[nameOf(o.(*corev1.Service))] = ServiceOf(o.(*corev1.Service))
			}, drop: func(n Name) { delete(m.services, n) }, keys: func() []Name { return keysIn(m.services, ns) }}, &corev1.Service{}, m.Core, anyList(services.List), services.Watch),
		)
	}
	for _, r := range all {
		running.Go(func() {
			_ = again.DelayWithReset(clock.RealClock{}, 5*time.Minute).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
				_ = r.ListAndWatchWithContext(ctx) // was heard
				return false, nil
			})
		})
	}
}

func groupResource(resource string) schema.GroupResource {
	return schema.GroupResource{Group: mcsv1.GroupName, Resource: resource}
}

func nameOf(o metav1.Object) Name { return Name{Namespace: o.GetNamespace(), Name: o.GetName()} }

func keysIn[T any](m map[Name]T, namespace string) (out []Name) {
	for n := range m {
		if namespace == "" || n.Namespace == namespace {
			out = append(out, n)
		}
	}
	return out
}

func anyList[T runtime.Object](list func(context.Context, metav1.ListOptions) (T, error)) func(context.Context, metav1.ListOptions) (runtime.Object, error) {
	return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return list(ctx, o) }
}

func reflector(w *watched, example runtime.Object, api any, list func(context.Context, metav1.ListOptions) (runtime.Object, error), watch func(context.Context, metav1.ListOptions) (apiwatch.Interface, error)) *cache.Reflector {
	w.waiting[w], w.refused = true, map[string]int{}
	backoff := again
	return cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(client.WhenThere(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l, err := list(ctx, o)
			w.heard(ctx, "list", err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			l, err := watch(ctx, o)
			w.heard(ctx, "watch", err)
			return l, err
		},
	}), api), example, store{w}, cache.ReflectorOptions{Name: "mcs/" + w.name + "/" + w.resource.Resource, Backoff: &backoff})
}

// heard says once what is forbidden or not there.
func (w *watched) heard(ctx context.Context, verb string, err error) {
	if ctx.Err() != nil || errors.Is(err, context.Canceled) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return
	}
	text, denied := client.Denied(verb, w.resource, err)
	w.c.mu.Lock()
	if denied {
		w.refused[verb]++
		denied = w.refused[verb] >= believe
	} else {
		w.refused[verb] = 0
	}
	w.c.mu.Unlock()
	if !denied {
		text = ""
	}
	if w.c.said.New(verb+" "+w.name+" "+w.resource.String()+" "+w.namespace, text) {
		w.c.log.Error("multi-cluster services: "+text, "cluster", w.name, "verb", verb, "resource", w.resource.String(), "namespace", w.namespace)
	}
	if verb != "list" {
		return
	}
	w.c.mu.Lock()
	changed := denied && w.waiting[w] && !w.absent
	if changed { // it is no reason for all others to wait
		w.absent = true
	}
	w.c.mu.Unlock()
	if changed {
		w.c.kick()
	}
}

// A store takes what a reflector sees.
type store struct{ *watched }

func (s store) take(f func()) error {
	s.c.mu.Lock()
	f()
	s.c.mu.Unlock()
	s.c.kick()
	return nil
}

func (s store) Add(o any) error {
	if o, ok := o.(*corev1.Service); ok { // most changes of Services are of no interest
		s.c.mu.Lock()
		old, there := s.services[nameOf(o)]
		same := there && reflect.DeepEqual(old, ServiceOf(o))
		s.c.mu.Unlock()
		if same {
			return nil
		}
	}
	return s.take(func() { s.put(o) })
}

func (s store) Update(o any) error { return s.Add(o) }
func (s store) Resync() error      { return nil }

func (s store) Delete(o any) error {
	return s.take(func() { s.drop(nameOf(o.(metav1.Object))) })
}

func (s store) Replace(list []any, _ string) error {
	return s.take(func() {
		there := map[Name]bool{}
		for _, o := range list {
			there[nameOf(o.(metav1.Object))] = true
			s.put(o)
		}
		for _, n := range s.keys() {
			if !there[n] {
				s.drop(n)
			}
		}
		delete(s.waiting, s.watched)
		if len(s.waiting) == 0 {
			s.absent = false
		}
	})
}
