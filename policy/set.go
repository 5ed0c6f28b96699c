package policy

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"culvert.dev/tunnel"
)

// A Set is the compiled policies of one target. It never changes, so any number of
// goroutines may use it. A nil Set has no policies.
type Set struct {
	selected []selection
	verbs    [Join + 1]decider
	dryRun   [Join + 1]*decider // the policies in dry run with all others; nil where there are none
}

// A selection is a Policy that selects a target.
type selection struct {
	*Policy
	byName bool // an allow admits only requests for its Names: the wildcard of the target is wider
}

// A decider is the policies of one verb, ready for evaluation.
type decider struct {
	broken *Decision // what is decided without a look at the request; nil for nothing

	flags  flags            // of policies for all listeners
	scoped map[string]flags // of policies for one listener, or for all of its sections where it ends with a slash

	known        index // for callers with an identity
	unidentified index // for others: a deny matches whatever identity it asks for, and an allow does not
	deferred     index // for others where the service sees to identities: the reverse

	matches []Decision // by rules
	denials []Decision // of those that no allow matches
	none    Decision
}

// flags say which policies select the target.
type flags struct {
	namespace bool     // there is one of the tier Namespace
	allows    [3]int32 // by tier: the index of the denial where none matches, or noAllow
}

const noAllow = math.MaxInt32

var noFlags = flags{allows: [3]int32{noAllow, noAllow, noAllow}}

// with returns the flags of the policies of f and o.
func (f flags) with(o flags) flags {
	f.namespace = f.namespace || o.namespace
	for t := range f.allows {
		f.allows[t] = min(f.allows[t], o.allows[t])
	}
	return f
}

// A NetworkOf returns the name of the network that has an address, and "" where none
// has it. It must be safe for concurrent use.
type NetworkOf func(netip.Addr) string

// Compile returns the Set of policies that select one target. Of their Targets it
// looks at Listeners alone. A nil NetworkOf means that there are no networks.
//
// The Set is usable in any case. If a policy can't be understood the error says why,
// and the Set denies everything.
func Compile(policies []*Policy, networkOf NetworkOf) (*Set, error) {
	selected := make([]selection, len(policies))
	for i, p := range policies {
		selected[i] = selection{Policy: p}
	}
	return compile(selected, networkOf)
}

func compile(selected []selection, networkOf NetworkOf) (*Set, error) {
	s := &Set{selected: selected}
	slices.SortStableFunc(s.selected, func(a, b selection) int { return compare(a.Policy, b.Policy) })
	var errs []error
	var broken, brokenDry *Decision
	for _, p := range s.selected {
		err := p.Check()
		if err == nil {
			continue
		}
		errs = append(errs, fmt.Errorf("policy %q of %s can't be used: %w", p.Name, cmp.Or(p.Origin, "an unnamed source"), err))
		d := &Decision{Policy: p.Name, Origin: p.Origin, Rule: -1, Step: Unreadable, Action: Deny}
		switch {
		case !p.DryRun && broken == nil:
			broken = d
		case p.DryRun && brokenDry == nil:
			brokenDry = d
		}
	}
	for v := Connect; v <= Join; v++ {
		var enforced, all []selection
		for _, p := range s.selected {
			if p.Verb != v {
				continue
			}
			all = append(all, p)
			if !p.DryRun {
				enforced = append(enforced, p)
			}
		}
		s.verbs[v] = decider{none: noDecider[v], broken: broken, flags: noFlags}
		if broken == nil && len(enforced) > 0 {
			s.verbs[v].compile(enforced, networkOf)
		}
		if len(all) > len(enforced) || brokenDry != nil && broken == nil {
			s.dryRun[v] = &decider{none: noDecider[v], broken: cmp.Or(broken, brokenDry), flags: noFlags}
			if s.dryRun[v].broken == nil {
				s.dryRun[v].compile(all, networkOf)
			}
		}
	}
	return s, errors.Join(errs...)
}

// compare puts policies into the order in which they are named: of several that would
// decide the same, the first one has decided.
func compare(a, b *Policy) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Origin, b.Origin))
}

// noDecider decides where there is no policy.
var noDecider = [Join + 1]Decision{Connect: {Allowed: true, Rule: -1}, Register: {Rule: -1}, Catalog: {Rule: -1}, Join: {Rule: -1}}

// Decide decides whether the caller of req may do verb with the target of s. The port
// is that of the service. It does not allocate.
func (s *Set) Decide(req *tunnel.Request, port uint16, verb Verb) Decision {
	switch {
	case verb > Join:
		return Decision{Rule: -1, Step: Unreadable, Action: Deny}
	case s == nil:
		return noDecider[verb]
	}
	c := callerOf(req, port)
	d := *s.verbs[verb].decide(&c)
	if dry := s.dryRun[verb]; dry != nil {
		if o := dry.decide(&c); !d.same(o) {
			d.DryRun = o
		}
	}
	return d
}

// same reports whether d and o are one decision.
func (d *Decision) same(o *Decision) bool {
	return d.Allowed == o.Allowed && d.Step == o.Step && d.Rule == o.Rule && d.Policy == o.Policy && d.Origin == o.Origin
}

// decide returns the decision on requests of c.
func (o *decider) decide(c *caller) *Decision {
	if o.broken != nil {
		return o.broken
	}
	f := o.flags
	if len(o.scoped) > 0 {
		if more, ok := o.flagsOn(c.req.Listener); ok {
			f = f.with(more)
		}
	}
	best := o.indexFor(c).find(c)
	switch {
	case best != nil && best.step <= NamespaceAllow:
		return &o.matches[best.match]
	case f.allows[Namespace] != noAllow:
		return &o.denials[f.allows[Namespace]]
	case f.namespace:
		return &o.none
	case best != nil:
		return &o.matches[best.match]
	case f.allows[Baseline] != noAllow:
		return &o.denials[f.allows[Baseline]]
	}
	return &o.none
}

// indexFor returns the index that has the conditions for c.
func (o *decider) indexFor(c *caller) *index {
	switch {
	case c.known:
		return &o.known
	case c.req.DeferIdentity && c.req.TLS == nil:
		return &o.deferred
	}
	return &o.unidentified
}

// compile fills o with policies that are sorted by name.
func (o *decider) compile(policies []selection, networkOf NetworkOf) {
	var conditions []*condition
	for _, p := range policies {
		more := noFlags
		more.namespace = p.Tier == Namespace
		if p.Action == Allow {
			more.allows[p.Tier] = int32(len(o.denials))
			o.denials = append(o.denials, Decision{Policy: p.Name, Origin: p.Origin, Rule: -1, Step: p.step(), Action: Allow})
		}
		if p.Targets.Listeners == nil {
			o.flags = o.flags.with(more)
		}
		for _, name := range p.Targets.Listeners {
			if o.scoped == nil {
				o.scoped = map[string]flags{}
			}
			name = scope(name)
			before, ok := o.scoped[name]
			if !ok {
				before = noFlags
			}
			o.scoped[name] = before.with(more)
		}
		conditions = o.addRules(conditions, p, networkOf)
	}
	slices.SortStableFunc(conditions, func(a, b *condition) int { return cmp.Compare(a.step, b.step) })
	for i, e := range conditions {
		e.rank = i
		o.known.add(e, true)
		switch {
		case !e.source.identity():
			o.unidentified.add(e, false)
			o.deferred.add(e, false)
		case e.step.denies():
			o.unidentified.add(e, false)
		default:
			o.deferred.add(e, false)
		}
	}
	for _, x := range []*index{&o.known, &o.unidentified, &o.deferred} {
		x.finish()
	}
}

// denies reports whether what matches in s is denied.
func (s Step) denies() bool { return s == AdminDeny || s == NamespaceDeny || s == BaselineDeny }

// addRules appends the conditions of p, one for each source of each of its rules.
func (o *decider) addRules(conditions []*condition, p selection, networkOf NetworkOf) []*condition {
	for i := range p.Rules {
		r := &p.Rules[i]
		o.matches = append(o.matches, Decision{Allowed: p.Action == Allow, Policy: p.Name, Origin: p.Origin, Rule: i, Step: p.step(), Action: p.Action})
		whole := condition{step: p.step(), match: int32(len(o.matches) - 1), listeners: p.Targets.Listeners, ports: r.Ports, protocols: r.Protocols}
		if p.byName && p.Action == Allow {
			whole.names = patternsOf(p.Targets.Names)
		}
		if r.Sources == nil {
			conditions = append(conditions, &whole)
			continue
		}
		for j := range *r.Sources {
			one := whole
			one.source = compileSource(&(*r.Sources)[j], networkOf)
			conditions = append(conditions, &one)
		}
	}
	return conditions
}

// Policies returns the policies of s, sorted by name. They must not be changed.
func (s *Set) Policies() []*Policy {
	if s == nil {
		return nil
	}
	all := make([]*Policy, len(s.selected))
	for i := range s.selected {
		all[i] = s.selected[i].Policy
	}
	return all
}

// DependsOnName reports whether decisions depend on the name that is asked for, and not
// only on the service.
func (s *Set) DependsOnName() bool {
	return s != nil && slices.ContainsFunc(s.selected, func(p selection) bool { return p.byName && p.Action == Allow })
}

// NamesIdentities reports whether an enforced policy of s has a condition on the
// identity of callers, which a listener that passes TLS on does not know.
func (s *Set) NamesIdentities() bool {
	return s.anySource(func(x *Source) bool { return x.namesIdentity() })
}

// NamesNetworks reports whether an enforced policy of s has a condition on the network
// of callers: its decisions may change with the networks.
func (s *Set) NamesNetworks() bool {
	return s.anySource(func(x *Source) bool { return len(x.Networks) > 0 })
}

func (s *Set) anySource(is func(*Source) bool) bool {
	return s != nil && slices.ContainsFunc(s.selected, func(p selection) bool { return !p.DryRun && p.anySource(is) })
}

// NamesIdentities reports whether p has a condition on the identity of callers.
func (p *Policy) NamesIdentities() bool {
	return p.anySource(func(x *Source) bool { return x.namesIdentity() })
}

func (p *Policy) anySource(is func(*Source) bool) bool {
	return slices.ContainsFunc(p.Rules, func(r Rule) bool {
		return r.Sources != nil && slices.ContainsFunc(*r.Sources, func(x Source) bool { return is(&x) })
	})
}
