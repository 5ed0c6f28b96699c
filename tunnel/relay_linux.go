//go:build amd64 || arm64

package tunnel

import (
	"fmt"
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
// bulk: it leaves the epoll set's attention and is looked at every bulkPause
// instead, so that bytes gather and each splice(2) moves many of them. It
// returns to events when it has been calm for a while.
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
	loopBuffer = 64 << 10               // one read, and the most user memory a blocked tunnel holds each way
	pipeSize   = 1 << 20                // bytes; a large pipe makes each splice move more
	maxPipes   = 32                     // per loop, so that all fit below pipe-user-pages-soft (64 MiB)
	bulkPause  = 200 * time.Microsecond // how long a bulk direction gathers bytes
	bulkTurn   = 4 * pipeSize           // the most one bulk direction moves before the next one's turn
	bulkCalm   = 16 << 10               // a turn below this many bytes is a calm one
	calmTurns  = 8                      // calm turns in a row that end bulk
	maxEvents  = 256
)

// carry takes over the tunnel if both ends are TCP sockets. It is false, with
// nothing changed, where they are not or the kernel won't have them.
func (k *kernelRelay) carry(r *Relay, client, server net.Conn, fromClient, fromServer []byte, t *Tunnel) bool {
	a, ok := client.(*net.TCPConn)
	if !ok {
		return false
	}
	b, ok := server.(*net.TCPConn)
	if !ok {
		return false
	}
	k.once.Do(func() { k.start(r) })
	loops := k.running()
	if len(loops) == 0 {
		return false
	}
	f := &flow{idle: t.Idle, half: t.HalfClosed, ended: t.Ended, moved: clock()}
	var err error
	if f.sides[0].fd, err = duplicate(a); err != nil {
		return false
	}
	if f.sides[1].fd, err = duplicate(b); err != nil {
		closeFD(f.sides[0].fd)
		return false
	}
	_, _ = a.Close(), b.Close() // the duplicates live on
	l := loops[int(k.next.Add(1))%len(loops)]
	l.adopt(f, fromClient, fromServer)
	return true
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

// A flow is one tunnel: sides[0] is the client's socket, sides[1] the
// service's. It belongs to its loop's goroutine once adopted.
type flow struct {
	sides      [2]side
	moved      int64 // clock of the last byte or end
	idle, half time.Duration
	ended      func(End)
	slot, gen  int32         // where it stands in loop.flows
	broken     syscall.Errno // what went wrong before the loop had it
	gone       bool
}

// A side is one socket of a flow, and the direction that flows into it.
type side struct {
	fd     int32
	events uint32   // what epoll is asked for
	out    *backlog // what the other side sent and this socket has not taken; nil for nothing
	taken  int64    // bytes this socket has taken
	eof    bool     // it has sent its end of stream
	shut   bool     // it was sent the other side's end of stream
	bulk   bool     // what it sends is moved in turns, not by events
	calm   uint8    // calm turns in a row
}

// A backlog holds the bytes that back-pressure keeps here: in memory, or in a
// pipe if they came by splice.
type backlog struct {
	bytes []byte
	pipe  pipe
	n     int // bytes in the pipe
}

// A turn is a direction in bulk: what side from of f sends.
type turn struct {
	f    *flow
	from int
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
	if len(l.flows)-len(l.free) == 1 {
		l.notify() // the first flow starts the sweeps
	}
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
		if len(l.turns) > 0 && l.now-l.turned >= int64(bulkPause) {
			l.bulk()
		}
		if l.now-l.swept >= int64(l.sweepPause()) {
			l.sweep()
		}
	}
}

// wait is how long the loop may sleep.
func (l *loop) wait() time.Duration {
	if len(l.turns) > 0 {
		return bulkPause
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.flows) == len(l.free) && len(l.pipes) == 0 {
		return -1
	}
	return l.pause
}

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

// handle answers one event of side i of f.
func (l *loop) handle(f *flow, i int, events uint32) {
	s, p := &f.sides[i], &f.sides[1-i]
	if events&syscall.EPOLLOUT != 0 && s.out != nil {
		l.flush(f, i)
		if f.gone {
			return
		}
	}
	if events&(syscall.EPOLLIN|syscall.EPOLLHUP|syscall.EPOLLERR) != 0 && !s.bulk {
		l.pump(f, i)
	}
	if events&syscall.EPOLLERR != 0 && !f.gone && (s.eof || p.out != nil || s.bulk) {
		if errno := socketError(s.fd); errno != 0 {
			l.fail(f, i, errno)
		}
	}
}

// pump moves what side i sends, by read and write.
func (l *loop) pump(f *flow, i int) {
	s, p := &f.sides[i], &f.sides[1-i]
	if s.eof || p.out != nil {
		l.arm(f)
		return
	}
	n, errno := read(s.fd, l.buf)
	switch {
	case errno == syscall.EAGAIN || errno == syscall.EINTR:
		return // level-triggered: it comes again
	case errno != 0:
		l.fail(f, i, errno)
		return
	case n == 0:
		l.finish(f, i)
		return
	}
	f.moved = l.now
	if errno := f.offer(1-i, l.buf[:n]); errno != 0 {
		l.fail(f, 1-i, errno)
		return
	}
	if n == len(l.buf) && !s.bulk {
		s.bulk, s.calm = true, 0
		l.turns = append(l.turns, turn{f, i})
		l.arm(f)
	} else if p.out != nil {
		l.arm(f)
	}
}

// offer gives p to side i's socket and keeps what it does not take.
func (f *flow) offer(i int, p []byte) syscall.Errno {
	s := &f.sides[i]
	for len(p) > 0 {
		n, errno := send(s.fd, p)
		switch errno {
		case 0:
			s.taken += int64(n)
			p = p[n:]
		case syscall.EINTR:
		case syscall.EAGAIN:
			s.out = &backlog{bytes: append([]byte(nil), p...)}
			return 0
		default:
			return errno
		}
	}
	return 0
}

// flush gives side i its backlog. When that is gone, the end of stream that
// waited behind it follows, and the other side is read again.
func (l *loop) flush(f *flow, i int) {
	s := &f.sides[i]
	if errno := l.drain(f, s); errno != 0 {
		l.fail(f, i, errno)
		return
	}
	if s.out != nil {
		return
	}
	if f.sides[1-i].eof {
		l.finish(f, 1-i)
		return
	}
	l.arm(f)
}

// drain moves s's backlog into its socket, as far as that takes it.
func (l *loop) drain(f *flow, s *side) syscall.Errno {
	o := s.out
	for o != nil {
		var n int
		var errno syscall.Errno
		if o.n > 0 {
			n, errno = splice(o.pipe.r, s.fd, o.n)
		} else {
			n, errno = send(s.fd, o.bytes)
		}
		switch errno {
		case 0:
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return 0
		default:
			return errno
		}
		f.moved = l.now
		s.taken += int64(n)
		switch {
		case o.n > n:
			o.n -= n
		case o.n > 0:
			l.pipes = append(l.pipes, o.pipe)
			s.out, o = nil, nil
		case len(o.bytes) > n:
			o.bytes = o.bytes[n:]
		default:
			s.out, o = nil, nil
		}
	}
	return 0
}

// finish passes on that side i has ended its stream, once all it sent is
// with the other side. The second end is the tunnel's.
func (l *loop) finish(f *flow, i int) {
	s, p := &f.sides[i], &f.sides[1-i]
	if !s.eof {
		s.eof, s.bulk, f.moved = true, false, l.now
	}
	if p.out == nil && !p.shut {
		p.shut = true
		if errno := shutdownWrite(p.fd); errno != 0 {
			l.fail(f, 1-i, errno)
			return
		}
	}
	if s.shut && p.shut {
		l.end(f, Done, nil)
		return
	}
	l.arm(f)
}

// bulk gives every bulk direction its turn.
func (l *loop) bulk() {
	kept := l.turns[:0]
	for _, t := range l.turns {
		if !t.f.gone && t.f.sides[t.from].bulk {
			l.take(t.f, t.from)
		}
		if !t.f.gone && t.f.sides[t.from].bulk {
			kept = append(kept, t)
		}
	}
	clear(l.turns[len(kept):])
	l.turns = kept
	l.turned = clock()
}

// take is one turn of bulk: what side i sends goes through a pipe to the
// other side.
func (l *loop) take(f *flow, i int) {
	s, p := &f.sides[i], &f.sides[1-i]
	before := p.taken
	for p.taken-before < bulkTurn {
		if errno := l.drain(f, p); errno != 0 {
			l.fail(f, 1-i, errno)
			return
		}
		if p.out != nil {
			break
		}
		pp, ok := l.pipe()
		if !ok {
			s.calm = calmTurns // no pipe to be had: events and the loop's own buffer do
			break
		}
		n, errno := splice(s.fd, pp.w, pipeSize)
		if n > 0 && errno == 0 {
			f.moved = l.now
			p.out = &backlog{pipe: pp, n: n}
			continue
		}
		l.pipes = append(l.pipes, pp)
		switch {
		case errno == 0:
			l.finish(f, i)
			return
		case errno == syscall.EINTR:
			continue
		case errno != syscall.EAGAIN:
			l.fail(f, i, errno)
			return
		}
		break
	}
	if p.taken-before >= bulkCalm {
		s.calm = 0
	} else if s.calm++; s.calm >= calmTurns {
		s.bulk = false
		l.arm(f)
	}
}

// pipe returns an empty pipe. It is false where no more may be had.
func (l *loop) pipe() (pipe, bool) {
	if n := len(l.pipes); n > 0 {
		p := l.pipes[n-1]
		l.pipes = l.pipes[:n-1]
		return p, true
	}
	if l.npipes >= maxPipes || !l.budget.Take(2) {
		return pipe{}, false
	}
	p, err := newPipe(pipeSize)
	if err != nil {
		l.budget.Give(2)
		return pipe{}, false
	}
	l.npipes++
	return p, true
}

// wants is what epoll is to watch on side i: input, unless it ended, its
// backlog at the other side is not gone or bulk polls it; output while it has
// a backlog of its own. With nothing to watch it is edge-triggered, or a socket
// that is closed both ways would wake the loop for ever.
func (f *flow) wants(i int) uint32 {
	s, p := &f.sides[i], &f.sides[1-i]
	var w uint32
	if !s.eof && p.out == nil && !s.bulk {
		w |= syscall.EPOLLIN
	}
	if s.out != nil && !p.bulk {
		w |= syscall.EPOLLOUT
	}
	if w == 0 {
		w = epollET
	}
	return w
}

// arm tells epoll what changed.
func (l *loop) arm(f *flow) {
	for i := range f.sides {
		s := &f.sides[i]
		if w := f.wants(i); w != s.events {
			s.events = w
			_ = epollControl(l.ep, syscall.EPOLL_CTL_MOD, s.fd, w, f.slot<<1|int32(i), f.gen)
		}
	}
}

// fail ends f because side i reported errno.
func (l *loop) fail(f *flow, i int, errno syscall.Errno) {
	who := [...]string{"client", "service"}[i]
	l.end(f, Reset, fmt.Errorf("%s: %w", who, errno))
}

// end closes f, in order for Done and with resets for any other reason.
func (l *loop) end(f *flow, why Reason, err error) {
	if f.gone {
		return
	}
	f.gone = true
	for i := range f.sides {
		s := &f.sides[i]
		if s.out != nil && s.out.n > 0 { // a pipe with bytes in it is of no use to anyone
			s.out.pipe.close()
			l.npipes--
			l.budget.Give(2)
		}
		s.out = nil
		if why == Done {
			closeFD(s.fd)
		} else {
			resetFD(s.fd)
		}
	}
	l.mu.Lock()
	l.flows[f.slot] = nil
	l.gens[f.slot]++
	l.free = append(l.free, f.slot)
	l.mu.Unlock()
	f.ended(End{Reason: why, Err: err, In: f.sides[1].taken, Out: f.sides[0].taken})
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
