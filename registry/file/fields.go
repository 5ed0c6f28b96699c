package file

import (
	"cmp"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"

	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// positions are the nodes to which the checks of the whole configuration point.
type positions struct {
	networks   []mapping
	listeners  []listenerAt
	admin      *yaml.Node
	services   []mapping
	ports      *yaml.Node
	vips       vipsAt
	kubernetes *yaml.Node
	mesh       meshAt
	dns        dnsAt
}

// A mapping is the node of an object, in which checks find the values of its keys.
type mapping struct{ node *yaml.Node }

// value returns the value of a key, as valueOf does.
func (m mapping) value(key string) *yaml.Node { return valueOf(m.node, key) }

// where returns the value of a key, or the mapping itself if there is none.
func (m mapping) where(key string) *yaml.Node { return cmp.Or(m.value(key), m.node) }

// word returns the value of a key as it is written, and "" if it is no single value.
func (m mapping) word(key string) string {
	if n := m.value(key); n != nil && n.Kind == yaml.ScalarNode {
		return n.Value
	}
	return ""
}

// item returns an element of the list of a key. It is the list itself if it is no list,
// and an empty node if the key is missing.
func (m mapping) item(key string, i int) *yaml.Node {
	n := m.value(key)
	switch {
	case n == nil:
		return &yaml.Node{}
	case i < len(n.Content) && n.Kind == yaml.SequenceNode:
		return n.Content[i]
	}
	return n
}

type listenerAt struct {
	mapping
	tls tlsAt
}

// auth returns the value of a key in the listener's auth.
func (at *listenerAt) auth(key string) *yaml.Node { return valueOf(at.value("auth"), key) }

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
			var w network
			into(d, n, "a network", &w)
			d.at.networks = append(d.at.networks, mapping{n})
			c.Networks = append(c.Networks, w.registered())
		})
	}},
	{"listeners", func(d *decoder, n *yaml.Node, c *Config) {
		d.list(n, "listeners", func(n *yaml.Node) {
			i := len(c.Listeners)
			c.Listeners = append(c.Listeners, Listener{Refusal: "alert"})
			d.at.listeners = append(d.at.listeners, listenerAt{mapping: mapping{n}})
			objectOf(d, n, "a listener", listenerFields, &c.Listeners[i])
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
	{"limits", func(d *decoder, n *yaml.Node, c *Config) { objectOf(d, n, "limits", limitsFields, &c.Limits) }},
	{"drain", func(d *decoder, n *yaml.Node, c *Config) { objectOf(d, n, "drain", drainFields, &c.Drain) }},
	{"log", func(d *decoder, n *yaml.Node, c *Config) { objectOf(d, n, "log", logFields, &c.Log) }},
	{"services", func(d *decoder, n *yaml.Node, c *Config) {
		var l services
		l.decode(d, n, "services")
		c.Services = l
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
		objectOf(d, n, "auth", authFields, to.Auth)
		if n.Kind == yaml.MappingNode && len(n.Content) == 0 {
			d.errorf(n, "name users, usersFile or tokensFile", "auth is empty, which would refuse every client")
		}
	}},
	{"proxyProtocol", func(d *decoder, n *yaml.Node, to *Listener) {
		to.Proxy = &Proxy{}
		objectOf(d, n, "proxyProtocol", proxyFields, to.Proxy)
		d.need(n, "proxyProtocol", "from")
	}},
	{"tls", func(d *decoder, n *yaml.Node, to *Listener) { d.tls(n, to) }},
	{"websocket", func(d *decoder, n *yaml.Node, to *Listener) {
		objectOf(d, n, "websocket", websocketFields, &to.WebSocket)
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

func (d *decoder) cidr(n *yaml.Node) (netip.Prefix, bool) {
	s, ok := d.text(n, "a range")
	if !ok {
		return netip.Prefix{}, false
	}
	p, c := parseCIDR(s)
	if c != nil {
		d.errorf(n, c.hint, "%s", c.msg)
	}
	return p, c == nil
}
