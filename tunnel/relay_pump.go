package tunnel

import (
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// rest is how long a pump keeps a goroutine that waits for a socket. Then it is
// parked, if there is an event loop to do the waiting.
const rest = time.Second

// A pump is one direction of a copyTunnel. What it costs depends on its source:
// a Waker has a goroutine and a buffer only while there are bytes; a socket has
// a buffer only then, and a goroutine for a while longer, since its wait in Go's
// poller is the faster one; any other stream has both until its end.
type pump struct {
	ct       *copyTunnel
	src, dst net.Conn
	budget   *Budget // counts the buffer while a write keeps it

	n      atomic.Int64 // bytes that dst has taken
	moved  atomic.Int64 // when it last took some, nanoseconds of clock
	state  atomic.Int32
	dozing atomic.Bool // the source was given a deadline to have it parked

	waker Waker  // the source, if it is one
	again func() // wake, made once for it
	perch        // where a socket is waited for
}

// The states of a pump. Who moves it from parked to moving runs it.
const (
	moving int32 = iota
	parked
)

var errParked = errors.New("tunnel: parked")

func (p *pump) init(ct *copyTunnel, src, dst net.Conn) {
	p.ct, p.src, p.dst, p.budget = ct, src, dst, ct.relay.loops().Budget
	if w, ok := src.(Waker); ok {
		p.waker, p.again = w, p.wake
	} else {
		p.findPerch()
	}
}

// start begins with what was read before. A pump that has nothing to do is
// parked at once.
func (p *pump) start(early []byte) {
	p.moved.Store(clock())
	if len(early) > 0 || !p.park() {
		go p.run(early)
	}
}

// run moves bytes until the end, or until p is parked.
func (p *pump) run(early []byte) {
	err := p.copy(early)
	if err == errParked {
		return // and not ours any more
	}
	p.passOn(err)
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

func (p *pump) copyAny() error {
	for {
		if err := p.step(); err != nil {
			return err
		}
	}
}

// step is one read and one write.
func (p *pump) step() error {
	buf := p.budget.buffer()
	defer buf.free()
	n, err := p.src.Read(*buf)
	if n > 0 {
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

// buffer returns a buffer, a small one while memory is short or too much of it
// is held. The caller frees it.
func (b *Budget) buffer() *copyBuffer {
	if b.most(copySize) < copySize {
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
	if p.park() {
		return errParked
	}
	return nil
}

// doze has a pump parked that has waited for its socket for longer than it
// should keep a goroutine.
func (p *pump) doze(now int64) {
	if p.perches() && p.state.Load() == moving && now-p.moved.Load() >= int64(rest) && !p.dozing.Swap(true) {
		_ = p.src.SetReadDeadline(time.Unix(1, 0)) // which ends the read
	}
}

// park gives up the caller's goroutine. It is false where there is something
// to read, or no way to wait for it: then the caller goes on.
func (p *pump) park() bool {
	if p.waker == nil && !p.perches() {
		return false
	}
	p.state.Store(parked) // before it is known that there is nothing: somebody may wake it at once
	waits := false
	if p.waker != nil {
		waits = !p.waker.WakeRead(p.again)
	} else {
		p.moved.Store(clock()) // or it would doze as soon as it wakes
		waits = p.settle()
	}
	return waits || !p.state.CompareAndSwap(parked, moving)
}

// wake has a parked pump run. It does nothing to any other.
func (p *pump) wake() {
	if p.state.CompareAndSwap(parked, moving) {
		p.leave()
		go p.run(nil)
	}
}
