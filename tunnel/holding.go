package tunnel

import "context"

// A Holding is what a connection of many streams keeps in memory because nobody
// reads it: in the process's account, and in its client's. It is not safe for
// concurrent use; its zero value counts for nobody.
type Holding struct {
	budget *Budget
	client *Client // nil for a connection that several clients use
	held   int64
}

// holdStep is how far the accounts may be behind, for each connection.
const holdStep = 16 << 10 // bytes

// NewHolding returns the Holding of the connection that ctx is of: in the
// accounts of its Server, and of its client where that is the one who sends.
func NewHolding(ctx context.Context, sends bool) Holding {
	k, ok := ctx.Value(slotKey{}).(*slot)
	switch {
	case !ok:
		return Holding{}
	case !sends || k.exempt:
		return Holding{budget: k.server.Budget}
	}
	return Holding{budget: k.server.Budget, client: k.client}
}

// Set counts n bytes, in place of what was counted before.
func (h *Holding) Set(n int) {
	more := int64(n) - h.held
	if h.budget == nil || more == 0 || n != 0 && more > -holdStep && more < holdStep {
		return
	}
	h.held = int64(n)
	h.budget.Hold(int(more))
	h.client.addHeld(more)
}

// Scarce reports whether memory is short, or much of it is held by what nobody
// reads: then a peer is to send no more than is read.
func (h *Holding) Scarce() bool { return h.budget.most(copySize) < copySize }

// MayHold refuses to keep more for the client where so much is held in all that
// there is none left beyond its share.
func (h *Holding) MayHold() error {
	b := h.budget
	if b == nil || b.Backlogs <= 0 {
		return nil
	}
	most := backlogsMost * b.Backlogs
	free := most - b.held.Load()
	if h.client == nil {
		if free > 0 {
			return nil
		}
		return Refusef(Overload, "%d bytes are held that nobody reads, the limit", most)
	}
	return h.client.fair("bytes that nobody reads", most, free, 0, func(c *Client) int64 { return c.held.Load() }, "raise the limit on memory or add a gateway")
}

// backlogsMost is how many times Budget.Backlogs may be held before streams end
// for it.
const backlogsMost = 2
