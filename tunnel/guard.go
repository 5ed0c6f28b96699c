package tunnel

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// A Guard decides which addresses may be dialed. Everything that dials asks
// it, with the address actually dialed: a name can't resolve its way around
// it.
//
// It refuses this gateway's own listeners (Loop) and admin port (Prohibited)
// always, and what Forbidden lists unless the route names the address itself.
// A nil Guard refuses what Forbidden lists.
type Guard struct {
	mu    sync.RWMutex            // guards what follows
	own   map[uint16][]own        // by port: a gateway may have thousands
	local map[netip.Addr]struct{} // the addresses of this host
	seen  time.Time               // when local was read
}

type own struct {
	addr netip.AddrPort // an unspecified address stands for every one of this host
	why  Reason
	udp  bool // the address is one of UDP and not of TCP
}

// localAge is how old the list of this host's addresses may be.
const localAge = 5 * time.Second

// OwnListener makes addr, a listener of this gateway, refused as Loop. It is
// for addresses of TCP and of UDP, which are told apart.
func (g *Guard) OwnListener(addr net.Addr) { g.add(addr, Loop) }

// OwnAdmin makes addr, an admin port of this gateway, refused as Prohibited.
func (g *Guard) OwnAdmin(addr net.Addr) { g.add(addr, Prohibited) }

// Disown takes back one OwnListener or OwnAdmin of addr.
func (g *Guard) Disown(addr net.Addr) {
	ap, udp, ok := ownAddr(addr)
	if !ok {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	have := g.own[ap.Port()]
	i := slices.IndexFunc(have, func(o own) bool { return o.addr == ap && o.udp == udp })
	if i < 0 {
		return
	}
	if len(have) == 1 {
		delete(g.own, ap.Port())
		return
	}
	g.own[ap.Port()] = slices.Concat(have[:i], have[i+1:]) // somebody may be reading have
}

func (g *Guard) add(addr net.Addr, why Reason) {
	ap, udp, ok := ownAddr(addr)
	if !ok {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.own == nil {
		g.own = make(map[uint16][]own)
	}
	g.own[ap.Port()] = append(g.own[ap.Port()], own{ap, why, udp})
}

func ownAddr(addr net.Addr) (ap netip.AddrPort, udp, ok bool) {
	switch a := addr.(type) {
	case *net.TCPAddr:
		ap = a.AddrPort()
	case *net.UDPAddr:
		ap, udp = a.AddrPort(), true
	default:
		return ap, false, false
	}
	return netip.AddrPortFrom(ap.Addr().Unmap().WithZone(""), ap.Port()), udp, true
}

// Check returns nil if addr may be dialed by TCP and an *Error with the Reason
// otherwise. named says that the route names this very address.
func (g *Guard) Check(addr netip.AddrPort, named bool) error { return g.check(addr, named, false) }

// CheckUDP is Check for an address of UDP.
func (g *Guard) CheckUDP(addr netip.AddrPort, named bool) error { return g.check(addr, named, true) }

func (g *Guard) check(addr netip.AddrPort, named, udp bool) error {
	ip := addr.Addr().Unmap().WithZone("")
	if why := g.isOwn(ip, addr.Port(), udp); why == Loop {
		return Refusef(Loop, "%s is a listener of this gateway", addr)
	} else if why != "" {
		return Refusef(why, "%s is the admin port of this gateway", addr)
	}
	if named {
		return nil
	}
	if why, bad := Forbidden(ip); bad {
		return Refusef(Prohibited, "%s is %s: a route must name it to reach it", addr, why)
	}
	return nil
}

func (g *Guard) isOwn(ip netip.Addr, port uint16, udp bool) Reason {
	if g == nil {
		return ""
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	for _, o := range g.own[port] {
		if o.udp != udp {
			continue
		}
		if o.addr.Addr() == ip || o.addr.Addr().IsUnspecified() && (ip.IsLoopback() || ip.IsUnspecified() || g.isLocal(ip)) ||
			ip.IsUnspecified() && o.addr.Addr().IsLoopback() {
			return o.why
		}
	}
	return ""
}

// isLocal reports whether ip is an address of this host. The caller holds mu
// for reading; it is given up while the list is read.
func (g *Guard) isLocal(ip netip.Addr) bool {
	if time.Since(g.seen) > localAge {
		g.mu.RUnlock()
		addrs := hostAddrs()
		g.mu.Lock()
		if addrs != nil { // without descriptors it can't be read: the last one stands
			g.local = addrs
		}
		g.seen = time.Now()
		g.mu.Unlock()
		g.mu.RLock()
	}
	_, ok := g.local[ip]
	return ok
}

func hostAddrs() map[netip.Addr]struct{} {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	m := make(map[netip.Addr]struct{}, len(addrs))
	for _, a := range addrs {
		if p, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(p.IP); ok {
				m[ip.Unmap()] = struct{}{}
			}
		}
	}
	return m
}

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
