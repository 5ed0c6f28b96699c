package peer

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// A peer is one site with which catalogs are exchanged.
type peer struct {
	*Config
	owner   *Peers
	changed chan struct{} // has room for one: what Run sends is different

	// subscriber says that it is no peer, and only reads what we offer.
	subscriber bool

	lastGiven *given // of follow alone

	mu       sync.Mutex // guards what follows
	sessions []*session // open ones, and those that begin
	active   *session   // the one by which we get the catalog; nil for none
	got      *received  // the last good catalog; nil for none
	fresh    bool       // got is what the peer offers now
	err      error      // why it is not; nil at the start
	since    time.Time  // of fresh, or of its end
	contact  time.Time  // when the last message has come
	offers   map[string]*catalog
	closed   bool
	absent   bool   // its gateways have said that there is no catalog for us: got is empty
	bytes    uint64 // sent
	problem  string // of the bundle
}

// oneWay reports whether the stream carries the catalog of one side, and nothing else.
func (p *peer) oneWay() bool { return p.subscriber || p.Network != "" }

// is reports whether a caller is a gateway of the peer.
func (p *peer) is(caller *tunnel.Peer) bool {
	return caller.Method == "mtls" && strings.HasPrefix(caller.ID, "spiffe://") &&
		slices.ContainsFunc(p.IDs, func(id string) bool { return matchesID(id, caller.ID) })
}

// open returns the sessions with an open stream.
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
	if p.owner.TrustGeneration != nil && !p.oneWay() {
		s.trusted = p.owner.TrustGeneration(p.Config)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	key, most := gateway.ID+" "+s.from.String(), maxSessions
	if p.subscriber {
		s.network, _ = p.owner.Table().Network(s.from)
		key, most = viewOf(&gateway, s.network), MaxSubscriptions
	}
	switch s.offers = p.offers[key]; {
	case p.closed:
		return nil, tunnel.Refusef(tunnel.Denied, "peer: %q is no longer configured", p.Name)
	case len(p.sessions) >= most:
		return nil, tunnel.Refusef(tunnel.Overload, "peer: %q has %d streams, limit %d", p.Name, len(p.sessions), most)
	case s.offers == nil && p.subscriber && len(p.offers) >= maxViews:
		return nil, tunnel.Refusef(tunnel.Overload, "peer: %q comes with %d different credentials and from as many networks, limit %d", p.Name, len(p.offers), maxViews)
	case s.offers == nil:
		for k := range p.offers { // drop those that no session uses
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

// begin gives a session its stream. If the peer is no longer configured, it closes the stream and
// returns false.
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

// forget removes a session, and has another one take its place.
func (p *peer) forget(s *session) {
	p.mu.Lock()
	p.sessions = slices.DeleteFunc(p.sessions, func(o *session) bool { return o == s })
	if p.active == s {
		p.active = nil
	}
	if p.subscriber && !slices.ContainsFunc(p.sessions, func(o *session) bool { return o.offers == s.offers }) {
		maps.DeleteFunc(p.offers, func(_ string, c *catalog) bool { return c == s.offers })
	}
	p.mu.Unlock()
	p.activate()
	p.note()
}

// activate has one session ask for the catalog, if none does.
func (p *peer) activate() {
	if p.subscriber {
		return // it offers nothing
	}
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

// moved takes over changed gateways of the peer, if its catalog comes by s.
func (p *peer) moved(s *session) {
	im := p.importer()
	p.mu.Lock()
	if p.active != s || p.got == nil || reflect.DeepEqual(p.got.named, s.gateways) {
		p.mu.Unlock()
		return
	}
	next := *p.got
	next.leftOut = maps.Clone(next.leftOut)
	im.use(&next, s.gateways)
	p.got = &next
	p.mu.Unlock()
	p.owner.log().Info("a peer has other gateways", "peer", p.Name, "gateways", len(next.gateways))
	p.note()
}

func (p *peer) importer() *importer {
	im := &importer{Config: p.Config}
	if !p.oneWay() { // otherwise the catalog has services of our own site, too
		im.site = p.owner.Site
	}
	if p.owner.Table != nil {
		im.mesh = p.owner.Table().Mesh()
	}
	return im
}

// deliver takes over a complete catalog.
func (p *peer) deliver(s *session, r *received) {
	im := p.importer()
	p.mu.Lock()
	if p.active != s {
		p.mu.Unlock()
		return
	}
	im.use(r, s.gateways)
	before := p.got
	p.got, p.err, p.absent = r, nil, false
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

// confirmed handles a heartbeat by which the catalog has a generation: nothing up to that may be
// missing.
func (p *peer) confirmed(s *session, generation uint64) error {
	p.moved(s) // a catalog of an earlier stream has the gateways of its hello
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

// bundle takes over the trust bundle of the peer.
func (p *peer) bundle(s *session, doc json.RawMessage) {
	take := p.owner.TakeBundle
	if take == nil || p.oneWay() {
		return
	}
	problem := ""
	if err := take(p.Config, doc, s.trusted); err != nil {
		problem = "its trust bundle is refused: " + err.Error()
		p.owner.log().Warn("trust bundle of a peer is refused; keeping the last one", "peer", p.Name, "error", err.Error())
	} else if p.owner.TrustGeneration != nil {
		s.trusted = p.owner.TrustGeneration(p.Config) // this stream was verified by the bundle before, which vouches for the new one
	}
	p.mu.Lock()
	p.problem = problem
	p.mu.Unlock()
}

// note has Run look at the catalog again.
func (p *peer) note() {
	select {
	case p.changed <- struct{}{}:
	default:
	}
}
