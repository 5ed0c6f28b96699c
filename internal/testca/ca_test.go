package testca

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

const echoID = "spiffe://example.test/ns/demo/sa/echo"

func newTestCA(t *testing.T) *CA {
	t.Helper()
	ca, err := New("example.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func issue(t *testing.T, ca *CA, o Options) *Pair {
	t.Helper()
	p, err := ca.Issue(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// handshake runs a handshake and one byte each way, so that the client has
// heard what the server thinks of its certificate.
func handshake(t *testing.T, server, client *tls.Config) (serverErr, clientErr error) {
	t.Helper()
	s, c := net.Pipe()
	deadline := time.Now().Add(10 * time.Second)
	_ = s.SetDeadline(deadline)
	_ = c.SetDeadline(deadline)
	done := make(chan error)
	go func() {
		defer s.Close()
		conn := tls.Server(s, server)
		err := conn.Handshake()
		if err == nil {
			_, err = conn.Write([]byte{1})
		}
		done <- err
	}()
	conn := tls.Client(c, client)
	_, clientErr = conn.Read(make([]byte, 1))
	_ = c.Close()
	return <-done, clientErr
}

func TestMutualTLS(t *testing.T) {
	ca := newTestCA(t)
	server := issue(t, ca, Options{SPIFFEID: echoID, DNSNames: []string{"echo.demo.test"}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}})
	client := issue(t, ca, Options{SPIFFEID: "spiffe://example.test/ns/demo/sa/client"})
	for _, name := range []string{"echo.demo.test", "127.0.0.1"} {
		if serr, cerr := handshake(t, server.ServerConfig(), client.ClientConfig(name)); serr != nil || cerr != nil {
			t.Errorf("handshake with %s: server %v, client %v; want none", name, serr, cerr)
		}
	}
}

func TestMutualTLSRefuses(t *testing.T) {
	ca, other := newTestCA(t), newTestCA(t)
	sub, err := New("sub.example.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	opts := Options{SPIFFEID: echoID, DNSNames: []string{"echo.demo.test"}}
	server, client := issue(t, ca, opts), issue(t, ca, opts)
	with := func(o Options) *tls.Config { return issue(t, ca, o).ClientConfig("echo.demo.test") }
	anonymous := client.ClientConfig("echo.demo.test")
	anonymous.Certificates = nil
	stranger := issue(t, sub, Options{SPIFFEID: "spiffe://sub.example.test/a"})
	foreign := client.ClientConfig("echo.demo.test")
	// Otherwise the client would see that the server can't want it, and send none.
	foreign.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &stranger.TLS, nil }
	sameName := issue(t, other, opts).ClientConfig("echo.demo.test")
	sameName.RootCAs = ca.Pool()

	for name, tt := range map[string]struct {
		client *tls.Config
		server string // in the server's error
	}{
		"no certificate":            {anonymous, "certificate"},
		"another CA's":              {foreign, "unknown authority"},
		"another CA, same domain":   {sameName, "unknown authority"},
		"expired":                   {with(Options{SPIFFEID: echoID, NotBefore: time.Now().Add(-2 * time.Hour), TTL: time.Hour}), "expired"},
		"for servers only":          {with(Options{SPIFFEID: echoID, Usage: ServerOnly}), "incompatible key usage"},
		"server has another name":   {client.ClientConfig("other.demo.test"), "bad certificate"},
		"an address it has no name": {client.ClientConfig("127.0.0.1"), "bad certificate"},
	} {
		serr, cerr := handshake(t, server.ServerConfig(), tt.client)
		if serr == nil || cerr == nil || !strings.Contains(serr.Error(), tt.server) {
			t.Errorf("%s: server %v, client %v; want a server error with %q", name, serr, cerr, tt.server)
		}
	}
}

func TestVerifyConnectionWantsOneID(t *testing.T) {
	ca := newTestCA(t)
	p := issue(t, ca, Options{SPIFFEID: echoID})
	good := *p.TLS.Leaf
	if err := ca.verifyConnection(tls.ConnectionState{PeerCertificates: []*x509.Certificate{&good}}); err != nil {
		t.Fatalf("verifyConnection = %v, want none", err)
	}
	two, none := good, good
	two.URIs = append(two.URIs[:1:1], two.URIs[0])
	none.URIs = nil
	for name, certs := range map[string][]*x509.Certificate{"two": {&two}, "none": {&none}, "no certificate": nil} {
		if err := ca.verifyConnection(tls.ConnectionState{PeerCertificates: certs}); err == nil {
			t.Errorf("%s: verifyConnection = nil, want an error", name)
		}
	}
}

func TestIssue(t *testing.T) {
	start := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	ca, err := New("example.test", func() time.Time { return start })
	if err != nil {
		t.Fatal(err)
	}
	leaf := issue(t, ca, Options{SPIFFEID: echoID}).TLS.Leaf
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != echoID {
		t.Errorf("URI names = %v, want only %s", leaf.URIs, echoID)
	}
	if got, want := leaf.NotAfter, start.Add(defaultTTL); !got.Equal(want) {
		t.Errorf("NotAfter = %v, want %v", got, want)
	}
	if leaf.PublicKeyAlgorithm != x509.ECDSA || leaf.IsCA {
		t.Errorf("leaf has a %v key and IsCA %v, want ECDSA and false", leaf.PublicKeyAlgorithm, leaf.IsCA)
	}
	if got := issue(t, ca, Options{SPIFFEID: echoID, TTL: 10 * caTTL}).TLS.Leaf.NotAfter; !got.Equal(ca.cert.NotAfter) {
		t.Errorf("NotAfter = %v, want the CA's own %v", got, ca.cert.NotAfter)
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	if got := issue(t, ca, Options{SPIFFEID: echoID, Key: key}).TLS.Leaf.KeyUsage; got&x509.KeyUsageKeyEncipherment == 0 {
		t.Errorf("key usage of an RSA key = %b, want key encipherment too", got)
	}
	for name, o := range map[string]Options{
		"no id":                {},
		"bad id":               {SPIFFEID: "spiffe://example.test/a/../b"},
		"another trust domain": {SPIFFEID: "spiffe://sub.example.test/a"},
		"negative TTL":         {SPIFFEID: echoID, TTL: -time.Second},
		"after the CA's end":   {SPIFFEID: echoID, NotBefore: start.Add(2 * caTTL)},
	} {
		if p, err := ca.Issue(o); err == nil {
			t.Errorf("%s: issued %v, want an error", name, p.TLS.Leaf.URIs)
		}
	}
}

func TestNewRefusesTrustDomain(t *testing.T) {
	for _, td := range []string{"", "Example.test", "example.test:443", "example.test/a", strings.Repeat("a", 256)} {
		if _, err := New(td, nil); err == nil {
			t.Errorf("New(%.40q) = nil, want an error", td)
		}
	}
}

func TestIssueAtOnce(t *testing.T) {
	ca := newTestCA(t)
	var (
		wg     sync.WaitGroup
		mu     sync.Mutex
		serial = map[string]bool{}
	)
	for range 16 {
		wg.Go(func() {
			p, err := ca.Issue(Options{SPIFFEID: echoID})
			if err != nil {
				t.Error(err)
				return
			}
			_ = p.ServerConfig()
			mu.Lock()
			defer mu.Unlock()
			serial[p.TLS.Leaf.SerialNumber.String()] = true
		})
	}
	wg.Wait()
	if len(serial) != 16 {
		t.Errorf("16 certificates have %d serial numbers, want 16", len(serial))
	}
}
