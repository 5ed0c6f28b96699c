//go:build unix

package interop

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"culvert.dev/internal/testca"
)

// TestTLSEndsForServices: on one port a browser reaches a web service without TLS of its
// own, curl and psql need a certificate for services that have none either, and TLS for
// another service is passed on.
func TestTLSEndsForServices(t *testing.T) {
	const www, api = "www.example.test", "api.example.test"
	w := newWorld(t)
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	site := issue(t, ca, w.dir, "www", testca.Options{SPIFFEID: "spiffe://example.test/www", DNSNames: []string{www}, Usage: testca.ServerOnly})
	guarded := issue(t, ca, w.dir, "api", testca.Options{SPIFFEID: "spiffe://example.test/api", DNSNames: []string{api, postgresName}, Usage: testca.ServerOnly})
	plain := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(rw, "served %s in the clear", r.Host)
	}))
	t.Cleanup(plain.Close)
	g := startGateway(t, "--config", w.write(t, "ended.yaml", fmt.Sprintf(`
listeners:
  - address: 127.0.0.1:%s
    protocols: [sni, postgres, connect]
    requireTLS: true
    tls:
      - {names: [%[2]s], certificateFile: www.crt, keyFile: www.key, protocols: [tcp], alpn: [http/1.1]}
      - names: [%[3]s, %[4]s]
        certificateFile: api.crt
        keyFile: api.key
        protocols: [tcp]
        clientCertificates: required
        clientCAFile: ca.crt
admin: 127.0.0.1:%[5]s
services:
  - {name: %[2]s, endpoints: ["%[6]s"]}
  - {name: %[3]s, endpoints: ["%[6]s"]}
  - {name: %[4]s, ports: [5432], endpoints: ["%[7]s"]}
  - {name: %[8]s, endpoints: ["%[9]s"]}
`, freePort(t), www, api, postgresName, freePort(t), plain.Listener.Addr(), w.postgresOf(t, postgresBin(t), true), svc, w.nginx(t))))
	host, port, err := net.SplitHostPort(g.addr)
	must(t, err)
	served := func(name string) string { return "served " + name + ":" + port + " in the clear" }

	var pins []string
	for _, pair := range []*testca.Pair{site, guarded} {
		pin := sha256.Sum256(pair.TLS.Leaf.RawSubjectPublicKeyInfo)
		pins = append(pins, base64.StdEncoding.EncodeToString(pin[:]))
	}
	show := func(name string) string {
		out, _ := browse(t, "--ignore-certificate-errors-spki-list="+strings.Join(pins, ","),
			"--host-resolver-rules=MAP *.example.test 127.0.0.1", "https://"+name+":"+port+"/")
		return out
	}
	if out := show(www); !strings.Contains(out, served(www)) {
		t.Errorf("the browser shows %q, want %q in it", out, served(www))
	}
	g.line(t, "logged the browser", func(l line) bool { return l.Proto == "tls" && l.Service == www && l.Peer == "" })
	if out := show(api); strings.Contains(out, "in the clear") {
		t.Errorf("without a certificate the browser shows %q", out)
	}
	g.line(t, "refused the browser", func(l line) bool { return l.Proto == "tls" && l.Reason == "no-auth" })

	curl := func(name string, more ...string) (string, string, int) {
		return command(t, "curl", append([]string{"-sS", "--cacert", w.ca, "--resolve", name + ":" + port + ":" + host, "https://" + name + ":" + port + "/"}, more...)...)
	}
	certified := []string{"--cert", w.cert, "--key", w.key}
	if out, errs, code := curl(api, certified...); out != served(api) || code != 0 {
		t.Errorf("curl: exit code %d, got %q, %s, want %q", code, out, errs, served(api))
	}
	g.line(t, "logged whose request it was", func(l line) bool { return l.Proto == "tls" && l.Service == api && l.Peer == clientPeer })
	if out, errs, code := curl(api); code == 0 {
		t.Errorf("curl without a certificate: got %q, %s", out, errs)
	}
	if out, errs, code := curl(api, "--cert", w.wrongCert, "--key", w.wrongKey); code == 0 {
		t.Errorf("curl with a certificate of another CA: got %q, %s", out, errs)
	}
	if out, errs, code := curl(svc, certified...); !strings.Contains(out, "sni="+svc) || code != 0 {
		t.Errorf("curl to the service that ends TLS itself: exit code %d, got %q, %s", code, out, errs)
	}
	if out, errs, code := command(t, "curl", "-sS", "-p", "-x", "http://"+g.addr, "http://"+www+"/"); code == 0 {
		t.Errorf("curl without TLS: got %q, %s", out, errs)
	}
	g.line(t, "refused what was not TLS", func(l line) bool { return l.Proto == "connect" && l.Reason == "insecure" })

	psql := func(more string) (string, string, int) {
		out, errs, code := command(t, "psql", "-X", "-A", "-t", "-c", "select 'in the clear' from pg_stat_ssl where not ssl and pid = pg_backend_pid()",
			fmt.Sprintf("host=%s hostaddr=%s port=%s user=%s dbname=postgres sslmode=verify-full sslrootcert=%s connect_timeout=20 %s", postgresName, host, port, postgresUser, w.ca, more))
		return strings.TrimSpace(out), errs, code
	}
	if out, errs, code := psql("sslcert=" + w.cert + " sslkey=" + w.key); out != "in the clear" || code != 0 {
		t.Errorf("psql: exit code %d, got %q, %s", code, out, errs)
	}
	if out, errs, code := psql("sslcert=none"); code == 0 || !strings.Contains(errs, "certificate required") {
		t.Errorf("psql without a certificate: exit code %d, got %q, %s, want the alert certificate_required", code, out, errs)
	}
}
