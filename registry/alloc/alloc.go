package alloc

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"time"
)

// DefaultReuseAfter is how long the port or address of a service that is gone is
// reserved for it.
const DefaultReuseAfter = 24 * time.Hour

// An allocation assigns one item of a pool to a key. No two have the same item.
type allocation[K comparable] struct {
	Key   K
	Index uint64
	Since time.Time
	Gone  time.Time // when the key was first missed; zero while it is wanted
}

// A pool is a numbered set of items, such as the ports of a range, and the rules by
// which they are assigned to keys.
type pool[K comparable] struct {
	Size       uint64 // the items are 0 to Size-1; at least 1
	ReuseAfter time.Duration
	Now        time.Time

	Start   func(key K) uint64 // where the search for a key's item begins, modulo Size
	Compare func(a, b K) int   // the order in which keys get items

	// Taken returns how many items from index on must not be assigned to a new
	// key, 0 if this one may. Existing allocations stay. May be nil.
	Taken func(index uint64) uint64
}

// hashOf is a Start. It must not change: the items that clients know depend on it.
func hashOf(key string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key))
	return h.Sum64()
}

// isHeld reports whether an item whose key was gone at gone is still reserved for
// that key at now.
func isHeld(gone, now time.Time, reuseAfter time.Duration) bool { return now.Sub(gone) < reuseAfter }

// assign returns the allocations by index, those of keys that are gone included, and
// the keys that get none, with the reason. Keys that are given twice count once;
// have must have indices below Size, and is not changed. The answer is the same
// for the same arguments in any order.
func (p *pool[K]) assign(keys []K, have []allocation[K]) ([]allocation[K], []K, *Exhausted) {
	wanted := make(map[K]bool, len(keys))
	for _, k := range keys {
		wanted[k] = true
	}
	s := search[K]{pool: p, used: make(map[uint64]allocation[K], len(have)+len(keys)), skips: map[uint64]uint64{}}
	for _, l := range have {
		switch {
		case wanted[l.Key]:
			l.Gone = time.Time{}
			delete(wanted, l.Key)
		case l.Gone.IsZero():
			l.Gone = p.Now
		}
		s.used[l.Index] = l
	}
	fresh := make([]K, 0, len(wanted))
	for k := range wanted {
		fresh = append(fresh, k)
	}
	slices.SortFunc(fresh, p.Compare)
	var without []K
	var why *Exhausted
	for _, k := range fresh {
		at, ok := s.find(p.Start(k) % p.Size)
		if ok {
			s.used[at] = allocation[K]{Key: k, Index: at, Since: p.Now}
			continue
		}
		if why == nil { // and for the next one it is the same
			why = s.exhausted()
		}
		without = append(without, k)
	}
	all := make([]allocation[K], 0, len(s.used))
	for _, l := range s.used {
		all = append(all, l)
	}
	slices.SortFunc(all, func(a, b allocation[K]) int { return cmp.Compare(a.Index, b.Index) })
	return all, without, why
}

// A search is a pool while its items are assigned.
type search[K comparable] struct {
	pool *pool[K]
	used map[uint64]allocation[K] // those that are, or were, a key's

	// skips leads from an item that is not free to a later one, with none free
	// between them: without it, filling a range would walk over all that is full
	// once for each key.
	skips map[uint64]uint64
	path  []uint64 // of nextFree, to use its memory again

	full    bool            // every item is taken, or is or was a key's
	expired []allocation[K] // if full: those that may be assigned again, by when they were left, then by index
}

// find finds an item for a key whose search begins at start: one that was never
// another key's, or else the one that has been free for the longest time.
func (s *search[K]) find(start uint64) (uint64, bool) {
	if !s.full {
		at := s.nextFree(start)
		if at == s.pool.Size {
			at = s.nextFree(0)
		}
		if at < s.pool.Size {
			return at, true
		}
		s.full = true
		s.expire()
	}
	if len(s.expired) == 0 {
		return 0, false
	}
	// Of those left at the same time, the first one from start on.
	first := s.expired[0].Gone
	n, _ := slices.BinarySearchFunc(s.expired, first, func(l allocation[K], t time.Time) int { return cmp.Or(l.Gone.Compare(t), -1) })
	i, _ := slices.BinarySearchFunc(s.expired[:n], start, func(l allocation[K], at uint64) int { return cmp.Compare(l.Index, at) })
	if i == n {
		i = 0
	}
	at := s.expired[i].Index
	s.expired = slices.Delete(s.expired, i, i+1)
	return at, true
}

// nextFree returns the first item from at on that may be assigned and was never a
// key's; Size where there is none.
func (s *search[K]) nextFree(at uint64) uint64 {
	s.path = s.path[:0]
	for at < s.pool.Size {
		to, known := s.skips[at]
		if !known {
			if _, used := s.used[at]; used {
				to = at + 1
			} else if n := s.taken(at); n > 0 {
				to = at + min(n, s.pool.Size-at)
			} else {
				break
			}
		}
		s.path = append(s.path, at)
		at = to
	}
	for _, from := range s.path {
		s.skips[from] = at
	}
	return at
}

func (s *search[K]) taken(at uint64) uint64 {
	if s.pool.Taken == nil {
		return 0
	}
	return s.pool.Taken(at)
}

// expire finds the items that may be assigned again.
func (s *search[K]) expire() {
	for at, l := range s.used {
		if !l.Gone.IsZero() && !isHeld(l.Gone, s.pool.Now, s.pool.ReuseAfter) && s.taken(at) == 0 {
			s.expired = append(s.expired, l)
		}
	}
	slices.SortFunc(s.expired, func(a, b allocation[K]) int { return cmp.Or(a.Gone.Compare(b.Gone), cmp.Compare(a.Index, b.Index)) })
}

// exhausted counts why there is no free item.
func (s *search[K]) exhausted() *Exhausted {
	e := &Exhausted{Size: s.pool.Size, Taken: s.pool.Size}
	for _, l := range s.used {
		switch {
		case l.Gone.IsZero():
			e.Taken--
		case isHeld(l.Gone, s.pool.Now, s.pool.ReuseAfter):
			e.Taken--
			if free := l.Gone.Add(s.pool.ReuseAfter); e.Held == 0 || free.Before(e.Until) {
				e.Until = free
			}
			e.Held++
		}
	}
	return e
}

// Exhausted is the error of keys for which no item is left.
type Exhausted struct {
	What  string    // is missing, and where: "tcp port is free in 20000-20999"; set by the caller
	Size  uint64    // of the pool
	Taken uint64    // items that something else than a key uses
	Held  uint64    // items that are reserved for keys that are gone
	Until time.Time // when the first of those is free
}

func (e *Exhausted) Error() string {
	text := fmt.Sprintf("no %s: %d of %d are other services'", e.What, e.Size-e.Held-e.Taken, e.Size)
	if e.Taken > 0 {
		text += fmt.Sprintf(", %d are taken by others", e.Taken)
	}
	if e.Held > 0 {
		text += fmt.Sprintf(", %d are kept for services that are gone, the first until %s", e.Held, e.Until.UTC().Format(time.RFC3339))
	}
	return text
}
