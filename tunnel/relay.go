package tunnel

import (
	"cmp"
	"context"
	"iter"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"culvert.dev/tunnel/internal/poll"
	"culvert.dev/tunnel/internal/relay"
)

// A Relay owns tunnels from the moment both ends stand to their end: it moves
// the bytes, carries an end of stream as an end of stream and an abort as an
// abort, keeps the limits and counts exactly.
//
// A pair of plain TCP sockets on Linux is held by an event loop, with two
// descriptors and no goroutine, pipe or buffer while nothing moves. Any other
// pair takes two goroutines and pooled buffers, while bytes move: a direction
// that is quiet gives them up where its source is a Waiter or, on Linux, a
// socket, or stands on one of these. There, an abort of a side whose bytes the other side does not take is
// noticed within two seconds where it is a socket on Linux, an AbortDetector, or
// a layer over one of these, and else only when the other side takes some, or at
// the idle limit.
//
// The zero value is ready to use. Close it to end its goroutines.
type Relay struct {
	Limits        Limits
	CurrentLimits LimitsFunc   // if set, takes the place of Limits
	Loops         *Loops       // carry pairs of sockets; nil means loops of the Relay's own
	Log           *slog.Logger // panics in tunnels; nil discards

	own      Loops
	loads    serviceLoads
	once     sync.Once // guards the setting of carrier
	carrier  relay.Relay
	sessions sessions
}

// A Tunnel is what Carry takes over. Neither stream may be used by anyone
// else from then on.
type Tunnel struct {
	Client net.Conn
	Server net.Conn

	IdleTimeout       time.Duration // 0 means the Relay's
	HalfClosedTimeout time.Duration // 0 means the Relay's

	// About is what is known of the request, for the list of live tunnels. It
	// is read until the tunnel's end and may be for a moment after it; what it
	// says of the end (Reason, Err, BytesIn, BytesOut, Lasted) is not, so Ended
	// may write that. May be nil.
	About *Outcome

	// Ended is called exactly once, when both streams are closed. It is
	// called on the Relay's own goroutine and must not block.
	Ended func(End)
}

// An End says how a tunnel ended.
type End = relay.End

// Carry takes ownership of both streams and returns at once; t.Ended reports
// the end. Bytes that either stream has already read (see Unwrapper) are
// passed on first.
func (r *Relay) Carry(t Tunnel) {
	info := r.newCarriedInfo(&t)
	var carried relay.Tunnel
	r.carry(&carried, t.Client, t.Server, t.IdleTimeout, t.HalfClosedTimeout, &info, nil)
}

// carry is Carry for the request of info, and fills in t with what it carries. k is the
// client's connection in a Server, nil where it came from elsewhere.
func (r *Relay) carry(t *relay.Tunnel, client, server net.Conn, idle, halfClosed time.Duration, info record, k *slot) {
	limits := r.CurrentLimits.Or(&r.Limits)
	*t = relay.Tunnel{
		IdleTimeout:       limit(idle, limits.IdleTimeout, DefaultIdleTimeout),
		HalfClosedTimeout: limit(halfClosed, limits.HalfClosedTimeout, DefaultHalfClosedTimeout),
		Owner:             info,
	}
	t.Client, t.FromClient = unwrap(client)
	t.Server, t.FromServer = unwrap(server)
	scratch := k.takeScratch(t.Client)
	r.loads.opened(info.countedIn())
	if copied := r.carriers().Carry(t); copied && scratch != nil {
		scratch.Free()
	}
}

// carriers returns what carries the tunnels. It has the settings of r from the first
// call on.
func (r *Relay) carriers() *relay.Relay {
	r.once.Do(func() { r.carrier.Loops, r.carrier.Log = r.loops().engine(), r.Log })
	return &r.carrier
}

// Open returns the number of tunnels that have not ended.
func (r *Relay) Open() int { return int(r.loads.all.Load()) }

// Wait returns nil when no tunnel is open, or the context's error.
func (r *Relay) Wait(ctx context.Context) error {
	const often = 10 * time.Millisecond
	tick := time.NewTicker(often)
	defer tick.Stop()
	for r.loads.all.Load() > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}

// Abort ends every tunnel that is open now, as aborts and never as ends of
// stream, spread evenly over the given time so that their clients don't all
// come back at once. It returns early, with the rest aborted at once, when ctx
// ends.
func (r *Relay) Abort(ctx context.Context, why Reason, over time.Duration) {
	all := r.all()
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	start := time.Now()
	for i, t := range all {
		due := over * time.Duration(i) / time.Duration(len(all))
		if wait := due - time.Since(start); wait > time.Millisecond && ctx.Err() == nil {
			timer := time.NewTimer(wait)
			select {
			case <-ctx.Done():
			case <-timer.C:
			}
			timer.Stop()
		}
		t.Kill(why, nil)
	}
}

// Close aborts every tunnel, waits for their ends and stops the Relay's own
// goroutines. The Relay can't be used after it.
func (r *Relay) Close() error {
	for _, t := range r.all() {
		t.Kill(Drain, nil)
	}
	r.carriers().Close()
	return r.own.Close()
}

func (r *Relay) loops() *Loops {
	if r.Loops != nil {
		return r.Loops
	}
	return &r.own
}

// limit picks the first of the given durations that is not zero; a negative
// one means no limit and becomes 0.
func limit(ds ...time.Duration) time.Duration {
	for _, d := range ds {
		if d != 0 {
			return max(d, 0)
		}
	}
	return 0
}

// unwrap strips the wrappers of c and returns the bytes they had read.
func unwrap(c net.Conn) (net.Conn, []byte) {
	var early []byte
	for {
		u, ok := c.(Unwrapper)
		if !ok {
			return c, early
		}
		inner, read := u.Unwrap()
		if c = inner; early == nil {
			early = read
		} else {
			early = append(early, read...) // the outer one read first
		}
	}
}

// A Live is an open tunnel as it was at one moment.
type Live struct {
	ID       uint64 // of the request, as in its Outcome; this and what follows is empty for a Tunnel without About
	Start    time.Time
	Age      time.Duration // since Start, whatever the wall clock did
	Proto    string
	Listener string
	Source   netip.AddrPort
	Process  *Process // as in the Outcome
	Peer     Peer
	Target   string
	Service  string
	Pattern  string
	Endpoint string

	In         int64         // bytes taken from the client and given to the service's socket, so far
	Out        int64         // bytes taken from the service and given to the client's socket, so far
	Quiet      time.Duration // since a byte moved or a side ended
	HalfClosed bool          // one side has ended its stream
}

// List yields the tunnels that are open when it is ranged over, in the order of
// their IDs, each as it is when its turn comes. Those that have ended by then
// are left out. It takes as long as its caller does and holds up no tunnel.
func (r *Relay) List() iter.Seq[Live] {
	return func(yield func(Live) bool) {
		for _, t := range r.sorted() {
			if v, open := live(t.Live); open && !yield(v) {
				return
			}
		}
	}
}

// End aborts the tunnel of the given ID, never as an end of stream. It is false
// where there is no such tunnel. The end itself is reported by the tunnel's
// Ended, and has another reason where it was about to come anyway.
func (r *Relay) End(id uint64, why Reason) bool {
	return id != 0 && r.EndRecords(why, func(rec Record) bool { return rec.of.requestID() == id }) > 0
}

// EndFunc aborts, like End, every tunnel that is open now and that match wants
// gone, and returns how many those are. They are shown to match in the order of
// their IDs; it must not keep what it is shown. EndRecords is faster.
func (r *Relay) EndFunc(why Reason, match func(*Live) bool) int {
	n := 0
	for _, t := range r.sorted() {
		if v, open := live(t.Live); open && match(&v) {
			t.Kill(why, nil)
			n++
		}
	}
	return n
}

// A Record is what the Relay keeps of an open tunnel's request. To ask it costs next to
// nothing.
type Record struct{ of record }

// Service names the service that is carried to.
func (r Record) Service() ServiceKey {
	key := r.of.countedIn().key
	return ServiceKey{key.route, key.backend}
}

// Listener returns the address of the listener that the request came by, as configured.
func (r Record) Listener() string { return r.of.at() }

// Peer returns the verified identity of the caller.
func (r Record) Peer() Peer { return r.of.peer() }

// Request fills in the request as it was decided, and returns the route that it took, with
// the one endpoint that was reached. Its Accept and Refuse are nil. It is false where no
// Router has decided.
func (r Record) Request(req *Request) (Route, bool) { return r.of.request(req) }

// EndRecords aborts, like End, every tunnel and session that match wants gone, and
// returns how many those are. All that were open when it was called, and still are, are
// shown to match, in no order. It looks at them in pieces, and no other tunnel waits for
// it; the event loops end theirs soon after, some at a time.
func (r *Relay) EndRecords(why Reason, match func(Record) bool) int {
	n := r.carriers().KillFunc(why, func(o relay.Owner) bool { return match(Record{o.(record)}) })
	return n + r.sessions.killFunc(why, match)
}

// all returns the open tunnels, in no order.
func (r *Relay) all() []relay.Live {
	return r.sessions.appendAll(r.carriers().All())
}

// A numbered is an open tunnel with the ID of its request.
type numbered struct {
	relay.Live
	id uint64
}

// sorted returns the open tunnels in the order of their IDs.
func (r *Relay) sorted() []numbered {
	open := r.all()
	all := make([]numbered, len(open))
	for i, t := range open {
		all[i] = numbered{t, infoOf(t).requestID()}
	}
	slices.SortFunc(all, func(a, b numbered) int { return cmp.Compare(a.id, b.id) })
	return all
}

// infoOf returns what is known of the request that t is carried for.
func infoOf(t relay.Live) record { return t.Owner().(record) }

// live is t now. It is false where t has ended.
func live(t relay.Live) (Live, bool) {
	p, open := t.Progress()
	if !open {
		return Live{}, false
	}
	v := Live{In: p.In, Out: p.Out, Quiet: time.Duration(max(poll.Clock()-p.Moved, 0)), HalfClosed: p.HalfClosed}
	infoOf(t).describe(&v)
	return v, true
}

// FreedMemory is the result of Relay.FreeMemory.
type FreedMemory = relay.FreedMemory

// FreeMemory ends tunnels that keep bytes because a side does not take them,
// until about n bytes are free. It is called when memory is full. The next tunnel
// to end is always one of the client that keeps most: first one that moves
// nothing, and of those the one that keeps most. Tunnels that keep next to
// nothing are left alone.
//
// kernel says that what the kernel keeps for the sockets counts, too.
func (r *Relay) FreeMemory(n int64, kernel bool) FreedMemory {
	return r.carriers().FreeMemory(n, kernel)
}

// OpenByService returns the number of tunnels that have not ended of each service
// that has some. Tunnels without a service are those of "".
func (r *Relay) OpenByService() map[string]int { return r.loads.byService() }

// ServiceBytes is what open tunnels of one service have carried.
type ServiceBytes struct {
	In  int64 // from clients to the service
	Out int64 // from the service to clients
}

// Connections returns the number of tunnels and sessions of a service that are open or
// being dialed, by whatever rule they reach it. ServiceLimits are held against it.
func (r *Relay) Connections(service string) int {
	if s := r.loads.find(loadKey{route: service}); s != nil {
		return int(max(s.connections.Load(), 0))
	}
	return 0
}

// BytesByService returns what the open tunnels of each service have carried so far.
// A tunnel is left out from the moment before its Outcome is reported. It takes time
// with the number of tunnels and holds up none of them.
func (r *Relay) BytesByService() map[string]ServiceBytes {
	services := make(map[string]ServiceBytes)
	for _, t := range r.all() {
		if p, open := t.Progress(); open {
			name := infoOf(t).countedIn().key.route
			sum := services[name]
			sum.In += p.In
			sum.Out += p.Out
			services[name] = sum
		}
	}
	return services
}

// Loops are event loops, one for each processor, that watch sockets: those
// that listen, those whose preamble is on its way, and tunnels. A connection
// that never has to wait goes from accept to the Relay on one goroutine.
//
// A Server and a Relay that are given the same Loops share them; close those
// after both. The zero value is ready to use. Where there is no epoll, Loops
// do nothing and each connection takes goroutines instead.
type Loops struct {
	Count  int     // 0 means one for each processor that Go uses; it is best one less
	Budget *Budget // pipes are counted here; nil means no limit

	once  sync.Once // guards the settings of loops
	loops relay.Loops
}

// Close stops the loops. What they still watch is closed with a reset.
func (l *Loops) Close() error {
	l.loops.Stop()
	return nil
}

// engine returns the event loops. They have the settings of l from the first call on.
func (l *Loops) engine() *relay.Loops {
	l.once.Do(func() { l.loops.Count, l.loops.Budget = l.Count, l.Budget })
	return &l.loops
}

// Stalls returns how often a connection held up a loop: it waited for something
// else than its context, or computed for long without WillCompute.
func (l *Loops) Stalls() uint64 { return l.loops.Stalls() }

// WillCompute says that the caller, which serves the request or connection of
// ctx, is about to compute for more than a moment, as a password's hash takes. The
// event loop that the caller may be running on goes on with another goroutine. It
// costs nothing to call it elsewhere, or again.
//
// What waits need not call it: whoever waits asks for the context's Done, reads
// from the connection or dials by a NetDialer, and each of them does the same. A
// loop that is held up all the same goes on after a fifth of a second at most.
func WillCompute(ctx context.Context) {
	if t := taskOf(ctx); t != nil {
		t.HandOff()
	}
}

// taskOf returns the task of ctx's connection, nil where there is none.
func taskOf(ctx context.Context) *poll.Task {
	if k, ok := ctx.Value(slotKey{}).(*slot); ok {
		return &k.task
	}
	return nil
}

type slotKey struct{}

// A slotContext is the context of a connection. It knows the slot.
type slotContext struct {
	context.Context
	k *slot
}

// Done hands off the loop: only what is about to wait asks for it. What needs no
// wait, as most of what serves a connection does, asks for Err at most.
func (c *slotContext) Done() <-chan struct{} {
	c.k.task.HandOff()
	return c.Context.Done()
}

func (c *slotContext) Value(key any) any {
	if key == (slotKey{}) {
		return c.k
	}
	return c.Context.Value(key)
}
