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

// TestOneOutgoingPort has every program of the matrix, at each entry of an agent that it can use,
// in a network that reaches one port of one other host: the gateway's, a corporate proxy's or that
// of an nginx that ends TLS. There is no DNS. The services of the other network see the
// certificate or the key of the program, and the agent has another certificate, which they do not
// trust.
//
// The test starts itself again within the network of the gateway, where the services are.
func TestOneOutgoingPort(t *testing.T) {
	if name := os.Getenv(onePortClient); name != "" {
		throughOnePort(t, name)
		return
	}
	guide, err := os.ReadFile("../../docs/guides/agent.md")
	must(t, err)
	if want := table(t); !strings.Contains(string(guide), want) {
		t.Errorf("the guide to the agent does not have the table of programs by entries:\n%s", want)
	}
	kubectl := filepath.Join(t.TempDir(), "kubectl")
	build := exec.Command("go", "build", "-o", kubectl, "./kubectl")
	build.Dir, build.Env = "../cluster", append(os.Environ(), "CGO_ENABLED=0") // as for the suites in clusters
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build kubectl: %v\n%s", err, out)
	}
	client, far := netns.New(t, "client"), netns.New(t, "far")
	netns.Link(t, client, "10.77.0.1/24", far, onePortFar+"/24")
	client.Route(t, "default", onePortFar) // to the addresses that lead to the agent, too
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	self, err := os.Executable()
	must(t, err)
	cmd := far.Command(ctx, self, "-test.run=^TestOneOutgoingPort$", "-test.v", "-test.timeout=5m", "-test.parallel=4")
	cmd.Env = append(os.Environ(), onePortClient+"="+client.Name, onePortKubectl+"="+kubectl, "CULVERT="+culvert)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	var want []string
	for _, way := range waysOut {
		for _, p := range matrix {
			for _, entry := range entries {
				if p.not[entry] == "" && (way == "directly" || p.always) {
					want = append(want, way+"/"+p.name+"/"+strings.ReplaceAll(entry, " ", "_"))
				}
			}
		}
	}
	for _, name := range want {
		if !strings.Contains(string(out), "--- PASS: TestOneOutgoingPort/"+name+" ") {
			t.Errorf("%s did not pass", name)
		}
	}
}

// The ways out of the network of the programs, by the one port.
var waysOut = []string{"directly", "squid", "nginx"}

// throughOnePort is the test within the network of the gateway. The clients are in the namespace
// called name.
func throughOnePort(t *testing.T, name string) {
	w := newWorld(t)
	w.host, w.within = onePortFar, []string{look(t, "ip"), "netns", "exec", name}
	s := w.shop(t)
	issue(t, w.authority, w.dir, "gw", testca.Options{SPIFFEID: "spiffe://example.test/gateway", DNSNames: []string{"gw.example.test"}, IPs: []net.IP{net.ParseIP(w.host)}, Usage: testca.ServerOnly})
	// The agent's own certificate is for the gateway alone.
	edge, err := testca.New("edge.test", nil)
	must(t, err)
	must(t, edge.Save(filepath.Join(w.dir, "edge")))
	issue(t, edge, filepath.Join(w.dir, "edge"), "laptop", testca.Options{SPIFFEID: "spiffe://edge.test/laptop", Usage: testca.ClientOnly})
	plain := "127.0.0.1:" + freePort(t)
	startGateway(t, "--config", w.write(t, "gw.yaml", fmt.Sprintf(`
identity: {trust: {edge.test: {caFile: edge/ca.crt}}}
listeners:
  - {address: "%[1]s:443", tls: {certificateFile: gw.crt, keyFile: gw.key, trust: edge.test}}
  - {address: "%[1]s:444", tls: {certificateFile: gw.crt, keyFile: gw.key, trust: edge.test}}
  - {address: %[2]q, protocols: [websocket], websocket: {path: /edge/}}
admin: 127.0.0.1:%[3]s
drain: {delay: 0s}
services:
%[4]s`, w.host, plain, freePort(t), s.services)))

	const squid = "3128"
	w.squid(t, squid, "443", "alice", "hunter2", w.host+" gw.example.test\n")
	w.write(t, "password", "hunter2\n")
	nginx := w.nginxBefore(t, plain, "", time.Minute)
	_, nginxPort, err := net.SplitHostPort(nginx)
	must(t, err)
	ports := []string{"443", "444", squid, nginxPort}

	p := w.onePortPrograms(t, s)
	for _, way := range waysOut {
		gateway, top, port := fmt.Sprintf(`gateway: "%s:443"`, w.host), "", "443"
		switch way {
		case "squid":
			port, gateway = squid, `gateway: "gw.example.test:443"`
			top = fmt.Sprintf(`upstreamProxy: {url: "http://%s:%s", user: alice, passwordCommand: [cat, %s]}`, w.host, squid, filepath.Join(w.dir, "password"))
		case "nginx":
			port, gateway = nginxPort, fmt.Sprintf(`gateway: %q, serverName: localhost, transports: [websocket], path: /edge/, catalog: false`, nginx)
		}
		w.onePort(t, port)
		for _, other := range ports {
			want := "Connection refused"
			if other == port {
				want = "* Connected to " + w.host
			}
			_, errs, _ := runCmd(t, w.inside(t, "curl", "-sS", "-v", "-k", "-m", "60", "https://"+net.JoinHostPort(w.host, other)+"/"))
			if !strings.Contains(errs, want) {
				t.Fatalf("%s: port %s: want %q of curl, got\n%s", way, other, want, errs)
			}
		}
		stop := p.agents(t, way, top, gateway)
		t.Run(way, func(t *testing.T) { // of which all have ended when it has
			for _, one := range matrix {
				if way == "directly" || one.always {
					p.row(t, one)
				}
			}
		})
		stop()
	}
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
		ip daddr 127.0.0.0/8 accept
		ip6 daddr ::1 accept
		ip daddr %[1]s tcp dport %[2]s accept
		oifname "lo" accept
		meta l4proto tcp reject with tcp reset
		reject
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
