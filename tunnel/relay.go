package tunnel

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"time"
)

// Limits of a tunnel that its Route leaves at zero.
const (
	DefaultIdleTimeout       = time.Hour
	DefaultHalfClosedTimeout = time.Minute
)

// A Relay owns tunnels from the moment both ends stand to their end: it moves
// the bytes, carries an end of stream as an end of stream and an abort as an
// abort, keeps the limits and counts exactly.
//
// A pair of plain TCP sockets on Linux is held by an event loop, with two
// descriptors and no goroutine, pipe or buffer while nothing moves. Any other
// pair takes two goroutines and pooled buffers, while bytes move: a direction
// that is quiet gives them up where its source is a Waker or, on Linux, a
// socket, or stands on one of these, and keeps a small goroutine where it is a
// Waiter. There, an abort of a side whose bytes the other side does not take is
// noticed within two seconds where it is a socket on Linux, an AbortDetector, or
// a layer over one of these, and else only when the other side takes some, or at
// the idle limit.
//
// The zero value is ready to use. Close it to end its goroutines.
type Relay struct {
	IdleTimeout       time.Duration // without a byte either way; 0 means DefaultIdleTimeout, negative none
	HalfClosedTimeout time.Duration // half-closed and silent; 0 means DefaultHalfClosedTimeout, negative none
	Loops             *Loops        // carry pairs of sockets; nil means loops of the Relay's own
	Log               *slog.Logger  // panics in tunnels; nil discards

	own      Loops
	open     atomic.Int64
	kernel   kernelRelay
	copies   copyRelay
	sessions sessions
	panics   panicLog
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
type End struct {
	Reason Reason
	Err    error // what a side reported, nil after an orderly end
	In     int64 // bytes taken from the client and given to the service's socket
	Out    int64 // bytes taken from the service and given to the client's socket

	byClient bool // it was the client that aborted
}

// Carry takes ownership of both streams and returns at once; t.Ended reports
// the end. Bytes that either stream has already read (see Unwrapper) are
// passed on first.
func (r *Relay) Carry(t Tunnel) {
	r.carry(t.Client, t.Server, t.IdleTimeout, t.HalfClosedTimeout, &record{rare: &rare{t.About, t.Ended}}, nil)
}

// carry is Carry for a request that rec, which is copied, describes. k is the
// client's connection in a Server, nil where it came from elsewhere.
func (r *Relay) carry(client, server net.Conn, idle, halfClosed time.Duration, rec *record, k *slot) {
	j := job{relay: r, slot: k, idle: limit(idle, r.IdleTimeout, DefaultIdleTimeout), half: limit(halfClosed, r.HalfClosedTimeout, DefaultHalfClosedTimeout), record: rec}
	j.client, j.fromClient = unwrap(client)
	j.server, j.fromServer = unwrap(server)
	r.open.Add(1)
	if !r.kernel.carry(&j) {
		r.copies.carry(&j)
	}
}

// A job is a tunnel on its way to whoever will carry it.
type job struct {
	relay                  *Relay
	client, server         net.Conn
	fromClient, fromServer []byte // read already
	idle, half             time.Duration
	record                 *record
	slot                   *slot // of the client's connection, nil for none
}

// freeScratch gives back the memory that the client's preamble stood in, unless
// bytes are left there. The caller has passed on what it had of them, and nobody
// uses the connection yet.
func (j *job) freeScratch() {
	k := j.slot
	if k != nil && k.scratch != nil && len(k.buf) == 0 && below(j.client) == k.Conn.Conn {
		k.scratch.Free()
		k.scratch = nil
	}
}

// Open returns the number of tunnels that have not ended.
func (r *Relay) Open() int { return int(r.open.Load()) }

// Wait returns nil when no tunnel is open, or the context's error.
func (r *Relay) Wait(ctx context.Context) error {
	const often = 10 * time.Millisecond
	tick := time.NewTicker(often)
	defer tick.Stop()
	for r.open.Load() > 0 {
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
		t.kill(why, nil)
	}
}

// Close aborts every tunnel, waits for their ends and stops the Relay's own
// goroutines. The Relay can't be used after it.
func (r *Relay) Close() error {
	for _, t := range r.all() {
		t.kill(Drain, nil)
	}
	r.copies.close()
	r.kernel.wait()
	return r.own.Close()
}

func (r *Relay) loops() *Loops {
	if r.Loops != nil {
		return r.Loops
	}
	return &r.own
}

// sideNames are for errors, in the order of sides and pumps.
var sideNames = [2]string{"client", "service"}

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

// silent reports whether a tunnel has been without a byte for longer than its
// limit allows, and which limit that is.
func silent(quiet time.Duration, half bool, idle, halfClosed time.Duration) (Reason, bool) {
	switch {
	case half && halfClosed > 0 && quiet >= halfClosed:
		return HalfClosed, true
	case idle > 0 && quiet >= idle:
		return Idle, true
	}
	return "", false
}
