package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync/atomic"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"culvert.dev/kube/client"
	"culvert.dev/kube/discovery"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// A cluster is what a process has to do with Kubernetes.
type cluster struct {
	cfg     *file.Config
	log     *slog.Logger
	rest    *rest.Config
	core    kubernetes.Interface
	leads   atomic.Bool // this replica writes
	sources []registry.Source
}

// newCluster makes what c says of Kubernetes; nil where it says nothing. No
// request is made yet.
func newCluster(c *file.Config, log *slog.Logger) (*cluster, error) {
	if c.Kubernetes == nil {
		return nil, nil
	}
	k := &cluster{cfg: c, log: log}
	var err error
	if k.rest, err = (client.Config{Kubeconfig: c.Kubernetes.Kubeconfig, Context: c.Kubernetes.Context, Version: version}).REST(); err != nil {
		return nil, usageError("give kubernetes a kubeconfig, or run where a pod's service account is", "%w", err)
	}
	client.Logs(log)
	if k.core, err = kubernetes.NewForConfig(client.Protobuf(k.rest)); err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	if c.Kubernetes.Discovery != nil {
		if err := k.discover(); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// discover adds the sources of services.
func (k *cluster) discover() error {
	d := k.cfg.Kubernetes.Discovery
	own := k.source(k.cfg.Cluster)
	own.Client, own.Network, own.Namespaces = k.core, d.Network, k.cfg.Kubernetes.Namespaces
	own.NoNetwork = slices.ContainsFunc(k.cfg.Networks, func(n registry.Network) bool { return n.Name == d.Network })
	if err := own.Rules.Check(); err != nil {
		return configError(fmt.Errorf("kubernetes: discovery: %w", err))
	}
	k.sources = append(k.sources, own)
	if d.Clusters != "" {
		k.sources = append(k.sources, &discovery.Clusters{Client: k.core, Namespace: d.Clusters, Own: k.cfg.Cluster, New: k.source, Log: k.log})
	}
	return nil
}

// source returns the discovery of a cluster, without what is its own.
func (k *cluster) source(name string) *discovery.Source {
	d := k.cfg.Kubernetes.Discovery
	s := &discovery.Source{
		Cluster: name, PodCIDRs: d.PodCIDRs, Zone: d.Zone, Prefer: d.Prefer, GatewayNamespaces: d.Gateways,
		Rules:  discovery.Rules{Allow: d.Allow, Deny: d.Deny},
		Events: k.leads.Load, Log: k.log,
	}
	for _, suffix := range d.Suffixes {
		s.Rules.Names = append(s.Rules.Names, discovery.NameRule{Suffix: tunnel.MustParseName(suffix)})
	}
	if k.cfg.Kubernetes.MultiCluster {
		s.ClusterSet = []string{discovery.Everyone}
	}
	return s
}

// run does what is left to one of several replicas, until ctx is done.
func (k *cluster) run(ctx context.Context) error {
	if k == nil {
		return nil
	}
	name, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("kubernetes: a name for this replica: %w", err)
	}
	lease := client.Lease{
		Client: k.core, Namespace: k.cfg.Kubernetes.Leader.Namespace, Name: k.cfg.Kubernetes.Leader.Name,
		Identity: name + "_" + k.cfg.Cluster, Log: k.log,
	}
	err = lease.Run(ctx, func(ctx context.Context) {
		k.leads.Store(true)
		defer k.leads.Store(false)
		<-ctx.Done()
	})
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
