//go:build unix

package interop

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// startProxied starts a gateway whose one listener expects a PROXY header from
// loopback.
func startProxied(t *testing.T, w *world, listener, services string) *gateway {
	t.Helper()
	return startGateway(t, "--config", w.write(t, "proxied.yaml", fmt.Sprintf(`listeners:
  - address: 127.0.0.1:%s
    proxyProtocol: {from: [127.0.0.1/32]}
%sadmin: 127.0.0.1:%s
services:
%s`, freePort(t), listener, freePort(t), services)))
}

// haproxy starts HAProxy with the rest of a configuration. It waits for addr.
func (w *world) haproxy(t *testing.T, addr, rest string) *process {
	t.Helper()
	p := start(t, "haproxy", "-db", "-f", w.write(t, "haproxy.cfg", `defaults
	mode tcp
	timeout connect 5s
	timeout client 20s
	timeout server 20s
`+rest))
	p.listens(t, addr)
	return p
}

// get fetches the service's page by way of addr, from an address that can be
// told from the proxies'.
func (w *world) get(t *testing.T, addr, from string) string {
	t.Helper()
	_, port, _ := net.SplitHostPort(addr)
	out, errs, code := command(t, "curl", "-sS", "--interface", from, "--cacert", w.ca, "--cert", w.cert, "--key", w.key,
		"--resolve", svc+":"+port+":127.0.0.1", "https://"+svc+":"+port+"/")
	if code != 0 {
		t.Errorf("curl: exit code %d, %s", code, errs)
	}
	return out
}

// In: HAProxy and nginx in front say who the client is, and the service sees
// its certificate all the same.
func TestPROXYFromHAProxyAndNginx(t *testing.T) {
	w := newWorld(t)
	g := startProxied(t, w, "", service(svc, w.nginx(t)))
	want := "dn=CN=web serial=" + w.serial() + " proto=HTTP/2.0 sni=" + svc + "\n"
	fronts := []struct{ name, options string }{
		{"v1", "send-proxy"},
		{"v2", "send-proxy-v2"},
		{"v2 with all it has", "send-proxy-v2-ssl-cn proxy-v2-options ssl,cert-cn,authority,unique-id,crc32c"},
		{"v2 with health checks", "send-proxy-v2 proxy-v2-options crc32c,unique-id check check-send-proxy inter 100ms"},
		{"v1 with health checks", "send-proxy check check-send-proxy inter 100ms"},
	}
	for i, front := range fronts {
		t.Run("HAProxy "+front.name, func(t *testing.T) {
			addr := "127.0.0.1:" + freePort(t)
			w.haproxy(t, addr, fmt.Sprintf("listen f\n\tbind %s\n\tunique-id-format id-%%pid\n\tserver g %s %s\n", addr, g.addr, front.options))
			from := fmt.Sprintf("127.0.1.%d", i+1)
			if got := w.get(t, addr, from); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
			g.line(t, "logged a tunnel from "+from, func(l line) bool {
				return strings.HasPrefix(l.Source, from+":") && l.Proto == "sni" && l.In > 0 && l.Out > 0
			})
			if strings.Contains(front.options, "check") {
				g.line(t, "logged a health check", func(l line) bool { return l.Reason == "no-hello" && strings.HasPrefix(l.Source, "127.0.0.1:") })
			}
		})
	}
	t.Run("nginx", func(t *testing.T) {
		addr := "127.0.0.1:" + freePort(t)
		w.runNginx(t, "nginx-proxied", addr, fmt.Sprintf("server { listen %s; proxy_pass %s; proxy_protocol on; }", addr, g.addr), "")
		if got := w.get(t, addr, "127.0.1.99"); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		g.line(t, "logged a tunnel from 127.0.1.99", func(l line) bool { return strings.HasPrefix(l.Source, "127.0.1.99:") && l.In > 0 && l.Out > 0 })
	})
	t.Run("curl", func(t *testing.T) { // --haproxy-protocol is v1
		_, port, _ := net.SplitHostPort(g.addr)
		out, errs, code := command(t, "curl", "-sS", "--haproxy-protocol", "--cacert", w.ca, "--cert", w.cert, "--key", w.key,
			"--resolve", svc+":"+port+":127.0.0.1", "https://"+svc+":"+port+"/")
		if out != want || code != 0 {
			t.Errorf("curl: exit code %d, got %q, %s", code, out, errs)
		}
	})
	for _, l := range g.lines() {
		if l.Msg == "refused" || l.Reason == "bad-preamble" || l.Peer != "" {
			t.Errorf("the gateway said %+v, and nothing was wrong", l)
		}
	}
}

// HAProxy's health checks find a gateway up, and find out when it is not.
func TestHAProxyHealthChecks(t *testing.T) {
	w := newWorld(t)
	g := startProxied(t, w, "", service(svc, w.nginx(t)))
	addr := "127.0.0.1:" + freePort(t)
	p := w.haproxy(t, addr, fmt.Sprintf("listen f\n\tbind %s\n\tserver good %s send-proxy-v2 check check-send-proxy inter 50ms fall 2 rise 1\n\tserver bad 127.0.0.1:%s send-proxy-v2 check check-send-proxy inter 50ms fall 2\n",
		addr, g.addr, freePort(t)))
	p.says(t, "Server f/bad is DOWN")
	testnet.Eventually(t, patience, func() bool {
		n := 0
		for _, l := range g.lines() {
			if l.Reason == "no-hello" {
				n++
			}
		}
		return n >= 5
	}, "five health checks")
	if strings.Contains(p.output(), "f/good is DOWN") {
		t.Error("HAProxy found the gateway down")
	}
}

// Pinned to proxy, the name that HAProxy took from a TLS it ended leads to the
// service, whose server speaks first.
func TestPROXYAuthorityRoutes(t *testing.T) {
	w := newWorld(t)
	banner := testnet.Greeting(t, "welcome\n")
	g := startProxied(t, w, "    protocols: [proxy]\n", service(svc, banner.Addr()))
	addr := "127.0.0.1:" + freePort(t)
	pem, err := os.ReadFile(w.svcCert)
	must(t, err)
	key, err := os.ReadFile(w.svcKey)
	must(t, err)
	w.haproxy(t, addr, fmt.Sprintf("listen f\n\tbind %s ssl crt %s\n\tserver g %s send-proxy-v2 proxy-v2-options authority,crc32c,ssl check check-send-proxy inter 100ms\n",
		addr, w.write(t, "both.pem", string(pem)+string(key)), g.addr))
	client := start(t, "openssl", "s_client", "-connect", addr, "-servername", svc, "-quiet", "-CAfile", w.ca)
	client.says(t, "welcome\n")
	client.signal(syscall.SIGTERM)
	g.line(t, "logged a tunnel by proxy", func(l line) bool { return l.Proto == "proxy" && l.Target == svc && l.Out > 0 })
	start(t, "openssl", "s_client", "-connect", addr, "-servername", "nobody.example.test", "-quiet", "-CAfile", w.ca)
	g.line(t, "refused a name there is not", func(l line) bool {
		return l.Proto == "proxy" && l.Reason == "no-route" && l.Target == "nobody.example.test"
	})
}

// Out: HAProxy and nginx behind the gateway are told who the client is.
func TestPROXYToHAProxyAndNginx(t *testing.T) {
	for _, version := range []string{"v1", "v2"} {
		t.Run("HAProxy "+version, func(t *testing.T) {
			w := newWorld(t)
			addr := "127.0.0.1:" + freePort(t)
			// It ends the TLS and says what it was told.
			pem, err := os.ReadFile(w.svcCert)
			must(t, err)
			key, err := os.ReadFile(w.svcKey)
			must(t, err)
			w.haproxy(t, addr, fmt.Sprintf(`frontend f
	mode http
	bind %s accept-proxy ssl crt %s ca-file %s verify required
	http-request return status 200 content-type text/plain lf-string "src=%%[src] dst=%%[dst] authority=%%[fc_pp_authority] id=%%[fc_pp_unique_id] cn=%%[ssl_c_s_dn(CN)]\n"
`, addr, w.write(t, "both.pem", string(pem)+string(key)), w.ca))
			g := startGateway(t, "--config", w.write(t, "out.yaml", fmt.Sprintf("listeners:\n  - address: 127.0.0.1:%s\nadmin: 127.0.0.1:%s\nservices:\n%s",
				freePort(t), freePort(t), service(svc, addr, "proxyProtocol: "+version))))
			got := w.get(t, g.addr, "127.0.2.7")
			want := `^src=127\.0\.2\.7 dst=127\.0\.0\.1 authority= id= cn=web\n$`
			if version == "v2" {
				want = `^src=127\.0\.2\.7 dst=127\.0\.0\.1 authority=svc\.example\.test id=[0-9a-f]{32} cn=web\n$`
			}
			if !regexp.MustCompile(want).MatchString(got) {
				t.Errorf("HAProxy was told %q, want %q", got, want)
			}
			g.line(t, "logged the tunnel", func(l line) bool { // HAProxy may answer curl's end with a reset
				return strings.HasPrefix(l.Source, "127.0.2.7:") && (l.Reason == "done" || l.Reason == "reset")
			})
		})
		t.Run("nginx "+version, func(t *testing.T) {
			w := newWorld(t)
			addr := "127.0.0.1:" + freePort(t)
			w.runNginx(t, "nginx-proxied", addr, "", fmt.Sprintf(`server {
		listen %s ssl proxy_protocol;
		ssl_certificate %s;
		ssl_certificate_key %s;
		default_type text/plain;
		location / { return 200 "src=$proxy_protocol_addr:$proxy_protocol_port\n"; }
	}`, addr, w.svcCert, w.svcKey))
			g := startGateway(t, "--config", w.write(t, "out.yaml", fmt.Sprintf("listeners:\n  - address: 127.0.0.1:%s\nadmin: 127.0.0.1:%s\nservices:\n%s",
				freePort(t), freePort(t), service(svc, addr, "proxyProtocol: "+version))))
			got := w.get(t, g.addr, "127.0.2.8")
			if !strings.HasPrefix(got, "src=127.0.2.8:") {
				t.Errorf("nginx was told %q, want 127.0.2.8", got)
			}
		})
	}
}

// What is no header, comes from elsewhere, or comes where none is expected, is
// reset, and no endpoint hears of it.
func TestPROXYIsNeverGuessed(t *testing.T) {
	w := newWorld(t)
	tap := testnet.NewTap(t)
	header := "PROXY TCP4 198.51.100.7 192.0.2.1 56789 443\r\n"
	g := startProxied(t, w, "", service(svc, tap.Addr()))
	open := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(tap.Addr()))
	for _, row := range []struct {
		name   string
		g      *gateway
		from   string
		raw    string
		reason string
		source string // "" means the socket's peer
	}{
		{"no header", g, "127.0.0.1", string(hello(svc)), "bad-preamble", ""},
		{"from elsewhere", g, "127.0.0.2", header + string(hello(svc)), "denied", ""},
		{"where none is expected", open, "127.0.0.1", header + string(hello(svc)), "bad-preamble", ""},
		{"v2 where none is expected", open, "127.0.0.1", "\r\n\r\n\x00\r\nQUIT\n\x21\x00\x00\x00" + string(hello(svc)), "bad-preamble", ""},
		{"twice", g, "127.0.0.1", header + "PROXY TCP4 198.51.100.8 192.0.2.1 1 443\r\n" + string(hello(svc)), "bad-preamble", "198.51.100.7:56789"},
		{"in lower case", g, "127.0.0.1", strings.ToLower(header) + string(hello(svc)), "bad-preamble", ""},
		{"65,535 bytes of it", g, "127.0.0.1", "\r\n\r\n\x00\r\nQUIT\n\x21\x11\xff\xff" + strings.Repeat("x", 65535) + string(hello(svc)), "bad-preamble", ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			local := net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(row.from), 0))
			d := net.Dialer{LocalAddr: local, Timeout: patience}
			c, err := d.DialContext(t.Context(), "tcp", row.g.addr)
			source := row.source
			if err == nil { // who is not trusted may be reset before this returns
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(patience))
				if source == "" {
					source = c.LocalAddr().String()
				}
				var got []byte
				if _, err = io.WriteString(c, row.raw); err == nil {
					got, err = io.ReadAll(c)
				}
				if len(got) > 0 {
					t.Errorf("got %q", got)
				}
			}
			if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
				t.Errorf("got %v, want a reset", err)
			}
			row.g.line(t, "logged a connection from "+source, func(l line) bool {
				return l.Reason == row.reason && (l.Source == source || source == "" && strings.HasPrefix(l.Source, row.from+":"))
			})
		})
	}
	if n := len(tap.Flows()); n > 0 {
		t.Errorf("the endpoint heard of %d connections, want none", n)
	}
}
