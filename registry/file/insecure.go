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
		protocols := slices.DeleteFunc(l.spoken(), func(p string) bool { return p == "sni" || p == "quic" || p == "postgres" })
		switch {
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
	if more := len(by) - most; more > 0 {
		by = append(by[:most], fmt.Sprintf("%d more", more))
	}
	return strings.Join(by, ", ")
}

// warnInsecure warns of a way without TLS, by which the plaintext of what takes some
// is refused.
func (d *decoder) warnInsecure(at *yaml.Node, hint, way, plain string) {
	d.warnf(at, hint, "%s: plaintext from %s is refused there with %q, and only TLS is carried", way, plain, tunnel.Insecure)
}

// checkInsecure tells of networks that plaintext goes to without TLS, and of those
// that it can't go to for that.
func (d *decoder) checkInsecure(network *registry.Network, at mapping, plain string) {
	const hint = "give the network a via with TLS, or set insecure: true for it"
	to, clear := "", false
	switch {
	case network.Insecure:
		d.warnf(at.where("name"), "", "network %q is insecure: plaintext may go there without TLS", clip(network.Name))
		return
	case network.Name == d.cfg.Mesh.Network || plain == "":
		return
	case len(network.Via) > 0:
		to, clear = registry.InsecureVia(network.Via)
	default:
		to, clear = network.CleartextGateway()
	}
	if clear {
		d.warnInsecure(at.where("name"), hint, fmt.Sprintf("gateway %q of network %q is reached without TLS", clip(to), clip(network.Name)), plain)
	}
}

// checkInsecureServices tells of services that are asked for without TLS, of another
// gateway or in another network.
func (d *decoder) checkInsecureServices() {
	plain := d.plaintext()
	if plain == "" {
		return
	}
	open := d.reachedDirectly()
	for i, s := range d.cfg.Services {
		at := d.services[i]
		if at.node == nil { // it was read before
			continue
		}
		if to, clear := registry.InsecureVia(s.Via); clear && at.value("via") != nil {
			d.warnInsecure(at.value("via"), "use TLS there, or set insecure: true for that hop", fmt.Sprintf("gateway %q is reached without TLS for service %q", clip(to), clip(s.Name)), plain)
		}
		for j := range s.Endpoints {
			n := d.networkOf(&s.Endpoints[j], open)
			if n < 0 || len(s.Via) > 0 {
				continue
			}
			name := d.cfg.Networks[n].Name
			d.warnInsecure(d.network(n).where("name"), "give the network gateways or a via with TLS, or set insecure: true for it",
				fmt.Sprintf("network %q has no gateway, and endpoint %s of service %q there is reached unencrypted", clip(name), s.Endpoints[j], clip(s.Name)), plain)
			if open = slices.DeleteFunc(open, func(i int) bool { return i == n }); len(open) == 0 {
				break
			}
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
