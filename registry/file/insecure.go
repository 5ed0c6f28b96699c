package file

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// plaintext names what requests come by that may carry plaintext: "" where all that
// is taken is TLS by name.
func (d *decoder) plaintext() string {
	const most = 4
	var by []string
	for i := range d.cfg.Listeners {
		l := &d.cfg.Listeners[i]
		spoken := l.spoken()
		if l.RequireTLS { // of all that is not inside TLS
			spoken = l.Inner()
		}
		protocols := slices.DeleteFunc(spoken, func(p string) bool { return p == "sni" || p == "quic" || p == "postgres" || p == "reverse-pool" })
		switch {
		case !l.Service.IsZero() && l.RequireTLS:
		case !l.Service.IsZero():
			by = append(by, fmt.Sprintf("listener %s (service)", l.Address))
		case len(protocols) > 0:
			by = append(by, fmt.Sprintf("listener %s (%s)", l.Address, strings.Join(protocols, ", ")))
		}
	}
	if d.cfg.ServicePorts != nil {
		by = append(by, "servicePorts")
	}
	if d.cfg.Kubernetes != nil && d.cfg.Kubernetes.GatewayAPI != nil {
		by = append(by, "kubernetes.gatewayAPI")
	}
	if d.cfg.Kubernetes != nil && d.cfg.Kubernetes.ImportedServices != nil {
		by = append(by, "kubernetes.importedServices")
	}
	if more := len(by) - most; more > 0 {
		by = append(by[:most], fmt.Sprintf("%d more", more))
	}
	return strings.Join(by, ", ")
}

// warnInsecure warns of a weak transport, by which the plaintext of what takes some is
// refused.
func (d *decoder) warnInsecure(at *yaml.Node, hint, way, plain string) {
	d.warnf(at, hint, "%s: plaintext from %s is refused there with %q, and only TLS is carried", way, plain, tunnel.Insecure)
}

// checkInsecure warns of networks and services that plaintext goes to without a mutual
// transport, or is refused for. The credentials of hops have been read.
func (d *decoder) checkInsecure() {
	plain := d.plaintext()
	for i := range d.cfg.Networks {
		d.checkInsecureNetwork(&d.cfg.Networks[i], d.network(i), plain)
	}
	d.checkInsecureServices(plain)
}

// checkInsecureNetwork warns of a network without a mutual transport.
func (d *decoder) checkInsecureNetwork(network *registry.Network, at mapping, plain string) {
	hint := "give its gateways transports with TLS and credentials, or set insecure: true for it"
	var hop *registry.WeakHop
	switch {
	case network.Insecure:
		d.warnf(at.where("name"), "", "network %q is insecure: plaintext may go there without mutual TLS", clip(network.Name))
		return
	case network.Name == d.cfg.Mesh.Network || plain == "":
		return
	case len(network.Via) > 0:
		hint = "give the network a via with TLS and credentials, or set insecure: true for it"
		hop = registry.InsecureVia(network.Via)
	default:
		hop = network.InsecureGateway()
	}
	if hop != nil {
		d.warnInsecure(at.where("name"), hint, fmt.Sprintf("gateway %q of network %q is reached without %s", clip(hop.Address), clip(network.Name), hop.Lacks()), plain)
	}
}

// checkInsecureServices warns of services that are insecure, and of those that are
// reached by a weak transport: over another gateway, or in another network.
func (d *decoder) checkInsecureServices(plain string) {
	open := d.reachedDirectly()
	for i, s := range d.cfg.Services {
		at := d.services[i]
		if at.node == nil { // it was read before
			continue
		}
		if s.Insecure {
			d.warnf(at.where("insecure"), "", "service %q is insecure: plaintext may go to other networks and gateways without mutual TLS", clip(s.Name))
			continue
		}
		if plain == "" || s.TLS != nil { // the gateway's own TLS protects it, whatever is on the way
			continue
		}
		if hop := registry.InsecureVia(s.Via); hop != nil && at.value("via") != nil {
			d.warnInsecure(at.value("via"), "use TLS and credentials there, or set insecure: true for that hop", fmt.Sprintf("gateway %q is reached without %s for service %q", clip(hop.Address), hop.Lacks(), clip(s.Name)), plain)
		}
		for j := range s.Endpoints {
			if via := s.Endpoints[j].Hops(); len(via) > 0 && len(s.Via) == 0 {
				if hop := registry.InsecureVia(via); hop != nil {
					d.warnInsecure(at.item("endpoints", j), "use TLS and credentials in its via, or set insecure: true for that hop", fmt.Sprintf("gateway %q is reached without %s for endpoint %s of service %q", clip(hop.Address), hop.Lacks(), s.Endpoints[j], clip(s.Name)), plain)
				}
				continue
			}
			n := d.networkOf(&s.Endpoints[j], open)
			if n < 0 || len(s.Via) > 0 {
				continue
			}
			name := d.cfg.Networks[n].Name
			d.warnInsecure(d.network(n).where("name"), "give the network a via with TLS and credentials, or set insecure: true for it",
				fmt.Sprintf("network %q has no gateway, and endpoint %s of service %q there is reached unencrypted", clip(name), s.Endpoints[j], clip(s.Name)), plain)
			open = slices.DeleteFunc(open, func(i int) bool { return i == n })
		}
	}
}

// reachedDirectly returns the indices of the networks other than the gateway's own
// whose addresses are dialed as they are.
func (d *decoder) reachedDirectly() []int {
	var open []int
	for i := range d.cfg.Networks {
		n := &d.cfg.Networks[i]
		if d.cfg.Mesh.Network != "" && n.Name != d.cfg.Mesh.Network && !n.Insecure && len(n.Gateways) == 0 && len(n.Via) == 0 {
			open = append(open, i)
		}
	}
	return open
}

// networkOf returns which of the networks of those indices ep is in, -1 for none.
func (d *decoder) networkOf(ep *registry.Endpoint, among []int) int {
	for _, i := range among {
		n := &d.cfg.Networks[i]
		if ep.Network != "" && ep.Network != n.Name {
			continue
		}
		if ep.Network != "" || slices.ContainsFunc(n.CIDRs, func(p netip.Prefix) bool { return p.Contains(ep.Addr.Unmap()) && !d.narrower(p, ep) }) {
			return i
		}
	}
	return -1
}

// narrower reports whether the address of ep is in a range of a network that is
// smaller than p, which then counts.
func (d *decoder) narrower(p netip.Prefix, ep *registry.Endpoint) bool {
	return slices.ContainsFunc(d.cfg.Networks, func(n registry.Network) bool {
		return slices.ContainsFunc(n.CIDRs, func(q netip.Prefix) bool { return q.Bits() > p.Bits() && q.Contains(ep.Addr.Unmap()) })
	})
}
