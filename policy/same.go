package policy

import (
	"reflect"
	"slices"
)

// Same reports whether the policies of s and o that are enforced are the same, but for
// their Origins: the two Sets then decide alike, as long as NamesNetworks is false or the
// networks are the same.
func (s *Set) Same(o *Set) bool {
	if s == o {
		return true
	}
	return slices.EqualFunc(s.enforced(), o.enforced(), func(a, b selection) bool {
		if a.byName != b.byName || a.Policy == b.Policy {
			return a.byName == b.byName
		}
		p, q := *a.Policy, *b.Policy
		p.Origin, q.Origin = "", ""
		return reflect.DeepEqual(&p, &q)
	})
}

// enforced returns the policies of s that are not in dry run.
func (s *Set) enforced() (all []selection) {
	if s == nil {
		return nil
	}
	for _, p := range s.selected {
		if !p.DryRun {
			all = append(all, p)
		}
	}
	return all
}
