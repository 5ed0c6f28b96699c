//go:build unix

package interop

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"culvert.dev/internal/testca"
)

// squid starts a Squid at the host of the world that wants a user by Basic, lets clients connect to one port, and
// knows hosts, of lines as in /etc/hosts. It writes a line to the file logs as each connection ends.
func (w *world) squid(t *testing.T, port, allowed, user, password, hosts string) (p *process, logs string) {
	t.Helper()
	passwd := exec.Command(look(t, "openssl"), "passwd", "-apr1", "-stdin")
	passwd.Env, passwd.Stdin = environ(), strings.NewReader(password)
	hash, errs, code := runCmd(t, passwd)
	if code != 0 {
		t.Fatalf("openssl passwd: %s", errs)
	}
	// As root it gives up its rights, and then it can't read what others may not.
	dir, err := os.MkdirTemp("", "culvert-squid-")
	must(t, err)
	instance := "culvert" + strconv.Itoa(os.Getpid()) // of the names of its shared memory, which stays when it is killed
	t.Cleanup(func() {
		_ = os.RemoveAll(dir)
		shared, _ := filepath.Glob("/dev/shm/" + instance + "-*")
		for _, name := range shared {
			_ = os.Remove(name)
		}
	})
	must(t, os.Chmod(dir, 0o755))
	logs = filepath.Join(dir, "logs", "access")
	must(t, os.Mkdir(filepath.Dir(logs), 0o755))
	must(t, os.Chmod(filepath.Dir(logs), 0o777))
	must(t, os.WriteFile(filepath.Join(dir, "users"), []byte(user+":"+hash), 0o644))
	must(t, os.WriteFile(filepath.Join(dir, "hosts"), []byte(hosts), 0o644))
	conf := w.write(t, "squid.conf", fmt.Sprintf(`http_port %[1]s
pid_filename none
cache_log stdio:%[2]s/logs/cache
access_log stdio:%[2]s/logs/access
cache deny all
cache_mem 0
pinger_enable off
hosts_file %[2]s/hosts
dns_nameservers 127.0.0.1
visible_hostname squid.corp
shutdown_lifetime 0 seconds
auth_param basic program /usr/lib/squid/basic_ncsa_auth %[2]s/users
auth_param basic children 1
acl known proxy_auth REQUIRED
acl gateway port %[3]s
http_access deny !gateway
http_access allow known
http_access deny all
`, net.JoinHostPort(w.host, port), dir, allowed))
	p = start(t, "squid", "-N", "-n", instance, "-d", "1", "-f", conf)
	p.listens(t, net.JoinHostPort(w.host, port))
	return p, logs
}

// A gateway beside the client reaches the next one through a corporate proxy that wants a
// password. A client certificate passes from end to end.
func TestCorporateProxy(t *testing.T) {
	const name = "gw.example.test"
	w := newWorld(t)
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	issue(t, ca, w.dir, "gw", testca.Options{SPIFFEID: "spiffe://example.test/gw", DNSNames: []string{name}, Usage: testca.ServerOnly})
	far := startGateway(t, "--config", w.write(t, "far.yaml", fmt.Sprintf(`
listeners:
  - {address: "127.0.0.1:%s", tls: {names: [%s], certificateFile: gw.crt, keyFile: gw.key, protocols: [connect-h2], clientCertificates: required, clientCAFile: ca.crt}}
admin: 127.0.0.1:%s
services: [{name: %s, ports: [443], endpoints: [%q]}]
`, freePort(t), name, freePort(t), svc, w.serveHTTPS(t, http.HandlerFunc(whoami)))))
	_, port, err := net.SplitHostPort(far.addr)
	must(t, err)
	proxyPort := freePort(t)
	squid, logs := w.squid(t, proxyPort, port, "alice", "hunter2", "127.0.0.1 "+name+"\n")
	w.write(t, "password", "hunter2\n")
	// Each has a file of its own: a gateway follows its file.
	startNear := func(file string) *gateway {
		t.Helper()
		return startGateway(t, "--config", w.write(t, file, fmt.Sprintf(`
listeners: [{address: "127.0.0.1:%s", protocols: [connect]}]
admin: 127.0.0.1:%s
upstreamProxy: {url: "http://127.0.0.1:%s", user: alice, passwordCommand: [cat, %s]}
services:
  - {name: %s, ports: [443], via: [{connect-h2: "https://%s:%s", certificateFile: web.crt, keyFile: web.key, caFile: ca.crt}]}
`, freePort(t), freePort(t), proxyPort, filepath.Join(w.dir, "password"), svc, name, port)))
	}
	near := startNear("near.yaml")
	ask := func() (stdout, errs string, code int) {
		return command(t, "curl", "-sS", "--proxy", "http://"+near.addr, "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "https://"+svc+"/")
	}
	if out, errs, code := ask(); code != 0 || !strings.HasPrefix(out, "you are "+clientID) {
		t.Fatalf("curl: exit code %d, got %q, %s", code, out, errs)
	}
	near.signal(syscall.SIGKILL)
	want := "CONNECT " + name + ":" + port + " alice"
	squid.await(t, "logged the connection", func() bool {
		log, err := os.ReadFile(logs)
		return err == nil && strings.Contains(string(log), want)
	})
	for _, l := range []string{near.output(), far.output()} {
		if strings.Contains(l, "hunter2") {
			t.Error("the log has the password")
		}
	}

	// A new connection with a wrong password, and one with no proxy.
	w.write(t, "password", "wrong\n")
	near = startNear("wrong.yaml")
	if out, _, code := ask(); code == 0 {
		t.Fatalf("with a wrong password curl got %q", out)
	}
	near.line(t, "logged the wrong password", func(l line) bool {
		return l.Reason == "dial-failed" && strings.Contains(l.Err, "it is still the same")
	})
	squid.signal(syscall.SIGKILL)
	squid.awaitEnd(t)
	w.write(t, "password", "hunter2\n")
	near = startNear("away.yaml")
	if out, _, code := ask(); code == 0 {
		t.Fatalf("without the proxy curl got %q", out)
	}
	near.line(t, "logged that the proxy is away", func(l line) bool {
		return l.Reason == "dial-failed" && strings.Contains(l.Err, "check that url of upstreamProxy is an HTTP proxy, and that it runs")
	})
}

// A connector behind a corporate proxy: its session and its pool connections pass the proxy with
// credentials, by each carrier, and requests go over the pool connections.
func TestConnectorBehindCorporateProxy(t *testing.T) {
	const name = "gw.example.test"
	w := newWorld(t)
	issue(t, w.authority, w.dir, "gw", testca.Options{SPIFFEID: "spiffe://example.test/gw", DNSNames: []string{name}, Usage: testca.ServerOnly})
	port, proxyPort := freePort(t), freePort(t)
	_, logs := w.squid(t, proxyPort, port, "alice", "hunter2", "127.0.0.1 "+name+"\n")
	w.write(t, "password", "hunter2\n")
	service := w.serveHTTPS(t, http.HandlerFunc(whoami))
	logged := func() string {
		log, err := os.ReadFile(logs)
		must(t, err)
		return string(log)
	}
	for _, carrier := range []string{"connect", "connect-h2", "websocket"} {
		t.Run(carrier, func(t *testing.T) {
			far := startGateway(t, "--config", w.write(t, "far-"+carrier+".yaml", fmt.Sprintf(`
cluster: far
listeners:
  - address: "127.0.0.1:%s"
    protocols: [sni, reverse-pool]
    tls: {names: [%s], certificateFile: gw.crt, keyFile: gw.key, protocols: [%s], trust: example.test}
identity: {trust: {example.test: {caFile: ca.crt}}}
admin: 127.0.0.1:%s
policies:
  - {name: edge, verb: register, action: allow, targets: {names: [%s]}, rules: [{sources: [{spiffe: [%q]}]}]}
services: []
`, port, name, carrier, freePort(t), svc, clientID)))
			near := startGateway(t, "--config", w.write(t, "connector-"+carrier+".yaml", fmt.Sprintf(`
cluster: near
listeners: [{address: "127.0.0.1:%s", protocols: [connect]}]
admin: 127.0.0.1:%s
upstreamProxy: {url: "http://127.0.0.1:%s", user: alice, passwordFile: password}
reverse:
  to: ["%s:%s"]
  protocol: %s
  poolConnections: 2
  certificateFile: web.crt
  keyFile: web.key
  caFile: ca.crt
  expose: [{name: %s, to: %q}]
services: []
`, freePort(t), freePort(t), proxyPort, name, port, carrier, svc, service)))
			full := func() bool {
				var list struct{ Sessions []struct{ Pool int } }
				return far.ask("/connectors", &list) == nil && len(list.Sessions) == 1 && list.Sessions[0].Pool == 2
			}
			before := strings.Count(logged(), " alice ")
			const requests = 3
			for range requests {
				far.await(t, "had two pool connections", full)
				out, errs, code := command(t, "curl", "-sS", "--connect-to", svc+":443:"+far.addr, "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "https://"+svc+"/")
				if code != 0 || !strings.HasPrefix(out, "you are "+clientID) {
					t.Fatalf("curl: exit code %d, got %q, %s", code, out, errs)
				}
			}
			// The session stands, so that each connection which the proxy has logged is one of the
			// pool, which has ended with its request.
			near.await(t, "used as many pool connections as there were requests", func() bool {
				return strings.Count(logged(), " alice ") == before+requests
			})
			far.await(t, "had two pool connections again", full)
			near.signal(syscall.SIGKILL)
			near.awaitEnd(t)
			far.signal(syscall.SIGKILL)
			far.awaitEnd(t)
			far.await(t, "been forgotten by the proxy", func() bool { return strings.Count(logged(), " alice ") == before+requests+3 })
		})
	}
}

// A device joins through a corporate proxy that wants a password, which is in a file.
func TestJoinThroughCorporateProxy(t *testing.T) {
	const name = "gw.example.test"
	w := newWorld(t)
	issue(t, w.authority, w.dir, "gw", testca.Options{SPIFFEID: "spiffe://example.test/gw", DNSNames: []string{name}, Usage: testca.ServerOnly})
	port, admin := freePort(t), "127.0.0.1:"+freePort(t)
	startGateway(t, "--config", w.write(t, "gw.yaml", fmt.Sprintf(`
listeners:
  - {address: "127.0.0.1:%[1]s", protocols: [sni], tls: {names: [%[2]s], key: gw, trust: example.test, clientCertificates: optional, protocols: [connect-h2]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {example.test: {caFile: ca.crt}}
enrollment: {gateway: "%[2]s:%[1]s", key: gw, trustDomain: example.test, certificateFile: ca.crt, keyFile: ca.key, state: enrollment}
services: [{name: %[4]s, ports: [443], endpoints: ["127.0.0.1:1"]}]
admin: %[3]q
adminControl: true
`, port, name, admin, svc)))
	proxyPort := freePort(t)
	squid, logs := w.squid(t, proxyPort, port, "alice", "hunter2", "127.0.0.1 "+name+"\n")
	token, errs, code := command(t, "culvert", "invite", "--device", "cam-7", "--admin", admin)
	if code != 0 {
		t.Fatalf("culvert invite: %s", errs)
	}
	join := func(args ...string) (string, string, int) {
		t.Helper()
		return runCmd(t, withInput(t, token, append(append([]string{"join", "--state", filepath.Join(w.dir, "device")}, args...), "-")...))
	}
	proxy := []string{"--upstream-proxy", "http://127.0.0.1:" + proxyPort}
	for _, wrong := range []struct {
		args []string
		want string
	}{
		{nil, name}, // which only the proxy knows
		{proxy, "407"},
		{append(proxy, "--upstream-proxy-user", "alice"), "go together"},
		{append(proxy, "--upstream-proxy-user", "alice", "--upstream-proxy-password-file", w.write(t, "wrong", "wrong\n")), "refuse"},
	} {
		if out, errs, code := join(wrong.args...); code == 0 || !strings.Contains(errs, wrong.want) {
			t.Errorf("%q: exit code %d, %s%s, want %q", wrong.args, code, out, errs, wrong.want)
		}
	}
	out, errs, code := join(append(proxy, "--upstream-proxy-user", "alice", "--upstream-proxy-password-file", w.write(t, "password", "hunter2\n"))...)
	if code != 0 || !strings.HasPrefix(out, "joined as spiffe://example.test/device/cam-7\n") {
		t.Fatalf("exit code %d, %s%s", code, out, errs)
	}
	squid.await(t, "logged the connection", func() bool {
		log, err := os.ReadFile(logs)
		return err == nil && strings.Contains(string(log), "CONNECT "+name+":"+port+" alice")
	})
}
