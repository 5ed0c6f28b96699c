package file

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// A relative path is from the file.
func TestKubernetesState(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "culvert.yaml")
	for state, want := range map[string]string{"learnt": filepath.Join(dir, "learnt"), "/var/lib/culvert/kubernetes": "/var/lib/culvert/kubernetes"} {
		if err := os.WriteFile(path, []byte("cluster: west\nlisteners: [{address: \":443\"}]\nkubernetes: {discovery: {}, state: "+state+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		if c.Kubernetes.State != want {
			t.Errorf("%s: got %q, want %q", state, c.Kubernetes.State, want)
		}
	}
}

// What no annotation can change.
func TestKubernetesRules(t *testing.T) {
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	for _, tt := range []struct {
		discovery string
		suffixes  []Suffix
		closed    bool
	}{
		{`{}`, nil, false},
		{`{externalNames: true}`, nil, false},
		{`{externalNames: false}`, nil, true},
		{`{suffixes: [Shop.Example.com]}`, []Suffix{{Domain: "shop.example.com"}}, false},
		{`{suffixes: [{suffix: a.test}, {suffix: b.test, namespaces: [b, "team-*"]}]}`,
			[]Suffix{{Domain: "a.test"}, {Domain: "b.test", Namespaces: []string{"b", "team-*"}}}, false},
	} {
		if err := os.WriteFile(path, []byte("cluster: west\nlisteners: [{address: \":443\"}]\nkubernetes: {discovery: "+tt.discovery+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load(path)
		if err != nil {
			t.Fatalf("%s: %v", tt.discovery, err)
		}
		if d := c.Kubernetes.Discovery; !reflect.DeepEqual(d.Suffixes, tt.suffixes) || d.NoExternalNames != tt.closed {
			t.Errorf("%s: got %+v, closed %v, want %+v, %v", tt.discovery, d.Suffixes, d.NoExternalNames, tt.suffixes, tt.closed)
		}
	}
}
