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
	file := func(name string, certs ...[]byte) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, pemOf(certs...), 0o600))
		return path
	}
	rootsA, rootsB := file("a.pem", p.a.cert.Raw, p.a2.cert.Raw), file("b.pem", p.b.cert.Raw)

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
      clientCAFile: {%s: %s, %s: %s}
admin: 127.0.0.1:%s
services:
  - {name: %[2]s, endpoints: ["%[8]s"]}
`, port, hostA, domainA, rootsA, domainB, rootsB, freePort(t), backend.Listener.Addr()), 0o600))
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
	out, errs, code := command(t, "java", append([]string{"-Xshare:auto", "-XX:TieredStopAtLevel=1", "testdata/Show.java", g.addr, hostA, dir}, names...)...)
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
