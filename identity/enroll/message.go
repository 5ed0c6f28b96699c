package enroll

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"culvert.dev/tunnel"
)

// Host is the name at which devices are enrolled.
const Host = "enroll.culvert.alt"

// version is that of the messages.
const version = 1

const (
	// maxRequest is how many bytes of a request are read: a signing request of maxCSR in base64,
	// and room for the rest. Answers may be larger, as they have a bundle.
	maxRequest = 32 << 10

	maxCSR  = 8 << 10 // bytes
	maxName = 63      // bytes of the name of a device
	minRSA  = 2048    // bits
	maxRSA  = 4096
)

// A request is the one line that a device sends.
type request struct {
	Version int    `json:"version"`
	Secret  []byte `json:"secret,omitempty"` // of a token; none to renew the certificate that TLS has shown
	Name    string `json:"name"`             // of the device
	CSR     []byte `json:"csr"`              // PKCS #10, DER
}

// An answer is what the authority says.
type answer struct {
	Version int             `json:"version"`
	Error   string          `json:"error,omitempty"` // why not
	Removed bool            `json:"removed,omitempty"`
	Name    string          `json:"name,omitempty"`
	ID      string          `json:"id,omitempty"`
	Chain   [][]byte        `json:"chain,omitempty"` // DER, the leaf first
	Domain  string          `json:"trustDomain,omitempty"`
	Bundle  json.RawMessage `json:"bundle,omitempty"`
}

// checkName returns why a device can't have a name.
func checkName(name string) error {
	n, err := tunnel.ParseName(name)
	if err != nil || n.String() != name || strings.Contains(name, ".") || len(name) > maxName {
		return fmt.Errorf("%q is not the name of a device: use lower-case letters, digits and hyphens", clip(name))
	}
	return nil
}

// keyOf returns the public key of a certificate signing request. All else in it has no
// meaning.
func keyOf(der []byte) (any, error) {
	if len(der) == 0 || len(der) > maxCSR {
		return nil, fmt.Errorf("the certificate signing request has %d bytes, limit %d", len(der), maxCSR)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, errors.New("the certificate signing request is malformed")
	}
	switch key := csr.PublicKey.(type) {
	case *ecdsa.PublicKey:
		if c := key.Curve; c != elliptic.P256() && c != elliptic.P384() && c != elliptic.P521() {
			return nil, fmt.Errorf("the key is of the curve %s, want P-256, P-384 or P-521", key.Curve.Params().Name)
		}
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits < minRSA || bits > maxRSA {
			return nil, fmt.Errorf("the RSA key has %d bits, want %d to %d", bits, minRSA, maxRSA)
		}
	case ed25519.PublicKey:
	default:
		return nil, errors.New("the key is of an unknown kind, want ECDSA, RSA or Ed25519")
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, errors.New("the certificate signing request is not signed by its own key")
	}
	return csr.PublicKey, nil
}

func clip(s string) string {
	const most = 200
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}
