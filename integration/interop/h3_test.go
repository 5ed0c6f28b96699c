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
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"culvert.dev/internal/testca"
)

// startHTTP3 starts a gateway with one listener of UDP, where QUIC ends for all
// or, with quic, for gw.example.test alone, and returns its address.
func startHTTP3(t *testing.T, w *world, protocols string, services ...string) (*gateway, string) {
	t.Helper()
	ca, err := testca.Load(w.dir, nil)
	must(t, err)
	issue(t, ca, w.dir, "gw", testca.Options{
		SPIFFEID: "spiffe://example.test/gw", DNSNames: []string{"gw.example.test", "localhost"}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Usage: testca.ServerOnly,
	})
	file := w.dir + "/http3.yaml"
	must(t, os.WriteFile(file, fmt.Appendf(nil, `
listeners:
  - address: udp://127.0.0.1:%s
    tls: {certificateFile: gw.crt, keyFile: gw.key}
%s
admin: 127.0.0.1:%s
services:
%s`, freePort(t), protocols, freePort(t), strings.Join(services, "")), 0o600))
	g := startGateway(t, "--config", file)
	return g, strings.TrimPrefix(g.addr, "udp://")
}

// quicGo connects to a gateway with quic-go's own HTTP/3.
func quicGo(t *testing.T, w *world, addr string) *http3.ClientConn {
	t.Helper()
	cfg := w.client.ClientConfig("gw.example.test")
	cfg.NextProtos = []string{http3.NextProtoH3}
	qc, err := quic.DialAddr(t.Context(), addr, cfg, nil)
	must(t, err)
	t.Cleanup(func() { _ = qc.CloseWithError(0x100, "") })
	return (&http3.Transport{}).NewClientConn(qc)
}

// ask sends a CONNECT for authority.
func ask(ctx context.Context, cc *http3.ClientConn, authority string) (*http3.RequestStream, *http.Response, error) {
	s, err := cc.OpenRequestStream(ctx)
	if err != nil {
		return nil, nil, err
	}
	req := (&http.Request{Method: http.MethodConnect, Proto: "HTTP/1.1", URL: &url.URL{Scheme: "https", Host: authority}, Host: authority, Header: http.Header{}}).WithContext(ctx)
	_ = s.SetDeadline(time.Now().Add(3 * patience))
	if err := s.SendRequestHeader(req); err != nil {
		return nil, nil, err
	}
	resp, err := s.ReadResponse()
	return s, resp, err
}

// A streamConn is a stream as what TLS wants.
type streamConn struct {
	*http3.RequestStream
	net.Addr
}

func (c streamConn) LocalAddr() net.Addr  { return c.Addr }
func (c streamConn) RemoteAddr() net.Addr { return c.Addr }

func TestQuicGoTunnelsOverHTTP3(t *testing.T) {
	w := newWorld(t)
	for name, protocols := range map[string]string{"alone": "", "beside QUIC that goes on": "    protocols: [quic]"} {
		t.Run(name, func(t *testing.T) {
			g, addr := startHTTP3(t, w, protocols, service(svc, w.nginx(t)), service("echo.example.test", listenAndEcho(t)))
			cc := quicGo(t, w, addr)

			// Half-close: the end of the request goes up, and all of the reply comes down.
			s, resp, err := ask(t.Context(), cc, "echo.example.test:7")
			must(t, err)
			if resp.StatusCode != 200 {
				t.Fatalf("status %d", resp.StatusCode)
			}
			want := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
			go func() { _, _ = s.Write(want); _ = s.Close() }()
			got, err := io.ReadAll(s)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d of %d bytes came back, and %v", len(got), len(want), err)
			}
			g.line(t, "logged the tunnel", func(l line) bool {
				return l.Proto == "connect-h3" && l.Reason == "done" && l.In == int64(len(want)) && l.Out == l.In
			})

			// Mutual TLS inside, seen at the service.
			s, _, err = ask(t.Context(), cc, svc+":443")
			must(t, err)
			inside := tls.Client(streamConn{s, &net.TCPAddr{}}, w.client.ClientConfig(svc))
			_, err = io.WriteString(inside, "GET / HTTP/1.1\r\nHost: "+svc+"\r\nConnection: close\r\n\r\n")
			must(t, err)
			reply, _ := io.ReadAll(inside)
			if !strings.Contains(string(reply), "dn=CN=web serial="+w.serial()) {
				t.Errorf("got %q", reply)
			}

			// A refusal ends its stream alone.
			s, resp, err = ask(t.Context(), cc, "nobody.example.test:443")
			must(t, err)
			body, _ := io.ReadAll(s)
			if resp.StatusCode != 403 || !strings.Contains(resp.Header.Get("Proxy-Status"), "no-route") || !strings.HasPrefix(string(body), "culvert: no-route: ") {
				t.Errorf("got %d, %v, %q", resp.StatusCode, resp.Header, body)
			}
			if _, resp, err := ask(t.Context(), cc, "echo.example.test:7"); err != nil || resp.StatusCode != 200 {
				t.Errorf("after the refusal: %v", err)
			}
		})
	}
}

// ngtcp2 and nghttp3 can't be asked for a CONNECT that is one. What they do send
// is answered, also after they have moved to another port. For an address they
// name "localhost" in their hello.
func TestNgtcp2IsAnswered(t *testing.T) {
	w := newWorld(t)
	for name, protocols := range map[string]string{"alone": "", "beside QUIC that goes on": "    protocols: [quic]"} {
		t.Run(name, func(t *testing.T) {
			g, addr := startHTTP3(t, w, protocols, service(svc, "127.0.0.1:1"))
			_, port, err := net.SplitHostPort(addr)
			must(t, err)
			for _, c := range []struct {
				name string
				args []string
				want string
			}{
				{"GET", nil, "[:status: 405]"},
				{"GET from another port", []string{"--change-local-addr=100ms", "--delay-stream=300ms"}, "[:status: 405]"},
				{"GET from another port, as NAT has it", []string{"--change-local-addr=100ms", "--delay-stream=300ms", "--nat-rebinding"}, "[:status: 405]"},
				{"a version of QUIC that there is not", []string{"--version=0x1a2a3a4a", "--preferred-versions=v1", "--other-versions=v1"}, "[:status: 405]"},
				{"CONNECT with a path", []string{"--http-method=CONNECT"}, ""},
			} {
				args := append(append([]string{"--exit-on-all-streams-close"}, c.args...), "127.0.0.1", port, "https://gw.example.test/")
				out, errs, _ := command(t, "gtlsclient", args...)
				if c.want != "" && !strings.Contains(out+errs, c.want) {
					t.Errorf("%s: got %s%s, want %s in it", c.name, out, errs, c.want)
				}
			}
			g.line(t, "refused the CONNECT", func(l line) bool {
				return l.Proto == "connect-h3" && l.Reason == "bad-request" && strings.Contains(l.Err, "a CONNECT with :scheme or :path")
			})
		})
	}
}
