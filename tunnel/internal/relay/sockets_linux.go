//go:build amd64 || arm64

package relay

import (
	"errors"
	"math"
	"net"
	"sync"
	"syscall"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

// A socketRelay carries pairs of TCP sockets in event loops.
//
// A tunnel at rest is a socketTunnel: two descriptors registered for input in a loop's
// epoll set, and nothing else. A small payload is one read into the loop's own
// buffer and one write. A direction that fills that buffer turns to bulk: it
// leaves the epoll set's attention and is looked at from time to time instead
// (see gather), so that bytes gather and each poll.Splice(2) moves many of them. It
// returns to events when it has been calm for a while.
//
// What the far side does not take at once waits in a backlog, and its source
// is not read until the backlog is gone: that is all the back-pressure there is.
//
// To follow one tunnel: carry and adopt below give its sockets to a loop, whose
// run (loop_linux.go) hands it each event. What becomes of that is in
// sockettunnel_linux.go: handle, pump and offer for bytes, bulk and take for many of
// them, finish and fail for the end. The sweep at the end of this file looks
// after those that have no events.
type socketRelay struct {
	flows sync.WaitGroup
}

const (
	loopBuffer     = 64 << 10              // one read, and the most user memory a blocked tunnel holds each way
	pipeSize       = 1 << 20               // bytes; a large pipe makes each splice move more
	maxPipes       = 32                    // per loop, so that all fit below pipe-user-pages-soft (64 MiB)
	bulkPause      = 50 * time.Microsecond // how long bulk gathers bytes, for each direction in it
	bulkMost       = 4                     // directions that count for that
	bulkTurn       = 4 * pipeSize          // the most one bulk direction moves before the next one's turn
	bulkCalm       = 16 << 10              // a turn below this many bytes is a calm one
	calmTurns      = 8                     // calm turns in a row that end bulk
	trimAfter      = time.Second           // without bulk, after which empty pipes are closed
	keepAliveAfter = 5 * time.Second       // the age at which a tunnel's sockets get their keepalive

	// maxLateBytes is the most bytes that may arrive at a side after it has closed
	// without the tunnel's end being called a reset: the close_notify of a TLS client whose server,
	// as many do, has closed altogether and not only its half. The client still
	// gets the reset it would have got from the server.
	maxLateBytes = 128
)

// carry takes over the tunnel if both ends are TCP sockets. It is false, with
// nothing changed, where they are not or there is no loop to carry them.
func (k *socketRelay) carry(r *Relay, t *Tunnel) bool {
	if !InKernel || !poll.IsSocket(t.Client) || !poll.IsSocket(t.Server) {
		return false
	}
	l := r.Loops.pick(homeOf(t.Client))
	if l == nil {
		return false
	}
	f := &socketTunnel{relay: r, owner: t.Owner, idle: millis(t.IdleTimeout), half: millis(t.HalfClosedTimeout), born: clock()}
	f.moved = f.born
	var err error
	if f.sides[0].fd, err = poll.TakeFD(t.Client); err != nil {
		return false
	}
	k.flows.Add(1)
	t.socket = listedTunnel{f, l}
	if f.sides[1].fd, err = poll.TakeFD(t.Server); err != nil {
		k.orphan(f, t.Server)
		return true
	}
	l.adopt(f, t.FromClient, t.FromServer)
	return true
}

// orphan ends a tunnel of which one socket was taken and the other could not
// be: there are no descriptors left, not even for a moment.
func (k *socketRelay) orphan(f *socketTunnel, other net.Conn) {
	poll.ResetFD(f.sides[0].fd)
	_ = Abort(other)
	f.gone = true
	f.over(End{Reason: Overload, Err: errors.New("no descriptor is left to take over a socket with")})
}

// held returns what the tunnels keep, as each loop says, and false where one does
// not answer in time.
func (k *socketRelay) held(relay *Relay, kernel bool) (all []heldTunnel, ok bool) {
	for _, l := range relay.Loops.started() {
		some, ok := l.held(relay, kernel)
		if !ok {
			return nil, false
		}
		all = append(all, some...)
	}
	return all, true
}

func (k *socketRelay) all(relay *Relay) []Live {
	var all []Live
	for _, l := range relay.Loops.started() {
		all = append(all, l.all(relay)...)
	}
	return all
}

// wait returns when every tunnel has ended.
func (k *socketRelay) wait() { k.flows.Wait() }

// adopt passes on the early bytes and puts f in the loop's care.
func (l *loop) adopt(f *socketTunnel, fromClient, fromServer []byte) {
	broken := l.offer(f, 1, fromClient)
	if broken != 0 {
		f.owner.ServiceEnded(sideError(1, broken))
	}
	if len(fromServer) > 0 {
		f.owner.Answered()
	}
	if err := l.offer(f, 0, fromServer); broken == 0 {
		broken = err
	}
	for i := range f.sides {
		f.sides[i].events = f.wants(i)
	}
	if !l.watchTunnel(f, broken) { // Close came in between
		f.gone = true
		poll.ResetFD(f.sides[0].fd)
		poll.ResetFD(f.sides[1].fd)
		f.over(End{Reason: Drain, In: f.sides[1].taken, Out: f.sides[0].taken})
	}
}

// watchTunnel adds f and has the loop watch it. It is false where the loop has
// ended.
func (l *loop) watchTunnel(f *socketTunnel, broken syscall.Errno) bool {
	// Both sides are added before the loop can handle either: it takes the lock first.
	l.Lock()
	defer l.Unlock()
	if l.Stopped() {
		return false
	}
	l.add(f)
	for i := range f.sides {
		s := &f.sides[i]
		if err := l.Watch(s.fd, s.events, f.token, i); err != nil && broken == 0 {
			broken = err.(syscall.Errno)
		}
	}
	// The first sweep of it sets its keepalive, and begins to check its peers.
	l.checkAt[f.token.Index()] = f.born + int64(poll.PeerCheckInterval)
	if l.schedule(f, f.nextSweep(f.born, l.checkAt[f.token.Index()])) {
		l.Notify()
	}
	if broken != 0 {
		f.broken = uint16(broken)
		l.order(abortOrder{f, Reset, nil})
	}
	return true
}

// add registers f, with nothing due. The caller holds the lock.
func (l *loop) add(f *socketTunnel) {
	f.token = l.Register(f)
	for len(l.sweepAt) <= f.token.Index() {
		l.sweepAt, l.checkAt = append(l.sweepAt, notDue), append(l.checkAt, notDue)
	}
	l.flows.Add(1)
}

// remove is the end of add. The caller holds the lock.
func (l *loop) remove(f *socketTunnel) {
	l.sweepAt[f.token.Index()], l.checkAt[f.token.Index()] = notDue, notDue
	l.Unregister(f.token)
	l.flows.Add(-1)
}

// abort asks the loop to abort f.
func (l *loop) abort(f *socketTunnel, why Reason, err error) {
	l.Lock()
	defer l.Unlock()
	l.order(abortOrder{f, why, err})
}

// order has the loop carry out orders, which are its own from then on. The caller holds
// the lock.
func (l *loop) order(orders ...abortOrder) {
	l.aborts = append(l.aborts, orders)
	l.Notify()
}

// endTime is for how long a loop ends tunnels before it looks at its events again: each
// takes a few microseconds, and there may be many thousands to end.
const endTime = 250 * time.Microsecond

// endSome carries out orders for endTime. Those that are left are next after the events.
func (l *loop) endSome() {
	for start := clock(); len(l.ending) > 0; {
		orders := l.ending[0]
		for len(orders) > 0 {
			o := &orders[0]
			if orders = orders[1:]; o.tunnel.gone {
				continue
			}
			if o.tunnel.broken != 0 {
				l.fail(o.tunnel, 1, syscall.Errno(o.tunnel.broken))
			}
			l.end(o.tunnel, o.why, o.err)
			if clock()-start >= int64(endTime) {
				l.ending[0] = orders
				return
			}
		}
		l.ending[0] = nil
		l.ending = l.ending[1:]
	}
	l.ending = nil
}

// gather is the time between bulk turns. One tunnel alone is not kept waiting;
// many share the processor, and cost the less the more each turn moves.
func (l *loop) gather() time.Duration { return bulkPause * time.Duration(min(len(l.turns), bulkMost)) }

// trim closes the empty pipes once bulk has been over for a while.
func (l *loop) trim() {
	if len(l.turns) > 0 || l.Now-l.turned < int64(trimAfter) {
		return
	}
	for _, p := range l.pipes {
		p.Close()
	}
	l.npipes -= len(l.pipes)
	l.budget.Give(int64(2 * len(l.pipes)))
	l.pipes = nil
}

// A sweep looks at the tunnels that are due, in pieces, one between two waits for
// events: a loop with many tunnels is not away for longer than one with few. All
// its pieces go by the time it began. A tunnel at rest is due when its limit is
// over, and costs eight bytes of reading until then.
type sweep struct {
	began int64 // clock of this one, or of the last if none is under way
	next  int   // the index where it goes on; 0 while none is under way
	due   int64 // of the next one, by the tunnels it has passed; guarded by the lock
}

const (
	sweepPiece = 1024    // tunnels
	sweepSeats = 1 << 15 // tokens

	// sweepGrain is what due times are rounded up to, so that many tunnels have the
	// same one. Those of tunnels with short limits are less round.
	sweepGrain = time.Second
)

// notDue is the due time of a tunnel that no sweep needs to look at.
const notDue = math.MaxInt64

// nextSweep is when f is due next: when its keepalive is to be set,
// when its peers are to be checked, notDue for never, or when it will have been
// silent for too long.
func (f *socketTunnel) nextSweep(now, ask int64) int64 {
	due, grain := ask, sweepGrain
	if !f.hasKeepAlive() {
		due = min(due, f.born+int64(keepAliveAfter))
	}
	within := func(m milliseconds) {
		if m > 0 {
			due = min(due, f.moved+int64(m.limit()))
			grain = min(grain, max(m.limit()/4, time.Millisecond))
		}
	}
	within(f.idle)
	if f.halfClosed() {
		within(f.half)
	}
	if due == notDue {
		return notDue
	}
	g := int64(grain)
	return (max(due, now+1) + g - 1) / g * g
}

func (f *socketTunnel) hasKeepAlive() bool { return f.sides[0].keepAlive }

func (f *socketTunnel) halfClosed() bool { return f.sides[0].eof != f.sides[1].eof }

// schedule has the sweep look at f at the given time, and reports whether that is
// sooner than it would have looked at any. The caller holds the lock.
func (l *loop) schedule(f *socketTunnel, at int64) (sooner bool) {
	l.sweepAt[f.token.Index()] = at
	l.sweep.due = min(l.sweep.due, at) // f may sit where the sweep under way has passed
	sooner = at < l.due
	l.due = min(l.due, at)
	return sooner
}

// touch notes that something moved.
func (l *loop) touch(f *socketTunnel) {
	f.touch(l.Now)
	if f.unchecked {
		l.reschedule(f)
	}
}

// reschedule brings f's due time forward: its peers are to be checked again, or a
// shorter limit holds.
func (l *loop) reschedule(f *socketTunnel) {
	l.Lock()
	defer l.Unlock()
	if f.gone {
		return
	}
	if f.unchecked {
		f.unchecked, l.checkAt[f.token.Index()] = false, f.nextCheck(l.Now)
	}
	if at := f.nextSweep(l.Now, l.checkAt[f.token.Index()]); at < l.sweepAt[f.token.Index()] {
		l.schedule(f, at)
	}
}

// sweepDue is when a sweep is to begin, or to go on.
func (l *loop) sweepDue() int64 {
	if l.sweep.next > 0 {
		return 0
	}
	l.Lock()
	defer l.Unlock()
	return l.due
}

// sweepSome ends tunnels that have been silent for longer than they may, and
// those of which a peer is gone.
func (l *loop) sweepSome() {
	s := &l.sweep
	var over []abortOrder
	type deadSide struct {
		f *socketTunnel
		i int
	}
	var dead []deadSide
	l.Lock()
	if s.next == 0 {
		s.began, s.due = l.Now, notDue
	}
	looks, at := 0, s.next
	for end := min(at+sweepSeats, len(l.sweepAt)); at < end && looks < sweepPiece; at++ {
		if l.sweepAt[at] > s.began {
			s.due = min(s.due, l.sweepAt[at])
			continue
		}
		f, ok := l.Handlers()[at].(*socketTunnel)
		if !ok {
			l.sweepAt[at] = notDue
			continue
		}
		looks++
		if !f.hasKeepAlive() && s.began-f.born >= int64(keepAliveAfter) {
			for i := range f.sides {
				f.sides[i].keepAlive = true
				poll.SetKeepAlive(f.sides[i].fd, keepAlive)
			}
		}
		if l.checkAt[at] <= s.began {
			if i := f.deadSide(); i >= 0 {
				dead = append(dead, deadSide{f, i})
			}
			l.checkAt[at] = f.nextCheck(s.began)
			f.unchecked = l.checkAt[at] == notDue
		}
		if why, yes := limitExceeded(time.Duration(s.began-f.moved), f.halfClosed(), f.idle.limit(), f.half.limit()); yes {
			over = append(over, abortOrder{f, why, nil})
		}
		l.sweepAt[at] = f.nextSweep(s.began, l.checkAt[at])
		s.due = min(s.due, l.sweepAt[at])
	}
	if s.next = at; at == len(l.sweepAt) {
		s.next, l.due = 0, s.due
	}
	l.Unlock()
	for _, d := range dead {
		l.fail(d.f, d.i, syscall.ETIMEDOUT)
	}
	for _, o := range over {
		l.end(o.tunnel, o.why, nil)
	}
}

// deadSide checks the peers of f, and returns the side whose peer is gone, or -1.
func (f *socketTunnel) deadSide() int {
	for i := range f.sides {
		if f.sides[i].check.Dead(f.sides[i].fd) {
			return i
		}
	}
	return -1
}

// nextCheck is when f's peers are to be checked next: never while nothing moves and
// nothing was found under way.
func (f *socketTunnel) nextCheck(now int64) int64 {
	every := int64(poll.PeerCheckInterval)
	if now-f.moved > 2*every && f.sides[0].check == 0 && f.sides[1].check == 0 {
		return notDue
	}
	return f.born + ((now-f.born)/every+1)*every
}
