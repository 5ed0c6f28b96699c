//go:build !nokube

package command

import (
	"context"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"sync/atomic"

	"culvert.dev/internal/gateway"
	"culvert.dev/internal/kube"
	"culvert.dev/internal/kube/discovery"
	"culvert.dev/internal/kube/gatewayapi"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// What differs in a program without Kubernetes: see nokube.go.
type (
	kubeReader = kube.Kube
	kubeReport = kube.Status
)

// checkKube returns an error if this program can't keep the section for Kubernetes.
func checkKube(*file.Config) error { return nil }

// logKube has the Kubernetes client write to log.
func logKube(log *slog.Logger) { kube.Logs(log) }

// kubeSources are the sources of Kubernetes that a running gateway has, which follow the
// file.
type kubeSources struct {
	cfg kube.Config // of current; only of the goroutine that changes it

	state atomic.Pointer[kubeState]
}

// A kubeState is not changed.
type kubeState struct {
	current *kubeReader // nil for none
	before  *kubeReader // the last one that knew the Services of its cluster
}

// use has k be the current one, which was made of c.
func (s *kubeSources) use(c *file.Config, k *kubeReader) {
	next := &kubeState{current: k}
	if was := s.state.Load(); was != nil {
		next.before = was.before
		if was.current.Listed() {
			next.before = was.current
		}
	}
	s.cfg = kubeSettings(c)
	s.state.Store(next)
}

// differs reports whether c needs another Kube than the current one.
func (s *kubeSources) differs(c *file.Config) bool {
	return !reflect.DeepEqual(s.cfg, kubeSettings(c))
}

// kubeSettings is the kubeConfig of c, for comparing; the zero Config where it says nothing
// of Kubernetes.
func kubeSettings(c *file.Config) kube.Config {
	if c.Kubernetes == nil {
		return kube.Config{}
	}
	return kubeConfig(c, nil)
}

// kube returns the current one; nil for none.
func (s *kubeSources) kube() *kubeReader { return s.state.Load().current }

// refuses is gateway.Config.Refuses. As long as the current one does not know the Services
// of its cluster, the one before it judges, whose services are served until then.
func (s *kubeSources) refuses(a netip.Addr) string {
	state := s.state.Load()
	if state.before != nil && !state.current.Listed() {
		return state.before.Refuses(a)
	}
	return state.current.Refuses(a)
}

// status is gateway.Config.Kubernetes.
func (s *kubeSources) status() any {
	if k := s.kube(); k != nil {
		return k.Status()
	}
	return nil
}

// configure sets what of a gateway asks for Kubernetes.
func (s *kubeSources) configure(cfg *gateway.Config) {
	cfg.Refuses, cfg.Kubernetes = s.refuses, s.status
	cfg.Metrics = func(add func(name, help string, labels []string, read func(yield func(labels []string, v float64)))) {
		kube.Metrics(s.kube, add)
	}
}

// group returns the current sources as a Group. They end when the gateway does, and write
// nothing after ctx is done.
func (s *kubeSources) group(ctx context.Context, g kube.Gateway) *registry.Group {
	k := s.kube()
	return &registry.Group{Sources: k.Sources(), Start: func() (stop func()) { return k.Start(ctx, g) }}
}

// newKube makes what c says of Kubernetes; nil where it says nothing.
func newKube(c *file.Config, sockets tunnel.Sockets, log *slog.Logger) (*kubeReader, error) {
	if c.Kubernetes == nil {
		return nil, nil
	}
	cfg := kubeConfig(c, log)
	if sockets.Mark != 0 { // else clients share connections
		cfg.Dial = sockets.DialContext
	}
	k, err := kube.New(cfg)
	if err != nil {
		return nil, usageError("set kubernetes.kubeconfig, or run in a pod with a service account", "%w", err)
	}
	return k, nil
}

func kubeConfig(c *file.Config, log *slog.Logger) kube.Config {
	f := c.Kubernetes
	cfg := kube.Config{
		Kubeconfig: f.Kubeconfig, Context: f.Context, Version: version, Cluster: c.Cluster, Mesh: c.Mesh, Namespaces: f.Namespaces,
		MultiCluster: f.MultiCluster, Lease: kube.Object(f.Leader), State: f.State, Log: log,
	}
	if d := f.Discovery; d != nil {
		cfg.Discovery = &kube.Discovery{
			Network:  d.Network,
			Declared: slices.ContainsFunc(c.Networks, func(n registry.Network) bool { return n.Name == d.Network && !n.OnlyInsecure() }),
			Zone:     d.Zone, Prefer: d.Prefer, PodCIDRs: d.PodCIDRs, GatewayNamespaces: d.Gateways, Clusters: d.Clusters, ExportedTo: d.ExportedTo,
			Rules: discovery.Rules{Allow: d.Allow, Deny: d.Deny, ExternalNames: d.ExternalNames},
		}
		for _, s := range d.Suffixes {
			cfg.Discovery.Rules.Names = append(cfg.Discovery.Rules.Names, discovery.NameRule{Suffix: tunnel.MustParseName(s.Domain), Namespaces: s.Namespaces})
		}
	}
	if api := f.GatewayAPI; api != nil {
		cfg.GatewayAPI = &kube.GatewayAPI{Controller: api.ControllerName, Service: kube.Object(api.Service), InfrastructureKeys: api.InfrastructureKeys}
		for _, a := range api.Addresses {
			switch {
			case a.Address.IsValid():
				cfg.GatewayAPI.Addresses = append(cfg.GatewayAPI.Addresses, gatewayapi.Address{Bind: a.Address, Public: a.Public})
			case a.Public.IsValid():
				cfg.GatewayAPI.Public = append(cfg.GatewayAPI.Public, a.Public)
			}
		}
	}
	if i := f.ImportedServices; i != nil {
		cfg.ImportedServices = &kube.ImportedServices{Ports: i.Ports, Selector: i.Selector}
	}
	if p := f.AuthorizationPolicies; p != nil {
		cfg.Policies = &kube.Policies{TrustDomains: p.TrustDomains}
	}
	return cfg
}
