//go:build amd64 || arm64

package tunnel

import (
	"testing"
	"time"
)

// TestSweepGoesInPieces has a loop with many tunnels, all of them silent for
// too long, sweep: between two pieces it can look at its events.
func TestSweepGoesInPieces(t *testing.T) {
	l, err := newLoop(&Budget{}, func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer l.release()
	relay, ended := new(Relay), 0
	seat := func(idle time.Duration) *flow {
		f := &flow{relay: relay, idle: millis(idle), born: l.now, moved: l.now, record: record{rare: &rare{ended: func(e End) {
			if ended++; e.Reason != Idle {
				t.Errorf("ended by %s, want %s", e.Reason, Idle)
			}
		}}}}
		f.sides[0].fd, f.sides[1].fd = -1, -1
		relay.kernel.flows.Add(1)
		if !l.welcome(f, 0) {
			t.Fatal("the loop is over")
		}
		f.broken = 0
		return f
	}
	const pieces = 3
	for range pieces * sweepPiece {
		seat(time.Minute)
	}
	l.kills = nil // epoll does not know a descriptor of -1
	// All in time: nothing ends, and the sweep goes all the way.
	for range pieces {
		if l.sweepSome(); ended > 0 {
			t.Fatalf("%d tunnels ended that were in time", ended)
		}
	}
	if l.sweep.next != 0 {
		t.Fatalf("after %d pieces the sweep is at seat %d, want its end", pieces, l.sweep.next)
	}
	l.now += int64(time.Minute)
	for i := 1; i <= pieces; i++ {
		if l.sweepSome(); ended != i*sweepPiece {
			t.Fatalf("%d tunnels ended in %d pieces, want %d in each", ended, i, sweepPiece)
		}
		if want := time.Duration(0); i < pieces && l.wait() != want {
			t.Errorf("with %d pieces to go the loop sleeps %v, want %v", pieces-i, l.wait(), want)
		}
		if i == 1 { // into a seat that is passed: its limit counts for the next sweep
			seat(40 * time.Millisecond)
			l.kills = nil
		}
	}
	if got, want := l.sweepPause(), 10*time.Millisecond; got != want {
		t.Errorf("the next sweep is in %v, want %v for the tunnel that came while this one went on", got, want)
	}
	l.now += int64(40 * time.Millisecond)
	for l.sweepSome(); l.sweep.next != 0; {
		l.sweepSome()
	}
	if want := pieces*sweepPiece + 1; ended != want {
		t.Errorf("%d tunnels ended, want %d", ended, want)
	}
}
