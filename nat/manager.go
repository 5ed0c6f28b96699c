package nat

import (
	"context"
	crand "crypto/rand"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Times of a Manager.
const (
	DefaultLifetime = 2 * time.Hour // that RFC 6887 section 15 and RFC 6886 section 3.3 recommend

	pollInterval   = 30 * time.Second // between two questions whether all is as it was
	routeInterval  = 2 * time.Second  // between two looks for a default route while there is none
	searchTimeout  = 2 * time.Second  // for a router to say which protocols it speaks, at first
	maxSearchTime  = 8 * time.Second  // for one that has not answered so far
	mapTimeout     = 8 * time.Second  // for one mapping: enough for two requests of PCP
	stunTimeout    = 2 * time.Second
	verifyTimeout  = 10 * time.Second
	minReverify    = 5 * time.Second  // after a verification that failed; doubled each time
	verifyInterval = 10 * time.Minute // between two verifications of a mapping that is verified
	releaseTimeout = 2 * time.Second  // for all deletions, at the end
	minRenew       = 4 * time.Second  // RFC 6887 section 11.2.1
	minRetry       = 2 * time.Second  // after a request without an answer; doubled each time
	maxRetry       = 10 * time.Minute
	maxSearch      = time.Minute     // between two searches for a router that speaks any protocol
	announceDelay  = 5 * time.Second // at most: RFC 6887 section 14.1.3
	maxLost        = 3               // polls without an answer; then the router is searched for again
	maxUnverified  = 3               // failed verifications; then a mapping is not verified any more
	maxPortChoices = 5               // outside ports that are tried for one mapping
)

// Protocols are the names of the protocols, in order of preference.
var Protocols = []string{"pcp", "nat-pmp", "upnp"}

// A Port is a port of this host that is to be mapped.
type Port struct {
	Name     string // of the listener, for people
	Network  string // "tcp" or "udp"
	Internal uint16
	External uint16 // to ask for outside; 0 means the same as Internal
}

// Settings say what a Manager does.
type Settings struct {
	Ports     []Port
	Router    netip.Addr    // zero means that of the default route
	Protocols []string      // to try; nil means all of Protocols
	Lifetime  time.Duration // to ask for; 0 means DefaultLifetime
	STUN      []string      // HOST:PORT of servers to ask for the outside address; the first answer counts
}

// A Route is the way to the internet.
type Route struct {
	Router    netip.Addr `json:"router"`
	Local     netip.Addr `json:"local"`               // of this host, towards the router
	Interface string     `json:"interface,omitempty"` // "" where that is not known
}

// A Verifier has somebody outside connect to a mapped port, and returns nil where this gateway has
// answered.
type Verifier func(ctx context.Context, p Port, public netip.AddrPort) error

// A Manager keeps the ports of its Settings mapped while Run runs. All its fields are optional.
type Manager struct {
	Dial DialFunc // to the router and to STUN servers; nil means a net.Dialer's

	// FindRoute returns the way to the internet; nil means DefaultRoute.
	FindRoute func(ctx context.Context, router netip.Addr) (Route, error)

	// FindUPnP returns the Client of a router by UPnP-IGD; nil means that there is none.
	FindUPnP func(ctx context.Context, route Route) (Client, error)

	// ListenAnnouncements opens the socket for announcements of the router at an interface;
	// nil means ListenAnnouncements. Without a socket, changes are found by polling alone.
	ListenAnnouncements func(ifname string) (net.PacketConn, error)

	// Lookup resolves the names of STUN servers; nil means net.DefaultResolver.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	// Verify is called for each mapping; nil means that none is ever verified.
	Verify Verifier

	// Secret makes the nonces of PCP: with the same one a gateway that comes back after a
	// crash may renew its mappings. Empty means a random one.
	Secret []byte

	// OnChange is called by Run with each Status that differs from the one before it. It must
	// not block. May be nil.
	OnChange func(Status)

	Log *slog.Logger // nil discards

	settings atomic.Pointer[Settings]
	status   atomic.Pointer[Status]
	reverify atomic.Bool
	once     sync.Once
	changed  chan struct{}

	// Of Run's goroutine.
	route    Route
	clients  []Client       // that the router answers by, in order of preference
	lost     map[Client]int // polls in a row without an answer
	searched *Settings      // that clients were searched for
	mappings []*mapping
	outside  netip.Addr // that the router says
	seen     netip.Addr // by STUN
	unseen   string     // why no STUN server has answered the last question
	problem  string     // why there is nothing to ask
	searchAt time.Time  // not before
	retry    time.Duration
	heard    announcements

	now func() time.Time // for tests; nil means time.Now
}

// A mapping is the state of a Port.
type mapping struct {
	Port
	client   Client // that has made it; nil while there is none
	external netip.AddrPort
	lifetime time.Duration
	expires  time.Time // zero for a permanent one
	due      time.Time // the next request
	retry    time.Duration
	err      error

	verified   bool
	verifyAt   time.Time
	unverified int // failures in a row
	verifyErr  error
}

// Use replaces the settings by s. It may be called at any time, and s must not be changed
// afterwards.
func (m *Manager) Use(s Settings) {
	m.settings.Store(&s)
	select {
	case m.wake() <- struct{}{}:
	default:
	}
}

// Reverify has Run verify again, without a delay, what is not verified: there is another gateway to
// ask. It may be called at any time.
func (m *Manager) Reverify() {
	m.reverify.Store(true)
	select {
	case m.wake() <- struct{}{}:
	default:
	}
}

func (m *Manager) wake() chan struct{} {
	m.once.Do(func() { m.changed = make(chan struct{}, 1) })
	return m.changed
}

// Run keeps the ports mapped until ctx is done, then deletes the mappings and returns nil. It may
// be called once.
func (m *Manager) Run(ctx context.Context) error {
	if m.Log == nil {
		m.Log = slog.New(slog.DiscardHandler)
	}
	if len(m.Secret) == 0 {
		m.Secret = []byte(crand.Text())
	}
	defer m.heard.stop()
	defer func() {
		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		m.release(release, m.mappings)
		m.mappings, m.clients = nil, nil
		m.report()
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.wake():
		case <-m.heard.received():
		case <-timer.C:
		}
		timer.Reset(m.safeStep(ctx))
	}
}

func (m *Manager) clock() time.Time {
	if m.now != nil {
		return m.now()
	}
	return time.Now()
}

// safeStep is step, which is called again after pollInterval if it panics.
func (m *Manager) safeStep(ctx context.Context) (wait time.Duration) {
	defer m.recovered()
	wait = pollInterval
	return m.step(ctx)
}

// step does what is due, and returns how long to wait for the next step.
func (m *Manager) step(ctx context.Context) time.Duration {
	s := m.settings.Load()
	if s == nil {
		s = &Settings{}
	}
	m.keepPorts(ctx, s)
	if len(s.Ports) == 0 {
		m.clients, m.route, m.problem, m.unseen = nil, Route{}, "", ""
		m.heard.stop()
		m.report()
		return time.Hour
	}
	find := m.FindRoute
	if find == nil {
		find = DefaultRoute
	}
	route, err := find(ctx, s.Router)
	if err != nil {
		m.problem = err.Error()
		if !s.Router.IsValid() {
			m.problem += ": set nat.router if there is one"
		}
		m.report()
		return routeInterval // a gateway may start before the network does
	}
	m.problem = ""
	if route != m.route {
		m.setRoute(route)
	}
	seen := make(chan netip.Addr, 1)
	unseen := ""
	go func() {
		defer close(seen)
		defer m.recovered()
		var at netip.Addr
		at, unseen = m.askSTUN(ctx, s.STUN)
		seen <- at
	}()
	if len(m.clients) == 0 && !m.clock().Before(m.searchAt) {
		m.search(ctx, s)
	}
	m.poll(ctx)
	now := <-seen
	if m.unseen = unseen; now.IsValid() {
		if m.seen.IsValid() && now != m.seen {
			m.Log.Info("the outside address changed; renewing the mappings", "from", m.seen, "to", now)
			m.renewAll()
		}
		m.seen = now
	}
	for _, p := range m.mappings {
		if ctx.Err() == nil {
			m.keep(ctx, p, s)
		}
	}
	m.report()
	if m.verify(ctx) {
		m.report()
	}
	return m.next()
}

// keepPorts has a mapping for each port of s, and deletes those of others.
func (m *Manager) keepPorts(ctx context.Context, s *Settings) {
	var keep, gone []*mapping
	for _, p := range m.mappings {
		if slices.Contains(s.Ports, p.Port) {
			keep = append(keep, p)
		} else {
			gone = append(gone, p)
		}
	}
	for _, port := range s.Ports {
		if !slices.ContainsFunc(keep, func(p *mapping) bool { return p.Port == port }) {
			keep = append(keep, &mapping{Port: port})
		}
	}
	m.mappings = keep
	if len(gone) > 0 {
		ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
		defer cancel()
		m.release(ctx, gone)
	}
	if m.searched != nil && !slices.Equal(m.searched.Protocols, s.Protocols) {
		m.clients, m.searchAt, m.retry = nil, time.Time{}, 0
	}
	m.searched = s
	for _, p := range m.mappings {
		if p.client != nil && !s.allows(p.client.Protocol()) {
			m.release(ctx, []*mapping{p})
			*p = mapping{Port: p.Port}
		}
	}
}

func (s *Settings) allows(protocol string) bool {
	return s.Protocols == nil || slices.Contains(s.Protocols, protocol)
}

// release deletes mappings at the router.
func (m *Manager) release(ctx context.Context, ps []*mapping) {
	for _, p := range ps {
		if p.client == nil {
			continue
		}
		if _, err := p.client.Map(ctx, m.request(p, 0)); err != nil {
			m.Log.Warn("cannot delete a port mapping; the router drops it by itself when it expires", "listener", p.Name, "external", p.external, "error", err)
		} else {
			m.Log.Info("port mapping deleted", "listener", p.Name, "external", p.external)
		}
		p.client = nil
	}
}

// setRoute takes another route to the internet, and forgets the mappings of the router before: that
// cannot be reached any more.
func (m *Manager) setRoute(route Route) {
	if m.route.Router.IsValid() {
		m.Log.Info("the way to the internet changed; mapping all ports again", "router", route.Router, "address", route.Local)
	}
	m.route, m.clients, m.outside, m.seen, m.searchAt, m.retry = route, nil, netip.Addr{}, netip.Addr{}, time.Time{}, 0
	for i, p := range m.mappings {
		m.mappings[i] = &mapping{Port: p.Port}
	}
	listen := m.ListenAnnouncements
	if listen == nil {
		listen = ListenAnnouncements
	}
	if err := m.heard.start(listen, route); err != nil {
		m.Log.Debug("cannot hear announcements of the router; asking it now and then", "error", err)
	}
}

// search finds out which protocols the router speaks. It asks by all of them at once: a router
// gives no answer by a protocol that it does not speak, and each search takes its whole time. A
// router that is slow, or that starts when this host does, gets more time in each search.
func (m *Manager) search(ctx context.Context, s *Settings) {
	ctx, cancel := context.WithTimeoutCause(ctx, min(max(m.retry, searchTimeout), maxSearchTime), errors.New("no answer in time"))
	defer cancel()
	found := make([]Client, len(Protocols))
	var wg sync.WaitGroup
	for i, protocol := range Protocols {
		if !s.allows(protocol) {
			continue
		}
		wg.Go(func() {
			defer m.recovered()
			c, err := m.client(ctx, protocol)
			if err == nil && c != nil {
				_, _, err = c.Poll(ctx)
			}
			if refusal, ok := errors.AsType[*Refusal](err); ok && !refusal.Forever {
				err = nil // it speaks the protocol, and a mapping may work later
			}
			if err == nil {
				found[i] = c
			} else {
				m.Log.Debug("the router does not speak a protocol for port mapping", "protocol", protocol, "error", err)
			}
		})
	}
	wg.Wait()
	m.clients = slices.DeleteFunc(found, func(c Client) bool { return c == nil })
	m.lost = map[Client]int{}
	if len(m.clients) == 0 {
		m.retry = min(max(2*m.retry, minRetry), maxSearch)
		m.searchAt = m.clock().Add(m.retry)
		return
	}
	m.retry = 0
	m.renewAll()
}

// recovered is deferred where answers are read: a panic loses that answer only.
func (m *Manager) recovered() {
	if v := recover(); v != nil {
		m.Log.Error("panic in an answer of the router or of a STUN server", "panic", v, "stack", string(debug.Stack()))
	}
}

// next returns how long to wait for the next step.
func (m *Manager) next() time.Duration {
	now, wait := m.clock(), pollInterval
	if len(m.clients) == 0 {
		wait = min(wait, m.searchAt.Sub(now))
	}
	for _, p := range m.mappings {
		if len(m.clients) > 0 {
			wait = min(wait, p.due.Sub(now))
		}
		if m.Verify != nil && m.public(p).IsValid() {
			wait = min(wait, p.verifyAt.Sub(now))
		}
	}
	return max(wait, time.Second)
}

// public returns the address at which p may be reached from outside, and the zero AddrPort if there
// is none.
func (m *Manager) public(p *mapping) netip.AddrPort {
	kind, _ := m.assess()
	switch {
	case kind == NoNAT && p.client == nil:
		return netip.AddrPortFrom(m.route.Local, p.Internal)
	case p.client == nil || !IsPublic(p.external.Addr()):
		return netip.AddrPort{}
	}
	return p.external
}

func (m *Manager) assess() (Kind, string) { return Assess(m.route.Local, m.outside, m.seen) }
