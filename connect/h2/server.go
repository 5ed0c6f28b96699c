package h2

import (
	"context"
	"errors"
	"io"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

// A server is one connection of a Protocol.
type server struct {
	p        *Protocol
	c        *conn
	tc       *tunnel.Conn
	requests mux.Server
	ctx      context.Context // ends with the connection
	running  sync.WaitGroup
	timer    *time.Timer

	// Guarded by c.mu.
	stopped   bool  // ServeConn is about to return
	handlers  int   // requests whose Handler has not returned
	idleSince int64 // when the last stream ended, by mux.Clock
	goAway    mux.GoAway
}

var _ side = (*server)(nil)

// begin sends the connection preface and the first frames, before any other.
func (c *conn) begin(settings ...http2.Setting) {
	c.mu.Lock()
	defer c.mu.Unlock()
	early := append([]byte(nil), c.control.Bytes()...) // a GOAWAY, where the drain began before the connection
	c.control.Reset()
	if c.client {
		c.control.WriteString(preface)
	}
	_ = c.fw.WriteSettings(settings...)
	_ = c.fw.WriteWindowUpdate(0, connWindow-65535)
	c.control.Write(early)
	c.awaitsSettingsAck, c.pinged = true, mux.Clock()
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

// headers implements side: it begins a request, or ends the body of one.
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
	case b.id <= c.last && c.wasJustReset(b.id):
		return c.charge(costRequest+b.cost(), "too many HEADERS on streams that are closed")
	case b.id <= c.last:
		return protocolError(http2.ErrCodeStreamClosed, "HEADERS on stream %d, which is closed", b.id)
	}
	if s.goAway.Finished() {
		c.resetID(b.id, http2.ErrCodeRefusedStream) // the client may try elsewhere
		s.reportRefused(nil, refuse(tunnel.Drain, "a request after the last GOAWAY"))
		return c.charge(costRequest+b.cost(), "too many requests on a connection that is about to end")
	}
	c.last = b.id
	if s.idleSince == 0 {
		s.idleSince = mux.Clock() // from here on a connection may be idle
	}
	if wrong := b.malformed(); wrong != "" {
		c.resetID(b.id, http2.ErrCodeProtocol)
		s.reportRefused(nil, refuse(tunnel.BadRequest, "%s", wrong))
		return c.charge(costReset+b.cost(), "too many malformed requests")
	}
	if len(c.streams) >= s.p.streams() || s.handlers >= s.p.streams() {
		c.resetID(b.id, http2.ErrCodeRefusedStream)
		s.reportRefused(nil, refuse(tunnel.Overload, "%d streams are open on this connection, the limit", len(c.streams)))
		return c.charge(costReset+b.cost(), "too many requests over the limit of streams")
	}
	cost := costRequest + b.cost()
	if err := c.charge(cost, "too many requests that are not accepted"); err != nil {
		return err
	}
	st := c.newStream(b.id)
	st.cost = uint16(cost)
	st.began = mux.Clock()
	if b.end {
		st.ended, st.readErr = true, io.EOF
	}
	switch head := b.List; {
	case b.Large():
		s.refuseUnserved(st, refuse(tunnel.TooLarge, "a header list of more than %d bytes or %d fields", maxList, connect.MaxListFields))
	case head.Method != "CONNECT":
		err := refuse(tunnel.BadMethod, "method %q, want CONNECT", tunnel.Clip(head.Method))
		if st.discardedBody = newDiscardedBody(&head, s, err); st.discardedBody == nil {
			c.reset(st, http2.ErrCodeProtocol)
		} else if b.end {
			return st.discardedBody.data(st, 0, true)
		}
	default:
		s.handlers++
		s.running.Add(1)
		ctx, cancel := context.WithCancel(s.ctx)
		st.cancel = cancel
		go s.serve(ctx, st, &head)
	}
	return nil
}

// trailers handles a second header block of a stream. Nothing follows a CONNECT but
// DATA, RFC 9113 section 8.5.
func (s *server) trailers(st *Stream, b *block) error {
	code := http2.ErrCodeProtocol
	switch {
	case st.ended:
		code = http2.ErrCodeStreamClosed
	case st.discardedBody != nil && b.end && b.wrong == "" && b.IsTrailers():
		return st.discardedBody.data(st, 0, true)
	}
	s.c.reset(st, code)
	return s.c.charge(costReset+b.cost(), "too many stream errors")
}

// serve has the Handler answer one request.
func (s *server) serve(ctx context.Context, st *Stream, head *Head) {
	defer s.running.Done()
	req := s.tc.NewRequest(s.p.Name())
	req.Start = time.Now()
	if req.Peer.Revoked() != nil {
		s.drain() // whoever has a new certificate connects anew
	}
	peer := req.Source
	defer func() {
		v := recover()
		if v != nil {
			s.recovered(st, req, v)
		}
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		s.handlers--
		st.cancel()
	}()
	err := s.requests.Serve(ctx, req, head, requestStream{s, st})
	if err == nil {
		return
	}
	s.report(req, err)
	// A load balancer's connection must not end for what one of its clients guesses.
	if errors.Is(err, connect.ErrCredentials) && req.Source == peer {
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		if err := s.c.charge(mux.CostGuess, "too many wrong credentials"); err != nil {
			s.c.failLocked(err)
		}
	}
}

// recovered ends the stream of a request whose Handler panicked. It ends the whole
// connection only if the panic cannot be reported.
func (s *server) recovered(st *Stream, req *tunnel.Request, v any) {
	s.noteRequest()
	s.c.mu.Lock()
	s.c.reset(st, http2.ErrCodeInternal)
	r, ok := s.requests.Handler.(tunnel.Refuser)
	s.c.mu.Unlock()
	if ok {
		r.Panicked(req, v)
		return
	}
	s.c.fail(s.c.caught(v))
}

// noteRequest notes that a request was made: from here on the connection's time
// limits are its own.
func (s *server) noteRequest() {
	if !s.c.input.hasRequest.Swap(true) {
		s.c.input.deadline(time.Time{})
	}
}

// A requestStream is the stream of a request that a Handler may serve.
type requestStream struct {
	s  *server
	st *Stream
}

// Accept implements mux.RequestStream.
func (r requestStream) Accept(fields connect.Fields) (tunnel.Stream, error) {
	s, st := r.s, r.st
	s.noteRequest()
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.c.streams[st.id] != st || st.finished {
		return nil, refuse(tunnel.Gone, "the client left before it was answered: %w", orReset(st.writeErr))
	}
	s.c.meter.GiveBack(float64(st.cost))
	st.cost = 0
	s.c.writeHead(st.id, connect.Fields{{Name: ":status", Value: "200"}}, fields, false)
	return st, nil
}

// Refuse implements mux.RequestStream.
func (r requestStream) Refuse(refusal connect.Refusal) {
	s := r.s
	s.noteRequest()
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.c.meter.GiveBack(costRequest - mux.CostRefused)
	s.answer(r.st, refusal)
}

func orReset(err error) error {
	if err == nil {
		return &ResetError{}
	}
	return err
}

// answer sends a refusal on the stream. The caller holds c.mu.
func (s *server) answer(st *Stream, r connect.Refusal) {
	c := s.c
	if c.streams[st.id] != st || st.finish || st.finished {
		return
	}
	fields := r.Fields(s.p.ProxyName)
	c.writeHead(st.id, connect.Fields{{Name: ":status", Value: strconv.Itoa(r.Status)}}, fields, false)
	// The body is sent like any data, as the windows allow.
	st.closed, st.finish, st.discardedBody = true, true, nil
	st.pending, st.answered = []byte(r.Body()), mux.Clock()
	c.discard(st)
	c.enlist(st)
}

// refuseUnserved refuses a stream that no Handler has seen. The caller holds c.mu.
func (s *server) refuseUnserved(st *Stream, err error) {
	s.answer(st, s.requests.Service.Refusal(nil, err))
	s.reportRefused(nil, err)
}

// reportRefused reports a request that was refused here to the Server, on a
// goroutine of its own. A nil req stands for one that was not read. The caller
// holds c.mu.
func (s *server) reportRefused(req *tunnel.Request, err error) {
	if s.stopped || s.c.err != nil {
		return
	}
	s.running.Go(func() { // without c.mu
		defer func() {
			if v := recover(); v != nil {
				s.c.fail(s.c.caught(v))
			}
		}()
		s.noteRequest()
		if req == nil {
			req = s.tc.NewRequest(s.p.Name())
			req.Start = time.Now()
		}
		s.report(req, err)
	})
}

func (s *server) report(req *tunnel.Request, err error) {
	if r, ok := s.requests.Handler.(tunnel.Refuser); ok {
		r.Refused(req, err)
	}
}

// settings implements side.
func (s *server) settings() {}

// peerGoAway implements side: a client that leaves opens no more streams.
func (s *server) peerGoAway(uint32) {}

// unwritable implements side.
func (s *server) unwritable() {}

// dropped implements side.
func (s *server) dropped(*Stream) {
	s.idleSince = mux.Clock()
	if s.goAway.Finished() && len(s.c.streams) == 0 {
		s.done()
	}
}

// done ends a connection that has drained. The caller holds c.mu.
func (s *server) done() {
	if s.c.err == nil {
		s.c.failLocked(errDrained)
	}
}

// drain sends the first GOAWAY.
func (s *server) drain() {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.c.err != nil {
		return
	}
	now := mux.Clock()
	if !s.goAway.Start(now) {
		return
	}
	_ = s.c.fw.WriteGoAway(1<<31-1, http2.ErrCodeNo, nil)
	s.c.work.Signal()
	s.timer.Reset(s.goAway.Left(now))
}

// tick enforces the connection's time limits and sends what is due.
func (s *server) tick() {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	defer s.c.recovered()
	c := s.c
	if c.err != nil || s.stopped {
		return
	}
	now := mux.Clock()
	if c.settingsTimedOut(now) {
		return
	}
	c.replenish() // memory may be short no longer
	c.tell()
	heard := time.Duration(now - c.lastFrame.Load())
	next := pongTimeout / 3
	switch {
	case s.goAway.Started() && !s.goAway.Finished():
		if left := s.goAway.Left(now); left > 0 {
			next = left
			break
		}
		s.goAway.Finish()
		_ = c.fw.WriteGoAway(c.last, http2.ErrCodeNo, nil)
		c.work.Signal()
		if len(c.streams) == 0 {
			s.done()
		}
	case heard >= pingInterval+pongTimeout && c.pinged != 0 && !c.awaitsSettingsAck:
		c.failLocked(errDead)
	case heard >= pingInterval && s.c.input.hasRequest.Load():
		c.sendPing()
	case len(c.streams) == 0 && s.handlers == 0 && s.idleSince != 0 && time.Duration(now-s.idleSince) >= mux.OrDefault(s.p.Idle, DefaultIdle):
		c.failLocked(errIdle)
	}
	for _, st := range c.streams {
		switch {
		case st.discardedBody != nil && time.Duration(now-st.began) >= requestTimeout:
			st.discardedBody.refuse(st)
		case st.answered != 0 && time.Duration(now-st.answered) >= requestTimeout:
			c.reset(st, http2.ErrCodeCancel) // the client does not read its refusal
		}
	}
	s.timer.Reset(next)
}

// A discardedBody reads the body of a request that is not a CONNECT. The answer is
// sent after its end, so that a body that violates HTTP is reported first.
type discardedBody struct {
	s    *server
	err  error
	want int64 // bytes by Content-Length; -1 where there is none
	got  int64
}

// newDiscardedBody returns nil for a malformed Content-Length.
func newDiscardedBody(head *Head, s *server, err error) *discardedBody {
	k := &discardedBody{s: s, err: err, want: -1}
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
func (k *discardedBody) data(st *Stream, n int, end bool) error {
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

func (k *discardedBody) refuse(st *Stream) { k.s.refuseUnserved(st, k.err) }
