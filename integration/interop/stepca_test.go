//go:build unix

package interop

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/smallstep/certificates/authority"
	"github.com/smallstep/certificates/authority/config"
	"github.com/smallstep/certificates/authority/provisioner"
	"github.com/smallstep/certificates/db"
	"go.step.sm/crypto/jose"

	"culvert.dev/internal/testnet"
)

// A stepCA is step-ca as a library. It has a database, of which it makes revocation lists.
type stepCA struct {
	t      *testing.T
	ca     *authority.Authority
	tokens jose.Signer // of its one provisioner
}

// newStepCA starts a step-ca that signs by an intermediate CA below root.
func newStepCA(t *testing.T, root, by *issuer) *stepCA {
	t.Helper()
	dir := t.TempDir()
	rootFile, _ := saveChain(t, dir, "root", chain{[][]byte{root.cert.Raw}, root.key})
	cert, key := saveChain(t, dir, "intermediate", chain{[][]byte{by.cert.Raw}, by.key})
	jwk, err := jose.GenerateJWK("EC", "P-256", "ES256", "sig", "", 0)
	must(t, err)
	public := jwk.Public()
	ca, err := authority.New(&config.Config{
		Address: "127.0.0.1:443", DNSNames: []string{"ca.test"}, Root: []string{rootFile}, IntermediateCert: cert, IntermediateKey: key,
		DB:              &db.Config{Type: "bbolt", DataSource: filepath.Join(dir, "db")},
		CRL:             &config.CRLConfig{Enabled: true, GenerateOnRevoke: true},
		AuthorityConfig: &config.AuthConfig{Provisioners: provisioner.List{&provisioner.JWK{Name: "test", Type: "JWK", Key: &public}}},
	}, authority.WithQuietInit())
	must(t, err)
	t.Cleanup(func() { must(t, ca.Shutdown()) })
	tokens, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jwk.Key}, (&jose.SignerOptions{}).WithType("JWT").WithHeader("kid", jwk.KeyID))
	must(t, err)
	return &stepCA{t, ca, tokens}
}

// token is what a request of method is authorized by.
func (s *stepCA) token(method, subject string, sans ...string) string {
	s.t.Helper()
	now := time.Now()
	text, err := jose.Signed(s.tokens).Claims(jose.Claims{
		Subject: subject, Issuer: "test", Audience: []string{"https://ca.test/1.0/" + method}, ID: rand.Text(),
		NotBefore: jose.NewNumericDate(now), Expiry: jose.NewNumericDate(now.Add(5 * time.Minute)),
	}).Claims(map[string]any{"sans": sans}).CompactSerialize()
	must(s.t, err)
	return text
}

// issue has the CA sign a certificate with these names, of which the first is a SPIFFE id.
func (s *stepCA) issue(sans ...string) chain {
	s.t.Helper()
	key := ecKey(s.t)
	request := &x509.CertificateRequest{URIs: leafTemplate(sans[0]).URIs, DNSNames: sans[1:]}
	der, err := x509.CreateCertificateRequest(rand.Reader, request, key)
	must(s.t, err)
	request, err = x509.ParseCertificateRequest(der)
	must(s.t, err)
	ctx := provisioner.NewContextWithMethod(context.Background(), provisioner.SignMethod)
	options, err := s.ca.Authorize(ctx, s.token("sign", "workload", sans...))
	must(s.t, err)
	certs, err := s.ca.SignWithContext(ctx, request, provisioner.SignOptions{}, options...)
	must(s.t, err)
	c := chain{key: key.(*ecdsa.PrivateKey)}
	for _, cert := range certs {
		c.certs = append(c.certs, cert.Raw)
	}
	return c
}

// revoke revokes a certificate, and returns the revocation list in PEM.
func (s *stepCA) revoke(c chain) string {
	s.t.Helper()
	leaf, err := x509.ParseCertificate(c.certs[0])
	must(s.t, err)
	serial := leaf.SerialNumber.String()
	must(s.t, s.ca.Revoke(provisioner.NewContextWithMethod(context.Background(), provisioner.RevokeMethod),
		&authority.RevokeOptions{Serial: serial, ReasonCode: 1, OTT: s.token("revoke", serial), PassiveOnly: true}))
	list, err := s.ca.GetCertificateRevocationList()
	must(s.t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: list.Data}))
}

// TestStepCA: step-ca issues the SPIFFE ids of the gateway and of its clients. One that it
// revokes is refused as soon as the gateway has the list, which an intermediate CA has
// signed. A new intermediate CA needs nothing at the gateway.
func TestStepCA(t *testing.T) {
	dir, root := t.TempDir(), newIssuer(t, "root", nil)
	first := newStepCA(t, root, newIssuer(t, "first intermediate", root))
	second := newStepCA(t, root, newIssuer(t, "second intermediate", root))
	save := func(name string, c chain) chain {
		saveChain(t, dir, name, c)
		return c
	}
	write := func(name, text string) {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path+".new", []byte(text), 0o600))
		must(t, os.Rename(path+".new", path))
	}
	save("gw", first.issue("spiffe://"+domainA+"/gw", hostA))
	web, spare := save("web", first.issue(idA)), first.issue("spiffe://"+domainA+"/spare")
	save("api", first.issue("spiffe://"+domainA+"/ns/shop/sa/api"))
	write("root.pem", string(pemOf(root.cert.Raw)))
	lists := first.revoke(spare)
	write("lists.pem", lists)

	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "close")
		_, _ = io.WriteString(w, "admitted\n")
	}))
	t.Cleanup(backend.Close)
	config := filepath.Join(dir, "culvert.yaml")
	must(t, os.WriteFile(config, fmt.Appendf(nil, `
listeners:
  - {address: "127.0.0.1:%s", tls: {names: [%s], key: gw, trust: %s, protocols: [tcp]}}
admin: 127.0.0.1:%s
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {%[3]s: {caFile: root.pem, crlFile: lists.pem}}
services:
  - {name: %[2]s, endpoints: ["%[5]s"]}
`, freePort(t), hostA, domainA, freePort(t), backend.Listener.Addr()), 0o600))
	g := startGateway(t, "--config", config)
	get := func(name string) string {
		t.Helper()
		out, errs, _ := command(t, "curl", "-sS", "-m", "60", "--cacert", filepath.Join(dir, "root.pem"), "--cert", filepath.Join(dir, name+".crt"), "--key", filepath.Join(dir, name+".key"),
			"--connect-to", hostA+":443:"+g.addr, "https://"+hostA+"/")
		return out + errs
	}
	admits := func(names ...string) {
		t.Helper()
		for _, name := range names {
			if out := get(name); out != "admitted\n" {
				t.Errorf("curl with %s: got %q, want that it is admitted", name, out)
			}
		}
	}
	refuses := func(name string) {
		t.Helper()
		testnet.Eventually(t, patience, func() bool { return strings.Contains(get(name), "alert bad certificate") }, "%s is refused", name)
	}

	admits("web", "api")
	g.line(t, "logged who it is", func(l line) bool { return l.Peer == idA })
	lists = first.revoke(web)
	write("lists.pem", lists)
	refuses("web")
	g.line(t, "said that it is revoked", func(l line) bool {
		return l.Reason == "no-auth" && strings.Contains(l.Err, `is on the revocation list of the CA "CN=first intermediate"`)
	})
	admits("api")

	// The next intermediate CA has a list of its own, beside that of the first.
	next := save("next", second.issue(idA))
	save("gw", second.issue("spiffe://"+domainA+"/gw", hostA))
	admits("next", "api")
	write("lists.pem", lists+second.revoke(next))
	refuses("next")
	refuses("web")
	admits("api")
}
