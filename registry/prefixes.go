package registry

import (
	"cmp"
	"net/netip"
	"slices"
)

// A prefixTable finds the longest prefix that holds an address, with one map lookup for each
// prefix length in use.
type prefixTable struct {
	names    []string
	byPrefix map[netip.Prefix]int32 // masked
	bits4    []int                  // longest first
	bits6    []int
}

func (n *prefixTable) add(p netip.Prefix, network int32) {
	n.byPrefix[p] = network
	bits := &n.bits6
	if p.Addr().Is4() {
		bits = &n.bits4
	}
	at, ok := slices.BinarySearchFunc(*bits, p.Bits(), func(a, b int) int { return cmp.Compare(b, a) })
	if !ok {
		*bits = slices.Insert(*bits, at, p.Bits())
	}
}

// find returns the index of the network of a, or -1.
func (n *prefixTable) find(a netip.Addr) int32 {
	a = normalAddr(a)
	if !a.IsValid() {
		return -1
	}
	lengths := n.bits6
	if a.Is4() {
		lengths = n.bits4
	}
	for _, bits := range lengths {
		p, err := a.Prefix(bits)
		if err != nil {
			continue
		}
		if i, ok := n.byPrefix[p]; ok {
			return i
		}
	}
	return -1
}

// normalAddr gives every address one form: IPv4 as IPv4, without a zone.
func normalAddr(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

func normalPrefix(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked()
}

// name returns the name of the network that has a, "" for none.
func (n prefixTable) name(a netip.Addr) string {
	if i := n.find(a); i >= 0 {
		return n.names[i]
	}
	return ""
}
