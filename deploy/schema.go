package deploy

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// Schema returns the JSON Schema of the values.
func Schema() ([]byte, error) { return chartFiles.ReadFile(path.Join(chartRoot, "values.schema.json")) }

// Validate holds values against the schema and returns every mistake.
func Validate(values map[string]any) error {
	data, err := Schema()
	if err != nil {
		return err
	}
	var root map[string]any
	if err := json.Unmarshal(data, &root); err != nil {
		return fmt.Errorf("values.schema.json: %w", err)
	}
	v := validator{root: root}
	v.check("values", root, values)
	return errors.Join(v.errs...)
}

// A validator knows the part of JSON Schema that the chart's uses. A keyword
// that it does not know is a mistake, too: it must not be passed over.
type validator struct {
	root map[string]any
	errs []error
}

func (v *validator) errorf(at, format string, args ...any) {
	v.errs = append(v.errs, fmt.Errorf("%s: "+format, append([]any{strings.TrimPrefix(at, "values.")}, args...)...))
}

func (v *validator) check(at string, schema, value any) {
	if allowed, ok := schema.(bool); ok {
		if !allowed {
			v.errorf(at, "this can't be said here")
		}
		return
	}
	s, _ := schema.(map[string]any)
	for _, keyword := range slices.Sorted(maps.Keys(s)) {
		if !v.keyword(at, keyword, s, value) {
			return // the rest would say the same in other words
		}
	}
}

// keyword holds value against one keyword of s. It is false where others of s
// can't say more.
func (v *validator) keyword(at, keyword string, s map[string]any, value any) bool {
	before := len(v.errs)
	want := s[keyword]
	text, isText := value.(string)
	number, isNumber := value.(float64)
	list, isList := value.([]any)
	object, isObject := value.(map[string]any)
	switch keyword {
	case "$schema", "$id", "$defs", "title", "description", "properties":
		if keyword != "properties" || !isObject {
			break
		}
		for _, key := range slices.Sorted(maps.Keys(object)) {
			if sub, ok := want.(map[string]any)[key]; ok {
				v.check(at+"."+key, sub, object[key])
			}
		}
	case "$ref":
		name, _ := strings.CutPrefix(want.(string), "#/$defs/")
		defs, _ := v.root["$defs"].(map[string]any)
		def, ok := defs[name]
		if !ok {
			v.errorf(at, "the schema has no definition %q", name)
		}
		v.check(at, def, value)
	case "additionalProperties":
		known, _ := s["properties"].(map[string]any)
		for _, key := range slices.Sorted(maps.Keys(object)) {
			switch _, ok := known[key]; {
			case ok:
			case want == false:
				v.errorf(at+"."+key, "there is no such value")
			default:
				v.check(at+"."+key, want, object[key])
			}
		}
	case "required":
		for _, key := range want.([]any) {
			if _, ok := object[key.(string)]; isObject && !ok {
				v.errorf(at+"."+key.(string), "is missing")
			}
		}
	case "items":
		for i := range list {
			v.check(fmt.Sprintf("%s[%d]", at, i), want, list[i])
		}
	case "type":
		if !isType(want, value) {
			v.errorf(at, "%s is not of type %s", show(value), show(want))
		}
	case "enum":
		if !slices.ContainsFunc(want.([]any), func(w any) bool { return reflect.DeepEqual(w, value) }) {
			v.errorf(at, "%s is none of %s", show(value), show(want))
		}
	case "minimum":
		if isNumber && number < want.(float64) {
			v.errorf(at, "%v is less than %v", number, want)
		}
	case "maximum":
		if isNumber && number > want.(float64) {
			v.errorf(at, "%v is more than %v", number, want)
		}
	case "maxLength":
		if isText && utf8.RuneCountInString(text) > int(want.(float64)) {
			v.errorf(at, "%s is longer than %v", show(value), want)
		}
	case "minItems":
		if isList && len(list) < int(want.(float64)) {
			v.errorf(at, "has less than %v items", want)
		}
	case "pattern":
		p, err := regexp.Compile(want.(string))
		if err != nil {
			v.errorf(at, "the schema: %v", err)
		} else if isText && !p.MatchString(text) {
			v.errorf(at, "%s does not match %s", show(value), want)
		}
	default:
		v.errorf(at, "the schema has %q, which is not known here", keyword)
	}
	return len(v.errs) == before || keyword != "type"
}

// isType reports whether value is of a type of JSON, or of one of several.
func isType(want, value any) bool {
	if several, ok := want.([]any); ok {
		return slices.ContainsFunc(several, func(w any) bool { return isType(w, value) })
	}
	switch v := value.(type) {
	case nil:
		return want == "null"
	case bool:
		return want == "boolean"
	case float64:
		return want == "number" || want == "integer" && v == math.Trunc(v)
	case string:
		return want == "string"
	case []any:
		return want == "array"
	case map[string]any:
		return want == "object"
	}
	return false
}

// show is a value as it is written, if it is short.
func show(v any) string {
	data, err := json.Marshal(v)
	if err != nil || len(data) > 100 {
		return fmt.Sprintf("what is said (%T)", v)
	}
	return string(data)
}
