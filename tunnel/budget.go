package tunnel

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// A Budget counts the descriptors that clients cause, so that they never take
// the ones kept back for the gateway's own needs: the admin port, reload, DNS.
// It is also where connections and tunnels learn that memory is short, and has
// the accounts of clients: what one client may take depends on what is left for
// the others. A nil Budget has no limit.
type Budget struct {
	Limit    int64 // descriptors for connections, tunnels and pipes together
	Backlogs int64 // bytes that back-pressure may keep in memory before tunnels are read in small pieces; 0 means no limit

	clients  Clients
	backlogs atomic.Int64 // in place of Backlogs, and one more; 0 for Backlogs
	used     atomic.Int64
	held     atomic.Int64
	pressure atomic.Int32

	notify   chan struct{}
	notifyAt atomic.Int64 // of used; 0 for never, and before notify is made
}

// reservedForRefusals is how many descriptors Take leaves for connections that
// are only accepted to be refused.
const reservedForRefusals = 32

// Accept takes one descriptor for an accepted connection.
func (b *Budget) Accept() bool { return b.take(1, 0) }

// Take takes n descriptors for a dial or a pipe, and leaves a few for
// connections that can then be refused in their own protocol's words.
func (b *Budget) Take(n int64) bool { return b.take(n, reservedForRefusals) }

func (b *Budget) take(n, leave int64) bool {
	if b == nil {
		return true
	}
	used := b.used.Add(n)
	if used > b.Limit-leave {
		b.used.Add(-n)
		return false
	}
	if at := b.notifyAt.Load(); at > 0 && used >= at && b.notifyAt.CompareAndSwap(at, 0) {
		select {
		case b.notify <- struct{}{}:
		default:
		}
	}
	return true
}

// NotifyAt returns a channel that receives once n descriptors more than now are
// taken. It is for one goroutine; a call replaces the one before.
func (b *Budget) NotifyAt(n int64) <-chan struct{} {
	if b.notify == nil {
		b.notify = make(chan struct{}, 1)
	}
	select {
	case <-b.notify: // of the call before
	default:
	}
	b.notifyAt.Store(b.used.Load() + n)
	return b.notify
}

// Clients returns the accounts of clients.
func (b *Budget) Clients() *Clients { return &b.clients }

// Give returns n descriptors.
func (b *Budget) Give(n int64) {
	if b != nil {
		b.used.Add(-n)
	}
}

// Used returns how many descriptors are taken.
func (b *Budget) Used() int64 {
	if b == nil {
		return 0
	}
	return b.used.Load()
}

// A Pressure says how short of memory the process is. Whoever watches the
// memory tells the Budget.
type Pressure int32

const (
	Calm  Pressure = iota
	Short          // new requests are refused, pending connections are fewer and get less time, tunnels are read in small pieces
	Full           // nothing is accepted, either
)

func (p Pressure) String() string { return [...]string{"calm", "short", "full"}[p] }

const (
	// shortTime is what a preamble has while memory is short, and one part in
	// shortHalfOpen how many there may be: one that is in the middle of a TLS
	// handshake has tens of kilobytes.
	shortTime     = 2 * time.Second
	shortHalfOpen = 8
)

// SetPressure says how short memory is.
func (b *Budget) SetPressure(p Pressure) {
	if b != nil {
		b.pressure.Store(int32(p))
	}
}

// Pressure returns what SetPressure was last told.
func (b *Budget) Pressure() Pressure {
	if b == nil {
		return Calm
	}
	return Pressure(b.pressure.Load())
}

// errFull is why nothing is accepted.
var errFull = errors.New("memory is full")

// preamble shortens the time that preambles have while memory is short, and
// their number.
func (b *Budget) preamble(l Limits) Limits {
	if b.Pressure() == Calm {
		return l
	}
	for _, d := range []*time.Duration{&l.FirstByteTimeout, &l.HandshakeTimeout} {
		if *d <= 0 || *d > shortTime {
			*d = shortTime
		}
	}
	if most, limited := l.PendingLimit(); limited {
		l.MaxPendingConnections = max(most/shortHalfOpen, 1)
	} else {
		l.MaxPendingConnections = DefaultMaxPendingConnections / shortHalfOpen
	}
	return l
}

// AddBuffered counts n bytes that back-pressure keeps in memory. A negative n counts
// what is kept no longer.
func (b *Budget) AddBuffered(n int) {
	if b != nil && n != 0 {
		b.held.Add(int64(n))
	}
}

// Buffered returns how many bytes back-pressure keeps in memory.
func (b *Budget) Buffered() int64 {
	if b == nil {
		return 0
	}
	return b.held.Load()
}

// SetBacklogs puts n in the place of Backlogs.
func (b *Budget) SetBacklogs(n int64) { b.backlogs.Store(n + 1) }

// BacklogLimit returns Backlogs, or what took its place.
func (b *Budget) BacklogLimit() int64 {
	if n := b.backlogs.Load(); n > 0 {
		return n - 1
	}
	return b.Backlogs
}

// backlogged reports whether more is held than back-pressure may keep.
func (b *Budget) backlogged() bool {
	most := b.BacklogLimit()
	return most > 0 && b.held.Load() > most
}

// MemoryShort reports whether tunnels are to be read in small pieces. The account of
// buffered bytes is exact, where Pressure is a look from time to time: thousands that
// stop to read at once must not fill the memory between two looks.
func (b *Budget) MemoryShort() bool {
	return b != nil && (b.pressure.Load() > 0 || b.backlogged())
}

// A BufferAccount counts the bytes that a connection of many streams keeps in
// memory because nobody reads them: for the process, and for its client. It is
// not safe for concurrent use. Its zero value counts nothing.
type BufferAccount struct {
	budget *Budget
	client *Client // nil for a connection that several clients use
	held   int64
}

// holdStep is how far the accounts may be behind, for each connection.
const holdStep = 16 << 10 // bytes

// NewBufferAccount returns the BufferAccount of the connection that ctx belongs
// to. It counts for the connection's Server and, where sends says that the client
// sends the bytes, for its client.
func NewBufferAccount(ctx context.Context, sends bool) BufferAccount {
	k, ok := ctx.Value(slotKey{}).(*slot)
	switch {
	case !ok:
		return BufferAccount{}
	case !sends || k.exempt:
		return BufferAccount{budget: k.server.Budget}
	}
	return BufferAccount{budget: k.server.Budget, client: k.client}
}

// Set counts n bytes, in place of what was counted before.
func (h *BufferAccount) Set(n int) {
	more := int64(n) - h.held
	if h.budget == nil || more == 0 || n != 0 && more > -holdStep && more < holdStep {
		return
	}
	h.held = int64(n)
	h.budget.AddBuffered(int(more))
	h.client.addHeld(more)
}

// MemoryShort reports whether memory is short, or much of it is taken by bytes
// that nobody reads: a peer may then send no more than is read.
func (h *BufferAccount) MemoryShort() bool { return h.budget.MemoryShort() }

// CheckLimit returns an error where the client has its share of the memory for
// unread bytes already.
func (h *BufferAccount) CheckLimit() error {
	b := h.budget
	if b == nil || b.BacklogLimit() <= 0 {
		return nil
	}
	most := backlogsMost * b.BacklogLimit()
	free := most - b.held.Load()
	if h.client == nil {
		if free > 0 {
			return nil
		}
		return Refusef(Overload, "%d bytes are buffered and not read, the limit", most)
	}
	return h.client.fair("bytes that are not read", most, free, 0, func(c *Client) int64 { return c.held.Load() }, "raise the limit on memory or add a gateway")
}

// backlogsMost is how many times Budget.Backlogs may be held before streams end
// for it.
const backlogsMost = 2
