package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"culvert.dev/gateway"
	"culvert.dev/kube/client"
	"culvert.dev/kube/discovery"
	"culvert.dev/kube/gatewayapi"
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
	plane   *plane // nil where nothing is listened at for Kubernetes
}

// A plane is a gateway as the controller of Gateway API sees it. The gateway is
// made after what it is fed by.
type plane struct{ *gateway.Gateway }

func (p *plane) Changed() <-chan struct{} { return p.ListenersChanged() }

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
	if c.Kubernetes.GatewayAPI != nil {
		if err := k.serve(); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// serve adds the source of listeners.
func (k *cluster) serve() error {
	api := k.cfg.Kubernetes.GatewayAPI
	k.plane = &plane{}
	cfg := gatewayapi.Config{
		Settings: gatewayapi.Settings{
			Controller: api.ControllerName, Namespaces: k.cfg.Kubernetes.Namespaces,
			PublicService: types.NamespacedName(api.Service),
		},
		REST: k.rest, Plane: k.plane, Leads: k.leads.Load, Log: k.log,
	}
	for _, a := range api.Addresses {
		switch {
		case a.Address.IsValid():
			cfg.Addresses = append(cfg.Addresses, gatewayapi.Address{Bind: a.Address, Public: a.Public})
		case a.Public.IsValid():
			cfg.PublicAddresses = append(cfg.PublicAddresses, a.Public)
		}
	}
	c, err := gatewayapi.New(cfg)
	if err != nil {
		return err
	}
	k.sources = append(k.sources, c)
	return nil
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

// feeds returns what of Kubernetes is a source.
func (k *cluster) feeds() []registry.Source {
	if k == nil {
		return nil
	}
	return k.sources
}

// start begins what g's sources don't do, and returns what ends it and waits.
func (k *cluster) start(ctx context.Context, g *gateway.Gateway) (stop func()) {
	if k.plane != nil {
		k.plane.Gateway = g
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // a drain writes, too
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := k.lead(ctx); err != nil {
			k.log.Error("kubernetes: nobody writes what has become of its objects", "err", err)
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// lead does what is left to one of several replicas, until ctx is done.
func (k *cluster) lead(ctx context.Context) error {
	name, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("kubernetes: a name for this replica: %w", err)
	}
	lease := client.Lease{
		Client: k.core, Namespace: k.cfg.Kubernetes.Leader.Namespace, Name: k.cfg.Kubernetes.Leader.Name,
		Identity: fmt.Sprintf("%s_%d", name, os.Getpid()), Log: k.log,
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
