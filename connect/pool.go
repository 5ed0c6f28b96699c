package connect

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

// DefaultParallel is how many connections a Pool has for the sake of speed.
const DefaultParallel = 4

const (
	spread = 8 // streams on every connection, before there is one more
	tries  = 3 // connections that may refuse a stream unseen before the dial fails
)

// ErrUnseen is for a request that the proxy is sure not to have acted on:
// another connection may do.
var ErrUnseen = errors.New("the proxy took no more streams on this connection")

// A Pool keeps connections to one proxy, each for many streams, and shares them
// between dials. Close it to end them. It must not be copied.
type Pool[C Pooled] struct {
	// Set before the first Try.
	Proxy    string        // for errors
	Parallel int           // connections for the sake of speed; 0 means DefaultParallel. Beyond it, one is opened only when the others take no more
	Streams  int           // the most a connection is used for at once, until its Most is called
	Single   bool          // each stream has a connection of its own
	Wait     time.Duration // that reaching the proxy may take
	New      func() C      // makes a connection that Run opens

	mu     sync.Mutex // guards what follows, and used and most of the Places
	open   []C        // that take more streams
	all    []C
	closed bool
	wg     sync.WaitGroup // connections
}

// Pooled is a connection of a Pool, which embeds a Place.
type Pooled interface {
	comparable
	PoolPlace() *Place

	// Run is the connection from the dial, for which ctx is, to its end. It calls
	// Ready, once, and Leave before it returns.
	Run(ctx context.Context)
	// Stop ends the connection after Ready.
	Stop()
}

// A Place is that of a connection in a Pool.
type Place struct {
	pool   interface{ leave(*Place) }
	mu     *sync.Mutex        // the Pool's
	cancel context.CancelFunc // of the dial
	ready  chan struct{}      // closed by Ready
	failed error
	used   int // streams open or about to be
	most   int // that it takes; 0 when it takes no more
}

// PoolPlace implements Pooled for who embeds l.
func (l *Place) PoolPlace() *Place { return l }

// Ready says that the connection is there, or with an error that it never will
// be.
func (l *Place) Ready(err error) {
	l.failed = err
	close(l.ready)
}

// Leave takes the connection out of the pool: it takes no more streams.
func (l *Place) Leave() { l.do(l.leave) }

// LeaveUnused is Leave where no stream is open or about to be, and false
// otherwise.
func (l *Place) LeaveUnused() (unused bool) {
	l.do(func() {
		if unused = l.used == 0; unused {
			l.leave()
		}
	})
	return unused
}

// GiveBack counts a stream out.
func (l *Place) GiveBack() { l.do(func() { l.used-- }) }

// Most says how many streams the proxy allows on the connection.
func (l *Place) Most(n int) {
	l.do(func() {
		if l.most > 0 {
			l.most = n
		}
	})
}

// Full says that the proxy allows no more streams than are open, without the one
// that was to be.
func (l *Place) Full() {
	l.do(func() {
		if l.most > 0 {
			l.most = max(1, min(l.most, l.used-1))
		}
	})
}

// do runs f with the Pool's mu held; not for a connection of no pool, such as a
// test has.
func (l *Place) do(f func()) {
	if l.pool == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

func (l *Place) leave() {
	l.most = 0
	l.pool.leave(l)
}

// Try has open use a connection with room for a stream, and another one while
// that fails with ErrUnseen. The stream is counted in: open, or whoever has the
// stream then, calls GiveBack.
func (p *Pool[C]) Try(ctx context.Context, open func(C) error) error {
	for try := 1; ; try++ {
		k, err := p.reserve(ctx)
		if err != nil {
			return err
		}
		if err = open(k); err == nil || !errors.Is(err, ErrUnseen) || try == tries || ctx.Err() != nil {
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
	l := k.PoolPlace()
	l.used++
	p.mu.Unlock()
	select {
	case <-l.ready:
	default:
		select {
		case <-l.ready:
		case <-ctx.Done():
			l.GiveBack()
			return none, p.GivenUp(ctx)
		}
	}
	return k, l.failed
}

// GivenUp is for a caller who gave up: no Reason but what its context says.
func (p *Pool[C]) GivenUp(ctx context.Context) error {
	return fmt.Errorf("connect: proxy %q was given up: %w", p.Proxy, ctx.Err())
}

// pick returns the connection with the fewest streams. It is false where a new
// one is to be opened. The caller holds mu.
func (p *Pool[C]) pick() (best C, ok bool) {
	if p.Single {
		return best, false
	}
	for _, k := range p.open {
		if l := k.PoolPlace(); l.used < l.most && (!ok || l.used < best.PoolPlace().used) {
			best, ok = k, true
		}
	}
	parallel := p.Parallel
	if parallel <= 0 {
		parallel = DefaultParallel
	}
	if ok && best.PoolPlace().used >= spread && len(p.open) < parallel {
		return best, false
	}
	return best, ok
}

// start opens a connection, which the caller does not wait for. The caller
// holds mu.
func (p *Pool[C]) start(ctx context.Context) C {
	k := p.New()
	l := k.PoolPlace()
	l.pool, l.mu, l.most, l.ready = p, &p.mu, p.Streams, make(chan struct{})
	p.open = append(p.open, k)
	p.all = append(p.all, k)
	// Others may wait for this connection when the one who asked for it has
	// given up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.Wait)
	l.cancel = cancel
	p.wg.Go(func() {
		defer cancel()
		run(ctx, k)
		p.mu.Lock()
		defer p.mu.Unlock()
		p.all = without(p.all, l)
	})
	return k
}

// run runs a connection. A panic, of the TLS below or of what made it, ends that
// one.
func run[C Pooled](ctx context.Context, k C) {
	defer func() {
		if v := recover(); v != nil {
			l := k.PoolPlace()
			l.Leave()
			select {
			case <-l.ready:
			default:
				l.Ready(tunnel.Caught(v))
			}
		}
	}()
	k.Run(ctx)
}

// leave takes a connection from those that take more streams. The caller holds
// mu.
func (p *Pool[C]) leave(l *Place) { p.open = without(p.open, l) }

func without[C Pooled](list []C, l *Place) []C {
	i := slices.IndexFunc(list, func(k C) bool { return k.PoolPlace() == l })
	if i < 0 {
		return list
	}
	return slices.Delete(list, i, i+1)
}

// Close ends every connection, with the streams on it, and waits for their
// ends.
func (p *Pool[C]) Close() {
	p.mu.Lock()
	p.closed = true
	all := slices.Clone(p.all)
	p.open = nil
	p.mu.Unlock()
	for _, k := range all {
		l := k.PoolPlace()
		l.cancel()
		<-l.ready
		if l.failed == nil {
			k.Stop()
		}
	}
	p.wg.Wait()
}

// Conns returns how many connections there are that take more streams.
func (p *Pool[C]) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.open)
}
