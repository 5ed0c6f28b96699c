//go:build !nospiffe

package spiffe

import (
	"crypto"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spiffe/go-spiffe/v2/bundle/jwtbundle"
	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"culvert.dev/identity"
)

// A known is the last good of all that the agent has said. Parts of it are not changed
// once they are in the Store.
type known struct {
	svids   []svid               // in the agent's order; nil before the first
	roots   map[string]authority // by trust domain
	jwtKeys map[string]jwtKeys   // by trust domain
	revoked []*x509.RevocationList
}

type svid struct {
	id    string
	cert  *tls.Certificate
	print string
}

type authority struct {
	roots []*x509.Certificate
	print string
}

type jwtKeys struct {
	keys  map[string]crypto.PublicKey
	print string
}

func (k *known) domains() []string {
	all := slices.Concat(slices.Collect(maps.Keys(k.roots)), slices.Collect(maps.Keys(k.jwtKeys)))
	slices.Sort(all)
	return slices.Compact(all)
}

// fingerprint tells whether something is another than before.
func fingerprint(parts ...[]byte) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:", len(p))
		h.Write(p)
	}
	return string(h.Sum(nil))
}

// useSVIDs takes up a set of SVIDs. One that is malformed leaves that of its id as it
// was; one that is not in the set is gone.
func (s *Source) useSVIDs(m *workload.X509SVIDResponse) (refused []error) {
	if len(m.Svids) == 0 {
		return []error{errors.New("there is no SVID in it")}
	}
	var next []svid
	for _, v := range m.Svids {
		one, err := s.parseSVID(v)
		if err != nil {
			refused = append(refused, fmt.Errorf("SVID %q: %w", clip(v.GetSpiffeId()), err))
			old := slices.IndexFunc(s.known.svids, func(old svid) bool { return old.id == v.GetSpiffeId() })
			if old < 0 {
				continue
			}
			one = s.known.svids[old]
		}
		if !slices.ContainsFunc(next, func(other svid) bool { return other.id == one.id }) {
			next = append(next, one)
		}
	}
	if next != nil {
		s.known.svids = next
	}
	return refused
}

func (s *Source) parseSVID(v *workload.X509SVID) (svid, error) {
	parsed, err := x509svid.ParseRaw(v.GetX509Svid(), v.GetX509SvidKey())
	if err != nil {
		return svid{}, err
	}
	if id := parsed.ID.String(); id != v.GetSpiffeId() {
		return svid{}, fmt.Errorf("its certificate is that of %s", id)
	}
	leaf := parsed.Certificates[0]
	if leaf.NotAfter.Before(s.time()) {
		return svid{}, fmt.Errorf("it expired at %s", leaf.NotAfter.UTC().Format("2006-01-02T15:04:05Z"))
	}
	c := &tls.Certificate{PrivateKey: parsed.PrivateKey, Leaf: leaf}
	for _, link := range parsed.Certificates {
		c.Certificate = append(c.Certificate, link.Raw)
	}
	return svid{id: v.GetSpiffeId(), cert: c, print: fingerprint(v.GetX509Svid(), v.GetX509SvidKey())}, nil
}

// useX509Bundles takes up a set of bundles. A malformed one leaves that of its trust
// domain as it was; one that is not in the set is gone.
func (s *Source) useX509Bundles(m *workload.X509BundlesResponse) (refused []error) {
	if len(m.Bundles) == 0 {
		return []error{errors.New("there is no X.509 bundle in it")}
	}
	next := make(map[string]authority, len(m.Bundles))
	for _, name := range slices.Sorted(maps.Keys(m.Bundles)) {
		td, err := spiffeid.TrustDomainFromString(name)
		if err != nil {
			refused = append(refused, fmt.Errorf("X.509 bundle of %q: %w", clip(name), err))
			continue
		}
		der := m.Bundles[name]
		parsed, err := x509bundle.ParseRaw(td, der)
		if err == nil && parsed.Empty() {
			err = errors.New("it has no certificate")
		}
		if err != nil {
			refused = append(refused, fmt.Errorf("X.509 bundle of %s: %w", td, err))
			if old, ok := s.known.roots[td.Name()]; ok {
				next[td.Name()] = old
			}
			continue
		}
		next[td.Name()] = authority{roots: parsed.X509Authorities(), print: fingerprint(der)}
	}
	var revoked []*x509.RevocationList
	for _, der := range m.Crl {
		list, err := x509.ParseRevocationList(der)
		if err != nil { // fail closed: the lists that there were stay
			refused = append(refused, fmt.Errorf("revocation list: %w", err))
			revoked = s.known.revoked
			break
		}
		revoked = append(revoked, list)
	}
	s.known.revoked = revoked
	if len(next) > 0 {
		s.known.roots = next
	}
	return refused
}

// useJWTBundles is useX509Bundles for the keys of JWT-SVIDs. A trust domain without any
// is nothing special.
func (s *Source) useJWTBundles(m *workload.JWTBundlesResponse) (refused []error) {
	next := make(map[string]jwtKeys, len(m.Bundles))
	for _, name := range slices.Sorted(maps.Keys(m.Bundles)) {
		td, err := spiffeid.TrustDomainFromString(name)
		if err != nil {
			refused = append(refused, fmt.Errorf("JWT bundle of %q: %w", clip(name), err))
			continue
		}
		jwks := m.Bundles[name]
		parsed, err := jwtbundle.Parse(td, jwks)
		if err != nil {
			refused = append(refused, fmt.Errorf("JWT bundle of %s: %w", td, err))
			if old, ok := s.known.jwtKeys[td.Name()]; ok {
				next[td.Name()] = old
			}
			continue
		}
		next[td.Name()] = jwtKeys{keys: parsed.JWTAuthorities(), print: fingerprint(jwks)}
	}
	s.known.jwtKeys = next
	return refused
}

// apply sets those keys and trust in the Store that are other than before. It is called
// with s.mu held.
func (s *Source) apply() {
	applied := make(map[string]string, len(s.config.Keys)+len(s.config.Trust))
	for name, id := range s.config.Keys {
		s.applyKey(applied, name, id)
	}
	for name, td := range s.config.Trust {
		s.applyTrust(applied, name, td)
	}
	s.applied = applied
}

func (s *Source) applyKey(applied map[string]string, name, id string) {
	if s.known.svids == nil {
		return // the Store says that nobody has set it yet
	}
	at := 0
	if id != "" {
		at = slices.IndexFunc(s.known.svids, func(v svid) bool { return v.id == id })
	}
	kind := "key " + name
	if at < 0 {
		var others []string
		for _, v := range s.known.svids {
			others = append(others, v.id)
		}
		err := fmt.Errorf("the Workload API has no SVID of %s; it has %s", id, list(others))
		if applied[kind] = "no " + err.Error(); s.applied[kind] != applied[kind] {
			s.Store.Key(name).Remove(err)
		}
		return
	}
	v := s.known.svids[at]
	if applied[kind] = v.print; s.applied[kind] != v.print {
		s.Store.Key(name).Set(v.cert)
	}
}

func (s *Source) applyTrust(applied map[string]string, name, td string) {
	if s.known.roots == nil {
		return
	}
	kind := "trust " + name
	roots, has := s.known.roots[td]
	keys, hasKeys := s.known.jwtKeys[td]
	if !has && !hasKeys {
		err := fmt.Errorf("the Workload API has no bundle of %s; it has %s", td, list(s.known.domains()))
		if applied[kind] = "no " + err.Error(); s.applied[kind] != applied[kind] {
			s.Store.Trust(name).Remove(err)
		}
		return
	}
	b := &identity.Bundle{TrustDomain: td, Roots: roots.roots, JWTKeys: keys.keys}
	parts := [][]byte{[]byte(td), []byte(roots.print), []byte(keys.print)}
	for _, l := range s.known.revoked {
		// A revocation list belongs to the domain whose CA signed it.
		if slices.ContainsFunc(roots.roots, func(ca *x509.Certificate) bool { return l.CheckSignatureFrom(ca) == nil }) {
			b.Revoked = append(b.Revoked, l)
			parts = append(parts, l.Raw)
		}
	}
	if applied[kind] = fingerprint(parts...); s.applied[kind] != applied[kind] {
		s.Store.Trust(name).Set(b)
	}
}

// list is for an error: the first names of many.
func list(names []string) string {
	const most = 5
	if len(names) == 0 {
		return "none"
	}
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

// clip is for an error: a name from outside, at a length that fits in a line.
func clip(s string) string {
	const most = 128
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}
