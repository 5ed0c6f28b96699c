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

// A Config is a peer, and what it may do. It is not changed once it is used.
type Config struct {
	Name     string             // "west", one label
	Gateways []registry.Gateway // that are asked for the catalog, in order; none for a peer that cannot be dialed
	IDs      []string           // the SPIFFE ids of its gateways; one that ends with /* is of all below
	Zones    []tunnel.Pattern   // names that it may offer

	ExposedTo []string // the networks whose clients may ask for what it offers; empty means all

	// Network is of a peer whose catalog is only read, as an agent reads that of its gateways:
	// the network of the configuration that its services are in. It is offered nothing, has no
	// IDs, and says nothing about trust and gateways. "" is a peer with which catalogs are
	// exchanged, and its services are in a network of its own.
	Network string

	// Access is how gateways are asked that the peer names, and Check how they are checked.
	Access registry.Hop
	Check  registry.Check

	// State is the folder where the last catalog is kept over a restart; "" keeps none.
	State string
}

// Peers exchanges catalogs with all peers. It is a registry.Source, and a tunnel.Handler
// for the streams that peers open. The zero value but for Table and NewTransport is ready.
type Peers struct {
	Site string // our own id; "" for none, and then our own services are not recognised when they come back

	// Table returns the current table, whose services are offered.
	Table func() *registry.Table

	// NewTransport is that of a registry.Registry.
	NewTransport func(*registry.Service, *registry.Endpoint, *registry.Gateway) (tunnel.Transport, error)

	// Gateways returns our own, as peers are to reach them now; none says nothing. After a
	// change Moved has to be called. May be nil.
	Gateways func() []Gateway

	// Bundle returns that of our own trust domain, and a number that grows with each change.
	// TakeBundle takes the one that a peer has sent on a stream that was verified by its trust
	// of a generation, which TrustGeneration returns. Each may be nil.
	Bundle          func() (doc []byte, generation uint64)
	TakeBundle      func(c *Config, doc []byte, verifiedBy uint64) error
	TrustGeneration func(c *Config) uint64

	// Router admits and refuses requests, with an Outcome for each. Nil, and requests do it
	// themselves.
	Router *tunnel.Router

	// Settled reports whether the Table has all that the sources know. Before, subscribers are
	// told to come back. Nil means that it always has.
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

// Check returns why all cannot be the peers of one gateway: two of them speak for one name,
// or have one id.
func Check(all []Config) error {
	for i := range all {
		for j := range all[:i] {
			a, b := &all[j], &all[i]
			if a.Name == b.Name {
				return fmt.Errorf("two peers are called %q", a.Name)
			}
			for _, zone := range a.Zones {
				if a.Network != "" || b.Network != "" {
					break // what is only read goes behind what is configured
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

// Configure replaces the peers. Those that stay as they are keep their streams. Of an error
// nothing has changed.
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

// current returns the peers, and what is closed when there are others.
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

// Moved has all peers told of Gateways that are others than before.
func (p *Peers) Moved() { p.TableChanged() }

// open returns all streams that stand.
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

// TableChanged says that there may be another table: peers and subscribers are told of
// changes. It does not block.
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

// refresh has the catalog of a session be that of the current table.
func (p *Peers) refresh(s *session) {
	t := p.Table()
	if t == nil {
		return
	}
	s.offers.refreshing.Lock()
	defer s.offers.refreshing.Unlock()
	if s.offers.table == t && (s.offers.from == s.from || s.peer.subscriber) { // whose addresses are of one network
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

// firstWords is how long Run waits for the first word of all peers, with the one table that
// has them all. It is less than a Registry waits with its first table.
const firstWords = 4 * time.Second

// sourceName is that of the update which belongs to no peer.
const sourceName = "peers"

// Run implements registry.Source.
func (p *Peers) Run(ctx context.Context, updates chan<- registry.Update) error {
	ctx, cancel := context.WithCancel(ctx)
	var working sync.WaitGroup
	defer working.Wait()
	defer cancel()
	words := make(chan word)
	running := map[*peer]context.CancelFunc{}
	silent := map[*peer]bool{} // of those at the start
	known := map[string]bool{} // names with a snapshot
	late := time.NewTimer(firstWords)
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
			delete(silent, one)
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
					silent[one] = true
				}
				working.Go(func() { one.follow(work, words) })
			}
		}
		if !started && !slices.ContainsFunc(all, func(o *peer) bool { return silent[o] }) {
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
			clear(silent)
		case w := <-words:
			if running[w.peer] == nil {
				continue // it was replaced
			}
			more := w.update.More
			if !more {
				delete(silent, w.peer)
			}
			if w.update.Err != nil && !known[w.update.Source] {
				known[w.update.Source] = true // a peer that nobody has heard of yet offers nothing
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

// A word is an update of a peer.
type word struct {
	peer   *peer
	update registry.Update
}

// follow sends what the peer offers, with its gateways, until ctx is done.
func (p *peer) follow(ctx context.Context, words chan<- word) {
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
		case words <- word{p, u}:
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

// withGateways returns s with the configured gateways where the peer has named none. They
// are not saved: the configuration has them. Where there are none either, only a connector of
// the peer can serve its services: each has a group for it, of which policies decide.
func (p *peer) withGateways(s registry.Snapshot) registry.Snapshot {
	if len(s.Networks) != 1 {
		return s
	}
	if last := p.lastGiven; last != nil && len(last.in.Networks) > 0 && &last.in.Networks[0] == &s.Networks[0] {
		return last.out // the very slices confirm it
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
