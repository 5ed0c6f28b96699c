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
	Kubeconfig string   // path; "" means the pod's own service account
	Context    string   // of the kubeconfig; "" means its current one
	Namespaces []string // what is looked at; empty means the whole cluster

	Discovery    *Discovery  // nil means that services are not looked for
	GatewayAPI   *GatewayAPI // nil means that nothing is served of it
	MultiCluster bool        // ServiceExports are taken up, and ServiceImports kept

	Leader Object // of the Lease among those who write statuses

	// State is the beginning of the paths of files that keep what was learnt, for a
	// start while the API server is away; "" keeps nothing.
	State string
}

// An Object is what a namespaced object is called.
type Object struct{ Namespace, Name string }

// Discovery says which Services become services.
type Discovery struct {
	Network  string   // that their endpoints are in; "" means the cluster's name
	Zone     string   // that the gateway is in, for topology hints; "" means that they count for nothing
	Allow    []string // NAMESPACE/NAME, with * and ?, of what annotations may expose; empty means everything
	Deny     []string // likewise, of what they may not, whatever Allow says
	Suffixes []Suffix // that annotations may take names of; empty means none
	Prefer   string   // "ipv4", "ipv6" or "both", of pods that have both; "" means each Service's first
	PodCIDRs bool     // what Nodes have for their pods is of Network. Not where several clusters have the same
	Gateways []string // namespaces whose Services may say that they are gateways; empty means culvert-system
	Clusters string   // namespace of Secrets with the kubeconfigs of further clusters; "" means that there are none

	ExternalNames bool     // annotations may expose Services of the type ExternalName
	ExportedTo    []string // networks that exports open a Service to, beside those of the clusters; "*" means everyone
}

// A Suffix is a domain that Services may take names of.
type Suffix struct {
	Domain     string   // itself, and what is below it
	Namespaces []string // that may, with * and ?; empty means all
}

// GatewayAPI says which Gateways are served, and where.
type GatewayAPI struct {
	ControllerName string          // of the GatewayClasses
	Addresses      []PublicAddress // to listen at; empty means every address, all Gateways together
	Service        Object          // whose addresses are those of Gateways; zero means none's

	// InfrastructureKeys are DOMAIN/NAME, with * and ?, of labels and annotations of
	// infrastructure that ServiceAccounts of Gateways may have, beside those without a domain.
	InfrastructureKeys []string
}

// A PublicAddress is an address to listen at, and what others know it by.
type PublicAddress struct {
	Address netip.Addr // the zero Addr means every address
	Public  netip.Addr // the zero Addr means as Address
}

// DefaultControllerName is that of a GatewayAPI that names no other.
const DefaultControllerName = "culvert.dev/gateway"

// defaultLeader is the Lease where the file names no other.
var defaultLeader = Object{"culvert-system", "culvert"}

// kubernetesAt is where kubernetes stands.
type kubernetesAt struct {
	node, network, multi *yaml.Node
}

var kubernetesFields = []field[Kubernetes]{
	{"kubeconfig", func(d *decoder, n *yaml.Node, to *Kubernetes) { to.Kubeconfig, _ = d.text(n, "kubeconfig") }},
	{"context", func(d *decoder, n *yaml.Node, to *Kubernetes) { to.Context, _ = d.text(n, "context") }},
	{"namespaces", func(d *decoder, n *yaml.Node, to *Kubernetes) {
		d.namespaces(n, "namespaces", "the whole cluster", &to.Namespaces)
	}},
	{"discovery", func(d *decoder, n *yaml.Node, to *Kubernetes) {
		to.Discovery = &Discovery{}
		object(d, n, "discovery", discoveryFields, to.Discovery)
	}},
	{"gatewayAPI", func(d *decoder, n *yaml.Node, to *Kubernetes) {
		to.GatewayAPI = &GatewayAPI{ControllerName: DefaultControllerName}
		object(d, n, "gatewayAPI", gatewayAPIFields, to.GatewayAPI)
	}},
	{"multiCluster", func(d *decoder, n *yaml.Node, to *Kubernetes) {
		d.at.kubernetes.multi = n
		d.boolean(n, "multiCluster", &to.MultiCluster)
	}},
	{"leader", func(d *decoder, n *yaml.Node, to *Kubernetes) { d.object(n, "leader", &to.Leader) }},
	{"state", func(d *decoder, n *yaml.Node, to *Kubernetes) { to.State, _ = d.text(n, "state") }},
}

var discoveryFields = []field[Discovery]{
	{"network", func(d *decoder, n *yaml.Node, to *Discovery) {
		d.at.kubernetes.network = n
		to.Network, _ = d.text(n, "network")
	}},
	{"zone", func(d *decoder, n *yaml.Node, to *Discovery) { to.Zone, _ = d.text(n, "zone") }},
	{"allow", func(d *decoder, n *yaml.Node, to *Discovery) { d.objects(n, "allow", &to.Allow) }},
	{"deny", func(d *decoder, n *yaml.Node, to *Discovery) { d.objects(n, "deny", &to.Deny) }},
	{"suffixes", func(d *decoder, n *yaml.Node, to *Discovery) {
		d.list(n, "suffixes", func(n *yaml.Node) {
			var s Suffix
			before := len(d.errs)
			if n.Kind == yaml.MappingNode {
				object(d, n, "a suffix", suffixFields, &s)
				d.need(n, "a suffix", "suffix")
			} else {
				d.suffix(n, &s.Domain)
			}
			if len(d.errs) == before {
				to.Suffixes = append(to.Suffixes, s)
			}
		})
	}},
	{"externalNames", func(d *decoder, n *yaml.Node, to *Discovery) {
		d.boolean(n, "externalNames", &to.ExternalNames)
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
	{"podCIDRs", func(d *decoder, n *yaml.Node, to *Discovery) { d.boolean(n, "podCIDRs", &to.PodCIDRs) }},
	{"gatewayNamespaces", func(d *decoder, n *yaml.Node, to *Discovery) {
		d.namespaces(n, "gatewayNamespaces", "culvert-system", &to.Gateways)
	}},
	{"clusters", func(d *decoder, n *yaml.Node, to *Discovery) {
		to.Clusters, _ = d.label(n, "the namespace of clusters")
	}},
}

var suffixFields = []field[Suffix]{
	{"suffix", func(d *decoder, n *yaml.Node, to *Suffix) { d.suffix(n, &to.Domain) }},
	{"namespaces", func(d *decoder, n *yaml.Node, to *Suffix) {
		d.patterns(n, "namespaces", 0, `write "shop" or "team-*"`, "a namespace", &to.Namespaces)
	}},
}

var gatewayAPIFields = []field[GatewayAPI]{
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
				object(d, n, "an address", publicAddressFields, &a)
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
	{"service", func(d *decoder, n *yaml.Node, to *GatewayAPI) { d.object(n, "service", &to.Service) }},
	{"infrastructureKeys", func(d *decoder, n *yaml.Node, to *GatewayAPI) {
		d.patterns(n, "infrastructureKeys", 1, `write "example.com/*" or "example.com/team"`, "DOMAIN/NAME", &to.InfrastructureKeys)
	}},
}

var publicAddressFields = []field[PublicAddress]{
	{"address", func(d *decoder, n *yaml.Node, to *PublicAddress) { d.address(n, &to.Address) }},
	{"public", func(d *decoder, n *yaml.Node, to *PublicAddress) {
		d.address(n, &to.Public)
	}},
}

func (d *decoder) kubernetes(n *yaml.Node, c *Config) {
	d.at.kubernetes.node = n
	c.Kubernetes = &Kubernetes{Leader: defaultLeader}
	object(d, n, "kubernetes", kubernetesFields, c.Kubernetes)
}

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

// object reads NAMESPACE/NAME.
func (d *decoder) object(n *yaml.Node, what string, to *Object) {
	s, ok := d.text(n, what)
	if !ok {
		return
	}
	namespace, name, found := strings.Cut(s, "/")
	if !found || namespace == "" || name == "" || strings.Contains(name, "/") {
		d.errorf(n, "write it as culvert-system/culvert", "%s %q is not NAMESPACE/NAME", what, clip(s))
		return
	}
	*to = Object{namespace, name}
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
			d.errorf(n, hint, "%s %q is no pattern of %s", what, clip(s), of)
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
	k, at := d.cfg.Kubernetes, &d.at.kubernetes
	if k == nil || at.node.Kind != yaml.MappingNode {
		return
	}
	if k.Discovery == nil && k.GatewayAPI == nil {
		d.errorf(at.node, "add discovery: {}, or gatewayAPI: {}, or both", "kubernetes has nothing to do")
	}
	if k.MultiCluster && k.Discovery == nil {
		d.errorf(at.multi, "add discovery: {}", "multiCluster needs the services of the clusters")
	}
	if k.Discovery == nil {
		return
	}
	if d.cfg.Cluster == "" {
		d.errorf(at.node, "add cluster to the configuration", "discovery makes names of the cluster's id, which it has none")
	}
	if k.Discovery.Network == "" {
		k.Discovery.Network = d.cfg.Cluster
	}
	if k.Kubeconfig == "" && d.cfg.Mesh.Network == "" {
		d.cfg.Mesh.Network = k.Discovery.Network // a pod is where the pods are
	}
}
