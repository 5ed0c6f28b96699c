package reverse

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Defaults and limits of Groups.
const (
	DefaultHoldFor       = 10 * time.Minute
	DefaultNamesPerOwner = 1000
	maxNames             = 1 << 16 // of all owners
	maxMembers           = 1 << 10 // of one name
	maxMemberships       = 1 << 16 // of one owner
	maxAttempts          = 3       // sessions that are tried for one request
	maxAllow             = 64      // ids in Registration.Allow
	maxText              = 256     // bytes of a group and of an id
)

// A Registration is what a connector asks for: to serve a name.
type Registration struct {
	Name tunnel.Pattern `json:"name"`
	Port uint16         `json:"port,omitzero"` // that clients ask for; 0 means any

	// Group is the endpoint that it serves, where a service of the gateway's configuration
	// has the name. It may be empty where that has one group only. It has no effect on
	// other names: all sessions of a name share the load.
	Group string `json:"group,omitzero"`

	// Weight is its share of new streams beside other sessions of the group; 0 means 1.
	Weight uint16 `json:"weight,omitzero"`

	// Allow has the ids of the callers that may connect; empty means that the gateway's
	// policies alone decide. It is for names that no service of the configuration has.
	Allow []string `json:"allow,omitzero"`

	// Insecure says that what clients send may go over pool connections although it is not
	// encrypted. Without it that is for TLS which passes through by its name.
	Insecure bool `json:"insecure,omitzero"`

	raw bool // in a copy for Open: the gateway adds nothing to the client's bytes, and may use a pool connection
}

// A Session reaches one connector. Its methods may be called at any time, by anyone.
type Session interface {
	// Open opens a stream for req to what the connector serves. reg is a copy of what it
	// has joined with, whose Name is never a wildcard and whose Port is the one that is
	// asked for, 0 if that is not known. ctx covers the opening and nothing after. The
	// net.Conn belongs to the caller. After an error another session is tried, unless it is
	// an *tunnel.Error that is Final.
	Open(ctx context.Context, req *tunnel.Request, reg *Registration) (net.Conn, error)

	// Streams returns how many streams are open. New ones go to the session that has the
	// fewest for its weight.
	Streams() int

	// Security says how the session is protected.
	Security() tunnel.Security
}

// Groups knows which sessions serve which name: a live registry beside the table. The zero value, with
// an Authorize, is ready. It is safe for use by many goroutines, and must not be copied.
type Groups struct {
	// Authorize decides whether the caller of req may serve a name: see
	// registry.Registry.MayRegister. Nil denies everything.
	Authorize func(req *tunnel.Request, name tunnel.Pattern, port uint16) (groups []string, listed bool, err error)

	// HoldFor is how long a name stays its owner's after the last session has left; 0 means
	// DefaultHoldFor.
	HoldFor time.Duration

	// NamesPerOwner is how many names one owner may have; 0 means DefaultNamesPerOwner.
	NamesPerOwner int

	// PassedOn reports whether another replica of this gateway has passed req on: it goes to
	// sessions of this one and no further. Nil means that there are no others. It is
	// Replicas.PassedOn.
	PassedOn func(req *tunnel.Request) bool

	// Log receives which names are registered and which end. Nil discards it.
	Log *slog.Logger

	used atomic.Bool   // a name was registered, ever
	turn atomic.Uint32 // of equal sessions

	once    sync.Once
	changed chan struct{} // set by once: names have changed, for a Keeper

	mu     sync.RWMutex // guards what follows
	names  map[tunnel.Pattern]*heldName
	groups map[string][]*Membership
	sorted sortedNames            // those of names
	owned  map[string]sortedNames // those of each owner
	joined map[string]int         // memberships by owner
	swept  time.Time
	remote map[string][]*remoteMember // sessions of other replicas, by group
	news   chan struct{}              // closed with the next change for other replicas; nil if nobody waits for one
	recent recentNames
}

// A heldName is a name that belongs to an owner.
type heldName struct {
	name    tunnel.Pattern
	owner   string
	listed  bool                  // a service of the table has it
	live    *registry.LiveService // that has it, unless it is listed
	allow   []string
	ports   []uint16
	members []*Membership
	remotes []*remoteName // the same name at other replicas that have sessions for it
	since   int64         // when the owner got it, in milliseconds of Unix time: of two owners the first one keeps it
	until   time.Time     // when it is free again; counts while there are no members and no remotes
}

// heldAt reports whether the name is its owner's at a time.
func (h *heldName) heldAt(now time.Time) bool {
	return len(h.members) > 0 || len(h.remotes) > 0 || now.Before(h.until)
}

// A Membership is one name that one session serves, until Leave.
type Membership struct {
	Registration
	Owner  string         // the id of the connector's principal
	Source netip.AddrPort // where the connector came from
	Since  time.Time

	group    string // the key in Groups.groups
	session  Session
	process  string // what the connector calls its process; "" where it has no name of its own
	groups   *Groups
	req      *tunnel.Request // by which the connector came
	draining atomic.Bool
	left     bool // guarded by groups.mu
}

// Join has s serve what reg says. req is the request by which its connector came: its Peer
// owns the name. The error is an *tunnel.Error with the Reason Denied, for what policies and
// other owners deny, BadRequest or Overload. Leave ends the Membership.
func (g *Groups) Join(req *tunnel.Request, s Session, reg Registration) (*Membership, error) {
	return g.join(req, s, "", reg)
}

// join is Join for a connector that calls its process so: its sessions count as one connector.
func (g *Groups) join(req *tunnel.Request, s Session, process string, reg Registration) (*Membership, error) {
	owner := req.Peer.ID
	if req.Peer.Method == "" || owner == "" {
		return nil, tunnel.Refusef(tunnel.Denied, "reverse: %q: a name has an owner, and the caller has no identity", reg.Name)
	}
	if err := reg.check(); err != nil {
		return nil, err
	}
	key, listed, err := g.authorize(req, &reg)
	if err != nil {
		return nil, err
	}
	m := &Membership{Registration: reg, Owner: owner, Source: req.Source, Since: time.Now(), group: key, session: s, process: process, groups: g, req: req}
	if err := g.add(m, listed); err != nil {
		return nil, err
	}
	g.log().Debug("name registered", "name", reg.Name.String(), "port", reg.Port, "group", reg.Group, "owner", owner, "source", req.Source.String())
	return m, nil
}

// authorize returns the key of the group that the caller of req joins by reg, and whether a
// service of the table has the name.
func (g *Groups) authorize(req *tunnel.Request, reg *Registration) (key string, listed bool, err error) {
	if g.Authorize == nil {
		return "", false, tunnel.Refusef(tunnel.Denied, "reverse: %q: no policy lets anyone register names here", reg.Name)
	}
	groups, listed, err := g.Authorize(req, reg.Name, reg.Port)
	switch {
	case err != nil:
		return "", listed, err
	case !listed:
		return liveGroup(reg.Name), false, nil
	}
	key, err = listedGroup(reg, groups)
	return key, true, err
}

// Recheck ends every Membership that Authorize no longer permits, or permits in another
// group. It is called after each change of what Authorize decides by. Open streams go on:
// policies about their own callers decide about them.
func (g *Groups) Recheck() {
	if !g.used.Load() {
		return
	}
	var all []*Membership
	g.mu.RLock()
	for _, members := range g.groups {
		all = append(all, members...)
	}
	g.mu.RUnlock()
	for _, m := range all {
		key, _, err := g.authorize(m.req, &m.Registration)
		if err == nil && key == m.group {
			continue
		}
		m.Leave()
		if err != nil {
			g.logLost(m.req, m.Name, m.Port, err)
		}
	}
}

// logLost logs that the connector of req may not have a name any longer.
func (g *Groups) logLost(req *tunnel.Request, name tunnel.Pattern, port uint16, why error) {
	g.log().Warn("name is no longer registered", "name", name.String(), "port", port, "owner", req.Peer.ID, "source", req.Source.String(), "reason", string(tunnel.ReasonOf(why)), "error", why.Error())
}

// check returns why no gateway can accept r.
func (r *Registration) check() error {
	switch {
	case r.Name.Suffix.IsZero() || r.Name == tunnel.AnyName || r.Name.Suffix.IsReserved():
		return tunnel.Refusef(tunnel.BadRequest, "reverse: %q can't be registered", r.Name)
	case len(r.Group) > maxText || strings.ContainsFunc(r.Group, func(c rune) bool { return c <= ' ' || c == '@' || c == 0x7f }):
		return tunnel.Refusef(tunnel.BadRequest, "reverse: %q: group %q is not a name", r.Name, tunnel.Clip(r.Group))
	case len(r.Allow) > maxAllow:
		return tunnel.Refusef(tunnel.BadRequest, "reverse: %q: allow has %d ids, limit %d", r.Name, len(r.Allow), maxAllow)
	}
	for _, id := range r.Allow {
		if len(id) > maxText {
			return tunnel.Refusef(tunnel.BadRequest, "reverse: %q: an id in allow has %d bytes, limit %d", r.Name, len(id), maxText)
		}
	}
	for _, p := range r.policies("") {
		if err := p.Check(); err != nil {
			return tunnel.Refusef(tunnel.BadRequest, "reverse: %q: allow: %w", r.Name, err)
		}
	}
	return nil
}

// add lists m, if its name belongs to no other owner.
func (g *Groups) add(m *Membership, listed bool) error {
	now := m.Since
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sweep(now)
	if other := g.conflicting(m, now); other != nil {
		return tunnel.Refusef(tunnel.Denied, "reverse: %q can't be registered: %q %w, and is kept for it for %v after its last session", m.Name, other.name, errTaken, g.holdFor())
	}
	h := g.names[m.Name]
	if h != nil && h.owner != m.Owner { // its time is over
		g.free(m.Name, h)
		h = nil
	}
	switch {
	case g.joined[m.Owner] >= maxMemberships:
		return tunnel.Refusef(tunnel.Overload, "reverse: %q: all sessions of the owner serve %d names, the limit", m.Name, maxMemberships)
	case h != nil && len(h.members) >= maxMembers:
		return tunnel.Refusef(tunnel.Overload, "reverse: %q has %d sessions, the limit", m.Name, len(h.members))
	case h == nil:
		if n := len(g.owned[m.Owner]); n >= g.namesPerOwner() {
			return tunnel.Refusef(tunnel.Overload, "reverse: %q: the owner has %d names, the limit", m.Name, n)
		}
		if len(g.names) >= maxNames {
			return tunnel.Refusef(tunnel.Overload, "reverse: %q: %d names are registered, the limit", m.Name, len(g.names))
		}
		h = g.hold(m.Name, m.Owner)
	}
	if h.members = append(h.members, m); len(h.members) == 1 {
		g.tellChange()
	}
	if g.joined == nil {
		g.joined = map[string]int{}
	}
	g.joined[m.Owner]++
	g.groups[m.group] = append(slices.Clip(g.groups[m.group]), m)
	g.setLive(h, &m.Registration, m.group, listed)
	g.announce(m.Name)
	return nil
}

// hold gives a name that is free to an owner. The caller holds mu.
func (g *Groups) hold(name tunnel.Pattern, owner string) *heldName {
	if g.names == nil {
		g.names, g.owned = map[tunnel.Pattern]*heldName{}, map[string]sortedNames{}
	}
	if g.groups == nil {
		g.groups = map[string][]*Membership{}
	}
	h := &heldName{name: name, owner: owner, since: time.Now().UnixMilli()}
	g.names[name] = h
	g.sorted, g.owned[owner] = g.sorted.with(h), g.owned[owner].with(h)
	g.used.Store(true)
	g.note(name)
	return h
}

func (g *Groups) namesPerOwner() int { return cmp.Or(g.NamesPerOwner, DefaultNamesPerOwner) }

// errTaken is part of the error for a name that another owner has.
var errTaken = errors.New("belongs to another owner")

// conflicting returns a name of another owner that is the same as m's, below it or above it. It looks
// at no other names, and frees some whose time is over. The caller holds mu.
func (g *Groups) conflicting(m *Membership, now time.Time) *heldName {
	others := func(h *heldName) bool { return h != nil && h.owner != m.Owner && h.heldAt(now) }
	if h := g.names[m.Name]; others(h) {
		return h
	}
	for parent, ok := m.Name.Suffix.Parent(); ok; parent, ok = parent.Parent() {
		if h := g.names[tunnel.Pattern{Suffix: parent, Wildcard: true}]; others(h) {
			return h
		}
	}
	if !m.Name.Wildcard {
		return nil
	}
	for {
		h := g.sorted.below(m.Name.Suffix).notOf(g.owned[m.Owner].below(m.Name.Suffix))
		if h == nil || h.heldAt(now) {
			return h
		}
		g.free(h.name, h) // its time is over
	}
}

// sweep frees the names whose time is over, once in a while. The caller holds mu.
func (g *Groups) sweep(now time.Time) {
	every := time.Minute
	if len(g.names) >= maxNames {
		every = time.Second
	}
	if now.Sub(g.swept) < every {
		return
	}
	g.swept = now
	over := func(h *heldName) bool { return !h.heldAt(now) }
	owners := map[string]bool{}
	for name, h := range g.names {
		if over(h) {
			delete(g.names, name)
			g.note(name)
			owners[h.owner] = true
		}
	}
	if len(owners) == 0 {
		return
	}
	g.sorted = slices.DeleteFunc(g.sorted, over)
	for owner := range owners {
		if g.owned[owner] = slices.DeleteFunc(g.owned[owner], over); len(g.owned[owner]) == 0 {
			delete(g.owned, owner)
		}
	}
}

// free forgets a name. The caller holds mu.
func (g *Groups) free(name tunnel.Pattern, h *heldName) {
	delete(g.names, name)
	g.note(name)
	g.sorted = g.sorted.without(h)
	if g.owned[h.owner] = g.owned[h.owner].without(h); len(g.owned[h.owner]) == 0 {
		delete(g.owned, h.owner)
	}
}

// Drain has m serve new requests only if no other session of its group does.
func (m *Membership) Drain() {
	if m.draining.Swap(true) {
		return
	}
	m.groups.mu.Lock()
	defer m.groups.mu.Unlock()
	m.groups.announce(m.Name)
}

// Leave ends m. It does not end open streams: the Session does. Calls after the first do nothing.
func (m *Membership) Leave() {
	g := m.groups
	g.mu.Lock()
	if m.left {
		g.mu.Unlock()
		return
	}
	g.leave(m)
	g.mu.Unlock()
	g.log().Debug("name left", "name", m.Name.String(), "port", m.Port, "group", m.Group, "owner", m.Owner, "lasted", time.Since(m.Since))
}

// leave is Leave of an m that has not left. The caller holds mu.
func (g *Groups) leave(m *Membership) {
	m.left = true
	if g.joined[m.Owner]--; g.joined[m.Owner] <= 0 {
		delete(g.joined, m.Owner)
	}
	g.groups[m.group] = slices.DeleteFunc(slices.Clone(g.groups[m.group]), func(o *Membership) bool { return o == m })
	if len(g.groups[m.group]) == 0 {
		delete(g.groups, m.group)
	}
	if h := g.names[m.Name]; h != nil {
		h.members = slices.DeleteFunc(h.members, func(o *Membership) bool { return o == m })
		if len(h.members) == 0 {
			h.until = time.Now().Add(g.holdFor())
			g.tellChange()
		}
	}
	g.announce(m.Name)
}

// hasLeft reports whether m has ended.
func (m *Membership) hasLeft() bool {
	m.groups.mu.RLock()
	defer m.groups.mu.RUnlock()
	return m.left
}

// Service returns the service that has a name which no service of the table has, nil for
// none. It is registry.Registry.Live.
func (g *Groups) Service(name tunnel.Name) *registry.LiveService {
	if !g.used.Load() {
		return nil
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	if h := g.held(name); h != nil && h.live != nil && h.heldAt(time.Now()) {
		return h.live
	}
	return nil
}

// held returns the entry that a name has, or a wildcard above it; nil for none. The caller
// holds mu for reading.
func (g *Groups) held(name tunnel.Name) *heldName {
	if name.IsZero() {
		return nil
	}
	h := g.names[tunnel.Pattern{Suffix: name}]
	for parent, ok := name.Parent(); h == nil && ok; parent, ok = parent.Parent() {
		h = g.names[tunnel.Pattern{Suffix: parent, Wildcard: true}]
	}
	return h
}

// Transport returns the transport to the members of a group, for streams to which the
// gateway itself adds something where added is true: that is never sent unencrypted. It is for
// upstream.Transports.Group.
func (g *Groups) Transport(group string, added bool) tunnel.Transport {
	return groupTransport{g, group, added}
}

// A Listed is a name of Groups.List.
type Listed struct {
	Name    tunnel.Pattern
	Owner   string
	Until   time.Time     // when it is free again; zero while there are sessions
	Members []*Membership // must not be changed
	Remote  []ReplicaShare

	Connectors int // processes, or connections of SSH, that Members are of
}

// List returns the names that belong to somebody, sorted.
func (g *Groups) List() []Listed {
	now := time.Now()
	g.mu.RLock()
	defer g.mu.RUnlock()
	list := make([]Listed, 0, len(g.names))
	for name, h := range g.names {
		if !h.heldAt(now) {
			continue
		}
		one := Listed{Name: name, Owner: h.owner, Members: slices.Clone(h.members), Remote: h.shares(), Connectors: h.connectors()}
		if len(h.members) == 0 && len(h.remotes) == 0 {
			one.Until = h.until
		}
		slices.SortFunc(one.Members, func(a, b *Membership) int {
			return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Port, b.Port), a.Source.Compare(b.Source))
		})
		list = append(list, one)
	}
	slices.SortFunc(list, func(a, b Listed) int { return cmp.Compare(a.Name.String(), b.Name.String()) })
	return list
}

func (g *Groups) holdFor() time.Duration { return cmp.Or(g.HoldFor, DefaultHoldFor) }

func (g *Groups) log() *slog.Logger {
	if g.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return g.Log
}
