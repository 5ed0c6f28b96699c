package file

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

type jsonObject = map[string]any

func schema(t *testing.T) jsonObject {
	t.Helper()
	var s jsonObject
	if err := json.Unmarshal([]byte(Schema), &s); err != nil {
		t.Fatalf("schema.json: %v", err)
	}
	return s
}

// keys returns the keys of the objects that are decoded into a T.
func keys[T any]() []string { return slices.Clone(planOf(reflect.TypeFor[T]()).keys) }

// The schema and the structs that the file is decoded into know the same keys, which are
// required in both or in none, and the same words, defaults and empty lists.
func TestSchemaHasTheLoadersKeys(t *testing.T) {
	root := schema(t)
	defs := root["$defs"].(jsonObject)
	c := schemaComparison{t: t, defs: defs, seen: map[string]bool{}}
	c.object("", root, reflect.TypeFor[configuration]())
	for name, def := range defs {
		if def.(jsonObject)["properties"] != nil && !c.seen[name] {
			t.Errorf("the schema has an object %q that the loader does not read", name)
		}
	}
}

// The exported lists of protocols are the words of their keys.
func TestProtocolsAreWords(t *testing.T) {
	for _, row := range []struct {
		list []string
		typ  reflect.Type
	}{{Protocols, reflect.TypeFor[Listener]()}, {Inner, reflect.TypeFor[tlsSettings]()}} {
		p := planOf(row.typ)
		if f := p.fields[slices.Index(p.keys, "protocols")]; !slices.Equal(f.words, row.list) {
			t.Errorf("protocols of %s: the loader reads %q, want %q", row.typ, f.words, row.list)
		}
	}
	if got := defaults[GatewayAPI]().ControllerName; got != DefaultControllerName {
		t.Errorf("controllerName is %q by default, want %q", got, DefaultControllerName)
	}
}

// decodedAs are the types of which the file has the keys of another.
var decodedAs = map[reflect.Type]reflect.Type{
	reflect.TypeFor[TLS]():      reflect.TypeFor[tlsSettings](),
	reflect.TypeFor[services](): reflect.TypeFor[[]service](),
	reflect.TypeFor[policies](): reflect.TypeFor[[]policyEntry](),
}

// refusesEmpty has the lists that are checked to have elements with a sentence of their own.
var refusesEmpty = map[string]bool{".listeners.proxyProtocol.from": true}

// A schemaComparison compares a schema with the structs of the loader.
type schemaComparison struct {
	t    *testing.T
	defs jsonObject
	seen map[string]bool // definitions
}

// resolved returns what s refers to.
func (c schemaComparison) resolved(s jsonObject) jsonObject {
	for s["$ref"] != nil {
		name := strings.TrimPrefix(s["$ref"].(string), "#/$defs/")
		c.seen[name] = true
		s, _ = c.defs[name].(jsonObject)
	}
	return s
}

// alternative returns s, or the one of its alternatives of a type.
func (c schemaComparison) alternative(s jsonObject, kind string) jsonObject {
	s = c.resolved(s)
	for _, word := range []string{"oneOf", "anyOf"} {
		all, _ := s[word].([]any)
		for _, a := range all {
			if a := c.resolved(a.(jsonObject)); a["type"] == kind {
				return a
			}
		}
	}
	return s
}

func (c schemaComparison) object(at string, s jsonObject, typ reflect.Type) {
	c.t.Helper()
	if s["additionalProperties"] != false {
		c.t.Errorf("%q allows additional properties", at)
	}
	p := planOf(typ)
	properties, _ := s["properties"].(jsonObject)
	if got, want := slices.Sorted(maps.Keys(properties)), slices.Sorted(slices.Values(p.keys)); !slices.Equal(got, want) {
		c.t.Fatalf("keys of %q: the schema has %v, the loader %v", at, got, want)
	}
	required, _ := s["required"].([]any)
	for _, f := range p.fields {
		if slices.Contains(required, any(f.key)) != f.required {
			c.t.Errorf("%s.%s is required by the loader: %v, and not so by the schema", at, f.key, f.required)
		}
		c.value(at+"."+f.key, properties[f.key].(jsonObject), f, typ.FieldByIndex(f.index))
	}
}

func (c schemaComparison) value(at string, s jsonObject, f structField, field reflect.StructField) {
	c.t.Helper()
	if want, ok := field.Tag.Lookup("default"); ok && fmt.Sprint(s["default"]) != want {
		c.t.Errorf("%s: default %v in the schema, %s in the loader", at, s["default"], want)
	}
	typ := field.Type
	for {
		if t, ok := decodedAs[typ]; ok {
			typ = t
		}
		if typ.Kind() == reflect.Pointer {
			typ = typ.Elem()
			continue
		}
		if more, ok := c.alternative(s, "object")["additionalProperties"].(jsonObject); ok && typ.Kind() == reflect.Map && typ.Elem().Kind() == reflect.Pointer {
			s, typ = more, typ.Elem()
			continue
		}
		if typ.Kind() != reflect.Slice {
			break
		}
		least, _ := cmp.Or(s["minItems"], c.alternative(s, "array")["minItems"]).(float64)
		s, typ = c.alternative(s, "array"), typ.Elem()
		if least > 0 != (f.nonEmpty || refusesEmpty[at]) {
			c.t.Errorf("%s: minItems %v in the schema, the loader refuses an empty list: %v", at, least, f.nonEmpty)
		}
		items, ok := s["items"].(jsonObject)
		if !ok {
			c.t.Fatalf("%s is no list in the schema", at)
		}
		s = items
	}
	if len(f.words) > 0 {
		var words []string
		enum, _ := c.resolved(s)["enum"].([]any)
		for _, w := range enum {
			words = append(words, fmt.Sprint(w))
		}
		if !slices.Equal(slices.Compact(slices.Sorted(slices.Values(words))), slices.Sorted(slices.Values(f.words))) {
			c.t.Errorf("%s: words %v in the schema, %v in the loader", at, words, f.words)
		}
	}
	if typ.Kind() == reflect.Struct && f.format == nil && len(planOf(typ).keys) > 0 {
		c.object(at, c.alternative(s, "object"), typ)
	}
}

// The defaults of the schema are those of the loader: a file that spells them
// out says the same as one that leaves them out.
func TestSchemaHasTheLoadersDefaults(t *testing.T) {
	defs := schema(t)["$defs"].(jsonObject)
	var spelt strings.Builder
	spelt.WriteString("services: []\n")
	n := 0
	for _, part := range []string{"limits", "drain", "log"} {
		fmt.Fprintf(&spelt, "%s:\n", part)
		for key, v := range defs[part].(jsonObject)["properties"].(jsonObject) {
			value, ok := v.(jsonObject)["default"]
			if !ok {
				t.Errorf("%s.%s has no default in the schema", part, key)
				continue
			}
			n++
			fmt.Fprintf(&spelt, "  %s: %v\n", key, value)
		}
	}
	got, err := Parse("defaults.yaml", []byte(spelt.String()))
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	if !reflect.DeepEqual(got.Limits, want.Limits) || got.Drain != want.Drain || got.Log != want.Log || n < 15 {
		t.Errorf("%d defaults of the schema make %+v, %+v, %+v\nwant %+v, %+v, %+v", n, got.Limits, got.Drain, got.Log, want.Limits, want.Drain, want.Log)
	}
}

// Good files are valid by the schema; those that are wrong by its means are not.
func TestSchemaValidatesSamples(t *testing.T) {
	root := schema(t)
	validate := func(file string) error {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var v any
		if err := yaml.Unmarshal(data, &v); err != nil {
			return err
		}
		return valid(root, root, v, "")
	}
	good, _ := filepath.Glob("testdata/good/*.yaml")
	if len(good) < 4 {
		t.Fatalf("%d good samples", len(good))
	}
	for _, f := range good {
		if err := validate(f); err != nil {
			t.Errorf("%s: %v", f, err)
		}
	}
	for _, f := range []string{"keys", "types", "empty-values", "limits", "scalar", "no-services", "pinned-names", "admin", "service-ports", "checks", "dns-values", "identity", "identity-socket"} {
		if err := validate("testdata/bad/" + f + ".yaml"); err == nil {
			t.Errorf("%s.yaml is valid by the schema", f)
		}
	}
}

// valid checks v by the few words of JSON Schema that ours uses.
func valid(root, s jsonObject, v any, at string) error {
	for word, arg := range s {
		switch word {
		case "$schema", "$id", "$defs", "title", "description", "default", "items":
		case "$ref":
			name := strings.TrimPrefix(arg.(string), "#/$defs/")
			def, ok := root["$defs"].(jsonObject)[name].(jsonObject)
			if !ok {
				return fmt.Errorf("no definition %q", name)
			}
			if err := valid(root, def, v, at); err != nil {
				return err
			}
		case "type":
			if !isType(arg, v) {
				return fmt.Errorf("%s is %T, want %v", at, v, arg)
			}
		case "required":
			for _, k := range arg.([]any) {
				if m, ok := v.(jsonObject); ok && m[k.(string)] == nil {
					return fmt.Errorf("%s lacks %s", at, k)
				}
			}
		case "oneOf":
			n := 0
			for _, one := range arg.([]any) {
				if valid(root, one.(jsonObject), v, at) == nil {
					n++
				}
			}
			if n != 1 {
				return fmt.Errorf("%s is %d of %v", at, n, arg)
			}
		case "anyOf":
			if !slices.ContainsFunc(arg.([]any), func(one any) bool { return valid(root, one.(jsonObject), v, at) == nil }) {
				return fmt.Errorf("%s is none of %v", at, arg)
			}
		case "allOf":
			for _, one := range arg.([]any) {
				if err := valid(root, one.(jsonObject), v, at); err != nil {
					return err
				}
			}
		case "not":
			if valid(root, arg.(jsonObject), v, at) == nil {
				return fmt.Errorf("%s is %v", at, arg)
			}
		case "properties", "additionalProperties":
			if word == "additionalProperties" {
				more, ok := arg.(jsonObject)
				m, _ := v.(jsonObject)
				for k, e := range m {
					if _, listed := s["properties"]; !ok || listed {
						break
					}
					if err := valid(root, more, e, at+"."+k); err != nil {
						return err
					}
				}
				continue
			}
			m, _ := v.(jsonObject)
			for k, e := range m {
				p, ok := arg.(jsonObject)[k].(jsonObject)
				if !ok {
					if s["additionalProperties"] == false {
						return fmt.Errorf("%s has %s", at, k)
					}
					continue
				}
				if err := valid(root, p, e, at+"."+k); err != nil {
					return err
				}
			}
		case "enum":
			if !slices.Contains(arg.([]any), v) {
				return fmt.Errorf("%s is %v, want %v", at, v, arg)
			}
		case "pattern":
			if str, ok := v.(string); ok && !regexp.MustCompile(arg.(string)).MatchString(str) {
				return fmt.Errorf("%s is %q, want %s", at, str, arg)
			}
		case "minLength":
			if str, ok := v.(string); ok && float64(len(str)) < arg.(float64) {
				return fmt.Errorf("%s is short", at)
			}
		case "minItems":
			if l, ok := v.([]any); ok && float64(len(l)) < arg.(float64) {
				return fmt.Errorf("%s is short", at)
			}
		case "minProperties":
			if m, ok := v.(jsonObject); ok && float64(len(m)) < arg.(float64) {
				return fmt.Errorf("%s is short", at)
			}
		case "minimum", "maximum":
			if n, ok := v.(int); ok && (word == "minimum" && float64(n) < arg.(float64) || word == "maximum" && float64(n) > arg.(float64)) {
				return fmt.Errorf("%s is %d, %s %v", at, n, word, arg)
			}
		case "uniqueItems":
			l, _ := v.([]any)
			for i, e := range l {
				if slices.ContainsFunc(l[:i], func(o any) bool { return reflect.DeepEqual(o, e) }) {
					return fmt.Errorf("%s has %v twice", at, e)
				}
			}
		default:
			return fmt.Errorf("the schema uses %q, which this check does not know", word)
		}
	}
	if l, ok := v.([]any); ok && s["items"] != nil {
		for i, e := range l {
			if err := valid(root, s["items"].(jsonObject), e, fmt.Sprintf("%s[%d]", at, i)); err != nil {
				return err
			}
		}
	}
	return nil
}

func isType(want, v any) bool {
	if list, ok := want.([]any); ok {
		return slices.ContainsFunc(list, func(w any) bool { return isType(w, v) })
	}
	switch v.(type) {
	case jsonObject:
		return want == "object"
	case []any:
		return want == "array"
	case string:
		return want == "string"
	case bool:
		return want == "boolean"
	case int:
		return want == "integer" || want == "number"
	case float64:
		return want == "number"
	}
	return false
}
