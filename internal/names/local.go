package names

import (
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/dns"
	"culvert.dev/tunnel"
)

// A Local answers programs of this host that are to reach services through this process. A
// service has its virtual addresses, or those of Addrs, and never those of its endpoints; one
// with neither does not exist.
type Local struct {
	// Addrs returns where this host reaches a service by a name. May be nil.
	Addrs func(tunnel.Name) []netip.Addr

	// Any says that Addrs is asked for names that no service has, too: a service has every name.
	Any bool

	// Own reports whether a name is one by which this process reaches others. Such names are
	// left to other resolvers. May be nil.
	Own func(tunnel.Name) bool
}

// local is answer for l.
func (t *Table) local(q dns.Question, a *dns.Answer, l *Local) {
	name, err := tunnel.ParseName(q.Name)
	if err != nil || neverLocal(q.Name) {
		return
	}
	if l.Own != nil && l.Own(name) {
		a.Status = dns.Unknown
		return
	}
	locations, ok := t.table.Locations(name, q.View)
	client := t.viewer(&q, name)
	var addrs []netip.Addr
	for i := range locations {
		p := &locations[i]
		if client != nil && !t.table.Sees(client, p) || p.Single || p.GatewayLabel != "" {
			continue
		}
		for _, v := range p.VIPs {
			if v.IsValid() && !slices.Contains(addrs, v) {
				addrs = append(addrs, v)
			}
		}
	}
	if (ok || l.Any) && len(addrs) == 0 && l.Addrs != nil {
		addrs = l.Addrs(name)
	}
	switch {
	case len(addrs) > 0:
		a.Status = dns.Exists
		for _, addr := range addrs {
			a.Addrs = append(a.Addrs, dns.Addr{Addr: addr})
		}
	case !ok && t.table.HasNamesBelow(q.Name, q.View, client):
		a.Status = dns.Above
	}
}

// neverLocal reports whether a name is of the host's own network, where others answer it by
// LLMNR or mDNS (RFC 4795, RFC 6762), or one of addresses.
func neverLocal(name string) bool {
	top := name[strings.LastIndexByte(name, '.')+1:]
	switch top {
	case name, "local", "localhost", "arpa", "invalid", "onion":
		return true
	}
	return false
}
