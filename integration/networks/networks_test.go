//go:build linux && netns

package networks

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

const patience = time.Minute // until what must come has come, on a busy machine

// culvert is the path of the binary under test.
var culvert string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "culvert-networks-")
	if err != nil {
		panic(err)
	}
	culvert = filepath.Join(dir, "culvert")
	cmd := exec.Command("go", "build", buildFlag, "-ldflags", "-s -w", "-o", culvert, "./cmd/culvert")
	cmd.Dir = filepath.Join("..", "..")
	if out, err := cmd.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "networks: build culvert: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// What all three configurations say of the world.
const world = `
networks:
  - name: east
    cidrs: [10.1.0.0/16]
    gateways:
      - {address: "10.1.0.2:443", public: "192.0.2.1:443", check: {kind: tcp, interval: 1s, timeout: 500ms}}
      - {address: "10.1.0.3:443", public: "192.0.2.2:443", check: {kind: tcp, interval: 1s, timeout: 500ms}}
  - name: west
    cidrs: [10.2.0.0/16]
    gateways:
      - {address: "10.2.0.2:443", public: "198.51.100.1:443"}
services:
  - name: web.example.com
    ports: [443]
    endpoints: ["10.1.5.1:443"]
  - name: both.example.com
    ports: [443]
    endpoints: ["10.1.6.1:443", "10.2.6.1:443"]
  - mesh: {service: db, cluster: one}
    exported: true
    headless: true
    ports: [{port: 443, name: https}]
    endpoints:
      - {address: "10.1.5.11:443", name: db-0}
      - {address: "10.1.5.12:443", name: db-1}
      - {address: "10.1.5.13:443", name: db-2}
`

// A site is three networks: east and west, which know each other's gateways only,
// and the world between them.
type site struct {
	t               *testing.T
	dir             string
	east, west, out *netns.NS
	resolver        map[*netns.NS]string // the DNS server of each
}

func newSite(t *testing.T) *site {
	s := &site{t: t, dir: t.TempDir(), east: netns.New(t, "east"), west: netns.New(t, "west"), out: netns.New(t, "out")}
	s.resolver = map[*netns.NS]string{s.east: "10.1.0.53", s.west: "10.2.0.53", s.out: "203.0.113.53"}
	hub := netns.New(t, "hub")
	for _, n := range []struct {
		ns       *netns.NS
		own, hub string
		more     []string
	}{
		{s.east, "192.0.2.1", "192.0.2.254", []string{"192.0.2.2", "10.1.0.2", "10.1.0.3", "10.1.0.53", "10.1.0.99", "10.1.5.1", "10.1.5.11", "10.1.5.12", "10.1.5.13", "10.1.6.1"}},
		{s.west, "198.51.100.1", "198.51.100.254", []string{"10.2.0.2", "10.2.0.53", "10.2.0.99", "10.2.6.1"}},
		{s.out, "203.0.113.1", "203.0.113.254", []string{"203.0.113.53"}},
	} {
		dev, _ := netns.Link(t, n.ns, n.own+"/24", hub, n.hub+"/24")
		n.ns.Route(t, "default", n.hub)
		for _, a := range n.more {
			on, bits := "lo", "/32"
			if strings.HasPrefix(a, "192.0.2.") {
				on, bits = dev, "/24"
			}
			s.must(n.ns.Command(t.Context(), "ip", "addr", "add", a+bits, "dev", on))
		}
	}
	s.must(hub.Command(t.Context(), "sysctl", "-q", "-w", "net.ipv4.ip_forward=1"))
	return s
}

func (s *site) must(cmd *exec.Cmd) string {
	s.t.Helper()
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, out)
	}
	return string(out)
}

// start runs culvert in a network, with the world and what is its own. The
// returned function ends it, as the end of the test does.
func (s *site) start(ns *netns.NS, name, sub, own string) (stop func(os.Signal)) {
	s.t.Helper()
	return s.run(ns, name, sub, own+world)
}

// run is start with a whole configuration.
func (s *site) run(ns *netns.NS, name, sub, content string) (stop func(os.Signal)) {
	s.t.Helper()
	config := filepath.Join(s.dir, name+".yaml")
	if err := os.WriteFile(config, []byte(content), 0o600); err != nil {
		s.t.Fatal(err)
	}
	// Not ended by the context of the test, which is over before Cleanup.
	stop = s.background(name, ns.Command(context.Background(), culvert, sub, "--config", config, "--admin", "unix:"+s.socket(name)))
	testnet.Eventually(s.t, patience, func() bool {
		return ready(s.socket(name))
	}, "%s is ready", name)
	return stop
}

// ready reports whether the program with an admin socket is: its listeners and ports are open.
func ready(socket string) bool {
	client := &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	resp, err := client.Get("http://localhost/readyz")
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// background starts a program, and keeps all that it says in the log of a name. The returned
// function ends it, as the end of the test does.
func (s *site) background(name string, cmd *exec.Cmd) (stop func(os.Signal)) {
	s.t.Helper()
	log, err := os.OpenFile(s.logFile(name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	running := true
	stop = func(sig os.Signal) {
		if !running {
			return
		}
		running = false
		_ = cmd.Process.Signal(sig)
		<-ended
		report(s.t, name, s.logged(name))
	}
	s.t.Cleanup(func() { stop(syscall.SIGKILL) })
	return stop
}

// report tells of a race in what a program said that has ended, and shows it all
// where the test failed.
func report(t *testing.T, name, said string) {
	t.Helper()
	if strings.Contains(said, "DATA RACE") {
		t.Errorf("%s has a race", name)
	}
	if t.Failed() {
		t.Logf("%s said:\n%s", name, said)
	}
}

func (s *site) logFile(name string) string { return filepath.Join(s.dir, name+".log") }

// logged returns what a program has logged until now.
func (s *site) logged(name string) string {
	s.t.Helper()
	log, err := os.ReadFile(s.logFile(name))
	if err != nil {
		s.t.Fatal(err)
	}
	return string(log)
}

func (s *site) socket(name string) string { return filepath.Join(s.dir, name+".sock") }

func gateway(network string, listen ...string) string {
	out := "network: " + network + "\ndrain: {delay: 0s, timeout: 1s}\nlisteners:\n"
	for _, l := range listen {
		out += fmt.Sprintf("  - {address: %q, protocols: [sni, connect, socks5]}\n", l)
	}
	return out
}

func resolver(network, address string) string {
	own := fmt.Sprintf("dns:\n  listen: [\"udp://%s:53\", \"tcp://%s:53\"]\n  ttl: 1s\n", address, address)
	if network != "" {
		own = "network: " + network + "\n" + own
	}
	return own
}

// dig returns the addresses that dig prints in a network, sorted.
func (s *site) dig(ns *netns.NS, question ...string) string {
	s.t.Helper()
	args := append([]string{"+short", "+tries=3", "+time=10", "@" + s.resolver[ns]}, question...)
	lines := strings.Fields(s.must(ns.Command(s.t.Context(), "dig", args...)))
	slices.Sort(lines)
	return strings.Join(lines, " ")
}

// curl returns what curl prints in a network, where names mean what the
// network's resolver says.
func (s *site) curl(ns *netns.NS, args ...string) (string, error) {
	s.t.Helper()
	file := func(name string) string { return filepath.Join(s.dir, name) }
	return s.resolving(ns, "", append([]string{"curl", "-sS", "-m", "60", "--cacert", file("ca.crt"), "--cert", file("client.crt"), "--key", file("client.key")}, args...)...)
}

// resolving runs a program in a network, with a resolv.conf that has the network's
// resolver and more lines.
func (s *site) resolving(ns *netns.NS, more string, args ...string) (string, error) {
	s.t.Helper()
	conf := filepath.Join(s.dir, s.resolver[ns]+".conf")
	if err := os.WriteFile(conf, []byte("nameserver "+s.resolver[ns]+"\noptions timeout:10 attempts:3\n"+more), 0o644); err != nil {
		s.t.Fatal(err)
	}
	// A mount namespace of its own: nobody else's resolver is touched.
	const script = `mount --bind "$1" /etc/resolv.conf && shift && exec "$@"`
	out, err := ns.Command(s.t.Context(), "unshare", append([]string{"-m", "sh", "-c", script, "sh", conf}, args...)...).CombinedOutput()
	return string(out), err
}

// serve has a service of mutual TLS at each address, which says who it is and
// whom it saw.
func (s *site) serve() {
	s.t.Helper()
	ca, err := testca.New("example.test", nil)
	if err != nil {
		s.t.Fatal(err)
	}
	issue := func(o testca.Options) *testca.Pair {
		p, err := ca.Issue(o)
		if err != nil {
			s.t.Fatal(err)
		}
		return p
	}
	if err := ca.Save(s.dir); err != nil {
		s.t.Fatal(err)
	}
	if err := issue(testca.Options{SPIFFEID: "spiffe://example.test/client", Usage: testca.ClientOnly}).Save(s.dir, "client"); err != nil {
		s.t.Fatal(err)
	}
	server := issue(testca.Options{SPIFFEID: "spiffe://example.test/server", DNSNames: []string{
		"web.example.com", "both.example.com", "db.one", "*.db.one", "*.db.default.svc.one.mesh.internal", "*.one.db.default.svc.clusterset.local"}})
	for _, at := range []struct {
		ns   *netns.NS
		addr string
	}{{s.east, "10.1.5.1"}, {s.east, "10.1.5.11"}, {s.east, "10.1.5.12"}, {s.east, "10.1.5.13"}, {s.east, "10.1.6.1"}, {s.west, "10.2.6.1"}} {
		ln, err := at.ns.Listen("tcp", at.addr+":443")
		if err != nil {
			s.t.Fatal(err)
		}
		srv := &http.Server{
			ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo), // checks that leave after the handshake
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				id, _ := testca.PeerID(r.TLS.PeerCertificates[0])
				fmt.Fprintf(w, "%s saw %s ask for %s", at.addr, id, r.Host)
			}),
		}
		go func() { _ = srv.Serve(tls.NewListener(ln, server.ServerConfig())) }()
		s.t.Cleanup(func() { _ = srv.Close() })
	}
}

// One name is asked for from two networks and from outside of both, means what
// can be reached from there, and leads to the same service, which sees the
// client's certificate. A gateway that dies is not meant any more.
func TestNamesFromThreeNetworks(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.serve()
	killFirst := s.start(s.east, "east-1", "gateway", gateway("east", "10.1.0.2:443", "192.0.2.1:443"))
	s.start(s.east, "east-2", "gateway", gateway("east", "10.1.0.3:443", "192.0.2.2:443"))
	s.start(s.west, "west", "gateway", gateway("west", "10.2.0.2:443", "198.51.100.1:443"))
	s.start(s.east, "east-dns", "dns", resolver("east", "10.1.0.53"))
	s.start(s.west, "west-dns", "dns", resolver("west", "10.2.0.53"))
	s.start(s.out, "out-dns", "dns", resolver("", "203.0.113.53"))

	t.Run("dig", func(t *testing.T) {
		for _, c := range []struct {
			ns             *netns.NS
			question, want string
		}{
			{s.east, "both.example.com A", "10.1.6.1"},
			{s.west, "both.example.com A", "10.2.6.1"},
			{s.out, "both.example.com A", "192.0.2.1 192.0.2.2 198.51.100.1"},
			{s.east, "web.example.com A", "10.1.5.1"},
			{s.west, "web.example.com A", "192.0.2.1 192.0.2.2"},
			{s.out, "web.example.com A", "192.0.2.1 192.0.2.2"},
			{s.east, "db.one A", "10.1.5.11 10.1.5.12 10.1.5.13"},
			{s.east, "db-1.db.one A", "10.1.5.12"},
			{s.west, "db-1.db.one A", "192.0.2.1 192.0.2.2"},
			{s.east, "_https._tcp.db.one SRV", "0 0 0 1 1 1 443 443 443 db-0.db.one. db-1.db.one. db-2.db.one."},
			{s.east, "-x 10.1.5.12", "db-1.db.default.svc.one.mesh.internal."},
			{s.out, "dns-version.clusterset.local TXT", `"1.0.0"`},
			{s.out, "one.db.default.svc.clusterset.local A", ""},
			{s.out, "nobody.default.svc.one.mesh.internal A", ""},
		} {
			if got := s.dig(c.ns, strings.Fields(c.question)...); got != c.want {
				t.Errorf("%s in %s: %q, want %q", c.question, c.ns.Name, got, c.want)
			}
		}
	})

	t.Run("curl", func(t *testing.T) {
		const as = " saw spiffe://example.test/client ask for "
		for _, c := range []struct {
			ns        *netns.NS
			name, who string
			proxy     []string
		}{
			{s.east, "web.example.com", "10.1.5.1", nil},
			{s.west, "web.example.com", "10.1.5.1", nil},
			{s.out, "web.example.com", "10.1.5.1", nil},
			{s.east, "both.example.com", "10.1.6.1", nil},
			{s.west, "both.example.com", "10.2.6.1", nil},

			// Each endpoint through one port of one gateway.
			{s.west, "db-0.db.one", "10.1.5.11", nil},
			{s.west, "db-1.db.one", "10.1.5.12", nil},
			{s.west, "db-2.db.one", "10.1.5.13", nil},
			{s.west, "db-0.db.one", "10.1.5.11", []string{"-x", "http://192.0.2.1:443"}},
			{s.west, "1.db.default.svc.one.mesh.internal", "10.1.5.12", []string{"-x", "http://192.0.2.1:443"}},
			{s.west, "db-2.one.db.default.svc.clusterset.local", "10.1.5.13", []string{"-x", "http://192.0.2.1:443"}},
			{s.west, "db-0.db.one", "10.1.5.11", []string{"--socks5-hostname", "192.0.2.1:443"}},
			{s.west, "db-1.one.db.default.svc.clusterset.local", "10.1.5.12", []string{"--socks5-hostname", "192.0.2.1:443"}},
			{s.west, "10-1-5-13.db.one", "10.1.5.13", []string{"--socks5-hostname", "192.0.2.1:443"}},

			// Who asks the wrong gateway is passed on to the right one.
			{s.out, "web.example.com", "10.1.5.1", []string{"--connect-to", "::198.51.100.1:443"}},
		} {
			got, err := s.curl(c.ns, append([]string{"https://" + c.name + "/"}, c.proxy...)...)
			if want := c.who + as + c.name; err != nil || got != want {
				t.Errorf("%s in %s by %q: %q, %v, want %q", c.name, c.ns.Name, c.proxy, got, err, want)
			}
		}
	})

	// As a pod has it: short names are tried with each suffix first.
	t.Run("search list", func(t *testing.T) {
		const search = "search default.svc.one.mesh.internal svc.one.mesh.internal one.mesh.internal\noptions ndots:5\n"
		for _, c := range []struct{ name, want string }{
			{"db-1.db", "10.1.5.12"}, {"db-1.db.default", "10.1.5.12"}, {"db-2.db.default.svc", "10.1.5.13"},
			{"web.example.com", "10.1.5.1"}, {"db-0.db.one", "10.1.5.11"}, {"nobody", ""}, {"nobody.example.com", ""},
		} {
			out, err := s.resolving(s.east, search, "getent", "ahostsv4", c.name)
			got, _, _ := strings.Cut(out, " ")
			if got != c.want || (err == nil) != (c.want != "") {
				t.Errorf("%s: %q, %v, want %q", c.name, out, err, c.want)
			}
		}
	})

	t.Run("a gateway dies", func(t *testing.T) {
		testnet.Eventually(t, patience, func() bool {
			out, err := exec.Command(culvert, "status", "--admin", "unix:"+s.socket("out-dns")).Output()
			return err == nil && bytes.Contains(out, []byte("192.0.2.1:443")) && s.dig(s.out, "web.example.com") == "192.0.2.1 192.0.2.2"
		}, "both gateways are checked and well")
		died := time.Now()
		killFirst(syscall.SIGKILL)
		testnet.Eventually(t, patience, func() bool { return s.dig(s.out, "web.example.com") == "192.0.2.2" }, "the dead gateway has left the answers")
		took := time.Since(died)
		t.Logf("after %v the dead gateway is out of the answers", took.Round(time.Millisecond))
		if limit := testnet.Deadline(2 * time.Second); took > limit {
			t.Errorf("it took %v, want less than %v", took, limit)
		}
		got, err := s.curl(s.out, "https://web.example.com/")
		if err != nil || !strings.HasPrefix(got, "10.1.5.1 saw") {
			t.Errorf("the next connection: %q, %v", got, err)
		}
		for range 30 {
			if got := s.dig(s.out, "web.example.com"); got != "192.0.2.2" {
				t.Fatalf("after that the answer is %q", got)
			}
		}
		s.start(s.east, "east-1", "gateway", gateway("east", "10.1.0.2:443", "192.0.2.1:443"))
		testnet.Eventually(t, patience, func() bool { return s.dig(s.out, "web.example.com") == "192.0.2.1 192.0.2.2" }, "the gateway is back in the answers")
	})
}
