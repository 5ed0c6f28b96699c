package h2

import (
	"context"
	"errors"
	"time"

	"culvert.dev/connect/internal/mux"
)

// A proxy whose process or host is gone without a sign still looks like one that takes its
// time. A request that has no answer after silentAfter, on a connection on which nothing else
// comes either, has the proxy asked by a PING. If nothing comes for pingWait, others use new
// connections, and the request goes to one of them as soon as that works.
const (
	silentAfter = 500 * time.Millisecond
	pingWait    = time.Second
)

// answerTimeoutError is the net.Error for an answer that did not come in time.
type answerTimeoutError struct{}

func (answerTimeoutError) Error() string   { return "no answer in time" }
func (answerTimeoutError) Timeout() bool   { return true }
func (answerTimeoutError) Temporary() bool { return false }

// errMute is why Stream.answer stops to wait: the connection is silent.
var errMute = errors.New("h2: nothing comes on the connection")

// answer waits for the next header list of the peer's on s. Its error is mux.ErrSilent where
// nothing comes on the connection, and a new one works.
func (k *client) answer(ctx context.Context, s *Stream, limit time.Time) (*Head, error) {
	got, err := s.answer(ctx, limit, !k.d.Single && !k.d.Sole)
	if err != errMute {
		return got, err
	}
	k.Leave()
	waiting, replaced := context.WithCancelCause(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer func() {
			if v := recover(); v != nil {
				k.c.fail(k.c.caught(v))
			}
		}()
		if k.d.conns().Try(waiting, func(other *client) error { return other.works(waiting) }) == nil {
			replaced(mux.ErrSilent)
		}
	}()
	got, err = s.answer(waiting, limit, false)
	if err != nil && context.Cause(waiting) == mux.ErrSilent {
		err = mux.ErrSilent
	}
	replaced(nil)
	<-ended
	return got, err
}

// works waits for the settings of the proxy, for which it needs no stream.
func (k *client) works(ctx context.Context) error {
	defer k.Release()
	if err := k.awaitSettings(ctx); err != nil {
		return err
	}
	k.c.mu.Lock()
	defer k.c.mu.Unlock()
	return k.c.err
}

// answer waits for the next header list of the peer's. With watch it returns errMute where
// nothing comes on the connection.
func (s *Stream) answer(ctx context.Context, limit time.Time, watch bool) (*Head, error) {
	c := s.c
	wake := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		s.readable.Broadcast()
	}
	defer context.AfterFunc(ctx, wake)()
	if left := time.Until(limit); left > 0 {
		defer time.AfterFunc(left, wake).Stop()
	}
	var next *time.Timer // of watch
	if watch {
		next = time.AfterFunc(silentAfter, wake)
		defer next.Stop()
	}
	began, asked := mux.Clock(), int64(0)
	c.mu.Lock()
	defer c.mu.Unlock()
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
			return nil, answerTimeoutError{}
		}
		if watch {
			now, heard := mux.Clock(), c.lastFrame.Load()
			switch {
			case asked != 0 && heard >= asked:
				began, asked = now, 0
				next.Reset(silentAfter)
			case asked != 0 && now-asked >= int64(pingWait):
				return nil, errMute
			case asked == 0 && now-max(began, heard) >= int64(silentAfter):
				asked = now
				c.sendPing()
				next.Reset(pingWait)
			case asked == 0:
				next.Reset(silentAfter - time.Duration(now-max(began, heard)))
			}
		}
		s.readable.Wait()
	}
}
