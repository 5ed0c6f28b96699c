package names

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"culvert.dev/dns"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A Source serves a registry's table as dns.Names. It must not be copied.
type Source struct {
	Registry *registry.Registry

	// VIPs reports whether clients in a network get the virtual addresses of services
	// in place of their endpoints': something there accepts connections to them. Nil
	// means that no client gets them.
	VIPs func(network string) bool

	// DeferIdentity reports whether conditions of policies on identities are left out, where
	// policies decide who may see services: clients of DNS have none. Nil means that they
	// count, and nobody meets them.
	DeferIdentity func() bool

	// Local returns what programs of this host are told in place of the rest; a nil function,
	// and nil, mean that clients are told where services are.
	Local func() *Local

	current atomic.Pointer[Table]
}

// Names returns the present table, nil before the first one. It is dns.Server.Names.
func (s *Source) Names() dns.Names {
	partial := s.Registry.PendingSources() > 0 // read before the table, which then has all that was reported
	t := s.Registry.Table()
	if t == nil {
		return nil
	}
	if n := s.current.Load(); n != nil && n.table == t && n.partial == partial {
		return n
	}
	n := &Table{table: t, source: s, loaded: time.Now(), partial: partial}
	s.current.Store(n)
	return n
}

// A Table answers from one table of the registry.
type Table struct {
	table   *registry.Table
	source  *Source
	loaded  time.Time
	partial bool // a source has not reported yet
}

// Updated implements dns.Names: it is now, unless a source is lost.
func (t *Table) Updated() time.Time {
	if source, since, _ := t.source.Registry.Stale(); source != "" {
		return since
	}
	return t.loaded
}

// version is that of the specification of names in the cluster set.
var version = []string{"1.0.0"}

// Answer implements dns.Names. While a source has not reported yet, an absent name is
// unknown.
func (t *Table) Answer(q dns.Question, a *dns.Answer) {
	if t.source.Local != nil {
		if l := t.source.Local(); l != nil {
			t.local(q, a, l)
			return
		}
	}
	t.answer(q, a)
	t.hostKeys(q, a)
	if t.partial && (a.Status == dns.Absent || a.Status == dns.Above) {
		a.Status = dns.Unknown
	}
}

// hostKeys adds by which keys a gateway is known that is called as q asks.
func (t *Table) hostKeys(q dns.Question, a *dns.Answer) {
	name, err := tunnel.ParseName(q.Name)
	if err != nil {
		return
	}
	keys := t.table.HostKeys(name)
	switch {
	case len(keys) == 0:
	case q.Type == dns.TypeSSHFP:
		a.Status = dns.Exists
		for _, k := range keys {
			a.HostKeys = append(a.HostKeys, dns.HostKey{Algorithm: k.Algorithm, Hash: k.Hash, Digest: []byte(k.Digest)})
		}
	case a.Status == dns.Absent:
		a.Status = dns.Above // its addresses are where it is known otherwise
	}
}

func (t *Table) answer(q dns.Question, a *dns.Answer) {
	if q.View == "" {
		q.View, _ = t.table.Network(q.From)
	}
	if q.Name == "dns-version."+registry.Clusterset {
		a.Status, a.Texts = dns.Exists, version
		return
	}
	if addr, ok := parseReverse(q.Name); ok {
		if a.Hosts = t.table.Reverse(addr, q.View, t.viewer(&q, tunnel.Name{})); len(a.Hosts) > 0 {
			a.Status = dns.Exists
		}
		return
	}
	first, second, rest := splitPrefix(q.Name)
	name, err := tunnel.ParseName(rest)
	if err != nil {
		return
	}
	locations, ok := t.table.Locations(name, q.View)
	client := t.viewer(&q, name)
	if ok && client != nil {
		locations = slices.DeleteFunc(locations, func(p registry.Location) bool { return !t.table.Sees(client, &p) })
	}
	if ok && !slices.ContainsFunc(locations, exists) {
		ok = false
	}
	switch {
	case !ok && t.table.HasNamesBelow(rest, q.View, client) && first == "":
		a.Status = dns.Above
	case !ok:
	case first == "":
		t.ownName(q, a, locations)
	case second == "":
		if slices.ContainsFunc(locations, func(p registry.Location) bool { return namedPort(&p, "", first[1:]) != nil }) {
			a.Status = dns.Above
		}
	case second == "_https":
		port, err := strconv.ParseUint(first[1:], 10, 16)
		if at := slices.IndexFunc(locations, func(p registry.Location) bool { return takesPort(&p, uint16(port)) }); err == nil && at >= 0 {
			a.Status = dns.Exists
			t.bind(q, a, locations, rest, uint16(port))
		}
	default:
		t.services(q, a, locations, first[1:], second[1:], rest)
	}
}

// viewer returns the client of q as policies see it, which asks for name; nil where no
// policy decides who may see services.
func (t *Table) viewer(q *dns.Question, name tunnel.Name) *tunnel.Request {
	if !t.table.HasCatalog() {
		return nil
	}
	return Viewer(q.From, name, t.source.DeferIdentity != nil && t.source.DeferIdentity())
}

// Viewer returns a client of DNS at an address as policies see it, which asks for name.
func Viewer(from netip.Addr, name tunnel.Name, deferIdentity bool) *tunnel.Request {
	return &tunnel.Request{Proto: "dns", Name: name, Source: netip.AddrPortFrom(from, 0), DeferIdentity: deferIdentity}
}

// splitPrefix splits the labels with an underscore from a name: "_web._tcp" from
// "_web._tcp.example.com". One of the two alone is returned as the first.
func splitPrefix(name string) (first, second, rest string) {
	if !strings.HasPrefix(name, "_") {
		return "", "", name
	}
	first, rest, _ = strings.Cut(name, ".")
	if !strings.HasPrefix(rest, "_") {
		return first, "", rest
	}
	second, rest, _ = strings.Cut(rest, ".")
	return first, second, rest
}

// ownName answers a question for a service's own name.
func (t *Table) ownName(q dns.Question, a *dns.Answer, locations []registry.Location) {
	a.Status = dns.Exists
	switch q.Type {
	case dns.TypeA, dns.TypeAAAA:
		for i := range locations {
			t.addresses(q, a, &locations[i])
		}
	case dns.TypeHTTPS:
		t.bind(q, a, locations, q.Name, 443)
	}
}

// exists returns false for a headless service without any endpoint: KEP-1645 wants
// NXDOMAIN for its addresses, which holds for all types and for the names below (RFC
// 2308, RFC 8020).
func exists(p registry.Location) bool {
	return !p.Service.Headless || len(p.Service.Endpoints) > 0 || len(p.Gateways) > 0
}

// addresses adds the addresses of p. Unhealthy ones are left out, unless all are.
func (t *Table) addresses(q dns.Question, a *dns.Answer, p *registry.Location) {
	if own := t.ownAddresses(q.View, p); len(own) > 0 {
		for _, v := range own {
			// The locations of a service's ports have the same addresses.
			if !slices.Contains(a.Addrs, dns.Addr{Addr: v}) {
				a.Addrs = append(a.Addrs, dns.Addr{Addr: v})
			}
		}
		return
	}
	all := false
	for {
		for i := range p.Endpoints {
			ep := &p.Endpoints[i]
			t.add(a, ep, cmp.Or(ep.Port, ep.ServicePort, p.Port, firstPort(p)), 0, 0, all)
		}
		for i := range p.Gateways {
			if e := &p.Gateways[i]; e.Gateway.Supports("sni") {
				t.add(a, &e.Address, e.Address.Port, e.Rank, e.Gateway.Weight, all)
			}
		}
		if len(a.Addrs)+len(a.Targets) > 0 || all {
			return
		}
		all = true // all are unhealthy, so none is better than the others
	}
}

// ownAddresses returns the addresses that clients in a network get in place of those of p's
// endpoints and gateways: those that the network has for the name, or else the virtual ones of the
// service. A single endpoint has none, nor has the part of a service behind one gateway.
func (t *Table) ownAddresses(network string, p *registry.Location) (all []netip.Addr) {
	switch {
	case p.Single || p.GatewayLabel != "":
		return nil
	case len(p.SetAddresses) > 0:
		return p.SetAddresses
	case t.source.VIPs == nil || !t.source.VIPs(network):
		return nil
	}
	for _, v := range p.VIPs {
		if v.IsValid() {
			all = append(all, v)
		}
	}
	return all
}

// add adds one address if it is healthy, or with all in any case.
func (t *Table) add(a *dns.Answer, ep *registry.Endpoint, port uint16, rank int, weight uint16, all bool) {
	r := uint8(min(rank, 255))
	if !ep.Addr.IsValid() {
		// An endpoint of several ports has a location for each of them.
		if !slices.ContainsFunc(a.Targets, func(have dns.Target) bool { return ep.ServicePort != 0 && have.Host == ep.Host && have.Rank == r }) {
			a.Targets = append(a.Targets, dns.Target{Host: ep.Host, Port: port, Rank: r, Weight: weight})
		}
		return
	}
	if !all && !t.source.Registry.Healthy(netip.AddrPortFrom(ep.Addr, port)) {
		return
	}
	if slices.ContainsFunc(a.Addrs, func(have dns.Addr) bool { return have.Addr == ep.Addr }) {
		return
	}
	a.Addrs = append(a.Addrs, dns.Addr{Addr: ep.Addr, Rank: r, Weight: weight})
}

func firstPort(p *registry.Location) uint16 {
	if len(p.Service.Ports) == 0 {
		return 0
	}
	return p.Service.Ports[0]
}

// takesPort reports whether p takes a port.
func takesPort(p *registry.Location, port uint16) bool {
	return port != 0 && (p.Port == port || p.Port == 0 && (len(p.Service.Ports) == 0 || slices.Contains(p.Service.Ports, port)))
}

// namedPort returns the port of p with a name and protocol; with the name "", any.
func namedPort(p *registry.Location, name, protocol string) *registry.NamedPort {
	for i := range p.Service.NamedPorts {
		n := &p.Service.NamedPorts[i]
		if (name == "" || n.Name == name) && n.Protocol == protocol && (p.Port == 0 || p.Port == n.Port) {
			return n
		}
	}
	return nil
}

// parseReverse returns the address that a name of in-addr.arpa or ip6.arpa is of: RFC
// 1035 section 3.5, RFC 3596 section 2.5.
func parseReverse(name string) (netip.Addr, bool) {
	if digits, ok := strings.CutSuffix(name, ".in-addr.arpa"); ok {
		var b [4]byte
		for i := range b {
			label, rest, more := strings.Cut(digits, ".")
			n, err := strconv.ParseUint(label, 10, 8)
			if err != nil || more != (i < 3) || len(label) > 1 && label[0] == '0' {
				return netip.Addr{}, false
			}
			b[3-i], digits = byte(n), rest
		}
		return netip.AddrFrom4(b), true
	}
	digits, ok := strings.CutSuffix(name, ".ip6.arpa")
	if !ok || len(digits) != 63 {
		return netip.Addr{}, false
	}
	var b [16]byte
	for i := range 32 {
		n, err := strconv.ParseUint(digits[2*i:2*i+1], 16, 8)
		if err != nil || i < 31 && digits[2*i+1] != '.' {
			return netip.Addr{}, false
		}
		b[15-i/2] |= byte(n) << (4 * (i % 2))
	}
	return netip.AddrFrom16(b), true
}
