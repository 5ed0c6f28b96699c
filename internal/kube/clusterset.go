package kube

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	mcsclient "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned"

	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/discovery"
	"culvert.dev/internal/kube/imported"
	"culvert.dev/internal/kube/mcs"
	"culvert.dev/internal/kube/watch"
)

// addressInterval is how often the addresses of the services of the cluster set are read again, from
// the table.
const addressInterval = 2 * time.Second

// A clusterSet is what several clusters export together.
type clusterSet struct {
	*mcs.Controller
	own      mcs.Cluster
	imported *imported.Source // nil where imports have no ClusterIPs

	mu      sync.Mutex // guards the following
	sources map[string]*discovery.Source
	gateway Gateway // nil before Start
}

// export makes the cluster set, without members.
func (k *Kube) export() error {
	s := &clusterSet{sources: map[string]*discovery.Source{}}
	s.Controller = &mcs.Controller{
		Cluster: k.cfg.Cluster, ID: k.cfg.Lease.Namespace + "/" + k.cfg.Lease.Name,
		Leads: k.leads.Load, VIPs: s.addresses, OnExports: s.setExports, OnImports: k.setImports, Log: k.cfg.Log,
	}
	if d := k.cfg.Discovery; d != nil {
		s.Refuses = d.Rules.Refuses
	}
	api, err := mcsclient.NewForConfig(k.rest)
	if err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	s.own = mcs.Cluster{Core: k.core, API: api, Namespaces: k.cfg.Namespaces, Definitions: k.defs}
	k.set = s
	return nil
}

// imports adds the source that gives the imports of the own cluster ClusterIPs.
func (k *Kube) imports(cfg *ImportedServices) {
	src := &imported.Source{
		Client: k.core, Namespace: k.cfg.Lease.Namespace, Owner: k.cfg.Lease.Name, Selector: cfg.Selector, Ports: cfg.Ports,
		Leads: k.leads.Load, Pulse: k.pulse, Changed: k.set.Changed, Log: k.cfg.Log,
	}
	k.set.imported = src
	k.set.Address = func(name mcs.Name) (mcs.Address, bool) {
		a, known := src.Address(name)
		return mcs.Address(a), known
	}
	k.sources = append(k.sources, src)
}

// setImports has DNS answer with the addresses that imports of the own cluster have there, and the
// imports have them.
func (k *Kube) setImports(all map[mcs.Name]mcs.Imported) {
	ips := make(map[mcs.Name][]netip.Addr, len(all))
	ports := make(map[imported.Name][]mcsv1.ServicePort, len(all))
	for name, i := range all {
		ips[name], ports[name] = i.ClusterIPs, i.Ports
	}
	if k.own != nil {
		k.own.SetAddresses(ips)
	}
	if k.set.imported != nil {
		k.set.imported.SetImports(ports)
	}
}

// addresses returns those of a service in the cluster set.
func (s *clusterSet) addresses(namespace, name string) []netip.Addr {
	s.mu.Lock()
	g := s.gateway
	s.mu.Unlock()
	if g == nil {
		return nil
	}
	return g.ClusterSetAddresses(namespace, name)
}

// register has the discovery of a cluster receive what that cluster exports.
func (s *clusterSet) register(name string, src *discovery.Source) {
	src.AwaitExports = true
	s.mu.Lock()
	s.sources[name] = src
	s.mu.Unlock()
	s.network()
}

// unregister has a cluster's network no longer be one of the cluster set's.
func (s *clusterSet) unregister(name string, src *discovery.Source) {
	s.mu.Lock()
	if s.sources[name] == src {
		delete(s.sources, name)
	}
	s.mu.Unlock()
	s.network()
}

// network tells all discoveries the networks of the cluster set.
func (s *clusterSet) network() {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []string
	for _, src := range s.sources {
		all = append(all, src.PodNetwork())
	}
	slices.Sort(all)
	all = slices.Compact(all)
	for _, src := range s.sources {
		src.SetClusterSet(all)
	}
}

func (s *clusterSet) setExports(cluster string, exports map[mcs.Name]bool) {
	s.mu.Lock()
	src := s.sources[cluster]
	s.mu.Unlock()
	if src != nil {
		src.SetExports(exports)
	}
}

// joinClusterSet makes a further cluster a member until the returned function is called.
func (k *Kube) joinClusterSet(ctx context.Context, name string, cfg *rest.Config, src *discovery.Source) (leave func()) {
	api, err := mcsclient.NewForConfig(cfg)
	if err != nil {
		k.cfg.Log.Error("cluster cannot join the cluster set", "cluster", name, "err", err)
		return nil
	}
	core, err := kubernetes.NewForConfig(client.Protobuf(cfg))
	if err != nil {
		k.cfg.Log.Error("cluster cannot join the cluster set", "cluster", name, "err", err)
		return nil
	}
	defs, err := watch.NewDefinitions(cfg, k.cfg.Log.With("cluster", name))
	if err != nil {
		k.cfg.Log.Error("cluster cannot join the cluster set", "cluster", name, "err", err)
		return nil
	}
	k.set.register(name, src)
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { defs.Run(ctx) })
	remove := k.set.Add(ctx, name, mcs.Cluster{Core: core, API: api, Namespaces: src.Namespaces, Definitions: defs})
	return func() {
		cancel()
		remove()
		running.Wait()
		k.set.unregister(name, src)
	}
}

// runSet keeps the cluster set until ctx is done.
func (k *Kube) runSet(ctx context.Context, g Gateway) {
	s := k.set
	s.mu.Lock()
	s.gateway = g
	s.mu.Unlock()
	defer s.Add(ctx, k.cfg.Cluster, s.own)()
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { _ = s.Run(ctx) }) // until ctx is done
	tick := time.NewTicker(addressInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.Changed()
		}
	}
}
