//go:build unix

package interop

//lint:file-ignore SA1019 x/net's Transport is what many programs still use

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/summerwind/h2spec/config"
	"github.com/summerwind/h2spec/generic"
	"github.com/summerwind/h2spec/hpack"
	h2specs "github.com/summerwind/h2spec/http2"
	"github.com/summerwind/h2spec/spec"
	"golang.org/x/net/http2"
)

// TestH2Spec runs h2spec's 145 cases. On a port that is shared with others, the
// one that begins with no preface is answered by them, in HTTP/1.1.
func TestH2Spec(t *testing.T) {
	shared := startGateway(t, "--listen", "127.0.0.1:0", "--route", route("127.0.0.1:1"))
	dir := t.TempDir()
	file := dir + "/culvert.yaml"
	must(t, os.WriteFile(file, fmt.Appendf(nil, `
listeners:
  - address: 127.0.0.1:%s
    protocols: [connect-h2]
admin: 127.0.0.1:%s
services:
  - name: %s
    endpoints: ["127.0.0.1:1"]
`, freePort(t), freePort(t), svc), 0o600))
	pinned := startGateway(t, "--config", file)
	for _, c := range []struct {
		name   string
		g      *gateway
		except string
	}{{"pinned", pinned, ""}, {"shared", shared, "Sends invalid connection preface"}} {
		t.Run(c.name, func(t *testing.T) {
			host, port, err := net.SplitHostPort(c.g.addr)
			must(t, err)
			n, err := strconv.Atoi(port)
			must(t, err)
			cfg := &config.Config{Host: host, Port: n, Path: "/", Timeout: patience / 3, MaxHeaderLen: 4000}
			passed := 0
			for _, group := range []*spec.TestGroup{generic.Spec(), h2specs.Spec(), hpack.Spec()} {
				group.Test(cfg)
				passed += group.PassedCount
				for _, failed := range failures(group) {
					if failed != c.except {
						t.Errorf("h2spec: %s", failed)
					}
				}
			}
			want := 145
			if c.except != "" {
				want--
			}
			if passed != want {
				t.Errorf("%d cases passed, want %d", passed, want)
			}
		})
	}
}

func failures(g *spec.TestGroup) []string {
	var all []string
	for _, tc := range g.Tests {
		if tc.Result != nil && tc.Result.Failed {
			all = append(all, tc.Desc)
		}
	}
	for _, sub := range g.Groups {
		all = append(all, failures(sub)...)
	}
	return all
}

// A goTunnel is a CONNECT by golang.org/x/net/http2's Transport.
type goTunnel struct {
	net.Conn // for what is not the stream's
	up       *io.PipeWriter
	down     io.ReadCloser
}

func (c *goTunnel) Read(p []byte) (int, error)  { return c.down.Read(p) }
func (c *goTunnel) Write(p []byte) (int, error) { return c.up.Write(p) }
func (c *goTunnel) Close() error                { return c.down.Close() }

// goConnect asks gateway for authority over tr.
func goConnect(ctx context.Context, tr *http2.Transport, gateway, authority string) (*goTunnel, *http.Response, error) {
	r, w := io.Pipe()
	req, err := http.NewRequestWithContext(ctx, http.MethodConnect, "http://"+gateway, r)
	if err != nil {
		return nil, nil, err
	}
	req.Host = authority
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return nil, nil, err
	}
	near, _ := net.Pipe()
	return &goTunnel{near, w, resp.Body}, resp, nil
}

func TestGoTransportTunnelsOverHTTP2(t *testing.T) {
	w := newWorld(t)
	echo := listenAndEcho(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(w.nginx(t)), "--route", "echo.example.test="+echo)
	tr := &http2.Transport{AllowHTTP: true, DialTLSContext: func(ctx context.Context, network, addr string, _ *tls.Config) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, addr)
	}}
	defer tr.CloseIdleConnections()

	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	// Half-close: the end of the request goes up, and all of the reply comes down.
	c, resp, err := goConnect(ctx, tr, g.addr, "echo.example.test:7")
	must(t, err)
	if resp.StatusCode != 200 {
		t.Fatalf("status %d", resp.StatusCode)
	}
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
	go func() { _, _ = c.Write(want); _ = c.up.Close() }()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d of %d bytes came back, and %v", len(got), len(want), err)
	}

	// A refusal.
	_, resp, err = goConnect(ctx, tr, g.addr, "nobody.example.test:443")
	must(t, err)
	body, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != 403 || !strings.Contains(resp.Header.Get("Proxy-Status"), "no-route") || !strings.HasPrefix(string(body), "culvert: no-route: ") {
		t.Errorf("got %d, %v, %q", resp.StatusCode, resp.Header, body)
	}
	g.line(t, "logged the tunnel", func(l line) bool {
		return l.Proto == "connect-h2" && l.Reason == "done" && l.In == int64(len(want)) && l.Out == l.In
	})
}

// listenAndEcho sends back what it gets, end included.
func listenAndEcho(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	return ln.Addr().String()
}

// nghttp2 speaks CONNECT through Node; its own client, nghttp, can't.
func TestNodeTunnelsOverHTTP2(t *testing.T) {
	w := newWorld(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(w.nginx(t)))
	out, errs, code := command(t, "node", "testdata/h2.js", g.addr, svc, w.ca, w.cert, w.key)
	one := "200 dn=CN=web serial=" + w.serial() + " proto=HTTP/1.1 sni=" + svc + "\n"
	want := one + one + "403 culvert; error=http_request_denied; details=\"no-route\"\n"
	if out != want || code != 0 {
		t.Errorf("node: exit code %d, got %q, %s, want %q", code, out, errs, want)
	}
}

// Clients that can only ask for resources hear 405, and in HTTP/2.
func TestClientsOfResourcesAreAnswered(t *testing.T) {
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route("127.0.0.1:1"))
	url := "http://" + g.addr + "/"
	out, errs, code := command(t, "curl", "-sS", "--http2-prior-knowledge", "-w", "%{http_version} %{http_code}", url)
	if want := "culvert: bad-method: this proxy takes CONNECT only\n2 405"; out != want || code != 0 {
		t.Errorf("curl: exit code %d, got %q, %s, want %q", code, out, errs, want)
	}
	out, errs, code = command(t, "nghttp", "-nv", "-d", "/etc/hostname", url, url+"2", url+"3")
	if n := strings.Count(out, ":status: 405"); n != 3 || code != 0 || strings.Contains(out, "PROTOCOL_ERROR") {
		t.Errorf("nghttp: exit code %d, %d answers of 405, want 3:\n%s%s", code, n, out, errs)
	}
	// 400 requests over 4 connections, 50 at a time on each.
	out, errs, code = command(t, "h2load", "-n", "400", "-c", "4", "-m", "50", url)
	if !strings.Contains(out, "400 done") || !strings.Contains(out, "400 4xx") || code != 0 {
		t.Errorf("h2load: exit code %d:\n%s%s", code, out, errs)
	}
}
