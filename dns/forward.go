package dns

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"

	"culvert.dev/internal/wallclock"
	"culvert.dev/tunnel"
)

const (
	forwardTimeout = 1900 * time.Millisecond // for all tries of one question, so that SERVFAIL comes within 2 s
	staleAfter     = 1800 * time.Millisecond // until a stale answer is given, RFC 8767 section 5
	hedgeInterval  = 600 * time.Millisecond  // until the next try begins beside those under way

	defaultCache         = 32 << 20    // bytes
	maxForwardedNegative = time.Minute // in the cache

	// An upstream that did not answer is asked last, at first for minDown, which
	// doubles up to maxDown.
	minDown = time.Second
	maxDown = 30 * time.Second
)

// An Upstream is a recursive resolver.
type Upstream struct {
	Addr string      // host:port or an address, with 53 or 853 as its port
	TLS  *tls.Config // DNS over TLS, RFC 7858; nil means UDP, and TCP for what UDP can't carry
}

// A Forwarder asks other resolvers and caches their answers. The zero value asks
// those of resolv.conf. Fields are set before the first use and not changed. It must
// not be copied.
//
// Every question has an id, a port and a pattern of capitals that cannot be guessed.
// An answer is accepted only from the address that was asked, and only if it repeats
// the question to the letter. Of its records only those that were asked for are used,
// and the chain of CNAMEs to them.
type Forwarder struct {
	// Upstreams are asked in this order; those that did not answer lately come
	// last. Empty means those of ResolvConf, read again when it changes.
	Upstreams  []Upstream
	ResolvConf string // "" means /etc/resolv.conf

	// Zones have upstreams of their own: the innermost counts, by labels. Where a zone has none
	// in the map, it has those of all other names.
	Zones map[string][]Upstream

	// Own reports whether HOST:PORT is an address at which the Server takes questions. Such an
	// upstream is not asked: the question would come back. It must be quick. Nil means that
	// none is.
	Own func(address string) bool

	// PrivateZones are zones, beside Zones, that may have private and loopback
	// addresses; "." is all. For other names such addresses are removed from
	// answers: a web page must not reach its reader's network by a name that it
	// controls (DNS rebinding).
	PrivateZones []string

	CacheBytes int           // 0 means 32 MiB, less than 0 that nothing is kept but for the questions under way
	MinTTL     time.Duration // floor of the TTL that is believed; 0 means 1 s, less than 0 none
	MaxTTL     time.Duration // cap; 0 means 1 h
	MaxStale   time.Duration // how long after its time an answer is served if nothing better comes; 0 means 24 h, less than 0 not at all

	Sockets tunnel.Sockets // opens the sockets to upstreams

	Log *slog.Logger // nil discards

	now func() time.Time // nil means time.Now

	once    sync.Once // for what follows
	zones   zoneSet
	private zoneSet
	groups  map[string][]*upstream // by zone
	cache   *cache
	conf    cached[*config]
	system  upstreams // those of resolv.conf

	mu      sync.Mutex // guards what follows
	closed  bool
	flights map[string]*flight
	wg      sync.WaitGroup // flights
}

// A flight is a question under way, shared by all clients that ask it.
type flight struct {
	done   chan struct{} // closed when e and err are set
	cancel context.CancelFunc
	e      *reply
	err    error
}

func (f *Forwarder) init() {
	f.once.Do(func() {
		zones := make([]string, 0, len(f.Zones))
		f.groups = map[string][]*upstream{}
		for z, ups := range f.Zones {
			zones = append(zones, z)
			f.groups[trimName(z)] = f.newUpstreams(ups)
		}
		f.zones = newZoneSet(zones)
		f.private = newZoneSet(slices.Concat(zones, f.PrivateZones))
		if _, all := f.private[""]; all && !slices.ContainsFunc(f.PrivateZones, func(z string) bool { return trimName(z) == "" }) {
			delete(f.private, "") // upstreams for everything make nothing private
		}
		if len(f.Upstreams) > 0 {
			f.groups[""] = f.newUpstreams(f.Upstreams)
		}
		f.cache = newCache(max(cmp.Or(f.CacheBytes, defaultCache), 0))
		f.flights = map[string]*flight{}
	})
}

func (f *Forwarder) newUpstreams(list []Upstream) []*upstream {
	ups := make([]*upstream, len(list))
	for i, u := range list {
		port := "53"
		if u.TLS != nil {
			port = "853"
		}
		ups[i] = &upstream{addr: withDefaultPort(u.Addr, port), tls: u.TLS, sockets: f.Sockets}
	}
	return ups
}

func (f *Forwarder) clock() time.Time {
	if f.now != nil {
		return f.now()
	}
	return time.Now()
}

// zoneOf returns the zone that name is in and that has its own upstreams.
func (f *Forwarder) zoneOf(name string) (string, bool) {
	f.init()
	return f.zones.of(name)
}

// upstreams returns the upstreams for name, those that answer first.
func (f *Forwarder) upstreams(name string) []*upstream {
	var group []*upstream
	if zone, ok := f.zones.of(name); ok {
		group = f.groups[zone]
	}
	if len(group) == 0 {
		group = f.groups[""]
	}
	if group == nil {
		conf := f.conf.get(cmp.Or(f.ResolvConf, "/etc/resolv.conf"), f.clock(), parseResolvConf)
		return f.notOwn(f.system.inUse(conf.servers, f.Sockets, f.clock()))
	}
	return f.notOwn(answeringFirst(group, f.clock()))
}

// notOwn takes out of ups those that are the Server itself.
func (f *Forwarder) notOwn(ups []*upstream) []*upstream {
	if f.Own == nil {
		return ups
	}
	return slices.DeleteFunc(ups, func(u *upstream) bool { return f.Own(u.addr) })
}

// fromCache returns a cached answer that may be given without asking, its age in
// seconds and whether it is stale.
func (f *Forwarder) fromCache(key []byte) (e *reply, age uint32, stale bool) {
	f.init()
	now := f.clock()
	e, retry := f.cache.get(key)
	switch {
	case e == nil:
	case !wallclock.Passed(now, e.expires):
		return e, f.age(e, now), false
	case now.Before(retry) && f.usable(e, now):
		return e, 0, true
	}
	return nil, 0, false
}

func (f *Forwarder) age(e *reply, now time.Time) uint32 {
	return uint32(wallclock.Since(now, e.stored) / time.Second)
}

// usable reports whether e may be served stale. The wall clock does not count here: after a
// suspension an old answer is better than none, as long as no server answers.
func (f *Forwarder) usable(e *reply, now time.Time) bool {
	most := cmp.Or(f.MaxStale, maxStale)
	return !e.failed && now.Before(e.expires.Add(most))
}

// resolve asks, or waits for a flight of the same question. How is FromUpstream or
// FromStale; where e is nil it is FromCache for a failure and "" for a wait that has
// timed out.
func (f *Forwarder) resolve(ctx context.Context, key []byte, q *query) (e *reply, age uint32, how Source) {
	f.init()
	fl := f.startFlight(ctx, key, q)
	if fl == nil {
		return nil, 0, ""
	}
	old, _ := f.cache.get(key)
	var late <-chan time.Time
	if old != nil && f.usable(old, f.clock()) {
		t := time.NewTimer(staleAfter)
		defer t.Stop()
		late = t.C
	} else {
		old = nil
	}
	select {
	case <-fl.done:
	case <-late:
		return old, 0, FromStale
	case <-ctx.Done():
		return nil, 0, ""
	}
	switch {
	case fl.err == nil:
		return fl.e, 0, FromUpstream
	case old != nil:
		return old, 0, FromStale
	case errors.Is(fl.err, context.DeadlineExceeded):
		return nil, 0, ""
	}
	return nil, 0, FromCache
}

// startFlight returns the flight of a question, which it begins if there is none, or
// nil after Close. A flight goes on without the client that began it: others may wait
// for it, and a late answer is good for the cache.
func (f *Forwarder) startFlight(ctx context.Context, key []byte, q *query) *flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil
	}
	if fl := f.flights[string(key)]; fl != nil {
		return fl
	}
	// One may have ended since the cache was looked at: it puts its answer
	// there before it goes.
	if e, _, stale := f.fromCache(key); e != nil && !stale && !e.failed {
		fl := &flight{done: make(chan struct{}), e: e}
		close(fl.done)
		return fl
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), forwardTimeout)
	fl := &flight{done: make(chan struct{}), cancel: cancel}
	k := string(key)
	f.flights[k] = fl
	asked := *q
	asked.raw = slices.Clone(q.raw) // the asker's memory is soon another's
	f.wg.Go(func() {
		defer cancel()
		f.runFlight(ctx, []byte(k), &asked, fl)
		f.mu.Lock()
		delete(f.flights, k)
		f.mu.Unlock()
		close(fl.done)
	})
	return fl
}

// runFlight asks and stores the result. A panic is a failure.
func (f *Forwarder) runFlight(ctx context.Context, key []byte, q *query, fl *flight) {
	defer func() {
		if v := recover(); v != nil {
			fl.e, fl.err = nil, recovered(f.Log, "a forwarded question", v)
		}
	}()
	fl.e, fl.err = f.ask(ctx, q)
	f.store(key, fl)
}

// store puts the result of a flight into the cache.
func (f *Forwarder) store(key []byte, fl *flight) {
	now := f.clock()
	if fl.err == nil {
		if fl.e.expires.After(fl.e.stored) {
			f.cache.put(key, fl.e)
		}
		return
	}
	if old, _ := f.cache.get(key); old != nil && f.usable(old, now) {
		f.cache.retryAt(key, now.Add(staleTTL))
		return
	}
	f.cache.put(key, &reply{rcode: dns.RcodeServerFailure, failed: true, stored: now, expires: now.Add(failureTTL)})
}

// ask asks the upstreams and makes a reply of the answer.
func (f *Forwarder) ask(ctx context.Context, q *query) (*reply, error) {
	m, err := race(ctx, f.Log, f.upstreams(q.name), q, hedgeInterval, f.clock)
	if err != nil {
		return nil, err
	}
	_, private := f.private.of(q.name)
	c := check{name: q.name, qtype: q.qtype, do: q.do, private: private}
	if err := c.clean(m); err != nil {
		return nil, err
	}
	// The entry's names point into a question of any case.
	m.Question = []dns.Question{{Name: c.fqdn, Qtype: q.qtype, Qclass: dns.ClassINET}}
	e := newReply(m, len(q.raw))
	if e == nil {
		return nil, errUnusable
	}
	e.negative, e.stripped = c.negative, c.stripped
	e.stored = f.clock()
	keep := f.keepFor(m, &c)
	e.expires = e.stored.Add(keep)
	e.clampTTLs(uint32(keep / time.Second))
	return e, nil
}

// keepFor returns how long an answer is cached: the shortest TTL of its records,
// within the limits, and 0 for a negative one without a SOA (RFC 2308 section 5).
func (f *Forwarder) keepFor(m *dns.Msg, c *check) time.Duration {
	most := cmp.Or(f.MaxTTL, maxTTL)
	ttl := most
	if c.negative {
		ttl = min(most, maxForwardedNegative)
		soa := false
		for _, rr := range m.Ns {
			if s, ok := rr.(*dns.SOA); ok {
				soa = true
				ttl = min(ttl, time.Duration(min(s.Hdr.Ttl, s.Minttl))*time.Second)
			}
		}
		if !soa {
			return 0
		}
	}
	for _, rr := range m.Answer {
		ttl = min(ttl, time.Duration(rr.Header().Ttl)*time.Second)
	}
	floor := cmp.Or(f.MinTTL, minTTL)
	return max(ttl, min(max(floor, 0), most))
}

// clampTTLs limits all TTLs, so that clients cache the answer no longer than the
// Forwarder does.
func (e *reply) clampTTLs(limit uint32) {
	for _, at := range e.ttls {
		p := e.wire[at:]
		if ttl := binary.BigEndian.Uint32(p); ttl > limit {
			binary.BigEndian.PutUint32(p, limit)
		}
	}
}

// Health reports for every upstream in use whether it answers; one that does not is
// asked last.
func (f *Forwarder) Health() map[string]bool {
	f.init()
	now := f.clock()
	up := map[string]bool{}
	for _, group := range f.groups {
		for _, u := range group {
			up[u.addr] = u.down(now) == 0
		}
	}
	for _, u := range f.system.all() {
		up[u.addr] = u.down(now) == 0
	}
	return up
}

// CacheSize returns about how many bytes the cache takes.
func (f *Forwarder) CacheSize() int {
	f.init()
	return f.cache.bytes()
}

// Close ends all flights and connections, and returns when they have ended. Later
// questions fail.
func (f *Forwarder) Close() error {
	f.init()
	f.mu.Lock()
	f.closed = true
	for _, fl := range f.flights {
		fl.cancel()
	}
	groups := make([][]*upstream, 0, len(f.groups))
	for _, g := range f.groups {
		groups = append(groups, g)
	}
	f.mu.Unlock()
	f.wg.Wait()
	for _, g := range groups {
		for _, u := range g {
			u.closeIdle()
		}
	}
	return nil
}
