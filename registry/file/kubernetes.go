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
	Kubeconfig string   `yaml:"kubeconfig"` // path; "" means the pod's own service account
	Context    string   `yaml:"context"`    // of the kubeconfig; "" means its current one
	Namespaces []string `yaml:"namespaces"` // what is looked at; empty means the whole cluster

	Discovery    *Discovery  `yaml:"discovery"`    // nil means that services are not looked for
	GatewayAPI   *GatewayAPI `yaml:"gatewayAPI"`   // nil means that nothing is served of it
	MultiCluster bool        `yaml:"multiCluster"` // ServiceExports are taken up, and ServiceImports kept

	Leader Object `yaml:"leader"` // of the Lease among those who write statuses

	// State is the beginning of the paths of files that keep what was learnt, for a
	// start while the API server is away; "" keeps nothing.
	State string `yaml:"state"`
}

// An Object is what a namespaced object is called.
type Object struct{ Namespace, Name string }

// Discovery says which Services become services.
type Discovery struct {
	Network  string   `yaml:"network"`           // that their endpoints are in; "" means the cluster's name
	Zone     string   `yaml:"zone"`              // that the gateway is in, for topology hints; "" means that they count for nothing
	Allow    []string `yaml:"allow"`             // NAMESPACE/NAME, with * and ?, of what annotations may expose; empty means everything
	Deny     []string `yaml:"deny"`              // likewise, of what they may not, whatever Allow says
	Suffixes []Suffix `yaml:"suffixes"`          // that annotations may take names of; empty means none
	Prefer   string   `yaml:"prefer"`            // "ipv4", "ipv6" or "both", of pods that have both; "" means each Service's first
	PodCIDRs bool     `yaml:"podCIDRs"`          // what Nodes have for their pods is of Network. Not where several clusters have the same
	Gateways []string `yaml:"gatewayNamespaces"` // namespaces whose Services may say that they are gateways; empty means culvert-system
	Clusters string   `yaml:"clusters"`          // namespace of Secrets with the kubeconfigs of further clusters; "" means that there are none

	ExternalNames bool     `yaml:"externalNames"` // annotations may expose Services of the type ExternalName
	ExportedTo    []string `yaml:"exportedTo"`    // networks that exports open a Service to, beside those of the clusters; "*" means everyone
}

// A Suffix is a domain that Services may take names of.
type Suffix struct {
	Domain     string   `yaml:"suffix"`     // itself, and what is below it
	Namespaces []string `yaml:"namespaces"` // that may, with * and ?; empty means all
}

// GatewayAPI says which Gateways are served, and where.
type GatewayAPI struct {
	ControllerName string          `yaml:"controllerName"` // of the GatewayClasses
	Addresses      []PublicAddress `yaml:"addresses"`      // to listen at; empty means every address, all Gateways together
	Service        Object          `yaml:"service"`        // whose addresses are those of Gateways; zero means none's

	// InfrastructureKeys are DOMAIN/NAME, with * and ?, of labels and annotations of
	// infrastructure that ServiceAccounts of Gateways may have, beside those without a domain.
	InfrastructureKeys []string `yaml:"infrastructureKeys"`
}

// A PublicAddress is an address to listen at, and what others know it by.
type PublicAddress struct {
	Address netip.Addr `yaml:"address"` // the zero Addr means every address
	Public  netip.Addr `yaml:"public"`  // the zero Addr means as Address
}

// DefaultControllerName is that of a GatewayAPI that names no other.
const DefaultControllerName = "culvert.dev/gateway"

// defaultLeader is the Lease where the file names no other.
var defaultLeader = Object{"culvert-system", "culvert"}

var kubernetesFields = fieldsOf([]field[Kubernetes]{
	{"namespaces", func(d *decoder, n *yaml.Node, to *Kubernetes) {
		d.namespaces(n, "namespaces", "the whole cluster", &to.Namespaces)
	}},
})

func (k *Kubernetes) decode(d *decoder, n *yaml.Node, key string) {
	d.at.kubernetes = n
	k.Leader = defaultLeader
	objectOf(d, n, key, kubernetesFields, k)
}

var discoveryFields = fieldsOf([]field[Discovery]{
	{"allow", func(d *decoder, n *yaml.Node, to *Discovery) { d.objects(n, "allow", &to.Allow) }},
	{"deny", func(d *decoder, n *yaml.Node, to *Discovery) { d.objects(n, "deny", &to.Deny) }},
	{"suffixes", func(d *decoder, n *yaml.Node, to *Discovery) {
		d.list(n, "suffixes", func(n *yaml.Node) {
			var s Suffix
			before := len(d.errs)
			if n.Kind == yaml.MappingNode {
				objectOf(d, n, "a suffix", suffixFields, &s)
				d.need(n, "a suffix", "suffix")
			} else {
				d.suffix(n, &s.Domain)
			}
			if len(d.errs) == before {
				to.Suffixes = append(to.Suffixes, s)
			}
		})
	}},
	{"exportedTo", func(d *decoder, n *yaml.Node, to *Discovery) {
		d.list(n, "exportedTo", func(n *yaml.Node) {
			if s, ok := d.text(n, "a network"); ok {
				to.ExportedTo = append(to.ExportedTo, s)
			}
		})
	}},
	{"prefer", func(d *decoder, n *yaml.Node, to *Discovery) {
		to.Prefer, _ = d.word(n, "prefer", "ipv4", "ipv6", "both")
	}},
	{"gatewayNamespaces", func(d *decoder, n *yaml.Node, to *Discovery) {
		d.namespaces(n, "gatewayNamespaces", "culvert-system", &to.Gateways)
	}},
	{"clusters", func(d *decoder, n *yaml.Node, to *Discovery) {
		to.Clusters, _ = d.label(n, "the namespace of clusters")
	}},
})

func (c *Discovery) decode(d *decoder, n *yaml.Node, key string) {
	objectOf(d, n, key, discoveryFields, c)
}

var suffixFields = fieldsOf([]field[Suffix]{
	{"suffix", func(d *decoder, n *yaml.Node, to *Suffix) { d.suffix(n, &to.Domain) }},
	{"namespaces", func(d *decoder, n *yaml.Node, to *Suffix) {
		d.patterns(n, "namespaces", 0, `write "shop" or "team-*"`, "a namespace", &to.Namespaces)
	}},
})

var gatewayAPIFields = fieldsOf([]field[GatewayAPI]{
	{"controllerName", func(d *decoder, n *yaml.Node, to *GatewayAPI) {
		s, ok := d.text(n, "controllerName")
		if ok && !strings.Contains(s, "/") {
			d.errorf(n, "write it as example.com/gateway", "controllerName %q has no domain", clip(s))
		}
		to.ControllerName = s
	}},
	{"addresses", func(d *decoder, n *yaml.Node, to *GatewayAPI) {
		d.list(n, "addresses", func(n *yaml.Node) {
			var a PublicAddress
			before := len(d.errs)
			if n.Kind == yaml.MappingNode {
				objectOf(d, n, "an address", publicAddressFields, &a)
				d.need(n, "an address", "address")
			} else {
				d.address(n, &a.Address)
			}
			if len(d.errs) > before {
				return
			}
			if slices.ContainsFunc(to.Addresses, func(b PublicAddress) bool { return b.Address == a.Address }) {
				d.errorf(n, "keep one of them", "address %s is listed twice", a.Address)
			}
			to.Addresses = append(to.Addresses, a)
		})
	}},
	{"infrastructureKeys", func(d *decoder, n *yaml.Node, to *GatewayAPI) {
		d.patterns(n, "infrastructureKeys", 1, `write "example.com/*" or "example.com/team"`, "DOMAIN/NAME", &to.InfrastructureKeys)
	}},
})

func (g *GatewayAPI) decode(d *decoder, n *yaml.Node, key string) {
	g.ControllerName = DefaultControllerName
	objectOf(d, n, key, gatewayAPIFields, g)
}

var publicAddressFields = fieldsOf([]field[PublicAddress]{
	{"address", func(d *decoder, n *yaml.Node, to *PublicAddress) { d.address(n, &to.Address) }},
	{"public", func(d *decoder, n *yaml.Node, to *PublicAddress) { d.address(n, &to.Public) }},
})

// namespaces reads a list of them. Without the key it is otherwise.
func (d *decoder) namespaces(n *yaml.Node, what, otherwise string, to *[]string) {
	d.list(n, what, func(n *yaml.Node) {
		if s, ok := d.label(n, "a namespace"); ok {
			*to = append(*to, s)
		}
	})
	if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
		d.errorf(n, "leave the key out for "+otherwise, "%s is empty", what)
	}
}

// address reads an address to listen at, without a port.
func (d *decoder) address(n *yaml.Node, to *netip.Addr) {
	s, ok := d.text(n, "an address")
	if !ok {
		return
	}
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" {
		d.errorf(n, "write it as 203.0.113.7 or 2001:db8::7", "%q is not an address", clip(s))
		return
	}
	*to = a.Unmap()
	if to.IsUnspecified() {
		*to = netip.Addr{}
	}
}

// decode reads NAMESPACE/NAME.
func (o *Object) decode(d *decoder, n *yaml.Node, key string) {
	s, ok := d.text(n, key)
	if !ok {
		return
	}
	namespace, name, found := strings.Cut(s, "/")
	if !found || namespace == "" || name == "" || strings.Contains(name, "/") {
		d.errorf(n, "write it as culvert-system/culvert", "%s %q is not NAMESPACE/NAME", key, clip(s))
		return
	}
	*o = Object{namespace, name}
}

// suffix reads a domain.
func (d *decoder) suffix(n *yaml.Node, to *string) {
	s, ok := d.text(n, "a suffix")
	if !ok {
		return
	}
	name, err := tunnel.ParseName(s)
	if err != nil {
		d.errorf(n, "write the domain alone: shop.example.com", "suffix %q: %v", clip(s), err)
		return
	}
	*to = name.String()
}

// objects reads patterns of NAMESPACE/NAME.
func (d *decoder) objects(n *yaml.Node, what string, to *[]string) {
	d.patterns(n, what, 1, `write "shop/*", "*/web" or "shop/web"`, "NAMESPACE/NAME", to)
}

// patterns reads patterns with so many slashes, of what is called of.
func (d *decoder) patterns(n *yaml.Node, what string, slashes int, hint, of string, to *[]string) {
	d.list(n, what, func(n *yaml.Node) {
		s, ok := d.text(n, what)
		if !ok {
			return
		}
		if _, err := path.Match(s, ""); err != nil || strings.Count(s, "/") != slashes {
			d.errorf(n, hint, "%s %q is not a pattern of %s", what, clip(s), of)
			return
		}
		*to = append(*to, s)
	})
	if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
		d.errorf(n, "leave the key out", "%s is empty", what)
	}
}

// checkKubernetes finds what of it can't work with the rest.
func (d *decoder) checkKubernetes() {
	k, at := d.cfg.Kubernetes, d.at.kubernetes
	if k == nil || at.Kind != yaml.MappingNode {
		return
	}
	if k.Discovery == nil && k.GatewayAPI == nil {
		d.errorf(at, "add discovery: {}, or gatewayAPI: {}, or both", "kubernetes has nothing to do")
	}
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
