package reverse

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/tunnel"
)

// A serverSession is one session of a connector. It implements Session and tunnel.Carrier.
type serverSession struct {
	server  *Server
	req     *tunnel.Request
	id      uint64
	since   time.Time
	carrier *carrierConn
	dialer  h2.Dialer     // used once ready is closed
	ready   chan struct{} // closed once the control stream is open
	gone    chan struct{} // closed where the session ends
	streams atomic.Int64
	in, out atomic.Int64 // bytes to and from the connector
	killed  atomic.Pointer[tunnel.Reason]
	missed  atomic.Int64 // when a request got no answer in time, by clock; 0 means that all did

	sending sync.Mutex // held by sendResults
	pool    pool

	tickets    [][32]byte // hashes of those that were issued; guarded by the server's mu
	lastPoolID uint64     // guarded by the server's mu
	listBytes  int        // that the owner is charged for; guarded by the server's mu

	parts []Registration // of a list that is not complete; of the goroutine that reads the control stream

	mu        sync.Mutex // guards what follows
	connector string
	control   *controlStream // nil before it is open
	draining  bool
	asked     []Registration // the names that the connector wants to serve
	refused   int            // how many of them were refused
	over      []Result       // of names beyond maxNamesOf
	results   []Result       // of all names
	changes   uint64         // counts the changes of results
	sent      uint64         // the last change that the connector has
	members   map[memberKey]*Membership
}

// serve runs the session to its end. Its steps are functions of their own, so that the stack of an
// idle session stays small.
func (x *serverSession) serve(ctx context.Context) error {
	defer x.leaveAll()
	if is, err := x.begin(); err != nil || !is {
		return err
	}
	defer x.carrier.watch(x.caught)()
	err := x.serveControl(ctx)
	if x.carrier.dead.Load() {
		return errDead
	}
	return err
}

// begin reads the hello and answers it. is reports whether there is a session then.
func (x *serverSession) begin() (is bool, err error) {
	_ = x.carrier.SetDeadline(time.Now().Add(headTimeout))
	var h hello
	err = readJSON(x.carrier.early, &h)
	if err == nil && h.Version != version {
		err = tunnel.Refusef(tunnel.Unsupported, "reverse: version %d of the protocol, want %d", h.Version, version)
	}
	if err != nil {
		_ = writeJSON(x.carrier, welcome{Version: version, Error: publicError(err)})
		return false, err
	}
	if slices.Contains(h.Have, x.server.Replica()) {
		return false, writeJSON(x.carrier, welcome{Version: version, Replica: x.server.Replica(), Same: true})
	}
	x.mu.Lock()
	x.connector = clip(h.Connector)
	x.mu.Unlock()
	if err := x.hold(listBytes(h.Register)); err != nil {
		_ = writeJSON(x.carrier, welcome{Version: version, Error: publicError(err)})
		return false, err
	}
	x.register(h.Register)
	w := welcome{Version: version, Replica: x.server.Replica()}
	x.mu.Lock()
	w.Names, x.sent = x.results, x.changes
	x.mu.Unlock()
	if err := writeLine(x.carrier, w, maxAnswer); err != nil {
		return false, err
	}
	return true, x.carrier.SetDeadline(time.Time{})
}

// serveControl opens the control stream and reads it to its end, which is that of the session.
func (x *serverSession) serveControl(ctx context.Context) error {
	s, err := x.openControl(ctx)
	if err != nil {
		return err
	}
	defer x.left(s)
	defer x.background(func() { _ = x.sendResults() })() // changes since the welcome
	defer s.ping(x.carrier, x.caught)()
	return s.read(maxLine, x.handle)
}

func (x *serverSession) openControl(ctx context.Context) (*controlStream, error) {
	x.dialer.Proxy, x.dialer.Dialer, x.dialer.Via = "connector of "+tunnel.Clip(x.req.Peer.ID), &oneConn{conn: x.carrier}, x.server.via()
	x.dialer.Sole, x.dialer.Parallel, x.dialer.Streams = true, 1, maxStreams
	x.dialer.Idle, x.dialer.Ping, x.dialer.Pong = math.MaxInt64/4, deadAfter, 2*deadAfter // the control stream is first
	opening, cancel := context.WithTimeout(ctx, headTimeout)
	c, _, err := x.dialer.Open(opening, &h2.Head{Authority: net.JoinHostPort(controlName.String(), "1")})
	cancel()
	if err != nil {
		return nil, fmt.Errorf("reverse: the control stream was not opened: %v", err) // its Reason is about a dial
	}
	close(x.ready)
	s := &controlStream{conn: c}
	x.mu.Lock()
	x.control = s
	draining := x.server.isDraining()
	x.mu.Unlock()
	if draining {
		x.sendDrain()
	}
	x.server.log().Info("connector joined", "owner", x.req.Peer.ID, "source", x.req.Source.String(), "connector", x.connectorName(), "names", x.memberCount())
	return s, nil
}

// left logs the end of the session and closes the control stream.
func (x *serverSession) left(s *controlStream) {
	x.server.log().Info("connector left", "owner", x.req.Peer.ID, "source", x.req.Source.String(), "connector", x.connectorName(), "lasted", time.Since(x.since).Round(time.Microsecond))
	_ = s.conn.Close()
}

// background runs f in a goroutine, which wait waits for.
func (x *serverSession) background(f func()) (wait func()) {
	var running sync.WaitGroup
	running.Go(func() {
		defer func() {
			if v := recover(); v != nil {
				x.caught(v)
			}
		}()
		f()
	})
	return running.Wait
}

// caught logs a panic, and ends the session.
func (x *serverSession) caught(v any) {
	x.server.caught(v)
	_ = x.carrier.Close()
}

func (s *Server) isDraining() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draining
}

// handle handles one line of the control stream.
func (x *serverSession) handle(c *control) error {
	switch c.Kind {
	case kindRegister:
		list, complete, err := x.takeList(c)
		if err != nil || !complete {
			return err
		}
		x.register(list)
		// The stream is not read meanwhile, so that a flood fills the buffers of the connector.
		time.Sleep(min(namesEvery*time.Duration(1+len(list)/100), time.Second))
		return x.sendResults()
	case kindDrain:
		x.mu.Lock()
		x.draining = true
		for _, m := range x.members {
			m.Drain()
		}
		x.mu.Unlock()
		x.stopPool()
	case kindTickets:
		return x.giveTickets(c.Count)
	}
	return nil
}

func (x *serverSession) send(c control) error {
	x.mu.Lock()
	s := x.control
	x.mu.Unlock()
	if s == nil {
		return nil
	}
	return s.send(c)
}

// sendDrain tells the connector that this gateway is about to stop. It does not wait.
func (x *serverSession) sendDrain() {
	go func() {
		defer func() {
			if v := recover(); v != nil {
				x.server.caught(v)
			}
		}()
		_ = x.send(control{Kind: kindDrain})
	}()
}

// missedAfter is how long a request must have waited in vain for the session to count as silent.
const missedAfter = time.Second

// Silent reports whether a request got no answer in time and no byte has come since. The path may be
// dead, or only slow: other sessions are tried first, and this one if there are none.
func (x *serverSession) Silent() bool {
	missed := x.missed.Load()
	return missed != 0 && x.carrier.heard.Load() < missed
}

// Open implements Session.
func (x *serverSession) Open(ctx context.Context, req *tunnel.Request, reg *Registration) (net.Conn, error) {
	select {
	case <-x.ready:
	case <-x.gone:
		return nil, ErrEnded
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	to := net.JoinHostPort(reg.Name.Suffix.String(), strconv.Itoa(int(max(reg.Port, 1))))
	fields := callerFields(req)
	var ready net.Conn
	var id string
	if reg.raw {
		if ready, id = x.takePool(); ready != nil {
			fields = append(fields, connect.Field{Name: poolField, Value: id})
		}
	}
	x.streams.Add(1)
	var first []byte
	if reg.raw && ready == nil {
		first = req.FirstBytes
	}
	asked := clock()
	c, answer, err := x.dialer.OpenWith(ctx, &h2.Head{Authority: to, Fields: fields}, first)
	if err == nil && ready != nil {
		if used, n := answer.Get(poolField); n == 1 && used == id {
			_ = c.Close()
			return x.newPoolStream(ready), nil
		}
	}
	if ready != nil {
		_ = ready.Close()
	}
	if err != nil {
		if now := clock(); ctx.Err() != nil && time.Duration(now-asked) >= missedAfter && x.carrier.heard.Load() < asked {
			x.missed.Store(now)
		}
		x.streams.Add(-1)
		return nil, err
	}
	st, ok := c.(*h2.Stream)
	if !ok {
		_ = c.Close()
		x.streams.Add(-1)
		return nil, fmt.Errorf("reverse: a %T is no stream of HTTP/2", c)
	}
	return &sessionStream{Stream: st, session: x}, nil
}

// A sessionStream is a stream that counts for its session until it is closed or aborted.
type sessionStream struct {
	*h2.Stream
	session *serverSession
	once    sync.Once
}

func (s *sessionStream) left() { s.once.Do(func() { s.session.streams.Add(-1) }) }

// Read implements net.Conn.
func (s *sessionStream) Read(b []byte) (int, error) {
	n, err := s.Stream.Read(b)
	s.session.out.Add(int64(n))
	return n, err
}

// WaitPush implements tunnel.Pusher.
func (s *sessionStream) WaitPush(wake func(), push func([][]byte) int) (ready bool) {
	return s.Stream.WaitPush(wake, func(run [][]byte) int {
		n := push(run)
		s.session.out.Add(int64(n))
		return n
	})
}

// Write implements net.Conn.
func (s *sessionStream) Write(b []byte) (int, error) {
	n, err := s.Stream.Write(b)
	s.session.in.Add(int64(n))
	return n, err
}

// WriteFrom implements tunnel.Puller.
func (s *sessionStream) WriteFrom(b []byte, source func([][]byte) int) (int, error) {
	n, err := s.Stream.WriteFrom(b, func(run [][]byte) int {
		n := source(run)
		s.session.in.Add(int64(n))
		return n
	})
	s.session.in.Add(int64(n))
	return n, err
}

// Close implements net.Conn.
func (s *sessionStream) Close() error {
	s.left()
	return s.Stream.Close()
}

// Abort implements tunnel.Aborter.
func (s *sessionStream) Abort() error {
	s.left()
	return s.Stream.Abort()
}

// Streams implements Session.
func (x *serverSession) Streams() int { return int(x.streams.Load()) }

// Security implements Session. It is Mutual where the session is inside of TLS, or does not leave
// the host.
func (x *serverSession) Security() tunnel.Security {
	if x.req.TLS != nil || x.req.Source.Addr().IsLoopback() || x.req.Process != nil {
		return tunnel.Mutual
	}
	return tunnel.Plain
}

// Progress implements tunnel.Carrier.
func (x *serverSession) Progress() (in, out int64, moved time.Time) {
	return x.out.Load(), x.in.Load(), time.Now().Add(-x.carrier.silent())
}

// Kill implements tunnel.Carrier.
func (x *serverSession) Kill(why tunnel.Reason) {
	x.killed.CompareAndSwap(nil, &why)
	x.carrier.abort()
}

// end returns the End of a session that has ended with err.
func (x *serverSession) end(err error) tunnel.End {
	e := tunnel.End{Reason: tunnel.Done, In: x.out.Load(), Out: x.in.Load()}
	refusal, refused := errors.AsType[*tunnel.Error](err)
	switch why := x.killed.Load(); {
	case why != nil:
		e.Reason = *why
	case refused:
		e.Reason, e.Err = refusal.Reason, err
	case errors.Is(err, errDead):
		e.Reason, e.Err = tunnel.Idle, err
	case err != nil && !errors.Is(err, io.EOF) && !x.isDraining():
		e.Reason, e.Err, e.ByClient = tunnel.Reset, err, true
	}
	return e
}

// isDraining reports whether the connector has said that it is about to end the session.
func (x *serverSession) isDraining() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.draining
}

func (x *serverSession) connectorName() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.connector
}

func (x *serverSession) memberCount() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.members)
}

func (x *serverSession) info() SessionInfo {
	i := SessionInfo{
		ID: x.id, Owner: x.req.Peer.ID, Source: x.req.Source, Listener: x.req.Listener, Proto: x.req.Proto,
		Secure: x.req.TLS != nil, Since: x.since, Streams: x.Streams(), In: x.out.Load(), Out: x.in.Load(),
		Pool: x.poolCount(),
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	i.Connector, i.Draining = x.connector, x.draining
	for _, m := range x.members {
		i.Names = append(i.Names, m.Registration)
	}
	for _, r := range x.results {
		if r.Reason != "" {
			i.Refused = append(i.Refused, r)
		}
	}
	slices.SortFunc(i.Names, func(a, b Registration) int {
		return cmp.Or(cmp.Compare(a.Name.String(), b.Name.String()), cmp.Compare(a.Port, b.Port))
	})
	return i
}

// A oneConn is a Dialer that returns one connection, once.
type oneConn struct {
	mu   sync.Mutex
	conn net.Conn // nil once it was returned
}

// DialContext implements tunnel.Dialer.
func (o *oneConn) DialContext(context.Context, string, string) (net.Conn, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	c := o.conn
	if o.conn = nil; c == nil {
		return nil, ErrEnded
	}
	return c, nil
}

// publicError returns the text of err for the other side, which may learn of its own names, and of
// nothing else at this gateway.
func publicError(err error) string {
	if errors.Is(err, errTaken) { // and policies would let the caller have it
		return "it belongs to another owner, and stays so for a while after the owner's last session"
	}
	switch tunnel.ReasonOf(err) {
	case tunnel.Denied:
		return "no policy of the gateway lets you register it"
	case tunnel.BadRequest, tunnel.TooLarge, tunnel.Unsupported, tunnel.Overload:
		return clip(err.Error())
	}
	return "the gateway can't take it"
}

// clip shortens what the other side has sent.
func clip(s string) string {
	if len(s) > maxText {
		return s[:maxText]
	}
	return s
}

var (
	_ tunnel.Handler     = (*Server)(nil)
	_ Session            = (*serverSession)(nil)
	_ tunnel.Carrier     = (*serverSession)(nil)
	_ tunnel.Stream      = (*sessionStream)(nil)
	_ tunnel.Multiplexed = (*sessionStream)(nil)
)
