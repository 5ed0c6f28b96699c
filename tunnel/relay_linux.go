//go:build amd64 || arm64

package tunnel

import (
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A kernelRelay carries pairs of TCP sockets with one event loop per core.
//
// A tunnel at rest is a flow: two descriptors registered for input in the
// loop's epoll set, and nothing else. A small payload is one read into the
// loop's own buffer and one write. A direction that fills that buffer turns to
// bulk: it leaves the epoll set's attention and is looked at from time to time
// instead (see gather), so that bytes gather and each splice(2) moves many of
// them. It returns to events when it has been calm for a while.
//
// What the far side does not take at once waits in a backlog, and its source
// is not read until the backlog is gone: that is all the back-pressure there is.
type kernelRelay struct {
	once  sync.Once
	loops atomic.Pointer[[]*loop] // set once; nil before
	next  atomic.Uint32
	wg    sync.WaitGroup
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
	keepAfter  = 5 * time.Second       // the age at which a tunnel's sockets get their keepalive
	maxEvents  = 256

	// goodbye is the most bytes that may find nobody left without the tunnel's
	// end being called a reset: the close_notify of a TLS client whose server,
	// as many do, has closed altogether and not only its half. The client still
	// gets the reset it would have got from the server.
	goodbye = 128
)

// carry takes over the tunnel if both ends are TCP sockets. It is false, with
// nothing changed, where they are not or there is no loop to carry them.
func (k *kernelRelay) carry(r *Relay, client, server net.Conn, fromClient, fromServer []byte, t *Tunnel) bool {
	if !inKernel || !isSocket(client) || !isSocket(server) {
		return false
	}
	k.once.Do(func() { k.start(r) })
	loops := k.running()
	if len(loops) == 0 {
		return false
	}
	f := &flow{idle: t.Idle, half: t.HalfClosed, ended: t.Ended, born: clock()}
	f.moved = f.born
	var err error
	if f.sides[0].fd, err = takeFD(client); err != nil {
		return false
	}
	if f.sides[1].fd, err = takeFD(server); err != nil {
		k.orphan(f.sides[0].fd, server, t)
		return true
	}
	l := loops[int(k.next.Add(1))%len(loops)]
	l.adopt(f, fromClient, fromServer)
	return true
}

// orphan ends a tunnel of which one socket was taken and the other could not
// be: there are no descriptors left, not even for a moment.
func (k *kernelRelay) orphan(fd int32, other net.Conn, t *Tunnel) {
	resetFD(fd)
	_ = abort(other)
	t.Ended(End{Reason: Overload, Err: errors.New("no descriptor is left to take over a socket with")})
}

func (k *kernelRelay) start(r *Relay) {
	var loops []*loop
	for range runtime.GOMAXPROCS(0) {
		l, err := newLoop(r.Budget)
		if err != nil {
			break // fewer loops, or none: the other path carries
		}
		loops = append(loops, l)
		k.wg.Add(1)
		go func() {
			defer k.wg.Done()
			l.run()
		}()
	}
	k.loops.Store(&loops)
}

func (k *kernelRelay) running() []*loop {
	if loops := k.loops.Load(); loops != nil {
		return *loops
	}
	return nil
}

func (k *kernelRelay) all() []func(Reason) {
	var kills []func(Reason)
	for _, l := range k.running() {
		l.mu.Lock()
		for _, f := range l.flows {
			if f != nil {
				kills = append(kills, func(why Reason) { l.kill(f, why) })
			}
		}
		l.mu.Unlock()
	}
	return kills
}

func (k *kernelRelay) close() {
	k.once.Do(func() {}) // never start after this
	for _, l := range k.running() {
		l.mu.Lock()
		l.stop = true
		l.notify()
		l.mu.Unlock()
	}
	k.wg.Wait()
}

type loop struct {
	ep     int
	wake   int32
	budget *Budget
	now    int64
	buf    []byte
	events []syscall.EpollEvent
	ready  []ready
	turns  []turn
	pipes  []pipe // empty ones
	npipes int
	swept  int64 // clock of the last sweep
	turned int64 // clock of the last bulk turn

	mu    sync.Mutex // guards what follows
	flows []*flow    // by slot; nil where free
	free  []int32
	gens  []int32
	kills []order
	pause time.Duration // between sweeps
	stop  bool

	released bool // its descriptors are no longer its own
}

type order struct {
	f   *flow
	why Reason
}

type ready struct {
	f      *flow
	side   int
	events uint32
}

const wakeKey = -1

func newLoop(budget *Budget) (*loop, error) {
	ep, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	wake, err := newEventFD()
	if err == nil {
		err = epollControl(ep, syscall.EPOLL_CTL_ADD, wake, syscall.EPOLLIN|epollET, wakeKey, 0)
	}
	if err != nil {
		_ = syscall.Close(ep)
		return nil, err
	}
	return &loop{
		ep: ep, wake: wake, budget: budget, pause: time.Second,
		buf:    make([]byte, loopBuffer),
		events: make([]syscall.EpollEvent, maxEvents),
		ready:  make([]ready, 0, maxEvents),
	}, nil
}

// adopt passes on the early bytes and puts f in the loop's care.
func (l *loop) adopt(f *flow, fromClient, fromServer []byte) {
	broken := f.offer(1, fromClient)
	if err := f.offer(0, fromServer); broken == 0 {
		broken = err
	}
	for i := range f.sides {
		f.sides[i].events = f.wants(i)
	}
	// Both are added before the loop can look at either: it takes mu first.
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released { // Close came in between
		resetFD(f.sides[0].fd)
		resetFD(f.sides[1].fd)
		f.ended(End{Reason: Drain, In: f.sides[1].taken, Out: f.sides[0].taken})
		return
	}
	l.place(f)
	for i := range f.sides {
		s := &f.sides[i]
		if err := epollControl(l.ep, syscall.EPOLL_CTL_ADD, s.fd, s.events, f.slot<<1|int32(i), f.gen); err != nil && broken == 0 {
			broken = err.(syscall.Errno)
		}
	}
	for _, d := range []time.Duration{f.idle, f.half} {
		if d > 0 && max(d/4, time.Millisecond) < l.pause {
			l.pause = max(d/4, time.Millisecond)
			l.notify()
		}
	}
	if broken != 0 {
		f.broken = broken
		l.kills = append(l.kills, order{f, Reset})
		l.notify()
	}
}

// place finds a slot for f. The caller holds mu.
func (l *loop) place(f *flow) {
	if n := len(l.free); n > 0 {
		f.slot = l.free[n-1]
		l.free = l.free[:n-1]
	} else {
		f.slot = int32(len(l.flows))
		l.flows = append(l.flows, nil)
		l.gens = append(l.gens, 0)
	}
	l.flows[f.slot] = f
	f.gen = l.gens[f.slot]
}

// notify wakes the loop. The caller holds mu, so that the descriptor is still
// the loop's own.
func (l *loop) notify() {
	if l.released {
		return
	}
	one := [8]byte{1}
	_, _ = syscall.Write(int(l.wake), one[:])
}

// kill asks the loop to abort f.
func (l *loop) kill(f *flow, why Reason) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kills = append(l.kills, order{f, why})
	l.notify()
}

// run is the loop: wait, handle what is ready, give bulk its turn, sweep.
func (l *loop) run() {
	defer l.release()
	for {
		n := epollPoll(l.ep, l.events)
		if n == 0 {
			n = epollWait(l.ep, l.events, l.wait())
		}
		l.now = clock()
		if !l.collect(l.events[:n]) {
			return
		}
		for _, r := range l.ready {
			if !r.f.gone {
				l.handle(r.f, r.side, r.events)
			}
		}
		if len(l.turns) > 0 && l.now-l.turned >= int64(l.gather()) {
			l.bulk()
		}
		if l.now-l.swept >= int64(l.sweepPause()) {
			l.sweep()
		}
	}
}

// wait is how long the loop may sleep. It looks up once a second also where it
// has no flow: that is cheaper than waking it for every first one.
func (l *loop) wait() time.Duration {
	if len(l.turns) > 0 {
		return l.gather()
	}
	return l.sweepPause()
}

// gather is the time between bulk turns. One flow alone is not kept waiting;
// many share the processor, and cost the less the more each turn moves.
func (l *loop) gather() time.Duration { return bulkPause * time.Duration(min(len(l.turns), bulkMost)) }

func (l *loop) sweepPause() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.pause
}

// collect finds the flows of the events and carries out the orders. It is
// false when the loop is to stop.
func (l *loop) collect(events []syscall.EpollEvent) bool {
	l.ready = l.ready[:0]
	l.mu.Lock()
	for _, ev := range events {
		if ev.Fd == wakeKey {
			continue // edge-triggered: it need not be read
		}
		slot := ev.Fd >> 1
		if f := l.flows[slot]; f != nil && f.gen == ev.Pad {
			l.ready = append(l.ready, ready{f, int(ev.Fd & 1), ev.Events})
		}
	}
	kills, stop := l.kills, l.stop
	l.kills = nil
	l.mu.Unlock()
	for _, o := range kills {
		if o.f.broken != 0 {
			l.fail(o.f, 1, o.f.broken)
		}
		l.end(o.f, o.why, nil)
	}
	return !stop
}

// trim closes the empty pipes once bulk has been over for a while.
func (l *loop) trim() {
	if len(l.turns) > 0 || l.now-l.turned < int64(time.Second) {
		return
	}
	for _, p := range l.pipes {
		p.close()
	}
	l.npipes -= len(l.pipes)
	l.budget.Give(int64(2 * len(l.pipes)))
	l.pipes = nil
}

// sweep ends the flows that have been silent for longer than they may.
func (l *loop) sweep() {
	l.swept = l.now
	l.trim()
	var over []order
	l.mu.Lock()
	pause := time.Second
	for _, f := range l.flows {
		if f == nil {
			continue
		}
		for _, d := range []time.Duration{f.idle, f.half} {
			if d > 0 {
				pause = min(pause, max(d/4, time.Millisecond))
			}
		}
		if !f.kept && l.now-f.born >= int64(keepAfter) {
			f.kept = true
			keepFD(f.sides[0].fd)
			keepFD(f.sides[1].fd)
		}
		half := f.sides[0].eof != f.sides[1].eof
		if why, yes := silent(time.Duration(l.now-f.moved), half, f.idle, f.half); yes {
			over = append(over, order{f, why})
		}
	}
	l.pause = pause
	l.mu.Unlock()
	for _, o := range over {
		l.end(o.f, o.why, nil)
	}
}

// release ends what is left and gives everything back.
func (l *loop) release() {
	l.mu.Lock()
	l.released = true
	left := make([]*flow, 0, len(l.flows)-len(l.free))
	for _, f := range l.flows {
		if f != nil {
			left = append(left, f)
		}
	}
	l.mu.Unlock()
	for _, f := range left {
		l.end(f, Drain, nil)
	}
	for _, p := range l.pipes {
		p.close()
	}
	l.budget.Give(int64(2 * l.npipes))
	closeFD(l.wake)
	closeFD(int32(l.ep))
}
