package peer

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/internal/background"
	"culvert.dev/registry"
	"culvert.dev/registry/snapshot"
	"culvert.dev/tunnel"
)

// Host is the name at which gateways serve their catalogs.
const Host = "catalog.culvert.alt"

// A Config says who a peer is and what it may do. It is not changed once it is used.
type Config struct {
	Name     string             // "west", one label
	Gateways []registry.Gateway // that are asked for the catalog, in order; none for a peer that cannot be dialed
	IDs      []string           // the SPIFFE ids of its gateways; one that ends with /* is of all below
	Zones    []tunnel.Pattern   // names that it may offer

	ExposedTo []string // the networks whose clients may ask for what it offers; empty means all

	// Network is set for a peer whose catalog is only read, as an agent reads that of its gateways:
	// its services are in this network of the configuration. Such a peer has no IDs, is offered
	// nothing, and its bundle and gateways are ignored. "" means that catalogs are exchanged, and
	// the services of the peer are in a network of its own.
	Network string

	// Access and Check are those of gateways that the peer names.
	Access registry.Hop
	Check  registry.Check

	// State is the folder where the last catalog is kept over a restart; "" keeps none.
	State string
}

// Peers exchanges catalogs with all peers. It is a registry.Source, and a tunnel.Handler
// for the streams that peers open. The zero value but for Table and NewTransport is ready.
type Peers struct {
	Site string // our own id; without one, our own services are not recognised when they come back

	// Table returns the current table, whose services are offered.
	Table func() *registry.Table

	// NewTransport is that of a registry.Registry.
	NewTransport func(*registry.Service, *registry.Endpoint, *registry.Gateway) (tunnel.Transport, error)

	// Gateways returns our own, as peers can reach them now. None means that peers learn of none.
	// Moved has to be called after a change. May be nil.
	Gateways func() []Gateway

	// Bundle returns that of our own trust domain, and a generation, which grows with each change.
	// TakeBundle takes over the bundle of a peer; verifiedBy is what TrustGeneration has returned
	// when the stream was verified on which the bundle has come. Each may be nil.
	Bundle          func() (doc []byte, generation uint64)
	TakeBundle      func(c *Config, doc []byte, verifiedBy uint64) error
	TrustGeneration func(c *Config) uint64

	// Router admits and refuses requests, with an Outcome for each. If it is nil, requests are
	// accepted and refused without limits.
	Router *tunnel.Router

	// Settled reports whether the Table has all that the sources know. Until then subscribers are
	// refused. Nil means that it always has.
	Settled func() bool

	Log *slog.Logger // nil discards

	mu       sync.Mutex // guards what follows
	peers    []*peer    // in the order of their configuration
	others   subscribers
	changed  chan struct{}
	draining bool
}

// maxSessions is how many streams a peer may open at once: its gateways have replicas.
const maxSessions = 64

// Check returns why all cannot be the peers of one gateway: two of them may offer the same name, or
// have the same id.
func Check(all []Config) error {
	for i := range all {
		for j := range all[:i] {
			a, b := &all[j], &all[i]
			if a.Name == b.Name {
				return fmt.Errorf("two peers are called %q", a.Name)
			}
			for _, zone := range a.Zones {
				if a.Network != "" || b.Network != "" {
					break // a catalog that is only read comes after the configuration
				}
				for _, other := range b.Zones {
					if Overlap(zone, other) {
						return fmt.Errorf("peer %q may offer %q, and peer %q %q: a name has one peer", a.Name, zone, b.Name, other)
					}
				}
			}
			for _, id := range a.IDs {
				for _, other := range b.IDs {
					if matchesID(id, strings.TrimSuffix(other, "*")) || matchesID(other, strings.TrimSuffix(id, "*")) || id == other {
						return fmt.Errorf("the id %q of peer %q may be that of peer %q, too", other, b.Name, a.Name)
					}
				}
			}
		}
	}
	return nil
}

// matchesID reports whether an id is the one that is wanted, or below it.
func matchesID(want, id string) bool {
	if below, ok := strings.CutSuffix(want, "*"); ok {
		return strings.HasPrefix(id, below)
	}
	return id == want
}

// Configure replaces the peers. Those that do not change keep their streams. If it returns an error,
// it has changed nothing.
func (p *Peers) Configure(all []Config) error {
	if err := Check(all); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var next []*peer
	for i := range all {
		c := &all[i]
		at := slices.IndexFunc(p.peers, func(old *peer) bool { return reflect.DeepEqual(old.Config, c) })
		if at >= 0 {
			next = append(next, p.peers[at])
			continue
		}
		next = append(next, &peer{Config: c, owner: p, changed: make(chan struct{}, 1), offers: map[string]*catalog{}, since: time.Now()})
	}
	old := p.peers
	p.peers = next
	for _, o := range old {
		if !slices.Contains(next, o) {
			o.close()
		}
	}
	if p.changed != nil {
		close(p.changed)
	}
	p.changed = make(chan struct{})
	return nil
}

// current returns the peers, and a channel that is closed when they change.
func (p *Peers) current() ([]*peer, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.peers, p.changed
}

func (p *Peers) log() *slog.Logger {
	if p.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return p.Log
}

func (p *Peers) gateways() []Gateway {
	if p.Gateways == nil {
		return nil
	}
	all := p.Gateways()
	return all[:min(len(all), MaxGateways)]
}

// Moved has the changed Gateways sent to all peers.
func (p *Peers) Moved() { p.TableChanged() }

// open returns all open streams.
func (p *Peers) open() (all []*session) {
	p.mu.Lock()
	of := p.others.with(p.peers)
	p.mu.Unlock()
	for _, one := range of {
		all = append(all, one.open()...)
	}
	return all
}

// IsPeer reports whether a caller is a gateway of a peer.
func (p *Peers) IsPeer(caller *tunnel.Peer) bool {
	all, _ := p.current()
	return slices.ContainsFunc(all, func(o *peer) bool { return o.is(caller) })
}

func (p *Peers) ownBundle() ([]byte, uint64) {
	if p.Bundle == nil {
		return nil, 0
	}
	return p.Bundle()
}

// TableChanged has changes of the table sent to peers and subscribers. It does not block.
func (p *Peers) TableChanged() {
	for _, s := range p.open() {
		s.poke()
	}
}

// Drain tells all peers and subscribers that this gateway is about to stop, and ends their
// streams. They open no more of them.
func (p *Peers) Drain() {
	p.mu.Lock()
	p.draining = true
	p.mu.Unlock()
	for _, s := range p.open() {
		s.drain()
	}
}

// refresh makes the catalog of a session that of the current table.
func (p *Peers) refresh(s *session) {
	t := p.Table()
	if t == nil {
		return
	}
	s.offers.refreshing.Lock()
	defer s.offers.refreshing.Unlock()
	if s.offers.table == t && (s.offers.from == s.from || s.peer.subscriber) { // the addresses of a subscriber are of one network
		return
	}
	leftOut := 0
	background.Do(func() { leftOut = s.offers.update(t, p.Site, s.gateway, s.from) })
	s.offers.table, s.offers.from = t, s.from
	if leftOut > 0 && s.offers.leftOut == 0 {
		p.log().Warn("not all services are offered; a peer takes no more", "peer", s.peer.Name, "left_out", leftOut)
	}
	s.offers.leftOut = leftOut
}

// firstUpdates is how long Run waits for the first update of each peer, so that one table has them
// all. A Registry waits longer with its first table.
const firstUpdates = 4 * time.Second

// sourceName is that of the update which belongs to no peer.
const sourceName = "peers"

// Run implements registry.Source.
func (p *Peers) Run(ctx context.Context, updates chan<- registry.Update) error {
	ctx, cancel := context.WithCancel(ctx)
	var working sync.WaitGroup
	defer working.Wait()
	defer cancel()
	received := make(chan peerUpdate)
	running := map[*peer]context.CancelFunc{}
	awaited := map[*peer]bool{} // those at the start that have sent no update
	known := map[string]bool{}  // names with a snapshot
	late := time.NewTimer(firstUpdates)
	defer late.Stop()
	started := false
	send := func(u registry.Update) error {
		u.More = u.More || !started
		select {
		case updates <- u:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for {
		all, changed := p.current()
		for one, stop := range running {
			if slices.Contains(all, one) {
				continue
			}
			stop()
			delete(running, one)
			delete(awaited, one)
			if name := one.source(); known[name] && !slices.ContainsFunc(all, func(o *peer) bool { return o.Name == one.Name }) {
				delete(known, name)
				if err := send(registry.Update{Source: name}); err != nil {
					return err
				}
			}
		}
		for _, one := range all {
			if running[one] == nil {
				work, stop := context.WithCancel(ctx)
				running[one] = stop
				if !started && (len(one.Gateways) > 0 || one.State != "") { // others may open a stream at any time
					awaited[one] = true
				}
				working.Go(func() { one.follow(work, received) })
			}
		}
		if !started && !slices.ContainsFunc(all, func(o *peer) bool { return awaited[o] }) {
			started = true
			if err := send(registry.Update{Source: sourceName}); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-late.C:
			clear(awaited)
		case w := <-received:
			if running[w.peer] == nil {
				continue // it was replaced
			}
			more := w.update.More
			if !more {
				delete(awaited, w.peer)
			}
			if w.update.Err != nil && !known[w.update.Source] {
				known[w.update.Source] = true // a peer without a catalog offers nothing yet
				if err := send(registry.Update{Source: w.update.Source, More: true}); err != nil {
					return err
				}
			}
			known[w.update.Source] = true
			if err := send(w.update); err != nil {
				return err
			}
		}
	}
}

// A peerUpdate is an update of a peer.
type peerUpdate struct {
	peer   *peer
	update registry.Update
}

// follow sends the updates of the peer, with its gateways, until ctx is done.
func (p *peer) follow(ctx context.Context, to chan<- peerUpdate) {
	var src registry.Source = p
	if p.State != "" {
		if err := os.MkdirAll(p.State, 0o700); err != nil {
			p.owner.log().Error("cannot make the folder of a peer; its catalog is not kept over a restart", "peer", p.Name, "error", err.Error())
		}
		src = &snapshot.Source{
			Source: p, Path: filepath.Join(p.State, "catalog"), Settings: p.settings(),
			Names: func() []string { return []string{p.source()} }, Log: p.owner.log(),
		}
	}
	updates := make(chan registry.Update)
	done := make(chan error, 1)
	go func() {
		var err error
		defer func() {
			if v := recover(); v != nil {
				err = tunnel.Caught(v)
			}
			done <- err
		}()
		err = src.Run(ctx, updates)
	}()
	for {
		var u registry.Update
		select {
		case u = <-updates:
		case err := <-done:
			if ctx.Err() != nil {
				return
			}
			u = registry.Update{Source: p.source(), Err: fmt.Errorf("peer %q: %w", p.Name, err)}
			done = nil
		}
		if u.Err == nil {
			u.Snapshot = p.withGateways(u.Snapshot)
		}
		select {
		case to <- peerUpdate{p, u}:
		case <-ctx.Done():
			if done != nil {
				for {
					select {
					case <-updates:
						continue
					case <-done:
					}
					break
				}
			}
			return
		}
	}
}

// withGateways returns s with the configured gateways if the peer has named none. They are not
// saved: the configuration has them. If it has none either, only a connector of the peer can serve
// its services: each gets a group, for which policies decide.
func (p *peer) withGateways(s registry.Snapshot) registry.Snapshot {
	if len(s.Networks) != 1 {
		return s
	}
	if last := p.lastGiven; last != nil && len(last.in.Networks) > 0 && &last.in.Networks[0] == &s.Networks[0] {
		return last.out // so that an unchanged snapshot has the same slices
	}
	out := s
	if len(s.Networks[0].Gateways) == 0 {
		n := s.Networks[0]
		n.Gateways = p.Gateways
		out.Networks = []registry.Network{n}
		if len(n.Gateways) == 0 {
			out.Services = make([]*registry.Service, len(s.Services))
			for i := range s.Services {
				one := *s.Services[i]
				one.Endpoints = []registry.Endpoint{{Group: n.Name + "/" + one.Names[0].String()}}
				out.Services[i] = &one
			}
		}
	}
	p.lastGiven = &given{s, out}
	return out
}

// A given is what withGateways has returned.
type given struct{ in, out registry.Snapshot }

// ServeTunnel implements tunnel.Handler: it serves the catalog to the gateway of a peer, and to
// other callers that policies with the verb catalog let see services.
func (p *Peers) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	all, _ := p.current()
	at := slices.IndexFunc(all, func(o *peer) bool { return o.is(&req.Peer) })
	p.mu.Lock()
	draining := p.draining
	p.mu.Unlock()
	switch {
	case draining:
		p.refuse(req, tunnel.Refusef(tunnel.Overload, "peer: this gateway is about to stop"))
		return
	case at < 0:
		p.serveSubscriber(ctx, req)
		return
	}
	one := all[at]
	s, err := one.newSession(req.Peer, req.Source.Addr(), false, req.Source.String())
	if err != nil {
		p.refuse(req, err)
		return
	}
	stream, err := req.Accept()
	if err != nil {
		one.forget(s)
		return
	}
	if !one.begin(s, stream) {
		return
	}
	err = one.serve(ctx, s)
	if err != nil && !isRoutine(err) {
		p.log().Warn("stream of a peer ended", "peer", one.Name, "gateway", s.by, "error", err.Error())
	}
}

func (p *Peers) refuse(req *tunnel.Request, err error) {
	if p.Router != nil {
		p.Router.Refuse(req, err)
		return
	}
	req.Refuse(err)
}

// TrustDomain returns that of the peer's gateways.
func (c *Config) TrustDomain() string {
	if len(c.IDs) == 0 {
		return ""
	}
	domain, _, _ := strings.Cut(strings.TrimPrefix(c.IDs[0], "spiffe://"), "/")
	return domain
}
