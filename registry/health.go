package registry

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"culvert.dev/tunnel"
)

// penalties is how long an endpoint is last in the order after its first,
// second, ... failure in a row.
var penalties = [...]time.Duration{time.Second, 2 * time.Second, 10 * time.Second, 20 * time.Second, 30 * time.Second}

const (
	// retryWindow is how long the first request after a penalty has the endpoint to
	// itself: a black hole costs one request its dial timeout, not all of them.
	retryWindow = 5 * time.Second

	// failureExpiry is how long a failure counts against an endpoint that has not
	// been tried since.
	failureExpiry = 5 * time.Minute

	// maxFailing bounds the memory for failing endpoints, as DNS answers are
	// made by others. Beyond it failures are not remembered.
	maxFailing = 1 << 16
)

// A failure is the state of an endpoint that could not be dialed. Endpoints
// that work have none.
type failure struct {
	inARow int
	since  time.Time // of the first
	until  time.Time // the end of the penalty
	trial  time.Time // the end of the trial under way, zero if none
	host   string    // the DNS name the address came from, "" for a written address
	err    error     // of the last
}

// health remembers across tables which addresses fail, by what dials and by
// what checks say of them. Where they differ, the worse word counts.
type health struct {
	n       atomic.Int64 // of failing and down, so that requests can tell without the lock that all is well
	mu      sync.RWMutex // guards what follows
	failing map[netip.AddrPort]failure
	checked map[Target]verdict
	down    map[netip.AddrPort]int // by how many of the checked
}

// count brings n up to date. The caller holds mu.
func (h *health) count() { h.n.Store(int64(len(h.failing) + len(h.down))) }

// report takes in how a dial of ep ended.
func (h *health) report(ep tunnel.Endpoint, err error) {
	switch {
	case err == nil:
		if h.n.Load() == 0 {
			return
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.failing, ep.Addr)
	case !IsEndpointError(err):
		return
	default:
		now := time.Now()
		h.mu.Lock()
		defer h.mu.Unlock()
		f, known := h.failing[ep.Addr]
		if known && now.Before(f.until) {
			return // dials that were under way together are one failure
		}
		if !known && len(h.failing) >= maxFailing {
			h.sweep(now)
			if len(h.failing) >= maxFailing {
				return
			}
		}
		if !known {
			f.since = now
		}
		f.err = err
		f.until = now.Add(penalties[min(f.inARow, len(penalties)-1)])
		f.inARow++
		f.trial = time.Time{}
		f.host = ep.Host
		if h.failing == nil {
			h.failing = map[netip.AddrPort]failure{}
		}
		h.failing[ep.Addr] = f
	}
	h.count()
}

// IsEndpointError reports whether a dial error is the endpoint's: not that of a client
// that left, or of a gateway out of descriptors or ports.
func IsEndpointError(err error) bool {
	for _, ours := range []error{context.Canceled, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS} {
		if errors.Is(err, ours) {
			return false
		}
	}
	if tunnel.NoLocalPort(err) {
		return false
	}
	switch tunnel.ReasonOf(err) {
	case tunnel.Prohibited, tunnel.Loop, tunnel.Overload:
		return false
	}
	return true
}

// order moves failing endpoints behind the others, the one due back first at
// the front of them, and behind those the ones that a check says are down.
func (h *health) order(eps []tunnel.Endpoint) {
	if h.n.Load() == 0 || len(eps) < 2 {
		return
	}
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	slices.SortStableFunc(eps, func(a, b tunnel.Endpoint) int {
		return cmp.Or(cmp.Compare(min(h.down[a.Addr], 1), min(h.down[b.Addr], 1)), h.due(a.Addr, now).Compare(h.due(b.Addr, now)))
	})
	first := eps[0].Addr
	if f, ok := h.failing[first]; ok && h.down[first] == 0 && h.due(first, now).IsZero() {
		f.trial = now.Add(retryWindow)
		h.failing[first] = f
	}
}

// due is when an address that failed may be tried again, zero for now. The
// caller holds mu.
func (h *health) due(ap netip.AddrPort, now time.Time) time.Time {
	f := h.failing[ap]
	switch {
	case now.Before(f.until):
		return f.until
	case now.Before(f.trial):
		return f.trial
	}
	return time.Time{}
}

// prune forgets endpoints that are not in t any more.
func (h *health) prune(t *Table) {
	if h.n.Load() == 0 {
		return
	}
	h.mu.Lock()
	gone := maps.Clone(h.failing)
	h.mu.Unlock()

	// Outside of the lock, as tables are large and requests wait for it.
	addrs, hosts := map[netip.Addr]bool{}, map[string]bool{}
	for ap, f := range gone {
		if f.host != "" {
			hosts[f.host] = false
		} else {
			addrs[ap.Addr()] = false
		}
	}
	here := func(ep *Endpoint) {
		if _, ok := hosts[ep.Host]; ok {
			hosts[ep.Host] = true
		} else if _, ok := addrs[ep.Addr.Unmap()]; ok {
			addrs[ep.Addr.Unmap()] = true
		}
	}
	for _, all := range []iter.Seq[*Service]{t.Services(), t.Backends()} {
		for s := range all {
			for i := range s.Endpoints {
				here(&s.Endpoints[i])
			}
		}
	}
	for n := range t.Networks() {
		for i := range n.Gateways {
			here(&n.Gateways[i].Address)
			here(&n.Gateways[i].Public)
		}
	}

	h.mu.Lock()
	defer h.mu.Unlock()
	for ap, f := range gone {
		if !hosts[f.host] && !addrs[ap.Addr()] {
			delete(h.failing, ap)
		}
	}
	h.sweep(time.Now())
	h.count()
}

// sweep drops expired failures. The caller holds mu.
func (h *health) sweep(now time.Time) {
	for ap, f := range h.failing {
		if now.Sub(f.until) > failureExpiry {
			delete(h.failing, ap)
		}
	}
}
