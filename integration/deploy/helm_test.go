package deploy

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	helm "helm.sh/helm/v4/pkg/chart/v2"
	"sigs.k8s.io/yaml"

	culvert "culvert.dev/deploy"
	"culvert.dev/integration/deploy/chart"
)

// root is the project's folder.
var root = filepath.Join("..", "..")

func loadChart(t *testing.T) *helm.Chart {
	t.Helper()
	c, err := chart.Load(root)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// refused returns what Helm says of assignments that it refuses.
func refused(t *testing.T, sets ...string) string {
	t.Helper()
	values, err := chart.Values("", sets)
	if err != nil {
		t.Fatal(err)
	}
	text, err := chart.Render(loadChart(t), chart.Release{Name: "culvert", Namespace: "culvert-system"}, values)
	if err == nil {
		t.Errorf("%q: got %d bytes of manifests, want the values refused", sets, len(text))
		return ""
	}
	return err.Error()
}

// The files of deploy/kustomize, which the program embeds, are what the chart
// makes.
func TestManifestsAreOfTheChart(t *testing.T) {
	files, err := chart.Files(loadChart(t))
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(root, "deploy", "kustomize")
	err = filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(name) != ".yaml" {
			return err
		}
		key, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		want := files[filepath.ToSlash(key)]
		delete(files, filepath.ToSlash(key))
		got, err := os.ReadFile(name)
		if err == nil && string(got) != want {
			t.Errorf("%s is not what the chart makes: run \"make manifests\"", name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range files {
		t.Errorf("deploy/kustomize/%s is missing: run \"make manifests\"", name)
	}
}

// "culvert install" prints what Helm makes of the same profile and settings.
func TestInstallPrintsWhatHelmMakes(t *testing.T) {
	c := loadChart(t)
	var names []string
	for _, p := range chart.Profiles {
		names = append(names, p.Name)
		for _, s := range []culvert.Settings{
			{Name: "culvert", Namespace: "culvert-system"},
			{Name: "west-culvert", Namespace: "edge", CreateNamespace: true, Cluster: "west"},
			{Name: "edge", Namespace: "culvert", CreateNamespace: true, Image: "registry.example.com/gateway:v1.2.3"},
		} {
			sets := slices.Clone(p.Sets)
			if s.Cluster != "" {
				sets = append(sets, "cluster="+s.Cluster)
			}
			if s.Image != "" {
				repository, tag, _ := strings.Cut(s.Image, ":")
				sets = append(sets, "image={repository: "+repository+", tag: "+tag+"}")
			}
			values, err := chart.Values("", sets)
			if err != nil {
				t.Fatal(err)
			}
			text, err := chart.Render(c, chart.Release{Name: s.Name, Namespace: s.Namespace, CreateNamespace: s.CreateNamespace}, values)
			if err != nil {
				t.Fatal(err)
			}
			want, err := culvert.Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			s.Profile = p.Name
			got, err := culvert.Manifests(s)
			if err != nil || len(got) != len(want) {
				t.Fatalf("%+v: got %d objects, %v; want %d", s, len(got), err, len(want))
			}
			for i := range want {
				if !reflect.DeepEqual(got[i], want[i]) {
					t.Errorf("%+v: got\n%s\nwant\n%s", s, asYAML(t, got[i]), asYAML(t, want[i]))
				}
			}
		}
	}
	if !slices.Equal(names, culvert.Profiles) {
		t.Errorf("got the profiles %q, want %q", culvert.Profiles, names)
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

// Each line of testdata/bad-values is an assignment that the schema refuses.
func TestBadValues(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "bad-values"))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		set := strings.TrimSpace(line)
		got := refused(t, set)
		key, _, _ := strings.Cut(set, "=")
		named := func(key string) bool { return strings.Contains(got, key) }
		keys := strings.FieldsFunc(key, func(r rune) bool { return r == '.' || r == '[' })
		if !strings.Contains(got, "schema") || !slices.ContainsFunc(keys, named) {
			t.Errorf("%s: got %q, want the schema and one of %q named", set, got, keys)
		}
		n++
	}
	if n < 20 {
		t.Errorf("got %d lines, want at least 20", n)
	}
}

// What the chart itself refuses is said in its words.
func TestTheChartRefuses(t *testing.T) {
	for want, sets := range map[string][]string{
		"multiCluster.enabled needs discovery.enabled: what is exported are its services":                        {"multiCluster.enabled=true", "discovery.enabled=false"},
		"gateway.sharedSessions needs key, trust and ids: replicas ask each other by mutual TLS":                 {"gateway.sharedSessions.enabled=true"},
		"multiCluster.importedServices.enabled needs multiCluster.enabled":                                       {"multiCluster.importedServices.enabled=true"},
		"multiCluster.importedServices.enabled needs gateway.enabled: the addresses of imports lead to its pods": {"multiCluster.enabled=true", "multiCluster.importedServices.enabled=true", "gateway.enabled=false"},
	} {
		if got := refused(t, sets...); !strings.Contains(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// Every value is in the schema, and what the schema has is a value.
func TestTheSchemaHasEveryValue(t *testing.T) {
	c := loadChart(t)
	root := map[string]any{}
	if err := yaml.UnmarshalStrict(bytes.TrimSpace(c.Schema), &root); err != nil {
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
	walk("values", root, c.Values)
}
