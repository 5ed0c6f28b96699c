package proxyproto

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	wire "github.com/pires/go-proxyproto"

	"culvert.dev/tunnel"
)

// An SSL is what a header of version 2 says of the TLS in which the client speaks with the
// proxy: PP2_TYPE_SSL, section 2.2.6. Texts are "" where they are not stated.
type SSL struct {
	// Certificate says that the client has shown a certificate in this connection, and
	// Session that it has in this TLS session, perhaps in an earlier connection.
	Certificate, Session bool

	// Verified says that the proxy has verified the certificate.
	Verified bool

	Version string // of TLS, as OpenSSL calls it: "TLSv1.3"
	CN      string // the common name of the client's certificate, UTF-8
	Cipher  string // as OpenSSL calls it: "ECDHE-RSA-AES128-GCM-SHA256"

	SigAlg string // by which the proxy's own certificate is signed: "RSA-SHA256"
	KeyAlg string // of the key in it: "RSA2048", "EC256"

	ClientCertificate []byte // the client's, in DER, as HAProxy 3 writes it; nil where it is not stated
}

// Flags of PP2_TYPE_SSL, section 2.2.6.
const (
	sslUsed        = 0x01
	sslCertificate = 0x02
	sslSession     = 0x04

	sslHead = 5 // flags, verification
)

// notVerified is what SSL has where no certificate was verified. Any number but 0 says so;
// this is X509_V_ERR_APPLICATION_VERIFICATION of OpenSSL.
const notVerified = 50

// size is about that of value, and no less than the values in it have.
func (s *SSL) size() int {
	if s == nil {
		return 0
	}
	return len(s.Version) + len(s.CN) + len(s.Cipher) + len(s.SigAlg) + len(s.KeyAlg) + len(s.ClientCertificate)
}

// value returns s as a TLV has it, "" for nil. Its size is at most maxV2.
func (s *SSL) value() string {
	if s == nil {
		return ""
	}
	flags, verify := byte(sslUsed), uint32(notVerified)
	if s.Certificate {
		flags |= sslCertificate
	}
	if s.Session {
		flags |= sslSession
	}
	if s.Verified {
		verify = 0
	}
	b := binary.BigEndian.AppendUint32([]byte{flags}, verify)
	for _, v := range []struct {
		kind  wire.PP2Type
		value string
	}{
		{wire.PP2_SUBTYPE_SSL_VERSION, s.Version},
		{wire.PP2_SUBTYPE_SSL_CN, s.CN},
		{wire.PP2_SUBTYPE_SSL_CIPHER, s.Cipher},
		{wire.PP2_SUBTYPE_SSL_SIG_ALG, s.SigAlg},
		{wire.PP2_SUBTYPE_SSL_KEY_ALG, s.KeyAlg},
		{wire.PP2_SUBTYPE_SSL_CLIENT_CERT, string(s.ClientCertificate)},
	} {
		if v.value != "" {
			b = append(b, byte(v.kind))
			b = binary.BigEndian.AppendUint16(b, uint16(len(v.value)))
			b = append(b, v.value...)
		}
	}
	return string(b)
}

// parseSSL reads the value of PP2_TYPE_SSL. It is nil where the client has used no TLS.
func parseSSL(b []byte) (*SSL, error) {
	if len(b) < sslHead {
		return nil, fmt.Errorf("the value SSL has %d bytes, want at least %d", len(b), sslHead)
	}
	flags := b[0]
	s := &SSL{Certificate: flags&sslCertificate != 0, Session: flags&sslSession != 0}
	// Some proxies write 0 where there is no certificate at all.
	s.Verified = binary.BigEndian.Uint32(b[1:]) == 0 && (s.Certificate || s.Session)
	tlvs, err := wire.SplitTLVs(b[sslHead:])
	if err != nil {
		return nil, fmt.Errorf("the value SSL: %w", err)
	}
	var seen [wire.PP2_SUBTYPE_SSL_CLIENT_CERT + 1]bool
	for _, v := range tlvs {
		var to *string
		switch v.Type {
		case wire.PP2_SUBTYPE_SSL_VERSION:
			to = &s.Version
		case wire.PP2_SUBTYPE_SSL_CN:
			to = &s.CN
		case wire.PP2_SUBTYPE_SSL_CIPHER:
			to = &s.Cipher
		case wire.PP2_SUBTYPE_SSL_SIG_ALG:
			to = &s.SigAlg
		case wire.PP2_SUBTYPE_SSL_KEY_ALG:
			to = &s.KeyAlg
		case wire.PP2_SUBTYPE_SSL_CLIENT_CERT:
			s.ClientCertificate = append([]byte(nil), v.Value...)
		default:
			continue
		}
		switch {
		case seen[v.Type]:
			return nil, fmt.Errorf("value %#02x of the value SSL is repeated", byte(v.Type))
		case to != nil && !utf8.Valid(v.Value):
			return nil, fmt.Errorf("value %#02x of the value SSL is not UTF-8", byte(v.Type))
		case to != nil:
			*to = string(v.Value)
		}
		seen[v.Type] = true
	}
	if flags&sslUsed == 0 {
		return nil, nil
	}
	return s, nil
}

// sslOf returns what a gateway knows of the TLS of req that it has ended, nil where it has
// ended none. It names a certificate only if that was verified and is the caller's own:
// readers would take that of another for the caller's.
func sslOf(req *tunnel.Request) *SSL {
	t := req.TLS
	if t == nil {
		return nil
	}
	s := &SSL{}
	if t.Version != 0 {
		s.Version = strings.Replace(tls.VersionName(t.Version), "TLS ", "TLSv", 1)
		s.Cipher = cipherName(t.CipherSuite)
	}
	if t.Certificate != nil {
		s.SigAlg, s.KeyAlg = sigAlg(t.Certificate.SignatureAlgorithm), keyAlg(t.Certificate.PublicKey)
	}
	if len(t.Chain) > 0 && !isActors(req) {
		// Every handshake is a full one: sessions are not resumed.
		s.Certificate, s.Session, s.Verified = true, true, true
		if cn := t.Chain[0].Subject.CommonName; utf8.ValidString(cn) {
			s.CN = cn
		}
		s.ClientCertificate = t.Chain[0].Raw
	}
	return s
}

// isActors reports whether the certificate in the TLS of req is not the caller's own, but
// that of its Actor: a gateway that has stated the caller, or a proxy that has passed on its
// token.
func isActors(req *tunnel.Request) bool {
	auth := req.Peer.Auth
	return auth != nil && auth.Actor != nil && auth.Actor.Method == "mtls" && auth.Actor.ID == req.TLS.Peer.ID
}

// cipherName returns what OpenSSL calls a cipher suite, as other proxies write it.
func cipherName(id uint16) string {
	name := tls.CipherSuiteName(id)
	exchange, cipher, ok := strings.Cut(strings.TrimPrefix(name, "TLS_"), "_WITH_")
	if !ok {
		return name // one of TLS 1.3, which has one name
	}
	cipher = strings.NewReplacer("AES_", "AES", "_CBC", "", "3DES_EDE", "DES-CBC3", "_SHA256", "-SHA256", "_", "-").Replace(cipher)
	if strings.HasPrefix(cipher, "CHACHA20") {
		cipher = strings.TrimSuffix(cipher, "-SHA256")
	}
	if exchange == "RSA" {
		return cipher
	}
	return strings.ReplaceAll(exchange, "_", "-") + "-" + cipher
}

// sigAlg returns what OpenSSL calls a signature algorithm, "" for one that it calls
// nothing in particular.
func sigAlg(a x509.SignatureAlgorithm) string {
	return map[x509.SignatureAlgorithm]string{
		x509.SHA256WithRSA: "RSA-SHA256", x509.SHA384WithRSA: "RSA-SHA384", x509.SHA512WithRSA: "RSA-SHA512",
		x509.SHA256WithRSAPSS: "RSASSA-PSS", x509.SHA384WithRSAPSS: "RSASSA-PSS", x509.SHA512WithRSAPSS: "RSASSA-PSS",
		x509.ECDSAWithSHA256: "ecdsa-with-SHA256", x509.ECDSAWithSHA384: "ecdsa-with-SHA384", x509.ECDSAWithSHA512: "ecdsa-with-SHA512",
		x509.PureEd25519: "ED25519",
	}[a]
}

// keyAlg returns what HAProxy calls a public key.
func keyAlg(key any) string {
	switch k := key.(type) {
	case *rsa.PublicKey:
		return "RSA" + strconv.Itoa(k.N.BitLen())
	case *ecdsa.PublicKey:
		return "EC" + strconv.Itoa(k.Curve.Params().BitSize)
	case ed25519.PublicKey:
		return "ED25519"
	}
	return ""
}
