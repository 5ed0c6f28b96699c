package deploy

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// ParseValues reads values from YAML. A key that is there twice is an error.
func ParseValues(data []byte) (map[string]any, error) {
	values := map[string]any{}
	if err := yaml.UnmarshalStrict(data, &values); err != nil {
		return nil, fmt.Errorf("values: %s", strings.TrimPrefix(err.Error(), "error converting YAML to JSON: yaml: "))
	}
	return values, nil
}

// Merge puts what over says into values, maps into maps; null takes a key away,
// and the chart does as if it said nothing.
func Merge(values, over map[string]any) {
	for k, v := range over {
		if v == nil {
			delete(values, k)
			continue
		}
		into, ok := values[k].(map[string]any)
		from, also := v.(map[string]any)
		if ok && also {
			Merge(into, from)
			continue
		}
		values[k] = v
	}
}

// Set puts one assignment into values: KEY.KEY=VALUE, KEY.KEY[INDEX]=VALUE, with
// \. for a dot in a key. A value is true, false, null, a whole number, a list
// [a, b] or a map {a: b} in YAML, and text if it is none of them.
func Set(values map[string]any, assignment string) error {
	key, text, ok := strings.Cut(assignment, "=")
	if !ok || key == "" {
		return fmt.Errorf("%q is not KEY=VALUE", assignment)
	}
	path, err := splitKey(key)
	if err != nil {
		return fmt.Errorf("%q: %w", assignment, err)
	}
	value, err := parseValue(text)
	if err != nil {
		return fmt.Errorf("%q: %w", assignment, err)
	}
	_, err = put(values, path, value)
	if err != nil {
		return fmt.Errorf("%q: %w", assignment, err)
	}
	return nil
}

// splitKey returns the keys, texts, and indexes, numbers, of a path.
func splitKey(key string) ([]any, error) {
	var path []any
	for part := range strings.SplitSeq(strings.ReplaceAll(key, `\.`, "\x00"), ".") {
		name, rest, _ := strings.Cut(part, "[")
		if name == "" {
			return nil, errors.New("a key is empty")
		}
		path = append(path, strings.ReplaceAll(name, "\x00", "."))
		if len(name) == len(part) {
			continue
		}
		for index := range strings.SplitSeq(rest, "[") {
			digits, closed := strings.CutSuffix(index, "]")
			n, err := strconv.ParseUint(digits, 10, 10)
			if err != nil || !closed {
				return nil, fmt.Errorf("%q is not [INDEX] with a number below 1024", "["+index)
			}
			path = append(path, int(n))
		}
	}
	return path, nil
}

func parseValue(text string) (any, error) {
	if _, err := strconv.ParseInt(text, 10, 64); err != nil && text != "true" && text != "false" && text != "null" &&
		!strings.HasPrefix(text, "[") && !strings.HasPrefix(text, "{") {
		return text, nil // 1.10 and yes stay what they are
	}
	var v any
	if err := yaml.UnmarshalStrict([]byte(text), &v); err != nil {
		return nil, fmt.Errorf("the value is no YAML: %w", err)
	}
	return v, nil
}

// put returns at with the value at path in it.
func put(at any, path []any, value any) (any, error) {
	if len(path) == 0 {
		return value, nil
	}
	switch key := path[0].(type) {
	case string:
		m, ok := at.(map[string]any)
		if !ok && at != nil {
			return nil, fmt.Errorf("what %s would be put into is no map", key)
		}
		if m == nil {
			m = map[string]any{}
		}
		if len(path) == 1 && value == nil {
			delete(m, key)
			return m, nil
		}
		v, err := put(m[key], path[1:], value)
		m[key] = v
		return m, err
	case int:
		l, ok := at.([]any)
		if !ok && at != nil {
			return nil, fmt.Errorf("what [%d] would be put into is no list", key)
		}
		if key > len(l) {
			return nil, fmt.Errorf("[%d] of a list of %d: the next one is [%d]", key, len(l), len(l))
		}
		if key == len(l) {
			l = append(l, nil)
		}
		v, err := put(l[key], path[1:], value)
		l[key] = v
		return l, err
	}
	return nil, errors.New("a key is neither text nor a number")
}
