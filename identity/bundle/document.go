package bundle

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/big"
	"slices"
	"time"

	"culvert.dev/identity"
)

// Limits of a document.
const (
	MaxSize = 1 << 20 // bytes
	maxKeys = 1024
	maxHint = math.MaxInt32 // seconds
	minRSA  = 2048          // bits
	maxRSA  = 16384
)

// A document is a JWK set with what SPIFFE adds to it (SPIFFE Trust Domain and Bundle
// section 4).
type document struct {
	Keys        *[]jwk   `json:"keys"`
	Sequence    *uint64  `json:"spiffe_sequence,omitempty"`
	RefreshHint *float64 `json:"spiffe_refresh_hint,omitempty"` // seconds
}

// A jwk is a key, RFC 7517. Its x5c has the certificate of an X.509 authority.
type jwk struct {
	Use   string   `json:"use,omitempty"`
	KeyID string   `json:"kid,omitempty"`
	Type  string   `json:"kty"`
	Curve string   `json:"crv,omitempty"`
	X     string   `json:"x,omitempty"`
	Y     string   `json:"y,omitempty"`
	N     string   `json:"n,omitempty"`
	E     string   `json:"e,omitempty"`
	Certs []string `json:"x5c,omitempty"`
}

const (
	useX509 = "x509-svid"
	useJWT  = "jwt-svid"
)

// Parse reads the bundle of a trust domain. Keys for other uses are ignored, as SPIFFE
// wants it. A bundle without any authority is an error.
func Parse(trustDomain string, doc []byte) (*identity.Bundle, error) {
	if len(doc) > MaxSize {
		return nil, fmt.Errorf("bundle has %d bytes, limit %d", len(doc), MaxSize)
	}
	var d document
	if err := json.Unmarshal(doc, &d); err != nil {
		return nil, fmt.Errorf("bundle is not a JWK set: %w", err)
	}
	if d.Keys == nil {
		return nil, errors.New("bundle has no \"keys\"")
	}
	if n := len(*d.Keys); n > maxKeys {
		return nil, fmt.Errorf("bundle has %d keys, limit %d", n, maxKeys)
	}
	b := &identity.Bundle{TrustDomain: trustDomain}
	if d.Sequence != nil {
		b.Sequence = *d.Sequence
	}
	if d.RefreshHint != nil && *d.RefreshHint > 0 {
		b.RefreshHint = time.Duration(min(*d.RefreshHint, maxHint) * float64(time.Second))
	}
	for i := range *d.Keys {
		if err := (*d.Keys)[i].addTo(b); err != nil {
			return nil, fmt.Errorf("key %d of the bundle: %w", i+1, err)
		}
	}
	if len(b.Roots) == 0 && len(b.JWTKeys) == 0 {
		return nil, errors.New("bundle is empty: it has no key for x509-svid or jwt-svid")
	}
	return b, nil
}

func (k *jwk) addTo(b *identity.Bundle) error {
	switch k.Use {
	case useX509:
		ca, err := k.authority(b.TrustDomain)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(b.Roots, ca.Equal) {
			b.Roots = append(b.Roots, ca)
		}
	case useJWT:
		if k.KeyID == "" {
			return errors.New("a key for jwt-svid has no \"kid\"")
		}
		if b.JWTKeys[k.KeyID] != nil {
			return fmt.Errorf("two keys have the \"kid\" %q", clip(k.KeyID))
		}
		key, err := k.public()
		if err != nil {
			return err
		}
		if b.JWTKeys == nil {
			b.JWTKeys = make(map[string]crypto.PublicKey)
		}
		b.JWTKeys[k.KeyID] = key
	}
	return nil
}

// authority returns the CA of a key for x509-svid. One that says that it is of another
// trust domain is refused.
func (k *jwk) authority(trustDomain string) (*x509.Certificate, error) {
	if len(k.Certs) != 1 {
		return nil, fmt.Errorf("\"x5c\" has %d certificates, want exactly 1", len(k.Certs))
	}
	der, err := base64.StdEncoding.DecodeString(k.Certs[0])
	if err != nil {
		return nil, fmt.Errorf("\"x5c\" is not base64: %w", err)
	}
	ca, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("\"x5c\" is not a certificate: %w", err)
	}
	if !ca.IsCA {
		return nil, fmt.Errorf("the certificate of %q is not that of a CA", clip(ca.Subject.String()))
	}
	if _, err := publicJWK(ca.PublicKey); err != nil {
		return nil, fmt.Errorf("the CA %q: %w", clip(ca.Subject.String()), err)
	}
	for _, u := range ca.URIs {
		if u.Scheme == "spiffe" && u.Host != trustDomain {
			return nil, fmt.Errorf("the CA is of trust domain %q, want %q", clip(u.Host), trustDomain)
		}
	}
	return ca, nil
}

// public returns the public key. A shared one, which anybody could sign by, is none.
func (k *jwk) public() (crypto.PublicKey, error) {
	switch k.Type {
	case "EC":
		curve, size := elliptic.Curve(nil), 0
		switch k.Curve {
		case "P-256":
			curve, size = elliptic.P256(), 32
		case "P-384":
			curve, size = elliptic.P384(), 48
		case "P-521":
			curve, size = elliptic.P521(), 66
		default:
			return nil, fmt.Errorf("curve %q is not supported", clip(k.Curve))
		}
		x, errX := base64.RawURLEncoding.DecodeString(k.X)
		y, errY := base64.RawURLEncoding.DecodeString(k.Y)
		if errX != nil || errY != nil || len(x) != size || len(y) != size {
			return nil, fmt.Errorf("\"x\" and \"y\" are not those of a point of %s", k.Curve)
		}
		key, err := ecdsa.ParseUncompressedPublicKey(curve, slices.Concat([]byte{4}, x, y))
		if err != nil {
			return nil, fmt.Errorf("\"x\" and \"y\" are not those of a point of %s: %w", k.Curve, err)
		}
		return key, nil
	case "RSA":
		n, errN := base64.RawURLEncoding.DecodeString(k.N)
		e, errE := base64.RawURLEncoding.DecodeString(k.E)
		if errN != nil || errE != nil || len(e) == 0 || len(e) > 4 || len(n) > maxRSA/8+1 {
			return nil, errors.New("\"n\" and \"e\" are not those of an RSA key")
		}
		key := &rsa.PublicKey{N: new(big.Int).SetBytes(n), E: int(new(big.Int).SetBytes(e).Int64())}
		if bits := key.N.BitLen(); bits < minRSA {
			return nil, fmt.Errorf("the RSA key has %d bits, want at least %d", bits, minRSA)
		}
		if key.E < 3 || key.E > math.MaxInt32 || key.E%2 == 0 || key.N.Bit(0) == 0 {
			return nil, errors.New("\"n\" and \"e\" are not those of an RSA key")
		}
		return key, nil
	case "OKP":
		x, err := base64.RawURLEncoding.DecodeString(k.X)
		if err != nil || k.Curve != "Ed25519" || len(x) != ed25519.PublicKeySize {
			return nil, errors.New("\"x\" is not that of an Ed25519 key")
		}
		return ed25519.PublicKey(x), nil
	}
	return nil, fmt.Errorf("key type %q is not one of EC, RSA and OKP", clip(k.Type))
}

// Marshal writes a bundle. It is the same for the same bundle.
func Marshal(b *identity.Bundle) ([]byte, error) {
	keys := []jwk{}
	for _, ca := range b.Roots {
		k, err := publicJWK(ca.PublicKey)
		if err != nil {
			return nil, fmt.Errorf("CA %q: %w", clip(ca.Subject.String()), err)
		}
		k.Use, k.Certs = useX509, []string{base64.StdEncoding.EncodeToString(ca.Raw)}
		keys = append(keys, k)
	}
	for _, id := range slices.Sorted(maps.Keys(b.JWTKeys)) {
		k, err := publicJWK(b.JWTKeys[id])
		if err != nil {
			return nil, fmt.Errorf("JWT key %q: %w", clip(id), err)
		}
		k.Use, k.KeyID = useJWT, id
		keys = append(keys, k)
	}
	d := document{Keys: &keys}
	if b.Sequence > 0 {
		d.Sequence = &b.Sequence
	}
	if b.RefreshHint > 0 {
		seconds := math.Ceil(b.RefreshHint.Seconds())
		d.RefreshHint = &seconds
	}
	return json.Marshal(d)
}

func publicJWK(key crypto.PublicKey) (jwk, error) {
	encode := base64.RawURLEncoding.EncodeToString
	switch key := key.(type) {
	case *ecdsa.PublicKey:
		point, err := key.Bytes() // 4, X, Y
		if err != nil {
			return jwk{}, err
		}
		half := (len(point) - 1) / 2
		return jwk{Type: "EC", Curve: key.Params().Name, X: encode(point[1 : 1+half]), Y: encode(point[1+half:])}, nil
	case *rsa.PublicKey:
		return jwk{Type: "RSA", N: encode(key.N.Bytes()), E: encode(big.NewInt(int64(key.E)).Bytes())}, nil
	case ed25519.PublicKey:
		return jwk{Type: "OKP", Curve: "Ed25519", X: encode(key)}, nil
	}
	return jwk{}, fmt.Errorf("a key of type %T has no place in a bundle", key)
}

// clip is for an error: a text from outside, at a length that fits in a line.
func clip(s string) string {
	const most = 128
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}
