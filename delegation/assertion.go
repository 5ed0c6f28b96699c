package delegation

import (
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-jose/go-jose/v4/json" // refuses names that are given twice, and tells case apart
)

// HeaderField is the field of a request that has an Assertion.
const HeaderField = "Culvert-Peer"

// TLV is the type of the value that has an Assertion in a PROXY header of version 2. It
// is one of those that section 2.2 of the specification leaves to applications.
const TLV = 0xE1

// Limits.
const (
	MaxLifetime = 60 * time.Second // from IssuedAt to Expires
	MaxActors   = 4                // gateways on the way
	MaxTLV      = 1536             // bytes of an assertion without a certificate chain
	MaxToken    = 8 << 10          // bytes of any assertion

	maxName = 2048 // bytes of an id, as SPIFFE-ID section 2.3 has it
	maxWord = 128  // bytes of a method and of an assertion's own id
)

// An Assertion says who calls a service through a gateway. Of all of it the gateway that
// has signed it is the witness.
type Assertion struct {
	Subject  string // the caller: "spiffe://corp.example/ns/shop/sa/api", "alice"
	Method   string // how it proved that to the first gateway: "mtls", "jwt", "basic"
	CertHash []byte // SHA-256 of its certificate, RFC 8705 section 3.1; nil for no certificate
	Audience string // the service

	// IssuedAt and Expires are at most 60 seconds apart. Where they are zero, Sign uses the
	// present and 30 seconds later.
	IssuedAt, Expires time.Time

	ID string // of this assertion, for logs; where it is "", Sign makes a random one

	// Binding is the tls-exporter of the session to the service: see Binding.
	Binding []byte

	// Actors are the gateways on the way, the one that has signed first, and at most four.
	// That one alone is proven; it vouches for the others. Sign adds itself, so that a
	// gateway hands over what it has verified as it is.
	Actors []string
}

// claims is the payload of the JWS.
type claims struct {
	Issuer   string `json:"iss"`
	Subject  string `json:"sub"`
	Audience string `json:"aud"`
	IssuedAt int64  `json:"iat"` // seconds
	Expires  int64  `json:"exp"`
	ID       string `json:"jti"`
	Method   string `json:"method,omitempty"`
	Binding  string `json:"tls-exporter"` // in base64url; the name is that of RFC 9266
	Cnf      *cnf   `json:"cnf,omitempty"`
	Act      *act   `json:"act,omitempty"`
}

// cnf is RFC 8705 section 3.1.
type cnf struct {
	CertHash string `json:"x5t#S256"` // in base64url
}

// act is RFC 8693 section 4.1: the outermost is the last actor.
type act struct {
	Subject string `json:"sub"`
	Act     *act   `json:"act,omitempty"`
}

// chain returns the actors of a, nested.
func chain(actors []string) (a *act) {
	for _, id := range slices.Backward(actors) {
		a = &act{id, a}
	}
	return a
}

// check returns why a can't be signed, or must not be believed: a value that is missing or
// that has bytes no id has.
func (a *Assertion) check() error {
	names := append([]string{a.Subject, a.Audience}, a.Actors...)
	for i, s := range names {
		if err := checkText(s, maxName); err != nil {
			what := "an actor"
			switch i {
			case 0:
				what = "the subject"
			case 1:
				what = "the audience"
			}
			return refusef(Malformed, "%s %w", what, err)
		}
	}
	if err := checkText(a.Method, maxWord); err != nil {
		return refusef(Malformed, "the method %w", err)
	}
	if err := checkText(a.ID, maxWord); err != nil {
		return refusef(Malformed, "the id %w", err)
	}
	switch n := len(a.Actors); {
	case n > MaxActors:
		return refusef(TooManyActors, "there are %d actors, limit %d", n, MaxActors)
	case a.CertHash != nil && len(a.CertHash) != 32:
		return refusef(Malformed, "the hash of the caller's certificate has %d bytes, want 32", len(a.CertHash))
	case a.Expires.Sub(a.IssuedAt) > MaxLifetime:
		return refusef(TooLong, "the assertion is for %v, limit %v", a.Expires.Sub(a.IssuedAt), MaxLifetime)
	case !a.Expires.After(a.IssuedAt):
		return refusef(Malformed, "the assertion ends before it begins")
	}
	return nil
}

// checkText returns why s can be no id: ids go to logs and headers.
func checkText(s string, limit int) error {
	switch {
	case s == "":
		return errors.New("is missing")
	case len(s) > limit:
		return fmt.Errorf("has %d bytes, limit %d", len(s), limit)
	case !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f }):
		return fmt.Errorf("has bytes that no id has: %q", clip(s))
	}
	return nil
}

// parseClaims reads the payload. It checks nothing but its form.
func parseClaims(payload []byte) (*claims, error) {
	c := new(claims)
	if err := json.Unmarshal(payload, c); err != nil {
		return nil, fmt.Errorf("its payload is not that of an assertion: %w", err)
	}
	return c, nil
}

// assertion returns what c says.
func (c *claims) assertion() (*Assertion, error) {
	const most = 1 << 40 // seconds; more would not fit in a time.Duration
	if c.IssuedAt < 0 || c.Expires < 0 || c.IssuedAt > most || c.Expires > most {
		return nil, refusef(Malformed, "its times are out of range")
	}
	a := &Assertion{
		Subject: c.Subject, Method: c.Method, Audience: c.Audience, ID: c.ID,
		IssuedAt: time.Unix(c.IssuedAt, 0), Expires: time.Unix(c.Expires, 0),
	}
	var err error
	if a.Binding, err = decode(c.Binding); err != nil || len(a.Binding) == 0 {
		return nil, refusef(Malformed, "the binding to a TLS session is missing, or is not base64url")
	}
	for at := c.Act; at != nil; at = at.Act {
		if len(a.Actors) == MaxActors {
			return nil, refusef(TooManyActors, "there are more than %d actors", MaxActors)
		}
		a.Actors = append(a.Actors, at.Subject)
	}
	if c.Cnf != nil {
		if a.CertHash, err = decode(c.Cnf.CertHash); err != nil || len(a.CertHash) == 0 {
			return nil, refusef(Malformed, "the hash of the caller's certificate is not base64url")
		}
	}
	if err := a.check(); err != nil {
		return nil, err
	}
	if len(a.Actors) == 0 || a.Actors[0] != c.Issuer {
		return nil, refusef(Malformed, "the first actor is not %q, which has signed", clip(c.Issuer))
	}
	return a, nil
}

// Binding returns what binds an Assertion to a TLS session: its tls-exporter, RFC 9266
// section 2. Both ends have the same, and no other session has it. It is an error for TLS
// 1.2 without extended master secret, RFC 7627, where sessions could be made to share it.
// The handshake is complete.
func Binding(cs *tls.ConnectionState) ([]byte, error) {
	b, err := cs.ExportKeyingMaterial("EXPORTER-Channel-Binding", []byte{}, 32)
	if err != nil {
		return nil, refusef(NoBinding, "the TLS session has nothing to bind to: it is neither TLS 1.3 nor TLS 1.2 with extended master secret: %w", err)
	}
	return b, nil
}

// clip shortens a peer's text for an error.
func clip(s string) string { return s[:min(len(s), 80)] }
