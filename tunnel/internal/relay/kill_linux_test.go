//go:build amd64 || arm64

package relay

import (
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

// seated returns a Relay of one loop with n tunnels, whose descriptors are no sockets. The
// loop does not run; the owner of each tunnel is what owner returns.
func seated(t testing.TB, n int, owner func(i int) Owner) (*Relay, *loop) {
	t.Helper()
	l, err := newLoop(noBudget{}, func() {})
	if err != nil {
		t.Fatal(err)
	}
	r := &Relay{Loops: &Loops{}}
	r.Loops.once.Do(func() {})
	r.Loops.loops.Store(&[]*loop{l})
	l.Lock()
	defer l.Unlock()
	for i := range n {
		f := &socketTunnel{relay: r, owner: owner(i)}
		f.sides[0].fd, f.sides[1].fd = -1, -1
		r.sockets.flows.Add(1)
		l.add(f)
	}
	return r, l
}

// stopAndRun ends the loop and what is left in it.
func (l *loop) stopAndRun(t testing.TB) {
	t.Helper()
	l.Stop()
	l.Run()
}

// TestLoopEndsManyTunnelsInTurns has half of many tunnels ended at once: the loop looks at
// its events in between, and those that nobody meant stay.
func TestLoopEndsManyTunnelsInTurns(t *testing.T) {
	const n = 40_000
	ended := make([]atomic.Int32, n)
	r, l := seated(t, n, func(i int) Owner {
		return &numberedOwner{i, func(i int, e End) {
			if e.Reason == "revoked" {
				ended[i].Add(1)
			}
		}}
	})
	defer l.stopAndRun(t)
	shown := 0
	got := r.KillFunc("revoked", func(o Owner) bool {
		shown++
		return o.(*numberedOwner).i%2 == 0
	})
	if got != n/2 || shown != n {
		t.Errorf("%d of %d tunnels are to end, want %d of %d", got, shown, n/2, n)
	}
	l.Orders()
	turns := 1
	for ; len(l.ending) > 0; turns++ {
		if got := l.MaxSleep(); got != 0 {
			t.Fatalf("with tunnels to end the loop sleeps %v, want 0", got)
		}
		if turns == 1 { // once more, for those that are on their way and those that are gone
			r.KillFunc("killed", func(o Owner) bool { return o.(*numberedOwner).i%2 == 0 })
			l.Orders()
		}
		l.RunDue()
	}
	if turns < 3 {
		t.Errorf("the loop ended %d tunnels in %d turns, want more turns of %v each", n/2, turns, endTime)
	}
	if got := l.MaxSleep(); got == 0 {
		t.Error("with nothing to do the loop does not sleep")
	}
	for i := range ended {
		if got, want := ended[i].Load(), int32(1-i%2); got != want {
			t.Fatalf("tunnel %d was revoked %d times, want %d", i, got, want)
		}
	}
}

// A numberedOwner is an Owner with a number.
type numberedOwner struct {
	i     int
	ended func(i int, e End)
}

func (*numberedOwner) Answered()                {}
func (*numberedOwner) ServiceEnded(error)       {}
func (o *numberedOwner) Ended(e End)            { o.ended(o.i, e) }
func (*numberedOwner) ChargedTo() (any, string) { return nil, "" }

// BenchmarkKillFunc looks at 100,000 tunnels in a loop and ends one of them.
func BenchmarkKillFunc(b *testing.B) {
	const n = 100_000
	r, l := seated(b, n, func(i int) Owner { return &numberedOwner{i, func(int, End) {}} })
	defer l.stopAndRun(b)
	b.ResetTimer()
	for i := range b.N {
		if got := r.KillFunc("revoked", func(o Owner) bool { return o.(*numberedOwner).i == i%n }); got > 1 {
			b.Fatalf("ended %d", got)
		}
	}
}

// BenchmarkEndSome reports for how long a loop is held while 100,000 tunnels end: in most
// turns, and in all but one of a hundred.
func BenchmarkEndSome(b *testing.B) {
	var turns []time.Duration
	for range b.N {
		b.StopTimer()
		r, l := seated(b, 100_000, func(i int) Owner { return ownerFunc(func(End) {}) })
		r.KillFunc("revoked", func(Owner) bool { return true })
		b.StartTimer()
		start := clock()
		for l.Orders(); len(l.ending) > 0; l.RunDue() {
			now := clock()
			turns = append(turns, time.Duration(now-start))
			start = now
		}
		b.StopTimer()
		l.stopAndRun(b)
		b.StartTimer()
	}
	slices.Sort(turns)
	b.ReportMetric(float64(turns[len(turns)/2].Microseconds()), "µs/turn")
	b.ReportMetric(float64(turns[len(turns)*99/100].Microseconds()), "µs/turn-p99")
}
