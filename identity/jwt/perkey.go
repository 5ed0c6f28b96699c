package jwt

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
)

// This file is about issuers that serve each key by itself, in PEM, such as the load balancers of
// AWS: the URL has kidMark in place of the key's id.

const (
	kidMark = "{kid}"

	// Who sends tokens can ask for keys that do not exist. So there are as many requests a
	// second as this at most, and other tokens with unknown keys are refused meanwhile.
	keysAtMost = time.Second
	maxWanted  = 4

	maxKeysByID = 8  // that are kept
	maxKid      = 64 // bytes
)

// byID reports whether each key is fetched by itself.
func (p *place) byID() bool { return strings.Contains(p.url, kidMark) }

// isKid reports whether a key that has the id may be asked for: whatever a token has there, the
// URL stays that of a key.
func isKid(kid string) bool {
	return kid != "" && len(kid) <= maxKid && !strings.ContainsFunc(kid, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '-' || r == '_')
	})
}

// want has the key with that id fetched next. It returns false where it is not to be fetched now.
// The caller holds mu.
func (s *source) want(kid string) bool {
	switch {
	case slices.Contains(s.wanted, kid):
		return true
	case !isKid(kid) || len(s.wanted) >= maxWanted:
		return false
	}
	s.wanted = append(s.wanted, strings.Clone(kid))
	return true
}

// A statusError is an answer of the issuer's server other than 200.
type statusError int

func (e statusError) Error() string { return fmt.Sprintf("status %d", int(e)) }

// fetchEach returns the keys that are known and those that are wanted, without those that the
// issuer no longer has. Where one could not be fetched, it also returns why, and the last one
// stays.
func (s *source) fetchEach(ctx context.Context, known *keySet, wanted []string) (*keySet, error) {
	next := &keySet{}
	var failed error
	fetch := func(kid string) (key, error) {
		data, err := s.get(ctx, strings.ReplaceAll(s.url, kidMark, kid))
		if err != nil {
			return key{}, err
		}
		return parsePEMKey(kid, data)
	}
	for _, old := range known.keys {
		switch k, err := fetch(old.id); {
		case err == nil:
			next.keys = append(next.keys, k)
		case !isGone(err):
			next.keys, failed = append(next.keys, old), err
		}
	}
	for _, kid := range wanted {
		if slices.ContainsFunc(next.keys, func(k key) bool { return k.id == kid }) {
			continue
		}
		switch k, err := fetch(kid); {
		case err == nil:
			next.keys = append(next.keys, k)
		case !isGone(err): // otherwise somebody has made it up
			failed = err
		}
	}
	if n := len(next.keys); n > maxKeysByID {
		next.keys = next.keys[n-maxKeysByID:] // the oldest ones are in front
	}
	sum := sha256.New()
	for _, k := range next.keys {
		der, _ := x509.MarshalPKIXPublicKey(k.public) // as it was parsed
		fmt.Fprintf(sum, "%s %x\n", k.id, der)
	}
	next.sum = [sha256.Size]byte(sum.Sum(nil))
	return next, failed
}

// isGone reports whether the issuer has no such key. S3, where AWS has those of some regions, says
// 403 for what does not exist.
func isGone(err error) bool {
	var status statusError
	return errors.As(err, &status) && (status == http.StatusNotFound || status == http.StatusForbidden || status == http.StatusGone)
}

// parsePEMKey reads a public key.
func parsePEMKey(kid string, data []byte) (key, error) {
	block, rest := pem.Decode(data)
	if block == nil || block.Type != "PUBLIC KEY" || len(strings.TrimSpace(string(rest))) > 0 {
		return key{}, fmt.Errorf("the key %q is not one public key in PEM", kid)
	}
	public, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil || kindOf(public) == "" {
		return key{}, fmt.Errorf("the key %q is none that a token could be verified by", kid)
	}
	return key{id: kid, public: public}, nil
}
