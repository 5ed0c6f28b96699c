package alloc

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A VIP is an address that is assigned to a service.
type VIP struct {
	Service string // by one of its keys
	Address netip.Addr
	Since   time.Time
	Gone    time.Time // when its service was first missed; zero while that is there
}

// A VIPFailure is a service that gets no address of one family.
type VIPFailure struct {
	Service string
	Family  string // "IPv4" or "IPv6"
	Err     error  // for people, without the service
}

// A VIPPlan says how Assign assigns addresses.
type VIPPlan struct {
	Ranges     []netip.Prefix // one of a family, as registry.CheckVIPRange wants them; a family without one has no addresses
	ReuseAfter time.Duration  // how long the address of a service that is gone is reserved; 0 means DefaultReuseAfter
	Now        time.Time

	// Taken are addresses that something else uses. A service that has one of
	// them gets another one: what people have configured comes first.
	Taken []netip.Prefix
}

// Assign returns the assignments, those of services that are gone included, and
// the services that get none. The answer is ordered by family and address, and
// is the same for the same arguments in any order; have is left as it is.
//
// A service keeps what any of its keys has. An assignment outside of the ranges,
// which were others once, is moved into them, or dropped where its service is
// gone.
func (p *VIPPlan) Assign(requests []registry.VIPRequest, have []VIP) ([]VIP, []VIPFailure) {
	keys := vipKeys(requests, have)
	have = p.pruneGone(keys, have)
	var failures []VIPFailure
	all := make([]VIP, 0, 2*len(keys))
	for _, r := range slices.SortedFunc(slices.Values(p.Ranges), func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) }) {
		b := newAddrBlock(r, p.Taken)
		leased := make([]allocation[string], 0, len(have))
		for _, a := range have {
			if place, ok := b.index(a.Address); ok && b.taken(place) == 0 {
				leased = append(leased, allocation[string]{Key: a.Service, Index: place, Since: a.Since, Gone: a.Gone})
			}
		}
		plan := pool[string]{
			Size: b.size, ReuseAfter: cmp.Or(p.ReuseAfter, DefaultReuseAfter), Now: p.Now,
			Start: hashOf, Compare: strings.Compare,
			Taken: func(place uint64) uint64 {
				if n := b.taken(place); n > 0 {
					return n
				}
				if _, bad := tunnel.Forbidden(b.at(place)); bad { // a metadata service's, say
					return 1
				}
				return 0
			},
		}
		next, without, full := plan.assign(keys, leased)
		for _, l := range next {
			all = append(all, VIP{Service: l.Key, Address: b.at(l.Index), Since: l.Since, Gone: l.Gone})
		}
		if full != nil {
			full.What = fmt.Sprintf("address is free in %s", r)
		}
		for _, k := range without {
			failures = append(failures, VIPFailure{k, Family(r.Addr()), full})
		}
	}
	slices.SortFunc(failures, func(a, b VIPFailure) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Family, b.Family))
	})
	return all, failures
}

// maxHeldVIPs is how many released addresses are remembered, and not assigned to
// other services while unused ones are left. Without a limit, services that come
// and go would fill the state file, which has less room than there are addresses.
const maxHeldVIPs = 10_000

// pruneGone returns have without the released addresses that may be assigned
// again, of which it keeps the maxHeldVIPs released last.
func (p *VIPPlan) pruneGone(keys []string, have []VIP) []VIP {
	var left []time.Time
	old := func(a VIP) bool {
		return !a.Gone.IsZero() && !isHeld(a.Gone, p.Now, cmp.Or(p.ReuseAfter, DefaultReuseAfter))
	}
	for _, a := range have {
		if old(a) {
			left = append(left, a.Gone)
		}
	}
	if len(left) <= maxHeldVIPs {
		return have
	}
	slices.SortFunc(left, time.Time.Compare)
	last := left[len(left)-maxHeldVIPs-1] // that is forgotten, with all that were left then
	wanted := make(map[string]bool, len(keys))
	for _, k := range keys {
		wanted[k] = true
	}
	return slices.DeleteFunc(slices.Clone(have), func(a VIP) bool {
		return old(a) && !a.Gone.After(last) && !wanted[a.Service]
	})
}

// vipKeys returns the key that each service uses: the first that has an address
// in have, else the first that had one, else the best.
func vipKeys(requests []registry.VIPRequest, have []VIP) []string {
	const gone, stands = 1, 2
	known := make(map[string]int, len(have))
	for _, a := range have {
		if a.Gone.IsZero() {
			known[a.Service] = stands
		} else {
			known[a.Service] = max(known[a.Service], gone)
		}
	}
	keys := make([]string, len(requests))
	for i, w := range requests {
		for _, k := range w.Keys {
			if keys[i] == "" || known[k] > known[keys[i]] {
				keys[i] = k
			}
		}
	}
	return keys
}

// AssignedVIPs returns the assignments of services that are there, as a
// registry.Registry takes them.
func AssignedVIPs(all []VIP) []registry.VIP {
	at := make(map[string]int, len(all))
	var list []registry.VIP
	for _, a := range all {
		if !a.Gone.IsZero() {
			continue
		}
		i, ok := at[a.Service]
		if !ok {
			i = len(list)
			at[a.Service] = i
			list = append(list, registry.VIP{Key: a.Service})
		}
		if a.Address.Is4() {
			list[i].V4 = a.Address
		} else {
			list[i].V6 = a.Address
		}
	}
	return list
}

// Family returns "IPv4" or "IPv6".
func Family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// maxOffset is more than any place is from the first address of a range.
const maxOffset = 1 << 62

// An addrBlock numbers the addresses of a range, as registry.VIPsIn counts them.
type addrBlock struct {
	prefix netip.Prefix
	size   uint64
	others []span // what is taken, in order and apart
}

// A span is the places from first to end, without end.
type span struct{ first, end uint64 }

// newAddrBlock returns the block of a range without those addresses that are taken.
func newAddrBlock(p netip.Prefix, taken []netip.Prefix) *addrBlock {
	b := &addrBlock{prefix: p, size: registry.VIPsIn(p)}
	for _, t := range taken {
		switch {
		case !t.Overlaps(p):
			continue
		case t.Bits() <= p.Bits():
			b.others = []span{{0, b.size}}
			return b
		}
		// The offset of the first address, of which none is too large to count
		// but those behind the last place.
		offset, ok := b.offset(t.Addr())
		if !ok {
			continue
		}
		n := uint64(maxOffset)
		if host := t.Addr().BitLen() - t.Bits(); host < 62 {
			n = 1 << host
		}
		first, end := max(offset, 1)-1, offset+n-1
		if end = min(end, b.size); first < end {
			b.others = append(b.others, span{first, end})
		}
	}
	slices.SortFunc(b.others, func(x, y span) int { return cmp.Compare(x.first, y.first) })
	apart := b.others[:0]
	for _, s := range b.others {
		if n := len(apart); n > 0 && s.first <= apart[n-1].end {
			apart[n-1].end = max(apart[n-1].end, s.end)
			continue
		}
		apart = append(apart, s)
	}
	b.others = apart
	return b
}

// offset returns how far an address of the range is from the first one; false
// where that is too far for any place.
func (b *addrBlock) offset(a netip.Addr) (uint64, bool) {
	x, first := a.As16(), b.prefix.Addr().As16()
	high := binary.BigEndian.Uint64(x[:8]) - binary.BigEndian.Uint64(first[:8])
	low := binary.BigEndian.Uint64(x[8:]) - binary.BigEndian.Uint64(first[8:]) // a prefix has no bits there that could borrow
	return low, high == 0 && low <= maxOffset
}

// index returns the place of an address, if it has one.
func (b *addrBlock) index(a netip.Addr) (uint64, bool) {
	if !b.prefix.Contains(a) {
		return 0, false
	}
	offset, ok := b.offset(a)
	return offset - 1, ok && offset >= 1 && offset <= b.size
}

// at returns the address of a place.
func (b *addrBlock) at(place uint64) netip.Addr {
	x := b.prefix.Addr().As16()
	low := binary.BigEndian.Uint64(x[8:]) + place + 1
	binary.BigEndian.PutUint64(x[8:], low)
	return netip.AddrFrom16(x).Unmap()
}

// taken returns how many places from this one on are others'.
func (b *addrBlock) taken(place uint64) uint64 {
	i, _ := slices.BinarySearchFunc(b.others, place, func(s span, at uint64) int {
		if s.end <= at {
			return -1
		}
		return 1
	})
	if i == len(b.others) || b.others[i].first > place {
		return 0
	}
	return b.others[i].end - place
}
