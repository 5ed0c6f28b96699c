//go:build unix

package interop

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"culvert.dev/internal/testca"
)

// redis starts a Redis server without TLS.
func (w *world) redis(t *testing.T) (addr string) {
	t.Helper()
	port := freePort(t)
	addr = net.JoinHostPort("127.0.0.1", port)
	start(t, "redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", w.dir).listens(t, addr)
	return addr
}

// TestRedis: clients of Redis hold many connections and send many requests on each before
// they read an answer. They come by a port of the service's own, and by TLS that ends at the
// gateway and is for clients with a certificate.
func TestRedis(t *testing.T) {
	t.Parallel()
	const name = "redis.example.test"
	w := newWorld(t)
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	issue(t, ca, w.dir, "redis", testca.Options{SPIFFEID: "spiffe://example.test/redis", DNSNames: []string{name}, Usage: testca.ServerOnly})
	own := freePort(t)
	g := startGateway(t, "--config", w.write(t, "redis.yaml", fmt.Sprintf(`
listeners:
  - address: 127.0.0.1:%s
    tls: {names: [%[2]s], certificateFile: redis.crt, keyFile: redis.key, protocols: [tcp], clientCertificates: required, clientCAFile: ca.crt}
  - {address: "127.0.0.1:%[3]s", service: %[2]s}
admin: 127.0.0.1:%[4]s
services:
  - {name: %[2]s, ports: [6379], endpoints: ["%[5]s"], limits: {connections: 300}}
`, freePort(t), name, own, freePort(t), w.redis(t))))
	_, port, err := net.SplitHostPort(g.addr)
	must(t, err)
	inTLS := []string{"-h", "127.0.0.1", "-p", port, "--tls", "--sni", name, "--cacert", w.ca}
	certified := append(inTLS, "--cert", w.cert, "--key", w.key)

	if out, errs, code := command(t, "redis-cli", append(certified, "set", "key", "value")...); strings.TrimSpace(out) != "OK" || code != 0 {
		t.Errorf("set by TLS: exit code %d, got %q, %s", code, out, errs)
	}
	if out, errs, code := command(t, "redis-cli", "-h", "127.0.0.1", "-p", own, "get", "key"); strings.TrimSpace(out) != "value" || code != 0 {
		t.Errorf("get by the service's own port: exit code %d, got %q, %s", code, out, errs)
	}
	if out, errs, code := command(t, "redis-cli", append(inTLS, "get", "key")...); strings.Contains(out, "value") {
		t.Errorf("without a certificate: exit code %d, got %q, %s", code, out, errs)
	}
	for how, args := range map[string][]string{"by the service's own port": {"-h", "127.0.0.1", "-p", own}, "by TLS": certified} {
		// 200 connections at once, 16 requests under way on each, and values that fill many segments.
		args = append(args, "-c", "200", "-P", "16", "-n", "20000", "-d", "2000", "-t", "set,get", "--csv")
		out, errs, code := command(t, "redis-benchmark", args...)
		if code != 0 || !strings.Contains(out, `"SET"`) || !strings.Contains(out, `"GET"`) || strings.Contains(out+errs, "rror") {
			t.Errorf("redis-benchmark %s: exit code %d, got %q, %s", how, code, out, errs)
		}
	}
}
