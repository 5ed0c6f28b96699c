package udp

import (
	"encoding/binary"
	"net"
	"net/netip"
	"syscall"
)

// oobSize is room for what comes with a datagram, in bytes: one of IP_PKTINFO
// and IPV6_PKTINFO, ip(7) and ipv6(7).
//
//	struct in_pktinfo  { int ifindex; struct in_addr spec_dst, addr; }
//	struct in6_pktinfo { struct in6_addr addr; unsigned int ifindex; }
const (
	oobSize   = 64
	pktInfo4  = 12
	pktInfo6  = 20
	specDst4  = 4
	sockaddr4 = 4
	sockaddr6 = 16
)

// askLocal makes c say to which address each datagram came.
func askLocal(c *net.UDPConn, six bool) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var serr error
	err = raw.Control(func(fd uintptr) {
		if six {
			serr = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_IPV6, syscall.IPV6_RECVPKTINFO, 1)
		} else {
			serr = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_IP, syscall.IP_PKTINFO, 1)
		}
	})
	return err == nil && serr == nil
}

// parseLocal finds the address in what came with a datagram, the zero Addr if
// there is none.
func parseLocal(oob []byte) netip.Addr {
	if len(oob) == 0 {
		return netip.Addr{}
	}
	all, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.Addr{}
	}
	for _, m := range all {
		switch {
		case m.Header.Level == syscall.IPPROTO_IP && m.Header.Type == syscall.IP_PKTINFO && len(m.Data) >= pktInfo4:
			return netip.AddrFrom4([4]byte(m.Data[specDst4:]))
		case m.Header.Level == syscall.IPPROTO_IPV6 && m.Header.Type == syscall.IPV6_PKTINFO && len(m.Data) >= pktInfo6:
			return netip.AddrFrom16([16]byte(m.Data)).Unmap()
		}
	}
	return netip.Addr{}
}

// appendLocal makes what has a datagram sent from the given address. The
// interface is left to the kernel.
func appendLocal(b []byte, local netip.Addr, six bool) []byte {
	level, typ, size := syscall.IPPROTO_IP, syscall.IP_PKTINFO, pktInfo4
	if six {
		level, typ, size = syscall.IPPROTO_IPV6, syscall.IPV6_PKTINFO, pktInfo6
	}
	b = b[:syscall.CmsgSpace(size)]
	clear(b)
	head := syscall.SizeofCmsghdr
	// struct cmsghdr { size_t len; int level, type; }
	if head == 16 {
		binary.NativeEndian.PutUint64(b, uint64(syscall.CmsgLen(size)))
	} else {
		binary.NativeEndian.PutUint32(b, uint32(syscall.CmsgLen(size)))
	}
	binary.NativeEndian.PutUint32(b[head-8:], uint32(level))
	binary.NativeEndian.PutUint32(b[head-4:], uint32(typ))
	if six {
		a := local.As16()
		copy(b[head:head+sockaddr6], a[:])
	} else {
		a := local.As4()
		copy(b[head+specDst4:head+specDst4+sockaddr4], a[:])
	}
	return b
}

// dontFragment makes the kernel drop what is larger than the way allows, as
// QUIC wants it (RFC 9000 section 14), and leaves finding out to the ends.
func dontFragment(c *net.UDPConn) {
	const (
		ipMTUDiscover   = 10 // linux/in.h
		ipv6MTUDiscover = 23 // linux/in6.h
		probe           = 3  // IP_PMTUDISC_PROBE
	)
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_IP, ipMTUDiscover, probe)
		_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_IPV6, ipv6MTUDiscover, probe)
	})
}
