//go:build amd64 || arm64

package relay

import (
	"testing"
	"time"
	"unsafe"

	"culvert.dev/tunnel/internal/poll"
)

// noBudget is a Budget without limits.
type noBudget struct{}

func (noBudget) Take(int64) bool   { return true }
func (noBudget) Give(int64)        {}
func (noBudget) AddBuffered(int)   {}
func (noBudget) MemoryShort() bool { return false }

// An ownerFunc is an Owner that hears of the end alone.
type ownerFunc func(End)

func (ownerFunc) Answered()                {}
func (ownerFunc) ServiceEnded(error)       {}
func (f ownerFunc) Ended(e End)            { f(e) }
func (ownerFunc) ChargedTo() (any, string) { return nil, "" }

// TestTunnelAtRestIsSmall is the Relay's part of the half KiB that a tunnel at rest may
// take.
func TestTunnelAtRestIsSmall(t *testing.T) {
	if size := unsafe.Sizeof(socketTunnel{}); size > 128 {
		t.Errorf("a socketTunnel has %d bytes, want 128 at most, its size class", size)
	}
}

// TestSweepGoesInPieces has a loop with many tunnels, all of them silent for
// too long, sweep: between two pieces it can look at its events.
func TestSweepGoesInPieces(t *testing.T) {
	l, err := newLoop(noBudget{}, func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { // its goroutine, and what is left
		l.Stop()
		l.Run()
	}()
	relay, ended, wantReason := new(Relay), 0, Idle
	seat := func(idle time.Duration) *socketTunnel {
		f := &socketTunnel{relay: relay, idle: millis(idle), born: l.Now, moved: l.Now, owner: ownerFunc(func(e End) {
			if ended++; e.Reason != wantReason {
				t.Errorf("ended by %s, want %s", e.Reason, wantReason)
			}
		})}
		f.sides[0].fd, f.sides[1].fd = -1, -1
		relay.sockets.flows.Add(1)
		if !l.watchTunnel(f, 0) {
			t.Fatal("the loop is over")
		}
		f.broken = 0
		return f
	}
	const pieces = 3
	for range pieces * sweepPiece {
		seat(time.Hour)
	}
	l.aborts = nil // epoll does not know a descriptor of -1
	sweep := func(when string, pieces, want int) {
		t.Helper()
		before := ended
		for i := 1; i <= pieces; i++ {
			l.sweepSome()
			if got := l.sweep.next == 0; got != (i == pieces) {
				t.Fatalf("%s: after piece %d of %d the sweep is at seat %d of %d", when, i, pieces, l.sweep.next, len(l.sweepAt))
			}
		}
		if ended-before != want {
			t.Fatalf("%s: %d tunnels ended, want %d", when, ended-before, want)
		}
	}
	// The first look, for keepalive, finds them all in time. A flow that was not
	// due is not looked at: all of them fit into one piece then.
	sweep("too early", 1, 0)
	l.Now += int64(keepAliveAfter)
	if got := l.sweepDue(); got > l.Now+int64(sweepGrain) {
		t.Fatalf("the first sweep is at %v, want %v", time.Duration(got), time.Duration(l.Now))
	}
	l.Now = l.sweepDue()
	sweep("for keepalive", pieces, 0)
	for range 10 { // until nobody is asked for
		if l.sweepDue() > l.Now+int64(10*poll.PeerCheckInterval) {
			break
		}
		l.Now = l.sweepDue()
		sweep("for dead peers", pieces, 0)
	}
	if got, want := l.sweepDue(), int64(time.Hour); got != want {
		t.Fatalf("at rest the next sweep is at %v, want %v", time.Duration(got), time.Duration(want))
	}
	// One that moves is asked for again, and no other.
	busy := l.Handlers()[7].(*socketTunnel)
	l.touch(busy)
	if got, want := l.sweepDue(), l.Now+int64(poll.PeerCheckInterval+sweepGrain); got > want {
		t.Fatalf("after a byte the next sweep is at %v, want %v at most", time.Duration(got), time.Duration(want))
	}
	// When it has ended one way, the shorter limit holds.
	busy.half = millis(2 * time.Second)
	busy.sides[0].eof = true
	l.reschedule(busy)
	if got, want := l.sweepDue(), l.Now+int64(3*time.Second); got > want {
		t.Fatalf("half-closed: the next sweep is at %v, want %v at most", time.Duration(got), time.Duration(want))
	}
	wantReason = HalfClosed
	l.Now = l.sweepDue()
	sweep("half-closed", 1, 1)
	wantReason = Idle
	l.Now = int64(time.Hour)
	for i := 1; i <= pieces; i++ {
		l.sweepSome()
		if i < pieces && l.MaxSleep() != 0 {
			t.Errorf("with %d pieces to go the loop sleeps %v, want 0", pieces-i, l.MaxSleep())
		}
		if i == 1 { // into a seat that is passed: its limit counts for the next sweep
			seat(40 * time.Millisecond)
			l.aborts = nil
		}
	}
	if want := pieces * sweepPiece; ended != want {
		t.Fatalf("%d tunnels ended after an hour, want %d", ended, want)
	}
	if got, most := l.MaxSleep(), 50*time.Millisecond; got > most {
		t.Errorf("the next sweep is in %v, want %v at most for the tunnel that came while this one went on", got, most)
	}
	l.Now = l.sweepDue()
	sweep("the tunnel that came", 1, 1)
}
