package upstream

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/internal/termination"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A tlsLayer speaks TLS on connections, as a registry.BackendTLS says. Where the
// endpoint cannot be verified there is no connection: no byte of the client goes there.
type tlsLayer struct {
	config *tls.Config
	sans   []string
}

// tlsLayer parses b. Equal ones share one.
func (t *Transports) tlsLayer(b *registry.BackendTLS) (*tlsLayer, error) {
	return t.layers.getByKey(tlsKey(b), func() (*tlsLayer, error) { return newTLSLayer(b) })
}

// tlsKey returns a key that equal settings share. It is asked for with each table, for each
// of maybe thousands of services, whose roots and certificates are long.
func tlsKey(b *registry.BackendTLS) (key [sha256.Size]byte) {
	h := sha256.New()
	var number [8]byte
	count := func(n int) {
		binary.BigEndian.PutUint64(number[:], uint64(n))
		h.Write(number[:])
	}
	text := func(s string) {
		count(len(s))
		_, _ = io.WriteString(h, s)
	}
	for _, s := range []string{b.ServerName, b.Roots, b.Certificate, string(b.Key)} {
		text(s)
	}
	for _, list := range [][]string{b.SANs, b.CipherSuites} {
		count(len(list))
		for _, s := range list {
			text(s)
		}
	}
	count(int(b.MinVersion))
	count(int(b.MaxVersion))
	h.Sum(key[:0])
	return key
}

// TLSLayer returns what speaks TLS by b, for probes. It is checks.Checker.TLS.
func (t *Transports) TLSLayer(b *registry.BackendTLS) (registry.TLSLayer, error) {
	layer, err := t.tlsLayer(b)
	if err != nil {
		return nil, err // and no interface that has a nil in it
	}
	return layer, nil
}

func newTLSLayer(b *registry.BackendTLS) (*tlsLayer, error) {
	if b.ServerName == "" {
		return nil, errors.New("gateway: TLS to a service needs a server name")
	}
	suites, err := cipherSuites(b)
	if err != nil {
		return nil, err
	}
	t := &tlsLayer{sans: b.SANs, config: &tls.Config{
		ServerName: b.ServerName, MinVersion: max(b.MinVersion, tls.VersionTLS12), MaxVersion: b.MaxVersion, CipherSuites: suites,
		// Small records help a browser on a slow line to show something early. Here
		// they only cost time.
		DynamicRecordSizingDisabled: true,
	}}
	if b.Roots != "" {
		t.config.RootCAs = x509.NewCertPool()
		if !t.config.RootCAs.AppendCertsFromPEM([]byte(b.Roots)) {
			return nil, errors.New("gateway: the roots to verify a service by hold no certificate")
		}
	}
	if b.Certificate != "" {
		pair, err := tls.X509KeyPair([]byte(b.Certificate), []byte(b.Key))
		if err != nil {
			return nil, fmt.Errorf("gateway: the certificate to show to a service: %w", err)
		}
		// It is shown whatever CAs the service names: there is no other one, and a
		// service that does not accept it must say so.
		t.config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	if len(t.sans) > 0 {
		// crypto/tls would require the server name in the certificate. Here it is
		// for the hello only, and verify checks all the rest.
		t.config.InsecureSkipVerify = true
		t.config.VerifyConnection = t.verify
	}
	return t, nil
}

// cipherSuites returns the numbers of b's cipher suites, nil for the default. What b asks
// for must leave a version and a suite to speak.
func cipherSuites(b *registry.BackendTLS) ([]uint16, error) {
	if b.MaxVersion != 0 && b.MaxVersion < max(b.MinVersion, tls.VersionTLS12) {
		return nil, fmt.Errorf("gateway: TLS to a service: the highest version, %s, is below the lowest, %s",
			tls.VersionName(b.MaxVersion), tls.VersionName(max(b.MinVersion, tls.VersionTLS12)))
	}
	var suites []uint16
	for _, name := range b.CipherSuites {
		id, err := registry.ParseCipherSuite(name)
		if err != nil {
			return nil, fmt.Errorf("gateway: TLS to a service: %w", err)
		}
		suites = append(suites, id)
	}
	return suites, nil
}

// verify is what crypto/tls does, with the SANs in place of the server name.
func (t *tlsLayer) verify(cs tls.ConnectionState) error {
	if len(cs.PeerCertificates) == 0 {
		return errors.New("it shows no certificate")
	}
	leaf := cs.PeerCertificates[0]
	opts := x509.VerifyOptions{Roots: t.config.RootCAs, Intermediates: x509.NewCertPool()}
	for _, c := range cs.PeerCertificates[1:] {
		opts.Intermediates.AddCert(c)
	}
	if _, err := leaf.Verify(opts); err != nil {
		return &tls.CertificateVerificationError{UnverifiedCertificates: cs.PeerCertificates, Err: err}
	}
	if !slices.ContainsFunc(t.sans, func(san string) bool { return hasSAN(leaf, san) }) {
		return &sanError{t.sans, leaf}
	}
	return nil
}

// hasSAN reports whether a certificate has a name, or an address. A URI is compared byte
// by byte, as RFC 3986 section 6.2.1 and SPIFFE do; a DNS name with a wildcard is
// that very name.
func hasSAN(leaf *x509.Certificate, san string) bool {
	if strings.Contains(san, "://") {
		for _, u := range leaf.URIs {
			if u.String() == san {
				return true
			}
		}
		return false
	}
	if _, err := netip.ParseAddr(san); err == nil {
		return leaf.VerifyHostname(san) == nil
	}
	if _, err := tunnel.ParseName(san); err == nil {
		return leaf.VerifyHostname(san) == nil
	}
	return strings.HasPrefix(san, "*.") && slices.ContainsFunc(leaf.DNSNames, func(n string) bool { return strings.EqualFold(n, san) })
}

// A sanError is that of a certificate without the names that it must have.
type sanError struct {
	want []string
	leaf *x509.Certificate
}

func (e *sanError) Error() string {
	const maxNames = 10
	has := slices.Clone(e.leaf.DNSNames)
	for _, u := range e.leaf.URIs {
		has = append(has, u.String())
	}
	for _, a := range e.leaf.IPAddresses {
		has = append(has, a.String())
	}
	return fmt.Sprintf("its certificate has none of the names %q, it has %q", e.want, has[:min(len(has), maxNames)])
}

// security is what the layer adds to a Transport.
func (t *tlsLayer) security() tunnel.Security {
	if t.config.GetClientCertificate != nil {
		return tunnel.Mutual
	}
	return tunnel.ServerVerified
}

// Handshake implements Layer.
func (t *tlsLayer) Handshake(ctx context.Context, c net.Conn, ep *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	s, err := termination.Client(ctx, c, t.config)
	if err == nil {
		return s, nil
	}
	reason := tunnel.DialFailed
	if ctx.Err() != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		reason, err = tunnel.DialTimeout, errors.New("it is not complete in time")
	}
	return nil, &tunnel.Error{Reason: reason, Err: fmt.Errorf("TLS handshake with %s as %q: %w", ep, t.config.ServerName, t.explain(err))}
}

// explain says which check has failed.
func (t *tlsLayer) explain(err error) error {
	by := "the CAs of the system"
	if t.config.RootCAs != nil {
		by = "the CAs that are configured for it"
	}
	var (
		unknown x509.UnknownAuthorityError
		host    x509.HostnameError
		invalid x509.CertificateInvalidError
		op      *net.OpError
	)
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return fmt.Errorf("the service does not speak TLS there: %w", err)
	}
	switch {
	case errors.As(err, &unknown):
		return fmt.Errorf("its certificate is not signed by any of %s: %w", by, err)
	case errors.As(err, &host):
		return fmt.Errorf("its certificate is for other names: %w", err)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Errorf("its certificate is not valid now: %w", err)
	case errors.As(err, &invalid) && invalid.Reason == x509.IncompatibleUsage:
		return fmt.Errorf("its certificate is not for servers: %w", err)
	case errors.As(err, &op) && op.Op == "remote error":
		return fmt.Errorf("the service refuses it: %w", err)
	}
	return err
}
