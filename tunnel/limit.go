package tunnel

import "sync/atomic"

// A Budget counts the descriptors that clients cause, so that they never take
// the ones kept back for the gateway's own needs: the admin port, reload, DNS.
// It is also where connections and tunnels learn that memory is short, and has
// the accounts of clients: what one client may take depends on what is left for
// the others. A nil Budget has no limit.
type Budget struct {
	Limit    int64 // descriptors for connections, tunnels and pipes together
	Backlogs int64 // bytes that back-pressure may keep in memory before tunnels are read in small pieces; 0 means no limit

	clients  Clients
	used     atomic.Int64
	held     atomic.Int64
	pressure atomic.Int32

	notify   chan struct{}
	notifyAt atomic.Int64 // of used; 0 for never, and before notify is made
}

// reservedForRefusals is how many descriptors Take leaves for connections that
// are only accepted to be refused.
const reservedForRefusals = 32

// Accept takes one descriptor for an accepted connection.
func (b *Budget) Accept() bool { return b.take(1, 0) }

// Take takes n descriptors for a dial or a pipe, and leaves a few for
// connections that can then be refused in their own protocol's words.
func (b *Budget) Take(n int64) bool { return b.take(n, reservedForRefusals) }

func (b *Budget) take(n, leave int64) bool {
	if b == nil {
		return true
	}
	used := b.used.Add(n)
	if used > b.Limit-leave {
		b.used.Add(-n)
		return false
	}
	if at := b.notifyAt.Load(); at > 0 && used >= at && b.notifyAt.CompareAndSwap(at, 0) {
		select {
		case b.notify <- struct{}{}:
		default:
		}
	}
	return true
}

// NotifyAt returns a channel that receives once n descriptors more than now are
// taken. It is for one goroutine; a call replaces the one before.
func (b *Budget) NotifyAt(n int64) <-chan struct{} {
	if b.notify == nil {
		b.notify = make(chan struct{}, 1)
	}
	select {
	case <-b.notify: // of the call before
	default:
	}
	b.notifyAt.Store(b.used.Load() + n)
	return b.notify
}

// Clients returns the accounts of clients.
func (b *Budget) Clients() *Clients { return &b.clients }

// Give returns n descriptors.
func (b *Budget) Give(n int64) {
	if b != nil {
		b.used.Add(-n)
	}
}

// Used returns how many descriptors are taken.
func (b *Budget) Used() int64 {
	if b == nil {
		return 0
	}
	return b.used.Load()
}
