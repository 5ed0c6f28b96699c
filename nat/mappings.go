package nat

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"culvert.dev/internal/wallclock"
)

// client returns a Client of the router, and nil if there is none for the protocol.
func (m *Manager) client(ctx context.Context, protocol string) (Client, error) {
	switch protocol {
	case "pcp":
		return &PCP{Router: m.route.Router, Dial: m.Dial}, nil
	case "nat-pmp":
		return &NATPMP{Router: m.route.Router, Dial: m.Dial}, nil
	}
	if m.FindUPnP == nil {
		return nil, nil
	}
	return m.FindUPnP(ctx, m.route)
}

// poll asks the router for its outside address, and whether it has lost its mappings.
func (m *Manager) poll(ctx context.Context) {
	outside := netip.Addr{}
	for _, c := range m.clients {
		asked, cancel := context.WithTimeoutCause(ctx, searchTimeout, errors.New("no answer in time"))
		at, lost, err := c.Poll(asked)
		cancel()
		_, refused := errors.AsType[*Refusal](err)
		switch {
		case err == nil || refused:
			m.lost[c] = 0
		case ctx.Err() == nil:
			m.lost[c]++
			m.Log.Debug("the router does not answer", "protocol", c.Protocol(), "error", err)
		}
		if lost {
			m.Log.Warn("the router has lost its mappings; making them again", "protocol", c.Protocol())
			m.renewBy(c)
		}
		if at.IsValid() && !outside.IsValid() {
			outside = at
		}
	}
	if outside.IsValid() {
		if m.outside.IsValid() && outside != m.outside {
			m.Log.Info("the outside address changed; renewing the mappings", "from", m.outside, "to", outside)
			m.renewAll()
		}
		m.outside = outside
	}
	m.clients = slices.DeleteFunc(m.clients, func(c Client) bool { return m.lost[c] >= maxLost })
}

// renewAll has all mappings asked for now.
func (m *Manager) renewAll() {
	for _, p := range m.mappings {
		p.due, p.retry = time.Time{}, 0
	}
}

// renewBy has the mappings of c asked for now.
func (m *Manager) renewBy(c Client) {
	for _, p := range m.mappings {
		if p.client == c {
			p.due, p.retry = time.Time{}, 0
		}
	}
}

// request returns the request for p; a lifetime of 0 deletes it.
func (m *Manager) request(p *mapping, lifetime time.Duration) Request {
	r := Request{Network: p.Network, Internal: p.Internal, External: p.external, Lifetime: lifetime}
	if !r.External.IsValid() {
		port := p.Port.External
		if port == 0 {
			port = p.Internal
		}
		r.External = netip.AddrPortFrom(p.external.Addr(), port)
	}
	mac := hmac.New(sha256.New, m.Secret)
	_, _ = fmt.Fprintf(mac, "culvert nat %s %d", p.Network, p.Internal)
	copy(r.Nonce[:], mac.Sum(nil))
	return r
}

// keep asks for p, if that is due.
func (m *Manager) keep(ctx context.Context, p *mapping, s *Settings) {
	now := m.clock()
	if p.client != nil && !p.expires.IsZero() && !now.Before(p.expires) {
		m.Log.Warn("port mapping expired", "listener", p.Name, "external", p.external, "error", p.err)
		p.client, p.verified = nil, false
	}
	// By both clocks: the router goes on counting while this machine is suspended.
	if !wallclock.Passed(now, p.due) || len(m.clients) == 0 {
		return
	}
	lifetime := s.Lifetime
	if lifetime == 0 {
		lifetime = DefaultLifetime
	}
	try := m.clients
	if p.client != nil && slices.Contains(m.clients, p.client) {
		try = []Client{p.client}
	}
	var failed []error
	for _, c := range try {
		grant, err := m.ask(ctx, c, m.request(p, lifetime))
		if err == nil {
			m.granted(p, c, grant)
			return
		}
		failed = append(failed, err)
	}
	p.err = errors.Join(failed...)
	first := minRetry
	if _, refused := errors.AsType[*Refusal](p.err); refused {
		first = pollInterval
	}
	p.retry = min(max(2*p.retry, first), maxRetry)
	if p.client != nil && !p.expires.IsZero() { // after half of the time that is left, and half again
		p.retry = min(p.retry, max(p.expires.Sub(now)/2, minRenew))
	}
	for _, err := range failed {
		if refusal, ok := errors.AsType[*Refusal](err); ok && p.client == nil {
			p.retry = max(p.retry, min(refusal.For, maxRetry))
		}
	}
	p.due = m.clock().Add(p.retry)
	m.Log.Warn("cannot map a port; trying again", "listener", p.Name, "network", p.Network, "port", p.Internal, "error", p.err, "retry_in", p.retry)
}

// ask asks c for a mapping, with other outside ports where one is taken.
func (m *Manager) ask(ctx context.Context, c Client, r Request) (grant Grant, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, mapTimeout, errors.New("no answer in time"))
	defer cancel()
	for range maxPortChoices {
		grant, err = c.Map(ctx, r)
		if refusal, ok := errors.AsType[*Refusal](err); !ok || !refusal.Taken {
			break
		}
		r.External = netip.AddrPortFrom(r.External.Addr(), uint16(20000+rand.IntN(40000)))
	}
	return grant, err
}

// granted records what c has granted for p.
func (m *Manager) granted(p *mapping, c Client, grant Grant) {
	now := m.clock()
	was, wasBy := p.external, p.client
	external := grant.External
	switch {
	case external.Addr().IsValid() && !external.Addr().IsUnspecified():
		m.outside = external.Addr()
	default:
		external = netip.AddrPortFrom(m.outside, external.Port())
	}
	p.client, p.external, p.lifetime, p.err, p.retry = c, external, grant.Lifetime, nil, 0
	p.expires, p.due = now.Add(grant.Lifetime), now.Add(max(grant.Lifetime/2, minRenew))
	if grant.Lifetime == 0 {
		p.expires, p.due = time.Time{}, now.Add(DefaultLifetime)
	}
	if grant.Check > 0 {
		p.due = now.Add(min(p.due.Sub(now), grant.Check))
	}
	if was != external || wasBy == nil {
		p.verified, p.verifyAt, p.unverified, p.verifyErr = false, time.Time{}, 0, nil
		m.Log.Info("port mapped", "listener", p.Name, "network", p.Network, "port", p.Internal, "external", external, "protocol", c.Protocol(), "lifetime", grant.Lifetime)
	}
}
