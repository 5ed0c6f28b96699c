package deploy

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	culvert "culvert.dev/deploy"
)

// What kustomize builds of each folder is what the chart makes of the values
// that the folder is for.
func TestKustomizeBuildsWhatTheChartMakes(t *testing.T) {
	sets := map[string][]string{
		"base":                    nil,
		"overlays/daemonset":      {"gateway.kind=DaemonSet", "gateway.hostNetwork=true", "gateway.service.enabled=false"},
		"overlays/dns":            {"dns.enabled=true"},
		"overlays/gateway-api":    {"gatewayAPI.enabled=true"},
		"overlays/out-of-cluster": {"gateway.enabled=false"},
	}
	folder := filepath.Join(root, "deploy", "kustomize")
	found, err := os.ReadDir(filepath.Join(folder, "overlays"))
	if err != nil || len(found) != len(sets)-1 {
		t.Errorf("%d overlays, %v, want %d", len(found), err, len(sets)-1)
	}
	for name, set := range sets {
		t.Run(name, func(t *testing.T) {
			built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join(folder, name))
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]map[string]any{}
			for _, r := range built.Resources() {
				text, err := r.AsYAML()
				if err != nil {
					t.Fatal(err)
				}
				var fields map[string]any
				if err := yaml.UnmarshalStrict(text, &fields); err != nil {
					t.Fatal(err)
				}
				got[r.GetKind()+" "+r.GetNamespace()+"/"+r.GetName()] = fields
			}
			values, err := culvert.Defaults()
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range set {
				if err := culvert.Set(values, s); err != nil {
					t.Fatal(err)
				}
			}
			objects, err := culvert.Render(culvert.Release{Name: "culvert", Namespace: "culvert-system", CreateNamespace: true}, values)
			if err != nil {
				t.Fatal(err)
			}
			var want []string
			for _, o := range objects {
				key := o.Kind + " " + o.Namespace + "/" + o.Name
				want = append(want, key)
				if !reflect.DeepEqual(got[key], o.Fields) {
					t.Errorf("%s: got %v\nwant %v", key, got[key], o.Fields)
				}
			}
			for key := range got {
				if !slices.Contains(want, key) {
					t.Errorf("%s is built, and not made of the chart", key)
				}
			}
		})
	}
}
