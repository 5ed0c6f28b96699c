package join

import (
	"bufio"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"culvert.dev/identity/bundle"
	"culvert.dev/internal/invitation"
	"culvert.dev/registry/peer"
	"culvert.dev/tunnel"
)

// Host is the name at which gateways are joined.
const Host = "join.culvert.alt"

// version is that of the messages.
const version = 1

const (
	maxChain = 8
	exporter = "EXPORTER-culvert-join"
)

// A request is the one line that the joining site sends, and proof the second one.
type request struct {
	Version  int             `json:"version"`
	Secret   []byte          `json:"secret"`
	Site     string          `json:"site"`
	Zones    []string        `json:"zones"` // that it wants to offer names of
	Bundle   json.RawMessage `json:"bundle"`
	Domain   string          `json:"trustDomain"`
	Chain    [][]byte        `json:"chain"` // its certificate, DER, the leaf first
	Gateways []peer.Gateway  `json:"gateways,omitempty"`
}

// A proof is a signature, by the key of the certificate, over the TLS session and the line
// before.
type proof struct {
	Signature []byte `json:"signature"`
}

// An answer is what the site says that was joined.
type answer struct {
	Version  int             `json:"version"`
	Error    string          `json:"error,omitempty"` // why not
	Site     string          `json:"site,omitempty"`
	Bundle   json.RawMessage `json:"bundle,omitempty"`
	Domain   string          `json:"trustDomain,omitempty"`
	Gateways []peer.Gateway  `json:"gateways,omitempty"`
}

// signed is what a proof signs.
func signed(binding, line []byte) []byte {
	sum := sha256.Sum256(line)
	return slices.Concat([]byte("culvert join 1\x00"), binding, sum[:])
}

// sign signs data with a private key.
func sign(key crypto.PrivateKey, data []byte) ([]byte, error) {
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("a key of the type %T cannot sign", key)
	}
	if _, ok := signer.Public().(ed25519.PublicKey); ok {
		return signer.Sign(rand.Reader, data, crypto.Hash(0))
	}
	sum := sha256.Sum256(data)
	return signer.Sign(rand.Reader, sum[:], crypto.SHA256)
}

// checkSignature returns an error unless the key of leaf has signed data.
func checkSignature(leaf *x509.Certificate, data, signature []byte) error {
	switch leaf.PublicKey.(type) {
	case *ecdsa.PublicKey:
		return leaf.CheckSignature(x509.ECDSAWithSHA256, data, signature)
	case *rsa.PublicKey:
		return leaf.CheckSignature(x509.SHA256WithRSA, data, signature)
	case ed25519.PublicKey:
		return leaf.CheckSignature(x509.PureEd25519, data, signature)
	}
	return errors.New("its key is of an unknown kind")
}

// ServeTunnel implements tunnel.Handler: it serves the stream of a site that joins.
func (s *Site) ServeTunnel(ctx context.Context, req *tunnel.Request) { s.Serve(ctx, req, req.Refuse) }

// Serve is ServeTunnel, and refuses by refuse.
func (s *Site) Serve(ctx context.Context, req *tunnel.Request, refuse func(error)) {
	s.mu.Lock()
	err := s.usable()
	s.mu.Unlock()
	if err != nil {
		refuse(tunnel.Refusef(tunnel.Denied, "join: %w", err))
		return
	}
	s.server.Serve(ctx, req, refuse, "join", func(r *bufio.Reader) (any, bool) {
		var a *answer
		var name string
		binding, err := req.TLS.Exporter(exporter, nil, 32)
		if err == nil {
			a, name, err = s.admit(r, binding)
		}
		if err != nil {
			s.log().Warn("a site could not join", "source", req.Source.String(), "error", err.Error())
			return &answer{Version: version, Error: err.Error()}, true
		}
		s.log().Info("a site has joined", "peer", name, "source", req.Source.String())
		s.changed()
		return a, false
	})
}

// errSecret is the answer to any secret that does not work.
var errSecret = errors.New("the token is not known here, was used already, or has expired")

// admit reads the request of a site, and stores it as a peer.
func (s *Site) admit(r *bufio.Reader, binding []byte) (a *answer, name string, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = tunnel.Caught(v)
		}
	}()
	var q request
	var p proof
	line, err := invitation.ReadMessage(r, &q)
	if err == nil {
		_, err = invitation.ReadMessage(r, &p)
	}
	if err != nil {
		return nil, "", err
	}
	m, err := q.member(line, binding, p.Signature)
	s.mu.Lock()
	defer s.mu.Unlock()
	// The secret comes first: others are told nothing of what else is wrong.
	hash := invitation.HashOf(q.Secret)
	at := slices.IndexFunc(s.state.Invitations, func(i invited) bool { return i.Hash == hash })
	if at < 0 || !s.state.Invitations[at].Valid(time.Now()) {
		return nil, "", errSecret
	}
	if err != nil {
		return nil, "", err
	}
	for _, zone := range q.Zones {
		if !slices.Contains(s.state.Invitations[at].Zones, zone) {
			return nil, "", fmt.Errorf("the invitation does not have the zone %q", clip(zone))
		}
	}
	_, doc, err := s.own(&s.settings)
	if err != nil {
		return nil, "", errors.New("the site that is joined has no certificate or no bundle")
	}
	next := s.state
	next.Invitations = slices.Clone(next.Invitations)
	next.Invitations[at].Used = time.Now().UTC()
	if err := s.add(&next, m); err != nil {
		return nil, "", err
	}
	return &answer{Version: version, Site: s.settings.Name, Bundle: doc, Domain: s.settings.Trust, Gateways: s.gateways(&s.settings)}, m.Name, nil
}

// member returns the peer that sends q, whose line is signed.
func (q *request) member(line, binding, signature []byte) (*member, error) {
	if q.Version != version {
		return nil, fmt.Errorf("the request is of version %d, and this culvert knows version %d", q.Version, version)
	}
	if len(q.Chain) == 0 || len(q.Chain) > maxChain || len(q.Gateways) > peer.MaxGateways {
		return nil, errors.New("the request is malformed")
	}
	b, err := bundle.Parse(q.Domain, q.Bundle)
	if err != nil {
		return nil, err
	}
	var chain []*x509.Certificate
	for _, der := range q.Chain {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, errors.New("a certificate in the request is malformed")
		}
		chain = append(chain, c)
	}
	who, err := verify(b, chain, x509.ExtKeyUsageClientAuth)
	if err != nil {
		return nil, fmt.Errorf("the bundle does not verify the joining gateway: %w", err)
	}
	if err := checkSignature(chain[0], signed(binding, line), signature); err != nil {
		return nil, errors.New("the joining gateway does not have the key of its certificate, or the request is from another session")
	}
	m := &member{Name: q.Site, ID: who.ID, Bundle: q.Bundle, Zones: q.Zones, Gateways: q.Gateways, Joined: time.Now().UTC()}
	return m, m.check()
}

// check returns why m cannot be a peer of anybody.
func (m *member) check() error {
	if n, err := tunnel.ParseName(m.Name); err != nil || n.String() != m.Name || strings.Contains(m.Name, ".") {
		return fmt.Errorf("the site calls itself %q, which is not one label: set cluster there", clip(m.Name))
	}
	_, err := m.config(&Settings{})
	return err
}

// add stores m, with all else of next. It is called with s.mu held.
func (s *Site) add(next *state, m *member) error {
	if m.Name == s.settings.Name {
		return fmt.Errorf("both sites call themselves %q", m.Name)
	}
	if err := s.checkDomain(m.trustDomain()); err != nil {
		return err
	}
	c, err := m.config(&s.settings)
	if err != nil {
		return err
	}
	if err := peer.Check(slices.Concat(s.configured(), s.peers(), []peer.Config{c})); err != nil {
		return err
	}
	next.Peers = append(slices.Clone(next.Peers), *m)
	if err := s.save(*next); err != nil {
		return fmt.Errorf("it cannot be stored: %w", err)
	}
	s.publish()
	return nil
}

// checkDomain returns why no site of a trust domain can be one more peer. It is called with s.mu
// held.
func (s *Site) checkDomain(domain string) error {
	at := slices.IndexFunc(s.state.Peers, func(o member) bool { return o.trustDomain() == domain })
	switch {
	case domain == s.settings.Trust:
		return fmt.Errorf("both sites are of trust domain %q", domain)
	case s.Knows != nil && s.Knows(domain):
		return fmt.Errorf("trust domain %q is configured already", domain)
	case at >= 0:
		return fmt.Errorf("peer %q of trust domain %q has joined already: to have it join again, run \"culvert peers remove %s\" at the gateway first", s.state.Peers[at].Name, domain, s.state.Peers[at].Name)
	case len(s.state.Peers) >= maxPeers:
		return fmt.Errorf("there are %d peers already", maxPeers)
	}
	return nil
}
