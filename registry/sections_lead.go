package registry

import (
	"errors"
	"fmt"
	"math/bits"

	"culvert.dev/tunnel"
)

// confined reports whether only a section's rules count for req.
func (t *Table) confined(req *tunnel.Request) bool {
	if req.ListenerOnly {
		return true
	}
	if t == nil || t.fronts == nil {
		return false
	}
	_, ok := t.fronts.sections[req.Listener]
	return ok
}

// rule finds the rule for what is asked within a section, and what of it has
// matched.
func (t *Table) rule(req *tunnel.Request) (chosen[*rule], *tunnel.Error) {
	var s *section
	if t != nil && t.fronts != nil {
		s = t.fronts.sections[req.Listener]
	}
	switch {
	case s == nil && t != nil && t.fronts != nil && t.fronts.byName[req.Listener] != nil:
		return chosen[*rule]{}, tunnel.Refusef(tunnel.NoRoute, "registry: no section of listener %q is for %q", req.Listener, req.Name)
	case s == nil:
		return chosen[*rule]{}, tunnel.Refusef(tunnel.NoRoute, "registry: section %q is gone", req.Listener)
	case req.Addr.IsValid():
		return chosen[*rule]{}, tunnel.Refusef(tunnel.NoRoute, "registry: section %q leads to no addresses, and %q was asked for", req.Listener, req.Target())
	case !s.Host.Suffix.IsZero() && !s.Host.Matches(req.Name) && !req.Name.IsZero():
		return chosen[*rule]{}, tunnel.Refusef(tunnel.NoRoute, "registry: section %q is for %q, and %q was asked for", req.Listener, s.Host, req.Name)
	}
	r, ok := s.byName.find(req.Name)
	if !ok {
		return chosen[*rule]{}, tunnel.Refusef(tunnel.NoRoute, "registry: no rule of section %q is for %q; it has %d", req.Listener, req.Name, s.rules)
	}
	return r, nil
}

// PrecheckRoute says why req, which is confined to a section, is refused whichever
// backend's turn it is, and returns nil where it may have better luck: it is to
// be asked before a client is promised anything.
func (t *Table) PrecheckRoute(req *tunnel.Request) error {
	one, refusal := t.rule(req)
	if refusal != nil {
		return refusal
	}
	r, reason := one.to, tunnel.NoEndpoint
	why := errors.New("it has no backend with a weight")
	for i := range r.backends {
		b := &r.backends[i]
		switch {
		case b.weight == 0:
		case b.broken != "":
			why = errors.New(b.broken)
		default:
			e, refusal := t.leads(b, req)
			if refusal != nil {
				why, reason = refusal, refusal.Reason
				continue
			}
			if len(e.Endpoints) > 0 || len(e.Via) > 0 {
				refusal := t.exposes(req, found{entry: e, port: b.port, rule: r})
				if refusal == nil {
					return nil
				}
				why, reason = refusal, tunnel.Insecure
				continue
			}
			why = fmt.Errorf("service %q has no endpoint", e.Name)
		}
	}
	return tunnel.Refusef(reason, "registry: rule %q of %s leads nowhere: %w", r.Name, orUnknown(r.Origin), why)
}

// golden is the golden ratio's fraction, in units of 1/2^64: its multiples are
// spread evenly over any stretch, so that a few requests already are shared as
// the weights say.
const golden = 0x9E3779B97F4A7C15

// lead is find for a request that is confined to a section: it counts.
func (s *state) lead(req *tunnel.Request) (found, *tunnel.Error) {
	one, refusal := s.table.rule(req)
	if refusal != nil {
		return found{}, refusal
	}
	r := one.to
	if r.total == 0 {
		return found{}, tunnel.Refusef(tunnel.NoEndpoint, "registry: rule %q of %s has no backend with a weight", r.Name, orUnknown(r.Origin))
	}
	n := s.turns[s.ruled+r.turn].Add(1) - 1
	at, _ := bits.Mul64(uint64(n)*golden, r.total)
	b := &r.backends[0]
	for i := 1; at >= b.weight; i++ {
		at -= b.weight
		b = &r.backends[i]
	}
	if b.broken != "" {
		return found{rule: r}, tunnel.Refusef(tunnel.NoEndpoint, "registry: %s: a backend of rule %q of %s, with %d of %d of the requests: %s", req.Listener, r.Name, orUnknown(r.Origin), b.weight, r.total, b.broken)
	}
	e, refusal := s.table.leads(b, req)
	if refusal != nil {
		return found{rule: r}, refusal
	}
	return found{entry: e, pattern: one.by, port: b.port, rule: r, turn: s.ruled + b.turn}, nil
}

// leads returns the service that a backend that is not broken leads to: one made for
// it, or one of the table that it stands for. The latter must be exposed to the
// network of the client: a rule opens nothing that is closed to that client by name.
func (t *Table) leads(b *backend, req *tunnel.Request) (*entry, *tunnel.Error) {
	if b.of.IsZero() {
		return &t.fronts.backends[b.entry], nil
	}
	i := t.claims(b.of, b.port)
	if i < 0 {
		i = t.claims(b.of, 0)
	}
	switch {
	case i < 0:
		return nil, tunnel.Refusef(tunnel.NoEndpoint, "registry: no service has the name %q and the port %d, which a backend stands for", b.of, b.port)
	case !t.services[i].Exposed:
		return nil, tunnel.Refusef(tunnel.NotExposed, "registry: service %q, which a backend stands for, is private", t.services[i].Name)
	}
	if e := &t.services[i]; len(e.ExposedTo) > 0 {
		if network := t.networks.find(req.Source.Addr()); !t.exposedTo(e, network) {
			return nil, tunnel.Refusef(tunnel.NotExposed, "registry: service %q, which a backend stands for, is exposed to %q; the source %s is in %s",
				e.Name, e.ExposedTo, req.Source.Addr(), t.whereabouts(network))
		}
	}
	return &t.services[i], nil
}

// A turnKey says whose a counter of a rule is, whatever table it is in.
type turnKey struct{ section, rule, service string }

// eachTurn calls f with every counter of rules and backends.
func (s *state) eachTurn(f func(k turnKey, turn int32)) {
	if s.table == nil || s.table.fronts == nil {
		return
	}
	of := func(r *rule) {
		f(turnKey{r.section, r.Name, ""}, s.ruled+r.turn)
		for i := range r.backends {
			if b := &r.backends[i]; b.entry >= 0 {
				f(turnKey{r.section, r.Name, s.table.fronts.backends[b.entry].Name + "/"}, s.ruled+b.turn)
			}
		}
	}
	i := 0
	for _, sec := range s.table.fronts.sections {
		for _, m := range []map[tunnel.Name]chosen[*rule]{sec.byName.exact, sec.byName.wild} {
			for _, r := range m {
				Yield(i)
				i++
				of(r.to)
			}
		}
		if sec.byName.any.by != "" {
			of(sec.byName.any.to)
		}
	}
}
