package file

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// A DNS is the configuration of the DNS server. Changes of its certificate files take
// effect while it runs.
type DNS struct {
	Listeners   []DNSListener `yaml:"listen"`
	Certificate KeyPair       `yaml:"tls"` // of those by TLS and HTTPS; zero if there are none

	Zones       []string      `yaml:"zones"` // its own; empty means the mesh's and svc.clusterset.local
	TTL         time.Duration `yaml:"ttl"`   // of the table's answers
	NegativeTTL time.Duration `yaml:"negativeTTL"`

	Upstreams        []DNSUpstream  `yaml:"upstreams"`        // that are asked for the rest; empty means those of resolv.conf
	Forward          []DNSForward   `yaml:"forward"`          // zones with others
	PrivateZones     []string       `yaml:"privateZones"`     // zones that may have private addresses, beside those of Forward
	VIPNetworks      []string       `yaml:"vipNetworks"`      // networks whose clients are told the VIPs of services
	RecursionClients []netip.Prefix `yaml:"recursionClients"` // clients that may ask for the names of others
	RateLimitExempt  []netip.Prefix `yaml:"rateLimitExempt"`  // clients for which RateLimit does not hold
	RateLimit        int            `yaml:"rateLimit,limit"`  // responses a second by UDP to a network; -1 for no limit
	Cache            DNSCache       `yaml:"cache"`
}

// DNSTransports are the transports of a DNSListener.
var DNSTransports = []string{"udp", "tcp", "tls", "https"}

// A DNSListener is an address at which questions are accepted.
type DNSListener struct {
	Transport string // of DNSTransports
	Address   string `yaml:"address"` // host:port; no host means every address of this machine
	View      string `yaml:"view"`    // the network of all who ask here; "" means that of their address
}

func (l DNSListener) String() string { return l.Transport + "://" + l.Address }

// place is the address as those of the other listeners are written.
func (l DNSListener) place() string {
	if l.Transport == "udp" {
		return udpPrefix + l.Address
	}
	return l.Address
}

// A DNSUpstream is a resolver to ask.
type DNSUpstream struct {
	Address string // host:port
	TLS     bool   // by TLS, and not in the clear
	Name    string // of its certificate; "" means its address
}

// A DNSForward is a zone that has resolvers of its own.
type DNSForward struct {
	Zone      string        `yaml:"zone"`
	Upstreams []DNSUpstream `yaml:"upstreams"`
}

// A DNSCache is how much of others' answers is kept, and how long.
type DNSCache struct {
	Size     Memory        `yaml:"size"` // of all answers, about
	MinTTL   time.Duration `yaml:"minTTL"`
	MaxTTL   time.Duration `yaml:"maxTTL,min=1s"`
	MaxStale time.Duration `yaml:"maxStale"` // that an answer is served after its time, where there is no better
}

func defaultDNS() *DNS {
	return &DNS{
		TTL: 5 * time.Second, NegativeTTL: 5 * time.Second, RateLimit: 1000,
		Cache: DNSCache{Size: 32 << 20, MinTTL: time.Second, MaxTTL: time.Hour, MaxStale: 24 * time.Hour},
	}
}

// A dnsAt has the positions of the keys of dns.
type dnsAt struct {
	mapping
	listeners, views []*yaml.Node
	vips             []*yaml.Node
	zones            []*yaml.Node
	forward          []*yaml.Node
	upstreams        []*yaml.Node // as those of all, those of zones
	addresses        []string     // of upstreams
}

var dnsFields = fieldsOf([]field[DNS]{
	{"listen", func(d *decoder, n *yaml.Node, to *DNS) {
		d.list(n, "listen", func(n *yaml.Node) {
			l := DNSListener{}
			d.at.dns.listeners = append(d.at.dns.listeners, n)
			d.at.dns.views = append(d.at.dns.views, nil)
			if n.Kind == yaml.MappingNode {
				objectOf(d, n, "a listener", dnsListenerFields, &l)
				d.need(n, "a listener", "address")
			} else {
				d.dnsAddress(n, &l)
			}
			to.Listeners = append(to.Listeners, l)
		})
		if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
			d.errorf(n, "list where to take questions: [udp://:53, tcp://:53]", "listen is empty")
		}
	}},
	{"tls", func(d *decoder, n *yaml.Node, _ *DNS) {
		objectOf(d, n, "tls", pairFields, &KeyPair{})
		d.need(n, "tls", "certificateFile")
		d.need(n, "tls", "keyFile")
	}},
	{"zones", func(d *decoder, n *yaml.Node, to *DNS) {
		d.zones(n, "zones", &to.Zones, &d.at.dns.zones)
		if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
			d.errorf(n, "leave the key out for the mesh's", "zones is empty")
		}
	}},
	{"upstreams", func(d *decoder, n *yaml.Node, to *DNS) { d.upstreams(n, &to.Upstreams) }},
	{"forward", func(d *decoder, n *yaml.Node, to *DNS) {
		d.list(n, "forward", func(n *yaml.Node) {
			var f DNSForward
			d.at.dns.forward = append(d.at.dns.forward, n)
			objectOf(d, n, "a zone to forward", dnsForwardFields, &f)
			d.need(n, "a zone to forward", "zone")
			d.need(n, "a zone to forward", "upstreams")
			to.Forward = append(to.Forward, f)
		})
	}},
	{"privateZones", func(d *decoder, n *yaml.Node, to *DNS) {
		var at []*yaml.Node
		d.zones(n, "privateZones", &to.PrivateZones, &at)
	}},
	{"vipNetworks", func(d *decoder, n *yaml.Node, to *DNS) {
		d.list(n, "vipNetworks", func(n *yaml.Node) {
			if s, ok := d.text(n, "vipNetworks"); ok {
				to.VIPNetworks = append(to.VIPNetworks, s)
				d.at.dns.vips = append(d.at.dns.vips, n)
			}
		})
	}},
	{"recursionClients", func(d *decoder, n *yaml.Node, to *DNS) {
		d.sources(n, "recursionClients", &to.RecursionClients, "list the ranges of your own clients", "would make this an open resolver, for everybody to attack others with")
	}},
	{"rateLimitExempt", func(d *decoder, n *yaml.Node, to *DNS) {
		d.sources(n, "rateLimitExempt", &to.RateLimitExempt, "list the resolvers that ask for many clients, or write rateLimit: -1", "covers everybody")
	}},
})

func (c *DNSCache) decode(d *decoder, n *yaml.Node, key string) {
	objectOf(d, n, key, dnsCacheFields, c)
}

var dnsListenerFields = fieldsOf([]field[DNSListener]{
	{"address", func(d *decoder, n *yaml.Node, to *DNSListener) {
		d.at.dns.listeners[len(d.at.dns.listeners)-1] = n
		d.dnsAddress(n, to)
	}},
	{"view", func(d *decoder, n *yaml.Node, to *DNSListener) {
		if s, ok := d.text(n, "view"); ok {
			to.View = s
			d.at.dns.views[len(d.at.dns.views)-1] = n
		}
	}},
})

var dnsForwardFields = fieldsOf([]field[DNSForward]{
	{"zone", func(d *decoder, n *yaml.Node, to *DNSForward) {
		d.at.dns.forward[len(d.at.dns.forward)-1] = n
		to.Zone, _ = d.zone(n)
	}},
	{"upstreams", func(d *decoder, n *yaml.Node, to *DNSForward) { d.upstreams(n, &to.Upstreams) }},
})

var dnsCacheFields = fieldsOf([]field[DNSCache]{
	{"size", func(d *decoder, n *yaml.Node, to *DNSCache) {
		s, ok := d.text(n, "size")
		if !ok {
			return
		}
		size, err := parseSize(s, leastCache)
		if err != nil {
			d.errorf(n, "write it as 32MiB", "size: %v", err)
			return
		}
		to.Size = size
	}},
})

// leastCache is the least size of a cache that is accepted.
const leastCache = 1 << 20

func (d *decoder) dns(n *yaml.Node, c *Config) {
	d.at.dns.node = n
	c.DNS = defaultDNS()
	objectOf(d, n, "dns", dnsFields, c.DNS)
	d.need(n, "dns", "listen")
}

// dnsAddress reads "udp://:53", and for HTTPS a path.
func (d *decoder) dnsAddress(n *yaml.Node, to *DNSListener) {
	const hint = "write udp://:53, tcp://:53, tls://:853 or https://:443/dns-query"
	s, ok := d.text(n, "an address")
	if !ok {
		return
	}
	transport, address, found := strings.Cut(s, "://")
	if !found || !slices.Contains(DNSTransports, transport) {
		d.errorf(n, hint, "address %q must begin with udp://, tcp://, tls:// or https://", clip(s))
		return
	}
	address, path, slash := strings.Cut(address, "/")
	if slash && (transport != "https" || path != "dns-query") {
		d.errorf(n, hint, "address %q: the only path is /dns-query, by HTTPS", clip(s))
		return
	}
	inner := *n
	inner.Value = address
	if d.listenAddress(&inner, "address", &to.Address); to.Address != "" {
		to.Transport = transport
	}
}

// zones reads a list of zones, and where they stand.
func (d *decoder) zones(n *yaml.Node, what string, to *[]string, at *[]*yaml.Node) {
	d.list(n, what, func(n *yaml.Node) {
		z, ok := d.zone(n)
		switch {
		case !ok:
		case slices.Contains(*to, z):
			d.errorf(n, "keep one of them", "zone %q is listed twice", z)
		default:
			*to, *at = append(*to, z), append(*at, n)
		}
	})
}

// zone reads the name of a zone, in lower case and without a dot at its end.
func (d *decoder) zone(n *yaml.Node) (string, bool) {
	s, ok := d.text(n, "a zone")
	if !ok {
		return "", false
	}
	name, c := parseName(strings.TrimSuffix(s, "."))
	if c != nil {
		hint := c.hint
		if s == "." || s == "*" {
			hint = "write upstreams for all other names"
		}
		d.errorf(n, hint, "zone %q: %s", clip(s), c.msg)
		return "", false
	}
	return name.String(), true
}

// upstreams reads a list of "ADDRESS[:PORT]" and "tls://ADDRESS[:PORT][#NAME]".
func (d *decoder) upstreams(n *yaml.Node, to *[]DNSUpstream) {
	d.list(n, "upstreams", func(n *yaml.Node) {
		s, ok := d.text(n, "an upstream")
		if !ok {
			return
		}
		u, c := parseUpstream(s)
		switch {
		case c != nil:
			d.errorf(n, c.hint, "upstream %q: %s", clip(s), c.msg)
		case slices.Contains(*to, u):
			d.errorf(n, "keep one of them", "upstream %q is listed twice", clip(s))
		default:
			*to = append(*to, u)
			d.at.dns.upstreams = append(d.at.dns.upstreams, n)
			d.at.dns.addresses = append(d.at.dns.addresses, u.Address)
		}
	})
	if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
		d.errorf(n, "list the resolvers to ask: [192.0.2.53]", "upstreams is empty")
	}
}

func parseUpstream(s string) (u DNSUpstream, c *complaint) {
	const hint = "write 192.0.2.53, 192.0.2.53:5353 or tls://192.0.2.53:853#dns.example.com"
	rest, secure := strings.CutPrefix(s, "tls://")
	rest, name, named := strings.Cut(rest, "#")
	if strings.Contains(rest, "://") || strings.Contains(rest, "/") {
		return u, complain(hint, "a resolver is an address, or tls:// and an address")
	}
	port := uint16(53)
	if u.TLS = secure; secure {
		port = 853
	}
	if named {
		if !secure {
			return u, complain(hint, "a name is checked against a certificate, and without tls:// there is none")
		}
		n, c := parseName(name)
		if c != nil {
			return u, c
		}
		u.Name = n.String()
	}
	host, given := rest, uint16(0)
	if a, err := netip.ParseAddr(rest); err != nil || !a.Is6() {
		if host, given, c = cutPort(rest); c != nil {
			return u, c
		}
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return u, complain(hint, "a resolver must be an IP address")
	}
	if c := destination(a); c != nil {
		return u, c
	}
	u.Address = net.JoinHostPort(a.Unmap().String(), fmt.Sprint(cmp.Or(given, port)))
	return u, nil
}

// sources reads ranges of which none may be everybody.
func (d *decoder) sources(n *yaml.Node, what string, to *[]netip.Prefix, hint, why string) {
	d.list(n, what, func(n *yaml.Node) {
		p, ok := d.cidr(n)
		// The largest ranges that are one party's own: 10.0.0.0/8 and fc00::/7.
		switch {
		case !ok:
		case p.Addr().Is4() && p.Bits() < 8 || p.Addr().Is6() && p.Bits() < 7:
			d.errorf(n, hint, "range %s in %s %s", p, what, why)
		case slices.Contains(*to, p):
			d.errorf(n, "keep one of them", "range %s is listed twice", p)
		default:
			*to = append(*to, p)
		}
	})
}
