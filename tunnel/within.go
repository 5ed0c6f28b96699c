package tunnel

import (
	"context"
	"sync"
	"time"
)

// within is context.WithTimeout for which 0 means no limit, and whose timer
// is made when somebody asks for Done: a dial that is answered at once, as most
// are, needs none. The time runs from now.
func within(ctx context.Context, now time.Time, d time.Duration) (context.Context, context.CancelFunc) {
	if d == 0 {
		return context.WithCancel(ctx)
	}
	deadline := now.Add(d)
	if earlier, ok := ctx.Deadline(); ok && earlier.Before(deadline) {
		deadline = earlier
	}
	c := &timely{parent: ctx, deadline: deadline}
	return c, c.cancel
}

// A timely is a context with a deadline and, until it is needed, no timer.
type timely struct {
	parent   context.Context
	deadline time.Time

	mu       sync.Mutex
	real     context.Context // nil until Done
	end      context.CancelFunc
	canceled bool
}

func (c *timely) Deadline() (time.Time, bool) { return c.deadline, true }

func (c *timely) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.real == nil {
		c.real, c.end = context.WithDeadline(c.parent, c.deadline)
		if c.canceled {
			c.end()
		}
	}
	return c.real.Done()
}

func (c *timely) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.real != nil && c.real.Err() != nil:
		return c.real.Err()
	case c.canceled:
		return context.Canceled
	case c.parent.Err() != nil:
		return c.parent.Err()
	case !time.Now().Before(c.deadline): // whether or not the timer has run
		return context.DeadlineExceeded
	}
	return nil
}

// Value asks the real context where there is one: package context finds
// itself that way, and then needs no goroutine for a child of this.
func (c *timely) Value(key any) any {
	c.mu.Lock()
	from := c.real
	c.mu.Unlock()
	if from == nil {
		from = c.parent
	}
	return from.Value(key)
}

func (c *timely) cancel() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.canceled = true
	if c.end != nil {
		c.end()
	}
}
