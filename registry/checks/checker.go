package checks

import (
	"container/heap"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/internal/background"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

const (
	maxProbes = 64 // under way
	maxDown   = 16 // of them, of addresses that are down

	// spread is the longest that a first probe waits.
	spread = 5 * time.Second

	// lookEvery is how often a DNS name is looked up, at most.
	lookEvery = 5 * time.Second

	// lookTime is how long a lookup may take.
	lookTime = 5 * time.Second

	// maxAddrs is how many addresses of a name are asked: others make them.
	maxAddrs = 64
)

// A Checker asks what a registry has. Set the fields and call Run, once.
type Checker struct {
	Registry *registry.Registry // whose current table is followed, and which is told

	// Dial connects to an address by TCP; its guard has the last word. The
	// caller closes the connection. It is (*tunnel.NetDialer).DialEndpoint.
	Dial func(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error)

	// Lookup finds the addresses of a DNS name; nil means that those with names
	// are not asked. It is called every few seconds, so it should cache.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	// TLS returns what speaks TLS to the endpoints of a service that has it. Nil means
	// that their checks are as those of others.
	TLS func(*registry.BackendTLS) (registry.TLSLayer, error)

	// Budget is where each probe takes a descriptor; one that gets none says
	// nothing. Nil means no limit.
	Budget *tunnel.Budget

	// Log gets a line for every address that goes down or comes back. Nil
	// discards.
	Log *slog.Logger

	once    sync.Once
	changed chan struct{}

	passed, failed, up, down atomic.Int64

	// Only Run uses the fields below.
	items   map[registry.Target]*item
	queues  [2]queue // of what is not known to be down, and of what is
	running [2]int
	results chan result
	work    sync.WaitGroup
}

// An item is something to be asked: an address, or, where its Target has none
// but its port, a DNS name.
type item struct {
	registry.Target
	name       string    // for SNI where the check has no host
	what       string    // that has it, for the log
	due        time.Time // of the next probe
	at         int       // in its queue; -1 while it is asked
	queue      int       // of queues
	verdict    verdict   // of an address
	inARow     int       // probes whose result was against the verdict
	children   []*item   // of a DNS name: its addresses
	generation uint64    // of the table that had it last
	gone       bool      // it is in no table any more
}

// isName reports whether it is a DNS name, whose addresses are asked.
func (it *item) isName() bool { return !it.Addr.Addr().IsValid() && it.Transport == nil }

type verdict int

const (
	unknown verdict = iota
	up
	down
)

// A result is what became of an item's probes.
type result struct {
	*item
	err    error
	probes int          // that ended with err
	addrs  []netip.Addr // of a DNS name
}

// Counts says how things are.
type Counts struct {
	Up, Down       int64 // addresses, by what their checks say; one whose first is not over is neither
	Passed, Failed int64 // probes so far
}

// Counts returns what there is to count. It may be called at any time.
func (c *Checker) Counts() Counts {
	return Counts{Up: c.up.Load(), Down: c.down.Load(), Passed: c.passed.Load(), Failed: c.failed.Load()}
}

func (c *Checker) init() { c.once.Do(func() { c.changed = make(chan struct{}, 1) }) }

// Changed has Run look at the current table. It does not wait.
func (c *Checker) Changed() {
	c.init()
	select {
	case c.changed <- struct{}{}:
	default: // it has yet to look
	}
}

// Run probes until ctx is done, and then waits for the probes under way. It
// returns nil.
func (c *Checker) Run(ctx context.Context) error {
	c.init()
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.items = map[registry.Target]*item{}
	c.results = make(chan result, maxProbes) // so that nobody waits for who has gone
	defer c.work.Wait()
	background.Do(c.follow)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		if next, ok := c.start(ctx); ok {
			timer.Reset(time.Until(next))
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-c.changed:
			background.Do(c.follow)
		case r := <-c.results:
			c.take(r)
		case <-timer.C:
		}
	}
}

// start begins the probes that are due, as far as there is room, and returns
// when the next one is.
func (c *Checker) start(ctx context.Context) (next time.Time, ok bool) {
	now := time.Now()
	for q, most := range [2]int{maxProbes - maxDown, maxDown} {
		for len(c.queues[q]) > 0 && c.running[q] < most {
			it := c.queues[q][0]
			if it.due.After(now) {
				if !ok || it.due.Before(next) {
					next, ok = it.due, true
				}
				break
			}
			heap.Pop(&c.queues[q])
			c.running[q]++
			ask := *it // the item goes on changing
			c.work.Go(func() {
				r := c.ask(ctx, &ask)
				r.item = it
				c.results <- r
			})
		}
	}
	return next, ok
}

// ask makes the probes of one turn, or the lookup.
func (c *Checker) ask(ctx context.Context, it *item) (r result) {
	defer func() {
		if v := recover(); v != nil { // by what an endpoint answers: it is not well, and nothing else is touched
			p := tunnel.Caught(v)
			c.Log.Error("panic in a check", "endpoint", it.Addr.String(), "panic", p.Value, "stack", string(p.Stack))
			r = result{err: p, probes: 2}
		}
	}()
	if it.isName() {
		addrs, err := c.lookup(ctx, it.Host)
		if it.Guarded {
			addrs = slices.DeleteFunc(addrs, func(a netip.Addr) bool { return c.Registry.RefusesGuarded(a) != "" })
		}
		return result{addrs: addrs, err: err}
	}
	r = result{err: c.count(c.probe(ctx, it)), probes: 1}
	if r.err != nil && it.verdict != down && it.inARow == 0 && it.Check.UnhealthyThreshold > 1 && registry.IsEndpointError(r.err) && ctx.Err() == nil {
		if r.err = c.count(c.probe(ctx, it)); r.err != nil {
			r.probes++
		}
	}
	return r
}

func (c *Checker) count(err error) error {
	switch {
	case err == nil:
		c.passed.Add(1)
	case registry.IsEndpointError(err):
		c.failed.Add(1)
	}
	return err
}

// take takes in what became of an item, and puts it back.
func (c *Checker) take(r result) {
	it := r.item
	c.running[it.queue]--
	if it.gone {
		return
	}
	every := it.Check.Interval
	if !it.isName() {
		c.judge(it, r)
	} else {
		every = max(every, lookEvery)
		if r.err == nil { // else the addresses it had are asked on
			c.adopt(it, r.addrs)
		}
	}
	it.due = it.due.Add(every)
	if now := time.Now(); it.due.Before(now) { // there was no room for it in time
		it.due = now
	}
	c.push(it)
}

// judge changes the verdict on an address if enough probes in a row were
// against it.
func (c *Checker) judge(it *item, r result) {
	switch {
	case r.err != nil && !registry.IsEndpointError(r.err):
		return
	case (r.err != nil) == (it.verdict == down):
		it.inARow = 0
		if it.verdict == unknown {
			c.turn(it, up)
		}
	case r.err != nil:
		if it.inARow += r.probes; it.inARow < it.Check.UnhealthyThreshold {
			return
		}
		c.turn(it, down)
		c.Log.Warn("endpoint is unhealthy", it.attrs("err", r.err)...)
	default:
		if it.inARow++; it.inARow < it.Check.HealthyThreshold {
			return
		}
		c.turn(it, up)
		c.Log.Info("endpoint is healthy again", it.attrs()...)
	}
	c.Registry.ReportCheck(it.Target, r.err)
}

// turn changes the state of an address.
func (c *Checker) turn(it *item, to verdict) {
	switch it.verdict {
	case up:
		c.up.Add(-1)
	case down:
		c.down.Add(-1)
	}
	switch to {
	case up:
		c.up.Add(1)
	case down:
		c.down.Add(1)
	}
	it.verdict, it.inARow = to, 0
}

func (it *item) attrs(more ...any) []any {
	attrs := []any{"address", it.Addr.String(), "of", it.what, "check", it.Check.Kind}
	if it.Transport != nil {
		attrs[1] = it.HealthKey
	} else if it.Host != "" {
		attrs = append(attrs, "host", it.Host)
	}
	return append(attrs, more...)
}

// push puts an item into its queue. An address that is down but has answered no
// longer needs the full timeout.
func (c *Checker) push(it *item) {
	it.queue = 0
	if it.verdict == down && it.inARow == 0 {
		it.queue = 1
	}
	heap.Push(&c.queues[it.queue], it)
}

// add begins to ask it.
func (c *Checker) add(it *item) {
	if !it.isName() {
		it.due = time.Now().Add(rand.N(min(it.Check.Interval, spread)))
	} else {
		it.due = time.Now().Add(rand.N(min(it.Check.Interval, spread) / 4)) // its addresses wait again
	}
	c.items[it.Target] = it
	c.push(it)
}

// drop asks it no more.
func (c *Checker) drop(it *item) {
	for _, child := range it.children {
		c.drop(child)
	}
	it.gone, it.children = true, nil
	delete(c.items, it.Target)
	if it.at >= 0 {
		heap.Remove(&c.queues[it.queue], it.at)
	}
	if it.verdict != unknown {
		c.turn(it, unknown)
		c.Registry.ForgetCheck(it.Target)
	}
}

// adopt makes addrs the addresses of a name.
func (c *Checker) adopt(parent *item, addrs []netip.Addr) {
	addrs = addrs[:min(len(addrs), maxAddrs)]
	var keep []*item
	for _, child := range parent.children {
		if slices.Contains(addrs, child.Addr.Addr()) {
			keep = append(keep, child)
			continue
		}
		c.drop(child)
	}
	for _, a := range addrs {
		t := parent.Target
		t.Addr = netip.AddrPortFrom(a, t.Addr.Port())
		child, ok := c.items[t]
		if !ok {
			child = &item{Target: t}
			c.add(child)
			keep = append(keep, child)
		}
		child.name, child.what = parent.name, parent.what
	}
	parent.children = keep
}

// lookup returns the addresses of a name, in the one form they have in the
// registry.
func (c *Checker) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	if registry.IsLocalhost(host) {
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, nil
	}
	if c.Lookup == nil {
		return nil, errors.New("no DNS resolver is configured")
	}
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	answer, err := c.Lookup(ctx, host)
	addrs := make([]netip.Addr, 0, len(answer))
	for _, a := range answer { // which belongs to the cache
		if a = a.Unmap(); !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	return addrs, err
}

// A queue is a heap of items by when they are due.
type queue []*item

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].due.Before(q[j].due) }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].at, q[j].at = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	it := x.(*item)
	it.at = len(*q)
	*q = append(*q, it)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	old := *q
	it := old[len(old)-1]
	old[len(old)-1] = nil
	*q, it.at = old[:len(old)-1], -1
	return it
}
