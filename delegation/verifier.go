package delegation

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/json"
)

const (
	defaultSkew = 5 * time.Second
	maxX5C      = 4 // certificates that a token may have
	maxCached   = 1024
)

// algorithms are those that gateways sign by.
var algorithms = []jose.SignatureAlgorithm{jose.ES256, jose.ES384, jose.ES512, jose.PS256, jose.EdDSA}

// A Gateway may call a service on behalf of others.
type Gateway struct {
	// ID is what the gateway's certificate has: its one URI, such as
	// "spiffe://corp.example/ns/edge/sa/gw", or "dns:" and one of its DNS names, where it
	// has no URI.
	ID string

	// Roots are the CAs that may name this gateway. Nil means that its certificate can't
	// be verified, and then only Keys count.
	Roots *x509.CertPool

	// Keys are known to be the gateway's. They are for services that get no certificate of
	// it, in the session or in the assertion.
	Keys []crypto.PublicKey

	// TrustDomains are those of the callers that the gateway may name. Empty means any, also
	// callers whose id has no trust domain.
	TrustDomains []string
}

// A Verifier decides which assertions a service believes. The fields must not change once
// it is in use. It is safe for concurrent use. It must not be copied.
type Verifier struct {
	// Audience are the ids of the service; an assertion is for one of them. Empty means
	// that none is for the service.
	Audience []string

	// Gateways are those that may call on behalf of others. Nobody else may.
	Gateways []Gateway

	// Identify, if set, verifies the certificate of a gateway, leaf first, and returns its
	// id. It takes the place of Roots, for CAs that are replaced while the Verifier is in
	// use.
	Identify func(chain []*x509.Certificate) (id string, err error)

	// Skew is how far the clocks of gateway and service may be apart. 0 means 5 s; more
	// than a minute is a minute.
	Skew time.Duration

	// Optional has Listener and Middleware admit callers without an assertion, who then
	// have none. A wrong one is refused all the same.
	Optional bool

	// Unbound accepts assertions where the service has no TLS session, such as behind a
	// sidecar that ends it. Whoever sees one can use it again until it expires. Where
	// there is a session, the binding is checked all the same.
	Unbound bool

	// HeaderTimeout is how long a client of Listener may take for the TLS handshake and the
	// header. 0 means 10 s.
	HeaderTimeout time.Duration

	// Refused, if set, answers requests that Middleware refuses because of err, an *Error.
	// Nil answers 403 with the Reason.
	Refused RefusedFunc

	Time func() time.Time // nil means time.Now

	mu       sync.Mutex
	verified map[[sha256.Size]byte]*Assertion // by token and binding; guarded by mu
	trusted  map[[sha256.Size]byte]trusted    // by gateway and chain; guarded by mu
}

// trusted is the key of a certificate chain that was verified.
type trusted struct {
	key   crypto.PublicKey
	until time.Time
}

// rechecked is how long a verified chain of a gateway is not verified again.
const rechecked = time.Minute

// header is that of the JWS.
type header struct {
	Alg jose.SignatureAlgorithm `json:"alg"`
	Typ string                  `json:"typ"`
	X5C []string                `json:"x5c"`
}

// Verify returns what a token of the TLS session cs says, or an *Error. The handshake of
// the session is complete. cs is nil where there is no session: see Unbound.
//
// The key is that of the certificate that the gateway has shown in the session. Where it
// has shown none, it is that of the assertion's own certificate chain, or one of the
// gateway's Keys. The Assertion is shared: it is not changed.
func (v *Verifier) Verify(token string, cs *tls.ConnectionState) (*Assertion, error) {
	s := new(Session)
	if cs != nil && token != "" {
		binding, err := Binding(cs)
		if err != nil {
			return nil, err
		}
		s.Binding, s.shown = binding, cs.PeerCertificates
	}
	return v.verifyIn(token, s)
}

// A Session is a TLS session with a gateway, for a service that knows whose it is.
type Session struct {
	// Gateway is whose session it is: the service has verified its certificate, Leaf. Its
	// TrustDomains count, where "" stands for callers whose id has none, and the rest is
	// not used.
	Gateway Gateway
	Leaf    *x509.Certificate

	Binding  []byte   // the tls-exporter: see Binding
	Audience []string // of the service in this session, beside that of the Verifier

	shown []*x509.Certificate // in place of Gateway and Leaf: not verified
}

// VerifySession is Verify for a service that has verified the gateway's certificate
// itself. The Gateways of v do not matter.
func (v *Verifier) VerifySession(token string, s *Session) (*Assertion, error) {
	if s.Gateway.ID == "" || s.Leaf == nil || len(s.Binding) == 0 {
		return nil, refusef(NoBinding, "there is no TLS session of a gateway that the assertion could be bound to")
	}
	return v.verifyIn(token, s)
}

func (v *Verifier) verifyIn(token string, s *Session) (*Assertion, error) {
	switch {
	case token == "":
		return nil, refusef(Missing, "there is no assertion")
	case len(token) > MaxToken:
		return nil, refusef(TooLarge, "the assertion has %d bytes, limit %d", len(token), MaxToken)
	case s.Binding == nil && !v.Unbound:
		return nil, refusef(NoBinding, "there is no TLS session that the assertion could be bound to")
	}
	seen := key([]byte(s.Gateway.ID), s.Binding, []byte(token))
	v.mu.Lock()
	a := v.verified[seen]
	v.mu.Unlock()
	if a != nil {
		if err := v.admit(a, s); err != nil {
			return nil, err
		}
		return a, nil
	}
	a, err := v.verify(token, s)
	if err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.verified == nil || len(v.verified) >= maxCached {
		v.verified = make(map[[sha256.Size]byte]*Assertion)
	}
	v.verified[seen] = a
	return a, nil
}

// admit decides about an assertion that its gateway has signed.
func (v *Verifier) admit(a *Assertion, s *Session) error {
	if err := v.checkTime(a); err != nil {
		return err
	}
	gateway := &s.Gateway
	if gateway.ID == "" {
		gateway = v.gateway(a.Actors[0])
	}
	switch {
	case !slices.Contains(v.Audience, a.Audience) && !slices.Contains(s.Audience, a.Audience):
		return refusef(WrongAudience, "the assertion is for %q, and this service is %q", clip(a.Audience), slices.Concat(v.Audience, s.Audience))
	case s.Binding != nil && !bytes.Equal(a.Binding, s.Binding):
		return refusef(WrongSession, "the assertion is bound to another TLS session")
	case len(gateway.TrustDomains) > 0 && !slices.Contains(gateway.TrustDomains, trustDomain(a.Subject)):
		return refusef(NotDelegated, "%q may name callers of the trust domains %q, and the caller is %q", gateway.ID, gateway.TrustDomains, clip(a.Subject))
	}
	return nil
}

// key returns one that nothing else has.
func key(parts ...[]byte) (sum [sha256.Size]byte) {
	h := sha256.New()
	for _, p := range parts {
		one := sha256.Sum256(p)
		h.Write(one[:])
	}
	h.Sum(sum[:0])
	return sum
}

// verify is Verify, for a token that was not seen before.
func (v *Verifier) verify(token string, s *Session) (*Assertion, error) {
	first, rest, _ := strings.Cut(token, ".")
	second, third, ok := strings.Cut(rest, ".")
	var h header
	var payload []byte
	text, err := decode(first)
	if err == nil {
		err = json.Unmarshal(text, &h)
	}
	if err == nil {
		payload, err = decode(second)
	}
	if err != nil || !ok || strings.Contains(third, ".") {
		return nil, refusef(Malformed, "the assertion is not a JWS")
	}
	switch {
	case h.Typ != tokenType:
		return nil, refusef(Malformed, "the token has the type %q, want %q", clip(h.Typ), tokenType)
	case !slices.Contains(algorithms, h.Alg):
		return nil, refusef(Malformed, "the assertion is signed by %q, want one of %q", clip(string(h.Alg)), algorithms)
	case len(h.X5C) > maxX5C:
		return nil, refusef(Malformed, "the assertion has %d certificates, limit %d", len(h.X5C), maxX5C)
	}
	c, err := parseClaims(payload)
	if err != nil {
		return nil, &Error{Malformed, err}
	}
	gateway := v.gateway(c.Issuer)
	switch {
	case s.Gateway.ID != "" && s.Gateway.ID != c.Issuer:
		return nil, refusef(UnknownGateway, "the assertion is of %q, and the TLS session is of %q", clip(c.Issuer), s.Gateway.ID)
	case s.Gateway.ID == "" && gateway == nil:
		return nil, refusef(UnknownGateway, "the assertion is of %q, which is none of the gateways that may call on behalf of others", clip(c.Issuer))
	}
	var keys []crypto.PublicKey
	if s.Gateway.ID != "" {
		keys = []crypto.PublicKey{s.Leaf.PublicKey}
	} else if keys, err = v.keys(gateway, h.X5C, s.shown); err != nil {
		return nil, err
	}
	if err := checkSignature(token, h.Alg, keys); err != nil {
		return nil, err
	}
	// From here on it is the gateway that speaks.
	a, err := c.assertion()
	if err != nil {
		return nil, err
	}
	if err := v.admit(a, s); err != nil {
		return nil, err
	}
	return a, nil
}

// gateway returns the configured gateway with that id, nil for none.
func (v *Verifier) gateway(id string) *Gateway {
	for i := range v.Gateways {
		if v.Gateways[i].ID == id && id != "" {
			return &v.Gateways[i]
		}
	}
	return nil
}

// trustDomain returns that of a SPIFFE id, "" for other ids.
func trustDomain(id string) string {
	rest, ok := strings.CutPrefix(id, "spiffe://")
	if !ok {
		return ""
	}
	domain, _, _ := strings.Cut(rest, "/")
	return domain
}

// checkTime returns an error unless a is valid now.
func (v *Verifier) checkTime(a *Assertion) error {
	now, skew := v.now(), min(v.Skew, time.Minute)
	if skew <= 0 {
		skew = defaultSkew
	}
	switch {
	case now.Add(skew).Before(a.IssuedAt):
		return refusef(NotYetValid, "the assertion is from %s, and it is %s", stamp(a.IssuedAt), stamp(now))
	case !now.Add(-skew).Before(a.Expires):
		return refusef(Expired, "the assertion was valid until %s, and it is %s", stamp(a.Expires), stamp(now))
	}
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func (v *Verifier) now() time.Time {
	if v.Time != nil {
		return v.Time()
	}
	return time.Now()
}

// keys returns the keys that may have signed for g.
func (v *Verifier) keys(g *Gateway, x5c []string, shown []*x509.Certificate) ([]crypto.PublicKey, error) {
	where := "in the TLS session"
	if len(shown) == 0 && len(x5c) > 0 {
		where = "of the assertion"
		for _, s := range x5c {
			der, err := base64.StdEncoding.Strict().DecodeString(s)
			if err != nil {
				return nil, refusef(Malformed, "a certificate of the assertion is not base64")
			}
			c, err := x509.ParseCertificate(der)
			if err != nil {
				return nil, refusef(Malformed, "a certificate of the assertion can't be parsed: %w", err)
			}
			shown = append(shown, c)
		}
	}
	if len(shown) > 0 {
		k, err := v.keyOf(g, shown, where)
		return []crypto.PublicKey{k}, err
	}
	if len(g.Keys) == 0 {
		return nil, refusef(BadCertificate, "%q has shown no certificate, in the TLS session or in the assertion, and no key of it is known", g.ID)
	}
	return g.Keys, nil
}

// keyOf returns the key of a chain, leaf first, which must be that of g.
func (v *Verifier) keyOf(g *Gateway, shown []*x509.Certificate, where string) (crypto.PublicKey, error) {
	leaf, now := shown[0], v.now()
	if v.Identify != nil {
		switch id, err := v.Identify(shown); {
		case err != nil:
			return nil, refusef(BadCertificate, "the gateway's certificate %s can't be verified: %w", where, err)
		case id != g.ID:
			return nil, refusef(UnknownGateway, "the assertion is of %q, and the certificate %s is of %q", g.ID, where, clip(id))
		}
		return leaf.PublicKey, nil
	}
	if !names(leaf, g.ID) {
		return nil, refusef(UnknownGateway, "the assertion is of %q, and the certificate %s is of another", g.ID, where)
	}
	if g.Roots == nil {
		return nil, refusef(BadCertificate, "no CA is configured for %q", g.ID)
	}
	parts := [][]byte{[]byte(g.ID)}
	for _, c := range shown[:min(len(shown), 8)] {
		parts = append(parts, c.Raw)
	}
	seen := key(parts...)
	v.mu.Lock()
	known, ok := v.trusted[seen]
	v.mu.Unlock()
	if ok && now.Before(known.until) {
		return known.key, nil
	}
	opts := x509.VerifyOptions{Roots: g.Roots, Intermediates: x509.NewCertPool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	for _, c := range shown[1:] {
		opts.Intermediates.AddCert(c)
	}
	if _, err := leaf.Verify(opts); err != nil {
		return nil, refusef(BadCertificate, "the gateway's certificate %s can't be verified: %w", where, err)
	}
	until := now.Add(rechecked)
	if leaf.NotAfter.Before(until) {
		until = leaf.NotAfter
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.trusted == nil || len(v.trusted) >= maxCached {
		v.trusted = make(map[[sha256.Size]byte]trusted)
	}
	v.trusted[seen] = trusted{leaf.PublicKey, until}
	return leaf.PublicKey, nil
}

// names reports whether a leaf is that of the gateway with that id. A certificate with
// several URIs is nobody's.
func names(leaf *x509.Certificate, id string) bool {
	if name, ok := strings.CutPrefix(id, "dns:"); ok {
		return len(leaf.URIs) == 0 && slices.Contains(leaf.DNSNames, name)
	}
	return len(leaf.URIs) == 1 && leaf.URIs[0].String() == id
}

// checkSignature returns an error unless one of the keys has signed.
func checkSignature(token string, alg jose.SignatureAlgorithm, keys []crypto.PublicKey) error {
	jws, err := jose.ParseSignedCompact(token, []jose.SignatureAlgorithm{alg})
	if err != nil {
		return refusef(Malformed, "the assertion is not a JWS: %w", err)
	}
	err = refusef(BadSignature, "the assertion is not signed by the gateway's key")
	for _, k := range keys {
		want, bad := algorithm(k)
		switch {
		case bad != nil:
			err = bad
		case want != alg:
			err = refusef(BadSignature, "the assertion is signed by %s, and the gateway's key signs by %s", alg, want)
		default:
			if _, bad := jws.Verify(k); bad == nil {
				return nil
			}
		}
	}
	return err
}

// decode decodes base64url without padding, of which there is one spelling for each value.
func decode(s string) ([]byte, error) { return base64.RawURLEncoding.Strict().DecodeString(s) }
