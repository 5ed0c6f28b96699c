//go:build unix

package interop

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
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
			pinned := "--ignore-certificate-errors-spki-list=" + base64.StdEncoding.EncodeToString(pin[:])
			out, errs := browse(t, append(append([]string{pinned}, way.args...), way.url)...)
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

// page has a browser open a WebSocket through the gateway at %s, and is loaded
// when the browser has said what came of it.
const page = `<script>
const say = text => fetch("/said?" + encodeURIComponent(text));
const ws = new WebSocket("ws://%s/edge/` + svc + `:443", "culvert.v1");
ws.binaryType = "arraybuffer";
ws.onopen = () => ws.send(new TextEncoder().encode("hello"));
ws.onmessage = m => say("echo " + new TextDecoder().decode(m.data));
ws.onerror = () => say("error");
</script><img src="/loaded">`

// A page of a site that is not listed has no WebSocket, whatever the browser
// that shows it may reach: it is refused as such, and nothing is dialed. That
// of a listed one has.
func TestChromiumFromAnotherOrigin(t *testing.T) {
	w := newWorld(t)
	echo := testnet.Echo(t)
	var gateway string
	words, said := make(chan string), make(chan string, 2)
	mux := http.NewServeMux()
	mux.HandleFunc("/{$}", func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(rw, page, gateway)
	})
	mux.HandleFunc("/said", func(_ http.ResponseWriter, r *http.Request) {
		text, _ := url.QueryUnescape(r.URL.RawQuery)
		select {
		case words <- text:
		case <-r.Context().Done():
		}
	})
	mux.HandleFunc("/loaded", func(_ http.ResponseWriter, r *http.Request) {
		select {
		case text := <-words:
			said <- text
		case <-r.Context().Done():
		}
	})
	site := httptest.NewUnstartedServer(mux)
	_, port, err := net.SplitHostPort(site.Listener.Addr().String())
	must(t, err)
	g := startGateway(t, "--config", w.write(t, "origins.yaml", fmt.Sprintf(`
admin: 127.0.0.1:%s
listeners:
  - address: 127.0.0.1:%s
    protocols: [websocket]
    websocket: {path: /edge/, origins: ["http://app.example.test:%s"]}
services:
  - name: %s
    endpoints: [%q]
`, freePort(t), freePort(t), port, svc, echo.Addr())))
	between := testnet.NewRecorder(t, g.addr)
	gateway = between.Addr()
	site.Start()
	t.Cleanup(site.Close)
	for i, shown := range []struct{ origin, says, answer string }{
		{"http://evil.example.test:" + port, "error", "HTTP/1.1 403 "},
		{"http://app.example.test:" + port, "echo hello", "HTTP/1.1 101 "},
	} {
		_, errs := browse(t, "--host-resolver-rules=MAP *.example.test 127.0.0.1", shown.origin+"/")
		select {
		case got := <-said:
			if got != shown.says {
				t.Errorf("%s: the page says %q, want %q", shown.origin, got, shown.says)
			}
		default:
			t.Fatalf("%s: the page says nothing\n%s", shown.origin, errs)
		}
		flows := between.Flows()
		if len(flows) != i+1 {
			t.Fatalf("%s: %d connections to the gateway, want %d", shown.origin, len(flows), i+1)
		}
		up, down := string(flows[i].Up), string(flows[i].Down)
		if !strings.HasPrefix(down, shown.answer) || !strings.Contains(up, "\r\nOrigin: "+shown.origin+"\r\n") {
			t.Errorf("%s: the browser sent %q and got %q, want its origin and %q", shown.origin, up, down, shown.answer)
		}
		if i > 0 {
			continue
		}
		g.line(t, "refused the page", func(l line) bool {
			return l.Proto == "websocket" && l.Reason == "denied" && strings.Contains(l.Err, shown.origin)
		})
		if n := g.dials(t) + int(echo.Accepted()); n != 0 {
			t.Errorf("%s: the service was dialed %d times", shown.origin, n)
		}
	}
}

// browse is world.browse in the network of the test.
func browse(t *testing.T, args ...string) (shown, errs string) {
	t.Helper()
	return new(world).browse(t, args...)
}

// browse has a browser that is new show a page, and returns that as it is when
// it is loaded, and what the browser has to say besides. The last of args is
// the page's URL.
func (w *world) browse(t *testing.T, args ...string) (shown, errs string) {
	t.Helper()
	shown, errs, _ = runCmd(t, w.inside(t, "chromium", slices.Concat(browserFlags, []string{"--user-data-dir=" + t.TempDir()}, args)...))
	return shown, errs
}

// browserFlags have Chromium write a page to standard output.
var browserFlags = []string{
	"--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
	"--timeout=60000", "--dump-dom",
}
