//go:build linux

package nft

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// A Table is a table of the family inet.
type Table struct {
	Name   string
	Owned  bool // by the Conn that makes it
	Sets   []*Set
	Chains []Chain
}

// A KeyType is what a Set has, by its size in bytes.
type KeyType int

const (
	IPv4Addr KeyType = 4
	IPv6Addr KeyType = 16
)

// number returns k as programs write it into the kernel for others to read.
func (k KeyType) number() uint32 {
	if k == IPv4Addr {
		return 7
	}
	return 8
}

// A Set has addresses of one family. With Ranges it has prefixes and does not change; without
// it has single addresses.
type Set struct {
	Name   string
	Key    KeyType
	Ranges []netip.Prefix // of the family of Key; they may overlap
	Addrs  []netip.Addr   // of the family of Key, each once
}

// A ChainType says what a Chain may do.
type ChainType string

const (
	NAT    ChainType = "nat"
	Filter ChainType = "filter"
)

// A Hook is where packets pass a Chain.
type Hook uint32

const (
	PreRouting Hook = unix.NF_INET_PRE_ROUTING
	Output     Hook = unix.NF_INET_LOCAL_OUT
)

// A Chain has rules. Its policy is to accept.
type Chain struct {
	Name     string
	Type     ChainType
	Hook     Hook
	Priority int32
	Rules    []Rule
}

const (
	tableOwner = 0x2 // NFT_TABLE_F_OWNER, Linux 5.12

	// maxElements is how many elements go into one message: an attribute has 64 KiB at most.
	maxElements = 1000
)

// replace adds what makes t the only table of its name.
func (b *batch) replace(t *Table) {
	// Or there is nothing to delete. Without flags it leaves a table as it is, owned or not.
	b.command("make table inet "+t.Name, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func(m *message) {
		m.putString(unix.NFTA_TABLE_NAME, t.Name)
	})
	b.remove(t.Name)
	b.command("make table inet "+t.Name, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func(m *message) {
		m.putString(unix.NFTA_TABLE_NAME, t.Name)
		flags := uint32(0)
		if t.Owned {
			flags = tableOwner
		}
		m.putUint32(unix.NFTA_TABLE_FLAGS, flags)
	})
	for _, s := range t.Sets {
		b.set(t.Name, s)
	}
	for i := range t.Chains {
		b.chain(t.Name, &t.Chains[i])
	}
}

func (b *batch) remove(table string) {
	b.command("delete table inet "+table, unix.NFT_MSG_DELTABLE, 0, func(m *message) { m.putString(unix.NFTA_TABLE_NAME, table) })
}

func (b *batch) set(table string, s *Set) {
	b.command("make set "+s.Name, unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, func(m *message) {
		m.putString(unix.NFTA_SET_TABLE, table)
		m.putString(unix.NFTA_SET_NAME, s.Name)
		if s.Ranges != nil {
			m.putUint32(unix.NFTA_SET_FLAGS, unix.NFT_SET_INTERVAL)
		}
		m.putUint32(unix.NFTA_SET_KEY_TYPE, s.Key.number())
		m.putUint32(unix.NFTA_SET_KEY_LEN, uint32(s.Key))
		m.putUint32(unix.NFTA_SET_ID, uint32(len(b.whats)))
	})
	elements := make([]element, 0, len(s.Addrs)+2*len(s.Ranges))
	for _, a := range s.Addrs {
		elements = append(elements, element{a, false})
	}
	for _, r := range merge(s.Ranges) {
		elements = append(elements, element{r.first, false})
		if next := r.last.Next(); next.IsValid() { // a range up to the last address has no end
			elements = append(elements, element{next, true})
		}
	}
	b.elements(table, s.Name, unix.NFT_MSG_NEWSETELEM, elements)
}

// An element is an address of a set, or with end the address after a range.
type element struct {
	addr netip.Addr
	end  bool
}

// elements adds a message for each maxElements of list.
func (b *batch) elements(table, set string, command uint16, list []element) {
	var flags uint16
	if command == unix.NFT_MSG_NEWSETELEM {
		flags = unix.NLM_F_CREATE
	}
	for part := range slices.Chunk(list, maxElements) {
		b.command("change set "+set, command, flags, func(m *message) {
			m.putString(unix.NFTA_SET_ELEM_LIST_TABLE, table)
			m.putString(unix.NFTA_SET_ELEM_LIST_SET, set)
			m.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(m *message) {
				for _, e := range part {
					m.nest(unix.NFTA_LIST_ELEM, func(m *message) {
						if e.end {
							m.putUint32(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
						}
						data(m, unix.NFTA_SET_ELEM_KEY, e.addr.AsSlice())
					})
				}
			})
		})
	}
}

func (b *batch) chain(table string, c *Chain) {
	b.command("make chain "+c.Name, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, func(m *message) {
		m.putString(unix.NFTA_CHAIN_TABLE, table)
		m.putString(unix.NFTA_CHAIN_NAME, c.Name)
		m.nest(unix.NFTA_CHAIN_HOOK, func(m *message) {
			m.putUint32(unix.NFTA_HOOK_HOOKNUM, uint32(c.Hook))
			m.putUint32(unix.NFTA_HOOK_PRIORITY, uint32(c.Priority))
		})
		m.putUint32(unix.NFTA_CHAIN_POLICY, 1) // NF_ACCEPT
		m.putString(unix.NFTA_CHAIN_TYPE, string(c.Type))
	})
	for _, r := range c.Rules {
		b.command("make a rule of chain "+c.Name, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, func(m *message) {
			m.putString(unix.NFTA_RULE_TABLE, table)
			m.putString(unix.NFTA_RULE_CHAIN, c.Name)
			m.nest(unix.NFTA_RULE_EXPRESSIONS, func(m *message) {
				for _, e := range r {
					m.nest(unix.NFTA_LIST_ELEM, func(m *message) {
						m.putString(unix.NFTA_EXPR_NAME, e.name)
						m.nest(unix.NFTA_EXPR_DATA, e.put)
					})
				}
			})
		})
	}
}

type addrRange struct{ first, last netip.Addr }

// merge returns the ranges of prefixes, in order, without overlaps and neighbours: a set
// refuses overlaps.
func merge(prefixes []netip.Prefix) (all []addrRange) {
	sorted := slices.SortedFunc(slices.Values(prefixes), func(a, b netip.Prefix) int { return a.Masked().Addr().Compare(b.Masked().Addr()) })
	for _, p := range sorted {
		r := addrRange{p.Masked().Addr(), last(p)}
		if n := len(all); n > 0 && (!all[n-1].last.Less(r.first) || all[n-1].last.Next() == r.first) {
			if all[n-1].last.Less(r.last) {
				all[n-1].last = r.last
			}
			continue
		}
		all = append(all, r)
	}
	return all
}

// last returns the last address of a prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(b); bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
