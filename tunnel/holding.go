package tunnel

import "context"

// A BufferAccount counts the bytes that a connection of many streams keeps in
// memory because nobody reads them: for the process, and for its client. It is
// not safe for concurrent use. Its zero value counts nothing.
type BufferAccount struct {
	budget *Budget
	client *Client // nil for a connection that several clients use
	held   int64
}

// holdStep is how far the accounts may be behind, for each connection.
const holdStep = 16 << 10 // bytes

// NewBufferAccount returns the BufferAccount of the connection that ctx belongs
// to. It counts for the connection's Server and, where sends says that the client
// sends the bytes, for its client.
func NewBufferAccount(ctx context.Context, sends bool) BufferAccount {
	k, ok := ctx.Value(slotKey{}).(*slot)
	switch {
	case !ok:
		return BufferAccount{}
	case !sends || k.exempt:
		return BufferAccount{budget: k.server.Budget}
	}
	return BufferAccount{budget: k.server.Budget, client: k.client}
}

// Set counts n bytes, in place of what was counted before.
func (h *BufferAccount) Set(n int) {
	more := int64(n) - h.held
	if h.budget == nil || more == 0 || n != 0 && more > -holdStep && more < holdStep {
		return
	}
	h.held = int64(n)
	h.budget.AddBuffered(int(more))
	h.client.addHeld(more)
}

// MemoryShort reports whether memory is short, or much of it is taken by bytes
// that nobody reads: a peer may then send no more than is read.
func (h *BufferAccount) MemoryShort() bool { return h.budget.most(copySize) < copySize }

// CheckLimit returns an error where the client has its share of the memory for
// unread bytes already.
func (h *BufferAccount) CheckLimit() error {
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
