package jwt

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"

	"culvert.dev/connect"
	"culvert.dev/identity"
	"culvert.dev/tunnel"
)

const (
	login = "https://login.example/"
	alb   = "https://alb.example/"
	arn   = "arn:aws:elasticloadbalancing:eu-west-1:123456789012:loadbalancer/app/edge/0123456789abcdef"
)

func newEC(t testing.TB, c elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(c, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// testRSA is made once: that takes long.
var testRSA = sync.OnceValue(func() *rsa.PrivateKey {
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		panic(err)
	}
	return k
})

// set returns a JWK Set of public keys by their kid, with more members for each.
func set(t testing.TB, keys map[string]crypto.PublicKey) []byte {
	t.Helper()
	doc := jose.JSONWebKeySet{}
	for kid, k := range keys {
		doc.Keys = append(doc.Keys, jose.JSONWebKey{Key: k, KeyID: kid, Use: "sig"})
	}
	b, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

type claims map[string]any

// good returns the claims of a token that is accepted, changed by more. A nil value takes
// one away.
func good(more claims) claims {
	c := claims{"iss": login, "sub": "alice", "aud": "culvert", "exp": time.Now().Add(time.Hour).Unix(), "iat": time.Now().Unix()}
	maps.Copy(c, more)
	maps.DeleteFunc(c, func(_ string, v any) bool { return v == nil })
	return c
}

// sign makes a token as its header says, with more members.
func sign(t testing.TB, alg string, k any, header map[string]any, c claims) string {
	t.Helper()
	h := map[string]any{"alg": alg}
	maps.Copy(h, header)
	return signParts(t, alg, k, part(t, base64.RawURLEncoding, h)+"."+part(t, base64.RawURLEncoding, c), base64.RawURLEncoding)
}

func part(t testing.TB, enc *base64.Encoding, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return enc.EncodeToString(b)
}

// signParts signs bytes by hand, so that nothing of it is what the library would do.
func signParts(t testing.TB, alg string, k any, signed string, enc *base64.Encoding) string {
	t.Helper()
	var sig []byte
	var err error
	sum := func() (crypto.Hash, []byte) {
		h := map[string]crypto.Hash{"256": crypto.SHA256, "384": crypto.SHA384, "512": crypto.SHA512}[alg[2:]]
		d := h.New()
		d.Write([]byte(signed))
		return h, d.Sum(nil)
	}
	switch k := k.(type) {
	case nil:
	case *ecdsa.PrivateKey:
		_, digest := sum()
		r, s, err2 := ecdsa.Sign(rand.Reader, k, digest)
		size := (k.Params().BitSize + 7) / 8
		if err = err2; err == nil {
			sig = append(r.FillBytes(make([]byte, size)), s.FillBytes(make([]byte, size))...)
		}
	case *rsa.PrivateKey:
		h, digest := sum()
		if alg[0] == 'P' {
			sig, err = rsa.SignPSS(rand.Reader, k, h, digest, &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash})
		} else {
			sig, err = rsa.SignPKCS1v15(rand.Reader, k, h, digest)
		}
	case ed25519.PrivateKey:
		sig = ed25519.Sign(k, []byte(signed))
	case []byte:
		m := hmac.New(sha256.New, k)
		m.Write([]byte(signed))
		sig = m.Sum(nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	return signed + "." + enc.EncodeToString(sig)
}

func bearer(token string) connect.Credentials {
	return connect.Credentials{Scheme: "bearer", Value: token}
}

func inField(name, token string) connect.Credentials {
	return connect.Credentials{Fields: connect.Fields{{Name: "Via", Value: "1.1 lb"}, {Name: name, Value: token}}}
}

// wantRefused checks the cause and the text of a refusal, and that it has nothing of the
// signature in it.
func wantRefused(t *testing.T, err error, token string, cause Cause, text string) {
	t.Helper()
	r := (*Refusal)(nil)
	if !errors.As(err, &r) || r.Cause != cause || !strings.Contains(err.Error(), text) {
		t.Errorf("got %v, want the cause %s and %q", err, cause, text)
		return
	}
	if !errors.Is(err, connect.ErrCredentials) || tunnel.ReasonOf(err) != tunnel.Internal {
		t.Errorf("%v is not the error of credentials", err)
	}
	for _, p := range strings.Split(token, ".") {
		if len(p) > 8 && strings.Contains(err.Error(), p) {
			t.Errorf("%v has a part of the token in it", err)
		}
	}
}

// TestBadTokens has each row of the table of tokens in the documentation.
func TestBadTokens(t *testing.T) {
	ec, other, ed := newEC(t, elliptic.P256()), newEC(t, elliptic.P256()), ed25519.NewKeyFromSeed(make([]byte, 32))
	p384 := newEC(t, elliptic.P384())
	rs := testRSA()
	keys := set(t, map[string]crypto.PublicKey{"ec": ec.Public(), "rsa": rs.Public(), "ed": ed.Public(), "p384": p384.Public()})
	tokens := &Tokens{}
	if err := tokens.Use([]Issuer{
		{URL: login, Audiences: []string{"culvert", "gw"}, JWKS: keys, Claims: []string{"groups", "realm_access.roles", "level"}},
		{URL: alb, Header: "x-amzn-oidc-data", Signer: arn, JWKS: set(t, map[string]crypto.PublicKey{"alb": ec.Public()})},
		{Name: "mail", URL: "https://mail.example", Audiences: []string{"culvert"}, JWKS: keys, ID: "mail:{email}"},
		{URL: "https://not.here.example", Audiences: []string{"culvert"}, JWKS: keys},
		{URL: "https://cluster.example", Audiences: []string{"culvert"}, Kubernetes: true, JWKS: keys},
	}); err != nil {
		t.Fatal(err)
	}
	auth := tokens.Accept([]string{login, alb, "mail", "https://cluster.example"})
	kid := map[string]any{"kid": "ec"}
	es := func(c claims) string { return sign(t, "ES256", ec, kid, good(c)) }
	head := func(h map[string]any) string {
		out := map[string]any{"kid": "ec"}
		maps.Copy(out, h)
		return sign(t, "ES256", ec, out, good(nil))
	}
	many := func(n, size int) []string {
		out := make([]string, n)
		for i := range out {
			out[i] = strings.Repeat("g", size)
		}
		return out
	}
	publicAsSecret, err := x509.MarshalPKIXPublicKey(rs.Public())
	if err != nil {
		t.Fatal(err)
	}
	embedded := map[string]any{"kty": "EC", "crv": "P-256",
		"x": base64.RawURLEncoding.EncodeToString(other.X.FillBytes(make([]byte, 32))), "y": base64.RawURLEncoding.EncodeToString(other.Y.FillBytes(make([]byte, 32)))}
	soon := time.Now()
	for _, row := range []struct {
		name, token string
		cause       Cause
		text        string
	}{
		{"alg none", sign(t, "none", nil, nil, good(nil)) + "x", BadAlgorithm, "is none"},
		{"alg None", sign(t, "NoNe", nil, nil, good(nil)) + "x", BadAlgorithm, "is none"},
		{"no alg", sign(t, "", nil, nil, good(nil)) + "x", BadAlgorithm, `algorithm "" is not accepted`},
		{"shared secret", sign(t, "HS256", []byte("secret"), kid, good(nil)), BadAlgorithm, "shared secret"},
		{"public key as shared secret", sign(t, "HS256", publicAsSecret, map[string]any{"kid": "rsa"}, good(nil)), BadAlgorithm, "shared secret"},
		{"algorithm of nobody", sign(t, "ES256K", nil, kid, good(nil)) + "x", BadAlgorithm, "ES256K"},
		{"algorithm in lower case", sign(t, "es256", nil, kid, good(nil)) + "x", BadAlgorithm, "es256"},
		{"algorithm of another key", sign(t, "RS256", rs, kid, good(nil)), BadAlgorithm, `RS256 is not that of the key "ec"`},
		{"curve of another algorithm", sign(t, "ES256", ec, map[string]any{"kid": "p384"}, good(nil)), BadAlgorithm, `ES256 is not that of the key "p384"`},
		{"key of another kid", sign(t, "ES256", other, kid, good(nil)), BadSignature, "signature is not that"},
		{"signature changed", cut(es(nil), 4) + "AAAA", BadSignature, "signature is not that"},
		{"signature cut", cut(es(nil), 2), BadSignature, "signature is not that"},
		{"no signature", cut(es(nil), 86), Malformed, "signature is missing"},
		{"claims changed", swapClaims(t, es(nil), good(claims{"sub": "admin"})), BadSignature, "signature is not that"},
		{"no kid, several keys", sign(t, "RS256", newRSA(t), nil, good(nil)), BadSignature, "signature is not that"},
		{"embedded key", sign(t, "ES256", other, map[string]any{"kid": "ec", "jwk": embedded}, good(nil)), BadSignature, "signature is not that"},
		{"jku", sign(t, "ES256", other, map[string]any{"kid": "mine", "jku": "https://evil.example/keys"}, good(nil)), UnknownKey, `no key "mine"`},
		{"x5u", sign(t, "ES256", other, map[string]any{"kid": "mine", "x5u": "https://evil.example/cert"}, good(nil)), UnknownKey, `no key "mine"`},
		{"kid that is a path", head(map[string]any{"kid": "../../../../dev/null"}), UnknownKey, `no key "../../../../dev/null"`},
		{"kid that is a URL", head(map[string]any{"kid": "https://evil.example/key"}), UnknownKey, `no key "https://evil.example/key"`},
		{"kid that is a number", head(map[string]any{"kid": 7}), Malformed, "header is not the JSON"},
		{"critical members", head(map[string]any{"crit": []string{"b64"}, "b64": false}), Malformed, "crit"},
		{"critical members, none", head(map[string]any{"crit": nil}), Malformed, "crit"},
		{"logout token", head(map[string]any{"typ": "logout+jwt"}), Malformed, "logout+jwt"},
		{"proof of possession", head(map[string]any{"typ": "dpop+jwt"}), Malformed, "dpop+jwt"},
		{"nested", head(map[string]any{"cty": "JWT"}), Encrypted, "another token inside"},
		{"encrypted", "a.b.c.d.e", Encrypted, "is encrypted"},
		{"encrypted by its header", head(map[string]any{"enc": "A256GCM"}), Encrypted, "is encrypted"},
		{"over 16 KiB", es(claims{"x": strings.Repeat("x", 16<<10)}), TooLarge, "limit 16384"},
		{"two parts", "abc.def", Malformed, "this one 2"},
		{"no token", "opaque", Malformed, "this one 1"},
		{"header not base64", "{}." + strings.SplitN(es(nil), ".", 2)[1], Malformed, "header is not base64url"},
		{"header not JSON", "AAAA." + strings.SplitN(es(nil), ".", 2)[1], Malformed, "header is not the JSON"},
		{"header with a name twice", base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","alg":"ES256"}`)) + "." + strings.SplitN(es(nil), ".", 2)[1], Malformed, "header is not the JSON"},
		{"claims with a name twice", strings.Split(es(nil), ".")[0] + "." + base64.RawURLEncoding.EncodeToString([]byte(`{"sub":"a","sub":"b"}`)) + ".AAAA", Malformed, "claims are not a JSON object"},
		{"claims null", strings.Split(es(nil), ".")[0] + "." + base64.RawURLEncoding.EncodeToString([]byte(`null`)) + ".AAAA", Malformed, "claims are not a JSON object"},
		{"claims not base64", strings.Split(es(nil), ".")[0] + ".{}.AAAA", Malformed, "claims are not base64url"},
		{"padding", strings.Split(es(nil), ".")[0] + "." + padded(t, good(nil)) + ".AAAA", Malformed, "padding"},
		{"exp missing", es(claims{"exp": nil}), Expired, "does not say when it expires"},
		{"exp text", es(claims{"exp": "tomorrow"}), Malformed, "exp is not a date"},
		{"exp out of range", es(claims{"exp": 1e300}), Malformed, "exp is not a date"},
		{"exp negative", es(claims{"exp": -1}), Malformed, "exp is not a date"},
		{"exp null", es(claims{"exp": json.RawMessage("null")}), Malformed, "exp is not a date"},
		{"expired", es(claims{"exp": soon.Add(-2 * time.Minute).Unix()}), Expired, "expired at"},
		{"nbf ahead", es(claims{"nbf": soon.Add(10 * time.Minute).Unix()}), NotYet, "valid from"},
		{"clock off", es(claims{"iat": soon.Add(10 * time.Minute).Unix()}), NotYet, "compare the clocks"},
		{"aud missing", es(claims{"aud": nil}), BadAudience, "does not say for whom"},
		{"aud empty", es(claims{"aud": []string{}}), BadAudience, "does not say for whom"},
		{"aud a number", es(claims{"aud": 1}), Malformed, "aud is not text"},
		{"aud of another", es(claims{"aud": []string{"billing", "culvert2"}}), BadAudience, `for "billing, culvert2"`},
		{"aud too many", es(claims{"aud": many(65, 1)}), Malformed, "at most 64"},
		{"issuer unknown", es(claims{"iss": "https://evil.example/"}), UnknownIssuer, `"https://evil.example/" are not accepted here`},
		{"issuer without its slash", es(claims{"iss": "https://login.example"}), UnknownIssuer, `"https://login.example" are not accepted here`},
		{"issuer missing", es(claims{"iss": nil}), UnknownIssuer, `issuer "" are not accepted here`},
		{"issuer of another listener", es(claims{"iss": "https://not.here.example"}), UnknownIssuer, "are not accepted here"},
		{"issuer of a header, as credentials", es(claims{"iss": alb}), UnknownIssuer, "are not accepted here"},
		{"sub missing", es(claims{"sub": nil}), BadClaims, "no claim sub"},
		{"sub empty", es(claims{"sub": ""}), BadClaims, "no claim sub"},
		{"sub an object", es(claims{"sub": claims{}}), Malformed, "sub is not text"},
		{"sub a SPIFFE id", es(claims{"sub": "spiffe://corp.example/ns/a/sa/b"}), BadClaims, "one that a certificate gives"},
		{"sub a SPIFFE id in capitals", es(claims{"sub": "SPIFFE://corp.example/a"}), BadClaims, "one that a certificate gives"},
		{"sub an id of a certificate", es(claims{"sub": "dns:a.example"}), BadClaims, "one that a certificate gives"},
		{"sub a user of a socket", es(claims{"sub": "uid:0"}), BadClaims, "one that a certificate gives"},
		{"sub with a line feed", es(claims{"sub": "alice\nlevel=error"}), BadClaims, "characters that none may have"},
		{"sub over 512 bytes", es(claims{"sub": strings.Repeat("a", 513)}), BadClaims, "513 bytes, limit 512"},
		{"id of a claim that is missing", es(claims{"iss": "https://mail.example"}), BadClaims, "no claim email"},
		{"too many groups", es(claims{"groups": many(257, 1)}), BadClaims, "257 values, limit 256"},
		{"too many values", es(claims{"groups": many(200, 1), "realm_access": claims{"roles": many(57, 1)}}), BadClaims, "more than 256 values"},
		{"long group", es(claims{"groups": many(1, 257)}), BadClaims, "257 bytes, limit 256"},
		{"group that is an object", es(claims{"groups": []any{claims{}}}), BadClaims, "groups is not text"},
		{"Kubernetes without a service account", es(claims{"iss": "https://cluster.example"}), BadClaims, "not that of a service account"},
		{"Kubernetes, another service account", es(claims{"iss": "https://cluster.example", "sub": "system:serviceaccount:shop:admin", "kubernetes.io": claims{"namespace": "shop", "serviceaccount": claims{"name": "api"}}}), BadClaims, "not that of a service account"},
		{"bound to a certificate", es(claims{"cnf": claims{"x5t#S256": base64.RawURLEncoding.EncodeToString(make([]byte, 32))}}), BadCertificate, "the client has shown none"},
		{"bound to something else", es(claims{"cnf": claims{"x5t#S256": "AAAA"}}), Malformed, "not a SHA-256"},
		{"bound by text", es(claims{"cnf": "x"}), Malformed, "cnf is not an object"},
	} {
		t.Run(row.name, func(t *testing.T) {
			p, err := auth.Authenticate(t.Context(), bearer(row.token))
			wantRefused(t, err, row.token, row.cause, row.text)
			if p != (tunnel.Peer{}) {
				t.Errorf("got the peer %+v beside an error", p)
			}
		})
	}
	for _, row := range []struct {
		name string
		auth connect.Credentials
		want error
	}{
		{"nothing", connect.Credentials{}, connect.ErrCredentials},
		{"a password", connect.Credentials{Scheme: "basic", Value: es(nil)}, connect.ErrCredentials},
	} {
		if _, err := auth.Authenticate(t.Context(), row.auth); err != row.want {
			t.Errorf("%s: got %v, want %v itself", row.name, err, row.want)
		}
	}
	if _, err := tokens.Accept(nil).Authenticate(t.Context(), bearer(es(nil))); err != connect.ErrCredentials {
		t.Errorf("where no issuer is accepted: got %v, want %v", err, connect.ErrCredentials)
	}
	if _, err := auth.Authenticate(t.Context(), bearer(es(nil))); err != nil {
		t.Errorf("the token that all of these were made of: %v", err)
	}
}

func newRSA(t testing.TB) *rsa.PrivateKey {
	t.Helper()
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// cut takes n bytes from the end of a token. The signature of ES256 has 86.
func cut(token string, n int) string { return token[:len(token)-n] }

// swapClaims replaces the claims of a token and keeps its signature.
func swapClaims(t testing.TB, token string, c claims) string {
	parts := strings.Split(token, ".")
	parts[1] = part(t, base64.RawURLEncoding, c)
	return strings.Join(parts, ".")
}

// padded returns claims in base64 with padding.
func padded(t testing.TB, c claims) string {
	for n := 0; ; n++ {
		c["pad"] = strings.Repeat("x", n)
		if s := part(t, base64.URLEncoding, c); strings.HasSuffix(s, "=") {
			return s
		}
	}
}

// Every algorithm that is accepted is, and what is made of the claims is what the
// configuration says.
func TestGoodTokens(t *testing.T) {
	ed := ed25519.NewKeyFromSeed(make([]byte, 32))
	rs := testRSA()
	signers := map[string]any{
		"ES256": newEC(t, elliptic.P256()), "ES384": newEC(t, elliptic.P384()), "ES512": newEC(t, elliptic.P521()), "EdDSA": ed,
		"RS256": rs, "RS384": rs, "RS512": rs, "PS256": rs, "PS384": rs, "PS512": rs,
	}
	keys := map[string]crypto.PublicKey{}
	for alg, k := range signers {
		keys[alg] = k.(crypto.Signer).Public()
	}
	tokens := &Tokens{}
	if err := tokens.Use([]Issuer{
		{URL: login, Audiences: []string{"culvert", "gw"}, JWKS: set(t, keys), ID: "{sub}@{org.name}", Claims: []string{"groups", "realm_access.roles", "https://a.example/level", "none"}},
		{URL: "https://cluster.example", TrustDomain: "corp.example", Audiences: []string{"culvert"}, Kubernetes: true, JWKS: set(t, keys)},
	}); err != nil {
		t.Fatal(err)
	}
	auth := tokens.Accept([]string{login, "https://cluster.example"})
	for alg, k := range signers {
		got, err := auth.Authenticate(t.Context(), bearer(sign(t, alg, k, map[string]any{"kid": alg, "typ": "at+JWT"}, good(claims{
			"org": claims{"name": "corp"}, "aud": []string{"x", "gw"}, "nbf": time.Now().Add(30 * time.Second).Unix(),
			"groups": []any{"a", "b"}, "realm_access": claims{"roles": "one"}, "https://a.example/level": 7, "secret": "x",
		}))))
		if err != nil {
			t.Errorf("%s: %v", alg, err)
			continue
		}
		want := "map[groups:[a b] https://a.example/level:[7] realm_access.roles:[one]]"
		if got.ID != "alice@corp" || got.Method != "jwt" || fmt.Sprint(got.Auth.Claims) != want || got.Auth.Expires.Before(time.Now()) || got.Auth.TrustDomain != "" {
			t.Errorf("%s: got %+v with %+v, want alice@corp with %s", alg, got, got.Auth, want)
		}
	}
	got, err := auth.Authenticate(t.Context(), bearer(sign(t, "RS256", rs, map[string]any{"kid": "RS256"}, good(claims{
		"iss": "https://cluster.example", "sub": "system:serviceaccount:shop:api",
		"kubernetes.io": claims{"namespace": "shop", "serviceaccount": claims{"name": "api", "uid": "1"}, "pod": claims{"name": "api-0"}},
	}))))
	if err != nil || got.ID != "system:serviceaccount:shop:api" || got.Auth.Namespace != "shop" || got.Auth.ServiceAccount != "api" || got.Auth.TrustDomain != "corp.example" {
		t.Errorf("Kubernetes: got %+v and %v, want the service account shop/api of corp.example", got, err)
	}
}

// A person who asks about a service account by its id gets the peer that its token makes.
func TestAccount(t *testing.T) {
	tokens := &Tokens{}
	keys := set(t, map[string]crypto.PublicKey{"k": newEC(t, elliptic.P256()).Public()})
	if err := tokens.Use([]Issuer{
		{URL: login, Audiences: []string{"culvert"}, JWKS: keys},
		{URL: "https://mail.example", Audiences: []string{"culvert"}, Kubernetes: true, JWKS: keys, ID: "{email}"},
		{URL: "https://east.example", TrustDomain: "east.example", Audiences: []string{"culvert"}, Kubernetes: true, JWKS: keys, ID: "east:{sub}"},
		{URL: "https://west.example", TrustDomain: "west.example", Audiences: []string{"culvert"}, Kubernetes: true, JWKS: keys},
	}); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]string{
		"system:serviceaccount:shop:api":      "west.example shop api https://west.example",
		"east:system:serviceaccount:shop:api": "east.example shop api https://east.example",
		"north:system:serviceaccount:a:b":     "",
		"system:serviceaccount:shop":          "",
		"system:serviceaccount::api":          "",
		"system:serviceaccount:shop:api:x":    "",
		"alice":                               "",
	} {
		got := ""
		p, ok := tokens.Account(id)
		if ok {
			got = strings.Join([]string{p.Auth.TrustDomain, p.Auth.Namespace, p.Auth.ServiceAccount, p.Auth.Issuer}, " ")
			if p.ID != id || p.Method != "jwt" {
				t.Errorf("%s: got the peer %s by %s", id, p.ID, p.Method)
			}
		}
		if got != want {
			t.Errorf("%s: got %q, want %q", id, got, want)
		}
	}
}

// A load balancer of AWS signs base64 with its padding, and has no audience. Others must
// not.
func TestLoadBalancers(t *testing.T) {
	ec, iap := newEC(t, elliptic.P256()), newEC(t, elliptic.P256())
	cf, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	const field, goog, team = "x-amzn-oidc-data", "https://cloud.google.com/iap", "https://team.cloudflareaccess.com"
	tokens := &Tokens{}
	if err := tokens.Use([]Issuer{
		{URL: alb, Header: field, Signer: arn, JWKS: set(t, map[string]crypto.PublicKey{"k": ec.Public()}), ID: "{email}"},
		{URL: goog, Header: "x-goog-iap-jwt-assertion", Audiences: []string{"/projects/1/global/backendServices/2"}, JWKS: set(t, map[string]crypto.PublicKey{"k": iap.Public()}), ID: "{email}"},
		{URL: team, Header: "cf-access-jwt-assertion", Audiences: []string{"4714c1"}, JWKS: set(t, map[string]crypto.PublicKey{"k": cf.Public()}), ID: "{email}"},
		{URL: login, Audiences: []string{"culvert"}, JWKS: set(t, map[string]crypto.PublicKey{"k": ec.Public()})},
	}); err != nil {
		t.Fatal(err)
	}
	auth := tokens.Accept([]string{alb, goog, team, login})
	exp := time.Now().Add(time.Minute).Unix()
	aws := func(header, c claims) string {
		h := claims{"alg": "ES256", "kid": "k", "signer": arn, "iss": alb, "client": "the client id", "exp": exp}
		maps.Copy(h, header)
		maps.DeleteFunc(h, func(_ string, v any) bool { return v == nil })
		if c == nil {
			c = claims{"sub": "1", "email": "alice@corp.example", "exp": exp, "iss": alb}
		}
		return signParts(t, "ES256", ec, padded(t, h)+"."+padded(t, c), base64.URLEncoding)
	}
	for name, token := range map[string]string{
		"claims and header":   aws(nil, nil),
		"dates in the header": aws(nil, claims{"email": "alice@corp.example"}),
		"dates in the claims": aws(claims{"exp": nil, "iss": nil}, nil),
	} {
		for range 2 {
			p, err := auth.Authenticate(t.Context(), inField("X-Amzn-Oidc-Data", token))
			if err != nil || p.ID != "alice@corp.example" {
				t.Errorf("%s: got %+v and %v, want alice", name, p, err)
			}
		}
	}
	google := sign(t, "ES256", iap, map[string]any{"kid": "k", "typ": "JWT"}, good(claims{"iss": goog, "aud": "/projects/1/global/backendServices/2", "email": "bob@corp.example", "sub": "accounts.google.com:1"}))
	if p, err := auth.Authenticate(t.Context(), inField("x-goog-iap-jwt-assertion", google)); err != nil || p.ID != "bob@corp.example" {
		t.Errorf("IAP: got %+v and %v, want bob", p, err)
	}
	iapToken := func(c claims) string {
		all := claims{"iss": goog, "aud": "/projects/1/global/backendServices/2", "email": "bob@corp.example"}
		maps.Copy(all, c)
		return sign(t, "ES256", iap, map[string]any{"kid": "k"}, good(all))
	}
	access := func(alg string, k any, c claims) string {
		all := claims{"iss": team, "aud": []string{"4714c1"}, "email": "carol@corp.example"}
		maps.Copy(all, c)
		return sign(t, alg, k, map[string]any{"kid": "k"}, good(all))
	}
	if p, err := auth.Authenticate(t.Context(), inField("Cf-Access-Jwt-Assertion", access("RS256", cf, nil))); err != nil || p.ID != "carol@corp.example" {
		t.Errorf("Cloudflare Access: got %+v and %v, want carol", p, err)
	}
	none := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","kid":"k"}`)) + strings.TrimPrefix(access("RS256", cf, nil), strings.Split(access("RS256", cf, nil), ".")[0])
	both := inField(field, aws(nil, nil))
	both.Scheme, both.Value = "bearer", "wrong"
	twice := inField(field, aws(nil, nil))
	twice.Fields = append(twice.Fields, twice.Fields...)
	elsewhere := inField("x-amzn-oidc-data-2", aws(nil, nil))
	for _, row := range []struct {
		name  string
		c     connect.Credentials
		cause Cause
		text  string
	}{
		{"another load balancer", inField(field, aws(claims{"signer": arn + "0"}, nil)), BadSigner, "signer is"},
		{"no signer", inField(field, aws(claims{"signer": nil}, nil)), BadSigner, `signer is ""`},
		{"another issuer in the header", inField(field, aws(claims{"iss": login}, nil)), UnknownIssuer, "issuer in the header"},
		{"expired in the header", inField(field, aws(claims{"exp": exp - 600}, nil)), Expired, "expired at"},
		{"expired in the claims", inField(field, aws(nil, claims{"email": "a", "exp": exp - 600, "iss": alb})), Expired, "expired at"},
		{"never expires", inField(field, aws(claims{"exp": nil}, claims{"email": "a", "iss": alb})), Expired, "does not say"},
		{"another algorithm", inField(field, aws(claims{"alg": "ES384"}, nil)), BadAlgorithm, "signs by ES256"},
		{"changed", inField(field, aws(nil, nil)+"="), Malformed, "signature is missing or not base64url"},
		{"twice", twice, Malformed, "2 fields x-amzn-oidc-data"},
		{"IAP: for another backend", inField("x-goog-iap-jwt-assertion", iapToken(claims{"aud": "/projects/1/global/backendServices/3"})), BadAudience, "the token is for"},
		{"IAP: expired", inField("x-goog-iap-jwt-assertion", iapToken(claims{"exp": exp - 600})), Expired, "expired at"},
		{"IAP: another key", inField("x-goog-iap-jwt-assertion", sign(t, "ES256", ec, map[string]any{"kid": "k"}, good(claims{"iss": goog, "aud": "/projects/1/global/backendServices/2", "email": "b"}))), BadSignature, "the signature is not"},
		{"Access: for another application", inField("cf-access-jwt-assertion", access("RS256", cf, claims{"aud": []string{"5825d2"}})), BadAudience, "the token is for"},
		{"Access: expired", inField("cf-access-jwt-assertion", access("RS256", cf, claims{"exp": exp - 600})), Expired, "expired at"},
		{"Access: of another team", inField("cf-access-jwt-assertion", access("RS256", cf, claims{"iss": "https://other.cloudflareaccess.com"})), UnknownIssuer, "are not accepted here"},
		{"Access: another algorithm", inField("cf-access-jwt-assertion", access("ES256", ec, nil)), BadAlgorithm, "not that of the key"},
		{"Access: not signed", inField("cf-access-jwt-assertion", none), BadAlgorithm, "not signed"},
		{"Access: nothing in the field", inField("cf-access-jwt-assertion", ""), Malformed, "three parts"},
		{"as credentials", bearer(aws(nil, nil)), UnknownIssuer, "are not accepted here"},
		{"in the field of another", inField("x-goog-iap-jwt-assertion", aws(nil, nil)), UnknownIssuer, "are not accepted here"},
		{"a client's token in the field", inField(field, sign(t, "ES256", ec, map[string]any{"kid": "k"}, good(nil))), UnknownIssuer, "are not accepted here"},
		{"wrong credentials beside it", both, Malformed, "this one 1"},
	} {
		_, err := auth.Authenticate(t.Context(), row.c)
		r := (*Refusal)(nil)
		if !errors.As(err, &r) || r.Cause != row.cause || !strings.Contains(err.Error(), row.text) {
			t.Errorf("%s: got %v, want %s and %q", row.name, err, row.cause, row.text)
		}
	}
	if _, err := auth.Authenticate(t.Context(), elsewhere); err != connect.ErrCredentials {
		t.Errorf("in a field of nobody: got %v, want %v", err, connect.ErrCredentials)
	}
}

// JWT-SVIDs are verified by the bundle of the trust domain that their id is of, and by no
// other.
func TestSVIDs(t *testing.T) {
	a, b := newEC(t, elliptic.P256()), newEC(t, elliptic.P256())
	var store identity.Store
	bundle := func(domain string, keys map[string]crypto.PublicKey) {
		store.Trust(domain).Set(&identity.Bundle{TrustDomain: domain, JWTKeys: keys})
	}
	ed := ed25519.NewKeyFromSeed(make([]byte, 32))
	bundle("a.example", map[string]crypto.PublicKey{"k": a.Public(), "ed": ed.Public()})
	bundle("b.example", map[string]crypto.PublicKey{"k": b.Public()})
	tokens := &Tokens{Trust: store.Trust}
	if err := tokens.Use([]Issuer{{TrustDomain: "a.example", Audiences: []string{"culvert"}}, {TrustDomain: "b.example", Audiences: []string{"culvert"}}}); err != nil {
		t.Fatal(err)
	}
	auth := tokens.Accept([]string{"a.example", "b.example"})
	const id = "spiffe://a.example/ns/shop/sa/api"
	by := func(alg string, k any, header map[string]any, more claims) string {
		c := claims{"iss": nil, "sub": id}
		maps.Copy(c, more)
		return sign(t, alg, k, header, good(c))
	}
	svid := func(k *ecdsa.PrivateKey, sub string) string {
		return sign(t, "ES256", k, map[string]any{"kid": "k", "typ": "JWT"}, good(claims{"iss": nil, "sub": sub}))
	}
	token := svid(a, id)
	for range 2 {
		p, err := auth.Authenticate(t.Context(), bearer(token))
		if err != nil || p.ID != id || p.Auth.TrustDomain != "a.example" || p.Auth.Namespace != "shop" || p.Auth.ServiceAccount != "api" {
			t.Fatalf("got %+v and %v, want %s", p, err, id)
		}
	}
	for _, row := range []struct {
		name, token string
		cause       Cause
	}{
		{"the key of another domain", svid(b, id), BadSignature},
		{"a domain that is not accepted", svid(a, "spiffe://c.example/a"), UnknownIssuer},
		{"an id without a path", svid(a, "spiffe://a.example"), UnknownIssuer},
		{"no id", svid(a, "alice"), UnknownIssuer},
		{"no sub", by("ES256", a, map[string]any{"kid": "k"}, claims{"sub": nil}), UnknownIssuer},
		{"an id in capitals", svid(a, "SPIFFE://a.example/ns/shop/sa/api"), UnknownIssuer},
		{"a trust domain in capitals", svid(a, "spiffe://A.example/ns/shop/sa/api"), UnknownIssuer},
		{"a path with dots", svid(a, "spiffe://a.example/ns/../sa/api"), UnknownIssuer},
		{"an id over 2,048 bytes", svid(a, "spiffe://a.example/"+strings.Repeat("a", 2048)), UnknownIssuer},
		{"no audience", by("ES256", a, map[string]any{"kid": "k"}, claims{"aud": nil}), BadAudience},
		{"another audience", by("ES256", a, map[string]any{"kid": "k"}, claims{"aud": "billing"}), BadAudience},
		{"no exp", by("ES256", a, map[string]any{"kid": "k"}, claims{"exp": nil}), Expired},
		{"expired", by("ES256", a, map[string]any{"kid": "k"}, claims{"exp": time.Now().Add(-2 * time.Minute).Unix()}), Expired},
		{"alg none", by("none", nil, map[string]any{"kid": "k"}, nil) + "x", BadAlgorithm},
		{"a shared secret", by("HS256", []byte("secret"), map[string]any{"kid": "k"}, nil), BadAlgorithm},
		{"EdDSA", by("EdDSA", ed, map[string]any{"kid": "ed"}, nil), BadAlgorithm},
		{"the type of an access token", by("ES256", a, map[string]any{"kid": "k", "typ": "at+jwt"}, nil), Malformed},
		{"a key of the other domain by its name", by("ES256", b, map[string]any{"kid": "k2"}, nil), UnknownKey},
	} {
		_, err := auth.Authenticate(t.Context(), bearer(row.token))
		if r := (*Refusal)(nil); !errors.As(err, &r) || r.Cause != row.cause {
			t.Errorf("%s: got %v, want the cause %s", row.name, err, row.cause)
		}
		wantRefused(t, err, row.token, row.cause, "")
	}
	for _, typ := range []string{"", "JWT", "JOSE"} {
		if _, err := auth.Authenticate(t.Context(), bearer(by("ES256", a, map[string]any{"kid": "k", "typ": typ}, claims{"iss": login}))); err != nil {
			t.Errorf("the type %q, and an iss: %v", typ, err)
		}
	}
	// No other issuer can make up the id of a workload, whatever its id is made of.
	mixed := &Tokens{Trust: store.Trust}
	if err := mixed.Use([]Issuer{{TrustDomain: "a.example", Audiences: []string{"culvert"}}, {URL: login, Audiences: []string{"culvert"}, JWKS: set(t, map[string]crypto.PublicKey{"k": b.Public()})}}); err != nil {
		t.Fatal(err)
	}
	forged := by("ES256", b, map[string]any{"kid": "k"}, claims{"iss": login})
	if p, err := mixed.Accept([]string{"a.example", login}).Authenticate(t.Context(), bearer(forged)); !errors.Is(err, connect.ErrCredentials) {
		t.Errorf("an id of a.example that %s has signed: got %+v and %v, want it refused", login, p, err)
	}
	// A key that is gone verifies nothing any more, not even what is remembered.
	bundle("a.example", map[string]crypto.PublicKey{"k2": b.Public()})
	_, err := auth.Authenticate(t.Context(), bearer(token))
	wantRefused(t, err, token, UnknownKey, `no key "k"`)
	store.Trust("a.example").Set(&identity.Bundle{TrustDomain: "a.example"})
	_, err = auth.Authenticate(t.Context(), bearer(token))
	wantRefused(t, err, token, NoKeys, "no JWT keys")
	store.Trust("a.example").Remove(errors.New("the source is away"))
	_, err = auth.Authenticate(t.Context(), bearer(token))
	wantRefused(t, err, token, NoKeys, "the source is away")
}

// A token that belongs to a client certificate is of use beside that one alone, also where
// it is remembered.
func TestBoundTokens(t *testing.T) {
	ec := newEC(t, elliptic.P256())
	tokens := &Tokens{}
	if err := tokens.Use([]Issuer{{URL: login, Audiences: []string{"culvert"}, JWKS: set(t, map[string]crypto.PublicKey{"k": ec.Public()})}}); err != nil {
		t.Fatal(err)
	}
	auth := tokens.Accept([]string{login})
	mine, others := &x509.Certificate{Raw: []byte("mine")}, &x509.Certificate{Raw: []byte("others")}
	sum := sha256.Sum256(mine.Raw)
	c := bearer(sign(t, "ES256", ec, nil, good(claims{"cnf": claims{"x5t#S256": base64.RawURLEncoding.EncodeToString(sum[:])}})))
	for range 2 {
		for _, row := range []struct {
			tls  *tunnel.EndedTLS
			want string
		}{
			{nil, "shown none"},
			{&tunnel.EndedTLS{}, "shown none"},
			{&tunnel.EndedTLS{Chain: []*x509.Certificate{others, mine}}, "another client certificate"},
			{&tunnel.EndedTLS{Chain: []*x509.Certificate{mine}}, ""},
		} {
			c.TLS = row.tls
			_, err := auth.Authenticate(t.Context(), c)
			if row.want == "" && err != nil || row.want != "" && (err == nil || !strings.Contains(err.Error(), row.want)) {
				t.Errorf("beside %+v: got %v, want %q", row.tls, err, row.want)
			}
		}
	}
}

// What is remembered is bounded, and is forgotten with the token's end and with its issuer.
func TestRemembered(t *testing.T) {
	tokens := &Tokens{}
	ec := newEC(t, elliptic.P256())
	keys := set(t, map[string]crypto.PublicKey{"k": ec.Public()})
	one := Issuer{URL: login, Audiences: []string{"culvert"}, JWKS: keys}
	use := func(all ...Issuer) {
		t.Helper()
		if err := tokens.Use(all); err != nil {
			t.Fatal(err)
		}
	}
	use(one)
	auth := tokens.Accept([]string{login})
	token := sign(t, "ES256", ec, nil, good(nil))
	ask := func() error {
		_, err := auth.Authenticate(t.Context(), bearer(token))
		return err
	}
	if err := ask(); err != nil || tokens.order.Len() != 1 {
		t.Fatalf("got %v and %d remembered, want one", err, tokens.order.Len())
	}
	use(one, Issuer{URL: alb, Audiences: []string{"x"}, JWKS: keys}) // which changes nothing about the first
	before := tokens.order.Front()
	if err := ask(); err != nil || tokens.order.Front() != before {
		t.Errorf("got %v, want the token remembered", err)
	}
	strict := one
	strict.Audiences = []string{"another"}
	use(strict)
	wantRefused(t, ask(), token, BadAudience, "another")
	use()
	if err := ask(); err != connect.ErrCredentials {
		t.Errorf("with no issuer: got %v, want %v", err, connect.ErrCredentials)
	}
	use(one)
	i := tokens.issuers()[0]
	add := func(n, size int) {
		tokens.remember(&cachedToken{sum: sha256.Sum256(fmt.Append(nil, n)), size: size, issuer: i, keys: i.static, until: time.Now().Add(time.Hour)})
	}
	for n := range maxCached + 10 {
		add(n, 100)
	}
	if n := len(tokens.cached); n != maxCached || n != tokens.order.Len() || tokens.size != n*100 {
		t.Errorf("%d are remembered, %d in order, %d bytes; want %d", n, tokens.order.Len(), tokens.size, maxCached)
	}
	for n := range 1000 {
		add(n, MaxToken)
	}
	if tokens.size > maxCachedSize || len(tokens.cached) != tokens.order.Len() {
		t.Errorf("%d bytes are remembered, limit %d", tokens.size, maxCachedSize)
	}
	if tokens.recall(sha256.Sum256(fmt.Append(nil, 999))) == nil {
		t.Error("the last one is forgotten")
	}
	tokens.remember(&cachedToken{sum: sha256.Sum256([]byte("old")), issuer: i, keys: i.static, until: time.Now()})
	if tokens.recall(sha256.Sum256([]byte("old"))) != nil {
		t.Error("one that has expired is remembered")
	}
}

func TestIssuersThatCannotBe(t *testing.T) {
	ec := newEC(t, elliptic.P256())
	keys := set(t, map[string]crypto.PublicKey{"k": ec.Public()})
	tokens := &Tokens{Trust: new(identity.Store).Trust}
	for name, i := range map[string]Issuer{
		"nobody":                   {Audiences: []string{"a"}},
		"two":                      {URL: login, TrustDomain: "a.example", Audiences: []string{"a"}},
		"for everybody":            {URL: login},
		"http":                     {URL: "http://login.example", Audiences: []string{"a"}},
		"keys by http":             {URL: login, JWKSURL: "http://login.example/keys", Audiences: []string{"a"}},
		"user in the URL":          {URL: "https://user@login.example", Audiences: []string{"a"}},
		"keys twice":               {URL: login, JWKSURL: "https://a.example", JWKS: keys, Audiences: []string{"a"}},
		"signer without a header":  {URL: alb, Signer: arn, JWKS: keys},
		"signer without keys":      {URL: alb, Signer: arn, Header: "x"},
		"SVIDs with an id":         {TrustDomain: "a.example", ID: "{sub}", Audiences: []string{"a"}},
		"no claim in the id":       {URL: login, ID: "x", Audiences: []string{"a"}},
		"id with half a brace":     {URL: login, ID: "{sub", Audiences: []string{"a"}},
		"id with the other half":   {URL: login, ID: "sub}", Audiences: []string{"a"}},
		"keys that are none":       {URL: login, JWKS: []byte("{}"), Audiences: []string{"a"}},
		"CAs that are none":        {URL: login, Roots: "x", Audiences: []string{"a"}},
		"a brace within a brace":   {URL: login, ID: "{a{b}}", Audiences: []string{"a"}},
		"an empty claim in the id": {URL: login, ID: "{}", Audiences: []string{"a"}},
	} {
		if err := tokens.Use([]Issuer{i}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if err := tokens.Use([]Issuer{{URL: login, JWKS: keys, Audiences: []string{"a"}}, {URL: login, JWKS: keys, Audiences: []string{"b"}}}); err == nil || !strings.Contains(err.Error(), "two issuers") {
		t.Errorf("two of one name: got %v", err)
	}
}

func TestCounts(t *testing.T) {
	ec := newEC(t, elliptic.P256())
	tokens := &Tokens{}
	if err := tokens.Use([]Issuer{{URL: login, Audiences: []string{"culvert"}, JWKS: set(t, map[string]crypto.PublicKey{"k": ec.Public()})}}); err != nil {
		t.Fatal(err)
	}
	auth := tokens.Accept([]string{login})
	token := sign(t, "ES256", ec, nil, good(nil))
	for _, one := range []string{token, token, "x", sign(t, "ES256", ec, nil, good(claims{"iss": "https://evil.example/" + rand.Text()})), sign(t, "ES256", ec, nil, good(claims{"aud": "x"}))} {
		_, _ = auth.Authenticate(t.Context(), bearer(one))
	}
	got := map[string]uint64{}
	tokens.Counts(func(issuer string, c Cause, n uint64) { got[issuer+" "+string(c)] = n })
	want := map[string]uint64{login + " accepted": 2, login + " audience": 1, " malformed": 1, " unknown-issuer": 1}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A claim of the issuer's that is read is never more than one.
func BenchmarkES256(b *testing.B) { benchmark(b, false) }

func BenchmarkRepeated(b *testing.B) { benchmark(b, true) }

func benchmark(b *testing.B, repeated bool) {
	ec := newEC(b, elliptic.P256())
	tokens := &Tokens{}
	if err := tokens.Use([]Issuer{{URL: login, Audiences: []string{"culvert"}, Claims: []string{"groups"}, JWKS: set(b, map[string]crypto.PublicKey{"k": ec.Public()})}}); err != nil {
		b.Fatal(err)
	}
	auth := tokens.Accept([]string{login})
	c := bearer(sign(b, "ES256", ec, map[string]any{"kid": "k"}, good(claims{"groups": []string{"a", "b", "c"}, "email": "alice@corp.example", "jti": rand.Text()})))
	b.ReportAllocs()
	for b.Loop() {
		if !repeated {
			tokens.cached = nil
			tokens.order.Init()
			tokens.size = 0
		}
		if _, err := auth.Authenticate(b.Context(), c); err != nil {
			b.Fatal(err)
		}
	}
}
