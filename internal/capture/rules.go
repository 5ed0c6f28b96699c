package capture

import (
	"fmt"
	"net/netip"
	"strings"
)

const (
	// Mark is that of this process's own sockets: "cv" and 1.
	Mark = 0x63760001

	// Table is the name of the table of nftables, of the family inet, for Rules without a Name.
	Table = "culvert"

	// Priority is that of the chain of nftables for connections of this host: just before the
	// destination NAT of others.
	Priority = -101

	maxName = 64
)

// Rules say which connections are captured: those whose destination and whose program are.
// Rules that name neither capture nothing, unless All is set.
type Rules struct {
	// Name tells captures in one network namespace apart, such as those of the agents of two
	// users. The table is Table-Name then. Letters, digits, "-", "_" and "." of ASCII, at most 64.
	Name string

	// Destinations. Without any, and with All, every one is captured.
	VIPs  bool           // an address that SetVIPs was told of
	CIDRs []netip.Prefix // an address of a range
	All   bool

	// Programs. Without any, those of every user and cgroup are captured.
	Cgroups []string // in a cgroup of version 2, or below: a path below /sys/fs/cgroup
	UIDs    []uint32 // that a user runs

	Except     []netip.Prefix // destinations that are not captured
	ExceptUIDs []uint32       // users whose programs are not captured
	Mark       uint32         // sockets that are not captured; 0 means none

	// Port is that of the listeners at 127.0.0.1 and ::1 to which connections of this host
	// are redirected. A connection by IPv6 is refused where nothing listens at ::1.
	Port uint16

	// TransparentPort is that of the listeners of tunnel.ListenTransparent at 127.0.0.1 and
	// ::1, to which connections go that this host routes for others, by VIPs and CIDRs. 0 means
	// that those are not captured, but for Interfaces.
	TransparentPort uint16

	// Interfaces are those by which such connections come; without any, every one. With
	// TransparentPort 0, connections that come by them are redirected to Port, at the address
	// that this host has at the interface: 127.0.0.1 is not reached from there
	// (route_localnet).
	Interfaces []string

	// TransparentMark is that of packets for TransparentPort, and RoutingTable is where rules
	// of routing look such packets up. 0 means a number that belongs to Name.
	TransparentMark, RoutingTable uint32

	// DNSPort is that of a DNS server at 127.0.0.1 and ::1 to which all of DNS is redirected,
	// by UDP and TCP, also where it would go to this host. Other datagrams that leave this
	// host are refused then. Both are about the programs that are captured, and leave out
	// Except. 0 leaves DNS and UDP alone.
	DNSPort uint16

	// Stay has the table stay when the process ends. Without it the process owns the table.
	Stay bool
}

// TableName returns the name of the table of nftables for Rules with a Name.
func TableName(name string) string {
	if name == "" {
		return Table
	}
	return Table + "-" + name
}

// IsTable reports whether a table of the family inet is one of this package, by its name.
func IsTable(table string) bool {
	return table == Table || strings.HasPrefix(table, Table+"-")
}

// CheckName returns nil for what may be the Name of Rules.
func CheckName(name string) error {
	if len(name) > maxName {
		return fmt.Errorf("the name of a capture has %d characters; the limit is %d", len(name), maxName)
	}
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("-_.", rune(c)) {
			return fmt.Errorf("the name of a capture %q has %q; use letters, digits, \"-\", \"_\" and \".\"", name, c)
		}
	}
	return nil
}
