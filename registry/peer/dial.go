package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
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
		got, fresh, err, since := p.got, p.fresh || p.absent, p.err, p.since
		p.mu.Unlock()
		u := registry.Update{Source: p.source()}
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

	// absentRetry is the time until gateways are asked again that have no catalog for us.
	absentRetry = 15 * time.Minute
)

// A candidate is a gateway of the peer, and one transport to it.
type candidate struct {
	name      string // "connect-h2 gw.west.example:443"
	gateway   int    // its index
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
			d := candidate{name: hop.Proto + " " + at.String(), gateway: i}
			d.transport, d.err = p.owner.NewTransport(&registry.Service{}, &at, &one)
			if d.err == nil && (d.transport == nil || d.transport.Info().Security != tunnel.Mutual) {
				d.err = errors.New("a catalog needs mutual TLS, and this transport is weaker")
			}
			if d.err != nil && p.Network != "" {
				continue // an agent without credentials is not for a catalog
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
	if len(all) == 0 && p.Network != "" {
		p.haveNone(errors.New("a catalog is for callers with credentials"))
		return
	}
	if len(all) == 0 {
		p.failed(errors.New("none of its gateways has a carrier"))
		return
	}
	pause := time.Duration(0)
	refused := map[int]bool{} // gateways, in a row, that have no catalog for us
	logged := false           // that there is no stream, of a catalog that is only read
	for next := 0; ; next++ {
		d := &all[next%len(all)]
		began := time.Now()
		err := p.ask(ctx, d)
		if ctx.Err() != nil {
			return
		}
		worked := time.Since(began) > HeartbeatTimeout
		no := p.Network != "" && isNo(err)
		if err == nil {
			err = errEnded
		}
		err = fmt.Errorf("%s: %w%s", d.name, err, p.advice(err))
		level := slog.LevelWarn
		switch {
		case no:
			refused[d.gateway] = true
			for (next+1)%len(all) != 0 && all[(next+1)%len(all)].gateway == d.gateway {
				next++ // by another transport it says the same
			}
			level = slog.LevelDebug
		case worked:
			clear(refused)
		case p.Network != "" && logged: // a laptop may be without a network for hours
			level = slog.LevelDebug
		}
		logged = !worked
		absent := no && len(refused) == len(p.Gateways)
		if absent {
			p.haveNone(err)
		} else {
			p.failed(err)
		}
		p.owner.log().Log(ctx, level, "no stream to a peer; trying the next transport", "peer", p.Name, "gateway", d.name, "error", err.Error())
		switch {
		case worked:
			pause = 0
		case absent:
			clear(refused)
			pause = absentRetry
		case (next+1)%len(all) == 0 || pause > 0:
			pause = min(max(2*pause, minRetry), maxRetry)
		}
		wait := time.NewTimer(max(p.spread(pause), minRetry/10))
		select {
		case <-ctx.Done():
			wait.Stop()
			return
		case <-wait.C:
		}
	}
}

// advice is what an error says after a semicolon: what to do about a gateway of the peer that does
// not accept our certificate. It is "" for other errors, and for a catalog that is only read.
func (p *peer) advice(err error) string {
	op, ok := errors.AsType[*net.OpError](err)
	if !ok || op.Op != "remote error" || !strings.Contains(op.Err.Error(), "certificate") || p.Network != "" {
		return ""
	}
	return "; that gateway does not accept the certificate of this one: see whether this site is a peer there, and trusted"
}

// isNo reports whether a gateway has refused a catalog in a way that it will again.
func isNo(err error) bool {
	e, ok := errors.AsType[*tunnel.Error](err)
	return ok && e.BehindHop && e.Final
}

// spread returns a time of about pause for a catalog that is only read: gateways have many
// subscribers, which all lose them at once.
func (p *peer) spread(pause time.Duration) time.Duration {
	if p.Network == "" || pause <= 0 {
		return pause
	}
	return pause/2 + rand.N(pause)
}

// haveNone notes that the gateways have no catalog for us, in which err is the last answer.
// Names of an earlier one go.
func (p *peer) haveNone(err error) {
	p.mu.Lock()
	first := !p.absent
	p.absent, p.fresh, p.err = true, false, err
	if first {
		p.got = &received{services: map[string]*registry.Service{}, sizes: map[string]cost{}, leftOut: map[string]string{}}
	}
	p.mu.Unlock()
	if first {
		p.owner.log().Info("the gateways have no catalog for this agent; it knows the names of its configuration", "answer", err.Error())
	}
	p.note()
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
	var gateway tunnel.Peer
	if len(p.IDs) > 0 {
		gateway = tunnel.Peer{ID: p.IDs[0], Method: "mtls", Auth: &tunnel.AuthInfo{TrustDomain: p.TrustDomain()}}
	}
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
