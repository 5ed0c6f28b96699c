package dns

import (
	"hash/maphash"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel"
)

// rateSlots is how many sources' rates are counted at a time. Sources that
// share a slot by chance share its rate; the memory is the same in any flood.
const rateSlots = 1 << 16

// A rateLimit counts the responses by UDP to each network in each second, as a
// source address of UDP can be forged.
type rateLimit struct {
	began time.Time // seconds are counted from here
	seed  maphash.Seed
	limit uint32                   // a second
	slots [rateSlots]atomic.Uint64 // second << 32 | count
}

func newRateLimit(limit int) *rateLimit {
	return &rateLimit{seed: maphash.MakeSeed(), limit: uint32(limit), began: time.Now()}
}

// take counts one response to from. It is true while the second's rate is not
// reached; beyond it, every other one may slip: it is answered with an empty
// TC=1, which a real client repeats by TCP, and which is no longer than the
// question.
func (r *rateLimit) take(from netip.Addr, now time.Time) (ok, slip bool) {
	slot := &r.slots[maphash.Comparable(r.seed, network(from))%rateSlots]
	second := uint64(uint32(now.Sub(r.began)/time.Second)+1) << 32
	for {
		old := slot.Load()
		count := second | 1
		if old&^0xffffffff == second {
			if uint32(old) == 1<<32-1 {
				return false, false
			}
			count = old + 1
		}
		if slot.CompareAndSwap(old, count) {
			n := uint32(count)
			return n <= r.limit, n > r.limit && n%2 == 0
		}
	}
}

// network returns the prefix that is limited as one source by UDP: a /24, or a
// /56.
func network(a netip.Addr) netip.Prefix {
	bits := 56
	if a = a.Unmap(); a.Is4() {
		bits = 24
	}
	p, _ := a.WithZone("").Prefix(bits)
	return p
}

// host returns the prefix that is limited as one client whose address is proven
// or trusted: an address, or a /64.
func host(a netip.Addr) netip.Prefix {
	bits := 64
	if a = a.Unmap(); a.Is4() {
		bits = 32
	}
	p, _ := a.WithZone("").Prefix(bits)
	return p
}

// shares hands out places, of which one client has only so many. What it
// remembers is bounded by the places.
type shares struct {
	all, each int

	mu    sync.Mutex // guards what follows
	taken int
	by    map[netip.Prefix]int
}

func (s *shares) take(from netip.Addr) bool {
	p := host(from)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken >= s.all || s.by[p] >= s.each {
		return false
	}
	if s.by == nil {
		s.by = map[netip.Prefix]int{}
	}
	s.taken++
	s.by[p]++
	return true
}

func (s *shares) give(from netip.Addr) {
	p := host(from)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken--
	if s.by[p]--; s.by[p] <= 0 {
		delete(s.by, p)
	}
}

// crowded reports whether more than half of the places are taken.
func (s *shares) crowded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.taken > s.all/2
}

// refusalLogInterval is how often one kind of refusal is logged.
const refusalLogInterval = 10 * time.Second

// refusalLog logs refusals: the first of a kind, and then how many there were.
// Names that were asked for are not written.
type refusalLog struct {
	mu   sync.Mutex // guards what follows
	kind map[tunnel.Reason]*refusalCount
}

type refusalCount struct {
	last  time.Time
	count int // since last
}

func (c *refusalLog) add(log *slog.Logger, r *Result, now time.Time) {
	if log == nil {
		return
	}
	c.mu.Lock()
	if c.kind == nil {
		c.kind = map[tunnel.Reason]*refusalCount{}
	}
	k := c.kind[r.Reason]
	if k == nil {
		k = &refusalCount{}
		c.kind[r.Reason] = k
	}
	k.count++
	count := k.count
	due := k.last.IsZero() || now.Sub(k.last) >= refusalLogInterval
	if due {
		k.last, k.count = now, 0
	}
	c.mu.Unlock()
	if due {
		log.Info("query not answered", "reason", string(r.Reason), "count", count, "transport", string(r.Transport),
			"from", network(r.From.Addr()).String(), "view", r.View, "type", r.Type.String(), "rcode", r.Rcode)
	}
}
