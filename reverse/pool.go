package reverse

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// A pool connection is a TCP connection from a connector to the gateway, which waits for a
// request. The request itself comes on the session, as any other. The bytes of the client and the
// service go over the pool connection as they are, and the kernel moves them at both of its ends.

// PoolName is the name by which pool connections are counted and listed. Clients can't ask for it.
var PoolName = tunnel.MustParseName("pool." + tunnel.ReservedZone)

// PoolProtocolName is the name of PoolProtocol.
const PoolProtocolName = "reverse-pool"

// A pool connection begins with 16 bytes that no other protocol begins with, and 32 of a ticket.
// The gateway sends no answer: it closes a connection that it does not accept.
const poolPrefix = "\x00culvert-pool/1\n"

const poolPreamble = len(poolPrefix) + len(ticket{})

// MaxPool is how many pool connections that wait, and tickets, a session may have together.
const MaxPool = 64

const (
	ticketTime  = 30 * time.Second // for which a ticket is good
	poolTimeout = 10 * time.Second // to open a pool connection, and for the answer to a request for tickets
)

// poolField names the pool connection of a request, and in the answer the one that is used.
const poolField = "culvert-pool"

// poolKeepAlive is that of pool connections that wait: NAT forgets those that are silent.
var poolKeepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// A ticket is good for one pool connection. It is random.
type ticket [32]byte

// A poolTicket is a ticket in a control line.
type poolTicket struct {
	ID     uint64 `json:"id"` // of the pool connection, in poolField
	Ticket []byte `json:"ticket"`
}

// A PoolProtocol takes the pool connections of connectors. Its zero value is ready.
type PoolProtocol struct{}

// Name implements tunnel.Protocol.
func (*PoolProtocol) Name() string { return PoolProtocolName }

// Sniff implements tunnel.Protocol.
func (*PoolProtocol) Sniff(b []byte) tunnel.Verdict {
	n := min(len(b), len(poolPrefix))
	switch {
	case string(b[:n]) != poolPrefix[:n]:
		return tunnel.No
	case n == len(poolPrefix):
		return tunnel.Yes
	}
	return tunnel.More
}

// HasPreamble implements tunnel.PreambleDetector.
func (*PoolProtocol) HasPreamble(b []byte) bool { return len(b) >= poolPreamble }

type ticketKey struct{}

// ServeConn implements tunnel.Protocol. It asks h for PoolName, and returns once the
// connection is used or has ended.
func (p *PoolProtocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	for len(c.Buffered()) < poolPreamble {
		if err := c.Fill(poolPreamble); err != nil {
			_ = c.Abort()
			return tunnel.PreambleError(c, err)
		}
	}
	b := c.Buffered()
	if string(b[:len(poolPrefix)]) != poolPrefix {
		_ = c.Abort()
		return tunnel.Refusef(tunnel.BadPreamble, "reverse: %q is not the beginning of a pool connection", b[:len(poolPrefix)])
	}
	t := ticket(b[len(poolPrefix):poolPreamble])
	c.Discard(poolPreamble)
	req := c.NewRequest(p.Name())
	req.Name = PoolName
	h.ServeTunnel(context.WithValue(ctx, ticketKey{}, t), req)
	return nil
}

// An issuedTicket is a ticket that a session was given. The Server keeps its hash.
type issuedTicket struct {
	session *serverSession
	id      uint64
	until   time.Time
}

// issue returns up to n tickets for x.
func (s *Server) issue(x *serverSession, n int) []poolTicket {
	if x.Security() < tunnel.Mutual || !x.req.Source.IsValid() {
		return nil // others could read them, or there is no address to compare
	}
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining || x.poolOver() {
		return nil
	}
	x.tickets = slices.DeleteFunc(x.tickets, func(sum [32]byte) bool {
		t, ok := s.tickets[sum]
		if ok && now.After(t.until) {
			delete(s.tickets, sum)
			ok = false
		}
		return !ok
	})
	if s.tickets == nil {
		s.tickets = map[[32]byte]issuedTicket{}
	}
	var all []poolTicket
	for range min(n, MaxPool-len(x.tickets)-x.poolCount()) {
		var t ticket
		_, _ = rand.Read(t[:]) // which never fails
		sum := sha256.Sum256(t[:])
		x.lastPoolID++
		s.tickets[sum] = issuedTicket{x, x.lastPoolID, now.Add(ticketTime)}
		x.tickets = append(x.tickets, sum)
		all = append(all, poolTicket{ID: x.lastPoolID, Ticket: t[:]})
	}
	return all
}

// forgetTickets revokes the tickets of x. The caller holds mu.
func (s *Server) forgetTickets(x *serverSession) {
	for _, sum := range x.tickets {
		delete(s.tickets, sum)
	}
	x.tickets = nil
}

// redeem takes the ticket by which req came, once. A ticket is for the connector whose
// session it was given to, which comes from the same address.
func (s *Server) redeem(ctx context.Context, req *tunnel.Request) (issuedTicket, error) {
	t, ok := ctx.Value(ticketKey{}).(ticket)
	if !ok {
		return issuedTicket{}, tunnel.Refusef(tunnel.Denied, "reverse: %q is for the pool connections of connectors", req.Name)
	}
	sum := sha256.Sum256(t[:])
	s.mu.Lock()
	defer s.mu.Unlock()
	of, ok := s.tickets[sum]
	if !ok {
		return issuedTicket{}, tunnel.Refusef(tunnel.Denied, "reverse: the ticket of a pool connection was used, has expired, or is not of this gateway")
	}
	delete(s.tickets, sum)
	of.session.tickets = slices.DeleteFunc(of.session.tickets, func(o [32]byte) bool { return o == sum })
	switch from := of.session.req.Source.Addr(); {
	case time.Now().After(of.until):
		return issuedTicket{}, tunnel.Refusef(tunnel.Denied, "reverse: the ticket of a pool connection has expired")
	case req.Source.Addr() != from:
		return issuedTicket{}, tunnel.Refusef(tunnel.Denied, "reverse: the ticket of a pool connection was given to a connector at %s", from)
	}
	return of, nil
}

// Pool returns the Handler of requests for PoolName.
func (s *Server) Pool() tunnel.Handler { return poolHandler{s} }

type poolHandler struct{ server *Server }

// ServeTunnel implements tunnel.Handler. It returns once the connection is used or has ended.
func (h poolHandler) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	s := h.server
	of, err := s.redeem(ctx, req)
	if err != nil {
		s.Router.Refuse(req, err)
		return
	}
	x := of.session
	req.Peer = x.req.Peer // which is charged for it
	admitted, err := s.Router.Admit(req, PoolName.String())
	if err != nil {
		return
	}
	p := &poolConn{session: x, id: of.id, admitted: admitted, conn: admitted.Conn, readDone: make(chan struct{})}
	var early []byte
	if u, ok := p.conn.(tunnel.Unwrapper); ok {
		p.conn, early = u.Unwrap() // take, in another goroutine, needs the connection itself
	}
	admitted.Carry(p)
	if req.Peer.Revoked() != nil { // since it was admitted
		p.Kill(tunnel.Revoked)
	}
	defer context.AfterFunc(ctx, func() {
		defer func() {
			if v := recover(); v != nil {
				s.caught(v)
			}
		}()
		p.Kill(tunnel.Drain)
	})()
	if len(early) > 0 {
		p.end(errPoolSpoke)
		return
	}
	keepAlive(p.conn)
	p.wait()
}

// keepAlive has the kernel find out that the path of c is dead.
func keepAlive(c net.Conn) {
	if k, ok := c.(interface {
		SetKeepAliveConfig(cfg net.KeepAliveConfig) error
	}); ok {
		_ = k.SetKeepAliveConfig(poolKeepAlive)
	}
}

// A poolConn is a pool connection of a Server that no request has taken. It implements
// tunnel.Carrier.
type poolConn struct {
	session  *serverSession
	id       uint64
	admitted *tunnel.Session
	conn     net.Conn
	readDone chan struct{} // closed once wait does not read any more
	fit      bool          // set before readDone is closed: no byte has come

	mu   sync.Mutex // guards what follows
	over bool       // it has ended, or a request has taken it
	why  tunnel.Reason
}

// wait returns when p has ended, or when take wants it.
func (p *poolConn) wait() {
	x := p.session
	if !x.addPool(p) {
		p.end(tunnel.End{Reason: tunnel.Drain})
		return
	}
	var b [1]byte
	n, err := p.conn.Read(b[:])
	if x.removePool(p) { // nobody has taken it
		if n > 0 {
			p.end(errPoolSpoke)
			return
		}
		p.end(tunnel.End{Reason: tunnel.Done})
		return
	}
	p.fit = n == 0 && errors.Is(err, os.ErrDeadlineExceeded)
	close(p.readDone)
}

// errPoolSpoke ends a pool connection on which the connector speaks first.
var errPoolSpoke = tunnel.End{
	Reason: tunnel.BadRequest, ByClient: true, Err: errors.New("reverse: the connector has sent something on a pool connection before a request"),
}

// end closes p, unless a request has taken it.
func (p *poolConn) end(e tunnel.End) {
	p.mu.Lock()
	if p.over {
		p.mu.Unlock()
		return
	}
	p.over = true
	if p.why != "" {
		e = tunnel.End{Reason: p.why}
	}
	p.mu.Unlock()
	_ = p.conn.Close()
	p.admitted.End(e)
}

// take returns the connection, which belongs to the caller from then on, and nil if it has ended.
func (p *poolConn) take() net.Conn {
	_ = p.conn.SetReadDeadline(time.Unix(1, 0))
	<-p.readDone
	if !p.fit || p.conn.SetReadDeadline(time.Time{}) != nil {
		p.end(tunnel.End{Reason: tunnel.Done})
		return nil
	}
	p.mu.Lock()
	if p.over {
		p.mu.Unlock()
		return nil
	}
	p.over = true
	p.mu.Unlock()
	p.admitted.End(tunnel.End{Reason: tunnel.Done})
	return p.conn
}

// Progress implements tunnel.Carrier.
func (p *poolConn) Progress() (in, out int64, moved time.Time) { return 0, 0, time.Now() }

// Kill implements tunnel.Carrier.
func (p *poolConn) Kill(why tunnel.Reason) {
	p.mu.Lock()
	p.why = why
	p.mu.Unlock()
	p.end(tunnel.End{})
}

// A pool is the pool connections of a serverSession. Its mu guards all.
type pool struct {
	mu     sync.Mutex
	idle   []*poolConn // the newest last
	used   map[*poolStream]struct{}
	closed bool
	ended  tunnel.Reason // why all have ended with the session; "" before
}

// poolOver reports whether the session takes no more pool connections.
func (x *serverSession) poolOver() bool {
	x.pool.mu.Lock()
	defer x.pool.mu.Unlock()
	return x.pool.closed
}

func (x *serverSession) poolCount() int {
	x.pool.mu.Lock()
	defer x.pool.mu.Unlock()
	return len(x.pool.idle)
}

// addPool lists p for requests. It returns false if the session takes no more.
func (x *serverSession) addPool(p *poolConn) bool {
	x.pool.mu.Lock()
	defer x.pool.mu.Unlock()
	if x.pool.closed || len(x.pool.idle) >= MaxPool {
		return false
	}
	x.pool.idle = append(x.pool.idle, p)
	return true
}

// removePool reports whether p was waiting.
func (x *serverSession) removePool(p *poolConn) bool {
	x.pool.mu.Lock()
	defer x.pool.mu.Unlock()
	at := slices.Index(x.pool.idle, p)
	if at >= 0 {
		x.pool.idle = slices.Delete(x.pool.idle, at, at+1)
	}
	return at >= 0
}

// takePool returns a pool connection with its id, and nil if none waits.
func (x *serverSession) takePool() (net.Conn, string) {
	for {
		x.pool.mu.Lock()
		last := len(x.pool.idle) - 1
		if last < 0 {
			x.pool.mu.Unlock()
			return nil, ""
		}
		p := x.pool.idle[last]
		x.pool.idle = slices.Delete(x.pool.idle, last, last+1)
		x.pool.mu.Unlock()
		if c := p.take(); c != nil {
			return c, strconv.FormatUint(p.id, 10)
		}
	}
}

// stopPool ends the pool connections that wait, and takes no more.
func (x *serverSession) stopPool() {
	x.pool.mu.Lock()
	x.pool.closed = true // no ticket is issued from here on
	idle := slices.Clone(x.pool.idle)
	x.pool.mu.Unlock()
	x.server.mu.Lock()
	x.server.forgetTickets(x)
	x.server.mu.Unlock()
	for _, p := range idle {
		p.Kill(tunnel.Drain)
	}
}

// endPool ends all pool connections with the session, as streams end.
func (x *serverSession) endPool() {
	x.stopPool()
	why := tunnel.Reset
	if killed := x.killed.Load(); killed != nil {
		why = *killed
	}
	x.pool.mu.Lock()
	used := x.pool.used
	x.pool.used, x.pool.ended = nil, why
	x.pool.mu.Unlock()
	for st := range used {
		st.kill(why)
	}
}

// giveTickets answers a connector that asks for tickets for n more pool connections.
func (x *serverSession) giveTickets(n int) error {
	if list := x.server.issue(x, n); list != nil {
		return x.send(control{Kind: kindTickets, Tickets: list})
	}
	return nil
}

// newPoolStream returns c, a pool connection that a request has taken, as a stream of the session.
func (x *serverSession) newPoolStream(c net.Conn) net.Conn {
	st := &poolStream{Stream: c.(tunnel.Stream)}
	st.ended = func(e tunnel.End) {
		x.in.Add(e.In)
		x.out.Add(e.Out)
		x.streams.Add(-1)
		x.pool.mu.Lock()
		defer x.pool.mu.Unlock()
		delete(x.pool.used, st)
	}
	x.pool.mu.Lock()
	ended := x.pool.ended
	if ended == "" {
		if x.pool.used == nil {
			x.pool.used = map[*poolStream]struct{}{}
		}
		x.pool.used[st] = struct{}{}
	}
	x.pool.mu.Unlock()
	if ended != "" { // while c was taken
		st.kill(ended)
	}
	return st
}

var (
	_ tunnel.Protocol         = (*PoolProtocol)(nil)
	_ tunnel.PreambleDetector = (*PoolProtocol)(nil)
	_ tunnel.Carrier          = (*poolConn)(nil)
)
