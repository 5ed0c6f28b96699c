package discovery

import (
	"cmp"
	"log/slog"
	"reflect"
	"slices"
	"sync"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/internal/kube/watch"
	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
)

// A run is one call of Source.Run.
type run struct {
	src     *Source
	log     *slog.Logger
	running sync.WaitGroup
	changed watch.Signal
	events  chan Problem
	slices  *endpoints.Store

	reslicing sync.Mutex       // guards the next one: it is held for a moment only, not while services are converted
	resliced  map[key]struct{} // services whose slices have changed since the last conversion

	mu       sync.Mutex // guards all below, and what the scopes hold
	scopes   []*scope
	services map[key]*service
	spaces   map[string]*namespace
	silent   error // why the API server does not answer; nil if it does
	nodes    map[string]*node

	dirty    map[key]struct{} // services that must be converted again
	dirtyNet bool             // the network must be converted again, too

	view
	exports       map[key]bool
	order         []*item // sorted, the oldest first
	items         map[key]*item
	nets          []registry.Network // none or one
	netProblems   []Problem
	problemCounts map[Problem]int // how many items have each
	unlogged      []Problem
	addresses     []registry.SetAddress
	modified      bool // items, network or addresses are not sent yet
}

// An item is a service with the result of its conversion.
type item struct {
	*service
	out      *registry.Service // nil if it is not in the table
	problems []Problem
}

func newRun(s *Source, log *slog.Logger) *run {
	shared := s.Slices
	if shared == nil {
		shared = endpoints.NewStore(endpoints.Config{Client: s.Client, Name: s.name(), Namespaces: s.Namespaces, Pulse: s.Pulse, Log: log})
	}
	return &run{
		src: s, log: log, slices: shared, changed: watch.NewSignal(), events: make(chan Problem, maxEvents),
		resliced: map[key]struct{}{}, services: map[key]*service{}, spaces: map[string]*namespace{}, nodes: map[string]*node{},
		dirty: map[key]struct{}{}, dirtyNet: true, items: map[key]*item{}, problemCounts: map[Problem]int{},
		view: view{cluster: s.Cluster, network: s.PodNetwork(), zone: s.Zone, prefer: s.Prefer, rules: &s.Rules},
	}
}

// A kind keeps the objects of one kind. Its functions are called with run.mu held.
type kind struct {
	put  func(r *run, o any) // the new state of an object
	drop func(r *run, k key)
}

var (
	serviceKind = kind{
		put: func(r *run, o any) { r.putService(serviceOf(o.(*corev1.Service))) },
		drop: func(r *run, k key) {
			if s := r.services[k]; s != nil {
				delete(r.services, k)
				r.touch(k)
				r.dirtyNet = r.dirtyNet || s.notes[noteGateway] != ""
			}
		},
	}
	namespaceKind = kind{
		put:  func(r *run, o any) { r.putNamespace(o.(*corev1.Namespace).Name, namespaceOf(o.(*corev1.Namespace))) },
		drop: func(r *run, k key) { r.putNamespace(k.Name, nil) },
	}
	nodeKind = kind{
		put:  func(r *run, o any) { r.putNode(o.(*corev1.Node).Name, nodeOf(o.(*corev1.Node))) },
		drop: func(r *run, k key) { r.putNode(k.Name, nil) },
	}
)

// A store is the watch.Store of one kind.
type store struct {
	*run
	kind kind
}

// Apply implements watch.Store.
func (s store) Apply(changed []any, gone []key) {
	s.mu.Lock()
	for _, o := range changed {
		s.kind.put(s.run, o)
	}
	for _, k := range gone {
		s.kind.drop(s.run, k)
	}
	s.mu.Unlock()
	s.changed.Notify()
}

// touch marks a service to be converted again.
func (r *run) touch(k key) { r.dirty[k] = struct{}{} }

func (r *run) touchAll() {
	for k := range r.services {
		r.touch(k)
	}
	r.dirtyNet = true
}

func (r *run) putService(s *service) {
	old := r.services[s.key]
	if old != nil && reflect.DeepEqual(old, s) {
		return // only fields have changed that are not used
	}
	r.services[s.key] = s
	r.touch(s.key)
	if s.notes[noteGateway] != "" || old != nil && old.notes[noteGateway] != "" {
		r.dirtyNet = true
	}
}

// slicesChanged is called when the slices of owners have changed. It does not wait for a conversion
// in progress, because others use the store, too.
func (r *run) slicesChanged(owners []endpoints.Owner) {
	r.reslicing.Lock()
	for _, o := range owners {
		if !o.Import {
			r.resliced[o.NamespacedName] = struct{}{}
		}
	}
	r.reslicing.Unlock()
	r.changed.Notify()
}

// touchResliced marks the services whose slices have changed to be converted again.
func (r *run) touchResliced() {
	r.reslicing.Lock()
	defer r.reslicing.Unlock()
	for k := range r.resliced {
		r.touch(k)
		if s := r.services[k]; s != nil && s.local && s.notes[noteGateway] != "" {
			r.dirtyNet = true
		}
	}
	clear(r.resliced)
}

func (r *run) putNamespace(name string, n *namespace) {
	old := r.spaces[name]
	if n == nil {
		delete(r.spaces, name)
	} else {
		r.spaces[name] = n
	}
	if reflect.DeepEqual(old, n) {
		return
	}
	for k := range r.services {
		if k.Namespace == name {
			r.touch(k)
		}
	}
}

func (r *run) putNode(name string, n *node) {
	if reflect.DeepEqual(r.nodes[name], n) {
		return
	}
	if n == nil {
		delete(r.nodes, name)
	} else {
		r.nodes[name] = n
	}
	r.dirtyNet = true
}

// slicesOf returns the slices of a service, in any order. The result of a conversion does not depend
// on it.
func (r *run) slicesOf(k key) []*endpoints.Slice {
	return r.slices.Of(endpoints.OfService(k.Namespace, k.Name))
}

// convert brings items and network up to date.
func (r *run) convert() {
	r.touchResliced()
	for k := range r.dirty {
		r.convertOne(k)
	}
	clear(r.dirty)
	if r.dirtyNet {
		r.dirtyNet = false
		r.convertNetwork()
	}
}

func (r *run) convertOne(k key) {
	old, s := r.items[k], r.services[k]
	var next *item
	if s != nil {
		next = &item{service: s}
		next.out, next.problems = r.view.convert(s, r.spaces[k.Namespace], r.slicesOf(k), r.exports[k])
	}
	// The new problems are counted before the old ones are removed, so that a problem that stays is
	// not logged again.
	if next != nil {
		r.addProblems(next.problems)
	}
	if old != nil {
		r.removeProblems(old.problems)
	}
	if old != nil && next != nil {
		if reflect.DeepEqual(old.out, next.out) {
			next.out = old.out // an unchanged service keeps its pointer
		} else {
			r.modified = true
		}
		if old.created.Equal(next.created) { // and its place
			*old = *next
			return
		}
		r.modified = true
	}
	if old != nil {
		if at, ok := slices.BinarySearchFunc(r.order, old, compareItems); ok {
			r.order = slices.Delete(r.order, at, at+1)
		}
		delete(r.items, k)
		r.modified = r.modified || old.out != nil
	}
	if next != nil {
		at, _ := slices.BinarySearchFunc(r.order, next, compareItems)
		r.order = slices.Insert(r.order, at, next)
		r.items[k] = next
		r.modified = r.modified || next.out != nil
	}
}

// compareItems puts the oldest first: if two services claim one name, the older one has it.
func compareItems(a, b *item) int {
	return cmp.Or(a.created.Compare(b.created), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

// convertNetwork converts the network with its gateways.
func (r *run) convertNetwork() {
	if r.src.NoNetwork {
		return
	}
	var gatewayServices []*item
	var bad []Problem
	for k, s := range r.services {
		network := s.notes[noteGateway]
		if network == "" {
			continue
		}
		p := Problem{Kind: "Service", Namespace: k.Namespace, Name: k.Name, Key: noteGateway, Value: clip(network)}
		switch {
		case !slices.Contains(r.src.gatewayNamespaces(), k.Namespace):
			p.Text = "gateways are not trusted in this namespace; it is not used as a gateway"
		case network != r.view.network:
			p.Text = "the network of this cluster is " + r.network + "; it is not used as a gateway"
		default:
			gatewayServices = append(gatewayServices, &item{service: s})
			continue
		}
		bad = append(bad, p)
	}
	slices.SortFunc(gatewayServices, compareItems)
	list := make([]*service, len(gatewayServices))
	at := map[key][]*endpoints.Slice{}
	for i, e := range gatewayServices {
		list[i] = e.service
		at[e.key] = r.slicesOf(e.key)
	}
	network, more := r.view.networkOf(list, at, r.nodes, r.src.PodCIDRs)
	bad = append(bad, more...)
	if p, none := r.withoutPodCIDR(); none {
		bad = append(bad, p)
	}
	r.addProblems(bad)
	r.removeProblems(r.netProblems)
	r.netProblems = bad
	if len(network.Gateways) == 0 && len(list) > len(more) && len(r.nets) > 0 {
		// Without a gateway, the pods of the network would seem to be reachable from everywhere.
		network.Gateways = r.nets[0].Gateways
	}
	if len(r.nets) > 0 && reflect.DeepEqual(r.nets[0], network) {
		return
	}
	r.nets = []registry.Network{network}
	r.modified = true
}

// withoutPodCIDR reports the problem that podCIDRs is set and no Node has a podCIDR, as with a network
// plugin that assigns addresses by itself.
func (r *run) withoutPodCIDR() (Problem, bool) {
	if !r.src.PodCIDRs || len(r.nodes) == 0 {
		return Problem{}, false
	}
	for _, n := range r.nodes {
		if len(n.pods) > 0 {
			return Problem{}, false
		}
	}
	return Problem{Kind: "Nodes", Text: "podCIDRs is set, and no Node has a podCIDR: pods are in no network; write their ranges as cidrs of the network"}, true
}

// addProblems counts problems, and queues new ones to be logged.
func (r *run) addProblems(problems []Problem) {
	for _, p := range problems {
		if r.problemCounts[p]++; r.problemCounts[p] == 1 {
			r.unlogged = append(r.unlogged, p)
		}
	}
}

func (r *run) removeProblems(problems []Problem) {
	for _, p := range problems {
		if r.problemCounts[p]--; r.problemCounts[p] <= 0 {
			delete(r.problemCounts, p)
		}
	}
}

// snapshot returns the services and the network, in new slices.
func (r *run) snapshot() registry.Snapshot {
	out := registry.Snapshot{SetAddresses: r.addresses, Networks: r.nets, Services: make([]*registry.Service, 0, len(r.order))}
	for _, i := range r.order {
		if i.out != nil {
			out.Services = append(out.Services, i.out)
		}
	}
	return out
}
