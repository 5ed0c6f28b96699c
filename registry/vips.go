package registry

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/tunnel"
)

// A VIPRequest is a service that wants an address of its own.
type VIPRequest struct {
	Service string // the service's name, for people

	// Keys identify the service in all tables, the best first: "CLUSTER/NAMESPACE/SERVICE" if
	// it has an ID, without the cluster if it is of several, and each of its names, with a port
	// if another service has the name too. No two services of a table share a key.
	Keys []string
}

// A VIP is the addresses of a service of its own, one of each family. An address that it does
// not have is the zero Addr.
type VIP struct {
	Key    string // one of VIPRequest.Keys
	V4, V6 netip.Addr
}

// vips are the VIPs of a table.
type vips struct {
	list      []VIP                // in the order of services
	claims    []claims             // to the ports of each, at both addresses
	byService map[int32]int32      // indices in list and claims
	byAddr    map[netip.Addr]int32 // indices of services
}

// VIPRequests returns the services that want an address of their own: those that are exposed
// and have VIP, and that are identified by an ID or by a name that is no wildcard.
func (t *Table) VIPRequests() []VIPRequest {
	var all []VIPRequest
	t.eachVIPRequest(func(_ int32, w VIPRequest) { all = append(all, w) })
	return all
}

func (t *Table) eachVIPRequest(each func(i int32, w VIPRequest)) {
	if t == nil {
		return
	}
	known := map[ID]bool{}
	owners := map[tunnel.Name]int32{} // of names that several services have
	owner := func(name tunnel.Name) int32 {
		c := t.exact[name]
		if len(c) == 1 {
			return c[0].service
		}
		if _, ok := owners[name]; !ok && len(c) > 0 {
			owners[name] = slices.MinFunc(c, func(a, b claim) int { return cmp.Compare(a.service, b.service) }).service
		}
		return owners[name]
	}
	for i := range t.services {
		e := &t.services[i]
		if !e.VIP || !e.Exposed {
			continue
		}
		w := VIPRequest{Service: e.Name}
		if t.aloneInSet(e) { // its address is that of the cluster set, and stays when others join
			w.Keys = append(w.Keys, e.ID.namespace()+"/"+e.ID.Service)
		}
		if e.ID != (ID{}) && !known[e.ID] {
			known[e.ID] = true
			key := e.ID.namespace() + "/" + e.ID.Service
			if e.ID.Cluster != "" { // else it is of the cluster set
				key = e.ID.Cluster + "/" + key
			}
			w.Keys = append(w.Keys, key)
		}
		for _, p := range e.Names {
			if _, ok := t.exact[p.Suffix]; !ok || p.Wildcard {
				continue
			}
			if owner(p.Suffix) == e.index {
				w.Keys = append(w.Keys, p.Suffix.String())
				continue
			}
			for _, port := range orAny(e.Ports) {
				if t.claimant(p.Suffix, port) == e.index {
					w.Keys = append(w.Keys, joinPort(p.Suffix.String(), port))
					break
				}
			}
		}
		if len(w.Keys) > 0 {
			each(e.index, w)
		}
	}
}

// aloneInSet reports whether e is the only service with its name in the cluster set.
func (t *Table) aloneInSet(e *serviceEntry) bool {
	if !e.Exported || e.ID == (ID{}) {
		return false
	}
	set, err := e.ID.SetName()
	if err != nil {
		return false
	}
	for _, c := range t.exact[set] {
		if c.service != e.index {
			return false
		}
	}
	return len(t.exact[set]) > 0
}

// SetVIPs returns the addresses of the service named id.SetName, in any view, each
// the zero Addr where it has none.
func (t *Table) SetVIPs(id ID) (v4, v6 netip.Addr) {
	set, err := id.SetName()
	if t == nil || err != nil || len(t.exact[set]) == 0 {
		return netip.Addr{}, netip.Addr{}
	}
	return t.VIPs(int(t.exact[set][0].service))
}

var anyPort = []uint16{0}

// orAny returns the ports that a service with those Ports claims: 0, which is any, for none.
func orAny(ports []uint16) []uint16 {
	if len(ports) == 0 {
		return anyPort
	}
	return ports
}

// VIPs returns the VIP of the i-th of Services, each address the zero Addr if it has none. It
// does not allocate.
func (t *Table) VIPs(i int) (v4, v6 netip.Addr) {
	if t == nil || t.vips == nil {
		return netip.Addr{}, netip.Addr{}
	}
	at, ok := t.vips.byService[int32(i)]
	if !ok {
		return netip.Addr{}, netip.Addr{}
	}
	v := &t.vips.list[at]
	return v.V4, v.V6
}

// ByVIP returns the index in Services of the service with a VIP. It does not depend on who may
// see the service. It does not allocate.
func (t *Table) ByVIP(a netip.Addr) (i int, ok bool) {
	if t == nil || t.vips == nil {
		return 0, false
	}
	at, ok := t.vips.byAddr[normalAddr(a)]
	return int(at), ok
}

// AllVIPs returns all VIPs, in the order of their services. The slice must not be changed.
func (t *Table) AllVIPs() []VIP {
	if t == nil || t.vips == nil {
		return nil
	}
	return t.vips.list
}

// findVIP is findAddr for a VIP.
func (t *Table) findVIP(a netip.Addr, req *tunnel.Request) (f match, refusal *tunnel.Error, ok bool) {
	i, ok := t.ByVIP(a)
	if !ok {
		return match{}, nil, false
	}
	f, refusal = t.pick(nameMatch{claims: t.vips.claims[t.vips.byService[int32(i)]]}, req)
	f.vip = true
	return f, refusal, true
}

// assignVIPs sets the VIPs to those of list whose services are in t, without addresses that a
// service lists as its own.
func (t *Table) assignVIPs(list []VIP) {
	t.vips = nil
	if len(list) == 0 {
		return
	}
	given := make(map[string]VIP, len(list))
	for _, v := range list {
		given[v.Key] = v
	}
	next := &vips{byService: make(map[int32]int32, len(list)), byAddr: make(map[netip.Addr]int32, 2*len(list))}
	free := func(a netip.Addr) netip.Addr {
		a = normalAddr(a)
		_, listed := t.byAddress[a]
		if _, twice := next.byAddr[a]; listed || twice {
			return netip.Addr{}
		}
		return a
	}
	t.eachVIPRequest(func(i int32, w VIPRequest) {
		for _, k := range w.Keys {
			v, ok := given[k]
			if !ok {
				continue
			}
			v.V4, v.V6 = free(v.V4), free(v.V6)
			for _, a := range [...]netip.Addr{v.V4, v.V6} {
				if a.IsValid() {
					next.byAddr[a] = i
				}
			}
			if v.V4.IsValid() || v.V6.IsValid() {
				next.byService[i] = int32(len(next.list))
				next.list = append(next.list, v)
				next.claims = append(next.claims, t.services[i].vipClaims())
			}
			return
		}
	})
	if len(next.list) > 0 {
		t.vips = next
	}
}

// vipClaims returns the claims of e at its VIP.
func (e *serviceEntry) vipClaims() claims {
	ports := orAny(e.Ports)
	c := make(claims, len(ports))
	for i, port := range ports {
		c[i] = claim{port: port, service: e.index, pattern: "vip"}
	}
	slices.SortFunc(c, func(a, b claim) int { return cmp.Compare(a.port, b.port) })
	return c
}

// AssignVIPs sets what VIPs and ByVIP return from now on, for later tables too, as far as the
// services are among VIPRequests. It returns the current table, which is a new one if something
// has changed. It returns nil before the first table.
func (r *Registry) AssignVIPs(list []VIP) *Table {
	return r.change(func(next *Table) bool {
		before := next.AllVIPs()
		next.assignVIPs(list)
		return !slices.Equal(next.AllVIPs(), before)
	})
}

// UsedAddresses returns the parts of a range that are in use: ranges of networks, except those
// of all addresses, gateways, and the addresses and endpoints of services.
func (t *Table) UsedAddresses(of netip.Prefix) []netip.Prefix {
	if t == nil {
		return nil
	}
	var all []netip.Prefix
	for p := range t.prefixes.byPrefix {
		// A network of all addresses means the rest of the world.
		if p.Overlaps(of) && p.Bits() > 0 {
			all = append(all, p)
		}
	}
	add := func(a netip.Addr) {
		if a = normalAddr(a); of.Contains(a) {
			all = append(all, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	for i := range t.networks {
		for _, g := range t.networks[i].Gateways {
			add(g.Address.Addr)
			add(g.Public.Addr)
		}
	}
	occupy := func(e *Service) {
		for _, a := range e.Addresses {
			add(a)
		}
		if len(e.Via) > 0 { // behind a Via the address is one of another network
			return
		}
		for _, ep := range e.Endpoints {
			add(ep.Addr)
		}
	}
	for i := range t.services {
		occupy(t.services[i].Service)
	}
	for s := range t.Backends() {
		occupy(s)
	}
	return all
}

// reservedRanges are ranges with a special meaning to hosts or to the gateway.
var reservedRanges = []struct {
	prefix netip.Prefix
	why    string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "addresses of this host"},
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local addresses"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("::/16"), "loopback, and forms of IPv4"},
	{netip.MustParsePrefix("64:ff9b::/32"), "NAT64, a form of IPv4"},
	{netip.MustParsePrefix("2001::/32"), "Teredo, a form of IPv4"},
	{netip.MustParsePrefix("2002::/16"), "6to4, a form of IPv4"},
	{netip.MustParsePrefix("fe80::/10"), "link-local addresses"},
	{netip.MustParsePrefix("fec0::/10"), "site-local addresses (RFC 3879)"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
}

// CheckVIPRange returns nil if VIPs may be of a range, and why not otherwise.
func CheckVIPRange(p netip.Prefix) error {
	most := 126
	if p.Addr().Is4() {
		most = 30
	}
	switch {
	case !p.IsValid() || p != p.Masked() || p.Addr().Is4In6():
		return errors.New("it is not an address range")
	case p.Bits() > most:
		return fmt.Errorf("it is too small: it can have at most %d bits, /%d", most, most)
	}
	for _, n := range reservedRanges {
		if p.Overlaps(n.prefix) {
			return fmt.Errorf("%s are %s", n.prefix, n.why)
		}
	}
	return nil
}

// maxVIPs is the largest number of VIPs of a range: a quarter of a /64 of IPv6, so that the
// number fits a uint64.
const maxVIPs = 1 << 62

// VIPsIn returns the number of addresses of a range that can be VIPs. The first one is left out,
// which is that of the network, or of its routers (RFC 4291 section 2.6.1), and of IPv4 the last
// one, which is for broadcast.
func VIPsIn(p netip.Prefix) uint64 {
	host := p.Addr().BitLen() - p.Bits()
	switch {
	case p.Addr().Is4():
		return 1<<host - 2
	case host <= 62:
		return 1<<host - 1
	}
	return maxVIPs
}

// DefaultVIPRanges returns the ranges for the VIPs of a cluster that names
// none: 240.0.0.0/4, which is not in use (RFC 1112 section 4), and a /64 of a
// ULA (RFC 4193) that follows from the cluster's name, so that two clusters
// differ.
func DefaultVIPRanges(cluster string) []netip.Prefix {
	h := sha256.Sum256([]byte("culvert vips " + strings.ToLower(cluster)))
	ula := [16]byte{0xfd} // and 40 bits of a hash, a subnet of 16 bits, 64 of the host
	copy(ula[1:6], h[:])
	return []netip.Prefix{netip.MustParsePrefix("240.0.0.0/4"), netip.PrefixFrom(netip.AddrFrom16(ula), 64)}
}
