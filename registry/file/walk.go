package file

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"
)

// This file decodes YAML into structs by their tags, so that a struct says all there is to
// say of the keys of an object:
//
//	yaml      the key, and after it options, with commas:
//	            required  the object needs the key
//	            short     a single value in place of the object is the value of this key
//	            single    a single value in place of the list is a list of one
//	            limit     a count of at least 1, or -1 for no limit
//	            min, max  the bounds of a number or a duration; min is 0 if left out
//	what      what errors call the value, or each element of a list; the key if left out
//	oneof     the words that the value may be
//	as        the syntax of the value, of formats
//	default   the value if the key is left out
//	empty     the hint for an empty list, which is a mistake; without it a list may be empty
//	unique    what an element is that may not be listed twice; without it it may
//
// oneof, as and the bounds of a list are those of its elements. Keys that name files have
// the type string; the files are read when the rest is known to be right.
//
// The fields of an embedded struct without a key are those of the struct around it.
//
// A list has as many elements as in the file, also if some can't be read. These are
// zero, so that an index leads to the place of an element, and checks leave them out.

// A decodable value reads itself from the value of a key. The key is its name in errors.
type decodable interface {
	decode(d *decoder, n *yaml.Node, key string)
}

// A checked object finds what is wrong with its keys together, after they were read.
type checked interface {
	check(d *decoder, at mapping)
}

// A structPlan is how the keys of an object are read.
type structPlan struct {
	keys     []string
	fields   []structField // as keys
	short    *structField  // that a single value is for; nil if it can't be one
	defaults reflect.Value
	checked  bool
}

// A structField is a field with a key.
type structField struct {
	index    []int // in its struct, as reflect.StructField has it
	key      string
	what     string
	words    []string
	empty    string // with nonEmpty
	unique   string
	min, max string
	required bool
	single   bool
	nonEmpty bool
	limit    bool
	format   format
	read     reader
}

// A reader reads n into to, which can be set. The errors call it what.
type reader func(d *decoder, n *yaml.Node, what string, to reflect.Value)

var (
	plans         sync.Map // *structPlan by reflect.Type
	decodableType = reflect.TypeFor[decodable]()
	checkedType   = reflect.TypeFor[checked]()
	durationType  = reflect.TypeFor[time.Duration]()
)

// planOf returns the plan of a type of struct.
func planOf(t reflect.Type) *structPlan {
	if p, ok := plans.Load(t); ok {
		return p.(*structPlan)
	}
	p := &structPlan{checked: reflect.PointerTo(t).Implements(checkedType), defaults: reflect.New(t).Elem()}
	for _, field := range reflect.VisibleFields(t) {
		tag := field.Tag
		key, options, _ := strings.Cut(tag.Get("yaml"), ",")
		if key == "" {
			continue
		}
		f := structField{index: field.Index, key: key, what: cmp.Or(tag.Get("what"), key), words: strings.Fields(tag.Get("oneof")), unique: tag.Get("unique")}
		f.empty, f.nonEmpty = tag.Lookup("empty")
		if as, ok := tag.Lookup("as"); ok {
			if f.format = formats[as]; f.format == nil {
				panic(fmt.Sprintf("file: %q has the unknown format %q", key, as))
			}
		} else if len(f.words) > 0 {
			f.format = formatOf(func(what, s string) (string, *complaint) {
				if c := oneOf(what, s, f.words); c != nil {
					return "", c
				}
				return s, nil
			})
		}
		short := false
		for option := range strings.SplitSeq(options, ",") {
			name, value, _ := strings.Cut(option, "=")
			switch name {
			case "required":
				f.required = true
			case "short":
				short = true
			case "single":
				f.single = true
			case "limit":
				f.limit = true
			case "min":
				f.min = value
			case "max":
				f.max = value
			case "":
			default:
				panic(fmt.Sprintf("file: %q has the unknown option %q", key, name))
			}
		}
		f.read = f.reader(field.Type)
		p.keys, p.fields = append(p.keys, key), append(p.fields, f)
		if short {
			p.short = &f
		}
		if ft := field.Type; ft.Kind() == reflect.Struct && f.format == nil && !reflect.PointerTo(ft).Implements(decodableType) {
			p.defaults.FieldByIndex(field.Index).Set(planOf(ft).defaults)
		}
		if s, ok := tag.Lookup("default"); ok {
			d := &decoder{}
			f.read(d, &yaml.Node{Kind: yaml.ScalarNode, Value: s}, key, p.defaults.FieldByIndex(field.Index))
			if len(d.errs) > 0 {
				panic(fmt.Sprintf("file: the default of %q: %v", key, d.errs))
			}
		}
	}
	plans.Store(t, p)
	return p
}

// reader returns how a value of a type is read.
func (f *structField) reader(t reflect.Type) reader {
	switch {
	case t.Kind() == reflect.Pointer:
		elem := f.reader(t.Elem())
		return func(d *decoder, n *yaml.Node, what string, to reflect.Value) {
			to.Set(reflect.New(t.Elem()))
			elem(d, n, what, to.Elem())
		}
	case f.format != nil && t.Kind() != reflect.Slice:
		return func(d *decoder, n *yaml.Node, what string, to reflect.Value) {
			if s, ok := d.text(n, what); ok {
				if c := f.format(what, s, to.Addr().Interface()); c != nil {
					d.errorf(n, c.hint, "%s", c.msg)
				}
			}
		}
	case reflect.PointerTo(t).Implements(decodableType):
		return func(d *decoder, n *yaml.Node, what string, to reflect.Value) {
			to.Addr().Interface().(decodable).decode(d, n, what)
		}
	case t.Kind() == reflect.Slice:
		elem := f.reader(t.Elem())
		return func(d *decoder, n *yaml.Node, _ string, to reflect.Value) { f.list(d, n, elem, to) }
	case t.Kind() == reflect.Struct:
		return object
	case t == durationType:
		least, _ := time.ParseDuration(f.min)
		return func(d *decoder, n *yaml.Node, what string, to reflect.Value) {
			d.duration(n, what, least, to.Addr().Interface().(*time.Duration))
		}
	}
	switch t.Kind() {
	case reflect.String:
		return func(d *decoder, n *yaml.Node, what string, to reflect.Value) {
			s, _ := d.text(n, what)
			to.SetString(s)
		}
	case reflect.Bool:
		return func(d *decoder, n *yaml.Node, what string, to reflect.Value) {
			d.boolean(n, what, to.Addr().Interface().(*bool))
		}
	case reflect.Int, reflect.Uint16:
		min, _ := strconv.Atoi(f.min)
		max, err := strconv.Atoi(f.max)
		if err != nil {
			max = math.MaxInt32
		}
		if f.limit {
			min = -1
		}
		return func(d *decoder, n *yaml.Node, what string, to reflect.Value) {
			switch v, ok := d.integer(n, what, min, max); {
			case !ok:
			case f.limit && v == 0:
				d.errorf(n, "write -1 for no limit", "%s is 0, which would refuse every client", what)
			case to.CanUint():
				to.SetUint(uint64(v))
			default:
				to.SetInt(int64(v))
			}
		}
	}
	panic(fmt.Sprintf("file: %q is a %s, which can't be decoded", f.key, t))
}

// list reads a sequence, and each of its elements by elem.
func (f *structField) list(d *decoder, n *yaml.Node, elem reader, to reflect.Value) {
	if f.single && n.Kind != yaml.SequenceNode {
		to.Set(reflect.MakeSlice(to.Type(), 1, 1))
		elem(d, n, f.what, to.Index(0))
		return
	}
	if !d.is(n, yaml.SequenceNode, f.key) {
		return
	}
	if len(n.Content) == 0 {
		if f.nonEmpty {
			d.errorf(n, f.empty, "%s is empty", f.key)
		}
		return
	}
	to.Set(reflect.MakeSlice(to.Type(), len(n.Content), len(n.Content)))
	seen := map[any]bool{}
	for i, n := range n.Content {
		if isNull(n) {
			d.errorf(n, "give it a value, or take it out", "%s has an empty element", f.key)
			continue
		}
		v := to.Index(i)
		elem(d, n, f.what, v)
		if f.unique == "" || v.IsZero() {
			continue
		}
		if !seen[v.Interface()] {
			seen[v.Interface()] = true
			continue
		}
		shown := strconv.Quote(clip(n.Value))
		switch v := v.Interface().(type) {
		case netip.Prefix:
			shown = v.String()
		case string:
			shown = strconv.Quote(clip(v))
		}
		d.errorf(n, "keep one of them", "%s %s is listed twice", f.unique, shown)
		v.SetZero()
	}
}

// into reads an object into a struct, as object does.
func into[T any](d *decoder, n *yaml.Node, what string, to *T) {
	object(d, n, what, reflect.ValueOf(to).Elem())
}

// defaults returns a T as an object without keys makes it.
func defaults[T any]() *T {
	v := planOf(reflect.TypeFor[T]()).defaults.Interface().(T)
	return &v
}

// object reads a mapping into a struct. It reports a node that is no mapping, keys that
// are unknown, repeated or missing, and keys without a value.
func object(d *decoder, n *yaml.Node, what string, to reflect.Value) {
	p := planOf(to.Type())
	to.Set(p.defaults)
	if p.short != nil && n.Kind == yaml.ScalarNode {
		p.short.read(d, n, what, to.FieldByIndex(p.short.index))
		return
	}
	if !d.is(n, yaml.MappingNode, what) {
		return
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if k.Kind != yaml.ScalarNode || k.Tag == "!!merge" {
			d.errorf(k, "write the keys out", "a key of %s must be a word", what)
			continue
		}
		if first := keyOf(n, k.Value); first != k {
			d.errorf(k, "keep one of them", "%q is in %s twice, first in line %d", clip(k.Value), what, first.Line)
			if d.full() {
				return
			}
			continue
		}
		f := slices.Index(p.keys, k.Value)
		switch {
		case f < 0:
			hint := "known keys are " + strings.Join(p.keys, ", ")
			if m := called(k.Value, p.keys); m != "" {
				hint = fmt.Sprintf("did you mean %q?", m)
			}
			d.errorf(k, hint, "unknown key %q in %s", clip(k.Value), what)
			if d.full() {
				return
			}
		case isNull(v):
			d.errorf(k, "give it one, or leave the key out", "%q has no value", k.Value)
		default:
			p.fields[f].read(d, v, p.fields[f].what, to.FieldByIndex(p.fields[f].index))
		}
	}
	for i := range p.fields {
		if f := &p.fields[i]; f.required && !has(n, f.key) {
			d.errorf(n, "", "%s needs the key %q", what, f.key)
		}
	}
	if p.checked {
		to.Addr().Interface().(checked).check(d, mapping{n})
	}
}
