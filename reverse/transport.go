package reverse

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"culvert.dev/tunnel"
)

// A groupTransport dials the members of a group.
type groupTransport struct {
	groups *Groups
	name   string
	added  bool // the gateway adds something to what clients send
}

// members returns those that serve a port, 0 for any. They must not be changed.
func (t groupTransport) members(port uint16) []*Membership {
	t.groups.mu.RLock()
	all := t.groups.groups[t.name]
	t.groups.mu.RUnlock()
	if !slices.ContainsFunc(all, func(m *Membership) bool { return !m.serves(port) }) {
		return all
	}
	var some []*Membership
	for _, m := range all {
		if m.serves(port) {
			some = append(some, m)
		}
	}
	return some
}

func (m *Membership) serves(port uint16) bool { return m.Port == 0 || port == 0 || m.Port == port }

// Dial implements tunnel.Transport: on the session with the fewest streams for its weight.
// Where that fails, others are tried, and after them those of other replicas.
//
// Where the last session has just ended, Dial waits a moment for the connector to come back:
// the client has heard nothing yet.
func (t groupTransport) Dial(ctx context.Context, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	for {
		news := t.groups.nextNews()
		dials, passedOn := t.dials(ep.Addr.Port(), req)
		if len(dials) > 0 {
			c, err := t.dialAny(ctx, ep, req, dials)
			if err == nil || ctx.Err() != nil || len(t.members(ep.Addr.Port())) > 0 || len(t.elsewhere(ep.Addr.Port())) > 0 {
				return c, err
			}
		}
		if !passedOn && t.comingBack(req) && t.await(ctx, news) {
			continue
		}
		if passedOn {
			return nil, fmt.Errorf("%w: %w", t.errNoSession(), errPassedOn)
		}
		return nil, t.errNoSession()
	}
}

// comebackTime is how long requests wait for a connector after its last session.
const comebackTime = 2 * time.Second

// comingBack reports whether the last session of req's name has ended a moment ago.
func (t groupTransport) comingBack(req *tunnel.Request) bool {
	g := t.groups
	g.mu.RLock()
	defer g.mu.RUnlock()
	h := g.held(req.Name)
	return h != nil && len(h.members) == 0 && len(h.remotes) == 0 && time.Until(h.until) > g.holdFor()-comebackTime
}

// await waits for a change of the sessions. It returns false if none comes in time.
func (t groupTransport) await(ctx context.Context, news <-chan struct{}) bool {
	late := time.NewTimer(comebackTime)
	defer late.Stop()
	select {
	case <-news:
		return true
	case <-late.C:
	case <-ctx.Done():
	}
	return false
}

// dialAny opens a stream by the first of dials that works.
func (t groupTransport) dialAny(ctx context.Context, ep *tunnel.Endpoint, req *tunnel.Request, dials []groupDial) (net.Conn, error) {
	var errs []error
	for i, d := range dials {
		name := d.pattern().Suffix
		if d.pattern().Wildcard {
			if !d.pattern().Matches(req.Name) {
				errs = append(errs, tunnel.Refusef(tunnel.NoEndpoint, "reverse: %q names none of %q, which the connector serves", req.Target(), d.pattern()))
				continue
			}
			name = req.Name
		}
		c, err := d.open(ctx, req, name, ep, len(dials)-i, t.added)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
		if e, ok := errors.AsType[*tunnel.Error](err); ctx.Err() != nil || len(errs) == maxAttempts || d.local != nil && ok && e.Final {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// A groupDial is one way to open a stream: by a session here, or by another replica.
type groupDial struct {
	local  *Membership
	remote *remoteMember
}

func (d *groupDial) pattern() tunnel.Pattern {
	if d.local != nil {
		return d.local.Name
	}
	return d.remote.name
}

// open opens a stream for req to name. It leaves part of the time of ctx for the others, of
// which there are left with this one: the client has heard nothing yet.
func (d *groupDial) open(ctx context.Context, req *tunnel.Request, name tunnel.Name, ep *tunnel.Endpoint, left int, added bool) (net.Conn, error) {
	if end, ok := ctx.Deadline(); ok && left > 1 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(end)/2)
		defer cancel()
	}
	if d.local == nil {
		return d.remote.passOn(ctx, req, name, ep)
	}
	asked := d.local.Registration
	asked.Name, asked.Port = tunnel.Pattern{Suffix: name}, ep.Addr.Port()
	asked.raw = !added && (req.Hello != 0 || asked.Insecure)
	return d.local.session.Open(ctx, req, &asked)
}

// dials returns the ways to open a stream for req, in the order to try them. Where another
// replica has passed req on, the sessions here are the only ones, and passedOn is true.
func (t groupTransport) dials(port uint16, req *tunnel.Request) (all []groupDial, passedOn bool) {
	var last []groupDial // draining, or silent
	if members := t.members(port); len(members) > 0 {
		for _, m := range byLoad(members, int(t.groups.turn.Add(1)&0xffff)) {
			if m.draining.Load() || isSilent(m.session) {
				last = append(last, groupDial{local: m})
			} else {
				all = append(all, groupDial{local: m})
			}
		}
	}
	passedOn = t.groups.PassedOn != nil && t.groups.PassedOn(req)
	if !passedOn {
		if len(all) > maxAttempts-1 { // one is another replica's
			all = all[:maxAttempts-1]
		}
		for _, m := range t.elsewhere(port) {
			if m.Draining {
				last = append(last, groupDial{remote: m})
			} else {
				all = append(all, groupDial{remote: m})
			}
		}
	}
	return append(all, last...), passedOn
}

// isSilent reports whether s says that its path is silent.
func isSilent(s Session) bool {
	q, ok := s.(interface{ Silent() bool })
	return ok && q.Silent()
}

// byLoad returns members in the order to try. Equal ones take turns, and those that are
// draining come last.
func byLoad(members []*Membership, turn int) []*Membership {
	if len(members) == 1 {
		return members
	}
	type candidate struct {
		*Membership
		load     float64
		draining bool
	}
	all := make([]candidate, len(members))
	for i := range members {
		m := members[(i+turn)%len(members)]
		all[i] = candidate{m, float64(m.session.Streams()+1) / float64(cmp.Or(m.Weight, 1)), m.draining.Load()}
	}
	slices.SortStableFunc(all, func(a, b candidate) int {
		switch {
		case a.draining != b.draining && a.draining:
			return 1
		case a.draining != b.draining:
			return -1
		}
		return cmp.Compare(a.load, b.load)
	})
	out := make([]*Membership, len(all))
	for i := range all {
		out[i] = all[i].Membership
	}
	return out
}

func (t groupTransport) errNoSession() error {
	if name, ok := strings.CutPrefix(t.name, "@"); ok { // liveGroup
		return tunnel.Refusef(tunnel.DialFailed, "reverse: no connector has a session for %q", name)
	}
	return tunnel.Refusef(tunnel.DialFailed, "reverse: no connector has a session for group %q", t.name)
}

// Check implements tunnel.Transport.
func (t groupTransport) Check(ep *tunnel.Endpoint) error {
	if len(t.members(ep.Addr.Port())) == 0 && len(t.elsewhere(ep.Addr.Port())) == 0 {
		return t.errNoSession()
	}
	return nil
}

// Info implements tunnel.Transport. The weakest session counts.
func (t groupTransport) Info() tunnel.TransportInfo {
	info := tunnel.TransportInfo{Security: tunnel.Mutual}
	for _, m := range t.members(0) {
		info.Security = min(info.Security, m.session.Security())
		info.Hops = []string{"reverse session of " + t.name}
	}
	var replicas []string // that have sessions
	for _, m := range t.elsewhere(0) {
		if m.Plain {
			info.Security = tunnel.Plain
		}
		if at := fmt.Sprintf("replica %s at %s", m.link.replicaID(), m.link.address); !slices.Contains(replicas, at) {
			replicas = append(replicas, at)
		}
	}
	if info.Hops == nil && replicas != nil {
		slices.Sort(replicas)
		info.Hops = []string{strings.Join(replicas, " or ")}
	}
	if !slices.Contains(info.Hops, "reverse session of "+t.name) {
		info.Hops = append(info.Hops, "reverse session of "+t.name)
	}
	return info
}

// ErrEnded is the error of a session that has ended.
var ErrEnded = fmt.Errorf("reverse: the session has ended: %w", net.ErrClosed)
