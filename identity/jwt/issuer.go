package jwt

import (
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/json"

	"culvert.dev/connect"
	"culvert.dev/identity"
	"culvert.dev/tunnel"
)

// An Issuer says whose tokens are accepted, and what is made of them.
type Issuer struct {
	// Name is what listeners call the issuer. "" means URL, or TrustDomain.
	Name string

	// URL is the claim iss. It is empty for JWT-SVIDs.
	URL string

	// TrustDomain is that of JWT-SVIDs, where URL is empty: its bundle has the keys. With
	// Kubernetes it is the one that the service accounts are of; "" means none.
	TrustDomain string

	// Audiences are those of which a token must name one. They are required, but with a
	// Signer, whose tokens have none; what those say of the client must then be listed.
	Audiences []string

	// ID makes the Peer's ID of claims in braces: "{sub}", "{email}", "ci:{repository}".
	// "" means "{sub}".
	ID string

	// Claims are kept, for policy. "a.b" is the member b of the claim a.
	Claims []string

	// Kubernetes says that the tokens are of service accounts.
	Kubernetes bool

	// Header is the field in which a load balancer sends the token; "" means the
	// client's own credentials.
	Header string

	// Signer is the load balancer of AWS that the token must name, and JWKS or JWKSURL
	// must be set.
	Signer string

	// JWKS is the issuer's key set (RFC 7517 section 5) and JWKSURL is where it is, by
	// https. If that has "{kid}" in it, it is where each key is by itself, in PEM, by its id.
	// With neither, the issuer's configuration document says where: OpenID Connect Discovery
	// 1.0 section 4.
	JWKS    []byte
	JWKSURL string

	Roots     string // PEM, to verify the issuer's server by; "" means the system's
	TokenFile string // has the token to show to the issuer when keys are asked for; "" for none
}

// name returns what the Issuer is called.
func (i *Issuer) name() string {
	switch {
	case i.Name != "":
		return i.Name
	case i.URL != "":
		return i.URL
	}
	return i.TrustDomain
}

// Check returns what is wrong with the Issuer.
func (i *Issuer) Check() error {
	switch {
	case i.svid() == (i.TrustDomain == "") && !i.Kubernetes:
		return errors.New("an issuer has either a URL or a trust domain")
	case len(i.Audiences) == 0 && i.Signer == "":
		return errors.New("an issuer without an audience would accept tokens that are meant for others")
	case i.svid() && (i.Header != "" || i.Signer != "" || i.Kubernetes || len(i.JWKS) > 0 || i.JWKSURL != "" || i.ID != ""):
		return errors.New("JWT-SVIDs have the keys and ids of their trust domain")
	case i.Signer != "" && (i.Header == "" || len(i.JWKS) == 0 && i.JWKSURL == ""):
		return errors.New("a signer needs the header that it sends, and its keys")
	case len(i.JWKS) > 0 && i.JWKSURL != "":
		return errors.New("keys are in a file or at a URL")
	case i.remote() && !isHTTPS(i.where()):
		return fmt.Errorf("%q is not an https URL", i.where())
	}
	if len(i.JWKS) > 0 {
		if _, err := parseKeys(i.JWKS); err != nil {
			return err
		}
	}
	_, err := parseTemplate(i.ID)
	return err
}

// svid reports whether the tokens are JWT-SVIDs.
func (i *Issuer) svid() bool { return i.URL == "" }

// remote reports whether the keys are fetched.
func (i *Issuer) remote() bool { return !i.svid() && len(i.JWKS) == 0 }

// where returns the URL that keys are fetched by.
func (i *Issuer) where() string {
	if i.JWKSURL != "" {
		return i.JWKSURL
	}
	return i.URL
}

func isHTTPS(s string) bool {
	u, err := url.Parse(s)
	return err == nil && u.Scheme == "https" && u.Host != "" && u.User == nil && u.Fragment == ""
}

// An issuer is an Issuer in use.
type issuer struct {
	Issuer
	called string
	id     template
	source *source         // of fetched keys; nil for others
	static *keySet         // of JWKS
	trust  *identity.Trust // of JWT-SVIDs
	bundle atomic.Pointer[bundleSet]
}

// A bundleSet is the keys of one version of a bundle.
type bundleSet struct {
	generation uint64
	set        *keySet
	err        error
}

// A template is the ID of Issuer, in parts: texts, and claims at odd places.
type template []string

func parseTemplate(s string) (template, error) {
	if s == "" {
		s = "{sub}"
	}
	var t template
	for {
		before, rest, ok := strings.Cut(s, "{")
		t = append(t, before)
		if strings.Contains(before, "}") {
			return nil, fmt.Errorf("the id %q has a brace that is not open", s)
		}
		if !ok {
			break
		}
		claim, after, ok := strings.Cut(rest, "}")
		if !ok || claim == "" || strings.Contains(claim, "{") {
			return nil, fmt.Errorf("the id %q has a brace that is not closed", s)
		}
		t, s = append(t, claim), after
	}
	if len(t) == 1 {
		return nil, errors.New("an id without a claim in braces would be the same for everybody")
	}
	return t, nil
}

// reserved begin the ids that certificates and sockets give: no issuer may make them up.
var reserved = []string{"spiffe:", "dns:", "uri:", "subject:", "uid:"}

// expand makes the ID of a token.
func (t template) expand(claims map[string]json.RawMessage) (string, *Refusal) {
	var b strings.Builder
	for i, part := range t {
		if i%2 == 0 {
			b.WriteString(part)
			continue
		}
		raw, _ := find(claims, part)
		value, ok := text(raw)
		if !ok || value == "" {
			return "", refuse(BadClaims, "the token has no claim %s, of which the id is made", part)
		}
		b.WriteString(value)
	}
	id := b.String()
	lower := strings.ToLower(id)
	switch {
	case len(id) > maxID:
		return "", refuse(BadClaims, "the id has %d bytes, limit %d", len(id), maxID)
	case !utf8.ValidString(id) || strings.ContainsFunc(id, unicode.IsControl):
		return "", refuse(BadClaims, "the id has characters that none may have")
	case slices.ContainsFunc(reserved, func(r string) bool { return strings.HasPrefix(lower, r) }):
		return "", refuse(BadClaims, "the id %q is one that a certificate gives, and no token", tunnel.Clip(id))
	}
	return id, nil
}

// verify returns the peer of a token that names this issuer. Whether it came by the right
// field and belongs to the client's certificate is not looked at.
func (i *issuer) verify(ctx context.Context, t *token) (tunnel.Peer, *keySet, error) {
	t, r := i.asSigner(t)
	if r != nil {
		return tunnel.Peer{}, nil, r
	}
	if i.svid() {
		if r := t.header.checkSVID(); r != nil {
			return tunnel.Peer{}, nil, r
		}
	}
	if r := t.checkDates(time.Now()); r != nil {
		return tunnel.Peer{}, nil, r
	}
	if r := i.checkAudience(t); r != nil {
		return tunnel.Peer{}, nil, r
	}
	keys, err := i.checkSignature(ctx, t)
	if err != nil {
		return tunnel.Peer{}, nil, err
	}
	p, r := i.peer(t)
	if r != nil {
		return tunnel.Peer{}, nil, r
	}
	return p, keys, nil
}

// asSigner checks the signer of a load balancer of AWS, and that all others have no
// padding. It returns the token with what those have in the header in place of the claims.
func (i *issuer) asSigner(t *token) (*token, *Refusal) {
	if i.Signer == "" {
		if t.padded {
			return nil, refuse(Malformed, "the token has padding")
		}
		return t, nil
	}
	if t.header.Signer != i.Signer {
		return nil, refuse(BadSigner, "the signer is %q, want %q", tunnel.Clip(t.header.Signer), i.Signer)
	}
	if t.header.Alg != "ES256" {
		return nil, refuse(BadAlgorithm, "the algorithm is %s, and a load balancer of AWS signs by ES256", t.header.Alg)
	}
	out := *t
	if t.header.Iss != "" && t.header.Iss != i.URL {
		return nil, refuse(UnknownIssuer, "the issuer in the header is %q, want %q", tunnel.Clip(t.header.Iss), i.URL)
	}
	if t.header.Exp != nil {
		var exp time.Time
		if err := parseDate(t.header.Exp, &exp); err != nil {
			return nil, refuse(Malformed, "exp in the header is not a date")
		}
		if out.expires.IsZero() || exp.Before(out.expires) {
			out.expires = exp
		}
	}
	out.audiences = nil
	if t.header.Client != "" {
		out.audiences = []string{t.header.Client}
	}
	return &out, nil
}

func (i *issuer) checkAudience(t *token) *Refusal {
	switch {
	case len(i.Audiences) == 0: // of a signer
		return nil
	case len(t.audiences) == 0:
		return refuse(BadAudience, "the token does not say for whom it is")
	case !slices.ContainsFunc(t.audiences, func(a string) bool { return slices.Contains(i.Audiences, a) }):
		return refuse(BadAudience, "the token is for %q, want one of %q", tunnel.Clip(strings.Join(t.audiences, ", ")), i.Audiences)
	}
	return nil
}

// checkSignature verifies the signature and returns the keys by which it did.
func (i *issuer) checkSignature(ctx context.Context, t *token) (*keySet, error) {
	set, err := i.keys()
	for fetched := false; ; fetched = true {
		if err == nil {
			fitting, r := set.fitting(i.called, &t.header)
			if r == nil {
				if !slices.ContainsFunc(fitting, t.signedBy) {
					return nil, refuse(BadSignature, "the signature is not that of the key %q of %s", tunnel.Clip(t.header.Kid), i.called)
				}
				return set, nil
			}
			if fetched || i.source == nil || r.Cause != UnknownKey {
				return nil, r
			}
		} else if fetched || i.source == nil {
			return nil, refuse(NoKeys, "there are no keys of %s: %v", i.called, err)
		}
		// Other keys may have been added since.
		if err := i.source.refresh(ctx, t.header.Kid); err != nil {
			return nil, err
		}
		set, err = i.keys()
	}
}

// keys returns the current ones.
func (i *issuer) keys() (*keySet, error) {
	switch {
	case i.static != nil:
		return i.static, nil
	case i.source != nil:
		return i.source.keys()
	}
	last := i.bundle.Load()
	if g := i.trust.Generation(); last == nil || last.generation != g {
		last = &bundleSet{generation: g}
		if b, err := i.trust.Bundle(); err != nil {
			last.err = err
		} else if last.set = bundleKeys(b); len(last.set.keys) == 0 {
			last.set, last.err = nil, errors.New("the bundle of the trust domain has no JWT keys")
		}
		i.bundle.Store(last)
	}
	return last.set, last.err
}

// signedBy reports whether k has signed the token.
func (t *token) signedBy(k key) bool {
	if t.padded { // is signed with its padding, which the library has not
		pub, ok := k.public.(*ecdsa.PublicKey)
		if !ok || len(t.signature) != 64 {
			return false
		}
		sum := sha256.Sum256([]byte(t.compact[:t.signed]))
		return ecdsa.Verify(pub, sum[:], new(big.Int).SetBytes(t.signature[:32]), new(big.Int).SetBytes(t.signature[32:]))
	}
	sig, err := jose.ParseSignedCompact(t.compact, []jose.SignatureAlgorithm{jose.SignatureAlgorithm(t.header.Alg)})
	if err != nil {
		return false
	}
	_, err = sig.Verify(k.public)
	return err == nil
}

// peer makes the peer of a token that was verified.
func (i *issuer) peer(t *token) (tunnel.Peer, *Refusal) {
	info := &tunnel.AuthInfo{}
	p := tunnel.Peer{Method: "jwt"}
	switch {
	case i.svid():
		svid, err := identity.Principal(t.subject)
		if err != nil {
			return p, refuse(BadClaims, "the subject: %v", err)
		}
		if svid.TrustDomain != i.TrustDomain {
			return p, refuse(UnknownIssuer, "keys of %s, for an id of %s", i.TrustDomain, svid.TrustDomain)
		}
		info, p.ID = svid, strings.Clone(t.subject)
	case i.Kubernetes:
		var k struct {
			Namespace      string `json:"namespace"`
			ServiceAccount struct {
				Name string `json:"name"`
			} `json:"serviceaccount"`
		}
		if err := json.Unmarshal(t.claims["kubernetes.io"], &k); err != nil || k.Namespace == "" || t.subject != "system:serviceaccount:"+k.Namespace+":"+k.ServiceAccount.Name {
			return p, refuse(BadClaims, "the token is not that of a service account of Kubernetes")
		}
		info.TrustDomain, info.Namespace, info.ServiceAccount = i.TrustDomain, k.Namespace, k.ServiceAccount.Name
		fallthrough
	default:
		id, r := i.id.expand(t.claims)
		if r != nil {
			return p, r
		}
		p.ID = id
	}
	left := maxValues
	for _, name := range i.Claims {
		raw, ok := find(t.claims, name)
		if !ok {
			continue
		}
		all, r := values(name, raw)
		if r != nil {
			return p, r
		}
		if left -= len(all); left < 0 {
			return p, refuse(BadClaims, "the claims that are kept have more than %d values", maxValues)
		}
		if info.Claims == nil {
			info.Claims = make(map[string][]string, len(i.Claims))
		}
		info.Claims[name] = all
	}
	info.Issuer, info.Expires = i.called, t.expires.Add(skew) // until then it is accepted
	p.Auth = info
	return p, nil
}

// accountOf returns the peer that a token would make whose ID is id; it is false where that
// is no service account's.
func (i *issuer) accountOf(id string) (p tunnel.Peer, ok bool) {
	if !i.Kubernetes || len(i.id) != 3 || i.id[1] != "sub" {
		return p, false
	}
	sub, ok := strings.CutPrefix(id, i.id[0])
	if ok {
		sub, ok = strings.CutSuffix(sub, i.id[2])
	}
	parts := strings.Split(sub, ":")
	if !ok || len(parts) != 4 || parts[0] != "system" || parts[1] != "serviceaccount" || parts[2] == "" || parts[3] == "" {
		return p, false
	}
	return tunnel.Peer{ID: id, Method: "jwt", Auth: &tunnel.AuthInfo{TrustDomain: i.TrustDomain, Namespace: parts[2], ServiceAccount: parts[3], Issuer: i.called}}, true
}

// A binding is the certificate that a token belongs to, RFC 8705 section 3.1.
type binding struct {
	bound bool // false: it belongs to nobody's
	sum   [sha256.Size]byte
}

// binding returns that of the token.
func (t *token) binding() (b binding, r *Refusal) {
	var cnf struct {
		X5T *string `json:"x5t#S256"`
	}
	raw, ok := t.claims["cnf"]
	if !ok {
		return b, nil
	}
	if json.Unmarshal(raw, &cnf) != nil {
		return b, refuse(Malformed, "the claim cnf is not an object")
	}
	if cnf.X5T == nil {
		return b, nil
	}
	sum, err := base64.RawURLEncoding.DecodeString(*cnf.X5T)
	if err != nil || len(sum) != len(b.sum) {
		return b, refuse(Malformed, "the certificate in the claim cnf is not a SHA-256")
	}
	return binding{true, [sha256.Size]byte(sum)}, nil
}

// check refuses a client that has not shown the certificate.
func (b *binding) check(c *connect.Credentials) *Refusal {
	if !b.bound {
		return nil
	}
	if c.TLS == nil || len(c.TLS.Chain) == 0 {
		return refuse(BadCertificate, "the token belongs to a client certificate, and the client has shown none")
	}
	if sum := sha256.Sum256(c.TLS.Chain[0].Raw); sum != b.sum {
		return refuse(BadCertificate, "the token belongs to another client certificate")
	}
	return nil
}
