package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"
)

// writeCredentials makes what an API server needs, as files of dir: its CA
// (ca.crt), its certificate (apiserver.crt and .key), the key that signs the
// tokens of ServiceAccounts (sa.key), and tokens.csv with the one of the
// administrator, which it returns beside the CA.
func writeCredentials(dir string, addrs ...netip.Addr) (ca []byte, token string, err error) {
	caKey, err := newKey(filepath.Join(dir, "ca.key"))
	if err != nil {
		return nil, "", err
	}
	root := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "kubernetes"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}
	if ca, err = writeCertificate(filepath.Join(dir, "ca.crt"), root, root, caKey, caKey); err != nil {
		return nil, "", err
	}
	serverKey, err := newKey(filepath.Join(dir, "apiserver.key"))
	if err != nil {
		return nil, "", err
	}
	server := &x509.Certificate{
		SerialNumber: big.NewInt(2),
		Subject:      pkix.Name{CommonName: "kube-apiserver"},
		NotBefore:    root.NotBefore,
		NotAfter:     root.NotAfter,
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:     []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost"},
	}
	for _, a := range addrs {
		server.IPAddresses = append(server.IPAddresses, net.IP(a.AsSlice()))
	}
	if _, err = writeCertificate(filepath.Join(dir, "apiserver.crt"), server, root, serverKey, caKey); err != nil {
		return nil, "", err
	}
	if _, err = newKey(filepath.Join(dir, "sa.key")); err != nil {
		return nil, "", err
	}
	random := make([]byte, 16)
	rand.Read(random)
	token = hex.EncodeToString(random)
	line := fmt.Sprintf("%s,admin,admin,system:masters\n", token)
	return ca, token, os.WriteFile(filepath.Join(dir, "tokens.csv"), []byte(line), 0o600)
}

func newKey(file string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
}

func writeCertificate(file string, cert, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.CreateCertificate(rand.Reader, cert, parent, &key.PublicKey, signer)
	if err != nil {
		return nil, err
	}
	b := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return b, os.WriteFile(file, b, 0o644)
}
