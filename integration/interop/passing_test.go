//go:build unix

package interop

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"culvert.dev/internal/testca"
)

// TestProgramsHaveTheirOwnTLS: of one service, programs that begin TLS have it with the server,
// with their own certificate, and programs without it have that of the gateway. Each of the
// servers demands TLS and a certificate.
func TestProgramsHaveTheirOwnTLS(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	issue(t, ca, w.dir, "gw", testca.Options{SPIFFEID: "spiffe://example.test/gw", Usage: testca.ClientOnly})
	redis := w.redisTLS(t, ca)
	const redisName = "cache.example.test"
	db, cache, web := freePort(t), freePort(t), freePort(t)
	g := startGateway(t, "--config", w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners:
  - {address: "127.0.0.1:%s", service: "%s:5432"}
  - {address: "127.0.0.1:%s", service: "%s:6379"}
  - {address: "127.0.0.1:%s", service: "%s:443"}
admin: 127.0.0.1:%s
services:
  - {name: %[2]s, ports: [5432], startTLS: postgres, endpoints: ["%[8]s"], tls: {%[11]s}}
  - {name: %[4]s, ports: [6379], endpoints: ["%[9]s"], tls: {%[11]s}}
  - {name: %[6]s, ports: [443], endpoints: ["%[10]s"], tls: {%[11]s}}
`, db, postgresName, cache, redisName, web, svc, freePort(t), w.postgres(t), redis, w.nginx(t), "caFile: ca.crt, certificateFile: gw.crt, keyFile: gw.key, passClientTLS: true")))

	psql := func(rest string) (string, string, int) {
		return command(t, "psql", "-X", "-A", "-t", "-c", "select client_dn from pg_stat_ssl where pid = pg_backend_pid()",
			fmt.Sprintf("host=%s hostaddr=127.0.0.1 port=%s user=%s dbname=postgres sslrootcert=%s sslcert=%s sslkey=%s connect_timeout=20 %s", postgresName, db, postgresUser, w.ca, w.cert, w.key, rest))
	}
	for _, mode := range []string{"verify-full", "require", "prefer"} {
		if out, errs, code := psql("sslmode=" + mode); strings.TrimSpace(out) != "/CN=web" || code != 0 {
			t.Errorf("psql, %s: exit code %d, got %q, %s, want the certificate of psql", mode, code, out, errs)
		}
	}
	// The server lets in whose certificate names the user: that of the gateway does not.
	if out, errs, code := psql("sslmode=disable"); code == 0 || !strings.Contains(errs, "certificate authentication failed") {
		t.Errorf("psql without TLS: exit code %d, got %q, %s, want the server to see the certificate of the gateway", code, out, errs)
	}

	redisCLI := func(args ...string) (string, string, int) {
		return command(t, "redis-cli", append([]string{"-h", "127.0.0.1", "-p", cache}, args...)...)
	}
	ownTLS := []string{"--tls", "--sni", redisName, "--cacert", w.ca}
	if out, errs, code := redisCLI("set", "key", "by the gateway"); strings.TrimSpace(out) != "OK" || code != 0 {
		t.Errorf("redis-cli without TLS: exit code %d, got %q, %s", code, out, errs)
	}
	if out, errs, code := redisCLI(append(ownTLS, "--cert", w.cert, "--key", w.key, "get", "key")...); strings.TrimSpace(out) != "by the gateway" || code != 0 {
		t.Errorf("redis-cli with TLS: exit code %d, got %q, %s", code, out, errs)
	}
	// Were the gateway's TLS around that of redis-cli, the server would see a certificate.
	if out, errs, code := redisCLI(append(ownTLS, "get", "key")...); strings.Contains(out, "by the gateway") {
		t.Errorf("redis-cli with TLS and no certificate: exit code %d, got %q, %s, want a refusal of the server", code, out, errs)
	}

	curl := func(url string, args ...string) string {
		out, errs, code := command(t, "curl", append([]string{"-sS", "--cacert", w.ca, "--connect-to", "::127.0.0.1:" + web, url}, args...)...)
		return fmt.Sprintf("%s%s%d", out, errs, code)
	}
	if got := curl("https://"+svc+"/", "--cert", w.cert, "--key", w.key); !strings.HasPrefix(got, "dn=CN=web ") {
		t.Errorf("curl with TLS: %s, want its own certificate", got)
	}
	if got := curl("http://" + svc + "/"); !strings.HasPrefix(got, "dn=CN=gw ") {
		t.Errorf("curl without TLS: %s, want that of the gateway", got)
	}
	out, errs, code := command(t, culvert, "explain", redisName+":6379", "--admin", g.admin, "--listener", "127.0.0.1:"+cache)
	if code != 0 || !strings.Contains(out, "a client that begins TLS has its own with the endpoint") {
		t.Errorf("explain: exit code %d, got %q, %s", code, out, errs)
	}
}

// redisTLS starts a Redis server that takes TLS alone, of clients with a certificate.
func (w *world) redisTLS(t *testing.T, ca *testca.CA) (addr string) {
	t.Helper()
	issue(t, ca, w.dir, "cache", testca.Options{SPIFFEID: "spiffe://example.test/cache", DNSNames: []string{"cache.example.test"}, Usage: testca.ServerOnly})
	port := freePort(t)
	addr = net.JoinHostPort("127.0.0.1", port)
	start(t, "redis-server", "--port", "0", "--tls-port", port, "--bind", "127.0.0.1", "--save", "", "--dir", w.dir,
		"--tls-cert-file", filepath.Join(w.dir, "cache.crt"), "--tls-key-file", filepath.Join(w.dir, "cache.key"), "--tls-ca-cert-file", w.ca, "--tls-auth-clients", "yes").listens(t, addr)
	return addr
}
