package enroll

import (
	"bufio"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/identity"
	"culvert.dev/internal/invitation"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { testnet.Main(m) }

const patience = time.Minute

// A testGateway has an Authority of corp.example and serves enroll.culvert.alt by TLS.
type testGateway struct {
	*Authority                           // of the test's own goroutine
	serving    atomic.Pointer[Authority] // of connections
	ca         *testca.CA
	pair       *testca.Pair
	addr       string
	folder     string
	lifetime   time.Duration
}

func newGateway(t testing.TB) *testGateway {
	t.Helper()
	ca, err := testca.New("corp.example", nil)
	if err != nil {
		t.Fatal(err)
	}
	g := &testGateway{ca: ca, folder: t.TempDir(), lifetime: time.Hour}
	if g.pair, err = ca.Issue(testca.Options{SPIFFEID: "spiffe://corp.example/gw"}); err != nil {
		t.Fatal(err)
	}
	g.listen(t)
	g.start(t)
	return g
}

// start makes the authority of the gateway anew, as a restart does.
func (g *testGateway) start(t testing.TB) {
	t.Helper()
	if g.Authority != nil {
		g.Close()
	}
	g.Authority = &Authority{Store: new(identity.Store), server: invitation.Server{Pause: time.Millisecond}}
	g.Store.Key("gw").Set(&g.pair.TLS)
	g.Store.Trust("corp.example").Set(&identity.Bundle{TrustDomain: "corp.example", Roots: []*x509.Certificate{g.ca.Root()}})
	folder := t.TempDir()
	if err := g.ca.Save(folder); err != nil {
		t.Fatal(err)
	}
	signer, err := tls.LoadX509KeyPair(filepath.Join(folder, "ca.crt"), filepath.Join(folder, "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	s := &Settings{Gateway: g.addr, Transport: "connect", Key: "gw", Trust: "corp.example", CA: &signer, Lifetime: g.lifetime, State: g.folder}
	if err := g.Use(s); err != nil {
		t.Fatal(err)
	}
	g.serving.Store(g.Authority)
	t.Cleanup(g.Close)
}

// listen serves CONNECT to enroll.culvert.alt inside TLS, as a listener with optional client
// certificates does.
func (g *testGateway) listen(t testing.TB) {
	t.Helper()
	ln := testnet.Listen(t)
	g.addr = ln.Addr().String()
	var wg sync.WaitGroup
	t.Cleanup(func() { _ = ln.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			raw, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { g.serve(raw) })
		}
	})
}

func (g *testGateway) serve(raw net.Conn) {
	defer raw.Close()
	a := g.serving.Load()
	trust := []*identity.Trust{a.Store.Trust("corp.example")}
	v := identity.Verifier{Trust: trust, Want: identity.Expectation{Usage: x509.ExtKeyUsageClientAuth}}
	var who tunnel.Peer
	c := tls.Server(raw, &tls.Config{
		Certificates: []tls.Certificate{g.pair.TLS}, ClientAuth: tls.RequestClientCert,
		VerifyConnection: func(cs tls.ConnectionState) (err error) {
			if len(cs.PeerCertificates) > 0 {
				who, err = v.Verify(cs.PeerCertificates)
			}
			return err
		},
	})
	_ = c.SetDeadline(time.Now().Add(patience))
	if c.Handshake() != nil {
		return
	}
	r := bufio.NewReader(c)
	for line := ""; line != "\r\n"; {
		var err error
		if line, err = r.ReadString('\n'); err != nil {
			return
		}
	}
	cs := c.ConnectionState()
	source := netip.MustParseAddrPort(raw.RemoteAddr().String())
	spread := netip.AddrFrom4([4]byte{10, 0, byte(source.Port() >> 8), byte(source.Port())}) // a client of each port
	a.ServeTunnel(context.Background(), &tunnel.Request{
		Name: tunnel.MustParseName(Host), Source: netip.AddrPortFrom(spread, source.Port()), Peer: who,
		TLS: &tunnel.EndedTLS{Version: cs.Version, Exporter: cs.ExportKeyingMaterial, Chain: cs.PeerCertificates, Peer: who},
		Accept: func() (tunnel.Stream, error) {
			_, err := fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
			return c, err
		},
		Refuse: func(err error) { _, _ = fmt.Fprint(c, "HTTP/1.1 503 no\r\nContent-Length: 0\r\n\r\n") },
	})
}

func (g *testGateway) invite(t testing.TB, name string) string {
	t.Helper()
	token, err := g.Invite(name, "", 1, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func join(t testing.TB, token, name string) (string, *Membership, error) {
	t.Helper()
	folder := filepath.Join(t.TempDir(), "state")
	m, err := Join(t.Context(), new(net.Dialer), token, name, folder, false)
	return folder, m, err
}

// A device gets the names of its invitation, a key that it alone has, and the CAs that verify
// its gateway.
func TestJoin(t *testing.T) {
	g := newGateway(t)
	folder, m, err := join(t, g.invite(t, "cam-7"), "called-otherwise")
	if err != nil {
		t.Fatal(err)
	}
	if m.Name != "cam-7" || m.ID != "spiffe://corp.example/device/cam-7" || m.GatewayID != "spiffe://corp.example/gw" || m.Gateway != g.addr {
		t.Errorf("joined as %+v", m)
	}
	again, err := Load(folder)
	if err != nil || again.ID != m.ID {
		t.Fatalf("loaded %+v, %v", again, err)
	}
	cert, b, err := read(folder, m)
	if err != nil {
		t.Fatal(err)
	}
	leaf := cert.Leaf
	if leaf.IsCA || len(leaf.URIs) != 1 || leaf.URIs[0].String() != m.ID || len(leaf.DNSNames)+len(leaf.IPAddresses)+len(leaf.EmailAddresses) > 0 || len(leaf.ExtKeyUsage) != 2 {
		t.Errorf("the certificate is %+v", leaf)
	}
	if life := leaf.NotAfter.Sub(leaf.NotBefore); life > g.lifetime+Skew+time.Minute || time.Since(leaf.NotBefore) < Skew-time.Minute {
		t.Errorf("it is valid from %v to %v", leaf.NotBefore, leaf.NotAfter)
	}
	if key, ok := cert.PrivateKey.(*ecdsa.PrivateKey); !ok || key.Curve != elliptic.P256() {
		t.Errorf("the key is a %T", cert.PrivateKey)
	}
	if len(b.Roots) != 1 || !b.Roots[0].Equal(g.ca.Root()) {
		t.Errorf("the bundle has %d CAs", len(b.Roots))
	}
	for name, want := range map[string]os.FileMode{IdentityFile: 0o600, membershipFile: 0o600, "": 0o700} {
		info, err := os.Stat(filepath.Join(folder, name))
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%q has mode %v, %v; want %v", name, info.Mode(), err, want)
		}
	}
	if _, err := Join(t.Context(), new(net.Dialer), g.invite(t, "cam-8"), "", folder, false); !errors.Is(err, ErrJoined) {
		t.Errorf("joining in the same folder: %v", err)
	}
	if list := g.Devices(); len(list) != 1 || list[0].Name != "cam-7" || !list[0].Expires.Equal(leaf.NotAfter) || list[0].Expired {
		t.Errorf("devices are %+v", list)
	}
}

// Of 100 devices that use one token at once, one joins; of a token for three, three.
func TestTokenWorksOnce(t *testing.T) {
	g := newGateway(t)
	for uses, name := range map[int]string{1: "once-*", 3: "thrice-*"} {
		token, err := g.Invite(name, "", uses, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		var joined atomic.Int32
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				if _, _, err := join(t, token, fmt.Sprintf("%s%d", strings.TrimSuffix(name, "*"), i)); err == nil {
					joined.Add(1)
				}
			})
		}
		wg.Wait()
		if n := int(joined.Load()); n > uses || n == 0 || n < uses && uses == 1 {
			t.Errorf("%d have joined by a token for %d", n, uses)
		}
		if uses == 1 {
			if _, _, err := join(t, token, "once-late"); err == nil || !strings.Contains(err.Error(), "was used already") {
				t.Errorf("by a token that was used: %v", err)
			}
		}
	}
	data, err := os.ReadFile(filepath.Join(g.folder, "devices.json"))
	if err != nil {
		t.Fatal(err)
	}
	tok, err := invitation.Parse(g.invite(t, "one"), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	secret, _ := json.Marshal(tok.Secret)
	if strings.Contains(string(data), strings.Trim(string(secret), `"`)) {
		t.Error("the state has a secret")
	}
}

// A token that is wrong leads nowhere, and nothing is sent to another server.
func TestTokensThatAreRefused(t *testing.T) {
	g, other := newGateway(t), newGateway(t)
	token := g.invite(t, "cam")
	tok, err := invitation.Parse(token, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	text := func(change func(*invitation.Token)) string {
		one := *tok
		change(&one)
		s, err := one.Text()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for name, c := range map[string]struct{ token, want string }{
		"none":             {"", "not a token"},
		"truncated":        {token[:len(token)-5], "damaged"},
		"expired":          {text(func(t *invitation.Token) { t.Expires = time.Now().Add(-time.Minute) }), "has expired"},
		"of a site":        {text(func(t *invitation.Token) { t.Kind = invitation.Site }), "makes two sites peers"},
		"the wrong server": {text(func(t *invitation.Token) { t.Address = other.addr }), "nothing was sent"},
		"another secret":   {text(func(t *invitation.Token) { t.Secret = make([]byte, invitation.SecretSize) }), "not known here"},
	} {
		folder, _, err := join(t, c.token, "cam")
		if err == nil || !strings.Contains(err.Error(), c.want) || len(c.token) > 30 && strings.Contains(err.Error(), c.token[30:]) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if Joined(folder) {
			t.Errorf("%s: the device has joined", name)
		}
	}
	if _, _, err := join(t, token, ""); err != nil {
		t.Errorf("after all that the token does not work: %v", err)
	}
}

// send sends a request as it is, with a client certificate if there is one.
func (g *testGateway) send(t *testing.T, q *request, pair *tls.Certificate) (a answer) {
	t.Helper()
	cfg := &tls.Config{InsecureSkipVerify: true}
	if pair != nil {
		cfg.Certificates = []tls.Certificate{*pair}
	}
	c, _, err := invitation.Dial(t.Context(), new(net.Dialer), "connect", g.addr, cfg, Host)
	if err != nil {
		return answer{Error: err.Error()}
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	line, err := json.Marshal(q)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(append(line, '\n')); err != nil {
		t.Fatal(err)
	}
	if _, err := invitation.ReadMessage(bufio.NewReader(c), &a); err != nil {
		return answer{Error: err.Error()}
	}
	return a
}

func csr(t *testing.T, key crypto.Signer, template *x509.CertificateRequest) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func newKey(t *testing.T, c elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(c, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// A signing request with a key that is weak is refused and the token stays valid; names in it
// have no effect.
func TestSigningRequests(t *testing.T) {
	g := newGateway(t)
	tok, err := invitation.Parse(g.invite(t, "cam"), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("GODEBUG", "rsa1024min=0")
	weak, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	good := newKey(t, elliptic.P256())
	broken := csr(t, good, &x509.CertificateRequest{})
	broken[len(broken)-1] ^= 1
	for name, c := range map[string]struct {
		csr  []byte
		want string
	}{
		"none":          {nil, "0 bytes"},
		"malformed":     {[]byte{0x30, 3, 1, 2, 3}, "malformed"},
		"a short key":   {csr(t, weak, &x509.CertificateRequest{}), "1024 bits"},
		"a weak curve":  {csr(t, newKey(t, elliptic.P224()), &x509.CertificateRequest{}), "P-224"},
		"oversized":     {csr(t, good, &x509.CertificateRequest{Subject: pkix.Name{CommonName: strings.Repeat("x", maxCSR)}}), "limit 8192"},
		"another's key": {broken, "not signed by its own key"},
	} {
		if a := g.send(t, &request{Version: version, Secret: tok.Secret, Name: "cam", CSR: c.csr}, nil); !strings.Contains(a.Error, c.want) || a.Chain != nil {
			t.Errorf("%s: %+v, want %q", name, a.Error, c.want)
		}
	}
	ca := &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "admin"}, DNSNames: []string{"gw.example"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtraExtensions: []pkix.Extension{{Id: []int{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 3, 1, 1, 0xff}}},
	}
	a := g.send(t, &request{Version: version, Secret: tok.Secret, Name: "admin", CSR: csr(t, good, ca)}, nil)
	if a.Error != "" || len(a.Chain) != 1 {
		t.Fatalf("the answer is %+v", a)
	}
	leaf, err := x509.ParseCertificate(a.Chain[0])
	if err != nil {
		t.Fatal(err)
	}
	if leaf.IsCA || len(leaf.DNSNames)+len(leaf.IPAddresses) > 0 || leaf.Subject.CommonName != "cam" || leaf.URIs[0].String() != "spiffe://corp.example/device/cam" || a.Name != "cam" {
		t.Errorf("the certificate is %+v", leaf)
	}
}

// A device renews its own certificate and no other, also after a restart of the gateway; once
// it is removed it gets none, and what it has counts no more.
func TestRenewal(t *testing.T) {
	g := newGateway(t)
	folder, m, err := join(t, g.invite(t, "cam"), "")
	if err != nil {
		t.Fatal(err)
	}
	otherFolder, other, err := join(t, g.invite(t, "door"), "")
	if err != nil {
		t.Fatal(err)
	}
	cert, _, err := read(folder, m)
	if err != nil {
		t.Fatal(err)
	}
	otherCert, _, err := read(otherFolder, other)
	if err != nil {
		t.Fatal(err)
	}
	g.start(t)
	key := newKey(t, elliptic.P256())
	q := func(name string) *request {
		return &request{Version: version, Name: name, CSR: csr(t, key, &x509.CertificateRequest{})}
	}
	namesake, err := g.ca.Issue(testca.Options{SPIFFEID: m.ID}) // by another way than the authority
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		pair *tls.Certificate
		want string
	}{
		"no certificate":      {nil, "none was shown"},
		"that of another":     {otherCert, `is that of device "door"`},
		"that of the gateway": {&g.pair.TLS, "no device has this certificate"},
		"one of the same id":  {&namesake.TLS, "no device has this certificate"},
	} {
		if a := g.send(t, q("cam"), c.pair); !strings.Contains(a.Error, c.want) || a.Chain != nil {
			t.Errorf("%s: %+v, want %q", name, a, c.want)
		}
	}
	r := &Renewer{Dir: folder, Dialer: new(net.Dialer)}
	if err := r.renew(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	renewed, _, err := read(folder, m)
	if err != nil || renewed.Leaf.SerialNumber.Cmp(cert.Leaf.SerialNumber) == 0 || renewed.Leaf.URIs[0].String() != m.ID {
		t.Fatalf("renewed: %+v, %v", renewed, err)
	}

	trust := []*identity.Trust{g.Store.Trust("corp.example")}
	verifier := &identity.Verifier{Trust: trust, Want: identity.Expectation{Usage: x509.ExtKeyUsageClientAuth}}
	peer, err := verifier.Verify([]*x509.Certificate{renewed.Leaf})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Remove("cam"); err != nil {
		t.Fatal(err)
	}
	for range 2 { // and after a restart
		for _, c := range []*tls.Certificate{cert, renewed} {
			if _, err := (&identity.Verifier{Trust: []*identity.Trust{g.Store.Trust("corp.example")}}).Verify([]*x509.Certificate{c.Leaf}); err == nil || !strings.Contains(err.Error(), "revocation list") {
				t.Errorf("a certificate of the device that was removed: %v", err)
			}
		}
		if err := r.renew(t.Context(), m); err == nil {
			t.Error("a device that was removed renews its certificate")
		}
		g.start(t)
	}
	if err := peer.Auth.Evidence.Revoked(); err == nil {
		t.Error("tunnels of the device go on")
	}
	if _, err := (&identity.Verifier{Trust: []*identity.Trust{g.Store.Trust("corp.example")}}).Verify([]*x509.Certificate{otherCert.Leaf}); err != nil {
		t.Errorf("the other device: %v", err)
	}
	if err := g.Remove("cam"); err == nil {
		t.Error("a device is removed twice")
	}
	if _, err := os.Stat(filepath.Join(g.folder, ListFile)); err != nil {
		t.Error(err)
	}
	if _, _, err := join(t, g.invite(t, "cam"), ""); err != nil {
		t.Errorf("joining anew: %v", err)
	}
}

// An invitation says what its devices are called, and is for the own trust domain alone.
func TestInvitations(t *testing.T) {
	g := newGateway(t)
	for _, c := range []struct {
		name, id string
		uses     int
		want     string
	}{
		{"", "", 1, "not the name of a device"},
		{"a.b", "", 1, "not the name of a device"},
		{"../x", "", 1, "not the name of a device"},
		{"cam", "spiffe://other.example/cam", 1, "signs for \"corp.example\" alone"},
		{"cam", "spiffe://corp.example/gw", 1, "that of this gateway"},
		{"cam", "cam", 1, "not a SPIFFE id"},
		{"cam", "", 0, "works once"},
		{"cam", "", 2, "end with *"},
		{"cam-*", "spiffe://corp.example/cam", 1, "its own"},
	} {
		if _, err := g.Invite(c.name, c.id, c.uses, time.Hour); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q %q %d: %v, want %q", c.name, c.id, c.uses, err, c.want)
		}
	}
	token, err := g.Invite("cam-*", "spiffe://corp.example/ns/edge/sa/*", 2, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"door-1": `with names as "cam-*"`, "Cam-1": "not the name of a device", "": "not the name of a device"} {
		if _, _, err := join(t, token, name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("as %q: %v, want %q", name, err, want)
		}
	}
	if _, m, err := join(t, token, "cam-1"); err != nil || m.ID != "spiffe://corp.example/ns/edge/sa/cam-1" {
		t.Errorf("joined as %+v, %v", m, err)
	}
	if _, _, err := join(t, token, "cam-1"); err == nil || !strings.Contains(err.Error(), "run \"culvert devices remove cam-1\" at the gateway first") {
		t.Errorf("a second device of a name: %v", err)
	}
}

// A state that is damaged is not overwritten, and no device joins.
func TestDamagedState(t *testing.T) {
	g := newGateway(t)
	g.Close()
	if err := os.WriteFile(filepath.Join(g.folder, "devices.json"), []byte(`{"version":1,"dev`), 0o600); err != nil {
		t.Fatal(err)
	}
	a := &Authority{Store: g.Store}
	defer a.Close()
	s := g.settings
	if err := a.Use(&s); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("Use returns %v", err)
	}
	if _, err := a.Invite("cam", "", 1, time.Hour); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("Invite returns %v", err)
	}
}
