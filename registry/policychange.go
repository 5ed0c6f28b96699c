package registry

import (
	"maps"
	"reflect"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// Generation returns that of the current table, and 0 before the first one. It is the
// generation of the routes that are resolved now.
func (r *Registry) Generation() uint64 { return r.Table().Generation() }

var _ tunnel.Rechecker = (*Registry)(nil)

// PolicyChanges returns those of keys, which services and rules with tunnels have, for
// which t may decide otherwise than the table before it: other policies select them, or
// the networks that these name have changed. It is nil where there is none.
func (t *Table) PolicyChanges(before *Table, keys []tunnel.ServiceKey) map[tunnel.ServiceKey]bool {
	if len(keys) == 0 || len(t.Policies())+len(before.Policies()) == 0 {
		return nil
	}
	wanted := make(map[string]bool, 2*len(keys)) // names of services and of rules
	for _, k := range keys {
		wanted[k.Service], wanted[k.Backend] = true, true
	}
	c := policyChange{old: before.policiesOf(wanted), now: t.policiesOf(wanted), same: map[[2]*policy.Set]bool{}}
	c.networks = !before.sameNetworkPrefixes(t)
	c.deferred = !maps.Equal(before.deferringListeners(), t.deferringListeners())
	var changed map[tunnel.ServiceKey]bool
	for _, k := range keys {
		if !c.concerns(k) {
			continue
		}
		if changed == nil {
			changed = make(map[tunnel.ServiceKey]bool)
		}
		changed[k] = true
	}
	return changed
}

// A policyChange compares the policies of two tables.
type policyChange struct {
	old, now map[tunnel.ServiceKey][]*policySets
	same     map[[2]*policy.Set]bool // that were compared
	networks bool                    // the networks have changed
	deferred bool                    // listeners have that leave identities to services
}

// concerns reports whether there is a change for a service or a rule.
func (c *policyChange) concerns(k tunnel.ServiceKey) bool {
	of := func(all map[tunnel.ServiceKey][]*policySets) []*policySets {
		if own, ok := all[k]; ok || k.Backend == "" {
			return own
		}
		return all[tunnel.ServiceKey{Service: k.Backend}] // the rule has none of its own
	}
	old, now := of(c.old), of(c.now)
	if len(old) != len(now) {
		return true
	}
	for i := range now {
		a, b := old[i], now[i]
		switch {
		case a.workloads != nil || b.workloads != nil: // workloads come and go, and Recheck knows
			return true
		case c.networks && (a.service.NamesNetworks() || b.service.NamesNetworks()),
			c.deferred && (a.service.NamesIdentities() || b.service.NamesIdentities()),
			!c.sameSets(a.service, b.service):
			return true
		}
	}
	return false
}

func (c *policyChange) sameSets(a, b *policy.Set) bool {
	pair := [2]*policy.Set{a, b}
	same, known := c.same[pair]
	if !known {
		same = a.Same(b)
		c.same[pair] = same
	}
	return same
}

// policiesOf returns the policies of the wanted services of t, and of rules that have
// others than their service.
func (t *Table) policiesOf(wanted map[string]bool) map[tunnel.ServiceKey][]*policySets {
	all := make(map[tunnel.ServiceKey][]*policySets, len(wanted))
	if t == nil {
		return all
	}
	add := func(k tunnel.ServiceKey, p *policySets) { all[k] = append(all[k], p) }
	for i := range t.services {
		if e := &t.services[i]; wanted[e.Name] {
			add(tunnel.ServiceKey{Service: e.Name}, &e.policies)
		}
	}
	for name := range wanted {
		if e := t.live.called(t, name); e != nil {
			add(tunnel.ServiceKey{Service: name}, &e.policies)
		}
	}
	if t.listeners == nil {
		return all
	}
	for i := range t.listeners.backends {
		if e := &t.listeners.backends[i]; wanted[e.Name] {
			add(tunnel.ServiceKey{Service: e.Name}, &e.policies)
		}
	}
	for _, r := range t.listeners.rules {
		if !wanted[r.Name] {
			continue
		}
		for i := range r.backends {
			b := &r.backends[i]
			if b.policies == nil {
				continue
			}
			if e := t.backendEntry(b); e != nil {
				add(tunnel.ServiceKey{Service: r.Name, Backend: e.Name}, b.policies)
			}
		}
	}
	return all
}

// sameNetworkPrefixes reports whether an address is in the same network by t and by o.
func (t *Table) sameNetworkPrefixes(o *Table) bool {
	of := func(t *Table) map[string]string {
		all := map[string]string{}
		if t != nil {
			for p, i := range t.prefixes.byPrefix {
				all[p.String()] = t.prefixes.names[i]
			}
		}
		return all
	}
	return reflect.DeepEqual(of(t), of(o))
}

// deferringListeners returns the names of listeners that leave identities to services.
func (t *Table) deferringListeners() map[string]bool {
	all := map[string]bool{}
	if t != nil && t.listeners != nil {
		for name, l := range t.listeners.byName {
			if l.Settings != nil && l.Settings.DeferIdentity {
				all[name] = true
			}
		}
	}
	return all
}
