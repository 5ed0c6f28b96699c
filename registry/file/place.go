package file

import (
	"cmp"

	"go.yaml.in/yaml/v3"
)

// A mapping is the node of an object. Checks find the places of its keys in it.
type mapping struct{ node *yaml.Node }

// value returns the value of a key. It is nil if the key is missing or has no value.
func (m mapping) value(key string) *yaml.Node { return valueOf(m.node, key) }

// object returns the object of a key.
func (m mapping) object(key string) mapping { return mapping{m.value(key)} }

// where returns the value of a key, or the mapping itself if there is none.
func (m mapping) where(key string) *yaml.Node { return cmp.Or(m.value(key), m.node) }

// word returns the value of a key as it is written, and "" if it is no single value.
func (m mapping) word(key string) string {
	if n := m.value(key); n != nil && n.Kind == yaml.ScalarNode {
		return n.Value
	}
	return ""
}

// words returns the single values in the list of a key, or the one that is in its place.
// Other elements are "".
func (m mapping) words(key string) []string {
	n := m.value(key)
	switch {
	case n == nil:
		return nil
	case n.Kind == yaml.ScalarNode:
		return []string{n.Value}
	}
	all := make([]string, len(m.items(key)))
	for i, item := range m.items(key) {
		if item.Kind == yaml.ScalarNode && !isNull(item) {
			all[i] = item.Value
		}
	}
	return all
}

// items returns the elements of the list of a key.
func (m mapping) items(key string) []*yaml.Node {
	if n := m.value(key); n != nil && n.Kind == yaml.SequenceNode {
		return n.Content
	}
	return nil
}

// item returns an element of the list of a key. It is the value of the key if that is no
// list, and an empty node if the key is missing.
func (m mapping) item(key string, i int) *yaml.Node {
	if all := m.items(key); i < len(all) {
		return all[i]
	}
	return cmp.Or(m.value(key), missing)
}

// missing stands for a node that the file does not have. Nobody changes it.
var missing = &yaml.Node{}

// network and listener return an element of networks and of listeners.
func (d *decoder) network(i int) mapping  { return mapping{d.root.item("networks", i)} }
func (d *decoder) listener(i int) mapping { return mapping{d.root.item("listeners", i)} }

// need adds an error if an object lacks a key.
func (d *decoder) need(n *yaml.Node, what, key string) {
	if n.Kind == yaml.MappingNode && !has(n, key) {
		d.errorf(n, "", "%s needs the key %q", what, key)
	}
}

// has reports whether a mapping has a key.
func has(n *yaml.Node, key string) bool { return keyOf(n, key) != n }

// keyOf returns a key of a mapping, or the mapping if it has no such key.
func keyOf(n *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i]
		}
	}
	return n
}

// valueOf returns the value of a key of a mapping. It is nil if the key is missing or has
// no value, and if n is nil or no mapping.
func valueOf(n *yaml.Node, key string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key && !isNull(n.Content[i+1]) {
			return n.Content[i+1]
		}
	}
	return nil
}
