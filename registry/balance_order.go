package registry

import (
	"math"
	"math/bits"

	"culvert.dev/tunnel"
)

// An ordering puts endpoints in the order to try.
type ordering struct {
	eps []tunnel.Endpoint
	all []contender
}

func (o *ordering) swap(i, j int) {
	o.eps[i], o.eps[j] = o.eps[j], o.eps[i]
	o.all[i], o.all[j] = o.all[j], o.all[i]
}

// lowest returns the lowest tier of those from the index from on, and the number and the
// weight of its endpoints.
func (o *ordering) lowest(from int) (tier uint8, n int, weight uint64) {
	tier = math.MaxUint8
	for i := from; i < len(o.all); i++ {
		c := &o.all[i]
		if c.weight == 0 {
			continue
		}
		if c.tier < tier {
			tier, n, weight = c.tier, 0, 0
		}
		if c.tier == tier {
			n++
			weight += uint64(c.weight)
		}
	}
	return tier, n, weight
}

// byTurn chooses so that a few requests already are shared as the weights say.
func (o *ordering) byTurn(turn uint32) {
	tier, n, weight := o.lowest(0)
	if n == 0 {
		return
	}
	i := o.at(share(turn, weight), tier)
	o.swap(0, i)
	for done := 1; done < min(maxOrdered, len(o.eps)); done++ { // the next ones, of the same tier first
		if n--; n == 0 {
			if tier, n, _ = o.lowest(done); n == 0 {
				return
			}
		}
		for i = max(i+1, done); ; i++ {
			if i >= len(o.all) {
				i = done
			}
			if c := &o.all[i]; c.weight > 0 && c.tier == tier {
				break
			}
		}
		o.swap(done, i)
	}
}

// at returns the index of the endpoint of a tier that has a share of the tier's weight.
func (o *ordering) at(share uint64, tier uint8) int {
	for i := range o.all {
		c := &o.all[i]
		if c.weight == 0 || c.tier != tier {
			continue
		}
		if share < uint64(c.weight) {
			return i
		}
		share -= uint64(c.weight)
	}
	return 0 // never
}

// golden is the golden ratio's fraction, in units of 1/2^64: its multiples are
// spread evenly over any stretch, so that a few requests already are shared as
// the weights say.
const golden = 0x9E3779B97F4A7C15

// share returns a number below total. Those of successive turns are spread evenly.
func share(turn uint32, total uint64) uint64 {
	at, _ := bits.Mul64(uint64(turn)*golden, total)
	return at
}

// byLoad chooses the endpoint with the fewest tunnels for its weight. Of equal ones it
// is the next from that on whose turn it is, so that idle endpoints take turns.
func (o *ordering) byLoad(turn uint32) {
	tier, n, weight := o.lowest(0)
	if n == 0 {
		return
	}
	if n > maxCompared {
		o.byTwo(turn)
		return
	}
	next := o.at(share(turn, weight), tier)
	for done := range min(maxOrdered, len(o.eps)) {
		best, at := -1, max(next, done)
		for range len(o.eps) - done {
			if o.all[at].weight > 0 && (best < 0 || o.lighter(at, best)) {
				best = at
			}
			if at++; at == len(o.eps) {
				at = done
			}
		}
		if best < 0 {
			return
		}
		o.swap(done, best)
	}
}

// lighter reports whether endpoint i is to be chosen rather than endpoint j.
func (o *ordering) lighter(i, j int) bool {
	a, b := &o.all[i], &o.all[j]
	if a.tier != b.tier {
		return a.tier < b.tier
	}
	return uint64(o.eps[i].Load.Tunnels())*uint64(b.weight) < uint64(o.eps[j].Load.Tunnels())*uint64(a.weight)
}

// byTwo compares two random endpoints. What is random is a hash of the turn.
func (o *ordering) byTwo(turn uint32) {
	for done := range 2 {
		tier, n, _ := o.lowest(done)
		if n == 0 {
			return
		}
		at, _ := bits.Mul64(mix(uint64(turn)+1, uint64(done)+golden), uint64(n))
		for i := done; ; i++ {
			if c := &o.all[i]; c.weight == 0 || c.tier != tier {
				continue
			}
			if at == 0 {
				o.swap(done, i)
				break
			}
			at--
		}
	}
	if o.lighter(1, 0) {
		o.swap(0, 1)
	}
}

// byHash is rendezvous hashing with weights: each endpoint draws a number from the
// client and itself, and the lowest wins. So an endpoint that leaves takes no other
// client with it, and gateways with the same endpoints agree.
//
// The number is that of an exponential distribution with the weight as its rate:
// -ln(u)/weight for a u of even distribution.
func (o *ordering) byHash(client uint64) {
	var best [maxOrdered]struct {
		at   int
		tier uint8
		cost float64
	}
	n := 0
	for i := range o.eps {
		c := &o.all[i]
		if c.weight == 0 {
			continue
		}
		u := (float64(mix(numberOf(&o.eps[i]), client)>>11) + 0.5) / (1 << 53)
		weight := float64(c.weight)
		last := &best[maxOrdered-1]
		if n == maxOrdered && (c.tier > last.tier || c.tier == last.tier && (1-u) >= last.cost*weight) { // as -ln(u) is at least 1-u
			continue
		}
		cost := -math.Log(u) / weight
		at := min(n, maxOrdered-1)
		if n == maxOrdered && c.tier == last.tier && cost >= last.cost {
			continue
		}
		for at > 0 && (c.tier < best[at-1].tier || c.tier == best[at-1].tier && cost < best[at-1].cost) {
			best[at] = best[at-1]
			at--
		}
		best[at].at, best[at].tier, best[at].cost = i, c.tier, cost
		n = min(n+1, maxOrdered)
	}
	for i := range n {
		o.swap(i, best[i].at)
		for j := i + 1; j < n; j++ {
			if best[j].at == i {
				best[j].at = best[i].at // where it was moved to
			}
		}
	}
}

// keep puts the healthy endpoint that a client has already at the front, and keeps the
// order of the others.
func (o *ordering) keep(hash uint64) {
	for i := range o.eps {
		if o.all[i].tier&tierUnhealthy != 0 || hashOf(&o.eps[i]) != hash {
			continue
		}
		ep, c := o.eps[i], o.all[i]
		c.weight = max(c.weight, 1)
		copy(o.eps[1:i+1], o.eps[:i])
		copy(o.all[1:i+1], o.all[:i])
		o.eps[0], o.all[0] = ep, c
		return
	}
}

// dropDraining moves the endpoints that may be tried to the front, and returns how many
// those are. It must not return them: contenders would then be on the heap, too.
func (o *ordering) dropDraining() int {
	n := 0
	for i := range o.eps {
		if o.all[i].weight == 0 {
			continue
		}
		if n < i {
			o.eps[n] = o.eps[i]
		}
		n++
	}
	return n
}

// hashOf returns a hash of what is dialed: the endpoint, or the next hop to it. It is
// the same in every process, and never 0.
func hashOf(ep *tunnel.Endpoint) uint64 { return max(1, mix(numberOf(ep), golden)) }

// numberOf returns a number for the endpoint, whose bits are not mixed yet.
func numberOf(ep *tunnel.Endpoint) uint64 {
	addr, port := ep.Addr.Addr(), uint64(ep.Addr.Port())
	switch {
	case ep.HealthKey != "":
		return hashString(ep.HealthKey)
	case addr.Is4():
		b := addr.As4()
		return uint64(b[0])<<40 | uint64(b[1])<<32 | uint64(b[2])<<24 | uint64(b[3])<<16 | port
	case addr.IsValid():
		b := addr.As16()
		return mix(be64(b[:8]), be64(b[8:])^port)
	}
	return hashString(ep.Host) ^ port
}

// hashString is FNV-1a.
func hashString(s string) uint64 {
	h := uint64(0xcbf29ce484222325)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 0x100000001b3
	}
	return h
}

func be64(b []byte) uint64 {
	_ = b[7]
	return uint64(b[0])<<56 | uint64(b[1])<<48 | uint64(b[2])<<40 | uint64(b[3])<<32 | uint64(b[4])<<24 | uint64(b[5])<<16 | uint64(b[6])<<8 | uint64(b[7])
}

// mix returns a hash of two numbers, by the product of both and its two halves.
func mix(a, b uint64) uint64 {
	high, low := bits.Mul64(a^0xa0761d6478bd642f, b^0xe7037ed1a0b428db)
	high, low = bits.Mul64(high^low^0x8ebc6af09c88c6e3, (high+low)^0x589965cc75374cc3)
	return high ^ low
}

// clientOf returns a number for the client of req: its IPv4 address, or the first 64
// bits of its IPv6 address. It is false where the address is not known.
func clientOf(req *tunnel.Request) (client uint64, known bool) {
	addr := req.Source.Addr().Unmap()
	switch {
	case !addr.IsValid():
		return 0, false
	case addr.Is4():
		b := addr.As4()
		return 1<<63 | uint64(b[0])<<24 | uint64(b[1])<<16 | uint64(b[2])<<8 | uint64(b[3]), true
	}
	b := addr.As16()
	return be64(b[:8]), true
}
