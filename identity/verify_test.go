package identity

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha1"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"math/big"
	"net/url"
	"strings"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// noon is the time of all tests.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// A signer signs certificates: it is a CA.
type signer struct {
	t    testing.TB
	cert *x509.Certificate
	key  crypto.Signer
}

var serial int64

// template is that of a workload's certificate.
func template(uris ...string) *x509.Certificate {
	serial++
	c := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "leaf"},
		NotBefore: noon.Add(-time.Hour), NotAfter: noon.Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	for _, s := range uris {
		u, err := url.Parse(s)
		if err != nil {
			panic(err)
		}
		c.URIs = append(c.URIs, u)
	}
	return c
}

// newKey returns an EC key.
func newKey(t testing.TB) crypto.Signer {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// sign has parent sign c for key; a nil parent means that it signs itself.
func sign(t testing.TB, c *x509.Certificate, key crypto.Signer, parent *signer) *x509.Certificate {
	t.Helper()
	by, with := c, key
	if parent != nil {
		by, with = parent.cert, parent.key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, by, key.Public(), with)
	if err != nil {
		t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// newSigner makes a root, or with a parent an intermediate. edit may change its template.
func newSigner(t testing.TB, name string, parent *signer, edit ...func(*x509.Certificate)) *signer {
	t.Helper()
	c := template()
	c.Subject.CommonName, c.ExtKeyUsage = name, nil
	c.NotBefore, c.NotAfter = noon.Add(-24*time.Hour), noon.Add(24*time.Hour)
	c.IsCA, c.BasicConstraintsValid, c.KeyUsage = true, true, x509.KeyUsageCertSign|x509.KeyUsageCRLSign
	for _, f := range edit {
		f(c)
	}
	key := newKey(t)
	return &signer{t, sign(t, c, key, parent), key}
}

// issue signs a leaf, by an EC key.
func (s *signer) issue(c *x509.Certificate) *x509.Certificate {
	s.t.Helper()
	return sign(s.t, c, newKey(s.t), s)
}

// revoke makes the CA's list of revoked certificates.
func (s *signer) revoke(from, until time.Time, certs ...*x509.Certificate) *x509.RevocationList {
	s.t.Helper()
	serial++
	list := &x509.RevocationList{Number: big.NewInt(serial), ThisUpdate: from, NextUpdate: until}
	for _, c := range certs {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: from})
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, s.cert, s.key)
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := x509.ParseRevocationList(der)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// trusted returns a Trust with that bundle.
func trusted(domain string, revoked []*x509.RevocationList, roots ...*signer) *Trust {
	b := &Bundle{TrustDomain: domain, Revoked: revoked}
	for _, r := range roots {
		b.Roots = append(b.Roots, r.cert)
	}
	t := &Trust{name: domain}
	t.Set(b)
	return t
}

// resignSHA1 replaces the signature of c by one with SHA-1, which crypto/x509 no longer
// makes.
func resignSHA1(t *testing.T, c *x509.Certificate, by *rsa.PrivateKey) *x509.Certificate {
	t.Helper()
	var outer struct {
		TBS, Algorithm asn1.RawValue
		Signature      asn1.BitString
	}
	if _, err := asn1.Unmarshal(c.Raw, &outer); err != nil {
		t.Fatal(err)
	}
	sha256, sha1oid := []byte{0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x0b}, []byte{0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x05}
	tbs := bytes.ReplaceAll(outer.TBS.FullBytes, sha256, sha1oid)
	sum := sha1.Sum(tbs)
	signature, err := rsa.SignPKCS1v15(rand.Reader, by, crypto.SHA1, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	outer.TBS = asn1.RawValue{FullBytes: tbs}
	outer.Algorithm = asn1.RawValue{FullBytes: bytes.ReplaceAll(outer.Algorithm.FullBytes, sha256, sha1oid)}
	outer.Signature = asn1.BitString{Bytes: signature, BitLength: 8 * len(signature)}
	der, err := asn1.Marshal(outer)
	if err != nil {
		t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// A certificate is accepted for its own trust domain, and refused for each reason by a
// text of its own.
func TestVerify(t *testing.T) {
	a, b := newSigner(t, "root of a", nil), newSigner(t, "root of b", nil)
	renewed := newSigner(t, "root of a", nil)
	legacy := newSigner(t, "legacy root", nil)
	between := newSigner(t, "intermediate of a", a, func(c *x509.Certificate) { c.URIs = template("spiffe://a.example/ns/prod/sa/admin").URIs })
	narrow := newSigner(t, "narrow", a, func(c *x509.Certificate) { c.PermittedURIDomains = []string{"other.example"} })
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("GODEBUG", "rsa1024min=0")
	weakKey, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	rsaTemplate := template()
	rsaTemplate.Subject.CommonName = "RSA root"
	rsaTemplate.IsCA, rsaTemplate.BasicConstraintsValid, rsaTemplate.KeyUsage, rsaTemplate.ExtKeyUsage = true, true, x509.KeyUsageCertSign, nil
	rsaRoot := &signer{t, sign(t, rsaTemplate, rsaKey, nil), rsaKey}

	const alice, istio = "spiffe://a.example/alice", "spiffe://a.example/ns/prod/sa/admin"
	edit := func(c *x509.Certificate, f func(*x509.Certificate)) *x509.Certificate { f(c); return c }
	leaf := func(c ...*x509.Certificate) []*x509.Certificate { return c }
	good := a.issue(template(alice))
	viaBetween := between.issue(template(alice))
	client := Expectation{Usage: x509.ExtKeyUsageClientAuth}
	domains := []*Trust{trusted("a.example", nil, a), trusted("b.example", nil, b)}
	list := func(lists ...*x509.RevocationList) []*Trust { return []*Trust{trusted("a.example", lists, a)} }
	unknown := new(Store).Trust("later")
	nobody := new(Store).Trust("peers")
	nobody.SetMembers(nil)
	dns := func(names ...string) *x509.Certificate {
		return edit(template(), func(c *x509.Certificate) { c.DNSNames = names })
	}

	for _, tt := range []struct {
		name  string
		chain []*x509.Certificate
		trust []*Trust
		want  Expectation
		id    string // "" where it is refused
		err   string // what the error says
	}{
		{"a for a", leaf(good), domains, client, alice, ""},
		{"b for b", leaf(b.issue(template("spiffe://b.example/bob"))), domains, client, "spiffe://b.example/bob", ""},
		{"over an intermediate", leaf(viaBetween, between.cert), domains, client, alice, ""},
		{"the root is shown, too", leaf(good, a.cert), domains, client, alice, ""},
		{"two CAs of one domain, the first", leaf(good), []*Trust{trusted("a.example", nil, a, renewed)}, client, alice, ""},
		{"two CAs of one domain, the second", leaf(renewed.issue(template(alice))), []*Trust{trusted("a.example", nil, a, renewed)}, client, alice, ""},
		{"two bundles of one domain", leaf(renewed.issue(template(alice))), []*Trust{trusted("a.example", nil, a), trusted("a.example", nil, renewed)}, client, alice, ""},
		{"one CA for two domains, the first", leaf(good), []*Trust{trusted("a.example", nil, a), trusted("b.example", nil, a)}, client, alice, ""},
		{"one CA for two domains, the second", leaf(a.issue(template("spiffe://b.example/bob"))), []*Trust{trusted("a.example", nil, a), trusted("b.example", nil, a)}, client, "spiffe://b.example/bob", ""},

		{"the CA of a for an id of b", leaf(a.issue(template("spiffe://b.example/bob"))), domains, client, "", `the client's id is of trust domain "b.example", and its certificate is signed by a CA of ["a.example"]`},
		{"the CA of b for an id of a", leaf(b.issue(template(alice))), domains, client, "", `the client's id is of trust domain "a.example", and its certificate is signed by a CA of ["b.example"]`},
		{"a domain without a bundle", leaf(a.issue(template("spiffe://c.example/carol"))), domains, client, "", `the client's trust domain is "c.example", want one of ["a.example" "b.example"]`},
		{"a domain that is not wanted", leaf(good), domains, Expectation{Usage: x509.ExtKeyUsageClientAuth, TrustDomains: []string{"b.example"}}, "", `the client's trust domain is "a.example", want one of ["b.example"]`},
		{"an unknown CA", leaf(legacy.issue(template(alice))), domains, client, "", "the client's certificate is signed by an unknown CA"},
		{"no bundle yet", leaf(good), []*Trust{unknown}, client, "", `the client's certificate can't be verified: trust "later" is not known yet`},
		{"no trust at all", leaf(good), nil, client, "", "no CA is configured"},

		{"expired", leaf(a.issue(edit(template(alice), func(c *x509.Certificate) { c.NotAfter = noon.Add(-time.Minute) }))), domains, client, "", `the client's certificate has expired: that of "CN=leaf" was valid until 2026-03-01T11:59:00Z`},
		{"not yet valid", leaf(a.issue(edit(template(alice), func(c *x509.Certificate) { c.NotBefore = noon.Add(time.Minute) }))), domains, client, "", `the client's certificate is not valid yet: that of "CN=leaf" is from 2026-03-01T12:01:00Z on`},
		{"for servers only", leaf(a.issue(edit(template(alice), func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }))), domains, client, "", "the client's certificate has the wrong key usage"},
		{"for clients only, at a server", leaf(a.issue(edit(template(alice), func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }))), domains, Expectation{Usage: x509.ExtKeyUsageServerAuth}, "", "the server's certificate has the wrong key usage"},
		{"not for signatures", leaf(a.issue(edit(template(alice), func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyEncipherment }))), domains, client, "", "the client's certificate has the wrong key usage: it is not for digital signatures"},
		{"name constraints", leaf(narrow.issue(template(alice)), narrow.cert), domains, client, "", "the client's certificate has a name that its CA is not permitted"},
		{"a CA for a workload", leaf(between.cert), domains, client, "", "the client's certificate is that of a CA"},

		{"two URIs", leaf(a.issue(template(alice, "spiffe://a.example/bob"))), domains, client, "", "the client's certificate has 2 URIs, want one"},
		{"two URIs of one value", leaf(a.issue(template(alice, alice))), domains, client, "", "the client's certificate has 2 URIs, want one"},
		{"a malformed id", leaf(a.issue(template("spiffe://a.example/a//b"))), domains, client, "", `the client's certificate has a malformed id: the SPIFFE id "spiffe://a.example/a//b" has a malformed path`},
		{"an id without a path", leaf(a.issue(template("spiffe://a.example"))), domains, client, "", `the SPIFFE id "spiffe://a.example" has no path`},
		{"an id of 2,049 bytes", leaf(a.issue(template("spiffe://a.example/" + strings.Repeat("x", 2030)))), domains, client, "", "has 2049 bytes, limit 2048"},
		{"an id of 2,048 bytes", leaf(a.issue(template("spiffe://a.example/" + strings.Repeat("x", 2029)))), domains, client, "spiffe://a.example/" + strings.Repeat("x", 2029), ""},
		{"an id that only an intermediate has", leaf(between.issue(dns("x.example")), between.cert), domains, client, "", `the client's certificate has no SPIFFE id, want one of ["a.example" "b.example"]`},
		{"no name at all", leaf(a.issue(template())), domains, client, "", "the client's certificate has no SPIFFE id"},
		{"another URI", leaf(a.issue(template("https://a.example/alice"))), domains, client, "", "the client's certificate has no SPIFFE id"},

		{"SHA-1", leaf(resignSHA1(t, rsaRoot.issue(template(alice)), rsaKey)), []*Trust{trusted("a.example", nil, rsaRoot)}, client, "", `the signature of "CN=leaf" is by SHA1-RSA, which is broken`},
		{"an RSA key of 1,024 bits", leaf(sign(t, template(alice), weakKey, a)), domains, client, "", `the RSA key of "CN=leaf" has 1024 bits, want at least 2048`},
		{"an RSA key of 2,048 bits", leaf(sign(t, template(alice), rsaKey, a)), domains, client, alice, ""},
		{"a chain of nine", leaf(good, a.cert, a.cert, a.cert, a.cert, a.cert, a.cert, a.cert, a.cert), domains, client, "", "the client's chain has 9 certificates, limit 8"},
		{"a chain of eight", leaf(good, a.cert, a.cert, a.cert, a.cert, a.cert, a.cert, a.cert), domains, client, alice, ""},
		{"no certificate", nil, domains, client, "", "the client's certificate is missing"},

		{"on the list", leaf(good), list(a.revoke(noon.Add(-time.Hour), noon.Add(time.Hour), good)), client, "", `is on the revocation list of the CA "CN=root of a"`},
		{"not on the list", leaf(good), list(a.revoke(noon.Add(-time.Hour), noon.Add(time.Hour), viaBetween)), client, alice, ""},
		{"on an older list", leaf(good), list(a.revoke(noon.Add(-time.Hour), noon.Add(time.Hour)), a.revoke(noon.Add(-2*time.Hour), noon.Add(-time.Hour), good)), client, "", "is on the revocation list"},
		{"an older list is out of date", leaf(good), list(a.revoke(noon.Add(-2*time.Hour), noon.Add(-time.Hour)), a.revoke(noon.Add(-time.Hour), noon.Add(time.Hour))), client, alice, ""},
		{"the list is out of date", leaf(good), list(a.revoke(noon.Add(-2*time.Hour), noon.Add(-time.Hour))), client, "", `the revocation list of the CA "CN=root of a" is out of date since 2026-03-01T11:00:00Z`},
		{"the list of an intermediate", leaf(viaBetween, between.cert), list(between.revoke(noon.Add(-time.Hour), noon.Add(time.Hour), viaBetween)), client, "", `is on the revocation list of the CA "CN=intermediate of a"`},
		{"an intermediate on the list", leaf(viaBetween, between.cert), list(a.revoke(noon.Add(-time.Hour), noon.Add(time.Hour), between.cert)), client, "", `is on the revocation list of the CA "CN=root of a"`},
		{"the list of another CA", leaf(good), list(b.revoke(noon.Add(-time.Hour), noon.Add(time.Hour), good)), client, alice, ""},
		{"the list of another key of a CA", leaf(good), list(renewed.revoke(noon.Add(-time.Hour), noon.Add(time.Hour), good)), client, alice, ""},
		{"a forged list", leaf(good), list(forgeList(a, renewed)), client, "", `the revocation list of the CA "CN=root of a" has no valid signature`},

		{"wanted by id", leaf(good), domains, Expectation{IDs: []string{"spiffe://a.example/bob", alice}}, alice, ""},
		{"wanted by domain", leaf(good), domains, Expectation{IDs: []string{"spiffe://a.example"}}, alice, ""},
		{"another id is wanted", leaf(good), domains, Expectation{IDs: []string{"spiffe://a.example/bob"}}, "", `the peer's id is "spiffe://a.example/alice", want one of ["spiffe://a.example/bob"]`},
		{"the start of an id is wanted", leaf(good), domains, Expectation{IDs: []string{"spiffe://a.example/ali", "spiffe://a.exampl", "spiffe://"}}, "", "the peer's id is"},

		{"Istio", leaf(a.issue(template(istio))), domains, client, istio, ""},
		{"Linkerd", leaf(a.issue(dns("admin.prod.serviceaccount.identity.linkerd.a.example"))), domains, client, istio, ""},
		{"Linkerd, by the CA of another domain", leaf(b.issue(dns("admin.prod.serviceaccount.identity.linkerd.a.example"))), domains, client, "", `a CA of ["b.example"]`},
		{"Linkerd, beside another name", leaf(a.issue(dns("admin.prod.serviceaccount.identity.linkerd.a.example", "x.example"))), domains, client, "", "has no SPIFFE id"},

		{"no domain: DNS", leaf(legacy.issue(dns("x.example", "y.example"))), []*Trust{trusted("", nil, legacy)}, client, "dns:x.example", ""},
		{"no domain: subject", leaf(legacy.issue(template())), []*Trust{trusted("", nil, legacy)}, client, "subject:CN=leaf", ""},
		{"no domain: URI", leaf(legacy.issue(template("https://x.example/y"))), []*Trust{trusted("", nil, legacy)}, client, "uri:https://x.example/y", ""},
		{"no domain: a SPIFFE id", leaf(legacy.issue(template(alice))), []*Trust{trusted("", nil, legacy)}, client, "uri:" + alice, ""},
		{"no domain: Linkerd", leaf(legacy.issue(dns("admin.prod.serviceaccount.identity.linkerd.a.example"))), []*Trust{trusted("", nil, legacy)}, client, "dns:admin.prod.serviceaccount.identity.linkerd.a.example", ""},
		{"no domain: a subject like an id", leaf(legacy.issue(edit(template(), func(c *x509.Certificate) { c.Subject.CommonName = alice }))), []*Trust{trusted("", nil, legacy)}, client, "subject:CN=" + alice, ""},
		{"no domain: a long name", leaf(legacy.issue(template("https://x.example/" + strings.Repeat("y", 600)))), []*Trust{trusted("", nil, legacy)}, client, "", "limit 512"},
		{"no domain beside one: an id of the domain", leaf(legacy.issue(template(alice))), []*Trust{trusted("", nil, legacy), trusted("a.example", nil, a)}, client, "", "unknown CA"},
		{"no domain beside one: an id of another", leaf(legacy.issue(template("spiffe://c.example/carol"))), []*Trust{trusted("", nil, legacy), trusted("a.example", nil, a)}, client, "", `want one of ["a.example"]`},
		{"no domain beside one that is not known yet", leaf(legacy.issue(template(alice))), []*Trust{trusted("", nil, legacy), unknown}, client, "", "is not known yet"},
		{"a group without members", leaf(good), []*Trust{nobody}, client, "", "the client's certificate can't be verified: no CA is configured"},
		{"no domain beside one: DNS", leaf(legacy.issue(dns("x.example"))), []*Trust{trusted("", nil, legacy), trusted("a.example", nil, a)}, client, "dns:x.example", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := &Verifier{Trust: tt.trust, Want: tt.want, Time: func() time.Time { return noon }}
			got, err := v.Verify(tt.chain)
			switch {
			case tt.id == "":
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got error %v, want %q", err, tt.err)
				}
				if got != (tunnel.Peer{}) {
					t.Errorf("got the peer %+v beside an error", got)
				}
			case err != nil:
				t.Errorf("got error %v, want the id %q", err, tt.id)
			case got.ID != tt.id || got.Method != "mtls" || got.Auth == nil || !got.Auth.Expires.Equal(noon.Add(time.Hour)):
				t.Errorf("got %+v and %+v, want the id %q by mtls until %v", got, got.Auth, tt.id, noon.Add(time.Hour))
			case strings.HasPrefix(tt.id, "spiffe://") != (got.Auth.TrustDomain != ""):
				t.Errorf("got the trust domain %q of %q", got.Auth.TrustDomain, tt.id)
			case tt.id == istio && (got.Auth.TrustDomain != "a.example" || got.Auth.Namespace != "prod" || got.Auth.ServiceAccount != "admin"):
				t.Errorf("got %+v, want admin in prod of a.example", got.Auth)
			}
		})
	}
}

// forgeList is a list in the name of a, which another has signed.
func forgeList(a, by *signer) *x509.RevocationList {
	l := by.revoke(noon.Add(-time.Hour), noon.Add(time.Hour))
	l.RawIssuer, l.AuthorityKeyId = a.cert.RawSubject, a.cert.SubjectKeyId
	return l
}

// A server is verified by a name where no identity is wanted of it.
func TestVerifyNames(t *testing.T) {
	ca, other := newSigner(t, "root", nil), newSigner(t, "other root", nil)
	leaf := func(by *signer) []*x509.Certificate {
		c := template("spiffe://a.example/gw", "https://gw.example/")
		c.DNSNames = []string{"gw.example", "*.wild.example"}
		c.IPAddresses = append(c.IPAddresses, []byte{192, 0, 2, 1})
		return []*x509.Certificate{by.issue(c)}
	}
	for _, tt := range []struct {
		name string
		sans []string
		err  string
	}{
		{"gw.example", nil, ""},
		{"a.wild.example", nil, ""},
		{"192.0.2.1", nil, ""},
		{"gw2.example", nil, `certificate does not have the name "gw2.example"`},
		{"192.0.2.2", nil, `certificate does not have the name "192.0.2.2"`},
		{"", []string{"x.example", "GW.example"}, ""},
		{"", []string{"192.0.2.1"}, ""},
		{"", []string{"a.wild.example"}, ""},
		{"", []string{"*.Wild.example"}, ""},
		{"", []string{"https://gw.example/"}, ""},
		{"", []string{"spiffe://a.example/gw"}, ""},
		{"", []string{"https://gw.example", "*.example", "wild.example", "192.0.2.2"}, `has none of the names ["https://gw.example" "*.example" "wild.example" "192.0.2.2"], it has ["gw.example"`},
	} {
		want := Expectation{Usage: x509.ExtKeyUsageServerAuth, DNSName: tt.name, SANs: tt.sans}
		now := func() time.Time { return noon }
		_, err := (&Verifier{Trust: []*Trust{trusted("", nil, ca)}, Want: want, Time: now}).Verify(leaf(ca))
		if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%q %q: got error %v, want %q", tt.name, tt.sans, err, tt.err)
		}
		unknown := x509.UnknownAuthorityError{}
		if _, err := (&Verifier{Trust: []*Trust{trusted("", nil, ca)}, Want: want, Time: now}).Verify(leaf(other)); err == nil || tt.err == "" && !errors.As(err, &unknown) {
			t.Errorf("%q %q of another CA: got error %v, want that the CA is unknown", tt.name, tt.sans, err)
		}
		if _, err := (&Verifier{System: true, Want: want, Time: now}).Verify(leaf(ca)); err == nil {
			t.Errorf("%q %q: a CA that the system does not have is accepted", tt.name, tt.sans)
		}
		if _, err := (&Verifier{Want: want, Time: now}).Verify(leaf(ca)); err == nil {
			t.Errorf("%q %q: accepted without a bundle", tt.name, tt.sans)
		}
	}
}

// A CA of a trust domain does not sign a SPIFFE id of another, also where that is looked for
// among other names.
func TestVerifySANsByTrustDomain(t *testing.T) {
	a, b := newSigner(t, "a", nil), newSigner(t, "b", nil)
	v := &Verifier{
		Trust: []*Trust{trusted("a.example", nil, a), trusted("b.example", nil, b)},
		Want:  Expectation{Usage: x509.ExtKeyUsageServerAuth, SANs: []string{"spiffe://a.example/db", "spiffe://b.example/db", "db.example"}},
		Time:  func() time.Time { return noon },
	}
	for _, tt := range []struct {
		by   *signer
		uri  string
		name string
		err  string
	}{
		{a, "spiffe://a.example/db", "", ""},
		{b, "spiffe://b.example/db", "", ""},
		{b, "spiffe://a.example/other", "db.example", ""},
		{b, "spiffe://a.example/db", "", `id is "spiffe://a.example/db", and its certificate is signed by a CA of "b.example"`},
		{a, "spiffe://b.example/db", "", `id is "spiffe://b.example/db", and its certificate is signed by a CA of "a.example"`},
		{a, "spiffe://a.example/other", "", "has none of the names"},
	} {
		c := template(tt.uri)
		if tt.name != "" {
			c.DNSNames = []string{tt.name}
		}
		_, err := v.Verify([]*x509.Certificate{tt.by.issue(c)})
		if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s of the CA %s: got error %v, want %q", tt.uri, tt.by.cert.Subject.CommonName, err, tt.err)
		}
	}
}

// The refusal by the bundle that has the CA is told, whatever other bundles there are.
func TestVerifyTellsOfTheRightBundle(t *testing.T) {
	ca, other := newSigner(t, "ca", nil), newSigner(t, "other", nil)
	c := template()
	c.DNSNames, c.ExtKeyUsage = []string{"db.example"}, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	shown := []*x509.Certificate{ca.issue(c)}
	for _, trust := range [][]*Trust{
		{trusted("", nil, ca), trusted("", nil, other)},
		{trusted("", nil, other), trusted("", nil, ca)},
	} {
		for _, want := range []Expectation{{DNSName: "db.example"}, {SANs: []string{"db.example"}}, {}} {
			want.Usage = x509.ExtKeyUsageServerAuth
			_, err := (&Verifier{Trust: trust, Want: want, Time: func() time.Time { return noon }}).Verify(shown)
			if err == nil || !strings.Contains(err.Error(), "certificate has the wrong key usage") {
				t.Errorf("%+v: got error %v, want that the key usage is wrong", want, err)
			}
		}
	}
}

// A bundle that is replaced decides from the next handshake on.
func TestVerifyFollowsRotation(t *testing.T) {
	old, renewed := newSigner(t, "root", nil), newSigner(t, "root", nil)
	trust := trusted("a.example", nil, old)
	v := &Verifier{Trust: []*Trust{trust}, Time: func() time.Time { return noon }}
	accepts := func(by *signer) bool {
		_, err := v.Verify([]*x509.Certificate{by.issue(template("spiffe://a.example/x"))})
		return err == nil
	}
	for _, step := range []struct {
		roots    []*signer
		old, new bool
	}{{[]*signer{old}, true, false}, {[]*signer{old, renewed}, true, true}, {[]*signer{renewed}, false, true}} {
		b := &Bundle{TrustDomain: "a.example"}
		for _, r := range step.roots {
			b.Roots = append(b.Roots, r.cert)
		}
		trust.Set(b)
		if o, n := accepts(old), accepts(renewed); o != step.old || n != step.new {
			t.Errorf("%d roots: the old CA is accepted: %v, want %v; the new one: %v, want %v", len(step.roots), o, step.old, n, step.new)
		}
	}
	trust.Remove(errors.New("gone"))
	if accepts(renewed) {
		t.Error("a certificate is accepted by a bundle that was removed")
	}
}

// Client verifies by the bundle of the handshake, whatever RootCAs say.
func TestVerifierClient(t *testing.T) {
	ca, other := newSigner(t, "root", nil), newSigner(t, "other", nil)
	chain := []*x509.Certificate{ca.issue(template("spiffe://a.example/gw"))}
	for _, tt := range []struct {
		by *signer
		ok bool
	}{{ca, true}, {other, false}} {
		cfg := &tls.Config{RootCAs: x509.NewCertPool(), ClientSessionCache: tls.NewLRUClientSessionCache(1)}
		(&Verifier{Trust: []*Trust{trusted("a.example", nil, tt.by)}, Time: func() time.Time { return noon }}).Client(cfg)
		if err := cfg.VerifyConnection(tls.ConnectionState{PeerCertificates: chain}); (err == nil) != tt.ok || cfg.ClientSessionCache != nil {
			t.Errorf("got error %v and a session cache: %v, want it accepted: %v and none", err, cfg.ClientSessionCache != nil, tt.ok)
		}
	}
}

func BenchmarkVerify(b *testing.B) {
	root := newSigner(b, "root", nil)
	between := newSigner(b, "intermediate", root)
	leaf := between.issue(template("spiffe://a.example/ns/shop/sa/api"))
	for name, chain := range map[string][]*x509.Certificate{"direct": {root.issue(template("spiffe://a.example/ns/shop/sa/api"))}, "intermediate": {leaf, between.cert}} {
		now := func() time.Time { return noon }
		v := &Verifier{Trust: []*Trust{trusted("b.example", nil, newSigner(b, "b", nil)), trusted("a.example", []*x509.RevocationList{root.revoke(noon, noon.Add(time.Hour))}, root)}, Want: Expectation{Usage: x509.ExtKeyUsageClientAuth}, Time: now}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := v.Verify(chain); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(name+" by crypto/x509 alone", func(b *testing.B) {
			b.ReportAllocs()
			roots := x509.NewCertPool()
			roots.AddCert(root.cert)
			for b.Loop() {
				between := x509.NewCertPool()
				for _, c := range chain[1:] {
					between.AddCert(c)
				}
				if _, err := chain[0].Verify(x509.VerifyOptions{CurrentTime: noon, Roots: roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestListOfAnIntermediateCA: a file of revocation lists may have those of CAs below the
// ones that are trusted.
func TestListOfAnIntermediateCA(t *testing.T) {
	root := newSigner(t, "root", nil)
	below, other := newSigner(t, "below", root), newSigner(t, "below", nil)
	good, bad := below.issue(template("spiffe://a.example/good")), below.issue(template("spiffe://a.example/bad"))
	from, until := noon.Add(-time.Hour), noon.Add(time.Hour)
	for _, tt := range []struct {
		name string
		list []byte
		leaf *x509.Certificate
		err  string
	}{
		{"not on the list", below.revoke(from, until, bad).Raw, good, ""},
		{"on the list", below.revoke(from, until, bad).Raw, bad, `is on the revocation list of the CA "CN=below"`},
		{"out of date", below.revoke(from.Add(-time.Hour), from, bad).Raw, good, `the revocation list of the CA "CN=below" is out of date`},
		{"of another CA of that name", other.revoke(from, until, bad).Raw, bad, ""},
	} {
		roots := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root.cert.Raw})
		b, err := ParseBundle("a.example", roots, tt.list)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		trust := &Trust{name: "a.example"}
		trust.Set(b)
		v := &Verifier{Trust: []*Trust{trust}, Want: Expectation{Usage: x509.ExtKeyUsageClientAuth}, Time: func() time.Time { return noon }}
		_, err = v.Verify([]*x509.Certificate{tt.leaf, below.cert})
		if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: got error %v, want %q", tt.name, err, tt.err)
		}
	}
}
