//go:build unix

package interop

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha1"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// An issuer signs whatever it is given, good or bad: testca makes good certificates
// only.
type issuer struct {
	t    testing.TB
	cert *x509.Certificate
	key  crypto.Signer
}

// A chain is what a peer shows, the leaf first, and the leaf's key.
type chain struct {
	certs [][]byte // DER
	key   crypto.Signer
}

var serials atomic.Int64

// signed has by sign a template for key; nil means that key signs for itself.
func signed(t testing.TB, template *x509.Certificate, key crypto.Signer, by *issuer) *x509.Certificate {
	t.Helper()
	parent, with := template, key
	if by != nil {
		parent, with = by.cert, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), with)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// newIssuer returns a root, or an intermediate of parent. Each of edit may change its
// template.
func newIssuer(t testing.TB, name string, parent *issuer, edit ...func(*x509.Certificate)) *issuer {
	t.Helper()
	return newIssuerOf(t, name, ecKey(t), parent, edit...)
}

func newIssuerOf(t testing.TB, name string, key crypto.Signer, parent *issuer, edit ...func(*x509.Certificate)) *issuer {
	t.Helper()
	c := leafTemplate()
	c.Subject.CommonName, c.ExtKeyUsage = name, nil
	c.IsCA, c.BasicConstraintsValid, c.KeyUsage = true, true, x509.KeyUsageCertSign|x509.KeyUsageCRLSign
	for _, f := range edit {
		f(c)
	}
	return &issuer{t, signed(t, c, key, parent), key}
}

// leafTemplate is that of a workload's certificate, for both sides and for one hour on
// either side of now.
func leafTemplate(uris ...string) *x509.Certificate {
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1<<40 + serials.Add(1)), Subject: pkix.Name{CommonName: "leaf"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
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

// ecKey returns a key on P-256.
func ecKey(t testing.TB) crypto.Signer {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// rsaKey returns an RSA key, which may be too short.
func rsaKey(t testing.TB, bits int) *rsa.PrivateKey {
	t.Helper()
	k, err := rsa.GenerateKey(rand.Reader, bits)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// issue signs a leaf. What is between it and the root goes with it.
func (a *issuer) issue(template *x509.Certificate, between ...*issuer) chain {
	a.t.Helper()
	return a.issueFor(ecKey(a.t), template, between...)
}

func (a *issuer) issueFor(key crypto.Signer, template *x509.Certificate, between ...*issuer) chain {
	a.t.Helper()
	c := chain{[][]byte{signed(a.t, template, key, a).Raw}, key}
	for _, b := range between {
		c.certs = append(c.certs, b.cert.Raw)
	}
	return c
}

// revoke returns the CA's list of revoked certificates.
func (a *issuer) revoke(certs ...*big.Int) []byte {
	a.t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(serials.Add(1)), ThisUpdate: time.Now().Add(-time.Minute), NextUpdate: time.Now().Add(time.Hour)}
	for _, n := range certs {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: n, RevocationTime: list.ThisUpdate})
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, a.cert, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return der
}

// bySHA1 replaces the signature of a certificate, which is by SHA-256 and RSA, by one
// with SHA-1: crypto/x509 makes none.
func (a *issuer) bySHA1(c chain) chain {
	a.t.Helper()
	var outer struct {
		TBS, Algorithm asn1.RawValue
		Signature      asn1.BitString
	}
	if _, err := asn1.Unmarshal(c.certs[0], &outer); err != nil {
		a.t.Fatal(err)
	}
	// sha256WithRSAEncryption and sha1WithRSAEncryption, RFC 8017 appendix C.
	const arc = "\x2a\x86\x48\x86\xf7\x0d\x01\x01"
	old, sha := []byte(arc+"\x0b"), []byte(arc+"\x05")
	tbs := bytes.ReplaceAll(outer.TBS.FullBytes, old, sha)
	sum := sha1.Sum(tbs)
	signature, err := a.key.Sign(rand.Reader, sum[:], crypto.SHA1)
	if err != nil {
		a.t.Fatal(err)
	}
	outer.TBS = asn1.RawValue{FullBytes: tbs}
	outer.Algorithm = asn1.RawValue{FullBytes: bytes.ReplaceAll(outer.Algorithm.FullBytes, old, sha)}
	outer.Signature = asn1.BitString{Bytes: signature, BitLength: 8 * len(signature)}
	der, err := asn1.Marshal(outer)
	if err != nil {
		a.t.Fatal(err)
	}
	return chain{append([][]byte{der}, c.certs[1:]...), c.key}
}

// rawSANs is the extension of names with these URIs, which need not be any.
func rawSANs(t testing.TB, uris ...string) pkix.Extension {
	t.Helper()
	var names []asn1.RawValue
	for _, u := range uris {
		names = append(names, asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 6, Bytes: []byte(u)}) // RFC 5280 section 4.2.1.6
	}
	der, err := asn1.Marshal(names)
	if err != nil {
		t.Fatal(err)
	}
	return pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: der}
}

// saveChain writes NAME.crt and NAME.key into dir, as all programs here read them.
func saveChain(t testing.TB, dir, name string, c chain) (cert, key string) {
	t.Helper()
	cert, key = filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	der, err := x509.MarshalPKCS8PrivateKey(c.key)
	if err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string][]byte{cert: pemOf(c.certs...), key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// saveTrust writes what is trusted of a table into dir, and returns the identity section of
// a configuration there.
func (p *pki) saveTrust(t testing.TB, dir string) (section string) {
	t.Helper()
	for name, text := range map[string][]byte{
		"a.pem": pemOf(p.a.cert.Raw, p.a2.cert.Raw), "b.pem": pemOf(p.b.cert.Raw),
		"a.crl": pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: p.crl}),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return "identity: {trust: {" + domainA + ": {caFile: a.pem, crlFile: a.crl}, " + domainB + ": {caFile: b.pem}}}"
}

// pemOf returns certificates in PEM.
func pemOf(certs ...[]byte) (text []byte) {
	for _, der := range certs {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	}
	return text
}

// A shown is what a peer shows, and what becomes of it.
type shown struct {
	name  string // of its files
	chain chain

	id string // of who has it; "" where it is refused

	// err is what the refusal says, behind "the client's" or "the server's".
	err string
}

// What all of shownCerts have that do not say otherwise.
const (
	domainA, domainB = "a.example", "b.example"
	idA              = "spiffe://" + domainA + "/ns/shop/sa/web"
	idB              = "spiffe://" + domainB + "/ns/shop/sa/web"
	hostA            = "shop.a.example"
)

// A pki has the CAs of two trust domains, and those that nobody trusts.
type pki struct {
	a, a2, b, unknown *issuer // roots; a2 is the next one of a
	crl               []byte  // of a, once there is a table
}

func newPKI(t testing.TB) *pki {
	t.Helper()
	return &pki{a: newIssuer(t, "root of a", nil), a2: newIssuerOf(t, "root of a", rsaKey(t, 2048), nil), b: newIssuer(t, "root of b", nil), unknown: newIssuer(t, "nobody's root", nil)}
}

// certs is the table: each certificate that a peer may show, for the trust domains a and
// b. wrong is the use that the peer's certificate must not have alone.
func (p *pki) certs(t testing.TB, wrong x509.ExtKeyUsage) []shown {
	t.Helper()
	template := func(f func(*x509.Certificate), uris ...string) *x509.Certificate {
		c := leafTemplate(uris...)
		c.DNSNames, c.IPAddresses = []string{hostA}, []net.IP{{127, 0, 0, 1}}
		if f != nil {
			f(c)
		}
		return c
	}
	between := newIssuer(t, "intermediate of a", p.a)
	named := newIssuer(t, "intermediate with an id", p.a, func(c *x509.Certificate) { c.URIs = leafTemplate(idA).URIs })
	narrow := newIssuer(t, "narrow", p.a, func(c *x509.Certificate) {
		c.PermittedURIDomains, c.PermittedDNSDomains = []string{"other.example"}, []string{"other.example"}
	})
	long := []*issuer{p.a}
	for i := range 9 {
		long = append(long, newIssuer(t, fmt.Sprintf("link %d", i), long[i]))
	}
	// links is a chain of n certificates.
	links := func(n int) chain {
		var under []*issuer
		for i := n - 1; i > 0; i-- {
			under = append(under, long[i])
		}
		return under[0].issue(template(nil, idA), under...)
	}
	withSANs := func(uris ...string) *x509.Certificate {
		return template(func(c *x509.Certificate) {
			c.DNSNames, c.IPAddresses, c.ExtraExtensions = nil, nil, []pkix.Extension{rawSANs(t, uris...)}
		})
	}
	revoked, underRevoked := leafTemplate(idA), newIssuer(t, "revoked intermediate", p.a)
	p.crl = p.a.revoke(revoked.SerialNumber, underRevoked.cert.SerialNumber)
	hour := time.Hour
	return []shown{
		{"good", p.a.issue(template(nil, idA)), idA, ""},
		{"next-ca", p.a2.issue(template(nil, idA)), idA, ""},
		{"other-domain", p.b.issue(template(nil, idB)), idB, ""},
		{"intermediate", between.issue(template(nil, idA), between), idA, ""},
		{"rsa2048", p.a.issueFor(rsaKey(t, 2048), template(nil, idA)), idA, ""},
		{"chain8", links(8), idA, ""},

		{"expired", p.a.issue(template(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = c.NotBefore.Add(-hour), c.NotBefore }, idA)), "", `certificate has expired: that of "CN=leaf" was valid until `},
		{"not-yet-valid", p.a.issue(template(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = c.NotAfter, c.NotAfter.Add(hour) }, idA)), "", `certificate is not valid yet: that of "CN=leaf" is from `},
		{"extended-usage", p.a.issue(template(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{wrong} }, idA)), "", "certificate has the wrong key usage: "},
		{"name-constraints", narrow.issue(template(nil, idA), narrow), "", "certificate has a name that its CA is not permitted: "},
		{"revoked", p.a.issue(revoked), "", fmt.Sprintf(`certificate is not accepted: the certificate with the serial number %x is on the revocation list of the CA "CN=root of a"`, revoked.SerialNumber.Bytes())},
		{"intermediate-revoked", underRevoked.issue(template(nil, idA), underRevoked), "", fmt.Sprintf("the certificate with the serial number %x is on the revocation list", underRevoked.cert.SerialNumber.Bytes())},
		{"unknown-ca", p.unknown.issue(template(nil, idA)), "", "certificate is signed by an unknown CA: "},
		{"no-intermediate", between.issue(template(nil, idA)), "", "certificate is signed by an unknown CA: "},
		{"ca-of-b", p.b.issue(template(nil, idA)), "", `id is of trust domain "a.example", and its certificate is signed by a CA of ["b.example"]`},
		{"ca-of-a", p.a.issue(template(nil, idB)), "", `id is of trust domain "b.example", and its certificate is signed by a CA of ["a.example"]`},
		{"other-id", p.a.issue(template(nil, "spiffe://c.example/ns/shop/sa/web")), "", `trust domain is "c.example", want one of ["a.example" "b.example"]`},
		{"two-uris", p.a.issue(template(nil, idA, idB)), "", "certificate has 2 URIs, want one"},
		{"malformed", p.a.issue(withSANs("spiffe://A.example/ns/shop/sa/web")), "", `certificate has a malformed id: "spiffe://A.example/ns/shop/sa/web" is not a SPIFFE id`},
		{"escapes", p.a.issue(withSANs("spiffe://a.example/ns/shop/sa/w%65b")), "", `certificate has a malformed id: the SPIFFE id "spiffe://a.example/ns/shop/sa/w%65b" has a malformed path`},
		{"no-path", p.a.issue(template(nil, "spiffe://"+domainA)), "", `certificate has a malformed id: the SPIFFE id "spiffe://a.example" has no path`},
		{"too-long", p.a.issue(template(nil, "spiffe://"+domainA+"/"+strings.Repeat("x", 2048))), "", "... has 2067 bytes, limit 2048"},
		{"no-id", p.a.issue(template(nil)), "", `certificate has no SPIFFE id, want one of ["a.example" "b.example"]`},
		{"id-in-intermediate", named.issue(template(nil), named), "", `certificate has no SPIFFE id, want one of ["a.example" "b.example"]`},
		{"ca", p.a.issue(template(func(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = true, true }, idA)), "", "certificate is that of a CA, which can't be a workload's"},
		{"sha1", p.a2.bySHA1(p.a2.issue(template(nil, idA))), "", `certificate is not accepted: the signature of "CN=leaf" is by SHA1-RSA, which is broken`},
		{"rsa1024", p.a.issueFor(rsaKey(t, 1024), template(nil, idA)), "", `certificate is not accepted: the RSA key of "CN=leaf" has 1024 bits, want at least 2048`},
		{"chain9", links(9), "", "chain has 9 certificates, limit 8"},
	}
}
