package invitation

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Kind is what a token invites to: the beginning of its text, by which a reader knows what
// it has found.
type Kind string

// Kinds.
const (
	Site   Kind = "culvert-join-1."   // to be a peer: package registry/peer/join
	Device Kind = "culvert-device-1." // to have an identity: package identity/enroll
)

const (
	SecretSize = 32      // bytes of a Token's Secret
	maxToken   = 8 << 10 // bytes of its text
	maxZones   = 64

	// MaxTTL is how long a token may be valid.
	MaxTTL = 30 * 24 * time.Hour
)

// Transports are those by which a gateway can be asked.
var Transports = []string{"connect-h2", "connect"}

// A Token is what one administrator gives to another, or to a device: where to go, by whom
// that is answered, and a secret.
type Token struct {
	Kind      Kind      `json:"-"`
	Address   string    `json:"address"`   // host:port of a gateway
	Transport string    `json:"transport"` // one of Transports
	SPKI      []byte    `json:"spki"`      // SHA-256 of the public key of its certificate
	Secret    []byte    `json:"secret"`
	Zones     []string  `json:"zones,omitempty"` // of Site: names that the joining site may offer
	Expires   time.Time `json:"expires"`
}

// New returns a token with a new secret, which leads to the gateway at address that shows the
// certificate leaf.
func New(kind Kind, address, transport string, leaf *x509.Certificate, ttl time.Duration) (*Token, error) {
	if ttl <= 0 || ttl > MaxTTL {
		return nil, fmt.Errorf("%v is no time for a token to be valid: at most %.0fh", ttl, MaxTTL.Hours())
	}
	spki := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	t := &Token{Kind: kind, Address: address, Transport: transport, SPKI: spki[:], Secret: make([]byte, SecretSize), Expires: time.Now().Add(ttl).UTC().Truncate(time.Second)}
	_, _ = rand.Read(t.Secret)
	return t, nil
}

// Text returns the token as text. It has a checksum, by which one that was copied in part
// is told apart from one that is unknown.
func (t *Token) Text() (string, error) {
	data, err := json.Marshal(t)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(data)
	return string(t.Kind) + base64.RawURLEncoding.EncodeToString(append(data, sum[:4]...)), nil
}

// KindOf returns the kind of a token's text, "" for none.
func KindOf(text string) Kind {
	text = withoutSpace(text)
	for _, k := range []Kind{Site, Device} {
		if strings.HasPrefix(text, string(k)) {
			return k
		}
	}
	return ""
}

// withoutSpace returns text without spaces and line ends: a terminal or a mail breaks a long token
// into lines, and a token has none.
func withoutSpace(text string) string { return strings.Join(strings.Fields(text), "") }

// Parse reads a token, which is not to be of now or before. Its errors do not quote it.
func Parse(text string, now time.Time) (*Token, error) {
	text = withoutSpace(text)
	kind := KindOf(text)
	if kind == "" || len(text) > maxToken {
		return nil, errors.New("it is not a token of \"culvert invite\"")
	}
	data, err := base64.RawURLEncoding.DecodeString(text[len(kind):])
	if err != nil || len(data) < 4 {
		return nil, errors.New("the token is damaged, or not all of it was copied")
	}
	body, check := data[:len(data)-4], data[len(data)-4:]
	if sum := sha256.Sum256(body); string(sum[:4]) != string(check) {
		return nil, errors.New("the token is damaged, or not all of it was copied")
	}
	t := &Token{Kind: kind}
	if err := json.Unmarshal(body, t); err != nil {
		return nil, errors.New("the token is malformed")
	}
	host, port, err := net.SplitHostPort(t.Address)
	_, bad := strconv.ParseUint(port, 10, 16)
	switch {
	case err != nil || bad != nil || host == "" || !slices.Contains(Transports, t.Transport),
		len(t.SPKI) != sha256.Size || len(t.Secret) != SecretSize || len(t.Zones) > maxZones:
		return nil, errors.New("the token is malformed")
	case !now.Before(t.Expires):
		return nil, fmt.Errorf("the token has expired at %s, and the clock of this machine says %s: ask for another one, or set the clock", t.Expires.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	return t, nil
}

// HashOf is what is kept of a secret. It has 256 random bits, so that it can't be found by
// trying.
func HashOf(secret []byte) string {
	sum := sha256.Sum256(secret)
	return hex.EncodeToString(sum[:])
}

// A Record is what a gateway keeps of a token.
type Record struct {
	Hash    string    `json:"sha256"` // HashOf its secret
	Expires time.Time `json:"expires"`
	Used    time.Time `json:"used,omitzero"` // zero while it can be used
}

// Valid reports whether the token can be used.
func (r *Record) Valid(now time.Time) bool { return r.Used.IsZero() && now.Before(r.Expires) }

// Forgotten reports whether the record has no use any more: the token has expired, and not
// just now.
func (r *Record) Forgotten(now time.Time) bool {
	const keep = 24 * time.Hour
	return now.Sub(r.Expires) > keep
}
