package jwt

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/go-jose/go-jose/v4"

	"culvert.dev/identity"
	"culvert.dev/tunnel"
)

// Limits of a key set.
const (
	maxKeySet = 1 << 20 // bytes
	maxKeys   = 256
	minRSA    = 2048 // bits
	maxRSA    = 8192 // bits: what a signature costs to verify grows with their square
)

// A key verifies signatures.
type key struct {
	id, algorithm string // "" where the set does not say
	public        crypto.PublicKey
}

// A keySet is what an issuer signs by at one time. It is not changed.
type keySet struct {
	keys []key
	sum  [sha256.Size]byte // of what it was made of
}

// parseKeys reads a JWK Set, RFC 7517 section 5. Keys of kinds that sign no token are left
// out. A set with a shared secret or a private key is refused as a whole: whoever may read
// it could sign.
func parseKeys(data []byte) (*keySet, error) {
	if len(data) > maxKeySet {
		return nil, fmt.Errorf("the key set has more than %d bytes", maxKeySet)
	}
	var doc struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if err := json.Unmarshal(data, &doc); err != nil {
		return nil, errors.New("the key set is not JSON")
	}
	if len(doc.Keys) > maxKeys {
		return nil, fmt.Errorf("the key set has %d keys, limit %d", len(doc.Keys), maxKeys)
	}
	set := &keySet{sum: sha256.Sum256(data)}
	for _, raw := range doc.Keys {
		var about struct {
			Kty string          `json:"kty"`
			Use string          `json:"use"`
			Ops []string        `json:"key_ops"`
			K   json.RawMessage `json:"k"`
			D   json.RawMessage `json:"d"`
		}
		if err := json.Unmarshal(raw, &about); err != nil {
			return nil, errors.New("the key set has a key that is not one")
		}
		switch {
		case about.Kty == "oct" || about.K != nil:
			return nil, errors.New("the key set has a shared secret, which whoever may read the set could sign by")
		case about.D != nil:
			return nil, errors.New("the key set has a private key, which whoever may read the set could sign by")
		case about.Use != "" && about.Use != "sig", len(about.Ops) > 0 && !slices.Contains(about.Ops, "verify"):
			continue
		}
		var k jose.JSONWebKey
		if k.UnmarshalJSON(raw) != nil || kindOf(k.Key) == "" {
			continue
		}
		set.keys = append(set.keys, key{k.KeyID, k.Algorithm, k.Key})
	}
	if len(set.keys) == 0 {
		return nil, errors.New("the key set has no key that a token could be verified by")
	}
	return set, nil
}

// bundleKeys returns the keys of a trust domain.
func bundleKeys(b *identity.Bundle) *keySet {
	set := &keySet{keys: make([]key, 0, len(b.JWTKeys))}
	for id, public := range b.JWTKeys {
		if kindOf(public) != "" {
			set.keys = append(set.keys, key{id: id, public: public})
		}
	}
	return set
}

// kindOf returns what is in front of the algorithms that a key is for: "RS" also stands
// for "PS". It is empty for a key that no token is verified by.
func kindOf(public crypto.PublicKey) string {
	switch k := public.(type) {
	case *rsa.PublicKey:
		if bits := k.N.BitLen(); bits >= minRSA && bits <= maxRSA {
			return "RS"
		}
	case *ecdsa.PublicKey:
		switch k.Curve {
		case elliptic.P256():
			return "ES256"
		case elliptic.P384():
			return "ES384"
		case elliptic.P521():
			return "ES512"
		}
	case ed25519.PublicKey:
		return "EdDSA"
	}
	return ""
}

// fits reports whether k is for the algorithm.
func (k *key) fits(algorithm string) bool {
	if k.algorithm != "" && k.algorithm != algorithm {
		return false
	}
	kind := kindOf(k.public)
	return kind == algorithm || kind == "RS" && (algorithm[:2] == "RS" || algorithm[:2] == "PS")
}

// fitting returns the keys that may have signed a token of issuer with that header: those
// with its kid and algorithm. Without a kid there must be only one for the algorithm.
func (s *keySet) fitting(issuer string, h *header) ([]key, *Refusal) {
	var all []key
	named := false
	for _, k := range s.keys {
		if h.Kid != "" && k.id != h.Kid {
			continue
		}
		named = true
		if k.fits(h.Alg) {
			all = append(all, k)
		}
	}
	switch {
	case h.Kid == "" && len(all) > 1:
		return nil, refuse(UnknownKey, "the token does not say which of %d keys of %s it was signed by", len(all), issuer)
	case len(all) > 0:
		return all, nil
	case named && h.Kid != "":
		return nil, refuse(BadAlgorithm, "the algorithm %s is not that of the key %q of %s", h.Alg, tunnel.Clip(h.Kid), issuer)
	case h.Kid == "":
		return nil, refuse(UnknownKey, "no key of %s is for the algorithm %s", issuer, h.Alg)
	}
	return nil, refuse(UnknownKey, "%s has no key %q", issuer, tunnel.Clip(h.Kid))
}
