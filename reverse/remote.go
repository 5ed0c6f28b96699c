package reverse

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"time"

	"culvert.dev/tunnel"
)

// A replicaName is a name that belongs to an owner, as replicas of a gateway send it to each other.
type replicaName struct {
	Name   tunnel.Pattern `json:"name"`
	Owner  string         `json:"owner"`
	Since  int64          `json:"since"` // milliseconds of Unix time
	Allow  []string       `json:"allow,omitempty"`
	Serves []replicaGroup `json:"serves,omitempty"` // by the sessions of the replica
	Left   int            `json:"left,omitzero"`    // seconds for which a name without sessions is kept
}

// A replicaGroup is the sessions of one replica that serve a name at one port.
type replicaGroup struct {
	Group    string `json:"group,omitempty"` // "" for a name that no service of the table has
	Port     uint16 `json:"port,omitzero"`
	Weight   int    `json:"weight"`
	Sessions int    `json:"sessions"`
	Plain    bool   `json:"plain,omitempty"` // one of them is not inside TLS
	Draining bool   `json:"draining,omitempty"`
}

// equal reports whether a replica that has received n needs no line for o.
func (n *replicaName) equal(o *replicaName) bool {
	return n.Owner == o.Owner && n.Since == o.Since && slices.Equal(n.Allow, o.Allow) && slices.Equal(n.Serves, o.Serves)
}

// check finds fields that no replica sends.
func (n *replicaName) check() error {
	reg := Registration{Name: n.Name, Allow: n.Allow}
	if err := reg.check(); err != nil {
		return err
	}
	if n.Owner == "" || len(n.Owner) > maxOwner || n.Left < 0 || len(n.Serves) > maxMembers {
		return tunnel.Refusef(tunnel.BadRequest, "reverse: %q: another replica says what can't be of its owner or sessions", n.Name)
	}
	for i := range n.Serves {
		s := &n.Serves[i]
		group := Registration{Name: n.Name, Group: s.Group}
		if s.Weight < 1 || s.Sessions < 1 || s.Weight > 1<<30 || s.Sessions > maxMembers || group.check() != nil {
			return tunnel.Refusef(tunnel.BadRequest, "reverse: %q: another replica says what can't be of its sessions", n.Name)
		}
	}
	return nil
}

// A remoteName is a name at another replica that has sessions for it.
type remoteName struct {
	replicaName
	link *replicaLink
}

// A remoteMember is the sessions of another replica for one name and port, as a member of a
// group.
type remoteMember struct {
	replicaGroup
	name tunnel.Pattern
	link *replicaLink
}

func (m *remoteMember) serves(port uint16) bool { return m.Port == 0 || port == 0 || m.Port == port }

// A ReplicaShare is the sessions that another replica has for a name.
type ReplicaShare struct {
	Replica  string
	Address  string
	Sessions int
}

// shares returns the sessions of other replicas for h.
func (h *heldName) shares() (all []ReplicaShare) {
	for _, r := range h.remotes {
		one := ReplicaShare{Replica: r.link.replicaID(), Address: r.link.address}
		for i := range r.Serves {
			one.Sessions += r.Serves[i].Sessions
		}
		all = append(all, one)
	}
	return all
}

// announce has the other replicas learn of a change of a name. The caller holds mu.
func (g *Groups) announce(name tunnel.Pattern) {
	g.note(name)
	if g.news != nil {
		close(g.news)
		g.news = nil
	}
}

// nextNews returns a channel that is closed with the next change of sessions.
func (g *Groups) nextNews() <-chan struct{} {
	g.mu.RLock()
	news := g.news
	g.mu.RUnlock()
	if news != nil {
		return news
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.news == nil {
		g.news = make(chan struct{})
	}
	return g.news
}

// add counts m, one of the sessions that serve n.
func (n *replicaName) add(m *Membership) {
	one := replicaGroup{Port: m.Port, Draining: true}
	if m.group != liveGroup(m.Name) {
		one.Group = m.group
	}
	at := slices.IndexFunc(n.Serves, func(s replicaGroup) bool { return s.Group == one.Group && s.Port == one.Port })
	if at < 0 {
		at = len(n.Serves)
		n.Serves = append(n.Serves, one)
	}
	s := &n.Serves[at]
	s.Sessions++
	s.Weight += int(cmp.Or(m.Weight, 1))
	s.Plain = s.Plain || m.session.Security() < tunnel.Mutual
	s.Draining = s.Draining && m.draining.Load()
}

// setRemote records what another replica has sent of a name. Of two owners, the one that has had
// the name for longer keeps it, at all replicas alike. lost says that sessions here have lost the
// name for it.
func (g *Groups) setRemote(l *replicaLink, n *replicaName) (lost bool) {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.unlink(l, n.Name, now)
	claim := &Membership{Registration: Registration{Name: n.Name, Allow: n.Allow}, Owner: n.Owner}
	for {
		other := g.conflicting(claim, now)
		if other == nil {
			break
		}
		if !n.wins(other) {
			return lost
		}
		g.log().Warn("two owners have the same name at two replicas; the earlier owner keeps it",
			"name", n.Name.String(), "owner", n.Owner, "loser", other.owner, "replica", l.replicaID())
		lost = g.evict(other) || lost
	}
	h := g.names[n.Name]
	if h != nil && h.owner != n.Owner { // its time is over
		g.free(n.Name, h)
		h = nil
	}
	if h == nil {
		if len(g.names) >= maxNames {
			return lost
		}
		h = g.hold(n.Name, n.Owner)
		h.since = n.Since
		g.tellChange()
	}
	h.since = min(h.since, n.Since)
	g.note(n.Name)
	if len(n.Serves) == 0 {
		if until := now.Add(min(time.Duration(n.Left)*time.Second, g.holdFor())); until.After(h.until) {
			h.until = until
		}
		return lost
	}
	defer g.announce(n.Name)
	h.remotes = append(h.remotes, &remoteName{*n, l})
	if g.remote == nil {
		g.remote = map[string][]*remoteMember{}
	}
	for _, s := range n.Serves {
		key, listed := s.Group, s.Group != ""
		if !listed {
			key = liveGroup(n.Name)
		}
		g.remote[key] = append(slices.Clip(g.remote[key]), &remoteMember{s, n.Name, l})
		if len(h.members) == 0 || !listed {
			g.setLive(h, &claim.Registration, key, listed)
		}
	}
	return lost
}

// wins reports whether the owner of n keeps the name against h's.
func (n *replicaName) wins(h *heldName) bool {
	return cmp.Or(cmp.Compare(n.Since, h.since), strings.Compare(n.Owner, h.owner)) < 0
}

// evict takes a name from its owner, and reports whether there were sessions here that served
// it. The caller holds mu.
func (g *Groups) evict(h *heldName) (had bool) {
	for _, m := range slices.Clone(h.members) {
		g.leave(m)
		had = true
	}
	for _, r := range slices.Clone(h.remotes) {
		g.unlink(r.link, h.name, time.Now())
	}
	if g.names[h.name] == h {
		g.free(h.name, h)
	}
	g.tellChange()
	g.announce(h.name)
	return had
}

// unlink forgets what another replica has sent of a name. The caller holds mu.
func (g *Groups) unlink(l *replicaLink, name tunnel.Pattern, now time.Time) {
	h := g.names[name]
	if h == nil {
		return
	}
	at := slices.IndexFunc(h.remotes, func(r *remoteName) bool { return r.link == l })
	if at < 0 {
		return
	}
	gone := h.remotes[at]
	h.remotes = slices.Delete(slices.Clone(h.remotes), at, at+1)
	g.note(name)
	for _, s := range gone.Serves {
		key := cmp.Or(s.Group, liveGroup(name))
		left := slices.DeleteFunc(slices.Clone(g.remote[key]), func(m *remoteMember) bool { return m.link == l && m.name == name })
		if g.remote[key] = left; len(left) == 0 {
			delete(g.remote, key)
		}
	}
	if len(h.remotes) == 0 && len(h.members) == 0 {
		h.until = now.Add(g.holdFor())
		g.tellChange()
		g.announce(name)
	}
}

// dropRemote forgets what another replica has sent of some names. They stay reserved for their
// owners, as after a last session here.
func (g *Groups) dropRemote(l *replicaLink, names []tunnel.Pattern) {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, name := range names {
		g.unlink(l, name, now)
	}
}

// drainRemote has the sessions of another replica come after those of others.
func (g *Groups) drainRemote(l *replicaLink) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for key, members := range g.remote {
		next := make([]*remoteMember, len(members))
		for i, m := range members {
			one := *m
			one.Draining = one.Draining || m.link == l
			next[i] = &one
		}
		g.remote[key] = next
	}
}

// elsewhere returns the sessions of other replicas that serve a port, 0 for any: a random
// order by weight, those that are draining last.
func (t groupTransport) elsewhere(port uint16) []*remoteMember {
	t.groups.mu.RLock()
	all := t.groups.remote[t.name]
	t.groups.mu.RUnlock()
	var some []*remoteMember
	for _, m := range all {
		if m.serves(port) {
			some = append(some, m)
		}
	}
	if len(some) < 2 {
		return some
	}
	turn := make(map[*remoteMember]float64, len(some))
	for _, m := range some {
		turn[m] = rand.ExpFloat64() / float64(m.Weight)
	}
	slices.SortFunc(some, func(a, b *remoteMember) int {
		switch {
		case a.Draining != b.Draining && a.Draining:
			return 1
		case a.Draining != b.Draining:
			return -1
		}
		return cmp.Compare(turn[a], turn[b])
	})
	return some
}

// passOn asks the replica of m for name and port.
func (m *remoteMember) passOn(ctx context.Context, req *tunnel.Request, name tunnel.Name, ep *tunnel.Endpoint) (net.Conn, error) {
	at := &tunnel.Endpoint{Host: name.String(), Addr: ep.Addr}
	c, err := m.link.transport.Dial(ctx, at, req)
	if err != nil {
		return nil, &passError{m.link, err}
	}
	return c, nil
}

// A passError is the error of a request that was passed on to another replica.
type passError struct {
	link *replicaLink
	err  error
}

func (e *passError) Error() string {
	return "replica " + e.link.replicaID() + " at " + e.link.address + ": " + e.err.Error()
}

func (e *passError) Unwrap() error { return e.err }

// errPassedOn is part of the error for a request that another replica has passed on and that no
// session here serves.
var errPassedOn = errors.New("another replica has passed the request on, and it goes no further")
