package file

import (
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// An AgentDNS is what an agent answers by DNS, to programs of this host: its names, with
// addresses that lead to it. It stands for the part dns of the file.
type AgentDNS struct {
	Listeners []DNSAddress `yaml:"listen,required" what:"an address" as:"localDNS" unique:"address" empty:"list where to take questions: [udp://127.0.0.54:53, tcp://127.0.0.54:53]"`

	// Upstreams are asked for all other names; empty means that those are refused.
	Upstreams []DNSUpstream `yaml:"upstreams" what:"an upstream" as:"upstream" unique:"upstream" empty:"list the resolvers to ask: [192.0.2.53]"`

	// Install says which resolver of this host asks the agent, while it runs; "" means that
	// none is told of it.
	Install string `yaml:"install" oneof:"systemd-resolved resolv.conf"`
}

// What AgentDNS.Install may be.
const (
	InstallResolved   = "systemd-resolved" // asks the agent for its names
	InstallResolvConf = "resolv.conf"      // names the agent first; the agent asks those from before
)

// resolvedStubs are addresses at which systemd-resolved answers.
var resolvedStubs = []string{"127.0.0.53:53", "127.0.0.54:53"}

// UDPAddress returns HOST:PORT of the first listener by UDP; "" for none.
func (a *AgentDNS) UDPAddress() string {
	for _, l := range a.Listeners {
		if l.Transport == "udp" {
			return l.Address
		}
	}
	return ""
}

// checkInstall finds what does not go with the resolver that asks the agent.
func (a *AgentDNS) checkInstall(d *decoder, at mapping, c *configuration) {
	if a.Install == "" {
		return
	}
	n := at.value("install")
	out := c.config()
	if len(a.Listeners) > 0 && a.UDPAddress() == "" {
		d.errorf(at.where("listen"), "add udp://127.0.0.1:5354", "%s asks by UDP, and no listener takes that", a.Install)
	}
	switch {
	case slices.Contains(out.agentZones(), ""):
		d.errorf(n, `add names: ["*.shop.example"] to agent, those that the gateways have`, "%s would ask the agent for every name: it has the names \"*\"", a.Install)
	case len(out.AgentDomains(nil)) == 0:
		d.errorf(n, "add names to agent", "there is no name for which %s could ask the agent", a.Install)
	}
	for i, u := range a.Upstreams {
		if slices.Contains(resolvedStubs, u.Address) {
			d.errorf(at.item("upstreams", i), "write the resolver of your network, as resolvectl status shows it", "upstream %s is systemd-resolved, which asks this agent", u.Address)
		}
	}
	if a.Install == InstallResolvConf && a.UDPAddress() != "" && listenPort(a.UDPAddress()) != 53 {
		d.errorf(at.where("listen"), "write udp://127.0.0.54:53, tcp://127.0.0.54:53", "resolv.conf has no ports: the agent must listen at port 53, and not at %s", a.UDPAddress())
	}
	for _, l := range a.Listeners {
		if a.Install == InstallResolved && slices.Contains(resolvedStubs, l.Address) {
			d.errorf(at.where("listen"), "write udp://127.0.0.1:5354, tcp://127.0.0.1:5354", "%s is an address of systemd-resolved itself", l)
		}
	}
}

// parseLocalDNS parses the address of a DNS server for this host alone.
func parseLocalDNS(what, s string) (DNSAddress, *complaint) {
	a, c := parseDNSAddress(what, s)
	if c != nil {
		return a, c
	}
	const hint = "write udp://127.0.0.54:53 and tcp://127.0.0.54:53; for other hosts, use dns"
	switch {
	case a.Transport != "udp" && a.Transport != "tcp":
		return DNSAddress{}, complain(hint, "address %q: programs of this host ask by UDP and TCP", clip(s))
	case !registry.OnLoopback(a.Address):
		return DNSAddress{}, complain(hint, "address %q is not on loopback, and its answers are for this host alone", clip(s))
	}
	return a, nil
}

// addDNS adds the DNS server of an agent.
func (a *Agent) addDNS(d *decoder, c *configuration, at mapping) {
	if a.DNS == nil {
		return
	}
	n := at.object("dns")
	if c.DNS != nil {
		d.errorf(keyOf(at.node, "dns"), "keep one of them", "agent has dns, and so has the configuration (line %d)", keyOf(d.root.node, "dns").Line)
		return
	}
	list := func(key string) *yaml.Node {
		return sequenceNode(n.where(key), slices.Clone(n.items(key))...)
	}
	listen := list("listen")
	for i := len(listen.Content) - 1; i >= 0; i-- {
		if i >= len(a.DNS.Listeners) || a.DNS.Listeners[i].Address == "" { // it is reported already
			listen.Content = slices.Delete(listen.Content, i, i+1)
		}
	}
	if len(listen.Content) == 0 {
		return
	}
	a.DNS.checkInstall(d, n, c)
	node := mappingNode(n.node, "listen", listen, "rateLimit", integerNode(n.node, -1))
	a.addUpstreams(d, c, node, list, n)
	if has(d.root.node, "dns") { // without a value
		return
	}
	d.root.node.Content = append(d.root.node.Content, scalarNode(n.node, "dns"), node)
	c.DNS = new(DNS)
	into(d, node, "dns", c.DNS)
}

// addUpstreams adds to the node of dns who is asked for other names: those of this host, and
// among them those by which the agent itself reaches its gateways.
func (a *Agent) addUpstreams(d *decoder, c *configuration, node *yaml.Node, list func(string) *yaml.Node, n mapping) {
	add := func(key string, value *yaml.Node) {
		node.Content = append(node.Content, scalarNode(n.node, key), value)
	}
	a.own = a.ownHosts(c)
	if len(a.DNS.Upstreams) == 0 && a.DNS.Install != InstallResolvConf {
		for _, p := range a.Names {
			for _, host := range a.own {
				if name, err := tunnel.ParseName(host); err == nil && p != tunnel.AnyName && p.Matches(name) {
					d.errorf(n.node, "add upstreams: [ADDRESS] to agent.dns, the resolvers that have it; or write the address of the gateway in place of its name", "the agent reaches its gateways by %q, which is one of the names that it answers by DNS", clip(host))
				}
			}
		}
		return
	}
	if len(a.DNS.Upstreams) > 0 {
		add("upstreams", list("upstreams"))
	}
	add("recursionClients", sequenceNode(n.node, scalarNode(n.node, "127.0.0.0/8"), scalarNode(n.node, "::1/128")))
}

// ownHosts returns the DNS names by which the agent reaches its gateways: they are never
// answered with addresses that lead to the agent.
func (a *Agent) ownHosts(c *configuration) []string {
	all := map[string]bool{}
	add := func(address string) {
		host, _, err := net.SplitHostPort(address)
		if name, bad := tunnel.ParseName(host); err == nil && bad == nil {
			all[name.String()] = true
		}
	}
	for _, g := range a.Gateway {
		add(g)
	}
	if c.UpstreamProxy != nil {
		if u, err := url.Parse(c.UpstreamProxy.URL); err == nil {
			add(net.JoinHostPort(u.Hostname(), "0"))
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// AgentHosts returns the DNS names by which the agent reaches its gateways.
func (c *Config) AgentHosts() []string { return c.Agent.own }

// AgentOwns reports whether the agent reaches its gateways by name.
func (c *Config) AgentOwns(name tunnel.Name) bool {
	return c.Agent != nil && slices.Contains(c.Agent.own, name.String())
}

// ForwardAddrs returns where a program reaches a service by its own port at a forward of
// the agent.
func (c *Config) ForwardAddrs(name tunnel.Name) (addrs []netip.Addr) {
	for _, f := range c.Agent.Forwards.All {
		host, port, err := net.SplitHostPort(f.Listener)
		if err != nil || f.Service != name || port != strconv.Itoa(int(f.Port)) {
			continue
		}
		if host == "localhost" {
			host = "127.0.0.1"
		}
		if a, err := netip.ParseAddr(host); err == nil && !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// maxAgentDomains is how many domains AgentDomains returns: systemd-resolved takes 256.
const maxAgentDomains = 250

// AgentDomains returns the domains that hold the names of an agent, without those that are
// below others: the names of c, and those of the catalog in t, which may be nil, in the zones that
// c.Agent.Catalog lists. A gateway that may offer any name gets no domain by that.
func (c *Config) AgentDomains(t *registry.Table) []string {
	all := map[string]bool{}
	add := func(p tunnel.Pattern) {
		domain := p.Suffix.String()
		if domain == "" || domain == "local" || strings.HasSuffix(domain, ".local") || !p.Wildcard && !strings.Contains(domain, ".") {
			return
		}
		all[domain] = true
	}
	for _, s := range c.Services {
		for _, p := range s.Names {
			add(p)
		}
	}
	if c.Agent != nil && len(c.Agent.Catalog.Zones) > 0 {
		for s := range t.Services() {
			for _, p := range s.Names {
				if len(all) < maxAgentDomains && slices.ContainsFunc(c.Agent.Catalog.Zones, func(z tunnel.Pattern) bool { return z == p || z.Matches(p.Suffix) }) {
					add(p)
				}
			}
		}
	}
	maps.DeleteFunc(all, func(domain string, _ bool) bool {
		for rest, more := domain, true; more; {
			if _, rest, more = strings.Cut(rest, "."); more && all[rest] {
				return true
			}
		}
		return false
	})
	return slices.Sorted(maps.Keys(all))
}

// agentZones returns the zones in which every name is one of an agent: those of its names with
// an asterisk, and "" for "*". Others of its names are hosts by themselves.
func (c *Config) agentZones() []string {
	all := map[string]bool{}
	for _, s := range c.Services {
		for _, p := range s.Names {
			if zone := p.Suffix.String(); p.Wildcard && zone != "local" && !strings.HasSuffix(zone, ".local") {
				all[zone] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(all))
}
