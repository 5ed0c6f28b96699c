package gateway

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A balancer ends TLS in front of a gateway and passes on what is in it.
type balancer struct {
	url string
	tls *tls.Config // for who connects to it
	ca  *testca.CA

	mu     sync.Mutex // guards chosen
	chosen []string   // by each connection so far: "h2", "http/1.1" or ""
}

func newBalancer(t *testing.T, to string, alpn ...string) *balancer {
	t.Helper()
	ca, err := testca.New("lb.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://lb.test/lb", DNSNames: []string{"localhost"}, Usage: testca.ServerOnly})
	if err != nil {
		t.Fatal(err)
	}
	ln := testnet.Listen(t)
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	b := &balancer{url: "wss://localhost:" + port + "/", tls: &tls.Config{RootCAs: ca.Pool()}, ca: ca}
	cfg := &tls.Config{Certificates: []tls.Certificate{leaf.TLS}, NextProtos: alpn}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			raw, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { b.pass(tls.Server(raw, cfg), to) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait()
	})
	return b
}

func (b *balancer) pass(in *tls.Conn, to string) {
	defer in.Close()
	if in.Handshake() != nil {
		return
	}
	b.mu.Lock()
	b.chosen = append(b.chosen, in.ConnectionState().NegotiatedProtocol)
	b.mu.Unlock()
	out, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	cut := func() { // a reset stays one
		_ = out.(*net.TCPConn).SetLinger(0)
		_ = in.NetConn().(*net.TCPConn).SetLinger(0)
		_ = in.NetConn().Close()
	}
	back := make(chan struct{})
	go func() {
		defer close(back)
		if _, err := io.Copy(in, out); err != nil {
			cut()
			return
		}
		_ = in.CloseWrite()
	}()
	if _, err := io.Copy(out, in); err != nil {
		cut()
	} else {
		_ = out.(*net.TCPConn).CloseWrite()
	}
	<-back
	_ = out.Close()
}

func (b *balancer) protocols() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return fmt.Sprintf("%q", b.chosen)
}

// dialer returns what asks through b. Idle connections are soon closed.
func (b *balancer) dialer(t *testing.T) *upstream.WebSocketDialer {
	d := upstream.NewWebSocketDialer(&ws.Dialer{URL: b.url, TLS: b.tls})
	d.HTTP2.Idle = 50 * time.Millisecond
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// both are the protocols of a listener that takes WebSockets over HTTP/1.1 and
// over HTTP/2.
func both(p *ws.Protocol) []tunnel.Protocol {
	return []tunnel.Protocol{p, &h2.Protocol{Via: p.Via, Extended: []connect.ExtendedService{p}}, &connect.Protocol{Via: p.Via}}
}

// The suites of streams and dialers, over HTTP/2.
func TestWebSocketOverHTTP2(t *testing.T) {
	t.Parallel()
	tunneltest.TestDialer(t, func(t *testing.T, backend net.Listener) tunneltest.Dialer {
		down := service(closed)
		down.Name, down.Names = "down", []tunnel.Pattern{{Suffix: tunnel.MustParseName("down.test")}}
		addr := startWith(t, "near", both(&ws.Protocol{}), service(backend.Addr().String()), down)
		b := newBalancer(t, addr, "h2", "http/1.1")
		t.Cleanup(func() {
			if got := b.protocols(); strings.Contains(got, "http") || strings.Contains(got, `""`) {
				t.Errorf("got connections of %s, want HTTP/2 alone", got)
			}
		})
		return tunneltest.Dialer{Dialer: b.dialer(t), Addr: "svc.test:443", Refused: map[string]tunnel.Reason{
			"nobody.test:443": tunnel.NoRoute,
			"down.test:443":   tunnel.DialFailed,
			"svc.test":        tunnel.BadRequest,
		}}
	}, tunneltest.Options{Streams: 1000})
}

// Where HTTP/2 is not to be had, or takes no WebSockets, HTTP/1.1 is used, and
// that is not found out anew for each stream.
func TestWebSocketFallsBack(t *testing.T) {
	to := service(testnet.Echo(t).Addr())
	without := startWith(t, "without", []tunnel.Protocol{&ws.Protocol{}, &h2.Protocol{}}, to)
	with := startWith(t, "with", both(&ws.Protocol{}), to)
	for _, row := range []struct {
		name, gateway string
		alpn          []string
		want          []string // the protocols of connections, for three streams
	}{
		{"HTTP/2", with, []string{"h2", "http/1.1"}, []string{"h2"}},
		{"HTTP/1.1 by ALPN", with, []string{"http/1.1"}, []string{"http/1.1", "http/1.1", "http/1.1", "http/1.1"}},
		{"no ALPN", with, nil, []string{"", "", "", ""}},
		{"HTTP/2 without extended CONNECT", without, []string{"h2", "http/1.1"}, []string{"h2", "http/1.1", "http/1.1", "http/1.1"}},
	} {
		b := newBalancer(t, row.gateway, row.alpn...)
		d := b.dialer(t)
		d.HTTP2.Idle = time.Minute
		for range 3 {
			if err := check(t, d); err != nil {
				t.Errorf("%s: %v", row.name, err)
			}
		}
		if got, want := b.protocols(), fmt.Sprintf("%q", row.want); got != want {
			t.Errorf("%s: got connections of %s, want %s", row.name, got, want)
		}
	}
}

// A way out by wss shares connections where it may, and their end is the
// gateway's.
func TestWebSocketHop(t *testing.T) {
	far := startWith(t, "far", both(&ws.Protocol{Via: "far"}), service(testnet.Echo(t).Addr()))
	for shared, want := range map[bool]string{true: `["h2"]`, false: `["http/1.1" "http/1.1" "http/1.1"]`} {
		b := newBalancer(t, far, "h2", "http/1.1")
		near := start(t, "near", service("", registry.Hop{Proto: "websocket", Addresses: []string{b.url}, Roots: string(b.ca.CertPEM), HTTP2: shared}))
		for range 3 {
			if err := check(t, &connect.Dialer{Proxy: near}); err != nil {
				t.Error(err)
			}
		}
		if got := b.protocols(); got != want {
			t.Errorf("shared %v: got connections of %s, want %s", shared, got, want)
		}
	}
}

// Requests that are refused over HTTP/2, on one connection. The rules of
// HTTP/2 itself are tried in package h2, those of frames in package ws.
func TestRefusedWebSocketsOverHTTP2(t *testing.T) {
	t.Parallel()
	const path = "/.culvert/tunnel/svc.test:443"
	auth := connect.AnyOf{&connect.Bearer{Verify: connect.Tokens(map[string]string{"bob": "t0ken"})}}
	dialed := make(chan struct{}, 100)
	backend := testnet.Listen(t)
	go func() {
		for {
			c, err := backend.Accept()
			if err != nil {
				return
			}
			dialed <- struct{}{}
			_ = c.Close()
		}
	}()
	rows := []struct {
		name   string
		head   h2.Head // Scheme, Path and Authority where it has none
		fields []string
		auth   bool
		want   string // of the error
		reason tunnel.Reason
	}{
		{"another protocol", h2.Head{Protocol: "connect-udp"}, nil, false, `status 501, unsupported`, tunnel.Unsupported},
		{"another scheme", h2.Head{Scheme: "ftp"}, nil, false, `status 400, bad-request: "culvert: bad-request: scheme \"ftp\", want https"`, tunnel.BadRequest},
		{"no version", h2.Head{}, []string{"sec-websocket-version"}, false, `status 400, bad-request: "culvert: bad-request: WebSocket version \"\", want 13"`, tunnel.BadRequest},
		{"version 8", h2.Head{}, []string{"sec-websocket-version", "8"}, false, `status 400, bad-request: "culvert: bad-request: WebSocket version \"8\", want 13"`, tunnel.BadRequest},
		{"two versions", h2.Head{}, []string{"sec-websocket-version", "13", "sec-websocket-version", "13"}, false, `2 Sec-WebSocket-Version fields`, tunnel.BadRequest},
		{"authority that is not served", h2.Head{Authority: "evil.test"}, nil, false, `status 421, bad-request: "culvert: bad-request: host \"evil.test\" is not served here"`, tunnel.BadRequest},
		{"origin", h2.Head{}, []string{"origin", "https://evil.test"}, false, `status 403, denied: "culvert: denied: origin \"https://evil.test\" is not allowed"`, tunnel.Denied},
		{"origin of the same host", h2.Head{}, []string{"origin", "https://gw.test"}, false, `status 403, denied`, tunnel.Denied},
		{"origin null", h2.Head{}, []string{"origin", "null"}, false, `status 403, denied`, tunnel.Denied},
		{"empty origin", h2.Head{}, []string{"origin", ""}, false, `status 403, denied`, tunnel.Denied},
		{"origin with a port", h2.Head{}, []string{"origin", "https://app.test:8443"}, false, `status 403, denied`, tunnel.Denied},
		{"two origins", h2.Head{}, []string{"origin", "https://app.test", "origin", "https://app.test"}, false, `2 Origin fields`, tunnel.BadRequest},
		{"no credentials", h2.Head{}, nil, true, `status 401, no-auth`, tunnel.NoAuth},
		{"wrong credentials", h2.Head{}, []string{"authorization", "Bearer guess"}, true, `status 401, no-auth`, tunnel.NoAuth},
		{"a cookie", h2.Head{}, []string{"cookie", "authorization=Bearer t0ken"}, true, `status 401, no-auth`, tunnel.NoAuth},
		{"a proxy's credentials", h2.Head{}, []string{"proxy-authorization", "Bearer t0ken"}, true, `status 401, no-auth`, tunnel.NoAuth},
		{"two credentials", h2.Head{}, []string{"authorization", "Bearer t0ken", "authorization", "Bearer t0ken"}, true, `2 Authorization fields`, tunnel.BadRequest},
		{"another path", h2.Head{Path: "/chat"}, nil, false, `status 404, bad-request: "culvert: bad-request: path \"/chat\" is not below \"/.culvert/tunnel/\""`, tunnel.BadRequest},
		{"a path that goes up", h2.Head{Path: "/.culvert/../tunnel/svc.test:443"}, nil, false, `status 404`, tunnel.BadRequest},
		{"absolute form", h2.Head{Path: "https://gw.test" + path}, nil, false, `status 404`, tunnel.BadRequest},
		{"query", h2.Head{Path: path + "?to=a.test:1"}, nil, false, `the target has a query`, tunnel.BadRequest},
		{"no destination", h2.Head{Path: "/.culvert/tunnel/"}, nil, false, `no destination`, tunnel.BadRequest},
		{"two destinations", h2.Head{}, []string{"culvert-target", "a.test:1"}, false, `the destination is in the path and in Culvert-Target`, tunnel.BadRequest},
		{"two fields", h2.Head{Path: "/.culvert/tunnel"}, []string{"culvert-target", "a.test:1", "culvert-target", "b.test:1"}, false, `2 Culvert-Target fields`, tunnel.BadRequest},
		{"half a percent", h2.Head{Path: "/.culvert/tunnel/svc.test%3"}, nil, false, `percent-encoded`, tunnel.BadRequest},
		{"no port", h2.Head{Path: "/.culvert/tunnel/svc.test"}, nil, false, `has no port`, tunnel.BadRequest},
		{"octal address", h2.Head{Path: "/.culvert/tunnel/0177.0.0.1:443"}, nil, false, `name is an address`, tunnel.BadRequest},
		{"a loop, by via", h2.Head{}, []string{"via", "2 other, 2 GW-1"}, false, `status 502, loop`, tunnel.Loop},
		{"a loop, by length", h2.Head{}, []string{"via", strings.Repeat("2 a,", 15) + "2 b"}, false, `status 502, loop`, tunnel.Loop},
		{"no route", h2.Head{Path: "/.culvert/tunnel/nobody.test:443"}, nil, false, `status 403, no-route`, tunnel.NoRoute},
		{"an address that is nobody's", h2.Head{Path: "/.culvert/tunnel/127.0.0.1:22"}, nil, false, `status 403, prohibited`, tunnel.Prohibited},
		{"fields of more than 16 KiB", h2.Head{}, []string{"a", strings.Repeat("a", 9000), "b", strings.Repeat("a", 9000)}, false, `status 431`, tunnel.TooLarge},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			p := &ws.Protocol{Via: "gw-1", Hosts: []string{"gw.test"}, Origins: []string{"https://app.test"}}
			if row.auth {
				p.Auth = auth
			}
			d := &h2.Dialer{Proxy: startWith(t, "gw-1", both(p), service(backend.Addr().String()))}
			t.Cleanup(func() { _ = d.Close() })
			head := row.head
			head.Protocol, head.Scheme = orElse(head.Protocol, "websocket"), orElse(head.Scheme, "https")
			head.Authority, head.Path = orElse(head.Authority, "gw.test"), orElse(head.Path, path)
			version := true
			for i := 0; i+1 < len(row.fields); i += 2 {
				version = version && row.fields[i] != "sec-websocket-version"
				head.Fields = append(head.Fields, connect.Field{Name: row.fields[i], Value: row.fields[i+1]})
			}
			if version && len(row.fields) != 1 {
				head.Fields = append(head.Fields, connect.Field{Name: "sec-websocket-version", Value: "13"})
			}
			s, _, err := d.Open(t.Context(), &head)
			if err == nil {
				_ = s.Close()
			}
			if err == nil || !strings.Contains(err.Error(), row.want) || tunnel.ReasonOf(err) != row.reason {
				t.Errorf("got %v (%s), want %s", err, tunnel.ReasonOf(err), row.want)
			}
			// The connection lives on. By CONNECT the same names are to be had.
			c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
			if err != nil || d.Conns() != 1 {
				t.Errorf("CONNECT on the same connection: %v, with %d connections", err, d.Conns())
			} else {
				_ = c.Close()
			}
			select {
			case <-dialed:
			case <-time.After(patience):
				t.Fatal("the service was not dialed for CONNECT")
			}
			if len(dialed) > 0 {
				t.Error("the service was dialed for what was refused")
			}
		})
	}
}

// What is accepted, and what the answer has.
func TestAcceptedWebSocketsOverHTTP2(t *testing.T) {
	auth := connect.AnyOf{&connect.Bearer{Verify: connect.Tokens(map[string]string{"bob": "t0ken"})}}
	p := &ws.Protocol{Auth: auth, Hosts: []string{"gw.test"}, Origins: []string{"https://app.test"}}
	d := &h2.Dialer{Proxy: startWith(t, "gw-1", both(p), service(testnet.Echo(t).Addr()))}
	t.Cleanup(func() { _ = d.Close() })
	for _, row := range []struct{ name, path, fields, subprotocol string }{
		{"in the path", "/.culvert/tunnel/svc.test:443", "", ""},
		{"in the field", "/.culvert/tunnel", "culvert-target: svc.test:443", ""},
		{"a page that is listed", "/.culvert/tunnel/svc.test:443", "origin: https://app.test", ""},
		{"subprotocol", "/.culvert/tunnel/svc.test:443", "sec-websocket-protocol: chat, culvert.v1", "culvert.v1"},
		{"an extension", "/.culvert/tunnel/svc.test:443", "sec-websocket-extensions: permessage-deflate", ""},
	} {
		head := &h2.Head{Protocol: "websocket", Scheme: "https", Authority: "GW.test:8443", Path: row.path, Fields: connect.Fields{
			{Name: "sec-websocket-version", Value: "13"}, {Name: "authorization", Value: "Bearer t0ken"},
		}}
		if name, value, ok := strings.Cut(row.fields, ": "); ok {
			head.Fields = append(head.Fields, connect.Field{Name: name, Value: value})
		}
		s, answer, err := d.Open(t.Context(), head)
		if err != nil {
			t.Errorf("%s: %v", row.name, err)
			continue
		}
		got, _ := answer.Get("sec-websocket-protocol")
		if _, n := answer.Get("sec-websocket-extensions"); got != row.subprotocol || n > 0 {
			t.Errorf("%s: got fields %v, want subprotocol %q and no extension", row.name, answer, row.subprotocol)
		}
		c := ws.NewStream(s, ws.Client, got, ws.Options{})
		_ = c.SetDeadline(time.Now().Add(patience))
		_, _ = io.WriteString(c, "there and back")
		b := make([]byte, len("there and back"))
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "there and back" {
			t.Errorf("%s: got %q, %v, want what was sent", row.name, b, err)
		}
		err = c.CloseWrite()
		if (row.subprotocol != "") != (err == nil) || err != nil && !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: got %v from CloseWrite", row.name, err)
		}
		_ = c.Close()
	}
}

func orElse(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}
