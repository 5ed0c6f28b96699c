package endpoints

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/watch"
)

// A Config says which EndpointSlices a Store keeps. Only Client is needed.
type Config struct {
	Client     kubernetes.Interface
	Name       string        // of the watches in client-go's debug log
	Namespaces []string      // that are watched; empty means all
	Imports    bool          // keep those of ServiceImports, too
	Pulse      *client.Pulse // that Client is wrapped by; nil where nobody knows whether the API server answers
	Log        *slog.Logger  // nil discards
}

// A Store keeps the EndpointSlices of one cluster, for all that use them: each is received, decoded
// and kept once. What uses the Store asks it for the Slices of an Owner, and is told when they have
// changed. It may begin and end to do so at any time, because it finds in the Store what was
// received before.
type Store struct {
	scopes []Scope
	pods   *pods

	mu     sync.RWMutex // guards the rest
	slices map[types.NamespacedName]*Slice
	owned  map[Owner][]*Slice // each list is never changed, but replaced
	users  []*User            // as well
}

// A Scope is the watch of one namespace, or of all of them ("").
type Scope struct {
	*watch.Watch
	Namespace string
}

// A User is told of changes. Its functions must not block, and may be called once more after its
// end.
type User struct {
	Changed      func([]Owner)                   // the Slices of those have changed
	StateChanged func(before, after watch.State) // of one of the scopes
}

// NewStore makes a Store, which asks nothing before Run.
func NewStore(cfg Config) *Store {
	s := &Store{slices: map[types.NamespacedName]*Slice{}, owned: map[Owner][]*Slice{}}
	namespaces := cfg.Namespaces
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	ofServices := func(o *metav1.ListOptions) { o.LabelSelector = discoveryv1.LabelServiceName }
	if cfg.Imports {
		ofServices = nil // a selector cannot ask for one label or another
	}
	for _, ns := range namespaces {
		s.scopes = append(s.scopes, Scope{Namespace: ns, Watch: watch.New(watch.Config{
			Name: cfg.Name, Resource: discoveryv1.Resource("endpointslices"), Namespace: ns, Object: &discoveryv1.EndpointSlice{},
			Source: watch.Source(cfg.Client.DiscoveryV1().EndpointSlices(ns), ofServices), Client: cfg.Client,
			Store: s, Transform: transform, Pulse: cfg.Pulse, OnChange: s.stateChanged, Without: "endpoints of services", Log: cfg.Log,
		})})
	}
	s.newPods(cfg, namespaces)
	return s
}

// Run watches until ctx is done.
func (s *Store) Run(ctx context.Context) {
	var running sync.WaitGroup
	for _, sc := range s.scopes {
		running.Go(func() { sc.Run(ctx) })
	}
	running.Go(func() { s.pods.run(ctx) })
	running.Wait()
}

// Scopes returns the watches, one for each namespace that is watched.
func (s *Store) Scopes() []Scope { return s.scopes }

// Of returns the Slices of an owner, in no order. The list must not be changed.
func (s *Store) Of(o Owner) []*Slice {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.owned[o]
}

// At returns the owners that have an endpoint at an address. It looks through all endpoints.
func (s *Store) At(a netip.Addr) (owners []Owner) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for o, list := range s.owned {
		if slices.ContainsFunc(list, func(sl *Slice) bool {
			return slices.ContainsFunc(sl.Endpoints, func(e Endpoint) bool { return e.Addr == a })
		}) {
			owners = append(owners, o)
		}
	}
	return owners
}

// Use tells u of changes from now on, until end is called.
func (s *Store) Use(u *User) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.users = append(slices.Clone(s.users), u)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.users = slices.DeleteFunc(slices.Clone(s.users), func(o *User) bool { return o == u })
	}
}

func (s *Store) stateChanged(before, after watch.State) {
	s.mu.RLock()
	users := s.users
	s.mu.RUnlock()
	for _, u := range users {
		u.StateChanged(before, after)
	}
}

// A received is an EndpointSlice as the Transform of the watch leaves it.
type received struct {
	metav1.ObjectMeta // its name alone
	slice             *Slice
}

// transform leaves a received, so that a list is never held whole.
func transform(o any) (any, error) {
	if s, ok := o.(*discoveryv1.EndpointSlice); ok {
		return &received{metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name}, SliceOf(s)}, nil
	}
	return o, nil
}

// Apply implements watch.Store.
func (s *Store) Apply(changed []any, gone []types.NamespacedName) {
	var owners []Owner
	s.mu.Lock()
	for _, o := range changed {
		if o, err := transform(o); err == nil {
			r := o.(*received)
			owners = append(owners, s.set(types.NamespacedName{Namespace: r.Namespace, Name: r.Name}, r.slice)...)
		}
	}
	for _, name := range gone {
		owners = append(owners, s.set(name, nil)...)
	}
	users := s.users
	s.mu.Unlock()
	if len(owners) == 0 {
		return
	}
	for _, u := range users {
		u.Changed(owners)
	}
}

// set makes next the Slice of that name, nil for none, and returns the owners for which that makes a
// difference. mu is held.
func (s *Store) set(name types.NamespacedName, next *Slice) (owners []Owner) {
	before := s.slices[name]
	if next != nil {
		next = s.labelled(name.Namespace, next)
	}
	if before == next || before != nil && next != nil && before.equal(next) {
		return nil // something of it changed that is not used, or it was listed again
	}
	s.pods.index(name, before, next)
	if before != nil {
		delete(s.slices, name)
		for _, o := range before.Owners {
			if left := slices.DeleteFunc(slices.Clone(s.owned[o]), func(b *Slice) bool { return b == before }); len(left) > 0 {
				s.owned[o] = left
			} else {
				delete(s.owned, o)
			}
		}
		owners = before.Owners
	}
	if next != nil {
		s.slices[name] = next
		for _, o := range next.Owners {
			s.owned[o] = append(slices.Clone(s.owned[o]), next)
		}
		if !slices.Equal(owners, next.Owners) {
			owners = slices.Concat(owners, next.Owners)
		}
	}
	return owners
}
