package tunnel

import (
	"cmp"
	"context"
	"sync/atomic"
	"time"
)

// Limits bound what connections may cost before they have asked for anything,
// and how much of the gateway one source may have. A zero field means its
// default, a negative one no limit.
type Limits struct {
	FirstByte time.Duration // from accept to the first byte; default 10 s
	Preamble  time.Duration // from the first byte to a complete preamble, whatever comes; default 5 s
	HalfOpen  int           // unfinished preambles in all; the oldest makes room; default 4,096

	// Per source: an IPv4 address or an IPv6 /64.
	HalfOpenPerSource int // unfinished preambles; default 256
	OpenPerSource     int // connections and tunnels; default 2,000
	NewPerSource      int // new connections a second, and as many at once; default 200
}

// Default Limits.
const (
	DefaultFirstByte         = 10 * time.Second
	DefaultPreamble          = 5 * time.Second
	DefaultHalfOpen          = 4096
	DefaultHalfOpenPerSource = 256
	DefaultOpenPerSource     = 2000
	DefaultNewPerSource      = 200
)

// capped reports whether n has reached limit, or the default where limit is
// zero. A negative limit is never reached.
func capped(n, limit, otherwise int) bool {
	if limit == 0 {
		limit = otherwise
	}
	return limit >= 0 && n >= limit
}

// Crowded reports whether n unfinished preambles, or what stands for them, are
// as many as there may be in all.
func (l *Limits) Crowded(n int) bool { return capped(n, l.HalfOpen, DefaultHalfOpen) }

func (l *Limits) newPerSource() int {
	if l.NewPerSource == 0 {
		return DefaultNewPerSource
	}
	return l.NewPerSource
}

// A slot is one connection's place in the Server: what it is counted under.
// It lives as long as the connection is served; a tunnel that outlives that has
// a lease on the place.
type slot struct {
	Conn
	server  *Server
	ctx     slotContext // of the connection
	ln      *Listener
	loop    *loop // that accepted it, nil for none
	source  *Source
	lent    bool               // a tunnel holds the place
	scratch *[scratchSize]byte // what Conn's buffer began in, if it is to be given back
	evicted atomic.Bool
	guest   *guest // its place in the lobby, nil elsewhere; guarded by the loop's mu

	// The list of unfinished preambles, oldest first. Guarded by server.mu.
	half       bool
	prev, next *slot
}

// slots is the Server's account of its connections. The Server's mu guards it.
type slots struct {
	halfOpen       int
	oldest, newest *slot
	sources        Sources
	waiting        map[*slot]struct{} // not handed over: what Close closes
	sweeping       bool
}

// admit counts k in, or says which limit it would break.
func (t *slots) admit(k *slot, l *Limits, now time.Time) error {
	src := t.sources.Of(k.Conn.source.Addr(), l, now)
	switch {
	case k.ln.fronted(k.Conn.source.Addr()): // it stands for many
	case k.ln.Preface != nil:
		return Refusef(Denied, "this port is for proxies in front, and %s is none that is listed", k.Conn.source.Addr())
	default:
		if err := cmp.Or(src.MayOpen(l, "connections"), src.MayBegin(l, "unfinished preambles")); err != nil {
			return err
		}
		if err := src.Spend(l, now, "connections"); err != nil {
			return err
		}
	}
	if l.Crowded(t.halfOpen) {
		// Whoever has been at it for longest is the least likely to be honest:
		// a preamble takes a round trip.
		t.oldest.evict()
		t.finished(t.oldest)
	}
	k.source, k.half = src, true
	src.Open++
	src.HalfOpen++
	t.halfOpen++
	k.prev = t.newest
	if t.newest != nil {
		t.newest.next = k
	} else {
		t.oldest = k
	}
	t.newest = k
	if t.waiting == nil {
		t.waiting = make(map[*slot]struct{})
	}
	t.waiting[k] = struct{}{}
	return nil
}

// finished takes k from the unfinished preambles.
func (t *slots) finished(k *slot) {
	if !k.half {
		return
	}
	k.half = false
	t.halfOpen--
	k.source.HalfOpen--
	if k.prev != nil {
		k.prev.next = k.next
	} else {
		t.oldest = k.next
	}
	if k.next != nil {
		k.next.prev = k.prev
	} else {
		t.newest = k.prev
	}
	k.prev, k.next = nil, nil
}

// expire wakes the connections whose preamble took too long. It is false when
// none is unfinished.
func (t *slots) expire(l *Limits, now time.Time) bool {
	first, whole := limit(l.FirstByte, DefaultFirstByte), limit(l.Preamble, DefaultPreamble)
	var next *slot
	for k := t.oldest; k != nil; k = next {
		next = k.next
		began := k.began.Load()
		switch {
		case k.leaving.Load(): // it has its answer, and a limit of its own
		case began == 0 && first > 0 && now.Sub(k.accepted) >= first,
			began != 0 && whole > 0 && now.Sub(k.accepted)-time.Duration(began) >= whole:
			k.wake()
			t.finished(k)
		}
	}
	return t.oldest != nil
}

func (t *slots) each(f func(*slot)) {
	for k := range t.waiting {
		f(k)
	}
}

// ServeTunnel is what the protocol calls: the preamble is over.
func (k *slot) ServeTunnel(ctx context.Context, req *Request) {
	s := k.server
	s.mu.Lock()
	s.slots.finished(k)
	s.mu.Unlock()
	req.slot = k
	s.Handler.ServeTunnel(ctx, req)
}

// A lease is a place that a tunnel holds beyond its connection's goroutine, so
// that a source's tunnels count against its share. The slot itself is not kept:
// it is larger than all that a tunnel needs.
type lease struct {
	server *Server
	source *Source
}

// lend makes the slot's place the tunnel's, where the connection is the tunnel.
// Where it carries many, it holds its place itself.
func (k *slot) lend() lease {
	if k == nil || !k.handed {
		return lease{}
	}
	k.lent = true
	return lease{k.server, k.source}
}

// release gives the place back.
func (l lease) release() {
	if l.server == nil {
		return
	}
	l.server.mu.Lock()
	defer l.server.mu.Unlock()
	l.source.Open--
	l.server.Budget.Give(1)
}

// leave gives up the place of a connection whose goroutine is done with it,
// unless a tunnel has it.
func (k *slot) leave() {
	s := k.server
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slots.finished(k)
	delete(s.slots.waiting, k)
	k.ln.conns--
	s.forget(k.ln)
	if !k.lent {
		k.source.Open--
		s.Budget.Give(1)
	}
}

// wake makes the connection's pending read fail: its time is up.
func (k *slot) wake() {
	_ = k.SetReadDeadline(time.Unix(1, 0))
	k.leaveLobby()
}

func (k *slot) evict() {
	k.evicted.Store(true)
	k.wake()
}
