package join

import (
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"culvert.dev/identity"
	"culvert.dev/identity/bundle"
	"culvert.dev/internal/invitation"
	"culvert.dev/registry"
	"culvert.dev/registry/peer"
	"culvert.dev/tunnel"
)

// TrustName is the name in an identity.Store of the trust in all peers that have joined.
const TrustName = "peers"

// Settings are what a site is to others.
type Settings struct {
	Name     string         // that it calls itself, one label; peers call it so
	Gateways []peer.Gateway // as others reach them; none where they cannot be reached
	Key      string         // of the Store, with a SPIFFE id: what its gateways show
	Trust    string         // its own trust domain
	State    string         // the folder where peers and invitations are kept
}

// A Site has the peers that have joined by a token, and the invitations. It is safe for
// concurrent use.
type Site struct {
	Store *identity.Store

	// Configured returns the peers of the configuration, and Knows whether the configuration
	// has trust of that name: neither may be joined again.
	Configured func() []peer.Config
	Knows      func(trustDomain string) bool

	// Gateways returns Settings.Gateways as others reach them now; nil means as they are.
	Gateways func() []peer.Gateway

	Changed func()       // there are other peers. May be nil
	Log     *slog.Logger // nil discards

	mu       sync.Mutex // guards what follows
	settings Settings
	file     *invitation.File // of state; nil for none
	state    state
	failed   error    // why the state can't be used; nil if it can
	group    []string // trust domains in TrustName

	server invitation.Server
}

// A state is what is kept on disk.
type state struct {
	Version     int       `json:"version"`
	Peers       []member  `json:"peers"`
	Invitations []invited `json:"invitations"`
}

// stateVersion is that of the file.
const stateVersion = 1

// A member is a peer that has joined.
type member struct {
	Name     string          `json:"name"`
	ID       string          `json:"id"` // of its gateways
	Bundle   json.RawMessage `json:"bundle"`
	Zones    []string        `json:"zones"`
	Gateways []peer.Gateway  `json:"gateways,omitempty"` // as it says itself
	Entrance *peer.Gateway   `json:"entrance,omitempty"` // where we have joined it, as the operator said
	Joined   time.Time       `json:"joined"`
}

// An invited is a token that somebody has. Who reads it can't join by it.
type invited struct {
	invitation.Record
	Zones []string `json:"zones"`
}

const (
	maxInvitations = 1000
	maxPeers       = 1000
)

func (s *Site) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Log
}

// Use has the site be what the settings say; nil means that there are none. An error says
// why nobody can join: what the settings say is in force then, with the peers that there are.
func (s *Site) Use(next *Settings) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if next == nil {
		next = &Settings{}
	}
	if next.State != s.settings.State {
		s.close()
		s.state = state{Version: stateVersion}
		s.failed = nil
		if next.State != "" {
			s.failed = s.load(next.State)
		}
	}
	s.settings = *next
	s.publish()
	return s.failed
}

// Close unlocks the file of the state.
func (s *Site) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.close()
}

func (s *Site) close() {
	if s.file != nil {
		s.file.Close()
		s.file = nil
	}
}

// load reads the state. It is called with s.mu held.
func (s *Site) load(folder string) error {
	f, data, err := invitation.Open(folder, "peers.json", "state of peers")
	if err != nil {
		return fmt.Errorf("site.state: %w", err)
	}
	s.file = f
	if data == nil {
		return nil
	}
	var got state
	if err := json.Unmarshal(data, &got); err != nil || got.Version != stateVersion {
		return fmt.Errorf("site.state: %s is damaged, or of another version: put back a copy of it, or take it away and join again", f.Path)
	}
	for _, m := range got.Peers {
		if _, err := m.config(&s.settings); err != nil {
			return fmt.Errorf("site.state: peer %q in %s: %w", m.Name, f.Path, err)
		}
	}
	s.state = got
	return nil
}

// save puts next on disk, and then in force. Bundles and names are in one file, so that none
// is there without the other. It is called with s.mu held.
func (s *Site) save(next state) error {
	if s.settings.State == "" || s.file == nil {
		return errors.New("there is no state to keep peers in")
	}
	next.Version = stateVersion
	err := s.file.Save(&next)
	if err == nil {
		s.state = next
	}
	return err
}

// publish sets the trust of all peers. It is called with s.mu held.
func (s *Site) publish() {
	var domains []string
	var all []*identity.Trust
	for i := range s.state.Peers {
		m := &s.state.Peers[i]
		domain := m.trustDomain()
		if s.Knows != nil && s.Knows(domain) {
			continue // the configuration decides
		}
		t := s.Store.Trust(domain)
		b, err := bundle.Parse(domain, m.Bundle)
		if err != nil { // load and Join have parsed it
			t.Remove(err)
			continue
		}
		if now, err := t.Bundle(); err != nil || !sameBundle(now, b) {
			t.Set(b)
		}
		domains, all = append(domains, domain), append(all, t)
	}
	for _, domain := range s.group {
		if !slices.Contains(domains, domain) && !(s.Knows != nil && s.Knows(domain)) {
			s.Store.Trust(domain).Remove(identity.ErrNotConfigured) // which ends its tunnels
		}
	}
	if group := s.Store.Trust(TrustName); !group.IsGroup() || !slices.Equal(s.group, domains) {
		group.SetMembers(all)
	}
	s.group = domains
}

// sameBundle reports whether two bundles are written alike.
func sameBundle(a, b *identity.Bundle) bool {
	x, err := bundle.Marshal(a)
	if err != nil {
		return false
	}
	y, err := bundle.Marshal(b)
	return err == nil && string(x) == string(y)
}

// trustDomain returns that of the peer's gateways.
func (m *member) trustDomain() string {
	domain, _, _ := identity.ParseSPIFFEID(m.ID)
	return domain
}

// config returns the peer, as a site of those settings has it.
func (m *member) config(s *Settings) (peer.Config, error) {
	zones, err := ParseZones(m.Zones)
	if err != nil {
		return peer.Config{}, err
	}
	domain, _, err := identity.ParseSPIFFEID(m.ID)
	if err != nil {
		return peer.Config{}, err
	}
	if _, err := bundle.Parse(domain, m.Bundle); err != nil {
		return peer.Config{}, err
	}
	c := peer.Config{
		Name: m.Name, IDs: []string{m.ID}, Zones: zones, State: filepath.Join(s.State, m.Name), Check: registry.Check{Kind: "tcp"},
		Access: registry.Hop{KeyName: s.Key, TrustNames: []string{domain}, Peers: []string{m.ID}},
	}
	if m.Entrance != nil {
		g, err := m.Entrance.Registered(c.Access, true)
		if err != nil {
			return peer.Config{}, err
		}
		g.Check = c.Check
		c.Gateways = append(c.Gateways, g)
	}
	for i := range m.Gateways {
		if m.Entrance != nil && m.Entrance.Address == m.Gateways[i].Address {
			continue
		}
		if g, err := m.Gateways[i].Registered(c.Access, false); err == nil { // others may not be dialed
			g.Check = c.Check
			c.Gateways = append(c.Gateways, g)
		}
	}
	return c, nil
}

// Peers returns those that have joined, without those that the configuration has by now.
func (s *Site) Peers() []peer.Config {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.peers()
}

func (s *Site) peers() (all []peer.Config) {
	configured := s.configured()
	for i := range s.state.Peers {
		c, err := s.state.Peers[i].config(&s.settings)
		if err == nil && s.Knows != nil && s.Knows(c.TrustDomain()) {
			err = fmt.Errorf("identity.trust has %q", c.TrustDomain())
		}
		if err == nil {
			err = peer.Check(slices.Concat(configured, all, []peer.Config{c}))
		}
		if err != nil {
			s.log().Error("a peer that has joined is left out", "peer", s.state.Peers[i].Name, "error", err.Error())
			continue
		}
		all = append(all, c)
	}
	return all
}

func (s *Site) configured() []peer.Config {
	if s.Configured == nil {
		return nil
	}
	return s.Configured()
}

// Problem returns why what the settings say cannot be used, so that there are no peers; nil if it
// can.
func (s *Site) Problem() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}

// retry reads the state again if it could not be used: it may have been repaired or taken away
// since.
func (s *Site) retry() {
	s.mu.Lock()
	failed := s.failed != nil
	if failed {
		s.close()
		s.failed = s.load(s.settings.State)
		s.publish()
	}
	usable := s.failed == nil
	s.mu.Unlock()
	if failed && usable {
		s.log().Info("the state of peers can be used again", "folder", s.settings.State)
		s.changed()
	}
}

// usable returns why nobody can be invited and nobody can be joined.
func (s *Site) usable() error {
	switch {
	case s.settings.State == "":
		return errors.New("the configuration has no site: add site: {key: NAME, trust: DOMAIN, state: FOLDER}")
	case s.failed != nil:
		return s.failed
	}
	return nil
}

// own returns the certificate of this site's gateways, and the bundle of its trust domain.
func (s *Site) own(c *Settings) (chain []*x509.Certificate, doc []byte, err error) {
	cert, err := s.Store.Key(c.Key).Certificate()
	if err != nil {
		return nil, nil, fmt.Errorf("site.key: %w", err)
	}
	for _, der := range cert.Certificate {
		link, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, nil, fmt.Errorf("site.key: %w", err)
		}
		chain = append(chain, link)
	}
	b, err := s.Store.Trust(c.Trust).Bundle()
	if err != nil {
		return nil, nil, fmt.Errorf("site.trust: %w", err)
	}
	if _, err := verify(b, chain, x509.ExtKeyUsageClientAuth); err != nil {
		return nil, nil, fmt.Errorf("site.key is not of site.trust: %w", err)
	}
	doc, err = bundle.Marshal(b)
	return chain, doc, err
}

// verify returns the id of a chain that verifies with b alone.
func verify(b *identity.Bundle, chain []*x509.Certificate, usage x509.ExtKeyUsage) (tunnel.Peer, error) {
	t := identity.NewTrust(b.TrustDomain, b.Roots...)
	v := identity.Verifier{Trust: []*identity.Trust{t}, Want: identity.Expectation{Usage: usage, TrustDomains: []string{b.TrustDomain}}}
	return v.Verify(chain)
}

// gateways returns those of settings as others reach them now.
func (s *Site) gateways(settings *Settings) []peer.Gateway {
	if s.Gateways == nil {
		return settings.Gateways
	}
	return s.Gateways()
}

// Invite returns a token by which one site may join until ttl is over, and offer names of
// zones.
func (s *Site) Invite(zones []string, ttl time.Duration) (string, error) {
	if _, err := ParseZones(zones); err != nil {
		return "", err
	}
	s.retry()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return "", err
	}
	if len(s.settings.Gateways) == 0 {
		return "", errors.New("site.gateways is empty: another site can't join where it can't connect to; have it invite this one")
	}
	reached := s.gateways(&s.settings)
	if len(reached) == 0 {
		return "", errors.New("no address of site.gateways is verified from outside yet, see culvert nat: another site can't join where it can't connect to; have it invite this one")
	}
	chain, _, err := s.own(&s.settings)
	if err != nil {
		return "", err
	}
	g := reached[0]
	at := slices.IndexFunc(g.Transports, func(p string) bool { return slices.Contains(invitation.Transports, p) })
	if at < 0 {
		return "", fmt.Errorf("gateway %q in site.gateways has none of the transports %q, by which sites join", g.Address, invitation.Transports)
	}
	t, err := invitation.New(invitation.Site, g.Address, g.Transports[at], chain[0], ttl)
	if err != nil {
		return "", err
	}
	t.Zones = zones
	text, err := t.Text()
	if err != nil {
		return "", err
	}
	next := s.state
	next.Invitations = slices.DeleteFunc(slices.Clone(next.Invitations), func(i invited) bool { return i.Forgotten(time.Now()) })
	if len(next.Invitations) >= maxInvitations {
		return "", fmt.Errorf("there are %d invitations already", maxInvitations)
	}
	next.Invitations = append(next.Invitations, invited{Record: invitation.Record{Hash: invitation.HashOf(t.Secret), Expires: t.Expires}, Zones: zones})
	if err := s.save(next); err != nil {
		return "", err
	}
	return text, nil
}

// Remove forgets a peer that has joined: its trust and its names. Its tunnels end.
func (s *Site) Remove(name string) error {
	s.retry()
	s.mu.Lock()
	if s.failed != nil {
		defer s.mu.Unlock()
		return s.failed
	}
	at := slices.IndexFunc(s.state.Peers, func(m member) bool { return m.Name == name })
	if at < 0 {
		s.mu.Unlock()
		if slices.ContainsFunc(s.configured(), func(c peer.Config) bool { return c.Name == name }) {
			return fmt.Errorf("peer %q is in the configuration file: take it out there", clip(name))
		}
		return fmt.Errorf("no peer %q has joined", clip(name))
	}
	next := s.state
	next.Peers = slices.Delete(slices.Clone(next.Peers), at, at+1)
	if err := s.save(next); err != nil {
		s.mu.Unlock()
		return err
	}
	// What it offered must not come back with one of its name.
	if err := os.RemoveAll(filepath.Join(s.settings.State, name)); err != nil {
		s.log().Error("cannot remove the last catalog of a peer", "peer", name, "error", err.Error())
	}
	s.publish()
	s.mu.Unlock()
	s.log().Info("peer removed", "peer", name)
	s.changed()
	return nil
}

func (s *Site) changed() {
	if s.Changed != nil {
		s.Changed()
	}
}
