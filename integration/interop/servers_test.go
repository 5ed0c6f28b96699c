//go:build unix

package interop

import (
	"net/http"
	"strings"
	"testing"
)

// TestServicesNameTheirClients: services in other languages verify the certificates of
// clients that come through the gateway, by SNI and by CONNECT, as if it were not there.
// Each names the client by its SPIFFE id, and refuses one with a certificate of another CA
// by itself.
func TestServicesNameTheirClients(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, s := range []struct {
		name    string
		command []string // nil for Go
	}{
		{"Go", nil},
		{"Python", []string{"python3", "testdata/server.py"}},
		{"Node", []string{"node", "testdata/server.js"}},
		{"Java", []string{"java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", "testdata/Server.java"}},
	} {
		t.Run(s.name, func(t *testing.T) {
			addr := ""
			if s.command == nil {
				addr = w.serveHTTPS(t, http.HandlerFunc(whoami))
			} else {
				port := freePort(t)
				addr = "127.0.0.1:" + port
				start(t, s.command[0], append(s.command[1:], port, w.ca, w.svcCert, w.svcKey)...).listens(t, addr)
			}
			g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(addr))
			for _, way := range [][]string{{"--connect-to", svc + ":443:" + g.addr}, {"-p", "-x", "http://" + g.addr}} {
				get := func(cert, key string) (out, errs string, code int) {
					return command(t, "curl", append([]string{"-sS", "-m", "60", "--http1.1", "--cacert", w.ca, "--cert", cert, "--key", key, "https://" + svc + "/"}, way...)...)
				}
				if out, errs, code := get(w.cert, w.key); code != 0 || !strings.HasPrefix(out, "you are "+clientID) {
					t.Errorf("curl %s: exit code %d, got %q, %s, want that it is %s", way, code, out, errs, clientID)
				}
				if out, errs, code := get(w.wrongCert, w.wrongKey); code == 0 || strings.Contains(out, "you are") {
					t.Errorf("curl %s with a certificate of another CA: exit code %d, got %q, %s, want that the service refuses it", way, code, out, errs)
				}
			}
			for _, l := range g.lines() {
				if l.Peer != "" {
					t.Errorf("the gateway knows %q, whose certificate it can't see", l.Peer)
				}
			}
		})
	}
}
