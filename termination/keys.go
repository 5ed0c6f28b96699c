package termination

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"

	"culvert.dev/tunnel"
)

// Keys are what TLS is ended with. Neither they nor what they point to are
// changed once they are in use.
type Keys struct {
	// Certificates are at least one. A client is shown the one that has the
	// name it asks for and that it can verify, or else the first.
	Certificates []tls.Certificate

	// Names are those that end here; empty means the names of the
	// certificates, without wildcards: that one could speak for every name
	// below a domain does not mean that one wants to.
	Names []tunnel.Pattern

	// ClientCAs verify the certificates of clients, whatever identity these
	// have. Trust does so by trust domain: a client must have a SPIFFE id, and
	// its certificate must be signed by a CA that is listed for the trust domain
	// of this id, so that no CA can speak for the domain of another. One of the
	// two may be set; with neither, no client is asked for a certificate, and
	// nobody has an identity.
	ClientCAs *x509.CertPool
	Trust     map[string][]*x509.Certificate

	// Optional lets clients come without a certificate. Unverified also lets
	// those come whose certificate can't be verified, or tells of nobody in
	// particular; they have no identity.
	Optional   bool
	Unverified bool

	MinVersion uint16 // 0 means TLS 1.3; 1.2 is the least
}

// A ring is Keys made ready for use.
type ring struct {
	config *tls.Config
	verify func(*tls.ConnectionState) // of Unverified: finds the chains that crypto/tls did not look for
	names  []tunnel.Pattern
	exact  map[tunnel.Name][]*tls.Certificate
	wild   map[tunnel.Name][]*tls.Certificate // by what is behind "*."
	first  *tls.Certificate
}

// newRing checks k and makes it a ring. The inner protocols are told by alpn.
func newRing(k *Keys, alpn []string) (*ring, error) {
	return makeRing(k, alpn, len(k.Names) == 0)
}

// makeRing is newRing; with own, what the certificates name ends here.
func makeRing(k *Keys, alpn []string, own bool) (*ring, error) {
	if len(k.Certificates) == 0 {
		return nil, errors.New("termination: no certificate")
	}
	r := &ring{
		names: slices.Clone(k.Names), first: &k.Certificates[0],
		exact: make(map[tunnel.Name][]*tls.Certificate), wild: make(map[tunnel.Name][]*tls.Certificate),
	}
	for i := range k.Certificates {
		if err := r.add(&k.Certificates[i], own); err != nil {
			return nil, err
		}
	}
	for _, n := range k.Names {
		if n.Wildcard && r.wild[n.Suffix] == nil || !n.Wildcard && r.find(n.Suffix) == nil {
			return nil, fmt.Errorf("termination: no certificate has the name %q", n)
		}
	}
	trust, roots, err := newTrust(k)
	if err != nil {
		return nil, err
	}
	if roots == nil && (k.Optional || k.Unverified) {
		return nil, errors.New("termination: optional client certificates, and no CA to verify certificates by")
	}
	least := k.MinVersion
	if least == 0 {
		least = tls.VersionTLS13
	}
	if least < tls.VersionTLS12 {
		return nil, fmt.Errorf("termination: %s is too old, TLS 1.2 is the least", tls.VersionName(least))
	}
	r.config = &tls.Config{
		MinVersion:     least,
		NextProtos:     alpn,
		GetCertificate: r.certificate,
		// A ticket would carry an identity past a change of CAs, and tunnels
		// are long enough for a whole handshake each.
		SessionTicketsDisabled: true,
	}
	if roots != nil {
		r.config.ClientCAs = roots
		r.config.ClientAuth = tls.RequireAndVerifyClientCert
		if k.Optional {
			r.config.ClientAuth = tls.VerifyClientCertIfGiven
		}
		if k.Unverified {
			r.config.ClientAuth = tls.RequestClientCert
			r.verify = func(cs *tls.ConnectionState) { verifyClient(cs, roots, trust) }
			return r, nil
		}
		r.config.VerifyConnection = func(cs tls.ConnectionState) error {
			_, err := peerOf(&cs, trust)
			return err
		}
	}
	return r, nil
}

// add lists a certificate by its names; with own, those end here.
func (r *ring) add(c *tls.Certificate, own bool) error {
	leaf := c.Leaf
	if leaf == nil {
		if len(c.Certificate) == 0 {
			return errors.New("termination: a certificate is empty")
		}
		var err error
		if leaf, err = x509.ParseCertificate(c.Certificate[0]); err != nil {
			return fmt.Errorf("termination: %w", err)
		}
	}
	for _, s := range leaf.DNSNames {
		p, err := tunnel.ParsePattern(s)
		switch {
		case err != nil && own:
			return fmt.Errorf("termination: a name of a certificate: %w", err)
		case err != nil: // nobody can ask for it
		case p.Wildcard:
			r.wild[p.Suffix] = append(r.wild[p.Suffix], c)
		default:
			r.exact[p.Suffix] = append(r.exact[p.Suffix], c)
			if own {
				r.names = append(r.names, p)
			}
		}
	}
	return nil
}

// owns reports whether TLS for n ends here.
func (r *ring) owns(n tunnel.Name) bool {
	return slices.ContainsFunc(r.names, func(p tunnel.Pattern) bool { return p.Matches(n) })
}

// find returns the certificates with the name n. A wildcard stands for one
// label, RFC 9525 section 6.3.
func (r *ring) find(n tunnel.Name) []*tls.Certificate {
	if cs := r.exact[n]; cs != nil {
		return cs
	}
	if parent, ok := n.Parent(); ok {
		return r.wild[parent]
	}
	return nil
}

// certificate is tls.Config.GetCertificate.
func (r *ring) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	name, err := tunnel.ParseName(hello.ServerName)
	if err != nil {
		return r.first, nil // it names nobody: what names are wrong, Hello has judged
	}
	list := r.find(name)
	for _, c := range list {
		if hello.SupportsCertificate(c) == nil {
			return c, nil
		}
	}
	if len(list) > 0 {
		return list[0], nil
	}
	return r.first, nil
}

// Config returns what k means to crypto/tls, for whoever ends TLS in another
// way than a Protocol. Who the client is says PeerOf, which has been asked when
// the handshake is complete.
func (k *Keys) Config(alpn ...string) (*tls.Config, error) {
	r, err := newRing(k, alpn)
	if err != nil {
		return nil, err
	}
	return r.config, nil
}
