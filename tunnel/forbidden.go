package tunnel

import (
	"net/netip"
	"slices"
)

// never lists what a gateway never dials unless a route writes the address
// itself: this host, its links, and the services that hand out a cloud
// machine's credentials.
var never = []struct {
	prefix netip.Prefix
	why    string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "this host (RFC 1122 section 3.2.1.3)"}, // Linux connects 0.0.0.0 to loopback
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local, where clouds keep their metadata service"},
	{netip.MustParsePrefix("100.100.100.200/32"), "a cloud's metadata service"}, // Alibaba
	{netip.MustParsePrefix("168.63.129.16/32"), "a cloud's metadata service"},   // Azure
	{netip.MustParsePrefix("192.0.0.192/32"), "a cloud's metadata service"},     // Oracle
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("255.255.255.255/32"), "broadcast"},
	{netip.MustParsePrefix("::/128"), "unspecified"},
	{netip.MustParsePrefix("::1/128"), "loopback"},
	{netip.MustParsePrefix("fe80::/10"), "link-local"},
	{netip.MustParsePrefix("fec0::/10"), "site-local (RFC 3879)"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
	{netip.MustParsePrefix("fd00:ec2::254/128"), "a cloud's metadata service"}, // AWS
	{netip.MustParsePrefix("fd00:ec2::23/128"), "a cloud's metadata service"},  // AWS, credentials of EKS pods
	{netip.MustParsePrefix("fd20:ce::254/128"), "a cloud's metadata service"},  // Google
}

// An embedding is a range of IPv6 addresses that carry IPv4 ones: what such an
// address reaches is what the IPv4 address reaches.
type embedding struct {
	prefix netip.Prefix
	name   string
	v4     func(b [16]byte) []netip.Addr
}

var embeddings = []embedding{
	{netip.MustParsePrefix("::ffff:0:0/96"), "IPv4-mapped", last4},
	{netip.MustParsePrefix("::ffff:0:0:0/96"), "IPv4-translated", last4},
	{netip.MustParsePrefix("::/96"), "IPv4-compatible", last4},
	{netip.MustParsePrefix("64:ff9b::/96"), "NAT64", last4},
	{netip.MustParsePrefix("2002::/16"), "6to4", func(b [16]byte) []netip.Addr {
		return []netip.Addr{four(b[2], b[3], b[4], b[5])}
	}},
	// RFC 4380 section 4: the server in clear, the client with its bits flipped.
	{netip.MustParsePrefix("2001::/32"), "Teredo", func(b [16]byte) []netip.Addr {
		return []netip.Addr{four(b[4], b[5], b[6], b[7]), four(^b[12], ^b[13], ^b[14], ^b[15])}
	}},
}

// local64 is NAT64 with a prefix of the site's own choice (RFC 8215). How long
// that prefix is can't be seen, so every place where RFC 6052 section 2.2 may
// put the IPv4 address is looked at.
var local64 = netip.MustParsePrefix("64:ff9b:1::/48")

// Forbidden reports whether a is an address the gateway never dials on a
// client's or a DNS server's word, and why: loopback, link-local, metadata,
// unspecified, multicast and broadcast addresses, and the zero Addr. An IPv6
// address that stands for an IPv4 one (mapped, compatible, translated, 6to4,
// Teredo, NAT64) is judged by that one. A zone does not matter.
//
// Private ranges are not on the list: what is behind a gateway is private.
// The gateway's own listeners are not either; a Guard knows them.
func Forbidden(a netip.Addr) (why string, forbidden bool) {
	if !a.IsValid() {
		return "no address", true
	}
	a = a.WithZone("")
	for _, n := range never {
		if n.prefix.Contains(a) {
			return n.why, true
		}
	}
	if !a.Is6() {
		return "", false
	}
	name, embedded := embeddedIn(a)
	for _, v4 := range embedded {
		if why, bad := Forbidden(v4); bad {
			return name + " form of " + v4.String() + ": " + why, true
		}
	}
	return "", false
}

// Embedded returns the IPv4 addresses that a stands for, or may stand for:
// whoever judges addresses judges those, too. Most stand for none.
func Embedded(a netip.Addr) []netip.Addr {
	_, embedded := embeddedIn(a)
	return embedded
}

func embeddedIn(a netip.Addr) (name string, embedded []netip.Addr) {
	if !a.Is6() {
		return "", nil
	}
	a = a.WithZone("")
	for _, e := range embeddings {
		if e.prefix.Contains(a) {
			return e.name, e.v4(a.As16())
		}
	}
	if local64.Contains(a) {
		return "NAT64", readings64(a.As16())
	}
	return "", nil
}

// readings64 are the readings of b, which has a prefix of the site's own choice.
// One in 0.0.0.0/8 is most likely padding of another one, and counts only where
// all of them are.
func readings64(b [16]byte) []netip.Addr {
	all := []netip.Addr{
		four(b[6], b[7], b[9], b[10]),  // a prefix of 48 bits; octet 8 is reserved
		four(b[7], b[9], b[10], b[11]), // 56
		four(b[9], b[10], b[11], b[12]),
		four(b[12], b[13], b[14], b[15]),
	}
	if real := slices.DeleteFunc(slices.Clone(all), func(v4 netip.Addr) bool { return v4.As4()[0] == 0 }); len(real) > 0 {
		return real
	}
	return all
}

func last4(b [16]byte) []netip.Addr { return []netip.Addr{four(b[12], b[13], b[14], b[15])} }

func four(a, b, c, d byte) netip.Addr { return netip.AddrFrom4([4]byte{a, b, c, d}) }
