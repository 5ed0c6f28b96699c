package identity

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A Store has keys and trust bundles by name. Sources (files, Secrets of Kubernetes, a
// Workload API, bundle endpoints) set them; listeners and dialers look them up once, by
// name, and ask them at each handshake. So rotation makes no new table and ends no
// connection. The zero Store is empty and ready for use. It is safe for concurrent use.
type Store struct {
	mu    sync.Mutex
	keys  map[string]*Key
	trust map[string]*Trust

	delegations atomic.Pointer[map[string][]string] // the trust domains, by the gateway's id

	watchers map[chan struct{}]struct{} // guarded by mu
}

// Watch returns a channel that gets a value soon after a change of trust or of delegates:
// whatever a tunnel.Evidence rests on. Changes that come close together may share one.
// Stop ends that.
func (s *Store) Watch() (changes <-chan struct{}, stop func()) {
	c := make(chan struct{}, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watchers == nil {
		s.watchers = make(map[chan struct{}]struct{})
	}
	s.watchers[c] = struct{}{}
	return c, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers, c)
	}
}

// changed tells those who watch.
func (s *Store) changed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.watchers {
		select {
		case c <- struct{}{}:
		default: // it has not looked since the last change
		}
	}
}

// SetDelegates says, by trust domain, which gateways may name callers of it. What was said
// before is forgotten.
func (s *Store) SetDelegates(byDomain map[string][]string) {
	all := make(map[string][]string)
	for domain, ids := range byDomain {
		for _, id := range ids {
			all[id] = append(all[id], domain)
		}
	}
	s.delegations.Store(&all)
	s.changed()
}

// Delegations returns the trust domains whose callers the gateway with that id may name.
// The slice is not to be changed.
func (s *Store) Delegations(id string) []string {
	if all := s.delegations.Load(); all != nil {
		return (*all)[id]
	}
	return nil
}

// Key returns the key with that name. Nobody needs to have set it yet: until then its
// Certificate is an error. It is the same Key for as long as the Store lives.
func (s *Store) Key(name string) *Key {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.keys[name]
	if k == nil {
		if s.keys == nil {
			s.keys = make(map[string]*Key)
		}
		k = &Key{name: name}
		s.keys[name] = k
	}
	return k
}

// Trust returns the trust with that name, as Key does.
func (s *Store) Trust(name string) *Trust {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.trust[name]
	if t == nil {
		if s.trust == nil {
			s.trust = make(map[string]*Trust)
		}
		t = &Trust{name: name, store: s}
		s.trust[name] = t
	}
	return t
}

// ErrUnused is for Remove, of a key or trust that nothing names any more.
var ErrUnused = errors.New("nothing uses it any more")

// A Key is a certificate with its private key that can be replaced at any time.
type Key struct {
	name string
	now  atomic.Pointer[version[tls.Certificate]]
}

// A Trust is a Bundle that can be replaced at any time.
type Trust struct {
	name    string
	store   *Store // nil for none
	now     atomic.Pointer[version[Bundle]]
	members atomic.Pointer[[]*Trust] // nil where it is no group

	mu      sync.Mutex // guards what follows
	source  *Bundle    // that was Set
	revoked []*x509.RevocationList
}

// NewKey returns a key that is in no Store.
func NewKey(c *tls.Certificate) *Key {
	k := new(Key)
	k.Set(c)
	return k
}

// NewTrust returns trust that is in no Store: in CAs of a trust domain, or of none where
// it is "".
func NewTrust(domain string, roots ...*x509.Certificate) *Trust {
	t := &Trust{name: domain}
	t.Set(&Bundle{TrustDomain: domain, Roots: roots})
	return t
}

// A version is what was set last: a value, or the error that says why there is none.
type version[T any] struct {
	value      *T
	ends       []End
	err        error
	generation uint64
}

// Name returns the key's name in its Store.
func (k *Key) Name() string { return k.name }

// Certificate returns the certificate with its chain and private key. Its Leaf is set.
// Nobody changes it. The error says why there is none.
func (k *Key) Certificate() (*tls.Certificate, error) {
	v := k.now.Load()
	switch {
	case v == nil:
		return nil, fmt.Errorf("key %q is not known yet", k.name)
	case v.err != nil:
		return nil, fmt.Errorf("key %q: %w", k.name, v.err)
	}
	return v.value, nil
}

// Generation returns a number that grows with each Set: what was made with a key of
// another generation is out of date. It is 0 before the first.
func (k *Key) Generation() uint64 { return generation(&k.now) }

// Set replaces the certificate, which belongs to the Key from then on and has its Leaf.
// Handshakes that have begun keep the one they have.
func (k *Key) Set(c *tls.Certificate) { set(&k.now, c, endsOfKey(c), nil) }

// Remove takes the certificate away; err says why there is none. Handshakes that need
// it fail from then on.
func (k *Key) Remove(err error) { set(&k.now, nil, nil, err) }

// A Bundle is what the certificates and tokens of one trust domain are verified by.
// It is not changed once it is set.
type Bundle struct {
	// TrustDomain is the one domain that Roots and JWTKeys speak for. It is empty for
	// CAs that may name anything but a SPIFFE id: trust of the type "ca".
	TrustDomain string

	Roots       []*x509.Certificate
	JWTKeys     map[string]crypto.PublicKey // by key ID; for JWT-SVIDs
	Revoked     []*x509.RevocationList      // signatures are checked by Roots
	RefreshHint time.Duration               // how often the source wants to be asked; 0 says nothing
	Sequence    uint64                      // grows with each version; 0 says nothing

	prepared prepared
}

// Name returns the trust's name in its Store.
func (t *Trust) Name() string { return t.name }

// Bundle returns what is trusted now. The error says why nothing is.
func (t *Trust) Bundle() (*Bundle, error) {
	v := t.now.Load()
	switch {
	case v == nil:
		return nil, fmt.Errorf("trust %q is not known yet", t.name)
	case v.err != nil:
		return nil, fmt.Errorf("trust %q: %w", t.name, v.err)
	}
	return v.value, nil
}

// Generation is that of a Key, for a Trust.
func (t *Trust) Generation() uint64 { return generation(&t.now) }

// Set replaces the bundle, which belongs to the Trust from then on.
func (t *Trust) Set(b *Bundle) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.source = b
	t.setSource()
}

// Revoke adds revocation lists to those of each bundle that is Set, now and later, in place
// of the lists of the last call. It is for an authority in the same process, which knows what
// it has revoked before any source of bundles does.
func (t *Trust) Revoke(lists ...*x509.RevocationList) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.revoked = lists
	if t.source != nil {
		t.setSource()
	}
}

// setSource has the bundle of the source in force, with what was revoked. It is called with
// t.mu held.
func (t *Trust) setSource() {
	b := t.source
	if len(t.revoked) > 0 {
		b = &Bundle{TrustDomain: b.TrustDomain, Roots: b.Roots, JWTKeys: b.JWTKeys, Revoked: slices.Concat(b.Revoked, t.revoked), RefreshHint: b.RefreshHint, Sequence: b.Sequence}
	}
	b.prepare() // and not at the first handshake
	t.set(b, endsOfBundle(b), nil)
}

// SetMembers makes t a group, without a bundle of its own: who trusts it trusts each of all.
// It is called again after a member has changed.
func (t *Trust) SetMembers(all []*Trust) {
	t.members.Store(&all)
	t.set(nil, nil, errGroup)
}

var errGroup = errors.New("it is a group, and each member has a bundle of its own")

// IsGroup reports whether t has members in place of a bundle.
func (t *Trust) IsGroup() bool { return t.members.Load() != nil }

// Members returns list with the members of groups in place of these. It is list itself where
// there is no group.
func Members(list []*Trust) []*Trust {
	if !slices.ContainsFunc(list, (*Trust).IsGroup) {
		return list
	}
	var all []*Trust
	for _, t := range list {
		if members := t.members.Load(); members != nil {
			all = append(all, *members...)
		} else {
			all = append(all, t)
		}
	}
	return all
}

// Remove takes the bundle away; err says why. Nobody is trusted by it from then on.
func (t *Trust) Remove(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.source = nil
	t.set(nil, nil, err)
}

func (t *Trust) set(b *Bundle, ends []End, err error) {
	set(&t.now, b, ends, err)
	if t.store != nil {
		t.store.changed()
	}
}

func generation[T any](p *atomic.Pointer[version[T]]) uint64 {
	if v := p.Load(); v != nil {
		return v.generation
	}
	return 0
}

func set[T any](p *atomic.Pointer[version[T]], value *T, ends []End, err error) {
	for {
		old := p.Load()
		next := &version[T]{value: value, ends: ends, err: err, generation: 1}
		if old != nil {
			next.generation = old.generation + 1
		}
		if p.CompareAndSwap(old, next) {
			return
		}
	}
}
