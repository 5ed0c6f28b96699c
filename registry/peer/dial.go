package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Run implements registry.Source: it dials the gateways of the peer, and sends what it
// offers.
func (p *peer) Run(ctx context.Context, updates chan<- registry.Update) error {
	ctx, cancel := context.WithCancel(ctx)
	var working sync.WaitGroup
	defer working.Wait()
	defer cancel()
	if len(p.Gateways) > 0 {
		working.Go(func() { p.dialAll(ctx) })
	}
	defer p.endDialed()
	var sent *received
	var snapshot registry.Snapshot
	var lost error
	p.note() // what has come before Run
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.changed:
		}
		p.mu.Lock()
		got, fresh, err, since := p.got, p.fresh, p.err, p.since
		p.mu.Unlock()
		u := registry.Update{Source: p.network()}
		switch {
		case fresh && (got != sent || lost != nil):
			if got != sent {
				snapshot = got.snapshot(p.Config)
			}
			sent, lost = got, nil
			u.Snapshot = snapshot
		case !fresh && err != nil && lost == nil:
			lost = err
			u.Err = fmt.Errorf("peer %q: %w", p.Name, err)
			if sent != nil {
				u.Since = since
			}
		default:
			continue
		}
		select {
		case updates <- u:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// endDialed ends the sessions that were dialed.
func (p *peer) endDialed() {
	for _, s := range p.open() {
		if s.dialed {
			s.end()
		}
	}
}

// failed notes that no gateway could be asked.
func (p *peer) failed(err error) {
	p.mu.Lock()
	if !p.fresh {
		p.err = err
	}
	p.mu.Unlock()
	p.note()
}

const (
	dialTimeout = 10 * time.Second
	minRetry    = time.Second // between two attempts; it doubles up to maxRetry
	maxRetry    = 30 * time.Second
)

// A candidate is a gateway of the peer, and one transport to it.
type candidate struct {
	name      string // "connect-h2 gw.west.example:443"
	transport tunnel.Transport
	err       error // of the transport
}

// candidates returns those of the peer, in order of preference.
func (p *peer) candidates() (all []candidate) {
	for i := range p.Gateways {
		g := &p.Gateways[i]
		at := g.AddressFrom(p.network(), "")
		for _, hop := range g.Transports {
			if !hop.IsCarrier() {
				continue
			}
			one := *g
			one.Transports = []registry.Hop{hop}
			d := candidate{name: hop.Proto + " " + at.String()}
			d.transport, d.err = p.owner.NewTransport(&registry.Service{}, &at, &one)
			if d.err == nil && (d.transport == nil || d.transport.Info().Security != tunnel.Mutual) {
				d.err = errors.New("a catalog needs mutual TLS, and this transport is weaker")
			}
			all = append(all, d)
		}
	}
	return all
}

// dialAll keeps a session with one of the peer's gateways, until ctx is done. After one has
// ended the next candidate is tried.
func (p *peer) dialAll(ctx context.Context) {
	all := p.candidates()
	if len(all) == 0 {
		p.failed(errors.New("none of its gateways has a carrier"))
		return
	}
	pause := time.Duration(0)
	for next := 0; ; next++ {
		d := &all[next%len(all)]
		began := time.Now()
		err := p.ask(ctx, d)
		if ctx.Err() != nil {
			return
		}
		worked := time.Since(began) > HeartbeatTimeout
		if err == nil {
			err = errEnded
		}
		err = fmt.Errorf("%s: %w", d.name, err)
		p.failed(err)
		p.owner.log().Warn("no stream to a peer; trying the next transport", "peer", p.Name, "gateway", d.name, "error", err.Error())
		switch {
		case worked:
			pause = 0
		case (next+1)%len(all) == 0 || pause > 0:
			pause = min(max(2*pause, minRetry), maxRetry)
		}
		wait := time.NewTimer(max(pause, minRetry/10))
		select {
		case <-ctx.Done():
			wait.Stop()
			return
		case <-wait.C:
		}
	}
}

// ask opens a stream to a candidate and serves it until its end.
func (p *peer) ask(ctx context.Context, d *candidate) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = tunnel.Caught(v)
		}
	}()
	if d.err != nil {
		return d.err
	}
	gateway := tunnel.Peer{ID: p.IDs[0], Method: "mtls", Auth: &tunnel.AuthInfo{TrustDomain: p.TrustDomain()}}
	s, err := p.newSession(gateway, netip.Addr{}, true, d.name)
	if err != nil {
		return err
	}
	ep := tunnel.Endpoint{Host: Host, Addr: netip.AddrPortFrom(netip.Addr{}, 443)}
	dialing, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	var conn net.Conn
	if err = d.transport.Check(&ep); err == nil {
		conn, err = d.transport.Dial(dialing, &ep, &tunnel.Request{Proto: "catalog", Name: tunnel.MustParseName(Host), Port: 443, Start: time.Now()})
	}
	if err != nil {
		p.forget(s)
		return err
	}
	if !p.begin(s, conn) {
		return errEnded
	}
	p.owner.log().Info("stream to a peer is open", "peer", p.Name, "gateway", d.name)
	return p.serve(ctx, s)
}
