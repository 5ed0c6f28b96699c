package reverse

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"

	"culvert.dev/tunnel"
)

// A groupTransport dials the members of a group.
type groupTransport struct {
	groups *Groups
	name   string
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
// Where that fails, others are tried.
func (t groupTransport) Dial(ctx context.Context, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	members := t.members(ep.Addr.Port())
	if len(members) == 0 {
		return nil, t.errNobody()
	}
	var errs []error
	for _, m := range byLoad(members, int(t.groups.turn.Add(1)&0xffff)) {
		asked := m.Registration
		asked.Port = ep.Addr.Port()
		if asked.Name.Wildcard {
			if !asked.Name.Matches(req.Name) {
				errs = append(errs, tunnel.Refusef(tunnel.NoEndpoint, "reverse: %q names none of %q, which the connector serves", req.Target(), asked.Name))
				continue
			}
			asked.Name = tunnel.Pattern{Suffix: req.Name}
		}
		c, err := m.session.Open(ctx, req, &asked)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
		if e, ok := errors.AsType[*tunnel.Error](err); ctx.Err() != nil || len(errs) == maxAttempts || ok && e.Final {
			break
		}
	}
	return nil, errors.Join(errs...)
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

func (t groupTransport) errNobody() error {
	return tunnel.Refusef(tunnel.DialFailed, "reverse: no connector has a session for group %q", t.name)
}

// Check implements tunnel.Transport.
func (t groupTransport) Check(ep *tunnel.Endpoint) error {
	if len(t.members(ep.Addr.Port())) == 0 {
		return t.errNobody()
	}
	return nil
}

// Info implements tunnel.Transport. The weakest session counts.
func (t groupTransport) Info() tunnel.TransportInfo {
	info := tunnel.TransportInfo{Hops: []string{"reverse session of " + t.name}, Security: tunnel.Mutual}
	for _, m := range t.members(0) {
		info.Security = min(info.Security, m.session.Security())
	}
	return info
}

// ErrEnded is the error of a session that has ended.
var ErrEnded = fmt.Errorf("reverse: the session has ended: %w", net.ErrClosed)
