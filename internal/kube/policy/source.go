package policy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/watch"
	"culvert.dev/policy"
	"culvert.dev/registry"
)

// A Config has the settings of a Source. Only REST is required.
type Config struct {
	Settings

	REST        *rest.Config       // of the API server: see internal/kube/client
	Pulse       *client.Pulse      // that REST is wrapped by; nil where nobody knows whether the API server answers
	Definitions *watch.Definitions // that report when a CRD changes; nil: that is noticed within minutes
	Namespaces  []string           // whose AuthorizationPolicies are read; empty means all

	// Uses returns what the policies are about in the table, by their Origin. Nil: nobody knows.
	Uses func() map[string]registry.PolicyUse

	// SelectPods is called when there is a policy that selects Pods, and PodsKnown reports whether
	// they have been read since: until then such policies of a later time are not sent. Both may be nil.
	SelectPods func()
	PodsKnown  func() bool

	Controller string       // that status is written as; "" means DefaultController
	Leads      func() bool  // whether this replica is the one that writes; nil means that it is
	Log        *slog.Logger // nil discards
}

// DefaultController is the name of the controller in status.
const DefaultController = "culvert.dev/policy"

// A Source is a registry.Source of policies, and writes the status of the objects that they are made
// of.
type Source struct {
	cfg      Config
	dynamic  dynamic.Interface
	core     kubernetes.Interface
	metadata metadata.Interface
}

// Name is that of the snapshots.
const Name = "policies"

// New makes a Source. It sends no request yet.
func New(cfg Config) (*Source, error) {
	if cfg.REST == nil {
		return nil, errors.New("policy: no API server")
	}
	s := &Source{cfg: cfg}
	var err error
	if s.dynamic, err = dynamic.NewForConfig(cfg.REST); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	if s.core, err = kubernetes.NewForConfig(client.Protobuf(cfg.REST)); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	if s.metadata, err = metadata.NewForConfig(cfg.REST); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	return s, nil
}

// Intervals.
const (
	debounce          = 10 * time.Millisecond  // from the first change, for others that belong to it
	translateInterval = 100 * time.Millisecond // from one time to the next
	requestTimeout    = 10 * time.Second       // for one request
)

// A run is one call of Run.
type run struct {
	*Source
	log     *slog.Logger
	updates chan<- registry.Update
	changed watch.Signal
	watches []*watching
	spaces  *watching // of Namespaces

	podsSelected bool // SelectPods was called
	writer       *writer

	objects map[types.NamespacedName]types.UID // that the last snapshot was made of

	mu   sync.Mutex // guards the rest
	sent *registry.Snapshot
	why  error // that is known to be out of date, as was sent; nil if it is not
}

// A watching is a Watch with its objects.
type watching struct {
	*watch.Watch
	*watch.Cache
}

// Run implements registry.Source: it sends an Update at first and at each change, until ctx is done.
func (s *Source) Run(ctx context.Context, updates chan<- registry.Update) error {
	r := &run{Source: s, log: s.cfg.Log, updates: updates, changed: watch.NewSignal()}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	r.writer = newWriter(s, r.latest, r.log)
	namespaces := s.cfg.Namespaces
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	for _, ns := range namespaces {
		r.watches = append(r.watches, r.watch(resource, kind, ns))
	}
	r.watches = append(r.watches, r.watch(clusterResource, clusterKind, metav1.NamespaceAll))
	r.spaces = r.watchNamespaces()

	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for _, w := range append(slices.Clone(r.watches), r.spaces) {
		running.Go(func() { w.Run(ctx) })
	}
	running.Go(func() { r.writer.run(ctx) })
	if s.cfg.Pulse != nil {
		running.Go(func() { watch.Reachability(ctx, s.cfg.Pulse, func(err error) { r.reachable(ctx, err) }) })
	}
	return r.loop(ctx)
}

// watch makes the watch of a kind in a namespace, "" for all.
func (r *run) watch(res schema.GroupVersionResource, kind, namespace string) *watching {
	empty := &unstructured.Unstructured{}
	empty.SetGroupVersionKind(schema.GroupVersionKind{Group: group, Version: version, Kind: kind})
	return r.watching(watch.Config{
		Name: "policy", Resource: res.GroupResource(), Namespace: namespace, Object: empty, Client: r.dynamic,
		Source:  watch.Source[*unstructured.UnstructuredList](r.dynamic.Resource(res).Namespace(namespace), nil),
		Without: "policies of Kubernetes", Transform: decode,
	})
}

// watchNamespaces makes the watch of Namespaces, of which the labels are needed.
func (r *run) watchNamespaces() *watching {
	return r.watching(watch.Config{
		Name: "policy", Resource: schema.GroupResource{Resource: "namespaces"}, Object: &metav1.PartialObjectMetadata{}, Client: r.metadata, Optional: true,
		Source: watch.Source[*metav1.PartialObjectMetadataList](r.metadata.Resource(schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}), nil),
	})
}

func (r *run) watching(cfg watch.Config) *watching {
	cache := watch.NewCache(r.observe)
	cfg.Store, cfg.Pulse, cfg.Definitions, cfg.Log = cache, r.cfg.Pulse, r.cfg.Definitions, r.log
	cfg.OnChange = func(before, after watch.State) {
		if !before.EqualButErr(after) {
			r.changed.Notify()
		}
	}
	return &watching{watch.New(cfg), cache}
}

// observe notes a change of an object, unless it is one of status, which is our own.
func (r *run) observe(before, after metav1.Object) {
	if before != nil && after != nil && before.GetUID() == after.GetUID() && before.GetGeneration() == after.GetGeneration() && before.GetGeneration() > 0 {
		r.writer.wake.Notify() // somebody may have changed it
		return
	}
	r.changed.Notify()
}

// latest returns o with the status that it has by now, as far as the watches have told.
func (r *run) latest(o *object) *object {
	for _, w := range r.watches {
		if now, ok := w.Get(key(o)).(*object); ok && now.UID == o.UID && now.Generation == o.Generation {
			return now
		}
	}
	return o
}

// decode is the Transform of the watches of policies.
func decode(o any) (any, error) {
	u, ok := o.(*unstructured.Unstructured)
	if !ok {
		return o, nil
	}
	out, err := objectOf(u)
	if err != nil {
		out = &object{}
		out.Name, out.Namespace, out.UID, out.Generation, out.ResourceVersion = u.GetName(), u.GetNamespace(), u.GetUID(), u.GetGeneration(), u.GetResourceVersion()
		out.Kind, out.Spec.broken = u.GetKind(), err
	}
	out.ManagedFields = nil
	return out, nil
}

// known reports whether all kinds have been listed, or cannot be.
func (r *run) known() bool {
	for _, w := range append(slices.Clone(r.watches), r.spaces) {
		if !w.State().Known() {
			return false
		}
	}
	return true
}

// unusable returns why no policies can be made of what is known: part of it can't be read, and what
// it denies is not known.
func (r *run) unusable() error {
	for _, w := range r.watches {
		switch s := w.State(); {
		case s.Unconfirmed != nil:
			return s.Unconfirmed
		case s.Missing:
			return fmt.Errorf("the API server has no %s: install the CRDs of culvert, or turn kubernetes.authorizationPolicies off", w)
		case s.Denied != "" && !s.Synced:
			return errors.New(s.Denied)
		}
	}
	return nil
}

// removed returns an error if policies are gone because their definition is being removed, which
// deletes all of them: nobody has said that what they forbid is allowed now.
func (r *run) removed(ctx context.Context, listed []*object) error {
	now := make(map[types.NamespacedName]types.UID, len(listed))
	for _, o := range listed {
		now[key(o)] = o.UID
	}
	var gone []schema.GroupVersionResource
	for name, uid := range r.objects {
		if now[name] != uid {
			gone = []schema.GroupVersionResource{resource, clusterResource}
			break
		}
	}
	for _, res := range gone {
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		name := res.GroupResource().String()
		all, err := r.metadata.Resource(watch.CustomResourceDefinitions).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		cancel()
		if err == nil && !slices.ContainsFunc(all.Items, func(o metav1.PartialObjectMetadata) bool { return o.Name == name && o.DeletionTimestamp == nil }) {
			return fmt.Errorf("the CustomResourceDefinition %s is being removed, and all of its objects with it: install the CRDs of culvert, or turn kubernetes.authorizationPolicies off", name)
		}
	}
	return nil
}

// loop translates whenever something has changed.
func (r *run) loop(ctx context.Context) error {
	for !r.known() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.changed:
		}
	}
	for {
		if err := r.rebuild(ctx); err != nil {
			return err
		}
		if !watch.Sleep(ctx, translateInterval) {
			return ctx.Err()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.changed:
		}
		if !watch.Sleep(ctx, debounce) {
			return ctx.Err()
		}
	}
}

// listed returns all policies, the cluster's first, by namespace and name.
func (r *run) listed() (all []*object) {
	for _, w := range r.watches {
		for _, o := range w.All() {
			if o, ok := o.(*object); ok && o.DeletionTimestamp == nil {
				all = append(all, o)
			}
		}
	}
	slices.SortFunc(all, func(a, b *object) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return all
}

// rebuild translates, sends the snapshot if it has changed, and has status written.
func (r *run) rebuild(ctx context.Context) error {
	if err := r.unusable(); err != nil {
		return r.stale(ctx, err)
	}
	listed := r.listed()
	if err := r.removed(ctx, listed); err != nil {
		return r.stale(ctx, err)
	}
	t := &translator{Settings: r.cfg.Settings}
	if state := r.spaces.State(); state.Synced {
		t.namespaces = map[string]labels.Set{}
		for _, o := range r.spaces.All() {
			if m, ok := o.(*metav1.PartialObjectMetadata); ok {
				t.namespaces[m.Name] = m.Labels
			}
		}
	}
	next := &registry.Snapshot{}
	var all []*translated
	pods := false
	for _, o := range listed {
		one := t.translate(o)
		all = append(all, one)
		next.Policies = append(next.Policies, one.policies...)
		pods = pods || slices.ContainsFunc(one.policies, func(p *policy.Policy) bool { return p.Targets.Workloads != nil })
	}
	if pods && !r.podsSelected && r.cfg.SelectPods != nil {
		r.podsSelected = true
		r.cfg.SelectPods()
		if !r.awaitPods(ctx) {
			return ctx.Err()
		}
	}
	r.objects = make(map[types.NamespacedName]types.UID, len(listed))
	for _, o := range listed {
		r.objects[key(o)] = o.UID
	}
	r.writer.want(all)
	return r.publish(ctx, next)
}

// podsPatience is how long the first policy that selects Pods waits for them: endpoints whose Pods are
// not known serve nobody that it selects. podsInterval is the time from one look to the next, and a
// last one for the table to have them.
const (
	podsPatience = 10 * time.Second
	podsInterval = 500 * time.Millisecond
)

// awaitPods waits until Pods have been read, and no longer than podsPatience. It is false if ctx is
// done.
func (r *run) awaitPods(ctx context.Context) bool {
	for end := time.Now().Add(podsPatience); r.cfg.PodsKnown != nil && !r.cfg.PodsKnown() && time.Now().Before(end); {
		if !watch.Sleep(ctx, podsInterval) {
			return false
		}
	}
	return watch.Sleep(ctx, podsInterval)
}

// publish sends a snapshot, unless it equals the last one and that was not reported as stale.
func (r *run) publish(ctx context.Context, next *registry.Snapshot) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sent != nil && reflect.DeepEqual(r.sent.Policies, next.Policies) {
		if r.why == nil {
			return nil
		}
	} else {
		r.sent = next
	}
	if r.why != nil {
		r.log.Info("policies of Kubernetes are readable again")
	}
	r.why = nil
	return r.send(ctx, registry.Update{Source: Name, Snapshot: *r.sent})
}

// stale reports once why policies can't be read. Those of before stay in force.
func (r *run) stale(ctx context.Context, why error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.why != nil && r.why.Error() == why.Error() {
		return nil
	}
	r.why = why
	r.log.Warn("policies of Kubernetes cannot be read; enforcing the last known ones", "err", why)
	return r.send(ctx, registry.Update{Source: Name, Err: why})
}

// reachable reports that the API server does not answer, or with nil that it does again.
func (r *run) reachable(ctx context.Context, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err != nil:
		_ = r.send(ctx, registry.Update{Source: Name, Err: fmt.Errorf("the Kubernetes API server does not answer: %w", err)})
	case r.why != nil:
		_ = r.send(ctx, registry.Update{Source: Name, Err: r.why})
	case r.sent != nil:
		_ = r.send(ctx, registry.Update{Source: Name, Snapshot: *r.sent})
	}
}

func (r *run) send(ctx context.Context, u registry.Update) error {
	select {
	case r.updates <- u:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func key(o *object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
}
