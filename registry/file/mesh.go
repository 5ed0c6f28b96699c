package file

import (
	"fmt"
	"slices"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// transports are what a gateway of a network may be said to take.
var transports = []string{"sni", "connect", "connect-h2", "connect-h3", "websocket", "hbone", "socks5", "quic"}

// viaAlone are those of them that need more than an address: keys, or a URL.
var viaAlone = []string{"connect-h3", "websocket", "hbone"}

// A meshAt is where the file says what has to do with networks and names.
type meshAt struct{ zone, network *yaml.Node }

func (d *decoder) meshZone(n *yaml.Node, c *Config) {
	d.at.mesh.zone = n
	s, ok := d.text(n, "zone")
	if !ok {
		return
	}
	name, complaint := parseName(s)
	if complaint != nil {
		d.errorf(n, complaint.hint, "zone %q: %s", clip(s), complaint.msg)
		return
	}
	c.Mesh.Zone = name.String()
}

// near reads the names of other networks.
func (d *decoder) near(n *yaml.Node, to *registry.Network) {
	d.list(n, "near", func(n *yaml.Node) {
		s, ok := d.text(n, "near")
		switch {
		case ok && slices.Contains(to.Near, s):
			d.errorf(n, "keep one of them", "network %q is listed twice", clip(s))
		case ok:
			to.Near = append(to.Near, s)
			d.network().near = append(d.network().near, n)
		}
	})
}

func (d *decoder) gateways(n *yaml.Node, to *registry.Network) {
	d.list(n, "gateways", func(n *yaml.Node) {
		at := d.network()
		at.transports = append(at.transports, nil)
		if n.Kind == yaml.ScalarNode { // an address and nothing else
			to.Gateways = append(to.Gateways, registry.Gateway{Address: d.gatewayAddress(n, "a gateway"), Check: gatewayCheck})
			return
		}
		to.Gateways = append(to.Gateways, registry.Gateway{Check: gatewayCheck})
		g := &to.Gateways[len(to.Gateways)-1]
		object(d, n, "a gateway", gatewayFields, g)
		if onlyUDP(g.Transports) && g.Check == gatewayCheck && !has(n, "check") {
			g.Check = registry.Check{} // nobody may be there by TCP
		}
		d.need(n, "a gateway", "address")
	})
	if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
		d.errorf(n, "leave the key out for a network that is reached without one", "gateways is empty")
	}
}

func (d *decoder) gatewayAddress(n *yaml.Node, what string) registry.Endpoint {
	s, ok := d.text(n, what)
	if !ok {
		return registry.Endpoint{}
	}
	ep, c := parseEndpoint(s)
	if c == nil && ep.Port == 0 {
		c = complain("write HOST:PORT", "it has no port")
	}
	if c != nil {
		d.errorf(n, c.hint, "%s %q: %s", what, clip(s), c.msg)
		return registry.Endpoint{}
	}
	return ep
}

var gatewayFields = []field[registry.Gateway]{
	{"address", func(d *decoder, n *yaml.Node, to *registry.Gateway) { to.Address = d.gatewayAddress(n, "address") }},
	{"public", func(d *decoder, n *yaml.Node, to *registry.Gateway) { to.Public = d.gatewayAddress(n, "public") }},
	{"transports", func(d *decoder, n *yaml.Node, to *registry.Gateway) {
		d.protocols(n, transports, &to.Transports)
		if at := d.network().transports; len(at) > 0 {
			at[len(at)-1] = n
		}
		if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
			d.errorf(n, "leave the key out for sni", "transports is empty")
		}
	}},
	{"weight", func(d *decoder, n *yaml.Node, to *registry.Gateway) {
		if v, ok := d.integer(n, "weight", 1, 1000); ok {
			to.Weight = uint16(v)
		}
	}},
	{"check", func(d *decoder, n *yaml.Node, to *registry.Gateway) { d.healthCheck(n, &to.Check) }},
}

// id reads what a service is called in its cluster.
func (d *decoder) id(n *yaml.Node, to *registry.Service) {
	object(d, n, "mesh", idFields, &to.ID)
	d.need(n, "mesh", "service")
}

func label(key string, at func(*registry.ID) *string) field[registry.ID] {
	return field[registry.ID]{key, func(d *decoder, n *yaml.Node, to *registry.ID) {
		if s, ok := d.label(n, key); ok {
			*at(to) = s
		}
	}}
}

var idFields = []field[registry.ID]{
	label("service", func(id *registry.ID) *string { return &id.Service }),
	label("namespace", func(id *registry.ID) *string { return &id.Namespace }),
	label("cluster", func(id *registry.ID) *string { return &id.Cluster }),
}

// label reads one label of a name, in lower case.
func (d *decoder) label(n *yaml.Node, what string) (string, bool) {
	s, ok := d.text(n, what)
	if !ok {
		return "", false
	}
	name, err := tunnel.ParseName(s + ".x") // digits alone would be an address
	if err != nil || strings.ContainsAny(s, "._") || strings.HasPrefix(s, "-") || strings.HasSuffix(s, "-") {
		d.errorf(n, "use letters, digits and hyphens", "%s %q is not one label of a DNS name", what, clip(s))
		return "", false
	}
	return strings.TrimSuffix(name.String(), ".x"), true
}

// port reads a port, or one with a name.
func (d *decoder) port(n *yaml.Node, to *registry.Service) {
	var p registry.NamedPort
	if n.Kind == yaml.MappingNode {
		p.Protocol = "tcp"
		object(d, n, "a port", portFields, &p)
		d.need(n, "a port", "port")
		d.need(n, "a port", "name")
		if p.Port == 0 || p.Name == "" {
			return
		}
		if slices.ContainsFunc(to.NamedPorts, func(o registry.NamedPort) bool { return o.Name == p.Name && o.Protocol == p.Protocol }) {
			d.errorf(n, "give one of them another", "two ports are called %q", p.Name)
			return
		}
		to.NamedPorts = append(to.NamedPorts, p)
	} else {
		port, ok := d.integer(n, "a port", 1, 65535)
		if !ok {
			return
		}
		p.Port = uint16(port)
	}
	switch {
	case !slices.Contains(to.Ports, p.Port):
		to.Ports = append(to.Ports, p.Port)
	case p.Name == "":
		d.errorf(n, "keep one of them", "port %d is listed twice", p.Port)
	}
}

// alpn reads what the TLS of a service speaks, RFC 7301.
func (d *decoder) alpn(n *yaml.Node, to *registry.Service) {
	d.list(n, "alpn", func(n *yaml.Node) {
		s, ok := d.text(n, "a protocol")
		switch {
		case ok && (len(s) > 255 || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' || r == ',' || r == '\\' })):
			d.errorf(n, "write it as h2 or http/1.1", "%q is not the name of a protocol", clip(s))
		case ok && slices.Contains(to.ALPN, s):
			d.errorf(n, "keep one of them", "%q is listed twice", clip(s))
		case ok:
			to.ALPN = append(to.ALPN, s)
		}
	})
}

var portFields = []field[registry.NamedPort]{
	{"port", func(d *decoder, n *yaml.Node, to *registry.NamedPort) {
		if v, ok := d.integer(n, "a port", 1, 65535); ok {
			to.Port = uint16(v)
		}
	}},
	{"name", func(d *decoder, n *yaml.Node, to *registry.NamedPort) {
		s, ok := d.label(n, "the name of a port")
		if ok && len(s) > 15 { // RFC 6335 section 5.1
			d.errorf(n, "", "the name of a port has %d characters, limit 15", len(s))
			return
		}
		to.Name = s
	}},
	{"protocol", func(d *decoder, n *yaml.Node, to *registry.NamedPort) {
		if s, ok := d.word(n, "protocol", "tcp", "udp"); ok {
			to.Protocol = s
		}
	}},
}

// endpoint reads an endpoint: an address, or one with what is known of it.
func (d *decoder) endpoint(n *yaml.Node, to *registry.Service) {
	var ep registry.Endpoint
	if n.Kind == yaml.MappingNode {
		before := len(d.errs)
		object(d, n, "an endpoint", endpointFields, &ep)
		d.need(n, "an endpoint", "address")
		if len(d.errs) > before {
			return
		}
	} else if !d.endpointAddress(n, &ep) {
		return
	}
	d.service().portless = d.service().portless || ep.Port == 0
	to.Endpoints = append(to.Endpoints, ep)
	d.service().endpoints = append(d.service().endpoints, n)
}

func (d *decoder) endpointAddress(n *yaml.Node, to *registry.Endpoint) bool {
	s, ok := d.text(n, "an endpoint")
	if !ok {
		return false
	}
	ep, err := parseEndpoint(s)
	if err != nil {
		d.errorf(n, err.hint, "endpoint %q: %s", clip(s), err.msg)
		return false
	}
	to.Host, to.Addr, to.Port = ep.Host, ep.Addr, ep.Port
	return true
}

var endpointFields = []field[registry.Endpoint]{
	{"address", func(d *decoder, n *yaml.Node, to *registry.Endpoint) { d.endpointAddress(n, to) }},
	{"name", func(d *decoder, n *yaml.Node, to *registry.Endpoint) {
		to.Name, _ = d.label(n, "the name of an endpoint")
	}},
	{"network", func(d *decoder, n *yaml.Node, to *registry.Endpoint) { to.Network, _ = d.text(n, "network") }},
}

// checkMesh finds what is wrong with networks and the names of a mesh together.
func (d *decoder) checkMesh() {
	if n := d.at.mesh.network; n != nil {
		d.knownNetwork(n, d.cfg.Mesh.Network)
	}
	plain := d.plaintext()
	for i, network := range d.cfg.Networks {
		at := &d.at.networks[i]
		for j, name := range network.Near {
			if name == network.Name {
				d.errorf(at.near[j], "leave it out", "network %q is not near itself", clip(name))
			} else {
				d.knownNetwork(at.near[j], name)
			}
		}
		d.checkInsecure(&network, at, plain)
		for j := range network.Gateways {
			d.checkEntrance(&network, &network.Gateways[j], at, at.transports[j])
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
		registry.Yield(i)
		s, at := d.cfg.Services[i], d.at.services[i]
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

// checkEntrance finds a gateway that takes only what a gateway of another network
// needs more than an address for, in a network without a via that says it. Those
// of our own network are for others, whose files say it.
func (d *decoder) checkEntrance(network *registry.Network, g *registry.Gateway, at *networkAt, n *yaml.Node) {
	if n == nil || len(g.Transports) == 0 || has(at.node, "via") || network.Name == d.cfg.Mesh.Network {
		return
	}
	for _, transport := range g.Transports {
		if !slices.Contains(viaAlone, transport) {
			return
		}
	}
	d.errorf(n, "add via to the network, or one of sni, connect-h2, connect and socks5 to its transports",
		"gateway %q of network %q takes only %s, which needs keys or a URL, and those are set in via", g.Address, clip(network.Name), strings.Join(g.Transports, " and "))
}

// identify completes the ID of a service that was read.
func (d *decoder) identify(s *registry.Service, at *serviceAt) {
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
func (d *decoder) meshNames(s *registry.Service, at *serviceAt) (names []string) {
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
func (d *decoder) checkPlaces(s *registry.Service, at *serviceAt) {
	if at.value("exported") != nil && s.Exported && s.ID.Service == "" {
		d.errorf(at.value("exported"), "add mesh: {service: ...}", "exported has no effect: the service has no name in the mesh")
	}
	if at.network != nil {
		d.knownNetwork(at.network, at.network.Value)
	}
	names := map[string]bool{}
	for j := range s.Endpoints {
		ep, n := &s.Endpoints[j], at.endpoints[j]
		if n.Kind == yaml.MappingNode && has(n, "network") {
			d.knownNetwork(n, ep.Network)
		} else if at.network != nil {
			ep.Network = at.network.Value
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
