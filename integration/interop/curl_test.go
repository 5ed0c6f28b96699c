//go:build unix

package interop

import (
	"net"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
)

// The three ways of curl to a service behind a gateway. The arguments come
// before the URL's.
func curls(g *gateway) map[string][]string {
	_, port, _ := net.SplitHostPort(g.addr)
	return map[string][]string{
		"resolve":     {"--resolve", svc + ":" + port + ":127.0.0.1", "https://" + svc + ":" + port + "/"},
		"proxy":       {"-x", "http://" + g.addr, "https://" + svc + "/"},
		"proxytunnel": {"--proxytunnel", "-x", "http://" + g.addr, "https://" + svc + ":8443/"},
	}
}

func TestCurlReachesNginxThatVerifiedItsCertificate(t *testing.T) {
	w := newWorld(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(w.nginx(t)))
	for how, args := range curls(g) {
		for _, version := range []struct{ flag, proto string }{{"--http1.1", "HTTP/1.1"}, {"--http2", "HTTP/2.0"}} {
			t.Run(how+version.flag, func(t *testing.T) {
				all := append([]string{"-sS", version.flag, "--cacert", w.ca, "--cert", w.cert, "--key", w.key}, args...)
				out, errs, code := command(t, "curl", all...)
				want := "dn=CN=web serial=" + w.serial() + " proto=" + version.proto + " sni=" + svc + "\n"
				if out != want || code != 0 {
					t.Errorf("curl: exit code %d, got %q, %s, want %q", code, out, errs, want)
				}
			})
		}
	}
	// The gateway saw what curl offers, and that by SNI only.
	g.line(t, "logged a tunnel by SNI with h2", func(l line) bool {
		return l.Proto == "sni" && l.ALPN == "h2,http/1.1" && l.Reason == "done" && l.Target == svc && l.In > 0 && l.Out > 0
	})
	g.line(t, "logged a tunnel by CONNECT", func(l line) bool {
		return l.Proto == "connect" && l.ALPN == "" && l.Reason == "done" && l.Target == svc+":8443"
	})
}

// A certificate is the service's to judge: the gateway carries the handshake
// and never says no to it.
func TestNginxRefusesAWrongCertificateAndTheGatewayDoesNot(t *testing.T) {
	w := newWorld(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(w.nginx(t)))
	for how, args := range curls(g) {
		for _, c := range []struct {
			name  string
			certs []string
			says  string
		}{
			{"of another CA", []string{"--cert", w.wrongCert, "--key", w.wrongKey}, "The SSL certificate error"},
			{"none", nil, "No required SSL certificate was sent"},
		} {
			t.Run(how+" "+c.name, func(t *testing.T) {
				all := append([]string{"-sS", "-w", "%{http_code}", "--cacert", w.ca}, c.certs...)
				out, errs, code := command(t, "curl", append(all, args...)...)
				if !strings.Contains(out, c.says) || !strings.HasSuffix(out, "400") || code != 0 {
					t.Errorf("curl: exit code %d, got %q, %s, want nginx's 400 that says %q", code, out, errs, c.says)
				}
			})
		}
	}
	testnet.Eventually(t, patience, func() bool {
		done := 0
		for _, l := range g.lines() {
			if l.Reason == "done" {
				done++
			}
		}
		return done == 6
	}, "six tunnels that ended in order")
	for _, l := range g.lines() {
		if l.Msg == "refused" {
			t.Errorf("the gateway refused: %+v", l)
		}
	}
}

// Without TLS inside, --proxytunnel carries plain HTTP.
func TestCurlTunnelsPlainHTTP(t *testing.T) {
	const page = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nplain\n"
	s := testnet.Serve(t, func(c net.Conn) {
		if _, err := c.Read(make([]byte, 4096)); err == nil {
			_, _ = c.Write([]byte(page))
			_ = testnet.CloseWrite(c)
		}
	})
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", "plain.example.test:80="+s.Addr())
	out, errs, code := command(t, "curl", "-sS", "--proxytunnel", "-x", "http://"+g.addr, "http://plain.example.test/")
	if out != "plain\n" || code != 0 {
		t.Errorf("curl: exit code %d, got %q, %s", code, out, errs)
	}
	// Without --proxytunnel it is no CONNECT, and the gateway is no HTTP proxy.
	out, _, _ = command(t, "curl", "-sS", "-w", "%{http_code}", "-x", "http://"+g.addr, "http://plain.example.test/")
	if !strings.HasSuffix(out, "405") {
		t.Errorf("a plain request: got %q, want 405", out)
	}
}
