//go:build linux && netns

package interop

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet/netns"
)

const (
	onePortFar = "10.77.0.2" // the host of the gateway

	// Variables: the namespace of the clients, and the path of kubectl.
	onePortClient  = "CULVERT_CLIENT"
	onePortKubectl = "CULVERT_KUBECTL"
)

// TestOneOutgoingPort has every program of the guide to the agent in a network that reaches one
// port of one other host, which is the gateway's, a corporate proxy's or that of an nginx that ends
// TLS. There is no DNS. The programs reach services of the other network by name, by CONNECT,
// SOCKS5, forwards and "culvert exec", with client certificates from end to end.
//
// The test starts itself again within the network of the gateway, where the services are.
func TestOneOutgoingPort(t *testing.T) {
	if name := os.Getenv(onePortClient); name != "" {
		throughOnePort(t, name)
		return
	}
	kubectl := filepath.Join(t.TempDir(), "kubectl")
	build := exec.Command("go", "build", "-o", kubectl, "./kubectl")
	build.Dir = "../cluster"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build kubectl: %v\n%s", err, out)
	}
	client, far := netns.New(t, "client"), netns.New(t, "far")
	netns.Link(t, client, "10.77.0.1/24", far, onePortFar+"/24")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	self, err := os.Executable()
	must(t, err)
	cmd := far.Command(ctx, self, "-test.run=^TestOneOutgoingPort$", "-test.v", "-test.timeout=5m")
	cmd.Env = append(os.Environ(), onePortClient+"="+client.Name, onePortKubectl+"="+kubectl, "CULVERT="+culvert)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	for _, name := range []string{"curl", "git", "psql", "JDBC", "Redis", "Python", "Node", "Java", "Registries_of_images", "Browsers", "SSH", "kubectl", "exec", "squid", "nginx"} {
		if !strings.Contains(string(out), "--- PASS: TestOneOutgoingPort/"+name+" ") && !strings.Contains(string(out), "--- PASS: TestOneOutgoingPort/programs/"+name+" ") {
			t.Errorf("%s did not pass", name)
		}
	}
}

// throughOnePort is the test within the network of the gateway. The clients are in the namespace
// called name.
func throughOnePort(t *testing.T, name string) {
	guide, err := os.ReadFile("../../docs/guides/agent.md")
	must(t, err)
	w := newWorld(t)
	w.host, w.within = onePortFar, []string{look(t, "ip"), "netns", "exec", name}
	s := w.shop(t)
	issue(t, w.authority, w.dir, "gw", testca.Options{SPIFFEID: "spiffe://example.test/gateway", DNSNames: []string{"gw.example.test"}, IPs: []net.IP{net.ParseIP(w.host)}, Usage: testca.ServerOnly})
	plain := "127.0.0.1:" + freePort(t)
	startGateway(t, "--config", w.write(t, "gw.yaml", fmt.Sprintf(`
identity: {trust: {example.test: {caFile: ca.crt}}}
listeners:
  - {address: "%[1]s:443", tls: {certificateFile: gw.crt, keyFile: gw.key, trust: example.test}}
  - {address: "%[1]s:444", tls: {certificateFile: gw.crt, keyFile: gw.key, trust: example.test}}
  - {address: %[2]q, protocols: [websocket], websocket: {path: /edge/}}
admin: 127.0.0.1:%[3]s
drain: {delay: 0s}
services:
%[4]s`, w.host, plain, freePort(t), s.services)))
	const rest = `names: ["*.shop.example"], forwards: {5432: db.shop.example, 6379: cache.shop.example}`
	const credentials = "certificateFile: web.crt, keyFile: web.key, caFile: ca.crt"

	w.onePort(t, "443")
	stop := w.agent(t, "direct", fmt.Sprintf("agent: {gateway: \"%s:443\", %s, %s}\n", w.host, credentials, rest))
	for port, want := range map[string]bool{"443": true, "444": false} {
		_, errs, _ := runCmd(t, w.inside(t, "curl", "-sS", "-v", "-m", "5", "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "https://"+net.JoinHostPort(w.host, port)+"/"))
		if strings.Contains(errs, "* Connected to "+w.host) != want {
			t.Fatalf("port %s can be reached: want %v\n%s", port, want, errs)
		}
	}
	t.Run("programs", func(t *testing.T) { // of which all have ended when it has
		w.programs(t, string(guide), strings.NewReplacer(), s, "127.0.0.1:1080")
		t.Run("kubectl", func(t *testing.T) {
			t.Parallel()
			w.kubectl(t)
		})
		t.Run("exec", func(t *testing.T) {
			t.Parallel()
			w.byExec(t, s)
		})
	})
	stop()
	ask := func(t *testing.T) {
		t.Helper()
		for _, proxy := range []string{"http://127.0.0.1:1080", "socks5h://127.0.0.1:1080"} {
			out, errs, code := runCmd(t, w.inside(t, "curl", "-sS", "--proxy", proxy, "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "https://orders.shop.example/"))
			if code != 0 || !strings.HasPrefix(out, "you are "+clientID) {
				t.Errorf("by %s: exit code %d, got %q, %s", proxy, code, out, errs)
			}
		}
		if out := w.recipe(t, section(t, string(guide), "psql")); out != "/CN=web\n" {
			t.Errorf("psql says %q", out)
		}
	}
	t.Run("squid", func(t *testing.T) {
		const port = "3128"
		w.squid(t, port, "443", "alice", "hunter2", w.host+" gw.example.test\n")
		w.write(t, "password", "hunter2\n")
		w.onePort(t, port)
		defer w.agent(t, "squid", fmt.Sprintf(`
upstreamProxy: {url: "http://%s:%s", user: alice, passwordCommand: [cat, %s]}
agent: {gateway: "gw.example.test:443", %s, %s}
`, w.host, port, filepath.Join(w.dir, "password"), credentials, rest))()
		ask(t)
	})
	t.Run("nginx", func(t *testing.T) {
		at := w.nginxBefore(t, plain, "")
		_, port, err := net.SplitHostPort(at)
		must(t, err)
		w.onePort(t, port)
		defer w.agent(t, "nginx", fmt.Sprintf("agent: {gateway: %q, serverName: localhost, transports: [websocket], path: /edge/, catalog: false, %s, %s}\n", at, credentials, rest))()
		ask(t)
	})
}

// onePort has the network of the clients reach one port of the host alone.
func (w *world) onePort(t *testing.T, port string) {
	t.Helper()
	cmd := w.inside(t, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`
table inet oneport
delete table inet oneport
table inet oneport {
	chain out {
		type filter hook output priority 0; policy drop;
		oifname "lo" accept
		ip daddr %s tcp dport %s accept
	}
	chain in {
		type filter hook input priority 0; policy drop;
		iifname "lo" accept
		ct state established accept
	}
}`, w.host, port))
	if out, errs, code := runCmd(t, cmd); code != 0 {
		t.Fatalf("nft: %s%s", out, errs)
	}
}

// agent starts an agent in the network of the clients, and returns what ends it.
func (w *world) agent(t *testing.T, name, config string) (stop func()) {
	t.Helper()
	file := w.write(t, name+".yaml", config)
	p := startCmd(t, w.inside(t, "culvert", "agent", "--config", file, "--log-level", "debug"))
	p.await(t, "listened", func() bool {
		_, _, code := runCmd(t, w.inside(t, "curl", "-sS", "-f", "-o", "/dev/null", "http://127.0.0.1:1080/proxy.pac"))
		return code == 0
	})
	return func() {
		p.signal(syscall.SIGKILL)
		p.awaitEnd(t)
	}
}

// kubectl reads a page by the context that "culvert kube login" has written.
func (w *world) kubectl(t *testing.T) {
	kubectl := os.Getenv(onePortKubectl)
	config := filepath.Join(t.TempDir(), "config")
	for _, args := range [][]string{
		{culvert, "kube", "login", "west", "--kubeconfig", config, "--server", "orders.shop.example", "--ca", w.ca, "--cert", w.cert, "--key", w.key},
		{kubectl, "--kubeconfig", config, "get", "--raw", "/version"},
	} {
		out, errs, code := runCmd(t, w.inside(t, args[0], args[1:]...))
		if code != 0 {
			t.Fatalf("%q: exit code %d, %s%s", args, code, out, errs)
		}
		if args[0] == kubectl && !strings.HasPrefix(out, "you are "+clientID) {
			t.Errorf("kubectl says %q", out)
		}
	}
}

// byExec has programs that know nothing of the agent reach services by their names.
func (w *world) byExec(t *testing.T, s *shop) {
	tls := []string{"--cacert", w.ca, "--cert", w.cert, "--key", w.key}
	ssh := []string{"-F", "/dev/null", "-i", filepath.Join(s.keys, "client"), "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"}
	for _, c := range []struct {
		want string
		args []string
	}{
		{"you are " + clientID, append([]string{"curl", "-sS", "https://orders.shop.example/"}, tls...)},
		{"/CN=web", []string{"psql", "-X", "-A", "-t", "-c", "select client_dn from pg_stat_ssl where pid = pg_backend_pid()",
			fmt.Sprintf("host=db.shop.example sslmode=verify-full sslrootcert=%s sslcert=%s sslkey=%s user=web dbname=postgres", w.ca, w.cert, w.key)}},
		{"OK", append(append([]string{"redis-cli", "-h", "cache.shop.example", "--tls", "--sni", "cache.shop.example"}, tls...), "set", "greeting", "hello")},
		{"by ssh", append(append([]string{"ssh"}, ssh...), "build.shop.example", "echo by ssh")},
	} {
		out, errs, code := runCmd(t, w.inside(t, "culvert", append([]string{"exec", "--"}, c.args...)...))
		if code != 0 || !strings.HasPrefix(out, c.want) {
			t.Errorf("%q: exit code %d, got %q, %s; want %q", c.args[0], code, out, errs, c.want)
		}
	}
}
