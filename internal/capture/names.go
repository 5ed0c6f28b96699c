package capture

import (
	"container/list"
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// Ranges of the addresses of Names: one for benchmarks (RFC 2544), which no network uses, and
// one of unique local addresses.
var (
	namesRange4 = netip.MustParsePrefix("198.18.0.0/15")
	namesRange6 = netip.MustParsePrefix("fd63:7600:6e61:6d65::/96")
)

// maxNames is how many names have an address at once, half of the addresses of the smaller
// range. The one that was not used for the longest time loses its own.
const maxNames = 1 << 16

// minHeld is how long a name has its address for itself since it was last used. Programs keep
// an address for longer than the 5 s of the answer: Java for 30 s, browsers for a minute. With
// another name's they would reach the wrong service.
const minHeld = 2 * time.Minute

// Names gives addresses to names that are asked for, so that a captured connection to one has
// its name again. The zero value is ready to use.
type Names struct {
	mu     sync.Mutex // guards what follows
	byName map[tunnel.Name]*list.Element
	byAddr map[uint32]*list.Element // by the number of an address in either range
	used   list.List                // of *namedAddr, the last used first
}

type namedAddr struct {
	name   tunnel.Name
	number uint32
	last   time.Time // when it was used
}

// use notes that a name is used. The caller holds mu.
func (n *Names) use(e *list.Element) *namedAddr {
	one := e.Value.(*namedAddr)
	one.last = time.Now()
	n.used.MoveToFront(e)
	return one
}

// NameRanges returns the ranges that addresses of Names are from.
func NameRanges() []netip.Prefix { return []netip.Prefix{namesRange4, namesRange6} }

// Addrs returns the addresses of a name, the same for as long as it is used. They are found by
// the name, so that a program that has one still has that name's after a restart of the agent:
// another name gets it only where that is asked for first and would have had the same, or one
// just before. They are zero where as many names as have an address were used lately.
func (n *Names) Addrs(name tunnel.Name) (v4, v6 netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.byName == nil {
		n.byName, n.byAddr = map[tunnel.Name]*list.Element{}, map[uint32]*list.Element{}
	}
	e, ok := n.byName[name]
	if !ok {
		if n.used.Len() >= maxNames {
			oldest := n.used.Back().Value.(*namedAddr)
			if time.Since(oldest.last) < minHeld {
				return netip.Addr{}, netip.Addr{}
			}
			n.used.Remove(n.used.Back())
			delete(n.byName, oldest.name)
			delete(n.byAddr, oldest.number)
		}
		number := n.free(name)
		e = n.used.PushFront(&namedAddr{name: name, number: number})
		n.byName[name], n.byAddr[number] = e, e
	}
	number := n.use(e).number
	a4, a6 := namesRange4.Addr().As4(), namesRange6.Addr().As16()
	binary.BigEndian.PutUint32(a4[:], binary.BigEndian.Uint32(a4[:])+number)
	binary.BigEndian.PutUint32(a6[12:], number)
	return netip.AddrFrom4(a4), netip.AddrFrom16(a6)
}

// free returns the number of an address for name that no name has: the first from its hash on.
// The first and the last one of the range are nobody's. The caller holds mu.
func (n *Names) free(name tunnel.Name) uint32 {
	const count = 1<<(32-15) - 2 // of namesRange4
	h := fnv.New32a()
	_, _ = h.Write([]byte(name.String()))
	for i := h.Sum32() % count; ; i = (i + 1) % count {
		if _, taken := n.byAddr[i+1]; !taken {
			return i + 1
		}
	}
}

// Name returns the name that has an address. It is false with a zero Name for an address of
// another range; mine says that the address is one of these, and has no name any more.
func (n *Names) Name(a netip.Addr) (name tunnel.Name, mine bool) {
	var number uint32
	switch a = a.Unmap(); {
	case namesRange4.Contains(a):
		b, first := a.As4(), namesRange4.Addr().As4()
		number = binary.BigEndian.Uint32(b[:]) - binary.BigEndian.Uint32(first[:])
	case namesRange6.Contains(a):
		b := a.As16()
		number = binary.BigEndian.Uint32(b[12:])
	default:
		return tunnel.Name{}, false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	e, ok := n.byAddr[number]
	if !ok {
		return tunnel.Name{}, true
	}
	return n.use(e).name, true
}

// Resolve is for Protocol.Resolve: a request to the address of a name is one for the name.
func (n *Names) Resolve(req *tunnel.Request) error {
	name, mine := n.Name(req.Addr)
	switch {
	case !mine:
	case name.IsZero():
		return tunnel.Refusef(tunnel.NoRoute, "captured: %s is the address of no name any more: look the name up again", req.Addr)
	default:
		req.Name, req.Addr = name, netip.Addr{}
	}
	return nil
}
