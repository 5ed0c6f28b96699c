//go:build unix

package interop

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// plugin prints the client certificate in the files that it is given, as kubectl's plugins do.
const plugin = `#!/bin/sh
lines() { awk '{printf "%s\\n", $0}' "$1"; }
printf '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"clientCertificateData":"%s","clientKeyData":"%s"}}' "$(lines "$1")" "$(lines "$2")"
`

// kubectl runs the plugin of a user by itself, whose certificate is for the API server, through
// what "culvert kube login" has written: in the files of KUBECONFIG, of which the user's stays.
func TestKubectlRunsPlugins(t *testing.T) {
	w := newWorld(t)
	kubectl := filepath.Join(t.TempDir(), "kubectl")
	build := exec.Command("go", "build", "-o", kubectl, "./kubectl")
	build.Dir, build.Env = "../cluster", append(os.Environ(), "CGO_ENABLED=0") // as for the suites in clusters
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build kubectl: %v\n%s", err, out)
	}
	g := startSocks(t, w, service(svc, w.nginx(t)))
	script := w.write(t, "plugin.sh", plugin)
	must(t, os.Chmod(script, 0o700))
	for _, how := range []struct {
		name  string
		flags []string
	}{
		{"by the agent's port", []string{"--agent", g.addr}},
		{"at a gateway", []string{"--gateway", g.addr}},
	} {
		t.Run(how.name, func(t *testing.T) {
			dir := t.TempDir()
			first, users := filepath.Join(dir, "first"), filepath.Join(dir, "users")
			before := fmt.Sprintf(`apiVersion: v1
kind: Config
users:
- name: me # by hand
  user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: %q, args: [%q, %q], interactiveMode: Never}}
`, script, w.cert, w.key)
			must(t, os.WriteFile(first, nil, 0o600))
			must(t, os.WriteFile(users, []byte(before), 0o600))
			for _, args := range [][]string{
				append([]string{culvert, "kube", "login", "west", "--server", svc, "--ca", w.ca, "--user", "me"}, how.flags...),
				{kubectl, "get", "--raw", "/version"},
			} {
				cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
				cmd.Env = append(environ(), "KUBECONFIG="+first+":"+users, "HOME="+dir)
				out, errs, code := runCmd(t, cmd)
				if code != 0 || args[0] == kubectl && !strings.HasPrefix(out, "dn=CN=web serial="+w.serial()) {
					t.Fatalf("%q: exit code %d, got %q, %s", args, code, out, errs)
				}
			}
			if now, err := os.ReadFile(users); err != nil || string(now) != before {
				t.Errorf("the file of the user: %v\n%s", err, now)
			}
		})
	}
}
