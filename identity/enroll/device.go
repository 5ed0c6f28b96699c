package enroll

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"culvert.dev/identity"
	"culvert.dev/identity/bundle"
	"culvert.dev/internal/invitation"
	"culvert.dev/internal/statefile"
	"culvert.dev/tunnel"
)

// Files in the folder of a device.
const (
	IdentityFile   = "identity.pem" // the key and the certificate chain, for its owner alone
	BundleFile     = "bundle.pem"   // the CAs of the trust domain
	membershipFile = "device.json"  // a Membership; it is written last

	maxFile = 4 << 20 // bytes
)

// A Membership is what a device knows of where it has joined.
type Membership struct {
	Version     int       `json:"version"`
	Name        string    `json:"name"`
	ID          string    `json:"id"` // of the device
	TrustDomain string    `json:"trustDomain"`
	Gateway     string    `json:"gateway"` // host:port
	Transport   string    `json:"transport"`
	GatewayID   string    `json:"gatewayID"` // whom the device expects there
	Joined      time.Time `json:"joined"`

	// ClockOff is how far the clock of the device was behind that of the authority, negative
	// where it was ahead. Join sets it.
	ClockOff time.Duration `json:"-"`
}

// ErrJoined is of a folder of a device that has joined already.
var ErrJoined = errors.New("this device has joined already")

// CheckToken returns why no device can join by a token, before any connection is made.
func CheckToken(text string) error {
	_, err := parseToken(text)
	return err
}

func parseToken(text string) (*invitation.Token, error) {
	t, err := invitation.Parse(text, time.Now())
	if err == nil && t.Kind != invitation.Device {
		return nil, errors.New("the token is not for a device: it makes two sites peers")
	}
	return t, err
}

// Join uses a token: it makes a key, gets a certificate for it by a connection of dialer, and
// puts both into the folder, which it makes. Name is what the device wants to be called where
// the invitation does not say it. In a folder of a device that has joined, it returns
// ErrJoined unless replace is set.
func Join(ctx context.Context, dialer tunnel.Dialer, text, name, folder string, replace bool) (*Membership, error) {
	t, err := parseToken(text)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	lock, err := statefile.Lock(filepath.Join(folder, membershipFile), "identity of this device")
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if m, err := Load(folder); err == nil && !replace {
		return m, ErrJoined
	}
	ctx, cancel := context.WithTimeout(ctx, invitation.Timeout)
	defer cancel()
	c, state, err := t.Dial(ctx, dialer, Host)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	got, err := ask(ctx, c, t.Address, &request{Secret: t.Secret, Name: name})
	if err != nil {
		return nil, err
	}
	gateway, err := verify(got.bundle, state.PeerCertificates, got.signed())
	if err != nil {
		return nil, fmt.Errorf("the bundle of %q does not verify the gateway that has sent it: %w", got.Domain, err)
	}
	m := &Membership{
		Version: version, Name: got.Name, ID: got.ID, TrustDomain: got.Domain, Gateway: t.Address, Transport: t.Transport, GatewayID: gateway.ID, Joined: time.Now().UTC(),
	}
	m.ClockOff = got.signed().Sub(m.Joined).Round(time.Second)
	if err := got.store(folder); err != nil {
		return nil, err
	}
	return m, statefile.Replace(filepath.Join(folder, membershipFile), func(w io.Writer) error { return json.NewEncoder(w).Encode(m) })
}

// verify returns who has shown a chain, by a bundle alone, at a time.
func verify(b *identity.Bundle, chain []*x509.Certificate, at time.Time) (tunnel.Peer, error) {
	v := identity.Verifier{
		Time:  func() time.Time { return at },
		Trust: []*identity.Trust{identity.NewTrust(b.TrustDomain, b.Roots...)},
		Want:  identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, TrustDomains: []string{b.TrustDomain}},
	}
	return v.Verify(chain)
}

// Load returns what a folder says of where its device has joined. The error is
// fs.ErrNotExist if it has not.
func Load(folder string) (*Membership, error) {
	path := filepath.Join(folder, membershipFile)
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	m := new(Membership)
	if err := json.NewDecoder(io.LimitReader(f, maxFile)).Decode(m); err != nil || m.Version != version {
		return nil, fmt.Errorf("%s is damaged, or of another version: join again with a new token", path)
	}
	_, _, bad := net.SplitHostPort(m.Gateway)
	domain, _, err := identity.ParseSPIFFEID(m.ID)
	if err != nil || bad != nil || domain != m.TrustDomain || checkName(m.Name) != nil {
		return nil, fmt.Errorf("%s is damaged: join again with a new token", path)
	}
	return m, nil
}

// Joined reports whether the device of a folder has joined.
func Joined(folder string) bool {
	_, err := os.Stat(filepath.Join(folder, membershipFile))
	return !errors.Is(err, fs.ErrNotExist)
}

// A certified is what an authority has given to a device.
type certified struct {
	answer
	key    *ecdsa.PrivateKey
	chain  []*x509.Certificate
	bundle *identity.Bundle
}

// errTaken is of an authority that has no such device any more.
var errTaken = errors.New("the authority has removed this device: join again with a new token")

// ask sends q, with a certificate signing request for a new key, on a connection to the
// gateway at an address, and returns what comes.
func ask(ctx context.Context, c net.Conn, address string, q *request) (*certified, error) {
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	q.Version = version
	if q.CSR, err = x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key); err != nil {
		return nil, err
	}
	line, err := json.Marshal(q)
	if err != nil {
		return nil, err
	}
	if _, err := c.Write(append(line, '\n')); err != nil {
		return nil, fmt.Errorf("the gateway at %s takes no request: %w", address, err)
	}
	got := &certified{key: key}
	if _, err := invitation.ReadMessage(bufio.NewReader(c), &got.answer); err != nil {
		return nil, fmt.Errorf("the gateway at %s gives no answer: %w", address, err)
	}
	switch {
	case got.Removed:
		return nil, errTaken
	case got.Error != "":
		return nil, fmt.Errorf("the gateway at %s refuses: %s", address, clip(got.Error))
	}
	if err := got.check(); err != nil {
		return nil, fmt.Errorf("the answer of the gateway at %s can't be used: %w", address, err)
	}
	return got, nil
}

// signed is when the authority has signed the certificate, by its clock. That of a device may
// not be set yet.
func (g *certified) signed() time.Time { return g.chain[0].NotBefore.Add(Skew) }

// check parses what has come.
func (g *certified) check() (err error) {
	if g.Version != version {
		return fmt.Errorf("it is of version %d, and this culvert knows version %d", g.Version, version)
	}
	if err := checkName(g.Name); err != nil {
		return err
	}
	if g.bundle, err = bundle.Parse(g.Domain, g.Bundle); err != nil {
		return err
	}
	const maxChain = 8
	if len(g.Chain) == 0 || len(g.Chain) > maxChain {
		return fmt.Errorf("it has %d certificates", len(g.Chain))
	}
	for _, der := range g.Chain {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return errors.New("a certificate is malformed")
		}
		g.chain = append(g.chain, c)
	}
	if pub, ok := g.chain[0].PublicKey.(*ecdsa.PublicKey); !ok || !pub.Equal(g.key.Public()) {
		return errors.New("the certificate is for another key")
	}
	who, err := verify(g.bundle, g.chain, g.signed())
	if err == nil && who.ID != g.ID {
		err = fmt.Errorf("the certificate is that of %q", who.ID)
	}
	return err
}

// store puts the key with its certificate, and the bundle, into a folder.
func (g *certified) store(folder string) error {
	der, err := x509.MarshalPKCS8PrivateKey(g.key)
	if err != nil {
		return err
	}
	var cas []*x509.Certificate
	cas = append(cas, g.bundle.Roots...)
	if err := replace(filepath.Join(folder, BundleFile), nil, cas); err != nil {
		return err
	}
	return replace(filepath.Join(folder, IdentityFile), der, g.chain)
}

// replace puts a private key, if there is one, and certificates in the file at path.
func replace(path string, key []byte, certificates []*x509.Certificate) error {
	var text []byte
	if key != nil {
		text = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})
	}
	for _, c := range certificates {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	return statefile.Replace(path, func(w io.Writer) error {
		_, err := w.Write(text)
		return err
	})
}

// read returns the key with its certificate, and the bundle, of a folder.
func read(folder string, m *Membership) (*tls.Certificate, *identity.Bundle, error) {
	own, err := os.ReadFile(filepath.Join(folder, IdentityFile))
	if err != nil {
		return nil, nil, err
	}
	cert, err := identity.ParsePair(own, own)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", filepath.Join(folder, IdentityFile), err)
	}
	cas, err := os.ReadFile(filepath.Join(folder, BundleFile))
	if err != nil {
		return nil, nil, err
	}
	b, err := identity.ParseBundle(m.TrustDomain, cas, nil)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", filepath.Join(folder, BundleFile), err)
	}
	return cert, b, nil
}
