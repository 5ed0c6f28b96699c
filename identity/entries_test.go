package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"slices"
	"testing"
	"time"
)

// A key ends with the first of its chain, CAs of a trust domain with the last of them, those
// of none with the last of each name, and revocation lists with the newest of each issuer.
func TestEntries(t *testing.T) {
	until := func(d time.Duration) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.NotAfter = noon.Add(d) }
	}
	a, next, b := newSigner(t, "a", nil), newSigner(t, "a", nil, until(48*time.Hour)), newSigner(t, "b", nil, until(12*time.Hour))
	between := newSigner(t, "between", a, until(30*time.Minute))
	leaf := between.issue(template("spiffe://a.example/gw"))
	cas := []*x509.Certificate{next.cert, a.cert, b.cert}
	never := a.revoke(noon, noon.Add(time.Hour))
	never.NextUpdate = time.Time{}
	var s Store
	s.Key("edge").Set(&tls.Certificate{Certificate: [][]byte{leaf.Raw, between.cert.Raw}, Leaf: leaf})
	s.Key("edge").Set(&tls.Certificate{Certificate: [][]byte{leaf.Raw, between.cert.Raw}, Leaf: leaf})
	s.Key("gone").Remove(errors.New("no file"))
	s.Trust("a.example").Set(&Bundle{TrustDomain: "a.example", Roots: cas, Revoked: []*x509.RevocationList{
		a.revoke(noon.Add(-time.Hour), noon.Add(2*time.Hour)), a.revoke(noon.Add(-2*time.Hour), noon.Add(-time.Hour)), a.revoke(noon.Add(-time.Hour), noon.Add(time.Hour)),
	}})
	s.Trust("legacy").Set(&Bundle{Roots: cas, Revoked: []*x509.RevocationList{never}})
	type end struct {
		kind, of string
		until    time.Duration
	}
	for i, want := range []struct {
		kind, name string
		generation uint64
		ends       []end
	}{
		{KindKey, "edge", 2, []end{{KindKey, "spiffe://a.example/gw", 30 * time.Minute}}},
		{KindKey, "gone", 1, nil},
		{KindTrust, "a.example", 1, []end{{KindTrust, "CN=a", 48 * time.Hour}, {KindList, "CN=a", time.Hour}}},
		{KindTrust, "legacy", 1, []end{{KindTrust, "CN=b", 12 * time.Hour}, {KindTrust, "CN=a", 48 * time.Hour}}},
	} {
		e := s.Entries()[i]
		var ends []end
		for _, x := range e.Ends {
			ends = append(ends, end{x.Kind, x.Of, x.NotAfter.Sub(noon)})
		}
		if e.Kind != want.kind || e.Name != want.name || e.Generation != want.generation || (e.Err == nil) != (want.ends != nil) || !slices.Equal(ends, want.ends) {
			t.Errorf("entry %d: got %v, want %v", i, e, want)
		}
	}
}
