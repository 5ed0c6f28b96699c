package jwt

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4/json" // refuses names that are given twice, and tells case apart

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// Limits of a token.
const (
	MaxToken     = 16 << 10 // bytes
	maxValues    = 256      // of all claims that are kept
	maxValue     = 256      // bytes of each
	maxID        = 512      // bytes of the ID that is made of claims
	maxAudiences = 64
	skew         = time.Minute // that the clock of an issuer may be off
)

// A Cause says in one word why a token was refused. It is the label of a metric.
type Cause string

// Causes, in the order in which a token is judged. Accepted is that of one that was not
// refused.
const (
	Accepted       Cause = "accepted"
	TooLarge       Cause = "too-large"
	Malformed      Cause = "malformed"
	Encrypted      Cause = "encrypted"
	BadAlgorithm   Cause = "algorithm"
	UnknownIssuer  Cause = "unknown-issuer"
	BadSigner      Cause = "signer"
	Expired        Cause = "expired"
	NotYet         Cause = "not-yet-valid"
	BadAudience    Cause = "audience"
	NoKeys         Cause = "no-keys"
	UnknownKey     Cause = "unknown-key"
	BadSignature   Cause = "signature"
	BadClaims      Cause = "claims"
	BadCertificate Cause = "certificate"
)

// A Refusal is the error for a token that is not accepted. It wraps
// connect.ErrCredentials and quotes no more of the token than a claim.
type Refusal struct {
	Cause Cause
	text  string
}

func (r *Refusal) Error() string { return "jwt: " + r.text }

// Unwrap returns connect.ErrCredentials.
func (r *Refusal) Unwrap() error { return connect.ErrCredentials }

func refuse(c Cause, format string, args ...any) *Refusal {
	return &Refusal{c, fmt.Sprintf(format, args...)}
}

// A header is that of a JWS, RFC 7515 section 4.1, as far as it is looked at. Of the
// members that say where a key is, kid alone is, and it is compared and nothing else.
type header struct {
	Alg  string          `json:"alg"`
	Kid  string          `json:"kid"`
	Typ  string          `json:"typ"`
	Cty  string          `json:"cty"`
	Enc  string          `json:"enc"`
	Crit json.RawMessage `json:"crit"`

	// Of AWS load balancers, which have more here than in the claims.
	Signer string          `json:"signer"`
	Client string          `json:"client"`
	Iss    string          `json:"iss"`
	Exp    json.RawMessage `json:"exp"`
}

// A token is one that was read and not verified.
type token struct {
	compact   string // as it came
	signed    int    // bytes of it that are signed
	signature []byte
	padded    bool // base64 with padding, which only AWS load balancers may have
	header    header
	claims    map[string]json.RawMessage

	issuer, subject string
	audiences       []string
	expires         time.Time
	notBefore       time.Time // zero for none
	issuedAt        time.Time // zero for none
}

// algorithms are those that are accepted. All others, above all "none" and those of a
// shared secret, are not.
var algorithms = []string{"ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "EdDSA"}

// types are what a header may say that the token is, in lower case, RFC 8725 section
// 3.11. A logout token or a DPoP proof is no credential.
var types = []string{"", "jwt", "at+jwt", "jose"}

// parse reads a token in the compact serialization. It does not verify it.
func parse(compact string) (*token, *Refusal) {
	if len(compact) > MaxToken {
		return nil, refuse(TooLarge, "the token has %d bytes, limit %d", len(compact), MaxToken)
	}
	switch dots := strings.Count(compact, "."); dots {
	case 2:
	case 4:
		return nil, refuse(Encrypted, "the token is encrypted")
	default:
		return nil, refuse(Malformed, "a token has three parts, and this one %d", dots+1)
	}
	first, last := strings.IndexByte(compact, '.'), strings.LastIndexByte(compact, '.')
	t := &token{compact: compact, signed: last}
	head, err := t.part(compact[:first])
	if err != nil {
		return nil, refuse(Malformed, "the header is not base64url")
	}
	if err := json.Unmarshal(head, &t.header); err != nil {
		return nil, refuse(Malformed, "the header is not the JSON of a token's")
	}
	if r := t.header.check(); r != nil {
		return nil, r
	}
	body, err := t.part(compact[first+1 : last])
	if err != nil {
		return nil, refuse(Malformed, "the claims are not base64url")
	}
	if err := json.Unmarshal(body, &t.claims); err != nil || t.claims == nil {
		return nil, refuse(Malformed, "the claims are not a JSON object")
	}
	if t.signature, err = t.part(compact[last+1:]); err != nil || len(t.signature) == 0 {
		return nil, refuse(Malformed, "the signature is missing or not base64url")
	}
	return t, t.readClaims()
}

var base64url = base64.RawURLEncoding.Strict()

// part decodes one part of a token.
func (t *token) part(s string) ([]byte, error) {
	if plain := strings.TrimRight(s, "="); len(plain) < len(s) {
		if len(s)%4 != 0 || len(s)-len(plain) > 2 {
			return nil, errors.New("padding that is none")
		}
		s, t.padded = plain, true
	}
	return base64url.DecodeString(s)
}

func (h *header) check() *Refusal {
	typ := strings.TrimPrefix(strings.ToLower(h.Typ), "application/")
	switch {
	case h.Enc != "":
		return refuse(Encrypted, "the token is encrypted")
	case strings.EqualFold(strings.TrimPrefix(strings.ToLower(h.Cty), "application/"), "jwt"):
		return refuse(Encrypted, "the token has another token inside")
	case strings.EqualFold(h.Alg, "none"):
		return refuse(BadAlgorithm, "the token is not signed: its algorithm is none")
	case strings.HasPrefix(h.Alg, "HS"):
		return refuse(BadAlgorithm, "the token is signed by a shared secret (%q)", tunnel.Clip(h.Alg))
	case !slices.Contains(algorithms, h.Alg):
		return refuse(BadAlgorithm, "the algorithm %q is not accepted", tunnel.Clip(h.Alg))
	case h.Crit != nil:
		return refuse(Malformed, "the header has members that must be understood (crit), and they are not")
	case !slices.Contains(types, typ):
		return refuse(Malformed, "the type %q is not that of a credential", tunnel.Clip(h.Typ))
	}
	return nil
}

// checkSVID refuses what a JWT-SVID may not have in its header, JWT-SVID sections 2.1 and
// 2.3, and others may.
func (h *header) checkSVID() *Refusal {
	switch {
	case h.Alg == "EdDSA":
		return refuse(BadAlgorithm, "the algorithm is EdDSA, by which no JWT-SVID is signed")
	case h.Typ != "" && h.Typ != "JWT" && h.Typ != "JOSE":
		return refuse(Malformed, "the type %q is not that of a JWT-SVID", tunnel.Clip(h.Typ))
	}
	return nil
}

// readClaims reads the registered claims, RFC 7519 section 4.1.
func (t *token) readClaims() *Refusal {
	for _, c := range []struct {
		name string
		into *string
	}{{"iss", &t.issuer}, {"sub", &t.subject}} {
		raw, ok := t.claims[c.name]
		if ok && json.Unmarshal(raw, c.into) != nil {
			return refuse(Malformed, "the claim %s is not text", c.name)
		}
	}
	for _, c := range []struct {
		name string
		into *time.Time
	}{{"exp", &t.expires}, {"nbf", &t.notBefore}, {"iat", &t.issuedAt}} {
		raw, ok := t.claims[c.name]
		if !ok {
			continue
		}
		if err := parseDate(raw, c.into); err != nil {
			return refuse(Malformed, "the claim %s is not a date", c.name)
		}
	}
	if raw, ok := t.claims["aud"]; ok {
		one := ""
		if json.Unmarshal(raw, &one) == nil {
			t.audiences = []string{one}
		} else if json.Unmarshal(raw, &t.audiences) != nil || len(t.audiences) > maxAudiences {
			return refuse(Malformed, "the claim aud is not text or a list of at most %d texts", maxAudiences)
		}
	}
	return nil
}

// parseDate reads a NumericDate, RFC 7519 section 2: seconds, perhaps with a fraction.
func parseDate(raw json.RawMessage, into *time.Time) error {
	var seconds float64
	if err := json.Unmarshal(raw, &seconds); err != nil {
		return err
	}
	const most = 253402300800 // the year 10000
	if math.IsNaN(seconds) || seconds < 0 || seconds >= most || string(raw) == "null" {
		return errors.New("out of range")
	}
	*into = time.Unix(int64(seconds), 0)
	return nil
}

// checkDates compares the dates with now.
func (t *token) checkDates(now time.Time) *Refusal {
	switch {
	case t.expires.IsZero():
		return refuse(Expired, "the token does not say when it expires")
	case !now.Before(t.expires.Add(skew)):
		return refuse(Expired, "the token expired at %s", t.expires.UTC().Format(time.RFC3339))
	case t.notBefore.After(now.Add(skew)):
		return refuse(NotYet, "the token is valid from %s on", t.notBefore.UTC().Format(time.RFC3339))
	case t.issuedAt.After(now.Add(skew)):
		return refuse(NotYet, "the token was issued at %s, which is not yet: compare the clocks", t.issuedAt.UTC().Format(time.RFC3339))
	}
	return nil
}

// find returns the claim with that name, or with that path: "realm_access.roles" is the
// member roles of realm_access, unless a claim is called that.
func find(claims map[string]json.RawMessage, name string) (json.RawMessage, bool) {
	if v, ok := claims[name]; ok {
		return v, true
	}
	for i := range len(name) {
		if name[i] != '.' {
			continue
		}
		var inner map[string]json.RawMessage
		if v, ok := claims[name[:i]]; !ok || json.Unmarshal(v, &inner) != nil {
			continue
		}
		if v, ok := find(inner, name[i+1:]); ok {
			return v, true
		}
	}
	return nil, false
}

// text returns a claim that is text, or a number or truth value as it was written.
func text(raw json.RawMessage) (string, bool) {
	var v any
	if json.Unmarshal(raw, &v) != nil {
		return "", false
	}
	switch v := v.(type) {
	case string:
		return v, true
	case float64, bool:
		return string(raw), true
	}
	return "", false
}

// values returns the values of a claim that is kept.
func values(name string, raw json.RawMessage) ([]string, *Refusal) {
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil {
		list = []json.RawMessage{raw}
	}
	// A claim that is cut short would let through whom a rule wants kept out.
	if len(list) > maxValues {
		return nil, refuse(BadClaims, "the claim %s has %d values, limit %d", name, len(list), maxValues)
	}
	out := make([]string, 0, len(list))
	for _, one := range list {
		s, ok := text(one)
		switch {
		case !ok && string(one) == "null":
			continue
		case !ok:
			return nil, refuse(BadClaims, "the claim %s is not text or a list of texts", name)
		case len(s) > maxValue:
			return nil, refuse(BadClaims, "a value of the claim %s has %d bytes, limit %d", name, len(s), maxValue)
		}
		out = append(out, s)
	}
	return out, nil
}
