package file

import (
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// positions are the nodes to which the checks of the whole configuration point.
type positions struct {
	networks   []networkAt
	listeners  []listenerAt
	admin      *yaml.Node
	services   []*serviceAt
	hops       []hopAt
	ports      *yaml.Node
	vips       vipsAt
	kubernetes *yaml.Node
	mesh       meshAt
	dns        dnsAt
}

type networkAt struct {
	node, name *yaml.Node
	cidrs      []*yaml.Node
	near       []*yaml.Node
	transports []*yaml.Node // of each gateway; nil where it says nothing of them
}

// A mapping is the node of an object, in which checks find the values of its keys.
type mapping struct{ node *yaml.Node }

// value returns the value of a key, as valueOf does.
func (m mapping) value(key string) *yaml.Node { return valueOf(m.node, key) }

type listenerAt struct {
	mapping
	tls tlsAt
}

// auth returns the value of a key in the listener's auth.
func (at *listenerAt) auth(key string) *yaml.Node { return valueOf(at.value("auth"), key) }

type serviceAt struct {
	mapping
	network                            *yaml.Node // where it is a word
	names, addresses, endpoints, views []*yaml.Node
	portless                           bool // an endpoint has no port
}

var configFields = []field[Config]{
	{"cluster", func(d *decoder, n *yaml.Node, c *Config) {
		if s, ok := d.text(n, "cluster"); ok {
			if _, err := tunnel.ParseName(s); err != nil {
				d.errorf(n, "use letters, digits and hyphens", "cluster %q: %v", clip(s), err)
			}
			c.Cluster = s
		}
	}},
	{"zone", func(d *decoder, n *yaml.Node, c *Config) { d.meshZone(n, c) }},
	{"network", func(d *decoder, n *yaml.Node, c *Config) {
		d.at.mesh.network = n
		c.Mesh.Network, _ = d.text(n, "network")
	}},
	{"networks", func(d *decoder, n *yaml.Node, c *Config) {
		d.list(n, "networks", func(n *yaml.Node) {
			i := len(c.Networks)
			c.Networks = append(c.Networks, registry.Network{})
			d.at.networks = append(d.at.networks, networkAt{node: n, name: n})
			object(d, n, "a network", networkFields, &c.Networks[i])
			d.need(n, "a network", "name")
		})
	}},
	{"listeners", func(d *decoder, n *yaml.Node, c *Config) {
		d.list(n, "listeners", func(n *yaml.Node) {
			i := len(c.Listeners)
			c.Listeners = append(c.Listeners, Listener{Refusal: "alert"})
			d.at.listeners = append(d.at.listeners, listenerAt{mapping: mapping{n}})
			object(d, n, "a listener", listenerFields, &c.Listeners[i])
			d.need(n, "a listener", "address")
		})
	}},
	{"servicePorts", func(d *decoder, n *yaml.Node, c *Config) { d.servicePorts(n, c) }},
	{"vips", func(d *decoder, n *yaml.Node, c *Config) { d.vips(n, c) }},
	{"dns", func(d *decoder, n *yaml.Node, c *Config) { d.dns(n, c) }},
	{"kubernetes", func(d *decoder, n *yaml.Node, c *Config) {
		c.Kubernetes = &Kubernetes{}
		c.Kubernetes.decode(d, n, "kubernetes")
	}},
	{"admin", func(d *decoder, n *yaml.Node, c *Config) {
		d.at.admin = n
		d.adminAddress(n, &c.Admin)
	}},
	{"adminControl", func(d *decoder, n *yaml.Node, c *Config) { d.boolean(n, "adminControl", &c.Control) }},
	{"limits", func(d *decoder, n *yaml.Node, c *Config) { object(d, n, "limits", limitsFields, &c.Limits) }},
	{"drain", func(d *decoder, n *yaml.Node, c *Config) { object(d, n, "drain", drainFields, &c.Drain) }},
	{"log", func(d *decoder, n *yaml.Node, c *Config) { object(d, n, "log", logFields, &c.Log) }},
	{"services", func(d *decoder, n *yaml.Node, c *Config) {
		d.list(n, "services", func(n *yaml.Node) {
			s := &registry.Service{Exposed: true, Publish: true, Origin: d.origin(n.Line)}
			c.Services = append(c.Services, s)
			d.at.services = append(d.at.services, &serviceAt{mapping: mapping{n}})
			object(d, n, "a service", serviceFields, s)
		})
		if c.Services == nil {
			c.Services = []*registry.Service{}
		}
	}},
}

func (d *decoder) origin(line int) string {
	return filepath.Base(d.file) + ":" + strconv.Itoa(line)
}

// need adds an error if an object lacks a key.
func (d *decoder) need(n *yaml.Node, what, key string) {
	if n.Kind == yaml.MappingNode && !has(n, key) {
		d.errorf(n, "", "%s needs the key %q", what, key)
	}
}

// has reports whether a mapping has a key.
func has(n *yaml.Node, key string) bool { return keyOf(n, key) != n }

// keyOf returns a key of a mapping, or the mapping if it has no such key.
func keyOf(n *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i]
		}
	}
	return n
}

// valueOf returns the value of a key of a mapping. It is nil if the key is missing or has
// no value, and if n is nil or no mapping.
func valueOf(n *yaml.Node, key string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key && !isNull(n.Content[i+1]) {
			return n.Content[i+1]
		}
	}
	return nil
}

// network returns the positions of the network that is being read.
func (d *decoder) network() *networkAt { return &d.at.networks[len(d.at.networks)-1] }

var networkFields = []field[registry.Network]{
	{"name", func(d *decoder, n *yaml.Node, to *registry.Network) {
		if s, ok := d.text(n, "the name of a network"); ok {
			to.Name = s
			d.network().name = n
		}
	}},
	{"cidrs", func(d *decoder, n *yaml.Node, to *registry.Network) {
		d.list(n, "cidrs", func(n *yaml.Node) {
			if p, ok := d.cidr(n); ok {
				to.CIDRs = append(to.CIDRs, p)
				d.network().cidrs = append(d.network().cidrs, n)
			}
		})
		if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
			d.errorf(n, "list its address ranges", "cidrs is empty")
		}
	}},
	{"near", func(d *decoder, n *yaml.Node, to *registry.Network) { d.near(n, to) }},
	{"gateways", func(d *decoder, n *yaml.Node, to *registry.Network) { d.gateways(n, to) }},
	{"via", func(d *decoder, n *yaml.Node, to *registry.Network) { d.hops(n, &to.Via) }},
	{"insecure", func(d *decoder, n *yaml.Node, to *registry.Network) { d.boolean(n, "insecure", &to.Insecure) }},
}

// listener returns the positions of the listener that is being read.
func (d *decoder) listener() *listenerAt { return &d.at.listeners[len(d.at.listeners)-1] }

var listenerFields = []field[Listener]{
	{"address", func(d *decoder, n *yaml.Node, to *Listener) { d.listenerAddress(n, &to.Address) }},
	{"protocols", func(d *decoder, n *yaml.Node, to *Listener) {
		d.protocols(n, Protocols, &to.Protocols)
		if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
			d.errorf(n, "leave the key out for sni and connect", "protocols is empty")
		}
	}},
	{"refusal", func(d *decoder, n *yaml.Node, to *Listener) {
		if s, ok := d.word(n, "refusal", "alert", "close"); ok {
			to.Refusal = s
		}
	}},
	{"auth", func(d *decoder, n *yaml.Node, to *Listener) {
		to.Auth = &Auth{}
		object(d, n, "auth", authFields, to.Auth)
		if n.Kind == yaml.MappingNode && len(n.Content) == 0 {
			d.errorf(n, "name users, usersFile or tokensFile", "auth is empty, which would refuse every client")
		}
	}},
	{"proxyProtocol", func(d *decoder, n *yaml.Node, to *Listener) {
		to.Proxy = &Proxy{}
		object(d, n, "proxyProtocol", proxyFields, to.Proxy)
		d.need(n, "proxyProtocol", "from")
	}},
	{"tls", func(d *decoder, n *yaml.Node, to *Listener) { d.tls(n, to) }},
	{"websocket", func(d *decoder, n *yaml.Node, to *Listener) {
		object(d, n, "websocket", websocketFields, &to.WebSocket)
	}},
	{"service", func(d *decoder, n *yaml.Node, to *Listener) {
		if s, ok := d.text(n, "service"); ok {
			to.Service, to.Port = d.target(n, s)
		}
	}},
}

var authFields = []field[Auth]{
	{"users", func(d *decoder, n *yaml.Node, to *Auth) {
		d.users(n, to)
	}},
	{"usersFile", func(d *decoder, n *yaml.Node, to *Auth) {
		to.UsersFile, _ = d.text(n, "usersFile")
	}},
	{"tokensFile", func(d *decoder, n *yaml.Node, to *Auth) {
		to.TokensFile, _ = d.text(n, "tokensFile")
	}},
}

func durationField[T any](key string, least time.Duration, at func(*T) *time.Duration) field[T] {
	return field[T]{key, func(d *decoder, n *yaml.Node, to *T) { d.duration(n, key, least, at(to)) }}
}

// The least limit on time is a millisecond: less is a slip of the unit.
var (
	limitsFields = fieldsOf[Limits](nil)
	drainFields  = fieldsOf[Drain](nil)
)

var logFields = fieldsOf([]field[Log]{
	{"format", func(d *decoder, n *yaml.Node, to *Log) {
		if s, ok := d.word(n, "format", "text", "json"); ok {
			to.Format = s
		}
	}},
	{"level", func(d *decoder, n *yaml.Node, to *Log) {
		if s, ok := d.word(n, "level", "debug", "info", "warn", "error"); ok {
			_ = to.Level.UnmarshalText([]byte(s)) // knows these words
		}
	}},
})

var proxyFields = []field[Proxy]{
	{"from", func(d *decoder, n *yaml.Node, to *Proxy) {
		d.list(n, "from", func(n *yaml.Node) {
			p, ok := d.cidr(n)
			switch {
			case ok && p.Bits() == 0:
				// Whoever is trusted may claim to be anybody.
				d.errorf(n, "list the ranges of the proxies in front", "range %s covers everybody", p)
			case ok && slices.Contains(to.From, p):
				d.errorf(n, "keep one of them", "range %s is listed twice", p)
			case ok:
				to.From = append(to.From, p)
			}
		})
		if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
			d.errorf(n, "list the ranges of the proxies in front", "from is empty, which would refuse every client")
		}
	}},
}

// service returns the positions of the service that is being read.
func (d *decoder) service() *serviceAt { return d.at.services[len(d.at.services)-1] }

var serviceFields = []field[registry.Service]{
	{"name", func(d *decoder, n *yaml.Node, to *registry.Service) { d.serviceName(n, to) }},
	{"names", func(d *decoder, n *yaml.Node, to *registry.Service) {
		d.list(n, "names", func(n *yaml.Node) { d.serviceName(n, to) })
	}},
	{"ports", func(d *decoder, n *yaml.Node, to *registry.Service) {
		d.list(n, "ports", func(n *yaml.Node) { d.port(n, to) })
		if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
			d.errorf(n, "list ports, or leave the key out for any port", "ports is empty")
		}
	}},
	{"mesh", func(d *decoder, n *yaml.Node, to *registry.Service) { d.id(n, to) }},
	{"exported", func(d *decoder, n *yaml.Node, to *registry.Service) { d.boolean(n, "exported", &to.Exported) }},
	{"headless", func(d *decoder, n *yaml.Node, to *registry.Service) { d.boolean(n, "headless", &to.Headless) }},
	{"alpn", func(d *decoder, n *yaml.Node, to *registry.Service) { d.alpn(n, to) }},
	{"network", func(d *decoder, n *yaml.Node, to *registry.Service) {
		if _, ok := d.text(n, "network"); ok {
			d.service().network = n
		}
	}},
	{"exposed", func(d *decoder, n *yaml.Node, to *registry.Service) { d.boolean(n, "exposed", &to.Exposed) }},
	{"ownPort", func(d *decoder, n *yaml.Node, to *registry.Service) { d.boolean(n, "ownPort", &to.Publish) }},
	{"vip", func(d *decoder, n *yaml.Node, to *registry.Service) { d.boolean(n, "vip", &to.VIP) }},
	{"exposedTo", func(d *decoder, n *yaml.Node, to *registry.Service) {
		d.list(n, "exposedTo", func(n *yaml.Node) {
			if s, ok := d.text(n, "exposedTo"); ok {
				to.ExposedTo = append(to.ExposedTo, s)
				d.service().views = append(d.service().views, n)
			}
		})
		if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
			// Empty could be read as nobody; in the registry it is everyone.
			d.errorf(n, "leave the key out for everyone, or write exposed: false for nobody", "exposedTo is empty")
		}
	}},
	{"addresses", func(d *decoder, n *yaml.Node, to *registry.Service) {
		d.list(n, "addresses", func(n *yaml.Node) {
			if a, ok := d.vip(n); ok {
				to.Addresses = append(to.Addresses, a)
				d.service().addresses = append(d.service().addresses, n)
			}
		})
	}},
	{"endpoints", func(d *decoder, n *yaml.Node, to *registry.Service) {
		d.list(n, "endpoints", func(n *yaml.Node) { d.endpoint(n, to) })
	}},
	{"proxyProtocol", func(d *decoder, n *yaml.Node, to *registry.Service) {
		if s, ok := d.word(n, "proxyProtocol", "v1", "v2"); ok {
			to.ProxyProtocol = int(s[1] - '0')
		}
	}},
	{"check", func(d *decoder, n *yaml.Node, to *registry.Service) {
		d.healthCheck(n, &to.Check)
	}},
	{"via", func(d *decoder, n *yaml.Node, to *registry.Service) { d.via(n, to) }},
	durationField("idleTimeout", time.Millisecond, func(s *registry.Service) *time.Duration { return &s.IdleTimeout }),
	durationField("halfClosedTimeout", time.Millisecond, func(s *registry.Service) *time.Duration { return &s.HalfClosedTimeout }),
}

func (d *decoder) serviceName(n *yaml.Node, to *registry.Service) {
	s, ok := d.text(n, "the name of a service")
	if !ok {
		return
	}
	p, err := parsePattern(s)
	if err != nil {
		d.errorf(n, err.hint, "name %q: %s", clip(s), err.msg)
		return
	}
	if to.Name == "" {
		to.Name = p.String()
	}
	to.Names = append(to.Names, p)
	d.service().names = append(d.service().names, n)
}

func (d *decoder) cidr(n *yaml.Node) (netip.Prefix, bool) {
	s, ok := d.text(n, "a range")
	if !ok {
		return netip.Prefix{}, false
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		hint := "write it as 192.0.2.0/24 or 2001:db8::/32"
		if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
			hint = "did you mean " + netip.PrefixFrom(a, a.BitLen()).String() + "?"
		}
		d.errorf(n, hint, "%q is not an address range", clip(s))
		return netip.Prefix{}, false
	}
	if p.Addr().Is4In6() {
		d.errorf(n, "write it as an IPv4 range", "%q is an IPv4 range in IPv6 form", clip(s))
		return netip.Prefix{}, false
	}
	if p != p.Masked() {
		d.errorf(n, "did you mean "+p.Masked().String()+"?", "range %q has bits set after the first %d", clip(s), p.Bits())
		return netip.Prefix{}, false
	}
	return p, true
}

func (d *decoder) vip(n *yaml.Node) (netip.Addr, bool) {
	s, ok := d.text(n, "an address")
	if !ok {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		hint := "write an IP address, without a port"
		if _, err := netip.ParseAddrPort(s); err == nil {
			hint = "leave the port out: it goes to ports"
		}
		d.errorf(n, hint, "%q is not an address", clip(s))
		return netip.Addr{}, false
	}
	if e := destination(a); e != nil {
		d.errorf(n, e.hint, "address %q: %s", clip(s), e.msg)
		return netip.Addr{}, false
	}
	return a.Unmap(), true
}
