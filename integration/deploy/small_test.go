package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The program without Kubernetes and the Workload API, for small machines, has no package of
// them, is smaller than smallSize, and refuses what needs them.
func TestProgramWithoutKubernetes(t *testing.T) {
	const (
		tags      = "nokube,nospiffe"
		smallSize = 24 << 20 // bytes; see the ADR about the size of the program
	)
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	list := exec.Command("go", "list", "-deps", "-tags", tags, "./cmd/culvert")
	list.Dir = root
	deps, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	if found := regexp.MustCompile(`(?m)^(.*k8s\.io|google\.golang\.org/grpc)/.*$`).Find(deps); found != nil {
		t.Errorf("the program has the package %s", found)
	}

	program := filepath.Join(t.TempDir(), "culvert")
	build := exec.Command("go", "build", "-trimpath", "-tags", tags, "-ldflags", "-s -w", "-o", program, "./cmd/culvert")
	build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	info, err := os.Stat(program)
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > smallSize {
		t.Errorf("the program has %d bytes, want at most %d", info.Size(), smallSize)
	}

	const services = "listeners: [{address: '127.0.0.1:1'}]\nservices: [{name: a.test, endpoints: ['127.0.0.1:2']}]\n"
	config := filepath.Join(t.TempDir(), "culvert.yaml")
	for _, row := range []struct {
		args []string
		file string
		want string // in the output
		ok   bool
	}{
		{args: []string{"version"}, want: "culvert ", ok: true},
		{args: []string{"--version"}, want: "culvert ", ok: true},
		{args: []string{"config", "check", config}, file: services, ok: true},
		{args: []string{"config", "check", config}, file: "cluster: small\nlisteners: [{address: '127.0.0.1:1'}]\nkubernetes: {discovery: {}}\n", want: "this program was built without Kubernetes (tag nokube)"},
		{args: []string{"gateway", "--config", config}, file: "cluster: small\nlisteners: [{address: '127.0.0.1:1'}]\nkubernetes: {discovery: {}}\n", want: "this program was built without Kubernetes (tag nokube)"},
		{args: []string{"install", "--dry-run"}, want: "this program was built without Kubernetes (tag nokube)"},
	} {
		if err := os.WriteFile(config, []byte(row.file), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(program, row.args...).CombinedOutput()
		if (err == nil) != row.ok || !strings.Contains(string(out), row.want) {
			t.Errorf("%q with %q: %v, %s", row.args, row.file, err, out)
		}
	}
}
