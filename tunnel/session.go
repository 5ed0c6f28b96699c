package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"culvert.dev/tunnel/internal/poll"
	"culvert.dev/tunnel/internal/relay"
)

// A Session is what a Router has let through for somebody else than its Relay
// to carry: datagrams, which have no end of stream and no order, or a stream of this
// process itself. It is decided as any request is, it is on the Relay's list of what is
// open, counts there and is ended there, and it has one Outcome.
type Session struct {
	Conn     net.Conn // to the service, or after Admit to the client; the caller of Open or Admit closes it, before End
	Endpoint Endpoint
	Route    Route

	router  *Router
	record  record
	carrier Carrier
	ended   atomic.Bool
	seat    int32 // on the Relay's list; its lock guards this
	seated  bool  // and this
}

// A Carrier is asked about the Session that it carries. Its methods may be
// called at any time, by anyone, until End has returned and for a moment after.
type Carrier interface {
	// Progress returns the bytes that were taken to the service and to the
	// client, and when one last was.
	Progress() (in, out int64, moved time.Time)

	// Kill ends the session: End is called with why, before Kill returns or
	// soon after.
	Kill(why Reason)
}

// Open takes req as far as a service: resolve, allow, dial, by the same steps as
// ServeTunnel. It calls neither req.Accept nor req.Refuse. Where Endpoint.TLSOnly is set,
// the caller sends nothing but TLS. After an error the Outcome has been told, and the client is the
// caller's to tell; after none the caller calls Carry and Recheck, and End once.
//
// A successful dial of UDP does not show that a server is there, so for datagrams the
// route's Report gets failures only. See Session.Failed.
func (r *Router) Open(ctx context.Context, req *Request) (*Session, error) {
	o := r.newOutcome(req)
	lease := r.client(req)
	server, route, dialed, err := r.connect(ctx, req, &o, &lease)
	if err != nil {
		r.refused(o, err)
		return nil, err
	}
	if u, ok := server.(Undecided); ok { // nobody is there to be looked at
		if _, server, err = r.decide(ctx, u, nil, &lease); err != nil {
			dialed.Endpoint.Load.add(-1)
			o.Attempts = append(o.Attempts, dialed)
			r.refused(o, err)
			return nil, err
		}
	}
	o.Dialed = time.Since(req.Start) - o.Waited
	s := &Session{Conn: server, Endpoint: dialed.Endpoint, Route: route, router: r}
	s.record = r.newRecord(req, &o, dialed, isMultiplexed(server), lease)
	return s, nil
}

// Admit takes req, which this process serves itself: the request is held against the
// limits of its client and of the gateway, but neither resolved nor dialed, and its client
// is told yes. Session.Conn is the stream of the client. service is the name that logs,
// metrics and the list of tunnels have.
//
// After an error the client has been told, and so has the Outcome. After none the caller
// calls Carry, and closes Conn and calls End once.
func (r *Router) Admit(req *Request, service string) (*Session, error) {
	o := r.newOutcome(req)
	l := r.client(req)
	route := Route{Service: service, Pattern: service}
	o.Service, o.Pattern = route.Service, route.Pattern
	if err := r.reserve(&l, &route); err != nil {
		l.load.leave()
		l.client.Release()
		req.Refuse(err)
		r.refused(o, err)
		return nil, err
	}
	r.Budget.Give(1) // nothing is dialed
	l.client.addDescriptors(-1)
	client, err := req.Accept()
	if err != nil {
		err = errGone(err)
		r.giveBack(&l, true)
		r.refused(o, err)
		return nil, err
	}
	o.Dialed = time.Since(req.Start) - o.Waited
	req.slot.lend(&l)
	own := Endpoint{Host: service, Addr: netip.AddrPortFrom(netip.Addr{}, req.Port)}
	s := &Session{Conn: client, Endpoint: own, Route: route, router: r}
	s.record = r.newRecord(req, &o, Attempt{Endpoint: own}, true, l)
	return s, nil
}

// datagrams leaves out the endpoints to which datagrams cannot go, or must not.
func (r *Route) datagrams() error {
	if slices.ContainsFunc(r.Endpoints, carriesNoDatagrams) {
		r.Endpoints = slices.DeleteFunc(slices.Clone(r.Endpoints), carriesNoDatagrams)
	}
	if len(r.Endpoints) == 0 {
		return Refusef(Unsupported, "service %s is reached by a proxy protocol or through gateways that carry no datagrams: those asked by connect-h2 and connect-h3 do", r.Service)
	}
	if report := r.Report; report != nil {
		r.Report = func(ep Endpoint, err error) {
			if err != nil {
				report(ep, err)
			}
		}
	}
	return nil
}

// carriesNoDatagrams reports whether ep carries streams alone. Of datagrams nobody can tell
// whether they are encrypted, as TLSOnly demands.
func carriesNoDatagrams(ep Endpoint) bool {
	return ep.Transport != nil && !ep.Transport.Info().Datagrams || ep.TLSOnly != nil
}

// Carry puts s on the list of what is open. The caller then calls Recheck.
func (s *Session) Carry(c Carrier) {
	s.carrier = c
	s.router.Relay.loads.opened(s.record.countedIn())
	s.router.Relay.sessions.add(s)
}

// Recheck kills s where it was resolved by a table that another one has replaced, and this
// one denies it. It is called once after Carry.
func (s *Session) Recheck() {
	if s.router.revoked(s.record, s.Route.Generation) {
		s.carrier.Kill(Revoked)
	}
}

// Failed reports that the endpoint turned out not to be there, as an ICMP
// message says.
func (s *Session) Failed(err error) {
	if s.Route.Report != nil {
		s.Route.Report(s.Endpoint, &Error{Reason: DialFailed, Err: fmt.Errorf("dial %s: %w", s.Endpoint, err)})
	}
}

// End takes s from the list, gives back what it had taken, and tells its
// Outcome. Calls after the first do nothing.
func (s *Session) End(e End) {
	if s.ended.Swap(true) {
		return
	}
	if s.carrier == nil { // it was given up before Carry
		s.router.Relay.loads.opened(s.record.countedIn())
	}
	s.router.Relay.sessions.remove(s)
	s.record.Ended(e)
}

// listedSession is a Session on the Relay's list. It implements relay.Live.
type listedSession struct{ s *Session }

func (l listedSession) Owner() relay.Owner { return l.s.record }

func (l listedSession) Progress() (p relay.Progress, open bool) {
	in, out, moved := l.s.carrier.Progress()
	return relay.Progress{In: in, Out: out, Moved: poll.Clock() - int64(time.Since(moved))}, !l.s.ended.Load()
}

func (l listedSession) Kill(why Reason, _ error) { l.s.carrier.Kill(why) }

// sessions are those that a Relay lists.
type sessions struct {
	mu  sync.Mutex // guards all
	all relay.Seats[*Session]
}

func (l *sessions) add(s *Session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.seat = l.all.Add(s)
	s.seated = true
}

func (l *sessions) remove(s *Session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.seated {
		l.all.Remove(s.seat)
		s.seated = false
	}
}

// pieces yields the sessions, some at a time, and holds mu only while it collects those.
func (l *sessions) pieces() iter.Seq[[]*Session] {
	return func(yield func([]*Session) bool) {
		var some []*Session
		for at := 0; ; {
			l.mu.Lock()
			at, some = l.all.Piece(at, some[:0])
			l.mu.Unlock()
			if !yield(some) || at == 0 {
				return
			}
		}
	}
}

func (l *sessions) appendAll(to []relay.Live) []relay.Live {
	for some := range l.pieces() {
		for _, s := range some {
			to = append(to, listedSession{s})
		}
	}
	return to
}

// killFunc is Relay.EndRecords for sessions.
func (l *sessions) killFunc(why Reason, match func(Record) bool) (n int) {
	for some := range l.pieces() {
		for _, s := range some {
			if !s.ended.Load() && match(Record{s.record}) {
				s.carrier.Kill(why)
				n++
			}
		}
	}
	return n
}

// A DatagramConn is a connection that carries datagrams: to a service, or of a client to
// this gateway. Its Read and Write are not to be used.
type DatagramConn interface {
	net.Conn

	// SendDatagram sends b and does not keep it. It does not wait: what there is no room
	// for is lost, without an error. An error means that the connection has ended.
	SendDatagram(b []byte) error

	// ReceiveDatagrams calls deliver with each datagram that comes, until the connection
	// ends, and returns why: io.EOF after an orderly end, net.ErrClosed after Close. It is
	// called once. deliver may be called by several goroutines at once, and for a moment
	// after Close; it must not wait and does not keep b.
	ReceiveDatagrams(deliver func(b []byte)) error
}

// A datagramTunnel carries datagrams between two DatagramConns. It implements Carrier.
type datagramTunnel struct {
	session        *Session
	client, server DatagramConn
	idle           time.Duration // 0 means no limit
	timer          *time.Timer   // of idle; nil for none

	in, out atomic.Int64
	moved   atomic.Int64 // poll.Clock when a datagram last came

	once     sync.Once // guards what follows: the first reason is the one reported
	why      Reason
	err      error
	byClient bool
}

// carryDatagrams carries what client and server send each other and returns when the
// tunnel has ended.
func (r *Router) carryDatagrams(req *Request, client Stream, server net.Conn, o *Outcome, dialed Attempt, route Route, l lease) {
	s := &Session{Conn: server, Endpoint: dialed.Endpoint, Route: route, router: r}
	s.record = r.newRecord(req, o, dialed, isMultiplexed(server), l)
	t := &datagramTunnel{session: s, idle: limit(route.IdleTimeout, r.limits().UDPIdleTimeout, DefaultUDPIdleTimeout)}
	var fits, also bool
	t.client, fits = client.(DatagramConn)
	t.server, also = server.(DatagramConn)
	if !fits || !also {
		_, _ = Abort(client), Abort(server)
		s.End(End{Reason: Internal, Err: fmt.Errorf("tunnel: a %T and a %T do not both carry datagrams", client, server)})
		return
	}
	t.moved.Store(poll.Clock())
	if t.idle > 0 {
		t.timer = time.AfterFunc(math.MaxInt64, t.checkIdle)
		t.timer.Reset(t.idle) // which checkIdle does, too
	}
	s.Carry(t)
	s.Recheck()
	t.run()
}

// run carries until either side has ended.
func (t *datagramTunnel) run() {
	var service sync.WaitGroup
	service.Go(func() {
		defer t.recovered()
		t.serviceEnded(t.server.ReceiveDatagrams(t.toClient))
	})
	func() {
		defer t.recovered()
		t.clientEnded(t.client.ReceiveDatagrams(t.toService))
	}()
	service.Wait()
	if t.timer != nil {
		t.timer.Stop()
	}
	t.session.End(End{Reason: t.why, Err: t.err, In: t.in.Load(), Out: t.out.Load(), ByClient: t.byClient})
}

// recovered ends the tunnel whose goroutine panicked, and no other.
func (t *datagramTunnel) recovered() {
	if v := recover(); v != nil {
		t.finish(Internal, Caught(v), false)
	}
}

// toService is called with the datagrams of the client.
func (t *datagramTunnel) toService(b []byte) {
	defer t.recovered()
	t.moved.Store(poll.Clock())
	if err := t.server.SendDatagram(b); err != nil {
		t.serviceEnded(err)
		return
	}
	t.in.Add(int64(len(b)))
}

// toClient is called with the datagrams of the service.
func (t *datagramTunnel) toClient(b []byte) {
	defer t.recovered()
	t.moved.Store(poll.Clock())
	if t.client.SendDatagram(b) == nil { // or ReceiveDatagrams says why
		t.out.Add(int64(len(b)))
	}
}

// clientEnded ends the tunnel with the client's side, which ended with err.
func (t *datagramTunnel) clientEnded(err error) {
	if err == io.EOF {
		t.finish(Done, nil, true)
		return
	}
	t.finish(Reset, err, true)
}

// serviceEnded ends the tunnel with the service's side, which ended with err.
func (t *datagramTunnel) serviceEnded(err error) {
	switch {
	case err == io.EOF:
		t.finish(Done, nil, false)
		return
	case errors.Is(err, net.ErrClosed): // it was our own doing
		t.finish(Reset, err, false)
		return
	}
	t.session.Failed(err)
	why := Reset
	if t.out.Load() == 0 && errors.Is(err, syscall.ECONNREFUSED) {
		why = DialFailed
	}
	t.finish(why, fmt.Errorf("the service can't be reached: %w", err), false)
}

// finish ends the tunnel, once: both sides are closed, the client's in order or not.
func (t *datagramTunnel) finish(why Reason, err error, byClient bool) {
	t.once.Do(func() {
		t.why, t.err, t.byClient = why, err, byClient
		if why == Done || why == Idle {
			_ = t.client.Close()
		} else {
			_ = Abort(t.client)
		}
		_ = t.server.Close()
	})
}

// checkIdle ends the tunnel if nothing has come for too long.
func (t *datagramTunnel) checkIdle() {
	defer t.recovered()
	left := t.idle - time.Duration(poll.Clock()-t.moved.Load())
	if left <= 0 {
		t.finish(Idle, nil, false)
		return
	}
	t.timer.Reset(left)
}

// Progress implements Carrier.
func (t *datagramTunnel) Progress() (in, out int64, moved time.Time) {
	return t.in.Load(), t.out.Load(), time.Now().Add(-time.Duration(poll.Clock() - t.moved.Load()))
}

// Kill implements Carrier.
func (t *datagramTunnel) Kill(why Reason) { t.finish(why, nil, false) }
