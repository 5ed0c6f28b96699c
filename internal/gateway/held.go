package gateway

import (
	"errors"
	"net"
	"net/netip"
	"slices"
)

// heldByOthers reports whether a socket that could not be opened because of err, as its port
// is in use, could not be opened either if those of this process at own were closed. They
// are not to be closed then: each time their clients would be refused for a moment.
func heldByOthers(err error, own ...net.Addr) bool {
	op, ok := errors.AsType[*net.OpError](err)
	if !ok || !inUse(err) {
		return false
	}
	wanted, udp, ok := socketAddress(op.Addr)
	if !ok {
		return false
	}
	closing := make([]netip.Addr, 0, len(own))
	for _, a := range own {
		if ap, isUDP, ok := socketAddress(a); ok && isUDP == udp && ap.Port() == wanted.Port() {
			closing = append(closing, ap.Addr())
		}
	}
	return slices.ContainsFunc(boundAddresses(udp, wanted.Port()), func(a netip.Addr) bool {
		overlaps := a == wanted.Addr() || a.IsUnspecified() || wanted.Addr().IsUnspecified()
		return overlaps && !slices.Contains(closing, a)
	})
}

// socketAddress returns the address of a socket; no IP is every address.
func socketAddress(a net.Addr) (ap netip.AddrPort, udp, ok bool) {
	switch a := a.(type) {
	case *net.TCPAddr:
		ap = a.AddrPort()
	case *net.UDPAddr:
		ap, udp = a.AddrPort(), true
	default:
		return ap, false, false
	}
	addr := ap.Addr().Unmap().WithZone("")
	if !addr.IsValid() {
		addr = netip.IPv6Unspecified()
	}
	return netip.AddrPortFrom(addr, ap.Port()), udp, true
}
