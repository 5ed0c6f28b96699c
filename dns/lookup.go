package dns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"culvert.dev/internal/wallclock"
	"culvert.dev/tunnel"
)

const (
	defaultTimeout = 2 * time.Second

	minTTL = time.Second // also of answers that say 0
	maxTTL = time.Hour

	// maxNegative limits how long it is cached that a name does not exist: new names
	// are asked for before they exist.
	maxNegative = 10 * time.Second

	// failureTTL is how long a failed lookup is not repeated. Callers that wait for it
	// fail together, not one after the other.
	failureTTL = time.Second

	// A stale answer is served for a day if its servers do not answer, and they are
	// asked again every 5 seconds.
	maxStale = 24 * time.Hour
	staleTTL = 5 * time.Second

	// otherTTL is for answers of the standard library, and halfTTL for those of which
	// one family is missing because its lookup failed.
	otherTTL = 30 * time.Second
	halfTTL  = 30 * time.Second

	// familyGrace is how long addresses of one family wait for those of the other: some
	// servers never answer for AAAA.
	familyGrace = 300 * time.Millisecond

	maxEntries = 10_000 // names in the cache
	maxAddrs   = 64     // of one name and family
)

// A Resolver finds the addresses of names. The zero value uses the system's
// settings. It is safe for use by many goroutines and must not be copied.
//
// /etc/hosts comes first. Where resolv.conf has a search list, names with fewer
// dots than ndots are tried with it, then as they are; others only as they are,
// as is a name that ends in a dot. Both files are read again when they change.
// On systems without resolv.conf it asks the standard library, and caches the
// answer for 30 seconds.
//
// Questions are asked as a Forwarder asks them. Answers are kept for their TTL, within
// 1 second and 1 hour, and for at most 10 seconds that a name does not exist. A stale
// answer is served for up to a day while the servers do not answer.
type Resolver struct {
	Servers []string      // addresses, with or without a port; empty means resolv.conf's, and its search list
	Timeout time.Duration // of one question, all tries together; 0 means 2 seconds

	ResolvConf string // path; "" means /etc/resolv.conf
	Hosts      string // path; "" means /etc/hosts

	Sockets tunnel.Sockets // opens the sockets to servers

	now func() time.Time // nil means time.Now

	mu    sync.Mutex        // guards cache, and what entries point to
	cache map[string]*entry // by name: lower case, no trailing dot

	conf      cached[*config]
	upstreams upstreams
	hosts     cached[map[string][]netip.Addr]
}

// An entry is the cached answer for a name.
type entry struct {
	addrs   []netip.Addr
	err     error         // a *net.DNSError where there are no addrs
	expires time.Time     // then the servers are asked again
	stale   time.Time     // until then addrs may be served stale
	flight  chan struct{} // closed at the end of the lookup under way; nil if there is none
}

// Lookup returns the addresses of host: IPv4 first, as a gateway tries one
// address after the other and IPv6 is what more often leads nowhere. The slice
// is shared and must not be changed. The error is a *net.DNSError.
func (r *Resolver) Lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	addrs, _, err := r.LookupTTL(ctx, host)
	return addrs, err
}

// LookupTTL is Lookup that also returns how long the addresses are good for: up to an
// hour, and 5 seconds for stale ones.
func (r *Resolver) LookupTTL(ctx context.Context, host string) (addrs []netip.Addr, ttl time.Duration, err error) {
	addrs, until, err := r.lookup(ctx, host)
	if err != nil {
		return nil, 0, err
	}
	if ttl = maxTTL; !until.IsZero() {
		if ttl = until.Sub(r.clock()); ttl <= 0 {
			ttl = staleTTL
		}
	}
	return addrs, ttl, nil
}

// lookup is Lookup that also returns when the addresses expire; the zero time means never.
func (r *Resolver) lookup(ctx context.Context, host string) ([]netip.Addr, time.Time, error) {
	var always time.Time
	if a, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{a}, always, nil
	}
	absolute := strings.HasSuffix(host, ".")
	name := strings.ToLower(strings.TrimSuffix(host, "."))
	if name == "localhost" || strings.HasSuffix(name, ".localhost") { // RFC 6761 section 6.3
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, always, nil
	}
	if name == "" || len(name) > 253 {
		return nil, always, &net.DNSError{Err: "not a host name", Name: host, IsNotFound: true}
	}
	if addrs := r.fromHosts(name); len(addrs) > 0 {
		return addrs, always, nil
	}
	conf := r.settings()
	var last error
	for _, candidate := range conf.candidates(name, absolute) {
		addrs, until, err := r.fromCache(ctx, conf, candidate)
		if err == nil {
			return addrs, until, nil
		}
		last = err
		var de *net.DNSError
		if errors.As(err, &de) && !de.IsNotFound {
			break // it might exist: what the next one says is for another name
		}
	}
	return nil, always, last
}

func (r *Resolver) clock() time.Time {
	if r.now != nil {
		return r.now()
	}
	return time.Now()
}

// fromCache returns the cached answer for name, or asks. The first caller asks, with
// its own context; others wait for it, unless there is a stale answer. If the first
// one gives up, the next one asks.
func (r *Resolver) fromCache(ctx context.Context, conf *config, name string) ([]netip.Addr, time.Time, error) {
	for {
		now := r.clock()
		r.mu.Lock()
		e := r.cache[name]
		if e == nil {
			e = r.insert(name, now)
		}
		switch {
		case !wallclock.Passed(now, e.expires):
			defer r.mu.Unlock()
			return e.addrs, e.expires, e.err
		case e.flight == nil:
			e.flight = make(chan struct{})
			r.mu.Unlock()
			return r.refresh(ctx, conf, name, e)
		case len(e.addrs) > 0 && now.Before(e.stale):
			defer r.mu.Unlock()
			return e.addrs, e.expires, nil
		}
		flight := e.flight
		r.mu.Unlock()
		select {
		case <-flight:
		case <-ctx.Done():
			return nil, time.Time{}, contextError(ctx, name)
		}
	}
}

// refresh asks for name and puts the answer into e, whose flight is the caller's.
func (r *Resolver) refresh(ctx context.Context, conf *config, name string, e *entry) ([]netip.Addr, time.Time, error) {
	defer func() { // also after a panic, or all others would wait for ever
		r.mu.Lock()
		defer r.mu.Unlock()
		close(e.flight)
		e.flight = nil
	}()
	a := r.ask(ctx, conf, name)

	now := r.clock()
	r.mu.Lock()
	defer r.mu.Unlock()
	var de *net.DNSError
	switch {
	case a.err == nil:
		e.addrs, e.err = a.addrs, nil
		e.expires = now.Add(min(max(a.ttl, minTTL), maxTTL))
		e.stale = e.expires.Add(maxStale)
	case ctx.Err() != nil:
		return nil, time.Time{}, a.err // this caller's trouble only
	case errors.As(a.err, &de) && de.IsNotFound:
		e.addrs, e.err = nil, a.err
		e.expires = now.Add(min(max(a.ttl, minTTL), maxNegative))
	case len(e.addrs) > 0 && now.Before(e.stale):
		e.expires = now.Add(staleTTL)
	default:
		e.addrs, e.err = nil, a.err
		e.expires = now.Add(failureTTL)
	}
	return e.addrs, e.expires, e.err
}

// insert makes room for name. The caller holds mu.
func (r *Resolver) insert(name string, now time.Time) *entry {
	if r.cache == nil {
		r.cache = map[string]*entry{}
	}
	if len(r.cache) >= maxEntries {
		for n, e := range r.cache {
			if e.flight == nil && !now.Before(e.expires) {
				delete(r.cache, n)
			}
		}
		for n, e := range r.cache { // all fresh: any tenth of them
			if len(r.cache) <= maxEntries*9/10 {
				break
			}
			if e.flight == nil {
				delete(r.cache, n)
			}
		}
	}
	e := &entry{}
	r.cache[name] = e
	return e
}

// contextError returns the error of a caller whose context has ended.
func contextError(ctx context.Context, name string) error {
	err := ctx.Err()
	return &net.DNSError{Err: err.Error(), UnwrapErr: err, Name: name, IsTimeout: errors.Is(err, context.DeadlineExceeded)}
}
