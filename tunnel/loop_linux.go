//go:build amd64 || arm64

package tunnel

import (
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A loop is one goroutine around one epoll set. It waits, lets whoever has an
// event handle it, gives bulk its turn and sweeps. Nobody who handles an event
// waits: a connection that has to, for a name or for a service far away, passes
// the loop on to another goroutine first and keeps its own (see serve).
type loop struct {
	ep      int
	wake    int32
	budget  *Budget
	ended   func()
	now     int64 // clock
	buf     []byte
	events  []syscall.EpollEvent
	ready   []ready // what the events are for
	done    int     // of ready
	turns   []turn
	pipes   []pipe // empty ones
	npipes  int
	sweep   sweep
	turned  int64 // clock of the last bulk turn
	yielded int64 // clock of the last yield
	sleeps  int   // since then

	aboard atomic.Pointer[slot] // whom the loop's goroutine serves now
	flows  atomic.Int32         // how many of the seats are tunnels

	mu    sync.Mutex // guards what follows
	seats []watched  // nil where free
	free  []int32
	gens  []int32
	dues  []int64 // clock of the sweep's next look at each seat
	asks  []int64 // and of the next question whether its peers live
	kills []order
	asked []survey
	due   int64 // clock of the next sweep
	over  bool  // it is to stop
	stuck *slot // aboard when watch looked last

	released bool // its descriptors are no longer its own
}

// A watched has descriptors in a loop's epoll set: a flow, a guest or a door.
// Its event runs on the loop's goroutine and is false where that is the loop's
// no longer.
type watched interface {
	event(l *loop, side int, events uint32) bool
}

type ready struct {
	w      watched
	side   int
	events uint32
}

// An order to end a flow.
type order struct {
	f   *flow
	why Reason
	err error
}

const (
	wakeKey   = -1
	maxEvents = 256

	maxSleep = time.Minute

	yieldEvery  = 6 * time.Millisecond // less than the monitor's ten
	yieldSleeps = 8                    // in that time, below which the loop is at rest
)

type kernelLoops struct {
	once  sync.Once
	loops atomic.Pointer[[]*loop] // set once; nil before
	next  atomic.Uint32
	wg    sync.WaitGroup

	stalls atomic.Uint64
}

// running starts the loops if they never were and returns them. There are
// fewer or none where the system has no more epoll sets, or after stop.
func (l *Loops) running() []*loop {
	l.once.Do(func() {
		n := l.Count
		if n <= 0 {
			n = runtime.GOMAXPROCS(0)
		}
		var loops []*loop
		for range n {
			one, err := newLoop(l.Budget, l.wg.Done)
			if err != nil {
				break
			}
			loops = append(loops, one)
			l.wg.Add(1)
			go one.run()
		}
		l.loops.Store(&loops)
	})
	return l.started()
}

// started returns the loops if they run already.
func (k *kernelLoops) started() []*loop {
	if loops := k.loops.Load(); loops != nil {
		return *loops
	}
	return nil
}

// pick returns the loop for a new tunnel, nil where there is none: home, which
// has it at hand, unless that has clearly more tunnels than another.
func (l *Loops) pick(home *loop) *loop {
	loops := l.running()
	if len(loops) == 0 {
		return nil
	}
	// Begin somewhere else each time, or ties would all go to the first.
	first := int(l.next.Add(1))
	least := loops[first%len(loops)]
	for i := range loops {
		if one := loops[(first+i)%len(loops)]; one.flows.Load() < least.flows.Load() {
			least = one
		}
	}
	for _, one := range loops {
		if n := least.flows.Load(); one == home && home.flows.Load() <= n+n/8+1 {
			return home
		}
	}
	return least
}

func (k *kernelLoops) stop() {
	k.once.Do(func() {}) // never start after this
	for _, l := range k.started() {
		l.mu.Lock()
		l.over = true
		l.notify()
		l.mu.Unlock()
	}
	k.wg.Wait()
}

func newLoop(budget *Budget, ended func()) (*loop, error) {
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
		ep: ep, wake: wake, budget: budget, ended: ended, due: noLook,
		buf:    make([]byte, loopBuffer),
		events: make([]syscall.EpollEvent, maxEvents),
		ready:  make([]ready, 0, maxEvents),
	}, nil
}

// seat finds a place for w. The caller holds mu.
func (l *loop) seat(w watched) (at, gen int32) {
	if n := len(l.free); n > 0 {
		at = l.free[n-1]
		l.free = l.free[:n-1]
	} else {
		at = int32(len(l.seats))
		l.seats = append(l.seats, nil)
		l.gens = append(l.gens, 0)
		l.dues = append(l.dues, noLook)
		l.asks = append(l.asks, noLook)
	}
	l.seats[at], l.dues[at], l.asks[at] = w, noLook, noLook
	return at, l.gens[at]
}

// vacate gives up a place: events that were on their way to it are nobody's.
// The caller holds mu.
func (l *loop) vacate(at int32) {
	l.seats[at], l.dues[at] = nil, noLook
	l.gens[at]++
	l.free = append(l.free, at)
}

// control is epoll_ctl for the descriptor fd of whoever sits at at; side tells
// its descriptors apart.
func (l *loop) control(op int, fd int32, events uint32, at, gen int32, side int) error {
	return epollControl(l.ep, op, fd, events, at<<1|int32(side), gen)
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

// run is the loop. It returns when that is stopped, or passed on: then the
// other goroutine's run begins with the events that are left.
func (l *loop) run() {
	// A thread of its own, or the scheduler moves the loop to another whenever
	// it has slept: each time, two threads wake.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for {
		for l.done < len(l.ready) {
			r := l.ready[l.done]
			l.done++
			if !r.w.event(l, r.side, r.events) {
				return
			}
		}
		if len(l.turns) > 0 && l.now-l.turned >= int64(l.gather()) {
			l.bulk()
		}
		if len(l.pipes) > 0 {
			l.trim()
		}
		if l.now >= l.sweepDue() {
			l.sweepSome()
		}
		n := epollPoll(l.ep, l.events)
		if n == 0 {
			l.yield()
			n = epollWait(l.ep, l.events, l.wait())
		}
		l.now = clock()
		if !l.collect(l.events[:n]) {
			l.release()
			return
		}
	}
}

// yield gives way once before a sleep, of a loop that wakes often. One that
// never did would look to the runtime's monitor like a goroutine that keeps its
// processor to itself: the monitor takes that away every ten milliseconds and
// then looks each 20 µs whether it should do so again (docs/internals/adr/0006).
func (l *loop) yield() {
	l.sleeps++
	if l.now-l.yielded < int64(yieldEvery) {
		return
	}
	if l.sleeps >= yieldSleeps {
		runtime.UnlockOSThread() // or it would take two more threads to come back
		runtime.Gosched()
		runtime.LockOSThread()
	}
	l.yielded, l.sleeps = l.now, 0
}

// wait is how long the loop may sleep: at rest until a sweep is due, so that
// what rests costs nothing.
func (l *loop) wait() time.Duration {
	if len(l.turns) > 0 && l.sweep.next == 0 {
		return l.gather()
	}
	most := maxSleep
	if len(l.pipes) > 0 {
		most = trimAfter
	}
	return min(most, time.Duration(max(l.sweepDue()-l.now, 0)))
}

// collect finds whose the events are and carries out the orders. It is false
// when the loop is to stop.
func (l *loop) collect(events []syscall.EpollEvent) bool {
	l.ready, l.done = l.ready[:0], 0
	l.mu.Lock()
	for _, ev := range events {
		if ev.Fd == wakeKey {
			continue // edge-triggered: it need not be read
		}
		at := ev.Fd >> 1
		if w := l.seats[at]; w != nil && l.gens[at] == ev.Pad {
			l.ready = append(l.ready, ready{w, int(ev.Fd & 1), ev.Events})
		}
	}
	kills, over, asked := l.kills, l.over, l.asked
	l.kills, l.asked = nil, nil
	l.mu.Unlock()
	for _, o := range kills {
		if o.f.broken != 0 {
			l.fail(o.f, 1, syscall.Errno(o.f.broken))
		}
		l.end(o.f, o.why, o.err)
	}
	for _, s := range asked {
		s.answer <- l.survey(s)
	}
	return !over
}

// serve serves k on the loop's own goroutine, as any goroutine would. It is
// false where k came to wait: the loop is another goroutine's by then.
func (l *loop) serve(k *slot) bool {
	l.aboard.Store(k)
	k.server.serve(k)
	return l.aboard.CompareAndSwap(k, nil)
}

// passOn gives the loop that the calling goroutine serves k on to another
// goroutine. It does nothing where k is on a goroutine of its own.
func (k *slot) passOn() {
	if k.disembark() {
		// Whoever waits keeps no thread. The loop, which is next to run, most
		// likely gets this one.
		runtime.UnlockOSThread()
	}
}

func (k *slot) disembark() bool {
	l := k.loop
	if l == nil || l.aboard.Load() != k || !l.aboard.CompareAndSwap(k, nil) {
		return false
	}
	go l.run()
	return true
}

// watch passes on the loops that have served the same connection since the
// last time: it waits, and nobody said so. It is false when none is served.
func (k *kernelLoops) watch() (busy bool) {
	for _, l := range k.started() {
		now := l.aboard.Load()
		l.mu.Lock()
		stuck := now != nil && now == l.stuck
		l.stuck = now
		l.mu.Unlock()
		if stuck && now.disembark() {
			k.stalls.Add(1)
		}
		busy = busy || now != nil
	}
	return busy
}

// release ends what is left and gives everything back.
func (l *loop) release() {
	l.mu.Lock()
	l.released = true
	left := append([]watched(nil), l.seats...)
	l.mu.Unlock()
	for _, w := range left {
		if f, ok := w.(*flow); ok {
			l.end(f, Drain, nil)
		}
	}
	for _, p := range l.pipes {
		p.close()
	}
	l.budget.Give(int64(2 * l.npipes))
	closeFD(l.wake)
	closeFD(int32(l.ep))
	l.ended()
}
