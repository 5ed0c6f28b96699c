//go:build amd64 || arm64

package poll

import (
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A Loop is one goroutine around one epoll set. It waits, passes each event to
// its Handler, and has its Work done in between. A Handler never waits: a Task
// that has to, for a name or for a service far away, first hands the Loop to
// another goroutine and keeps its own.
type Loop struct {
	sync.Mutex // guards registration, and what Handlers and Work put under it

	Now int64 // the Clock when the loop last waited; for the loop's goroutine

	work      Work
	ended     func()
	ep        int
	wake      int32
	events    []syscall.EpollEvent
	ready     []ready // what the events are for
	done      int     // of ready
	yielded   int64   // Clock of the last yield
	sleeps    int     // since then
	current   atomic.Pointer[Task]
	handOffs  atomic.Uint64
	lastCheck *Task // current at the last CheckStalled; guarded by the Mutex

	handlers []Handler // nil where free
	gens     []int32
	free     []int32
	notified bool // there are orders for the Work
	stopping bool
	released bool // its descriptors are no longer its own
}

// A Handler has descriptors in a Loop's epoll set. HandleEvent runs on the
// Loop's goroutine; side is what Watch was given for the descriptor. It is false
// where the Loop has been handed to another goroutine meanwhile.
type Handler interface {
	HandleEvent(l *Loop, side int, events uint32) bool
}

// Work is what a Loop's goroutine does beside events. All its methods are called
// on that goroutine.
type Work interface {
	// Orders does what other goroutines asked for, after a Notify.
	Orders()

	// RunDue does what is due. It is called before the Loop waits.
	RunDue()

	// MaxSleep returns how long the Loop may wait at most.
	MaxSleep() time.Duration

	// Release gives everything back. No event comes after it.
	Release()
}

// A Token is what a Handler is registered under.
type Token struct{ at, gen int32 }

// Index returns a small number that no other registered Handler has.
func (t Token) Index() int { return int(t.at) }

type ready struct {
	h      Handler
	side   int
	events uint32
}

const (
	wakeKey   = -1
	maxEvents = 256

	yieldInterval = 6 * time.Millisecond // less than the monitor's ten
	yieldSleeps   = 8                    // sleeps in that time, below which the loop is at rest
)

// Init makes l a Loop that has work to do, and calls ended when its goroutine has
// ended. The caller runs it.
func (l *Loop) Init(work Work, ended func()) error {
	ep, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	wake, err := newEventFD()
	if err == nil {
		err = epollControl(ep, syscall.EPOLL_CTL_ADD, wake, In|EdgeTriggered, wakeKey, 0)
	}
	if err != nil {
		_ = syscall.Close(ep)
		return err
	}
	l.ep, l.wake, l.work, l.ended = ep, wake, work, ended
	l.events = make([]syscall.EpollEvent, maxEvents)
	l.ready = make([]ready, 0, maxEvents)
	return nil
}

// Work returns what Init was given.
func (l *Loop) Work() Work { return l.work }

// Stop ends the Loop soon.
func (l *Loop) Stop() {
	l.Lock()
	defer l.Unlock()
	l.stopping = true
	l.Notify()
}

// Stopped reports whether the Loop takes no more registrations. The caller holds
// the lock.
func (l *Loop) Stopped() bool { return l.released }

// Register registers h. The caller holds the lock, and the Loop is not Stopped.
func (l *Loop) Register(h Handler) Token {
	var at int32
	if n := len(l.free); n > 0 {
		at = l.free[n-1]
		l.free = l.free[:n-1]
	} else {
		at = int32(len(l.handlers))
		l.handlers = append(l.handlers, nil)
		l.gens = append(l.gens, 0)
	}
	l.handlers[at] = h
	return Token{at, l.gens[at]}
}

// Unregister gives up t: events on their way to its Handler are dropped. The
// caller holds the lock.
func (l *Loop) Unregister(t Token) {
	l.handlers[t.at] = nil
	l.gens[t.at]++
	l.free = append(l.free, t.at)
}

// Handlers returns the registered Handlers by the Index of their Token, nil where
// there is none. The caller holds the lock.
func (l *Loop) Handlers() []Handler { return l.handlers }

// Watch has events of fd passed to t's Handler, with side, 0 or 1, to tell its
// descriptors apart.
func (l *Loop) Watch(fd int32, events uint32, t Token, side int) error {
	return epollControl(l.ep, syscall.EPOLL_CTL_ADD, fd, events, t.at<<1|int32(side), t.gen)
}

// Rewatch changes the events of a descriptor that is watched.
func (l *Loop) Rewatch(fd int32, events uint32, t Token, side int) error {
	return epollControl(l.ep, syscall.EPOLL_CTL_MOD, fd, events, t.at<<1|int32(side), t.gen)
}

// Unwatch ends the events of fd. A descriptor that is closed needs no Unwatch.
func (l *Loop) Unwatch(fd int32) error {
	return epollControl(l.ep, syscall.EPOLL_CTL_DEL, fd, 0, 0, 0)
}

// Notify wakes the Loop, for its Work's Orders. The caller holds the lock, so that
// the descriptor is still the Loop's own.
func (l *Loop) Notify() {
	l.notified = true
	if l.released {
		return
	}
	one := [8]byte{1}
	_, _ = syscall.Write(int(l.wake), one[:])
}

// Run is the Loop. It returns when that is stopped, or handed off: then the other
// goroutine's Run begins with the events that are left.
func (l *Loop) Run() {
	// A thread of its own, or the scheduler moves the loop to another whenever
	// it has slept: each time, two threads wake.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for {
		for l.done < len(l.ready) {
			r := l.ready[l.done]
			l.done++
			if !r.h.HandleEvent(l, r.side, r.events) {
				return
			}
		}
		l.work.RunDue()
		n := epollPoll(l.ep, l.events)
		if n == 0 {
			l.yield()
			n = epollWait(l.ep, l.events, l.work.MaxSleep())
		}
		l.Now = Clock()
		if !l.collect(l.events[:n]) {
			l.release()
			return
		}
	}
}

// Alone reports whether the Loop has one event to handle and no other.
func (l *Loop) Alone() bool { return len(l.ready) == 1 }

// yield gives way once before a sleep, of a loop that wakes often. One that
// never did would look to the runtime's monitor like a goroutine that keeps its
// processor to itself: the monitor takes that away every ten milliseconds and
// then looks each 20 µs whether it should do so again (docs/internals/adr/0006).
func (l *Loop) yield() {
	l.sleeps++
	if l.Now-l.yielded < int64(yieldInterval) {
		return
	}
	if l.sleeps >= yieldSleeps {
		runtime.UnlockOSThread() // or it would take two more threads to come back
		runtime.Gosched()
		runtime.LockOSThread()
	}
	l.yielded, l.sleeps = l.Now, 0
}

// collect finds the Handlers of events and has the orders carried out. It is false
// when the loop is to stop.
func (l *Loop) collect(events []syscall.EpollEvent) bool {
	l.ready, l.done = l.ready[:0], 0
	l.Lock()
	for _, ev := range events {
		if ev.Fd == wakeKey {
			continue // edge-triggered: it need not be read
		}
		at := ev.Fd >> 1
		if h := l.handlers[at]; h != nil && l.gens[at] == ev.Pad {
			l.ready = append(l.ready, ready{h, int(ev.Fd & 1), ev.Events})
		}
	}
	notified, stopping := l.notified, l.stopping
	l.notified = false
	l.Unlock()
	if notified {
		l.work.Orders()
	}
	return !stopping
}

// release has the work end what is left, and gives everything back.
func (l *Loop) release() {
	l.Lock()
	l.released = true
	l.Unlock()
	l.work.Release()
	CloseFD(l.wake)
	CloseFD(int32(l.ep))
	l.ended()
}

// A Task is what a Loop's goroutine does for longer than an event: it serves a
// connection. Loop is nil for a Task on a goroutine of its own.
type Task struct{ Loop *Loop }

// Begin has the Loop's goroutine do t from now on.
func (l *Loop) Begin(t *Task) { l.current.Store(t) }

// End ends t. It is false where t had to wait: the Loop is another goroutine's by
// then.
func (l *Loop) End(t *Task) bool { return l.current.CompareAndSwap(t, nil) }

// HandOff gives the Loop whose goroutine does t to another goroutine. It does
// nothing where t has a goroutine of its own.
func (t *Task) HandOff() {
	if t.detach() {
		// What waits keeps no thread. The loop, which is next to run, most
		// likely gets this one.
		runtime.UnlockOSThread()
	}
}

func (t *Task) detach() bool {
	l := t.Loop
	if l == nil || l.current.Load() != t || !l.current.CompareAndSwap(t, nil) {
		return false
	}
	l.handOffs.Add(1)
	go l.Run()
	return true
}

// HandOffs returns how often the Loop was handed to another goroutine.
func (l *Loop) HandOffs() uint64 { return l.handOffs.Load() }

// CheckStalled hands off a Loop whose goroutine has done the same Task since the
// last call: the Task waits, and did not call HandOff. busy is false where there
// is no Task.
func (l *Loop) CheckStalled() (busy, stalled bool) {
	t := l.current.Load()
	l.Lock()
	same := t != nil && t == l.lastCheck
	l.lastCheck = t
	l.Unlock()
	return t != nil, same && t.detach()
}
