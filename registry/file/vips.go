package file

import (
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"culvert.dev/registry"
	"go.yaml.in/yaml/v3"
)

// VIPs are addresses to give to services, one of each range to one.
type VIPs struct {
	// Ranges has at most one of a family.
	Ranges []netip.Prefix `yaml:"ranges" what:"a range" as:"cidr" empty:"leave the key out for 240.0.0.0/4 and a range of IPv6"`

	// State is the path of the file that keeps which service has which address.
	State string `yaml:"state,required" reload:"restart"`

	// ReuseAfter is how long no other service gets the addresses of one that is gone.
	ReuseAfter time.Duration `yaml:"reuseAfter,min=1ms" default:"24h"`
}

func (v *VIPs) check(d *decoder, at mapping) {
	for i, p := range v.Ranges {
		if !p.IsValid() {
			continue
		}
		n := at.item("ranges", i)
		sameFamily := func(o netip.Prefix) bool { return o.IsValid() && o.Addr().Is4() == p.Addr().Is4() }
		if err := registry.CheckVIPRange(p); err != nil {
			d.errorf(n, "leave ranges out, or write 240.0.0.0/4, or a range that nobody else uses", "range %s can't be of vips: %v", p, err)
		} else if first := slices.IndexFunc(v.Ranges[:i], sameFamily); first >= 0 {
			d.errorf(n, "keep one of them", "a service has one address of each family, and %s is of the same family as %s", p, v.Ranges[first])
		} else {
			continue
		}
		v.Ranges[i] = netip.Prefix{}
	}
}

// checkVIP finds a service that asks for an address of its own and can't have
// one.
func (d *decoder) checkVIP(s *registry.Service, at mapping) {
	switch {
	case !s.VIP:
	case d.cfg.VIPs == nil:
		d.errorf(at.value("vip"), "add vips: {state: vips.json}, or leave it out", "vip has no effect: there are no vips")
	case !s.Exposed:
		d.errorf(at.value("vip"), "leave one of them out", "a service that is not exposed has no address of its own")
	case len(s.Names) > 0 && !hasExactName(s) && at.value("mesh") == nil:
		d.errorf(at.value("vip"), "add a name without *, or mesh, or leave it out", "a service with wildcard names only has no address of its own: a connection to it would not say which name is meant")
	}
}

// checkVIPs finds ranges that are somebody else's, and fills in those that the
// file leaves out.
func (d *decoder) checkVIPs() {
	c, at := d.cfg.VIPs, d.root.object("vips")
	if c == nil || at.node.Kind != yaml.MappingNode {
		return
	}
	if p := d.cfg.ServicePorts; p != nil && c.State != "" && d.beside(p.State) == d.beside(c.State) {
		d.errorf(at.value("state"), "give each a file of its own", "servicePorts use the state %q, too", clip(c.State))
	}
	if !has(at.node, "ranges") {
		if d.cfg.Cluster == "" {
			d.errorf(at.node, "add cluster to the configuration, or ranges: [240.0.0.0/4, fd12:3456:789a::/64] to vips", "vips needs ranges: the default one of IPv6 is made from cluster, which is not set")
			return
		}
		c.Ranges = registry.DefaultVIPRanges(d.cfg.Cluster)
	}
	services := uint64(0)
	for i := range d.cfg.Services {
		if s := d.cfg.Services[i]; s.VIP && s.Exposed {
			services++
		}
	}
	for i, r := range c.Ranges {
		if !r.IsValid() {
			continue
		}
		n := at.node
		if has(n, "ranges") {
			n = at.item("ranges", i)
		}
		if most := registry.VIPsIn(r); services > most {
			d.errorf(n, "choose a larger range", "range %s has %d addresses, and %d services need one", r, most, services)
		}
		for j := range d.cfg.Networks {
			for k, p := range d.cfg.Networks[j].CIDRs {
				if p.Bits() > 0 && p.Overlaps(r) { // a network of everything stands for the rest of the world
					d.errorf(n, "choose a range that nobody else uses", "range %s of vips overlaps %s of network %q (line %d)", r, p, clip(d.cfg.Networks[j].Name), d.network(j).item("cidrs", k).Line)
				}
			}
		}
		d.checkVIPListeners(r, n)
	}
}

// checkVIPListeners finds addresses of our own in a range.
func (d *decoder) checkVIPListeners(r netip.Prefix, n *yaml.Node) {
	check := func(address string, at *yaml.Node) {
		for _, a := range listenAddrs(address) {
			if r.Contains(a) {
				d.errorf(n, "choose a range that nobody else uses", "range %s of vips contains %s, the address of a listener (line %d)", r, a, at.Line)
			}
		}
	}
	for i, l := range d.cfg.Listeners {
		check(l.Address, d.listener(i).value("address"))
	}
	if d.root.value("admin") != nil && !isSocket(d.cfg.Admin) {
		check(d.cfg.Admin, d.root.value("admin"))
	}
	if d.cfg.DNS != nil {
		for i, l := range d.cfg.DNS.Listeners {
			check(l.Address, d.dnsListener(i))
		}
	}
	if p := d.cfg.ServicePorts; p != nil && p.Address.IsValid() && r.Contains(p.Address) {
		d.errorf(n, "choose a range that nobody else uses", "range %s of vips contains %s, the address of servicePorts (line %d)", r, p.Address, d.root.object("servicePorts").value("address").Line)
	}
}

// beside returns a path as it is from here, where it is written in the file.
func (d *decoder) beside(path string) string {
	if path == "" || filepath.IsAbs(path) {
		return filepath.Clean(path)
	}
	return filepath.Join(filepath.Dir(d.file), path)
}
