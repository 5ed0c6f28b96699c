package deploy

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"text/template"

	"sigs.k8s.io/yaml"
)

// functions are those of Helm's that the chart uses, for templates of t. What
// they do is what Helm's do, as far as the chart goes.
func functions(t *template.Template) template.FuncMap {
	return template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var b strings.Builder
			err := t.ExecuteTemplate(&b, name, data)
			return b.String(), err
		},
		"fail": func(msg string) (string, error) { return "", &Failure{msg} },

		"toYaml": toYAML,
		"fromYaml": func(s string) (map[string]any, error) {
			m := map[string]any{}
			err := yaml.Unmarshal([]byte(s), &m)
			return m, err
		},
		"sha256sum": func(s string) string {
			sum := sha256.Sum256([]byte(s))
			return hex.EncodeToString(sum[:])
		},

		"indent":  indent,
		"nindent": func(n int, s string) string { return "\n" + indent(n, s) },
		"quote":   func(v any) string { return strconv.Quote(fmt.Sprint(v)) },
		"lower":   strings.ToLower,
		"trim":    strings.TrimSpace,
		// As in Helm, what is looked for comes first.
		"contains": func(part, s string) bool { return strings.Contains(s, part) },
		"default":  orDefault,
		"add":      add,

		"list":     func(v ...any) []any { return v },
		"has":      func(v any, l []any) bool { return slices.Contains(l, v) },
		"append":   func(l []any, v any) []any { return append(l[:len(l):len(l)], v) },
		"dict":     dict,
		"set":      func(m map[string]any, k string, v any) map[string]any { m[k] = v; return m },
		"unset":    func(m map[string]any, k string) map[string]any { delete(m, k); return m },
		"omit":     omit,
		"deepCopy": copied,
		"kindIs":   func(kind string, v any) bool { return reflect.ValueOf(v).Kind().String() == kind },
	}
}

func toYAML(v any) (string, error) {
	data, err := yaml.Marshal(v)
	return strings.TrimSuffix(string(data), "\n"), err
}

func indent(n int, s string) string {
	pad := strings.Repeat(" ", n)
	return pad + strings.ReplaceAll(s, "\n", "\n"+pad)
}

// orDefault returns v, or fallback where v says nothing.
func orDefault(fallback any, v ...any) any {
	if len(v) == 0 {
		return fallback
	}
	if ok, _ := template.IsTrue(v[0]); !ok {
		return fallback
	}
	return v[0]
}

// add adds numbers, which YAML has made floating ones.
func add(numbers ...any) (int64, error) {
	var sum int64
	for _, n := range numbers {
		switch n := n.(type) {
		case int:
			sum += int64(n)
		case float64:
			sum += int64(n)
		default:
			return 0, fmt.Errorf("add: %v is no number", n)
		}
	}
	return sum, nil
}

func dict(pairs ...any) (map[string]any, error) {
	m := map[string]any{}
	if len(pairs)%2 != 0 {
		return nil, errors.New("dict: a key without a value")
	}
	for i := 0; i < len(pairs); i += 2 {
		m[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	return m, nil
}

func omit(m map[string]any, keys ...string) map[string]any {
	left := map[string]any{}
	for k, v := range m {
		left[k] = v
	}
	for _, k := range keys {
		delete(left, k)
	}
	return left
}

// renderError is what the chart itself says, if it does, without the way there.
func renderError(err error) error {
	if f, ok := errors.AsType[*Failure](err); ok {
		return f
	}
	return fmt.Errorf("render the chart: %w", err)
}
