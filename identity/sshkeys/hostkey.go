package sshkeys

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha1"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/crypto/ssh"
)

// leastRSA is the least size of an RSA key that is accepted, in bits.
const leastRSA = 2048

// ParseHostKey reads a private key, in the format of OpenSSH or in PEM, that has no
// passphrase: Ed25519, ECDSA, or RSA of at least 2,048 bits. Its errors quote nothing of it.
func ParseHostKey(pem []byte) (ssh.Signer, error) {
	raw, err := ssh.ParseRawPrivateKey(pem)
	if _, locked := errors.AsType[*ssh.PassphraseMissingError](err); locked {
		return nil, errors.New("the host key has a passphrase, which cannot be entered here")
	}
	if err != nil {
		return nil, errors.New("this is no private key of OpenSSH")
	}
	switch k := raw.(type) {
	case *rsa.PrivateKey:
		if k.N.BitLen() < leastRSA {
			return nil, fmt.Errorf("the RSA key has %d bits, and needs %d", k.N.BitLen(), leastRSA)
		}
	case *ecdsa.PrivateKey, *ed25519.PrivateKey:
	default:
		return nil, errors.New("the host key is not Ed25519, ECDSA or RSA")
	}
	return ssh.NewSignerFromKey(raw)
}

// A Fingerprint is what a record SSHFP says of a host key, RFC 4255 section 3.1.
type Fingerprint struct {
	Algorithm uint8  // 1 for RSA, 3 for ECDSA, 4 for Ed25519
	Hash      uint8  // 1 for SHA-1, 2 for SHA-256
	Digest    string // the bytes
}

// Fingerprints returns those of a host key, by SHA-1 and by SHA-256.
func Fingerprints(key ssh.PublicKey) []Fingerprint {
	var algorithm uint8
	switch t := key.Type(); {
	case t == ssh.KeyAlgoRSA:
		algorithm = 1
	case strings.HasPrefix(t, "ecdsa-"):
		algorithm = 3
	case t == ssh.KeyAlgoED25519: // RFC 7479
		algorithm = 4
	default:
		return nil
	}
	one, two := sha1.Sum(key.Marshal()), sha256.Sum256(key.Marshal())
	return []Fingerprint{{algorithm, 1, string(one[:])}, {algorithm, 2, string(two[:])}}
}

// checkKey returns why a public key of a client or of a CA is not accepted.
func checkKey(key ssh.PublicKey) error {
	if c, ok := key.(ssh.CryptoPublicKey); ok {
		if k, ok := c.CryptoPublicKey().(*rsa.PublicKey); ok && k.N.BitLen() < leastRSA {
			return fmt.Errorf("the RSA key has %d bits, and needs %d", k.N.BitLen(), leastRSA)
		}
	}
	switch key.Type() {
	case ssh.KeyAlgoRSA, ssh.KeyAlgoECDSA256, ssh.KeyAlgoECDSA384, ssh.KeyAlgoECDSA521, ssh.KeyAlgoED25519, ssh.KeyAlgoSKED25519, ssh.KeyAlgoSKECDSA256:
		return nil
	}
	return fmt.Errorf("keys of the type %s are not accepted", key.Type())
}
