package termination

import (
	"errors"
	"fmt"

	"culvert.dev/tunnel"
)

// An itemSet is items by their names. It is not changed.
type itemSet struct {
	list  []*useItem
	exact map[tunnel.Name]*useItem
	wild  map[tunnel.Name]*useItem // by the name after "*."
	any   *useItem                 // nil for none
}

// A useItem is an Item in use, with its keys.
type useItem struct {
	Item
	keys *KeySet
}

func newItemSet(items []Item) (*itemSet, error) {
	if len(items) == 0 {
		return nil, errors.New("termination: there is nothing to terminate TLS with")
	}
	set := &itemSet{exact: make(map[tunnel.Name]*useItem), wild: make(map[tunnel.Name]*useItem)}
	for _, i := range items {
		var names []string
		for _, o := range i.ALPN {
			names = append(names, o.Name)
		}
		u := &useItem{Item: i}
		var err error
		if u.keys, err = newKeySet(i.Keys, names, len(i.Names) == 0); err != nil {
			return nil, err
		}
		if !i.Any && len(u.keys.names) == 0 {
			return nil, errors.New("termination: no certificate has a name that could end here, wildcards aside: list the names")
		}
		if err := set.add(u); err != nil {
			return nil, err
		}
	}
	return set, nil
}

// add lists an item by its names. Each name is one item's.
func (s *itemSet) add(u *useItem) error {
	s.list = append(s.list, u)
	if u.Any {
		if s.any != nil {
			return errors.New("termination: two items terminate TLS for any name")
		}
		s.any = u
	}
	for _, p := range u.keys.names {
		by := s.exact
		if p.Wildcard {
			by = s.wild
		}
		if have := by[p.Suffix]; have != nil && have != u {
			return fmt.Errorf("termination: two items terminate TLS for %q: list the names of each", p)
		}
		by[p.Suffix] = u
	}
	return nil
}

// find returns the item for a name: the one that has it, or else the longest wildcard,
// or else the one for any. It is nil where there is none. s may be nil.
func (s *itemSet) find(n tunnel.Name) *useItem {
	if s == nil {
		return nil
	}
	if u := s.exact[n]; u != nil {
		return u
	}
	for parent, more := n.Parent(); more && len(s.wild) > 0; parent, more = parent.Parent() {
		if u := s.wild[parent]; u != nil {
			return u
		}
	}
	return s.any
}
