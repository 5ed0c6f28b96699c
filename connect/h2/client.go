package h2

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// A client is one connection of a Dialer.
type client struct {
	connect.Place // what it does is done with c.mu held, or without

	d   *Dialer
	met chan struct{} // closed when the peer's settings have come, or the end
	c   *conn

	// Guarded by c.mu.
	timer  *time.Timer
	since  int64  // when the last stream ended, nanoseconds of clock
	known  bool   // met is closed
	away   bool   // the peer sent GOAWAY
	lastOK uint32 // and takes no stream after this one
	purse  connect.Purse
}

var _ side = (*client)(nil)

// Run implements connect.Pooled.
func (k *client) Run(ctx context.Context) {
	nc, err := k.d.dial(ctx)
	if err != nil {
		k.Leave()
		k.Ready(err)
		return
	}
	k.c = newConn(nc, k, true)
	k.c.holding = tunnel.NewBufferAccount(ctx, false)
	k.since = clock()
	k.c.input.begun.Store(true)
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
	k.meet()
	k.c.mu.Unlock()
	k.Leave()
}

// meet notes that the peer's settings are known, or never will be. The caller
// holds c.mu.
func (k *client) meet() {
	if !k.known {
		k.known = true
		close(k.met)
	}
}

// Stop implements connect.Pooled.
func (k *client) Stop() { k.c.fail(errClosed) }

// extended waits until it is known whether the peer takes extended CONNECT,
// which must not be tried on it before (RFC 8441 section 3).
func (k *client) extended(ctx context.Context) error {
	late := time.NewTimer(k.d.wait())
	defer late.Stop()
	select {
	case <-k.met:
	default:
		tunnel.WillWait(ctx)
		select {
		case <-k.met:
		case <-ctx.Done():
			return k.d.pool.GivenUp(ctx)
		case <-late.C:
			return k.d.failure("sent no settings", errLate{})
		}
	}
	k.c.mu.Lock()
	defer k.c.mu.Unlock()
	if k.c.err == nil && !k.c.extends {
		return k.d.failure("has no extended CONNECT", ErrNotSpoken)
	}
	return nil
}

// open opens the stream that was reserved, and waits for its answer, whose
// fields it sets in head.
func (k *client) open(ctx context.Context, pseudo, fields connect.Fields, head *Head) (*Stream, error) {
	c, addr := k.c, head.Authority
	if head.Protocol != "" {
		if err := k.extended(ctx); err != nil {
			k.GiveBack()
			return nil, err
		}
	}
	c.mu.Lock()
	if c.err != nil || k.away || c.last > 1<<31-3 {
		err := connect.ErrUnseen
		if c.err != nil { // such as the alert of a peer that does not take our certificate
			err = fmt.Errorf("%w: %w", err, c.err)
		}
		c.mu.Unlock()
		k.Leave()
		k.GiveBack()
		return nil, k.d.failure("is not to be used", err)
	}
	if !k.purse.Ask() {
		c.mu.Unlock()
		k.GiveBack()
		return nil, k.purse.Empty(k.d.Proxy)
	}
	c.last = c.last + 1 | 1 // 1, 3, 5: a client's are odd
	s := c.newStream(c.last)
	c.writeHead(s.id, pseudo, fields, false)
	c.mu.Unlock()

	tunnel.WillWait(ctx)
	limit := time.Now().Add(k.d.wait())
	for interim := 0; ; interim++ {
		got, err := s.answer(ctx, limit)
		k.settle(got, err)
		if err != nil {
			_ = s.Abort()
			if ctx.Err() != nil {
				return nil, k.d.pool.GivenUp(ctx)
			}
			return nil, k.d.failure("gave no answer", k.unseen(s, err))
		}
		switch {
		case got.Status/100 == 2:
			if k.d.Answer != nil {
				k.d.Answer(ctx, addr, got.Fields)
			}
			head.Answer = got.Fields
			return s, nil
		case got.Status/100 != 1:
			return nil, k.d.refusal(s, got, addr)
		case interim == maxInterim:
			_ = s.Abort()
			return nil, k.d.failure("gave no answer", fmt.Errorf("more than %d interim ones", maxInterim))
		}
	}
}

// settle reckons what a request cost that has come to got or err.
func (k *client) settle(got *Head, err error) {
	k.c.mu.Lock()
	defer k.c.mu.Unlock()
	switch {
	case err != nil:
		k.purse.GaveUp()
	case got.Status/100 == 2:
		k.purse.Accepted()
	case got.Status/100 != 1:
		k.purse.Refused(got.Status)
	}
}

// unseen is ErrUnseen where the proxy is known not to have looked at s.
func (k *client) unseen(s *Stream, err error) error {
	re, ok := errors.AsType[*ResetError](err)
	k.c.mu.Lock()
	defer k.c.mu.Unlock()
	if ok && re.Err == nil && re.Code == http2.ErrCodeHTTP11Required {
		return fmt.Errorf("%w: %w", ErrNotSpoken, err)
	}
	if ok && re.Err == nil && re.Code == http2.ErrCodeRefusedStream || k.away && s.id > k.lastOK {
		return fmt.Errorf("%w: %w", connect.ErrUnseen, err)
	}
	return err
}

// errLate is for an answer that does not come. It is a timeout.
type errLate struct{}

func (errLate) Error() string   { return "no answer in time" }
func (errLate) Timeout() bool   { return true }
func (errLate) Temporary() bool { return false }

// answer waits for the next header list of the peer's.
func (s *Stream) answer(ctx context.Context, limit time.Time) (*Head, error) {
	wake := func() {
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		s.readable.Broadcast()
	}
	defer context.AfterFunc(ctx, wake)()
	late := time.AfterFunc(time.Until(limit), wake)
	defer late.Stop()
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	for {
		switch {
		case s.fresh:
			s.fresh = false
			return s.head, nil
		case s.ended:
			return nil, s.readErr
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case !time.Now().Before(limit):
			return nil, errLate{}
		}
		s.readable.Wait()
	}
}

// headers implements side: an answer.
func (k *client) headers(b *block) error {
	c := k.c
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[b.id]
	switch {
	case s == nil && !c.begun(b.id):
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
	k.meet()
	k.Most(min(k.c.peerMost, k.d.streams()))
}

// goAway implements side.
func (k *client) goAway(last uint32) {
	k.away, k.lastOK = true, last
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

// dropped implements side.
func (k *client) dropped(*Stream) {
	k.since = clock()
	k.GiveBack()
	if (k.away || k.d.Single) && len(k.c.streams) == 0 {
		k.c.failLocked(errDrained)
	}
}

func (k *client) tickEvery() time.Duration {
	return max(min(orElse(k.d.Ping, DefaultPing), orElse(k.d.Pong, DefaultPong), orElse(k.d.Idle, DefaultIdle))/4, time.Millisecond)
}

// tick looks after a connection now and then.
func (k *client) tick() {
	c := k.c
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.recovered()
	if c.err != nil {
		return
	}
	now := clock()
	if c.unsettled(now) {
		return
	}
	c.replenish() // memory may be short no longer
	ping, pong := int64(orElse(k.d.Ping, DefaultPing)), int64(orElse(k.d.Pong, DefaultPong))
	heard := now - c.heard.Load()
	switch {
	case c.pinged != 0 && now-c.pinged >= pong && heard >= pong:
		c.failLocked(errDead)
		return
	case heard >= ping-int64(k.tickEvery()):
		c.sendPing()
	}
	if len(c.streams) == 0 && now-k.since >= int64(orElse(k.d.Idle, DefaultIdle)) {
		if k.LeaveUnused() {
			c.failLocked(errIdle)
			return
		}
	}
	k.timer.Reset(k.tickEvery())
}
