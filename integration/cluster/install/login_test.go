package install

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/integration/cluster"
)

// kubectl reaches an API server that only a gateway dials: by the context that "culvert kube
// login" has written, through an agent, and at the gateway itself. What the kubeconfig had before
// stays in it.
func TestKubeLogin(t *testing.T) {
	c := cluster.Start(t, cluster.Options{})
	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	kubectl := filepath.Join(dir, "kubectl")
	if err := os.Symlink(self, kubectl); err != nil {
		t.Fatal(err)
	}
	run := func(program string, args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "HOME="+dir)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	must := func(program string, args ...string) string {
		t.Helper()
		out, err := run(program, args...)
		if err != nil {
			t.Fatalf("%s %q: %v\n%s", program, args, err, out)
		}
		return out
	}
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	culvert := cluster.Program("culvert")
	must(culvert, "ca", "init", "--dir", "pki", "--trust-domain", "shop.test")
	must(culvert, "ca", "issue", "--dir", "pki", "--id", "spiffe://shop.test/gateway", "--ip", "127.0.0.1", "--name", "gw")
	must(culvert, "ca", "issue", "--dir", "pki", "--id", "spiffe://shop.test/laptop", "--name", "me")
	server, err := url.Parse(c.APIServer)
	if err != nil {
		t.Fatal(err)
	}
	const name = "kubernetes.default.svc" // which is in the certificate of the API server
	c.RunCulvert(t, "gateway", "--config", write("gw.yaml", fmt.Sprintf(`
identity: {trust: {shop.test: {caFile: pki/ca.crt}}}
listeners:
  - {address: "127.0.0.1:8443", tls: {certificateFile: pki/gw.crt, keyFile: pki/gw.key, trust: shop.test}}
  - {address: "127.0.0.1:9443", protocols: [sni]}
drain: {delay: 0s}
services: [{name: %s, ports: [443], endpoints: [%q]}]
`, name, server.Host)))
	c.RunCulvert(t, "agent", "--config", write("agent.yaml", `
agent: {gateway: "127.0.0.1:8443", certificateFile: pki/me.crt, keyFile: pki/me.key, caFile: pki/ca.crt}
`))
	for _, address := range []string{"127.0.0.1:1080", "127.0.0.1:9443"} {
		c.Wait(t, time.Minute, func(ctx context.Context) error {
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
			if err == nil {
				_ = conn.Close()
			}
			return err
		})
	}
	before, err := os.ReadFile(c.AdminKubeconfig(t))
	if err != nil {
		t.Fatal(err)
	}
	ca, token := write("cluster.pem", string(c.REST.CAData)), write("token", c.REST.BearerToken)
	for how, flags := range map[string][]string{
		"through the agent":       {"--token-file", token},
		"at the gateway":          {"--token-file", token, "--gateway", "127.0.0.1:9443"},
		"with the former's token": {"--user", "admin"},
	} {
		t.Run(how, func(t *testing.T) {
			config := write("kubeconfig", string(before))
			login := append([]string{"kube", "login", "by-culvert", "--kubeconfig", config, "--server", name, "--ca", ca}, flags...)
			if out := must(culvert, login...); !strings.Contains(out, `context "by-culvert" leads to https://`) {
				t.Errorf("login says %q", out)
			}
			all := must(kubectl, "--kubeconfig", config, "config", "get-contexts", "-o", "name")
			for context := range strings.FieldsSeq(all) {
				if got := must(kubectl, "--kubeconfig", config, "--context", context, "get", "namespaces", "-o", "name"); !strings.Contains(got, "namespace/default\n") {
					t.Errorf("context %s: %q", context, got)
				}
			}
			if current := must(kubectl, "--kubeconfig", config, "config", "current-context"); current != "by-culvert\n" || len(strings.Fields(all)) != 2 {
				t.Errorf("of the contexts %q, %q is the current one", all, current)
			}
		})
	}
	// A name that the gateway does not have is refused.
	config := write("kubeconfig", string(before))
	must(culvert, "kube", "login", "east", "--kubeconfig", config, "--server", "kubernetes.default", "--ca", ca, "--token-file", token)
	if out, err := run(kubectl, "--kubeconfig", config, "get", "namespaces"); err == nil {
		t.Errorf("a cluster that the gateway does not have: %s", out)
	}
}
