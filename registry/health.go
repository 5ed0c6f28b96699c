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

// A healthKey is what failures are counted under: an address of TCP or of UDP, or a next hop
// that is asked by its name, HOST:PORT.
type healthKey struct {
	addr      netip.AddrPort
	hop       string // "" where there is an addr
	datagrams bool   // of addr: it is one of UDP
}

// keyOf returns the key of ep. A next hop at an address has the key of that address.
func keyOf(ep *tunnel.Endpoint) healthKey {
	if ep.HealthKey == "" {
		return healthKey{addr: ep.Addr, datagrams: ep.Datagrams}
	}
	if ap, err := netip.ParseAddrPort(ep.HealthKey); err == nil {
		return healthKey{addr: netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())}
	}
	return healthKey{hop: ep.HealthKey}
}

// A failure is the state of an endpoint that could not be dialed. Endpoints
// that work have none.
type failure struct {
	inARow int
	since  time.Time // of the first
	until  time.Time // the end of the penalty
	trial  time.Time // the end of the trial under way, zero if none
	host   string    // the DNS name the address came from, "" for a written address
	err    error     // of the last

	// Of the circuit.
	unconnected int       // dials in a row without a connection
	nextTrial   time.Time // when an open circuit lets the next dial through
	connectErr  error     // of the last of them
}

// health remembers across tables which addresses fail, by what dials and by
// what checks say of them. Where they differ, the worse word counts.
type health struct {
	cutOff  atomic.Uint64 // dials that open circuits have refused
	n       atomic.Int64  // of failing and down, so that requests can tell without the lock that all is well
	mu      sync.RWMutex  // guards what follows
	failing map[healthKey]failure
	checked map[Target]verdict
	down    map[healthKey]int     // by how many of the checked
	downBy  map[checkedKey]int    // the same, of each check
	byName  map[string]nameChecks // of addresses that came from a name, by HOST:PORT
}

// A checkedKey is an endpoint and one way to check it. Services may have different ones
// at one address, such as those for the leader and for the replicas of a database.
type checkedKey struct {
	healthKey
	check Check
}

// nameChecks counts the checks of the addresses of one name.
type nameChecks struct{ all, down int }

// count brings n up to date. The caller holds mu.
func (h *health) count() { h.n.Store(int64(len(h.failing) + len(h.down))) }

// report takes in how a dial of ep ended. A gateway of another network that has answered
// works, whatever it said. What the gateways of an endpoint's Via say is said of the endpoint,
// and what a gateway says of one service that it leads to is said of that service there.
func (h *health) report(ep tunnel.Endpoint, err error) {
	key := keyOf(&ep)
	if o := outlierOf(&ep); o != nil && (err == nil || IsEndpointError(err)) {
		o.reported(err)
	}
	e, ok := errors.AsType[*tunnel.Error](err)
	behindHop := ok && e.BehindHop
	if gateway, ok := key.gateway(); ok {
		if err != nil && !behindHop {
			h.record(gateway, &ep, err) // what is behind it was not asked
			return
		}
		h.record(gateway, &ep, nil)
	} else if behindHop && ep.HealthKey != "" && !isBehind(ep.HealthKey) {
		err = nil
	}
	h.record(key, &ep, err)
}

// record takes in how a dial of ep ended, for key.
func (h *health) record(key healthKey, ep *tunnel.Endpoint, err error) {
	switch {
	case err == nil:
		if h.n.Load() == 0 {
			return
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.failing, key)
	case !IsEndpointError(err):
		return
	default:
		now := time.Now()
		h.mu.Lock()
		defer h.mu.Unlock()
		f, known := h.failing[key]
		f.countUnconnected(ep, err, now)
		if known && now.Before(f.until) {
			h.failing[key] = f
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
		if ep.HealthKey != "" {
			f.host = ""
		}
		if key.hop != "" {
			f.host = hostOf(key.target())
		}
		if h.failing == nil {
			h.failing = map[healthKey]failure{}
		}
		h.failing[key] = f
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
// the front of them, and behind those the ones that a check says are down. Then come
// those that must not be dialed, and last the ones that are ejected.
func (h *health) order(eps []tunnel.Endpoint, check Check) {
	if len(eps) < 2 {
		return
	}
	h.orderByDials(eps, check)
	ejectLast(eps)
}

// orderByDials is order by what dials and checks have found.
func (h *health) orderByDials(eps []tunnel.Endpoint, check Check) {
	forbidden := func(ep *tunnel.Endpoint) bool { return ep.Transport != nil && ep.Transport.Check(ep) != nil }
	for i := range eps {
		if forbidden(&eps[i]) {
			slices.SortStableFunc(eps, func(a, b tunnel.Endpoint) int { return compareBool(forbidden(&a), forbidden(&b)) })
			break
		}
	}
	if h.n.Load() == 0 {
		return
	}
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	slices.SortStableFunc(eps, func(a, b tunnel.Endpoint) int {
		down, due := h.state(&a, check, now)
		otherDown, otherDue := h.state(&b, check, now)
		return cmp.Or(compareBool(down, otherDown), due.Compare(otherDue))
	})
	if down, due := h.state(&eps[0], check, now); down || !due.IsZero() {
		return
	}
	try := func(key healthKey) {
		if f, ok := h.failing[key]; ok {
			f.trial = now.Add(retryWindow)
			h.failing[key] = f
		}
	}
	first := keyOf(&eps[0])
	try(first)
	if gateway, ok := first.gateway(); ok {
		try(gateway)
	}
}

// state reports whether checks say that ep is down, and returns when what failed may be
// tried again, zero for now. check is that of the service; a gateway of a network has its
// own, and what is behind one is no better than it. The caller holds mu.
func (h *health) state(ep *tunnel.Endpoint, check Check, now time.Time) (down bool, due time.Time) {
	key := keyOf(ep)
	if ep.HealthKey != "" && !isBehind(ep.HealthKey) {
		check = Check{}
	}
	down, due = h.isDown(key, check), h.due(key, now)
	if gateway, ok := key.gateway(); ok {
		down = down || h.isDown(gateway, Check{})
		if later := h.due(gateway, now); later.After(due) {
			due = later
		}
	}
	return down, due
}

// unhealthy calls mark with the index of each endpoint that order moves behind the
// others.
func (h *health) unhealthy(eps []tunnel.Endpoint, check Check, mark func(i int)) {
	for i := range eps {
		if ep := &eps[i]; ep.Transport != nil && ep.Transport.Check(ep) != nil {
			mark(i)
		}
	}
	eachEjected(eps, mark)
	if h.n.Load() == 0 {
		return
	}
	now := time.Now()
	h.mu.RLock()
	defer h.mu.RUnlock()
	for i := range eps {
		if down, due := h.state(&eps[i], check, now); down || !due.IsZero() {
			mark(i)
		}
	}
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// isDown reports whether checks say so: of an address the service's own check, or any
// where it has none, and all of those of a name. The caller holds mu.
func (h *health) isDown(key healthKey, check Check) bool {
	key.datagrams = false // checks are of TCP, and speak for the host
	switch own := key.hop == "" || isBehind(key.hop); {
	case own && check.Kind != "":
		return h.downBy[checkedKey{key, check}] > 0
	case own:
		return h.down[key] > 0
	}
	n := h.byName[key.hop]
	return n.all > 0 && n.down == n.all
}

// due is when what failed may be tried again, zero for now. The caller holds mu.
func (h *health) due(key healthKey, now time.Time) time.Time {
	f := h.failing[key]
	switch {
	case now.Before(f.until):
		return f.until
	case now.Before(f.trial):
		return f.trial
	}
	return time.Time{}
}

// String returns the address, or HOST:PORT of a next hop.
func (k healthKey) String() string {
	if k.hop != "" {
		return k.hop
	}
	return k.addr.String()
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
	for key, f := range gone {
		if host, addr := key.place(&f); host != "" {
			hosts[host] = false
		} else {
			addrs[addr] = false
		}
	}
	here := func(ep *Endpoint) {
		if ep.isBehind() {
			if host := ep.hostBehind(); host != "" {
				if _, ok := hosts[host]; ok {
					hosts[host] = true
				}
			}
			return
		}
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
	for key, f := range gone {
		if host, addr := key.place(&f); !hosts[host] && !addrs[addr] {
			delete(h.failing, key)
		}
	}
	h.sweep(time.Now())
	h.count()
}

// place returns what k's failure f is kept for while it is in the table: a host, or else an
// address. Of a service behind a gateway it is that of the gateway.
func (k healthKey) place(f *failure) (host string, addr netip.Addr) {
	gateway, ok := k.gateway()
	switch {
	case ok && gateway.hop != "":
		return hostOf(gateway.hop), netip.Addr{}
	case ok:
		return "", gateway.addr.Addr()
	}
	return f.host, k.addr.Addr()
}

// sweep drops expired failures. The caller holds mu.
func (h *health) sweep(now time.Time) {
	for key, f := range h.failing {
		if now.Sub(f.until) > failureExpiry {
			delete(h.failing, key)
		}
	}
}
