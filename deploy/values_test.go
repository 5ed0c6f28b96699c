package deploy

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

func TestSet(t *testing.T) {
	for _, tt := range []struct{ start, set, want string }{
		{"", "a=b", "a: b"},
		{"", "a.b.c=1", "a: {b: {c: 1}}"},
		{"a: {b: 1, c: 2}", "a.b=3", "a: {b: 3, c: 2}"},
		{"a: 1", "a=null", "{}"},
		{"a: {b: 1}", "a.b=null", "a: {}"},
		{"", "a=true", "a: true"},
		{"", "a=yes", `a: "yes"`},
		{"", "a=1.10", `a: "1.10"`},
		{"", "a=-3", "a: -3"},
		{"", "a=", `a: ""`},
		{"", "a=b=c", "a: b=c"},
		{"", "a=: #", `a: ": #"`},
		{"", "a=[b, 1, {c: d}]", "a: [b, 1, {c: d}]"},
		{"", "a={b: c}", "a: {b: c}"},
		{"", "a=[]", "a: []"},
		{"", `a.b\.c/d=e`, `a: {"b.c/d": e}`},
		{"", "a[0]=b", "a: [b]"},
		{"a: [b, c]", "a[1]=d", "a: [b, d]"},
		{"a: [b]", "a[1].c=d", "a: [b, {c: d}]"},
		{"", "a[0][0]=b", "a: [[b]]"},
		{"a: 1", "a=b", "a: b"},
		{"a: null", "a.b=c", "a: {b: c}"},
	} {
		values, err := ParseValues([]byte(tt.start))
		if err != nil {
			t.Fatal(err)
		}
		if err := Set(values, tt.set); err != nil {
			t.Errorf("%s on %q: %v", tt.set, tt.start, err)
			continue
		}
		if got, want := asYAML(t, values), again(t, tt.want); got != want {
			t.Errorf("%s on %q: got %s, want %s", tt.set, tt.start, got, want)
		}
	}
}

func TestBadSets(t *testing.T) {
	for _, tt := range []struct{ start, set, want string }{
		{"", "", `"" is not KEY=VALUE`},
		{"", "a", `"a" is not KEY=VALUE`},
		{"", "=b", `"=b" is not KEY=VALUE`},
		{"", "a..b=c", "a key is empty"},
		{"", ".a=c", "a key is empty"},
		{"", "[0]=c", "a key is empty"},
		{"", "a[x]=b", `"[x]" is not [INDEX]`},
		{"", "a[-1]=b", `"[-1]" is not [INDEX]`},
		{"", "a[4000000000]=b", "a number below 1024"},
		{"", "a[0=b", `"[0" is not [INDEX]`},
		{"", "a[1]=b", "[1] of a list of 0: the next one is [0]"},
		{"a: b", "a.c=d", "what c would be put into is no map"},
		{"a: b", "a[0]=d", "what [0] would be put into is no list"},
		{"a: [b]", "a.c=d", "what c would be put into is no map"},
		{"", "a=[b", "the value is no YAML"},
		{"", "a={b: 1, b: 2}", "the value is no YAML"},
	} {
		values, err := ParseValues([]byte(tt.start))
		if err != nil {
			t.Fatal(err)
		}
		if err := Set(values, tt.set); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q on %q: got %v, want %q", tt.set, tt.start, err, tt.want)
		}
	}
}

func TestMerge(t *testing.T) {
	for _, tt := range []struct{ values, over, want string }{
		{"a: 1", "b: 2", "{a: 1, b: 2}"},
		{"a: {b: 1, c: 2}", "a: {b: 3}", "a: {b: 3, c: 2}"},
		{"a: [1, 2]", "a: [3]", "a: [3]"},
		{"a: {b: 1}", "a: 2", "a: 2"},
		{"a: 2", "a: {b: 1}", "a: {b: 1}"},
		{"a: {b: 1, c: 2}", "a: {b: null}", "a: {c: 2}"},
		{"a: {b: 1}", "a: null", "{}"},
		{"a: 1", "{}", "a: 1"},
	} {
		values, err := ParseValues([]byte(tt.values))
		if err != nil {
			t.Fatal(err)
		}
		over, err := ParseValues([]byte(tt.over))
		if err != nil {
			t.Fatal(err)
		}
		Merge(values, over)
		if got, want := asYAML(t, values), again(t, tt.want); got != want {
			t.Errorf("%s over %s: got %s, want %s", tt.over, tt.values, got, want)
		}
	}
}

func asYAML(t *testing.T, v any) string {
	t.Helper()
	data, err := yaml.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func again(t *testing.T, text string) string {
	t.Helper()
	v, err := ParseValues([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return asYAML(t, v)
}

func TestValuesThatAreNoYAML(t *testing.T) {
	for text, want := range map[string]string{
		"a: [":       "values: ",
		"a: 1\na: 2": `key "a" already set in map`,
		"- a":        "values: ",
		"a":          "values: ",
		"a: \xff":    "values: ",
	} {
		if _, err := ParseValues([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", text, err, want)
		}
	}
}

// Each line of testdata/bad-values is an assignment that the schema refuses.
func TestBadValues(t *testing.T) {
	for _, tt := range badValues(t) {
		err := Validate(valuesOf(t, "", tt.set))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.set, err, tt.want)
		}
	}
}

type badValue struct{ set, want string }

// badValues are of testdata/bad-values: an assignment, a bar, and what is said.
func badValues(t *testing.T) (out []badValue) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "bad-values"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		set, want, ok := strings.Cut(strings.TrimSpace(line), " | ")
		if !ok {
			t.Fatalf("%q is not ASSIGNMENT | WANT", line)
		}
		out = append(out, badValue{set, want})
	}
	if len(out) < 20 {
		t.Fatalf("%d lines", len(out))
	}
	return out
}

// What the chart itself refuses is said in its words alone.
func TestTheChartRefuses(t *testing.T) {
	_, err := Render(Release{Name: "culvert", Namespace: "a"}, valuesOf(t, "", "multiCluster.enabled=true", "discovery.enabled=false"))
	if want := "multiCluster.enabled needs discovery.enabled: what is exported are its services"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %q", err, want)
	}
}

// Every value is in the schema, and what the schema has is a value.
func TestTheSchemaHasEveryValue(t *testing.T) {
	data, err := Schema()
	if err != nil {
		t.Fatal(err)
	}
	root := map[string]any{}
	if err := yaml.UnmarshalStrict(data, &root); err != nil {
		t.Fatal(err)
	}
	var walk func(path string, schema, values any)
	walk = func(path string, schema, values any) {
		properties, _ := at(schema, "properties").(map[string]any)
		m, _ := values.(map[string]any)
		for key, sub := range properties {
			if _, ok := m[key]; !ok && key != "global" && path+"."+key != "values.enabled" {
				t.Errorf("%s.%s is in the schema and has no default", path, key)
			}
			if at(sub, "properties") != nil {
				walk(path+"."+key, sub, m[key])
			}
		}
		if at(schema, "additionalProperties") != false {
			t.Errorf("%s may have any key", path)
		}
	}
	values, err := Defaults()
	if err != nil {
		t.Fatal(err)
	}
	walk("values", root, values)
	if err := Validate(values); err != nil {
		t.Error(err)
	}
	if n := len(fmt.Sprint(root["$defs"])); n < 100 {
		t.Errorf("the schema is not found: %d", n)
	}
}
