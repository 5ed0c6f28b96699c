package registry

import (
	"slices"

	"culvert.dev/policy"
)

// A PolicyUse says what a policy is about in a table.
type PolicyUse struct {
	Services int // that it selects, or some of whose endpoints it selects

	// Unidentified is how many of them callers also reach by ways on which nobody's identity
	// is known, though the policy names identities: TLS passes through, or a port is the
	// service's own.
	Unidentified int
}

// PolicyUses returns the use of each policy of t for requests to connect, by Policy.Origin.
// Policies of one Origin count together. It looks at every service.
func (t *Table) PolicyUses() map[string]PolicyUse {
	if t == nil || len(t.policies) == 0 {
		return nil
	}
	uses := make(map[string]PolicyUse, len(t.policies))
	for _, p := range t.policies {
		uses[p.Origin] = PolicyUse{}
	}
	byName := t.hasBlindListener()
	for i := range t.services {
		e := &t.services[i]
		e.policies.count(uses, e.Exposed && (byName || e.Publish))
	}
	if t.listeners == nil {
		return uses
	}
	for i := range t.listeners.backends {
		e := &t.listeners.backends[i]
		e.policies.count(uses, t.listeners.reachesBlindly(int32(i)))
	}
	for _, r := range t.listeners.rules {
		for i := range r.backends {
			if own := r.backends[i].policies; own != nil {
				own.count(uses, t.listeners.passesTLS(r))
			}
		}
	}
	return uses
}

// count adds the service that p is of. blind says that callers reach it by ways on which
// nobody's identity is known.
func (p *policySets) count(uses map[string]PolicyUse, blind bool) {
	if p.service == nil && p.workloads == nil {
		return
	}
	counted := make(map[string]bool) // whether it names identities
	add := func(s *policy.Set) {
		for _, one := range s.Policies() {
			counted[one.Origin] = counted[one.Origin] || one.NamesIdentities()
		}
	}
	add(p.service)
	for _, s := range p.workloads {
		add(s)
	}
	for origin, names := range counted {
		use := uses[origin]
		use.Services++
		if names && blind {
			use.Unidentified++
		}
		uses[origin] = use
	}
}

// hasBlindListener reports whether clients reach services by name through a listener that
// does not end their TLS, and does not leave their identity to the service.
func (t *Table) hasBlindListener() bool {
	for l := range t.Listeners() {
		if s := l.Settings; s != nil && !s.DeferIdentity && (slices.Contains(s.Protocols, "sni") || slices.Contains(s.Protocols, "quic") || slices.Contains(s.Protocols, "postgres")) {
			return true
		}
	}
	return false
}

// reachesBlindly reports whether a rule that passes TLS on leads to a backend.
func (f *compiledListeners) reachesBlindly(backend int32) bool {
	return slices.ContainsFunc(f.rules, func(r *compiledRule) bool {
		return f.passesTLS(r) && slices.ContainsFunc(r.backends, func(b compiledBackend) bool { return b.entry == backend && b.policies == nil })
	})
}

// passesTLS reports whether the TLS of clients goes on through the section of a rule, or
// they need none.
func (f *compiledListeners) passesTLS(r *compiledRule) bool {
	s := f.sections[r.section]
	return s == nil || s.TLS == nil
}
