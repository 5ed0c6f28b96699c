package gatewayapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/internal/kube/watch"
)

// A store has the objects of all kinds that are watched.
type store struct {
	kinds  map[string]*kindStore // by resource
	order  []*kindStore
	nodes  *nodes
	slices *endpoints.Store
	own    bool // slices is not shared, and runs with the store
	dirty  func()

	references  atomic.Pointer[map[ObjectRef]bool] // of the last translation
	translating atomic.Bool                        // a translation is in progress, and may use any object
	ownWrites   ownWrites
}

// A kindStore has the objects of one kind: from one watch, or from one for each namespace.
type kindStore struct {
	kind
	watches []*kindWatch
	served  int // how many of the watches are of namespaces that are served
}

// A kindWatch is the watch of one kind in one namespace, with its objects. The watch of EndpointSlices
// has no Cache: they are in slices.
type kindWatch struct {
	*watch.Watch
	*watch.Cache
	namespace string // "" means all
}

// newStore makes the watches, and does not start them. shared has the EndpointSlices; nil makes a
// store of them.
func newStore(c clients, cfg Settings, shared *endpoints.Store, log *slog.Logger, dirty func()) *store {
	s := &store{kinds: map[string]*kindStore{}, slices: shared, own: shared == nil, dirty: dirty}
	if s.own {
		s.slices = endpoints.NewStore(endpoints.Config{Client: c.core, Name: "gatewayapi", Namespaces: cfg.Namespaces, Imports: true, Pulse: c.pulse, Log: log})
	}
	s.references.Store(&map[ObjectRef]bool{})
	for _, k := range c.kinds() {
		ks := &kindStore{kind: k}
		s.kinds[k.resource.Resource] = ks
		s.order = append(s.order, ks)
		if k.in == nil {
			for _, sc := range s.slices.Scopes() {
				ks.watches = append(ks.watches, &kindWatch{namespace: sc.Namespace, Watch: sc.Watch})
			}
			ks.served = len(ks.watches)
			continue
		}
		in := cfg.Namespaces
		if len(in) == 0 || k.cluster {
			in = []string{metav1.NamespaceAll}
		}
		ks.served = len(in)
		if ns := cfg.PublicService.Namespace; k.resource.Resource == "services" && ns != "" && in[0] != metav1.NamespaceAll && !slices.Contains(in, ns) {
			in = append(slices.Clone(in), ns)
		}
		for _, ns := range in {
			objects := watch.NewCache(s.observer(k))
			ks.watches = append(ks.watches, &kindWatch{namespace: ns, Cache: objects, Watch: watch.New(watch.Config{
				Name: "gatewayapi", Resource: k.resource, Namespace: ns, Object: k.object, Source: k.in(ns), Client: c.core,
				Store: objects, Transform: slim, Pulse: c.pulse, Definitions: c.definitions,
				OnChange: s.onState, Optional: k.optional, Log: log,
			})})
		}
	}
	s.nodes = newNodes(c, s, log)
	return s
}

// onState is called when the state of a watch has changed.
func (s *store) onState(before, after watch.State) {
	if !before.EqualButErr(after) {
		s.dirty()
	}
}

// run runs the watches until ctx is done.
func (s *store) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer s.slices.Use(&endpoints.User{Changed: s.slicesChanged, StateChanged: s.onState})()
	for _, ks := range s.order {
		for _, w := range ks.watches {
			if ks.in != nil || s.own {
				wg.Go(func() { w.Run(ctx) })
			}
		}
	}
	wg.Go(func() { s.nodes.run(ctx) })
	wg.Wait()
}

// known reports whether all kinds have been listed, or cannot be.
func (s *store) known() bool {
	for _, ks := range s.order {
		for _, w := range ks.watches {
			if !w.State().Known() {
				return false
			}
		}
	}
	return true
}

// needed are the kinds without which no table is made, because it would serve too little, or without
// the TLS that a policy asks for. Without Secrets, ConfigMaps or Namespaces only those Gateways and
// routes are refused that refer to one.
var needed = []string{
	"gatewayclasses", "gateways", "listenersets", "tlsroutes", "tcproutes", "udproutes",
	"referencegrants", "backendtlspolicies", "services", "endpointslices",
}

// unusable returns why no table can be made of the store now, or nil.
func (s *store) unusable() error {
	if err := s.forbidden(); err != nil {
		return err
	}
	for _, ks := range s.order {
		for _, w := range ks.watches {
			if err := w.State().Unconfirmed; err != nil {
				return err
			}
		}
	}
	return nil
}

// forbidden returns which of the needed kinds have never been read for lack of a permission: a gateway
// that starts with a reduced role must not serve less than before. It is nil if each can be read in
// at least one namespace, because the owner of a namespace can revoke permissions there, which must
// not affect the others.
func (s *store) forbidden() error {
	var all []string
	for _, resource := range needed {
		if ks := s.kinds[resource]; len(ks.unread()) == ks.served {
			all = append(all, ks.watches[0].State().Denied)
		}
	}
	switch n := len(all); {
	case n == 0:
		return nil
	case n > 3:
		all = append(all[:3], fmt.Sprintf("and %d more kinds may not be listed", n-3))
	}
	return errors.New(strings.Join(all, "; "))
}

// unread returns the served namespaces, "" for all, whose objects have never been read for lack of a
// permission.
func (ks *kindStore) unread() []string {
	var out []string
	for _, w := range ks.watches[:ks.served] {
		if w.State().Forbidden() {
			out = append(out, w.namespace)
		}
	}
	return out
}

// unread reports whether objects of a resource have never been read for lack of a permission.
func (s *store) unread(resource, namespace string) bool {
	for _, w := range s.kinds[resource].watches {
		if w.namespace == metav1.NamespaceAll || w.namespace == namespace {
			return w.State().Forbidden()
		}
	}
	return false
}

// observer returns a function that is called for each change of an object of a kind. It requests a
// translation if that may have another result.
func (s *store) observer(k kind) func(before, after metav1.Object) {
	return func(before, after metav1.Object) {
		o := after
		switch {
		case after == nil:
			o = before
			s.ownWrites.forget(before.GetUID())
		case before != nil && s.ownWrites.isOwn(before, after):
			return
		}
		if !k.refers || s.refers(referenceOf(o)) {
			s.dirty()
		}
	}
}

// slicesChanged is called when the EndpointSlices of owners have changed.
func (s *store) slicesChanged(owners []endpoints.Owner) {
	if slices.ContainsFunc(owners, func(o endpoints.Owner) bool { return s.refers(slicesOf(o)) }) {
		s.dirty()
	}
}

// refers reports whether a translation may have another result because an object has changed.
func (s *store) refers(o ObjectRef) bool { return s.translating.Load() || (*s.references.Load())[o] }

// referenceOf returns the reference by which routes and Gateways refer to an object.
func referenceOf(o any) ObjectRef {
	switch o := o.(type) {
	case *corev1.Namespace:
		return ObjectRef{"Namespace", "", o.Name}
	case *corev1.Service:
		return ObjectRef{"Service", o.Namespace, o.Name}
	case *corev1.Secret:
		return ObjectRef{"Secret", o.Namespace, o.Name}
	case *corev1.ConfigMap:
		return ObjectRef{"ConfigMap", o.Namespace, o.Name}
	case *mcsv1.ServiceImport:
		return ObjectRef{"ServiceImport", o.Namespace, o.Name}
	}
	return ObjectRef{}
}

// slicesOf returns the reference to the EndpointSlices of an owner.
func slicesOf(o endpoints.Owner) ObjectRef {
	if o.Import {
		return ObjectRef{"EndpointSlices of ServiceImport", o.Namespace, o.Name}
	}
	return ObjectRef{"EndpointSlices of Service", o.Namespace, o.Name}
}

// all returns the objects of a resource.
func all[T any](s *store, resource string) []T {
	var out []T
	for _, w := range s.kinds[resource].watches {
		for _, o := range w.All() {
			out = append(out, o.(T))
		}
	}
	return out
}

// get returns an object of a resource, or nil.
func get[T any](s *store, resource, namespace, name string) *T {
	for _, w := range s.kinds[resource].watches {
		if o, ok := w.Get(types.NamespacedName{Namespace: namespace, Name: name}).(*T); ok {
			return o
		}
	}
	return nil
}

// The store implements Objects.

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

func (s *store) Slices(o endpoints.Owner) []*endpoints.Slice { return s.slices.Of(o) }

// inputs returns the present objects, for one translation.
func (s *store) inputs() *Inputs {
	return &Inputs{
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
