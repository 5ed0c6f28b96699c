package join

import (
	"bufio"
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"culvert.dev/identity"
	"culvert.dev/identity/bundle"
	"culvert.dev/internal/invitation"
	"culvert.dev/registry/peer"
	"culvert.dev/tunnel"
)

// Join joins the site that has made a token, by connections of dialer. That site may offer
// names of zones. It returns the name of the peer.
func (s *Site) Join(ctx context.Context, dialer tunnel.Dialer, text string, zones []string) (name string, err error) {
	t, err := parseToken(text, time.Now())
	if err != nil {
		return "", err
	}
	if _, err := ParseZones(zones); err != nil {
		return "", err
	}
	s.retry()
	s.mu.Lock()
	settings, err := s.settings, s.usable()
	s.mu.Unlock()
	if err != nil {
		return "", err
	}
	chain, doc, err := s.own(&settings)
	if err != nil {
		return "", err
	}
	cert, err := s.Store.Key(settings.Key).Certificate()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, invitation.Timeout)
	defer cancel()
	c, state, err := t.Dial(ctx, dialer, Host)
	if err != nil {
		return "", err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if err := s.mayJoin(state.PeerCertificates[0], zones); err != nil {
		return "", err // before the token is used
	}
	binding, err := state.ExportKeyingMaterial(exporter, nil, 32)
	if err != nil {
		return "", err
	}
	q := request{Version: version, Secret: t.Secret, Site: settings.Name, Zones: t.Zones, Bundle: doc, Domain: settings.Trust, Gateways: s.gateways(&settings)}
	for _, link := range chain {
		q.Chain = append(q.Chain, link.Raw)
	}
	line, err := json.Marshal(&q)
	if err != nil {
		return "", err
	}
	line = append(line, '\n')
	var p proof
	if p.Signature, err = sign(cert.PrivateKey, signed(binding, line)); err != nil {
		return "", err
	}
	second, err := json.Marshal(&p)
	if err != nil {
		return "", err
	}
	if _, err := c.Write(slices.Concat(line, second, []byte{'\n'})); err != nil {
		return "", fmt.Errorf("the gateway at %s takes no request: %w", t.Address, err)
	}
	var a answer
	if _, err := invitation.ReadMessage(bufio.NewReader(c), &a); err != nil {
		return "", fmt.Errorf("the gateway at %s gives no answer: %w; see whether it knows this site by now", t.Address, err)
	}
	if a.Error != "" {
		return "", fmt.Errorf("the other site refuses: %s", clip(a.Error))
	}
	m, err := a.member(state.PeerCertificates, zones)
	if err != nil {
		return "", fmt.Errorf("the other site has stored this one, and its answer can't be used: %w; remove this site there", err)
	}
	m.Entrance = &peer.Gateway{Address: t.Address, Transports: []string{t.Transport}}
	s.mu.Lock()
	next := s.state
	err = s.add(&next, m)
	s.mu.Unlock()
	if err != nil {
		return "", fmt.Errorf("the other site has stored this one, and this one can't store it: %w; remove this site there, and join by another token", err)
	}
	s.log().Info("joined a site", "peer", m.Name, "gateway", t.Address)
	s.changed()
	return m.Name, nil
}

// mayJoin returns why this site cannot join the one whose gateway shows leaf, and which may offer
// names of zones, as far as that is known before anything is sent. The trust domain is not
// verified yet.
func (s *Site) mayJoin(leaf *x509.Certificate, zones []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(leaf.URIs) == 1 { // else what it answers is verified
		if domain, _, err := identity.ParseSPIFFEID(leaf.URIs[0].String()); err == nil {
			if err := s.checkDomain(domain); err != nil {
				return err
			}
		}
	}
	offers, err := ParseZones(zones)
	if err != nil {
		return err
	}
	for _, c := range slices.Concat(s.configured(), s.peers()) {
		for i := range c.Zones {
			at := slices.IndexFunc(offers, func(zone tunnel.Pattern) bool { return c.Network == "" && peer.Overlap(zone, c.Zones[i]) })
			if at >= 0 {
				return fmt.Errorf("the other site can't get the zone %q: peer %q has %q already, and a name has one peer", offers[at], c.Name, c.Zones[i])
			}
		}
	}
	// A disk that is full or can't be written is found out before the other side has stored this
	// one, and the token is used up.
	if err := s.save(s.state); err != nil {
		return fmt.Errorf("site.state can't be written, and the token is not used: %w", err)
	}
	return nil
}

// member returns the site that has sent a, and has shown a chain.
func (a *answer) member(chain []*x509.Certificate, zones []string) (*member, error) {
	if a.Version != version {
		return nil, fmt.Errorf("it is of version %d, and this culvert knows version %d", a.Version, version)
	}
	b, err := bundle.Parse(a.Domain, a.Bundle)
	if err != nil {
		return nil, err
	}
	who, err := verify(b, chain, x509.ExtKeyUsageServerAuth)
	if err != nil {
		return nil, fmt.Errorf("its bundle does not verify its gateway: %w", err)
	}
	m := &member{Name: a.Site, ID: who.ID, Bundle: json.RawMessage(bytes.Clone(a.Bundle)), Zones: zones, Gateways: a.Gateways, Joined: time.Now().UTC()}
	return m, m.check()
}
