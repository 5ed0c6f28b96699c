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
	"culvert.dev/tunnel"
)

const (
	accepting = time.Second            // that an answer may take to leave
	goodbye   = 500 * time.Millisecond // between the first GOAWAY and the last: a round trip
	farewell  = 3 * time.Second        // for the client to end a connection that has drained
	lastID    = 1<<62 - 4              // the highest number of a stream of a client's
)

// A serverConn is one connection of a Server.
type serverConn struct {
	s       *Server
	c       *conn
	a       *attempt
	tr      *quic.Transport
	handler tunnel.Handler
	local   uint16
	peer    tunnel.Peer
	running sync.WaitGroup // requests whose Handler has not returned

	grown int64 // by which its window grew; guarded by s.mu

	mu      sync.Mutex // guards what follows
	timer   *time.Timer
	over    bool  // run is about to return
	begun   bool  // a request was made
	late    bool  // none was, for too long
	streams int   // that have not ended
	next    int64 // above the numbers of all streams that came
	since   int64 // when the last stream ended, nanoseconds of clock
	leaving bool  // GOAWAY was sent
	final   bool  // with the number of the last stream: later ones are rejected
	left    int64 // when leaving began
}

func (k *serverConn) isServer() bool { return true }

// goAway implements side: a client that leaves opens no more streams, and the
// number is of pushes that never were.
func (k *serverConn) goAway(uint64) *connError { return nil }

// run serves the connection until it has ended and nothing of it runs any more.
func (k *serverConn) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { // the context of Serve ended
		defer k.c.recovered()
		k.c.fail(errClosed)
	})
	defer stop()
	k.take(ctx)
	stop()
	cancel()
	k.mu.Lock()
	k.over = true
	if k.timer != nil {
		k.timer.Stop()
	}
	begun, late := k.begun, k.late
	k.mu.Unlock()
	k.running.Wait()
	k.c.running.Wait()
	k.tellEnd(begun, late)
}

// take begins the connection and serves its streams until it ends.
func (k *serverConn) take(ctx context.Context) {
	defer k.c.recovered()
	if err := k.c.begin(); err != nil {
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

// tellEnd reports a connection that did something wrong, or nothing.
func (k *serverConn) tellEnd(begun, late bool) {
	err := k.c.cause()
	switch ce, ok := errors.AsType[*connError](err); {
	case ok:
		if p, ok := errors.AsType[*tunnel.Panic](ce.err); ok {
			k.s.logPanic(p)
		}
		k.s.tell(k.a, ce.err)
	case begun:
	case late:
		k.s.tell(k.a, refuse(tunnel.HelloTimeout, "no request in time"))
	case errors.Is(err, errClosed), errors.Is(err, errDrained):
		k.s.tell(k.a, refuse(tunnel.Drain, "the gateway is stopping"))
	default:
		k.s.tell(k.a, refuse(tunnel.NoHello, "a connection without a request: %w", err))
	}
}

// serve is one stream: it reads its request and has the Handler answer it.
func (k *serverConn) serve(ctx context.Context, qs quicStream) {
	if !k.enter(int64(qs.StreamID())) {
		st := newStream(k.c, qs)
		st.reset(RequestRejected) // the client may try elsewhere
		k.s.told(k.newRequest(), refuse(tunnel.Drain, "a request after the last GOAWAY"))
		k.fail(k.c.charge(connect.CostRequest, "requests on a connection that is about to end"))
		return
	}
	st := newStream(k.c, qs)
	st.ended = k.leave
	req := k.newRequest()
	defer func() {
		if v := recover(); v != nil {
			if st.shut() {
				st.reset(InternalError)
				k.leave()
			}
			k.s.panicking(req, v)
		}
	}()
	if ce := k.c.charge(connect.CostRequest, "requests that are not accepted"); ce != nil {
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
		k.answer(st, req, nil, refuse(tunnel.BadMethod, "method %q, want CONNECT", connect.Clip(list.Method)))
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(qs.Context(), cancel)() // the client gave up
	ctx, err = k.admit(ctx, req, list)
	if err != nil {
		k.answer(st, req, nil, err)
		k.c.giveBack(connect.CostRequest - connect.CostRefused)
		if errors.Is(err, connect.ErrCredentials) {
			k.fail(k.c.charge(connect.CostGuess, "wrong credentials"))
		}
		return
	}
	req.Accept = func() (tunnel.Stream, error) { return k.accept(st, list, cost) }
	req.Refuse = func(err error) {
		k.answer(st, nil, req, err)
		k.c.giveBack(connect.CostRequest - connect.CostRefused)
	}
	k.handler.ServeTunnel(ctx, req)
}

// enter counts a stream in. It is false where the client was told that streams
// of such a number are not taken.
func (k *serverConn) enter(id int64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.final && id >= k.next {
		return false
	}
	k.next = max(k.next, id+4)
	k.begun = true
	k.streams++
	return true
}

// leave counts a stream out.
func (k *serverConn) leave() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.streams--
	k.since = clock()
	if k.final && k.streams == 0 && !k.over {
		k.timer.Reset(farewell)
	}
}

// fail ends the connection where ce says so.
func (k *serverConn) fail(ce *connError) {
	if ce != nil {
		k.c.fail(ce)
	}
}

// drop resets a stream that nobody was asked about.
func (k *serverConn) drop(st *Stream, code ErrCode) {
	if st.shut() {
		st.reset(code)
		k.leave()
	}
}

// errMalformed is for a stream whose request breaks the rules.
type errMalformed struct{ what string }

func (e errMalformed) Error() string { return e.what }

var errTooLarge = errors.New("too large")

// readRequest reads the head of a request. The cost is what it has taken of the
// client's points for its size.
func (k *serverConn) readRequest(st *Stream) (list *Head, cost float64, err error) {
	if err := st.qs.SetReadDeadline(time.Now().Add(headTime)); err != nil {
		return nil, 0, err
	}
	r, size, err := st.readHead()
	cost = float64(size>>10) * connect.CostKiB
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

// readHead reads frames up to the first header list, and that. The size is that
// of the list in bytes as it was sent, and at most what is read of one.
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
		if err := s.charge(connect.CostFrame, "frames of unknown types"); err != nil {
			return nil, 0, err
		}
		if err := s.in.pass(scratch[:]); err != nil {
			return nil, 0, err
		}
	}
}

// unreadable is for a stream whose request could not be read: err says why.
func (k *serverConn) unreadable(st *Stream, req *tunnel.Request, err error) {
	if ce, ok := errors.AsType[*connError](err); ok {
		k.fail(ce) // which is told of at the end of the connection
		k.drop(st, ce.code)
		return
	}
	if bad, ok := errors.AsType[errMalformed](err); ok {
		k.drop(st, MessageError)
		k.s.told(req, refuse(tunnel.BadRequest, "%s", bad.what))
		k.fail(k.c.charge(connect.CostReset, "malformed requests"))
		return
	}
	switch {
	case err == errTooLarge:
		k.answer(st, req, nil, refuse(tunnel.TooLarge, "a header list of more than %d bytes or %d fields", maxList, connect.MaxListFields))
	case errors.Is(err, os.ErrDeadlineExceeded):
		k.answer(st, req, nil, refuse(tunnel.HelloTimeout, "the request was not complete within %v", headTime))
	case err == io.ErrUnexpectedEOF:
		k.drop(st, FrameError)
		k.fail(wrong(FrameError, "a stream ended inside of a frame"))
	case err == io.EOF:
		k.drop(st, RequestIncomplete)
		k.s.told(req, refuse(tunnel.Gone, "a stream ended without a request"))
		k.fail(k.c.charge(connect.CostReset, "streams without a request"))
	default:
		k.drop(st, RequestCancelled)
		if k.c.qc.Context().Err() == nil {
			k.s.told(req, refuse(tunnel.Gone, "the client gave up a request before it was complete: %w", err))
			k.fail(k.c.charge(connect.CostReset, "streams that were reset"))
		}
	}
}

// admit judges a request before the Handler does.
func (k *serverConn) admit(ctx context.Context, req *tunnel.Request, list *Head) (context.Context, error) {
	if list.Protocol != "" {
		return ctx, refuse(tunnel.Unsupported, "extended CONNECT for %q", connect.Clip(list.Protocol))
	}
	ctx, err := k.s.rules().AdmitList(ctx, req, list)
	if err == nil && k.s.Head != nil {
		err = k.s.Head(ctx, req, list)
	}
	return ctx, err
}

// accept says yes. The cost is that of the request's size.
func (k *serverConn) accept(st *Stream, list *Head, cost float64) (tunnel.Stream, error) {
	gone := st.qs.Context().Err()
	if gone == nil {
		gone = st.sendHead(http.StatusOK, list.Answer)
	}
	if gone != nil {
		k.drop(st, RequestCancelled)
		return nil, refuse(tunnel.Gone, "the client left before it was answered: %w", gone)
	}
	k.c.giveBack(connect.CostRequest + cost)
	return st, nil
}

// sendHead writes the head of an answer, and what is to follow it.
func (s *Stream) sendHead(status int, fields connect.Fields, more ...byte) error {
	lower := make(connect.Fields, len(fields))
	for i, f := range fields {
		lower[i] = connect.Field{Name: strings.ToLower(f.Name), Value: f.Value}
	}
	b := appendHead(nil, connect.Fields{{Name: ":status", Value: strconv.Itoa(status)}}, lower)
	if err := s.qs.SetWriteDeadline(time.Now().Add(accepting)); err != nil {
		return err
	}
	if _, err := s.qs.Write(append(b, more...)); err != nil {
		return err
	}
	return s.qs.SetWriteDeadline(time.Time{})
}

// answer says no. Of untold, the Server is told here; of asked, the Handler
// knows.
func (k *serverConn) answer(st *Stream, untold, asked *tunnel.Request, err error) {
	if st.shut() {
		r := k.s.rules().Refusal(asked, err)
		body := r.Body()
		if st.sendHead(r.Status, r.Fields(k.s.ProxyName), append(appendFrameHead(nil, frameData, uint64(len(body))), body...)...) != nil {
			st.reset(RequestCancelled)
		} else {
			_ = st.qs.Close()
			// What else the client sends is of no interest, RFC 9114 section 4.1.
			st.qs.CancelRead(quic.StreamErrorCode(NoError))
		}
		k.leave()
	}
	if untold != nil {
		k.s.told(untold, err)
	}
}

// drain sends the first GOAWAY, which says that there will be a last one:
// requests that are on their way are still served (RFC 9114 section 5.2).
func (k *serverConn) drain() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.drainLocked()
}

func (k *serverConn) drainLocked() {
	if k.leaving || k.over {
		return
	}
	k.leaving, k.left = true, clock()
	k.c.background(func() { k.c.sendGoAway(lastID) }) // it may have to wait
	if k.timer != nil {
		k.timer.Reset(goodbye)
	}
}

func (k *serverConn) idle() time.Duration {
	if k.s.Idle > 0 {
		return k.s.Idle
	}
	return DefaultIdle
}

// firstRequest is how long a connection may take to its first request.
func (k *serverConn) firstRequest() time.Duration {
	switch d := k.s.Limits.FirstByte; {
	case d == 0:
		return tunnel.DefaultFirstByte
	case d < 0:
		return k.idle()
	default:
		return d
	}
}

func (k *serverConn) tickEvery() time.Duration {
	return max(min(k.idle(), k.firstRequest(), 5*time.Second)/4, time.Millisecond)
}

// tick looks after a connection now and then.
func (k *serverConn) tick() {
	defer k.c.recovered() // without mu
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.over {
		return
	}
	now, next := clock(), k.tickEvery()
	k.c.lookAtPath(now)
	quiet := time.Duration(now - k.since)
	switch {
	case k.leaving && !k.final:
		if next = goodbye - time.Duration(now-k.left); next > 0 {
			break
		}
		k.final = true
		id := uint64(k.next)
		k.c.background(func() { k.c.sendGoAway(id) })
		next = farewell
	case k.final && k.streams == 0 && quiet >= farewell && time.Duration(now-k.left) >= farewell:
		// The client should have ended it, RFC 9114 section 5.2.
		k.c.background(func() { k.c.fail(errDrained) }) // which waits for the connection's end
		return
	case k.streams == 0 && !k.leaving && (quiet >= k.idle() || !k.begun && quiet >= k.firstRequest()):
		k.late = !k.begun
		k.drainLocked()
		next = goodbye
	}
	k.timer.Reset(next)
}
