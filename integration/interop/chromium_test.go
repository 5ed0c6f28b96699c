//go:build unix

package interop

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// A browser by SNI, CONNECT and SOCKS on one port. It offers a post-quantum key
// share and GREASE, and resolves nothing by itself: names are the gateway's.
func TestChromium(t *testing.T) {
	w := newWorld(t)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(rw, "served %s to %s", r.Host, r.Proto)
	}))
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{w.service.TLS}} // a browser without a person has no certificate to choose
	srv.EnableHTTP2 = true
	srv.StartTLS()
	t.Cleanup(srv.Close)
	g := startSocks(t, w, service(svc, srv.Listener.Addr().String()))

	pin := sha256.Sum256(srv.Certificate().RawSubjectPublicKeyInfo)
	_, port, _ := strings.Cut(g.addr, ":")
	nothing := "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
	for _, way := range []struct {
		name string
		args []string
		url  string
		want string
	}{
		{"SNI", []string{"--host-resolver-rules=MAP " + svc + " 127.0.0.1, " + nothing}, "https://" + svc + ":" + port + "/", "served " + svc + ":" + port + " to HTTP/2.0"},
		{"CONNECT", []string{"--proxy-server=http://" + g.addr, "--host-resolver-rules=" + nothing}, "https://" + svc + "/", "served " + svc + " to HTTP/2.0"},
		{"SOCKS", []string{"--proxy-server=socks5://" + g.addr, "--host-resolver-rules=" + nothing}, "https://" + svc + "/", "served " + svc + " to HTTP/2.0"},
		{"SOCKS to a name there is not", []string{"--proxy-server=socks5://" + g.addr, "--host-resolver-rules=" + nothing}, "https://nobody.example.test/", ""},
	} {
		t.Run(way.name, func(t *testing.T) {
			args := append([]string{
				"--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
				"--user-data-dir=" + t.TempDir(), "--ignore-certificate-errors-spki-list=" + base64.StdEncoding.EncodeToString(pin[:]),
				"--timeout=20000", "--dump-dom",
			}, way.args...)
			out, errs, _ := command(t, "chromium", append(args, way.url)...)
			if way.want == "" {
				if strings.Contains(out, "to HTTP/2.0") {
					t.Errorf("got %q", out)
				}
				g.line(t, "refused nobody.example.test", func(l line) bool {
					return l.Proto == "socks5" && l.Reason == "no-route" && l.Target == "nobody.example.test:443"
				})
				return
			}
			if !strings.Contains(out, way.want) {
				t.Errorf("got %q, want %q in it\n%s", out, way.want, errs)
			}
		})
	}
}
