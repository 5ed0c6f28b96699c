//go:build amd64 || arm64

package relay

import (
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

// A loop is a poll.Loop and the tunnels that it carries, of which it gives bulk
// its turn and sweeps the others between events.
type loop struct {
	poll.Loop
	budget Budget
	buf    []byte
	turns  []bulkDirection
	pipes  []poll.Pipe // empty ones
	npipes int
	sweep  sweep
	turned int64 // clock of the last bulk turn
	ending [][]abortOrder

	flows atomic.Int32 // tunnels

	// Guarded by the Loop's lock.
	sweepAt []int64        // when each tunnel is due for the sweep, by the index of its token
	checkAt []int64        // and when its peers are to be checked next
	aborts  [][]abortOrder // the loop takes them to ending
	surveys []bufferSurvey
	due     int64 // clock of the next sweep
}

// An abortOrder is an order to end a tunnel.
type abortOrder struct {
	tunnel *socketTunnel
	why    Reason
	err    error
}

const maxSleep = time.Minute

// Loops are event loops that carry tunnels and watch the sockets of listeners and of
// pending connections. Count and Budget are set before they start; they start when
// they are first needed.
type Loops struct {
	Count  int    // 0 means one for each processor that Go uses
	Budget Budget // pipes are counted here

	once   sync.Once
	loops  atomic.Pointer[[]*loop] // set once; nil before
	next   atomic.Uint32
	wg     sync.WaitGroup
	stalls atomic.Uint64
}

// Running starts the loops if they never were, and returns them. There are fewer or
// none where the system has no more epoll sets, or after Stop.
func (l *Loops) Running() []*poll.Loop {
	var all []*poll.Loop
	for _, one := range l.running() {
		all = append(all, &one.Loop)
	}
	return all
}

// running is Running, for this package.
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
			go one.Run()
		}
		l.loops.Store(&loops)
	})
	return l.started()
}

// started returns the loops if they run already.
func (l *Loops) started() []*loop {
	if loops := l.loops.Load(); loops != nil {
		return *loops
	}
	return nil
}

// pick returns the loop for a new tunnel, nil where there is none: home, which
// accepted its client, unless that has clearly more tunnels than another.
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

// Stop stops the loops. What they still watch is closed with a reset.
func (l *Loops) Stop() {
	l.once.Do(func() {}) // never start after this
	for _, one := range l.started() {
		one.Stop()
	}
	l.wg.Wait()
}

// Stalls returns how often HandOffStalled found a loop that was held up.
func (l *Loops) Stalls() uint64 { return l.stalls.Load() }

func newLoop(budget Budget, ended func()) (*loop, error) {
	l := &loop{budget: budget, due: notDue, buf: make([]byte, loopBuffer)}
	return l, l.Init(l, ended)
}

// loopOf returns the loop around l, nil where l is nil.
func loopOf(l *poll.Loop) *loop {
	if l == nil {
		return nil
	}
	return l.Work().(*loop)
}

// homeOf returns the loop that accepted c, nil where none did.
func homeOf(c net.Conn) *loop {
	if c, ok := c.(*poll.Conn); ok && c.Task != nil {
		return loopOf(c.Task.Loop)
	}
	return nil
}

// RunDue implements poll.Work: bulk, and the sweep.
func (l *loop) RunDue() {
	if len(l.ending) > 0 {
		l.endSome()
	}
	if len(l.turns) > 0 && l.Now-l.turned >= int64(l.gather()) {
		l.bulk()
	}
	if len(l.pipes) > 0 {
		l.trim()
	}
	if l.Now >= l.sweepDue() {
		l.sweepSome()
	}
}

// MaxSleep implements poll.Work. A loop at rest sleeps until a sweep is due, so that
// idle tunnels cost no CPU.
func (l *loop) MaxSleep() time.Duration {
	if len(l.ending) > 0 {
		return 0
	}
	if len(l.turns) > 0 && l.sweep.next == 0 {
		return l.gather()
	}
	most := maxSleep
	if len(l.pipes) > 0 {
		most = trimAfter
	}
	return min(most, time.Duration(max(l.sweepDue()-l.Now, 0)))
}

// Orders implements poll.Work: it ends tunnels, and answers surveys.
func (l *loop) Orders() {
	l.Lock()
	orders, asked := l.aborts, l.surveys
	l.aborts, l.surveys = nil, nil
	l.Unlock()
	l.ending = append(l.ending, orders...)
	l.endSome()
	for _, s := range asked {
		s.answer <- l.survey(s)
	}
}

// Release implements poll.Work: it ends the tunnels that are left.
func (l *loop) Release() {
	l.Lock()
	left := append([]poll.Handler(nil), l.Handlers()...)
	l.Unlock()
	for _, h := range left {
		if f, ok := h.(*socketTunnel); ok {
			l.end(f, Drain, nil)
		}
	}
	for _, p := range l.pipes {
		p.Close()
	}
	l.budget.Give(int64(2 * l.npipes))
}

// HandOffStalled hands off the loops that have served the same connection since
// the last call: it waits, and nobody said so. It is false when none is served.
func (l *Loops) HandOffStalled() (busy bool) {
	for _, one := range l.started() {
		serves, stalled := one.CheckStalled()
		if stalled {
			l.stalls.Add(1)
		}
		busy = busy || serves
	}
	return busy
}
