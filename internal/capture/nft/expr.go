//go:build linux

package nft

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// A Rule is expressions, each of which does something or ends the rule for this packet.
type Rule []Expr

// An Expr is one expression of the kernel, with its attributes.
type Expr struct {
	name string
	put  func(*message)
}

const (
	register = unix.NFT_REG_1 // of 16 bytes; each match loads it and compares at once

	// Of linux/netfilter/nf_tables.h, which x/sys lacks.
	socketKey, socketRegister, socketLevel   = 1, 2, 3 // NFTA_SOCKET_*
	socketTransparent, socketCgroupV2        = 0, 3    // NFT_SOCKET_TRANSPARENT, NFT_SOCKET_CGROUPV2
	tproxyFamily, tproxyAddress, tproxyPort  = 1, 2, 3 // NFTA_TPROXY_REG_*
	addressOffset4, addressOffset6           = 16, 24  // of the destination in a header
	portOffset                               = 2       // of the destination's
	tcpFlagsOffset, tcpFlagSYN, tcpFlagsMask = 13, 2, 1 | 2 | 4 | 16
)

func expr(name string, put func(*message)) Expr { return Expr{name, put} }

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

func data(m *message, kind uint16, value []byte) {
	m.nest(kind, func(m *message) { m.put(unix.NFTA_DATA_VALUE, value) })
}

func equal(value []byte) Expr {
	return expr("cmp", func(m *message) {
		m.putUint32(unix.NFTA_CMP_SREG, register)
		m.putUint32(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
		data(m, unix.NFTA_CMP_DATA, value)
	})
}

func meta(key uint32, value []byte) Rule {
	return Rule{expr("meta", func(m *message) {
		m.putUint32(unix.NFTA_META_DREG, register)
		m.putUint32(unix.NFTA_META_KEY, key)
	}), equal(value)}
}

func payload(base, offset, size uint32) Expr {
	return expr("payload", func(m *message) {
		m.putUint32(unix.NFTA_PAYLOAD_DREG, register)
		m.putUint32(unix.NFTA_PAYLOAD_BASE, base)
		m.putUint32(unix.NFTA_PAYLOAD_OFFSET, offset)
		m.putUint32(unix.NFTA_PAYLOAD_LEN, size)
	})
}

func immediate(reg uint32, value []byte) Expr {
	return expr("immediate", func(m *message) {
		m.putUint32(unix.NFTA_IMMEDIATE_DREG, reg)
		data(m, unix.NFTA_IMMEDIATE_DATA, value)
	})
}

// Mark matches packets whose mark is v: "meta mark v".
func Mark(v uint32) Rule { return meta(unix.NFT_META_MARK, native(v)) }

// UID matches packets of sockets that a user made: "meta skuid v".
func UID(v uint32) Rule { return meta(unix.NFT_META_SKUID, native(v)) }

// InInterface matches packets that come in by an interface: "meta iifname v".
func InInterface(name string) Rule {
	v := make([]byte, unix.IFNAMSIZ)
	copy(v[:unix.IFNAMSIZ-1], name)
	return meta(unix.NFT_META_IIFNAME, v)
}

// L4 matches packets of a transport protocol: "meta l4proto v".
func L4(v byte) Rule { return meta(unix.NFT_META_L4PROTO, []byte{v}) }

// IPv4 and IPv6 match packets of one version: "meta nfproto ipv4".
func IPv4() Rule { return meta(unix.NFT_META_NFPROTO, []byte{unix.NFPROTO_IPV4}) }

// IPv6 is IPv4 for IPv6.
func IPv6() Rule { return meta(unix.NFT_META_NFPROTO, []byte{unix.NFPROTO_IPV6}) }

// Opening matches the first packet of a TCP connection: "tcp flags & (fin|syn|rst|ack) ==
// syn". A chain of type nat also sees packets of connections that are older than connection
// tracking, which this leaves out. It comes after L4.
func Opening() Rule {
	return Rule{payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, tcpFlagsOffset, 1),
		expr("bitwise", func(m *message) {
			m.putUint32(unix.NFTA_BITWISE_SREG, register)
			m.putUint32(unix.NFTA_BITWISE_DREG, register)
			m.putUint32(unix.NFTA_BITWISE_LEN, 1)
			data(m, unix.NFTA_BITWISE_MASK, []byte{tcpFlagsMask})
			data(m, unix.NFTA_BITWISE_XOR, []byte{0})
		}), equal([]byte{tcpFlagSYN})}
}

// ToPort matches packets to a port: "tcp dport v". It comes after L4.
func ToPort(v uint16) Rule {
	return Rule{payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, portOffset, 2), equal(binary.BigEndian.AppendUint16(nil, v))}
}

// ToLocal matches packets to an address of this host: "fib daddr type local".
func ToLocal() Rule {
	return Rule{expr("fib", func(m *message) {
		m.putUint32(unix.NFTA_FIB_DREG, register)
		m.putUint32(unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_ADDRTYPE)
		m.putUint32(unix.NFTA_FIB_FLAGS, unix.NFTA_FIB_F_DADDR)
	}), equal(native(unix.RTN_LOCAL))}
}

// InSet matches packets to an address of a set: "ip daddr @name", or ip6 by the set's Key.
func InSet(s *Set) Rule {
	family, offset := IPv4(), uint32(addressOffset4)
	if s.Key == IPv6Addr {
		family, offset = IPv6(), addressOffset6
	}
	return append(family, payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, uint32(s.Key)), expr("lookup", func(m *message) {
		m.putString(unix.NFTA_LOOKUP_SET, s.Name)
		m.putUint32(unix.NFTA_LOOKUP_SREG, register)
	}))
}

// Cgroup matches packets of sockets that were made in a cgroup of version 2, or below it: "socket
// cgroupv2 level N PATH". The id is the inode of its folder, and its level counts the
// folders from the root.
func Cgroup(id uint64, level int) Rule {
	return Rule{expr("socket", func(m *message) {
		m.putUint32(socketKey, socketCgroupV2)
		m.putUint32(socketRegister, register)
		m.putUint32(socketLevel, uint32(level))
	}), equal(binary.NativeEndian.AppendUint64(nil, id))}
}

// Redirect leads the connection to a port of this host: "redirect to :port". The chain is of
// type nat.
func Redirect(port uint16) Rule {
	return Rule{immediate(register, binary.BigEndian.AppendUint16(nil, port)), expr("redir", func(m *message) {
		m.putUint32(unix.NFTA_REDIR_REG_PROTO_MIN, register)
	})}
}

// TProxy hands the packet to the socket that listens at to, with its addresses unchanged, and
// marks it so that it is routed to this host: "tproxy ip to ADDR:PORT meta mark set v
// accept". The chain is of type filter at prerouting. It comes after L4 and a match of the
// family.
func TProxy(to netip.AddrPort, mark uint32) Rule {
	family := uint32(unix.NFPROTO_IPV4)
	if to.Addr().Is6() {
		family = unix.NFPROTO_IPV6
	}
	return append(Rule{
		immediate(unix.NFT_REG_1, to.Addr().AsSlice()),
		immediate(unix.NFT_REG_2, binary.BigEndian.AppendUint16(nil, to.Port())),
		expr("tproxy", func(m *message) {
			m.putUint32(tproxyFamily, family)
			m.putUint32(tproxyAddress, unix.NFT_REG_1)
			m.putUint32(tproxyPort, unix.NFT_REG_2)
		})}, All(SetMark(mark), Accept())...)
}

// SetMark marks the packet: "meta mark set v".
func SetMark(v uint32) Rule {
	return Rule{immediate(register, native(v)), expr("meta", func(m *message) {
		m.putUint32(unix.NFTA_META_KEY, unix.NFT_META_MARK)
		m.putUint32(unix.NFTA_META_SREG, register)
	})}
}

// OfTransparentSocket matches packets of a connection that TPROXY has handed to a socket:
// "socket transparent 1".
func OfTransparentSocket() Rule {
	return Rule{expr("socket", func(m *message) {
		m.putUint32(socketKey, socketTransparent)
		m.putUint32(socketRegister, register)
	}), equal([]byte{1})}
}

// Return ends the chain for the packet, and Accept for the hook.
func Return() Rule { return verdict(unix.NFT_RETURN) }

// Accept is Return for the whole hook.
func Accept() Rule { return verdict(1) } // NF_ACCEPT

func verdict(code int32) Rule {
	return Rule{expr("immediate", func(m *message) {
		m.putUint32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		m.nest(unix.NFTA_IMMEDIATE_DATA, func(m *message) {
			m.nest(unix.NFTA_DATA_VERDICT, func(m *message) { m.putUint32(unix.NFTA_VERDICT_CODE, uint32(code)) })
		})
	})}
}

// RejectUnreachable answers that the port is not there: "reject".
func RejectUnreachable() Rule {
	return Rule{expr("reject", func(m *message) {
		m.putUint32(unix.NFTA_REJECT_TYPE, unix.NFT_REJECT_ICMPX_UNREACH)
		m.put(unix.NFTA_REJECT_ICMP_CODE, []byte{unix.NFT_REJECT_ICMPX_PORT_UNREACH})
	})}
}

// All joins matches and a verdict to one rule.
func All(parts ...Rule) Rule {
	var r Rule
	for _, p := range parts {
		r = append(r, p...)
	}
	return r
}
