package relay

import (
	"errors"
	"fmt"
	"iter"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

const (
	lingerTimeout    = 10 * time.Second // how long a stream without half-close may go on after its other side ended
	blockedWriteTime = time.Second      // a write that takes longer may hide that the side nobody reads has aborted
)

// A copyRelay carries pairs of streams of any kind, with a goroutine for each
// direction that moves bytes, and for those that cannot be parked. One sweep
// keeps the limits of all of them.
type copyRelay struct {
	mu      sync.Mutex // guards what follows
	tunnels Seats[*copyTunnel]
	pause   time.Duration // the sweep's, as it last found
	wake    chan struct{} // to the sweep, when the last tunnel is gone or one with shorter limits came; nil while there is none
	closed  bool
	wg      sync.WaitGroup
}

type copyTunnel struct {
	idle, half time.Duration
	relay      *Relay
	owner      Owner
	seat       int32   // on the list of relay
	pumps      [2]pump // what the client sends, and what the service does

	moved       atomic.Int64 // when a byte last moved, nanoseconds of clock
	open        atomic.Int32 // pumps that have not ended
	halves      atomic.Int32 // directions that have seen their end
	writing     atomic.Int32 // writes that have not returned
	lost        atomic.Bool  // one of them failed
	checks      peerChecks
	noHalfClose atomic.Bool // a side could not be half-closed
	finished    atomic.Bool // finish was called: what the pumps see now is our own doing

	once     sync.Once // the first reason is the one reported
	reason   Reason
	err      error
	byClient bool
}

func (r *copyRelay) carry(relay *Relay, t *Tunnel) {
	ct := &copyTunnel{idle: t.IdleTimeout, half: t.HalfClosedTimeout, relay: relay, owner: t.Owner}
	t.copied = ct
	ct.moved.Store(clock())
	ct.open.Store(int32(len(ct.pumps)))
	ct.pumps[0].init(ct, t.Client, t.Server)
	ct.pumps[1].init(ct, t.Server, t.Client)
	setKeepAlive(t.Client)
	setKeepAlive(t.Server)
	if !r.open(ct) { // Close came in between
		ct.finish(Drain, nil)
		ct.owner.Ended(End{Reason: Drain})
		return
	}
	ct.pumps[0].start(t.FromClient)
	ct.pumps[1].start(t.FromServer)
}

// open lists ct and has the sweep look after it, and counts it for close. It
// is false after close.
func (r *copyRelay) open(ct *copyTunnel) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	ct.seat = r.tunnels.Add(ct)
	r.wg.Add(1)
	if r.wake == nil {
		r.wake = make(chan struct{}, 1)
		r.wg.Add(1)
		go r.sweep(r.wake)
	} else if ct.pause() < r.pause {
		r.notify()
	}
	return true
}

// notify wakes the sweep. The caller holds mu.
func (r *copyRelay) notify() {
	select {
	case r.wake <- struct{}{}:
	default: // it is about to wake
	}
}

// ended is called by the last pump of ct to end.
func (r *copyRelay) ended(ct *copyTunnel) {
	defer r.wg.Done()
	ct.finish(Done, nil)
	r.mu.Lock()
	r.tunnels.Remove(ct.seat)
	if r.tunnels.Len() == 0 {
		r.notify()
	}
	r.mu.Unlock()
	ct.owner.Ended(End{Reason: ct.reason, Err: ct.err, In: ct.pumps[0].n.Load(), Out: ct.pumps[1].n.Load(), ByClient: ct.byClient})
}

// passEnd passes on the end of what p moves.
func (p *pump) passEnd(err error) {
	ct, dst := p.ct, p.dst
	if ct.finished.Load() {
		return
	}
	ct.moved.Store(clock()) // an end counts as a sign of life: the half-closed limit starts here
	if c, ok := ct.relay.caught(err); ok {
		ct.finish(Internal, c)
		return
	}
	if !routine(err) {
		_, lost := errors.AsType[*lostError](err)
		byClient := (p == &ct.pumps[0]) != lost
		if !byClient && ct.halves.Load() == 0 {
			ct.owner.ServiceEnded(err)
		}
		ct.finishBy(Reset, err, byClient)
		return
	}
	if ct.awaitWrites() {
		return // an abort, and for the direction that heard of it to report
	}
	// The second end closes both, so it need not be half-closed.
	if ct.halves.Add(1) == 1 {
		if p == &ct.pumps[1] {
			ct.owner.ServiceEnded(nil)
		}
		switch err := CloseWrite(dst); {
		case errors.Is(err, errors.ErrUnsupported):
			ct.noHalfClose.Store(true)
		case errors.Is(err, syscall.ENOTCONN):
			// It has closed altogether. What is read from it tells how.
		case !routine(err):
			ct.finish(Reset, err)
		}
	} else {
		_ = CloseWrite(dst)
	}
}

// write gives b to the other side. The budget counts the held bytes that are
// kept in memory for as long as that takes: where the other side does not read,
// until the tunnel's end.
func (p *pump) write(b []byte, held int) error {
	return p.give(held, func() (int, error) { return p.dst.Write(b) })
}

// give has write give bytes to the other side, with what is counted while it lasts, whatever
// becomes of it.
func (p *pump) give(held int, write func() (int, error)) error {
	ct := p.ct
	ct.moved.Store(clock())
	if p == &ct.pumps[1] {
		ct.owner.Answered()
	}
	ct.writing.Add(1)
	p.budget.AddBuffered(held)
	p.kept.Store(int64(held))
	lost := true // until it has returned in good order
	defer func() {
		p.budget.AddBuffered(-held)
		p.kept.Store(0)
		if lost {
			ct.lost.Store(true)
		}
		ct.writing.Add(-1)
	}()
	w, err := write()
	lost = err != nil
	now := clock()
	ct.moved.Store(now)
	p.moved.Store(now)
	p.n.Add(int64(w))
	if err != nil {
		return &lostError{err}
	}
	return nil
}

// awaitWrites gives a write that has failed the time to say so, and reports
// whether one did. A socket tells of its reset once: if the write into it hears
// of it, the read finds what looks like the end of the stream.
func (ct *copyTunnel) awaitWrites() bool {
	for i := 0; i < 10 && ct.writing.Load() > 0; i++ {
		time.Sleep(time.Millisecond)
	}
	return ct.lost.Load()
}

// A lostError is the failure of a write. It is never routine, whatever the
// stream calls it: bytes were lost.
type lostError struct{ err error }

func (e *lostError) Error() string { return e.err.Error() }

// finish closes both streams, in order or as an abort. The first caller's
// reason stands.
func (ct *copyTunnel) finish(why Reason, err error) { ct.finishBy(why, err, false) }

// finishBy is finish that knows whether it was the client who ended the tunnel.
func (ct *copyTunnel) finishBy(why Reason, err error, client bool) {
	ct.once.Do(func() {
		ct.reason, ct.err, ct.byClient = why, err, client
		ct.finished.Store(true)
		for i := range ct.pumps {
			c := ct.pumps[i].src
			err := guard(func() error {
				if why == Done {
					return c.Close()
				}
				return AbortWithReason(c, why)
			})
			if c, ok := ct.relay.caught(err); ok && ct.err == nil {
				ct.reason, ct.err = Internal, c
			}
		}
		for i := range ct.pumps {
			ct.pumps[i].wake()
		}
	})
}

// sweep keeps the limits while there are tunnels.
func (r *copyRelay) sweep(wake <-chan struct{}) {
	defer r.wg.Done()
	before := clock()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-wake:
		}
		open, pause := r.list()
		if open == nil {
			return
		}
		now := clock()
		for _, ct := range open {
			ct.sweep(before, now)
		}
		before = now
		timer.Reset(pause)
	}
}

// sweep looks after one tunnel. before is when the sweep before was.
func (ct *copyTunnel) sweep(before, now int64) {
	err := guard(func() error {
		ct.check(time.Duration(now - ct.moved.Load()))
		if who := ct.deadSide(before, now); who != "" {
			err := fmt.Errorf("%s: %w", who, syscall.ETIMEDOUT)
			if who == sideNames[1] && ct.halves.Load() == 0 {
				ct.owner.ServiceEnded(err)
			}
			ct.finish(Reset, err)
		}
		for i := range ct.pumps {
			ct.pumps[i].sweep(now)
		}
		return nil
	})
	if p, ok := ct.relay.caught(err); ok {
		ct.finish(Internal, p)
	}
}

// list returns the open tunnels and the time to the next sweep: a quarter of
// the shortest limit, so that none is overrun by more, and a second at most.
// Where there is no tunnel, the sweep is over and the next one starts its own.
func (r *copyRelay) list() ([]*copyTunnel, time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tunnels.Len() == 0 {
		r.wake = nil
		return nil, 0
	}
	open := r.tunnels.All()
	r.pause = time.Second
	for _, ct := range open {
		r.pause = min(r.pause, ct.pause())
	}
	return open, r.pause
}

// pause is how long the sweep may leave ct alone.
func (ct *copyTunnel) pause() time.Duration {
	pause := time.Second
	for _, l := range []time.Duration{ct.idle, ct.half} {
		if l > 0 {
			pause = min(pause, max(l/4, time.Millisecond))
		}
	}
	return pause
}

func (ct *copyTunnel) check(quiet time.Duration) {
	half := ct.halves.Load() > 0
	// With bytes on their way an orderly close would make a cut stream look whole.
	if half && ct.noHalfClose.Load() && quiet >= lingerTimeout && ct.writing.Load() == 0 {
		ct.finish(Done, nil)
		return
	}
	if why, yes := limitExceeded(quiet, half, ct.idle, ct.half); yes {
		ct.finish(why, nil)
		return
	}
	// Nobody reads from a side that has ended, and nobody may have anything to
	// write to it for long.
	if half {
		for i := range ct.pumps {
			b, ok := ct.pumps[i].src.(abortDetector)
			if !ok {
				continue
			}
			switch err := b.Broken(); {
			case err == nil:
			case routine(err): // it has closed altogether, in order
				ct.finish(Done, nil)
				return
			default:
				ct.finishBy(Reset, err, i == 0)
				return
			}
		}
	}
	if ct.writing.Load() > 0 && quiet >= blockedWriteTime {
		if err := errors.Join(abortedBehindWrite(ct.pumps[0].src), abortedBehindWrite(ct.pumps[1].src)); err != nil {
			ct.finish(Reset, err)
		}
	}
}

// abortedBehindWrite returns why c's peer takes nothing any more and sends nothing, nil where it
// may.
func abortedBehindWrite(c net.Conn) error {
	if err := poll.PendingError(BaseConn(c)); err != nil {
		return err
	}
	for _, over := range []net.Conn{c, BaseConn(c)} {
		if b, ok := over.(abortDetector); ok {
			if err := b.Broken(); !routine(err) {
				return err
			}
		}
	}
	return nil
}

// all returns the open tunnels.
func (r *copyRelay) all() []Live {
	var all []Live
	for some := range r.pieces() {
		for _, ct := range some {
			all = append(all, ct)
		}
	}
	return all
}

// pieces yields the open tunnels, some at a time, and holds mu only while it collects
// those. What it yields is not to be kept.
func (r *copyRelay) pieces() iter.Seq[[]*copyTunnel] {
	return func(yield func([]*copyTunnel) bool) {
		some := make([]*copyTunnel, 0, seatsPiece)
		for at := 0; ; {
			r.mu.Lock()
			at, some = r.tunnels.Piece(at, some[:0])
			r.mu.Unlock()
			if !yield(some) || at == 0 {
				return
			}
		}
	}
}

// killFunc is Relay.KillFunc for what r carries.
func (r *copyRelay) killFunc(why Reason, match func(Owner) bool) (n int) {
	for some := range r.pieces() {
		for _, ct := range some {
			if !ct.finished.Load() && match(ct.owner) {
				ct.finish(why, nil)
				n++
			}
		}
	}
	return n
}

// Owner implements Live.
func (ct *copyTunnel) Owner() Owner { return ct.owner }

// Progress implements Live.
func (ct *copyTunnel) Progress() (Progress, bool) {
	return Progress{
		In: ct.pumps[0].n.Load(), Out: ct.pumps[1].n.Load(), Moved: ct.moved.Load(), HalfClosed: ct.halves.Load() == 1,
	}, !ct.finished.Load()
}

// Kill implements Live.
func (ct *copyTunnel) Kill(why Reason, err error) { ct.finish(why, err) }

// close aborts every tunnel and waits for their ends. What is carried after it
// is aborted at once.
func (r *copyRelay) close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	for _, t := range r.all() {
		t.Kill(Drain, nil)
	}
	r.wg.Wait()
}

// peerChecks find out whether a copyTunnel's peers are gone. They belong to the
// sweep.
type peerChecks struct {
	born  int64
	sides [2]poll.PeerCheck
}

// deadSide checks the sockets of ct, or those below its streams, and returns the name
// of the side whose peer is gone, or "". last is when the sweep before was.
// Streams that share a socket have none: what they share looks after it.
func (ct *copyTunnel) deadSide(last, now int64) string {
	p := &ct.checks
	if p.born == 0 {
		p.born = now
	}
	every := int64(poll.PeerCheckInterval)
	moved := now-ct.moved.Load() <= 2*every
	if (last-p.born)/every == (now-p.born)/every || !moved && p.sides == [2]poll.PeerCheck{} {
		return ""
	}
	for i, who := range sideNames {
		if p.sides[i].DeadConn(BaseConn(ct.pumps[i].src)) {
			return who
		}
	}
	return ""
}
