package delegation

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"slices"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/cryptosigner"
	"github.com/go-jose/go-jose/v4/json"
)

// tokenType is the typ of the JWS, so that no other token of the same key is taken for an
// assertion: RFC 8725 section 3.11.
const tokenType = "culvert-peer+jwt"

// lifetime is that of an assertion that does not say.
const lifetime = 30 * time.Second

// A Signer signs assertions for one gateway. It is safe for concurrent use. It is made by
// NewSigner, once for each key.
type Signer struct {
	id     string
	signer jose.Signer
	limit  int              // bytes of a token
	now    func() time.Time // not nil
}

// NewSigner returns a Signer for the gateway with that id, which its certificate has:
// "spiffe://corp.example/ns/edge/sa/gw", or "dns:gw.corp.example".
//
// Services that get the certificate in the TLS session need no other one, and an assertion
// without is short enough for a PROXY header. For all others pass the chain, leaf first,
// which each assertion then has. ECDSA keys sign by ES256, ES384 or ES512, RSA keys of
// 2,048 bits at least by PS256, and Ed25519 keys by EdDSA.
func NewSigner(id string, key crypto.Signer, chain []*x509.Certificate) (*Signer, error) {
	alg, err := algorithm(key.Public())
	if err != nil {
		return nil, err
	}
	if err := checkText(id, maxName); err != nil {
		return nil, refusef(BadKey, "the id of the gateway %w", err)
	}
	s := &Signer{id: id, limit: MaxTLV, now: time.Now}
	opts := (&jose.SignerOptions{}).WithType(tokenType)
	if len(chain) > 0 {
		s.limit = MaxToken
		x5c := make([]string, len(chain))
		for i, c := range chain {
			x5c[i] = base64.StdEncoding.EncodeToString(c.Raw) // RFC 7515 section 4.1.6: not base64url
		}
		opts = opts.WithHeader("x5c", x5c)
	}
	if s.signer, err = jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: cryptosigner.Opaque(key)}, opts); err != nil {
		return nil, &Error{BadKey, err}
	}
	return s, nil
}

// algorithm returns the one algorithm for a key, so that a token can't choose.
func algorithm(key crypto.PublicKey) (jose.SignatureAlgorithm, error) {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		switch k.Curve {
		case elliptic.P256():
			return jose.ES256, nil
		case elliptic.P384():
			return jose.ES384, nil
		case elliptic.P521():
			return jose.ES512, nil
		}
		return "", refusef(BadKey, "the gateway's ECDSA key is of the curve %s, want P-256, P-384 or P-521", k.Curve.Params().Name)
	case *rsa.PublicKey:
		if n := k.N.BitLen(); n < 2048 {
			return "", refusef(BadKey, "the gateway's RSA key has %d bits, want at least 2048", n)
		}
		return jose.PS256, nil
	case ed25519.PublicKey:
		return jose.EdDSA, nil
	}
	return "", refusef(BadKey, "the gateway's key is of the type %T, want ECDSA, RSA or Ed25519", key)
}

// ID returns the id of the gateway.
func (s *Signer) ID() string { return s.id }

// Sign returns a as a JWS, with the gateway added to its Actors. It does not change a.
// An assertion that is not bound to a session, that is for more than a minute or has more
// than four actors, and one that is too large, is an *Error.
func (s *Signer) Sign(a *Assertion) (string, error) {
	full := *a
	full.Actors = slices.Concat([]string{s.id}, a.Actors)
	if full.IssuedAt.IsZero() {
		full.IssuedAt = s.now()
	}
	if full.Expires.IsZero() {
		full.Expires = full.IssuedAt.Add(lifetime)
	}
	if full.ID == "" {
		var id [12]byte
		_, _ = rand.Read(id[:]) // never fails
		full.ID = hex.EncodeToString(id[:])
	}
	if err := full.check(); err != nil {
		return "", err
	}
	if len(full.Binding) == 0 {
		return "", refusef(NoBinding, "the assertion is bound to no TLS session")
	}
	c := claims{
		Issuer: s.id, Subject: full.Subject, Audience: full.Audience, Method: full.Method, ID: full.ID, Binding: base64.RawURLEncoding.EncodeToString(full.Binding),
		IssuedAt: full.IssuedAt.Unix(), Expires: full.Expires.Unix(), Act: chain(full.Actors),
	}
	if full.CertHash != nil {
		c.Cnf = &cnf{base64.RawURLEncoding.EncodeToString(full.CertHash)}
	}
	payload, err := json.Marshal(c)
	if err != nil {
		return "", &Error{Malformed, err}
	}
	jws, err := s.signer.Sign(payload)
	if err != nil {
		return "", refusef(BadKey, "the gateway's key does not sign: %w", err)
	}
	token, err := jws.CompactSerialize()
	if err != nil {
		return "", &Error{BadKey, err}
	}
	if len(token) > s.limit {
		return "", refusef(TooLarge, "the assertion has %d bytes, limit %d", len(token), s.limit)
	}
	return token, nil
}
