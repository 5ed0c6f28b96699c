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

	"culvert.dev/identity"
	"culvert.dev/internal/termination"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A tlsLayer speaks TLS on connections, as a registry.BackendTLS says. Where the
// endpoint cannot be verified there is no connection: no byte of the client goes there.
type tlsLayer struct {
	config *tls.Config
	ownCAs bool // CAs are configured for the service
}

// tlsLayer parses b. Equal ones share one.
func (t *Transports) tlsLayer(b *registry.BackendTLS) (*tlsLayer, error) {
	return t.layers.getByKey(tlsKey(b), func() (*tlsLayer, error) { return t.newTLSLayer(b) })
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
	for _, s := range []string{b.ServerName, b.Roots, b.Certificate, string(b.Key), b.KeyName} {
		text(s)
	}
	for _, list := range [][]string{b.SANs, b.CipherSuites, b.TrustNames} {
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

func (t *Transports) newTLSLayer(b *registry.BackendTLS) (*tlsLayer, error) {
	if b.ServerName == "" {
		return nil, errors.New("gateway: TLS to a service needs a server name")
	}
	suites, err := cipherSuites(b)
	if err != nil {
		return nil, err
	}
	layer := &tlsLayer{config: &tls.Config{
		ServerName: b.ServerName, MinVersion: max(b.MinVersion, tls.VersionTLS12), MaxVersion: b.MaxVersion, CipherSuites: suites,
		// Small records help a browser on a slow line to show something early. Here
		// they only cost time.
		DynamicRecordSizingDisabled: true,
	}}
	v := &identity.Verifier{System: b.Roots == "" && len(b.TrustNames) == 0, Want: identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, SANs: b.SANs}}
	if len(b.SANs) == 0 {
		v.Want.DNSName = b.ServerName
	}
	if len(b.TrustNames) > 0 {
		v.Trust = t.trust(b.TrustNames)
	} else if !v.System {
		roots, err := identity.ParseCertificates(b.Roots)
		if err != nil {
			return nil, errors.New("gateway: the roots to verify a service by hold no certificate")
		}
		v.Trust = []*identity.Trust{identity.NewTrust("", roots...)}
	}
	v.Client(layer.config)
	layer.ownCAs = !v.System
	if b.KeyName != "" {
		layer.config.GetClientCertificate = t.clientCertificate(b.KeyName)
	}
	if b.Certificate != "" {
		pair, err := tls.X509KeyPair([]byte(b.Certificate), []byte(b.Key))
		if err != nil {
			return nil, fmt.Errorf("gateway: the certificate to show to a service: %w", err)
		}
		// It is shown whatever CAs the service names: there is no other one, and a
		// service that does not accept it must say so.
		layer.config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	return layer, nil
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

// security is what the layer adds to a Transport.
func (t *tlsLayer) security() tunnel.Security {
	if t.config.GetClientCertificate != nil {
		return tunnel.Mutual
	}
	return tunnel.ServerVerified
}

// Handshake implements Layer.
func (t *tlsLayer) Handshake(ctx context.Context, c net.Conn, ep *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	return t.handshake(ctx, c, ep, t.config)
}

// handshake is Handshake by a copy of t.config.
func (t *tlsLayer) handshake(ctx context.Context, c net.Conn, ep *tunnel.Endpoint, config *tls.Config) (net.Conn, error) {
	s, err := termination.Client(ctx, c, config)
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
	if t.ownCAs {
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
