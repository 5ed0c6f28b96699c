//go:build amd64 || arm64

package tunnel

import (
	"errors"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

// A kernelRelay carries pairs of TCP sockets in event loops.
//
// A tunnel at rest is a flow: two descriptors registered for input in a loop's
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
// flow_linux.go: handle, pump and offer for bytes, bulk and take for many of
// them, finish and fail for the end. The sweep at the end of this file looks
// after those that have no events.
type kernelRelay struct {
	flows sync.WaitGroup
}

const (
	loopBuffer = 64 << 10              // one read, and the most user memory a blocked tunnel holds each way
	pipeSize   = 1 << 20               // bytes; a large pipe makes each splice move more
	maxPipes   = 32                    // per loop, so that all fit below pipe-user-pages-soft (64 MiB)
	bulkPause  = 50 * time.Microsecond // how long bulk gathers bytes, for each direction in it
	bulkMost   = 4                     // directions that count for that
	bulkTurn   = 4 * pipeSize          // the most one bulk direction moves before the next one's turn
	bulkCalm   = 16 << 10              // a turn below this many bytes is a calm one
	calmTurns  = 8                     // calm turns in a row that end bulk
	trimAfter  = time.Second           // without bulk, after which empty pipes are closed
	keepAfter  = 5 * time.Second       // the age at which a tunnel's sockets get their keepalive

	// goodbye is the most bytes that may find nobody left without the tunnel's
	// end being called a reset: the close_notify of a TLS client whose server,
	// as many do, has closed altogether and not only its half. The client still
	// gets the reset it would have got from the server.
	goodbye = 128
)

// carry takes over the tunnel if both ends are TCP sockets. It is false, with
// nothing changed, where they are not or there is no loop to carry them.
func (k *kernelRelay) carry(j *job) bool {
	if !inKernel || !poll.IsSocket(j.client) || !poll.IsSocket(j.server) {
		return false
	}
	home := homeOf(j.client)
	l := j.relay.loops().pick(home)
	if l == nil {
		return false
	}
	f := &flow{relay: j.relay, idle: millis(j.idle), half: millis(j.half), record: *j.record, born: clock()}
	f.moved = f.born
	var err error
	if f.sides[0].fd, err = poll.TakeFD(j.client); err != nil {
		return false
	}
	k.flows.Add(1)
	if f.sides[1].fd, err = poll.TakeFD(j.server); err != nil {
		k.orphan(f, j.server)
		return true
	}
	l.adopt(f, j.fromClient, j.fromServer)
	j.freeScratch()
	return true
}

// orphan ends a tunnel of which one socket was taken and the other could not
// be: there are no descriptors left, not even for a moment.
func (k *kernelRelay) orphan(f *flow, other net.Conn) {
	poll.ResetFD(f.sides[0].fd)
	_ = abort(other)
	f.over(End{Reason: Overload, Err: errors.New("no descriptor is left to take over a socket with")})
}

// held returns what the tunnels keep, as each loop says, and false where one does
// not answer in time.
func (k *kernelRelay) held(relay *Relay, kernel bool) (all []heldTunnel, ok bool) {
	for _, l := range relay.loops().started() {
		some, ok := l.held(relay, kernel)
		if !ok {
			return nil, false
		}
		all = append(all, some...)
	}
	return all, true
}

func (k *kernelRelay) all(relay *Relay) []listed {
	var all []listed
	for _, l := range relay.loops().started() {
		all = append(all, l.all(relay)...)
	}
	return all
}

// wait returns when every flow has ended.
func (k *kernelRelay) wait() { k.flows.Wait() }

// adopt passes on the early bytes and puts f in the loop's care.
func (l *loop) adopt(f *flow, fromClient, fromServer []byte) {
	broken := l.offer(f, 1, fromClient)
	if err := l.offer(f, 0, fromServer); broken == 0 {
		broken = err
	}
	for i := range f.sides {
		f.sides[i].events = f.wants(i)
	}
	if !l.welcome(f, broken) { // Close came in between
		poll.ResetFD(f.sides[0].fd)
		poll.ResetFD(f.sides[1].fd)
		f.over(End{Reason: Drain, In: f.sides[1].taken, Out: f.sides[0].taken})
	}
}

// welcome seats f and has the loop watch it. It is false where the loop has
// ended.
func (l *loop) welcome(f *flow, broken syscall.Errno) bool {
	// Both sides are added before the loop can look at either: it takes the lock first.
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
	// The first look sets its keepalive, and begins to ask whether its peers live.
	l.asks[f.token.Index()] = f.born + int64(poll.PeerCheckInterval)
	if l.look(f, f.nextLook(f.born, l.asks[f.token.Index()])) {
		l.Notify()
	}
	if broken != 0 {
		f.broken = uint16(broken)
		l.kills = append(l.kills, order{f, Reset, nil})
		l.Notify()
	}
	return true
}

// add registers f, with nothing due. The caller holds the lock.
func (l *loop) add(f *flow) {
	f.token = l.Register(f)
	for len(l.dues) <= f.token.Index() {
		l.dues, l.asks = append(l.dues, noLook), append(l.asks, noLook)
	}
	l.flows.Add(1)
}

// remove is the end of add. The caller holds the lock.
func (l *loop) remove(f *flow) {
	l.dues[f.token.Index()], l.asks[f.token.Index()] = noLook, noLook
	l.Unregister(f.token)
	l.flows.Add(-1)
}

// kill asks the loop to abort f.
func (l *loop) kill(f *flow, why Reason, err error) {
	l.Lock()
	defer l.Unlock()
	l.kills = append(l.kills, order{f, why, err})
	l.Notify()
}

// gather is the time between bulk turns. One flow alone is not kept waiting;
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

// A sweep looks at the flows whose time has come, in pieces, one between two
// looks at the events: a loop with many tunnels is not away for longer than one
// with few. All its pieces go by the time it began. A flow at rest is looked at
// when its limit is over, and costs eight bytes of reading until then.
type sweep struct {
	began int64 // clock of this one, or of the last if none is under way
	next  int   // the index where it goes on; 0 while none is under way
	due   int64 // of the next one, by the tunnels it has passed; guarded by the lock
}

const (
	sweepPiece = 1024    // flows
	sweepSeats = 1 << 15 // tokens

	// sweepGrain is what times of looks are rounded up to, so that many flows
	// have the same one. Those of flows with short limits are less round.
	sweepGrain = time.Second
)

// noLook is the time of a look that is not to be.
const noLook = math.MaxInt64

// nextLook is when f is to be looked at next: when its keepalive is to be set,
// when its peers are to be asked for, noLook for not at all, or when it will have been
// silent for too long.
func (f *flow) nextLook(now, ask int64) int64 {
	due, grain := ask, sweepGrain
	if !f.kept() {
		due = min(due, f.born+int64(keepAfter))
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
	if due == noLook {
		return noLook
	}
	g := int64(grain)
	return (max(due, now+1) + g - 1) / g * g
}

func (f *flow) kept() bool { return f.sides[0].kept }

func (f *flow) halfClosed() bool { return f.sides[0].eof != f.sides[1].eof }

// look has the sweep look at f at the given time, and reports whether that is
// sooner than it would have looked at anybody. The caller holds the lock.
func (l *loop) look(f *flow, at int64) (sooner bool) {
	l.dues[f.token.Index()] = at
	l.sweep.due = min(l.sweep.due, at) // f may sit where the sweep under way has passed
	sooner = at < l.due
	l.due = min(l.due, at)
	return sooner
}

// touch notes that something moved.
func (l *loop) touch(f *flow) {
	f.touch(l.Now)
	if f.unasked {
		l.expect(f)
	}
}

// expect brings the next look at f forward: its peers are to be asked for
// again, or a shorter limit holds.
func (l *loop) expect(f *flow) {
	l.Lock()
	defer l.Unlock()
	if f.gone {
		return
	}
	if f.unasked {
		f.unasked, l.asks[f.token.Index()] = false, f.nextAsk(l.Now)
	}
	if at := f.nextLook(l.Now, l.asks[f.token.Index()]); at < l.dues[f.token.Index()] {
		l.look(f, at)
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

// sweepSome ends flows that have been silent for longer than they may, and
// those of which a peer is gone.
func (l *loop) sweepSome() {
	s := &l.sweep
	var over []order
	type deadSide struct {
		f *flow
		i int
	}
	var dead []deadSide
	l.Lock()
	if s.next == 0 {
		s.began, s.due = l.Now, noLook
	}
	looks, at := 0, s.next
	for end := min(at+sweepSeats, len(l.dues)); at < end && looks < sweepPiece; at++ {
		if l.dues[at] > s.began {
			s.due = min(s.due, l.dues[at])
			continue
		}
		f, ok := l.Handlers()[at].(*flow)
		if !ok {
			l.dues[at] = noLook
			continue
		}
		looks++
		if !f.kept() && s.began-f.born >= int64(keepAfter) {
			for i := range f.sides {
				f.sides[i].kept = true
				poll.SetKeepAlive(f.sides[i].fd, keepAlive)
			}
		}
		if l.asks[at] <= s.began {
			if i := f.ask(); i >= 0 {
				dead = append(dead, deadSide{f, i})
			}
			l.asks[at] = f.nextAsk(s.began)
			f.unasked = l.asks[at] == noLook
		}
		if why, yes := silent(time.Duration(s.began-f.moved), f.halfClosed(), f.idle.limit(), f.half.limit()); yes {
			over = append(over, order{f, why, nil})
		}
		l.dues[at] = f.nextLook(s.began, l.asks[at])
		s.due = min(s.due, l.dues[at])
	}
	if s.next = at; at == len(l.dues) {
		s.next, l.due = 0, s.due
	}
	l.Unlock()
	for _, d := range dead {
		l.fail(d.f, d.i, syscall.ETIMEDOUT)
	}
	for _, o := range over {
		l.end(o.f, o.why, nil)
	}
}

// ask checks the peers of f, and returns the side whose peer is gone, or -1.
func (f *flow) ask() int {
	for i := range f.sides {
		if f.sides[i].check.Dead(f.sides[i].fd) {
			return i
		}
	}
	return -1
}

// nextAsk is when f's peers are to be checked next: never while nothing moves and
// nothing was found under way.
func (f *flow) nextAsk(now int64) int64 {
	every := int64(poll.PeerCheckInterval)
	if now-f.moved > 2*every && f.sides[0].check == 0 && f.sides[1].check == 0 {
		return noLook
	}
	return f.born + ((now-f.born)/every+1)*every
}

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
	handlers := make([]poll.Handler, 0, n+n/8+8)
	l.Lock()
	handlers = append(handlers, l.Handlers()...)
	l.Unlock()
	refs, all := make([]listedFlow, 0, len(handlers)), make([]listed, 0, len(handlers))
	for _, w := range handlers {
		if f, ok := w.(*flow); ok && f.relay == relay {
			refs = append(refs, listedFlow{f, l})
			all = append(all, &refs[len(refs)-1])
		}
	}
	return all
}

// A survey asks a loop what its tunnels keep, since only the loop's goroutine may
// look at them.
type survey struct {
	relay  *Relay
	kernel bool
	answer chan<- []heldTunnel // with room for the answer
}

// surveyTime is how long a loop may take for it.
const surveyTime = 300 * time.Millisecond

// held returns what each tunnel of relay keeps, and false where the loop does not
// answer in time.
func (l *loop) held(relay *Relay, kernel bool) (all []heldTunnel, ok bool) {
	answer := make(chan []heldTunnel, 1)
	l.Lock()
	l.asked = append(l.asked, survey{relay, kernel, answer})
	l.Notify()
	l.Unlock()
	timer := time.NewTimer(surveyTime)
	defer timer.Stop()
	select {
	case all := <-answer:
		return all, true
	case <-timer.C:
		return nil, false
	}
}

// survey is called on the loop's goroutine.
func (l *loop) survey(s survey) (all []heldTunnel) {
	l.Lock()
	defer l.Unlock()
	for _, w := range l.Handlers() {
		f, ok := w.(*flow)
		if !ok || f.relay != s.relay || f.sides[0].out == nil && f.sides[1].out == nil {
			continue
		}
		t := heldTunnel{listed: &listedFlow{f, l}, quiet: l.Now-f.moved >= int64(quietAfter)}
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
