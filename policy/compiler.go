package policy

import (
	"encoding/binary"
	"fmt"
	"slices"

	"culvert.dev/tunnel"
)

// A Target is what policies can select: a service, or one endpoint of it.
type Target struct {
	Service   string // its name in logs
	ID        string // and the one in its namespace, which Targets.Services may have, too; "" for none
	Namespace string
	Names     []tunnel.Pattern // by which clients ask for it
	Route     string           // the rule of a listener that leads to it; "" for none
	Workload  *Workload        // of the endpoint; nil for the service itself, and where it is not known
}

// A Workload is what is known of the workload that an endpoint belongs to.
type Workload struct {
	Namespace      string
	ServiceAccount string            `json:",omitzero"`
	Labels         map[string]string `json:",omitzero"`

	// Unknown says that the endpoint belongs to a workload of Namespace whose labels are
	// not known. Where policies select workloads of it, such an endpoint serves nobody.
	Unknown bool `json:",omitzero"`
}

// A Compiler makes the Sets of a table. Targets that are selected by the same policies
// share one Set. It is not safe for concurrent use.
type Compiler struct {
	policies  []*compilerPolicy // sorted by name
	networkOf NetworkOf
	sets      map[string]*Set // by the policies that they have
	errs      []error
	seen      []uint32 // by policy, the last call of Set that has looked at it
	turn      uint32
	found     []int32
	workloads bool // a policy selects workloads
	names     bool // a policy selects names

	// A policy is filed under one of these, the first one that its Targets have.
	byService, byRoute, byNamespace map[string][]int32
	byName                          map[tunnel.Name][]int32 // exact names, and what follows "*."
	belowName                       map[tunnel.Name][]int32 // names that have the key as a parent
	rest                            []int32
}

type compilerPolicy struct {
	*Policy
	names []tunnel.Pattern // nil means any
}

// NewCompiler returns a Compiler for policies, which must not change any more. A nil
// NetworkOf means that there are no networks.
func NewCompiler(policies []*Policy, networkOf NetworkOf) *Compiler {
	c := &Compiler{
		networkOf: networkOf, sets: map[string]*Set{}, seen: make([]uint32, len(policies)), byService: map[string][]int32{}, byRoute: map[string][]int32{},
		byNamespace: map[string][]int32{}, byName: map[tunnel.Name][]int32{}, belowName: map[tunnel.Name][]int32{},
	}
	policies = slices.Clone(policies)
	slices.SortStableFunc(policies, compare)
	for i, p := range policies {
		one := &compilerPolicy{Policy: p}
		if err := p.Check(); err != nil {
			c.errs = append(c.errs, fmt.Errorf("policy %q of %s: %w", p.Name, p.Origin, err))
		}
		if p.Targets.check() == nil && p.Targets.Names != nil {
			one.names = patternsOf(p.Targets.Names)
			c.names = true
		}
		c.workloads = c.workloads || p.Targets.Workloads != nil
		c.policies = append(c.policies, one)
		c.file(one, int32(i))
	}
	return c
}

// file files policy i where Set finds it.
func (c *Compiler) file(p *compilerPolicy, i int32) {
	t := &p.Targets
	switch {
	case t.Services != nil:
		addAll(c.byService, t.Services, i)
	case t.Routes != nil:
		addAll(c.byRoute, t.Routes, i)
	case p.names != nil:
		for _, name := range p.names {
			if name == tunnel.AnyName {
				c.rest = append(c.rest, i)
				continue
			}
			c.byName[name.Suffix] = append(c.byName[name.Suffix], i)
			for parent, ok := name.Suffix.Parent(); ok; parent, ok = parent.Parent() {
				c.belowName[parent] = append(c.belowName[parent], i)
			}
		}
	case t.Namespaces != nil:
		addAll(c.byNamespace, t.Namespaces, i)
	default:
		c.rest = append(c.rest, i)
	}
}

func addAll(m map[string][]int32, keys []string, i int32) {
	for _, k := range keys {
		m[k] = append(m[k], i)
	}
}

// SelectsWorkloads reports whether there is a policy that selects endpoints by their
// workloads. Without one, no endpoint needs a Set of its own.
func (c *Compiler) SelectsWorkloads() bool { return c.workloads }

// SelectsNames reports whether there is a policy that selects services by their names.
func (c *Compiler) SelectsNames() bool { return c.names }

// Errors returns why policies can't be understood, one error for each.
func (c *Compiler) Errors() []error { return c.errs }

// Set returns the Set of the policies that select t. It is nil where there are none.
func (c *Compiler) Set(t *Target) *Set {
	if len(c.policies) == 0 {
		return nil
	}
	c.turn++
	c.found = c.found[:0]
	c.consider(c.rest, t)
	c.consider(c.byService[t.Service], t)
	if t.ID != "" {
		c.consider(c.byService[t.ID], t)
	}
	if t.Route != "" {
		c.consider(c.byRoute[t.Route], t)
	}
	c.consider(c.byNamespace[t.Namespace], t)
	if t.Workload != nil && t.Workload.Namespace != t.Namespace {
		c.consider(c.byNamespace[t.Workload.Namespace], t)
	}
	if len(c.byName) > 0 {
		for _, name := range t.Names {
			if name == tunnel.AnyName {
				for _, list := range c.byName {
					c.consider(list, t)
				}
				continue
			}
			c.consider(c.byName[name.Suffix], t)
			for parent, ok := name.Suffix.Parent(); ok; parent, ok = parent.Parent() {
				c.consider(c.byName[parent], t)
			}
			if name.Wildcard {
				c.consider(c.belowName[name.Suffix], t)
			}
		}
	}
	if len(c.found) == 0 {
		return nil
	}
	slices.Sort(c.found)
	key := make([]byte, 0, 64)
	for _, i := range c.found {
		key = binary.LittleEndian.AppendUint32(key, uint32(i))
	}
	unknown := c.unknown(t)
	if unknown != nil {
		key = append(key, "unknown"...)
	}
	if s, ok := c.sets[string(key)]; ok {
		return s
	}
	selected := make([]selection, len(c.found))
	for n, i := range c.found {
		selected[n] = selection{Policy: c.policies[i>>1].Policy, byName: i&1 != 0}
	}
	if unknown != nil {
		selected = append(selected, selection{Policy: unknown})
	}
	s, _ := compile(selected, c.networkOf) // Errors has them
	c.sets[string(key)] = s
	return s
}

// unknown returns a policy that denies everybody if those that were found select t by
// labels that are not known, and nil if not.
func (c *Compiler) unknown(t *Target) *Policy {
	if t.Workload == nil || !t.Workload.Unknown {
		return nil
	}
	for _, i := range c.found {
		if p := c.policies[i>>1]; p.Targets.Workloads != nil && !p.DryRun {
			return &Policy{Name: p.Name, Origin: p.Origin, Invalid: "it selects workloads by labels, and those of the endpoint are not known"}
		}
	}
	return nil
}

// consider adds those of list to found that select t.
func (c *Compiler) consider(list []int32, t *Target) {
	for _, i := range list {
		if c.seen[i] == c.turn {
			continue
		}
		c.seen[i] = c.turn
		selected, byName := c.policies[i].selects(t)
		if selected {
			mark := i << 1
			if byName {
				mark |= 1
			}
			c.found = append(c.found, mark)
		}
	}
}

// selects reports whether p selects t, and whether it has only a part of each wildcard
// of t that it has a part in.
func (p *compilerPolicy) selects(t *Target) (selected, byName bool) {
	x := &p.Targets
	namespace := t.Namespace
	switch {
	case x.Services != nil && !slices.Contains(x.Services, t.Service) && (t.ID == "" || !slices.Contains(x.Services, t.ID)):
		return false, false
	case x.Routes != nil && (t.Route == "" || !slices.Contains(x.Routes, t.Route)):
		return false, false
	case x.Workloads != nil:
		if t.Workload == nil || !t.Workload.Unknown && !x.Workloads.matches(t.Workload.Labels) {
			return false, false
		}
		namespace = t.Workload.Namespace
	}
	if x.Namespaces != nil && !slices.Contains(x.Namespaces, namespace) {
		return false, false
	}
	if p.names == nil {
		return true, false
	}
	for _, name := range t.Names {
		for _, own := range p.names {
			switch overlap(own, name) {
			case whole:
				return true, false
			case part:
				selected = true
			}
		}
	}
	return selected, selected
}

const (
	apart = iota
	part  // of the names of the target
	whole
)

// overlap says which of the names of a target p has.
func overlap(p, target tunnel.Pattern) int {
	switch {
	case p == tunnel.AnyName || p == target:
		return whole
	case target == tunnel.AnyName:
		return part
	case p.Wildcard && p.Matches(target.Suffix): // and so all below it
		return whole
	case target.Wildcard && target.Matches(p.Suffix):
		return part
	}
	return apart
}

// matches reports whether s selects workloads with these labels.
func (s *Selector) matches(labels map[string]string) bool {
	for k, v := range s.Labels {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	for _, r := range s.Requirements {
		have, ok := labels[r.Key]
		switch r.Operator {
		case "In":
			ok = ok && slices.Contains(r.Values, have)
		case "NotIn":
			ok = !ok || !slices.Contains(r.Values, have)
		case "DoesNotExist":
			ok = !ok
		}
		if !ok {
			return false
		}
	}
	return true
}
