package file

import (
	"net"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"culvert.dev/registry"
)

// checkLoops finds endpoints that are the gateway itself.
func (d *decoder) checkLoops() {
	var ours []place
	for i, l := range d.cfg.Listeners {
		if l.Address != "" && !l.UDP() { // endpoints may be of TCP, of UDP or of both
			ours = append(ours, place{l.Address, d.listener(i).value("address")})
		}
	}
	if d.cfg.Admin != "" && !isSocket(d.cfg.Admin) {
		ours = append(ours, place{d.cfg.Admin, d.root.value("admin")})
	}
	if d.cfg.DNS != nil {
		for i, l := range d.cfg.DNS.Listeners {
			if l.Address != "" && l.Transport != "udp" {
				ours = append(ours, place{l.Address, d.dnsListener(i)})
			}
		}
	}
	for i := range d.cfg.Services {
		s, at := d.cfg.Services[i], d.services[i]
		if at.node == nil || len(s.Via) > 0 {
			continue // it was read before, beside the same listeners; or its endpoints are seen from elsewhere
		}
		for j, ep := range s.Endpoints {
			if len(ep.Hops()) > 0 {
				continue
			}
			ports := s.Ports
			if ep.Port != 0 {
				ports = []uint16{ep.Port}
			}
			d.leadsToOwnPort(ep, ports, at.item("endpoints", j))
			for _, p := range ours {
				if leadsTo(ep, ports, p.address) {
					d.errorf(at.item("endpoints", j), "write where the service itself listens", "endpoint %q leads back to this gateway, which listens at %s (line %d)", ep, p.address, p.node.Line)
					break
				}
			}
		}
	}
}

// leadsTo reports whether an endpoint is the listening address.
func leadsTo(ep registry.Endpoint, ports []uint16, address string) bool {
	if !slices.Contains(ports, listenPort(address)) {
		return false
	}
	addrs := []netip.Addr{ep.Addr}
	if !ep.Addr.IsValid() {
		if ep.Host != "localhost" {
			return false // what DNS says is for the guard to judge
		}
		addrs = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	}
	for _, a := range addrs {
		// Loopback is ours with any listening address that is not specific.
		if slices.Contains(listenAddrs(address), a) || everywhere(address) && a.IsLoopback() {
			return true
		}
	}
	return false
}

// overlap reports whether two listening addresses cannot both be open.
func overlap(a, b string) bool {
	if isSocket(a) || isSocket(b) || isInherited(a) || isInherited(b) {
		return a == b || path.Clean(a) == path.Clean(b)
	}
	if isUDP(a) != isUDP(b) || listenPort(a) != listenPort(b) {
		return false
	}
	if everywhere(a) || everywhere(b) {
		return true
	}
	for _, addr := range listenAddrs(a) {
		if slices.Contains(listenAddrs(b), addr) {
			return true
		}
	}
	return false
}

func listenPort(address string) uint16 {
	_, digits, _ := net.SplitHostPort(strings.TrimPrefix(address, udpPrefix))
	port, _ := strconv.ParseUint(digits, 10, 16)
	return uint16(port)
}

// everywhere reports whether address is that of every interface.
func everywhere(address string) bool {
	host, _, _ := net.SplitHostPort(strings.TrimPrefix(address, udpPrefix))
	a, err := netip.ParseAddr(host)
	return host == "" || err == nil && a.Unmap().IsUnspecified()
}

// listenAddrs returns the specific addresses of a listening address.
func listenAddrs(address string) []netip.Addr {
	host, _, _ := net.SplitHostPort(strings.TrimPrefix(address, udpPrefix))
	if host == "localhost" {
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return nil
	}
	return []netip.Addr{a.Unmap()}
}
