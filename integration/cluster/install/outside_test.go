package install

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"culvert.dev/integration/cluster"
)

// A gateway out of the cluster serves what is in it, with the account and the
// kubeconfig that the README of the folder makes.
func TestTheReadmeForGatewaysOutOfTheClusterWorks(t *testing.T) {
	a, flags := newAudit(t)
	c := cluster.Start(t, cluster.Options{APIServerFlags: flags})
	c.RunEcho(t, cluster.Echo{Exposed: true})
	dir, programs := t.TempDir(), t.TempDir()
	folder := filepath.Join("..", "..", "..", "deploy", "kustomize", "overlays", "out-of-cluster")
	if err := os.CopyFS(dir, os.DirFS(folder)); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, filepath.Join(programs, "kubectl")); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	script := "set -euo pipefail\n"
	var wants []string
	for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```").FindAllStringSubmatch(string(text), -1) {
		script += block[1]
		for _, want := range regexp.MustCompile(`(?m)^# => (.*)$`).FindAllStringSubmatch(block[1], -1) {
			wants = append(wants, want[1])
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PATH="+programs+":"+os.Getenv("PATH"), "HOME="+dir, "KUBECONFIG="+c.AdminKubeconfig(t))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range wants {
		if len(wants) < 2 || !regexp.MustCompile(`(?m)^`+want+`\b`).Match(out) {
			t.Errorf("no line begins with %q:\n%s", want, out)
		}
	}
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if info, err := os.Stat(kubeconfig); err != nil || info.Mode().Perm() != fs.FileMode(0o600) {
		t.Errorf("the kubeconfig is %v, %v, want it for its owner only", info, err)
	}

	config := filepath.Join(dir, "culvert.yaml")
	const at = "127.0.0.1:8443"
	err = os.WriteFile(config, fmt.Appendf(nil, "cluster: west\nlisteners: [{address: %q}]\nkubernetes: {kubeconfig: %q, discovery: {}}\n", at, kubeconfig), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	c.WaitReady(t, cluster.PodTime, "default")
	gateway := c.RunCulvert(t, "gateway", "--config", config)
	wantEcho(t, c, at, "echo.default.svc.west.mesh.internal:80")
	log, err := os.ReadFile(gateway.Log)
	if err != nil || strings.Contains(string(log), "may not ") {
		t.Errorf("%v, the log: %s", err, log)
	}
	nothingForbidden(t, c, a, "culvert")
}
