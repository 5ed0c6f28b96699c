package admin

import (
	"cmp"
	"container/list"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// Limits of a RefusalLog. With texts of the greatest length it holds about 5 MiB.
const (
	maxRefusedClients = 256
	maxRefusalsEach   = 16          // of one client; the next one takes the place of its least recent
	maxRefusalError   = 512         // bytes
	errorInterval     = time.Second // between copies of the texts of errors of one Refusal
)

// A RefusalLog keeps the recent refusals, and counts those that are alike: of the
// same reason, listener, source and target. Its size is limited, and so is the part
// of it that one client can fill. The zero value is ready.
//
// The fields of a refusal are in the access log, too, and escaped in the same way.
type RefusalLog struct {
	mu      sync.Mutex                   // guards what follows
	clients map[netip.Addr]*list.Element // of recent
	recent  list.List                    // of *refusedClient, the most recent first
	dropped uint64
	order   uint64 // of the newest refusal
}

// A refusedClient is a source address; with IPv6 it is a network of 64 bits, as a
// host may use any address of its own.
type refusedClient struct {
	addr     netip.Addr
	refusals []*refusal
}

type refusal struct {
	Refusal
	order uint64
}

// Refusals is the answer of /refusals.
type Refusals struct {
	Refusals []Refusal `json:"refusals"` // newest first
	Dropped  uint64    `json:"dropped"`  // refusals that were counted and gave way to newer ones
}

// A Refusal is one line of /refusals. Fields may be added; those that are here keep
// their names and meanings.
type Refusal struct {
	Reason   tunnel.Reason `json:"reason"`
	Listener string        `json:"listener"`
	Source   string        `json:"source"`            // the client's address
	Target   string        `json:"target,omitempty"`  // what it asked for
	Count    uint64        `json:"count"`             // refusals like this
	First    time.Time     `json:"first"`             // the first of them
	Last     time.Time     `json:"last"`              // and the last
	Proto    string        `json:"proto,omitempty"`   // of the last
	Service  string        `json:"service,omitempty"` // likewise
	Error    string        `json:"error,omitempty"`   // of one in the second of the last
}

// Observe notes o if it is a refusal. A client that left before it was refused is
// none.
func (l *RefusalLog) Observe(o *tunnel.Outcome) {
	if o.Carried() || o.Reason == tunnel.NoHello || o.Reason == tunnel.Gone {
		return
	}
	now := time.Now()
	source, client := "", o.Source.Addr().Unmap().WithZone("")
	if client.IsValid() {
		source = client.String()
	} else if o.Process != nil {
		source = o.Process.User()
	}
	if client.Is6() {
		client = netip.PrefixFrom(client, 64).Masked().Addr()
	}
	reason, listener, target := tunnel.Reason(clean(string(o.Reason), maxField)), clean(o.Listener, maxField), clean(o.Target, maxTarget)
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.client(client)
	l.order++
	i := slices.IndexFunc(c.refusals, func(r *refusal) bool {
		return r.Reason == reason && r.Listener == listener && r.Source == source && r.Target == target
	})
	if i < 0 {
		i = len(c.refusals)
		if i < maxRefusalsEach {
			c.refusals = append(c.refusals, nil)
		} else {
			i = leastRecent(c.refusals)
			l.dropped += c.refusals[i].Count
		}
		c.refusals[i] = &refusal{Refusal: Refusal{
			Reason: reason, Listener: strings.Clone(listener), Source: source, Target: strings.Clone(target), First: now,
		}}
	}
	r := c.refusals[i]
	if o.Err != nil && now.Sub(r.Last) >= errorInterval {
		r.Error = strings.Clone(clean(o.Err.Error(), maxRefusalError))
	}
	r.Count++
	r.Last, r.order = now, l.order
	r.Proto, r.Service = clean(o.Proto, maxField), clean(o.Service, maxField)
}

// client returns the entry for a client, in the place of the least recent one if
// there are too many. The caller holds mu.
func (l *RefusalLog) client(addr netip.Addr) *refusedClient {
	if e := l.clients[addr]; e != nil {
		l.recent.MoveToFront(e)
		return e.Value.(*refusedClient)
	}
	if l.clients == nil {
		l.clients = make(map[netip.Addr]*list.Element)
	}
	if len(l.clients) >= maxRefusedClients {
		least := l.recent.Remove(l.recent.Back()).(*refusedClient)
		for _, r := range least.refusals {
			l.dropped += r.Count
		}
		delete(l.clients, least.addr)
	}
	c := &refusedClient{addr: addr}
	l.clients[addr] = l.recent.PushFront(c)
	return c
}

func leastRecent(refusals []*refusal) int {
	least := 0
	for i, r := range refusals {
		if r.order < refusals[least].order {
			least = i
		}
	}
	return least
}

// List returns the refusals that f means, the newest first, never nil.
func (l *RefusalLog) List(f *RefusalFilter) Refusals {
	l.mu.Lock()
	var matching []refusal
	for e := l.recent.Front(); e != nil; e = e.Next() {
		for _, r := range e.Value.(*refusedClient).refusals {
			if f.Match(&r.Refusal) {
				matching = append(matching, *r)
			}
		}
	}
	answer := Refusals{Refusals: []Refusal{}, Dropped: l.dropped}
	l.mu.Unlock()
	slices.SortFunc(matching, func(a, b refusal) int { return cmp.Compare(b.order, a.order) })
	if f.Limit > 0 && len(matching) > f.Limit {
		matching = matching[:f.Limit]
	}
	for _, r := range matching {
		r.First, r.Last = r.First.UTC(), r.Last.UTC() // until here they are compared
		answer.Refusals = append(answer.Refusals, r.Refusal)
	}
	return answer
}

// A RefusalFilter says which refusals are meant: those that fit every field that
// is not zero.
type RefusalFilter struct {
	Reason   string
	Target   string // "host" or "host:port"; without a port, whatever port was asked for
	Listener string // as configured
	Source   netip.Prefix
	Limit    int // the newest so many of them
}

var refusalFilters = []filterKey[RefusalFilter]{
	{"reason", func(f *RefusalFilter, s string) error { f.Reason = s; return nil }},
	{"target", func(f *RefusalFilter, s string) error { f.Target = strings.TrimSuffix(s, "."); return nil }},
	{"source", func(f *RefusalFilter, s string) (err error) { f.Source, err = parseSource(s); return err }},
	{"listener", func(f *RefusalFilter, s string) error { f.Listener = s; return nil }},
	{"limit", func(f *RefusalFilter, s string) (err error) { f.Limit, err = parseLimit(s); return err }},
}

// ParseRefusalFilter reads a query such as reason=no-route&source=192.0.2.0/24. Its
// words are reason, target, source (an address or a CIDR), listener and limit.
func ParseRefusalFilter(q url.Values) (RefusalFilter, error) {
	return parseFilter(q, refusalFilters)
}

// Match reports whether r is meant, whatever the Limit.
func (f *RefusalFilter) Match(r *Refusal) bool {
	source, _ := netip.ParseAddr(r.Source)
	return (f.Reason == "" || f.Reason == string(r.Reason)) &&
		(f.Listener == "" || f.Listener == r.Listener) &&
		(f.Target == "" || strings.EqualFold(f.Target, r.Target) || strings.EqualFold(f.Target, host(r.Target))) &&
		(!f.Source.IsValid() || f.Source.Contains(source))
}

// refusals serves /refusals.
func (a *Admin) refusals(w http.ResponseWriter, r *http.Request) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		text(w, http.StatusBadRequest, "query: "+clean(err.Error(), maxError))
		return
	}
	f, err := ParseRefusalFilter(q)
	if err != nil {
		text(w, http.StatusBadRequest, clean(err.Error(), maxError))
		return
	}
	a.json(w, a.Refusals.List(&f))
}
