package registry

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// A catalog finds, for a name, services below it that a client may see. It exists where a
// policy decides who may see services.
type catalog struct {
	below   map[string][]int32 // by name: indices of classes
	classes []catalogClass
}

// A catalogClass is one of many services that the same clients may see.
type catalogClass struct {
	service int32
	name    tunnel.Name // of the service
}

// catalogKey is what services of one class have in common.
type catalogKey struct {
	set     *policy.Set
	views   string
	service int32 // of one whose policies depend on its name; otherwise -1
}

// Patterns iterates over the names of services that are exposed, in no order, with those of
// clusters and without AnyName.
func (t *Table) Patterns() iter.Seq[tunnel.Pattern] {
	return func(yield func(tunnel.Pattern) bool) {
		if t == nil {
			return
		}
		exposed := func(c claims) bool {
			return slices.ContainsFunc(c, func(one claim) bool { return t.services[one.service].Exposed })
		}
		for name, c := range t.exact {
			if exposed(c) && !yield(tunnel.Pattern{Suffix: name}) {
				return
			}
		}
		for name, c := range t.wild {
			if exposed(c) && !yield(tunnel.Pattern{Suffix: name, Wildcard: true}) {
				return
			}
		}
	}
}

// HasCatalog reports whether policies decide who may see services, in DNS and in lists:
// there is one with the verb catalog that is enforced. Each service is then hidden from all
// clients that no policy lets see it.
func (t *Table) HasCatalog() bool { return t != nil && t.catalog != nil }

// Sees reports whether policies let the client of req, which asks for a name of p, see the
// service. It is true where no policy decides that.
func (t *Table) Sees(req *tunnel.Request, p *Location) bool {
	return !t.HasCatalog() || p.policies.Decide(req, p.Port, policy.Catalog).Allowed
}

// sees is Sees of a service.
func (t *Table) sees(req *tunnel.Request, e *serviceEntry) bool {
	return !t.HasCatalog() || e.policies.service.Decide(req, 0, policy.Catalog).Allowed
}

// seesNamed is sees for a service that is about to be named.
func (t *Table) seesNamed(req *tunnel.Request, e *serviceEntry, name tunnel.Name) bool {
	if !t.HasCatalog() {
		return true
	}
	one := *req
	one.Name = name
	return t.sees(&one, e)
}

// seesBelow reports whether there is a service below name that is exposed to a network, and
// that the client of req may see.
func (t *Table) seesBelow(req *tunnel.Request, name string, network int32) bool {
	one := *req
	for _, i := range t.catalog.below[name] {
		c := &t.catalog.classes[i]
		e := &t.services[c.service]
		if one.Name = c.name; t.exposedTo(e, network) && t.sees(&one, e) {
			return true
		}
	}
	return false
}

// indexCatalog makes the catalog, if a policy asks for one.
func (b *builder) indexCatalog() {
	if !slices.ContainsFunc(b.policies, func(p *policy.Policy) bool { return p.Verb == policy.Catalog && !p.DryRun }) {
		return
	}
	b.catalog = &catalog{below: map[string][]int32{}}
	classes := map[catalogKey]int32{}
	type place struct {
		name  string
		class int32
	}
	seen := map[place]struct{}{}
	add := func(name tunnel.Name, c claims, wild bool) {
		for i := range c {
			e := &b.services[c[i].service]
			if !e.Exposed || i > 0 && c[i].service == c[i-1].service {
				continue
			}
			key := catalogKey{e.policies.service, strings.Join(e.ExposedTo, " "), -1}
			if key.set.DependsOnName() {
				key.service = e.index
			}
			class, ok := classes[key]
			if !ok {
				class = int32(len(b.catalog.classes))
				classes[key] = class
				b.catalog.classes = append(b.catalog.classes, catalogClass{e.index, name})
			}
			note := func(above string) (is bool) {
				at := place{above, class}
				if _, is = seen[at]; !is {
					seen[at] = struct{}{}
					b.catalog.below[above] = append(b.catalog.below[above], class)
				}
				return is
			}
			headless := e.Headless && len(e.Endpoints) > 0
			if wild || headless {
				note(name.String())
			}
			for at, ok := name.Parent(); ok && !note(at.String()); at, ok = at.Parent() {
			}
			if headless && strings.HasSuffix(name.String(), clustersetSuffix) {
				for i := range e.Endpoints { // as in indexParentNames
					if ep := &e.Endpoints[i]; ep.Name != "" || ep.Addr.IsValid() {
						note(cmp.Or(ep.Cluster, e.ID.Cluster) + "." + name.String())
					}
				}
			}
		}
	}
	for name, c := range b.exact {
		add(name, c, false)
	}
	for name, c := range b.wild {
		add(name, c, true)
	}
}

// Offered iterates over the services that the gateway of another site is to know of: those
// that are exposed to its address, and that a policy with the verb catalog lets it see by
// who it is. Its address does not count for policies, as whoever is behind one NAT has one.
// Without such a policy there is none. What the services point to must not be changed.
func (t *Table) Offered(gateway tunnel.Peer, from netip.Addr) iter.Seq[*Service] {
	return func(yield func(*Service) bool) {
		if t == nil {
			return
		}
		network := int32(-1)
		if from.IsValid() {
			network = t.prefixes.find(from)
		}
		req := tunnel.Request{Peer: gateway}
		for i := range t.services {
			e := &t.services[i]
			if !t.exposedTo(e, network) {
				continue
			}
			req.Name, _ = e.primaryName()
			if e.policies.service.Decide(&req, 0, policy.Catalog).Allowed && !yield(e.Service) {
				return
			}
		}
	}
}
