package gateway

import (
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"culvert.dev/registry"
)

// A socketKey identifies the socket of a listener.
type socketKey struct {
	udp  bool
	addr netip.Addr
	host string
	port uint16
	name string // of a listener at any free port
	unix registry.UnixSocket

	inherited string // name of a socket of systemd
}

func keyOf(l *registry.Listener) socketKey {
	if l.Unix != nil {
		return socketKey{unix: *l.Unix}
	}
	if l.Inherited != "" {
		return socketKey{inherited: l.Inherited}
	}
	k := socketKey{udp: l.Protocol == registry.UDP || l.Protocol == registry.Datagrams, addr: l.Address, host: l.Host, port: l.Port}
	if l.Port == 0 {
		k.name = l.Name
	}
	return k
}

// conflicts reports whether sockets of k and o may exclude each other: of one port, or of
// one path or one name.
func (k socketKey) conflicts(o socketKey) bool {
	if k.unix.Path != "" || o.unix.Path != "" {
		return k.unix.Path == o.unix.Path
	}
	if k.inherited != "" || o.inherited != "" {
		return k.inherited == o.inherited
	}
	return k.udp == o.udp && k.port == o.port && k.port != 0
}

// portHolder says which part of the gateway has a port, if one does.
func (f *listeners) portHolder(l *registry.Listener) string {
	w := keyOf(l)
	hold := func(a net.Addr) (all, is bool) {
		var ap netip.AddrPort
		switch a := a.(type) {
		case *net.TCPAddr:
			if w.udp {
				return false, false
			}
			ap = a.AddrPort()
		case *net.UDPAddr:
			if !w.udp {
				return false, false
			}
			ap = a.AddrPort()
		}
		one, other := ap.Addr().Unmap(), w.addr.Unmap()
		anywhere := !other.IsValid() || other.IsUnspecified()
		return one != other && !(one.IsUnspecified() && anywhere), ap.Port() == w.port && (one == other || one.IsUnspecified() || anywhere)
	}
	said := func(who string, differs bool) string {
		if differs {
			return who + " has the port at other addresses: all addresses and a single one exclude each other"
		}
		return who + " has it"
	}
	for i, a := range f.g.addrs {
		if differs, is := hold(a); is {
			return said("the configured listener "+f.g.cfg.Listeners[i].Address, differs)
		}
	}
	own := map[string][]net.Addr{"the admin port": f.g.adminPort.addrs(), "a DNS listener": f.g.dns.addrs()}
	if f.g.healthLn != nil {
		own["the health port"] = []net.Addr{f.g.healthLn.Addr()}
	}
	for who, addrs := range own {
		for _, addr := range addrs {
			if differs, is := hold(addr); is {
				return said(who, differs)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.open)) {
		if differs, is := hold(f.open[name].addr()); is {
			if f.open[name].Table().Settings != nil {
				return said("the configured listener "+name, differs)
			}
			return said("listener "+strconv.Quote(name), differs)
		}
	}
	return "another process has it, or a part of this gateway"
}
