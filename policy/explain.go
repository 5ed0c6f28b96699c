package policy

import (
	"slices"

	"culvert.dev/tunnel"
)

// A StepResult is what one Step of the order has to say about a request.
type StepResult struct {
	Step     Step
	Policies []*Policy // that select the target in this step, by name

	// Match is the first Policy of them that matches, nil for none, and Rule the index of
	// its rule.
	Match *Policy
	Rule  int

	// Skipped says why the Step does not count; it is empty where it does.
	Skipped string
}

// Explain returns what each Step says about a request, whether or not an earlier one has
// decided, and the Decision. Policies in dry run are among them if dryRun is true. It is
// for people: it looks at every condition, where Decide looks at few.
func (s *Set) Explain(req *tunnel.Request, port uint16, verb Verb, dryRun bool) (Decision, []StepResult) {
	d := s.Decide(req, port, verb)
	if s == nil || verb > Join {
		return d, nil
	}
	o := &s.verbs[verb]
	if dryRun && s.dryRun[verb] != nil {
		o = s.dryRun[verb]
		if d.DryRun != nil {
			d = *d.DryRun
		}
	}
	if o.broken != nil {
		return d, nil
	}
	c := callerOf(req, port)
	x := o.indexFor(&c)
	results := make([]StepResult, 0, BaselineAllow)
	namespace := false
	for step := AdminDeny; step <= BaselineAllow; step++ {
		r := StepResult{Step: step}
		for _, p := range s.selected {
			if p.Verb != verb || p.step() != step || p.DryRun && !dryRun || !p.at(req.Listener) {
				continue
			}
			r.Policies = append(r.Policies, p.Policy)
			namespace = namespace || p.Tier == Namespace
			if rule := o.firstRule(p.Policy, x, &c); r.Match == nil && rule >= 0 {
				r.Match, r.Rule = p.Policy, rule
			}
		}
		if step >= BaselineDeny && namespace {
			r.Skipped = "a policy of the tier namespace selects the target"
		}
		results = append(results, r)
	}
	return d, results
}

// at reports whether p is for requests that came by a listener.
func (p selection) at(listener string) bool {
	return p.Targets.Listeners == nil || slices.ContainsFunc(p.Targets.Listeners, func(l string) bool { return onListener(l, listener) })
}

// firstRule returns the index of the first rule of p that matches c, or -1.
func (o *decider) firstRule(p *Policy, x *index, c *caller) int {
	for _, e := range x.all {
		d := &o.matches[e.match]
		if d.Policy == p.Name && d.Origin == p.Origin && e.step == p.step() && e.holds(c, x.identities) {
			return d.Rule
		}
	}
	return -1
}
