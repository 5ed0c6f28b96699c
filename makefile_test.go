//go:build unix && !unit

package culvert_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// What a machine can't run is counted, once each, in a line that "make check"
// and "make test" end with; and where make runs alone, nothing of an earlier
// call is counted.
func TestMakeCountsWhatIsLeftOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "left-out")
	for _, tt := range []struct {
		file, level, want string
	}{
		{"", "1", "left out: nothing"},
		{"not root: clusters\n", "1", "left out: 1 (not root: clusters)"},
		{"not root: clusters\nno cgroup: memory\nno cgroup: memory\n", "1", "left out: 2 (not root: clusters; no cgroup: memory)"},
		{"of an earlier call\n", "0", "left out: nothing"},
	} {
		if err := os.WriteFile(path, []byte(tt.file), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("make", "-s", "--no-print-directory", "left-out")
		cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL="+tt.level, "CULVERT_LEFT_OUT="+path)
		out, err := cmd.CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != tt.want {
			t.Errorf("with %q at level %s: %q, %v; want %q", tt.file, tt.level, got, err, tt.want)
		}
	}
	for _, target := range []string{"check", "test"} {
		_, recipe, _ := strings.Cut(read(t, "Makefile"), "\n"+target+":")
		recipe, _, _ = strings.Cut(recipe, "\n\n")
		if !strings.HasSuffix(recipe, "\n\t@$(MAKE) -s left-out") {
			t.Errorf("make %s does not end by saying what was left out", target)
		}
	}
}

// What the suite of reliability leaves out over the relay that copies is a test
// of it: a name that nothing has would leave out nothing, unseen.
func TestMakeLeavesOutTestsThatExist(t *testing.T) {
	_, list, ok := strings.Cut(read(t, "Makefile"), "\nNO_RELAY := ")
	list, _, _ = strings.Cut(list, "\n")
	files, err := filepath.Glob("integration/reliability/*_test.go")
	if err != nil || !ok || len(files) == 0 {
		t.Fatalf("%v, %d files, and NO_RELAY in the Makefile: %t", err, len(files), ok)
	}
	var all strings.Builder
	for _, f := range files {
		all.WriteString(read(t, f))
	}
	for _, name := range strings.Split(list, "|") {
		if !strings.Contains(all.String(), "\nfunc "+name+"(t *testing.T) {") {
			t.Errorf("integration/reliability has no test %q", name)
		}
	}
}
