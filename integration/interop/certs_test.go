//go:build unix

package interop

import (
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"culvert.dev/internal/testnet"
)

// A presenter is a program that shows a client certificate, and returns what it says.
type presenter struct {
	name string
	show func(t *testing.T, addr, dir, name string) string

	// alert is how it says that its certificate is bad.
	alert string

	// not has the certificates that it does not show, and why.
	not map[string]string
}

// permissive is an environment in which OpenSSL shows certificates that it takes for weak.
func permissive(t *testing.T, dir string) []string {
	t.Helper()
	path := filepath.Join(dir, "openssl.cnf")
	must(t, os.WriteFile(path, []byte("openssl_conf = all\n[all]\nssl_conf = ssl\n[ssl]\nsystem_default = weak\n[weak]\nCipherString = DEFAULT@SECLEVEL=0\n"), 0o600))
	return append(environ(), "OPENSSL_CONF="+path)
}

// presenters are real clients, each of which shows what it is told to.
var presenters = []presenter{
	{"openssl, TLS 1.3", showByOpenSSL("-tls1_3"), "SSL alert number 42", nil},
	{"openssl, TLS 1.2", showByOpenSSL("-tls1_2"), "SSL alert number 42", nil},
	{"curl", func(t *testing.T, addr, dir, name string) string {
		cmd := exec.Command(look(t, "curl"), "-sS", "-m", "60", "-k", "--cert", filepath.Join(dir, name+".crt"), "--key", filepath.Join(dir, name+".key"),
			"--connect-to", hostA+":443:"+addr, "https://"+hostA+"/")
		cmd.Env = permissive(t, dir)
		out, errs, _ := runCmd(t, cmd)
		return out + errs
	}, "alert bad certificate", nil},
	{"GnuTLS", func(t *testing.T, addr, dir, name string) string {
		_, port, _ := net.SplitHostPort(addr)
		p := start(t, "gnutls-cli", "--insecure", "--x509certfile", filepath.Join(dir, name+".crt"), "--x509keyfile", filepath.Join(dir, name+".key"),
			"--sni-hostname", hostA, "-p", port, "127.0.0.1")
		// Kept open: at the end of its input it leaves, answered or not.
		_, _ = io.WriteString(p.stdin, "GET / HTTP/1.0\r\nHost: "+hostA+"\r\n\r\n")
		p.awaitEnd(t)
		return p.output()
	}, "[42]: Certificate is bad", map[string]string{"chain8": "reads fewer", "chain9": "reads fewer"}},
}

func showByOpenSSL(version string) func(t *testing.T, addr, dir, name string) string {
	return func(t *testing.T, addr, dir, name string) string {
		cmd := exec.Command(look(t, "openssl"), append([]string{"s_client", "-connect", addr, "-servername", hostA, "-quiet", version}, opensslChain(dir, name)...)...)
		cmd.Env, cmd.Stdin = permissive(t, dir), strings.NewReader("GET / HTTP/1.0\r\nHost: "+hostA+"\r\n\r\n")
		out, errs, _ := runCmd(t, cmd)
		return out + errs
	}
}

// TestClientCertificates: each certificate of the table is shown by each client, by a
// listener that ends TLS for a service. It is admitted with its identity, or refused for
// its own reason, hears the alert, and leaves nothing.
func TestClientCertificates(t *testing.T) {
	t.Parallel()
	dir, p := t.TempDir(), newPKI(t)
	table := p.certs(t, x509.ExtKeyUsageServerAuth)
	var names []string
	for _, s := range table {
		saveShown(t, dir, s)
		names = append(names, s.name)
	}
	gw := leafTemplate("spiffe://" + domainA + "/gw")
	gw.DNSNames = []string{hostA}
	saveChain(t, dir, "gw", p.a.issue(gw)) // clients do not look at it
	var requests atomic.Int64
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		requests.Add(1)
		w.Header().Set("Connection", "close")
		_, _ = io.WriteString(w, "admitted\n")
	}))
	t.Cleanup(backend.Close)
	port := freePort(t)
	config := filepath.Join(dir, "culvert.yaml")
	must(t, os.WriteFile(config, fmt.Appendf(nil, `
listeners:
  - address: "127.0.0.1:%s"
    protocols: [sni]
    tls:
      names: [%s]
      certificateFile: gw.crt
      keyFile: gw.key
      protocols: [tcp]
      minVersion: "1.2"
      trust: [%s, %s]
admin: 127.0.0.1:%s
%s
services:
  - {name: %[2]s, endpoints: ["%[7]s"]}
`, port, hostA, domainA, domainB, freePort(t), p.saveTrust(t, dir), backend.Listener.Addr()), 0o600))
	g := startGateway(t, "--config", config)

	before := g.kept(t)

	type shownBy struct {
		client, said, alert string
		what                shown
	}
	var all []shownBy
	for _, c := range presenters {
		for _, s := range table {
			if c.not[s.name] == "" {
				all = append(all, shownBy{c.name, c.show(t, g.addr, dir, s.name), c.alert, s})
			}
		}
	}
	// All in one, as it takes long to start.
	out, errs, code := command(t, "java", append([]string{"-Xshare:auto", "-XX:TieredStopAtLevel=1", "testdata/Show.java", "to", g.addr, hostA, dir}, names...)...)
	if code != 0 {
		t.Fatalf("Java: exit code %d\n%s%s", code, out, errs)
	}
	for _, s := range table {
		_, said, _ := strings.Cut("\n"+out, "\n"+s.name+": ")
		said, _, _ = strings.Cut(said, "\n")
		all = append(all, shownBy{"Java", said, "Received fatal alert: bad_certificate", s})
	}

	var ends []line
	g.await(t, fmt.Sprintf("logged %d connections", len(all)), func() bool {
		ends = slices.DeleteFunc(g.lines(), func(l line) bool { return l.Proto != "tls" })
		return len(ends) >= len(all)
	})
	admitted := 0
	for _, a := range all {
		is := func(l line) bool {
			return l.Reason == "no-auth" && l.Peer == "" && l.Endpoint == "" && strings.Contains(l.Err, "identity: the client's ") && strings.Contains(l.Err, a.what.err)
		}
		want := a.alert
		if a.what.id != "" {
			admitted++
			is, want = func(l line) bool { return l.Peer == a.what.id && l.Service == hostA && l.Msg == "tunnel" }, "admitted"
		}
		if !strings.Contains(a.said, want) || a.what.id == "" && strings.Contains(a.said, "admitted") {
			t.Errorf("%s with %s said %q, want %q", a.client, a.what.name, a.said, want)
		}
		i := slices.IndexFunc(ends, is)
		if i < 0 {
			t.Errorf("%s with %s, which said %q: no line of the log has the peer %q or the refusal %q", a.client, a.what.name, a.said, a.what.id, a.what.err)
			continue
		}
		ends = slices.Delete(ends, i, i+1)
	}
	for _, l := range ends {
		t.Errorf("the log has %+v, which is for no client", l)
	}
	if n := requests.Load(); n != int64(admitted) {
		t.Errorf("the service has got %d requests, want %d", n, admitted)
	}
	testnet.Eventually(t, patience, func() bool { return g.kept(t) == before }, "nothing is kept of them: %v", before)
}

// kept is what a gateway has open, and what it holds for it: tunnels, bytes of handshakes
// and of tunnels, and descriptors.
func (g *gateway) kept(t *testing.T) (counts [3]float64) {
	t.Helper()
	body, err := g.get("/metrics")
	must(t, err)
	for l := range strings.Lines(string(body)) {
		for i, name := range []string{"culvert_tunnels_open", "culvert_backlog_bytes", "culvert_descriptors_used"} {
			if !strings.HasPrefix(l, name+" ") && !strings.HasPrefix(l, name+"{") {
				continue
			}
			v := 0.0
			if _, err := fmt.Sscan(l[strings.LastIndexByte(strings.TrimSpace(l), ' '):], &v); err != nil {
				t.Fatalf("metric %q: %v", l, err)
			}
			counts[i] += v
		}
	}
	return counts
}

// opensslChain has openssl show a chain.
func opensslChain(dir, name string) []string {
	args := []string{"-cert", filepath.Join(dir, name+".crt"), "-key", filepath.Join(dir, name+".key")}
	if rest := filepath.Join(dir, name+".rest"); exists(rest) {
		args = append(args, "-cert_chain", rest)
	}
	return args
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// saveShown writes the files of s for all programs.
func saveShown(t *testing.T, dir string, s shown) {
	t.Helper()
	saveChain(t, dir, s.name, s.chain)
	if rest := s.chain.certs[1:]; len(rest) > 0 { // which openssl reads from another file
		must(t, os.WriteFile(filepath.Join(dir, s.name+".rest"), pemOf(rest...), 0o600))
	}
}

// A certServer is a program that serves by TLS, and shows each certificate at a port of
// its own.
type certServer struct {
	name string

	// serve starts it, for certificates with the files of dir, at the port of each.
	serve func(t *testing.T, dir string, ports map[string]string)

	// not has the certificates that it does not show, and why.
	not map[string]string
}

var certServers = []certServer{
	{"openssl", func(t *testing.T, dir string, ports map[string]string) {
		var all []*process
		for name, port := range ports {
			cmd := exec.Command(look(t, "openssl"), append([]string{"s_server", "-accept", "127.0.0.1:" + port, "-www", "-quiet"}, opensslChain(dir, name)...)...)
			cmd.Env = permissive(t, dir)
			all = append(all, startCmd(t, cmd))
			all[len(all)-1].listens(t, "127.0.0.1:"+port)
		}
	}, nil},
	{"GnuTLS", func(t *testing.T, dir string, ports map[string]string) {
		for name, port := range ports {
			start(t, "gnutls-serv", "--http", "--disable-client-cert", "-q", "-p", port,
				"--x509certfile", filepath.Join(dir, name+".crt"), "--x509keyfile", filepath.Join(dir, name+".key")).listens(t, "127.0.0.1:"+port)
		}
	}, nil},
	{"nginx", func(t *testing.T, dir string, ports map[string]string) {
		var servers strings.Builder
		for name, port := range ports {
			fmt.Fprintf(&servers, "server { listen 127.0.0.1:%s ssl; ssl_certificate %s.crt; ssl_certificate_key %[2]s.key; return 200 served; }\n", port, filepath.Join(dir, name))
		}
		sub := filepath.Join(dir, "nginx")
		must(t, os.Mkdir(sub, 0o700))
		conf := filepath.Join(sub, "nginx.conf")
		must(t, os.WriteFile(conf, fmt.Appendf(nil, `daemon off; master_process off; pid %[1]s/pid; error_log stderr warn; events {}
http {
	access_log off;
	client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi;
	%[2]s
}
`, sub, servers.String()), 0o600))
		cmd := exec.Command(look(t, "nginx"), "-p", sub, "-e", "stderr", "-c", conf)
		cmd.Env = permissive(t, dir)
		p := startCmd(t, cmd)
		for _, port := range ports {
			p.listens(t, "127.0.0.1:"+port)
		}
	}, nil},
	{"Java", func(t *testing.T, dir string, ports map[string]string) {
		args := []string{"-Xshare:auto", "-XX:TieredStopAtLevel=1", "testdata/Show.java", "at", dir}
		for name, port := range ports {
			args = append(args, name+"="+port)
		}
		start(t, "java", args...).says(t, "listening")
	}, nil},
}

// TestServerCertificates: each certificate of the table is shown to the gateway by each
// server, as a next hop that may be any workload of two trust domains, and as a service
// that must have one name. The gateway uses it, or refuses it for its own reason, which
// the log and "culvert status" have; nothing of the client goes there.
func TestServerCertificates(t *testing.T) {
	t.Parallel()
	dir, p := t.TempDir(), newPKI(t)
	table := p.certs(t, x509.ExtKeyUsageClientAuth)
	for _, s := range table {
		saveShown(t, dir, s)
	}

	// What is said otherwise of one that must have a name. Names are what is asked for, so
	// that it may have more of them.
	const none = "certificate has none of the names "
	byName := map[string]string{
		"other-domain": none, "ca-of-a": none, "other-id": none, "malformed": none, "escapes": none, "no-path": none, "too-long": none, "no-id": none, "id-in-intermediate": none,
		"ca-of-b":  `id is "` + idA + `", and its certificate is signed by a CA of "b.example"`,
		"two-uris": "", "ca": "",
	}

	var services strings.Builder
	type asked struct {
		server string
		what   shown
		hop    bool
		err    string
	}
	want := make(map[string]asked) // by the service's name
	for _, server := range certServers {
		ports := make(map[string]string)
		for _, s := range table {
			if server.not[s.name] == "" {
				ports[s.name] = freePort(t)
			}
		}
		server.serve(t, dir, ports)
		for _, s := range table {
			port := ports[s.name]
			if port == "" {
				continue
			}
			id := strings.ToLower(server.name + "-" + s.name)
			err, other := byName[s.name]
			if !other {
				err = s.err
			}
			want["service-"+id+".test"] = asked{server.name, s, false, err}
			fmt.Fprintf(&services, "  - {name: service-%s.test, endpoints: [\"127.0.0.1:%s\"], tls: {serverName: %s, sans: [%s], trust: [%s, %s]}}\n", id, port, hostA, idA, domainA, domainB)
			if s.err != "" || server.name == "Java" { // which takes CONNECT for a request as any
				want["hop-"+id+".test"] = asked{server.name, s, true, s.err}
				fmt.Fprintf(&services, "  - {name: hop-%s.test, endpoints: [\"192.0.2.1:443\"], via: [{connect: \"https://127.0.0.1:%s\", serverName: %s, peers: [spiffe://%s, spiffe://%s], trust: [%[4]s, %[5]s]}]}\n", id, port, hostA, domainA, domainB)
			}
		}
	}
	config := filepath.Join(dir, "culvert.yaml")
	must(t, os.WriteFile(config, fmt.Appendf(nil, `
listeners:
  - {address: "127.0.0.1:%s", protocols: [connect]}
admin: 127.0.0.1:%s
%s
services:
%s`, freePort(t), freePort(t), p.saveTrust(t, dir), services.String()), 0o600))
	g := startGateway(t, "--config", config)
	before := g.kept(t)

	said := make(map[string]string)
	for name := range want {
		c := dial(t, g.addr)
		_, err := io.WriteString(c, "CONNECT "+name+":443 HTTP/1.1\r\nHost: "+name+"\r\n\r\n")
		must(t, err)
		head := make([]byte, 12)
		_, err = io.ReadFull(c, head)
		must(t, err)
		said[name] = string(head)
		must(t, c.Close())
	}
	ends := make(map[string]line)
	g.await(t, fmt.Sprintf("logged %d requests", len(want)), func() bool {
		for _, l := range g.lines() {
			if name, _, _ := strings.Cut(l.Target, ":"); l.Proto == "connect" {
				ends[name] = l
			}
		}
		return len(ends) == len(want)
	})
	for name, a := range want {
		l := ends[name]
		status := "HTTP/1.1 502"
		if a.err == "" {
			status = "HTTP/1.1 200"
		}
		if said[name] != status {
			t.Errorf("%s: the client got %q, want %q; the log has %+v", name, said[name], status, l)
		}
		if a.err != "" && (l.Reason != "dial-failed" || !strings.Contains(l.Err, "identity: the server's ") || !strings.Contains(l.Err, a.err)) {
			t.Errorf("%s: the log has %s, %q, want dial-failed and %q", name, l.Reason, l.Err, a.err)
		}
	}
	for name, a := range want {
		if a.server != "nginx" || a.hop || a.err == "" {
			continue // one command for each is slow
		}
		out, errs, code := command(t, "culvert", "explain", name+":443", "--from", "127.0.0.1", "--admin", g.admin)
		if code != 0 || !strings.Contains(out, "identity: the server's ") || !strings.Contains(out, a.err) {
			t.Errorf("explain %s: exit code %d, got %q, %s, want %q", name, code, out, errs, a.err)
		}
	}
	testnet.Eventually(t, patience, func() bool { return g.kept(t) == before }, "nothing is kept of them: %v", before)
}
