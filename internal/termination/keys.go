package termination

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"

	"culvert.dev/tunnel"
)

// Keys are the certificates for terminating TLS, and the CAs for its clients. Neither
// they nor what they point to may change once they are in use.
type Keys struct {
	// Certificates has at least one. A client gets one with the name that it asks
	// for and that it can verify, or else the first.
	Certificates []tls.Certificate

	// Names are the names for which TLS is terminated; empty means the names of the
	// certificates, but no wildcards: a certificate for all names below a domain
	// does not mean that all of them are the gateway's.
	Names []tunnel.Pattern

	// ClientCAs verify the certificates of clients, with any identity. Trust does so
	// by trust domain: a client must have a SPIFFE id, and its certificate must be
	// signed by a CA that is listed for the trust domain of this id, so that no CA
	// can speak for the domain of another. At most one of the two may be set; with
	// neither, no client is asked for a certificate, and none has an identity.
	ClientCAs *x509.CertPool
	Trust     map[string][]*x509.Certificate

	// Optional admits clients without a certificate. Unverified also admits those
	// whose certificate cannot be verified or has no identity. Both have none.
	Optional   bool
	Unverified bool

	MinVersion uint16 // 0 means TLS 1.3; 1.2 is the least
}

// A KeySet is Keys prepared for handshakes.
type KeySet struct {
	config *tls.Config
	verify func(*tls.ConnectionState) // for Unverified: finds the chains that crypto/tls did not verify
	names  []tunnel.Pattern
	exact  map[tunnel.Name][]*tls.Certificate
	wild   map[tunnel.Name][]*tls.Certificate // by the name after "*."
	first  *tls.Certificate
}

// newKeySet checks and prepares k, for clients that may choose among alpn. With own,
// it owns the names of the certificates.
func newKeySet(k *Keys, alpn []string, own bool) (*KeySet, error) {
	if len(k.Certificates) == 0 {
		return nil, errors.New("termination: no certificate")
	}
	r := &KeySet{
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

// add lists a certificate by its names; with own, the KeySet owns them.
func (r *KeySet) add(c *tls.Certificate, own bool) error {
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
		case err != nil: // no client can ask for it
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

// find returns the certificates with the name n. A wildcard stands for one
// label, RFC 9525 section 6.3.
func (r *KeySet) find(n tunnel.Name) []*tls.Certificate {
	if cs := r.exact[n]; cs != nil {
		return cs
	}
	if parent, ok := n.Parent(); ok {
		return r.wild[parent]
	}
	return nil
}

// certificate is tls.Config.GetCertificate.
func (r *KeySet) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	name, err := tunnel.ParseName(hello.ServerName)
	if err != nil {
		return r.first, nil // there is no name: Hello refuses a malformed one
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
