package file

import (
	"reflect"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// This file makes nodes for parts of a configuration that a key stands for. They have the
// position of a node of the file, so that mistakes in them are reported there.

// scalarNode returns a value at the position of another node.
func scalarNode(at *yaml.Node, value string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: value, Line: at.Line, Column: at.Column}
}

func booleanNode(at *yaml.Node, value bool) *yaml.Node {
	n := scalarNode(at, strconv.FormatBool(value))
	n.Tag = "!!bool"
	return n
}

func integerNode(at *yaml.Node, value int) *yaml.Node {
	n := scalarNode(at, strconv.Itoa(value))
	n.Tag = "!!int"
	return n
}

func sequenceNode(at *yaml.Node, items ...*yaml.Node) *yaml.Node {
	return &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Content: items, Line: at.Line, Column: at.Column}
}

// mappingNode returns an object of keys, each a string, and their values, each a node.
func mappingNode(at *yaml.Node, keysAndValues ...any) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Line: at.Line, Column: at.Column}
	for i := 0; i+1 < len(keysAndValues); i += 2 {
		n.Content = append(n.Content, scalarNode(at, keysAndValues[i].(string)), keysAndValues[i+1].(*yaml.Node))
	}
	return n
}

// addNode adds an element to a list of the document, which may not have it yet. It reports
// false where the file has something else by that key, which is reported already.
func (d *decoder) addNode(key string, n *yaml.Node) bool {
	list := d.root.value(key)
	switch {
	case list == nil && has(d.root.node, key): // without a value
		return false
	case list == nil:
		list = sequenceNode(n)
		d.root.node.Content = append(d.root.node.Content, scalarNode(n, key), list)
	case list.Kind != yaml.SequenceNode:
		return false
	}
	list.Content = append(list.Content, n)
	return true
}

// addTo adds an element to a list of the document, and what it is read as to another.
func addTo[T any](d *decoder, key, what string, n *yaml.Node, to *[]T) {
	if !d.addNode(key, n) {
		return
	}
	var one T
	object(d, n, what, reflect.ValueOf(&one).Elem())
	*to = append(*to, one)
}
