//go:build amd64 || arm64

package relay

import (
	"iter"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

// A listedTunnel is a socketTunnel on a list.
type listedTunnel struct {
	f *socketTunnel
	l *loop
}

// Owner implements Live.
func (t *listedTunnel) Owner() Owner { return t.f.owner }

// Progress implements Live.
func (t *listedTunnel) Progress() (Progress, bool) {
	f := t.f
	phase := atomic.LoadUint32(&f.phase)
	return Progress{
		In:         atomic.LoadInt64(&f.sides[1].taken),
		Out:        atomic.LoadInt64(&f.sides[0].taken),
		Moved:      atomic.LoadInt64(&f.moved),
		HalfClosed: phase == phaseHalf,
	}, phase != phaseOver
}

// Kill implements Live.
func (t *listedTunnel) Kill(why Reason, err error) { t.l.abort(t.f, why, err) }

// all returns the tunnels of l that are relay's. The loop waits for no more than
// a copy of some pointers at a time.
func (l *loop) all(relay *Relay) []Live {
	n := int(l.flows.Load())
	all := make([]Live, 0, n+n/8+8)
	for some := range l.pieces(relay) {
		refs := make([]listedTunnel, len(some))
		for i, f := range some {
			refs[i] = listedTunnel{f, l}
			all = append(all, &refs[i])
		}
	}
	return all
}

// pieces yields the tunnels of l that are relay's, some at a time. What it yields is not
// to be kept.
func (l *loop) pieces(relay *Relay) iter.Seq[[]*socketTunnel] {
	return func(yield func([]*socketTunnel) bool) {
		handlers, some := make([]poll.Handler, 0, seatsPiece), make([]*socketTunnel, 0, seatsPiece)
		for at, more := 0, true; more; at += seatsPiece {
			l.Lock()
			all := l.Handlers()
			end := min(at+seatsPiece, len(all))
			handlers = append(handlers[:0], all[min(at, end):end]...)
			more = end < len(all)
			l.Unlock()
			some = some[:0]
			for _, h := range handlers {
				if f, ok := h.(*socketTunnel); ok && f.relay == relay {
					some = append(some, f)
				}
			}
			if !yield(some) {
				return
			}
		}
	}
}

// killFunc is Relay.KillFunc for what k carries.
func (k *socketRelay) killFunc(relay *Relay, why Reason, match func(Owner) bool) (n int) {
	for _, l := range relay.Loops.started() {
		for some := range l.pieces(relay) {
			var orders []abortOrder
			for _, f := range some {
				if atomic.LoadUint32(&f.phase) != phaseOver && match(f.owner) {
					orders = append(orders, abortOrder{f, why, nil})
				}
			}
			if n += len(orders); len(orders) > 0 {
				l.Lock()
				l.order(orders...)
				l.Unlock()
			}
		}
	}
	return n
}

// A bufferSurvey asks a loop what its tunnels keep in memory, since only the
// loop's goroutine may look at them.
type bufferSurvey struct {
	relay  *Relay
	kernel bool
	answer chan<- []heldTunnel // with room for the answer
}

// surveyTime is how long a loop may take for it.
const surveyTimeout = 300 * time.Millisecond

// held returns what each tunnel of relay keeps, and false where the loop does not
// answer in time.
func (l *loop) held(relay *Relay, kernel bool) (all []heldTunnel, ok bool) {
	answer := make(chan []heldTunnel, 1)
	l.Lock()
	l.surveys = append(l.surveys, bufferSurvey{relay, kernel, answer})
	l.Notify()
	l.Unlock()
	timer := time.NewTimer(surveyTimeout)
	defer timer.Stop()
	select {
	case all := <-answer:
		return all, true
	case <-timer.C:
		return nil, false
	}
}

// survey is called on the loop's goroutine.
func (l *loop) survey(s bufferSurvey) (all []heldTunnel) {
	l.Lock()
	defer l.Unlock()
	for _, w := range l.Handlers() {
		f, ok := w.(*socketTunnel)
		if !ok || f.relay != s.relay || f.sides[0].out == nil && f.sides[1].out == nil {
			continue
		}
		t := heldTunnel{Live: &listedTunnel{f, l}, quiet: l.Now-f.moved >= int64(stalledAfter)}
		for i := range f.sides {
			if o := f.sides[i].out; o != nil {
				t.held += int64(o.held + o.n)
			}
			if s.kernel {
				t.held += poll.SocketMemory(f.sides[i].fd)
			}
		}
		all = append(all, t)
	}
	return all
}
