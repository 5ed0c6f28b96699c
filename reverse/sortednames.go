package reverse

import (
	"cmp"
	"slices"
	"sort"
	"strings"

	"culvert.dev/tunnel"
)

// sortedNames are names in the order of their text read from its end: those below a name stand
// beside each other.
type sortedNames []*heldName

func compareHeld(a, b *heldName) int {
	switch c := compareFromEnd(a.name.Suffix.String(), b.name.Suffix.String()); {
	case c != 0 || a.name.Wildcard == b.name.Wildcard:
		return c
	case b.name.Wildcard:
		return -1
	}
	return 1
}

// compareFromEnd compares two texts read from their ends.
func compareFromEnd(a, b string) int {
	for i := 1; i <= min(len(a), len(b)); i++ {
		if c := cmp.Compare(a[len(a)-i], b[len(b)-i]); c != 0 {
			return c
		}
	}
	return cmp.Compare(len(a), len(b))
}

// with returns all and h.
func (all sortedNames) with(h *heldName) sortedNames {
	at, _ := slices.BinarySearchFunc(all, h, compareHeld)
	return slices.Insert(all, at, h)
}

// without returns all but h.
func (all sortedNames) without(h *heldName) sortedNames {
	if at, ok := slices.BinarySearchFunc(all, h, compareHeld); ok {
		return slices.Delete(all, at, at+1)
	}
	return all
}

// below returns those that are below a name.
func (all sortedNames) below(name tunnel.Name) sortedNames {
	end := "." + name.String()
	from := sort.Search(len(all), func(i int) bool { return compareFromEnd(all[i].name.Suffix.String(), end) >= 0 })
	rest := all[from:]
	return rest[:sort.Search(len(rest), func(i int) bool { return !strings.HasSuffix(rest[i].name.Suffix.String(), end) })]
}

// notOf returns the first one of all that is not one of some, which are all in all; nil for none.
func (all sortedNames) notOf(some sortedNames) *heldName {
	if at := sort.Search(len(all), func(i int) bool { return i >= len(some) || all[i] != some[i] }); at < len(all) {
		return all[at]
	}
	return nil
}
