package identity

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"sync/atomic"
)

// ErrNotConfigured is for Remove, of a key or trust that an operator has taken out of the
// configuration. What was verified by that trust counts no more.
var ErrNotConfigured = errors.New("it is no longer in the configuration")

// An evidence is the chain that a peer was verified by. It implements tunnel.Evidence: a
// revocation list that has one of the certificates, and trust that is no longer configured,
// take back what the chain has proved. That a CA is replaced, that a certificate expires and
// that a list is out of date does not: those refuse the next handshake.
type evidence struct {
	trust  []*Trust            // of the Verifier
	domain string              // of the bundles that count; "" for those of no trust domain
	chain  []*x509.Certificate // verified, leaf first; the TLS connection has them, too
	held   atomic.Uint64       // the version of trust by which nothing was taken back
}

// Revoked implements tunnel.Evidence.
func (e *evidence) Revoked() error {
	version := uint64(0)
	for _, t := range e.trust {
		version += t.Generation()
	}
	if e.held.Load() == version {
		return nil
	}
	if err := e.check(); err != nil {
		return err
	}
	e.held.Store(version)
	return nil
}

func (e *evidence) check() error {
	var gone, listed error
	unknown, root := false, e.chain[len(e.chain)-1]
	for _, t := range e.trust {
		b, err := t.Bundle()
		switch {
		case errors.Is(err, ErrNotConfigured):
			gone = err
		case err != nil:
			unknown = true
		case b.TrustDomain != e.domain:
		default:
			unknown = true
			p := b.prepare()
			if err := p.listed(e.chain); err != nil {
				listed = err
			} else if p.has(root) {
				return nil
			}
		}
	}
	switch {
	case listed != nil:
		return listed
	case gone != nil && !unknown:
		return fmt.Errorf("the certificate was verified by trust that is taken away: %w", gone)
	}
	return nil
}

// has reports whether c is one of the roots.
func (p *prepared) has(c *x509.Certificate) bool {
	for _, r := range p.all {
		if bytes.Equal(r.Raw, c.Raw) {
			return true
		}
	}
	return false
}

// listed returns an error if one of a verified chain is on a list of its issuer.
func (p *prepared) listed(chain []*x509.Certificate) error {
	if p.lists == nil {
		return nil
	}
	for i, c := range chain[:len(chain)-1] {
		for r, err := range p.listsOf(c, chain[i+1]) {
			if err == nil && r.has(c) {
				return errRevoked(c, chain[i+1])
			}
		}
	}
	return nil
}
