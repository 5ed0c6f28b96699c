package endpoints

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/internal/kube/watch"
	"culvert.dev/policy"
)

// pods are those of the cluster, for policies that select endpoints by their labels. Nothing is
// watched until SelectPods is called.
type pods struct {
	selected chan struct{} // closed by SelectPods
	watches  []*watch.Watch

	// The Store's mu guards the rest.
	known     map[uint64]*pod                              // by Endpoint.Pod
	byName    map[types.NamespacedName]uint64              // the same
	workloads map[string]*policy.Workload                  // those that are alike are one
	slices    map[uint64]map[types.NamespacedName]struct{} // names of Slices with an endpoint of that pod
	unknown   map[string]*policy.Workload                  // of each namespace with Slices, for endpoints whose pod is not known; nil before SelectPods
}

// A pod is a Pod as far as it matters here.
type pod struct {
	metav1.ObjectMeta // its name alone
	id                uint64
	addrs             []netip.Addr
	workload          *policy.Workload
}

// slimPod is the Transform of the watch of Pods.
func slimPod(o any) (any, error) {
	from, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	p := &pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: from.Namespace, Name: from.Name},
		id:         podID(from.UID), workload: &policy.Workload{Namespace: from.Namespace, ServiceAccount: from.Spec.ServiceAccountName, Labels: from.Labels},
	}
	for _, ip := range from.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			p.addrs = append(p.addrs, a.Unmap())
		}
	}
	return p, nil
}

// newPods makes the watches of pods.
func (s *Store) newPods(cfg Config, namespaces []string) {
	s.pods = &pods{
		selected: make(chan struct{}), known: map[uint64]*pod{}, byName: map[types.NamespacedName]uint64{},
		workloads: map[string]*policy.Workload{}, slices: map[uint64]map[types.NamespacedName]struct{}{},
	}
	for _, ns := range namespaces {
		s.pods.watches = append(s.pods.watches, watch.New(watch.Config{
			Name: cfg.Name, Resource: corev1.Resource("pods"), Namespace: ns, Object: &corev1.Pod{},
			Source: watch.Source(cfg.Client.CoreV1().Pods(ns), nil), Client: cfg.Client,
			Store: podStore{s}, Transform: slimPod, Pulse: cfg.Pulse, OnChange: s.stateChanged, Without: "policies that select Pods", Log: cfg.Log,
		}))
	}
}

// SelectPods has each Endpoint's Workload found from now on: it is unknown until its pod is read. It
// may be called at any time and more than once.
func (s *Store) SelectPods() {
	s.mu.Lock()
	if s.pods.unknown != nil {
		s.mu.Unlock()
		return
	}
	close(s.pods.selected)
	s.pods.unknown = map[string]*policy.Workload{}
	s.relabel(maps.Keys(s.slices))
}

// PodsKnown reports whether Pods have been listed, or cannot be.
func (s *Store) PodsKnown() bool {
	for _, w := range s.pods.watches {
		if !w.State().Known() {
			return false
		}
	}
	return true
}

// relabel finds the workloads of Slices anew, unlocks mu and tells users what has changed.
func (s *Store) relabel(names iter.Seq[types.NamespacedName]) {
	var owners []Owner
	for _, name := range slices.Collect(names) {
		if sl := s.slices[name]; sl != nil {
			owners = append(owners, s.set(name, sl)...)
		}
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

// unknownIn returns the workload of an endpoint of a namespace whose pod is not known: nil before
// pods are selected.
func (p *pods) unknownIn(namespace string) *policy.Workload {
	if p.unknown == nil {
		return nil
	}
	if p.unknown[namespace] == nil {
		p.unknown[namespace] = &policy.Workload{Namespace: namespace, Unknown: true}
	}
	return p.unknown[namespace]
}

// run watches pods, once they are selected, until ctx is done.
func (p *pods) run(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-p.selected:
	}
	var running sync.WaitGroup
	for _, w := range p.watches {
		running.Go(func() { w.Run(ctx) })
	}
	running.Wait()
}

// A podStore is a Store as the watch of Pods sees it.
type podStore struct{ *Store }

// Apply implements watch.Store.
func (s podStore) Apply(changed []any, gone []types.NamespacedName) {
	s.mu.Lock()
	stale := map[types.NamespacedName]struct{}{}
	for _, name := range gone {
		s.setPod(name, nil, stale)
	}
	for _, o := range changed {
		if o, err := slimPod(o); err == nil {
			if p, ok := o.(*pod); ok {
				s.setPod(types.NamespacedName{Namespace: p.Namespace, Name: p.Name}, p, stale)
			}
		}
	}
	s.relabel(maps.Keys(stale))
}

// setPod makes next the pod of a name, nil for none, and adds to stale the Slices for which that makes
// a difference. mu is held.
func (s *Store) setPod(name types.NamespacedName, next *pod, stale map[types.NamespacedName]struct{}) {
	p := s.pods
	before := p.known[p.byName[name]]
	if next != nil {
		next.workload = p.shared(next.workload)
		if before != nil && before.id == next.id && before.workload == next.workload && slices.Equal(before.addrs, next.addrs) {
			return
		}
	}
	if before != nil {
		delete(p.known, before.id)
		delete(p.byName, name)
		maps.Copy(stale, p.slices[before.id])
	}
	if next != nil {
		p.known[next.id], p.byName[name] = next, next.id
		maps.Copy(stale, p.slices[next.id])
	}
}

// maxWorkloads is how many workloads are remembered to be shared.
const maxWorkloads = 1 << 16

// shared returns the one workload that says the same as w.
func (p *pods) shared(w *policy.Workload) *policy.Workload {
	var key strings.Builder
	fmt.Fprintf(&key, "%q %q", w.Namespace, w.ServiceAccount)
	for _, k := range slices.Sorted(maps.Keys(w.Labels)) {
		fmt.Fprintf(&key, " %q=%q", k, w.Labels[k])
	}
	if one := p.workloads[key.String()]; one != nil {
		return one
	}
	if len(p.workloads) >= maxWorkloads { // mostly of pods that are gone; the others keep theirs
		clear(p.workloads)
	}
	p.workloads[key.String()] = w
	return w
}

// index notes which pods a Slice has endpoints of. mu is held.
func (p *pods) index(name types.NamespacedName, before, next *Slice) {
	if before != nil {
		for i := range before.Endpoints {
			id := before.Endpoints[i].Pod
			delete(p.slices[id], name)
			if len(p.slices[id]) == 0 {
				delete(p.slices, id)
			}
		}
	}
	if next != nil {
		for i := range next.Endpoints {
			id := next.Endpoints[i].Pod
			if id == 0 {
				continue
			}
			if p.slices[id] == nil {
				p.slices[id] = map[types.NamespacedName]struct{}{}
			}
			p.slices[id][name] = struct{}{}
		}
	}
}

// labelled returns a Slice of a namespace with the workloads of its endpoints as they are known now.
// It is sl itself where that is no change. A pod counts only for its own addresses and in its own
// namespace: whoever writes EndpointSlices must not lend the labels of one pod to another. mu is held.
func (s *Store) labelled(namespace string, sl *Slice) *Slice {
	out := sl
	for i := range sl.Endpoints {
		e := &sl.Endpoints[i]
		w := s.pods.unknownIn(namespace)
		if p := s.pods.known[e.Pod]; e.Pod != 0 && p != nil && p.Namespace == namespace && slices.Contains(p.addrs, e.Addr) {
			w = p.workload
		}
		if e.Workload == w {
			continue
		}
		if out == sl {
			copied := *sl
			copied.Endpoints = slices.Clone(sl.Endpoints)
			out = &copied
		}
		out.Endpoints[i].Workload = w
	}
	return out
}
