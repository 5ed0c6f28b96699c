//go:build linux && netns

package networks

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

// A replicaSite is a gateway of two replicas, whose name has the addresses of both in DNS, with
// connectors and clients that know it by that name alone.
type replicaSite struct {
	*hiddenSite
	resolv    string // a resolv.conf
	processes map[string]*os.Process
	keys      *tls.Config // of the client
}

// The names of a replicaSite: the connector of the first one has a session to both replicas,
// that of the other one to whichever it has reached.
const bothName, oneName = "both.edge.example", "one.edge.example"

var gatewayNames = [2]string{"gw1", "gw2"}

func newReplicaSite(t *testing.T) *replicaSite {
	t.Helper()
	s := &replicaSite{processes: map[string]*os.Process{}, hiddenSite: &hiddenSite{site: &site{t: t, dir: t.TempDir()}, host: netns.New(t, "host"), hub: netns.New(t, "hub"), client: netns.New(t, "client")}}
	s.gw = [2]*netns.NS{netns.New(t, "gw1"), netns.New(t, "gw2")}
	s.must(s.hub.Command(t.Context(), "sysctl", "-q", "-w", "net.ipv4.ip_forward=1"))
	for i, ns := range []*netns.NS{s.host, s.gw[0], s.gw[1], s.client} {
		netns.Link(t, ns, fmt.Sprintf("11.0.%d.1/24", i), s.hub, fmt.Sprintf("11.0.%d.254/24", i))
		ns.Route(t, "default", fmt.Sprintf("11.0.%d.254", i))
	}
	var err error
	if s.ca, err = testca.New("corp.example", nil); err != nil {
		t.Fatal(err)
	}
	if err := s.ca.Save(s.dir); err != nil {
		t.Fatal(err)
	}
	s.issue(s.ca, "gw", testca.Options{SPIFFEID: "spiffe://corp.example/ns/gw/sa/gw", DNSNames: []string{"gw.example"}})
	s.issue(s.ca, "edge", testca.Options{SPIFFEID: "spiffe://corp.example/ns/edge/sa/edge", Usage: testca.ClientOnly})
	s.issue(s.ca, "service", testca.Options{SPIFFEID: "spiffe://corp.example/ns/edge/sa/service", DNSNames: []string{"*.edge.example"}})
	client, err := s.ca.Issue(testca.Options{SPIFFEID: "spiffe://corp.example/client", Usage: testca.ClientOnly})
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Save(s.dir, "client"); err != nil {
		t.Fatal(err)
	}
	s.keys = &tls.Config{RootCAs: s.ca.Pool(), Certificates: []tls.Certificate{client.TLS}}
	s.serveNginx()

	hosts := ""
	for _, name := range []string{"gw.example", bothName, oneName} {
		hosts += "11.0.1.1 " + name + "\n11.0.2.1 " + name + "\n"
	}
	s.background("dnsmasq", s.hub.Command(context.Background(), "dnsmasq", "--keep-in-foreground", "--user=root", "--pid-file=", "--no-resolv", "--no-hosts",
		"--addn-hosts="+s.write("hosts", hosts), "--listen-address=11.0.3.254", "--bind-interfaces", "--conf-file="+s.write("dnsmasq.conf", "")))
	s.resolv = s.write("resolv.conf", "nameserver 11.0.3.254\noptions timeout:2 attempts:3\n")

	for i := range s.gw {
		s.runCulvert(s.gw[i], gatewayNames[i], "gateway", "--config", s.write(gatewayNames[i]+".yaml", fmt.Sprintf(`cluster: gw
drain: {delay: 0s, timeout: 1s}
listeners:
  - address: "11.0.%[1]d.1:443"
    protocols: [sni]
    tls: {names: [gw.example], key: gw, trust: corp.example, protocols: [connect, connect-h2, websocket]}
  - {address: "udp://11.0.%[1]d.1:443", tls: {key: gw, trust: corp.example}}
identity:
  keys: {gw: {certificateFile: %[2]s/gw.crt, keyFile: %[2]s/gw.key}}
  trust: {corp.example: {caFile: %[2]s/ca.crt}}
policies:
  - name: edge
    verb: register
    action: allow
    targets: {names: ["*.edge.example"]}
    rules: [{sources: [{spiffe: ["spiffe://corp.example/ns/edge/*"]}]}]
replicas: {to: "gw.example:443", serverName: gw.example, key: gw, trust: corp.example, ids: ["spiffe://corp.example/ns/gw/sa/gw"]}
services: []
`, i+1, s.dir)))
	}
	for name, replicas := range map[string]int{bothName: 2, oneName: 1} {
		s.runCulvert(s.host, name, "gateway", "--config", s.write(name+".yaml", fmt.Sprintf(`cluster: edge
identity:
  keys: {edge: {certificateFile: %[1]s/edge.crt, keyFile: %[1]s/edge.key}}
  trust: {corp.example: {caFile: %[1]s/ca.crt}}
reverse:
  to: gw.example:443
  replicas: %[2]d
  key: edge
  trust: corp.example
  expose: [{name: %[3]s, to: "127.0.0.1:%[4]s"}]
services: []
`, s.dir, replicas, name, camPort)))
	}
	s.runCulvert(s.client, "agent", append([]string{"agent"}, s.asking("--name", "*.edge.example")...)...)
	return s
}

// in prepares a program in a network, where names mean what the DNS server says.
func (s *replicaSite) in(ctx context.Context, ns *netns.NS, args ...string) *exec.Cmd {
	const script = `mount --bind "$1" /etc/resolv.conf && shift && exec "$@"` // in a mount namespace of its own
	return ns.Command(ctx, "unshare", append([]string{"-m", "sh", "-c", script, "sh", s.resolv}, args...)...)
}

// runCulvert runs culvert until the end of the test.
func (s *replicaSite) runCulvert(ns *netns.NS, name string, args ...string) {
	s.t.Helper()
	cmd := s.in(context.Background(), ns, append([]string{culvert}, append(args, "--admin", "unix:"+s.socket(name))...)...)
	s.background(name, cmd)
	s.processes[name] = cmd.Process
}

// asking are the flags with which the client asks the gateway.
func (s *replicaSite) asking(more ...string) []string {
	return append([]string{"--gateway", "gw.example", "--cert", s.file("client.crt"), "--key", s.file("client.key"), "--ca", s.file("ca.crt")}, more...)
}

// knows reports which sessions a replica has for a name itself, and which it knows of at others.
func (s *replicaSite) knows(i int, name string) (own, elsewhere int) {
	s.t.Helper()
	out, err := exec.Command(culvert, "connectors", "-o", "json", "--admin", "unix:"+s.socket(gatewayNames[i])).Output()
	var list struct {
		Names []struct {
			Name     string
			Sessions int
			Replicas []struct{ Sessions int }
		}
	}
	if err != nil || json.Unmarshal(out, &list) != nil {
		return 0, 0
	}
	for _, n := range list.Names {
		if n.Name != name {
			continue
		}
		own = n.Sessions
		for _, r := range n.Replicas {
			elsewhere += r.Sessions
		}
	}
	return own, elsewhere
}

// A replicaClient asks for a name, as one of the programs that people use.
type replicaClient struct {
	what string
	late time.Duration // after the loss of a replica, from when on no request fails
	ask  func(ctx context.Context) (string, error)
}

// clients are those of a name: curl by the name itself, by the agent, which keeps connections to
// the gateway, and culvert connect, which makes one for each request.
func (s *replicaSite) clients(name string, direct, late time.Duration) []replicaClient {
	curl := func(more ...string) func(context.Context) (string, error) {
		args := []string{"curl", "-sS", "-m", "25", "--cacert", s.file("ca.crt"), "--cert", s.file("client.crt"), "--key", s.file("client.key")}
		args = append(append(args, more...), "https://"+name+"/")
		return func(ctx context.Context) (string, error) {
			out, err := s.in(ctx, s.client, args...).CombinedOutput()
			return string(out), err
		}
	}
	all := []replicaClient{
		{name + " by the agent", late, curl("--proxy", "http://127.0.0.1:1080")},
		{name + " by culvert connect", late, func(ctx context.Context) (string, error) { return s.connect(ctx, name) }},
	}
	if direct > 0 {
		all = append(all, replicaClient{name + " by itself", direct, curl()})
	}
	return all
}

// connect asks for a name by culvert connect and speaks TLS and HTTP over it.
func (s *replicaSite) connect(ctx context.Context, name string) (string, error) {
	cmd := s.in(ctx, s.client, append(append([]string{culvert, "connect", name, "443"}, s.asking()...), "--timeout", "25s")...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return "", err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	keys := s.keys.Clone()
	keys.ServerName = name
	c := tls.Client(&pipes{Reader: out, WriteCloser: in}, keys)
	_, err = fmt.Fprintf(c, "GET / HTTP/1.0\r\nHost: %s\r\n\r\n", name)
	answer, readErr := io.ReadAll(c)
	_ = in.Close()
	err = errors.Join(err, readErr, cmd.Wait())
	_, body, _ := strings.Cut(string(answer), "\r\n\r\n")
	return body + stderr.String(), err
}

// Pipes are those of a program, as a connection without deadlines.
type pipes struct {
	io.Reader
	io.WriteCloser
	net.Conn // nil
}

func (p *pipes) Read(b []byte) (int, error)  { return p.Reader.Read(b) }
func (p *pipes) Write(b []byte) (int, error) { return p.WriteCloser.Write(b) }
func (p *pipes) Close() error                { return p.WriteCloser.Close() }

// noticed is until a kill is: a second, and more for the kernel of a busy machine that ends the
// process.
const noticed = 3 * time.Second

// The gateway's name is that of two replicas, of which one is killed, or does not answer any more
// while its kernel still takes connections. New requests are served by the other one: in the first
// moment after a kill some may fail, and after silence those that began before it was found.
func TestReplicasByDNS(t *testing.T) {
	t.Parallel()
	for _, loss := range []struct {
		name         string
		signal       syscall.Signal
		direct, late time.Duration // of replicaClient
		one          time.Duration // late for a name whose only session was to the replica that is lost
	}{
		{"killed", syscall.SIGKILL, noticed, noticed, noticed},
		{"silent", syscall.SIGSTOP, 0, 0, 10 * time.Second},
	} {
		t.Run(loss.name, func(t *testing.T) {
			t.Parallel()
			s := newReplicaSite(t)
			victim := -1
			testnet.Eventually(t, comeBack, func() bool {
				for i := range s.gw {
					own, elsewhere := s.knows(i, bothName)
					one, oneElsewhere := s.knows(i, oneName)
					if own != 1 || elsewhere != 1 || one+oneElsewhere != 1 {
						return false
					}
					if one == 1 {
						victim = i
					}
				}
				return victim >= 0
			}, "the replicas know of all sessions")
			all := append(s.clients(bothName, loss.direct, loss.late), s.clients(oneName, loss.direct, loss.one)...)
			for _, c := range all {
				want := fmt.Sprintf("saw %s\n", s.serial())
				testnet.Eventually(t, comeBack, func() bool {
					out, err := c.ask(t.Context())
					return err == nil && strings.Contains(out, want)
				}, "%s is reached", c.what)
			}

			type request struct {
				client       *replicaClient
				began, ended time.Time
				out          string
				err          error
			}
			var mu sync.Mutex // guards requests
			var requests []request
			var asking sync.WaitGroup
			done := make(chan struct{})
			for i := range all {
				c := &all[i]
				asking.Go(func() {
					for {
						select {
						case <-done:
							return
						case <-time.After(20 * time.Millisecond):
						}
						r := request{client: c, began: time.Now()}
						r.out, r.err = c.ask(t.Context())
						r.ended = time.Now()
						mu.Lock()
						requests = append(requests, r)
						mu.Unlock()
					}
				})
			}
			// served returns how many requests of each client that began after some time were served.
			served := func(after func(c *replicaClient) time.Time) bool {
				mu.Lock()
				defer mu.Unlock()
				for i := range all {
					n := 0
					for _, r := range requests {
						if r.client == &all[i] && r.began.After(after(r.client)) {
							n++
						}
					}
					if n < 3 {
						return false
					}
				}
				return true
			}
			testnet.Eventually(t, comeBack, func() bool { return served(func(*replicaClient) time.Time { return time.Time{} }) }, "requests are under way")
			if err := s.processes[gatewayNames[victim]].Signal(loss.signal); err != nil {
				t.Fatal(err)
			}
			lost := time.Now()
			testnet.Eventually(t, 2*comeBack, func() bool { return served(func(c *replicaClient) time.Time { return lost.Add(c.late) }) }, "requests go on")
			close(done)
			asking.Wait()
			slowest := map[string]time.Duration{}
			failed := 0
			for _, r := range requests {
				if r.began.Before(lost.Add(-time.Second)) {
					continue
				}
				slowest[r.client.what] = max(slowest[r.client.what], r.ended.Sub(r.began).Round(time.Millisecond))
				if r.err == nil {
					continue
				}
				failed++
				t.Logf("%s, %v after the loss, for %v: %v, %s", r.client.what, r.began.Sub(lost), r.ended.Sub(r.began), r.err, r.out)
				if r.began.After(lost.Add(r.client.late)) {
					t.Errorf("%s failed %v after the loss", r.client.what, r.began.Sub(lost))
				}
			}
			t.Logf("%d of %d requests failed; the slowest took %v", failed, len(requests), slowest)
			if own, _ := s.knows(1-victim, oneName); own != 1 {
				t.Errorf("the connector with one session has %d to the replica that is left, want 1", own)
			}
		})
	}
}
