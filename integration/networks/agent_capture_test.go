//go:build linux && netns

package networks

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

// Users of the host.
const (
	captureUser  = 61001
	capturedUser = 61009 // whose programs are captured
	otherUser    = 61010
)

// A captureRun is a host whose agent captures, and all that is behind its one link: a gateway, a
// DNS server, and a web server at every address, which says from where it is asked.
type captureRun struct {
	*testing.T
	s         *site
	host, far *netns.NS
	binary    string // which every user may run
	ca        *testca.CA
	gateway   func(os.Signal) // ends it
	key       string          // of the agents
	more      string          // of the agents' configuration
}

const captureGateway = `
drain: {delay: 0s, timeout: 1s}
identity: {trust: {example.test: {caFile: ca.crt}}}
listeners:
  - {address: "10.20.0.254:443", tls: {certificateFile: gw.crt, keyFile: gw.key, trust: example.test}}
  - {address: "udp://10.20.0.254:443", tls: {certificateFile: gw.crt, keyFile: gw.key, trust: example.test}}
services:
  - {name: web.shop.test, ports: [80, 5432], endpoints: ["10.20.0.254"]}
  - {name: api.shop.test, ports: [80], endpoints: ["10.20.0.254:80"]}
  - {name: dead.shop.test, ports: [80], endpoints: ["10.20.0.254:81"]}
  - {name: four.shop.test, ports: [80], endpoints: ["10.96.0.80:80"]}
  - {name: six.shop.test, ports: [80], endpoints: ["[fd96::80]:80"]}
  - {name: cache.shop.test, ports: [6379], endpoints: ["10.20.0.254:6379"]}
`

// captureAgent is the configuration of an agent but for its listeners and what it captures.
const captureAgent = `
drain: {timeout: 1s}
vips: {ranges: [240.0.0.0/16, "fd77::/64"], state: %[1]s.json}
services:
  - {name: web.shop.test, vip: true, ports: [80], endpoints: [{address: "gateways.invalid:443", network: gateways}]}
  - {name: dead.shop.test, vip: true, ports: [80], endpoints: [{address: "gateways.invalid:443", network: gateways}]}
  - {name: four.shop.test, ports: [80], endpoints: [{address: "10.96.0.80:80", network: gateways}]}
  - {name: six.shop.test, ports: [80], endpoints: [{address: "[fd96::80]:80", network: gateways}]}
agent:
  gateway: %[2]q
  certificateFile: %[6]s.crt
  keyFile: %[6]s.key
  caFile: ca.crt
  serverName: gw.test
  transports: [connect-h3, connect-h2]
  names: ["*.shop.test"]
  proxy: "127.0.0.1:%[3]d"
  dns: {listen: ["udp://127.0.0.54:%[4]d", "tcp://127.0.0.54:%[4]d"], upstreams: ["10.20.0.53", "tls://10.20.0.254#gw.test"]}
  capture: %[5]s
`

func newCaptureRun(t *testing.T) *captureRun {
	t.Helper()
	r := &captureRun{T: t, key: "me", host: netns.New(t, "host"), far: netns.New(t, "far")}
	r.s = &site{t: t, dir: t.TempDir()}
	netns.Link(t, r.host, "10.20.0.1/24", r.far, "10.20.0.254/24")
	netns.Link(t, r.host, "fd20::1/64", r.far, "fd20::254/64")
	r.host.Route(t, "default", "10.20.0.254")
	r.host.Route(t, "fd00::/8", "fd20::254")
	for _, prefix := range []string{"10.96.0.0/16", "10.20.0.53/32", "10.20.0.77/32", "240.0.0.0/16", "fd96::/64", "fd77::/64"} {
		r.s.must(r.far.Command(t.Context(), "ip", "route", "add", "local", prefix, "dev", "lo"))
	}
	for _, addr := range []string{"10.20.0.53/32", "10.20.0.77/32"} {
		r.s.must(r.far.Command(t.Context(), "ip", "addr", "add", addr, "dev", "lo"))
	}
	r.s.must(r.host.Command(t.Context(), "ip", "route", "add", "10.20.0.53/32", "via", "10.20.0.254"))
	r.s.must(r.host.Command(t.Context(), "ip", "route", "add", "10.20.0.77/32", "via", "10.20.0.254"))
	for d := r.s.dir; d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(r.s.dir, 0o777); err != nil { // state files of the agents
		t.Fatal(err)
	}
	r.binary = filepath.Join(r.s.dir, "culvert")
	r.s.must(exec.Command("install", "-m755", culvert, r.binary))
	var err error
	if r.ca, err = testca.New("example.test", nil); err != nil {
		t.Fatal(err)
	}
	if err := r.ca.Save(r.s.dir); err != nil {
		t.Fatal(err)
	}
	r.issue("gw", testca.Options{SPIFFEID: "spiffe://example.test/gw", DNSNames: []string{"gw.test"}, Usage: testca.ServerOnly})
	r.issue("me", testca.Options{SPIFFEID: "spiffe://example.test/me", Usage: testca.ClientOnly})
	r.web()
	r.gateway = r.s.run(r.far, "gw", "gateway", captureGateway)
	return r
}

func (r *captureRun) issue(name string, o testca.Options) {
	r.Helper()
	pair, err := r.ca.Issue(o)
	if err == nil {
		err = pair.Save(r.s.dir, name)
	}
	if err == nil {
		err = os.Chmod(filepath.Join(r.s.dir, name+".key"), 0o644) // of a test
	}
	if err != nil {
		r.Fatal(err)
	}
}

// web says at every address behind the link who asks.
func (r *captureRun) web() {
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		host, _, _ := net.SplitHostPort(q.RemoteAddr)
		if strings.HasSuffix(host, ".1") || strings.HasSuffix(host, "::1") {
			_, _ = fmt.Fprint(w, "direct")
		} else {
			_, _ = fmt.Fprint(w, "by the gateway")
		}
	})}
	ended := make(chan struct{}, 2)
	for _, addr := range []string{"0.0.0.0:80", "[::]:80"} {
		ln, err := r.far.Listen(map[bool]string{true: "tcp4", false: "tcp6"}[addr[0] == '0'], addr)
		if err != nil {
			r.Fatal(err)
		}
		go func() { defer func() { ended <- struct{}{} }(); _ = web.Serve(ln) }()
	}
	r.Cleanup(func() { _ = web.Close(); <-ended; <-ended })
}

// as returns a command of a user of the host.
func (r *captureRun) as(uid int, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(r.Context(), 2*time.Minute)
	r.Cleanup(cancel)
	cmd := r.host.Command(ctx, "setpriv", append([]string{"--reuid", fmt.Sprint(uid), "--regid", fmt.Sprint(uid), "--clear-groups"}, args...)...)
	cmd.Dir = "/"
	return cmd
}

// curl returns what a user's curl gets of a URL, or its error.
func (r *captureRun) curl(uid int, args ...string) string {
	out, _ := r.as(uid, append([]string{"curl", "-sS", "--max-time", "60"}, args...)...).CombinedOutput()
	return string(out)
}

func (r *captureRun) want(what, got, want string) {
	r.Helper()
	if !strings.Contains(got, want) {
		r.Errorf("%s: got %q, want %q", what, got, want)
	}
}

// refused checks that a connection ended without an answer of anyone.
func (r *captureRun) refused(what, got string) {
	r.Helper()
	if strings.Contains(got, "direct") || strings.Contains(got, "by the gateway") || !strings.Contains(got, "curl: (") || strings.Contains(got, "timed out") {
		r.Errorf("%s: got %q, want a refusal", what, got)
	}
}

// agent starts an agent of a user with CAP_NET_ADMIN, and returns what kills it.
func (r *captureRun) agent(uid int, gateway, capture string, script ...string) (kill func()) {
	r.Helper()
	name, config := fmt.Sprintf("agent%d", uid), r.configure(uid, gateway, capture)
	r.s.must(exec.Command(culvert, "config", "check", config))
	args := append([]string{"--inh-caps", "+net_admin", "--ambient-caps", "+net_admin"}, script...)
	args = append(args, r.binary, "agent", "--config", config, "--admin", "unix:"+r.s.socket(name))
	cmd := r.as(uid, args...)
	if strings.Contains(capture, "cgroups") { // which ip netns exec would hide
		cmd = exec.Command("nsenter", append([]string{"--net=/run/netns/" + r.host.Name}, cmd.Args[4:]...)...)
	}
	kill = background(r.T, cmd)
	testnet.Eventually(r, 2*patience, func() bool { return strings.Contains(r.status(uid), "capture:") && r.ready(uid) }, "the agent of %d captures", uid)
	return kill
}

// configure writes the configuration of a user's agent, "" for one that does not capture.
func (r *captureRun) configure(uid int, gateway, capture string) (path string) {
	r.Helper()
	name := fmt.Sprintf("agent%d", uid)
	path = filepath.Join(r.s.dir, name+".yaml")
	content := fmt.Sprintf(captureAgent, name, gateway, 20000+uid%1000, 5300+uid%1000, capture, r.key) + r.more
	content = strings.Replace(content, "  capture: \n", "", 1)
	err := os.WriteFile(path+".new", []byte(content), 0o644)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		r.Fatal(err)
	}
	return path
}

func (r *captureRun) status(uid int) string {
	out, _ := exec.Command(culvert, "status", "--admin", "unix:"+r.s.socket(fmt.Sprintf("agent%d", uid))).CombinedOutput()
	return string(out)
}

// ready reports whether the rules are there, with the VIPs.
func (r *captureRun) ready(uid int) bool {
	out, _ := r.host.Command(r.Context(), "nft", "list", "table", "inet", fmt.Sprintf("culvert-agent-%d", uid)).CombinedOutput()
	return bytes.Contains(out, []byte("redirect")) && (!bytes.Contains(out, []byte("@vips4")) || bytes.Contains(out, []byte("240.0.")))
}

// address asks the DNS server of the agent of a user.
func (r *captureRun) address(uid int, kind, name string) string {
	r.Helper()
	out := r.s.must(r.host.Command(r.Context(), "dig", "+short", "-p", fmt.Sprint(5300+uid%1000), "@127.0.0.54", kind, name))
	if out = strings.TrimSpace(out); out == "" {
		r.Fatalf("%s has no address of %s", name, kind)
	}
	return out
}

// to is the URL of an address.
func to(addr string) string { return "http://" + net.JoinHostPort(addr, "80") + "/" }

// Programs that know nothing of the agent reach services by it, and all else as before.
func TestAgentCapture(t *testing.T) {
	t.Parallel()
	r := newCaptureRun(t)
	tables := r.s.must(r.host.Command(t.Context(), "nft", "list", "tables"))
	kill := r.agent(captureUser, "10.20.0.254:443", fmt.Sprintf(`{vips: true, cidrs: [10.96.0.0/16, 10.20.0.0/24, "fd96::/64"], uids: [own, %d], except: [10.96.9.0/24]}`, capturedUser))
	vip4, vip6 := r.address(captureUser, "A", "web.shop.test"), r.address(captureUser, "AAAA", "web.shop.test")
	for _, c := range []struct{ what, addr, want string }{
		{"a VIP", vip4, "by the gateway"},
		{"a VIP of IPv6", vip6, "by the gateway"},
		{"a name without a VIP", r.address(captureUser, "A", "api.shop.test"), "by the gateway"},
		{"a name without a VIP, by IPv6", r.address(captureUser, "AAAA", "api.shop.test"), "by the gateway"},
		{"a range", "10.96.0.80", "by the gateway"},
		{"a range of IPv6", "fd96::80", "by the gateway"},
		{"an exception", "10.96.9.1", "direct"},
		{"the gateway", "10.20.0.254", "direct"},
		{"the DNS upstream", "10.20.0.53", "direct"},
	} {
		r.want(c.what, r.curl(capturedUser, to(c.addr)), c.want)
		if c.want == "by the gateway" && !strings.HasPrefix(c.addr, "198.1") && !strings.HasPrefix(c.addr, "240.") && !strings.HasPrefix(c.addr, "fd77:") && !strings.HasPrefix(c.addr, "fd63:") {
			r.want(c.what+", of another user", r.curl(otherUser, to(c.addr)), "direct")
		}
	}
	stop := background(t, r.far.Command(context.Background(), "redis-server", "--bind", "10.20.0.254", "--port", "6379", "--save", "", "--protected-mode", "no", "--dir", r.s.dir))
	defer stop()
	cache := r.address(captureUser, "A", "cache.shop.test")
	testnet.Eventually(t, patience, func() bool {
		out, _ := r.as(capturedUser, "redis-cli", "-h", cache, "PING").CombinedOutput()
		return strings.TrimSpace(string(out)) == "PONG"
	}, "redis-cli has its answer")
	r.want("the agent's user", r.curl(captureUser, to(vip4)), "by the gateway")
	r.refused("no service", r.curl(capturedUser, to("10.20.0.77")))
	r.refused("a service of IPv4, by IPv6", r.curl(capturedUser, to("fd96::81")))
	r.refused("a name that the gateway does not have", r.curl(capturedUser, to(r.address(captureUser, "A", "none.shop.test"))))
	status := r.status(captureUser)
	for _, want := range []string{"capture:   4 virtual IPs, 10.96.0.0/16, 10.20.0.0/24, fd96::/64, but 10.96.9.0/24", fmt.Sprintf("uid %d, uid %d", captureUser, capturedUser), "table inet culvert-agent-61001"} {
		r.want("status", status, want)
	}

	// A fork storm to a dead service: each is refused.
	storm := r.as(capturedUser, "sh", "-c", `for i in $(seq 500); do nc -w 60 "$0" 80 </dev/null >/dev/null 2>&1 & done; wait`, r.address(captureUser, "A", "dead.shop.test"))
	if out, err := storm.CombinedOutput(); err != nil {
		t.Errorf("500 connections to a dead service: %v: %s", err, out)
	}
	r.want("after them", r.curl(capturedUser, to(vip4)), "by the gateway")

	// The gateway ends: refused, and never direct.
	r.gateway(os.Kill)
	for what, addr := range map[string]string{"a VIP": vip4, "a VIP of IPv6": vip6, "a range": "10.96.0.80", "a range of IPv6": "fd96::80"} {
		r.refused(what+" without a gateway", r.curl(capturedUser, to(addr)))
	}
	r.gateway = r.s.run(r.far, "gw", "gateway", captureGateway)
	testnet.Eventually(t, 2*patience, func() bool { return strings.Contains(r.curl(capturedUser, to(vip4)), "by the gateway") }, "the gateway is there again")

	// The agent is killed: all is as without it.
	kill()
	testnet.Eventually(t, patience, func() bool { return r.s.must(r.host.Command(t.Context(), "nft", "list", "tables")) == tables }, "the table has gone")
	r.want("without the agent", r.curl(capturedUser, to("10.96.0.80")), "direct")
}

// A reload changes what is captured, for connections from then on. One that was captured goes on,
// whatever becomes of its rules.
func TestAgentCaptureReload(t *testing.T) {
	t.Parallel()
	r := newCaptureRun(t)
	const gateway = "10.20.0.254:443"
	capture := func(text string, args ...any) { r.configure(captureUser, gateway, fmt.Sprintf(text, args...)) }
	r.agent(captureUser, gateway, fmt.Sprintf("{cidrs: [10.96.0.0/16], uids: [%d]}", capturedUser))
	eventually := func(what string, uid int, addr, want string) {
		t.Helper()
		testnet.Eventually(t, 2*patience, func() bool { return r.curl(uid, to(addr)) == want }, "%s is asked %s", what, want)
	}
	eventually("a range", capturedUser, "10.96.0.80", "by the gateway")
	r.want("no range yet", r.curl(capturedUser, to("fd96::80")), "direct")

	old := r.as(capturedUser, "nc", "10.96.0.80", "80")
	in, err := old.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := old.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close(); _ = old.Process.Kill(); _ = old.Wait() }()
	answers := bufio.NewReader(out)
	goesOn := func(when string) {
		t.Helper()
		if _, err := io.WriteString(in, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		answer, err := http.ReadResponse(answers, nil)
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		defer answer.Body.Close()
		body, _ := io.ReadAll(answer.Body)
		r.want(when, string(body), "by the gateway")
	}
	goesOn("a connection that is captured")

	capture(`{cidrs: ["fd96::/64"], uids: [%d]}`, capturedUser)
	eventually("a range that was added", capturedUser, "fd96::80", "by the gateway")
	r.want("a range that was taken out", r.curl(capturedUser, to("10.96.0.80")), "direct")
	goesOn("a connection to what was taken out")

	capture(`{cidrs: ["fd96::/64"], uids: [%d]}`, otherUser)
	eventually("a user who was added", otherUser, "fd96::80", "by the gateway")
	r.want("a user who was taken out", r.curl(capturedUser, to("fd96::80")), "direct")
	r.want("status", r.status(captureUser), fmt.Sprintf("fd96::/64, of uid %d", otherUser))

	// What the kernel does not take leaves the rules as they are, and is said.
	problem := func() string {
		b, _ := exec.Command("curl", "-sS", "--unix-socket", r.s.socket(fmt.Sprintf("agent%d", captureUser)), "http://localhost/metrics").CombinedOutput()
		_, value, _ := strings.Cut(string(b), "\nculvert_capture_problem ")
		return strings.SplitN(value, "\n", 2)[0]
	}
	if got := problem(); got != "0" {
		t.Errorf("culvert_capture_problem is %q, want 0", got)
	}
	capture("{cidrs: [10.96.0.0/16], cgroups: [no/such.slice]}")
	testnet.Eventually(t, patience, func() bool { return problem() == "1" }, "the metric has the problem")
	r.want("status with the problem", r.status(captureUser), "no/such.slice")
	r.want("the rules from before", r.curl(otherUser, to("fd96::80")), "by the gateway")
	r.want("no other ones", r.curl(otherUser, to("10.96.0.80")), "direct")
	goesOn("a connection beside the problem")

	// Without the section nothing is captured, and with it again all.
	capture("")
	eventually("what was captured", otherUser, "fd96::80", "direct")
	testnet.Eventually(t, patience, func() bool { return problem() == "0" && !strings.Contains(r.status(captureUser), "capture:") }, "the problem is over")
	goesOn("a connection without any rules")
	capture(`{cidrs: [10.96.0.0/16], uids: [%d]}`, capturedUser)
	eventually("what is captured again", capturedUser, "10.96.0.80", "by the gateway")
	if s := r.status(captureUser); strings.Contains(s, "restart") {
		t.Errorf("a restart is asked for: %s", s)
	}
	goesOn("a connection of the first rules")
}

// An agent that captures everything does not capture itself, whatever it asks.
func TestAgentCaptureNotItself(t *testing.T) {
	t.Parallel()
	r := newCaptureRun(t)
	r.s.run(r.far, "dns", "dns", `
dns: {listen: ["udp://10.20.0.53:53", "tcp://10.20.0.53:53"], zones: [gw.test]}
services: [{name: gw.test, ports: [443], endpoints: ["10.20.0.254:443"]}]
`)
	etc := filepath.Join("/etc/netns", r.host.Name)
	if err := os.MkdirAll(etc, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(etc) })
	if err := os.WriteFile(filepath.Join(etc, "resolv.conf"), []byte("nameserver 10.20.0.53\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	kubeconfig := filepath.Join(r.s.dir, "kube.yaml")
	if err := os.WriteFile(kubeconfig, []byte(`
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://10.20.0.254:6443"}}]
users: [{name: u, user: {token: none}}]
`), 0o644); err != nil {
		t.Fatal(err)
	}
	// What the agent sends to others, before rules lead it elsewhere.
	asked := map[string]string{
		"connect-h3":        "udp dport 443",
		"connect-h2":        "tcp dport 443",
		"the DNS upstream":  "udp dport 53",
		"DNS over TLS":      "tcp dport 853",
		"a token issuer":    "tcp dport 8443",
		"a bundle":          "tcp dport 8444",
		"PCP or NAT-PMP":    "udp dport 5351",
		"UPnP":              "udp dport 1900",
		"STUN":              "udp dport 3478",
		"Kubernetes":        "tcp dport 6443",
		"a reverse session": "tcp dport 8446",
	}
	rule := func(args ...string) { r.s.must(r.host.Command(t.Context(), "nft", args...)) }
	rule("add table inet probe")
	rule("add chain inet probe out { type filter hook output priority -150 ; }")
	own := fmt.Sprintf("add rule inet probe out meta skuid %d fib daddr type != local ct state new ", captureUser)
	rule(own + `meta mark != 0x63760001 counter comment "unmarked"`)
	for what, match := range asked {
		rule(own + fmt.Sprintf("%s counter comment %q", match, what))
	}
	r.more = fmt.Sprintf(`
cluster: laptop
identity:
  trust: {partner.test: {bundle: "https://10.20.0.254:8444/"}}
  tokens: [{issuer: "https://10.20.0.254:8443/", audience: [culvert], id: "{sub}"}]
  keys: {me: {certificateFile: me.crt, keyFile: me.key}}
nat: {ports: ["0.0.0.0:8447"], router: 10.20.0.254, stunServers: ["10.20.0.254:3478"]}
listeners: [{address: "0.0.0.0:8447", tls: {certificateFile: gw.crt, keyFile: gw.key, clientCAFile: ca.crt}}]
kubernetes: {kubeconfig: %q, discovery: {}}
reverse: {to: "10.20.0.254:8446", key: me, caFile: ca.crt, expose: [{name: mine.test, to: "127.0.0.1:1"}]}
`, kubeconfig)
	r.agent(captureUser, "gw.test:443", `{cidrs: [0.0.0.0/0, "::/0"], uids: [own, 61009]}`)
	r.want("a range", r.curl(capturedUser, to("10.96.0.80")), "by the gateway")
	r.want("a range of IPv6", r.curl(capturedUser, to("fd96::80")), "by the gateway")
	r.far.Drop(t, "udp dport 443")
	testnet.Eventually(t, time.Minute, func() bool {
		return strings.Contains(r.curl(capturedUser, to("10.96.0.80")), "by the gateway")
	}, "the next carrier is used")
	missing := ""
	t.Cleanup(func() {
		if t.Failed() {
			t.Log("not asked: ", missing)
		}
	})
	testnet.Eventually(t, time.Minute, func() bool {
		_, _ = r.host.Command(t.Context(), "dig", "+short", "-p", fmt.Sprint(5300+captureUser%1000), "@127.0.0.54", "other.example").CombinedOutput()
		out := r.s.must(r.host.Command(t.Context(), "nft", "list", "table", "inet", "probe"))
		for what := range asked {
			if !sent(out, what) {
				missing = what + "\n" + out
				return false
			}
		}
		return true
	}, "every way to others is taken")
	if out := r.s.must(r.host.Command(t.Context(), "nft", "list", "table", "inet", "probe")); sent(out, "unmarked") {
		t.Errorf("the agent has sent packets without its mark:\n%s", out)
	}
}

// sent reports whether a rule has counted a packet.
func sent(rules, comment string) bool {
	for line := range strings.Lines(rules) {
		if strings.Contains(line, fmt.Sprintf("comment %q", comment)) {
			return !strings.Contains(line, "packets 0 ")
		}
	}
	return false
}

// The agents of two users have a table each, and the programs of one never have the identity of
// the other. A key that has expired captures, and is refused.
func TestAgentCaptureOfTwoUsers(t *testing.T) {
	t.Parallel()
	r := newCaptureRun(t)
	const other = captureUser + 1
	before := r.as(captureUser, "/usr/bin/python3", "-c", `import socket, sys
s = socket.create_connection(("10.96.0.80", 80)); print("open", flush=True); sys.stdin.readline()
s.sendall(b"GET / HTTP/1.0\r\n\r\n"); print(s.makefile().read())`)
	in, err := before.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	pipe, err := before.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := before.Start(); err != nil {
		t.Fatal(err)
	}
	out := bufio.NewReader(pipe)
	if line, err := out.ReadString('\n'); err != nil || line != "open\n" {
		t.Fatalf("a connection before the agents: %q, %v", line, err)
	}
	const capture = `{cidrs: [10.96.0.0/16]}`
	kill := r.agent(captureUser, "10.20.0.254:443", capture)
	r.issue("old", testca.Options{SPIFFEID: "spiffe://example.test/old", Usage: testca.ClientOnly, NotBefore: time.Now().Add(-2 * time.Hour), TTL: time.Hour})
	r.key = "old"
	r.agent(other, "10.20.0.254:443", capture)
	r.want("the first", r.curl(captureUser, to("10.96.0.80")), "by the gateway")
	r.refused("with a certificate that has expired", r.curl(other, to("10.96.0.80")))
	r.want("a user without an agent", r.curl(otherUser, to("10.96.0.80")), "direct")
	_, _ = in.Write([]byte("\n"))
	rest, _ := io.ReadAll(out)
	_ = before.Wait()
	r.want("the connection from before", string(rest), "direct")
	kill()
	testnet.Eventually(t, patience, func() bool { return strings.Contains(r.curl(captureUser, to("10.96.0.80")), "direct") }, "the first is not captured any more")
	r.refused("the second still", r.curl(other, to("10.96.0.80")))
}

// Programs are captured by their cgroup, whatever their user, and refused where the agent has no
// descriptors left.
func TestAgentCaptureOfCgroup(t *testing.T) {
	t.Parallel()
	r := newCaptureRun(t)
	root := "/sys/fs/cgroup"
	if _, err := os.Stat(root + "/cgroup.procs"); err != nil {
		root += "/unified"
	}
	dir, err := os.MkdirTemp(root, "culvert-agent")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) })
	r.agent(captureUser, "10.20.0.254:443", fmt.Sprintf("{cgroups: [%s]}", filepath.Base(dir)), "sh", "-c", `ulimit -n 200; exec "$0" "$@"`)
	inside := func(script string, args ...string) string {
		// ip netns exec hides the cgroups.
		args = append([]string{"-c", "echo $$ >" + dir + "/cgroup.procs; exec ip netns exec " + r.host.Name + " " + script}, args...)
		out, _ := exec.CommandContext(t.Context(), "sh", args...).CombinedOutput()
		return string(out)
	}
	curl := "curl -sS --max-time 60 "
	r.want("in the cgroup", inside(curl+to("10.96.0.80")), "by the gateway")
	r.refused("in the cgroup, no service", inside(curl+to("10.20.0.77")))
	r.want("in another one", r.curl(captureUser, to("10.96.0.80")), "direct")
	got := inside("/usr/bin/python3 -c '" + `import socket
held = []
refused = 0
for i in range(300):
    try:
        s = socket.create_connection(("10.96.0.80", 80), timeout=60)
        s.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        if b"by the gateway" in s.recv(4096):
            held.append(s)
            continue
    except ConnectionError:
        pass
    refused += 1
print(len(held), "held,", refused, "refused")` + "'")
	var held, refused int
	if n, _ := fmt.Sscanf(got, "%d held, %d refused", &held, &refused); n != 2 || held < 10 || refused < 10 {
		t.Errorf("with few descriptors: %s", got)
	}
	testnet.Eventually(t, patience, func() bool { return strings.Contains(inside(curl+to("10.96.0.80")), "by the gateway") }, "connections are taken again")
}
