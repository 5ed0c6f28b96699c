package identity

import (
	"crypto/x509"
	"errors"
	"strings"
	"testing"
	"time"
)

// What a certificate has proved is taken back by a revocation list and by trust that is no
// longer configured. A rotation takes back nothing, nor does trust that is missing.
func TestEvidence(t *testing.T) {
	a, renewed, b := newSigner(t, "root of a", nil), newSigner(t, "root of a", nil), newSigner(t, "root of b", nil)
	between := newSigner(t, "intermediate of a", a)
	leaf := between.issue(template("spiffe://a.example/x"))
	plain := a.issue(func() *x509.Certificate { c := template(); c.DNSNames = []string{"x.test"}; return c }())
	hour := func(by *signer, certs ...*x509.Certificate) *x509.RevocationList {
		return by.revoke(noon.Add(-time.Hour), noon.Add(time.Hour), certs...)
	}
	bundle := func(domain string, root *signer, lists ...*x509.RevocationList) *Bundle {
		return &Bundle{TrustDomain: domain, Roots: []*x509.Certificate{root.cert}, Revoked: lists}
	}
	for _, row := range []struct {
		name  string
		chain []*x509.Certificate
		do    func(s *Store)
		err   string
	}{
		{"nothing", nil, func(*Store) {}, ""},
		{"the leaf is on a list", nil, func(s *Store) { s.Trust("a.example").Set(bundle("a.example", a, hour(between, leaf))) }, `is on the revocation list of the CA "CN=intermediate of a"`},
		{"the intermediate is on a list", nil, func(s *Store) { s.Trust("a.example").Set(bundle("a.example", a, hour(a, between.cert))) }, `is on the revocation list of the CA "CN=root of a"`},
		{"another one is on a list", nil, func(s *Store) { s.Trust("a.example").Set(bundle("a.example", a, hour(a, leaf))) }, ""},
		{"a list that another key has signed", nil, func(s *Store) {
			s.Trust("a.example").Set(bundle("a.example", a, hour(renewed, between.cert)))
		}, ""},
		{"a list that is out of date", nil, func(s *Store) {
			s.Trust("a.example").Set(bundle("a.example", a, a.revoke(noon.Add(-2*time.Hour), noon.Add(-time.Hour))))
		}, ""},
		{"the CA is replaced", nil, func(s *Store) { s.Trust("a.example").Set(bundle("a.example", renewed)) }, ""},
		{"the CA is replaced, and its list stays", nil, func(s *Store) {
			s.Trust("a.example").Set(bundle("a.example", renewed, hour(between, leaf)))
		}, "is on the revocation list"},
		{"a list of another trust domain", nil, func(s *Store) { s.Trust("b.example").Set(bundle("b.example", b, hour(between, leaf))) }, ""},
		{"a list of one of two bundles with that CA", nil, func(s *Store) {
			s.Trust("b.example").Set(bundle("a.example", a, hour(between, leaf)))
		}, ""},
		{"the trust is no longer configured", nil, func(s *Store) { s.Trust("a.example").Remove(ErrNotConfigured) }, "trust that is taken away"},
		{"another trust is no longer configured", nil, func(s *Store) { s.Trust("b.example").Remove(ErrNotConfigured) }, ""},
		{"the trust is missing", nil, func(s *Store) { s.Trust("a.example").Remove(errors.New("the source has no bundle")) }, ""},
		{"no trust domain, on a list", []*x509.Certificate{plain}, func(s *Store) { s.Trust("ca").Set(bundle("", a, hour(a, plain))) }, "is on the revocation list"},
		{"no trust domain, not on a list", []*x509.Certificate{plain}, func(s *Store) { s.Trust("ca").Set(bundle("", a, hour(a, leaf))) }, ""},
	} {
		store := new(Store)
		changes, stop := store.Watch()
		store.Trust("a.example").Set(bundle("a.example", a))
		store.Trust("b.example").Set(bundle("b.example", b))
		store.Trust("ca").Set(bundle("", a))
		v := &Verifier{Trust: []*Trust{store.Trust("a.example"), store.Trust("b.example"), store.Trust("ca")}, Want: Expectation{Usage: x509.ExtKeyUsageClientAuth}, Time: func() time.Time { return noon }}
		chain := row.chain
		if chain == nil {
			chain = []*x509.Certificate{leaf, between.cert}
		}
		p, err := v.Verify(chain)
		if err != nil {
			t.Fatalf("%s: %v", row.name, err)
		}
		if err := p.Revoked(); err != nil {
			t.Errorf("%s: before: %v", row.name, err)
		}
		<-changes // of what has made the store
		before := store.Trust("a.example").Generation() + store.Trust("b.example").Generation() + store.Trust("ca").Generation()
		row.do(store)
		if after := store.Trust("a.example").Generation() + store.Trust("b.example").Generation() + store.Trust("ca").Generation(); after != before {
			<-changes
		}
		for range 2 {
			err = p.Revoked()
			if row.err == "" && err != nil || row.err != "" && (err == nil || !strings.Contains(err.Error(), row.err)) {
				t.Errorf("%s: got %v, want %q", row.name, err, row.err)
			}
		}
		store.Trust("a.example").Set(bundle("a.example", a))
		store.Trust("b.example").Set(bundle("b.example", b))
		store.Trust("ca").Set(bundle("", a))
		if err := p.Revoked(); err != nil {
			t.Errorf("%s: after it was undone: %v", row.name, err)
		}
		stop()
		store.SetDelegates(nil) // nobody watches
	}
}
