//go:build linux && netns

package networks

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/capture"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

// Users of the containers of a pod.
const (
	agentUser   = "64001"
	programUser = "64003"
)

// A pod's init container captures a range of addresses and ends. The agent, another user without
// any capability, serves what is captured; a program, a third user, reaches a service at a
// virtual IP with mutual TLS from end to end.
func TestCaptureInPod(t *testing.T) {
	t.Parallel()
	pod, outside := netns.New(t, "pod"), netns.New(t, "outside")
	netns.Link(t, pod, "10.9.0.1/24", outside, "10.9.0.2/24")
	netns.Link(t, pod, "fd09::1/64", outside, "fd09::2/64")
	pod.Route(t, "default", "10.9.0.2")
	pod.Route(t, "fd00::/8", "fd09::2")
	dir := t.TempDir()
	for d := dir; d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	ca, err := testca.New("example.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := ca.Save(dir); err != nil {
		t.Fatal(err)
	}
	server, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/db", DNSNames: []string{"db.shop.test"}})
	if err != nil {
		t.Fatal(err)
	}
	client, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/program", Usage: testca.ClientOnly})
	if err == nil {
		err = client.Save(dir, "program")
	}
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(culvert)
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "culvert")
	files := map[string]string{
		"culvert": string(text),
		"agent.yaml": `
listeners:
  - {address: "127.0.0.1:15001", protocols: [captured]}
  - {address: "[::1]:15001", protocols: [captured]}
drain: {delay: 0s, timeout: 1s}
services:
  - {name: db.shop.test, addresses: [240.0.0.7, "fd77::7"], ports: [8443], endpoints: ["db.shop.test:8443"], via: [{connect: "10.9.0.2:8080"}]}
`,
		"gateway.yaml": `
listeners: [{address: "10.9.0.2:8080", protocols: [connect]}]
drain: {delay: 0s, timeout: 1s}
services: [{name: db.shop.test, ports: [8443], endpoints: ["127.0.0.1:8443"]}]
`,
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "program.key"), 0o644); err != nil { // the program is another user
		t.Fatal(err)
	}

	ln, err := outside.Listen("tcp", "127.0.0.1:8443")
	if err != nil {
		t.Fatal(err)
	}
	service := &http.Server{
		TLSConfig: server.ServerConfig(),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "the service, for %s", r.TLS.PeerCertificates[0].URIs[0])
		}),
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = service.ServeTLS(ln, "", "") }()
	t.Cleanup(func() { _ = service.Close(); <-ended })
	background(t, outside.Command(context.Background(), program, "gateway", "--config", filepath.Join(dir, "gateway.yaml")))

	as := func(user string, args ...string) *exec.Cmd {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		t.Cleanup(cancel)
		cmd := pod.Command(ctx, "setpriv", append([]string{"--reuid", user, "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"}, args...)...)
		cmd.Dir = "/"
		return cmd
	}
	// The init container: root, with no capability but one.
	initially := func(args ...string) string {
		t.Helper()
		cmd := pod.Command(t.Context(), "setpriv", append([]string{"--inh-caps=-all", "--bounding-set=-all,+net_admin", program, "capture"}, args...)...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("capture %s: %v: %s", args, err, out)
		}
		return string(out)
	}
	list := func() string {
		out, err := pod.Command(t.Context(), "nft", "list", "ruleset").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	ask := func(user, address string) string {
		out, _ := as(user, "curl", "-sS", "-m", "30", "--resolve", "db.shop.test:8443:"+address,
			"--cacert", filepath.Join(dir, "ca.crt"), "--cert", filepath.Join(dir, "program.crt"), "--key", filepath.Join(dir, "program.key"), "https://db.shop.test:8443/").CombinedOutput()
		return string(out)
	}
	want := func(what, got, part string) {
		t.Helper()
		if !strings.Contains(got, part) {
			t.Errorf("%s: got %q, want %q", what, got, part)
		}
	}

	out, err := as(agentUser, program, "capture", "up", "--port", "15001", "--all", "--exclude-uid", agentUser).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "lacks CAP_NET_ADMIN") || !strings.Contains(string(out), "add: [NET_ADMIN]") {
		t.Errorf("without rights: %v: %s", err, out)
	}
	// The gateway's own address is in a range: the agent has to reach it all the same.
	up := []string{"up", "--port", "15001", "--cidr", "240.0.0.0/4", "--cidr", "fd77::/16", "--cidr", "10.9.0.0/24", "--exclude-uid", agentUser}
	said := initially(up...)
	want("up", said, `inet culvert, which stays until "culvert capture down"`)
	want("up", said, "TCP to 10.9.0.0/24, 240.0.0.0/4, fd77::/16, by all programs")
	want("up without an agent", said, "no program listens at port 15001: what is captured is refused")
	rules := list()
	initially(up...)
	if again := list(); again != rules {
		t.Errorf("up again:\n%s\nwant\n%s", again, rules)
	}
	want("before the agent", ask(programUser, "240.0.0.7"), "(7) Failed to connect")

	stop := background(t, as(agentUser, program, "gateway", "--config", filepath.Join(dir, "agent.yaml")))
	var shown []capture.Status
	testnet.Eventually(t, patience, func() bool {
		shown = nil
		if err := json.Unmarshal([]byte(initially("show", "-o", "json")), &shown); err != nil {
			t.Fatal(err)
		}
		return len(shown) == 1 && shown[0].ListensIPv4 && shown[0].ListensIPv6
	}, "the agent listens, and show says so")
	if s := shown[0]; s.Owner != nil || s.Port != 15001 || len(s.ExceptUIDs) != 1 {
		t.Errorf("show says %+v", s)
	}
	const answer = "the service, for spiffe://example.test/program"
	testnet.Eventually(t, patience, func() bool { return ask(programUser, "240.0.0.7") == answer }, "a program reaches the service")
	want("by IPv6", ask(programUser, "[fd77::7]"), answer)
	want("root", ask("0", "240.0.0.7"), answer)
	// Nothing else of the ranges is let through, and the gateway is not reached past the agent.
	// The reset may come before curl has seen that it is connected.
	if out, err = as(programUser, "curl", "-sS", "-m", "30", "http://10.9.0.2:8080/").CombinedOutput(); err == nil {
		t.Errorf("the gateway itself has answered: %s", out)
	}
	if out, err = as(agentUser, "curl", "-sS", "-m", "30", "http://10.9.0.2:8080/").CombinedOutput(); err != nil {
		t.Errorf("the agent's own user is captured: %s", out)
	}
	if out, err = as(programUser, "curl", "-sS", "-m", "30", "telnet://127.0.0.1:15001").CombinedOutput(); err == nil {
		t.Errorf("the listener itself takes what was not captured: %s", out)
	}

	stop()
	want("without the agent", ask(programUser, "240.0.0.7"), "(7) Failed to connect")
	for range 2 {
		initially("down")
		if rules := list(); rules != "" {
			t.Errorf("after down: %s", rules)
		}
	}
	want("show", initially("show"), "nothing is captured")
}
