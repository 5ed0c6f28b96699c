package peer

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
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

	// Gateways are our own, as peers are to reach them; none says nothing.
	Gateways []Gateway

	// Bundle returns that of our own trust domain, and a number that grows with each change.
	// TakeBundle takes the one that a peer has sent on a stream that was verified by its trust
	// of a generation, which TrustGeneration returns. Each may be nil.
	Bundle          func() (doc []byte, generation uint64)
	TakeBundle      func(c *Config, doc []byte, verifiedBy uint64) error
	TrustGeneration func(c *Config) uint64

	// Refuse refuses a request, where that is to be noted; nil means its own Refuse.
	Refuse func(req *tunnel.Request, err error)

	Log *slog.Logger // nil discards

	mu       sync.Mutex // guards what follows
	peers    []*peer    // in the order of their configuration
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

func (p *Peers) gateways() []Gateway { return p.Gateways }

func (p *Peers) ownBundle() ([]byte, uint64) {
	if p.Bundle == nil {
		return nil, 0
	}
	return p.Bundle()
}

// TableChanged says that there may be another table: peers are told of changes. It does not
// block.
func (p *Peers) TableChanged() {
	all, _ := p.current()
	for _, one := range all {
		for _, s := range one.open() {
			s.poke()
		}
	}
}

// Drain tells all peers that this gateway is about to stop, and ends their streams. Peers
// open no more of them.
func (p *Peers) Drain() {
	p.mu.Lock()
	p.draining = true
	all := p.peers
	p.mu.Unlock()
	for _, one := range all {
		for _, s := range one.open() {
			s.drain()
		}
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
	if s.offers.table == t && s.offers.from == s.from {
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
			if name := one.network(); known[name] && !slices.ContainsFunc(all, func(o *peer) bool { return o.Name == one.Name }) {
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
			Source: p, Path: filepath.Join(p.State, "catalog"), Settings: fmt.Sprint(p.Name, p.Zones, p.ExposedTo, p.IDs),
			Names: func() []string { return []string{p.network()} }, Log: p.owner.log(),
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
			u = registry.Update{Source: p.network(), Err: fmt.Errorf("peer %q: %w", p.Name, err)}
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
// are not saved: the configuration has them. Services that can't be reached have no
// endpoints then.
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
				one.Endpoints = nil
				out.Services[i] = &one
			}
		}
	}
	p.lastGiven = &given{s, out}
	return out
}

// A given is what withGateways has returned.
type given struct{ in, out registry.Snapshot }

// ServeTunnel implements tunnel.Handler: it serves the catalog to the gateway of a peer.
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
		p.refuse(req, tunnel.Refusef(tunnel.Denied, "peer: %q is not the id of a peer's gateway", tunnel.Clip(req.Peer.ID)))
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
	if p.Refuse != nil {
		p.Refuse(req, err)
		return
	}
	req.Refuse(err)
}

// A peer is one site with which catalogs are exchanged.
type peer struct {
	*Config
	owner   *Peers
	changed chan struct{} // has room for one: what Run sends is different

	lastGiven *given // of follow alone

	mu       sync.Mutex // guards what follows
	sessions []*session // the streams that stand, and those that begin
	active   *session   // the one by which we get the catalog; nil for none
	got      *received  // the last good catalog; nil for none
	names    []Gateway  // what the peer calls its gateways
	fresh    bool       // got is what the peer offers now
	err      error      // why it is not; nil at the start
	since    time.Time  // of fresh, or of its end
	contact  time.Time  // when something has come last
	offers   map[string]*catalog
	closed   bool
	bytes    uint64 // sent
	problem  string // of the bundle
}

// is reports whether a caller is a gateway of the peer.
func (p *peer) is(caller *tunnel.Peer) bool {
	return caller.Method == "mtls" && strings.HasPrefix(caller.ID, "spiffe://") &&
		slices.ContainsFunc(p.IDs, func(id string) bool { return matchesID(id, caller.ID) })
}

// open returns the sessions that stand.
func (p *peer) open() []*session {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(p.sessions), func(s *session) bool { return s.conn == nil })
}

// close ends all sessions, as the peer is no longer configured.
func (p *peer) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	for _, s := range p.open() {
		s.end()
	}
}

// newSession returns a session with a gateway of the peer, whose conn is not set.
func (p *peer) newSession(gateway tunnel.Peer, from netip.Addr, dialed bool, by string) (*session, error) {
	s := &session{peer: p, gateway: gateway, from: from.Unmap(), dialed: dialed, by: by, wake: make(chan struct{}, 1)}
	if p.owner.TrustGeneration != nil {
		s.trusted = p.owner.TrustGeneration(p.Config)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	key := gateway.ID + " " + s.from.String()
	switch s.offers = p.offers[key]; {
	case p.closed:
		return nil, tunnel.Refusef(tunnel.Denied, "peer: %q is no longer configured", p.Name)
	case len(p.sessions) >= maxSessions:
		return nil, tunnel.Refusef(tunnel.Overload, "peer: %q has %d streams, limit %d", p.Name, len(p.sessions), maxSessions)
	case s.offers == nil:
		for k := range p.offers { // those of addresses that nobody comes from any more
			if len(p.offers) < maxSessions {
				break
			}
			if !slices.ContainsFunc(p.sessions, func(o *session) bool { return o.offers == p.offers[k] }) {
				delete(p.offers, k)
			}
		}
		s.offers = newCatalog()
		p.offers[key] = s.offers
	}
	p.sessions = append(p.sessions, s)
	return s, nil
}

// begin gives a session its stream. It is false, and the stream closed, where the peer is no
// longer configured.
func (p *peer) begin(s *session, c net.Conn) bool {
	p.mu.Lock()
	s.conn = c
	closed := p.closed
	p.mu.Unlock()
	if closed {
		_ = c.Close()
		p.forget(s)
	}
	return !closed
}

func newCatalog() *catalog { return &catalog{instance: rand.Text()} }

// serve runs a session until its end.
func (p *peer) serve(ctx context.Context, s *session) error {
	defer p.forget(s)
	err := s.run(ctx)
	p.mu.Lock()
	if p.active == s && p.fresh {
		p.fresh, p.since = false, time.Now()
	}
	if p.active == s {
		p.err = orEnded(err)
	}
	p.mu.Unlock()
	return err
}

func orEnded(err error) error {
	if err == nil {
		return errEnded
	}
	return err
}

// forget takes a session out, and has another one take its place.
func (p *peer) forget(s *session) {
	p.mu.Lock()
	p.sessions = slices.DeleteFunc(p.sessions, func(o *session) bool { return o == s })
	if p.active == s {
		p.active = nil
	}
	p.mu.Unlock()
	p.activate()
	p.note()
}

// activate has one session bring the catalog, if none does.
func (p *peer) activate() {
	p.mu.Lock()
	var next *session
	if p.active == nil {
		for _, s := range p.sessions {
			s.mu.Lock()
			ready := s.ready
			s.mu.Unlock()
			if ready {
				next, p.active = s, s
				break
			}
		}
	}
	p.mu.Unlock()
	if next != nil {
		next.subscribe(true)
	}
}

func (p *peer) isActive(s *session) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.active == s
}

func (p *peer) received() *received {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.got
}

func (p *peer) contacted() {
	p.mu.Lock()
	p.contact = time.Now()
	p.mu.Unlock()
}

func (p *peer) sentBytes(n int) {
	p.mu.Lock()
	p.bytes += uint64(n)
	p.mu.Unlock()
}

// named takes what the peer calls its gateways.
func (p *peer) named(all []Gateway) {
	p.mu.Lock()
	p.names = all
	p.mu.Unlock()
}

func (p *peer) importer() *importer {
	im := &importer{Config: p.Config, site: p.owner.Site}
	if p.owner.Table != nil {
		im.mesh = p.owner.Table().Mesh()
	}
	return im
}

// deliver takes a catalog that is complete.
func (p *peer) deliver(s *session, r *received) {
	im := p.importer()
	p.mu.Lock()
	if p.active != s {
		p.mu.Unlock()
		return
	}
	var leftOut []string
	r.gateways, leftOut = im.gateways(p.names)
	for i, why := range leftOut {
		r.leftOut[fmt.Sprintf("gateway %d", i)] = why
	}
	before := p.got
	p.got, p.err = r, nil
	if !p.fresh {
		p.fresh, p.since = true, time.Now()
	}
	p.mu.Unlock()
	if n := len(r.leftOut); n > 0 && (before == nil || len(before.leftOut) != n) {
		p.owner.log().Warn("part of what a peer offers is left out", "peer", p.Name, "left_out", n, "first", firstOf(r.leftOut))
	}
	p.note()
}

func firstOf(m map[string]string) string {
	first, key := "", ""
	for k, v := range m {
		if first == "" || k < key {
			first, key = v, k
		}
	}
	return first
}

// confirmed notes that the catalog has a generation, of which nothing may be missing.
func (p *peer) confirmed(s *session, generation uint64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.active != s {
		return nil
	}
	if p.got == nil || p.got.instance != s.instance || p.got.generation < generation {
		s.mu.Lock()
		asked := s.asked
		s.mu.Unlock()
		if asked && p.fresh {
			return fmt.Errorf("a heartbeat of generation %d has come, and no change to that", generation)
		}
		return nil
	}
	if !p.fresh {
		p.fresh, p.since, p.err = true, time.Now(), nil
		p.note()
	}
	return nil
}

// bundle takes the bundle of the peer's trust domain.
func (p *peer) bundle(s *session, doc json.RawMessage) {
	take := p.owner.TakeBundle
	if take == nil {
		return
	}
	problem := ""
	if err := take(p.Config, doc, s.trusted); err != nil {
		problem = "its trust bundle is refused: " + err.Error()
		p.owner.log().Warn("trust bundle of a peer is refused; keeping the last one", "peer", p.Name, "error", err.Error())
	} else if p.owner.TrustGeneration != nil {
		s.trusted = p.owner.TrustGeneration(p.Config) // it has come on a stream that the one before has verified
	}
	p.mu.Lock()
	p.problem = problem
	p.mu.Unlock()
}

// note has Run look again.
func (p *peer) note() {
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

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

// A door is a way to ask for the catalog.
type door struct {
	name      string // "connect-h2 gw.west.example:443"
	transport tunnel.Transport
	err       error // of the transport
}

// doors returns all ways to ask the peer, in order of preference.
func (p *peer) doors() (all []door) {
	for i := range p.Gateways {
		g := &p.Gateways[i]
		at := g.AddressFrom(p.network(), "")
		for _, hop := range g.Transports {
			if !hop.IsCarrier() {
				continue
			}
			one := *g
			one.Transports = []registry.Hop{hop}
			d := door{name: hop.Proto + " " + at.String()}
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
// ended the next door is tried.
func (p *peer) dialAll(ctx context.Context) {
	defer func() {
		if v := recover(); v != nil {
			p.failed(tunnel.Caught(v))
		}
	}()
	doors := p.doors()
	if len(doors) == 0 {
		p.failed(errors.New("none of its gateways has a carrier"))
		return
	}
	pause := time.Duration(0)
	for next := 0; ; next++ {
		d := &doors[next%len(doors)]
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
		case (next+1)%len(doors) == 0 || pause > 0:
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

// ask opens a stream through a door and serves it until its end.
func (p *peer) ask(ctx context.Context, d *door) error {
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

// TrustDomain returns that of the peer's gateways.
func (c *Config) TrustDomain() string {
	if len(c.IDs) == 0 {
		return ""
	}
	domain, _, _ := strings.Cut(strings.TrimPrefix(c.IDs[0], "spiffe://"), "/")
	return domain
}
