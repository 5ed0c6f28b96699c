// Package vips gives each of many services an address of its own, one of IPv4
// and one of IPv6, and the same one for as long as it is there.
//
//	state := vips.State{Path: "/var/lib/culvert/vips.json"}
//	lock, err := state.Lock() // until the process ends
//	if err != nil {
//		return err // another process gives these addresses
//	}
//	defer lock.Close()
//	have, err := state.Load()
//	if err != nil {
//		return err // never start over by itself: clients know these addresses
//	}
//	plan := vips.Plan{Ranges: registry.DefaultVIPRanges("west"), Now: time.Now()}
//	have, failures := plan.Assign(table.VIPRequests(), have)
//	if err := state.Save(have); err != nil {
//		return err
//	}
//	reg.AssignVIPs(vips.Table(have))
//
// Package leases has the rules by which addresses stay and are given. Assign is
// pure: clocks, and what else has addresses in the ranges, are its caller's.
package vips

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"culvert.dev/registry"
	"culvert.dev/registry/leases"
	"culvert.dev/tunnel"
)

// DefaultKeep is how long the addresses of a service that is gone are given to
// nobody else.
const DefaultKeep = leases.DefaultKeep

// An Assignment is an address that is a service's.
type Assignment struct {
	Service string // by one of its keys
	Address netip.Addr
	Since   time.Time
	Gone    time.Time // when its service was first missed; zero while that is there
}

// A Failure is a service that gets no address of one family.
type Failure struct {
	Service string
	Family  string // "IPv4" or "IPv6"
	Err     error  // for people, without the service
}

// A Plan is what Assign goes by.
type Plan struct {
	Ranges []netip.Prefix // one of a family, as registry.CheckVIPRange wants them; a family without one has no addresses
	Keep   time.Duration  // how long the address of a service that is gone is nobody's; 0 means DefaultKeep
	Now    time.Time

	// Taken are addresses that are somebody's in another way. Who has one of
	// them gets another one: what people have written stands above what was
	// found.
	Taken []netip.Prefix
}

// Assign returns the assignments, those of services that are gone included, and
// the services that get none. The answer is ordered by family and address, and
// is the same for the same arguments in any order; have is left as it is.
//
// A service keeps what any of its keys has. An assignment outside of the ranges,
// which were others once, is moved into them, or dropped where its service is
// gone.
func (p *Plan) Assign(wishes []registry.VIPRequest, have []Assignment) ([]Assignment, []Failure) {
	keys := keysOf(wishes, have)
	have = p.forget(keys, have)
	var failures []Failure
	all := make([]Assignment, 0, 2*len(keys))
	for _, r := range slices.SortedFunc(slices.Values(p.Ranges), func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) }) {
		b := blockOf(r, p.Taken)
		leased := make([]leases.Lease[string], 0, len(have))
		for i, a := range have {
			registry.Yield(i)
			if place, ok := b.place(a.Address); ok && b.taken(place) == 0 {
				leased = append(leased, leases.Lease[string]{Key: a.Service, Place: place, Since: a.Since, Gone: a.Gone})
			}
		}
		plan := leases.Plan[string]{
			Places: b.places, Keep: cmp.Or(p.Keep, DefaultKeep), Now: p.Now,
			Start: leases.Hash, Compare: strings.Compare,
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
		next, without, full := plan.Assign(keys, leased)
		for _, l := range next {
			all = append(all, Assignment{Service: l.Key, Address: b.at(l.Place), Since: l.Since, Gone: l.Gone})
		}
		if full != nil {
			full.What = fmt.Sprintf("address is free in %s", r)
		}
		for _, k := range without {
			failures = append(failures, Failure{k, Family(r.Addr()), full})
		}
	}
	slices.SortFunc(failures, func(a, b Failure) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Family, b.Family))
	})
	return all, failures
}

// remembered is how many addresses of services that are long gone are not given
// to others as long as there are more. Services that come and go would fill the
// state with them: there are more addresses than it has room for.
const remembered = 10_000

// forget returns have without those that may be had again and were left first,
// but for the last of them.
func (p *Plan) forget(keys []string, have []Assignment) []Assignment {
	var left []time.Time
	old := func(a Assignment) bool {
		return !a.Gone.IsZero() && !leases.Kept(a.Gone, p.Now, cmp.Or(p.Keep, DefaultKeep))
	}
	for _, a := range have {
		if old(a) {
			left = append(left, a.Gone)
		}
	}
	if len(left) <= remembered {
		return have
	}
	slices.SortFunc(left, time.Time.Compare)
	last := left[len(left)-remembered-1] // that is forgotten, with all that were left then
	wanted := make(map[string]bool, len(keys))
	for _, k := range keys {
		wanted[k] = true
	}
	return slices.DeleteFunc(slices.Clone(have), func(a Assignment) bool {
		return old(a) && !a.Gone.After(last) && !wanted[a.Service]
	})
}

// keysOf returns the key that each service goes by: the first that stands in
// have, else the first that stood, else the best.
func keysOf(wishes []registry.VIPRequest, have []Assignment) []string {
	const gone, stands = 1, 2
	known := make(map[string]int, len(have))
	for _, a := range have {
		if a.Gone.IsZero() {
			known[a.Service] = stands
		} else {
			known[a.Service] = max(known[a.Service], gone)
		}
	}
	keys := make([]string, len(wishes))
	for i, w := range wishes {
		registry.Yield(i)
		for _, k := range w.Keys {
			if keys[i] == "" || known[k] > known[keys[i]] {
				keys[i] = k
			}
		}
	}
	return keys
}

// Table returns the assignments of services that are there, as a
// registry.Registry takes them.
func Table(all []Assignment) []registry.VIP {
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

// A block is the addresses of a range as places, as registry.VIPsIn counts them.
type block struct {
	prefix netip.Prefix
	places uint64
	others []span // what is taken, in order and apart
}

// A span is the places from first to end, without end.
type span struct{ first, end uint64 }

// blockOf returns the block of a range without those addresses that are taken.
func blockOf(p netip.Prefix, taken []netip.Prefix) *block {
	b := &block{prefix: p, places: registry.VIPsIn(p)}
	for _, t := range taken {
		switch {
		case !t.Overlaps(p):
			continue
		case t.Bits() <= p.Bits():
			b.others = []span{{0, b.places}}
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
		if end = min(end, b.places); first < end {
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
func (b *block) offset(a netip.Addr) (uint64, bool) {
	x, first := a.As16(), b.prefix.Addr().As16()
	high := binary.BigEndian.Uint64(x[:8]) - binary.BigEndian.Uint64(first[:8])
	low := binary.BigEndian.Uint64(x[8:]) - binary.BigEndian.Uint64(first[8:]) // a prefix has no bits there that could borrow
	return low, high == 0 && low <= maxOffset
}

// place returns the place of an address, if it has one.
func (b *block) place(a netip.Addr) (uint64, bool) {
	if !b.prefix.Contains(a) {
		return 0, false
	}
	offset, ok := b.offset(a)
	return offset - 1, ok && offset >= 1 && offset <= b.places
}

// at returns the address of a place.
func (b *block) at(place uint64) netip.Addr {
	x := b.prefix.Addr().As16()
	low := binary.BigEndian.Uint64(x[8:]) + place + 1
	binary.BigEndian.PutUint64(x[8:], low)
	return netip.AddrFrom16(x).Unmap()
}

// taken returns how many places from this one on are others'.
func (b *block) taken(place uint64) uint64 {
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
