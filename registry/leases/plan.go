package leases

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"culvert.dev/registry"
)

// DefaultKeep is how long the place of a key that is gone is given to nobody
// else.
const DefaultKeep = 24 * time.Hour

// A Lease is a place that is a key's. No two have the same place.
type Lease[K comparable] struct {
	Key   K
	Place uint64
	Since time.Time
	Gone  time.Time // when the key was first missed; zero while it is wanted
}

// A Plan is what Assign goes by.
type Plan[K comparable] struct {
	Places uint64 // how many there are, from 0 on; at least 1
	Keep   time.Duration
	Now    time.Time

	Start   func(key K) uint64 // where the search for a key's place begins, modulo Places
	Compare func(a, b K) int   // the order in which keys are given places

	// Taken returns how many places from this one on must not be given to
	// anyone new, 0 if this one may. What stands is not asked about. May be nil.
	Taken func(place uint64) uint64
}

// Hash is a Start. It stays what it is: places that are known hang on it.
func Hash(key string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key))
	return h.Sum64()
}

// Kept reports whether a place that was left at gone is still nobody's at now.
func Kept(gone, now time.Time, keep time.Duration) bool { return now.Sub(gone) < keep }

// Assign returns the leases by place, those of keys that are gone included, and
// the keys that get none, which is an *Exhausted's business. Keys that are given
// twice count once; what is in have must have places below Places, and is left
// as it is. The answer is the same for the same arguments in any order.
func (p *Plan[K]) Assign(keys []K, have []Lease[K]) ([]Lease[K], []K, *Exhausted) {
	wanted := make(map[K]bool, len(keys))
	for _, k := range keys {
		wanted[k] = true
	}
	b := board[K]{plan: p, used: make(map[uint64]Lease[K], len(have)+len(keys)), skip: map[uint64]uint64{}}
	for i, l := range have {
		registry.Yield(i)
		switch {
		case wanted[l.Key]:
			l.Gone = time.Time{}
			delete(wanted, l.Key)
		case l.Gone.IsZero():
			l.Gone = p.Now
		}
		b.used[l.Place] = l
	}
	fresh := make([]K, 0, len(wanted))
	for k := range wanted {
		fresh = append(fresh, k)
	}
	slices.SortFunc(fresh, p.Compare)
	var without []K
	var why *Exhausted
	for i, k := range fresh {
		registry.Yield(i)
		at, ok := b.place(p.Start(k) % p.Places)
		if ok {
			b.used[at] = Lease[K]{Key: k, Place: at, Since: p.Now}
			continue
		}
		if why == nil { // and for the next one it is the same
			why = b.exhausted()
		}
		without = append(without, k)
	}
	all := make([]Lease[K], 0, len(b.used))
	for _, l := range b.used {
		all = append(all, l)
	}
	slices.SortFunc(all, func(a, b Lease[K]) int { return cmp.Compare(a.Place, b.Place) })
	return all, without, why
}

// A board is the places while they are given.
type board[K comparable] struct {
	plan *Plan[K]
	used map[uint64]Lease[K] // those that are, or were, somebody's

	// skip leads from a place that can't be had to a later one, before which
	// none can be had either: without it, who fills a range walks over all that
	// is full once for each key.
	skip map[uint64]uint64
	path []uint64 // of next, kept for its memory

	full    bool       // every place is taken, or is or was somebody's
	expired []Lease[K] // then: those that may be had again, the first left first, then by place
}

// place finds a place for who begins to look at start: one that never was
// another's; or else that which has been nobody's for the longest.
func (b *board[K]) place(start uint64) (uint64, bool) {
	if !b.full {
		at := b.next(start)
		if at == b.plan.Places {
			at = b.next(0)
		}
		if at < b.plan.Places {
			return at, true
		}
		b.full = true
		b.expire()
	}
	if len(b.expired) == 0 {
		return 0, false
	}
	// Of those left at the same time, the one that comes first from start on.
	first := b.expired[0].Gone
	n, _ := slices.BinarySearchFunc(b.expired, first, func(l Lease[K], t time.Time) int { return cmp.Or(l.Gone.Compare(t), -1) })
	i, _ := slices.BinarySearchFunc(b.expired[:n], start, func(l Lease[K], at uint64) int { return cmp.Compare(l.Place, at) })
	if i == n {
		i = 0
	}
	at := b.expired[i].Place
	b.expired = slices.Delete(b.expired, i, i+1)
	return at, true
}

// next returns the first place from at on that may be given and never was
// anybody's; Places where there is none.
func (b *board[K]) next(at uint64) uint64 {
	b.path = b.path[:0]
	for at < b.plan.Places {
		to, known := b.skip[at]
		if !known {
			if _, used := b.used[at]; used {
				to = at + 1
			} else if n := b.taken(at); n > 0 {
				to = at + min(n, b.plan.Places-at)
			} else {
				break
			}
		}
		b.path = append(b.path, at)
		at = to
	}
	for _, from := range b.path {
		b.skip[from] = at
	}
	return at
}

func (b *board[K]) taken(at uint64) uint64 {
	if b.plan.Taken == nil {
		return 0
	}
	return b.plan.Taken(at)
}

// expire finds what may be had again.
func (b *board[K]) expire() {
	for at, l := range b.used {
		if !l.Gone.IsZero() && !Kept(l.Gone, b.plan.Now, b.plan.Keep) && b.taken(at) == 0 {
			b.expired = append(b.expired, l)
		}
	}
	slices.SortFunc(b.expired, func(a, b Lease[K]) int { return cmp.Or(a.Gone.Compare(b.Gone), cmp.Compare(a.Place, b.Place)) })
}

// exhausted counts why there is no place.
func (b *board[K]) exhausted() *Exhausted {
	e := &Exhausted{Places: b.plan.Places, Taken: b.plan.Places}
	for _, l := range b.used {
		switch {
		case l.Gone.IsZero():
			e.Taken--
		case Kept(l.Gone, b.plan.Now, b.plan.Keep):
			e.Taken--
			if free := l.Gone.Add(b.plan.Keep); e.Kept == 0 || free.Before(e.Until) {
				e.Until = free
			}
			e.Kept++
		}
	}
	return e
}

// Exhausted is the error of keys for which there is no place left.
type Exhausted struct {
	What   string // there is none of, and where: "tcp port is free in 20000-20999"; the caller's to say
	Places uint64 // there are
	Taken  uint64 // of them, by others than keys
	Kept   uint64 // of them, for keys that are gone
	Until  time.Time
}

func (e *Exhausted) Error() string {
	said := fmt.Sprintf("no %s: %d of %d are other services'", e.What, e.Places-e.Kept-e.Taken, e.Places)
	if e.Taken > 0 {
		said += fmt.Sprintf(", %d are taken by others", e.Taken)
	}
	if e.Kept > 0 {
		said += fmt.Sprintf(", %d are kept for services that are gone, the first until %s", e.Kept, e.Until.UTC().Format(time.RFC3339))
	}
	return said
}
