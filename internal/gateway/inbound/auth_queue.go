package inbound

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

const (
	maxWaiting = 64              // password checks that wait for their turn
	maxWait    = 4 * time.Second // and for how long: a preamble has 5 s by default
)

// A checkQueue lets a few password checks run at once, which are slow on
// purpose, and shares them out: of one client address at most one runs, and the
// addresses with checks that wait have their turns one after the other. So a
// client that guesses passwords slows down itself alone.
type checkQueue struct {
	mu      sync.Mutex // guards what follows
	free    int        // checks that may begin
	waiting int
	clients map[netip.Prefix]*checkClient
	next    []*checkClient // that have checks waiting and none running, in order
}

// A checkClient is a client address with checks. Of IPv6 it is a /64.
type checkClient struct {
	running bool
	waiting []*checkTurn
}

// A checkTurn is a check that waits. Done is closed when it may run or is refused.
type checkTurn struct {
	done    chan struct{}
	refused bool
}

func newCheckQueue(running int) *checkQueue {
	return &checkQueue{free: max(1, running), clients: make(map[netip.Prefix]*checkClient)}
}

// run calls check when it is its turn. The error is that of a check that did
// not run: there are too many, or ctx ended.
func (q *checkQueue) run(ctx context.Context, from netip.Addr, check func()) error {
	key := clientOf(from)
	if err := q.begin(ctx, key); err != nil {
		return err
	}
	defer q.end(key)
	tunnel.WillCompute(ctx)
	check()
	return nil
}

// clientOf returns what counts as one client: an IPv4 address or an IPv6 /64.
func clientOf(a netip.Addr) netip.Prefix {
	a = a.Unmap()
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, _ := a.WithZone("").Prefix(bits) // the zero Prefix, for the zero Addr
	return p
}

func (q *checkQueue) begin(ctx context.Context, key netip.Prefix) error {
	q.mu.Lock()
	c := q.clients[key]
	if c == nil {
		c = &checkClient{}
		q.clients[key] = c
	}
	if q.free > 0 && !c.running { // then nobody waits who could run
		q.free--
		c.running = true
		q.mu.Unlock()
		return nil
	}
	if q.waiting >= maxWaiting && !q.makeRoom(c) {
		if len(c.waiting) == 0 && !c.running {
			delete(q.clients, key)
		}
		q.mu.Unlock()
		return tunnel.Refusef(tunnel.Overload, "%d password checks are waiting, the limit", maxWaiting)
	}
	turn := &checkTurn{done: make(chan struct{})}
	c.waiting = append(c.waiting, turn)
	q.waiting++
	if len(c.waiting) == 1 && !c.running {
		q.next = append(q.next, c)
	}
	q.mu.Unlock()

	late := time.NewTimer(maxWait)
	defer late.Stop()
	var err error
	select {
	case <-turn.done:
		if turn.refused {
			return tunnel.Refusef(tunnel.Overload, "%d password checks are waiting, the limit, and most of them are of this client", maxWaiting)
		}
		return nil
	case <-ctx.Done():
		err = tunnel.Refusef(tunnel.Gone, "the client left before its password was checked: %w", ctx.Err())
	case <-late.C:
		err = tunnel.Refusef(tunnel.Overload, "the password was not checked within %v", maxWait)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-turn.done:
		if !turn.refused {
			q.endLocked(key) // its turn came meanwhile
		}
	default:
		q.leave(key, c, turn)
	}
	return err
}

// makeRoom refuses the newest check of the client that has most of them waiting,
// if that has more than c would have. The caller holds mu.
func (q *checkQueue) makeRoom(c *checkClient) bool {
	var most *checkClient
	var key netip.Prefix
	for k, other := range q.clients {
		if most == nil || len(other.waiting) > len(most.waiting) {
			most, key = other, k
		}
	}
	if most == c || len(most.waiting) < len(c.waiting)+2 {
		return false
	}
	turn := most.waiting[len(most.waiting)-1]
	turn.refused = true
	close(turn.done)
	q.leave(key, most, turn)
	return true
}

// leave takes a check out that waits. The caller holds mu.
func (q *checkQueue) leave(key netip.Prefix, c *checkClient, turn *checkTurn) {
	i := slices.Index(c.waiting, turn)
	c.waiting = slices.Delete(c.waiting, i, i+1)
	q.waiting--
	if len(c.waiting) > 0 || c.running {
		return
	}
	q.next = slices.DeleteFunc(q.next, func(o *checkClient) bool { return o == c })
	delete(q.clients, key)
}

func (q *checkQueue) end(key netip.Prefix) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.endLocked(key)
}

// endLocked is end for a caller that holds mu.
func (q *checkQueue) endLocked(key netip.Prefix) {
	c := q.clients[key]
	c.running = false
	q.free++
	if len(c.waiting) > 0 {
		q.next = append(q.next, c)
	} else {
		delete(q.clients, key)
	}
	for q.free > 0 && len(q.next) > 0 {
		c := q.next[0]
		q.next = slices.Delete(q.next, 0, 1)
		turn := c.waiting[0]
		c.waiting = slices.Delete(c.waiting, 0, 1)
		c.running = true
		q.free--
		q.waiting--
		close(turn.done)
	}
}
