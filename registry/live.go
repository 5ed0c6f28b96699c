package registry

import (
	"slices"
	"strings"
	"sync"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// A LiveService is a service that comes and goes without a table. It must not change any
// more, nor anything that it points to.
type LiveService struct {
	// Service has a Name, Names, and endpoints with a Group. It is exposed to everybody, and its
	// fields for anything else but Ports, Insecure and Origin have no effect.
	Service

	// Policies decide about it with those of the table. They need no Targets.
	Policies []*policy.Policy
}

// liveServices makes entries of a table for LiveServices.
type liveServices struct {
	find         func(tunnel.Name) *LiveService
	newTransport newTransport

	mu       sync.RWMutex
	compiler *policy.Compiler
	entries  map[*LiveService]*serviceEntry
}

// maxLiveEntries bounds the entries that are kept: those of services that are gone are
// among them.
const maxLiveEntries = 1 << 14

// entry returns the live service with a name as an entry of t, nil for none.
func (l *liveServices) entry(t *Table, name tunnel.Name) *serviceEntry {
	if l == nil || name.IsZero() {
		return nil
	}
	s := l.find(name)
	if s == nil {
		return nil
	}
	l.mu.RLock()
	e := l.entries[s]
	l.mu.RUnlock()
	if e != nil {
		return e
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.entries[s]; e != nil {
		return e
	}
	if len(l.entries) >= maxLiveEntries {
		l.entries = nil
	}
	if l.entries == nil {
		l.entries = map[*LiveService]*serviceEntry{}
	}
	e = l.newEntry(t, s)
	l.entries[s] = e
	return e
}

// called returns the live service whose Service.Name is name as an entry of t, nil for none.
func (l *liveServices) called(t *Table, name string) *serviceEntry {
	if l == nil || name == "" {
		return nil
	}
	if below, ok := strings.CutPrefix(name, "*."); ok {
		name = wildcardProbe + below
	}
	n, err := tunnel.ParseName(name)
	if err != nil {
		return nil
	}
	if _, ok := t.matchName(n); ok {
		return nil
	}
	return l.entry(t, n)
}

// newEntry makes the entry of s. The caller holds mu.
func (l *liveServices) newEntry(t *Table, s *LiveService) *serviceEntry {
	b := builder{Table: *t, newTransport: l.newTransport}
	e := &serviceEntry{Service: &s.Service, index: -1, home: -1}
	e.policies = b.compilePolicies(l.compilerWith(t, s.Policies), e, nil)
	b.makeEndpointTransportsOf(e)
	if len(e.Endpoints) > 0 {
		b.joinEndpoints(e)
	}
	return e
}

// compilerWith returns the Compiler of t's policies and of more. The caller holds mu.
func (l *liveServices) compilerWith(t *Table, more []*policy.Policy) *policy.Compiler {
	if len(more) > 0 {
		return policy.NewCompiler(slices.Concat(t.policies, more), t.prefixes.name)
	}
	if l.compiler == nil {
		l.compiler = policy.NewCompiler(t.policies, t.prefixes.name)
	}
	return l.compiler
}

// match returns the match of a request for a live service. It is false where there is none.
func (l *liveServices) match(t *Table, req *tunnel.Request) (match, bool, *tunnel.Error) {
	e := l.entry(t, req.Name)
	if e == nil {
		return match{}, false, nil
	}
	f := match{entry: e, pattern: e.Names[0].String(), port: req.Port}
	switch {
	case f.port == 0 && len(e.Ports) == 1:
		f.port = e.Ports[0]
	case f.port == 0:
		f.port = req.LocalPort
	}
	if len(e.Ports) > 0 && !slices.Contains(e.Ports, f.port) {
		return match{}, true, tunnel.Refusef(tunnel.NoRoute, "registry: %q has no port %d: %s has registered it with the ports %d", req.Host(), f.port, orUnknown(e.Origin), e.Ports)
	}
	return f, true, nil
}

// MayRegister decides by the current table whether the caller of req may serve a name at a
// port, 0 for all, with reverse sessions: policies with the verb register permit it. Where
// services of the table have the name, it returns the groups among their endpoints, which
// are the only ones that serve it; otherwise listed is false, and the caller may serve the
// name as a LiveService. The error is an *tunnel.Error.
func (r *Registry) MayRegister(req *tunnel.Request, name tunnel.Pattern, port uint16) (groups []string, listed bool, err error) {
	t := r.Table()
	if t == nil {
		return nil, false, tunnel.Refusef(tunnel.NoRoute, "registry: %q: no table is loaded yet", name)
	}
	if name == tunnel.AnyName || name.Suffix.IsZero() || name.Suffix.IsReserved() {
		return nil, false, tunnel.Refusef(tunnel.Denied, "registry: %q can't be registered", name)
	}
	caller := *req
	if caller.Name = name.Suffix; name.Wildcard {
		// A policy that is about some of the names only does not permit all of them.
		below, err := tunnel.ParseName(wildcardProbe + name.Suffix.String())
		if err != nil {
			return nil, false, tunnel.Refusef(tunnel.Denied, "registry: %q can't be registered: %w", name, err)
		}
		caller.Name = below
	}
	decide := func(e *serviceEntry) error {
		d := e.policies.service.Decide(&caller, port, policy.Register)
		if d.Allowed {
			return nil
		}
		why := "no policy with the verb register is about it"
		if d.Step != policy.Undecided {
			why = denial(&d, &caller)
		}
		return tunnel.Refusef(tunnel.Denied, "registry: %s may not register %q: %s", callerText(&caller), name, why)
	}
	var found claims
	if name.Wildcard {
		found = t.wild[name.Suffix]
		if found == nil {
			if m, ok := t.matchWild(name.Suffix); ok {
				found = m.claims
			}
		}
	} else if m, ok := t.matchName(name.Suffix); ok {
		found = m.claims
	}
	for _, c := range found {
		if port != 0 && c.port != 0 && c.port != port {
			continue
		}
		e := &t.services[c.service]
		if err := decide(e); err != nil {
			return nil, true, err
		}
		for i := range e.Endpoints {
			if g := e.Endpoints[i].Group; g != "" && e.Endpoints[i].Serves(port) && !slices.Contains(groups, g) {
				groups = append(groups, g)
			}
		}
	}
	if found != nil {
		if groups == nil {
			return nil, true, tunnel.Refusef(tunnel.Denied, "registry: %q is a name of service %q of %s, which has no endpoint with a group at port %d", name, t.services[found[0].service].Name, orUnknown(t.services[found[0].service].Origin), port)
		}
		return groups, true, nil
	}
	s := &Service{Name: name.String(), Names: []tunnel.Pattern{name}}
	l := t.live
	if l == nil {
		l = &liveServices{}
	}
	l.mu.Lock()
	e := &serviceEntry{Service: s, index: -1, home: -1}
	b := builder{Table: *t}
	e.policies = b.compilePolicies(l.compilerWith(t, nil), e, nil)
	l.mu.Unlock()
	return nil, false, decide(e)
}

// wildcardProbe makes a name below a wildcard that no policy is about alone.
const wildcardProbe = "any-name-below."
