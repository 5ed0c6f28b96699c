package join

import (
	"crypto/x509"
	"errors"
	"slices"

	"culvert.dev/identity/bundle"
	"culvert.dev/registry/peer"
)

// Bundle returns the bundle of the site's own trust domain, and a number that grows with
// each change. It is peer.Peers.Bundle.
func (s *Site) Bundle() ([]byte, uint64) {
	s.mu.Lock()
	c := s.settings
	s.mu.Unlock()
	if c.Trust == "" {
		return nil, 0
	}
	t := s.Store.Trust(c.Trust)
	generation := t.Generation()
	b, err := t.Bundle()
	if err != nil {
		return nil, 0
	}
	doc, err := bundle.Marshal(b)
	if err != nil {
		return nil, 0
	}
	return doc, generation
}

// TrustGeneration is peer.Peers.TrustGeneration.
func (s *Site) TrustGeneration(c *peer.Config) uint64 {
	return s.Store.Trust(c.TrustDomain()).Generation()
}

// TakeBundle takes the bundle of a peer that has joined. It is peer.Peers.TakeBundle: a
// bundle that has no CA in common with the current one is taken only from a stream that
// the current one has verified.
func (s *Site) TakeBundle(c *peer.Config, doc []byte, verifiedBy uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := slices.IndexFunc(s.state.Peers, func(m member) bool { return m.Name == c.Name && m.trustDomain() == c.TrustDomain() })
	if at < 0 || s.Knows != nil && s.Knows(c.TrustDomain()) {
		return nil // its trust is the configuration's
	}
	b, err := bundle.Parse(c.TrustDomain(), doc)
	if err != nil {
		return err
	}
	t := s.Store.Trust(c.TrustDomain())
	now, err := t.Bundle()
	if err != nil {
		return err
	}
	before, err := bundle.Marshal(now)
	if err != nil {
		return err
	}
	after, err := bundle.Marshal(b)
	if err != nil {
		return err
	}
	if string(before) == string(after) {
		return nil
	}
	overlap := slices.ContainsFunc(b.Roots, func(ca *x509.Certificate) bool { return slices.ContainsFunc(now.Roots, ca.Equal) })
	if !overlap && t.Generation() != verifiedBy {
		return errors.New("it has no CA in common with the one that is trusted: join again")
	}
	next := s.state
	next.Peers = slices.Clone(next.Peers)
	next.Peers[at].Bundle = after
	if err := s.save(next); err != nil {
		return err
	}
	s.publish()
	s.log().Info("trust bundle of a peer has changed", "peer", c.Name, "cas", len(b.Roots))
	return nil
}
