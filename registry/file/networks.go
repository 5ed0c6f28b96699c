package file

import (
	"fmt"
	"net/netip"
	"slices"

	"culvert.dev/registry"
	"go.yaml.in/yaml/v3"
)

// A network is an element of networks.
type network struct {
	Name     string         `yaml:"name,required" what:"the name of a network"`
	CIDRs    []netip.Prefix `yaml:"cidrs" what:"a range" as:"cidr" empty:"list its address ranges"`
	Near     []string       `yaml:"near" unique:"network"` // nearest first
	Gateways []gateway      `yaml:"gateways" what:"a gateway" empty:"leave the key out for a network that is reached without one"`
	Via      []hop          `yaml:"via" what:"a hop" empty:"leave the key out to go there directly"`
	Insecure bool           `yaml:"insecure"`
}

// A gateway is host:port of a gateway, or an object with what else is known of it.
type gateway struct {
	Address    registry.Endpoint `yaml:"address,required,short" as:"gateway"`
	Public     registry.Endpoint `yaml:"public" as:"gateway"`
	Transports []transport       `yaml:"transports" what:"a protocol" empty:"leave the key out for sni"` // in order of preference
	Weight     uint16            `yaml:"weight,min=1,max=1000"`
	Check      *healthCheck      `yaml:"check"` // nil means tcp, if anything is carried by TCP
}

func (w *network) check(d *decoder, at mapping) { d.checkVia(at, w.Via) }

// registered returns w as the registry has it.
func (w *network) registered() registry.Network {
	out := registry.Network{Name: w.Name, CIDRs: w.CIDRs, Near: w.Near, Via: registeredHops(w.Via), Insecure: w.Insecure}
	for _, g := range w.Gateways {
		out.Gateways = append(out.Gateways, g.registered())
	}
	return out
}

func (g *gateway) registered() registry.Gateway {
	out := registry.Gateway{Address: g.Address, Public: g.Public, Weight: g.Weight}
	for i := range g.Transports {
		out.Transports = append(out.Transports, g.Transports[i].registered())
	}
	switch {
	case g.Check != nil:
		out.Check = g.Check.registered()
	case !onlyUDP(out.Transports):
		out.Check = gatewayCheck
	}
	return out
}

// checkMesh finds what is wrong with networks and the names of a mesh together.
func (d *decoder) checkMesh() {
	if n := d.root.value("network"); n != nil {
		d.knownNetwork(n, d.cfg.Mesh.Network)
	}
	for i, network := range d.cfg.Networks {
		at := d.network(i)
		for j, name := range network.Near {
			if name == network.Name && name != "" {
				d.errorf(at.item("near", j), "leave it out", "network %q is not near itself", clip(name))
			} else {
				d.knownNetwork(at.item("near", j), name)
			}
		}
		for j := range network.Gateways {
			d.checkTransports(&network, &network.Gateways[j], at, mapping{at.item("gateways", j)})
		}
		if len(network.Gateways) == 0 && len(network.CIDRs) == 0 && at.node.Kind == yaml.MappingNode && !has(at.node, "cidrs") && !has(at.node, "gateways") && !(network.Insecure && d.discovers()) {
			d.errorf(at.node, "add cidrs, or gateways, or both", "network %q is empty", clip(network.Name))
		}
	}
	type place struct {
		node   *yaml.Node // nil for one that was read before
		origin string
	}
	first := map[registry.ID]place{}
	for i := range d.cfg.Services {
		s, at := d.cfg.Services[i], d.services[i]
		if s.ID.Service == "" {
			continue
		}
		if at.value("mesh") != nil {
			d.identify(s, at)
		}
		key := s.ID
		if key.Namespace == "" {
			key.Namespace = registry.DefaultNamespace
		}
		here := place{at.value("mesh"), s.Origin}
		other, twice := first[key]
		if twice && here.node == nil {
			here, other = other, here
		}
		if twice && here.node != nil {
			d.errorf(here.node, "put their endpoints together", "service %q of namespace %q is in cluster %q already, in %s", key.Service, key.Namespace, key.Cluster, other.origin)
		}
		first[key] = here
	}
}

// discovers reports whether networks come from Kubernetes, too.
func (d *decoder) discovers() bool {
	return d.cfg.Kubernetes != nil && d.cfg.Kubernetes.Discovery != nil
}

// identify completes the ID of a service that was read.
func (d *decoder) identify(s *registry.Service, at mapping) {
	if s.ID.Cluster == "" {
		s.ID.Cluster = d.cfg.Cluster
	}
	if s.ID.Cluster == "" {
		d.errorf(at.value("mesh"), "add cluster to it, or to the whole configuration", "the service has a name in the mesh, and no cluster")
		return
	}
	if s.Name == "" {
		namespace := s.ID.Namespace
		if namespace == "" {
			namespace = registry.DefaultNamespace
		}
		s.Name = s.ID.Service + "." + namespace + "." + s.ID.Cluster
	}
}

// meshNames returns what a service is called in the mesh, but for the cluster set,
// where namesakes are one.
func (d *decoder) meshNames(s *registry.Service, at mapping) (names []string) {
	if s.ID.Service == "" || s.ID.Cluster == "" {
		return nil
	}
	full, short, err := d.cfg.Mesh.Names(s.ID)
	if err != nil {
		if at.value("mesh") != nil {
			d.errorf(at.value("mesh"), "shorten the zone, or one of the labels", "the name in the mesh: %v", err)
		}
		return nil
	}
	names = append(names, full.String())
	if !short.IsZero() {
		names = append(names, short.String())
	}
	return names
}

// checkPlaces checks what a service says of networks, names and endpoints.
func (d *decoder) checkPlaces(s *registry.Service, at mapping) {
	if at.value("exported") != nil && s.Exported && s.ID.Service == "" {
		d.errorf(at.value("exported"), "add mesh: {service: ...}", "exported has no effect: the service has no name in the mesh")
	}
	if network := at.word("network"); network != "" {
		d.knownNetwork(at.value("network"), network)
	}
	names := map[string]bool{}
	for j := range s.Endpoints {
		ep, n := &s.Endpoints[j], at.item("endpoints", j)
		if has(n, "network") {
			d.knownNetwork(n, ep.Network)
		}
		if ep.Name == "" {
			continue
		}
		if !s.Headless {
			d.errorf(n, "add headless: true to the service, or leave it out", "the name of an endpoint has no effect: the service is not headless")
		} else if names[ep.Name] {
			d.errorf(n, "give one of them another", "two endpoints are called %q", ep.Name)
		}
		names[ep.Name] = true
	}
}

// knownNetwork complains of a network that is not in the file.
func (d *decoder) knownNetwork(n *yaml.Node, name string) {
	known := make([]string, len(d.cfg.Networks))
	for i, network := range d.cfg.Networks {
		known[i] = network.Name
	}
	if name == "" || slices.Contains(known, name) || d.cfg.Kubernetes != nil && d.cfg.Kubernetes.Discovery != nil { // which brings networks
		return
	}
	hint := "add it to networks"
	if m := meant(name, known); m != "" {
		hint = fmt.Sprintf("did you mean %q?", m)
	}
	d.errorf(n, hint, "there is no network %q", clip(name))
}
