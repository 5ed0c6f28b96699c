//go:build amd64 || arm64

package tunnel

import "sync/atomic"

// A flow belongs to its loop, but for what the list shows: that the loop
// writes, and the list reads, atomically. The loop itself reads it plainly, as
// nobody else writes.

// The phases of a flow.
const (
	phaseOpen uint32 = iota
	phaseHalf        // one side has ended its stream
	phaseOver
)

// touch notes that something moved at the given clock.
func (f *flow) touch(now int64) { atomic.StoreInt64(&f.moved, now) }

// took counts n bytes that s's socket has taken.
func (s *side) took(n int) { atomic.StoreInt64(&s.taken, s.taken+int64(n)) }

// halve notes that a side has ended its stream. When the other one does, the
// tunnel is over.
func (f *flow) halve() { atomic.StoreUint32(&f.phase, phaseHalf) }

// depart takes f off the lists that are being read.
func (f *flow) depart() { atomic.StoreUint32(&f.phase, phaseOver) }

// A listedFlow is a flow on a list.
type listedFlow struct {
	f *flow
	l *loop
}

func (t *listedFlow) about() *record { return &t.f.record }

func (t *listedFlow) look() (progress, bool) {
	f := t.f
	phase := atomic.LoadUint32(&f.phase)
	return progress{
		in:    atomic.LoadInt64(&f.sides[1].taken),
		out:   atomic.LoadInt64(&f.sides[0].taken),
		moved: atomic.LoadInt64(&f.moved),
		half:  phase == phaseHalf,
	}, phase != phaseOver
}

func (t *listedFlow) kill(why Reason, err error) { t.l.kill(t.f, why, err) }

// all returns the flows of l that are relay's. The loop waits for no more than
// a copy of pointers.
func (l *loop) all(relay *Relay) []listed {
	n := int(l.flows.Load())
	seats := make([]watched, 0, n+n/8+8)
	l.mu.Lock()
	seats = append(seats, l.seats...)
	l.mu.Unlock()
	refs, all := make([]listedFlow, 0, len(seats)), make([]listed, 0, len(seats))
	for _, w := range seats {
		if f, ok := w.(*flow); ok && f.relay == relay {
			refs = append(refs, listedFlow{f, l})
			all = append(all, &refs[len(refs)-1])
		}
	}
	return all
}
