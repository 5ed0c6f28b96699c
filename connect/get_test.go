package connect

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// asked is a Handler that has each request accepted, and what the service would read.
type asked struct {
	target string
	read   chan string
}

func (a *asked) ServeTunnel(_ context.Context, req *tunnel.Request) {
	a.target = req.Target()
	s, err := req.Accept()
	if err != nil {
		a.read <- err.Error()
		return
	}
	defer s.Close()
	b, err := io.ReadAll(s)
	if err != nil {
		b = append(b, " "+err.Error()...)
	}
	a.read <- string(b)
	_, _ = io.WriteString(s, "HTTP/1.1 204 No Content\r\n\r\n")
}

// serveHTTP has p serve a client that sends text and then nothing more.
func serveHTTP(t *testing.T, p *HTTP, text string) (answer string, a *asked) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a = &asked{read: make(chan string, 1)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := ln.Accept()
		if err != nil {
			return
		}
		_ = p.ServeConn(t.Context(), tunnel.NewConn(c), a)
		_ = c.Close()
	}()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	_ = c.(*net.TCPConn).CloseWrite()
	b, _ := io.ReadAll(c)
	<-done
	return string(b), a
}

func TestHTTPRequestsGoToTheirService(t *testing.T) {
	rows := []struct{ send, target, service string }{
		{"GET http://shop.test/a?b=c HTTP/1.1\r\nHost: other.test\r\nProxy-Connection: keep-alive\r\nAccept: */*\r\n\r\n", "shop.test:80",
			"GET /a?b=c HTTP/1.1\r\nHost: shop.test\r\nAccept: */*\r\nVia: 1.1 culvert\r\nConnection: close\r\n\r\n"},
		{"POST HTTP://Shop.Test:8080 HTTP/1.0\r\nContent-Length: 5\r\nConnection: close, X-Secret, content-length\r\nX-Secret: 1\r\nProxy-Authorization: Basic eDp5\r\n\r\nhelloGET http://b.test/ HTTP/1.1\r\n\r\n", "shop.test:8080",
			"POST / HTTP/1.0\r\nHost: Shop.Test:8080\r\nContent-Length: 5\r\nVia: 1.0 culvert\r\nConnection: close\r\n\r\nhello"},
		{"OPTIONS http://shop.test HTTP/1.1\r\nHost: shop.test\r\nUpgrade: h2c\r\nTE: trailers\r\n\r\n", "shop.test:80",
			"OPTIONS * HTTP/1.1\r\nHost: shop.test\r\nVia: 1.1 culvert\r\nConnection: close\r\n\r\n"},
		{"PUT http://[2001:db8::1]/x?y HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nab", "[2001:db8::1]:80",
			"PUT /x?y HTTP/1.1\r\nHost: [2001:db8::1]\r\nContent-Length: 3\r\nVia: 1.1 culvert\r\nConnection: close\r\n\r\nab " + io.ErrUnexpectedEOF.Error()},
		{"POST http://shop.test/ HTTP/1.1\r\nHost: x\r\nConnection: transfer-encoding\r\nTransfer-Encoding: Chunked\r\nTrailer: Host\r\n\r\n005;a\r\nhello\r\n0\r\n\r\nGET http://b.test/ HTTP/1.1\r\n\r\n", "shop.test:80",
			"POST / HTTP/1.1\r\nHost: shop.test\r\nTransfer-Encoding: chunked\r\nVia: 1.1 culvert\r\nConnection: close\r\n\r\n5\r\nhello\r\n0\r\n\r\n"},
		{"GET http://shop.test?q HTTP/1.1\r\nHost: x\r\n\r\n", "shop.test:80", "GET /?q HTTP/1.1\r\nHost: shop.test\r\nVia: 1.1 culvert\r\nConnection: close\r\n\r\n"},
	}
	for _, row := range rows {
		answer, a := serveHTTP(t, &HTTP{}, row.send)
		select {
		case got := <-a.read:
			if got != row.service || a.target != row.target {
				t.Errorf("%q: %s got\n%q, want at %s\n%q", row.send, a.target, got, row.target, row.service)
			}
		default:
			t.Errorf("%q: no request; answer %q", row.send, answer)
		}
		if !strings.Contains(row.service, "unexpected") && answer != "HTTP/1.1 204 No Content\r\n\r\n" {
			t.Errorf("%q: answer %q", row.send, answer)
		}
	}
}

func TestHTTPRefuses(t *testing.T) {
	pac := func(string) []byte { return []byte("file") }
	for _, send := range []string{
		"GET / HTTP/1.1\r\nHost: 127.0.0.1:1080\r\n\r\n",
		"POST /proxy.pac HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"GET /proxy.pac HTTP/1.1\r\nHost: evil.test\r\n\r\n",
		"GET /proxy.pac HTTP/1.1\r\nHost: 127.0.0.1.evil.test:1080\r\n\r\n",
		"GET /proxy.pac HTTP/1.1\r\n\r\n",
		"GET https://shop.test/ HTTP/1.1\r\nHost: shop.test\r\n\r\n",
		"GET ftp://shop.test/ HTTP/1.1\r\nHost: shop.test\r\n\r\n",
		"GET shop.test:80 HTTP/1.1\r\nHost: shop.test\r\n\r\n",
		"GET http://user@shop.test/ HTTP/1.1\r\nHost: shop.test\r\n\r\n",
		"GET http:/// HTTP/1.1\r\nHost: shop.test\r\n\r\n",
		"GET http://shop.test/#a HTTP/1.1\r\nHost: shop.test\r\n\r\n",
		"GET http://shop.test:0/ HTTP/1.1\r\nHost: shop.test\r\n\r\n",
		"POST http://shop.test/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
		"POST http://shop.test/ HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"POST http://shop.test/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
		"POST http://shop.test/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\nabc",
		"POST http://shop.test/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"POST http://shop.test/ HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
		"POST http://shop.test/ HTTP/1.1\r\nHost: a\r\nContent-Length: -3\r\n\r\nabc",
		"POST http://shop.test/ HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc",
	} {
		answer, a := serveHTTP(t, &HTTP{PAC: pac}, send)
		if !strings.HasPrefix(answer, "HTTP/1.1 400 ") || a.target != "" {
			t.Errorf("%q: asked for %q, answer %q", send, a.target, answer)
		}
	}
}

func TestHTTPServesThePACFile(t *testing.T) {
	var proxy string
	p := &HTTP{PAC: func(at string) []byte { proxy = at; return []byte("file") }}
	for _, host := range []string{"localhost", "127.0.0.1:1080", "[::1]:1080", "localhost:1080"} {
		answer, _ := serveHTTP(t, p, "GET /proxy.pac HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
		r, err := http.ReadResponse(bufio.NewReader(strings.NewReader(answer)), nil)
		if err != nil {
			t.Fatalf("%q: %v", answer, err)
		}
		b, _ := io.ReadAll(r.Body)
		if r.StatusCode != 200 || r.Header.Get("Content-Type") != "application/x-ns-proxy-autoconfig" || string(b) != "file" || !strings.HasPrefix(proxy, "127.0.0.1:") {
			t.Errorf("Host %s: got %q for %s", host, answer, proxy)
		}
	}
}

// CONNECT is left to Protocol, and what is no HTTP to others.
func TestHTTPSniffs(t *testing.T) {
	for text, want := range map[string]tunnel.Verdict{
		"": tunnel.More, "C": tunnel.More, "CONNECT": tunnel.More, "CONNECT a:1": tunnel.No, "CO ": tunnel.Yes,
		"GET ": tunnel.Yes, "GE": tunnel.More, "PRI * HTTP/2.0\r\n": tunnel.No, "\x16\x03": tunnel.No, "SSH-2": tunnel.No,
	} {
		if got := (&HTTP{}).Sniff([]byte(text)); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

func TestAutoConfig(t *testing.T) {
	names := []tunnel.Pattern{{Suffix: tunnel.MustParseName("b.test")}, {Suffix: tunnel.MustParseName("a.test")}, tunnel.AnyName,
		{Suffix: tunnel.MustParseName("shop.test"), Wildcard: true}, {Suffix: tunnel.MustParseName("a.test")}}
	const want = `function FindProxyForURL(url, host) {
  host = host.toLowerCase().replace(/\.$/, "");
  var names = {
    "a.test": 1,
    "b.test": 1};
  var below = {
    "shop.test": 1};
  var proxy = "PROXY [::1]:1080";
  if (names[host] === 1) return proxy;
  for (var i = host.indexOf("."); i >= 0; i = host.indexOf(".", i + 1))
    if (below[host.substring(i + 1)] === 1) return proxy;
  return "DIRECT";
}
`
	if got := string(AutoConfig("[::1]:1080\"; evil()", names[:])); !strings.Contains(got, "PROXY [::1]:1080evil\"") {
		t.Errorf("got %s", got)
	}
	if got := string(AutoConfig("[::1]:1080", names)); got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
	many := make([]tunnel.Pattern, 0, MaxPACNames+10)
	for i := range MaxPACNames + 10 {
		many = append(many, tunnel.Pattern{Suffix: tunnel.MustParseName("n" + strings.Repeat("a", i%50) + string(rune('a'+i%26)) + "-" + strconv.Itoa(i) + ".test"), Wildcard: i%2 == 0})
	}
	if n := strings.Count(string(AutoConfig("127.0.0.1:1", many)), ": 1"); n != MaxPACNames {
		t.Errorf("%d names, want %d", n, MaxPACNames)
	}
}

// A request as it goes to the service is one, with the same content, and a service reads
// the same name out of it that was decided about.
func FuzzForwardHead(f *testing.F) {
	f.Add("GET http://shop.test/a HTTP/1.1\r\nHost: x\r\nConnection: a, b\r\nA: 1\r\n\r\n")
	f.Add("POST http://shop.test:8080?x HTTP/1.0\r\nContent-Length: 4\r\n\r\nabcd")
	f.Fuzz(func(t *testing.T, text string) {
		head, err := ParseHead([]byte(text))
		if err != nil {
			return
		}
		forward, err := newForwardHead(&head)
		if err != nil {
			if e := new(tunnel.Error); !errors.As(err, &e) {
				t.Errorf("%q: %v has no reason", text, err)
			}
			return
		}
		again, err := ParseHead(forward.text)
		if err != nil {
			if _, wrong := ParseAuthority(forward.authority); wrong == nil {
				t.Fatalf("%q: for the service %q: %v", text, forward.text, err)
			}
			return
		}
		host, n := again.Fields.Get("Host")
		if _, wrong := ParseAuthority(forward.authority); wrong == nil && (n != 1 || again.Len != len(forward.text) || !strings.HasPrefix(forward.authority, host)) {
			t.Errorf("%q: %s is told %q", text, forward.authority, forward.text)
		}
		coding, n := again.Fields.Get("Transfer-Encoding")
		_, lengths := again.Fields.Get("Content-Length")
		if n > 0 != forward.chunked || forward.chunked && (n > 1 || coding != "chunked" || lengths > 0 || forward.body > 0) || again.Method != head.Method {
			t.Errorf("%q: the service is told %q", text, forward.text)
		}
	})
}
