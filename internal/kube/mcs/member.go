package mcs

import (
	"context"
	"reflect"
	"sync"

	"culvert.dev/internal/kube/watch"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	mcsclient "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned"
)

// A Cluster is how a member is reached.
type Cluster struct {
	Core       kubernetes.Interface
	API        mcsclient.Interface
	Namespaces []string // that are watched; empty means all

	// Definitions report when the CRDs of the API are installed or removed; whoever makes them runs
	// them. With nil that is found out by requests, within minutes.
	Definitions *watch.Definitions
}

// A member is a cluster of the set.
type member struct {
	name string
	Cluster
	c *Controller

	watches []*watch.Watch
	exposed []*watch.Watch // those of exports and Services, which decide what the member exports
	events  watch.Events

	// What Controller.mu guards.
	exports  map[Name]*mcsv1.ServiceExport
	imports  map[Name]*mcsv1.ServiceImport
	services map[Name]Service

	writtenMessages map[Name]map[string]string // messages of conditions that were written, by their types
}

// listed reports whether all of the member's objects have been listed.
func (m *member) listed() bool {
	for _, w := range m.watches {
		if !w.State().Synced {
			return false
		}
	}
	return true
}

// absent reports whether the member has no such API, or we may not read it: it takes no part.
func (m *member) absent() bool {
	for _, w := range m.watches {
		if s := w.State(); !s.Synced && s.Denied != "" {
			return true
		}
	}
	return false
}

// forbidden reports whether we may not read what the member exports: that may be as it was before.
func (m *member) forbidden() bool {
	for _, w := range m.exposed {
		if w.State().Forbidden() {
			return true
		}
	}
	return false
}

// onState is called when the state of a watch has changed.
func (m *member) onState(before, after watch.State) {
	if !before.EqualButErr(after) {
		m.c.notify()
	}
}

// start begins to watch the member, until ctx is done.
func (m *member) start(ctx context.Context, running *sync.WaitGroup) {
	log := m.c.log.With("cluster", m.name)
	m.events = watch.Events{Client: m.Core, Controller: controllerName, Log: log}
	add := func(resource schema.GroupResource, namespace string, object runtime.Object, api any, source *cache.ListWatch, store watch.Store) *watch.Watch {
		w := watch.New(watch.Config{
			Name: "mcs/" + m.name, Resource: resource, Namespace: namespace, Object: object, Source: source, Client: api,
			Store: store, Transform: withoutManagedFields, Definitions: m.Definitions, OnChange: m.onState,
			Without: "services of the cluster set", Log: log,
		})
		m.watches = append(m.watches, w)
		return w
	}
	namespaces := m.Namespaces
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	for _, ns := range namespaces {
		api := m.API.MulticlusterV1beta1()
		m.exposed = append(m.exposed,
			add(groupResource("serviceexports"), ns, &mcsv1.ServiceExport{}, m.API, watch.Source(api.ServiceExports(ns), nil),
				store[*mcsv1.ServiceExport]{m.c, m.exports, func(o any) *mcsv1.ServiceExport { return o.(*mcsv1.ServiceExport) }}),
			add(corev1.Resource("services"), ns, &corev1.Service{}, m.Core, watch.Source(m.Core.CoreV1().Services(ns), nil),
				store[Service]{m.c, m.services, func(o any) Service { return ServiceOf(o.(*corev1.Service)) }}))
		add(groupResource("serviceimports"), ns, &mcsv1.ServiceImport{}, m.API, watch.Source(api.ServiceImports(ns), nil),
			store[*mcsv1.ServiceImport]{m.c, m.imports, func(o any) *mcsv1.ServiceImport { return o.(*mcsv1.ServiceImport) }})
	}
	for _, w := range m.watches {
		running.Go(func() { w.Run(ctx) })
	}
}

func groupResource(resource string) schema.GroupResource {
	return schema.GroupResource{Group: mcsv1.GroupName, Resource: resource}
}

func withoutManagedFields(o any) (any, error) {
	o.(metav1.Object).SetManagedFields(nil)
	return o, nil
}

func nameOf(o metav1.Object) Name { return Name{Namespace: o.GetNamespace(), Name: o.GetName()} }

// A store is the watch.Store of one resource of a member; of returns what is kept of an object.
type store[T any] struct {
	c       *Controller
	objects map[Name]T // guarded by Controller.mu
	of      func(o any) T
}

// Apply implements watch.Store.
func (s store[T]) Apply(changed []any, gone []Name) {
	s.c.mu.Lock()
	news := len(gone) > 0
	for _, o := range changed {
		name, next := nameOf(o.(metav1.Object)), s.of(o)
		if old, there := s.objects[name]; there && reflect.DeepEqual(old, next) {
			continue // as most changes of Services
		}
		s.objects[name], news = next, true
	}
	for _, n := range gone {
		delete(s.objects, n)
	}
	s.c.mu.Unlock()
	if news {
		s.c.notify()
	}
}
