package ports

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"culvert.dev/registry"
)

// DefaultKeep is how long the port of a service that is gone is given to
// nobody else.
const DefaultKeep = 24 * time.Hour

// A Range is the ports there are to give.
type Range = registry.PortRange

// A Key is what gets a port: one port of one service in one protocol.
type Key struct {
	Protocol string // "tcp" or "udp"
	Service  string // the name it is asked for by
	Port     uint16 // of the service; 0 for one that does not tell its ports apart
}

func (k Key) String() string {
	if k.Port == 0 {
		return k.Protocol + " " + k.Service
	}
	return fmt.Sprintf("%s %s:%d", k.Protocol, k.Service, k.Port)
}

// Compare orders keys by service, port and protocol.
func (k Key) Compare(other Key) int {
	return cmp.Or(cmp.Compare(k.Service, other.Service), cmp.Compare(k.Port, other.Port), cmp.Compare(k.Protocol, other.Protocol))
}

// An Assignment is a port that is a Key's. No two of one protocol have the same
// port.
type Assignment struct {
	Key
	Assigned uint16
	Since    time.Time
	Gone     time.Time // when its service was first missed; zero while that is there
}

// A Failure is a Key that gets no port.
type Failure struct {
	Key
	Err error // for people, without the Key
}

// A Plan is what Assign goes by.
type Plan struct {
	Range Range
	Keep  time.Duration // how long the port of a service that is gone is nobody's; 0 means DefaultKeep
	Now   time.Time

	// Taken reports whether a port must not be given to anyone new. What stands
	// is not asked about. May be nil.
	Taken func(protocol string, port uint16) bool
}

// Assign returns the assignments, those of services that are gone included, and
// the keys that get none. Keys that are given twice count once; have is left as
// it is. The answer is ordered by port and protocol, and is the same for the
// same arguments in any order.
//
// An assignment outside of the range, which was another one once, is moved into
// it, or dropped where its service is gone. A service that did not tell its ports
// apart and now has a single one keeps its assignment, and the other way round.
func (p *Plan) Assign(keys []Key, have []Assignment) ([]Assignment, []Failure) {
	wanted := make(map[Key]bool, len(keys))
	for _, k := range keys {
		wanted[k] = true
	}
	have = inherit(wanted, have)
	boards := map[string]*board{}
	boardOf := func(protocol string) *board {
		b := boards[protocol]
		if b == nil {
			b = &board{protocol: protocol, plan: p, places: make([]place, p.Range.Len())}
			boards[protocol] = b
		}
		return b
	}
	for i, a := range have {
		registry.Yield(i)
		if !p.Range.Contains(a.Assigned) {
			continue
		}
		switch {
		case wanted[a.Key]:
			a.Gone = time.Time{}
			delete(wanted, a.Key)
		case a.Gone.IsZero():
			a.Gone = p.Now
		}
		boardOf(a.Protocol).put(a)
	}
	fresh := make([]Key, 0, len(wanted))
	for k := range wanted {
		fresh = append(fresh, k)
	}
	slices.SortFunc(fresh, Key.Compare)
	var failures []Failure
	for i, k := range fresh {
		registry.Yield(i)
		if err := boardOf(k.Protocol).assign(k); err != nil {
			failures = append(failures, Failure{k, err})
		}
	}
	var all []Assignment
	for _, b := range boards {
		for i := range b.places {
			if b.places[i].used {
				all = append(all, b.places[i].Assignment)
			}
		}
	}
	slices.SortFunc(all, func(a, b Assignment) int {
		return cmp.Or(cmp.Compare(a.Assigned, b.Assigned), cmp.Compare(a.Protocol, b.Protocol))
	})
	return all, failures
}

// inherit returns have, with the assignment of a service for any port as that
// for its one port where that is what is wanted now, and the reverse.
func inherit(wanted map[Key]bool, have []Assignment) []Assignment {
	type service struct{ protocol, name string }
	want, stand := map[service][]Key{}, map[service]int{}
	for k := range wanted {
		s := service{k.Protocol, k.Service}
		want[s] = append(want[s], k)
	}
	for _, a := range have {
		if a.Gone.IsZero() {
			stand[service{a.Protocol, a.Service}]++
		}
	}
	out, renamed := slices.Clone(have), map[Key]bool{}
	for i := range out {
		a := &out[i]
		s := service{a.Protocol, a.Service}
		if keys := want[s]; a.Gone.IsZero() && stand[s] == 1 && len(keys) == 1 && (a.Port == 0) != (keys[0].Port == 0) {
			a.Port = keys[0].Port
			renamed[a.Key] = true
		}
	}
	// What it had in that way before is nobody's: there must not be two.
	return slices.DeleteFunc(out, func(a Assignment) bool { return renamed[a.Key] && !a.Gone.IsZero() })
}

func (p *Plan) keep() time.Duration {
	if p.Keep == 0 {
		return DefaultKeep
	}
	return p.Keep
}

// start is where the search for k's port begins. It does not depend on the
// protocol: a service of TCP and UDP most likely has one port for both.
func (p *Plan) start(k Key) int {
	h := fnv.New64a()
	_, _ = fmt.Fprintf(h, "%s:%d", k.Service, k.Port)
	return int(h.Sum64() % uint64(p.Range.Len()))
}

// A board is the ports of one protocol.
type board struct {
	protocol string
	plan     *Plan
	places   []place // by port less the range's first
	full     bool    // no port was free for the last key, so none is for the next
	why      error
}

type place struct {
	Assignment
	used bool
}

func (b *board) put(a Assignment) { b.places[a.Assigned-b.plan.Range.First] = place{a, true} }

// assign gives k a port that never was another's; or else that which has been
// nobody's for the longest.
func (b *board) assign(k Key) error {
	if b.full {
		return b.why
	}
	p := b.plan
	var count struct{ kept, taken int }
	var until time.Time // when the first one that is kept may be had
	oldest := -1
	start := p.start(k)
	for i := range b.places {
		at := (start + i) % len(b.places)
		port := p.Range.First + uint16(at)
		switch one := &b.places[at]; {
		case one.used && one.Gone.IsZero():
		case one.used && p.Now.Sub(one.Gone) < p.keep():
			if free := one.Gone.Add(p.keep()); count.kept == 0 || free.Before(until) {
				until = free
			}
			count.kept++
		case p.Taken != nil && p.Taken(b.protocol, port):
			count.taken++
		case !one.used:
			b.put(Assignment{Key: k, Assigned: port, Since: p.Now})
			return nil
		case oldest < 0 || one.Gone.Before(b.places[oldest].Gone):
			oldest = at
		}
	}
	if oldest >= 0 {
		b.put(Assignment{Key: k, Assigned: p.Range.First + uint16(oldest), Since: p.Now})
		return nil
	}
	b.full, b.why = true, p.exhausted(b.protocol, count.kept, count.taken, until)
	return b.why
}

// exhausted says why there is no port, and when there may be one.
func (p *Plan) exhausted(protocol string, kept, taken int, until time.Time) error {
	said := fmt.Sprintf("no %s port is free in %s: %d of %d are other services'", protocol, p.Range, p.Range.Len()-kept-taken, p.Range.Len())
	if taken > 0 {
		said += fmt.Sprintf(", %d are taken by others", taken)
	}
	if kept > 0 {
		said += fmt.Sprintf(", %d are kept for services that are gone, the first until %s", kept, until.UTC().Format(time.RFC3339))
	}
	return &Exhausted{said}
}

// Exhausted is the error of a Failure for which there is no port left.
type Exhausted struct{ said string }

func (e *Exhausted) Error() string { return e.said }
