package file

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testca"
)

// Certificates, CAs and revocation lists that can be read and that nobody accepts are warned
// of, each once, and good ones are not.
func TestCertificateWarnings(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, content []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now()
	ca, err := testca.New("a.example", nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, o := range map[string]testca.Options{
		"good":   {},
		"old":    {NotBefore: now.Add(-3 * time.Hour), TTL: time.Hour},
		"early":  {NotBefore: now.Add(20 * time.Hour), TTL: time.Hour},
		"client": {Usage: testca.ClientOnly},
		"server": {Usage: testca.ServerOnly},
	} {
		o.SPIFFEID, o.DNSNames = "spiffe://a.example/"+name, []string{"gw.a.example"}
		pair, err := ca.Issue(o)
		if err != nil {
			t.Fatal(err)
		}
		write(name+".crt", pair.CertPEM)
		write(name+".key", pair.KeyPEM)
	}
	write("a.pem", ca.CertPEM)

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "gone"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: now.Add(-3 * time.Hour), NotAfter: now.Add(-2 * time.Hour), KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, SubjectKeyId: []byte{1},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	write("gone.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	list, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: now.Add(-2 * time.Hour), NextUpdate: now.Add(-time.Hour)}, template, key)
	if err != nil {
		t.Fatal(err)
	}
	write("gone.crl", list)

	const (
		keys = `
  keys:
    good: {certificateFile: good.crt, keyFile: good.key}
    client: {certificateFile: client.crt, keyFile: client.key}
    server: {certificateFile: server.crt, keyFile: server.key}
`
		via = "\nservices: [{name: a.test, endpoints: [\"192.0.2.1:1\"], via: [{connect: \"https://gw.a.example:443\", key: "
	)
	for name, tt := range map[string]struct {
		identity string
		want     []string
	}{
		"good": {keys + `
  trust: {a.example: {caFile: a.pem}, legacy: {caFile: a.pem, type: ca}}
  serveBundle: {listener: ":8443", trust: a.example, key: good}
listeners: [{address: ":1", tls: {key: good, names: [gw.a.example]}}]` + via + "good}]}]", nil},
		"dates": {`
  keys: {old: {certificateFile: old.crt, keyFile: old.key}, early: {certificateFile: early.crt, keyFile: early.key}}`, []string{
			`3:33: the certificate of "CN=old" has expired: it was valid until `, `3:86: the certificate of "CN=early" is not valid yet, but from `,
		}},
		"uses": {keys + `
  trust: {a.example: {caFile: a.pem}}
  serveBundle: {listener: ":8443", trust: a.example, key: client}
listeners: [{address: ":1", tls: {key: client, names: [gw.a.example]}}]` + via + "server}]}]", []string{
			`9:59: clients refuse the certificate of "CN=client": it is not for serverAuth`,
			`10:40: clients refuse the certificate of "CN=client": it is not for serverAuth`,
			`11:104: servers refuse the certificate of "CN=server": it is not for clientAuth`,
		}},
		"uses of files": {`
  {}
listeners: [{address: ":1", tls: {certificateFile: client.crt, keyFile: client.key}}]`, []string{`clients refuse the certificate of "CN=client"`}},
		"CAs": {`
  trust:
    a.example: {caFile: a.pem}
    b.example: {caFile: a.pem}
    gone.example: {caFile: gone.pem, crlFile: gone.crl}
    leaf.example: {caFile: good.crt}`, []string{
			`5:25: the CA "CN=a.example,O=culvert development CA" speaks for the trust domains "a.example" and "b.example"`,
			`6:28: the CA of "CN=gone" has expired`, `6:47: the revocation list of "CN=gone" is out of date`,
			`7:28: the certificate of "CN=good" is not that of a CA`,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			text := "# of a test\nidentity:" + tt.identity + "\n"
			if !strings.Contains(text, "services:") {
				text += "services: []\n"
			}
			write("culvert.yaml", []byte(text))
			c, err := Load(filepath.Join(dir, "culvert.yaml"))
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			if c.Warnings != nil {
				got = c.Warnings.Error()
			}
			for _, want := range tt.want {
				if strings.Count(got, want) != 1 {
					t.Errorf("the warnings are\n%s\nwant %q once", got, want)
				}
			}
			if len(c.Warnings) != len(tt.want) {
				t.Errorf("the warnings are\n%s\nwant %d", got, len(tt.want))
			}
		})
	}
}
