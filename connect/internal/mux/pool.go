package mux

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// DefaultParallel is how many connections a Pool opens for the sake of speed.
const DefaultParallel = 4

const (
	spreadStreams = 8 // streams on each connection before another one is opened
	maxAttempts   = 3 // connections that may refuse a stream unprocessed before the dial fails
)

// ErrUnprocessed is the error of a request that the proxy has certainly not acted on:
// it may be sent on another connection.
var ErrUnprocessed = errors.New("the proxy took no more streams on this connection")

// ErrSilent is the error of a request on a connection that has become silent while another
// one works. The proxy may have acted on it; it is sent again on the other connection.
var ErrSilent = errors.New("the proxy no longer answers on this connection, and does on another one")

// A Pool keeps connections to one proxy, each for many streams, and shares them
// between dials. Close it to end them. It must not be copied.
type Pool[C Pooled] struct {
	// Set before the first Try.
	Proxy    string        // for errors
	Parallel int           // connections for the sake of speed; 0 means DefaultParallel. Beyond it, one is opened only when the others take no more
	Streams  int           // streams that a connection carries at once, until its SetMaxStreams is called
	Single   bool          // each stream has a connection of its own
	Wait     time.Duration // limits the time to reach the proxy
	New      func() C      // makes a connection that Run opens

	mu     sync.Mutex // guards what follows, and used and maxStreams of the Slots
	open   []C        // that take more streams
	all    []C
	closed bool
	wg     sync.WaitGroup // connections
}

// Pooled is a connection of a Pool, which embeds a Slot.
type Pooled interface {
	comparable
	PoolSlot() *Slot

	// Run dials the connection, which ctx limits, and serves it to its end. It calls
	// Ready once, and Leave before it returns.
	Run(ctx context.Context)
	// Stop ends the connection after Ready.
	Stop()
}

// A Slot is the place of a connection in a Pool.
type Slot struct {
	pool       interface{ leave(*Slot) }
	mu         *sync.Mutex        // the Pool's
	cancel     context.CancelFunc // of the dial
	ready      chan struct{}      // closed by Ready
	failed     error
	used       int // streams that are open or about to be
	maxStreams int // that the connection takes; 0 when it takes no more
}

// PoolSlot implements Pooled for the type that embeds s.
func (s *Slot) PoolSlot() *Slot { return s }

// Ready reports that the connection is open, or with an error that it never will be.
func (s *Slot) Ready(err error) {
	s.failed = err
	close(s.ready)
}

// Leave takes the connection out of the pool: it takes no more streams.
func (s *Slot) Leave() { s.do(s.leave) }

// LeaveUnused calls Leave unless a stream is open or about to be. It reports whether
// it did.
func (s *Slot) LeaveUnused() (unused bool) {
	s.do(func() {
		if unused = s.used == 0; unused {
			s.leave()
		}
	})
	return unused
}

// Release counts a stream out.
func (s *Slot) Release() { s.do(func() { s.used-- }) }

// SetMaxStreams sets how many streams the proxy allows on the connection.
func (s *Slot) SetMaxStreams(n int) {
	s.do(func() {
		if s.maxStreams > 0 {
			s.maxStreams = n
		}
	})
}

// AtMaxStreams notes that the proxy allows no more streams than are open, without the
// one that was refused.
func (s *Slot) AtMaxStreams() {
	s.do(func() {
		if s.maxStreams > 0 {
			s.maxStreams = max(1, min(s.maxStreams, s.used-1))
		}
	})
}

// do runs f with the Pool's mu held. It does nothing for a connection without a pool,
// such as a test has.
func (s *Slot) do(f func()) {
	if s.pool == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *Slot) leave() {
	s.maxStreams = 0
	s.pool.leave(s)
}

// Try calls open with a connection that has room for a stream, and with another one
// while that fails with ErrUnprocessed or ErrSilent. The stream is counted in: open, or the owner of
// the stream it opened, calls Release.
func (p *Pool[C]) Try(ctx context.Context, open func(C) error) error {
	for attempt := 1; ; attempt++ {
		k, err := p.reserve(ctx)
		if err != nil {
			return err
		}
		err = open(k)
		again := errors.Is(err, ErrUnprocessed) || errors.Is(err, ErrSilent)
		if !again || attempt == maxAttempts || ctx.Err() != nil {
			return err
		}
	}
}

// reserve finds a connection with room for a stream, or opens one, and counts
// the stream in.
func (p *Pool[C]) reserve(ctx context.Context) (none C, err error) {
	if ctx.Err() != nil {
		return none, p.GivenUp(ctx)
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return none, fmt.Errorf("connect: the dialer to %q: %w", p.Proxy, net.ErrClosed)
	}
	k, ok := p.pick()
	if !ok {
		k = p.start(ctx)
	}
	s := k.PoolSlot()
	s.used++
	p.mu.Unlock()
	select {
	case <-s.ready:
	default:
		select {
		case <-s.ready:
		case <-ctx.Done():
			s.Release()
			return none, p.GivenUp(ctx)
		}
	}
	return k, s.failed
}

// GivenUp returns the error for a caller that gave up. It has no Reason but that of
// the context.
func (p *Pool[C]) GivenUp(ctx context.Context) error {
	return fmt.Errorf("connect: proxy %q was given up: %w", p.Proxy, ctx.Err())
}

// pick returns the connection with the fewest streams, or false if a new one is to be
// opened. The caller holds mu.
func (p *Pool[C]) pick() (best C, ok bool) {
	if p.Single {
		return best, false
	}
	for _, k := range p.open {
		if s := k.PoolSlot(); s.used < s.maxStreams && (!ok || s.used < best.PoolSlot().used) {
			best, ok = k, true
		}
	}
	parallel := p.Parallel
	if parallel <= 0 {
		parallel = DefaultParallel
	}
	if ok && best.PoolSlot().used >= spreadStreams && len(p.open) < parallel {
		return best, false
	}
	return best, ok
}

// start begins to open a connection and does not wait for it. The caller holds mu.
func (p *Pool[C]) start(ctx context.Context) C {
	k := p.New()
	s := k.PoolSlot()
	s.pool, s.mu, s.maxStreams, s.ready = p, &p.mu, p.Streams, make(chan struct{})
	p.open = append(p.open, k)
	p.all = append(p.all, k)
	// Others may still wait for this connection when the caller has given up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.Wait)
	s.cancel = cancel
	p.wg.Go(func() {
		defer cancel()
		run(ctx, k)
		p.mu.Lock()
		defer p.mu.Unlock()
		p.all = without(p.all, s)
	})
	return k
}

// run runs a connection. A panic, such as one of the TLS below, ends that connection.
func run[C Pooled](ctx context.Context, k C) {
	defer func() {
		if v := recover(); v != nil {
			s := k.PoolSlot()
			s.Leave()
			select {
			case <-s.ready:
			default:
				s.Ready(tunnel.Caught(v))
			}
		}
	}()
	k.Run(ctx)
}

// leave removes a connection from those that take more streams. The caller holds mu.
func (p *Pool[C]) leave(s *Slot) { p.open = without(p.open, s) }

func without[C Pooled](list []C, s *Slot) []C {
	i := slices.IndexFunc(list, func(k C) bool { return k.PoolSlot() == s })
	if i < 0 {
		return list
	}
	return slices.Delete(list, i, i+1)
}

// Close ends every connection with its streams, and waits until they have ended.
func (p *Pool[C]) Close() {
	p.mu.Lock()
	p.closed = true
	all := slices.Clone(p.all)
	p.open = nil
	p.mu.Unlock()
	for _, k := range all {
		s := k.PoolSlot()
		s.cancel()
		<-s.ready
		if s.failed == nil {
			k.Stop()
		}
	}
	p.wg.Wait()
}

// Conns returns the number of connections that take more streams.
func (p *Pool[C]) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.open)
}
