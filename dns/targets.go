package dns

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/miekg/dns"
)

const (
	maxTargets = 16 // of a name

	// targetTimeout is how long a question waits for the lookup of its targets, so that
	// every answer comes within two seconds. Where some addresses are known, the rest
	// has moreTargetsTimeout.
	targetTimeout      = 1800 * time.Millisecond
	moreTargetsTimeout = 300 * time.Millisecond
)

// A targetState says what remains to be done about the targets of an answer.
type targetState uint8

const (
	targetsReady   targetState = iota // there are none, or they were looked up
	targetsPending                    // they have to be looked up
	targetsRefused                    // they have to be looked up, and no slot to wait in is left
	targetsFailed                     // neither they nor the table have an address
)

// A hostLookup is the lookup of one target, for all exchanges that wait for it.
type hostLookup struct {
	waiting []chan<- struct{} // each has a free buffer

	// Set when it is over:
	done  bool
	addrs []netip.Addr
	ttl   time.Duration
	err   error
}

// resolve looks up the targets and makes the answer again. The exchange has a slot to
// wait in.
func (x *exchange) resolve(ctx context.Context) {
	table, zone := x.table, x.zone
	x.found = x.s.lookUp(ctx, x.a.Targets, len(x.a.Addrs) > 0)
	x.a.reset()
	table.Answer(Question{Name: x.q.name, Type: Type(x.q.qtype), View: x.view, From: x.from.Addr()}, &x.a)
	x.local(table, zone)
	x.table, x.found = nil, nil // a table is large
}

// addresses writes those of x.a, its targets' among them.
func (x *exchange) addresses(w *writer, owner string, ttl uint32) bool {
	six := x.q.qtype == dns.TypeAAAA
	if len(x.a.Targets) == 0 {
		return x.writeAddrs(w, inAnswer, owner, x.a.Addrs, six, ttl)
	}
	addrs, ttl := x.merge(six, ttl)
	return x.writeAddrs(w, inAnswer, owner, addrs, six, ttl)
}

// merge returns the addresses of x.a with those of its targets, by rank, and the
// shortest of their TTLs and ttl. If it cannot, it sets x.targetState.
func (x *exchange) merge(six bool, ttl uint32) ([]Addr, uint32) {
	if x.found == nil {
		switch {
		case x.s.Lookup != nil && x.takeSlot(x.lookupSlots()):
			x.targetState = targetsPending
			return nil, 0
		case len(x.a.Addrs) > 0: // better than nothing
			return x.a.Addrs, ttl
		case x.s.Lookup != nil:
			x.targetState = targetsRefused
			return nil, 0
		}
	}
	all, spare := append(x.merged[:0], x.a.Addrs...), []Addr(nil)
	failed := true
	for i := range x.a.Targets[:min(len(x.a.Targets), maxTargets)] {
		t := &x.a.Targets[i]
		l := x.found[t.Host]
		if l == nil || l.err != nil {
			continue
		}
		failed = false
		for _, a := range l.addrs {
			if a = a.Unmap().WithZone(""); !a.IsValid() || a.Is6() != six {
				continue
			}
			ttl = min(ttl, wireTTL(l.ttl, maxTTL))
			to := Addr{Addr: a, Rank: t.Rank, Weight: t.Weight}
			if x.s.Usable != nil && !x.s.Usable(netip.AddrPortFrom(a, t.Port)) {
				spare = append(spare, to)
				continue
			}
			all = append(all, to)
		}
	}
	if failed && len(x.a.Addrs) == 0 {
		x.targetState = targetsFailed
		return nil, 0
	}
	if !slices.ContainsFunc(all, func(a Addr) bool { return a.Addr.IsValid() && a.Addr.Unmap().Is6() == six }) {
		all = append(all, spare...)
	}
	slices.SortStableFunc(all, func(a, b Addr) int { return cmp.Compare(a.Rank, b.Rank) })
	all = distinct(all)
	x.merged = all
	return all, ttl
}

// lookupSlots returns the slots to wait for Targets in. The address of a client by UDP
// may be forged, and any client may ask for the table's names: such questions have
// slots of their own, apart from those of forwarded questions.
func (x *exchange) lookupSlots() *shares {
	if x.viaUDP {
		return &x.s.unproven
	}
	return &x.s.forwards
}

// distinct removes repeated addresses: two targets may be the same load balancer.
func distinct(addrs []Addr) []Addr {
	out := addrs[:0]
	for _, a := range addrs {
		if !slices.ContainsFunc(out, func(b Addr) bool { return b.Addr == a.Addr }) {
			out = append(out, a)
		}
	}
	return out
}

// lookUp returns the lookups of the targets that are done when all are, or when it is
// time to answer: after moreTargetsTimeout with some, or once one has succeeded.
func (s *Server) lookUp(ctx context.Context, targets []Target, some bool) map[string]*hostLookup {
	targets = targets[:min(len(targets), maxTargets)]
	found := make(map[string]*hostLookup, len(targets))
	news := make(chan struct{}, len(targets))
	s.mu.Lock()
	for i := range targets {
		if host := targets[i].Host; found[host] == nil {
			found[host] = s.join(ctx, host, news)
		}
	}
	s.mu.Unlock()

	limit, more := time.NewTimer(targetTimeout), time.NewTimer(moreTargetsTimeout)
	defer limit.Stop()
	defer more.Stop()
	late := more.C
	if !some {
		late = nil
	}
	known := map[string]*hostLookup{}
	for waiting := true; waiting && len(known) < len(found); {
		select {
		case <-news:
		case <-late:
			waiting = false
		case <-limit.C:
			waiting = false
		case <-ctx.Done():
			waiting = false
		}
		s.mu.Lock()
		for host, l := range found {
			if l.done && known[host] == nil {
				known[host] = l // not changed any more
				if l.err == nil && late == nil {
					late = more.C
				}
			}
		}
		s.mu.Unlock()
	}
	return known
}

// join has news told of the lookup of host, which it begins if there is none.
// A lookup outlives who began it: its cache is for others, too. It ends within
// lookFor, or with Close. The caller holds mu.
func (s *Server) join(ctx context.Context, host string, news chan<- struct{}) *hostLookup {
	if l := s.lookups[host]; l != nil {
		l.waiting = append(l.waiting, news)
		return l
	}
	l := &hostLookup{waiting: []chan<- struct{}{news}}
	if s.lookups == nil {
		s.lookups = map[string]*hostLookup{}
	}
	if s.stops == nil {
		s.stops = map[*stopper]struct{}{}
	}
	s.lookups[host] = l
	if !s.closing {
		ctx = context.WithoutCancel(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, targetTimeout)
	k := &stopper{drain: func() {}, close: closers{cancel, nopCloser{}}}
	s.stops[k] = struct{}{}
	s.wg.Add(1)
	go func() {
		defer s.untrack(k)
		defer cancel()
		addrs, ttl, err := s.safeLookup(ctx, host)
		s.mu.Lock()
		defer s.mu.Unlock()
		l.done, l.addrs, l.ttl, l.err = true, addrs, ttl, err
		delete(s.lookups, host)
		for _, c := range l.waiting {
			c <- struct{}{}
		}
	}()
	return l
}

// safeLookup calls Lookup and turns a panic into an error.
func (s *Server) safeLookup(ctx context.Context, host string) (addrs []netip.Addr, ttl time.Duration, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = recovered(s.Log, "a lookup", v)
		}
	}()
	return s.Lookup(ctx, host)
}

// A nopCloser does nothing on Close.
type nopCloser struct{}

func (nopCloser) Close() error { return nil }
