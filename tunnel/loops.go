package tunnel

import (
	"context"
	"sync"

	"culvert.dev/tunnel/internal/poll"
	"culvert.dev/tunnel/internal/relay"
)

// Loops are event loops, one for each processor, that watch sockets: those
// that listen, those whose preamble is on its way, and tunnels. A connection
// that never has to wait goes from accept to the Relay on one goroutine.
//
// A Server and a Relay that are given the same Loops share them; close those
// after both. The zero value is ready to use. Where there is no epoll, Loops
// do nothing and each connection takes goroutines instead.
type Loops struct {
	Count  int     // 0 means one for each processor that Go uses; it is best one less
	Budget *Budget // pipes are counted here; nil means no limit

	once  sync.Once // guards the settings of loops
	loops relay.Loops
}

// Close stops the loops. What they still watch is closed with a reset.
func (l *Loops) Close() error {
	l.loops.Stop()
	return nil
}

// engine returns the event loops. They have the settings of l from the first call on.
func (l *Loops) engine() *relay.Loops {
	l.once.Do(func() { l.loops.Count, l.loops.Budget = l.Count, l.Budget })
	return &l.loops
}

// Stalls returns how often a connection held up a loop: it waited for something
// else than its context, or computed for long without WillCompute.
func (l *Loops) Stalls() uint64 { return l.loops.Stalls() }

// WillCompute says that the caller, which serves the request or connection of
// ctx, is about to compute for more than a moment, as a password's hash takes. The
// event loop that the caller may be running on goes on with another goroutine. It
// costs nothing to call it elsewhere, or again.
//
// What waits need not call it: whoever waits asks for the context's Done, reads
// from the connection or dials by a NetDialer, and each of them does the same. A
// loop that is held up all the same goes on after a fifth of a second at most.
func WillCompute(ctx context.Context) {
	if t := taskOf(ctx); t != nil {
		t.HandOff()
	}
}

// taskOf returns the task of ctx's connection, nil where there is none.
func taskOf(ctx context.Context) *poll.Task {
	if k, ok := ctx.Value(slotKey{}).(*slot); ok {
		return &k.task
	}
	return nil
}

type slotKey struct{}

// A slotContext is the context of a connection. It knows the slot.
type slotContext struct {
	context.Context
	k *slot
}

// Done hands off the loop: only what is about to wait asks for it. What needs no
// wait, as most of what serves a connection does, asks for Err at most.
func (c *slotContext) Done() <-chan struct{} {
	c.k.task.HandOff()
	return c.Context.Done()
}

func (c *slotContext) Value(key any) any {
	if key == (slotKey{}) {
		return c.k
	}
	return c.Context.Value(key)
}
