//go:build unix

package interop

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testca"
)

// TestAssertionsNeedExtendedMasterSecret: OpenSSL and GnuTLS with TLS 1.2 are told who calls,
// in an assertion for their session. Without extended master secret, RFC 7627, a session has
// nothing that an assertion could be bound to: the dial fails, and not a byte is sent. Callers
// without an identity, of whom there is no assertion, come through.
func TestAssertionsNeedExtendedMasterSecret(t *testing.T) {
	w := newWorld(t)
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	type server struct {
		*process
		addr string
	}
	openssl := func(old bool) server {
		addr := "127.0.0.1:" + freePort(t)
		cmd := exec.Command(look(t, "openssl"), "s_server", "-quiet", "-accept", addr, "-tls1_2", "-cert", w.svcCert, "-key", w.svcKey, "-verify", "1", "-verify_quiet", "-CAfile", w.ca)
		cmd.Env = environ()
		if old {
			cmd.Env = append(cmd.Env, "OPENSSL_CONF="+w.write(t, "old.cnf", "openssl_conf = all\n[all]\nssl_conf = ssl\n[ssl]\nsystem_default = old\n[old]\nOptions = -ExtendedMasterSecret\n"))
		}
		return server{startCmd(t, cmd), addr}
	}
	gnutls := func(old bool) server {
		port, priority := freePort(t), "NORMAL:-VERS-ALL:+VERS-TLS1.2"
		if old {
			priority += ":%NO_SESSION_HASH"
		}
		return server{start(t, "gnutls-serv", "--echo", "--port", port, "--priority", priority, "--x509certfile", w.svcCert, "--x509keyfile", w.svcKey, "--x509cafile", w.ca, "--verify-client-cert"), "127.0.0.1:" + port}
	}
	rows := []struct {
		name   string
		server server
		old    bool
	}{
		{"openssl.example.test", openssl(false), false}, {"old-openssl.example.test", openssl(true), true},
		{"gnutls.example.test", gnutls(false), false}, {"old-gnutls.example.test", gnutls(true), true},
	}
	var names []string
	services := ""
	for _, row := range rows {
		row.server.listens(t, row.server.addr)
		names = append(names, row.name)
		services += fmt.Sprintf("  - {name: %s, endpoints: [%q], tls: {serverName: %s, caFile: %s, certificateFile: %s, keyFile: %s}, forwardIdentity: {assertion: true}}\n", row.name, row.server.addr, svc, w.ca, w.cert, w.key)
	}
	issue(t, ca, w.dir, "edge", testca.Options{SPIFFEID: "spiffe://example.test/edge", DNSNames: names, Usage: testca.ServerOnly})
	g := startGateway(t, "--config", w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners:
  - address: 127.0.0.1:%s
    protocols: [sni]
    tls: {names: [%s], certificateFile: edge.crt, keyFile: edge.key, clientCAFile: ca.crt, clientCertificates: optional, protocols: [tcp]}
admin: 127.0.0.1:%s
services:
%s`, freePort(t), strings.Join(names, ", "), freePort(t), services)))
	own, err := tls.LoadX509KeyPair(w.cert, w.key)
	must(t, err)
	// dial opens a connection of a client, which says something.
	dial := func(name, words string, own ...tls.Certificate) net.Conn {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		d := &tls.Dialer{Config: &tls.Config{ServerName: name, Certificates: own, InsecureSkipVerify: true}}
		c, err := d.DialContext(ctx, "tcp", g.addr)
		must(t, err)
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(patience))
		_, _ = fmt.Fprintln(c, words) // the gateway may have closed by now
		return c
	}
	for _, row := range rows {
		if row.old {
			if n, err := dial(row.name, "secret words", own).Read(make([]byte, 1)); err == nil {
				t.Errorf("%s: got %d bytes, want the connection closed", row.name, n)
			}
			g.line(t, "said why "+row.name+" is not told", func(l line) bool {
				return l.Service == row.name && l.Reason == "internal" && strings.Contains(l.Err, "neither TLS 1.3 nor TLS 1.2 with extended master secret")
			})
		} else {
			c := dial(row.name, "words with a name", own)
			row.server.says(t, "words with a name")
			if strings.HasPrefix(row.name, "openssl") { // gnutls-serv writes what it gets up to the first zero
				row.server.says(t, "eyJ")
			}
			_ = c.Close()
		}
		// openssl serves one connection at a time.
		dial(row.name, "words of nobody")
		row.server.says(t, "words of nobody")
		if out := row.server.output(); row.old && (strings.Contains(out, "secret") || strings.Contains(out, "eyJ")) {
			t.Errorf("%s: the server has heard what is not for it: %q", row.name, out)
		}
	}
}
