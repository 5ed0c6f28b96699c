package tunnel

import (
	"errors"
	"net"
	"os"
	"sync/atomic"
	"time"
)

// rest is how long a direction without a byte keeps its goroutine and buffer.
// Then it is parked, where its source can be waited for without them: a Waker,
// or a socket where there is an event loop.
const rest = time.Second

// A pump is one direction of a copyTunnel.
type pump struct {
	ct       *copyTunnel
	src, dst net.Conn

	n      atomic.Int64 // bytes that dst has taken
	moved  atomic.Int64 // when it last took some, nanoseconds of clock
	state  atomic.Int32
	dozing atomic.Bool // the source was given a deadline to have it parked

	parks bool   // it may be
	again func() // wake, made once
	perch        // where a socket is waited for
}

// The states of a pump. Who moves it from parked to moving runs it.
const (
	moving int32 = iota
	parked
)

func (p *pump) init(ct *copyTunnel, src, dst net.Conn) {
	p.ct, p.src, p.dst = ct, src, dst
	if _, ok := src.(Waker); ok {
		p.parks, p.again = true, p.wake
	} else {
		p.parks = p.canPerch()
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

// run moves bytes until the end, or until there are none for a while.
func (p *pump) run(early []byte) {
	err, parked := p.copy(early)
	if parked {
		return
	}
	p.passOn(err)
	if p.ct.open.Add(-1) == 0 {
		p.ct.relay.copies.ended(p.ct)
	}
}

// copy is false where p was not parked: its direction is over, with err.
func (p *pump) copy(early []byte) (err error, parked bool) {
	if len(early) > 0 {
		if err := p.write(early); err != nil {
			return err, false
		}
	}
	for {
		if err := p.read(); !p.dozing.Load() || !errors.Is(err, os.ErrDeadlineExceeded) {
			return err, false
		}
		_ = p.src.SetReadDeadline(time.Time{})
		p.dozing.Store(false)
		if p.park() {
			return nil, true
		}
	}
}

// read moves bytes until the source has no more to give.
func (p *pump) read() error {
	buf := copyBuffers.Get().(*[copyBuffer]byte)
	defer copyBuffers.Put(buf)
	for {
		n, err := p.src.Read(buf[:])
		if n > 0 {
			if err := p.write(buf[:n]); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
	}
}

// doze has a pump parked that waits for its source longer than it should hold
// a goroutine and a buffer for.
func (p *pump) doze(now int64) {
	if p.parks && p.state.Load() == moving && now-p.moved.Load() >= int64(rest) && !p.dozing.Swap(true) {
		_ = p.src.SetReadDeadline(time.Unix(1, 0)) // which ends the Read
	}
}

// park gives up the caller's goroutine. It is false where there is something
// to read, or no way to wait for it: then the caller goes on.
func (p *pump) park() bool {
	if !p.parks {
		return false
	}
	p.moved.Store(clock())
	p.state.Store(parked) // before it is known that there is nothing: somebody may wake it at once
	waits := false
	if w, ok := p.src.(Waker); ok {
		waits = !w.WakeRead(p.again)
	} else {
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
