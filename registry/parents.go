package registry

import (
	"cmp"
	"iter"
	"strings"

	"culvert.dev/tunnel"
)

// HasNamesBelow reports whether a service below name is exposed to a network, and the client of req
// may see it: a service that is not makes no name exist there.
func (t *Table) HasNamesBelow(name, from string, req *tunnel.Request) bool {
	if t == nil {
		return false
	}
	if t.HasCatalog() {
		return t.seesBelow(req, name, t.indexOf(from))
	}
	if _, ok := t.parentNames[name]; ok {
		return true
	}
	in := t.indexOf(from)
	if in < 0 {
		return false
	}
	_, ok := t.parentNamesOf[in][name]
	return ok
}

// indexParentNames fills above and aboveOf.
func (b *builder) indexParentNames() {
	var last tunnel.Name // most names have the parent of the one before
	for name, c := range b.exact {
		if parent, ok := name.Parent(); ok && parent != last && b.addParentNames(name, c, false) {
			last = parent
		}
	}
	for name, c := range b.wild {
		b.addParentNames(name, c, true)
	}
	if b.headless == 0 {
		return
	}
	for name, c := range b.exact {
		for _, c := range c {
			e := &b.services[c.service]
			if !e.Headless || len(e.Endpoints) == 0 {
				continue
			}
			for above := range b.parentNamesFor(e) {
				above[name.String()] = struct{}{}
				if !strings.HasSuffix(name.String(), clustersetSuffix) {
					continue
				}
				for i := range e.Endpoints { // the clusters' own names are not there, but those below them are
					if ep := &e.Endpoints[i]; ep.Name != "" || ep.Addr.IsValid() {
						above[cmp.Or(ep.Cluster, e.ID.Cluster)+"."+name.String()] = struct{}{}
					}
				}
			}
		}
	}
}

// parentNamesFor yields the sets of names that have others below them, of all who may
// have e.
func (b *builder) parentNamesFor(e *serviceEntry) iter.Seq[map[string]struct{}] {
	return func(yield func(map[string]struct{}) bool) {
		if !e.Exposed {
			return
		}
		if len(e.ExposedTo) == 0 {
			yield(b.parentNames)
			return
		}
		for _, network := range e.views {
			if b.parentNamesOf[network] == nil {
				b.parentNamesOf[network] = map[string]struct{}{}
			}
			if !yield(b.parentNamesOf[network]) {
				return
			}
		}
	}
}

// addParentNames notes that there are names below each parent of a name, and below
// itself where that is wanted, for all who may have one of those that have it. It
// reports whether that is everybody.
func (b *builder) addParentNames(name tunnel.Name, c claims, self bool) (everybody bool) {
	for i := range c {
		if i > 0 && c[i].service == c[i-1].service {
			continue
		}
		e := &b.services[c[i].service]
		everybody = everybody || e.Exposed && len(e.ExposedTo) == 0
		for above := range b.parentNamesFor(e) {
			addParents(above, name, self)
		}
	}
	return everybody
}

// addParents adds each parent of name, and name where self is true. A service
// that is there has its own parents.
func addParents(above map[string]struct{}, name tunnel.Name, self bool) {
	for at, ok := name, true; ok; at, ok = at.Parent() {
		if at == name && !self {
			continue
		}
		if _, ok := above[at.String()]; ok {
			return
		}
		above[at.String()] = struct{}{}
	}
}
