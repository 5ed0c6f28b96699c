package gateway

import (
	"runtime/metrics"
	"time"
)

// When collections are spaced out, and how far. Go collects where the heap has
// doubled, at 4 MiB at the earliest. A gateway that holds little and allocates
// much, as golang.org/x/crypto/ssh does for each packet, would collect a hundred
// times a second.
const (
	usualPercent = 100     // GOGC, unless it is set
	leastHeap    = 4 << 20 // of the runtime, at usualPercent

	// What may be allocated between two collections: so much, and no more than one part
	// in so many of the memory limit. Beyond spaceBelow percent of that in use, the
	// runtime collects as usual.
	mostGarbage  = 32 << 20
	garbageShare = 16
	spaceBelow   = 50

	oftenRate  = 20.0 // collections a second that are too many
	seldomRate = 8.0  // and those that are not, without what is done about it

	seldomAfter   = time.Second     // how long they must be seldom
	lookUnlimited = 2 * time.Second // between two looks where there is no memory limit
)

// heapState is what the runtime says of its collections.
type heapState struct {
	cycles      uint64 // collections so far, without those that were asked for
	live, roots int64  // bytes: what the last one found in use, and the stacks and globals
}

// readHeap returns what this process's runtime says.
func readHeap() heapState {
	samples := []metrics.Sample{
		{Name: "/gc/cycles/automatic:gc-cycles"},
		{Name: "/gc/heap/live:bytes"},
		{Name: "/gc/scan/stack:bytes"},
		{Name: "/gc/scan/globals:bytes"},
	}
	metrics.Read(samples)
	get := func(i int) uint64 {
		if samples[i].Value.Kind() != metrics.KindUint64 {
			return 0
		}
		return samples[i].Value.Uint64()
	}
	return heapState{cycles: get(0), live: int64(get(1)), roots: int64(get(2) + get(3))}
}

// spacing has the runtime collect less often while it does so many times a second.
type spacing struct {
	set     func(percent int) // nil if the runtime's must stay
	collect func()            // a collection now

	percent int // that was set last; 0 for usualPercent
	cycles  uint64
	since   time.Time // when there were so many
}

// look sets what follows from h, of which used bytes of a limit are in use. 0 means that
// there is no limit. It never has the runtime collect later than usual while tight.
func (s *spacing) look(now time.Time, h heapState, used, limit int64, tight bool) {
	most := percentFor(h, used, limit)
	if tight {
		most = usualPercent
	}
	if s.since.IsZero() {
		s.cycles, s.since = h.cycles, now
		return
	}
	passed := now.Sub(s.since)
	rate := float64(h.cycles-s.cycles) / max(passed.Seconds(), 1e-3)
	if s.percent <= usualPercent {
		if passed < lookEvery {
			return // too short to say
		}
		s.cycles, s.since = h.cycles, now
		if rate >= oftenRate && most > usualPercent {
			s.change(most)
		}
		return
	}
	// What is in use has grown: each look makes the garbage less.
	if most == usualPercent || most < s.percent-s.percent/8 {
		s.change(most)
	}
	if passed < seldomAfter {
		return
	}
	s.cycles, s.since = h.cycles, now
	switch {
	case rate*float64(s.percent)/usualPercent < seldomRate:
		s.change(usualPercent)
		s.collect() // what was allocated meanwhile goes at once, and not in two minutes
	case most > s.percent+s.percent/8:
		s.change(most)
	}
}

// schedule sets the timer of the next look where there is no memory limit: none if there is
// nothing to do.
func (s *spacing) schedule(timer *time.Timer) {
	switch {
	case s.set == nil:
		timer.Stop()
	case s.percent > usualPercent:
		timer.Reset(lookEvery)
	default:
		timer.Reset(lookUnlimited)
	}
}

// end leaves the runtime as it was.
func (s *spacing) end() {
	if s.set != nil {
		s.change(usualPercent)
	}
}

func (s *spacing) change(percent int) {
	if percent = max(percent, usualPercent); percent != max(s.percent, usualPercent) {
		s.percent = percent
		s.set(percent)
	}
}

// percentFor returns the highest percentage with which no more is allocated between two
// collections than may be, or usualPercent.
func percentFor(h heapState, used, limit int64) int {
	garbage := int64(mostGarbage)
	if limit > 0 {
		if used >= limit/100*spaceBelow {
			return usualPercent
		}
		garbage = min(garbage, limit/garbageShare)
	}
	// The runtime's least heap grows with the percentage, so that less in use makes no difference.
	return max(int(garbage*100/max(h.live+h.roots, leastHeap)), usualPercent)
}
