package testca

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"path"
	"time"
)

const (
	caTTL      = 365 * 24 * time.Hour
	defaultTTL = 24 * time.Hour
	skew       = time.Minute // certificates are valid from a little earlier, for clocks that are behind
	maxCN      = 64          // RFC 5280 appendix A, ub-common-name
)

// A CA is a root key and its certificate. It doesn't change after New or
// Load, and its methods may be called from any number of goroutines.
type CA struct {
	TrustDomain string
	CertPEM     []byte // the root certificate

	cert *x509.Certificate
	key  crypto.Signer
	pool *x509.CertPool
	now  func() time.Time
}

// New makes a CA with a new ECDSA P-256 key. Its certificate is valid for a
// year from now(); a nil now means time.Now.
func New(trustDomain string, now func() time.Time) (*CA, error) {
	if err := CheckTrustDomain(trustDomain); err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("testca: make the root key: %w", err)
	}
	if now == nil {
		now = time.Now
	}
	start := now().Add(-skew)
	template := &x509.Certificate{
		Subject:   pkix.Name{Organization: []string{"culvert development CA"}, CommonName: clip(trustDomain)},
		NotBefore: start,
		NotAfter:  start.Add(caTTL),
		// X509-SVID section 4.1: a signing certificate's id has no path.
		URIs:                  []*url.URL{{Scheme: "spiffe", Host: trustDomain}},
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("testca: sign the root: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("testca: read back the root: %w", err)
	}
	return newCA(trustDomain, cert, key, now), nil
}

func newCA(trustDomain string, cert *x509.Certificate, key crypto.Signer, now func() time.Time) *CA {
	ca := &CA{
		TrustDomain: trustDomain,
		CertPEM:     certPEM(cert.Raw),
		cert:        cert,
		key:         key,
		pool:        x509.NewCertPool(),
		now:         now,
	}
	ca.pool.AddCert(cert)
	return ca
}

// A Usage says which side of a handshake a certificate is for.
type Usage int

// Both is what a workload needs that calls and is called.
const (
	Both Usage = iota
	ClientOnly
	ServerOnly
)

// Options say what Issue puts into a certificate.
type Options struct {
	SPIFFEID  string        // "spiffe://example.test/ns/demo/sa/echo"; required, and of the CA's trust domain
	DNSNames  []string      // for clients that check a host name
	IPs       []net.IP      // for clients that were given an address
	TTL       time.Duration // from NotBefore on; 0 means 24 hours; it never outlives the CA
	NotBefore time.Time     // zero means now, and a minute earlier for clocks that are behind
	Usage     Usage
	Key       crypto.Signer // nil means a new ECDSA P-256 key
}

// Issue makes a certificate. Its only URI name is the SPIFFE id.
func (ca *CA) Issue(o Options) (*Pair, error) {
	td, idPath, err := SplitID(o.SPIFFEID)
	if err != nil {
		return nil, err
	}
	if td != ca.TrustDomain {
		return nil, fmt.Errorf("testca: SPIFFE id %q is of trust domain %q, this CA's is %q", o.SPIFFEID, td, ca.TrustDomain)
	}
	if o.TTL < 0 {
		return nil, fmt.Errorf("testca: TTL is %v, want more than 0", o.TTL)
	}
	if o.TTL == 0 {
		o.TTL = defaultTTL
	}
	ends := o.NotBefore.Add(o.TTL)
	if o.NotBefore.IsZero() {
		o.NotBefore, ends = ca.now().Add(-skew), ca.now().Add(o.TTL)
	}
	if o.Key == nil {
		if o.Key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
			return nil, fmt.Errorf("testca: make a key: %w", err)
		}
	}
	template := &x509.Certificate{
		// The subject is for people: nobody may take it for an identity.
		Subject:               pkix.Name{CommonName: clip(path.Base(idPath))},
		NotBefore:             o.NotBefore,
		NotAfter:              earlier(ends, ca.cert.NotAfter),
		URIs:                  []*url.URL{{Scheme: "spiffe", Host: td, Path: idPath}},
		DNSNames:              o.DNSNames,
		IPAddresses:           o.IPs,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
	}
	if !template.NotAfter.After(template.NotBefore) {
		return nil, fmt.Errorf("testca: a certificate from %v on would outlive the CA, which ends at %v", o.NotBefore, ca.cert.NotAfter)
	}
	if _, ok := o.Key.Public().(*rsa.PublicKey); ok {
		template.KeyUsage |= x509.KeyUsageKeyEncipherment // TLS 1.2 without a key exchange of its own
	}
	if o.Usage != ServerOnly {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
	}
	if o.Usage != ClientOnly {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, o.Key.Public(), ca.key)
	if err != nil {
		return nil, fmt.Errorf("testca: sign %q: %w", o.SPIFFEID, err)
	}
	return ca.pair(der, o.Key)
}

func (ca *CA) pair(der []byte, key crypto.Signer) (*Pair, error) {
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("testca: read back the certificate: %w", err)
	}
	keyPEM, err := marshalKey(key)
	if err != nil {
		return nil, err
	}
	return &Pair{
		CertPEM: certPEM(der),
		KeyPEM:  keyPEM,
		TLS:     tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf},
		ca:      ca,
	}, nil
}

// RevocationList returns the CA's list of revoked certificates, in PEM, which is valid for a day.
func (ca *CA) RevocationList(revoked ...*x509.Certificate) ([]byte, error) {
	now := ca.now()
	list := &x509.RevocationList{Number: big.NewInt(now.UnixNano()), ThisUpdate: now.Add(-time.Minute), NextUpdate: now.Add(24 * time.Hour)}
	for _, c := range revoked {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: list.ThisUpdate})
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, ca.cert, ca.key)
	if err != nil {
		return nil, fmt.Errorf("testca: sign the revocation list: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der}), nil
}

// Root returns the root certificate, which is not to be changed.
func (ca *CA) Root() *x509.Certificate { return ca.cert }

// Pool returns a new pool that holds the root alone.
func (ca *CA) Pool() *x509.CertPool { return ca.pool.Clone() }

// A Pair is a certificate and its private key.
type Pair struct {
	CertPEM []byte // the leaf; the root is not part of the chain
	KeyPEM  []byte // PKCS #8
	TLS     tls.Certificate

	ca *CA
}

// ServerConfig returns a new configuration for a server that asks each client
// for a certificate of the same CA with exactly one SPIFFE id.
func (p *Pair) ServerConfig() *tls.Config {
	return &tls.Config{
		Certificates:     []tls.Certificate{p.TLS},
		ClientAuth:       tls.RequireAndVerifyClientCert,
		ClientCAs:        p.ca.Pool(),
		VerifyConnection: p.ca.verifyConnection,
		Time:             p.ca.now,
		MinVersion:       tls.VersionTLS12,
	}
}

// ClientConfig returns a new configuration for a client that shows p and
// expects the server to prove that it is name: a DNS name or an IP address.
func (p *Pair) ClientConfig(name string) *tls.Config {
	return &tls.Config{
		Certificates:     []tls.Certificate{p.TLS},
		RootCAs:          p.ca.Pool(),
		ServerName:       name,
		VerifyConnection: p.ca.verifyConnection,
		Time:             p.ca.now,
		MinVersion:       tls.VersionTLS12,
	}
}

// verifyConnection runs on every handshake, resumed ones included, after the
// chain has been verified.
func (ca *CA) verifyConnection(cs tls.ConnectionState) error {
	if len(cs.PeerCertificates) == 0 {
		return errors.New("testca: the peer has no certificate")
	}
	id, err := PeerID(cs.PeerCertificates[0])
	if err != nil {
		return err
	}
	if td, _, _ := SplitID(id); td != ca.TrustDomain {
		return fmt.Errorf("testca: peer %q is of trust domain %q, want %q", id, td, ca.TrustDomain)
	}
	return nil
}

// PeerID returns the SPIFFE id of a leaf certificate: its only URI name. It
// doesn't verify the certificate.
func PeerID(leaf *x509.Certificate) (string, error) {
	if n := len(leaf.URIs); n != 1 {
		return "", fmt.Errorf("testca: certificate has %d URI names, want exactly 1", n)
	}
	id := leaf.URIs[0].String()
	_, _, err := SplitID(id)
	return id, err
}

func certPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func marshalKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("testca: encode the key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func clip(s string) string { return s[:min(len(s), maxCN)] }
