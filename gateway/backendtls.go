package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"culvert.dev/connect/proxyproto"
	"culvert.dev/registry"
	"culvert.dev/termination"
	"culvert.dev/tunnel"
)

// A tlsDialer speaks TLS to what another way leads to. What can't be verified is
// no connection: nothing of the client's goes there in any other way.
type tlsDialer struct {
	way tunnel.Dialer // to endpoints, of a request if it can
	*backendTLS
}

// A backendTLS is a registry.BackendTLS made ready.
type backendTLS struct {
	config *tls.Config
	sans   []string
}

// maxTLSSeen is how many places in tables are known. Tables of the past are
// among them, and each holds its certificates.
const maxTLSSeen = 4096

// backendTLS makes b ready. Those that are equal share one.
func (d *Dialers) backendTLS(b *registry.BackendTLS) (*backendTLS, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if ready, ok := d.tlsSeen[b]; ok { // a table never changes
		return ready, nil
	}
	key := fmt.Sprintf("%q %q %q %q %q", b.ServerName, b.Roots, b.SANs, b.Certificate, string(b.Key))
	ready, ok := d.tls[key]
	if !ok {
		var err error
		if ready, err = newBackendTLS(b); err != nil {
			return nil, err
		}
		if d.tls == nil || len(d.tls) >= maxMade {
			d.tls = make(map[string]*backendTLS)
		}
		d.tls[key] = ready
	}
	if d.tlsSeen == nil || len(d.tlsSeen) >= maxTLSSeen {
		d.tlsSeen = make(map[*registry.BackendTLS]*backendTLS)
	}
	d.tlsSeen[b] = ready
	return ready, nil
}

func newBackendTLS(b *registry.BackendTLS) (*backendTLS, error) {
	if b.ServerName == "" {
		return nil, errors.New("gateway: TLS to a service needs a server name")
	}
	t := &backendTLS{config: &tls.Config{ServerName: b.ServerName, MinVersion: tls.VersionTLS12}, sans: b.SANs}
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
		// Whatever CAs the service names: it is the one there is, and who does
		// not get it must say so.
		t.config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	if len(t.sans) > 0 {
		// crypto/tls would want the server name in the certificate, which is for
		// the hello only here. All it would look at else is looked at by verify.
		t.config.InsecureSkipVerify = true
		t.config.VerifyConnection = t.verify
	}
	return t, nil
}

// verify is what crypto/tls does, with the SANs in place of the server name.
func (t *backendTLS) verify(cs tls.ConnectionState) error {
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

// hasSAN reports whether a certificate has a name. A URI is compared byte by
// byte, as RFC 3986 section 6.2.1 and SPIFFE do; a DNS name with a wildcard is
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
	const most = 10
	has := slices.Clone(e.leaf.DNSNames)
	for _, u := range e.leaf.URIs {
		has = append(has, u.String())
	}
	return fmt.Sprintf("its certificate has none of the names %q, it has %q", e.want, has[:min(len(has), most)])
}

// Check returns nil if ep may be dialed, as a tunnel.NetDialer does.
func (d *tlsDialer) Check(ep tunnel.Endpoint) error {
	if c, ok := d.way.(interface{ Check(tunnel.Endpoint) error }); ok {
		return c.Check(ep)
	}
	return nil
}

// dialFor has way dial ep on behalf of req, as a Router does.
func dialFor(ctx context.Context, way tunnel.Dialer, ep tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	switch way := way.(type) {
	case interface {
		DialRequest(context.Context, tunnel.Endpoint, *tunnel.Request) (net.Conn, error)
	}:
		return way.DialRequest(ctx, ep, req)
	case proxyproto.EndpointDialer:
		return way.DialEndpoint(ctx, ep)
	}
	tunnel.WillWait(ctx)
	return way.DialContext(ctx, "tcp", ep.Addr.String())
}

// DialRequest dials ep on behalf of req and has TLS begin there.
func (d *tlsDialer) DialRequest(ctx context.Context, ep tunnel.Endpoint, req *tunnel.Request) (c net.Conn, err error) {
	if c, err = dialFor(ctx, d.way, ep, req); err != nil {
		return nil, err
	}
	return d.begin(ctx, c, ep.String())
}

// DialContext implements tunnel.Dialer.
func (d *tlsDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := d.way.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return d.begin(ctx, c, addr)
}

// begin has TLS begin on c, and closes c where it does not.
func (d *tlsDialer) begin(ctx context.Context, c net.Conn, to string) (net.Conn, error) {
	tunnel.WillWait(ctx) // for the service, and for what its signature takes to verify
	s, err := termination.Begin(ctx, c, d.config)
	if err == nil {
		return s, nil
	}
	why := tunnel.DialFailed
	if ctx.Err() != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		why, err = tunnel.DialTimeout, errors.New("it is not complete in time")
	}
	return nil, &tunnel.Error{Reason: why, Err: fmt.Errorf("TLS handshake with %s as %q: %w", to, d.config.ServerName, d.explain(err))}
}

// explain says which check has failed.
func (d *tlsDialer) explain(err error) error {
	by := "the CAs of the system"
	if d.config.RootCAs != nil {
		by = "the CAs that are configured for it"
	}
	var (
		unknown x509.UnknownAuthorityError
		host    x509.HostnameError
		invalid x509.CertificateInvalidError
		op      *net.OpError
	)
	switch {
	case errors.As(err, &unknown):
		return fmt.Errorf("its certificate is not signed by any of %s: %w", by, err)
	case errors.As(err, &host):
		return fmt.Errorf("its certificate is for other names: %w", err)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Errorf("its certificate is not valid now: %w", err)
	case errors.As(err, &op) && op.Op == "remote error":
		return fmt.Errorf("the service refuses it: %w", err)
	}
	return err
}
