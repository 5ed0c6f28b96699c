package tunnel

import (
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// rest is how long a pump keeps a goroutine that waits for a socket, or for
	// what is asked by a Read. Then it is parked, if something else can do the
	// waiting.
	rest = time.Second

	// glance is how long a Read may take after a rest to find bytes in what has
	// come.
	glance = 10 * time.Millisecond
)

// A pump is one direction of a copyTunnel. What it costs depends on its source:
//   - a Waker has a goroutine and a buffer only while there are bytes;
//   - a socket has a buffer only then, and a goroutine for a while longer, since
//     its wait in Go's poller is the faster one;
//   - a layer on one of those, as TLS and a WebSocket are, has both for a while
//     longer: only a Read that finds nothing says that there is nothing;
//   - so does a Waiter, and then a small goroutine;
//   - any other stream has both until its end.
type pump struct {
	ct       *copyTunnel
	src, dst net.Conn
	budget   *Budget // counts the buffer while a write keeps it

	n      atomic.Int64 // bytes that dst has taken
	moved  atomic.Int64 // when it last took some, nanoseconds of clock
	kept   atomic.Int64 // bytes of the buffer that a write keeps now
	state  atomic.Int32
	dozing atomic.Bool // the source was given a deadline to have it parked
	large  bool        // it has a buffer of full size; where a Read may wait in it, only once bytes have filled a small one
	asks   bool        // only a Read says whether there is something: the source is a layer or a Waiter

	waker Waker  // the source or what it stands on, if that is one
	again func() // wake, made once for it
	perch        // where the source or what it stands on is waited for, if that is a socket
}

// The states of a pump. Who moves it from parked to moving runs it.
const (
	moving int32 = iota
	parked
)

var errParked = errors.New("tunnel: parked")

func (p *pump) init(ct *copyTunnel, src, dst net.Conn) {
	p.ct, p.src, p.dst, p.budget = ct, src, dst, ct.relay.loops().Budget
	carrier := below(src)
	if w, ok := carrier.(Waker); ok {
		p.waker, p.again = w, p.wake
	} else {
		p.findPerch(carrier)
	}
	_, p.asks = src.(Waiter)
	if _, ok := src.(layer); ok {
		p.asks = p.waker != nil || p.perches()
	}
	p.large = p.waker != nil && !p.asks
}

// start begins with what was read before. A pump that has nothing to do is
// parked at once, unless only a Read would tell.
func (p *pump) start(early []byte) {
	p.moved.Store(clock())
	if len(early) > 0 || p.asks || !p.park() {
		go p.run(early)
	}
}

// run moves bytes until the end, or until p is parked.
func (p *pump) run(early []byte) {
	err := guard(func() error { return p.copy(early) })
	if err == errParked {
		return // and not ours any more
	}
	if err := guard(func() error { p.passOn(err); return nil }); err != nil {
		p.passOn(err) // which is no more than to end the tunnel
	}
	if p.ct.open.Add(-1) == 0 {
		p.ct.relay.copies.ended(p.ct)
	}
}

func (p *pump) copy(early []byte) error {
	if len(early) > 0 {
		if err := p.write(early, len(early)); err != nil {
			return err
		}
	}
	switch {
	case p.asks:
		return p.copyAsking()
	case p.waker != nil:
		return p.copyWaker()
	case p.perches():
		return p.copySocket()
	}
	return p.copyAny()
}

func (p *pump) copyWaker() error {
	for !p.park() {
		if err := p.step(); err != nil {
			return err
		}
	}
	return errParked
}

// copyAsking begins with a glance, since what has come may be no byte of the
// stream: half of a record, or a ping.
func (p *pump) copyAsking() error {
	p.doze(time.Now().Add(glance))
	for {
		if err := p.awake(p.step()); err != nil {
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
	buf := p.budget.buffer(p.large)
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

const copySize = 32 << 10 // bytes

var copyBuffers, shortBuffers = newCopyBuffers(copySize), newCopyBuffers(shortRead)

func newCopyBuffers(n int) *sync.Pool {
	return &sync.Pool{New: func() any { return new(copyBuffer(make([]byte, n))) }}
}

// buffer returns a buffer, a small one also while memory is short or too much of
// it is held. The caller frees it.
func (b *Budget) buffer(large bool) *copyBuffer {
	if !large || b.most(copySize) < copySize {
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

// awake is for a read that ended with err: nil where that was to have p parked,
// and it could not be after all.
func (p *pump) awake(err error) error {
	if !p.dozing.Load() || !errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	_ = p.src.SetReadDeadline(time.Time{})
	p.dozing.Store(false)
	if p.asks {
		if !p.rested(clock()) {
			return nil // it was a glance, and bytes came
		}
		p.large = false
		if r, ok := p.src.(Rester); ok {
			r.Rest()
		}
	}
	if p.park() {
		return errParked
	}
	return nil
}

// look is what the sweep does with p.
func (p *pump) look(now int64) {
	switch {
	case p.state.Load() == parked:
		if p.asks && p.fell() { // closed by the layer, which gives its peer up
			p.wake()
		}
	case (p.asks || p.perches()) && p.rested(now):
		p.doze(time.Unix(1, 0)) // which ends the read
	}
}

// rested reports whether nothing was moved for as long as p should keep a
// goroutine.
func (p *pump) rested(now int64) bool { return now-p.moved.Load() >= int64(rest) }

// doze ends a read of p at the given time, to have p parked. Of several at once
// the first counts: its end of a read comes before the next doze.
func (p *pump) doze(at time.Time) {
	if !p.dozing.Swap(true) {
		_ = p.src.SetReadDeadline(at)
	}
}

// park gives up the caller's goroutine. It is false where there is something
// to read, or no way to wait for it: then the caller goes on.
func (p *pump) park() bool {
	if p.waker == nil && !p.perches() && !p.asks {
		return false
	}
	p.state.Store(parked) // before it is known that there is nothing: somebody may wake it at once
	return p.waits() || !p.state.CompareAndSwap(parked, moving)
}

// waits has p woken when there is something to read. It is false where there is,
// and where that can't be waited for.
func (p *pump) waits() (waits bool) {
	defer func() {
		if v := recover(); v != nil {
			c, _ := p.ct.relay.caught(Caught(v))
			p.ct.finish(Internal, c) // it wakes p, or a Read fails
			waits = false
		}
	}()
	switch {
	case p.waker != nil:
		return !p.waker.WakeRead(p.again)
	case p.perches():
		if !p.asks {
			p.moved.Store(clock()) // or it would doze as soon as it wakes
		}
		return p.settle()
	}
	p.ct.relay.copies.wg.Add(1)
	go p.await(p.src.(Waiter))
	return true
}

// await is what is left of the pump of a Waiter at rest: a small stack.
func (p *pump) await(src Waiter) {
	defer p.ct.relay.copies.wg.Done()
	defer p.wake()
	if c, ok := p.ct.relay.caught(guard(func() error { src.WaitRead(); return nil })); ok {
		p.ct.finish(Internal, c)
	}
}

// wake has a parked pump run. It does nothing to any other.
func (p *pump) wake() {
	if p.state.CompareAndSwap(parked, moving) {
		p.leave()
		go p.run(nil)
	}
}
