//go:build unix

package interop

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// haproxyTLS starts an HAProxy that wants a client certificate, and says whose it was and
// which server was asked for.
func (w *world) haproxyTLS(t *testing.T) (addr string) {
	t.Helper()
	addr = "127.0.0.1:" + freePort(t)
	var both []byte
	for _, name := range []string{w.svcCert, w.svcKey} {
		pem, err := os.ReadFile(name)
		must(t, err)
		both = append(both, pem...)
	}
	w.haproxy(t, addr, fmt.Sprintf(`frontend f
	mode http
	bind %s ssl crt %s ca-file %s verify required
	http-request return status 200 content-type text/plain lf-string "cn=%%[ssl_c_s_dn(CN)] sni=%%[ssl_fc_sni]\n"
`, addr, w.write(t, "both.pem", string(both)), w.ca))
	return addr
}

// TestTLSToServices: the gateway speaks TLS, with its own certificate, to servers that
// demand one, for clients that speak none. It does not add TLS to that of clients.
func TestTLSToServices(t *testing.T) {
	w := newWorld(t)
	nginx, haproxy, own, socks := w.nginx(t), w.haproxyTLS(t), freePort(t), freePort(t)
	mutual := fmt.Sprintf("caFile: %s, certificateFile: %s, keyFile: %s", w.ca, w.cert, w.key)
	g := startGateway(t, "--config", w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners:
  - {address: "127.0.0.1:%[1]s", protocols: [sni, connect]}
  - {address: "127.0.0.1:%[2]s", service: %[3]s}
  - {address: "127.0.0.1:%[4]s", protocols: [socks5]}
admin: 127.0.0.1:%[5]s
services:
  - {name: %[3]s, ports: [443], endpoints: ["%[6]s"], tls: {%[7]s}}
  - {name: haproxy.example.test, ports: [80], endpoints: ["%[8]s"], tls: {serverName: %[3]s, maxVersion: "1.2", %[7]s}}
  - {name: spiffe.example.test, ports: [80], endpoints: ["%[6]s"], tls: {serverName: other.example.test, sans: ["spiffe://example.test/ns/shop/sa/svc"], %[7]s}}
  - {name: bare.example.test, ports: [80], endpoints: ["%[6]s"], tls: {serverName: %[3]s, maxVersion: "1.2", caFile: %[9]s}}
  - {name: late.example.test, ports: [80], endpoints: ["%[8]s"], tls: {serverName: %[3]s, minVersion: "1.3", caFile: %[9]s}}
  - {name: wrong.example.test, ports: [80], endpoints: ["%[6]s"], tls: {serverName: wrong.example.test, %[7]s}}
`, freePort(t), own, svc, socks, freePort(t), nginx, mutual, haproxy, w.ca)))
	nginxSays := func(proto, sni string) string {
		return fmt.Sprintf("dn=CN=web serial=%s proto=%s sni=%s\n", w.serial(), proto, sni)
	}
	connect := []string{"--proxytunnel", "-x", "http://" + g.addr}
	for _, row := range []struct {
		name string
		args []string
		want string
	}{
		{"nginx by CONNECT", append(connect, "http://"+svc+":443/"), nginxSays("HTTP/1.1", svc)},
		{"nginx by SOCKS5", []string{"-x", "socks5h://127.0.0.1:" + socks, "http://" + svc + ":443/"}, nginxSays("HTTP/1.1", svc)},
		{"nginx at a port of its own", []string{"http://127.0.0.1:" + own + "/"}, nginxSays("HTTP/1.1", svc)},
		{"HAProxy by CONNECT", append(connect, "http://haproxy.example.test/"), "cn=web sni=" + svc + "\n"},
		{"a SPIFFE id in place of the name", append(connect, "http://spiffe.example.test/"), nginxSays("HTTP/1.1", "other.example.test")},
		{"the TLS of a client", []string{"--cacert", w.ca, "--cert", w.cert, "--key", w.key, "--connect-to", svc + ":443:" + g.addr, "https://" + svc + "/"}, nginxSays("HTTP/2.0", svc)},
	} {
		out, errs, code := command(t, "curl", append([]string{"-sS"}, row.args...)...)
		if out != row.want || code != 0 {
			t.Errorf("%s: exit code %d, got %q, %s, want %q", row.name, code, out, errs, row.want)
		}
	}

	// nginx answers whoever has no certificate, and HAProxy refuses: by TLS 1.3 only
	// when the handshake is complete.
	out, errs, code := command(t, "curl", append([]string{"-sS"}, append(connect, "http://bare.example.test/")...)...)
	if !strings.Contains(out, "No required SSL certificate was sent") {
		t.Errorf("without a certificate: exit code %d, got %q, %s", code, out, errs)
	}
	out, errs, code = command(t, "curl", append([]string{"-sS"}, append(connect, "http://late.example.test/")...)...)
	if code == 0 {
		t.Errorf("without a certificate, by TLS 1.3: got %q, %s", out, errs)
	}
	g.line(t, "said that HAProxy wants a certificate", func(l line) bool {
		return l.Service == "late.example.test" && strings.Contains(l.Err, "certificate required")
	})
	out, errs, code = command(t, "curl", append([]string{"-sS"}, append(connect, "http://wrong.example.test/")...)...)
	if code == 0 || !strings.Contains(errs, "502") {
		t.Errorf("a wrong name: exit code %d, got %q, %s, want a 502", code, out, errs)
	}
	g.line(t, "refused the wrong name", func(l line) bool {
		return l.Service == "wrong.example.test" && l.Reason == "dial-failed" && strings.Contains(l.Err, "its certificate is for other names")
	})
}

// TestTLSIsReencrypted: TLS of clients ends at the gateway, for names of its own
// certificate, and goes on by TLS to servers that demand the gateway's certificate.
func TestTLSIsReencrypted(t *testing.T) {
	w := newWorld(t)
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	names := []string{"nginx.example.test", "haproxy.example.test", "wrong.example.test"}
	issue(t, ca, w.dir, "edge", testca.Options{SPIFFEID: "spiffe://example.test/edge", DNSNames: names, Usage: testca.ServerOnly})
	mutual := fmt.Sprintf("caFile: %s, certificateFile: %s, keyFile: %s", w.ca, w.cert, w.key)
	g := startGateway(t, "--config", w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners:
  - address: 127.0.0.1:%[1]s
    protocols: [sni]
    tls: {names: [nginx.example.test, haproxy.example.test, wrong.example.test], certificateFile: edge.crt, keyFile: edge.key, protocols: [tcp]}
admin: 127.0.0.1:%[2]s
services:
  - {name: nginx.example.test, endpoints: ["%[3]s"], tls: {serverName: %[5]s, %[6]s}}
  - {name: haproxy.example.test, endpoints: ["%[4]s"], tls: {serverName: %[5]s, %[6]s}}
  - {name: wrong.example.test, endpoints: ["%[3]s"], tls: {%[6]s}}
  - {name: %[5]s, endpoints: ["%[3]s"]}
`, freePort(t), freePort(t), w.nginx(t), w.haproxyTLS(t), svc, mutual)))
	get := func(name string, args ...string) (string, string, int) {
		return command(t, "curl", append([]string{"-sS", "--cacert", w.ca, "--connect-to", name + ":443:" + g.addr, "https://" + name + "/"}, args...)...)
	}
	nginxSays := func(proto string) string {
		return fmt.Sprintf("dn=CN=web serial=%s proto=%s sni=%s\n", w.serial(), proto, svc)
	}
	for _, row := range []struct {
		name string
		args []string
		want string
	}{
		{"nginx.example.test", nil, nginxSays("HTTP/1.1")},
		{"haproxy.example.test", nil, "cn=web sni=" + svc + "\n"},
		{svc, []string{"--cert", w.cert, "--key", w.key}, nginxSays("HTTP/2.0")}, // passed on at the same port
	} {
		if out, errs, code := get(row.name, row.args...); out != row.want || code != 0 {
			t.Errorf("%s: exit code %d, got %q, %s, want %q", row.name, code, out, errs, row.want)
		}
	}
	if out, errs, code := get("wrong.example.test"); code == 0 {
		t.Errorf("a server with another name: got %q, %s", out, errs)
	}
	g.line(t, "refused the server with another name", func(l line) bool {
		return l.Proto == "tls" && l.Service == "wrong.example.test" && l.Reason == "dial-failed" && strings.Contains(l.Err, "its certificate is for other names")
	})
}

// TestPostgresBehindTLSOfTheGateway: a psql without TLS reaches a server that demands TLS
// and a certificate.
func TestPostgresBehindTLSOfTheGateway(t *testing.T) {
	w := newWorld(t)
	server, own := w.postgres(t), freePort(t)
	startGateway(t, "--config", w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners:
  - {address: "127.0.0.1:%s", service: "%s:5432"}
admin: 127.0.0.1:%s
services:
  - {name: %s, ports: [5432], startTLS: postgres, endpoints: ["%s"], tls: {caFile: %s, certificateFile: %s, keyFile: %s}}
`, own, postgresName, freePort(t), postgresName, server, w.ca, w.cert, w.key)))
	out, errs, code := command(t, "psql", "-X", "-A", "-t", "-c", "select client_dn from pg_stat_ssl where pid = pg_backend_pid()",
		fmt.Sprintf("host=127.0.0.1 port=%s user=%s dbname=postgres sslmode=disable connect_timeout=20", own, postgresUser))
	if strings.TrimSpace(out) != "/CN=web" || code != 0 {
		t.Errorf("psql: exit code %d, got %q, %s, want the server to see the gateway's certificate", code, out, errs)
	}
}

// TestTLSToServicesRotates: new files are taken up, what can't be used is refused and
// changes nothing, and what the gateway does not trust any more is not reached.
func TestTLSToServicesRotates(t *testing.T) {
	w := newWorld(t)
	copyFile := func(from, to string) {
		pem, err := os.ReadFile(from)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(w.dir, to), pem, 0o600))
	}
	copyFile(w.ca, "trust.pem")
	copyFile(w.cert, "gw.crt")
	copyFile(w.key, "gw.key")
	g := startGateway(t, "--config", w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners:
  - {address: "127.0.0.1:%s", protocols: [connect]}
admin: 127.0.0.1:%s
services:
  - {name: %s, ports: [443], endpoints: ["%s"], tls: {caFile: trust.pem, certificateFile: gw.crt, keyFile: gw.key}}
`, freePort(t), freePort(t), svc, w.nginx(t))))
	get := func() (string, int) {
		t.Helper()
		out, _, code := command(t, "curl", "-sS", "--proxytunnel", "-x", "http://"+g.addr, "http://"+svc+":443/")
		return out, code
	}
	holds := func(what string, want func(out string, code int) bool) {
		t.Helper()
		out, code := "", 0
		testnet.Eventually(t, patience, func() bool {
			out, code = get()
			return want(out, code)
		}, "%s", what)
	}
	sees := func(pair *testca.Pair) func(string, int) bool {
		return func(out string, code int) bool {
			return code == 0 && strings.Contains(strings.ToLower(out), strings.ToLower(fmt.Sprintf("%X ", pair.TLS.Leaf.SerialNumber)))
		}
	}
	holds("nginx sees the first certificate", sees(w.client))

	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	next := issue(t, ca, w.dir, "next", testca.Options{SPIFFEID: clientID, Usage: testca.ClientOnly})
	copyFile(filepath.Join(w.dir, "next.crt"), "gw.crt") // without its key
	g.line(t, "refused a certificate without its key", func(l line) bool {
		return l.Msg == "configuration refused; keeping the previous one" && strings.Contains(l.Err, "private key does not match public key")
	})
	holds("nginx sees the first certificate still", sees(w.client))
	copyFile(filepath.Join(w.dir, "next.key"), "gw.key")
	holds("nginx sees the next certificate", sees(next))

	must(t, os.Remove(filepath.Join(w.dir, "trust.pem")))
	g.line(t, "said that the CAs are gone", func(l line) bool {
		return l.Msg == "configuration refused; keeping the previous one" && strings.Contains(l.Err, "trust.pem: no such file")
	})
	holds("nginx is verified by the CAs that were there", sees(next))
	copyFile(filepath.Join(w.dir, "other", "ca.crt"), "trust.pem")
	holds("nginx is not trusted any more", func(_ string, code int) bool { return code != 0 })
	g.line(t, "said why nginx is not used", func(l line) bool {
		return l.Reason == "dial-failed" && strings.Contains(l.Err, "its certificate is not signed by any of the CAs that are configured for it")
	})
}
