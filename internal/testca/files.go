package testca

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"time"
)

// The files of a CA.
const (
	certFile = "ca.crt"
	keyFile  = "ca.key"
)

const maxFile = 64 << 10 // bytes of a PEM file

// Save writes ca.crt and ca.key to dir, which it makes if need be. The key can
// be read by its owner only. A directory that holds another CA is refused
// with an error that wraps fs.ErrExist: what that one has signed would be
// worth nothing.
func (ca *CA) Save(dir string) error {
	keyPEM, err := marshalKey(ca.key)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("testca: make the directory: %w", err)
	}
	switch old, err := os.ReadFile(filepath.Join(dir, keyFile)); {
	case err == nil && string(old) != string(keyPEM):
		return fmt.Errorf("testca: %s holds another CA's key: %w", dir, fs.ErrExist)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("testca: look for an older key: %w", err)
	}
	if err := writeFile(filepath.Join(dir, certFile), ca.CertPEM, 0o644); err != nil {
		return err
	}
	return writeFile(filepath.Join(dir, keyFile), keyPEM, 0o600)
}

// Save writes name.crt and name.key to dir, over older ones. The key can be
// read by its owner only. name has no directory part and is not "ca".
func (p *Pair) Save(dir, name string) error {
	if name == "" || name == "ca" || name != filepath.Base(name) || name[0] == '.' {
		return fmt.Errorf("testca: %q can't be the name of a certificate's files", name)
	}
	if err := writeFile(filepath.Join(dir, name+".key"), p.KeyPEM, 0o600); err != nil {
		return err
	}
	return writeFile(filepath.Join(dir, name+".crt"), p.CertPEM, 0o644)
}

// Load reads what Save wrote. It refuses a key that anyone but its owner may
// read or write, a certificate that others may write, and a pair that doesn't
// belong together or has expired. A nil now means time.Now.
func Load(dir string, now func() time.Time) (*CA, error) {
	if now == nil {
		now = time.Now
	}
	keyDER, err := readPEM(filepath.Join(dir, keyFile), "PRIVATE KEY", 0o077)
	if err != nil {
		return nil, err
	}
	certDER, err := readPEM(filepath.Join(dir, certFile), "CERTIFICATE", 0o022)
	if err != nil {
		return nil, err
	}
	key, err := parseKey(keyDER)
	if err != nil {
		return nil, fmt.Errorf("testca: %s: %w", filepath.Join(dir, keyFile), err)
	}
	cert, err := x509.ParseCertificate(certDER)
	if err != nil {
		return nil, fmt.Errorf("testca: %s: %w", filepath.Join(dir, certFile), err)
	}
	if err := checkRoot(cert, key, now()); err != nil {
		return nil, fmt.Errorf("testca: %s: %w", dir, err)
	}
	return newCA(cert.URIs[0].Host, cert, key, now), nil
}

func parseKey(der []byte) (crypto.Signer, error) {
	key, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, err
	}
	ec, ok := key.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("the key is a %T, want ECDSA", key)
	}
	return ec, nil
}

func checkRoot(cert *x509.Certificate, key crypto.Signer, now time.Time) error {
	pub, ok := cert.PublicKey.(*ecdsa.PublicKey)
	switch {
	case !cert.IsCA:
		return errors.New("the certificate is not a CA's")
	case len(cert.URIs) != 1 || cert.URIs[0].String() != scheme+cert.URIs[0].Host:
		return errors.New("the certificate doesn't name one trust domain")
	case !ok || !pub.Equal(key.Public()):
		return errors.New("the key is not the certificate's")
	case now.After(cert.NotAfter):
		return fmt.Errorf("the CA expired at %v", cert.NotAfter)
	}
	return CheckTrustDomain(cert.URIs[0].Host)
}

// readPEM reads a file with one PEM block of the given type. None of the
// mode bits in deny may be set. The open file is what is looked at, so it
// can't be exchanged in between.
func readPEM(path, kind string, deny fs.FileMode) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("testca: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("testca: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("testca: %s is not a regular file", path)
	}
	// Windows has no such bits: Go makes them up there.
	if mode := info.Mode().Perm(); mode&deny != 0 && runtime.GOOS != "windows" {
		return nil, fmt.Errorf("testca: %s has mode %#o, which lets others in: want no more than %#o (chmod it)", path, mode, 0o777&^deny&^0o111)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("testca: read %s: %w", path, err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("testca: %s is larger than the limit of %d bytes", path, maxFile)
	}
	block, _ := pem.Decode(data)
	if block == nil || block.Type != kind {
		return nil, fmt.Errorf("testca: %s has no PEM block %q", path, kind)
	}
	return block.Bytes, nil
}

// writeFile writes a file that is whole at any time, and never readable by
// more than mode says.
func writeFile(path string, data []byte, mode fs.FileMode) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*") // made with mode 0600
	if err != nil {
		return fmt.Errorf("testca: %w", err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
			err = fmt.Errorf("testca: write %s: %w", path, err)
		}
	}()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
