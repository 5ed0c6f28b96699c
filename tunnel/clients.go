package tunnel

import (
	"fmt"
	"iter"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Clients are the accounts of what each client of the process holds, whatever
// the listener and the protocol. A client is an IPv4 address or an IPv6 /64;
// the /64s of one /48, which is what one site has, also share an account. Of Unix sockets
// it is a user of this machine.
// Connections are charged to it. A tunnel is charged to the principal that asked for
// it, wherever that comes from, and to the client where there is none.
//
// The Budget has the accounts that all parts of a process share. The zero value
// is ready.
type Clients struct {
	mu       sync.Mutex // guards accounts, and who takes a reference to one that has none
	accounts map[netip.Prefix]*Client
	known    map[string]*Client // of principals, by Peer.ID
	users    map[uint32]*Client // of this machine, by Process.UID
	forgetAt int                // accounts, before those that say nothing are dropped

	tunnels atomic.Int64 // of all clients
	squares atomic.Int64 // the sum of the squares of each client's
}

// A Client is the account of one client: what it holds now. Whoever lets a
// client hold something asks whether it may and counts it. The methods are safe
// for concurrent use.
type Client struct {
	Open    Count // connections and sessions
	Pending Count // of them, those that have not asked for anything yet
	Tunnels Count // being dialed or standing

	descriptors Count
	held        Count // bytes that nobody reads

	budget *Budget
	site   *Client // of its /48; nil for IPv4, and for a /48
	prefix netip.Prefix
	name   string // of a principal, its ID

	principal bool         // it is one, and has tunnels only
	refs      atomic.Int64 // who holds it: connections, sessions, tunnels, and the accounts of its /64s

	mu       sync.Mutex // guards what follows
	newConns bucket     // of new connections
	aborts   bucket     // of tunnels on shared connections that the client gave up at once
	touched  time.Time
}

// A Count is one number of an account, and part of the same one of the client's
// /48.
type Count struct{ n atomic.Int64 }

// Load returns the number.
func (c *Count) Load() int64 { return c.n.Load() }

const (
	// sitePrefix and clientPrefix are how much of an IPv6 address says whose it is.
	sitePrefix, clientPrefix = 48, 64

	// siteShare is how many times the fixed limits of one client a /48 has.
	siteShare = 8

	// minForget is from how many accounts on those that say nothing are dropped.
	minForget = 1024
)

// Client returns the account of addr in the process's accounts, or in own where
// b is nil. An invalid address stands for all clients without one. The caller
// releases it.
func (b *Budget) Client(own *Clients, addr netip.Addr) *Client {
	if b != nil {
		own = &b.clients
	}
	own.mu.Lock()
	defer own.mu.Unlock()
	return own.of(b, prefixOf(addr, clientPrefix))
}

// PendingOf returns how many the client of addr has pending, without making an
// account.
func (b *Budget) PendingOf(own *Clients, addr netip.Addr) int {
	if b != nil {
		own = &b.clients
	}
	own.mu.Lock()
	defer own.mu.Unlock()
	c := own.accounts[prefixOf(addr, clientPrefix)]
	if c == nil {
		return 0
	}
	return int(c.Pending.Load())
}

// of finds or makes an account, and takes a reference. The caller holds mu.
func (m *Clients) of(b *Budget, prefix netip.Prefix) *Client {
	if c := m.accounts[prefix]; c != nil {
		c.refs.Add(1)
		return c
	}
	if m.accounts == nil {
		m.accounts = make(map[netip.Prefix]*Client)
	}
	m.makeRoom()
	c := &Client{prefix: prefix, budget: b, name: prefix.String()}
	switch {
	case !prefix.IsValid():
		c.name = "a client without an address"
	case prefix.IsSingleIP():
		c.name = prefix.Addr().String()
	case prefix.Bits() == clientPrefix:
		c.site = m.of(b, prefixOf(prefix.Addr(), sitePrefix))
	}
	c.refs.Add(1)
	m.accounts[prefix] = c
	return c
}

// makeRoom forgets accounts where there are many. The caller holds mu.
func (m *Clients) makeRoom() {
	if m.count() >= max(m.forgetAt, minForget) {
		m.forget(time.Now())
		m.forgetAt = 2 * m.count()
	}
}

// forget drops the accounts that say nothing. The caller holds mu.
func (m *Clients) forget(now time.Time) {
	for prefix, c := range m.accounts {
		if c.refs.Load() > 0 || c.hasRecentEvents(now) {
			continue
		}
		delete(m.accounts, prefix)
		if c.site != nil {
			c.site.refs.Add(-1)
		}
	}
	for id, c := range m.known {
		if c.refs.Load() <= 0 && !c.hasRecentEvents(now) {
			delete(m.known, id)
		}
	}
	for uid, c := range m.users {
		if c.refs.Load() <= 0 && !c.hasRecentEvents(now) {
			delete(m.users, uid)
		}
	}
}

// Idle returns an error that names a client which holds something, or whose
// account somebody holds: for tests, once all is over.
func (m *Clients) Idle() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.each() {
		if c.Open.Load() != 0 || c.Pending.Load() != 0 || c.Tunnels.Load() != 0 || c.descriptors.Load() != 0 || c.held.Load() != 0 {
			return fmt.Errorf("%s has %d open, %d pending, %d tunnels, %d descriptors, %d bytes", c, c.Open.Load(), c.Pending.Load(), c.Tunnels.Load(), c.descriptors.Load(), c.held.Load())
		}
		if n := c.refs.Load(); n != 0 && (c.principal || c.prefix.Bits() != sitePrefix) {
			return fmt.Errorf("the account of %s is held %d times", c, n)
		}
	}
	return nil
}

// Len returns how many accounts there are.
func (m *Clients) Len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.count()
}

func (m *Clients) count() int { return len(m.accounts) + len(m.known) + len(m.users) }

// each yields all accounts. The caller holds mu.
func (m *Clients) each() iter.Seq[*Client] {
	return func(yield func(*Client) bool) {
		for _, c := range m.accounts {
			if !yield(c) {
				return
			}
		}
		for _, c := range m.known {
			if !yield(c) {
				return
			}
		}
		for _, c := range m.users {
			if !yield(c) {
				return
			}
		}
	}
}

func prefixOf(addr netip.Addr, bits int) netip.Prefix {
	if !addr.Is6() {
		bits = 32
	}
	prefix, _ := addr.Prefix(bits)
	return prefix
}

// String returns the client's address, its prefix, or the ID of the principal.
func (c *Client) String() string { return c.name }

// Release gives back the reference that the caller has.
func (c *Client) Release() {
	if c != nil {
		c.refs.Add(-1)
	}
}

// Retain takes another reference. The caller has one.
func (c *Client) Retain() *Client {
	c.refs.Add(1)
	return c
}

// AddOpen, AddPending and AddTunnels count n more, or fewer, of what the client
// holds.
func (c *Client) AddOpen(n int64) {
	for ; c != nil; c = c.site {
		c.Open.n.Add(n)
	}
}

// AddPending is AddOpen for what has not asked for anything yet.
func (c *Client) AddPending(n int64) {
	for ; c != nil; c = c.site {
		c.Pending.n.Add(n)
	}
}

// AddTunnels is AddOpen for tunnels.
func (c *Client) AddTunnels(n int64) {
	if c.budget != nil {
		all, has := &c.budget.clients, c.Tunnels.n.Add(n)
		all.tunnels.Add(n)
		all.squares.Add(n * (2*has - n))
		c = c.site
	}
	for ; c != nil; c = c.site {
		c.Tunnels.n.Add(n)
	}
}

// addDescriptors is AddOpen for descriptors of the Budget.
func (c *Client) addDescriptors(n int64) {
	for ; c != nil; c = c.site {
		c.descriptors.n.Add(n)
	}
}

// addHeld is AddOpen for bytes that nobody reads.
func (c *Client) addHeld(n int64) {
	for ; c != nil; c = c.site {
		c.held.n.Add(n)
	}
}

// each calls f with c and with the account of its /48, until one refuses. times
// is how often c's limits the account has.
func (c *Client) each(f func(c *Client, times int64) error) error {
	times := int64(1)
	for ; c != nil; c = c.site {
		if err := f(c, times); err != nil {
			return err
		}
		times = siteShare
	}
	return nil
}

// CheckOpen refuses one more of what, such as "connections", where the client has
// as many open as the configuration allows one client.
func (c *Client) CheckOpen(l *Limits, what string) error {
	return c.within("limits.maxConnectionsPerClient", int64(l.MaxConnectionsPerClient), what, func(c *Client) int64 { return c.Open.Load() })
}

// CheckPending is CheckOpen for what has not asked for anything yet, such as
// "unfinished handshakes". pending is how many all clients have together: as it
// approaches Limits.MaxPendingConnections, the clients that have most are refused first. The
// user of a Queue, which makes room for a newcomer instead, passes 0.
func (c *Client) CheckPending(l *Limits, pending int, what string) error {
	held := func(c *Client) int64 { return c.Pending.Load() }
	if err := c.within("limits.maxPendingPerClient", int64(l.MaxPendingPerClient), what, held); err != nil {
		return err
	}
	most, limited := l.PendingLimit()
	switch {
	case !limited:
		return nil
	case pending >= most:
		return Refusef(Overload, "limits.maxPendingConnections: there are %d %s, the limit", pending, what)
	}
	return c.fair(what, int64(most), int64(most-pending), 1, held, "limits.maxPendingConnections allows more")
}

// CheckTunnels is CheckOpen for tunnels. Those of a principal have a limit of their own.
func (c *Client) CheckTunnels(l *Limits) error {
	key, most := "limits.maxConnectionsPerClient", l.MaxConnectionsPerClient
	if c.principal {
		key, most = "limits.maxConnectionsPerPrincipal", l.MaxConnectionsPerPrincipal
	}
	return c.within(key, int64(most), "tunnels", func(c *Client) int64 { return c.Tunnels.Load() })
}

// within refuses one more where the client has most already; zero and less are
// no limit.
func (c *Client) within(key string, most int64, what string, held func(*Client) int64) error {
	if most <= 0 {
		return nil
	}
	return c.each(func(c *Client, times int64) error {
		if n := held(c); n >= most*times {
			return Refusef(Overload, "%s: %s has %d %s open, the limit is %d", key, c, n, what, most*times)
		}
		return nil
	})
}

// CheckRate counts one new of what, such as "connections", and refuses it where
// the client opens them faster than the configuration allows one client.
func (c *Client) CheckRate(l *Limits, now time.Time, what string) error {
	key, most := "limits.connectionRatePerClient", l.ConnectionRatePerClient
	if c.principal {
		key, most = "limits.connectionRatePerPrincipal", l.ConnectionRatePerPrincipal
	}
	if most <= 0 {
		return nil
	}
	return c.each(func(c *Client, times int64) error {
		rate := float64(int64(most) * times)
		c.mu.Lock()
		ok := c.newConns.spend(now, rate, rate)
		c.touched = now
		c.mu.Unlock()
		if !ok {
			return Refusef(Overload, "%s: %s opened more than %.0f %s in a second", key, c, rate, what)
		}
		return nil
	})
}

// A bucket counts events and forgets a number of them each second.
type bucket struct {
	n  float64
	at time.Time
}

func (b *bucket) drain(now time.Time, perSecond float64) {
	if !b.at.IsZero() {
		b.n = max(0, b.n-now.Sub(b.at).Seconds()*perSecond)
	}
	b.at = now
}

// spend counts an event, unless there would be more than most.
func (b *bucket) spend(now time.Time, perSecond, most float64) bool {
	b.drain(now, perSecond)
	if b.n+1 > most {
		return false
	}
	b.n++
	return true
}

// Streams that the client aborts within earlyAbort of the answer, and before a
// byte of the service has come, cost a dial and a line in the log and cost the
// client next to nothing. A client may have mostAborts of them at once and
// abortsPerSecond in the long run; each tunnel that ends otherwise makes up for
// one. Beyond that its new tunnels on shared connections are refused.
const (
	earlyAbort      = time.Second
	mostAborts      = 500
	abortsPerSecond = 100
)

// countTunnelEnd counts the end of a stream's tunnel: early where it was given up
// before it was of any use.
func (c *Client) countTunnelEnd(early bool, now time.Time) {
	_ = c.each(func(c *Client, times int64) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !early && c.aborts.n == 0 {
			return nil // as nearly always
		}
		c.aborts.drain(now, float64(abortsPerSecond*times))
		if early {
			c.aborts.n++
			c.touched = now
		} else {
			c.aborts.n = max(0, c.aborts.n-1)
		}
		return nil
	})
}

// checkAborts refuses a new tunnel of a client that has aborted too many.
func (c *Client) checkAborts(now time.Time) error {
	return c.each(func(c *Client, times int64) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.aborts.n == 0 {
			return nil
		}
		c.aborts.drain(now, float64(abortsPerSecond*times))
		if c.aborts.n < float64(mostAborts*times) {
			return nil
		}
		return Refusef(Overload, "%s aborted more than %d tunnels before the service had answered, and may abort %d in a second", c, mostAborts*times, abortsPerSecond*times)
	})
}

// hasRecentEvents reports whether the client's buckets say something still.
func (c *Client) hasRecentEvents(now time.Time) bool {
	const longest = max(1, mostAborts/abortsPerSecond) * time.Second
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.touched.IsZero() && now.Sub(c.touched) <= longest
}

// principal returns the account of the principal with the given ID, as Client does of an
// address.
func (b *Budget) principal(own *Clients, id string) *Client {
	if b != nil {
		own = &b.clients
	}
	own.mu.Lock()
	defer own.mu.Unlock()
	c := own.known[id]
	if c == nil {
		if own.known == nil {
			own.known = make(map[string]*Client)
		}
		own.makeRoom()
		c = &Client{principal: true, budget: b, name: id}
		own.known[id] = c
	}
	c.refs.Add(1)
	return c
}

// user returns the account of the user whose process p is, as Client does of an address.
func (b *Budget) user(own *Clients, p *Process) *Client {
	if b != nil {
		own = &b.clients
	}
	own.mu.Lock()
	defer own.mu.Unlock()
	c := own.users[p.UID]
	if c == nil {
		if own.users == nil {
			own.users = make(map[uint32]*Client)
		}
		own.makeRoom()
		c = &Client{budget: b, name: p.User()}
		own.users[p.UID] = c
	}
	c.refs.Add(1)
	return c
}
