package delegation

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"io"
	"math/big"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/json"

	"culvert.dev/internal/testca"
)

const (
	gatewayID = "spiffe://corp.example/ns/edge/sa/gw"
	otherID   = "spiffe://corp.example/ns/shop/sa/other"
	serviceID = "spiffe://corp.example/ns/shop/sa/api"
	callerID  = "spiffe://partner.example/ns/web/sa/front"

	patience = 30 * time.Second
)

// A world has the parts that tests share: a gateway, another workload, and a service.
type world struct {
	ca                      *testca.CA
	gateway, other, service *testca.Pair
}

func newWorld(t testing.TB) *world {
	t.Helper()
	ca, err := testca.New("corp.example", nil)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{ca: ca}
	w.gateway, w.other, w.service = w.issue(t, gatewayID, nil), w.issue(t, otherID, nil), w.issue(t, serviceID, nil)
	return w
}

func (w *world) issue(t testing.TB, id string, key crypto.Signer) *testca.Pair {
	t.Helper()
	pair, err := w.ca.Issue(testca.Options{SPIFFEID: id, DNSNames: []string{"shop.test"}, Key: key})
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

func (w *world) verifier() *Verifier {
	return &Verifier{Audience: []string{serviceID}, Gateways: []Gateway{{ID: gatewayID, Roots: w.ca.Pool()}}}
}

func signer(t testing.TB, id string, p *testca.Pair, chain ...*x509.Certificate) *Signer {
	t.Helper()
	s, err := NewSigner(id, p.TLS.PrivateKey.(crypto.Signer), chain)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// session returns both ends of a TLS session of the gateway with the service.
func (w *world) session(t testing.TB, change ...func(client, server *tls.Config)) (gateway, service *tls.ConnectionState) {
	t.Helper()
	client := &tls.Config{Certificates: []tls.Certificate{w.gateway.TLS}, RootCAs: w.ca.Pool(), ServerName: "shop.test"}
	server := &tls.Config{Certificates: []tls.Certificate{w.service.TLS}, ClientAuth: tls.RequireAnyClientCert}
	for _, f := range change {
		f(client, server)
	}
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, s := tls.Client(a, client), tls.Server(b, server)
	done := make(chan error, 1)
	go func() { done <- s.HandshakeContext(ctx) }()
	err := c.HandshakeContext(ctx)
	if serverErr := <-done; err != nil || serverErr != nil {
		t.Fatal(err, serverErr)
	}
	cs, ss := c.ConnectionState(), s.ConnectionState()
	return &cs, &ss
}

func assertion(t testing.TB, cs *tls.ConnectionState) *Assertion {
	t.Helper()
	binding, err := Binding(cs)
	if err != nil {
		t.Fatal(err)
	}
	return &Assertion{Subject: callerID, Method: "mtls", CertHash: bytes.Repeat([]byte{7}, 32), Audience: serviceID, Binding: binding}
}

// noCertificate has the client show none.
func noCertificate(client, server *tls.Config) {
	client.Certificates, server.ClientAuth = nil, tls.NoClientCert
}

// What a gateway signs is what the service gets, by each kind of key, in each version of TLS, and
// wherever the key is from.
func TestVerifyReturnsWhatWasSigned(t *testing.T) {
	w := newWorld(t)
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name   string
		key    crypto.Signer // nil means P-256
		change func(client, server *tls.Config)
		x5c    bool
		pinned bool
	}{
		{name: "ES256"}, {name: "ES384", key: p384}, {name: "PS256", key: rsaKey}, {name: "EdDSA", key: ed},
		{name: "TLS 1.2", change: func(c, _ *tls.Config) { c.MaxVersion = tls.VersionTLS12 }},
		{name: "a certificate in the assertion", change: noCertificate, x5c: true},
		{name: "a known key", change: noCertificate, pinned: true},
	} {
		t.Run(row.name, func(t *testing.T) {
			gw := w.issue(t, gatewayID, row.key)
			gateway, service := w.session(t, func(c, s *tls.Config) {
				c.Certificates = []tls.Certificate{gw.TLS}
				if row.change != nil {
					row.change(c, s)
				}
			})
			var chain []*x509.Certificate
			if row.x5c {
				chain = append(chain, gw.TLS.Leaf)
			}
			v := w.verifier()
			if row.pinned {
				v.Gateways[0] = Gateway{ID: gatewayID, Keys: []crypto.PublicKey{w.other.TLS.Leaf.PublicKey, gw.TLS.Leaf.PublicKey}}
			}
			want := assertion(t, gateway)
			want.Actors = []string{"spiffe://partner.example/gw"}
			token, err := signer(t, gatewayID, gw, chain...).Sign(want)
			if err != nil {
				t.Fatal(err)
			}
			for range 2 { // the second is remembered
				got, err := v.Verify(token, service)
				if err != nil {
					t.Fatal(err)
				}
				if got.Subject != want.Subject || got.Method != want.Method || got.Audience != want.Audience || !bytes.Equal(got.CertHash, want.CertHash) ||
					!bytes.Equal(got.Binding, want.Binding) || got.ID == "" || got.Expires.Sub(got.IssuedAt) != lifetime {
					t.Errorf("got %+v, want what was signed, %+v", got, want)
				}
				if actors := []string{gatewayID, "spiffe://partner.example/gw"}; !slices.Equal(got.Actors, actors) {
					t.Errorf("got the actors %q, want %q", got.Actors, actors)
				}
			}
			if !row.x5c && len(token) > MaxTLV {
				t.Errorf("got %d bytes, want at most %d", len(token), MaxTLV)
			}
		})
	}
}

// forge signs any claims by any header, as a gateway never does.
func forge(t testing.TB, p *testca.Pair, typ string, c any) string {
	t.Helper()
	s, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: p.TLS.PrivateKey}, (&jose.SignerOptions{}).WithType(jose.ContentType(typ)))
	if err != nil {
		t.Fatal(err)
	}
	payload, ok := c.(string)
	if !ok {
		b, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		payload = string(b)
	}
	jws, err := s.Sign([]byte(payload))
	if err != nil {
		t.Fatal(err)
	}
	token, err := jws.CompactSerialize()
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// Each wrong assertion is refused for its own reason, in its own words, however often it is
// shown.
func TestVerifyRefuses(t *testing.T) {
	w := newWorld(t)
	gateway, service := w.session(t)
	_, another := w.session(t)
	_, byOther := w.session(t, func(c, _ *tls.Config) { c.Certificates = []tls.Certificate{w.other.TLS} })
	bareGateway, bare := w.session(t, noCertificate)
	foreignCA, err := testca.New("corp.example", nil)
	if err != nil {
		t.Fatal(err)
	}
	impostor, err := foreignCA.Issue(testca.Options{SPIFFEID: gatewayID})
	if err != nil {
		t.Fatal(err)
	}
	impostorGateway, byImpostor := w.session(t, func(c, _ *tls.Config) { c.Certificates = []tls.Certificate{impostor.TLS} })

	now := time.Now()
	good := claims{
		Issuer: gatewayID, Subject: callerID, Audience: serviceID, IssuedAt: now.Unix(), Expires: now.Add(lifetime).Unix(), ID: "1", Method: "mtls",
		Binding: base64.RawURLEncoding.EncodeToString(assertion(t, gateway).Binding), Act: chain([]string{gatewayID}),
	}
	with := func(change func(*claims)) string {
		c := good
		change(&c)
		return forge(t, w.gateway, tokenType, c)
	}
	sign := func(s *Signer, cs *tls.ConnectionState) string {
		t.Helper()
		token, err := s.Sign(assertion(t, cs))
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	token := sign(signer(t, gatewayID, w.gateway), gateway)
	parts := strings.Split(token, ".")
	b64 := base64.RawURLEncoding.EncodeToString

	for _, row := range []struct {
		name  string
		token string
		cs    *tls.ConnectionState // nil means the service's end of the first session
		v     func(*Verifier)
		why   Reason
		text  string
	}{
		{name: "none", why: Missing, text: "there is no assertion"},
		{name: "no session", token: token, cs: noSession, why: NoBinding, text: "there is no TLS session"},
		{name: "another session of the same gateway", token: token, cs: another, why: WrongSession, text: "bound to another TLS session"},
		{name: "session of another workload", token: token, cs: byOther, why: UnknownGateway, text: `of "` + gatewayID + `", and the certificate in the TLS session is of another`},
		{name: "another audience", token: with(func(c *claims) { c.Audience = otherID }), why: WrongAudience, text: `is for "` + otherID + `", and this service is`},
		{name: "no audience", token: with(func(c *claims) { c.Audience = "" }), why: Malformed, text: "the audience is missing"},
		{name: "a verifier without audience", token: token, v: func(v *Verifier) { v.Audience = nil }, why: WrongAudience, text: "and this service is []"},
		{name: "expired", token: with(func(c *claims) { c.IssuedAt -= 60; c.Expires = c.IssuedAt + 30 }), why: Expired, text: "was valid until"},
		{name: "expired since it was verified", token: token, v: func(v *Verifier) {
			if _, err := v.Verify(token, service); err != nil {
				t.Error(err)
			}
			v.Time = func() time.Time { return now.Add(lifetime + 6*time.Second) }
		}, why: Expired, text: "was valid until"},
		{name: "of the future", token: with(func(c *claims) { c.IssuedAt += 30; c.Expires += 30 }), why: NotYetValid, text: "the assertion is from"},
		{name: "for an hour", token: with(func(c *claims) { c.Expires = c.IssuedAt + 3600 }), why: TooLong, text: "is for 1h0m0s, limit 1m0s"},
		{name: "the end of time", token: with(func(c *claims) { c.IssuedAt, c.Expires = 0, 1<<63-1 }), why: Malformed, text: "its times are out of range"},
		{name: "ends before it begins", token: with(func(c *claims) { c.Expires = c.IssuedAt - 1 }), why: Malformed, text: "ends before it begins"},
		{name: "another workload", token: sign(signer(t, otherID, w.other), gateway), cs: byOther, why: UnknownGateway, text: `of "` + otherID + `", which is none of the gateways`},
		{name: "another workload for the gateway", token: sign(signer(t, gatewayID, w.other), gateway), why: BadSignature, text: "not signed by the gateway's key"},
		{name: "the gateway's id by another CA", token: sign(signer(t, gatewayID, impostor), impostorGateway), cs: byImpostor, why: BadCertificate, text: "in the TLS session can't be verified: x509: certificate signed by unknown authority"},
		{name: "the same, in the assertion", token: sign(signer(t, gatewayID, impostor, impostor.TLS.Leaf), bareGateway), cs: bare, why: BadCertificate, text: "of the assertion can't be verified"},
		{name: "a certificate of another in the assertion", token: sign(signer(t, gatewayID, w.other, w.other.TLS.Leaf), bareGateway), cs: bare, why: UnknownGateway, text: "the certificate of the assertion is of another"},
		{name: "no certificate and no key", token: sign(signer(t, gatewayID, w.gateway), bareGateway), cs: bare, why: BadCertificate, text: "has shown no certificate"},
		{name: "no gateways", token: token, v: func(v *Verifier) { v.Gateways = nil }, why: UnknownGateway, text: "none of the gateways"},
		{name: "no CAs", token: token, v: func(v *Verifier) { v.Gateways[0].Roots = nil }, why: BadCertificate, text: "no CA is configured for"},
		{name: "a caller of another domain", token: token, v: func(v *Verifier) { v.Gateways[0].TrustDomains = []string{"corp.example"} }, why: NotDelegated, text: `may name callers of the trust domains ["corp.example"]`},
		{name: "a gateway that Identify does not know", token: token, v: func(v *Verifier) {
			v.Identify = func([]*x509.Certificate) (string, error) { return "", errors.New("who?") }
		}, why: BadCertificate, text: "can't be verified: who?"},
		{name: "a gateway that Identify knows as another", token: token, v: func(v *Verifier) {
			v.Identify = func([]*x509.Certificate) (string, error) { return otherID, nil }
		}, why: UnknownGateway, text: `is of "` + otherID + `"`},
		{name: "five actors", token: with(func(c *claims) { c.Act = chain([]string{gatewayID, "b", "c", "d", "e"}) }), why: TooManyActors, text: "more than 4 actors"},
		{name: "no actor", token: with(func(c *claims) { c.Act = nil }), why: Malformed, text: "the first actor is not"},
		{name: "another first actor", token: with(func(c *claims) { c.Act = chain([]string{"b", gatewayID}) }), why: Malformed, text: "the first actor is not"},
		{name: "an empty actor", token: with(func(c *claims) { c.Act = chain([]string{gatewayID, ""}) }), why: Malformed, text: "an actor is missing"},
		{name: "no subject", token: with(func(c *claims) { c.Subject = "" }), why: Malformed, text: "the subject is missing"},
		{name: "a line in the subject", token: with(func(c *claims) { c.Subject = "a\nb" }), why: Malformed, text: "the subject has bytes that no id has"},
		{name: "a long subject", token: with(func(c *claims) { c.Subject = strings.Repeat("a", maxName+1) }), why: Malformed, text: "the subject has 2049 bytes, limit 2048"},
		{name: "no method", token: with(func(c *claims) { c.Method = "" }), why: Malformed, text: "the method is missing"},
		{name: "no id", token: with(func(c *claims) { c.ID = "" }), why: Malformed, text: "the id is missing"},
		{name: "a short hash", token: with(func(c *claims) { c.Cnf = &cnf{"AAAA"} }), why: Malformed, text: "has 3 bytes, want 32"},
		{name: "an empty hash", token: with(func(c *claims) { c.Cnf = &cnf{} }), why: Malformed, text: "the hash of the caller's certificate is not base64url"},
		{name: "no binding", token: with(func(c *claims) { c.Binding = "" }), why: Malformed, text: "the binding to a TLS session is missing"},
		{name: "half a binding", token: with(func(c *claims) { c.Binding = c.Binding[:20] }), why: WrongSession, text: "bound to another TLS session"},
		{name: "no issuer", token: with(func(c *claims) { c.Issuer = "" }), why: UnknownGateway, text: `of "", which is none`},
		{name: "another type of token", token: forge(t, w.gateway, "JWT", good), why: Malformed, text: `has the type "JWT", want "culvert-peer+jwt"`},
		{name: "a claim twice", token: forge(t, w.gateway, tokenType, `{"iss":"`+gatewayID+`","iss":"`+gatewayID+`"}`), why: Malformed, text: "not that of an assertion"},
		{name: "several audiences", token: forge(t, w.gateway, tokenType, `{"iss":"`+gatewayID+`","aud":["a","b"]}`), why: Malformed, text: "not that of an assertion"},
		{name: "no JSON", token: forge(t, w.gateway, tokenType, `hello`), why: Malformed, text: "not that of an assertion"},
		{name: "alg none", token: b64([]byte(`{"alg":"none","typ":"`+tokenType+`"}`)) + "." + parts[1] + ".", why: Malformed, text: `signed by "none"`},
		{name: "alg HS256", token: b64([]byte(`{"alg":"HS256","typ":"`+tokenType+`"}`)) + "." + parts[1] + "." + parts[2], why: Malformed, text: `signed by "HS256"`},
		{name: "alg of another key", token: b64([]byte(`{"alg":"EdDSA","typ":"`+tokenType+`"}`)) + "." + parts[1] + "." + parts[2], why: BadSignature, text: "signed by EdDSA, and the gateway's key signs by ES256"},
		{name: "a critical field", token: b64([]byte(`{"alg":"ES256","crit":["x"],"x":1,"typ":"`+tokenType+`"}`)) + "." + parts[1] + "." + parts[2], why: BadSignature, text: "not signed by"},
		{name: "another payload", token: parts[0] + "." + b64([]byte(strings.Replace(string(decoded(t, parts[1])), "front", "admin", 1))) + "." + parts[2], why: BadSignature, text: "not signed by"},
		{name: "another signature", token: parts[0] + "." + parts[1] + "." + b64(make([]byte, 64)), why: BadSignature, text: "not signed by"},
		{name: "no signature", token: parts[0] + "." + parts[1] + ".", why: BadSignature, text: "not signed by"},
		{name: "two parts", token: parts[0] + "." + parts[1], why: Malformed, text: "is not a JWS"},
		{name: "four parts", token: token + ".", why: Malformed, text: "is not a JWS"},
		{name: "padding", token: parts[0] + "." + parts[1] + "=." + parts[2], why: Malformed, text: "is not a JWS"},
		{name: "a space", token: " " + token, why: Malformed, text: "is not a JWS"},
		{name: "no certificate that parses", token: b64([]byte(`{"alg":"ES256","x5c":["AAAA"],"typ":"`+tokenType+`"}`)) + "." + parts[1] + "." + parts[2], cs: bare, why: Malformed, text: "a certificate of the assertion can't be parsed"},
		{name: "five certificates", token: b64([]byte(`{"alg":"ES256","x5c":["","","","",""],"typ":"`+tokenType+`"}`)) + "." + parts[1] + "." + parts[2], cs: bare, why: Malformed, text: "has 5 certificates, limit 4"},
		{name: "8 KiB and a byte", token: strings.Repeat("a", MaxToken+1), why: TooLarge, text: "has 8193 bytes, limit 8192"},
	} {
		t.Run(row.name, func(t *testing.T) {
			v := w.verifier()
			cs := service
			if row.cs == noSession {
				cs = nil
			} else if row.cs != nil {
				cs = row.cs
			}
			if row.v != nil {
				row.v(v)
			}
			for range 2 {
				a, err := v.Verify(row.token, cs)
				e, ok := errors.AsType[*Error](err)
				if a != nil || !ok || e.Reason != row.why || !strings.Contains(err.Error(), row.text) {
					t.Fatalf("got %v, %v, want %s and %q", a, err, row.why, row.text)
				}
			}
		})
	}
}

// noSession stands for nil in a table.
var noSession = new(tls.ConnectionState)

func decoded(t testing.TB, s string) []byte {
	t.Helper()
	b, err := decode(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What was verified in one session is not believed in another, although it is remembered.
func TestVerifyRemembersBySession(t *testing.T) {
	w := newWorld(t)
	v := w.verifier()
	gateway, service := w.session(t)
	_, another := w.session(t)
	token, err := signer(t, gatewayID, w.gateway).Sign(assertion(t, gateway))
	if err != nil {
		t.Fatal(err)
	}
	first, err := v.Verify(token, service)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := v.Verify(token, service); again != first || err != nil {
		t.Errorf("got %p, %v, want what was verified before, %p", again, err, first)
	}
	if _, err := v.Verify(token, another); reason(err) != WrongSession {
		t.Errorf("got %v, want %s", err, WrongSession)
	}
	v.Unbound = true
	if _, err := v.Verify(token, another); reason(err) != WrongSession {
		t.Errorf("unbound, and in a session: got %v, want %s", err, WrongSession)
	}
	if _, err := v.Verify(token, nil); reason(err) != BadCertificate { // it has no certificate of its own
		t.Errorf("unbound, and without a session: got %v, want %s", err, BadCertificate)
	}
	for range 2*maxCached + 1 {
		v.verified[key([]byte{byte(len(v.verified)), byte(len(v.verified) >> 8)})] = first
	}
	gateway, service = w.session(t)
	if token, err = signer(t, gatewayID, w.gateway).Sign(assertion(t, gateway)); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Verify(token, service); err != nil || len(v.verified) > maxCached {
		t.Errorf("got %d assertions that are remembered, %v, want at most %d", len(v.verified), err, maxCached)
	}
}

func reason(err error) Reason {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Reason
	}
	return ""
}

// Behind a sidecar there is no session: an assertion counts there by its own certificate,
// if the service says so.
func TestVerifyUnbound(t *testing.T) {
	w := newWorld(t)
	gateway, _ := w.session(t)
	token, err := signer(t, gatewayID, w.gateway, w.gateway.TLS.Leaf).Sign(assertion(t, gateway))
	if err != nil {
		t.Fatal(err)
	}
	v := w.verifier()
	if _, err := v.Verify(token, nil); reason(err) != NoBinding {
		t.Errorf("got %v, want %s", err, NoBinding)
	}
	v.Unbound = true
	if a, err := v.Verify(token, nil); err != nil || a.Subject != callerID {
		t.Errorf("got %v, %v, want the caller", a, err)
	}
}

// TLS 1.2 without extended master secret, RFC 7627, has no binding. crypto/tls always
// offers it, so that its absence is played by a state that has none.
func TestBindingNeedsExtendedMasterSecret(t *testing.T) {
	defer func() {
		if v := recover(); v != nil {
			t.Errorf("got a panic, %v", v)
		}
	}()
	w := newWorld(t)
	gateway, _ := w.session(t, func(c, _ *tls.Config) {
		c.MaxVersion, c.Renegotiation = tls.VersionTLS12, tls.RenegotiateOnceAsClient // crypto/tls then exports nothing
	})
	if _, err := Binding(gateway); reason(err) != NoBinding || !strings.Contains(err.Error(), "neither TLS 1.3 nor TLS 1.2 with extended master secret") {
		t.Errorf("got %v, want %s", err, NoBinding)
	}
}

// A signer refuses what no verifier would take, and sends nothing without a binding.
func TestSignRefuses(t *testing.T) {
	w := newWorld(t)
	gateway, _ := w.session(t)
	s := signer(t, gatewayID, w.gateway)
	for _, row := range []struct {
		name   string
		change func(*Assertion)
		why    Reason
		text   string
	}{
		{"four earlier actors", func(a *Assertion) { a.Actors = []string{"a", "b", "c", "d"} }, TooManyActors, "there are 5 actors, limit 4"},
		{"more than a minute", func(a *Assertion) { a.IssuedAt = time.Now(); a.Expires = a.IssuedAt.Add(61 * time.Second) }, TooLong, "is for 1m1s, limit 1m0s"},
		{"no time at all", func(a *Assertion) { a.IssuedAt = time.Now(); a.Expires = a.IssuedAt }, Malformed, "ends before it begins"},
		{"no binding", func(a *Assertion) { a.Binding = nil }, NoBinding, "bound to no TLS session"},
		{"no caller", func(a *Assertion) { a.Subject = "" }, Malformed, "the subject is missing"},
		{"no audience", func(a *Assertion) { a.Audience = "" }, Malformed, "the audience is missing"},
		{"no method", func(a *Assertion) { a.Method = "" }, Malformed, "the method is missing"},
		{"a NUL", func(a *Assertion) { a.Subject = "a\x00" }, Malformed, "bytes that no id has"},
		{"a short hash", func(a *Assertion) { a.CertHash = []byte{1} }, Malformed, "has 1 bytes, want 32"},
		{"more than 1.5 KiB", func(a *Assertion) { a.Subject += strings.Repeat("a", 1000) }, TooLarge, "limit 1536"},
	} {
		a := assertion(t, gateway)
		row.change(a)
		before := *a
		token, err := s.Sign(a)
		if token != "" || reason(err) != row.why || !strings.Contains(err.Error(), row.text) {
			t.Errorf("%s: got %q, %v, want %s and %q", row.name, token, err, row.why, row.text)
		}
		if len(a.Actors) != len(before.Actors) || a.ID != before.ID {
			t.Errorf("%s: the assertion was changed", row.name)
		}
	}
	if _, err := NewSigner(gatewayID, publicOnly{&rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), 1023), E: 65537}}, nil); reason(err) != BadKey || !strings.Contains(err.Error(), "has 1024 bits") {
		t.Errorf("got %v, want %s", err, BadKey)
	}
	if _, err := NewSigner(gatewayID, publicOnly{&ecdsa.PublicKey{Curve: elliptic.P224()}}, nil); reason(err) != BadKey || !strings.Contains(err.Error(), "P-224") {
		t.Errorf("got %v, want %s", err, BadKey)
	}
}

// publicOnly is a key that can't sign.
type publicOnly struct{ key crypto.PublicKey }

func (p publicOnly) Public() crypto.PublicKey { return p.key }
func (publicOnly) Sign(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) {
	return nil, errors.New("there is no private key")
}

func FuzzVerify(f *testing.F) {
	w := newWorld(f)
	gateway, service := w.session(f)
	token, err := signer(f, gatewayID, w.gateway).Sign(assertion(f, gateway))
	if err != nil {
		f.Fatal(err)
	}
	withChain, err := signer(f, gatewayID, w.gateway, w.gateway.TLS.Leaf).Sign(assertion(f, gateway))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(token)
	f.Add(withChain)
	f.Add("..")
	v := w.verifier()
	f.Fuzz(func(t *testing.T, got string) {
		a, err := v.Verify(got, service)
		if err == nil && got != token && got != withChain {
			t.Errorf("got %+v of a token that nobody signed", a)
		}
		if err != nil && reason(err) == "" {
			t.Errorf("got %v, want an *Error", err)
		}
	})
}

func BenchmarkSign(b *testing.B) {
	w := newWorld(b)
	gateway, _ := w.session(b)
	s, a := signer(b, gatewayID, w.gateway), assertion(b, gateway)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Sign(a); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkVerify(b *testing.B) {
	w := newWorld(b)
	gateway, service := w.session(b)
	token, err := signer(b, gatewayID, w.gateway).Sign(assertion(b, gateway))
	if err != nil {
		b.Fatal(err)
	}
	for _, row := range []struct {
		name   string
		forget func(*Verifier)
	}{
		{"first of a gateway", func(v *Verifier) { v.verified, v.trusted = nil, nil }},
		{"first of a session", func(v *Verifier) { v.verified = nil }},
		{"again", func(*Verifier) {}},
	} {
		b.Run(row.name, func(b *testing.B) {
			v := w.verifier()
			b.ReportAllocs()
			for b.Loop() {
				row.forget(v)
				if _, err := v.Verify(token, service); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
