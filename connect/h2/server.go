package h2

import (
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// A server is one connection of a Protocol.
type server struct {
	p       *Protocol
	c       *conn
	tc      *tunnel.Conn
	handler tunnel.Handler
	ctx     context.Context // ends with the connection
	running sync.WaitGroup
	timer   *time.Timer

	// Guarded by c.mu.
	over    bool  // ServeConn is about to return
	busy    int   // requests whose Handler has not returned
	since   int64 // when the last stream ended, nanoseconds of clock
	leaving bool  // GOAWAY was sent
	final   bool  // with the last stream's id: later ones were never there
	left    int64 // when leaving began
}

var _ side = (*server)(nil)

// begin sends what a side begins with. It must come before any other frame.
func (c *conn) begin(settings ...http2.Setting) {
	c.mu.Lock()
	defer c.mu.Unlock()
	early := append([]byte(nil), c.control.Bytes()...) // a drain that came first
	c.control.Reset()
	if c.client {
		c.control.WriteString(preface)
	}
	_ = c.fw.WriteSettings(settings...)
	_ = c.fw.WriteWindowUpdate(0, connWindow-65535)
	c.control.Write(early)
	c.settling, c.pinged = true, clock()
	c.work.Signal()
}

// first reads the first frame, which is SETTINGS (RFC 9113 section 3.4).
func (c *conn) first() error {
	h, err := c.fr.ReadFrameHeader()
	if err != nil {
		return c.readError(err)
	}
	if h.Type != http2.FrameSettings || h.Flags.Has(http2.FlagSettingsAck) {
		return protocolError(http2.ErrCodeProtocol, "the first frame is %v, not SETTINGS", h.Type)
	}
	f, err := c.fr.ReadFrameForHeader(h)
	if err != nil {
		return c.readError(err)
	}
	return c.other(f)
}

// preambleError says why a connection ended without a request.
func preambleError(n int64, err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return refuse(tunnel.HelloTimeout, "no request in time: %d bytes came", n)
	case n == 0:
		return refuse(tunnel.NoHello, "the client left without a byte: %w", err)
	case errors.Is(err, io.EOF):
		return refuse(tunnel.Gone, "the client left after %d bytes, before a request", n)
	}
	return refuse(tunnel.Gone, "the client left after %d bytes, before a request: %w", n, err)
}

// headers implements side: a request, or what must not come after one.
func (s *server) headers(b *block) error {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	if st := c.streams[b.id]; st != nil {
		return s.trailers(st, b)
	}
	b.Request()
	switch {
	case b.id%2 == 0:
		return protocolError(http2.ErrCodeProtocol, "HEADERS on stream %d, which is not a client's", b.id)
	case b.id <= c.last && c.justReset(b.id):
		return c.charge(costRequest+b.cost(), "too many HEADERS on streams that are closed")
	case b.id <= c.last:
		return protocolError(http2.ErrCodeStreamClosed, "HEADERS on stream %d, which is closed", b.id)
	}
	if s.final {
		c.resetID(b.id, http2.ErrCodeRefusedStream) // the client may try elsewhere
		s.refused(nil, refuse(tunnel.Drain, "a request after the last GOAWAY"))
		return c.charge(costRequest+b.cost(), "too many requests on a connection that is about to end")
	}
	c.last = b.id
	if s.since == 0 {
		s.since = clock() // from here on a connection may be idle
	}
	if wrong := b.malformed(); wrong != "" {
		c.resetID(b.id, http2.ErrCodeProtocol)
		s.refused(nil, refuse(tunnel.BadRequest, "%s", wrong))
		return c.charge(costReset+b.cost(), "too many malformed requests")
	}
	if len(c.streams) >= s.p.streams() || s.busy >= s.p.streams() {
		c.resetID(b.id, http2.ErrCodeRefusedStream)
		s.refused(nil, refuse(tunnel.Overload, "%d streams are open on this connection, the limit", len(c.streams)))
		return c.charge(costReset+b.cost(), "too many requests over the limit of streams")
	}
	cost := costRequest + b.cost()
	if err := c.charge(cost, "too many requests that are not accepted"); err != nil {
		return err
	}
	st := c.newStream(b.id)
	st.cost = uint16(cost)
	st.began = clock()
	if b.end {
		st.ended, st.readErr = true, io.EOF
	}
	switch head := b.List; {
	case b.Large():
		s.turnAway(st, refuse(tunnel.TooLarge, "a header list of more than %d bytes or %d fields", maxList, connect.MaxListFields))
	case head.Method != "CONNECT":
		err := refuse(tunnel.BadMethod, "method %q, want CONNECT", connect.Clip(head.Method))
		if st.sink = newSink(&head, s, err); st.sink == nil {
			c.reset(st, http2.ErrCodeProtocol)
		} else if b.end {
			return st.sink.data(st, 0, true)
		}
	default:
		s.busy++
		s.running.Add(1)
		ctx, cancel := context.WithCancel(s.ctx)
		st.cancel = cancel
		go s.serve(ctx, st, &head)
	}
	return nil
}

// trailers is a second header block of a stream. Nothing follows a CONNECT but
// DATA, RFC 9113 section 8.5.
func (s *server) trailers(st *Stream, b *block) error {
	code := http2.ErrCodeProtocol
	switch {
	case st.ended:
		code = http2.ErrCodeStreamClosed
	case st.sink != nil && b.end && b.wrong == "" && b.IsTrailers():
		return st.sink.data(st, 0, true)
	}
	s.c.reset(st, code)
	return s.c.charge(costReset+b.cost(), "too many stream errors")
}

// serve has the Handler answer one request.
func (s *server) serve(ctx context.Context, st *Stream, head *Head) {
	defer s.running.Done()
	req := s.tc.NewRequest(s.p.Name())
	req.Start = time.Now()
	defer func() {
		v := recover()
		if v != nil {
			s.recovered(st, req, v)
		}
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		s.busy--
		st.cancel()
	}()
	ctx, err := s.admit(ctx, req, head)
	if err != nil {
		s.begun()
		r := s.refusal(head, nil, err)
		s.refuse(st, &r)
		var guessing error
		if errors.Is(err, connect.ErrCredentials) {
			s.c.mu.Lock()
			guessing = s.c.charge(connect.CostGuess, "too many wrong credentials")
			s.c.mu.Unlock()
		}
		s.told(req, err)
		if guessing != nil {
			s.c.fail(guessing)
		}
		return
	}
	req.Accept = func() (tunnel.Stream, error) {
		err := s.accept(st, head)
		switch {
		case err != nil:
			return nil, err
		case head.Stream != nil:
			return head.Stream(st), nil
		}
		return st, nil
	}
	req.Refuse = func(err error) {
		s.begun()
		r := s.refusal(head, req, err)
		s.refuse(st, &r)
	}
	s.handler.ServeTunnel(ctx, req)
}

// recovered ends the stream of a request whose Handler panicked, and nothing
// else where there is somebody to tell.
func (s *server) recovered(st *Stream, req *tunnel.Request, v any) {
	s.begun()
	s.c.mu.Lock()
	s.c.reset(st, http2.ErrCodeInternal)
	r, ok := s.handler.(tunnel.Refuser)
	s.c.mu.Unlock()
	if ok {
		r.Panicked(req, v)
		return
	}
	s.c.fail(s.c.caught(v))
}

// begun notes that a request was made: from here on the connection's time
// limits are its own.
func (s *server) begun() {
	if !s.c.input.begun.Swap(true) {
		s.c.input.deadline(time.Time{})
	}
}

// admit judges a request before the Handler does.
func (s *server) admit(ctx context.Context, req *tunnel.Request, head *Head) (context.Context, error) {
	if head.Protocol != "" && s.p.Extended == nil {
		return ctx, refuse(tunnel.Unsupported, "extended CONNECT for %q", connect.Clip(head.Protocol))
	}
	if err := head.Check(); err != nil {
		return ctx, err
	}
	if head.Protocol != "" {
		return s.p.Extended(ctx, req, head)
	}
	ctx, err := s.p.rules().Admit(ctx, req, head.Authority, head.Fields)
	if err == nil && s.p.Head != nil {
		err = s.p.Head(ctx, req, head)
	}
	return ctx, err
}

// accept says yes.
func (s *server) accept(st *Stream, head *Head) error {
	s.begun()
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.c.streams[st.id] != st || st.finished {
		return refuse(tunnel.Gone, "the client left before it heard yes: %w", orReset(st.writeErr))
	}
	s.c.meter.GiveBack(float64(st.cost))
	st.cost = 0
	s.c.writeHead(st.id, connect.Fields{{Name: ":status", Value: "200"}}, head.Answer, false)
	return nil
}

func orReset(err error) error {
	if err == nil {
		return &ResetError{}
	}
	return err
}

// refusal is what the client hears of err. req is nil where it was not admitted.
func (s *server) refusal(head *Head, req *tunnel.Request, err error) connect.Refusal {
	if head.Refusal != nil {
		return head.Refusal(req, err)
	}
	r := s.p.rules().Refusal(req, err)
	if s.p.Status != nil {
		r.Status = s.p.Status(r)
	}
	return r
}

// refuse says no to a request that is as it should be.
func (s *server) refuse(st *Stream, r *connect.Refusal) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.c.meter.GiveBack(costRequest - connect.CostRefused)
	s.answer(st, r)
}

// answer says no to the stream. The caller holds c.mu.
func (s *server) answer(st *Stream, r *connect.Refusal) {
	c := s.c
	if c.streams[st.id] != st || st.finish || st.finished {
		return
	}
	fields := r.Fields(s.p.ProxyName)
	c.writeHead(st.id, connect.Fields{{Name: ":status", Value: strconv.Itoa(r.Status)}}, fields, false)
	// The line goes the way of any data, as the windows let it.
	st.closed, st.finish, st.sink = true, true, nil
	st.pending, st.answered = []byte(r.Body()), clock()
	c.discard(st)
	c.enlist(st)
}

// turnAway refuses a stream that no Handler was asked about. The caller holds
// c.mu.
func (s *server) turnAway(st *Stream, err error) {
	r := s.refusal(&Head{}, nil, err)
	s.answer(st, &r)
	s.refused(nil, err)
}

// refused has the Server know of a request that was refused here. The caller
// holds c.mu.
func (s *server) refused(req *tunnel.Request, err error) {
	if s.over || s.c.err != nil {
		return
	}
	s.running.Go(func() { // without c.mu
		defer func() {
			if v := recover(); v != nil {
				s.c.fail(s.c.caught(v))
			}
		}()
		s.begun()
		if req == nil {
			req = s.tc.NewRequest(s.p.Name())
			req.Start = time.Now()
		}
		s.told(req, err)
	})
}

func (s *server) told(req *tunnel.Request, err error) {
	if r, ok := s.handler.(tunnel.Refuser); ok {
		r.Refused(req, err)
	}
}

// settings implements side.
func (s *server) settings() {}

// goAway implements side: a client that leaves opens no more streams.
func (s *server) goAway(uint32) {}

// dropped implements side.
func (s *server) dropped(*Stream) {
	s.since = clock()
	if s.final && len(s.c.streams) == 0 {
		s.done()
	}
}

// done ends a connection that has drained. The caller holds c.mu.
func (s *server) done() {
	if s.c.err == nil {
		s.c.failLocked(errDrained)
	}
}

// drain sends the first GOAWAY, which says that there will be a last one:
// streams that are on their way are still served (RFC 9113 section 6.8).
func (s *server) drain() {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.leaving || s.c.err != nil {
		return
	}
	s.leaving, s.left = true, clock()
	_ = s.c.fw.WriteGoAway(1<<31-1, http2.ErrCodeNo, nil)
	s.c.work.Signal()
	s.timer.Reset(goodbye)
}

// goodbye is the time between the first GOAWAY and the last: a round trip.
const goodbye = 500 * time.Millisecond

// tick looks after a connection now and then.
func (s *server) tick() {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	defer s.c.recovered()
	c := s.c
	if c.err != nil || s.over {
		return
	}
	now := clock()
	if c.unsettled(now) {
		return
	}
	c.replenish() // memory may be short no longer
	heard := time.Duration(now - c.heard.Load())
	next := patient / 3
	switch {
	case s.leaving && !s.final:
		if left := goodbye - time.Duration(now-s.left); left > 0 {
			next = left
			break
		}
		s.final = true
		_ = c.fw.WriteGoAway(c.last, http2.ErrCodeNo, nil)
		c.work.Signal()
		if len(c.streams) == 0 {
			s.done()
		}
	case heard >= quiet+patient && c.pinged != 0 && !c.settling:
		c.failLocked(errDead)
	case heard >= quiet && s.c.input.begun.Load():
		c.sendPing()
	case len(c.streams) == 0 && s.busy == 0 && s.since != 0 && time.Duration(now-s.since) >= s.p.idle():
		c.failLocked(errIdle)
	}
	for _, st := range c.streams {
		switch {
		case st.sink != nil && time.Duration(now-st.began) >= blockTime:
			st.sink.refuse(st)
		case st.answered != 0 && time.Duration(now-st.answered) >= blockTime:
			c.reset(st, http2.ErrCodeCancel) // it does not read its refusal
		}
	}
	s.timer.Reset(next)
}

// A sink takes the body of a request that is not a CONNECT. The answer waits
// for its end, so that a client that gets HTTP wrong hears that first.
type sink struct {
	s    *server
	err  error
	want int64 // bytes by Content-Length; -1 where it says nothing
	got  int64
}

// newSink returns nil for a Content-Length that is none.
func newSink(head *Head, s *server, err error) *sink {
	k := &sink{s: s, err: err, want: -1}
	v, n := head.Fields.Get("content-length")
	if n == 0 {
		return k
	}
	var bad error
	if k.want, bad = strconv.ParseInt(v, 10, 64); bad != nil || n > 1 || k.want < 0 {
		return nil
	}
	return k
}

// data takes n bytes. The caller holds c.mu.
func (k *sink) data(st *Stream, n int, end bool) error {
	c := k.s.c
	k.got += int64(n)
	if k.want >= 0 && (k.got > k.want || end && k.got != k.want) { // RFC 9113 section 8.1.1
		c.reset(st, http2.ErrCodeProtocol)
		return c.charge(costReset, "too many stream errors")
	}
	if end {
		st.ended, st.readErr = true, io.EOF
	}
	if end || k.got > streamWindow/2 {
		k.refuse(st)
	}
	return nil
}

func (k *sink) refuse(st *Stream) { k.s.turnAway(st, k.err) }
