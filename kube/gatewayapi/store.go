package gatewayapi

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
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
	dirty func()

	uses    atomic.Pointer[map[Use]bool]
	looking atomic.Bool // a translation is under way, and may use anything
	echoes  echoes
}

// A shelf has the objects of one kind: from one watch, or one for each namespace.
type shelf struct {
	kind
	informers []cache.SharedIndexInformer
	lists     []*cache.ListWatch // of the same
	known     []chan struct{}    // closed when it is known what there is, or that it may not be
	once      []sync.Once
	refused   []int // times, of each informer; its own goroutine's
	said      client.Once
}

// newStore makes the watches, and starts none.
func newStore(c clients, cfg Settings, log *slog.Logger, dirty func()) (*store, error) {
	s := &store{log: log, kinds: map[string]*shelf{}, dirty: dirty}
	s.uses.Store(&map[Use]bool{})
	for _, k := range c.kinds() {
		sh := &shelf{kind: k}
		in := cfg.Namespaces
		if len(in) == 0 || k.cluster {
			in = []string{metav1.NamespaceAll}
		} else if ns := cfg.PublicService.Namespace; k.resource.Resource == "services" && ns != "" && !slices.Contains(in, ns) {
			in = append(slices.Clone(in), ns)
		}
		for range in {
			sh.known = append(sh.known, make(chan struct{}))
			sh.refused = append(sh.refused, 0)
		}
		sh.once = make([]sync.Once, len(in))
		for i, ns := range in {
			// The fake clients of tests can't stream lists, and say so to this.
			list := k.in(ns)
			sh.lists = append(sh.lists, list)
			lw := cache.ToListWatcherWithWatchListSemantics(client.WhenThere(whenBack(c.pulse, list)), c.core)
			inf := cache.NewSharedIndexInformerWithOptions(lw, k.object, cache.SharedIndexInformerOptions{Indexers: k.indexers, ObjectDescription: k.resource.String()})
			if err := inf.SetTransform(slim); err != nil {
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
	}
	return s, nil
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
	for _, inf := range s.kinds[resource].informers {
		for _, o := range inf.GetStore().List() {
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
	for _, inf := range s.kinds[resource].informers {
		if o, ok, err := inf.GetStore().GetByKey(key); err == nil && ok {
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
	for _, inf := range s.kinds["endpointslices"].informers {
		found, err := inf.GetIndexer().ByIndex(label, namespace+"/"+name)
		if err != nil {
			continue
		}
		for _, o := range found {
			out = append(out, o.(*discoveryv1.EndpointSlice))
		}
	}
	return out
}

// world is what there is now.
func (s *store) world() *World {
	return &World{
		Classes:      all[*gwv1.GatewayClass](s, "gatewayclasses"),
		Gateways:     all[*gwv1.Gateway](s, "gateways"),
		ListenerSets: all[*gwv1.ListenerSet](s, "listenersets"),
		TLSRoutes:    all[*gwv1.TLSRoute](s, "tlsroutes"),
		TCPRoutes:    all[*gwv1.TCPRoute](s, "tcproutes"),
		UDPRoutes:    all[*gwv1.UDPRoute](s, "udproutes"),
		HTTPRoutes:   all[*gwv1.HTTPRoute](s, "httproutes"),
		Grants:       all[*gwv1.ReferenceGrant](s, "referencegrants"),
		Policies:     all[*gwv1.BackendTLSPolicy](s, "backendtlspolicies"),
		Objects:      s,
	}
}

// vital are the kinds that a sudden end of all objects is not believed of at once.
var vital = []string{"gatewayclasses", "gateways", "listenersets", "tlsroutes", "tcproutes", "udproutes"}

// emptied reports whether all objects of a vital kind are gone since counts, and
// are not: the API server is asked once more for those, past its cache. An API
// server that has lost its store, or finds it again, lists nothing for a moment.
// counts are those of this time afterwards, if it is false.
func (s *store) emptied(ctx context.Context, counts map[string]int) (string, bool) {
	now := map[string]int{}
	for _, resource := range vital {
		for _, inf := range s.kinds[resource].informers {
			now[resource] += len(inf.GetStore().ListKeys())
		}
		if now[resource] > 0 || counts[resource] == 0 {
			continue
		}
		for _, list := range s.kinds[resource].lists {
			ctx, cancel := context.WithTimeout(ctx, answerTime)
			o, err := list.ListWithContext(ctx, metav1.ListOptions{Limit: 1})
			cancel()
			if err != nil {
				return fmt.Sprintf("all %s are gone, and it can't be found out whether they are: %v", resource, err), true
			}
			if meta.LenList(o) > 0 {
				return fmt.Sprintf("all %s were gone, and the API server has some", resource), true
			}
		}
	}
	maps.Copy(counts, now)
	return "", false
}
