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
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/summerwind/h2spec/config"
	"github.com/summerwind/h2spec/generic"
	"github.com/summerwind/h2spec/hpack"
	h2specs "github.com/summerwind/h2spec/http2"
	"github.com/summerwind/h2spec/spec"

	"culvert.dev/internal/testca"
)

// startTLS starts a gateway that ends TLS for localhost at its first port, and
// passes on what else there is. It asks for a client certificate by clients,
// "required", "optional" or "". At its second port all TLS ends, and every
// protocol may be inside. It returns them as localhost:PORT.
func startTLS(t *testing.T, w *world, clients, backend string) (g *gateway, own, all string) {
	t.Helper()
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	issue(t, ca, w.dir, "gw", testca.Options{SPIFFEID: "spiffe://example.test/gw", DNSNames: []string{"localhost"}, Usage: testca.ServerOnly})
	ask := ""
	if clients != "" {
		ask = ", clientCAFile: ca.crt, clientCertificates: " + clients
	}
	conf := fmt.Sprintf(`
listeners:
  - address: 127.0.0.1:%s
    protocols: [sni]
    tls: {certificateFile: gw.crt, keyFile: gw.key%s}
  - address: 127.0.0.1:%s
    tls: {certificateFile: gw.crt, keyFile: gw.key}
admin: 127.0.0.1:%s
services:
  - {name: %s, endpoints: ["%s"]}
`, freePort(t), ask, freePort(t), freePort(t), svc, backend)
	g = startGateway(t, "--config", w.write(t, "culvert.yaml", conf))
	return g, strings.Replace(g.addrs[0], "127.0.0.1", "localhost", 1), strings.Replace(g.addrs[1], "127.0.0.1", "localhost", 1)
}

// curl as the client of a proxy that wants TLS and a certificate; the service
// inside wants both again.
func TestCurlByAProxyThatEndsTLS(t *testing.T) {
	w := newWorld(t)
	g, own, _ := startTLS(t, w, "required", w.nginx(t))
	args := []string{"-sS", "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "--proxy-cacert", w.ca, "-x", "https://" + own, "https://" + svc + "/"}
	out, errs, code := command(t, "curl", append([]string{"--proxy-cert", w.cert, "--proxy-key", w.key}, args...)...)
	if want := "dn=CN=web serial=" + w.serial() + " proto=HTTP/2.0 sni=" + svc + "\n"; out != want || code != 0 {
		t.Errorf("curl: exit code %d, got %q, %s, want %q", code, out, errs, want)
	}
	// curl ends its TLS to a proxy without close_notify, which is no end.
	g.line(t, "logged the tunnel and whose it was", func(l line) bool {
		return l.Proto == "connect" && l.Reason == "reset" && l.Err == "the client ended TLS without close_notify" && l.Peer == clientPeer && l.Target == svc+":443"
	})
	if _, errs, code = command(t, "curl", args...); code == 0 {
		t.Errorf("curl without a certificate: exit code %d, %s, want to be refused", code, errs)
	}
	g.line(t, "refused who has no certificate", func(l line) bool { return l.Proto == "tls" && l.Reason == "no-auth" && l.Peer == "" })

	// The same port passes the service's own TLS on.
	_, port, _ := net.SplitHostPort(own)
	out, errs, code = command(t, "curl", "-sS", "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "--resolve", svc+":"+port+":127.0.0.1", "https://"+svc+":"+port+"/")
	if want := "dn=CN=web serial=" + w.serial() + " proto=HTTP/2.0 sni=" + svc + "\n"; out != want || code != 0 {
		t.Errorf("curl by SNI: exit code %d, got %q, %s, want %q", code, out, errs, want)
	}
}

// curl asks proxies by HTTP/2 from 8.1 on. Two transfers share a tunnel, which
// ends with the connection: curl does not end it before.
func TestCurlByHTTP2(t *testing.T) {
	w := newWorld(t)
	g, own, _ := startTLS(t, w, "required", w.nginx(t))
	want := "dn=CN=web serial=" + w.serial() + " proto=HTTP/2.0 sni=" + svc + "\n"
	out, errs, code := command(t, "../../bin/newcurl/curl", "-sS", "-v", "--proxy-http2", "--cacert", w.ca, "--cert", w.cert, "--key", w.key,
		"--proxy-cacert", w.ca, "--proxy-cert", w.cert, "--proxy-key", w.key, "-x", "https://"+own, "https://"+svc+"/", "https://"+svc+":443/again")
	if out != want+want || code != 0 || !strings.Contains(errs, "CONNECT tunnel: HTTP/2 negotiated") {
		t.Errorf("curl: exit code %d, got %q, %s, want %q twice, by HTTP/2", code, out, errs, want)
	}
	g.line(t, "logged the tunnel and whose it was", func(l line) bool {
		return l.Proto == "connect-h2" && l.Reason == "reset" && l.Peer == clientPeer && l.Target == svc+":443"
	})
	// Of an answer that ends its stream curl says that it could not receive.
	_, errs, code = command(t, "../../bin/newcurl/curl", "-sS", "--proxy-http2", "--proxy-cacert", w.ca, "--proxy-cert", w.cert, "--proxy-key", w.key,
		"-x", "https://"+own, "https://nobody.example.test/")
	if code != 56 {
		t.Errorf("curl to a name there is not: exit code %d, %s, want 56", code, errs)
	}
	g.line(t, "refused the name there is not", func(l line) bool {
		return l.Proto == "connect-h2" && l.Reason == "no-route" && l.Target == "nobody.example.test:443"
	})
}

// nghttp2's CONNECT, by Node, inside of TLS with a client certificate.
func TestNodeTunnelsOverHTTP2InsideOfTLS(t *testing.T) {
	w := newWorld(t)
	g, own, _ := startTLS(t, w, "optional", w.nginx(t))
	out, errs, code := command(t, "node", "testdata/h2.js", "https://"+own, svc, w.ca, w.cert, w.key)
	one := "200 dn=CN=web serial=" + w.serial() + " proto=HTTP/1.1 sni=" + svc + "\n"
	want := one + one + "403 culvert; error=destination_not_found; details=\"no-route\"\n"
	if out != want || code != 0 {
		t.Errorf("node: exit code %d, got %q, %s, want %q", code, out, errs, want)
	}
	g.line(t, "logged whose the tunnels were", func(l line) bool { return l.Proto == "connect-h2" && l.Peer == clientPeer })
}

// What openssl shows of the gateway's own TLS.
func TestOpenSSLMeetsTheGatewaysTLS(t *testing.T) {
	w := newWorld(t)
	g, own, all := startTLS(t, w, "required", "127.0.0.1:1")
	for _, c := range []struct {
		name, addr string
		args       []string
		says       string
	}{
		{"no certificate", own, nil, "alert certificate required"},
		{"of another CA", own, []string{"-cert", w.wrongCert, "-key", w.wrongKey}, "alert bad certificate"},
		{"TLS 1.2, where 1.3 is the least", own, []string{"-tls1_2"}, "alert protocol version"},
		{"an ALPN that nobody speaks", own, []string{"-alpn", "imap"}, "no application protocol"},
		{"HTTP/2 by ALPN", all, []string{"-alpn", "http/1.1,h2"}, "ALPN protocol: h2"},
		{"no ticket", all, nil, "New, TLSv1.3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := start(t, "openssl", append([]string{"s_client", "-connect", c.addr, "-servername", "localhost", "-CAfile", w.ca}, c.args...)...)
			p.says(t, c.says)
			if strings.Contains(p.output(), "Post-Handshake New Session Ticket") {
				t.Error("a session ticket was sent")
			}
		})
	}
	g.line(t, "refused a certificate of another CA", func(l line) bool { return l.Reason == "no-auth" && strings.Contains(l.Err, "unknown authority") })
}

// A resumed session would have the identity of an earlier one.
func TestNoSessionIsResumed(t *testing.T) {
	w := newWorld(t)
	_, _, addr := startTLS(t, w, "", "127.0.0.1:1")
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	cfg := &tls.Config{RootCAs: ca.Pool(), ClientSessionCache: tls.NewLRUClientSessionCache(8), NextProtos: []string{"h2"}}
	for range 3 {
		c, err := tls.Dial("tcp", addr, cfg)
		must(t, err)
		_ = c.SetDeadline(time.Now().Add(patience))
		_, err = c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
		must(t, err)
		_, err = c.Read(make([]byte, 1<<10))
		must(t, err) // a ticket would have come before
		if c.ConnectionState().DidResume {
			t.Error("a session was resumed")
		}
		_ = c.Close()
	}
}

// TestH2SpecInsideOfTLS runs h2spec's cases against HTTP/2 by ALPN.
func TestH2SpecInsideOfTLS(t *testing.T) {
	w := newWorld(t)
	_, _, addr := startTLS(t, w, "", "127.0.0.1:1")
	host, port, err := net.SplitHostPort(addr)
	must(t, err)
	n, err := strconv.Atoi(port)
	must(t, err)
	cfg := &config.Config{Host: host, Port: n, Path: "/", Timeout: patience / 3, MaxHeaderLen: 4000, TLS: true, Insecure: true}
	passed := 0
	for _, group := range []*spec.TestGroup{generic.Spec(), h2specs.Spec(), hpack.Spec()} {
		group.Test(cfg)
		passed += group.PassedCount
		for _, failed := range failures(group) {
			t.Errorf("h2spec: %s", failed)
		}
	}
	if passed != 145 {
		t.Errorf("%d cases passed, want 145", passed)
	}
}

// A browser whose proxy is asked inside of TLS, by HTTP/2.
func TestChromiumByAProxyThatEndsTLS(t *testing.T) {
	w := newWorld(t)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(rw, "served %s to %s", r.Host, r.Proto)
	}))
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{w.service.TLS}}
	srv.StartTLS()
	t.Cleanup(srv.Close)
	g, own, _ := startTLS(t, w, "", srv.Listener.Addr().String())
	pair, err := tls.LoadX509KeyPair(w.dir+"/gw.crt", w.dir+"/gw.key")
	must(t, err)
	var pins []string
	for _, spki := range [][]byte{srv.Certificate().RawSubjectPublicKeyInfo, pair.Leaf.RawSubjectPublicKeyInfo} {
		sum := sha256.Sum256(spki)
		pins = append(pins, base64.StdEncoding.EncodeToString(sum[:]))
	}
	out, errs := browse(t, "--ignore-certificate-errors-spki-list="+strings.Join(pins, ","),
		"--proxy-server=https://"+own, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1", "https://"+svc+"/")
	if want := "served " + svc + " to HTTP/1.1"; !strings.Contains(out, want) {
		t.Errorf("got %q, want %q in it\n%s", out, want, errs)
	}
	g.line(t, "logged a tunnel by HTTP/2", func(l line) bool { return l.Proto == "connect-h2" && l.Target == svc+":443" })
}
