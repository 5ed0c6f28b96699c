package termination

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"culvert.dev/identity"
	"culvert.dev/tunnel"
)

// Keys are the certificates for terminating TLS, and the CAs for its clients. They are
// not changed once they are in use, but what their keys and trust have may be at any
// time: the next handshake has it.
type Keys struct {
	// Certificates has at least one. A client gets one with the name that it asks
	// for and that it can verify, or else the first.
	Certificates []*identity.Key

	// Names are the names for which TLS is terminated; empty means the names that the
	// certificates have, but no wildcards: a certificate for all names below a domain does
	// not mean that all of them are the gateway's. Keys of a Store, whose certificates may
	// be replaced, have no names here, and need not have those of Names.
	Names []tunnel.Pattern

	// Trust verifies the certificates of clients: see identity.Verifier. With none, no
	// client is asked for a certificate, and none has an identity.
	Trust []*identity.Trust

	// TrustDomains are those that clients may be of; empty means any that has a bundle.
	TrustDomains []string

	// Optional admits clients without a certificate. Unverified also admits those
	// whose certificate cannot be verified or has no identity. Both have none.
	Optional   bool
	Unverified bool

	MinVersion uint16 // 0 means TLS 1.3; 1.2 is the least
}

// A KeySet is Keys prepared for handshakes.
type KeySet struct {
	config   *tls.Config
	keys     []*identity.Key
	names    []tunnel.Pattern
	verifier *identity.Verifier // nil where no client is asked for a certificate
	optional bool               // clients that are not verified have no identity
	index    atomic.Pointer[keyIndex]
	cas      atomic.Pointer[caHint]
}

// A keyIndex has the certificates of a KeySet by their names, as they are at one moment.
type keyIndex struct {
	version uint64 // that of the keys
	exact   map[tunnel.Name][]*tls.Certificate
	wild    map[tunnel.Name][]*tls.Certificate // by the name after "*."
	first   *tls.Certificate                   // nil where there is none
	err     error                              // why a certificate is missing
}

// A caHint is the CAs that clients are told of.
type caHint struct {
	version uint64 // that of the trust
	pool    *x509.CertPool
}

// newKeySet checks and prepares k, for clients that may choose among alpn. With own,
// it owns the names of the certificates.
func newKeySet(k *Keys, alpn []string, own bool) (*KeySet, error) {
	if len(k.Certificates) == 0 {
		return nil, errors.New("termination: no certificate")
	}
	r := &KeySet{names: slices.Clone(k.Names), keys: k.Certificates, optional: k.Unverified}
	x := r.current()
	for _, k := range k.Certificates {
		c, err := k.Certificate()
		if err != nil {
			continue // it is not known yet, and has no names
		}
		leaf, err := identity.Leaf(c)
		if err == nil && own && k.Name() == "" {
			err = r.ownNames(leaf)
		}
		if err != nil {
			return nil, fmt.Errorf("termination: %w", err)
		}
	}
	fixed := !slices.ContainsFunc(k.Certificates, func(k *identity.Key) bool { return k.Name() != "" })
	for _, n := range k.Names {
		if fixed && x.err == nil && (n.Wildcard && x.wild[n.Suffix] == nil || !n.Wildcard && x.find(n.Suffix) == nil) {
			return nil, fmt.Errorf("termination: no certificate has the name %q", n)
		}
	}
	if len(k.Trust) == 0 && (k.Optional || k.Unverified) {
		return nil, errors.New("termination: optional client certificates, and no CA to verify certificates by")
	}
	for _, t := range k.Trust {
		b, err := t.Bundle()
		switch {
		case err != nil: // it is not known yet
		case b.TrustDomain != "" && !identity.IsTrustDomain(b.TrustDomain):
			return nil, fmt.Errorf("termination: %q is not a trust domain", b.TrustDomain)
		case len(b.Roots) == 0:
			return nil, fmt.Errorf("termination: trust %q has no CA to verify certificates by", t.Name())
		}
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
		// Small records at first would make several writes of a small answer.
		DynamicRecordSizingDisabled: true,
	}
	if len(k.Trust) > 0 {
		r.verifier = &identity.Verifier{Trust: k.Trust, Want: identity.Expectation{Usage: x509.ExtKeyUsageClientAuth, TrustDomains: k.TrustDomains}}
		r.config.ClientAuth = tls.RequireAnyClientCert
		if k.Optional || k.Unverified {
			r.config.ClientAuth = tls.RequestClientCert
		}
	}
	return r, nil
}

// configFor returns the configuration of one handshake. verified is called with the
// identity of a client that has one, before the handshake is complete: whoever calls
// must believe it only afterwards. shown is called with the certificate that such a client
// gets; for others it is not known.
//
// crypto/tls only asks for the certificate: it would verify it by all CAs alike.
func (r *KeySet) configFor(verified func(tunnel.Peer), shown func(*tls.Certificate)) *tls.Config {
	if r.verifier == nil {
		return r.config
	}
	cfg := r.config.Clone()
	cfg.ClientCAs = r.hint()
	cfg.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		c, err := r.certificate(hello)
		if err == nil {
			shown(c)
		}
		return c, err
	}
	cfg.VerifyConnection = func(cs tls.ConnectionState) error {
		if len(cs.PeerCertificates) == 0 {
			return nil // ClientAuth decides
		}
		peer, err := r.verifier.Verify(cs.PeerCertificates)
		switch {
		case err == nil:
			verified(peer)
		case !r.optional:
			return refuse("%w", err)
		}
		return nil
	}
	return cfg
}

// hint returns the CAs that clients are told of. They decide nothing.
func (r *KeySet) hint() *x509.CertPool {
	version := uint64(0)
	for _, t := range r.verifier.Trust {
		version += t.Generation()
	}
	if h := r.cas.Load(); h != nil && h.version == version {
		return h.pool
	}
	h := &caHint{version, x509.NewCertPool()}
	for _, t := range identity.Members(r.verifier.Trust) {
		if b, err := t.Bundle(); err == nil {
			for _, c := range b.Roots {
				h.pool.AddCert(c)
			}
		}
	}
	r.cas.Store(h)
	return h.pool
}

// current returns the index of the certificates as they are now.
func (r *KeySet) current() *keyIndex {
	version := uint64(0)
	for _, k := range r.keys {
		version += k.Generation()
	}
	if x := r.index.Load(); x != nil && x.version == version {
		return x
	}
	x := &keyIndex{version: version, exact: make(map[tunnel.Name][]*tls.Certificate), wild: make(map[tunnel.Name][]*tls.Certificate)}
	for _, k := range r.keys {
		c, err := k.Certificate()
		if err == nil {
			err = x.add(c)
		}
		if err != nil && x.err == nil {
			x.err = err
		}
	}
	r.index.Store(x)
	return x
}

// add lists a certificate by its names.
func (x *keyIndex) add(c *tls.Certificate) error {
	leaf, err := identity.Leaf(c)
	if err != nil {
		return err
	}
	if x.first == nil {
		x.first = c
	}
	for _, s := range leaf.DNSNames {
		p, err := tunnel.ParsePattern(s)
		switch {
		case err != nil: // no client can ask for it
		case p.Wildcard:
			x.wild[p.Suffix] = append(x.wild[p.Suffix], c)
		default:
			x.exact[p.Suffix] = append(x.exact[p.Suffix], c)
		}
	}
	return nil
}

// ownNames has r own the names of a certificate.
func (r *KeySet) ownNames(leaf *x509.Certificate) error {
	for _, s := range leaf.DNSNames {
		p, err := tunnel.ParsePattern(s)
		if err != nil {
			return fmt.Errorf("a name of a certificate: %w", err)
		}
		if !p.Wildcard {
			r.names = append(r.names, p)
		}
	}
	return nil
}

// find returns the certificates with the name n. A wildcard stands for one
// label, RFC 9525 section 6.3.
func (x *keyIndex) find(n tunnel.Name) []*tls.Certificate {
	if cs := x.exact[n]; cs != nil {
		return cs
	}
	if parent, ok := n.Parent(); ok {
		return x.wild[parent]
	}
	return nil
}

// certificate is tls.Config.GetCertificate.
func (r *KeySet) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	x := r.current()
	if x.first == nil {
		return nil, refuseKey(x.err)
	}
	name, err := tunnel.ParseName(hello.ServerName)
	if err != nil {
		return x.first, nil // there is no name: Hello refuses a malformed one
	}
	list := x.find(name)
	for _, c := range list {
		if hello.SupportsCertificate(c) == nil {
			return c, nil
		}
	}
	if len(list) > 0 {
		return list[0], nil
	}
	return x.first, nil
}

// refuse returns the error for a client that is not admitted.
func refuse(format string, args ...any) error {
	return tunnel.Refusef(tunnel.NoAuth, format, args...)
}

// refuseKey returns the error for a client to whom no certificate can be shown.
func refuseKey(err error) error {
	return tunnel.Refusef(tunnel.Internal, "termination: there is no certificate to show: %w", err)
}
