package relay

import (
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

const (
	// idleBeforePark is how long a pump keeps a goroutine that waits for a socket,
	// or in a Read. Then it is parked, if something else can do the waiting.
	idleBeforePark = time.Second

	// probeTimeout is how long the first Read after a pause may take to find bytes
	// in what has arrived.
	probeTimeout = 10 * time.Millisecond

	// maxUnsent is how many bytes the kernel may take for the peer of a Pusher that
	// does not read, beside what that has room for.
	maxUnsent = 128 << 10
)

// A pump is one direction of a copyTunnel. What it costs depends on its source:
//   - a Waiter has a goroutine and a buffer only while there are bytes, or for a while
//     longer where it says so;
//   - a socket has a buffer only then, and a goroutine for a while longer, since
//     its wait in Go's poller is the faster one;
//   - a layer on one of those, as TLS and a WebSocket are, has both for a while
//     longer: only a Read that finds nothing says that there is nothing;
//   - any other stream has both until its end.
type pump struct {
	ct       *copyTunnel
	src, dst net.Conn
	budget   Budget // counts the buffer while a write keeps it

	n           atomic.Int64 // bytes that dst has taken
	moved       atomic.Int64 // when it last took some, nanoseconds of clock
	kept        atomic.Int64 // bytes of the buffer that a write keeps now
	state       atomic.Int32
	interrupted atomic.Bool // the source was given a deadline to have it parked
	large       bool        // it has a buffer of full size; of a layer, where a Read may wait in it, only once bytes have filled a small one
	needsRead   bool        // only a Read says whether there is something: the source is a layer

	waits    bool                   // the source or what it stands on is a Waiter
	wakeFunc func()                 // wake, made once for Waiters
	pushFunc func(run [][]byte) int // push, made once for a Pusher whose bytes go to a socket; nil for others
	failed   error                  // of a push; its run ends the tunnel
	poller                          // where the source or what it stands on is waited for, if that is a socket
}

// The states of a pump. Who moves it from parked to moving runs it.
const (
	moving int32 = iota
	parked
)

var errParked = errors.New("tunnel: parked")

func (p *pump) init(ct *copyTunnel, src, dst net.Conn) {
	p.ct, p.src, p.dst, p.budget = ct, src, dst, ct.relay.Loops.Budget
	carrier := BaseConn(src)
	p.wakeFunc = p.wake
	if _, p.waits = carrier.(waiter); !p.waits {
		p.initPoller(carrier)
	}
	if _, ok := src.(layer); ok {
		p.needsRead = p.waits || p.pollable()
	}
	p.large = p.waits && !p.needsRead
	if _, ok := src.(pusher); ok {
		// What the kernel takes opens the stream's window again: without a limit, megabytes
		// for a service that reads nothing.
		poll.LimitUnsent(BaseConn(dst), maxUnsent)
		if !p.needsRead {
			p.initPush()
		}
	}
}

// start begins with what was read before. A pump that has nothing to do is
// parked at once, unless only a Read would tell.
func (p *pump) start(early []byte) {
	p.moved.Store(clock())
	if len(early) > 0 || p.needsRead || !p.park() {
		go p.run(early)
	}
}

// run moves bytes until the end, or until p is parked.
func (p *pump) run(early []byte) {
	err := guard(func() error { return p.copy(early) })
	if err == errParked {
		return // and not ours any more
	}
	if err := guard(func() error { p.passEnd(err); return nil }); err != nil {
		p.passEnd(err) // which is no more than to end the tunnel
	}
	if p.ct.open.Add(-1) == 0 {
		p.ct.relay.copies.ended(p.ct)
	}
}

func (p *pump) copy(early []byte) error {
	if p.failed != nil {
		return p.failed
	}
	if len(early) > 0 {
		if err := p.write(early, len(early)); err != nil {
			return err
		}
	}
	switch {
	case p.needsRead:
		return p.copyNeedsRead()
	case p.waits:
		if len(early) > 0 && p.park() {
			return errParked
		}
		return p.copyWaiter()
	case p.pollable():
		return p.copySocket()
	}
	return p.copyAny()
}

// copyWaiter reads what the Waiter has said is there, and asks it again after each Read.
func (p *pump) copyWaiter() error {
	for {
		if err := p.afterRead(p.step()); err != nil {
			return err
		}
		if p.park() {
			return errParked
		}
	}
}

// copyNeedsRead begins with a short Read, since what has arrived may be no byte of
// the stream: half of a record, or a ping.
func (p *pump) copyNeedsRead() error {
	p.interruptRead(time.Now().Add(probeTimeout))
	for {
		if err := p.afterRead(p.step()); err != nil {
			return err
		}
	}
}

func (p *pump) copyAny() error {
	for {
		if err := p.step(); err != nil {
			return err
		}
	}
}

// step is one read and one write.
func (p *pump) step() error {
	buf := newBuffer(p.budget, p.large)
	defer buf.free()
	n, err := p.src.Read(*buf)
	if n > 0 {
		p.large = p.large || n == len(*buf)
		if err := p.write((*buf)[:n], len(*buf)); err != nil {
			return err
		}
	}
	return err
}

// A copyBuffer is what a pump reads into: of the size that its budget allowed
// when it was taken.
type copyBuffer []byte

const copySize = 64<<10 - 4*9 // bytes: what HTTP/2 makes four frames of that fill a TLS record each

var copyBuffers, shortBuffers = newCopyBuffers(copySize), newCopyBuffers(shortRead)

func newCopyBuffers(n int) *sync.Pool {
	return &sync.Pool{New: func() any { return new(copyBuffer(make([]byte, n))) }}
}

// newBuffer returns a buffer, a small one also while memory is short. The caller
// frees it.
func newBuffer(b Budget, large bool) *copyBuffer {
	if !large || b.MemoryShort() {
		return shortBuffers.Get().(*copyBuffer)
	}
	return copyBuffers.Get().(*copyBuffer)
}

func (b *copyBuffer) free() {
	if len(*b) < copySize {
		shortBuffers.Put(b)
	} else {
		copyBuffers.Put(b)
	}
}

// afterRead returns the error that a read of p ended with: errParked where the
// read was interrupted and p is parked now, and nil where it was interrupted and
// p can't be parked after all.
func (p *pump) afterRead(err error) error {
	if !p.interrupted.Load() || !errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	_ = p.src.SetReadDeadline(time.Time{})
	p.interrupted.Store(false)
	if p.needsRead {
		if !p.idle(clock()) {
			return nil // it was the first Read after a pause, and bytes came
		}
		p.large = false
	}
	if p.park() {
		return errParked
	}
	return nil
}

// sweep is p's part of the sweep.
func (p *pump) sweep(now int64) {
	switch {
	case p.state.Load() == parked:
		if p.needsRead && p.socketClosed() { // closed by the layer, which gives its peer up
			p.wake()
		}
	case (p.needsRead || p.waits || p.pollable()) && p.idle(now):
		p.interruptRead(time.Unix(1, 0)) // which ends the read
	}
}

// idle reports whether nothing was moved for as long as p should keep a
// goroutine.
func (p *pump) idle(now int64) bool { return now-p.moved.Load() >= int64(idleBeforePark) }

// interruptRead ends a read of p at the given time, to have p parked. Of several
// calls the first counts, until its read has ended.
func (p *pump) interruptRead(at time.Time) {
	if !p.interrupted.Swap(true) {
		_ = p.src.SetReadDeadline(at)
	}
}

// park gives up the caller's goroutine. It is false where there is something
// to read, or no way to wait for it: then the caller goes on.
func (p *pump) park() bool {
	if !p.waits && !p.pollable() {
		return false
	}
	p.state.Store(parked) // before it is known that there is nothing: somebody may wake it at once
	return p.wakeLater() || !p.state.CompareAndSwap(parked, moving)
}

// wakeLater has p woken when there is something to read. It is false where there
// is already, and where nothing can wait for it.
func (p *pump) wakeLater() (waits bool) {
	defer func() {
		if v := recover(); v != nil {
			c, _ := p.ct.relay.caught(Caught(v))
			p.ct.finish(Internal, c) // it wakes p, or a Read fails
			waits = false
		}
	}()
	if w, ok := p.src.(pusher); ok && p.pushFunc != nil {
		return !w.WaitPush(p.wakeFunc, p.pushFunc)
	}
	for c := p.src; ; {
		if w, ok := c.(waiter); ok && w.WaitRead(p.wakeFunc) {
			return false
		}
		over, ok := c.(layer)
		if !ok {
			break
		}
		c = over.NetConn()
	}
	if p.waits {
		return true
	}
	if !p.needsRead {
		p.moved.Store(clock()) // or the sweep would interrupt it as soon as it wakes
	}
	return p.watchSocket()
}

// wake has a parked pump run. It does nothing to any other.
func (p *pump) wake() {
	if p.state.CompareAndSwap(parked, moving) {
		p.unwatchSocket()
		go p.run(nil)
	}
}
