package udp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime/debug"
	"sync/atomic"
	"syscall"
	"time"

	"culvert.dev/tunnel"
)

// A client is the address that a datagram came from, and the local address it came to
// if an answer needs that.
type client struct {
	addr  netip.AddrPort
	local netip.Addr
}

// A state is how far a session has come.
type state uint8

const (
	asking  state = iota // the hello is not complete
	opening              // the route is not known
	carried              // there is a socket to a service
	local                // it ends here, at a Local
	refused              // it was refused, and the client may not know yet
	over
)

// refusalMemory is how long a refused session is kept.
const refusalMemory = 3 * time.Second

// A session is the datagrams between one client and one service.
type session struct {
	d       *activeListener
	src     *tunnel.Client
	req     tunnel.Request
	opening Opening   // nil where there is one service
	start   time.Time // monotonic, as all that is compared with it

	in, out        atomic.Int64 // bytes
	sent           atomic.Int64 // datagrams of the client
	moved          atomic.Int64 // when a datagram was last carried, from start
	answered       atomic.Bool
	clientSentLast atomic.Bool  // the last datagram was the client's
	shortAnswers   atomic.Int32 // of the service to the client, see provesClient
	answersProve   atomic.Bool  // the service's datagrams have proven the client
	usesServiceID  atomic.Bool  // the client has written to the id of the service

	// Guarded by the Server's mu.
	state        state
	half         bool // on the list of those not proven
	waiting      [][]byte
	size         int // of waiting
	paths        []*path
	ids          ids
	caller       caller // under which guess finds it
	tun          *tunnel.Session
	idle         time.Duration // 0 means no limit
	answer       []byte        // of one refused
	sinceRefusal int           // datagrams since then
	since        time.Time     // it was refused
	ended        tunnel.End    // how, without counts
	socketSlot   socketSlot

	place tunnel.Place[*session] // among those that are not proven
}

func (d *activeListener) proto() string {
	if d.ln.Open != nil {
		return "quic"
	}
	return "udp"
}

// request begins the request of a new session.
func (d *activeListener) request(c client) tunnel.Request {
	return tunnel.Request{
		Proto: d.proto(), Listener: d.ln.Name, Name: d.ln.Service, Port: d.ln.Port, LocalPort: d.port,
		Source: c.addr, Start: time.Now(), Datagrams: d.s.dialer(),
	}
}

// plain handles a datagram for the one service.
func (d *activeListener) plain(b []byte, c client) {
	s := d.s
	s.mu.Lock()
	if paths := d.byAddr[c]; len(paths) > 0 {
		paths[0].session.deliver(paths[0], b)
		return
	}
	k, evicted, err := d.admit(c)
	if err != nil {
		s.mu.Unlock()
		d.drop(c, err)
		return
	}
	k.req = d.request(c)
	if d.ln.To != nil {
		d.ln.To(&k.req)
	}
	k.hold(b)
	next, err := k.begin()
	s.mu.Unlock()
	evicted.evict()
	next.evict()
	if err != nil {
		k.decline(err)
	}
}

// admit creates a session for a client. It may evict another one that is not proven,
// the oldest of the client that has most of them; the caller ends that one after
// unlocking mu.
func (d *activeListener) admit(c client) (k, evicted *session, err error) {
	s, now := d.s, time.Now()
	if s.draining {
		return nil, nil, tunnel.Refusef(tunnel.Drain, "the gateway is stopping")
	}
	if p := s.Budget.Pressure(); p != tunnel.Calm {
		return nil, nil, tunnel.Refusef(tunnel.Overload, "memory is %s: raise its limit or add a gateway", p)
	}
	src := s.Budget.Client(&s.clients, c.addr.Addr())
	if err := s.mayOpen(src, now); err != nil {
		src.Release()
		return nil, nil, err
	}
	if s.limits().PendingFull(s.half.n) {
		evicted = s.half.queue.Victim().Value
		s.half.remove(evicted)
	}
	k = &session{d: d, src: src, start: now}
	k.paths = []*path{{session: k, client: c}}
	d.byAddr[c] = append(d.byAddr[c], k.paths[0])
	d.sessions[k] = struct{}{}
	s.sessions++
	src.AddOpen(1)
	s.half.add(k)
	if !s.sweeping {
		s.sweeping = true
		s.wg.Add(1)
		go s.sweep()
	}
	return k, evicted, nil
}

// mayOpen refuses one more session of a client that has reached a limit.
func (s *Server) mayOpen(c *tunnel.Client, now time.Time) error {
	limits := s.limits()
	if err := c.CheckOpen(limits, "sessions"); err != nil {
		return err
	}
	if err := c.CheckPending(limits, 0, "sessions of which nothing is proven"); err != nil {
		return err
	}
	return c.CheckRate(limits, now, "sessions")
}

// evict ends a session that made room; nil is none.
func (k *session) evict() {
	switch {
	case k == nil:
	case k.opening == nil && k.answered.Load(): // its client may well be done
		k.end(tunnel.Idle, errors.New("it made room for a newer session"))
	default:
		k.end(tunnel.Overload, errors.New("limits.maxPendingConnections: too many sessions of which nothing is proven; of the client with most, this was the oldest"))
	}
}

// hold keeps a datagram until there is a socket for it. The caller holds mu.
func (k *session) hold(b []byte) {
	if k.size+len(b) > maxWaiting || k.size+len(b) > firstWaiting && !k.mayWait(len(b)) {
		k.d.s.dropped.Add(1)
		return
	}
	k.waiting = append(k.waiting, append([]byte(nil), b...))
	k.size += len(b)
	k.wait(len(b))
}

// mayWait reports whether n bytes more of k's client may wait: no more than are
// left for all others. The caller holds mu.
func (k *session) mayWait(n int) bool {
	s := k.d.s
	return s.waiting+n <= maxAllWaiting && s.waitingBy[k.src]+n <= maxAllWaiting-s.waiting
}

// wait counts n bytes more, or less, that wait. The caller holds mu.
func (k *session) wait(n int) {
	s := k.d.s
	s.waiting += n
	switch had := s.waitingBy[k.src]; {
	case had+n == 0:
		delete(s.waitingBy, k.src)
	case s.waitingBy == nil:
		s.waitingBy = map[*tunnel.Client]int{k.src: n}
	default:
		s.waitingBy[k.src] = had + n
	}
}

// release returns what hold has kept. The caller holds mu.
func (k *session) release() [][]byte {
	w := k.waiting
	k.wait(-k.size)
	k.waiting, k.size = nil, 0
	return w
}

// begin opens the route of a session, which takes a socket. It may evict another
// session, as admit may. The caller holds mu, and declines the session after an
// error.
func (k *session) begin() (evicted *session, err error) {
	s := k.d.s
	if evicted, err = s.occupy(k); err != nil {
		return nil, err
	}
	k.state = opening
	s.wg.Add(1)
	go k.open()
	return evicted, nil
}

// decline reports a session without a request, and refuses it.
func (k *session) decline(err error) {
	k.d.s.report(k.outcome(tunnel.ReasonOf(err), err))
	k.refuse(err)
}

func (k *session) open() {
	s := k.d.s
	defer s.wg.Done()
	defer k.recovered()
	tun, err := s.Router.Open(k.d.ctx, &k.req)
	if err != nil {
		k.refuse(err)
		return
	}
	sock, err := k.d.datagramConn(tun.Conn)
	if err != nil {
		_ = tun.Conn.Close()
		tun.End(tunnel.End{Reason: tunnel.Internal, Err: err})
		k.refuse(err)
		return
	}
	s.mu.Lock()
	if k.state != opening { // it was ended meanwhile
		s.mu.Unlock()
		_ = sock.Close()
		tun.End(k.ended)
		return
	}
	p := k.paths[0]
	k.state, k.tun, p.sock = carried, tun, sock
	k.idle = max(limit(tun.Route.IdleTimeout, limit(s.limits().UDPIdleTimeout, tunnel.DefaultUDPIdleTimeout)), 0)
	tun.Carry(k)
	for _, b := range k.release() { // within mu, so that nothing overtakes it
		err = errors.Join(err, k.toService(p, sock, b))
	}
	s.mu.Unlock()
	tun.Recheck()
	if err != nil {
		k.lost(err)
	}
	k.pump(p, sock)
}

// recovered ends a session whose goroutine panicked, and no other.
func (k *session) recovered() {
	if v := recover(); v != nil {
		s := k.d.s
		s.log().Error("panic in a session", "panic", v, "stack", string(debug.Stack()))
		err := fmt.Errorf("panic: %v", v)
		s.mu.Lock()
		early := k.tun == nil
		s.mu.Unlock()
		if early {
			s.report(k.outcome(tunnel.Internal, err))
		}
		k.end(tunnel.Internal, err)
	}
}

// datagramConn returns c, which a Dialer or a Transport has connected, as it is used for
// the sessions of d.
func (d *activeListener) datagramConn(c net.Conn) (tunnel.DatagramConn, error) {
	dc, ok := c.(tunnel.DatagramConn)
	if !ok {
		return nil, fmt.Errorf("udp: a %T was dialed, want a tunnel.DatagramConn", c)
	}
	if s, ok := c.(*socket); ok && d.ln.Open != nil {
		dontFragment(s.UDPConn)
	}
	return dc, nil
}

func isRefused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// lost ends a session whose service cannot be reached any more, or never could.
func (k *session) lost(err error) {
	switch {
	case errors.Is(err, net.ErrClosed):
		return
	case err == io.EOF: // a next hop has ended its part of the session
		k.end(tunnel.Done, nil)
		return
	}
	s := k.d.s
	s.mu.Lock()
	tun := k.tun
	s.mu.Unlock()
	why := tunnel.Reset
	if !k.answered.Load() {
		why = tunnel.DialFailed
	}
	if tun != nil {
		tun.Failed(err)
	}
	k.end(why, fmt.Errorf("the service can't be reached: %w", err))
}

// prove marks a session as proven.
func (k *session) prove() {
	s := k.d.s
	s.mu.Lock()
	defer s.mu.Unlock()
	k.proven()
}

// proven is prove for a caller that holds mu.
func (k *session) proven() {
	if k.half && k.state != over {
		k.d.s.half.remove(k)
		k.rank(nil)
	}
}

// refuse refuses a session, whose Outcome was reported before.
func (k *session) refuse(err error) {
	s := k.d.s
	var answer []byte
	if k.opening != nil && !k.d.ln.Silent {
		answer = k.opening.Refuse(err)
	}
	s.mu.Lock()
	if k.state == over {
		s.mu.Unlock()
		return
	}
	s.refused.Add(1)
	k.state, k.answer, k.since = refused, answer, time.Now()
	k.release()
	s.vacate(k)
	c := k.paths[0].client
	s.mu.Unlock()
	if answer != nil {
		_ = k.d.wire.send(answer, c.addr, c.local)
	}
}

// end ends a session, once. Its client is sent nothing.
func (k *session) end(why tunnel.Reason, err error) {
	d, s := k.d, k.d.s
	s.mu.Lock()
	was := k.state
	if was == over {
		s.mu.Unlock()
		return
	}
	k.proven()
	s.vacate(k)
	k.state, k.ended = over, tunnel.End{Reason: why, Err: err}
	k.release()
	paths, tun := k.paths, k.tun
	k.paths = nil
	for _, p := range paths {
		d.forget(p)
	}
	k.ids.forget(k)
	d.removeCandidate(k)
	delete(d.sessions, k)
	s.sessions--
	k.src.AddOpen(-1)
	k.src.Release()
	s.mu.Unlock()
	if tun != nil {
		tun.End(tunnel.End{Reason: why, Err: err, In: k.in.Load(), Out: k.out.Load()})
	} else if was == asking {
		s.refused.Add(1)
		s.report(k.outcome(why, err))
	}
}

// outcome returns the Outcome of a session without a request.
func (k *session) outcome(why tunnel.Reason, err error) *tunnel.Outcome {
	o := &tunnel.Outcome{
		Start: k.req.Start, Proto: k.req.Proto, Listener: k.req.Listener, Source: k.req.Source,
		Reason: why, Err: err, Lasted: time.Since(k.start),
	}
	if !k.req.Name.IsZero() {
		o.Target = k.req.Target()
	}
	return o
}

// Progress implements tunnel.Carrier.
func (k *session) Progress() (in, out int64, moved time.Time) {
	return k.in.Load(), k.out.Load(), k.start.Add(time.Duration(k.moved.Load()))
}

// Kill implements tunnel.Carrier.
func (k *session) Kill(why tunnel.Reason) { k.end(why, nil) }
