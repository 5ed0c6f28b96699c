package join

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/tunnel"
)

// tokenPrefix begins a token: whoever finds one is to know what it is.
const tokenPrefix = "culvert-join-1."

const (
	secretSize = 32      // bytes
	maxToken   = 8 << 10 // bytes
	maxZones   = 64
)

// A token is what one administrator gives to another: where to join, by whom that is
// answered, and a secret that works once.
type token struct {
	Address   string    `json:"address"`   // host:port of a gateway
	Transport string    `json:"transport"` // by which it is asked: connect or connect-h2
	SPKI      []byte    `json:"spki"`      // SHA-256 of the public key of its certificate
	Secret    []byte    `json:"secret"`
	Zones     []string  `json:"zones"` // that the joining site may offer
	Expires   time.Time `json:"expires"`
}

// String returns the token as text. It has a checksum, by which one that was copied in part
// is told apart from one that nobody knows.
func (t *token) text() (string, error) {
	data, err := json.Marshal(t)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(data)
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(append(data, sum[:4]...)), nil
}

// parseToken reads a token. Its errors do not quote it.
func parseToken(text string, now time.Time) (*token, error) {
	text = strings.TrimSpace(text)
	rest, ok := strings.CutPrefix(text, tokenPrefix)
	if !ok || len(text) > maxToken {
		return nil, errors.New("it is not a token of \"culvert invite\"")
	}
	data, err := base64.RawURLEncoding.DecodeString(rest)
	if err != nil || len(data) < 4 {
		return nil, errors.New("the token is damaged, or not all of it was copied")
	}
	body, check := data[:len(data)-4], data[len(data)-4:]
	if sum := sha256.Sum256(body); string(sum[:4]) != string(check) {
		return nil, errors.New("the token is damaged, or not all of it was copied")
	}
	t := new(token)
	if err := json.Unmarshal(body, t); err != nil {
		return nil, errors.New("the token is malformed")
	}
	host, port, err := net.SplitHostPort(t.Address)
	_, bad := strconv.ParseUint(port, 10, 16)
	switch {
	case err != nil || bad != nil || host == "" || !slices.Contains(transports, t.Transport),
		len(t.SPKI) != sha256.Size || len(t.Secret) != secretSize || len(t.Zones) > maxZones:
		return nil, errors.New("the token is malformed")
	case !now.Before(t.Expires):
		return nil, fmt.Errorf("the token has expired at %s: ask for another one", t.Expires.UTC().Format(time.RFC3339))
	}
	if _, err := ParseZones(t.Zones); err != nil {
		return nil, errors.New("the token is malformed")
	}
	return t, nil
}

// transports are those by which a gateway can be joined.
var transports = []string{"connect-h2", "connect"}

// CheckToken returns why nobody can join by a token, before any connection is made.
func CheckToken(text string) error {
	_, err := parseToken(text, time.Now())
	return err
}

// ParseZones returns the names that a site may offer: "*.west.example".
func ParseZones(list []string) ([]tunnel.Pattern, error) {
	if len(list) > maxZones {
		return nil, fmt.Errorf("there are %d zones, limit %d", len(list), maxZones)
	}
	all := make([]tunnel.Pattern, len(list))
	for i, text := range list {
		p, err := tunnel.ParsePattern(text)
		if err != nil || p.Suffix.IsReserved() {
			return nil, fmt.Errorf("%q is not a zone: write it as \"*.west.example\"", clip(text))
		}
		all[i] = p
	}
	return all, nil
}

func clip(s string) string {
	const most = 120
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}
