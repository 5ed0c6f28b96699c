package enroll

import (
	"bufio"
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/invitation"
	"culvert.dev/tunnel"
)

// A countingReader counts what is read.
type countingReader struct {
	io.Reader
	n int
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n += n
	return n, err
}

// FuzzRequest sends what anybody may send, and what the holder of a token for devices named
// pool-* may. A certificate is signed for the second one alone, for such a name, and for the key
// that has signed the request.
func FuzzRequest(f *testing.F) {
	g := newGateway(f)
	text, err := g.Invite("pool-*", "", 1000, time.Hour)
	if err != nil {
		f.Fatal(err)
	}
	token, err := invitation.Parse(text, time.Now())
	if err != nil {
		f.Fatal(err)
	}
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	for _, key := range []crypto.Signer{ec, ed} {
		csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{DNSNames: []string{"other.example"}}, key)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(1, "pool-1", csr, []byte(nil))
		f.Add(2, "pool-1", csr, []byte(nil))
		f.Add(1, "web", csr[:len(csr)-1], []byte(nil))
		line, err := json.Marshal(request{Version: version, Name: "pool-2", CSR: csr, Secret: []byte("guessed")})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(0, "", []byte(nil), append(line, '\n'))
		f.Add(0, "", []byte(nil), line)
	}
	f.Add(0, "", []byte(nil), []byte("{}\n"))
	f.Add(0, "", []byte(nil), []byte(`{"version":1,"name":"pool-1","csr":"AA==","secret":[1]}`+"\n"))
	f.Add(0, "", []byte(nil), bytes.Repeat([]byte("a"), 2<<20))
	before := g.state
	req := &tunnel.Request{Source: netip.MustParseAddrPort("192.0.2.1:1")}
	f.Fuzz(func(t *testing.T, version int, name string, csr, raw []byte) {
		invited := len(raw) == 0
		if invited {
			line, err := json.Marshal(request{Version: version, Name: name, CSR: csr, Secret: token.Secret})
			if err != nil {
				t.Fatal(err)
			}
			raw = append(line, '\n')
		}
		in := &countingReader{Reader: bytes.NewReader(raw)}
		out, err := g.admit(bufio.NewReader(in), req)
		if in.n > maxRequest+4096 { // and a buffer
			t.Errorf("%d bytes were read, limit %d", in.n, maxRequest)
		}
		after := g.state
		g.state = before
		if (out == nil) == (err == nil) {
			t.Fatalf("got %v and %v, want one of them", out, err)
		}
		if err != nil {
			if strings.Contains(err.Error(), "panic") || len(err.Error()) > 1024 {
				t.Errorf("the answer is %q", err)
			}
			if len(after.Devices) != len(before.Devices) || after.Invitations[0].Uses != before.Invitations[0].Uses {
				t.Errorf("a refusal has changed the state: %+v", after)
			}
			return
		}
		if !invited {
			t.Fatalf("a certificate without a token, for %q", raw)
		}
		leaf, err := x509.ParseCertificate(out.Chain[0])
		if err != nil {
			t.Fatal(err)
		}
		asked, err := x509.ParseCertificateRequest(csr)
		if err != nil || asked.CheckSignature() != nil || !asked.PublicKey.(interface{ Equal(crypto.PublicKey) bool }).Equal(leaf.PublicKey) {
			t.Errorf("the certificate is not for the key of the request: %v", err)
		}
		if !strings.HasPrefix(out.Name, "pool-") || checkName(out.Name) != nil || len(leaf.URIs) != 1 || leaf.URIs[0].String() != out.ID || len(leaf.DNSNames) > 0 || leaf.IsCA {
			t.Errorf("device %q has the certificate %v, %v, CA %v", out.Name, leaf.URIs, leaf.DNSNames, leaf.IsCA)
		}
	})
}
