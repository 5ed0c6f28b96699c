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
	Listeners []DNSListener `yaml:"listen,required" what:"a listener" empty:"list where to take questions: [udp://:53, tcp://:53]"`
	Files     KeyFiles      `yaml:"tls"` // of Certificate

	// Zones are those that the server answers itself; empty means the mesh's and
	// svc.clusterset.local. The table's answers have TTL.
	Zones       []string      `yaml:"zones" what:"a zone" as:"dnsZone" unique:"zone" empty:"leave the key out for the mesh's"`
	TTL         time.Duration `yaml:"ttl" default:"5s"`
	NegativeTTL time.Duration `yaml:"negativeTTL" default:"5s"`

	// Upstreams are asked for all other names; empty means those of resolv.conf.
	// Forward has zones with others. PrivateZones may have private addresses, beside
	// the zones of Forward.
	Upstreams    []DNSUpstream `yaml:"upstreams" what:"an upstream" as:"upstream" unique:"upstream" empty:"list the resolvers to ask: [192.0.2.53]"`
	Forward      []DNSForward  `yaml:"forward" what:"a zone to forward"`
	PrivateZones []string      `yaml:"privateZones" what:"a zone" as:"dnsZone" unique:"zone"`

	// VIPNetworks are networks whose clients are told the VIPs of services.
	VIPNetworks []string `yaml:"vipNetworks"`

	// UnidentifiedCallers says what conditions of policies on identities are to clients of
	// DNS, which have none: with "deny" nobody meets them, and with "defer" they are left out.
	UnidentifiedCallers string `yaml:"unidentifiedCallers" oneof:"deny defer" default:"deny"`

	// RecursionClients may ask for the names of others.
	RecursionClients []netip.Prefix `yaml:"recursionClients" what:"a range" as:"cidr" unique:"range"`

	// RateLimitExempt are clients to which RateLimit does not apply. RateLimit is how many
	// responses a second a network gets by UDP, and -1 for no limit.
	RateLimitExempt []netip.Prefix `yaml:"rateLimitExempt" what:"a range" as:"cidr" unique:"range"`
	RateLimit       int            `yaml:"rateLimit,limit" default:"1000"`
	Cache           DNSCache       `yaml:"cache"`

	Certificate KeyPair // of the listeners by TLS and HTTPS; zero if there are none
}

// DNSTransports are the transports of a DNSListener.
var DNSTransports = []string{"udp", "tcp", "tls", "https"}

// A DNSListener is an address at which questions are accepted.
type DNSListener struct {
	DNSAddress `yaml:"address,required,short" what:"an address" as:"dnsAddress"`
	View       string `yaml:"view"` // the network of all who ask here; "" means that of their address
}

// A DNSAddress is a transport, and where it is spoken.
type DNSAddress struct {
	Transport string // of DNSTransports
	Address   string // host:port; no host means every address of this machine
}

func (a DNSAddress) String() string { return a.Transport + "://" + a.Address }

// place is the address as those of the other listeners are written.
func (a DNSAddress) place() string {
	if a.Transport == "udp" {
		return udpPrefix + a.Address
	}
	return a.Address
}

// A DNSUpstream is a resolver to ask.
type DNSUpstream struct {
	Address string // host:port
	TLS     bool   // by TLS, and not in the clear
	Name    string // of its certificate; "" means its address
}

// A DNSForward is a zone that has resolvers of its own.
type DNSForward struct {
	Zone      string        `yaml:"zone,required" what:"a zone" as:"dnsZone"`
	Upstreams []DNSUpstream `yaml:"upstreams,required" what:"an upstream" as:"upstream" unique:"upstream" empty:"list the resolvers to ask: [192.0.2.53]"`
}

// A DNSCache is how much of others' answers is kept, and how long.
type DNSCache struct {
	Size     Memory        `yaml:"size" as:"cacheSize" default:"32MiB"` // of all answers, about
	MinTTL   time.Duration `yaml:"minTTL" default:"1s"`
	MaxTTL   time.Duration `yaml:"maxTTL,min=1s" default:"1h"`
	MaxStale time.Duration `yaml:"maxStale" default:"24h"` // that an answer is served after its time, where there is no better
}

// leastCache is the least size of a cache that is accepted.
const leastCache = 1 << 20

// check finds ranges of clients that are more than one party's own: the largest of those
// are 10.0.0.0/8 and fc00::/7.
func (c *DNS) check(d *decoder, at mapping) {
	for _, list := range []struct {
		key       string
		ranges    []netip.Prefix
		hint, why string
	}{
		{"recursionClients", c.RecursionClients, "list the ranges of your own clients", "would make this an open resolver, for everybody to attack others with"},
		{"rateLimitExempt", c.RateLimitExempt, "list the resolvers that ask for many clients, or write rateLimit: -1", "covers everybody"},
	} {
		for i, p := range list.ranges {
			if p.IsValid() && (p.Addr().Is4() && p.Bits() < 8 || p.Addr().Is6() && p.Bits() < 7) {
				d.errorf(at.item(list.key, i), list.hint, "range %s in %s %s", p, list.key, list.why)
			}
		}
	}
}

// dnsListener returns where the address of an element of listen is.
func (d *decoder) dnsListener(i int) *yaml.Node {
	return mapping{d.root.object("dns").item("listen", i)}.where("address")
}

// parseDNSAddress parses "udp://:53", and for HTTPS a path.
func parseDNSAddress(_, s string) (a DNSAddress, c *complaint) {
	const hint = "write udp://:53, tcp://:53, tls://:853 or https://:443/dns-query"
	transport, address, found := strings.Cut(s, "://")
	if !found || !slices.Contains(DNSTransports, transport) {
		return a, complain(hint, "address %q must begin with udp://, tcp://, tls:// or https://", clip(s))
	}
	address, path, slash := strings.Cut(address, "/")
	if slash && (transport != "https" || path != "dns-query") {
		return a, complain(hint, "address %q: the only path is /dns-query, by HTTPS", clip(s))
	}
	if _, c := parseListenAddress("address", address); c != nil {
		return a, c
	}
	return DNSAddress{transport, address}, nil
}

// parseDNSZone parses the name of a zone, in lower case and without a dot at its end.
func parseDNSZone(_, s string) (string, *complaint) {
	name, c := parseName(strings.TrimSuffix(s, "."))
	if c == nil {
		return name.String(), nil
	}
	hint := c.hint
	if s == "." || s == "*" {
		hint = "write upstreams for all other names"
	}
	return "", complain(hint, "zone %q: %s", clip(s), c.msg)
}

func parseDNSUpstream(_, s string) (DNSUpstream, *complaint) {
	u, c := parseUpstream(s)
	if c != nil {
		return DNSUpstream{}, complain(c.hint, "upstream %q: %s", clip(s), c.msg)
	}
	return u, nil
}

// parseUpstream parses "ADDRESS[:PORT]" and "tls://ADDRESS[:PORT][#NAME]".
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
