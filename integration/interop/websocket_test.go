//go:build unix

package interop

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect/h2"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// loadBalancer is a certificate of the world's CA for localhost, as a pair of
// files for nginx and as one for HAProxy.
func (w *world) loadBalancer(t *testing.T) (cert, key, both string) {
	t.Helper()
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	issue(t, ca, w.dir, "lb", testca.Options{SPIFFEID: "spiffe://example.test/lb", DNSNames: []string{"localhost"}, Usage: testca.ServerOnly})
	cert, key = filepath.Join(w.dir, "lb.crt"), filepath.Join(w.dir, "lb.key")
	c, err := os.ReadFile(cert)
	must(t, err)
	k, err := os.ReadFile(key)
	must(t, err)
	return cert, key, w.write(t, "lb.pem", string(c)+string(k))
}

// silence is how long the load balancers here bear it. It is short, so that
// a test can be longer.
const silence = 2 * time.Second

// nginxBefore ends TLS in front of the gateway and passes WebSockets on, as
// nginx's own documentation says to. The options are those of its listen: with
// http2 it speaks that to clients, which get no WebSocket there. It ends a
// connection on which nothing is sent for the time idle.
func (w *world) nginxBefore(t *testing.T, gateway, options string, idle time.Duration) (addr string) {
	t.Helper()
	addr = net.JoinHostPort(w.host, freePort(t))
	cert, key, _ := w.loadBalancer(t)
	w.runNginx(t, "nginx-lb", addr, "", fmt.Sprintf(`
	server {
		listen %[1]s ssl %[6]s;
		ssl_certificate %[2]s;
		ssl_certificate_key %[3]s;
		location /edge/ {
			proxy_pass http://%[4]s;
			proxy_http_version 1.1;
			proxy_set_header Upgrade $http_upgrade;
			proxy_set_header Connection "upgrade";
			proxy_set_header Host $host;
			proxy_read_timeout %[5]d;
			proxy_send_timeout %[5]d;
		}
	}`, addr, cert, key, gateway, int(idle/time.Second), options))
	return addr
}

// haproxyBefore does the same. The options are those of its bind and of its
// server, which may say HTTP/2 each: "alpn h2,http/1.1" and "proto h2".
func (w *world) haproxyBefore(t *testing.T, gateway, bind, server string) (addr string) {
	t.Helper()
	addr = "127.0.0.1:" + freePort(t)
	_, _, pem := w.loadBalancer(t)
	conf := fmt.Sprintf(`global
	maxconn 100
defaults
	mode http
	timeout connect 5s
	timeout client %[4]ds
	timeout server %[4]ds
	timeout tunnel %[4]ds
frontend lb
	bind %[1]s ssl crt %[2]s %[5]s
	default_backend gateway
backend gateway
	server gateway %[3]s %[6]s
`, addr, pem, gateway, int(silence/time.Second), bind, server)
	start(t, "haproxy", "-db", "-f", w.write(t, "haproxy-lb.cfg", conf)).listens(t, addr)
	return addr
}

// webSocketGateway serves the world's service, at a path of its own, by
// WebSocket and by the others.
func (w *world) webSocketGateway(t *testing.T, service string) *gateway {
	t.Helper()
	return startGateway(t, "--config", w.write(t, "websocket.yaml", fmt.Sprintf(`
admin: 127.0.0.1:%s
listeners:
  - address: 127.0.0.1:%s
    protocols: [sni, connect, connect-h2, websocket]
    websocket: {path: /edge/}
services:
  - name: %s
    endpoints: [%q]
`, freePort(t), freePort(t), svc, service)))
}

// Load balancers that let HTTP through and end the TLS to themselves: the TLS
// to the service is the client's own, and so is every end of the stream.
func TestWebSocketBehindLoadBalancers(t *testing.T) {
	t.Parallel()
	const alpn, h2c = "alpn h2,http/1.1", "proto h2"
	haproxy := func(bind, server string) func(*world, *testing.T, string) string {
		return func(w *world, t *testing.T, to string) string { return w.haproxyBefore(t, to, bind, server) }
	}
	nginx := func(options string) func(*world, *testing.T, string) string {
		return func(w *world, t *testing.T, to string) string { return w.nginxBefore(t, to, options, silence) }
	}
	for name, row := range map[string]struct {
		before func(*world, *testing.T, string) string
		http2  bool // what is asked for
		shared bool // what comes of it
	}{
		"nginx":                         {nginx(""), false, false},
		"nginx with HTTP/2":             {nginx("http2"), true, false},
		"HAProxy":                       {haproxy(alpn, ""), false, false},
		"HAProxy, HTTP/2 to it":         {haproxy(alpn, ""), true, true},
		"HAProxy, HTTP/2 from it":       {haproxy("", h2c), true, false},
		"HAProxy, HTTP/2 on both sides": {haproxy(alpn, h2c), true, true},
	} {
		t.Run(name, func(t *testing.T) {
			before, mode, shared := row.before, "websocket", row.shared
			if row.http2 {
				mode = "websocket-h2"
			}
			w := newWorld(t)
			ca, err := testca.Load(w.dir, nil)
			must(t, err)
			tap := testnet.NewTap(t)
			echo := testnet.Echo(t)
			d := func(t *testing.T, service string) (tunnel.Dialer, *gateway) {
				g := w.webSocketGateway(t, service)
				_, port, _ := net.SplitHostPort(before(w, t, g.addr))
				plain := &ws.Dialer{URL: "wss://localhost:" + port + "/edge/", TLS: &tls.Config{RootCAs: ca.Pool()}, Options: ws.Options{Ping: silence / 4}}
				if !row.http2 {
					return plain, g
				}
				d := upstream.NewWebSocketDialer(plain)
				t.Cleanup(func() { _ = d.Close() })
				return d, g
			}
			t.Run("a client's certificate", func(t *testing.T) {
				d, g := d(t, w.serveHTTPS(t, http.HandlerFunc(whoami)))
				if got := w.fetch(t, d); !strings.Contains(got, "you are "+clientID) {
					t.Errorf("got %q, want it to name %s", got, clientID)
				}
				out, errs, code := command(t, "culvert", "probe", svc, "--mode", mode, "--via", urlOf(d), "--ca", w.ca, "--cert", w.cert, "--key", w.key)
				if code != 0 || !strings.Contains(out, "reached in") || strings.Contains(out, "over HTTP/2") != shared {
					t.Errorf("culvert probe --mode %s: exit code %d, over HTTP/2 wanted: %v\n%s%s", mode, code, shared, out, errs)
				}
				if l := g.line(t, "logged a tunnel", func(l line) bool { return l.Proto == "websocket" }); l.Target != svc+":443" {
					t.Errorf("the log: got %+v, want target %s:443", l, svc)
				}
			})
			t.Run("half-close", func(t *testing.T) {
				d, _ := d(t, echo.Addr())
				c := w.open(t, d)
				sent := noise(3 << 20)
				if _, shared := c.NetConn().(*h2.Stream); shared {
					// HAProxy before 3.1 reads nothing from a connection of HTTP/2 while one of
					// its streams cannot go on, not even the window updates that would let it:
					// an echo of more than the buffers hold would be for ever.
					sent = sent[:32<<10]
				}
				go func() {
					_, _ = c.Write(sent)
					_ = c.CloseWrite()
				}()
				got, err := io.ReadAll(c)
				if err != nil || !bytes.Equal(got, sent) {
					t.Errorf("got %d bytes, %v, want the %d that were sent and their end", len(got), err, len(sent))
				}
			})
			t.Run("silence", func(t *testing.T) {
				d, _ := d(t, echo.Addr())
				c := w.open(t, d)
				_ = c.SetReadDeadline(time.Now().Add(3 * silence / 2))
				if _, err := c.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "timeout") {
					t.Errorf("after %v of silence: %v, want it to last", silence, err)
				}
				_ = c.SetReadDeadline(time.Now().Add(patience))
				_, _ = c.Write([]byte("x"))
				if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
					t.Errorf("after %v of silence: %v", 3*silence/2, err)
				}
			})
			t.Run("a client's abort", func(t *testing.T) {
				d, g := d(t, tap.Addr())
				c := w.open(t, d)
				_, _ = c.Write([]byte("cut"))
				testnet.Eventually(t, patience, func() bool { f := tap.Flows(); return len(f) > 0 && len(f[len(f)-1].Data) == 3 }, "the bytes at the service")
				_ = c.Abort()
				if l := g.line(t, "logged the tunnel", func(l line) bool { return l.Proto == "websocket" }); l.Reason != "reset" {
					t.Errorf("the log: got %+v, want reset", l)
				}
				testnet.Eventually(t, patience, func() bool { f := tap.Flows(); return f[len(f)-1].End != testnet.Open }, "the end at the service")
				if f := tap.Flows(); f[len(f)-1].End != testnet.RST {
					t.Errorf("the service saw %v, want a reset", f[len(f)-1].End)
				}
			})
			t.Run("a service's abort", func(t *testing.T) {
				cut := testnet.Serve(t, func(c net.Conn) {
					_, _ = io.ReadFull(c, make([]byte, 1))
					_ = c.(interface{ SetLinger(int) error }).SetLinger(0)
				})
				d, _ := d(t, cut.Addr())
				c := w.open(t, d)
				_, _ = c.Write([]byte("x"))
				if got, err := io.ReadAll(c); err == nil {
					t.Errorf("got %q and an orderly end, want an abort", got)
				}
			})
			t.Run("a refusal", func(t *testing.T) {
				d, _ := d(t, echo.Addr())
				if _, err := d.DialContext(t.Context(), "tcp", "nobody.example.test:443"); err == nil || !strings.Contains(err.Error(), "with status 403, no-route") {
					t.Errorf("got %v, want no-route, through the load balancer", err)
				}
			})
		})
	}
}

// urlOf is that of a dialer of either kind.
func urlOf(d tunnel.Dialer) string {
	if d, ok := d.(*ws.Dialer); ok {
		return d.URL
	}
	return d.(*upstream.WebSocketDialer).URL
}

// open opens a stream to the service.
func (w *world) open(t *testing.T, d tunnel.Dialer) *ws.Stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", svc+":443")
	must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c.(*ws.Stream)
}

// fetch asks the service for / with the client's certificate.
func (w *world) fetch(t *testing.T, d tunnel.Dialer) string {
	t.Helper()
	client := http.Client{Timeout: patience, Transport: &http.Transport{
		DialContext: d.DialContext, TLSClientConfig: w.client.ClientConfig(svc), DisableKeepAlives: true,
	}}
	resp, err := client.Get("https://" + svc + "/")
	must(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	must(t, err)
	return string(body)
}

// WebSocket clients that know nothing of culvert.v1.
func TestWebSocketClientsInOtherLanguages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.webSocketGateway(t, w.serveHTTPS(t, http.HandlerFunc(whoami)))
	for _, c := range []struct {
		name    string
		command []string
		also    string
	}{
		{"Node", []string{"node", "--experimental-websocket", "testdata/websocket_client.js"}, "closed with 1000"},
		{"Python", []string{"/usr/bin/python3", "testdata/websocket_client.py"}, "with an Origin: 403"},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := append(c.command[1:], "ws://"+g.addr+"/edge/", svc, w.ca, w.cert, w.key)
			out, errs, code := command(t, c.command[0], args...)
			for _, want := range []string{"websocket: you are " + clientID + " by HTTP/1", c.also} {
				if !strings.Contains(out, want) {
					t.Errorf("exit code %d, want %q in\n%s%s", code, want, out, errs)
				}
			}
		})
	}
}

// A message may be as long as a program likes.
func TestNodeSendsALongMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.webSocketGateway(t, listenAndEcho(t))
	out, errs, code := command(t, "node", "--experimental-websocket", "testdata/websocket_big.js", "ws://"+g.addr+"/edge/", svc+":443", fmt.Sprint(2<<20))
	if want := fmt.Sprintf("echoed %d\nclosed with 1000\n", 2<<20); out != want || code != 0 {
		t.Errorf("exit code %d, got %q, want %q\n%s", code, out, want, errs)
	}
}

// Three gateways, each reached in another way: by SNI, by WebSocket behind a
// load balancer, by CONNECT. The far service sees the client's certificate.
func TestThreeGateways(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	far := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(w.nginx(t)))
	middle := startGateway(t, "--config", w.write(t, "middle.yaml", fmt.Sprintf(`
cluster: middle
admin: 127.0.0.1:%s
listeners:
  - address: 127.0.0.1:%s
    protocols: [connect-h2, websocket]
    websocket: {path: /edge/}
services:
  - name: %s
    via: [{connect: ["127.0.0.1:1", %q]}]
`, freePort(t), freePort(t), svc, far.addr)))
	_, port, _ := net.SplitHostPort(w.haproxyBefore(t, middle.addr, "alpn h2,http/1.1", "proto h2"))
	near := startGateway(t, "--config", w.write(t, "near.yaml", fmt.Sprintf(`
cluster: near
admin: 127.0.0.1:%s
listeners:
  - address: 127.0.0.1:%s
    protocols: [sni, connect, websocket]
services:
  - name: %s
    ports: [443]
    via: [{websocket: "wss://localhost:%s/edge/", caFile: ca.crt, http2: true}]
`, freePort(t), freePort(t), svc, port)))
	for how, args := range map[string][]string{
		"sni":     {"--connect-to", svc + ":443:" + near.addr},
		"connect": {"-x", "http://" + near.addr},
	} {
		out, errs, code := command(t, "curl", append(args, "-sS", "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "https://"+svc+"/")...)
		if !strings.Contains(out, "serial="+w.serial()) || !strings.Contains(out, "sni="+svc) {
			t.Errorf("by %s: exit code %d, want serial %s in\n%s%s", how, code, w.serial(), out, errs)
		}
	}
	if got := w.fetch(t, &ws.Dialer{URL: "ws://" + near.addr}); !strings.Contains(got, "serial="+w.serial()) {
		t.Errorf("by websocket: got %q, want serial %s", got, w.serial())
	}
	for name, g := range map[string]*gateway{"connect": far, "websocket": middle} {
		if l := g.line(t, "logged a tunnel", func(l line) bool { return l.Target != "" }); l.Proto != name || l.Target != svc+":443" {
			t.Errorf("the log: got %+v, want proto %s", l, name)
		}
	}
}
