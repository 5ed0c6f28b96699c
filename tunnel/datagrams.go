package tunnel

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

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
func (r *Router) carryDatagrams(client Stream, server net.Conn, o *Outcome, dialed Attempt, route Route, l lease) {
	s := &Session{Conn: server, Endpoint: dialed.Endpoint, Route: route, relay: r.Relay}
	s.record = r.newRecord(o, dialed, isMultiplexed(server), l)
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
