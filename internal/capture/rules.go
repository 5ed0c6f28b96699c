package capture

import "net/netip"

const (
	// Mark is that of this process's own sockets: "cv" and 1.
	Mark = 0x63760001

	// Table is the name of the table of nftables, of the family inet.
	Table = "culvert"

	transparentMark  = 0x63760002 // of packets for the listener of Rules.TransparentPort
	transparentTable = 76         // of routing, for those packets
)

// Rules say which connections are captured. A connection is captured where one of VIPs, CIDRs,
// Cgroups, UIDs and All says so.
type Rules struct {
	VIPs    bool           // to an address that SetVIPs was told of
	CIDRs   []netip.Prefix // to an address of a range
	Cgroups []string       // of programs in a cgroup of version 2, or below: a path below /sys/fs/cgroup
	UIDs    []uint32       // of programs that a user runs
	All     bool           // every one

	Except     []netip.Prefix // destinations that are not captured
	ExceptUIDs []uint32       // users whose programs are not captured
	Mark       uint32         // sockets that are not captured; 0 means none

	// Port is that of the listeners at 127.0.0.1 and ::1 to which connections of this host
	// are redirected.
	Port uint16

	// TransparentPort is that of the listeners of tunnel.ListenTransparent at 127.0.0.1 and
	// ::1, to which connections go that this host routes for others, by VIPs and CIDRs.
	// 0 means that those are not captured.
	TransparentPort uint16

	// DNSPort is that of a DNS server at 127.0.0.1 and ::1 to which all of DNS is redirected,
	// by UDP and TCP, also where it would go to this host. Other datagrams that leave this
	// host are refused then. 0 leaves DNS and UDP alone.
	DNSPort uint16

	// Stay has the table stay when the process ends. Without it the process owns the table.
	Stay bool
}
