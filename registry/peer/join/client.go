package join

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/identity/bundle"
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
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	c, state, err := t.dial(ctx, dialer)
	if err != nil {
		return "", err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
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
	if _, err := readMessage(bufio.NewReader(c), &a); err != nil {
		return "", fmt.Errorf("the gateway at %s gives no answer: %w; see whether it knows this site by now", t.Address, err)
	}
	if a.Error != "" {
		return "", fmt.Errorf("the other site refuses: %s", clip(a.Error))
	}
	m, err := a.member(state.PeerCertificates, zones)
	if err != nil {
		return "", fmt.Errorf("the other site has stored this one, and its answer can't be used: %w", err)
	}
	m.Entrance = &peer.Gateway{Address: t.Address, Transports: []string{t.Transport}}
	s.mu.Lock()
	next := s.state
	err = s.add(&next, m)
	s.mu.Unlock()
	if err != nil {
		return "", fmt.Errorf("the other site has stored this one, and this one can't store it: %w", err)
	}
	s.log().Info("joined a site", "peer", m.Name, "gateway", t.Address)
	s.changed()
	return m.Name, nil
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

// errPin is of a gateway that is another one than that of the token.
var errPin = errors.New("the gateway has another key than the one that the token names: it is not the one that has invited, or its key was replaced since; nothing was sent to it")

// dial opens a stream to the gateway of t, whose public key is verified before anything is
// sent.
func (t *token) dial(ctx context.Context, dialer tunnel.Dialer) (net.Conn, *tls.ConnectionState, error) {
	host, _, _ := net.SplitHostPort(t.Address)
	var state *tls.ConnectionState
	var wrong error
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: host,
		InsecureSkipVerify: true, // VerifyConnection verifies, by the public key
		VerifyConnection: func(cs tls.ConnectionState) error {
			spki := sha256.Sum256(cs.PeerCertificates[0].RawSubjectPublicKeyInfo)
			if subtle.ConstantTimeCompare(spki[:], t.SPKI) != 1 {
				wrong = errPin
				return errPin
			}
			return nil
		},
	}
	note := func(_ context.Context, cs *tls.ConnectionState) (connect.Fields, error) {
		state = cs
		return nil, nil
	}
	var d tunnel.Dialer
	if t.Transport == "connect" {
		d = &connect.Dialer{Proxy: t.Address, Dialer: dialer, TLS: cfg, SessionHeader: note}
	} else {
		two := &h2.Dialer{Proxy: t.Address, Dialer: dialer, TLS: cfg, SessionHeader: note}
		d = two
		context.AfterFunc(ctx, func() { _ = two.Close() })
	}
	c, err := d.DialContext(ctx, "tcp", Host+":443")
	switch {
	case wrong != nil:
		return nil, nil, wrong
	case err != nil:
		return nil, nil, fmt.Errorf("the gateway at %s can't be asked: %w", t.Address, err)
	case state == nil:
		_ = c.Close()
		return nil, nil, errors.New("the gateway speaks no TLS")
	}
	return c, state, nil
}
