// Package relay carries bytes between two streams until both have ended.
//
// A Relay takes over both streams of a Tunnel. On Linux it gives two TCP sockets to
// an event loop (Loops), which reads, writes and splices: the tunnel is one
// socketTunnel, without a goroutine. It copies between any other two streams: the
// tunnel is a copyTunnel of two pumps, each of which has a goroutine while bytes
// move.
//
// The package does not know what a tunnel is for. Its Owner hears of the service's
// first bytes and of the end.
package relay

import (
	"log/slog"
	"net"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

// A Relay carries tunnels. Its fields are set before the first one.
type Relay struct {
	Loops *Loops       // carry pairs of sockets
	Log   *slog.Logger // panics in tunnels; nil discards

	sockets socketRelay
	copies  copyRelay
	panics  PanicLog
}

// A Tunnel is what Carry takes over. Neither stream may be used by anyone else from
// then on.
type Tunnel struct {
	Client, Server         net.Conn
	FromClient, FromServer []byte // read from them already, and passed on first

	IdleTimeout       time.Duration // without a byte either way; 0 means no limit
	HalfClosedTimeout time.Duration // half-closed and silent; 0 means no limit

	Owner Owner

	socket listedTunnel // what carries it, once Carry has returned: this,
	copied *copyTunnel  // or this where it is not nil
}

// Kill aborts what Carry took over. It may have ended already.
func (t *Tunnel) Kill(why Reason) {
	if t.copied != nil {
		t.copied.Kill(why, nil)
		return
	}
	t.socket.Kill(why, nil)
}

// An Owner is what a tunnel is carried for. The Relay keeps it until the tunnel's end
// and for a moment after it. None of its methods blocks.
type Owner interface {
	// Answered is called before each write of what the service has sent, by one
	// goroutine at a time.
	Answered()

	// ServiceEnded is called when the service ends or aborts its stream before the
	// client does: after an end in order with nil, on the goroutine that calls Answered,
	// and after an abort with the error, on any. It may be called twice.
	ServiceEnded(err error)

	// Ended is called once, when both streams are closed.
	Ended(End)

	// ChargedTo returns who is charged for the memory that the tunnel keeps: a
	// comparable key, and a name for people. It may be called at any time.
	ChargedTo() (key any, name string)
}

// A Reason says why a tunnel ended. Package tunnel has the list of all Reasons; those
// below are the ones that a Relay finds by itself.
type Reason string

// Why tunnels end.
const (
	Done       Reason = "done"
	Reset      Reason = "reset"
	Idle       Reason = "idle"
	HalfClosed Reason = "half-closed"
	Drain      Reason = "drain"
	Overload   Reason = "overload"
	Internal   Reason = "internal"
)

// An End says how a tunnel ended.
type End struct {
	Reason   Reason
	Err      error // what a side reported, nil after an orderly end
	In       int64 // bytes taken from the client and given to the service's socket
	Out      int64 // bytes taken from the service and given to the client's socket
	ByClient bool  // the client aborted; not known of two sockets in an event loop
}

// A Budget counts what tunnels take of the process. Its methods may be called at any
// time.
type Budget interface {
	Take(n int64) bool // n descriptors for pipes; false where there are none
	Give(n int64)      // n descriptors back
	AddBuffered(n int) // n bytes that back-pressure keeps in memory, or fewer
	MemoryShort() bool // tunnels are to be read in small pieces
}

// shortRead is the most that is read at once of a side whose other side may not take
// it, while memory is short, in bytes.
const shortRead = 2 << 10

// readLimit returns how much of n bytes may be read at once.
func readLimit(b Budget, n int) int {
	if b.MemoryShort() {
		return min(n, shortRead)
	}
	return n
}

// Carry takes ownership of both streams and returns at once. It is false where
// FromClient is still in use afterwards.
func (r *Relay) Carry(t *Tunnel) (copied bool) {
	if r.sockets.carry(r, t) {
		return true
	}
	r.copies.carry(r, t)
	return len(t.FromClient) == 0
}

// Close aborts every tunnel and waits for their ends. What is carried after it is
// aborted at once, or by the end of the Loops.
func (r *Relay) Close() {
	for _, t := range r.All() {
		t.Kill(Drain, nil)
	}
	r.copies.close()
	r.sockets.wait()
}

// A Live is an open tunnel, whichever way it is carried. Its methods may be called at
// any time, on any goroutine.
type Live interface {
	Owner() Owner
	Progress() (p Progress, open bool)
	Kill(why Reason, err error) // an abort; where a loop carries the tunnel, it comes soon after
}

// Progress is what changes in a tunnel's life.
type Progress struct {
	In, Out    int64 // bytes, as in End
	Moved      int64 // poll.Clock of the last byte or end
	HalfClosed bool  // one side has ended its stream
}

// All returns the open tunnels, in no order.
func (r *Relay) All() []Live { return append(r.sockets.all(r), r.copies.all()...) }

// KillFunc aborts every tunnel whose Owner matches, and returns how many those are. It
// sees all that were open when it was called and still are, in no order, and looks at
// them in pieces: no loop and no tunnel waits for it. match is called on the caller's
// goroutine.
func (r *Relay) KillFunc(why Reason, match func(Owner) bool) int {
	return r.sockets.killFunc(r, why, match) + r.copies.killFunc(why, match)
}

// limitExceeded reports whether a tunnel has been without a byte for longer than its
// limit allows, and which limit that is.
func limitExceeded(quiet time.Duration, half bool, idle, halfClosed time.Duration) (Reason, bool) {
	switch {
	case half && halfClosed > 0 && quiet >= halfClosed:
		return HalfClosed, true
	case idle > 0 && quiet >= idle:
		return Idle, true
	}
	return "", false
}

// sideNames are for errors, in the order of sides and pumps.
var sideNames = [2]string{"client", "service"}

// clock is a monotonic clock for timestamps that fit a word.
func clock() int64 { return poll.Clock() }
