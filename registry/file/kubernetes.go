package file

import (
	"net/netip"
	"path"
	"slices"
	"strings"

	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// Kubernetes says what is learnt from Kubernetes, and what is told to it.
type Kubernetes struct {
	// Kubeconfig is a path; "" means the pod's own service account. Context is one of the
	// kubeconfig; "" means its current one.
	Kubeconfig string `yaml:"kubeconfig"`
	Context    string `yaml:"context"`

	// Namespaces are what is watched; empty means the whole cluster.
	Namespaces []string `yaml:"namespaces" what:"a namespace" as:"label" empty:"leave the key out for the whole cluster"`

	Discovery    *Discovery  `yaml:"discovery"`    // nil means that services are not looked for
	GatewayAPI   *GatewayAPI `yaml:"gatewayAPI"`   // nil means that nothing is served of it
	MultiCluster bool        `yaml:"multiCluster"` // ServiceExports are taken up, and ServiceImports kept

	// ImportedServices gives what the cluster imports from others addresses in it; nil means
	// that ServiceImports have VIPs at most.
	ImportedServices *ImportedServices `yaml:"importedServices"`

	AuthorizationPolicies *AuthorizationPolicies `yaml:"authorizationPolicies"` // nil means that those of Kubernetes are not read

	Leader Object `yaml:"leader" as:"object" default:"culvert-system/culvert"` // of the Lease among those who write statuses

	// State is the beginning of the paths of files that keep what was learnt, for a
	// start while the API server is away; "" keeps nothing.
	State string `yaml:"state"`
}

// An Object is what a namespaced object is called.
type Object struct{ Namespace, Name string }

// Discovery says which Services become services.
type Discovery struct {
	// Network is the one that the endpoints are in; "" means the cluster's name. Zone is the
	// one that the gateway is in, for topology hints and where TopologyZone is ""; "" means
	// that hints are ignored.
	Network string `yaml:"network"`
	Zone    string `yaml:"zone"`

	// Allow and Deny are NAMESPACE/NAME, with * and ?, of what annotations may expose and of
	// what they may not, whatever Allow says. An empty Allow means everything.
	Allow []string `yaml:"allow" as:"objectPattern" empty:"leave the key out"`
	Deny  []string `yaml:"deny" as:"objectPattern" empty:"leave the key out"`

	// Suffixes are domains that annotations may take names of; empty means none.
	Suffixes []Suffix `yaml:"suffixes" what:"a suffix"`

	// Prefer is the family of pods that have both; "" means each Service's first.
	Prefer string `yaml:"prefer" oneof:"ipv4 ipv6 both"`

	// PodCIDRs says that the ranges of Nodes for their pods are in Network. It is not for
	// several clusters with the same ranges.
	PodCIDRs bool `yaml:"podCIDRs"`

	// Gateways are the namespaces whose Services may say that they are gateways; empty means
	// culvert-system.
	Gateways []string `yaml:"gatewayNamespaces" what:"a namespace" as:"label" empty:"leave the key out for culvert-system"`

	// GatewayTransport is how such gateways are asked; nil means without TLS.
	GatewayTransport *GatewayTransport `yaml:"gatewayTransport"`

	// Clusters is the namespace of Secrets with the kubeconfigs of further clusters; "" means
	// that there are none.
	Clusters string `yaml:"clusters" what:"the namespace of clusters" as:"label"`

	ExternalNames bool     `yaml:"externalNames"`               // annotations may expose Services of the type ExternalName
	ExportedTo    []string `yaml:"exportedTo" what:"a network"` // networks that exports open a Service to, beside those of the clusters; "*" means everyone
}

// A Suffix is a domain that Services may take names of.
type Suffix struct {
	Domain     string   `yaml:"suffix,required,short" what:"a suffix" as:"suffix"`          // itself, and what is below it
	Namespaces []string `yaml:"namespaces" as:"namespacePattern" empty:"leave the key out"` // that may, with * and ?; empty means all
}

// GatewayAPI says which Gateways are served, and where.
type GatewayAPI struct {
	ControllerName string          `yaml:"controllerName" as:"controllerName" default:"culvert.dev/gateway"` // of the GatewayClasses
	Addresses      []PublicAddress `yaml:"addresses" what:"an address"`                                      // to listen at; empty means every address, all Gateways together
	Service        Object          `yaml:"service" as:"object"`                                              // whose addresses are those of Gateways; zero means none's

	// InfrastructureKeys are DOMAIN/NAME, with * and ?, of labels and annotations of
	// infrastructure that ServiceAccounts of Gateways may have, beside those without a domain.
	InfrastructureKeys []string `yaml:"infrastructureKeys" as:"keyPattern" empty:"leave the key out"`
}

// AuthorizationPolicies says how those of Kubernetes are read.
type AuthorizationPolicies struct {
	// TrustDomains are those of the workloads of the cluster, whose ServiceAccounts
	// policies name; empty means cluster.local.
	TrustDomains []string `yaml:"trustDomains" what:"a trust domain" as:"trustDomain" empty:"leave the key out for cluster.local"`
}

// DefaultTrustDomain is that of clusters whose mesh was told no other.
const DefaultTrustDomain = "cluster.local"

// A PublicAddress is an address to listen at, and what others know it by.
type PublicAddress struct {
	Address netip.Addr `yaml:"address,required,short" what:"an address" as:"publicAddress"` // the zero Addr means every address
	Public  netip.Addr `yaml:"public" what:"an address" as:"publicAddress"`                 // the zero Addr means as Address
}

// DefaultControllerName is that of a GatewayAPI that names no other.
const DefaultControllerName = "culvert.dev/gateway"

func (g *GatewayAPI) check(d *decoder, at mapping) {
	for i, a := range g.Addresses {
		same := func(b PublicAddress) bool {
			return a.Address == b.Address || a.Address.IsUnspecified() && b.Address.IsUnspecified()
		}
		if a.Address.IsValid() && slices.ContainsFunc(g.Addresses[:i], same) {
			d.errorf(at.item("addresses", i), "keep one of them", "address %s is listed twice", a.Address)
		}
	}
	for i := range g.Addresses {
		for _, a := range []*netip.Addr{&g.Addresses[i].Address, &g.Addresses[i].Public} {
			if a.IsUnspecified() {
				*a = netip.Addr{}
			}
		}
	}
}

// parsePublicAddress parses an address to listen at, without a port.
func parsePublicAddress(_, s string) (netip.Addr, *complaint) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, complain("write it as 203.0.113.7 or 2001:db8::7", "%q is not an address", clip(s))
	}
	return a.Unmap(), nil
}

func parseObject(what, s string) (Object, *complaint) {
	namespace, name, found := strings.Cut(s, "/")
	if !found || namespace == "" || name == "" || strings.Contains(name, "/") {
		return Object{}, complain("write it as culvert-system/culvert", "%s %q is not NAMESPACE/NAME", what, clip(s))
	}
	return Object{namespace, name}, nil
}

func parseSuffix(_, s string) (string, *complaint) {
	name, err := tunnel.ParseName(s)
	if err != nil {
		return "", complain("write the domain alone: shop.example.com", "suffix %q: %v", clip(s), err)
	}
	return name.String(), nil
}

func parseControllerName(_, s string) (string, *complaint) {
	if !strings.Contains(s, "/") {
		return s, complain("write it as example.com/gateway", "controllerName %q has no domain", clip(s))
	}
	return s, nil
}

// patternOf parses patterns with so many slashes, of what is called of.
func patternOf(slashes int, hint, of string) func(what, s string) (string, *complaint) {
	return func(what, s string) (string, *complaint) {
		if _, err := path.Match(s, ""); err != nil || strings.Count(s, "/") != slashes {
			return "", complain(hint, "%s %q is not a pattern of %s", what, clip(s), of)
		}
		return s, nil
	}
}

// checkKubernetes finds what of it can't work with the rest.
func (d *decoder) checkKubernetes() {
	k, at := d.cfg.Kubernetes, d.root.value("kubernetes")
	if k == nil || at.Kind != yaml.MappingNode {
		return
	}
	if p := k.AuthorizationPolicies; p != nil && len(p.TrustDomains) == 0 {
		p.TrustDomains = []string{DefaultTrustDomain}
	}
	if k.Discovery == nil && k.GatewayAPI == nil && k.AuthorizationPolicies == nil {
		d.errorf(at, "add discovery: {}, or gatewayAPI: {}, or both", "kubernetes has nothing to do")
	}
	d.checkImportedServices(k, at)
	if k.MultiCluster && k.Discovery == nil {
		d.errorf(valueOf(at, "multiCluster"), "add discovery: {}", "multiCluster needs the services of the clusters")
	}
	if k.Discovery == nil {
		return
	}
	if d.cfg.Cluster == "" {
		d.errorf(at, "add cluster to the configuration", "discovery makes names from the cluster's id, and cluster is not set")
	}
	if k.Discovery.Network == "" {
		k.Discovery.Network = d.cfg.Cluster
	}
	if k.Kubeconfig == "" && d.cfg.Mesh.Network == "" {
		d.cfg.Mesh.Network = k.Discovery.Network // a pod is where the pods are
	}
}
