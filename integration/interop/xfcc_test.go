//go:build unix

package interop

import (
	"fmt"
	"maps"
	"net/http"
	"os"
	"strings"
	"testing"

	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
)

// haproxyHop starts an HAProxy that passes CONNECT on to the proxy at next: of a gateway
// that shows a certificate, and for one client of that gateway, which it reads in
// X-Forwarded-Client-Cert.
func (w *world) haproxyHop(t *testing.T, next string) (addr string, p *process) {
	t.Helper()
	addr = "127.0.0.1:" + freePort(t)
	var both []byte
	for _, name := range []string{w.svcCert, w.svcKey} {
		pem, err := os.ReadFile(name)
		must(t, err)
		both = append(both, pem...)
	}
	p = w.haproxy(t, addr, fmt.Sprintf(`frontend f
	mode http
	log stdout len 8192 format raw local0
	bind %s ssl crt %s ca-file %s verify required alpn h2,http/1.1
	http-request capture req.fhdr(x-forwarded-client-cert) len 4096
	http-request capture req.fhdr(client-cert) len 4096
	http-request capture req.fhdr_cnt(x-forwarded-client-cert) len 8
	log-format "gateway=%%[ssl_c_s_dn(CN)] fields=%%[capture.req.hdr(2)] xfcc=%%[capture.req.hdr(0)] cert=%%[capture.req.hdr(1)]"
	http-request deny deny_status 403 unless { ssl_c_s_dn(CN) edge }
	http-request deny deny_status 403 unless { req.fhdr(x-forwarded-client-cert) -m reg ';URI=%s(;|$)' }
	default_backend b
backend b
	mode http
	server s %s
`, addr, w.write(t, "both.pem", string(both)), w.ca, clientID, next))
	return addr, p
}

// TestHAProxyReadsForwardedCertificates: a next hop that is no culvert gateway reads the
// caller in the fields that it knows, whatever the client says there itself, and decides by it.
func TestHAProxyReadsForwardedCertificates(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	issue(t, ca, w.dir, "edge", testca.Options{SPIFFEID: "spiffe://example.test/edge", DNSNames: []string{"edge.example.test"}})
	issue(t, ca, w.dir, "guest", testca.Options{SPIFFEID: "spiffe://example.test/guest", Usage: testca.ClientOnly})
	inner := startGateway(t, "--config", w.write(t, "inner.yaml", fmt.Sprintf(`
listeners: [{address: "127.0.0.1:%s", protocols: [connect]}]
admin: 127.0.0.1:%s
services:
%s`, freePort(t), freePort(t), service(svc, w.nginx(t)))))
	haproxy, p := w.haproxyHop(t, inner.addr)
	for i, carrier := range []string{"connect", "connect-h2"} {
		t.Run(carrier, func(t *testing.T) {
			edge := startGateway(t, "--config", w.write(t, carrier+".yaml", fmt.Sprintf(`
listeners: [{address: "127.0.0.1:%[1]s", tls: {key: gw, trust: example.test, clientCertificates: optional, protocols: [connect]}}]
admin: 127.0.0.1:%[2]s
identity:
  keys: {gw: {certificateFile: edge.crt, keyFile: edge.key}}
  trust: {example.test: {caFile: ca.crt}}
services:
  - {name: %[3]s, ports: [443], via: [{%[4]s: "https://%[5]s", serverName: %[3]s, key: gw, trust: example.test, forwardIdentity: {xfcc: sanitizeSet, clientCert: true}}]}
`, freePort(t), freePort(t), svc, carrier, haproxy)))
			read := map[string]int{}
			_, port, _ := strings.Cut(edge.addr, ":")
			ask := func(name string) (string, string, int) {
				args := []string{"-sS", "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "--proxy-cacert", w.ca, "--resolve", "edge.example.test:" + port + ":127.0.0.1",
					"-x", "https://edge.example.test:" + port, "--proxy-header", "X-Forwarded-Client-Cert: By=spiffe://example.test/edge;URI=" + clientID, "--proxy-header", "x_forwarded_client_cert: By=a;URI=" + clientID}
				if name != "" {
					args = append(args, "--proxy-cert", w.dir+"/"+name+".crt", "--proxy-key", w.dir+"/"+name+".key")
				}
				return command(t, "curl", append(args, "https://"+svc+"/")...)
			}
			if out, errs, code := ask("web"); code != 0 || !strings.Contains(out, "dn=CN=web") {
				t.Errorf("the client that HAProxy lets through: exit code %d, got %q, %s", code, out, errs)
			}
			for _, name := range []string{"guest", ""} {
				if out, errs, code := ask(name); code == 0 || !strings.Contains(errs, "403") && !strings.Contains(errs, "CONNECT") {
					t.Errorf("%q: exit code %d, got %q, %s, want it refused", name, code, out, errs)
				}
			}
			// It has read the caller, and nothing that the client has said.
			p.await(t, "logged three requests", func() bool { return strings.Count(p.output(), "gateway=edge ") == 3*(i+1) })
			for _, l := range strings.Split(p.output(), "\n") {
				fields, ok := strings.CutPrefix(strings.TrimSpace(l), "gateway=edge fields=")
				if !ok {
					continue
				}
				n, rest, _ := strings.Cut(fields, " xfcc=")
				xfcc, cert, _ := strings.Cut(rest, " cert=")
				if n == "0" && xfcc == "-" && cert == "-" {
					read[""]++
					continue
				}
				elements, err := delegation.ParseXFCC(xfcc)
				certs, bad := delegation.ParseClientCert(http.Header{"Client-Cert": {cert}})
				if err != nil || bad != nil || n != "1" || len(elements) != 1 || len(elements[0].URI) != 1 || len(certs) != 1 || certs[0].URIs[0].String() != elements[0].URI[0] {
					t.Errorf("HAProxy has read %q: %+v, %v, and %d certificates, %v", l, elements, err, len(certs), bad)
					continue
				}
				read[elements[0].URI[0]]++
			}
			want := map[string]int{clientID: i + 1, "spiffe://example.test/guest": i + 1, "": i + 1}
			if !maps.Equal(read, want) {
				t.Errorf("HAProxy has read the callers %v, want %v:\n%s", read, want, p.output())
			}
		})
	}
}
