package jwt

import (
	"container/list"
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/connect"
	"culvert.dev/identity"
	"culvert.dev/tunnel"
)

// Tokens verifies tokens of issuers. The zero value knows none; its fields must not be
// changed once it is used. It is safe for concurrent use.
type Tokens struct {
	// Trust returns what a trust domain is verified by, for JWT-SVIDs: that of an
	// identity.Store. Nil means that there is none.
	Trust func(domain string) *identity.Trust

	// ReadFile reads the TokenFile of an Issuer. Nil means that there is none.
	ReadFile func(name string) ([]byte, error)

	// Dial connects to issuers; nil means a net.Dialer's DialContext.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	Log *slog.Logger // nil discards

	transport http.RoundTripper // by which keys are fetched; nil means HTTPS
	now       func() time.Time  // nil means time.Now

	known atomic.Pointer[[]*issuer]

	mu      sync.Mutex // guards what follows
	changed chan struct{}
	counts  map[counted]*atomic.Uint64

	cacheMu sync.Mutex // guards what follows
	cached  map[[sha256.Size]byte]*list.Element
	order   list.List // of *cachedToken, the one that was used last in front
	size    int       // bytes of the tokens that are cached
}

type counted struct {
	issuer string
	cause  Cause
}

// Use has tokens of all accepted, and of no others, from the next one on. The keys of an
// Issuer whose keys are where they were are kept.
func (t *Tokens) Use(all []Issuer) error {
	sources := make(map[place]*source)
	for _, i := range t.issuers() {
		if i.source != nil {
			sources[i.source.place] = i.source
		}
	}
	next := make([]*issuer, 0, len(all))
	for n, one := range all {
		i := &issuer{Issuer: one, called: one.name()}
		if err := one.Check(); err != nil {
			return fmt.Errorf("jwt: issuer %d, %q: %w", n+1, i.called, err)
		}
		if slices.ContainsFunc(next, func(o *issuer) bool { return o.called == i.called }) {
			return fmt.Errorf("jwt: two issuers are called %q", i.called)
		}
		i.id, _ = parseTemplate(one.ID)
		switch {
		case one.svid():
			if t.Trust == nil {
				return fmt.Errorf("jwt: issuer %d: there is no trust domain %q", n+1, one.TrustDomain)
			}
			i.trust = t.Trust(one.TrustDomain)
		case !one.remote():
			i.static, _ = parseKeys(one.JWKS)
		default:
			p := place{url: one.where(), discovery: one.JWKSURL == "", roots: one.Roots, tokenFile: one.TokenFile}
			if sources[p] == nil {
				s, err := newSource(p, t)
				if err != nil {
					return fmt.Errorf("jwt: issuer %d, %q: %w", n+1, i.called, err)
				}
				sources[p] = s
			}
			i.source = sources[p]
		}
		for _, before := range t.issuers() {
			if before.source == i.source && before.trust == i.trust && reflect.DeepEqual(before.Issuer, one) {
				i = before // with what it has verified
			}
		}
		next = append(next, i)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.known.Store(&next)
	for k := range t.counts { // so that issuers that come and go don't use up the labels
		if k.issuer != "" && !slices.ContainsFunc(next, func(i *issuer) bool { return i.called == k.issuer }) {
			delete(t.counts, k)
		}
	}
	if t.changed != nil {
		close(t.changed)
		t.changed = nil
	}
	return nil
}

// issuers returns those in use.
func (t *Tokens) issuers() []*issuer {
	if p := t.known.Load(); p != nil {
		return *p
	}
	return nil
}

// Run fetches keys until ctx ends.
func (t *Tokens) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	running := make(map[*source]context.CancelFunc)
	for {
		t.mu.Lock()
		if t.changed == nil {
			t.changed = make(chan struct{})
		}
		changed := t.changed
		t.mu.Unlock()
		used := make(map[*source]bool)
		for _, i := range t.issuers() {
			if i.source == nil {
				continue
			}
			used[i.source] = true
			if running[i.source] == nil {
				ctx, cancel := context.WithCancel(ctx)
				running[i.source] = cancel
				wg.Go(func() { i.source.run(ctx, t.logKeys) })
			}
		}
		for s, cancel := range running {
			if !used[s] {
				cancel()
				delete(running, s)
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			for _, cancel := range running {
				cancel()
			}
			return
		}
	}
}

func (t *Tokens) logKeys(s *source, err error) {
	switch {
	case t.Log == nil:
	case err != nil:
		t.Log.Warn("the keys of an issuer cannot be fetched; keeping the last ones", "url", s.url, "error", err, "retry_in", fetchAgain)
	default:
		t.Log.Info("the keys of an issuer are fetched again", "url", s.url)
	}
}

// Accept returns an Authenticator for the tokens of the issuers with those names. It finds
// them at each request, so that it follows Use.
func (t *Tokens) Accept(names []string) *Authenticator {
	return &Authenticator{tokens: t, names: names}
}

// An Authenticator takes the tokens of some issuers.
type Authenticator struct {
	tokens *Tokens
	names  []string
	last   atomic.Pointer[selection]
}

// A selection is what issuers found last.
type selection struct {
	of       *[]*issuer
	accepted []*issuer
}

// Challenges implements connect.Authenticator.
func (*Authenticator) Challenges() []string { return new(connect.Bearer).Challenges() }

// Authenticate implements connect.Authenticator. A client's own token counts before that
// of a load balancer, so that a wrong one is refused whatever else is there. It returns
// connect.ErrCredentials itself where there is no token.
func (a *Authenticator) Authenticate(ctx context.Context, c connect.Credentials) (tunnel.Peer, error) {
	issuers := a.issuers()
	if c.Scheme != "" {
		if c.Scheme != "bearer" || !slices.ContainsFunc(issuers, func(i *issuer) bool { return i.Header == "" }) {
			return tunnel.Peer{}, connect.ErrCredentials
		}
		return a.tokens.verify(ctx, issuers, "", c.Value, &c)
	}
	for n, i := range issuers {
		if i.Header == "" || slices.ContainsFunc(issuers[:n], func(o *issuer) bool { return o.Header == i.Header }) {
			continue
		}
		switch value, n := c.Fields.Get(i.Header); {
		case n > 1:
			return tunnel.Peer{}, refuse(Malformed, "%d fields %s", n, i.Header)
		case n == 1:
			return a.tokens.verify(ctx, issuers, i.Header, value, &c)
		}
	}
	return tunnel.Peer{}, connect.ErrCredentials
}

// issuers returns those that are accepted.
func (a *Authenticator) issuers() []*issuer {
	now := a.tokens.known.Load()
	if last := a.last.Load(); last != nil && last.of == now {
		return last.accepted
	}
	next := &selection{of: now}
	for _, i := range a.tokens.issuers() {
		if slices.Contains(a.names, i.called) {
			next.accepted = append(next.accepted, i)
		}
	}
	a.last.Store(next)
	return next.accepted
}

// verify returns the peer of a token that came in the field with that name, "" for the
// client's own credentials, if it is of one of issuers.
func (t *Tokens) verify(ctx context.Context, issuers []*issuer, field, compact string, c *connect.Credentials) (tunnel.Peer, error) {
	sum := sha256.Sum256([]byte(compact))
	if known := t.recall(sum); known != nil && known.issuer.Header == field && slices.Contains(issuers, known.issuer) {
		if r := known.binding.check(c); r != nil {
			t.count(known.issuer.called, r.Cause)
			return tunnel.Peer{}, r
		}
		t.count(known.issuer.called, Accepted)
		return known.peer, nil
	}
	tok, r := parse(compact)
	if r != nil {
		t.count("", r.Cause)
		return tunnel.Peer{}, r
	}
	bound, r := tok.binding()
	if r != nil {
		t.count("", r.Cause)
		return tunnel.Peer{}, r
	}
	var refused error
	for _, i := range issuers {
		if i.Header != field || !i.issued(tok) {
			continue
		}
		p, keys, err := i.verify(ctx, tok)
		if err == nil {
			if r := bound.check(c); r != nil {
				err = r
			}
		}
		t.countError(i.called, err)
		if err == nil {
			t.remember(&cachedToken{sum: sum, size: len(compact), issuer: i, keys: keys, binding: bound, peer: p, until: p.Auth.Expires})
			return p, nil
		}
		refused = err
	}
	if refused == nil {
		t.count("", UnknownIssuer)
		refused = tok.unknownIssuer()
	}
	return tunnel.Peer{}, refused
}

// unknownIssuer is the refusal of a token of nobody whose tokens are accepted.
func (t *token) unknownIssuer() *Refusal {
	if domain, _, err := identity.ParseSPIFFEID(t.subject); err == nil && t.issuer == "" {
		return refuse(UnknownIssuer, "JWT-SVIDs of the trust domain %q are not accepted here", tunnel.Clip(domain))
	}
	return refuse(UnknownIssuer, "tokens of the issuer %q are not accepted here", tunnel.Clip(t.issuer))
}

// issued reports whether the token says that it is of i.
func (i *issuer) issued(t *token) bool {
	switch {
	case i.svid():
		domain, _, err := identity.ParseSPIFFEID(t.subject)
		return err == nil && domain == i.TrustDomain
	case i.Signer != "" && t.issuer == "":
		return t.header.Iss == i.URL
	}
	return t.issuer == i.URL
}

// Limits of the tokens that need no second look.
const (
	maxCached     = 8192
	maxCachedSize = 8 << 20 // bytes of the tokens, which bound what is made of them
)

// A cachedToken was verified, and is good for as long as the keys and the issuer are what
// they were then.
type cachedToken struct {
	sum     [sha256.Size]byte
	size    int
	issuer  *issuer
	keys    *keySet
	binding binding
	peer    tunnel.Peer
	until   time.Time
}

// recall returns what is known of a token; nil for nothing.
func (t *Tokens) recall(sum [sha256.Size]byte) *cachedToken {
	now := time.Now()
	t.cacheMu.Lock()
	defer t.cacheMu.Unlock()
	e := t.cached[sum]
	if e == nil {
		return nil
	}
	known := e.Value.(*cachedToken)
	if !now.Before(known.until) || !known.current() {
		t.forget(e)
		return nil
	}
	t.order.MoveToFront(e)
	return known
}

// current reports whether the keys that have verified the token are still the issuer's.
func (k *cachedToken) current() bool {
	set, err := k.issuer.keys()
	return err == nil && set == k.keys
}

func (t *Tokens) remember(k *cachedToken) {
	t.cacheMu.Lock()
	defer t.cacheMu.Unlock()
	if e := t.cached[k.sum]; e != nil {
		t.forget(e)
	}
	if t.cached == nil {
		t.cached = make(map[[sha256.Size]byte]*list.Element)
	}
	t.cached[k.sum] = t.order.PushFront(k)
	for t.size += k.size; t.size > maxCachedSize || t.order.Len() > maxCached; {
		t.forget(t.order.Back())
	}
}

func (t *Tokens) forget(e *list.Element) {
	k := t.order.Remove(e).(*cachedToken)
	delete(t.cached, k.sum)
	t.size -= k.size
}

func (t *Tokens) countError(issuer string, err error) {
	switch r := (*Refusal)(nil); {
	case err == nil:
		t.count(issuer, Accepted)
	case asRefusal(err, &r):
		t.count(issuer, r.Cause)
	}
}

func asRefusal(err error, r **Refusal) (ok bool) {
	*r, ok = err.(*Refusal)
	return ok
}

// count counts a token. Issuers are those of the configuration, and "" for none of them.
func (t *Tokens) count(issuer string, c Cause) {
	t.mu.Lock()
	n := t.counts[counted{issuer, c}]
	if n == nil {
		if t.counts == nil {
			t.counts = make(map[counted]*atomic.Uint64)
		}
		n = new(atomic.Uint64)
		t.counts[counted{issuer, c}] = n
	}
	t.mu.Unlock()
	n.Add(1)
}

// Counts calls yield with how many tokens were accepted or refused, by the issuer's name
// and the cause. The name is empty for tokens of nobody that is known.
func (t *Tokens) Counts(yield func(issuer string, c Cause, n uint64)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k, n := range t.counts {
		yield(k.issuer, k.cause, n.Load())
	}
}

// Account returns the peer that a token of Kubernetes makes, of which the ID alone is known:
// that of the first issuer whose service accounts have such ids. It is false where there is
// none. It is for people who ask what would happen.
func (t *Tokens) Account(id string) (p tunnel.Peer, ok bool) {
	for _, i := range t.issuers() {
		if p, ok = i.accountOf(id); ok {
			break
		}
	}
	return p, ok
}

// A Status is what is known of the keys of an issuer.
type Status struct {
	Issuer  string     `json:"issuer"`
	From    string     `json:"from,omitempty"` // the URL
	Keys    int        `json:"keys"`
	Fetched *time.Time `json:"fetched,omitempty"` // nil for keys that are not fetched, or were not yet
	Next    *time.Time `json:"next,omitempty"`    // when they are fetched next; nil for keys that are not
	Error   string     `json:"error,omitempty"`   // of the last attempt
}

// Status returns that of each issuer, in their order.
func (t *Tokens) Status() []Status {
	var all []Status
	for _, i := range t.issuers() {
		one := Status{Issuer: i.called}
		set, err := i.keys()
		if s := i.source; s != nil {
			s.mu.Lock()
			one.From, err = s.url, s.err
			if !s.fetched.IsZero() {
				at := s.fetched
				one.Fetched = &at
			}
			if !s.next.IsZero() {
				at := s.next
				one.Next = &at
			}
			s.mu.Unlock()
		}
		if set != nil {
			one.Keys = len(set.keys)
		}
		if err != nil {
			one.Error = err.Error()
		}
		all = append(all, one)
	}
	return all
}

var _ connect.Authenticator = (*Authenticator)(nil)
