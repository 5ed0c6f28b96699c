package gatewayapi

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/kube/client"
)

// A store has all that is watched, as it was last heard of.
type store struct {
	log   *slog.Logger
	kinds map[string]*shelf // by resource
	order []*shelf
	dirty func()

	uses    atomic.Pointer[map[Use]bool]
	looking atomic.Bool // a translation is under way, and may use anything
	echoes  echoes
	doubt   doubt
	nodes   *nodes
}

// A shelf has the objects of one kind: from one watch, or one for each namespace.
type shelf struct {
	kind
	informers []cache.SharedIndexInformer
	in        []string           // the namespaces of the same; "" is all
	lists     []*cache.ListWatch // of the same
	known     []chan struct{}    // closed when it is known what there is, or that it may not be
	once      []sync.Once
	refused   []int // times, of each informer; its own goroutine's
	said      client.Once

	// See doubt.go.
	wanted int                      // how many of the informers are of namespaces that are served
	denied []atomic.Pointer[string] // why nothing may be read, as far as that is believed
	found  []bool                   // something, by the translation that is under way or was last
	had    []bool                   // the same of the last one that was believed
}

// newStore makes the watches, and starts none.
func newStore(c clients, cfg Settings, log *slog.Logger, dirty func()) (*store, error) {
	s := &store{log: log, kinds: map[string]*shelf{}, dirty: dirty}
	s.uses.Store(&map[Use]bool{})
	for _, k := range c.kinds() {
		in := cfg.Namespaces
		if len(in) == 0 || k.cluster {
			in = []string{metav1.NamespaceAll}
		}
		wanted := len(in)
		if ns := cfg.PublicService.Namespace; k.resource.Resource == "services" && ns != "" && in[0] != metav1.NamespaceAll && !slices.Contains(in, ns) {
			in = append(slices.Clone(in), ns)
		}
		sh := newShelf(k, in)
		sh.wanted = wanted
		for i, ns := range in {
			// The fake clients of tests can't stream lists, and say so to this.
			list := k.in(ns)
			sh.lists = append(sh.lists, list)
			lw := cache.ToListWatcherWithWatchListSemantics(client.WhenDefined(whenBack(c.pulse, list), c.definitions, k.resource), c.core)
			inf := cache.NewSharedIndexInformerWithOptions(lw, k.object, cache.SharedIndexInformerOptions{Indexers: k.indexers, ObjectDescription: k.resource.String()})
			if err := inf.SetTransform(slimFor(cfg.PublicService)); err != nil {
				return nil, err
			}
			err := inf.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
				if !s.failed(sh, i, ns, err) {
					cache.DefaultWatchErrorHandler(ctx, r, err)
				}
			})
			if err != nil {
				return nil, err
			}
			if _, err := inf.AddEventHandler(s.handler(sh)); err != nil {
				return nil, err
			}
			sh.informers = append(sh.informers, inf)
		}
		s.kinds[k.resource.Resource] = sh
		s.order = append(s.order, sh)
	}
	var err error
	s.nodes, err = newNodes(c, s)
	return s, err
}

// newShelf makes one with a place for each of the namespaces in.
func newShelf(k kind, in []string) *shelf {
	sh := &shelf{
		kind: k, in: in, wanted: len(in),
		known: make([]chan struct{}, len(in)), once: make([]sync.Once, len(in)), refused: make([]int, len(in)),
		denied: make([]atomic.Pointer[string], len(in)), found: make([]bool, len(in)), had: make([]bool, len(in)),
	}
	for i := range in {
		sh.known[i] = make(chan struct{})
	}
	return sh
}

// believed is how many times something must be forbidden for it to be so.
const believed = 3

// failed says what an administrator must do for a watch, once, and is false if
// there is nothing of that kind. client-go tries again by itself.
func (s *store) failed(sh *shelf, i int, namespace string, err error) bool {
	verb := "list"
	if strings.Contains(err.Error(), "cannot watch") {
		verb = "watch"
	}
	text, ok := client.Denied(verb, sh.resource, err)
	if !ok {
		return false
	}
	// List and watch take turns; and an API server that has just started adds what of
	// its roles it has not read yet.
	once, _, _ := strings.Cut(text, ": RBAC: ")
	if sh.said.New(verb+" "+namespace, once) {
		say := s.log.Warn
		if sh.optional {
			say = s.log.Info
		}
		say("kubernetes: "+text, "namespace", namespace)
	}
	// Who is not known to the API server yet may be in a moment: before that there
	// is no telling what there is.
	// An API server that has just started refuses everything for a moment, too.
	if apierrors.IsForbidden(err) {
		sh.refused[i]++
	}
	switch {
	case apierrors.IsNotFound(err):
		if sh.denied[i].Swap(nil) != nil {
			s.dirty()
		}
	case verb == "list" && sh.refused[i] >= believed:
		if sh.denied[i].Swap(&once) == nil {
			s.dirty()
		}
	}
	if !apierrors.IsUnauthorized(err) && (!apierrors.IsForbidden(err) || sh.refused[i] >= believed) {
		sh.once[i].Do(func() { close(sh.known[i]) })
	}
	return true
}

// run keeps the watches until ctx is done.
func (s *store) run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, sh := range s.kinds {
		for i, inf := range sh.informers {
			wg.Go(func() { inf.RunWithContext(ctx) })
			wg.Go(func() {
				select {
				case <-inf.HasSyncedChecker().Done():
					sh.once[i].Do(func() { close(sh.known[i]) })
					s.dirty()
				case <-ctx.Done():
				}
			})
		}
	}
	wg.Go(func() { s.nodes.run(ctx, s.dirty) })
	wg.Wait()
}

// wait waits until it is known of every kind what there is, or that we may not
// know. It is false if ctx was done before.
func (s *store) wait(ctx context.Context) bool {
	for _, sh := range s.kinds {
		for _, known := range sh.known {
			select {
			case <-known:
			case <-ctx.Done():
				return false
			}
		}
	}
	return true
}

// handler tells of changes that may matter.
func (s *store) handler(sh *shelf) cache.ResourceEventHandler {
	changed := func(o any) {
		if !sh.refers || s.looking.Load() {
			s.dirty()
			return
		}
		if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = d.Obj
		}
		uses := *s.uses.Load()
		for _, u := range usesOf(o) {
			if uses[u] {
				s.dirty()
				return
			}
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: changed,
		DeleteFunc: func(o any) {
			if m, ok := o.(metav1.Object); ok {
				s.echoes.forget(m.GetUID())
			}
			changed(o)
		},
		UpdateFunc: func(_, o any) {
			if m, ok := o.(metav1.Object); ok {
				if s.echoes.is(m.GetUID(), m.GetResourceVersion()) {
					return
				}
			}
			changed(o)
		},
	}
}

// usesOf says as what an object may be used.
func usesOf(o any) []Use {
	switch o := o.(type) {
	case *corev1.Namespace:
		return []Use{{"Namespace", "", o.Name}}
	case *corev1.Service:
		return []Use{{"Service", o.Namespace, o.Name}}
	case *corev1.Secret:
		return []Use{{"Secret", o.Namespace, o.Name}}
	case *corev1.ConfigMap:
		return []Use{{"ConfigMap", o.Namespace, o.Name}}
	case *mcsv1.ServiceImport:
		return []Use{{"ServiceImport", o.Namespace, o.Name}}
	case *discoveryv1.EndpointSlice:
		return []Use{
			{"EndpointSlice:" + serviceLabel, o.Namespace, o.Labels[serviceLabel]},
			{"EndpointSlice:" + importLabel, o.Namespace, o.Labels[importLabel]},
		}
	}
	return nil
}

// all are the objects of a resource.
func all[T any](s *store, resource string) []T {
	var out []T
	sh := s.kinds[resource]
	for i, inf := range sh.informers {
		list := inf.GetStore().List()
		sh.found[i] = len(list) > 0
		for _, o := range list {
			out = append(out, o.(T))
		}
	}
	return out
}

// get finds an object of a resource; it is nil if there is none.
func get[T any](s *store, resource, namespace, name string) *T {
	key := name
	if namespace != "" {
		key = namespace + "/" + name
	}
	sh := s.kinds[resource]
	for i, inf := range sh.informers {
		if o, ok, err := inf.GetStore().GetByKey(key); err == nil && ok {
			sh.found[i] = true
			return o.(*T)
		}
	}
	return nil
}

// The store is Objects.

func (s *store) Namespace(name string) *corev1.Namespace {
	return get[corev1.Namespace](s, "namespaces", "", name)
}

func (s *store) Service(namespace, name string) *corev1.Service {
	return get[corev1.Service](s, "services", namespace, name)
}

func (s *store) Secret(namespace, name string) *corev1.Secret {
	return get[corev1.Secret](s, "secrets", namespace, name)
}

func (s *store) ConfigMap(namespace, name string) *corev1.ConfigMap {
	return get[corev1.ConfigMap](s, "configmaps", namespace, name)
}

func (s *store) Import(namespace, name string) *mcsv1.ServiceImport {
	return get[mcsv1.ServiceImport](s, "serviceimports", namespace, name)
}

func (s *store) Slices(namespace, label, name string) []*discoveryv1.EndpointSlice {
	var out []*discoveryv1.EndpointSlice
	sh := s.kinds["endpointslices"]
	for i, inf := range sh.informers {
		found, err := inf.GetIndexer().ByIndex(label, namespace+"/"+name)
		if err != nil {
			continue
		}
		sh.found[i] = sh.found[i] || len(found) > 0
		for _, o := range found {
			out = append(out, o.(*discoveryv1.EndpointSlice))
		}
	}
	return out
}

// world is what there is now. Its Objects are good for one translation, by the
// goroutine that calls this.
func (s *store) world() *World {
	for _, sh := range s.order {
		clear(sh.found)
	}
	return &World{
		Classes:      all[*gwv1.GatewayClass](s, "gatewayclasses"),
		Gateways:     all[*gwv1.Gateway](s, "gateways"),
		ListenerSets: all[*gwv1.ListenerSet](s, "listenersets"),
		TLSRoutes:    all[*gwv1.TLSRoute](s, "tlsroutes"),
		TCPRoutes:    all[*gwv1.TCPRoute](s, "tcproutes"),
		UDPRoutes:    all[*gwv1.UDPRoute](s, "udproutes"),
		HTTPRoutes:   all[*gwv1.HTTPRoute](s, "httproutes"),
		GRPCRoutes:   all[*gwv1.GRPCRoute](s, "grpcroutes"),
		Grants:       all[*gwv1.ReferenceGrant](s, "referencegrants"),
		Policies:     all[*gwv1.BackendTLSPolicy](s, "backendtlspolicies"),
		Objects:      s,
		Unread:       s.unread,

		PoliciesUnread: s.kinds["backendtlspolicies"].unread(),
	}
}
