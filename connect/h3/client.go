package h3

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

// A client is one connection of a Dialer.
type client struct {
	mux.Slot // what it does is done with mu held, or without

	d *Dialer
	c *conn

	mu             sync.Mutex // guards what follows
	timer          *time.Timer
	streams        map[quic.StreamID]*Stream
	idleSince      int64 // when the last stream ended, by mux.Clock
	goAwayReceived bool  // the peer sent GOAWAY
	firstRejected  int64 // the first number that the peer rejects after its GOAWAY; -1 before
	purse          mux.Purse
	stopped        bool // Run is about to return
}

func (k *client) isServer() bool { return false }

// Run implements mux.Pooled.
func (k *client) Run(ctx context.Context) {
	qc, tr, err := k.d.dial(ctx)
	if err != nil {
		k.Leave()
		k.Ready(err)
		return
	}
	defer tr.Conn.Close()
	defer tr.Close()
	k.c = &conn{qc: qc, side: k}
	k.idleSince = mux.Clock()
	if err := k.c.begin(settingDatagrams, 1); err != nil {
		k.c.fail(err)
	}
	k.mu.Lock()
	k.timer = time.AfterFunc(k.tickEvery(), k.tick)
	k.mu.Unlock()
	k.c.running.Go(k.c.acceptUni)
	k.Ready(nil)
	<-qc.Context().Done()
	k.mu.Lock()
	k.stopped = true
	k.timer.Stop()
	k.mu.Unlock()
	k.Leave()
	k.c.running.Wait()
}

// Stop implements mux.Pooled.
func (k *client) Stop() {
	k.mu.Lock()
	rest := k.lingerLeft()
	if len(k.streams) > 0 {
		rest = 0
	}
	if rest > 0 && !k.stopped {
		k.goAwayReceived = true // tick ends it
		k.timer.Reset(rest)
		k.mu.Unlock()
		return
	}
	k.mu.Unlock()
	k.c.fail(errClosed)
}

// lingerLeft returns how long the connection should stay open after its last stream
// ended, so that the last bytes arrive but for the worst of losses: QUIC does not
// tell when they have. The caller holds mu.
func (k *client) lingerLeft() time.Duration {
	linger := min(50*time.Millisecond+8*k.c.roundTrip(), time.Second)
	return linger - time.Duration(mux.Clock()-k.idleSince)
}

// streamLimitWait is how long a new stream waits for the proxy to allow one more: the
// proxy may not have noticed the end of another one yet.
const streamLimitWait = 200 * time.Millisecond

// openStream opens the stream that was reserved.
func (k *client) openStream(ctx context.Context) (*quic.Stream, error) {
	qs, err := k.c.qc.OpenStream()
	if _, full := errors.AsType[*quic.StreamLimitReachedError](err); full {
		wait, cancel := context.WithTimeout(ctx, streamLimitWait)
		defer cancel()
		if qs, err = k.c.qc.OpenStreamSync(wait); err != nil && wait.Err() != nil {
			k.AtMaxStreams() // the proxy allows fewer than was assumed
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", mux.ErrUnprocessed, err)
	}
	return qs, nil
}

// head encodes a request, with the fields that depend on the session.
func (k *client) head(ctx context.Context, pseudo, fields connect.Fields) ([]byte, error) {
	if k.d.SessionHeader == nil {
		return appendHead(nil, pseudo, fields), nil
	}
	cs := k.c.qc.ConnectionState().TLS
	own, err := k.d.SessionHeader.ForSession(ctx, &cs)
	if err != nil {
		return nil, err
	}
	return appendHead(nil, pseudo, slices.Concat(fields, own)), nil
}

// open opens a stream with the request of list, of these fields, and waits for its answer,
// whose fields it returns.
func (k *client) open(ctx context.Context, pseudo, fields connect.Fields, list *Head) (*Stream, connect.Fields, error) {
	if list.Protocol != "" {
		if err := k.extended(ctx); err != nil {
			k.Release()
			return nil, nil, err
		}
	}
	if err := tunnel.HandshakeDone(ctx); err != nil {
		k.Release()
		return nil, nil, connect.Unusable(k.d.Proxy, "is not asked", err)
	}
	head, err := k.head(ctx, pseudo, fields)
	if err != nil {
		k.Release()
		return nil, nil, fmt.Errorf("connect: fields for %q: %w", list.Authority, err)
	}
	k.mu.Lock()
	affords := k.purse.Ask()
	k.mu.Unlock()
	if !affords {
		k.Release()
		return nil, nil, k.purse.Empty(k.d.Proxy)
	}
	qs, err := k.openStream(ctx)
	if err != nil {
		k.mu.Lock()
		k.purse.NotSent()
		k.mu.Unlock()
		k.Release()
		if ctx.Err() != nil {
			return nil, nil, k.d.pool.GivenUp(ctx)
		}
		return nil, nil, connect.Unusable(k.d.Proxy, "is not to be used", err)
	}
	s := newStream(k.c, qs)
	k.mu.Lock()
	gone := k.goAwayReceived
	k.streams[qs.StreamID()] = s
	s.ended = func() { k.dropped(qs.StreamID()) }
	if list.Protocol != "" && !k.stopped {
		k.c.expectDatagrams(s)
	}
	k.mu.Unlock()
	if gone {
		_ = s.Abort()
		return nil, nil, connect.Unusable(k.d.Proxy, "is not to be used", mux.ErrUnprocessed)
	}

	limit := time.Now().Add(mux.OrDefault(k.d.Wait, DefaultWait))
	_ = qs.SetReadDeadline(limit)
	_ = qs.SetWriteDeadline(limit)
	stop := context.AfterFunc(ctx, func() { // wakes what waits
		defer k.c.recovered()
		_ = qs.SetReadDeadline(time.Unix(1, 0))
		_ = qs.SetWriteDeadline(time.Unix(1, 0))
	})
	answer, err := k.ask(s, head)
	k.account(answer, err)
	if !stop() {
		_ = s.Abort()
		return nil, nil, k.d.pool.GivenUp(ctx)
	}
	if err != nil {
		_ = s.Abort()
		return nil, nil, connect.Unusable(k.d.Proxy, "gave no answer", err)
	}
	_ = qs.SetWriteDeadline(time.Time{})
	if answer.Status/100 != 2 {
		s.refusal = true
		_ = qs.SetReadDeadline(time.Now().Add(answerTimeout))
		defer s.Close()
		return nil, nil, connect.Refused(k.d.Proxy, list.Authority, answer, s)
	}
	_ = qs.SetReadDeadline(time.Time{})
	if k.d.Answer != nil {
		k.d.Answer(ctx, list.Authority, answer.Fields)
	}
	return s, answer.Fields, nil
}

// account updates the purse by the result of a request, answer or err.
func (k *client) account(answer *Head, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err != nil {
		k.purse.GaveUp()
		return
	}
	k.purse.Answered(answer.Status)
}

// ask sends a request and returns the answer.
func (k *client) ask(s *Stream, head []byte) (*Head, error) {
	if _, err := s.qs.Write(head); err != nil {
		return nil, k.unprocessed(s, s.translate(err))
	}
	for interim := 0; ; interim++ {
		r, _, err := s.readHead()
		switch {
		case err == errTooLarge || err == nil && r.Large():
			return nil, tunnel.Refusef(tunnel.DialFailed, "h3: an answer with more than %d bytes or %d fields", maxList, connect.MaxListFields)
		case err != nil:
			s.reading.Lock()
			err = s.failed(err)
			s.reading.Unlock()
			return nil, k.unprocessed(s, err)
		case !r.IsAnswer():
			return nil, refuse(tunnel.DialFailed, "an answer that is none: %q", r.Wrong())
		case r.List.Status/100 != 1:
			return &r.List, nil
		case interim == maxInterim:
			return nil, fmt.Errorf("h3: more than %d interim answers", maxInterim)
		}
	}
}

// unprocessed wraps ErrUnprocessed where the proxy has certainly not processed s.
func (k *client) unprocessed(s *Stream, err error) error {
	re, ok := errors.AsType[*ResetError](err)
	if ok && re.Err == nil && re.Code == RequestRejected {
		k.Leave() // the proxy would reject the next one, too
		return fmt.Errorf("%w: %w", mux.ErrUnprocessed, err)
	}
	return err
}

// peerGoAway implements side.
func (k *client) peerGoAway(id uint64) *connError {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case id%4 != 0 || id > lastID:
		return wrong(IDError, "GOAWAY with %d, which is no request's", id)
	case k.firstRejected >= 0 && int64(id) > k.firstRejected:
		return wrong(IDError, "GOAWAY with %d after one with %d", id, k.firstRejected)
	}
	k.goAwayReceived, k.firstRejected = true, int64(id)
	k.Leave()
	for n, s := range k.streams {
		if int64(n) >= k.firstRejected {
			s.cut(&ResetError{Code: RequestRejected})
		}
	}
	if len(k.streams) == 0 && !k.stopped {
		k.timer.Reset(max(k.lingerLeft(), time.Millisecond))
	}
	return nil
}

// dropped removes a stream that was closed here.
func (k *client) dropped(id quic.StreamID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.streams, id)
	k.idleSince = mux.Clock()
	k.Release()
	if k.goAwayReceived && len(k.streams) == 0 && !k.stopped {
		k.timer.Reset(max(k.lingerLeft(), time.Millisecond))
	}
}

func (k *client) tickEvery() time.Duration {
	return max(min(mux.OrDefault(k.d.Idle, DefaultIdle)/4, 5*time.Second), time.Millisecond)
}

// tick enforces the connection's time limits.
func (k *client) tick() {
	defer k.c.recovered() // without mu
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stopped {
		return
	}
	next := k.tickEvery()
	k.c.checkPath(mux.Clock())
	if len(k.streams) == 0 {
		rest := k.lingerLeft()
		switch {
		case k.goAwayReceived && rest <= 0:
			k.c.background(func() { k.c.fail(errDrained) })
			return
		case k.goAwayReceived:
			next = rest
		case rest <= 0 && time.Duration(mux.Clock()-k.idleSince) >= mux.OrDefault(k.d.Idle, DefaultIdle) && k.LeaveUnused():
			k.c.background(func() { k.c.fail(errIdle) })
			return
		}
	}
	k.timer.Reset(max(next, time.Millisecond))
}
