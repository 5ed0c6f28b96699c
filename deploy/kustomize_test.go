package deploy

import (
	"bytes"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the folders of kustomize anew; then read the difference")

// made is in the first line of everything that is made of the chart.
const made = "# Made of the chart in ../helm by \"make manifests\": not to be edited here.\n"

// overlays are the folders of kustomize/overlays, and the values of each.
var overlays = []struct {
	folder string
	alone  bool // it has all of its objects, and nothing of the base
	sets   []string
}{
	{"daemonset", false, []string{"gateway.kind=DaemonSet", "gateway.hostNetwork=true", "gateway.service.enabled=false"}},
	{"dns", false, []string{"dns.enabled=true"}},
	{"gateway-api", false, []string{"gatewayAPI.enabled=true"}},
	{"out-of-cluster", true, []string{"gateway.enabled=false"}},
}

// The folders of kustomize say what the chart makes. That kustomize reads them
// so is tested in integration/deploy.
func TestKustomizeIsOfTheChart(t *testing.T) {
	base := renderWithNamespace(t)
	files := map[string]string{
		"base/kustomization.yaml": kustomization("resources", []string{"manifests.yaml"}),
		"base/manifests.yaml":     documents(t, base),
	}
	for _, o := range overlays {
		folder := "overlays/" + o.folder + "/"
		objects := renderWithNamespace(t, o.sets...)
		if o.alone {
			files[folder+"kustomization.yaml"] = kustomization("resources", []string{"manifests.yaml"})
			files[folder+"manifests.yaml"] = documents(t, objects)
			continue
		}
		added, patches := difference(t, base, objects)
		resources := []string{"../../base"}
		if len(added) > 0 {
			resources = append(resources, "manifests.yaml")
			files[folder+"manifests.yaml"] = documents(t, added)
		}
		var paths []string
		for _, p := range patches {
			name := fmt.Sprintf("%s-%s.yaml", strings.ToLower(p.Kind), strings.ReplaceAll(p.Name, ":", "-"))
			path := "path: " + name
			if !strings.HasPrefix(p.Text, "$patch") { // operations do not say of what they are
				path += fmt.Sprintf("\n    target: {kind: %s, name: %q}", p.Kind, p.Name)
			}
			paths = append(paths, path)
			files[folder+name] = made + p.Text
		}
		text := kustomization("resources", resources)
		if len(paths) > 0 {
			text += strings.TrimPrefix(kustomization("patches", paths), header)
		}
		files[folder+"kustomization.yaml"] = text
	}
	if *update {
		for name, text := range files {
			name = filepath.Join("kustomize", filepath.FromSlash(name))
			if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	err := filepath.WalkDir("kustomize", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(name) != ".yaml" {
			return err
		}
		key := strings.TrimPrefix(filepath.ToSlash(name), "kustomize/")
		want, ok := files[key]
		delete(files, key)
		if !ok && *update {
			return os.Remove(name)
		}
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
		t.Errorf("kustomize/%s is missing: run \"make manifests\"", name)
	}
}

func renderWithNamespace(t *testing.T, sets ...string) []Object {
	t.Helper()
	objects, err := Render(Release{Name: "culvert", Namespace: "culvert-system", CreateNamespace: true}, valuesOf(t, "", sets...))
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

func documents(t *testing.T, objects []Object) string {
	t.Helper()
	var b bytes.Buffer
	if err := WriteYAML(&b, objects); err != nil {
		t.Fatal(err)
	}
	return made + b.String()
}

const header = made + "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"

func kustomization(key string, list []string) string {
	return header + key + ":\n  - " + strings.Join(list, "\n  - ") + "\n"
}

// difference is what is to be added to base to make objects of it, and patches
// of what is otherwise or gone.
func difference(t *testing.T, base, objects []Object) (added, patches []Object) {
	t.Helper()
	same := func(a Object) func(Object) bool {
		return func(b Object) bool { return a.Kind == b.Kind && a.Name == b.Name && a.Namespace == b.Namespace }
	}
	for _, o := range objects {
		switch i := slices.IndexFunc(base, same(o)); {
		case i < 0:
			added = append(added, o)
		case !reflect.DeepEqual(base[i].Fields, o.Fields):
			o.Text = asYAML(t, operations("", base[i].Fields, o.Fields))
			patches = append(patches, o)
		}
	}
	for _, o := range base {
		if slices.ContainsFunc(objects, same(o)) {
			continue
		}
		o.Text = fmt.Sprintf("$patch: delete\napiVersion: %s\nkind: %s\nmetadata:\n  name: %q\n", o.APIVersion, o.Kind, o.Name)
		if o.Namespace != "" {
			o.Text += "  namespace: " + o.Namespace + "\n"
		}
		patches = append(patches, o)
	}
	return added, patches
}

// operations are those of RFC 6902 that make to of from.
func operations(path string, from, to map[string]any) (ops []map[string]any) {
	keys := map[string]bool{}
	for key := range from {
		keys[key] = true
	}
	for key := range to {
		keys[key] = true
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		a, b := from[key], to[key]
		at := path + "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
		inA, ok := a.(map[string]any)
		inB, also := b.(map[string]any)
		switch {
		case reflect.DeepEqual(a, b):
		case ok && also:
			ops = append(ops, operations(at, inA, inB)...)
		case b == nil:
			ops = append(ops, map[string]any{"op": "remove", "path": at})
		case a == nil:
			ops = append(ops, map[string]any{"op": "add", "path": at, "value": b})
		default:
			ops = append(ops, map[string]any{"op": "replace", "path": at, "value": b})
		}
	}
	return ops
}
