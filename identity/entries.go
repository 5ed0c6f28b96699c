package identity

import (
	"bytes"
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"slices"
	"strings"
	"time"
)

// The kinds of Entry and End.
const (
	KindKey   = "key"
	KindTrust = "trust"
	KindList  = "revocation-list"
)

// An Entry is what a Store has under a name.
type Entry struct {
	Kind       string // KindKey or KindTrust
	Name       string
	Generation uint64
	Err        error // why there is nothing; nil if there is something

	// Ends are when it ends, in parts: the certificate of a key, the CAs of trust and its
	// revocation lists. Nobody changes them.
	Ends []End
}

// An End is when a certificate expires, or a revocation list is out of date.
type End struct {
	Kind      string // KindKey, KindTrust or KindList
	Of        string // the SPIFFE ID, the DNS name or the subject; the issuer of a list
	NotBefore time.Time
	NotAfter  time.Time
}

// Implied reports whether nobody has given the entry its name: it is of a file that a
// listener, a hop or a service names, or of a Secret. The names of others have no colon and
// no slash.
func (e *Entry) Implied() bool { return strings.ContainsAny(e.Name, ":/") }

// Entries returns all entries, sorted by kind and name.
func (s *Store) Entries() []Entry {
	s.mu.Lock()
	keys, trust := make([]*Key, 0, len(s.keys)), make([]*Trust, 0, len(s.trust))
	for _, k := range s.keys {
		keys = append(keys, k)
	}
	for _, t := range s.trust {
		trust = append(trust, t)
	}
	s.mu.Unlock()
	all := make([]Entry, 0, len(keys)+len(trust))
	for _, k := range keys {
		all = append(all, entry(KindKey, k.name, k.now.Load()))
	}
	for _, t := range trust {
		if t.IsGroup() {
			continue // its members are there
		}
		all = append(all, entry(KindTrust, t.name, t.now.Load()))
	}
	slices.SortFunc(all, func(a, b Entry) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name)) })
	return all
}

func entry[T any](kind, name string, v *version[T]) Entry {
	if v == nil {
		return Entry{Kind: kind, Name: name, Err: errUnknown}
	}
	return Entry{Kind: kind, Name: name, Generation: v.generation, Err: v.err, Ends: v.ends}
}

var errUnknown = errors.New("it is not known yet")

// endsOfKey says when a certificate ends: with the first of its chain.
func endsOfKey(c *tls.Certificate) []End {
	if c == nil || c.Leaf == nil {
		return nil
	}
	chain := []*x509.Certificate{c.Leaf}
	for _, der := range c.Certificate[1:] {
		if link, err := x509.ParseCertificate(der); err == nil {
			chain = append(chain, link)
		}
	}
	return []End{{Kind: KindKey, Of: describe(c.Leaf), NotBefore: c.Leaf.NotBefore, NotAfter: expiry(chain)}}
}

// endsOfBundle says when the CAs and the newest revocation lists of a bundle end. The CAs of
// a trust domain replace each other, so that it ends with the last of them; of others, those
// of one name do.
func endsOfBundle(b *Bundle) (all []End) {
	last := make(map[string]*x509.Certificate)
	for _, c := range b.Roots {
		name := ""
		if b.TrustDomain == "" {
			name = string(c.RawSubject)
		}
		if old := last[name]; old == nil || c.NotAfter.After(old.NotAfter) {
			last[name] = c
		}
	}
	for _, c := range last {
		all = append(all, End{Kind: KindTrust, Of: clip(c.Subject.String()), NotBefore: c.NotBefore, NotAfter: c.NotAfter})
	}
	for i, list := range b.Revoked {
		newer := slices.ContainsFunc(b.Revoked[i+1:], func(o *x509.RevocationList) bool { return sameIssuer(o, list) && !o.ThisUpdate.Before(list.ThisUpdate) }) ||
			slices.ContainsFunc(b.Revoked[:i], func(o *x509.RevocationList) bool { return sameIssuer(o, list) && o.ThisUpdate.After(list.ThisUpdate) })
		if !newer && !list.NextUpdate.IsZero() {
			all = append(all, End{Kind: KindList, Of: clip(list.Issuer.String()), NotBefore: list.ThisUpdate, NotAfter: list.NextUpdate})
		}
	}
	slices.SortFunc(all, func(a, b End) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind)*-1, a.NotAfter.Compare(b.NotAfter), cmp.Compare(a.Of, b.Of))
	})
	return all
}

func sameIssuer(a, b *x509.RevocationList) bool {
	return bytes.Equal(a.RawIssuer, b.RawIssuer) && bytes.Equal(a.AuthorityKeyId, b.AuthorityKeyId)
}

// describe is what people call a certificate.
func describe(c *x509.Certificate) string {
	switch {
	case len(c.URIs) > 0:
		return c.URIs[0].String()
	case len(c.DNSNames) > 0:
		return c.DNSNames[0]
	}
	return clip(c.Subject.String())
}
