package h3

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

const (
	answerTimeout  = time.Second     // for the answer to be written
	drainedTimeout = 3 * time.Second // for the client to end a connection that has drained
	lastID         = 1<<62 - 4       // the highest number of a client's stream
)

// A serverConn is one connection of a Server.
type serverConn struct {
	s        *Server
	c        *conn
	a        *attempt
	tr       *quic.Transport
	requests mux.Server
	local    uint16
	tls      tunnel.EndedTLS // of the connection
	running  sync.WaitGroup  // requests whose Handler has not returned

	grown int64 // by which its window grew; guarded by s.mu

	mu         sync.Mutex // guards what follows
	timer      *time.Timer
	stopped    bool  // run is about to return
	hasRequest bool  // a request was made
	timedOut   bool  // the first request did not come in time
	streams    int   // that have not ended
	next       int64 // above the numbers of all streams that came
	idleSince  int64 // when the last stream ended, by mux.Clock
	goAway     mux.GoAway
}

func (k *serverConn) isServer() bool { return true }

// peerGoAway implements side. It does nothing: a client that leaves opens no more
// streams, and the number is that of a push.
func (k *serverConn) peerGoAway(uint64) *connError { return nil }

// run serves the connection until it and all its goroutines have ended.
func (k *serverConn) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { // the context of Serve ended
		defer k.c.recovered()
		k.c.fail(errClosed)
	})
	defer stop()
	k.serveStreams(ctx)
	stop()
	cancel()
	k.mu.Lock()
	k.stopped = true
	if k.timer != nil {
		k.timer.Stop()
	}
	begun, late := k.hasRequest, k.timedOut
	k.mu.Unlock()
	k.running.Wait()
	k.c.running.Wait()
	k.reportEnd(begun, late)
}

// serveStreams serves the connection's streams until it ends.
func (k *serverConn) serveStreams(ctx context.Context) {
	defer k.c.recovered()
	var more []uint64
	if len(k.s.Extended) > 0 {
		more = []uint64{settingExtendedConnect, 1, settingDatagrams, 1}
	}
	if err := k.c.begin(more...); err != nil {
		k.c.fail(err)
	}
	k.mu.Lock()
	k.timer = time.AfterFunc(k.tickEvery(), k.tick)
	k.mu.Unlock()
	k.c.running.Go(k.c.acceptUni)
	for {
		qs, err := k.c.qc.AcceptStream(k.c.qc.Context())
		if err != nil {
			return
		}
		k.running.Go(func() {
			defer k.c.recovered()
			k.serve(ctx, qs)
			qs.ReleaseStreamCredit() // only now may another stream take its place
		})
	}
}

// reportEnd reports a connection that broke the rules or made no request.
func (k *serverConn) reportEnd(begun, late bool) {
	err := k.c.cause()
	switch ce, ok := errors.AsType[*connError](err); {
	case ok:
		if p, ok := errors.AsType[*tunnel.Panic](ce.err); ok {
			k.s.logPanic(p)
		}
		k.s.reportAttempt(k.a, ce.err)
	case begun:
	case late:
		k.s.reportAttempt(k.a, refuse(tunnel.HelloTimeout, "no request in time"))
	case errors.Is(err, errClosed), errors.Is(err, errDrained):
		k.s.reportAttempt(k.a, refuse(tunnel.Drain, "the gateway is stopping"))
	default:
		k.s.reportAttempt(k.a, refuse(tunnel.NoHello, "a connection without a request: %w", err))
	}
}

// serve reads the request of one stream and calls the Handler.
func (k *serverConn) serve(ctx context.Context, qs quicStream) {
	if !k.countIn(int64(qs.StreamID())) {
		st := newStream(k.c, qs)
		st.reset(RequestRejected) // the client may try elsewhere
		k.s.report(k.newRequest(), refuse(tunnel.Drain, "a request after the last GOAWAY"))
		k.fail(k.c.charge(mux.CostRequest, "requests on a connection that is about to end"))
		return
	}
	st := newStream(k.c, qs)
	st.ended = k.countOut
	req := k.newRequest()
	if req.Peer.Revoked() != nil {
		k.drain() // whoever has a new certificate connects anew
	}
	defer func() {
		if v := recover(); v != nil {
			if st.shut() {
				st.reset(InternalError)
				k.countOut()
			}
			k.s.reportPanic(req, v)
		}
	}()
	if ce := k.c.charge(mux.CostRequest, "requests that are not accepted"); ce != nil {
		k.fail(ce)
		k.drop(st, ExcessiveLoad)
		return
	}
	list, cost, err := k.readRequest(st)
	if err != nil {
		k.unreadable(st, req, err)
		return
	}
	if list.Method != http.MethodConnect {
		k.refuseUnserved(st, req, refuse(tunnel.BadMethod, "method %q, want CONNECT", tunnel.Clip(list.Method)))
		return
	}
	if list.Protocol != "" && len(k.s.Extended) > 0 {
		k.c.expectDatagrams(st)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(qs.Context(), cancel)() // the client gave up
	err = k.requests.Serve(ctx, req, list, requestStream{k, st, cost})
	if err == nil {
		return
	}
	k.s.report(req, err)
	if errors.Is(err, connect.ErrCredentials) {
		k.fail(k.c.charge(mux.CostGuess, "wrong credentials"))
	}
}

// countIn counts a stream as open. It returns false for a stream that the last GOAWAY
// has excluded.
func (k *serverConn) countIn(id int64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.goAway.Finished() && id >= k.next {
		return false
	}
	k.next = max(k.next, id+4)
	k.hasRequest = true
	k.streams++
	return true
}

// countOut counts a stream as ended.
func (k *serverConn) countOut() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.streams--
	k.idleSince = mux.Clock()
	if k.goAway.Finished() && k.streams == 0 && !k.stopped {
		k.timer.Reset(drainedTimeout)
	}
}

// fail ends the connection unless ce is nil.
func (k *serverConn) fail(ce *connError) {
	if ce != nil {
		k.c.fail(ce)
	}
}

// drop resets a stream that no Handler has seen.
func (k *serverConn) drop(st *Stream, code ErrCode) {
	if st.shut() {
		st.reset(code)
		k.countOut()
	}
}

// errMalformed is the error of a malformed request.
type errMalformed struct{ what string }

func (e errMalformed) Error() string { return e.what }

var errTooLarge = errors.New("too large")

// readRequest reads the head of a request. The cost is the points that the client
// was charged for its size.
func (k *serverConn) readRequest(st *Stream) (list *Head, cost float64, err error) {
	if err := st.qs.SetReadDeadline(time.Now().Add(headTimeout)); err != nil {
		return nil, 0, err
	}
	r, size, err := st.readHead()
	cost = float64(size>>10) * mux.CostKiB
	if ce := k.c.charge(cost, "requests that are not accepted"); ce != nil {
		return nil, 0, ce
	}
	if err != nil {
		return nil, 0, err
	}
	if r.Request(); r.Large() {
		return nil, 0, errTooLarge
	}
	if what := r.Wrong(); what != "" {
		return nil, 0, errMalformed{what}
	}
	return &r.List, cost, st.qs.SetReadDeadline(time.Time{})
}

// readHead reads frames up to the first header list, and the list. The size is that
// of the encoded list in bytes, at most maxSection.
func (s *Stream) readHead() (r *connect.ListReader, size int, err error) {
	var scratch [512]byte
	for {
		t, err := s.in.next()
		switch {
		case err != nil:
			return nil, 0, err
		case t == frameHeaders:
			if s.in.left > maxSection {
				return nil, maxSection, errTooLarge
			}
			size := int(s.in.left)
			section, err := s.in.payload()
			if err != nil {
				return nil, size, err
			}
			r, err := decodeHead(section)
			if err != nil {
				return nil, size, wrong(DecompressionFailed, "a header list that can't be decoded: %w", err)
			}
			return r, size, nil
		case t == frameData, t == frameSettings, t == frameGoAway, t == frameCancelPush, t == framePushPromise,
			t == frameMaxPushID, t == framePriorityUpdate, t == framePriorityPush, isHTTP2(t):
			return nil, 0, wrong(FrameUnexpected, "a frame of type %#x before HEADERS", t)
		}
		if err := s.charge(mux.CostFrame, "frames of unknown types"); err != nil {
			return nil, 0, err
		}
		if err := s.in.pass(scratch[:]); err != nil {
			return nil, 0, err
		}
	}
}

// unreadable ends a stream whose request could not be read because of err.
func (k *serverConn) unreadable(st *Stream, req *tunnel.Request, err error) {
	if ce, ok := errors.AsType[*connError](err); ok {
		k.fail(ce) // it is reported at the end of the connection
		k.drop(st, ce.code)
		return
	}
	if bad, ok := errors.AsType[errMalformed](err); ok {
		k.drop(st, MessageError)
		k.s.report(req, refuse(tunnel.BadRequest, "%s", bad.what))
		k.fail(k.c.charge(mux.CostReset, "malformed requests"))
		return
	}
	switch {
	case err == errTooLarge:
		k.refuseUnserved(st, req, refuse(tunnel.TooLarge, "a header list of more than %d bytes or %d fields", maxList, connect.MaxListFields))
	case errors.Is(err, os.ErrDeadlineExceeded):
		k.refuseUnserved(st, req, refuse(tunnel.HelloTimeout, "the request was not complete within %v", headTimeout))
	case err == io.ErrUnexpectedEOF:
		k.drop(st, FrameError)
		k.fail(wrong(FrameError, "a stream ended inside of a frame"))
	case err == io.EOF:
		k.drop(st, RequestIncomplete)
		k.s.report(req, refuse(tunnel.Gone, "a stream ended without a request"))
		k.fail(k.c.charge(mux.CostReset, "streams without a request"))
	default:
		k.drop(st, RequestCancelled)
		if k.c.qc.Context().Err() == nil {
			k.s.report(req, refuse(tunnel.Gone, "the client gave up a request before it was complete: %w", err))
			k.fail(k.c.charge(mux.CostReset, "streams that were reset"))
		}
	}
}

// A requestStream is the stream of a request that a Handler may serve.
type requestStream struct {
	k    *serverConn
	st   *Stream
	cost float64 // points that were charged for the size of the request
}

// Accept implements mux.RequestStream.
func (r requestStream) Accept(fields connect.Fields) (tunnel.Stream, error) {
	gone := r.st.qs.Context().Err()
	if gone == nil {
		gone = r.st.sendHead(http.StatusOK, fields)
	}
	if gone != nil {
		r.k.drop(r.st, RequestCancelled)
		return nil, refuse(tunnel.Gone, "the client left before it was answered: %w", gone)
	}
	r.k.c.giveBack(mux.CostRequest + r.cost)
	return r.st, nil
}

// Refuse implements mux.RequestStream.
func (r requestStream) Refuse(refusal connect.Refusal) {
	r.k.answer(r.st, refusal)
	r.k.c.giveBack(mux.CostRequest - mux.CostRefused)
}

// sendHead writes the head of an answer, and more after it.
func (s *Stream) sendHead(status int, fields connect.Fields, more ...byte) error {
	lower := make(connect.Fields, len(fields))
	for i, f := range fields {
		lower[i] = connect.Field{Name: strings.ToLower(f.Name), Value: f.Value}
	}
	b := appendHead(nil, connect.Fields{{Name: ":status", Value: strconv.Itoa(status)}}, lower)
	if err := s.qs.SetWriteDeadline(time.Now().Add(answerTimeout)); err != nil {
		return err
	}
	if _, err := s.qs.Write(append(b, more...)); err != nil {
		return err
	}
	return s.qs.SetWriteDeadline(time.Time{})
}

// answer sends a refusal on the stream.
func (k *serverConn) answer(st *Stream, r connect.Refusal) {
	if !st.shut() {
		return
	}
	body := r.Body()
	if st.sendHead(r.Status, r.Fields(k.s.ProxyName), append(appendFrameHead(nil, frameData, uint64(len(body))), body...)...) != nil {
		st.reset(RequestCancelled)
	} else {
		_ = st.qs.Close()
		// What else the client sends is of no interest, RFC 9114 section 4.1.
		st.qs.CancelRead(quic.StreamErrorCode(NoError))
	}
	k.countOut()
}

// refuseUnserved refuses a request that no Handler has seen, and reports it.
func (k *serverConn) refuseUnserved(st *Stream, req *tunnel.Request, err error) {
	k.answer(st, k.requests.Service.Refusal(nil, err))
	k.s.report(req, err)
}

// drain sends the first GOAWAY.
func (k *serverConn) drain() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.drainLocked()
}

func (k *serverConn) drainLocked() {
	if k.stopped {
		return
	}
	now := mux.Clock()
	if !k.goAway.Start(now) {
		return
	}
	k.c.background(func() { k.c.sendGoAway(lastID) }) // it may have to wait
	if k.timer != nil {
		k.timer.Reset(k.goAway.Left(now))
	}
}

func (k *serverConn) idle() time.Duration { return mux.OrDefault(k.s.Idle, DefaultIdle) }

// firstRequest returns how long a connection may take to its first request.
func (k *serverConn) firstRequest() time.Duration {
	switch d := k.s.limits().FirstByteTimeout; {
	case d == 0:
		return tunnel.DefaultFirstByteTimeout
	case d < 0:
		return k.idle()
	default:
		return d
	}
}

func (k *serverConn) tickEvery() time.Duration {
	return max(min(k.idle(), k.firstRequest(), 5*time.Second)/4, time.Millisecond)
}

// tick enforces the connection's time limits.
func (k *serverConn) tick() {
	defer k.c.recovered() // without mu
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stopped {
		return
	}
	now, next := mux.Clock(), k.tickEvery()
	k.c.checkPath(now)
	quiet := time.Duration(now - k.idleSince)
	switch {
	case k.goAway.Started() && !k.goAway.Finished():
		if next = k.goAway.Left(now); next > 0 {
			break
		}
		k.goAway.Finish()
		id := uint64(k.next)
		k.c.background(func() { k.c.sendGoAway(id) })
		next = drainedTimeout
	case k.goAway.Finished() && k.streams == 0 && quiet >= drainedTimeout && k.goAway.Age(now) >= drainedTimeout:
		// The client should have ended it, RFC 9114 section 5.2.
		k.c.background(func() { k.c.fail(errDrained) }) // which waits for the connection's end
		return
	case k.streams == 0 && !k.goAway.Started() && (quiet >= k.idle() || !k.hasRequest && quiet >= k.firstRequest()):
		k.timedOut = !k.hasRequest
		k.drainLocked()
		next = k.goAway.Left(now)
	}
	k.timer.Reset(next)
}
