package reverse

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/tunnel"
)

// poolSteady is how long a pool connection must last: the gateway closes one earlier if it does not
// accept the ticket.
const poolSteady = 2 * time.Second

// poolRetry is the most that a connector waits after pool connections have failed.
const poolRetry = 10 * time.Second

// A clientPool keeps pool connections to the gateway of a session.
type clientPool struct {
	x       *clientSession
	gateway *Gateway
	tickets chan []poolTicket // has room for one
	change  chan struct{}     // has room for one: a connection has ended

	mu       sync.Mutex // guards what follows
	idle     map[uint64]*readyConn
	used     map[*poolStream]struct{}
	opening  int  // connections that are being opened
	asked    int  // tickets that the gateway was asked for, and has not given
	failures int  // in a row; those since one request for tickets count once
	counted  bool // failures has counted one since the last request for tickets
	warned   bool
	closed   bool
}

// A readyConn is a pool connection that no request has taken.
type readyConn struct {
	conn     *tunnel.Conn
	readDone chan struct{} // closed once wait does not read any more
	fit      bool          // set before readDone is closed: no byte has come
}

func newClientPool(x *clientSession) *clientPool {
	return &clientPool{
		x: x, gateway: x.slot.gateway, tickets: make(chan []poolTicket, 1), change: make(chan struct{}, 1),
		idle: map[uint64]*readyConn{}, used: map[*poolStream]struct{}{},
	}
}

// run keeps connections until done is closed, and ends all of them.
func (p *clientPool) run(ctx context.Context, done <-chan struct{}) {
	ctx, cancel := context.WithCancel(ctx)
	var opening sync.WaitGroup
	defer func() {
		cancel()
		p.close()
		opening.Wait()
	}()
	for {
		missing, failures := p.missing()
		if missing <= 0 {
			select {
			case <-p.change:
				continue
			case <-done:
				return
			}
		}
		if failures > 0 {
			if !waitFor(done, min(retryIn(failures, nil), poolRetry)) {
				return
			}
			if missing, _ = p.missing(); missing <= 0 {
				continue
			}
		}
		for _, t := range p.ask(done, missing) {
			opening.Go(func() {
				defer p.x.client.recovered()
				p.open(ctx, t)
			})
		}
		select {
		case <-done:
			return
		default:
		}
	}
}

// waitFor waits for d. It returns false if done is closed before.
func waitFor(done <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
		return false
	case <-t.C:
		return true
	}
}

// missing returns how many connections are to be opened, and how many have failed in a row.
func (p *clientPool) missing() (n, failures int) {
	draining := p.x.isDraining() || p.x.client.isDraining()
	p.mu.Lock()
	defer p.mu.Unlock()
	if draining || p.closed {
		return 0, 0
	}
	return p.gateway.Pool - len(p.idle) - p.opening, p.failures
}

// ask returns up to n tickets.
func (p *clientPool) ask(done <-chan struct{}, n int) []poolTicket {
	p.mu.Lock()
	p.asked, p.counted = n, false
	p.mu.Unlock()
	p.x.mu.Lock()
	s := p.x.control
	p.x.mu.Unlock()
	if s == nil || s.send(control{Kind: kindTickets, Count: n}) != nil {
		return nil
	}
	late := time.NewTimer(poolTimeout)
	defer late.Stop()
	select {
	case <-done:
		return nil
	case list := <-p.tickets:
		p.mu.Lock()
		defer p.mu.Unlock()
		p.opening += len(list)
		return list
	case <-late.C: // an older gateway, or one that gives none now
		p.failed(errors.New("the gateway has given no ticket"))
		return nil
	}
}

// got takes the tickets that the gateway has given, as many as it was asked for.
func (p *clientPool) got(list []poolTicket) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list = list[:min(len(list), p.asked)]
	if p.asked = 0; len(list) == 0 {
		return
	}
	select {
	case p.tickets <- list:
	default: // there is a late answer to the request before
	}
}

// failed records that a connection has ended. err is nil if that was no failure.
func (p *clientPool) failed(err error) {
	p.mu.Lock()
	warn := err != nil && !p.warned && !p.closed
	p.warned = p.warned || warn
	switch {
	case err == nil:
		p.failures = 0
	case !p.counted:
		p.failures++
		p.counted = true
	}
	p.mu.Unlock()
	if warn {
		p.x.client.log().Warn("no pool connection to the gateway; requests use the session", "gateway", p.gateway.Name, "error", err.Error())
	}
	p.notify()
}

func (p *clientPool) notify() {
	select {
	case p.change <- struct{}{}:
	default:
	}
}

// open opens a pool connection by a ticket, and returns when a request has taken it or it has ended.
func (p *clientPool) open(ctx context.Context, t poolTicket) {
	began := time.Now()
	r, err := p.connect(ctx, t)
	p.mu.Lock()
	p.opening--
	p.mu.Unlock()
	p.notify() // it has counted twice until now, and requests may have taken others
	if err == nil {
		err = p.wait(r, t.ID, began)
	}
	if ctx.Err() != nil {
		err = nil
	}
	p.failed(err)
}

// connect opens a pool connection and lists it.
func (p *clientPool) connect(ctx context.Context, t poolTicket) (*readyConn, error) {
	budget := p.x.client.Budget
	if !budget.Take(1) {
		return nil, fmt.Errorf("all %d descriptors for connections are taken", budget.Limit)
	}
	if len(t.Ticket) != len(ticket{}) {
		budget.Give(1)
		return nil, fmt.Errorf("the gateway has given a ticket of %d bytes", len(t.Ticket))
	}
	dialing, cancel := context.WithTimeout(ctx, poolTimeout)
	defer cancel()
	c, err := p.gateway.DialPool(dialing)
	if err != nil {
		budget.Give(1)
		return nil, err
	}
	r := &readyConn{conn: tunnel.NewConn(c), readDone: make(chan struct{})}
	keepAlive(c)
	p.mu.Lock()
	_, twice := p.idle[t.ID]
	if !twice && !p.closed {
		p.idle[t.ID] = r // before the gateway can use it
	} else {
		err = errors.New("the gateway has given two tickets the same number, or the session has ended")
	}
	p.mu.Unlock()
	if err == nil {
		_ = c.SetWriteDeadline(time.Now().Add(poolTimeout))
		if _, err = c.Write(append([]byte(poolPrefix), t.Ticket...)); err == nil {
			err = c.SetWriteDeadline(time.Time{})
		}
		if err != nil && p.remove(t.ID, r) {
			err = fmt.Errorf("the ticket could not be sent: %w", err)
		} else if err != nil {
			err = nil // a request has taken it, and take finds the failure
		}
	}
	if err != nil {
		p.discard(r)
		return nil, err
	}
	return r, nil
}

// remove reports whether r was listed.
func (p *clientPool) remove(id uint64, r *readyConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.idle[id] != r {
		return false
	}
	delete(p.idle, id)
	return true
}

func (p *clientPool) discard(r *readyConn) {
	_ = r.conn.Close()
	p.x.client.Budget.Give(1)
}

// errPoolEnded is the error of a pool connection that ends as soon as it was opened.
var errPoolEnded = errors.New("the gateway has closed it: its listener may lack the protocol " + PoolProtocolName + ", another replica got it, or it came from another address than the session")

// wait returns when a request has taken r or r has ended. The error is for one that ended at once.
func (p *clientPool) wait(r *readyConn, id uint64, began time.Time) error {
	var b [1]byte
	n, err := r.conn.Read(b[:])
	if p.remove(id, r) {
		p.discard(r)
		switch {
		case n > 0:
			return errors.New("something was sent before a request: an HTTP server in front of the gateway may have answered, which carries no pool connections")
		case time.Since(began) < poolSteady:
			return errPoolEnded
		}
		return nil
	}
	r.fit = n == 0 && errors.Is(err, os.ErrDeadlineExceeded)
	close(r.readDone)
	return nil
}

// take returns the pool connection of a request, and nil if it has ended.
func (p *clientPool) take(id string) *poolStream {
	n, err := strconv.ParseUint(id, 10, 64)
	if err != nil {
		return nil
	}
	p.mu.Lock()
	r := p.idle[n]
	if r == nil {
		p.mu.Unlock()
		return nil
	}
	delete(p.idle, n)
	p.mu.Unlock()
	_ = r.conn.SetReadDeadline(time.Unix(1, 0))
	<-r.readDone
	if !r.fit || r.conn.SetReadDeadline(time.Time{}) != nil {
		p.discard(r)
		return nil
	}
	st := &poolStream{Stream: r.conn}
	p.x.streams.Add(1)
	st.ended = func(tunnel.End) {
		p.x.streams.Add(-1)
		p.x.client.Budget.Give(1)
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.used, st)
	}
	p.mu.Lock()
	closed := p.closed
	if !closed {
		p.used[st] = struct{}{}
	}
	p.mu.Unlock()
	if closed {
		_ = st.Close()
		return nil
	}
	return st
}

// close ends all connections with the session, as streams end.
func (p *clientPool) close() {
	p.mu.Lock()
	p.closed = true
	idle, used := slices.Collect(maps.Values(p.idle)), p.used
	p.used = map[*poolStream]struct{}{}
	p.mu.Unlock()
	for _, r := range idle {
		_ = r.conn.SetReadDeadline(time.Unix(1, 0)) // wait discards it
	}
	for st := range used {
		st.kill(tunnel.Reset)
	}
}

// idleCount returns how many connections wait.
func (p *clientPool) idleCount() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.idle)
}

type poolStreamKey struct{}

// AdmitList implements connect.Service. The gateway asks for the control stream on behalf of the
// connector's own request, which is no loop. The answer to a request with a pool connection says
// whether that is used. The caller that the gateway names is for the log alone.
func (s *service) AdmitList(ctx context.Context, req *tunnel.Request, list *connect.HeaderList) (context.Context, connect.Fields, error) {
	if isControl(list.Authority) {
		return new(connect.Protocol).AdmitList(ctx, req, list)
	}
	ctx, fields, err := s.Protocol.AdmitList(ctx, req, list)
	req.Unverified = connect.UnverifiedHeaders(list.Fields)
	id, n := list.Fields.Get(poolField)
	if err != nil || n != 1 || s.pool == nil {
		return ctx, fields, err
	}
	st := s.pool.take(id)
	if st == nil {
		return ctx, fields, nil
	}
	return context.WithValue(ctx, poolStreamKey{}, st), append(fields, connect.Field{Name: poolField, Value: id}), nil
}

// overPool serves req over the pool connection that it came with, if any. The context that it
// returns does not end with the stream that req came on.
func (x *clientSession) overPool(ctx context.Context, req *tunnel.Request) (_ context.Context, done func()) {
	st, ok := ctx.Value(poolStreamKey{}).(*poolStream)
	if !ok {
		return ctx, func() {}
	}
	req.RequireTLS = !x.client.insecure(req)
	accept, accepted := req.Accept, false
	req.Accept = func() (tunnel.Stream, error) {
		stream, err := accept()
		if err != nil {
			return nil, err
		}
		accepted = true
		_ = stream.Close() // its answer is all that it was for
		return st, nil
	}
	return context.WithoutCancel(ctx), func() {
		if !accepted {
			_ = st.Close()
		}
	}
}

// insecure reports whether the name of req may be served over pool connections although what
// the client sends is not TLS: all that expose it say so.
func (c *Client) insecure(req *tunnel.Request) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	found := false
	for i := range c.names {
		r := &c.names[i]
		if !r.Name.Matches(req.Name) || r.Port != 0 && req.Port != 0 && r.Port != req.Port {
			continue
		}
		if found = true; !r.Insecure {
			return false
		}
	}
	return found
}

// A servedStream is a stream that counts for its session until it has ended.
type servedStream struct {
	*h2.Stream
	left func()
}

// Close implements net.Conn.
func (s *servedStream) Close() error {
	s.left()
	return s.Stream.Close()
}

// Abort implements tunnel.Aborter.
func (s *servedStream) Abort() error {
	s.left()
	return s.Stream.Abort()
}

// TunnelBegan implements tunnel.TunnelWatcher.
func (*servedStream) TunnelBegan(func(tunnel.Reason)) {}

// TunnelEnded implements tunnel.TunnelWatcher.
func (s *servedStream) TunnelEnded(tunnel.End) { s.left() }

var _ tunnel.TunnelWatcher = (*servedStream)(nil)
