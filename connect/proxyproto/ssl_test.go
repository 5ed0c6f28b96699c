package proxyproto

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"reflect"
	"strings"
	"testing"

	wire "github.com/pires/go-proxyproto"
	"github.com/pires/go-proxyproto/tlvparse"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// What Append writes is what the library reads, whose parser of the value SSL is another.
func TestSSLAsTheLibraryReadsIt(t *testing.T) {
	for _, row := range []struct {
		name string
		ssl  SSL
	}{
		{"no certificate", SSL{Version: "TLSv1.3", Cipher: "TLS_AES_128_GCM_SHA256"}},
		{"a certificate", SSL{
			Certificate: true, Session: true, Verified: true, Version: "TLSv1.2", CN: "w\u00e9b", Cipher: "ECDHE-ECDSA-AES128-GCM-SHA256",
			SigAlg: "RSA-SHA256", KeyAlg: "RSA2048", ClientCertificate: bytes.Repeat([]byte{0x30}, 700),
		}},
		{"a certificate that is not verified", SSL{Certificate: true, Version: "TLSv1.2"}},
	} {
		h := Header{Version: 2, Source: ap("198.51.100.7:56789"), Destination: ap("192.0.2.1:443"), SSL: &row.ssl, Assertion: "a.b.c"}
		b, err := h.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		w, err := wire.Read(bufio.NewReader(bytes.NewReader(b)))
		if err != nil {
			t.Fatal(err)
		}
		tlvs, err := w.TLVs()
		if err != nil {
			t.Fatal(err)
		}
		found, asserted := false, false
		for _, v := range tlvs {
			asserted = asserted || v.Type == 0xe1 && string(v.Value) == "a.b.c"
			if v.Type != wire.PP2_TYPE_SSL {
				continue
			}
			found = true
			s, err := tlvparse.SSL(v)
			if err != nil {
				t.Fatalf("%s: %v", row.name, err)
			}
			text := func(v string, _ bool) string { return v }
			cert, _ := s.ClientCert()
			got := SSL{
				Certificate: s.ClientCertConn(), Session: s.ClientCertSess(), Verified: s.Verified(), Version: text(s.SSLVersion()), CN: text(s.ClientCN()),
				Cipher: text(s.SSLCipher()), SigAlg: text(s.SSLSigAlg()), KeyAlg: text(s.SSLKeyAlg()), ClientCertificate: cert,
			}
			if !s.ClientSSL() || !reflect.DeepEqual(got, row.ssl) {
				t.Errorf("%s: the library reads %+v, want %+v", row.name, got, row.ssl)
			}
		}
		if !found || !asserted {
			t.Errorf("%s: got the value SSL: %v, an assertion: %v", row.name, found, asserted)
		}
	}
}

// Names are those that other proxies write, which have them from OpenSSL.
func TestNamesOfOpenSSL(t *testing.T) {
	for id, want := range map[uint16]string{
		tls.TLS_AES_128_GCM_SHA256:                        "TLS_AES_128_GCM_SHA256",
		tls.TLS_CHACHA20_POLY1305_SHA256:                  "TLS_CHACHA20_POLY1305_SHA256",
		tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256:         "ECDHE-RSA-AES128-GCM-SHA256",
		tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384:       "ECDHE-ECDSA-AES256-GCM-SHA384",
		tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256: "ECDHE-ECDSA-CHACHA20-POLY1305",
		tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA:            "ECDHE-RSA-AES128-SHA",
		tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256:         "ECDHE-RSA-AES128-SHA256",
		tls.TLS_RSA_WITH_AES_256_CBC_SHA:                  "AES256-SHA",
		tls.TLS_RSA_WITH_AES_128_GCM_SHA256:               "AES128-GCM-SHA256",
		tls.TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA:           "ECDHE-RSA-DES-CBC3-SHA",
	} {
		if got := cipherName(id); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	edKey, _, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		key  any
		want string
	}{
		{&ecdsa.PublicKey{Curve: elliptic.P384()}, "EC384"}, {edKey, "ED25519"}, {"", ""},
		{&rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), 2047)}, "RSA2048"},
	} {
		if got := keyAlg(row.key); got != row.want {
			t.Errorf("got %q, want %q", got, row.want)
		}
	}
	if got := sigAlg(x509.ECDSAWithSHA256); got != "ecdsa-with-SHA256" {
		t.Errorf("got %q", got)
	}
}

// ended is TLS that a client with a certificate of some size was ended with.
func ended(size int) *tunnel.EndedTLS {
	leaf := &x509.Certificate{Raw: bytes.Repeat([]byte{0x30}, size), Subject: pkix.Name{CommonName: "web"}}
	return &tunnel.EndedTLS{Version: tls.VersionTLS13, CipherSuite: tls.TLS_AES_128_GCM_SHA256, Chain: []*x509.Certificate{leaf}}
}

// A Layer says of the client what was verified, and nothing where that is not its task. A
// certificate that does not fit is left out, and then only.
func TestLayerTellsOfTheClient(t *testing.T) {
	svc, heard := wholeHeaders(t)
	gateway := tunnel.Peer{ID: "gw", Method: "mtls"}
	endedFor := func(p tunnel.Peer) *tunnel.EndedTLS {
		e := ended(700)
		e.Peer = p
		return e
	}
	for _, row := range []struct {
		name   string
		layer  Layer
		req    tunnel.Request
		want   Header
		tooBig int
	}{
		{"not asked for", Layer{Version: 2}, tunnel.Request{TLS: ended(700)}, Header{}, 0},
		{"no TLS", Layer{Version: 2, Identity: true}, tunnel.Request{}, Header{}, 0},
		{"no certificate", Layer{Version: 2, Identity: true}, tunnel.Request{TLS: &tunnel.EndedTLS{Version: tls.VersionTLS12, CipherSuite: tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256}},
			Header{SSL: &SSL{Version: "TLSv1.2", Cipher: "ECDHE-RSA-AES128-GCM-SHA256"}}, 0},
		{"a certificate", Layer{Version: 2, Identity: true}, tunnel.Request{TLS: ended(700)},
			Header{SSL: &SSL{Certificate: true, Session: true, Verified: true, Version: "TLSv1.3", Cipher: "TLS_AES_128_GCM_SHA256", CN: "web", ClientCertificate: ended(700).Chain[0].Raw}}, 0},
		{"a large certificate", Layer{Version: 2, Identity: true}, tunnel.Request{TLS: ended(5000)},
			Header{SSL: &SSL{Certificate: true, Session: true, Verified: true, Version: "TLSv1.3", Cipher: "TLS_AES_128_GCM_SHA256", CN: "web"}}, 5000},
		{"a huge certificate", Layer{Version: 2, Identity: true}, tunnel.Request{TLS: ended(70000)},
			Header{SSL: &SSL{Certificate: true, Session: true, Verified: true, Version: "TLSv1.3", Cipher: "TLS_AES_128_GCM_SHA256", CN: "web"}}, 70000},
		{"an assertion", Layer{Version: 2, Assert: func(net.Conn, *tunnel.Request) (string, error) { return "a.b.c", nil }}, tunnel.Request{}, Header{Assertion: "a.b.c"}, 0},
		{"an assertion and a large certificate", Layer{Version: 2, Identity: true, Assert: func(net.Conn, *tunnel.Request) (string, error) { return strings.Repeat("a", 1500), nil }}, tunnel.Request{TLS: ended(3000)},
			Header{Assertion: strings.Repeat("a", 1500), SSL: &SSL{Certificate: true, Session: true, Verified: true, Version: "TLSv1.3", Cipher: "TLS_AES_128_GCM_SHA256", CN: "web"}}, 3000},
		{"a caller", Layer{Version: 2, Identity: true}, tunnel.Request{Peer: tunnel.Peer{ID: "alice", Method: "basic"}}, Header{Caller: "alice"}, 0},
		{"a caller, and not asked for", Layer{Version: 2}, tunnel.Request{Peer: tunnel.Peer{ID: "alice", Method: "basic"}}, Header{}, 0},
		{"nobody", Layer{Version: 2, Identity: true}, tunnel.Request{Peer: tunnel.Peer{ID: "alice"}}, Header{}, 0},
		{"the certificate of a gateway", Layer{Version: 2, Identity: true}, tunnel.Request{Peer: tunnel.Peer{ID: "caller", Method: "mtls"}.WithActor(gateway), TLS: endedFor(gateway)},
			Header{Caller: "caller", SSL: &SSL{Version: "TLSv1.3", Cipher: "TLS_AES_128_GCM_SHA256"}}, 0},
		{"the caller's own, by a Unix socket", Layer{Version: 2, Identity: true}, tunnel.Request{Peer: gateway.WithActor(tunnel.Peer{ID: "uid:7", Method: "unix"}), TLS: endedFor(gateway)},
			Header{Caller: "gw", SSL: &SSL{Certificate: true, Session: true, Verified: true, Version: "TLSv1.3", Cipher: "TLS_AES_128_GCM_SHA256", CN: "web", ClientCertificate: ended(700).Chain[0].Raw}}, 0},
		{"no source", Layer{Version: 2, Identity: true}, tunnel.Request{TLS: &tunnel.EndedTLS{}, Proto: "unknown"}, Header{SSL: &SSL{}}, 0},
	} {
		tooBig := 0
		row.layer.TooLarge = func(_ *tunnel.Endpoint, n int) { tooBig = n }
		if row.req.Proto == "" {
			row.req.Source = ap("198.51.100.7:1")
		}
		c, err := net.Dial("tcp", svc)
		if err != nil {
			t.Fatal(err)
		}
		c, err = row.layer.Handshake(t.Context(), c, endpoint(svc), &row.req)
		if err != nil {
			t.Errorf("%s: %v", row.name, err)
			continue
		}
		_ = c.Close()
		got := <-heard
		if got.Local || !reflect.DeepEqual(got.SSL, row.want.SSL) || got.Assertion != row.want.Assertion || got.Caller != row.want.Caller || tooBig != row.tooBig {
			t.Errorf("%s: got %+v and %+v, %d bytes left out; want %+v and %+v", row.name, got, got.SSL, tooBig, row.want, row.want.SSL)
		}
	}
}

// wholeHeaders is a service that tells of the whole header.
func wholeHeaders(t *testing.T) (addr string, heard chan Header) {
	t.Helper()
	heard = make(chan Header, 10)
	return serviceOf(t, func(b []byte) bool {
		h, _, err := Parse(b)
		if err == ErrMore {
			return false
		}
		if err != nil {
			t.Errorf("the service read no header: %v", err)
		}
		heard <- h
		return true
	}), heard
}

// Where there is no assertion, although one is due, nothing is sent and the connection is
// closed.
func TestLayerSendsNothingWithoutItsAssertion(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	read := make(chan int, 1)
	go func() {
		n, _ := far.Read(make([]byte, 1))
		read <- n
	}()
	l := Layer{Version: 2, Assert: func(net.Conn, *tunnel.Request) (string, error) { return "", errors.New("no exporter") }}
	c, err := l.Handshake(t.Context(), near, endpoint("127.0.0.1:1"), &tunnel.Request{Source: ap("198.51.100.7:1")})
	if c != nil || tunnel.ReasonOf(err) != tunnel.Internal || !strings.Contains(err.Error(), "the caller's identity cannot be told to 127.0.0.1:1: no exporter") {
		t.Errorf("got %v, %v, want it refused", c, err)
	}
	if n := <-read; n != 0 {
		t.Error("something was sent")
	}
	l.Assert = func(net.Conn, *tunnel.Request) (string, error) { return strings.Repeat("a", maxAssertion+1), nil }
	near, far = net.Pipe()
	defer far.Close()
	if _, err := l.Handshake(t.Context(), near, endpoint("127.0.0.1:1"), &tunnel.Request{}); err == nil || !strings.Contains(err.Error(), "an assertion of 1537 bytes, limit 1536") {
		t.Errorf("got %v, want the assertion refused", err)
	}
}

// serviceOf is a service that hands what comes to enough, until that is enough.
func serviceOf(t *testing.T, enough func([]byte) bool) string {
	t.Helper()
	return testnet.Service(t, func(c net.Conn) {
		var all []byte
		b := make([]byte, 4096)
		for !enough(all) {
			n, err := c.Read(b)
			if all = append(all, b[:n]...); err != nil {
				t.Errorf("got %d bytes, %v", len(all), err)
				return
			}
		}
	})
}
