package registry

import (
	"errors"
	"fmt"

	"culvert.dev/tunnel"
)

// listenerOnly reports whether req is confined to the rules of a section.
func (t *Table) listenerOnly(req *tunnel.Request) bool {
	if req.ListenerOnly {
		return true
	}
	if t == nil || t.listeners == nil {
		return false
	}
	_, ok := t.listeners.sections[req.Listener]
	return ok
}

// matchRule returns the rule of a section for req, and the pattern that matched.
func (t *Table) matchRule(req *tunnel.Request) (hostMatch[*compiledRule], *tunnel.Error) {
	var s *compiledSection
	if t != nil && t.listeners != nil {
		s = t.listeners.sections[req.Listener]
	}
	switch {
	case s == nil && t != nil && t.listeners != nil && t.listeners.byName[req.Listener] != nil:
		return hostMatch[*compiledRule]{}, tunnel.Refusef(tunnel.NoRoute, "registry: no section of listener %q is for %q", req.Listener, req.Name)
	case s == nil:
		return hostMatch[*compiledRule]{}, tunnel.Refusef(tunnel.NoRoute, "registry: section %q is gone", req.Listener)
	case req.Addr.IsValid():
		return hostMatch[*compiledRule]{}, tunnel.Refusef(tunnel.NoRoute, "registry: section %q leads to no addresses, and %q was asked for", req.Listener, req.Target())
	case !s.Host.Suffix.IsZero() && !s.Host.Matches(req.Name) && !req.Name.IsZero():
		return hostMatch[*compiledRule]{}, tunnel.Refusef(tunnel.NoRoute, "registry: section %q is for %q, and %q was asked for", req.Listener, s.Host, req.Name)
	}
	if refusal := s.clients.admits(req, "section", s.Name, s.origin); refusal != nil {
		return hostMatch[*compiledRule]{}, refusal
	}
	r, ok := s.byName.find(req.Name)
	if !ok {
		return hostMatch[*compiledRule]{}, tunnel.Refusef(tunnel.NoRoute, "registry: no rule of section %q is for %q; it has %d", req.Listener, req.Name, s.rules)
	}
	if refusal := r.value.clients.admits(req, "rule", r.value.Name, r.value.Origin); refusal != nil {
		return hostMatch[*compiledRule]{}, refusal
	}
	return r, nil
}

// PrecheckRoute returns why req, whose TLS is to end here, would be refused: by its
// service or, where it is confined to a section, by every backend of its rule. It is nil
// if it may be accepted. It is called before the client is promised anything.
func (t *Table) PrecheckRoute(req *tunnel.Request) error {
	if !t.listenerOnly(req) {
		return t.precheckService(req)
	}
	one, refusal := t.matchRule(req)
	if refusal != nil {
		return refusal
	}
	r, reason := one.value, tunnel.NoEndpoint
	why := errors.New("it has no backend with a weight")
	for i := range r.backends {
		b := &r.backends[i]
		switch {
		case b.weight == 0:
		case b.broken != "":
			why = errors.New(b.broken)
		default:
			e, refusal := t.backendService(b, req)
			if refusal != nil {
				why, reason = refusal, refusal.Reason
				continue
			}
			if len(e.Endpoints) > 0 || len(e.Via) > 0 {
				if why = t.plaintextRefusal(match{entry: e, port: b.port, rule: r}); why == nil {
					return nil
				}
				reason = tunnel.Insecure
				continue
			}
			why = fmt.Errorf("service %q has no endpoint", e.Name)
		}
	}
	return tunnel.Refusef(reason, "registry: rule %q of %s leads nowhere: %w", r.Name, orUnknown(r.Origin), why)
}

// precheckService is PrecheckRoute for a request that all services may serve.
func (t *Table) precheckService(req *tunnel.Request) error {
	f, refusal := t.findVisible(req)
	if refusal != nil {
		return refusal
	}
	if len(f.entry.Endpoints) == 0 && len(f.entry.Via) == 0 {
		return tunnel.Refusef(tunnel.NoEndpoint, "registry: service %q of %s has no endpoint", f.entry.Name, orUnknown(f.entry.Origin))
	}
	if err := t.plaintextRefusal(f); err != nil {
		return &tunnel.Error{Reason: tunnel.Insecure, Err: err}
	}
	return nil
}

// findByRule is find for a request that is confined to a section. It counts the
// request, as rules share requests among their backends by weight.
func (s *state) findByRule(req *tunnel.Request) (match, *tunnel.Error) {
	one, refusal := s.table.matchRule(req)
	if refusal != nil {
		return match{}, refusal
	}
	r := one.value
	if r.total == 0 {
		return match{}, tunnel.Refusef(tunnel.NoEndpoint, "registry: rule %q of %s has no backend with a weight", r.Name, orUnknown(r.Origin))
	}
	n := s.turns[s.ruleOffset+r.turn].Add(1) - 1
	at := share(n, r.total)
	b := &r.backends[0]
	for i := 1; at >= b.weight; i++ {
		at -= b.weight
		b = &r.backends[i]
	}
	if b.broken != "" {
		return match{rule: r}, tunnel.Refusef(tunnel.NoEndpoint, "registry: %s: a backend of rule %q of %s, with %d of %d of the requests: %s", req.Listener, r.Name, orUnknown(r.Origin), b.weight, r.total, b.broken)
	}
	e, refusal := s.table.backendService(b, req)
	if refusal != nil {
		return match{rule: r}, refusal
	}
	return match{entry: e, pattern: one.pattern, port: b.port, rule: r, turn: s.ruleOffset + b.turn, policies: b.policiesOf(e)}, nil
}

// backendService returns the service of a backend that is not broken: one made for it, or the
// service of the table that it names. The latter must be exposed to the network of the client: a
// rule opens nothing that is closed to that client by name.
func (t *Table) backendService(b *compiledBackend, req *tunnel.Request) (*serviceEntry, *tunnel.Error) {
	if b.serviceName.IsZero() {
		e := &t.listeners.backends[b.entry]
		return e, e.clients.admits(req, "service", e.Name, e.Origin)
	}
	i := t.claimant(b.serviceName, b.port)
	if i < 0 {
		i = t.claimant(b.serviceName, 0)
	}
	switch {
	case i < 0:
		return nil, tunnel.Refusef(tunnel.NoEndpoint, "registry: no service has the name %q and the port %d, which a backend stands for", b.serviceName, b.port)
	case !t.services[i].Exposed:
		return nil, tunnel.Refusef(tunnel.NotExposed, "registry: service %q, which a backend stands for, is private", t.services[i].Name)
	}
	if e := &t.services[i]; len(e.ExposedTo) > 0 {
		if network := t.prefixes.find(req.Source.Addr()); !t.exposedTo(e, network) {
			return nil, tunnel.Refusef(tunnel.NotExposed, "registry: service %q, which a backend stands for, is exposed to %q; the source %s is in %s",
				e.Name, e.ExposedTo, req.Source.Addr(), t.describeNetwork(network))
		}
	}
	e := &t.services[i]
	return e, e.clients.admits(req, "service", e.Name, e.Origin)
}

// A turnKey identifies the counter of a rule or backend across tables.
type turnKey struct{ section, rule, service string }

// eachTurn calls f with every counter of rules and backends.
func (s *state) eachTurn(f func(k turnKey, turn int32)) {
	if s.table == nil || s.table.listeners == nil {
		return
	}
	of := func(r *compiledRule) {
		f(turnKey{r.section, r.Name, ""}, s.ruleOffset+r.turn)
		for i := range r.backends {
			if b := &r.backends[i]; b.entry >= 0 {
				f(turnKey{r.section, r.Name, s.table.listeners.backends[b.entry].Name + "/"}, s.ruleOffset+b.turn)
			}
		}
	}
	for _, sec := range s.table.listeners.sections {
		for _, m := range []map[tunnel.Name]hostMatch[*compiledRule]{sec.byName.exact, sec.byName.wild} {
			for _, r := range m {
				of(r.value)
			}
		}
		if sec.byName.fallback.pattern != "" {
			of(sec.byName.fallback.value)
		}
	}
}
