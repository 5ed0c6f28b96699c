package h2

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

// A client is one connection of a Dialer.
type client struct {
	mux.Slot // what it does is done with c.mu held, or without

	d               *Dialer
	settingsArrived chan struct{} // closed when the peer's settings have arrived, or the connection has ended
	c               *conn

	// Guarded by c.mu.
	timer          *time.Timer
	idleSince      int64  // when the last stream ended, by mux.Clock
	hasSettings    bool   // settingsArrived is closed
	goAwayReceived bool   // the peer sent GOAWAY
	mute           bool   // nothing can be sent any more
	lastTaken      uint32 // the last stream that the peer takes after its GOAWAY
	purse          mux.Purse
}

var _ side = (*client)(nil)

// Run implements mux.Pooled.
func (k *client) Run(ctx context.Context) {
	nc, err := k.d.dial(ctx)
	if err != nil {
		k.Leave()
		k.Ready(err)
		return
	}
	k.c = newConn(nc, k, true)
	k.c.holding = tunnel.NewBufferAccount(ctx, false)
	k.idleSince = mux.Clock()
	k.c.input.hasRequest.Store(true)
	k.c.mu.Lock()
	k.timer = time.AfterFunc(k.tickEvery(), k.tick)
	k.c.mu.Unlock()
	k.c.begin(
		http2.Setting{ID: http2.SettingEnablePush, Val: 0},
		http2.Setting{ID: http2.SettingInitialWindowSize, Val: streamWindow},
		http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: maxList},
	)
	k.Ready(nil)
	_ = k.c.run(k.c.first)
	k.c.mu.Lock()
	k.timer.Stop()
	k.noteSettings()
	k.c.mu.Unlock()
	k.Leave()
}

// noteSettings notes that the peer's settings have arrived, or never will. The
// caller holds c.mu.
func (k *client) noteSettings() {
	if !k.hasSettings {
		k.hasSettings = true
		close(k.settingsArrived)
	}
}

// Stop implements mux.Pooled.
func (k *client) Stop() { k.c.fail(errClosed) }

// extended waits until it is known whether the peer takes extended CONNECT. It
// must not be tried before (RFC 8441 section 3).
func (k *client) extended(ctx context.Context) error {
	if err := k.awaitSettings(ctx); err != nil {
		return err
	}
	k.c.mu.Lock()
	defer k.c.mu.Unlock()
	if k.c.err == nil && !k.c.peerExtended {
		return k.d.failure("has no extended CONNECT", ErrNotSpoken)
	}
	return nil
}

// handshakeDone calls tunnel.HandshakeDone once the proxy has sent its settings.
func (k *client) handshakeDone(ctx context.Context) error {
	if !tunnel.AwaitsHandshake(ctx) {
		return nil
	}
	if err := k.awaitSettings(ctx); err != nil {
		return err
	}
	k.c.mu.Lock()
	err := k.c.err
	k.c.mu.Unlock()
	if err == nil {
		err = tunnel.HandshakeDone(ctx)
	}
	if err != nil {
		return k.d.failure("is not asked", err)
	}
	return nil
}

// awaitSettings waits for the settings of the proxy, or the end of the connection.
func (k *client) awaitSettings(ctx context.Context) error {
	late := time.NewTimer(k.d.wait())
	defer late.Stop()
	select {
	case <-k.settingsArrived:
	default:
		select {
		case <-k.settingsArrived:
		case <-ctx.Done():
			return k.d.pool.GivenUp(ctx)
		case <-late.C:
			return k.d.failure("sent no settings", answerTimeoutError{})
		}
	}
	return nil
}

// open opens the stream that was reserved, sends first along with the request, and waits for
// the answer, whose fields it returns.
func (k *client) open(ctx context.Context, pseudo, fields connect.Fields, head *Head, first []byte) (*Stream, connect.Fields, error) {
	c, addr := k.c, head.Authority
	if head.Protocol != "" {
		if err := k.extended(ctx); err != nil {
			k.Release()
			return nil, nil, err
		}
	}
	if err := k.handshakeDone(ctx); err != nil {
		k.Release()
		return nil, nil, err
	}
	own, err := k.d.SessionHeader.For(ctx, c.nc)
	if err != nil {
		k.Release()
		return nil, nil, fmt.Errorf("connect: fields for %q: %w", addr, err)
	}
	if len(own) > 0 {
		fields = slices.Concat(fields, own) // those of another connection are tried again without
	}
	c.mu.Lock()
	if k.mute && c.err == nil { // why is known in a moment
		c.mu.Unlock()
		select {
		case <-c.written:
		case <-ctx.Done():
		}
		c.mu.Lock()
	}
	if c.err != nil || k.goAwayReceived || k.mute || c.last > 1<<31-3 {
		err := mux.ErrUnprocessed
		if c.err != nil { // such as the alert of a peer that does not take our certificate
			err = fmt.Errorf("%w: %w", err, c.err)
		}
		c.mu.Unlock()
		k.Leave()
		k.Release()
		return nil, nil, k.d.failure("is not to be used", err)
	}
	if !k.purse.Ask() {
		c.mu.Unlock()
		k.Release()
		return nil, nil, k.purse.Empty(k.d.Proxy)
	}
	c.last = c.last + 1 | 1 // 1, 3, 5: a client's are odd
	s := c.newStream(c.last)
	c.writeHead(s.id, pseudo, fields, false)
	s.begin(first)
	c.mu.Unlock()

	limit := time.Now().Add(k.d.wait())
	for interim := 0; ; interim++ {
		got, err := k.answer(ctx, s, limit)
		k.account(got, err)
		if err != nil {
			_ = s.Abort()
			if ctx.Err() != nil {
				return nil, nil, k.d.pool.GivenUp(ctx)
			}
			return nil, nil, k.d.failure("gave no answer", k.unprocessed(s, err))
		}
		switch {
		case got.Status/100 == 2:
			if k.d.Answer != nil {
				k.d.Answer(ctx, addr, got.Fields)
			}
			return s, got.Fields, nil
		case got.Status/100 != 1:
			return nil, nil, k.d.refusal(s, got, addr)
		case interim == maxInterim:
			_ = s.Abort()
			return nil, nil, k.d.failure("gave no answer", fmt.Errorf("more than %d interim ones", maxInterim))
		}
	}
}

// account updates the purse by the result of a request, got or err.
func (k *client) account(got *Head, err error) {
	k.c.mu.Lock()
	defer k.c.mu.Unlock()
	if err != nil {
		k.purse.GaveUp()
		return
	}
	k.purse.Answered(got.Status)
}

// unprocessed wraps ErrUnprocessed where the proxy has certainly not processed s.
func (k *client) unprocessed(s *Stream, err error) error {
	re, ok := errors.AsType[*ResetError](err)
	k.c.mu.Lock()
	defer k.c.mu.Unlock()
	if ok && re.Err == nil && re.Code == http2.ErrCodeHTTP11Required {
		return fmt.Errorf("%w: %w", ErrNotSpoken, err)
	}
	if ok && re.Err == nil && re.Code == http2.ErrCodeRefusedStream || k.goAwayReceived && s.id > k.lastTaken {
		return fmt.Errorf("%w: %w", mux.ErrUnprocessed, err)
	}
	return err
}

// headers implements side: an answer.
func (k *client) headers(b *block) error {
	c := k.c
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[b.id]
	switch {
	case s == nil && !c.wasOpened(b.id):
		return protocolError(http2.ErrCodeProtocol, "HEADERS on stream %d, which was never opened", b.id)
	case s == nil:
		return c.charge(costFrame, "too many HEADERS on streams that are closed")
	case b.Large():
		c.reset(s, http2.ErrCodeEnhanceYourCalm)
		return nil
	case s.head != nil && s.head.Status/100 != 1 && b.wrong == "" && b.IsTrailers() && b.end && s.head.Status/100 != 2:
		c.ended(s) // trailers of a refusal
		return nil
	case b.wrong != "", !b.IsAnswer(), s.head != nil && s.head.Status/100 != 1, b.end && b.List.Status/100 == 1:
		c.reset(s, http2.ErrCodeProtocol)
		return nil
	}
	if b.List.Status/100 == 1 {
		if err := c.charge(costFrame, "too many interim answers"); err != nil {
			return err
		}
	}
	head := b.List
	s.head, s.fresh = &head, true
	if b.end {
		c.ended(s)
	}
	s.readable.Broadcast()
	return nil
}

// settings implements side.
func (k *client) settings() {
	k.noteSettings()
	k.SetMaxStreams(min(k.c.peerMaxStreams, k.d.streams()))
}

// peerGoAway implements side.
func (k *client) peerGoAway(last uint32) {
	k.goAwayReceived, k.lastTaken = true, last
	k.Leave()
	for _, s := range k.c.streams {
		if s.id > last {
			s.cut(&ResetError{Code: http2.ErrCodeRefusedStream})
			k.c.drop(s)
		}
	}
	if len(k.c.streams) == 0 {
		k.c.failLocked(errDrained)
	}
}

// unwritable implements side.
func (k *client) unwritable() {
	k.mute = true
	k.Leave()
}

// dropped implements side.
func (k *client) dropped(*Stream) {
	k.idleSince = mux.Clock()
	k.Release()
	if (k.goAwayReceived || k.d.Single) && len(k.c.streams) == 0 {
		k.c.failLocked(errDrained)
	}
}

func (k *client) tickEvery() time.Duration {
	return max(min(mux.OrDefault(k.d.Ping, DefaultPing), mux.OrDefault(k.d.Pong, DefaultPong), mux.OrDefault(k.d.Idle, DefaultIdle))/4, time.Millisecond)
}

// tick enforces the connection's time limits and sends what is due.
func (k *client) tick() {
	c := k.c
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.recovered()
	if c.err != nil {
		return
	}
	now := mux.Clock()
	if c.settingsTimedOut(now) {
		return
	}
	c.replenish() // memory may be short no longer
	c.tell()
	ping, pong := int64(mux.OrDefault(k.d.Ping, DefaultPing)), int64(mux.OrDefault(k.d.Pong, DefaultPong))
	heard := now - c.lastFrame.Load()
	due := ping - int64(k.tickEvery())
	switch {
	case c.pinged != 0 && now-c.pinged >= pong && heard >= due+pong: // one that measures may be sent before it is due
		c.failLocked(errDead)
		return
	case heard >= due:
		c.sendPing()
	}
	if len(c.streams) == 0 && now-k.idleSince >= int64(mux.OrDefault(k.d.Idle, DefaultIdle)) {
		if k.LeaveUnused() {
			c.failLocked(errIdle)
			return
		}
	}
	k.timer.Reset(k.tickEvery())
}
