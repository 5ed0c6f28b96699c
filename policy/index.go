package policy

import (
	"cmp"
	"net/netip"
	"slices"
)

// An index finds the conditions that may hold for a caller. Each condition is filed
// under what is likely to be rarest of what it asks for. Lists are sorted by rank.
type index struct {
	identities    bool                            // conditions on identities count
	byID          map[string][]*condition         // SPIFFE ids
	byUser        map[string][]*condition         // other ids
	byAccount     map[ServiceAccount][]*condition // in any trust domain
	byNamespace   map[string][]*condition
	byTrustDomain map[string][]*condition
	byCIDR        prefixes[*condition]
	rest          []*condition
	all           []*condition // for Explain
}

// add files e. Conditions are added by rank.
func (x *index) add(e *condition, identities bool) {
	x.identities = identities
	x.all = append(x.all, e)
	s := e.source
	switch {
	case s == nil:
		x.rest = append(x.rest, e)
	case identities && s.spiffe && len(s.prefixes) == 0:
		file(&x.byID, s.ids, e)
	case identities && s.users != nil:
		file(&x.byUser, s.users, e)
	case identities && s.accounts != nil:
		file(&x.byAccount, s.accounts, e)
	case s.cidrs != nil:
		for i := range s.cidrs.list {
			x.byCIDR.add(s.cidrs.list[i].prefix, e)
		}
	case identities && s.namespaces != nil:
		file(&x.byNamespace, s.namespaces, e)
	case identities && s.spiffe:
		var domains []string
		for _, id := range slices.Concat(s.ids, s.prefixes) {
			if d, _, ok := cutSPIFFE(id); ok {
				domains = append(domains, d)
			}
		}
		slices.Sort(domains)
		file(&x.byTrustDomain, domains, e)
	case identities && s.trustDomains != nil:
		file(&x.byTrustDomain, s.trustDomains, e)
	default:
		x.rest = append(x.rest, e)
	}
}

// file files e under each of keys, which are sorted.
func file[K comparable](m *map[K][]*condition, keys []K, e *condition) {
	if *m == nil {
		*m = map[K][]*condition{}
	}
	for _, k := range slices.Compact(slices.Clone(keys)) {
		(*m)[k] = append((*m)[k], e)
	}
}

func (x *index) finish() { x.byCIDR.finish() }

// find returns the condition of the lowest rank that holds for c, or nil.
func (x *index) find(c *caller) *condition {
	best := x.best(nil, x.rest, c)
	if x.identities {
		who := &c.who
		if who.spiffe {
			best = x.best(best, x.byID[who.id], c)
		} else {
			best = x.best(best, x.byUser[who.id], c)
		}
		if who.account != "" && len(x.byAccount) > 0 {
			best = x.best(best, x.byAccount[ServiceAccount{who.namespace, who.account}], c)
		}
		if who.namespace != "" {
			best = x.best(best, x.byNamespace[who.namespace], c)
		}
		if who.trustDomain != "" {
			best = x.best(best, x.byTrustDomain[who.trustDomain], c)
		}
	}
	for i := x.byCIDR.find(c.addr); i >= 0; i = x.byCIDR.list[i].parent {
		best = x.best(best, x.byCIDR.list[i].values, c)
	}
	return best
}

// best returns the first of list that holds for c, unless have counts before it.
func (x *index) best(have *condition, list []*condition, c *caller) *condition {
	for _, e := range list {
		if have != nil && have.rank <= e.rank {
			break
		}
		if e.holds(c, x.identities) {
			return e
		}
	}
	return have
}

// prefixes finds all prefixes that hold an address: the last one that begins at or
// before it, or one of those that this one is in.
type prefixes[V any] struct {
	list []prefixNode[V] // sorted, after finish
}

type prefixNode[V any] struct {
	prefix netip.Prefix
	parent int32 // the longest other prefix that this one is in, or -1
	values []V
}

// add adds v for p, which is masked.
func (x *prefixes[V]) add(p netip.Prefix, v V) {
	x.list = append(x.list, prefixNode[V]{prefix: p, parent: -1, values: []V{v}})
}

// finish sorts what was added.
func (x *prefixes[V]) finish() {
	slices.SortStableFunc(x.list, func(a, b prefixNode[V]) int {
		return cmp.Or(a.prefix.Addr().Compare(b.prefix.Addr()), cmp.Compare(a.prefix.Bits(), b.prefix.Bits()))
	})
	n := 0
	for _, one := range x.list {
		if n > 0 && x.list[n-1].prefix == one.prefix {
			x.list[n-1].values = append(x.list[n-1].values, one.values...)
			continue
		}
		x.list[n] = one
		n++
	}
	clear(x.list[n:])
	x.list = slices.Clip(x.list[:n])
	for i := 1; i < n; i++ {
		p := int32(i - 1)
		for p >= 0 && !x.list[p].prefix.Contains(x.list[i].prefix.Addr()) {
			p = x.list[p].parent
		}
		x.list[i].parent = p
	}
}

// find returns the index of the longest prefix that holds a, or -1. The others are its
// parents.
func (x *prefixes[V]) find(a netip.Addr) int32 {
	if len(x.list) == 0 || !a.IsValid() {
		return -1
	}
	at, found := slices.BinarySearchFunc(x.list, a, func(n prefixNode[V], a netip.Addr) int {
		if n.prefix.Addr() == a {
			return -1 // the last of them is wanted
		}
		return n.prefix.Addr().Compare(a)
	})
	if found {
		return int32(at)
	}
	i := int32(at - 1)
	for i >= 0 && !x.list[i].prefix.Contains(a) {
		i = x.list[i].parent
	}
	return i
}

func (x *prefixes[V]) contains(a netip.Addr) bool { return x.find(a) >= 0 }
