package file

import (
	"os"
	"path/filepath"
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
