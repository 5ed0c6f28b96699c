package file

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// ServicePorts are ports to give to services, one to each.
type ServicePorts struct {
	Range      registry.PortRange `yaml:"range,required" as:"portRange"`
	Address    netip.Addr         `yaml:"address" as:"ownAddress"`          // to listen at; the zero Addr means every address of this machine
	State      string             `yaml:"state,required" reload:"restart"`  // path of the file that keeps who has which port
	ReuseAfter time.Duration      `yaml:"reuseAfter,min=1ms" default:"24h"` // how long nobody else gets the port of a service that is gone
}

// hasOwnPort reports whether a service is to get a port to itself.
func (d *decoder) hasOwnPort(s *registry.Service) bool {
	return d.cfg.ServicePorts != nil && s.Publish && s.Exposed && hasExactName(s)
}

func hasExactName(s *registry.Service) bool {
	return s.ID.Service != "" || slices.ContainsFunc(s.Names, func(p tunnel.Pattern) bool { return !p.Wildcard })
}

// checkOwnPort finds a service that asks for a port of its own and can't have
// one.
func (d *decoder) checkOwnPort(s *registry.Service, n *yaml.Node) {
	switch {
	case n == nil:
	case d.cfg.ServicePorts == nil:
		d.errorf(n, "add servicePorts: {range: 20000-20999, state: ...}, or leave it out", "ownPort has no effect: there are no servicePorts")
	case s.Publish && !s.Exposed:
		d.errorf(n, "leave one of them out", "a service that is not exposed has no port of its own")
	case s.Publish && len(s.Names) > 0 && !hasExactName(s):
		d.errorf(n, "add a name without *, or leave it out", "a service with wildcard names only has no port of its own: a connection to it would not say which name is meant")
	}
}

// An ownRange is ports that the gateway listens at for services.
type ownRange struct {
	registry.PortRange
	address netip.Addr // the zero Addr means every address of this machine
	key     string     // that says so, for people
	line    int
}

// listensAt returns the address of a port of the range.
func (r ownRange) listensAt(port uint16) (address string, ok bool) {
	if r.First == 0 || !r.Contains(port) {
		return "", false
	}
	host := ""
	if r.address.IsValid() {
		host = r.address.String()
		if r.address.Is6() {
			host = "[" + host + "]"
		}
	}
	return fmt.Sprintf("%s:%d", host, port), true
}

// ownRanges returns those of servicePorts and of kubernetes.importedServices.
func (d *decoder) ownRanges() (all []ownRange) {
	if p := d.cfg.ServicePorts; p != nil {
		all = append(all, ownRange{p.Range, p.Address, "servicePorts", lineOf(d.root.object("servicePorts").value("range"))})
	}
	if k := d.cfg.Kubernetes; k != nil && k.ImportedServices != nil {
		at := d.root.object("kubernetes").object("importedServices")
		all = append(all, ownRange{k.ImportedServices.Ports, netip.Addr{}, "kubernetes.importedServices", lineOf(at.value("ports"))})
	}
	return all
}

func lineOf(n *yaml.Node) int {
	if n == nil {
		return 0
	}
	return n.Line
}

// checkServicePorts finds listeners in the ranges of servicePorts and of imported services, and
// ranges that overlap.
func (d *decoder) checkServicePorts() {
	ranges := d.ownRanges()
	check := func(address string, n *yaml.Node) {
		for _, r := range ranges {
			ours, ok := r.listensAt(listenPort(address))
			if ok && listenPort(address) != 0 && overlap(ours, address) {
				d.errorf(n, "give it a port outside of the range", "%s is in the range %s of %s (line %d)", address, r.PortRange, r.key, r.line)
			}
		}
	}
	for i, l := range d.cfg.Listeners {
		check(l.Address, d.listener(i).value("address"))
	}
	if d.cfg.DNS != nil {
		for i, l := range d.cfg.DNS.Listeners {
			check(l.place(), d.dnsListener(i))
		}
	}
	if d.root.value("admin") != nil && !isSocket(d.cfg.Admin) {
		check(d.cfg.Admin, d.root.value("admin"))
	}
	if len(ranges) == 2 && ranges[0].First != 0 && ranges[1].First != 0 && ranges[0].First <= ranges[1].Last && ranges[1].First <= ranges[0].Last {
		d.errorf(d.root.object("kubernetes").object("importedServices").value("ports"), "choose ranges that have no port in common", "the range %s overlaps %s of %s (line %d)", ranges[1].PortRange, ranges[0].PortRange, ranges[0].key, ranges[0].line)
	}
}

// leadsToOwnPort finds an endpoint of this machine in a range of the gateway's own:
// whoever comes first would have its port.
func (d *decoder) leadsToOwnPort(ep registry.Endpoint, ports []uint16, n *yaml.Node) {
	for _, r := range d.ownRanges() {
		for _, port := range ports {
			if ours, ok := r.listensAt(port); ok && leadsTo(ep, []uint16{port}, ours) {
				d.errorf(n, "choose another range, or move the service to another port", "endpoint %q is in the range %s of %s (line %d), so this gateway may listen there", ep, r.PortRange, r.key, r.line)
				return
			}
		}
	}
}
