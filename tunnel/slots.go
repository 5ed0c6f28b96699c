package tunnel

import (
	"context"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel/internal/poll"
	"culvert.dev/tunnel/internal/relay"
)

// A slot is one connection's place in the Server: what it is counted under.
// It lives as long as the connection is served; a tunnel that outlives that has
// a lease on the place.
type slot struct {
	Conn
	server   *Server
	ctx      slotContext // of the connection
	ln       *Listener
	config   *ListenerConfig // of ln, as the connection came
	task     poll.Task       // its loop is the one that accepted the connection
	client   *Client
	exempt   bool         // the client is a proxy in front, and stands for many
	requests atomic.Int32 // made on the connection
	lent     bool         // a tunnel holds the place
	evicted  atomic.Bool
	waiting  *pendingConn // while its preamble is not complete, otherwise nil; guarded by the loop's lock

	headerOnly atomic.Bool // the client has sent nothing after its ConnHeader when that was read

	// Guarded by server.mu.
	pending  Place[*slot]  // in the Server's queue
	extended time.Duration // see ExtendPreamble
	silence  silence
	expired  bool // its time is up
}

// silence says whether a connection's client waits for the server to speak.
type silence uint8

const (
	unsettled silence = iota
	silent            // it has sent nothing for so long: its pending read is made to fail
	settled           // it is known whose it is, or nobody's
)

// settle ends the question whether the client waits for the server to speak, and reports
// whether it does. The deadline that said so is lifted.
func (k *slot) settle() bool {
	s := k.server
	s.mu.Lock()
	defer s.mu.Unlock()
	was := k.silence
	k.silence = settled
	if was == silent {
		k.limitRead(time.Time{})
	}
	return was == silent
}

// limitRead is LimitRead for a caller that holds server.mu.
func (k *slot) limitRead(t time.Time) {
	if !k.expired && !k.evicted.Load() {
		_ = k.SetReadDeadline(t)
	}
}

// LimitRead implements PreambleEnder.
func (k *slot) LimitRead(t time.Time) {
	s := k.server
	s.mu.Lock()
	defer s.mu.Unlock()
	k.limitRead(t)
}

// ExtendPreamble implements PreambleEnder.
func (k *slot) ExtendPreamble(d time.Duration) {
	s := k.server
	s.mu.Lock()
	defer s.mu.Unlock()
	k.extended = d
}

// EndPreamble implements PreambleEnder.
func (k *slot) EndPreamble() {
	s := k.server
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slots.removePending(k)
	k.limitRead(time.Time{})
}

// slots is the Server's account of its connections. The Server's mu guards it.
type slots struct {
	pending  Queue[*slot]
	waiting  map[*slot]struct{} // not handed over: what Close closes
	sweeping bool
}

// admit counts k in, or says which limit it would break.
func (t *slots) admit(k *slot, l *Limits, b *Budget, now time.Time) error {
	switch {
	case k.config.fronted(k.Conn.source.Addr()):
		k.exempt = true
	case k.config.ConnHeader != nil || len(k.config.Proxies) > 0:
		return Refusef(Denied, "this port is for proxies in front, and %s is none that is listed", k.Conn.source.Addr())
	default:
		if err := k.client.checkConnect(l, b, now); err != nil {
			return err
		}
	}
	t.makeRoom(l, 1)
	k.client.AddOpen(1)
	k.client.addDescriptors(1)
	k.client.AddPending(1)
	k.pending.Value = k
	t.pending.Add(&k.pending, k.client)
	if t.waiting == nil {
		t.waiting = make(map[*slot]struct{})
	}
	t.waiting[k] = struct{}{}
	return nil
}

// makeRoom evicts pending connections until there may be n more. The client that
// has most has the most to spare; of its connections, the one that has been at it
// for longest is the least likely to be honest: a preamble takes a round trip.
func (t *slots) makeRoom(l *Limits, n int) {
	for t.pending.Len() > 0 && l.PendingFull(t.pending.Len()+n-1) {
		old := t.pending.Victim().Value
		old.evict()
		t.removePending(old)
	}
}

// checkConnect refuses one more connection, which has its descriptor already.
func (c *Client) checkConnect(l *Limits, b *Budget, now time.Time) error {
	if err := c.CheckOpen(l, "connections"); err != nil {
		return err
	}
	if err := c.CheckPending(l, 0, "pending connections"); err != nil {
		return err
	}
	if err := b.checkDescriptors(c, 1); err != nil {
		return err
	}
	return c.CheckRate(l, now, "connections")
}

// removePending takes k from the pending connections.
func (t *slots) removePending(k *slot) {
	if k.pending.Listed() {
		t.pending.Remove(&k.pending)
		k.client.AddPending(-1)
	}
}

// charge makes k's client the one that a proxy in front has named, or says which
// limit that would break.
func (k *slot) charge(addr netip.Addr) error {
	s := k.server
	c := s.Budget.Client(&s.clients, addr)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := c.checkConnect(s.limits(), s.Budget, time.Now()); err != nil {
		c.Release()
		return err
	}
	was, listed := k.client, k.pending.Listed()
	s.slots.removePending(k)
	was.AddOpen(-1)
	was.addDescriptors(-1)
	k.client, k.exempt = c, false
	c.AddOpen(1)
	c.addDescriptors(1)
	if listed {
		c.AddPending(1)
		s.slots.pending.Add(&k.pending, c)
	}
	was.Release()
	return nil
}

// expirePending wakes the connections whose preamble took too long by l, or by short
// while memory is short and not for want of what other clients hold. It is false when none
// is pending.
func (t *slots) expirePending(l, short *Limits, now time.Time) bool {
	var next *Place[*slot]
	for p := t.pending.Oldest(); p != nil; p = next {
		next = p.Next()
		k := p.Value
		calm := k.server.Budget.Pressure() == Calm || !k.exempt && k.server.Budget.isOthersShortage(k.client)
		times := short
		if calm {
			times = l
		}
		first, whole := limit(times.FirstByteTimeout, DefaultFirstByteTimeout), limit(times.HandshakeTimeout, DefaultHandshakeTimeout)
		began := k.began.Load()
		if k.extended > whole && whole > 0 && calm {
			whole = k.extended
		}
		switch {
		case k.leaving.Load(): // it has its answer, and a limit of its own
		case began == 0 && first > 0 && now.Sub(k.accepted) >= first,
			began != 0 && whole > 0 && now.Sub(k.accepted)-time.Duration(began) >= whole:
			k.expired = true
			k.wake()
			t.removePending(k)
		case k.silence == unsettled && len(k.config.Protocols) > 1 && (began == 0 || k.headerOnly.Load()) && firstSpeaker(k.config.Protocols, now.Sub(k.accepted)) != nil:
			k.silence = silent
			k.wake()
		}
	}
	t.makeRoom(short, 0)
	return t.pending.Len() > 0
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
	s.slots.removePending(k)
	s.mu.Unlock()
	req.slot = k
	s.Handler.ServeTunnel(ctx, req)
}

// A lease is what a tunnel holds of its client's account and of its service's, and of
// the Budget for its connection where the connection is the tunnel.
type lease struct {
	client *Client      // that is charged for the tunnel: a principal, or an address; nil for nobody
	load   *serviceLoad // of the service; nil until it is known
	conn   *Client      // that is charged for the connection, where its place is the tunnel's; otherwise nil
	exempt bool         // no limit is held against the client
	stream bool         // one of several on a connection
	hello  uint32       // the request's, while it is on its way to a service and has no answer; otherwise 0
}

// client returns the account that req is charged to, with a reference for the
// lease.
func (r *Router) client(req *Request) lease {
	k := req.slot
	l := lease{stream: req.Datagrams == nil}
	if k != nil {
		l.stream = k.requests.Add(1) > 1
	}
	switch {
	case req.Peer.ID != "":
		l.client = r.Budget.principal(&r.clients, req.Peer.ID)
	case k != nil && req.Source == k.Conn.source:
		l.client, l.exempt = k.client.Retain(), k.exempt
	default:
		l.stream = l.stream || k != nil // a proxy's connection was not counted for its client
		l.client = r.Budget.Client(&r.clients, req.Source.Addr())
	}
	return l
}

// lend makes the connection's place the tunnel's, where the connection is the
// tunnel. Where it carries many, it holds its place itself.
func (k *slot) lend(l *lease) {
	if k == nil || !k.handed {
		l.stream = true
		return
	}
	k.lent, l.conn = true, k.client // with its reference
	if l.client != k.client {
		// Both descriptors are the principal's: two accounts would have two shares.
		k.client.addDescriptors(-1)
		l.client.addDescriptors(1)
	}
}

// release gives everything back. multiplexed says that the tunnel's way to the
// service takes no descriptor.
func (l *lease) release(multiplexed bool) {
	l.load.leave()
	c := l.client
	if c == nil {
		return
	}
	c.AddTunnels(-1)
	descriptors := int64(0)
	if !multiplexed {
		descriptors++
	}
	if conn := l.conn; conn != nil {
		descriptors++
		conn.AddOpen(-1)
		conn.budget.Give(1)
		conn.Release()
	}
	c.addDescriptors(-descriptors)
	c.Release()
}

// leave gives up the place of a connection whose goroutine is done with it,
// unless a tunnel has it.
func (k *slot) leave() {
	s := k.server
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slots.removePending(k)
	delete(s.slots.waiting, k)
	k.ln.conns--
	s.forget(k.ln)
	if !k.lent {
		k.giveUp()
	}
}

// giveUp gives back what the connection itself holds.
func (k *slot) giveUp() {
	k.client.AddOpen(-1)
	k.client.addDescriptors(-1)
	k.client.Release()
	k.server.Budget.Give(1)
}

// takeScratch returns the memory that the client's preamble stood in, for the caller to
// free once it has passed on what it has of it. It is nil where bytes are left there,
// and where client is not the connection itself, whose buffer somebody may yet read.
func (k *slot) takeScratch(client net.Conn) *poll.Scratch {
	if k == nil || len(k.buf) > 0 || relay.BaseConn(client) != k.Conn.Conn {
		return nil
	}
	scratch := k.scratch
	k.scratch = nil
	return scratch
}

// wake makes the connection's pending read fail: its time is up.
func (k *slot) wake() {
	_ = k.SetReadDeadline(time.Unix(1, 0))
	k.servePending()
}

func (k *slot) evict() {
	k.evicted.Store(true)
	k.wake()
}
