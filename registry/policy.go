package registry

import (
	"fmt"
	"iter"
	"strings"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// policySets are the policies of a service.
type policySets struct {
	service *policy.Set // nil for none

	// workloads has the Set of each workload that policies select by its labels. It is
	// complete for its service, or nil where none is selected.
	workloads map[*policy.Workload]*policy.Set
}

// of returns the Set of an endpoint.
func (p *policySets) of(ep *Endpoint) *policy.Set {
	if ep.Workload != nil {
		if s, ok := p.workloads[ep.Workload]; ok {
			return s
		}
	}
	return p.service
}

// addPolicies compiles the policies of snapshots, and gives each service its own.
func (b *builder) addPolicies(snapshots []Snapshot) {
	for i := range snapshots {
		b.policies = append(b.policies, snapshots[i].Policies...)
	}
	if len(b.policies) == 0 {
		return
	}
	c := policy.NewCompiler(b.policies, b.prefixes.name) // all networks are there by now
	for _, p := range b.policies {
		if err := p.Check(); err != nil {
			b.conflicts = append(b.conflicts, &Conflict{What: fmt.Sprintf("policy %q", p.Name), Dropped: p.Origin, Why: err.Error(), Denies: !p.DryRun})
		}
	}
	for i := range b.services {
		b.services[i].policies = b.compilePolicies(c, &b.services[i], nil)
	}
	if b.listeners == nil {
		return
	}
	for i := range b.listeners.backends {
		b.listeners.backends[i].policies = b.compilePolicies(c, &b.listeners.backends[i], nil)
	}
	for _, r := range b.listeners.rules {
		for i := range r.backends {
			to := &r.backends[i]
			e := b.backendEntry(to)
			if e == nil {
				continue
			}
			own := b.compilePolicies(c, e, r)
			if own.service != e.policies.service || own.workloads != nil {
				to.policies = &own
			}
		}
	}
}

// compilePolicies returns the policies of e, for requests that r leads to it; nil is for all
// others.
func (b *builder) compilePolicies(c *policy.Compiler, e *serviceEntry, r *compiledRule) policySets {
	target := policy.Target{Service: e.Name, ID: e.ID.Service, Namespace: e.ID.Namespace, Names: e.Names}
	if c.SelectsNames() {
		target = *PolicyTarget(b.mesh, e.Service)
	}
	if r != nil {
		target.Route, target.Names = r.Name, append(target.Names[:len(target.Names):len(target.Names)], r.asked...)
	}
	p := policySets{service: c.Set(&target)}
	if !c.SelectsWorkloads() {
		return p
	}
	selected := false
	for i := range e.Endpoints {
		w := e.Endpoints[i].Workload
		if w == nil {
			continue
		}
		if _, ok := p.workloads[w]; ok {
			continue
		}
		if p.workloads == nil {
			p.workloads = map[*policy.Workload]*policy.Set{}
		}
		target.Workload = w
		p.workloads[w] = c.Set(&target)
		selected = selected || p.workloads[w] != p.service
	}
	if !selected {
		p.workloads = nil
	}
	return p
}

// PolicyTarget returns what policies select s by, in a table of m.
func PolicyTarget(m Mesh, s *Service) *policy.Target {
	return &policy.Target{
		Service: s.Name, ID: s.ID.Service, Namespace: s.ID.Namespace,
		Names: append(s.Names[:len(s.Names):len(s.Names)], m.namesOf(s)...),
	}
}

// namesOf returns the names of s by its ID.
func (m Mesh) namesOf(e *Service) (names []tunnel.Pattern) {
	if e.ID == (ID{}) {
		return nil
	}
	if e.ID.Cluster != "" {
		if full, short, err := m.Names(e.ID); err == nil {
			names = append(names, tunnel.Pattern{Suffix: full})
			if !short.IsZero() {
				names = append(names, tunnel.Pattern{Suffix: short})
			}
		}
	}
	if e.Exported || e.ID.Cluster == "" {
		if set, err := e.ID.SetName(); err == nil {
			names = append(names, tunnel.Pattern{Suffix: set})
		}
	}
	return names
}

// backendEntry returns the service of a backend, and nil where there is none.
func (t *Table) backendEntry(to *compiledBackend) *serviceEntry {
	switch {
	case to.broken != "" || to.entry < 0:
		return nil
	case to.serviceName.IsZero():
		return &t.listeners.backends[to.entry]
	}
	i := t.claimant(to.serviceName, to.port)
	if i < 0 {
		i = t.claimant(to.serviceName, 0)
	}
	if i < 0 {
		return nil
	}
	return &t.services[i]
}

// Policies returns the policies of t in the order of their snapshots. They must not be
// changed.
func (t *Table) Policies() []*policy.Policy {
	if t == nil {
		return nil
	}
	return t.policies
}

// ServicesWithPolicies iterates over the services, and those that rules lead to, each with
// its policies: nil where it has none. Endpoints of a service, and a rule that leads there,
// may have more. What the services point to must not be changed.
func (t *Table) ServicesWithPolicies() iter.Seq2[*Service, *policy.Set] {
	return func(yield func(*Service, *policy.Set) bool) {
		if t == nil {
			return
		}
		for i := range t.services {
			if !yield(t.services[i].Service, t.services[i].policies.service) {
				return
			}
		}
		if t.listeners == nil {
			return
		}
		for i := range t.listeners.backends {
			if e := &t.listeners.backends[i]; !yield(e.Service, e.policies.service) {
				return
			}
		}
	}
}

// policyPort returns the port that policies see: that of the service, or the one of the
// listener where it is not known.
func (f *match) policyPort(req *tunnel.Request) uint16 {
	if f.port != 0 {
		return f.port
	}
	return req.LocalPort
}

// authorize decides whether the caller of req may connect to f. It returns nil and nil
// where no policy is about it. It does not allocate then.
func (f *match) authorize(t *Table, req *tunnel.Request) (*tunnel.PolicyDecision, *tunnel.Error) {
	p := f.policies
	if p == nil || p.service == nil && p.workloads == nil {
		return nil, nil
	}
	req = t.deferring(req)
	port := f.policyPort(req)
	d, admitted, all := policy.Decision{}, 0, 0
	if p.workloads == nil {
		d = p.service.Decide(req, port, policy.Connect)
	} else {
		d, admitted, all = f.authorizeEndpoints(req, port)
	}
	route := decisionOf(&d)
	if route != nil {
		route.Admitted, route.Endpoints = admitted, all
	}
	if d.Allowed {
		return route, nil
	}
	return route, tunnel.Refusef(tunnel.Denied, "registry: %q is service %q of %s: %s", req.Target(), f.entry.Name, orUnknown(f.entry.Origin), denial(&d, req))
}

// deferring returns req, or a copy of it where its listener leaves identities to services.
func (t *Table) deferring(req *tunnel.Request) *tunnel.Request {
	if req.Peer.Method != "" || req.DeferIdentity || t.listeners == nil {
		return req
	}
	l := t.listeners.byName[req.Listener]
	if l == nil || l.Settings == nil || !l.Settings.DeferIdentity {
		return req
	}
	deferred := *req
	deferred.DeferIdentity = true
	return &deferred
}

// authorizeEndpoints decides for each endpoint of f, and returns the first decision that
// allows, or else the first one, and how many of all allow.
func (f *match) authorizeEndpoints(req *tunnel.Request, port uint16) (first policy.Decision, admitted, all int) {
	eps := f.endpoints
	if eps == nil {
		eps = f.entry.servingPort(f.entry.Endpoints, f.port)
	}
	for i := range eps {
		d := f.policies.of(&eps[i]).Decide(req, port, policy.Connect)
		if d.Allowed {
			admitted++
		}
		if i == 0 || d.Allowed && admitted == 1 {
			first = d
		}
	}
	if len(eps) == 0 {
		first = f.policies.service.Decide(req, port, policy.Connect)
	}
	return first, admitted, len(eps)
}

// permitted returns those of eps, endpoints of x, that the caller may connect to. It is
// eps itself where that are all.
func (x *resolution) permitted(eps []Endpoint) []Endpoint {
	if x.policies == nil || x.policies.workloads == nil {
		return eps
	}
	req, port, kept := x.table.deferring(x.req), x.policyPort(x.req), make([]Endpoint, 0, len(eps))
	for i := range eps {
		if x.policies.of(&eps[i]).Decide(req, port, policy.Connect).Allowed {
			kept = append(kept, eps[i])
		}
	}
	if len(kept) == len(eps) {
		return eps
	}
	return kept
}

// errEndpointsDenied refuses a request that policies permit for other endpoints than
// those that it would go to.
func (x *resolution) errEndpointsDenied(why string) error {
	return tunnel.Refusef(tunnel.Denied, "registry: %q is service %q of %s: policies deny %s %s", x.req.Target(), x.entry.Name, orUnknown(x.entry.Origin), callerText(x.req), why)
}

// decisionOf returns d as an Outcome has it; nil where no policy has decided.
func decisionOf(d *policy.Decision) *tunnel.PolicyDecision {
	if d.Step == policy.Undecided && d.DryRun == nil {
		return nil
	}
	to := &tunnel.PolicyDecision{Policy: d.Policy, Origin: d.Origin, Rule: d.Rule, Step: d.Step.String(), Allowed: d.Allowed}
	if dry := d.DryRun; dry != nil {
		to.DryRun = &tunnel.PolicyDecision{Policy: dry.Policy, Origin: dry.Origin, Rule: dry.Rule, Step: dry.Step.String(), Allowed: dry.Allowed}
	}
	return to
}

// denial says why d, which denies, does so.
func denial(d *policy.Decision, req *tunnel.Request) string {
	who, name := callerText(req), fmt.Sprintf("policy %q of %s", d.Policy, orUnknown(d.Origin))
	switch {
	case d.Step == policy.Unreadable:
		return name + " can't be understood, and so denies everybody"
	case d.Rule < 0:
		return fmt.Sprintf("%s allows others, and no policy allows %s", name, who)
	}
	return fmt.Sprintf("%s denies %s by rule %d", name, who, d.Rule+1)
}

// callerText names the caller of req for people.
func callerText(req *tunnel.Request) string {
	var b strings.Builder
	if req.Peer.Method == "" {
		b.WriteString("a caller without an identity")
	} else {
		fmt.Fprintf(&b, "%q", tunnel.Clip(req.Peer.ID))
	}
	if a := req.Source.Addr(); a.IsValid() {
		fmt.Fprintf(&b, " at %s", a)
	}
	return b.String()
}

// Recheck decides by the current table whether the caller of req may still have a tunnel
// that was opened by route. It returns nil unless policy denies that now: neither a
// service that is gone nor one that is not exposed any more ends tunnels. Where policies
// select endpoints, the tunnel may go to any of route.Endpoints.
func (r *Registry) Recheck(req *tunnel.Request, route *tunnel.Route) error {
	s := r.current.Load()
	if s == nil || len(s.table.policies) == 0 {
		return nil
	}
	for _, f := range s.table.recheckable(req, route) {
		if _, refusal := f.authorize(s.table, req); refusal != nil {
			return refusal
		}
		if f.policies.workloads == nil {
			continue
		}
		x := resolution{Registry: r, table: s.table, req: req, match: f}
		for i := range route.Endpoints {
			if !x.permits(&route.Endpoints[i]) {
				return x.errEndpointsDenied("at endpoint " + route.Endpoints[i].String())
			}
		}
	}
	return nil
}

// A PolicyExplanation is what the policies of a service say about a request.
type PolicyExplanation struct {
	Decision policy.Decision
	Steps    []policy.StepResult // nil where no policy is about the request
	DryRun   []policy.StepResult // with the policies in dry run; nil where there are none
}

// ExplainPolicy says how policies decide about req, whose route Resolve has found or
// denied. Where policies select endpoints, it is about those of the service alone.
func (r *Registry) ExplainPolicy(req *tunnel.Request, route *tunnel.Route) PolicyExplanation {
	var x PolicyExplanation
	s := r.current.Load()
	if s == nil || route.Service == "" {
		return x
	}
	req = s.table.deferring(req)
	found := s.table.recheckable(req, route)
	if len(found) == 0 {
		return x
	}
	set, port := found[0].policies.service, found[0].policyPort(req)
	x.Decision, x.Steps = set.Explain(req, port, policy.Connect, false)
	if x.Decision.DryRun != nil {
		_, x.DryRun = set.Explain(req, port, policy.Connect, true)
	}
	return x
}

// permits reports whether the endpoint that is dialed as ep is none of those that
// policies deny to x.
func (x *resolution) permits(ep *tunnel.Endpoint) bool {
	for i := range x.entry.Endpoints {
		c := &x.entry.Endpoints[i]
		same := c.Host != "" && c.Host == ep.Host || c.Addr.IsValid() && c.Addr.Unmap() == ep.Addr.Addr().Unmap()
		if same && (c.Port == 0 || c.Port == ep.Addr.Port()) && !x.policies.of(c).Decide(x.table.deferring(x.req), x.policyPort(x.req), policy.Connect).Allowed {
			return false
		}
	}
	return true
}

// recheckable returns the matches of req that route may be of.
func (t *Table) recheckable(req *tunnel.Request, route *tunnel.Route) []match {
	if !t.listenerOnly(req) {
		f, err := t.find(req)
		if err != nil {
			return nil
		}
		f.policies = &f.entry.policies
		return []match{f}
	}
	one, refusal := t.matchRule(req)
	if refusal != nil {
		return nil
	}
	var all []match
	for i := range one.value.backends {
		b := &one.value.backends[i]
		if b.broken != "" {
			continue
		}
		if e, _ := t.backendService(b, req); e != nil && e.Name == route.Backend {
			all = append(all, match{entry: e, pattern: one.pattern, port: b.port, rule: one.value, policies: b.policiesOf(e)})
		}
	}
	return all
}

// policiesOf returns the policies for requests that b leads to e.
func (b *compiledBackend) policiesOf(e *serviceEntry) *policySets {
	if b.policies != nil {
		return b.policies
	}
	return &e.policies
}
