//go:build linux && netns

package networks

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

const (
	found    = 10 * time.Second // until both sides know that the path between them is dead
	comeBack = 2 * time.Minute  // until a session is there again
)

// The services of a hiddenSite, and the ports that they listen at.
const (
	camName, camPort     = "cam.edge.example", "8441"   // nginx, by culvert expose
	shellName, shellPort = "shell.edge.example", "8442" // openssl s_server, by ssh -R
)

// A hiddenSite has two gateways in the internet, which is 11.0.0.0/8, and a host that nobody
// there can connect to.
type hiddenSite struct {
	*site
	ca                *testca.CA
	host, hub, client *netns.NS
	gw                [2]*netns.NS
	stop              [2]func(os.Signal) // the gateways
	outer             *netns.NS          // the router that leads to the hub
	wan               string             // its interface there
	address           string             // where the client would dial the host, were it not hidden
}

// A kind is a kind of NAT.
type kind struct {
	name    string
	router  func(ns *netns.NS, t testing.TB, outside string)
	between string // of a second NAT in front of the first one: the first three bytes of the addresses between both
}

var kinds = []kind{
	{name: "a firewall without NAT", router: (*netns.NS).Firewall},
	{name: "port-restricted", router: (*netns.NS).Masquerade},
	{name: "symmetric", router: (*netns.NS).MasqueradeRandomly},
	{name: "double", router: (*netns.NS).Masquerade, between: "100.64.0"},
}

func newHiddenSite(t *testing.T, k kind) *hiddenSite {
	t.Helper()
	s := &hiddenSite{site: &site{t: t, dir: t.TempDir()}, host: netns.New(t, "host"), hub: netns.New(t, "hub"), client: netns.New(t, "client"), outer: netns.New(t, "router")}
	s.gw = [2]*netns.NS{netns.New(t, "gw1"), netns.New(t, "gw2")}
	s.must(s.hub.Command(t.Context(), "sysctl", "-q", "-w", "net.ipv4.ip_forward=1"))
	for i, ns := range []*netns.NS{s.outer, s.gw[0], s.gw[1], s.client} {
		dev, _ := netns.Link(t, ns, fmt.Sprintf("11.0.%d.1/24", i), s.hub, fmt.Sprintf("11.0.%d.254/24", i))
		ns.Route(t, "default", fmt.Sprintf("11.0.%d.254", i))
		if i == 0 {
			s.wan = dev
		}
	}
	k.router(s.outer, t, s.wan)
	inner, lan, public := s.outer, "192.168.1", "11.0.0.1"
	switch {
	case k.between != "":
		inner = netns.New(t, "inner")
		dev, _ := netns.Link(t, inner, k.between+".2/24", s.outer, k.between+".1/24")
		inner.Route(t, "default", k.between+".1")
		k.router(inner, t, dev)
	case k.name == kinds[0].name:
		lan, public = "11.0.9", "11.0.9.10"
		s.hub.Route(t, "11.0.9.0/24", "11.0.0.1")
	}
	netns.Link(t, s.host, lan+".10/24", inner, lan+".1/24")
	s.host.Route(t, "default", lan+".1")
	s.address = public

	var err error
	if s.ca, err = testca.New("corp.example", nil); err != nil {
		t.Fatal(err)
	}
	if err := s.ca.Save(s.dir); err != nil {
		t.Fatal(err)
	}
	s.issue(s.ca, "gw", testca.Options{SPIFFEID: "spiffe://corp.example/ns/gw/sa/gw", DNSNames: []string{"gw.example"}})
	s.issue(s.ca, "edge", testca.Options{SPIFFEID: "spiffe://corp.example/ns/edge/sa/cam", Usage: testca.ClientOnly})
	s.issue(s.ca, "thief", testca.Options{SPIFFEID: "spiffe://corp.example/ns/edge/sa/thief", Usage: testca.ClientOnly})
	s.issue(s.ca, "service", testca.Options{SPIFFEID: "spiffe://corp.example/ns/edge/sa/service", DNSNames: []string{"*.edge.example"}})
	s.issue(s.ca, "client", testca.Options{SPIFFEID: "spiffe://corp.example/client", Usage: testca.ClientOnly})
	other, err := testca.New("other.example", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.issue(other, "stranger", testca.Options{SPIFFEID: "spiffe://other.example/client", Usage: testca.ClientOnly})
	known := ""
	for i, name := range []string{"gw1.key", "gw2.key", "alice"} {
		s.must(s.host.Command(t.Context(), "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", s.file(name)))
		if i < 2 {
			known += fmt.Sprintf("[11.0.%d.1]:443 %s", i+1, s.read(name+".pub"))
		}
	}
	s.write("known_hosts", known)
	s.write("authorized_keys", s.read("alice.pub"))
	for i := range s.gw {
		s.startGateway(i)
	}
	s.serveNginx()
	s.background("s_server", s.host.Command(context.Background(), "openssl", "s_server", "-quiet", "-www", "-accept", "127.0.0.1:"+shellPort,
		"-cert", s.file("service.crt"), "-key", s.file("service.key"), "-CAfile", s.file("ca.crt"), "-Verify", "2", "-verify_return_error"))
	return s
}

func (s *hiddenSite) file(name string) string { return filepath.Join(s.dir, name) }

func (s *hiddenSite) read(name string) string {
	s.t.Helper()
	b, err := os.ReadFile(s.file(name))
	if err != nil {
		s.t.Fatal(err)
	}
	return string(b)
}

func (s *hiddenSite) write(name, text string) (path string) {
	s.t.Helper()
	if err := os.WriteFile(s.file(name), []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	return s.file(name)
}

func (s *hiddenSite) issue(ca *testca.CA, name string, o testca.Options) {
	s.t.Helper()
	p, err := ca.Issue(o)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := p.Save(s.dir, name); err != nil {
		s.t.Fatal(err)
	}
}

// startGateway starts one of the gateways, or starts it again with its state.
func (s *hiddenSite) startGateway(i int) {
	s.t.Helper()
	s.stop[i] = s.run(s.gw[i], fmt.Sprintf("gw%d", i+1), "gateway", fmt.Sprintf(`cluster: gw%[1]d
drain: {delay: 0s, timeout: 1s}
listeners:
  - address: "11.0.%[1]d.1:443"
    protocols: [sni, ssh]
    ssh: {hostKeyFile: %[2]s/gw%[1]d.key, authorizedKeysFile: %[2]s/authorized_keys, names: [gw%[1]d.example]}
    tls: {names: [gw.example], key: gw, trust: corp.example, protocols: [connect, connect-h2, websocket]}
  - {address: "udp://11.0.%[1]d.1:443", tls: {key: gw, trust: corp.example}}
  - {address: "udp://11.0.%[1]d.1:3478", stun: true}
  - {address: "11.0.%[1]d.1:15008", tls: {key: gw, trust: corp.example, protocols: [hbone]}}
identity:
  keys: {gw: {certificateFile: %[2]s/gw.crt, keyFile: %[2]s/gw.key}}
  trust: {corp.example: {caFile: %[2]s/ca.crt}}
site: {key: gw, trust: corp.example, state: %[2]s/state%[1]d}
dns: {listen: ["udp://11.0.%[1]d.1:53"]}
policies:
  - name: edge
    verb: register
    action: allow
    targets: {names: ["*.edge.example"]}
    rules: [{sources: [{users: [alice]}, {spiffe: ["spiffe://corp.example/ns/edge/*"]}]}]
services: []
`, i+1, s.dir))
}

// serveNginx has a service on the hidden host that wants a client certificate, and says whose
// it was.
func (s *hiddenSite) serveNginx() {
	s.t.Helper()
	config := s.write("nginx.conf", fmt.Sprintf(`daemon off;
master_process off;
pid %[1]s/nginx.pid;
error_log stderr warn;
events {}
http {
	access_log off;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	server {
		listen 127.0.0.1:%[2]s ssl;
		ssl_certificate %[1]s/service.crt;
		ssl_certificate_key %[1]s/service.key;
		ssl_client_certificate %[1]s/ca.crt;
		ssl_verify_client on;
		location / { return 200 "$ssl_server_name saw $ssl_client_serial\n"; }
	}
}
`, s.dir, camPort))
	s.background("nginx", s.host.Command(context.Background(), "nginx", "-p", s.dir, "-e", "stderr", "-c", config))
}

// expose runs culvert expose on the hidden host, by both gateways.
func (s *hiddenSite) expose(name string, more ...string) (stop func(os.Signal)) {
	s.t.Helper()
	return s.background(name, s.host.Command(context.Background(), culvert, s.exposing("edge", more...)...))
}

func (s *hiddenSite) exposing(who string, more ...string) []string {
	args := append([]string{"expose", camName, "--to", "127.0.0.1:" + camPort, "--cert", s.file(who + ".crt"), "--key", s.file(who + ".key"), "--ca", s.file("ca.crt")}, more...)
	if slices.Contains(more, "hbone") { // which has no names
		args = append(args, "--gateway-id", "spiffe://corp.example/ns/gw/sa/gw")
	} else {
		args = append(args, "--server-name", "gw.example")
	}
	if !slices.Contains(more, "--via") {
		args = append(args, "--via", "11.0.1.1", "--via", "11.0.2.1")
	}
	return args
}

// ssh runs ssh -R on the hidden host, again and again, by one gateway.
func (s *hiddenSite) ssh(i int) {
	s.t.Helper()
	cmd := s.host.Command(context.Background(), "autossh", "-M", "0", "-F", "/dev/null", "-N", "-i", s.file("alice"), "-l", "anybody", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes",
		"-o", "UserKnownHostsFile="+s.file("known_hosts"), "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=2", "-o", "ConnectTimeout=3",
		"-R", shellName+":443:127.0.0.1:"+shellPort, "-p", "443", fmt.Sprintf("11.0.%d.1", i+1))
	cmd.Env = append(os.Environ(), "AUTOSSH_GATETIME=0", "AUTOSSH_POLL=1", "AUTOSSH_FIRST_POLL=1")
	stop := s.background(fmt.Sprintf("autossh-%d", i+1), cmd)
	s.t.Cleanup(func() { stop(syscall.SIGTERM) }) // which it passes on
}

// ask returns what the client hears of a name at a gateway, with somebody's certificate.
func (s *hiddenSite) ask(i int, name, who string) (string, error) {
	out, err := s.client.Command(s.t.Context(), "curl", "-sS", "-m", "10", "--cacert", s.file("ca.crt"), "--cert", s.file(who+".crt"), "--key", s.file(who+".key"),
		"--connect-to", fmt.Sprintf("::11.0.%d.1:443", i+1), "https://"+name+"/").CombinedOutput()
	return string(out), err
}

// reached waits until both gateways lead the client to a name, with its certificate from end
// to end.
func (s *hiddenSite) reached(d time.Duration, name string) {
	s.t.Helper()
	want := "Verify return code: 0 (ok)"
	if name == camName {
		want = fmt.Sprintf("%s saw %s\n", name, s.serial())
	}
	for i := range s.gw {
		var last struct{ answer string }
		testnet.Eventually(s.t, d, func() bool {
			last.answer, _ = s.ask(i, name, "client")
			return strings.Contains(last.answer, want)
		}, "%s is reached by gateway %d; the last answer is %q", name, i+1, &last)
	}
}

// serial returns that of the client's certificate, as nginx writes it.
func (s *hiddenSite) serial() string {
	s.t.Helper()
	out := s.must(s.client.Command(s.t.Context(), "openssl", "x509", "-noout", "-serial", "-in", s.file("client.crt")))
	return strings.TrimPrefix(strings.TrimSpace(out), "serial=")
}

// sessions returns the lines of culvert connectors at a gateway.
func (s *hiddenSite) sessions(i int) string {
	s.t.Helper()
	return s.must(s.gw[i].Command(s.t.Context(), culvert, "connectors", "-o", "json", "--admin", "unix:"+s.socket(fmt.Sprintf("gw%d", i+1))))
}

// left returns when sessions have ended at a gateway, as its log says.
func (s *hiddenSite) left(i int) (all []time.Time) {
	s.t.Helper()
	for line := range strings.Lines(s.logged(fmt.Sprintf("gw%d", i+1))) {
		if !strings.Contains(line, `msg="connector left"`) {
			continue
		}
		text, _, _ := strings.Cut(strings.TrimPrefix(line, "time="), " ")
		at, err := time.Parse(time.RFC3339Nano, text)
		if err != nil {
			s.t.Fatalf("the line %q has no time: %v", line, err)
		}
		all = append(all, at)
	}
	return all
}

// A service behind each kind of NAT, to which nothing is mapped, is reached by name with a
// client certificate from end to end: an nginx by culvert expose, an openssl by ssh -R.
func TestHiddenServices(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			s := newHiddenSite(t, k)
			for _, port := range []string{camPort, shellPort, "443"} {
				if out, err := s.client.Command(t.Context(), "nc.openbsd", "-z", "-w", "1", s.address, port).CombinedOutput(); err == nil {
					t.Fatalf("the host is not hidden: port %s is open: %s", port, out)
				}
			}
			for i := range s.gw {
				s.ssh(i)
			}
			carriers := []string{"connect"}
			if k.name == "port-restricted" {
				carriers = []string{"connect", "connect-h2", "connect-h3", "websocket", "hbone"}
			}
			for _, carrier := range carriers {
				more := []string{"--protocol", carrier}
				if carrier == "hbone" {
					more = append(more, "--via", "11.0.1.1:15008", "--via", "11.0.2.1:15008")
				}
				stop := s.expose("expose-"+carrier, more...)
				s.reached(comeBack, camName)
				for i := range s.gw {
					if got, err := s.ask(i, camName, "stranger"); !strings.Contains(got, "400") && err == nil {
						t.Errorf("%s: with a certificate of another CA: %q, %v", carrier, got, err)
					}
				}
				stop(syscall.SIGINT)
			}
			s.reached(comeBack, shellName)
			if strings.Contains(s.logged("gw1"), "invalid") {
				t.Error("a line of the log has an endpoint that is none")
			}
		})
	}
}

// What is behind a NAT has its names again after the NAT has another address, the path was
// dead without a sign, or a gateway begins again; with one of two gateways killed, requests go
// on by the other one.
func TestHiddenServicesComeBack(t *testing.T) {
	t.Parallel()
	s := newHiddenSite(t, kinds[1])
	s.expose("expose")
	for i := range s.gw {
		s.ssh(i)
	}
	all := func(t *testing.T) {
		t.Helper()
		s.reached(comeBack, camName)
		s.reached(comeBack, shellName)
	}
	all(t)

	t.Run("another address of the NAT", func(t *testing.T) {
		s.must(s.outer.Command(t.Context(), "ip", "addr", "del", "11.0.0.1/24", "dev", s.wan))
		s.must(s.outer.Command(t.Context(), "ip", "addr", "add", "11.0.0.2/24", "dev", s.wan))
		s.must(s.outer.Command(t.Context(), "ip", "route", "replace", "default", "via", "11.0.0.254"))
		testnet.Eventually(t, comeBack, func() bool {
			return strings.Contains(s.sessions(0), "11.0.0.2") && !strings.Contains(s.sessions(0), "11.0.0.1")
		}, "the sessions are by the other address")
		all(t)
	})
	t.Run("a path that dies without a sign", func(t *testing.T) {
		lost := strings.Count(s.logged("expose"), "no session")
		left := [2]int{}
		for i := range left {
			left[i] = len(s.left(i))
		}
		s.host.Drop(t, "ip saddr 11.0.0.0/16")
		for i := range s.gw {
			s.gw[i].Drop(t, "ip saddr 11.0.0.0/24")
		}
		began := time.Now()
		for i := range s.gw {
			testnet.Eventually(t, comeBack, func() bool { return !strings.Contains(s.sessions(i), `"since"`) }, "gateway %d has found it", i+1)
		}
		testnet.Eventually(t, comeBack, func() bool { return strings.Count(s.logged("expose"), "no session") > lost }, "the connector has found it")
		// The lines of the log say when: to ask a gateway for its sessions takes a machine with
		// other load longer than the rest. A reverse session is given up 6 s after its last byte
		// by a look every second, one of ssh 9 s after it by a look every 0.75 s.
		for i := range s.gw {
			ends := s.left(i)[left[i]:]
			if len(ends) != 2 {
				t.Fatalf("gateway %d has logged the end of %d sessions, want 2", i+1, len(ends))
			}
			for _, at := range ends {
				after := at.Sub(began)
				t.Logf("gateway %d found it after %v; the limit of the design is %v", i+1, after.Round(100*time.Millisecond), found)
				if after > 3*found {
					t.Errorf("gateway %d found it after %v", i+1, after)
				}
			}
		}
		s.host.Undrop(t)
		for i := range s.gw {
			s.gw[i].Undrop(t)
		}
		all(t)
	})
	t.Run("a gateway that begins again", func(t *testing.T) {
		for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			s.stop[0](sig)
			s.startGateway(0)
			out, err := s.client.Command(t.Context(), culvert, s.exposing("thief", "--via", "11.0.1.1")...).CombinedOutput()
			if err == nil || !strings.Contains(string(out), "it belongs to another owner") {
				t.Errorf("after %v, the name is another one's: %v\n%s", sig, err, out)
			}
			all(t)
		}
	})
	t.Run("one of two gateways is killed", func(t *testing.T) {
		var (
			mu     sync.Mutex
			killed time.Time // zero until then
			after  int       // requests that began a second after it, and were served
			wg     sync.WaitGroup
		)
		want := fmt.Sprintf("%s saw %s\n", camName, s.serial())
		done := make(chan struct{})
		for range 3 {
			wg.Go(func() {
				for {
					select {
					case <-done:
						return
					default:
					}
					began := time.Now()
					out, err := s.client.Command(t.Context(), "curl", "-sS", "-m", "60", "--cacert", s.file("ca.crt"), "--cert", s.file("client.crt"), "--key", s.file("client.key"),
						"--resolve", camName+":443:11.0.1.1,11.0.2.1", "https://"+camName+"/").CombinedOutput()
					mu.Lock()
					late := !killed.IsZero() && began.Sub(killed) >= time.Second
					switch {
					case late && (err != nil || string(out) != want):
						t.Errorf("a request %v after the kill: %v, %s", began.Sub(killed), err, out)
						mu.Unlock()
						return
					case late:
						after++
					}
					mu.Unlock()
				}
			})
		}
		s.stop[0](syscall.SIGKILL)
		mu.Lock()
		killed = time.Now()
		mu.Unlock()
		testnet.Eventually(t, comeBack, func() bool { mu.Lock(); defer mu.Unlock(); return after >= 20 || t.Failed() }, "requests after the kill are served")
		close(done)
		wg.Wait()
	})
}

// DNS has the fingerprints of a gateway's host key as ssh-keygen writes them, ssh compares
// them, and says so if the key is another one. The key stays over a restart.
func TestSSHHostKeys(t *testing.T) {
	t.Parallel()
	s := newHiddenSite(t, kinds[1])
	fingerprints := func() []string {
		return lines(s.must(s.client.Command(t.Context(), "dig", "+short", "+tries=3", "@11.0.1.1", "gw1.example", "SSHFP")))
	}
	generated := func() (all []string) {
		for _, line := range lines(s.must(s.host.Command(t.Context(), "ssh-keygen", "-r", "gw1.example", "-f", s.file("gw1.key.pub")))) {
			algorithm, digest, _ := strings.Cut(strings.TrimPrefix(line, "gw1.example in sshfp "), " ")
			all = append(all, algorithm+" "+digest)
		}
		return all
	}
	if got, want := fingerprints(), generated(); len(got) != 2 || !slices.Equal(got, want) {
		t.Fatalf("DNS has the fingerprints\n%q, ssh-keygen says\n%q", got, want)
	}
	resolv := s.write("resolv.conf", "nameserver 11.0.1.1\noptions timeout:2 attempts:3\n")
	s.write("known", "")
	// ssh connects to gw1.example, which is at an address, and asks for a name that is none.
	ssh := func(address string, more ...string) string {
		t.Helper()
		const script = `mount --bind "$1" /etc/resolv.conf && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"`
		args := append([]string{"-m", "sh", "-c", script, "sh", resolv, s.write("hosts", address+" gw1.example\n"),
			"ssh", "-v", "-F", "/dev/null", "-i", s.file("alice"), "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "VerifyHostKeyDNS=yes", "-o", "UserKnownHostsFile=" + s.file("known")}, more...)
		out, err := s.host.Command(t.Context(), "unshare", append(args, "-p", "443", "-l", "anybody", "-W", "nowhere.example:1", "gw1.example")...).CombinedOutput()
		if err == nil {
			t.Errorf("ssh ends with 0:\n%s", out)
		}
		return string(out)
	}
	has := func(what, out string, want ...string) {
		t.Helper()
		for _, w := range want {
			if !strings.Contains(out, w) {
				t.Errorf("%s: ssh does not say %q:\n%s", what, w, out)
			}
		}
	}
	const letIn = "no-route"
	has("the first time", ssh("11.0.1.1", "-o", "StrictHostKeyChecking=accept-new"), "\r\ndebug1: matching host key fingerprint found in DNS", letIn)
	has("another host", ssh("11.0.2.1", "-o", "UserKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=yes"), "mismatching host key fingerprint found in DNS", "verification failed")
	s.stop[0](syscall.SIGTERM)
	s.startGateway(0)
	has("after a restart", ssh("11.0.1.1", "-o", "StrictHostKeyChecking=yes"), letIn)

	for _, name := range []string{"gw1.key", "gw1.key.pub"} {
		if err := os.Remove(s.file(name)); err != nil {
			t.Fatal(err)
		}
	}
	s.must(s.host.Command(t.Context(), "ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-C", "gw1", "-f", s.file("gw1.key")))
	testnet.Eventually(t, comeBack, func() bool { return slices.Equal(fingerprints(), generated()) }, "DNS has the fingerprints of the next key")
	has("another key", ssh("11.0.1.1", "-o", "StrictHostKeyChecking=yes", "-o", "HostKeyAlgorithms=ecdsa-sha2-nistp256"), "IDENTIFICATION HAS CHANGED", "verification failed")
}

// lines returns the lines of a text in lower case, without spaces inside of digests, sorted.
func lines(text string) (all []string) {
	for line := range strings.Lines(strings.ToLower(text)) {
		fields := strings.Fields(line)
		if len(fields) > 2 && fields[1] != "in" {
			fields = []string{fields[0], fields[1], strings.Join(fields[2:], "")}
		}
		all = append(all, strings.Join(fields, " "))
	}
	slices.Sort(all)
	return all
}
