package gateway

import (
	"slices"
	"testing"
	"time"
)

// A clock and a runtime that collects as often as a step says.
type fakeHeap struct {
	s         *spacing
	now       time.Time
	h         heapState
	limit     int64
	used      int64
	tight     bool
	set       []int
	collected int
}

func newFakeHeap() *fakeHeap {
	f := &fakeHeap{now: time.Unix(0, 0), h: heapState{live: 2 << 20}}
	f.s = &spacing{set: func(p int) { f.set = append(f.set, p) }, collect: func() { f.collected++ }}
	f.look(0, 0)
	return f
}

// look has the runtime collect n times in the time before a look.
func (f *fakeHeap) look(in time.Duration, n uint64) {
	f.now = f.now.Add(in)
	f.h.cycles += n
	f.s.look(f.now, f.h, f.used, f.limit, f.tight)
}

func (f *fakeHeap) want(t *testing.T, what string, set ...int) {
	t.Helper()
	if !slices.Equal(f.set, set) {
		t.Errorf("%s: the percentage was set to %v, want %v", what, f.set, set)
	}
	f.set = nil
}

// Collections are spaced out while they are many, and as usual when they are seldom.
func TestCollectionsAreSpacedOut(t *testing.T) {
	f := newFakeHeap()
	for range 20 {
		f.look(lookEvery, 4)
	}
	f.want(t, "16 a second")
	f.look(lookEvery/5, 100)
	f.want(t, "a look after too short a time")
	f.look(lookEvery, 5)
	f.want(t, "20 a second and more", 800)
	for range 20 {
		f.look(seldomAfter, 1)
	}
	f.want(t, "one a second, which would be 8")
	if f.collected != 0 {
		t.Errorf("%d collections were asked for", f.collected)
	}
	f.look(seldomAfter/2, 0)
	f.want(t, "none for half a second")
	f.look(seldomAfter/2, 0)
	f.want(t, "none for a second", 100)
	if f.collected != 1 {
		t.Errorf("%d collections were asked for at rest, want 1", f.collected)
	}
	f.look(time.Hour, 100)
	f.want(t, "an hour with 100")
	f.s.end()
	f.want(t, "the end at rest")
	f.look(lookEvery, 5)
	f.s.end()
	f.want(t, "the end while they are many", 800, 100)
}

// More in use means less garbage in percent, at the next look.
func TestGarbageIsBounded(t *testing.T) {
	f := newFakeHeap()
	f.look(lookEvery, 50)
	f.want(t, "2 MiB in use", 800)
	f.h.live = 8 << 20
	f.look(time.Millisecond, 0)
	f.want(t, "8 MiB in use", 400)
	f.h.live = 2 << 20
	f.look(lookEvery, 10)
	f.want(t, "less than a second")
	f.look(seldomAfter, 10)
	f.want(t, "2 MiB in use for a second", 800)
	f.h.live, f.h.roots = 20<<20, 12<<20
	f.look(time.Millisecond, 0)
	f.want(t, "32 MiB in use", 100)
	f.look(lookEvery, 100)
	f.want(t, "32 MiB in use, many collections")
}

// A memory limit leaves less garbage, and none beyond the usual where much of it is in use.
func TestGarbageLeavesRoomToTheLimit(t *testing.T) {
	for _, c := range []struct {
		limit, used int64
		want        int
	}{
		{0, 0, 800},
		{1 << 30, 1 << 28, 800},
		{1 << 30, 1 << 29, 100},
		{256 << 20, 1 << 20, 400},
		{64 << 20, 1 << 20, 100},
		{1 << 20, 1 << 19, 100},
	} {
		if got := percentFor(heapState{live: 1 << 20}, c.used, c.limit); got != c.want {
			t.Errorf("%d of %d in use: %d percent, want %d", c.used, c.limit, got, c.want)
		}
	}
	f := newFakeHeap()
	f.limit, f.used = 1<<30, 1<<20
	f.look(lookEvery, 50)
	f.want(t, "1 MiB of a GiB in use", 800)
	f.tight = true
	f.look(time.Millisecond, 0)
	f.want(t, "memory is short", 100)
	f.look(lookEvery, 50)
	f.want(t, "memory is still short")
}

// GOGC that is set stays.
func TestGOGCStays(t *testing.T) {
	w := &memoryWatch{} // without SetGCPercent
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	w.spaceOut()
	if w.space.schedule(timer); timer.Stop() {
		t.Error("a look that does nothing has a timer")
	}
	w.space.end()
}

// What the runtime says of itself is there.
func TestReadHeap(t *testing.T) {
	if h := readHeap(); h.roots == 0 {
		t.Errorf("%+v: no stacks and globals", h)
	}
}
