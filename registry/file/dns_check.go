package file

import (
	"cmp"
	"maps"
	"slices"

	"culvert.dev/registry"
	"go.yaml.in/yaml/v3"
)

// checkDNS finds what does not go together. Taken are the addresses of others.
func (d *decoder) checkDNS(taken []place) {
	c, at := d.cfg.DNS, d.root.object("dns")
	if c == nil {
		return
	}
	secure := false
	for i, l := range c.Listeners {
		n := d.dnsListener(i)
		if l.Address == "" {
			continue
		}
		if l.Transport == "tls" || l.Transport == "https" {
			secure = true
			if at.value("tls") == nil {
				d.errorf(n, "add tls: {certificateFile: ..., keyFile: ...} to dns", "%s needs a certificate", l)
			}
		}
		clash := slices.IndexFunc(taken, func(p place) bool { return overlap(p.address, l.place()) })
		if clash >= 0 {
			p := taken[clash]
			d.errorf(n, "give it an address or a port of its own", "%s is already in use: %s in line %d", l, p.address, p.node.Line)
			continue
		}
		taken = append(taken, place{l.place(), n})
	}
	if n := at.value("tls"); n != nil && !secure {
		d.errorf(n, "add tls://:853 or https://:443/dns-query to listen, or leave it out", "tls has no effect: there is no tls:// or https:// listener")
	}
	d.checkDNSViews(c)
	d.checkDNSForward(c)
	d.checkUpstreams(c.Upstreams, at)
	for i, f := range c.Forward {
		d.checkUpstreams(f.Upstreams, mapping{at.item("forward", i)})
	}
	if c.Cache.MinTTL > c.Cache.MaxTTL {
		d.errorf(at.value("cache"), "", "minTTL %v is longer than maxTTL %v", c.Cache.MinTTL, c.Cache.MaxTTL)
	}
}

// checkUpstreams finds resolvers that are this server.
func (d *decoder) checkUpstreams(upstreams []DNSUpstream, at mapping) {
	for i, u := range upstreams {
		ep, _ := parseEndpoint(u.Address)
		for j, l := range d.cfg.DNS.Listeners {
			if u.Address != "" && l.Address != "" && leadsTo(ep, []uint16{ep.Port}, l.Address) {
				d.errorf(at.item("upstreams", i), "write the address of another resolver", "upstream %s leads back to this server, which listens at %s (line %d)", u.Address, l, d.dnsListener(j).Line)
				break
			}
		}
	}
}

func (d *decoder) checkDNSViews(c *DNS) {
	at := d.root.object("dns")
	for i, l := range c.Listeners {
		if l.View != "" {
			d.knownNetwork(valueOf(at.item("listen", i), "view"), l.View)
		}
	}
	for i, name := range c.VIPNetworks {
		d.knownNetwork(at.item("vipNetworks", i), name)
		if d.cfg.VIPs == nil {
			d.errorf(at.item("vipNetworks", i), "add vips: {state: ...} to the configuration", "vipNetworks has no effect: no service has an address to itself")
		}
	}
}

// checkDNSForward finds zones that are somebody else's already, and what is
// forwarded for nobody.
func (d *decoder) checkDNSForward(c *DNS) {
	at := d.root.object("dns")
	forward := func(i int) *yaml.Node { return mapping{at.item("forward", i)}.where("zone") }
	for i, f := range c.Forward {
		if f.Zone == "" {
			continue
		}
		own := c.Zones
		if len(own) == 0 {
			own = d.cfg.defaultZones()
		}
		if slices.Contains(own, f.Zone) {
			d.errorf(forward(i), "take it out of zones, or out of forward", "zone %q is answered here and not forwarded", f.Zone)
		}
		if first := slices.IndexFunc(c.Forward, func(g DNSForward) bool { return g.Zone == f.Zone }); first < i {
			d.errorf(forward(i), "keep one of them", "zone %q is already in line %d", f.Zone, forward(first).Line)
		}
	}
	if len(c.RecursionClients) > 0 || has(at.node, "recursionClients") {
		return
	}
	for _, key := range []string{"upstreams", "forward", "privateZones", "cache"} {
		n := at.value(key)
		if n == nil {
			continue
		}
		d.errorf(n, "add recursionClients: [10.0.0.0/8], the ranges of your own clients", "%s has no effect: no client may ask for other names", key)
	}
}

// DNSZones returns the zones that DNS answers by itself.
func (c *Config) DNSZones() []string {
	if c.Agent != nil && c.Agent.DNS != nil {
		return c.agentZones()
	}
	if c.DNS != nil && len(c.DNS.Zones) > 0 {
		return c.DNS.Zones
	}
	return c.defaultZones()
}

// DNSClaims returns the domains outside of the zones where services have names, by the
// file or, once it is known what there is, by Kubernetes. What clusters are called that
// Secrets tell of is known later.
func (c *Config) DNSClaims() []string {
	if c.Agent != nil && c.Agent.DNS != nil {
		return nil
	}
	all := map[string]bool{}
	for _, s := range c.Services {
		for _, p := range s.Names {
			all[p.Suffix.String()] = true
		}
		if s.ID.Cluster != "" {
			all[s.ID.Cluster] = true // "db.west"
		}
	}
	if c.Kubernetes != nil && c.Kubernetes.Discovery != nil {
		all[c.Cluster] = true
		for _, s := range c.Kubernetes.Discovery.Suffixes {
			all[s.Domain] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

func (c *Config) defaultZones() []string {
	return []string{cmp.Or(c.Mesh.Zone, registry.DefaultZone), "svc." + registry.Clusterset}
}

// readDNSFiles reads the certificate and the key, and returns what they
// contain.
func (d *decoder) readDNSFiles(path string) (all [][]byte) {
	if d.cfg.DNS == nil || d.root.object("dns").value("tls") == nil {
		return nil
	}
	d.cfg.DNS.Certificate, _ = d.pair(path, "dns", d.root.object("dns").object("tls"), &all)
	return all
}
