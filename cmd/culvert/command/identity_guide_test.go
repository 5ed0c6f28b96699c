package command

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/identity"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry/file"

	"culvert.dev/tunnel"
)

// The recipe of the guide, with each certificate that a client may show: by the files that
// it names, while they rotate.
func TestIdentityGuide(t *testing.T) {
	guide, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "guides", "identity.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, recipe, ok := strings.Cut(string(guide), "```yaml\n")
	recipe, _, closed := strings.Cut(recipe, "```\n")
	if !ok || !closed {
		t.Fatal("the guide has no recipe")
	}
	dir := t.TempDir()
	write := func(name string, content []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	authority := func(domain string) *testca.CA {
		t.Helper()
		ca, err := testca.New(domain, nil)
		if err != nil {
			t.Fatal(err)
		}
		return ca
	}
	issue := func(ca *testca.CA, o testca.Options) *testca.Pair {
		t.Helper()
		if o.SPIFFEID == "" {
			o.SPIFFEID = "spiffe://" + ca.TrustDomain + "/ns/shop/sa/api"
		}
		pair, err := ca.Issue(o)
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	corp, next, partner, legacy := authority("corp.example"), authority("corp.example"), authority("partner.example"), authority("old.example")

	// revoke returns a list of corp's CA.
	if err := corp.Save(filepath.Join(dir, "ca")); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "ca", "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		if key, err = x509.ParseECPrivateKey(block.Bytes); err != nil {
			t.Fatal(err)
		}
	}
	revoke := func(until time.Time, serials ...*big.Int) []byte {
		t.Helper()
		list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(-2 * time.Hour), NextUpdate: until}
		for _, s := range serials {
			list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: s, RevocationTime: time.Now()})
		}
		der, err := x509.CreateRevocationList(rand.Reader, list, corp.Root(), key.(crypto.Signer))
		if err != nil {
			t.Fatal(err)
		}
		return der
	}

	edge := issue(corp, testca.Options{DNSNames: []string{"gw.corp.example"}})
	good, revoked := issue(corp, testca.Options{}), issue(corp, testca.Options{})
	write("edge.pem", edge.CertPEM)
	write("edge.key", edge.KeyPEM)
	write("corp.pem", corp.CertPEM)
	write("corp.crl", revoke(time.Now().Add(time.Hour), revoked.TLS.Leaf.SerialNumber))
	write("legacy.pem", legacy.CertPEM)
	write("culvert.yaml", []byte(recipe))
	c, err := file.Load(filepath.Join(dir, "culvert.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Warnings) > 0 {
		t.Errorf("warnings of the recipe: got %v, want none", c.Warnings)
	}
	ids, err := newIdentities(t.Context(), c.Identity, tunnel.Sockets{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ids.close)
	v := &identity.Verifier{Want: identity.Expectation{Usage: x509.ExtKeyUsageClientAuth}}
	for _, name := range c.Snapshot().Listeners[0].Settings.TLS[0].TrustNames {
		v.Trust = append(v.Trust, ids.store.Trust(name))
	}
	verify := func(p *testca.Pair) string {
		who, err := v.Verify([]*x509.Certificate{p.TLS.Leaf})
		if err != nil {
			return err.Error()
		}
		return who.ID
	}
	const api = "spiffe://corp.example/ns/shop/sa/api"
	for _, tt := range []struct {
		what string
		pair *testca.Pair
		want string
	}{
		{"a good one", good, api},
		{"on the revocation list", revoked, "is on the revocation list of the CA"},
		{"expired", issue(corp, testca.Options{NotBefore: time.Now().Add(-3 * time.Hour), TTL: time.Hour}), "certificate has expired"},
		{"not valid yet", issue(corp, testca.Options{NotBefore: time.Now().Add(3 * time.Hour), TTL: time.Hour}), "certificate is not valid yet"},
		{"of a server", issue(corp, testca.Options{Usage: testca.ServerOnly}), "certificate has the wrong key usage"},
		{"of a CA with that name", issue(next, testca.Options{}), "signed by an unknown CA"},
		{"of a domain that is not trusted", issue(partner, testca.Options{}), `trust domain is "partner.example", want one of ["corp.example"]`},
		{"of the CA without a trust domain", issue(legacy, testca.Options{}), `trust domain is "old.example", want one of ["corp.example"]`},
	} {
		if got := verify(tt.pair); !strings.Contains(got, tt.want) {
			t.Errorf("%s: got %q, want %q", tt.what, got, tt.want)
		}
	}
	eventually := func(what string, f func() bool) {
		t.Helper()
		testnet.Eventually(t, time.Minute, f, "%s; %+v", what, ids.status())
	}

	// The CA rotates: both are accepted, and then the next alone. The list of the old one
	// goes with it.
	of := issue(next, testca.Options{})
	write("corp.pem", append(append([]byte{}, corp.CertPEM...), next.CertPEM...))
	eventually("both CAs", func() bool { return verify(of) == api && verify(good) == api })
	write("corp.crl", revoke(time.Now().Add(-time.Hour)))
	eventually("a list that is out of date", func() bool {
		return strings.Contains(verify(good), "is out of date since") && verify(of) == api
	})
	write("corp.crl", revoke(time.Now().Add(time.Hour)))
	eventually("the next list", func() bool { return verify(revoked) == api })

	// A CA of two trust domains is accepted for both, and warned of.
	write("culvert.yaml", []byte(strings.Replace(recipe, "    legacy:", "    third.example: {caFile: corp.pem}\n    legacy:", 1)))
	if c, err = file.Reload(filepath.Join(dir, "culvert.yaml"), c); err != nil {
		t.Fatal(err)
	}
	if len(c.Warnings) == 0 || !strings.Contains(c.Warnings.Error(), `speaks for the trust domains "corp.example" and "third.example"`) {
		t.Errorf("one CA for two trust domains: got the warnings %v", c.Warnings)
	}
}
