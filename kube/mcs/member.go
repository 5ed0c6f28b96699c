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

// again is how what failed is tried again; see client.WhenDefined for a cluster
// without the CRDs.
var again = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 9, Cap: time.Minute}

// A Cluster is how a member is reached.
type Cluster struct {
	Core       kubernetes.Interface
	API        mcsclient.Interface
	Namespaces []string // that are looked at; empty means all

	// Definitions tell when the CRDs of the API come or go; somebody else runs them.
	// Nil has it found out by requests, within minutes.
	Definitions *client.Definitions
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
	denied   bool              // absent, but what it exported before may be as it was

	worded map[Name]map[string]string // messages of conditions that were written, by their types
}

// watched is one resource of a member in one namespace, or in all.
type watched struct {
	*member
	resource  schema.GroupResource
	namespace string
	put       func(o any)
	drop      func(Name)
	keys      func() []Name
	left      func(Name) (there, more bool) // whether there is one of a name, and others

	list   lister
	doubts chan struct{} // see doubt.go; nil for what is believed at once

	// What Controller.mu guards.
	refused map[string]int // times in a row, by verb
	gone    map[Name]bool  // all that there was, and is kept until that is certain
}

type (
	lister  = func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watcher = func(context.Context, metav1.ListOptions) (apiwatch.Interface, error)
)

// watch returns what keeps objects of a resource; of is what is kept of each.
func watch[T any](m *member, resource schema.GroupResource, namespace string, objects map[Name]T, of func(any) T) *watched {
	w := &watched{
		member: m, resource: resource, namespace: namespace, refused: map[string]int{}, gone: map[Name]bool{},
		put:  func(o any) { objects[nameOf(o.(metav1.Object))] = of(o) },
		drop: func(n Name) { delete(objects, n) },
		keys: func() []Name { return keysIn(objects, namespace) },
		left: func(n Name) (bool, bool) { return leftIn(objects, namespace, n) },
	}
	m.waiting[w] = true
	return w
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
	add := func(w *watched, example runtime.Object, api any, list lister, watch watcher) {
		w.list = list
		all = append(all, reflector(w, example, api, watch))
		if w.doubts != nil {
			running.Go(func() { w.makeSure(ctx) })
		}
	}
	for _, ns := range namespaces {
		exports, imports, services := m.API.MulticlusterV1beta1().ServiceExports(ns), m.API.MulticlusterV1beta1().ServiceImports(ns), m.Core.CoreV1().Services(ns)
		e := watch(m, groupResource("serviceexports"), ns, m.exports, func(o any) *mcsv1.ServiceExport {
			e := o.(*mcsv1.ServiceExport)
			e.ManagedFields = nil
			return e
		})
		i := watch(m, groupResource("serviceimports"), ns, m.imports, func(o any) *mcsv1.ServiceImport {
			i := o.(*mcsv1.ServiceImport)
			i.ManagedFields = nil
			return i
		})
		s := watch(m, corev1.Resource("services"), ns, m.services, func(o any) Service { return ServiceOf(o.(*corev1.Service)) })
		// ServiceImports that are gone are written again: nothing ends with them.
		e.doubts, s.doubts = make(chan struct{}, 1), make(chan struct{}, 1)
		add(e, &mcsv1.ServiceExport{}, m.API, anyList(exports.List), exports.Watch)
		add(i, &mcsv1.ServiceImport{}, m.API, anyList(imports.List), imports.Watch)
		add(s, &corev1.Service{}, m.Core, anyList(services.List), services.Watch)
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

// leftIn says whether m has n, and whether it has others of the namespace.
func leftIn[T any](m map[Name]T, namespace string, n Name) (there, more bool) {
	_, there = m[n]
	for k := range m {
		if k != n && (namespace == "" || k.Namespace == namespace) {
			return there, true
		}
	}
	return there, false
}

func anyList[T runtime.Object](list func(context.Context, metav1.ListOptions) (T, error)) lister {
	return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return list(ctx, o) }
}

func reflector(w *watched, example runtime.Object, api any, watch watcher) *cache.Reflector {
	backoff := again
	return cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(client.WhenDefined(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l, err := w.list(ctx, o)
			w.heard(ctx, "list", err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			l, err := watch(ctx, o)
			w.heard(ctx, "watch", err)
			return l, err
		},
	}, w.Definitions, w.resource), api), example, store{w}, cache.ReflectorOptions{Name: "mcs/" + w.name + "/" + w.resource.Resource, Backoff: &backoff})
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
	if w.waiting[w] && w.doubts != nil && denied && apierrors.IsForbidden(err) && !w.denied {
		w.denied, changed = true, true
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
		same := there && len(s.gone) == 0 && reflect.DeepEqual(old, ServiceOf(o))
		s.c.mu.Unlock()
		if same {
			return nil
		}
	}
	return s.take(func() {
		s.put(o)
		delete(s.gone, nameOf(o.(metav1.Object)))
		s.dropGone() // there is something: who has not come back is gone
	})
}

func (s store) Update(o any) error { return s.Add(o) }
func (s store) Resync() error      { return nil }

func (s store) Delete(o any) error {
	n := nameOf(o.(metav1.Object))
	return s.take(func() {
		if there, more := s.left(n); there && !more {
			s.doubt(n)
			return
		}
		s.drop(n)
	})
}

func (s store) Replace(list []any, _ string) error {
	return s.take(func() {
		there := map[Name]bool{}
		for _, o := range list {
			there[nameOf(o.(metav1.Object))] = true
			s.put(o)
		}
		if all := s.keys(); len(list) == 0 && len(all) > 0 {
			s.doubt(all...)
		} else {
			clear(s.gone)
			for _, n := range all {
				if !there[n] {
					s.drop(n)
				}
			}
		}
		delete(s.waiting, s.watched)
		if len(s.waiting) == 0 {
			s.absent, s.denied = false, false
		}
	})
}
