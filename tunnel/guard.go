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
