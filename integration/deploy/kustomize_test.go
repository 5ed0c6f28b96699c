package deploy

import (
	"path/filepath"
	"reflect"
	"testing"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"

	culvert "culvert.dev/deploy"
	"culvert.dev/integration/deploy/chart"
)

// What kustomize builds of each folder is what "culvert install" prints for the
// same profile.
func TestKustomizeBuildsTheProfiles(t *testing.T) {
	for _, p := range chart.Profiles {
		t.Run(p.Name, func(t *testing.T) {
			built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join(root, "deploy", "kustomize", p.Folder))
			if err != nil {
				t.Fatal(err)
			}
			text, err := built.AsYaml()
			if err != nil {
				t.Fatal(err)
			}
			got, err := culvert.Parse(string(text))
			if err != nil {
				t.Fatal(err)
			}
			want, err := culvert.Manifests(culvert.Settings{Profile: p.Name, CreateNamespace: true})
			if err != nil || len(got) != len(want) {
				t.Fatalf("got %d objects, %v; want %d", len(got), err, len(want))
			}
			byKey := map[string]culvert.Object{}
			for _, o := range got {
				byKey[o.Kind()+" "+o.Namespace()+"/"+o.Name()] = o
			}
			for _, o := range want {
				if key := o.Kind() + " " + o.Namespace() + "/" + o.Name(); !reflect.DeepEqual(byKey[key], o) {
					t.Errorf("%s: got %v\nwant %v", key, byKey[key], o)
				}
			}
		})
	}
}
