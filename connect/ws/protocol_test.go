package ws

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestProtocol(t *testing.T) {
	svc := tunnel.MustParseName("svc.test")
	wrap := func(b []byte) []byte { return frame(0x82, true, b) }
	unwrap := func(b []byte) (data []byte, over bool) {
		_, frames, _ := bytes.Cut(b, []byte("\r\n\r\n"))
		data, _ = messages(frames)
		return data, false
	}
	tunneltest.TestProtocol(t, &Protocol{},
		tunneltest.Preamble{Title: "path", Bytes: []byte(sample), Name: svc, Port: 443, Wrap: wrap, Unwrap: unwrap},
		tunneltest.Preamble{Title: "field", Bytes: []byte(handshake("/.culvert/tunnel", "Culvert-Target: Svc.Test.:5432")), Name: svc, Port: 5432, Wrap: wrap, Unwrap: unwrap},
	)
}

// messages are what a server has said in frames, and whether a close frame is
// among them.
func messages(frames []byte) (data []byte, closed bool) {
	for len(frames) > 0 {
		h, err := parseHeader(frames, false)
		if err != nil || len(frames) < h.size+int(h.length) {
			break
		}
		if h.opcode == opBinary {
			data = append(data, frames[h.size:h.size+int(h.length)]...)
		}
		closed = closed || h.opcode == opClose
		frames = frames[h.size+int(h.length):]
	}
	return data, closed
}

// The yes, to the byte: that of RFC 6455 section 1.3 where no subprotocol is
// asked for.
func TestAccepted(t *testing.T) {
	const yes = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + sampleAccept + "\r\n"
	rows := []struct{ name, in, want, target string }{
		{"as in the RFC", sample, yes + "\r\n", "svc.test:443"},
		{"subprotocol", handshake("/.culvert/tunnel/svc.test:443", "Sec-WebSocket-Protocol: chat, culvert.v1"), yes + "Sec-WebSocket-Protocol: culvert.v1\r\n\r\n", "svc.test:443"},
		{"plain bytes", handshake("/.culvert/tunnel/svc.test:443", "Sec-WebSocket-Protocol: base64,binary"), yes + "Sec-WebSocket-Protocol: binary\r\n\r\n", "svc.test:443"},
		{"unknown subprotocol", handshake("/.culvert/tunnel/svc.test:443", "Sec-WebSocket-Protocol: chat"), yes + "\r\n", "svc.test:443"},
		{"extension", handshake("/.culvert/tunnel/svc.test:443", "Sec-WebSocket-Extensions: permessage-deflate"), yes + "\r\n", "svc.test:443"},
		{"words in any case", handshake("/.culvert/tunnel/svc.test:443", "Upgrade: h2c, WebSocket", "Connection: keep-alive, upgrade"), yes + "\r\n", "svc.test:443"},
		{"in the field", handshake("/.culvert/tunnel/", "culvert-target: svc.test:443"), yes + "\r\n", "svc.test:443"},
		{"IPv6", handshake("/.culvert/tunnel/%5b2001:db8::1%5D:443"), yes + "\r\n", "[2001:db8::1]:443"},
		{"a cookie", handshake("/.culvert/tunnel/svc.test:443", "Cookie: session=alice"), yes + "\r\n", "svc.test:443"},
	}
	addr := testnet.Service(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	g := serve(t, tunneltest.Table{"svc.test:443": addr, "[2001:db8::1]:443": addr}, &Protocol{})
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			c := testnet.Connect(t, g.Addr)
			_, _ = io.WriteString(c, row.in)
			got := make([]byte, len(row.want))
			if _, err := io.ReadFull(c, got); err != nil || string(got) != row.want {
				t.Errorf("got answer\n%s\n%v, want\n%s", got, err, row.want)
			}
			_, _ = c.Write(closeFrame(1000, true, ""))
			if rest, err := io.ReadAll(c); !bytes.Equal(rest, closeFrame(1000, false, "")) || err != nil {
				t.Errorf("got %x, %v after the close frame, want it answered", rest, err)
			}
			if o := g.Outcome(t); o.Reason != tunnel.Done || o.Target != row.target || o.Proto != "websocket" || o.Peer.ID != "" {
				t.Errorf("got outcome %+v, want %s of %s by nobody", o, tunnel.Done, row.target)
			}
		})
	}
}

// refusal is the answer that a refused client has to get, to the byte.
func refusal(status, token string, reason tunnel.Reason, text string, extra ...string) string {
	body := "culvert: " + string(reason) + ": " + text + "\n"
	lines := []string{
		"HTTP/1.1 " + status,
		"Proxy-Status: culvert; error=" + token + `; details="` + string(reason) + `"`,
		"Content-Type: text/plain; charset=utf-8",
		"Content-Length: " + strconv.Itoa(len(body)),
	}
	lines = append(append(lines, extra...), "Connection: close", "", body)
	return strings.Join(lines, "\r\n")
}

// Handshakes that are refused. Each is followed by a good one in the same
// segment, which must not be answered (must-never N30), and nothing is dialed.
func TestRefusedHandshakes(t *testing.T) {
	const path = "/.culvert/tunnel/svc.test:443"
	malformed := func(text string) string {
		return refusal("400 Bad Request", "http_request_error", tunnel.BadRequest, text)
	}
	authority := func(s, text string) string { return malformed(fmt.Sprintf("authority %q%s", s, text)) }
	hidden := refusal("403 Forbidden", "http_request_denied", tunnel.NoRoute, "no such service here")
	loop := refusal("502 Bad Gateway", "proxy_loop_detected", tunnel.Loop, "the way leads back to this gateway")
	rows := []struct {
		name, in, want string
		reason         tunnel.Reason
	}{
		{"HTTP/1.0", strings.Replace(sample, "HTTP/1.1", "HTTP/1.0", 1), malformed("handshake in HTTP/1.0"), tunnel.BadRequest},
		{"HTTP/2.0", strings.Replace(sample, "HTTP/1.1", "HTTP/2.0", 1),
			refusal("505 HTTP Version Not Supported", "http_request_error", tunnel.BadRequest, `version "HTTP/2.0" is not HTTP/1.x at offset 34`), tunnel.BadRequest},
		{"POST", strings.Replace(sample, "GET", "POST", 1),
			refusal("405 Method Not Allowed", "http_request_error", tunnel.BadMethod, `method "POST", want GET`, "Allow: GET"), tunnel.BadMethod},
		{"CONNECT", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\r\n\r\n",
			refusal("405 Method Not Allowed", "http_request_error", tunnel.BadMethod, `method "CONNECT", want GET`, "Allow: GET"), tunnel.BadMethod},
		{"a page", "GET / HTTP/1.1\r\nHost: gw.test\r\n\r\n",
			refusal("426 Upgrade Required", "http_request_error", tunnel.BadRequest, "this is a culvert gateway, not a web server or a proxy for plain HTTP: use https:// and HTTP CONNECT", "Upgrade: websocket"), tunnel.BadRequest},
		{"no Host", handshake(path, "Host:"), malformed("0 Host fields, want one"), tunnel.BadRequest},
		{"two Hosts", handshake(path, "host: b"), malformed("2 Host fields, want one"), tunnel.BadRequest},
		{"two Hosts in one", handshake(path, "Host: a, b"), malformed("Host field is not a host"), tunnel.BadRequest},
		{"no Upgrade", handshake(path, "Upgrade:"), refusal("426 Upgrade Required", "http_request_error", tunnel.BadRequest, "this is a culvert gateway, not a web server or a proxy for plain HTTP: use https:// and HTTP CONNECT", "Upgrade: websocket"), tunnel.BadRequest},
		{"Upgrade to h2c", handshake(path, "Upgrade: h2c"), refusal("426 Upgrade Required", "http_request_error", tunnel.BadRequest, "this is a culvert gateway, not a web server or a proxy for plain HTTP: use https:// and HTTP CONNECT", "Upgrade: websocket"), tunnel.BadRequest},
		{"no Connection", handshake(path, "Connection:"), malformed("Connection does not name upgrade"), tunnel.BadRequest},
		{"Connection: keep-alive", handshake(path, "Connection: keep-alive"), malformed("Connection does not name upgrade"), tunnel.BadRequest},
		{"no version", handshake(path, "Sec-WebSocket-Version:"),
			refusal("426 Upgrade Required", "http_request_error", tunnel.BadRequest, `WebSocket version "", want 13`, "Sec-WebSocket-Version: 13", "Upgrade: websocket"), tunnel.BadRequest},
		{"version 8", handshake(path, "Sec-WebSocket-Version: 8"),
			refusal("426 Upgrade Required", "http_request_error", tunnel.BadRequest, `WebSocket version "8", want 13`, "Sec-WebSocket-Version: 13", "Upgrade: websocket"), tunnel.BadRequest},
		{"two versions", handshake(path, "sec-websocket-version: 13"), malformed("2 Sec-WebSocket-Version fields"), tunnel.BadRequest},
		{"no key", handshake(path, "Sec-WebSocket-Key:"), malformed("0 Sec-WebSocket-Key fields, want one"), tunnel.BadRequest},
		{"two keys", handshake(path, "sec-websocket-key: "+sampleKey), malformed("2 Sec-WebSocket-Key fields, want one"), tunnel.BadRequest},
		{"key of 15 bytes", handshake(path, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25j"), malformed("Sec-WebSocket-Key is not 16 bytes in base64"), tunnel.BadRequest},
		{"key not in base64", handshake(path, "Sec-WebSocket-Key: ***"), malformed("Sec-WebSocket-Key is not 16 bytes in base64"), tunnel.BadRequest},
		{"Content-Length", handshake(path, "Content-Length: 70"), malformed("handshake with Content-Length"), tunnel.BadRequest},
		{"Content-Length 0", handshake(path, "Content-Length: 0"), malformed("handshake with Content-Length"), tunnel.BadRequest},
		{"Transfer-Encoding", handshake(path, "Transfer-Encoding: chunked"), malformed("handshake with Transfer-Encoding"), tunnel.BadRequest},
		{"bare LF", strings.ReplaceAll(sample, "\r\n", "\n"), malformed("line feed without carriage return at offset 42"), tunnel.BadRequest},
		{"Origin", handshake(path, "Origin: https://evil.test"),
			refusal("403 Forbidden", "http_request_denied", tunnel.Denied, `origin "https://evil.test" is not allowed`), tunnel.Denied},
		{"Origin of the same host", handshake(path, "Origin: http://gw.test"),
			refusal("403 Forbidden", "http_request_denied", tunnel.Denied, `origin "http://gw.test" is not allowed`), tunnel.Denied},
		{"Origin null", handshake(path, "Origin: null"), refusal("403 Forbidden", "http_request_denied", tunnel.Denied, `origin "null" is not allowed`), tunnel.Denied},
		{"empty Origin", handshake(path, "Origin: "), refusal("403 Forbidden", "http_request_denied", tunnel.Denied, `origin "" is not allowed`), tunnel.Denied},
		{"two Origins", handshake(path, "Origin: https://a.test", "origin: https://b.test"), malformed("2 Origin fields"), tunnel.BadRequest},
		{"another path", handshake("/chat"), refusal("404 Not Found", "http_request_error", tunnel.BadRequest, `path "/chat" is not below "/.culvert/tunnel/"`), tunnel.BadRequest},
		{"a path that goes up", handshake("/.culvert/../tunnel/svc.test:443"),
			refusal("404 Not Found", "http_request_error", tunnel.BadRequest, `path "/.culvert/../tunnel/svc.test:443" is not below "/.culvert/tunnel/"`), tunnel.BadRequest},
		{"absolute form", handshake("http://gw.test" + path),
			refusal("404 Not Found", "http_request_error", tunnel.BadRequest, `path "http://gw.test/.culvert/tunnel/svc.test:443" is not below "/.culvert/tunnel/"`), tunnel.BadRequest},
		{"query", handshake(path + "?to=a.test:1"), malformed("the target has a query"), tunnel.BadRequest},
		{"no destination", handshake("/.culvert/tunnel/"), malformed(`no destination: write it behind "/.culvert/tunnel/" in the path, or in Culvert-Target`), tunnel.BadRequest},
		{"two destinations", handshake(path, "Culvert-Target: a.test:1"), malformed("the destination is in the path and in Culvert-Target"), tunnel.BadRequest},
		{"two fields", handshake("/.culvert/tunnel", "Culvert-Target: a.test:1", "culvert-target: b.test:1"), malformed("2 Culvert-Target fields"), tunnel.BadRequest},
		{"half a percent", handshake("/.culvert/tunnel/svc.test%3"), malformed("the path is not percent-encoded as it should be"), tunnel.BadRequest},
		{"encoded slash", handshake("/.culvert/tunnel/a%2fsvc.test:443"), authority("a/svc.test:443", `: name has a byte that is not a letter, digit, hyphen, underscore or dot: "a/svc.test" at offset 1`), tunnel.BadRequest},
		{"encoded line end", handshake("/.culvert/tunnel/svc.test:443%0d%0aX:y"), authority("svc.test:443\r\nX:y", `: port "y" is not a number from 1 to 65535`), tunnel.BadRequest},
		{"encoded twice", handshake("/.culvert/tunnel/svc.test%253a443"), authority("svc.test%3a443", ` has no port`), tunnel.BadRequest},
		{"no port", handshake("/.culvert/tunnel/svc.test"), authority("svc.test", " has no port"), tunnel.BadRequest},
		{"userinfo is not quoted", handshake("/.culvert/tunnel/alice:secret@svc.test:443"), malformed("the authority has user information before an @"), tunnel.BadRequest},
		{"octal address", handshake("/.culvert/tunnel/0177.0.0.1:443"), authority("0177.0.0.1:443", `: name is an address: "0177.0.0.1"`), tunnel.BadRequest},
		{"a loop, by Via", handshake(path, "Via: 1.1 other, 1.1 GW-1"), loop, tunnel.Loop},
		{"a loop, by length", handshake(path, "Via: "+strings.Repeat("1.1 a,", 15)+"1.1 b"), loop, tunnel.Loop},
		{"no route", handshake("/.culvert/tunnel/nobody.test:443"), hidden, tunnel.NoRoute},
		{"an address that is nobody's", handshake("/.culvert/tunnel/127.0.0.1:22"), hidden, tunnel.NoRoute},
		{"head of more than 16 KiB", handshake(path, "A: "+strings.Repeat("a", connect.MaxHead)),
			refusal("431 Request Header Fields Too Large", "http_request_error", tunnel.TooLarge, "head is too long at offset 16384, limit 16384"), tunnel.TooLarge},
		{"slow", sample[:len(sample)-1], refusal("408 Request Timeout", "http_request_error", tunnel.HelloTimeout, "the request was not complete in time"), tunnel.HelloTimeout},
	}
	dialed := make(chan struct{}, 1)
	g := serve(t, tunneltest.Table{"svc.test:443": testnet.Service(t, func(net.Conn) { dialed <- struct{}{} })}, &Protocol{Via: "gw-1"})
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			c := testnet.Connect(t, g.Addr)
			in := row.in
			if row.name != "slow" {
				in += sample
			}
			if _, err := io.WriteString(c, in); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(c)
			if string(got) != row.want || err != nil {
				t.Errorf("got answer\n%s\n%v, want\n%s", got, err, row.want)
			}
			_ = c.Close() // the gateway waits a second for it
			if o := g.Outcome(t); o.Reason != row.reason {
				t.Errorf("got outcome %s, %v, want %s", o.Reason, o.Err, row.reason)
			}
		})
	}
	select {
	case <-dialed:
		t.Error("the service was dialed")
	default:
	}
}

func TestHostsAndOrigins(t *testing.T) {
	rows := []struct {
		name   string
		fields []string
		status int
	}{
		{"right host", []string{"Host: GW.test:8080"}, 101},
		{"another host", []string{"Host: evil.test"}, 421},
		{"right origin", []string{"Origin: https://app.test"}, 101},
		{"right origin in capitals", []string{"Origin: HTTPS://APP.test"}, 101},
		{"origin with a port", []string{"Origin: https://app.test:8443"}, 403},
		{"origin below the right one", []string{"Origin: https://app.test.evil.test"}, 403},
		{"plain origin", []string{"Origin: http://app.test"}, 403},
	}
	g := serve(t, tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()}, &Protocol{Hosts: []string{"gw.test"}, Origins: []string{"https://app.test"}})
	for _, row := range rows {
		if got := status(t, g, handshake("/.culvert/tunnel/svc.test:443", row.fields...)); got != row.status {
			t.Errorf("%s: got status %d, want %d", row.name, got, row.status)
		}
	}
}

// status sends a handshake and returns the status of its answer.
func status(t *testing.T, g *tunneltest.Gateway, in string) int {
	t.Helper()
	c := testnet.Connect(t, g.Addr)
	defer c.Close()
	_, _ = io.WriteString(c, in)
	line, err := bufio.NewReader(c).ReadString('\n')
	n, _ := strconv.Atoi(strings.Split(line+"   ", " ")[1])
	if n == 0 {
		t.Fatalf("got %q, %v, want a status line", line, err)
	}
	return n
}

func TestAuthorization(t *testing.T) {
	auth := connect.AnyOf{
		&connect.BasicAuth{Verify: connect.Passwords(map[string]string{"alice": "secret"})},
		&connect.Bearer{Verify: connect.Tokens(map[string]string{"bob": "t0ken"})},
	}
	g := serve(t, tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()}, &Protocol{Auth: auth})
	for name, fields := range map[string][]string{
		"none":                {},
		"wrong password":      {"Authorization: " + connect.BasicCredentials("alice", "guess")},
		"a cookie":            {"Cookie: Authorization=" + connect.BearerCredentials("t0ken")},
		"Proxy-Authorization": {"Proxy-Authorization: " + connect.BearerCredentials("t0ken")},
		"unknown scheme":      {"Authorization: Digest x"},
	} {
		c := testnet.Connect(t, g.Addr)
		_, _ = io.WriteString(c, handshake("/.culvert/tunnel/svc.test:443", fields...))
		got, err := io.ReadAll(c)
		want := refusal("401 Unauthorized", "http_request_denied", tunnel.NoAuth, "credentials are required and are missing or wrong",
			`WWW-Authenticate: Basic realm="culvert", charset="UTF-8"`, `WWW-Authenticate: Bearer realm="culvert"`)
		if string(got) != want || err != nil {
			t.Errorf("%s: got answer\n%s\n%v, want\n%s", name, got, err, want)
		}
		_ = c.Close()
		if o := g.Outcome(t); o.Reason != tunnel.NoAuth {
			t.Errorf("%s: got outcome %s, want %s", name, o.Reason, tunnel.NoAuth)
		}
	}
	if got := status(t, g, handshake("/.culvert/tunnel/svc.test:443", "Authorization: "+connect.BearerCredentials("t0ken"), "authorization: Basic x")); got != 400 {
		t.Errorf("two Authorization fields: got status %d, want 400", got)
	}
	g.Outcome(t)
	for id, credentials := range map[string]string{"alice": connect.BasicCredentials("alice", "secret"), "bob": connect.BearerCredentials("t0ken")} {
		d := &Dialer{URL: "ws://" + g.Addr, Authorization: credentials}
		c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
		if err != nil {
			t.Fatalf("%s: %v", id, err)
		}
		_ = c.Close()
		if o := g.Outcome(t); o.Peer.ID != id {
			t.Errorf("got outcome of peer %+v, want %s", o.Peer, id)
		}
	}
	_, err := (&Dialer{URL: "ws://" + g.Addr}).DialContext(t.Context(), "tcp", "svc.test:443")
	if tunnel.ReasonOf(err) != tunnel.NoAuth {
		t.Errorf("dial without credentials: got %v, want %s", err, tunnel.NoAuth)
	}
}

// One port takes CONNECT and WebSocket, and the first word decides.
func TestBesideConnect(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()}, &Protocol{}, &connect.Protocol{})
	for name, d := range map[string]tunnel.Dialer{
		"websocket": &Dialer{URL: "ws://" + g.Addr},
		"connect":   &connect.Dialer{Proxy: g.Addr},
	} {
		c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		_, _ = io.WriteString(c, "hello")
		_ = c.(tunnel.Stream).CloseWrite()
		if got, err := io.ReadAll(c); string(got) != "hello" || err != nil {
			t.Errorf("%s: got %q, %v, want what was sent", name, got, err)
		}
		_ = c.Close()
		if o := g.Outcome(t); o.Proto != name || o.Reason != tunnel.Done {
			t.Errorf("got outcome %s of %s, want %s of %s", o.Reason, o.Proto, tunnel.Done, name)
		}
	}
	c := testnet.Connect(t, g.Addr)
	_, _ = io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\n\r\n")
	if got, _ := io.ReadAll(c); !strings.HasPrefix(string(got), "HTTP/1.1 405 ") {
		t.Errorf("got %q to a POST, want 405", got)
	}
}
