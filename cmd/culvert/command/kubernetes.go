package command

import (
	"log/slog"
	"slices"

	"culvert.dev/internal/kube"
	"culvert.dev/internal/kube/discovery"
	"culvert.dev/internal/kube/gatewayapi"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// newKube makes what c says of Kubernetes; nil where it says nothing.
func newKube(c *file.Config, log *slog.Logger) (*kube.Kube, error) {
	if c.Kubernetes == nil {
		return nil, nil
	}
	k, err := kube.New(kubeConfig(c, log))
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
	if p := f.AuthorizationPolicies; p != nil {
		cfg.Policies = &kube.Policies{TrustDomains: p.TrustDomains}
	}
	return cfg
}
