package connect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

const (
	hdrEnd   = "\r\n\r\n"
	notFound = "no such service here"
	hidden   = "HTTP/1.1 403 Forbidden\r\n" +
		"Proxy-Status: culvert; error=http_request_denied; details=\"no-route\"\r\n" +
		"Content-Type: text/plain; charset=utf-8\r\n" +
		"Content-Length: 40\r\n" +
		"Connection: close\r\n" +
		"\r\n" +
		"culvert: no-route: no such service here\n"
)

// Heads that are refused before the Handler hears of them. Each is followed
// by a good request in the same segment, which must not be answered (must-never
// N30).
func TestRefusedHeads(t *testing.T) {
	malformed := func(text string) string {
		return refusal("400 Bad Request", "http_request_error", tunnel.BadRequest, text)
	}
	authority := func(s, text string) string { return malformed(fmt.Sprintf("authority %q%s", s, text)) }
	const notNumber = " is not a number from 1 to 65535"
	notCONNECT := refusal("405 Method Not Allowed", "http_request_error", tunnel.BadMethod, "this proxy takes CONNECT only", "Allow: CONNECT")
	to := func(authority string) string { return "CONNECT " + authority + " HTTP/1.1\r\nHost: x" + hdrEnd }
	rows := []struct {
		name, in, want string
		reason         tunnel.Reason
	}{
		{"no port", to("svc.test"), authority("svc.test", " has no port"), tunnel.BadRequest},
		{"empty port", to("svc.test:"), authority("svc.test:", `: port ""`+notNumber), tunnel.BadRequest},
		{"port 0", to("svc.test:0"), authority("svc.test:0", `: port "0"`+notNumber), tunnel.BadRequest},
		{"port 65536", to("svc.test:65536"), authority("svc.test:65536", `: port "65536"`+notNumber), tunnel.BadRequest},
		{"signed port", to("svc.test:+443"), authority("svc.test:+443", `: port "+443"`+notNumber), tunnel.BadRequest},
		{"octal port", to("svc.test:0443"), authority("svc.test:0443", `: port "0443"`+notNumber), tunnel.BadRequest},
		{"userinfo is not quoted", to("alice:secret@svc.test:443"), malformed("the authority has user information before an @"), tunnel.BadRequest},
		{"path", to("svc.test:443/x"), authority("svc.test:443/x", `: port "443/x"`+notNumber), tunnel.BadRequest},
		{"absolute form", to("http://svc.test:443"), authority("http://svc.test:443", `: name has a byte that is not a letter, digit, hyphen, underscore or dot: "http://svc.test" at offset 4`), tunnel.BadRequest},
		{"[ without ]", to("[::1:443"), authority("[::1:443", ": a bracket is not closed"), tunnel.BadRequest},
		{"IPv6 without brackets", to("2001:db8::1:443"), authority("2001:db8::1:443", ": an IPv6 address needs brackets"), tunnel.BadRequest},
		{"IPv6 without port", to("[2001:db8::1]"), authority("[2001:db8::1]", " has no port"), tunnel.BadRequest},
		{"zone", to("[fe80::1%eth0]:443"), authority("[fe80::1%eth0]:443", ": an address with a zone means nothing on another host"), tunnel.BadRequest},
		{"escaped zone", to("[fe80::1%25eth0]:443"), authority("[fe80::1%25eth0]:443", ": an address with a zone means nothing on another host"), tunnel.BadRequest},
		{"IPv4 in brackets", to("[127.0.0.1]:443"), authority("[127.0.0.1]:443", ": the text in brackets is not an IPv6 address"), tunnel.BadRequest},
		{"hex IPv4", to("0x7f.1:443"), authority("0x7f.1:443", `: name is an address: "0x7f.1"`), tunnel.BadRequest},
		{"short IPv4", to("127.1:443"), authority("127.1:443", `: name is an address: "127.1"`), tunnel.BadRequest},
		{"dword IPv4", to("2130706433:443"), authority("2130706433:443", `: name is an address: "2130706433"`), tunnel.BadRequest},
		{"octal IPv4", to("0177.0.0.1:443"), authority("0177.0.0.1:443", `: name is an address: "0177.0.0.1"`), tunnel.BadRequest},
		{"empty host", to(":443"), authority(":443", ": name is empty"), tunnel.BadRequest},
		{"escape sequence in the name", to(`svc\x1b[31m:443`), authority(`svc\x1b[31m:443`, `: name has a byte that is not a letter, digit, hyphen, underscore or dot: "svc\\x1b[31m" at offset 3`), tunnel.BadRequest},
		{"space in the authority", "CONNECT svc test:443 HTTP/1.1\r\nHost: x" + hdrEnd, malformed("no HTTP version at offset 12"), tunnel.BadRequest},
		{"two spaces", "CONNECT  svc.test:443 HTTP/1.1\r\nHost: x" + hdrEnd, malformed("no target in the request line at offset 8"), tunnel.BadRequest},
		{"UTF-8 in the authority", to("své.test:443"), malformed("byte 0xc3 in the target at offset 10"), tunnel.BadRequest},
		{"two Hosts", "CONNECT svc.test:443 HTTP/1.1\r\nHost: svc.test:443\r\nHost: svc.test:443" + hdrEnd, malformed("2 Host fields"), tunnel.BadRequest},
		{"two Hosts in one", "CONNECT svc.test:443 HTTP/1.1\r\nHost: a, b" + hdrEnd, malformed("Host field is not a host"), tunnel.BadRequest},
		{"HTTP/1.1 without Host", "CONNECT svc.test:443 HTTP/1.1" + hdrEnd, malformed("no Host field in HTTP/1.1"), tunnel.BadRequest},
		{"Content-Length", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\r\nContent-Length: 5" + hdrEnd, malformed("CONNECT with Content-Length"), tunnel.BadRequest},
		{"Content-Length 0", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\r\ncontent-length: 0" + hdrEnd, malformed("CONNECT with Content-Length"), tunnel.BadRequest},
		{"Transfer-Encoding", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked" + hdrEnd, malformed("CONNECT with Transfer-Encoding"), tunnel.BadRequest},
		{"folded line", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\r\nA: b\r\n c" + hdrEnd, malformed("folded field line at offset 46"), tunnel.BadRequest},
		{"space before the colon", "CONNECT svc.test:443 HTTP/1.1\r\nHost : x" + hdrEnd, malformed("byte 0x20 in a field name at offset 35"), tunnel.BadRequest},
		{"no colon", "CONNECT svc.test:443 HTTP/1.1\r\nHost" + hdrEnd, malformed("field line without a colon at offset 35"), tunnel.BadRequest},
		{"no name", "CONNECT svc.test:443 HTTP/1.1\r\n: x" + hdrEnd, malformed("byte 0x3a in a field name at offset 31"), tunnel.BadRequest},
		{"NUL", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\x00y" + hdrEnd, malformed("byte 0x00 in a field value at offset 38"), tunnel.BadRequest},
		{"bare CR", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\rA: b" + hdrEnd, malformed("byte 0x0d in a field value at offset 38"), tunnel.BadRequest},
		{"bare LF", "CONNECT svc.test:443 HTTP/1.1\nHost: x\n\n", malformed("line feed without carriage return at offset 29"), tunnel.BadRequest},
		{"bare LF at the end", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\r\n\n", malformed("line feed without carriage return at offset 40"), tunnel.BadRequest},
		{"HTTP/0.9", "GET /\r\n", malformed("no HTTP version in the request line: HTTP/0.9 is not spoken here at offset 5"), tunnel.BadRequest},
		{"HTTP/0.9 CONNECT", "CONNECT svc.test:443\r\n", malformed("no HTTP version in the request line: HTTP/0.9 is not spoken here at offset 20"), tunnel.BadRequest},
		{"lower-case version", "CONNECT svc.test:443 http/1.1\r\nHost: x" + hdrEnd, malformed("no HTTP version at offset 21"), tunnel.BadRequest},
		{"HTTP/2.0", "CONNECT svc.test:443 HTTP/2.0\r\nHost: x" + hdrEnd,
			refusal("505 HTTP Version Not Supported", "http_request_error", tunnel.BadRequest, `version "HTTP/2.0" is not HTTP/1.x at offset 21`), tunnel.BadRequest},
		{"GET", "GET / HTTP/1.1\r\nHost: x" + hdrEnd, notCONNECT, tunnel.BadMethod},
		{"absolute-form GET", "GET http://svc.test/ HTTP/1.1\r\nHost: svc.test" + hdrEnd, notCONNECT, tunnel.BadMethod},
		{"lower-case connect", "connect svc.test:443 HTTP/1.1\r\nHost: x" + hdrEnd, notCONNECT, tunnel.BadMethod},
		{"POST with a body that is a request", "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 70" + hdrEnd, notCONNECT, tunnel.BadMethod},
		{"head of more than 16 KiB", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\r\nA: " + strings.Repeat("a", MaxHead),
			refusal("431 Request Header Fields Too Large", "http_request_error", tunnel.TooLarge, "head is too long at offset 16384, limit 16384"), tunnel.TooLarge},
		{"request line of more than 8 KiB", "CONNECT " + strings.Repeat("a", MaxRequestLine),
			refusal("414 Request URI Too Long", "http_request_error", tunnel.TooLarge, "first line is too long at offset 8192, limit 8192"), tunnel.TooLarge},
		{"101 fields", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\r\n" + strings.Repeat("A: b\r\n", 100) + "\r\n",
			refusal("431 Request Header Fields Too Large", "http_request_error", tunnel.TooLarge, "too many field lines at offset 634, limit 100"), tunnel.TooLarge},
		{"a loop, by Via", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\r\nVia: 1.1 other, HTTP/1.1 GW-1 (culvert)" + hdrEnd,
			refusal("502 Bad Gateway", "proxy_loop_detected", tunnel.Loop, "the way leads back to this gateway"), tunnel.Loop},
		{"a loop, by CDN-Loop", "CONNECT 192.0.2.1:443 HTTP/1.0\r\nCDN-Loop: other, gw-1; v=1" + hdrEnd,
			refusal("502 Bad Gateway", "proxy_loop_detected", tunnel.Loop, "the way leads back to this gateway"), tunnel.Loop},
		{"a loop, by length", "CONNECT svc.test:443 HTTP/1.1\r\nHost: x\r\nVia: " + strings.Repeat("1.1 a,", 15) + "\r\nVia: 1.1 b" + hdrEnd,
			refusal("502 Bad Gateway", "proxy_loop_detected", tunnel.Loop, "the way leads back to this gateway"), tunnel.Loop},
	}
	r := &router{}
	g := serve(t, &Protocol{Via: "gw-1"}, r)
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			if got := exchange(t, g.addr, row.in+to("svc.test:443")); got != row.want {
				t.Errorf("got answer\n%s\nwant\n%s", got, row.want)
			}
			tunneltest.WantReason(t, g.result(t), row.reason)
		})
	}
	if asked, _ := r.asked(); len(asked) != 0 {
		t.Errorf("got %d requests at the Handler, want none: %+v", len(asked), asked)
	}
}

// What the Handler refuses, for a stranger and for a caller it knows.
func TestRefusals(t *testing.T) {
	dialErr := func(errno syscall.Errno) error {
		err := &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.IPv4(10, 1, 2, 3), Port: 8443}, Err: errno}
		return tunnel.Refusef(tunnel.DialFailed, "2 endpoints: %w", errors.Join(errors.New("x"), err))
	}
	simple := func(r tunnel.Reason) error { return tunnel.Refusef(r, "10.1.2.3: secret detail\r\nX: y") }
	const (
		name, literal = "svc.test:443", "127.0.0.1:22"
		refused       = "no endpoint of the service took the connection"
		never         = "the address is one this gateway never dials"
		loop          = "the way leads back to this gateway"
	)
	rows := []struct {
		name   string
		target string
		err    error
		known  bool
		want   string
	}{
		{"no-route", name, simple(tunnel.NoRoute), false, hidden},
		{"not-exposed", name, simple(tunnel.NotExposed), false, hidden},
		{"denied", name, simple(tunnel.Denied), false, hidden},
		{"no-route, known", name, simple(tunnel.NoRoute), true, refusal("403 Forbidden", "destination_not_found", tunnel.NoRoute, notFound)},
		{"not-exposed, known", name, simple(tunnel.NotExposed), true, refusal("403 Forbidden", "http_request_denied", tunnel.NotExposed, "the service is private")},
		{"denied, known", name, simple(tunnel.Denied), true, refusal("403 Forbidden", "http_request_denied", tunnel.Denied, "policy does not allow this")},
		{"prohibited, asked for", literal, simple(tunnel.Prohibited), false, refusal("403 Forbidden", "destination_ip_prohibited", tunnel.Prohibited, never)},
		{"prohibited, resolved", name, simple(tunnel.Prohibited), false, refusal("502 Bad Gateway", "destination_ip_prohibited", tunnel.Prohibited, never)},
		{"loop, asked for", literal, simple(tunnel.Loop), false, refusal("403 Forbidden", "proxy_loop_detected", tunnel.Loop, loop)},
		{"loop, resolved", name, simple(tunnel.Loop), false, refusal("502 Bad Gateway", "proxy_loop_detected", tunnel.Loop, loop)},
		{"refused", name, dialErr(syscall.ECONNREFUSED), false, refusal("502 Bad Gateway", "connection_refused", tunnel.DialFailed, refused)},
		{"no way to the network", name, dialErr(syscall.ENETUNREACH), false, refusal("502 Bad Gateway", "destination_ip_unroutable", tunnel.DialFailed, refused)},
		{"no way to the host", name, dialErr(syscall.EHOSTUNREACH), false, refusal("502 Bad Gateway", "destination_ip_unroutable", tunnel.DialFailed, refused)},
		{"reset before data", name, dialErr(syscall.ECONNRESET), false, refusal("502 Bad Gateway", "connection_terminated", tunnel.DialFailed, refused)},
		{"closed before data", name, tunnel.Refusef(tunnel.DialFailed, "x: %w", io.EOF), true, refusal("502 Bad Gateway", "connection_terminated", tunnel.DialFailed, refused)},
		{"dial timeout", name, simple(tunnel.DialTimeout), false, refusal("504 Gateway Timeout", "connection_timeout", tunnel.DialTimeout, "no endpoint of the service answered in time")},
		{"a context's deadline", name, fmt.Errorf("x: %w", context.DeadlineExceeded), false, refusal("504 Gateway Timeout", "connection_timeout", tunnel.DialTimeout, "no endpoint of the service answered in time")},
		{"dns failed", name, simple(tunnel.LookupError), false, refusal("502 Bad Gateway", "dns_error", tunnel.LookupError, "the service's endpoint has no address")},
		{"dns timeout", name, simple(tunnel.LookupTime), false, refusal("504 Gateway Timeout", "dns_timeout", tunnel.LookupTime, "the service's endpoint was not resolved in time")},
		{"no endpoint", name, simple(tunnel.NoEndpoint), false, refusal("503 Service Unavailable", "destination_unavailable", tunnel.NoEndpoint, "the service has no endpoint")},
		{"overload", name, simple(tunnel.Overload), false, refusal("503 Service Unavailable", "connection_limit_reached", tunnel.Overload, "a connection limit is reached, try again", "Retry-After: 1")},
		{"drain", name, simple(tunnel.Drain), false, refusal("503 Service Unavailable", "connection_limit_reached", tunnel.Drain, "the gateway is stopping, try again", "Retry-After: 1")},
		{"internal", name, errors.New("10.1.2.3: nil map"), false, refusal("500 Internal Server Error", "proxy_internal_error", tunnel.Internal, "a fault of the gateway's own")},
		{"a reason of tomorrow", name, simple("moon-phase"), false, refusal("500 Internal Server Error", "proxy_internal_error", tunnel.Internal, "a fault of the gateway's own")},
		{"the handler's own bad request", name, simple(tunnel.BadRequest), false, refusal("400 Bad Request", "http_request_error", tunnel.BadRequest, "the request is malformed")},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			r := &router{refer: func(*tunnel.Request) error { return row.err }}
			p, auth := &Protocol{}, ""
			if row.known {
				p.Auth = &Bearer{Verify: Tokens(map[string]string{"ci": "t0ken"})}
				auth = "Proxy-Authorization: Bearer t0ken\r\n"
			}
			g := serve(t, p, r)
			in := "CONNECT " + row.target + " HTTP/1.1\r\nHost: x\r\n" + auth + "\r\n"
			if got := exchange(t, g.addr, in+"CONNECT svc.test:443 HTTP/1.0"+hdrEnd); got != row.want {
				t.Errorf("got answer\n%s\nwant\n%s", got, row.want)
			}
			if err := g.result(t); err != nil {
				t.Errorf("got error %v, want nil: the Handler has answered", err)
			}
			if asked, dials := r.asked(); len(asked) != 1 || dials != 0 {
				t.Errorf("got %d requests, %d dials, want 1, 0", len(asked), dials)
			}
		})
	}
}

func TestEveryReasonHasAnAnswer(t *testing.T) {
	for _, reason := range tunnel.Reasons() {
		row, ok := answers[reason]
		if !ok || row.status < 400 || row.token == "" || row.text == "" {
			t.Errorf("reason %q: got answer %+v, want a whole one", reason, row)
		}
	}
	if got, want := len(answers), len(tunnel.Reasons()); got != want {
		t.Errorf("got %d answers, want %d", got, want)
	}
}

func TestProxyName(t *testing.T) {
	for name, want := range map[string]string{
		"":             "culvert",
		"gw.example":   "gw.example",
		"7gw":          `"7gw"`,
		"east gateway": `"east gateway"`,
		"a\"b\\c\r\nd": `"a\"b\\c??d"`,
	} {
		g := serve(t, &Protocol{ProxyName: name}, &router{})
		got := exchange(t, g.addr, "CONNECT a.test:1 HTTP/1.0"+hdrEnd)
		if want := "Proxy-Status: " + want + "; error=http_request_denied; details=\"no-route\"\r\n"; !strings.Contains(got, want) {
			t.Errorf("name %q: got answer %q, want it to have %q", name, got, want)
		}
	}
}

// What is understood, and how.
func TestRequests(t *testing.T) {
	rows := []struct {
		in   string
		name string
		addr string
		port uint16
	}{
		{"CONNECT svc.test:443 HTTP/1.1\r\nHost: svc.test:443", "svc.test", "", 443},
		{"CONNECT svc.test:443 HTTP/1.1\r\nHost: other.test", "svc.test", "", 443},
		{"CONNECT svc.test:443 HTTP/1.1\r\nHost:", "svc.test", "", 443},
		{"CONNECT svc.test:443 HTTP/1.0", "svc.test", "", 443},
		{"CONNECT svc.test:443 HTTP/1.0\r\nUser-Agent: PROXY", "svc.test", "", 443},
		{"CONNECT svc.test:443 HTTP/1.9\r\nhOST: [::1]:1\r\nUser-Agent: \xc3\xa9\t\r\nEmpty:", "svc.test", "", 443},
		{"CONNECT SVC.Test.:65535 HTTP/1.0", "svc.test", "", 65535},
		{"CONNECT outbound_.443_._.svc.ns:1 HTTP/1.0", "outbound_.443_._.svc.ns", "", 1},
		{"CONNECT 192.0.2.7:8443 HTTP/1.0", "", "192.0.2.7", 8443},
		{"CONNECT [2001:db8::7]:8443 HTTP/1.0", "", "2001:db8::7", 8443},
		{"CONNECT [::ffff:127.0.0.1]:80 HTTP/1.0", "", "127.0.0.1", 80},
		{"CONNECT svc.test:443 HTTP/1.0\r\nVia: 1.0 fred, 1.1 p.example.net:8080 (a, b)\r\nVia: nonsense", "svc.test", "", 443},
	}
	for _, row := range rows {
		r := &router{}
		g := serve(t, &Protocol{Via: "gw-1"}, r)
		if got := exchange(t, g.addr, row.in+hdrEnd); got != hidden {
			t.Errorf("%q: got answer %q, want %q", row.in, got, hidden)
		}
		asked, _ := r.asked()
		if len(asked) != 1 {
			t.Errorf("%q: got %d requests, want 1", row.in, len(asked))
			continue
		}
		var addr netip.Addr
		if row.addr != "" {
			addr = netip.MustParseAddr(row.addr)
		}
		got := asked[0]
		if got.Name.String() != row.name || got.Addr != addr || got.Port != row.port || got.Proto != "connect" || got.Peer != (tunnel.Peer{}) {
			t.Errorf("%q: got request %+v, want name %q, address %q, port %d", row.in, got, row.name, row.addr, row.port)
		}
	}
}

// Bytes that come with the head, all at once or one by one, arrive behind it,
// in order and unchanged, and nothing of them is read as a request.
func TestEarlyBytes(t *testing.T) {
	early := "\x16\x03\x01\x02\x00CONNECT other.test:443 HTTP/1.1\r\nHost: x\r\n\r\n" + strings.Repeat("0123456789", 5000)
	for _, piece := range []int{1, 7, 1448, 1 << 20} {
		got := make(chan string, 1)
		addr := testnet.Service(t, func(c net.Conn) {
			b, _ := io.ReadAll(c)
			got <- string(b)
			_, _ = io.WriteString(c, "bye")
		})
		r := &router{table: map[string]string{"svc.test:443": addr}}
		g := serve(t, &Protocol{}, r)
		c := testnet.Connect(t, g.addr)
		in := "CONNECT svc.test:443 HTTP/1.1\r\nHost: svc.test:443\r\n\r\n" + early
		if piece == 1 {
			in = in[:2000]
		}
		for rest := []byte(in); len(rest) > 0; {
			n := min(piece, len(rest))
			if _, err := c.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		_ = c.CloseWrite()
		out, err := io.ReadAll(c)
		if want := established + "bye"; err != nil || string(out) != want {
			t.Errorf("pieces of %d: got answer %q, %v, want %q", piece, out, err, want)
		}
		if b, want := <-got, in[strings.Index(in, hdrEnd)+4:]; b != want {
			t.Errorf("pieces of %d: the backend got %d bytes, want %d: the client's, in order", piece, len(b), len(want))
		}
		if asked, dials := r.asked(); len(asked) != 1 || dials != 1 {
			t.Errorf("pieces of %d: got %d requests, %d dials, want 1, 1", piece, len(asked), dials)
		}
	}
}

// The stream is the Conn itself, so the bytes can move in the kernel, and
// its deadlines are gone.
func TestAcceptReturnsTheConn(t *testing.T) {
	client, server := net.Pipe()
	defer client.Close()
	c := tunnel.NewConn(server)
	_ = c.SetReadDeadline(time.Now().Add(patience))
	go func() { _, _ = io.WriteString(client, "CONNECT svc.test:1 HTTP/1.0\r\n\r\nearly") }()
	done := make(chan error, 1)
	go func() {
		done <- (&Protocol{}).ServeConn(t.Context(), c, tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			s, err := req.Accept()
			if err != nil || s != tunnel.Stream(c) {
				t.Errorf("got stream %v, %v, want the Conn", s, err)
				return
			}
			raw, early := s.(tunnel.Unwrapper).Unwrap()
			if raw != server || string(early) != "early" {
				t.Errorf("got %v, early %q, want the accepted connection and %q", raw, early, "early")
			}
			_ = raw.Close()
		}))
	}()
	if got, err := io.ReadAll(client); string(got) != established || err != nil {
		t.Errorf("got %q, %v, want %q", got, err, established)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestAcceptOfAClientThatLeft(t *testing.T) {
	client, server := net.Pipe()
	go func() {
		_, _ = io.WriteString(client, "CONNECT svc.test:1 HTTP/1.0\r\n\r\n")
		_ = client.Close()
	}()
	err := (&Protocol{}).ServeConn(t.Context(), tunnel.NewConn(server), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		_, _ = server.Read(make([]byte, 1)) // until the client is gone
		_, err := req.Accept()
		tunneltest.WantReason(t, err, tunnel.Gone)
	}))
	if err != nil {
		t.Error(err)
	}
	_ = server.Close()
}

func TestAcceptOfAClientThatDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := net.Pipe()
		defer client.Close()
		defer server.Close()
		go func() { _, _ = io.WriteString(client, "CONNECT svc.test:1 HTTP/1.0\r\n\r\n") }()
		err := (&Protocol{}).ServeConn(t.Context(), tunnel.NewConn(server), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			_, err := req.Accept()
			tunneltest.WantReason(t, err, tunnel.Gone)
		}))
		if err != nil {
			t.Error(err)
		}
	})
}

// Who says that no more is to come, in the middle of a head, gets no answer.
func TestHalfClosedHead(t *testing.T) {
	g := serve(t, &Protocol{}, &router{})
	c := testnet.Connect(t, g.addr)
	_, _ = io.WriteString(c, "CONNECT svc.test:443 HTTP/1.0\r\n")
	_ = c.CloseWrite()
	if got, err := io.ReadAll(c); len(got) > 0 || err != nil {
		t.Errorf("got answer %q, %v, want none", got, err)
	}
	tunneltest.WantReason(t, g.result(t), tunnel.Gone)
}

// A head that does not come to its end, by deadline, by the client's leaving
// and by the gateway's stopping.
func TestUnfinishedHeads(t *testing.T) {
	slow := refusal("408 Request Timeout", "http_request_error", tunnel.HelloTimeout, "the request was not complete in time")
	stopping := refusal("503 Service Unavailable", "connection_limit_reached", tunnel.Drain, "the gateway is stopping, try again", "Retry-After: 1")
	rows := []struct {
		name, in    string
		leave, stop bool
		want        string
		reason      tunnel.Reason
	}{
		{"slow", "CONNECT svc.test:443 HT", false, false, slow, tunnel.HelloTimeout},
		{"silent", "", false, false, "", tunnel.HelloTimeout},
		{"left in the middle", "CONNECT svc.test:443 HTTP/1.0\r\n", true, false, "", tunnel.Gone},
		{"left at once", "", true, false, "", tunnel.NoHello},
		{"stopped in the middle", "CONNECT ", false, true, stopping, tunnel.Drain},
		{"stopped at once", "", false, true, "", tunnel.Drain},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, server := net.Pipe()
				defer client.Close()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				c := tunnel.NewConn(server)
				_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
				done := make(chan error, 1)
				go func() {
					done <- (&Protocol{}).ServeConn(ctx, c, tunnel.HandlerFunc(func(context.Context, *tunnel.Request) {
						t.Error("the Handler was called")
					}))
					_ = c.Close()
				}()
				for i := range len(row.in) { // a byte does not buy time
					time.Sleep(time.Millisecond)
					_, _ = io.WriteString(client, row.in[i:i+1])
				}
				if row.stop {
					cancel()
					_ = c.SetReadDeadline(time.Now())
				}
				if row.leave {
					_ = client.Close()
				} else if got, err := io.ReadAll(client); string(got) != row.want || err != nil {
					t.Errorf("got answer %q, %v, want %q", got, err, row.want)
				}
				tunneltest.WantReason(t, <-done, row.reason)
			})
		})
	}
}

func TestSniff(t *testing.T) {
	p := new(Protocol)
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	rows := []struct {
		in   string
		want tunnel.Verdict
	}{
		{"CONNECT ", tunnel.Yes}, {"CONNECT svc:443 HTTP/1.1\r\n", tunnel.Yes}, {"GET / HTTP/1.1\r\n", tunnel.Yes},
		{"connect x", tunnel.Yes}, {"PRI * HTTP/1.1\r\n", tunnel.Yes}, {"POST ", tunnel.Yes}, {"M-SEARCH ", tunnel.Yes},
		{"C", tunnel.More}, {"CONNECT", tunnel.More}, {"P", tunnel.More}, {"PRI * HTTP/2.0\r", tunnel.More}, {"SSH", tunnel.More},
		{preface, tunnel.No}, {"SSH-2.0-OpenSSH_9.2 x", tunnel.No}, {"PROXY TCP4 ", tunnel.No}, {"\x16\x03\x01", tunnel.No},
		{"\x05\x01\x00", tunnel.No}, {" CONNECT", tunnel.No}, {"\r\nCONNECT", tunnel.No}, {"GET\r\n", tunnel.No},
		{strings.Repeat("A", 24), tunnel.More}, {strings.Repeat("A", 24) + " ", tunnel.Yes}, {strings.Repeat("A", 25), tunnel.No}, {"\x00", tunnel.No},
	}
	for _, row := range rows {
		if got := p.Sniff([]byte(row.in)); got != row.want {
			t.Errorf("Sniff(%q) = %d, want %d", row.in, got, row.want)
		}
		// A verdict is final: no prefix says the opposite.
		for i := 1; i < len(row.in); i++ {
			if got := p.Sniff([]byte(row.in[:i])); got != tunnel.More && got != row.want {
				t.Errorf("Sniff(%q) = %d, and %d for %q", row.in[:i], got, row.want, row.in)
			}
		}
	}
}

// A client's credentials are in no error and no answer, wherever they are put.
func TestCredentialsAreNotEchoed(t *testing.T) {
	const secret = "c2VjcmV0LXBsYW50ZWQ="
	for _, in := range []string{
		"CONNECT a:" + secret + "@svc.test:443 HTTP/1.1\r\nHost: x" + hdrEnd,
		"GET http://a:" + secret + "@svc.test/ HTTP/1.1\r\nHost: x" + hdrEnd,
		"CONNECT svc.test:443 HTTP/1.0\r\nProxy-Authorization: Basic " + secret + hdrEnd,
		"CONNECT svc.test:443 HTTP/1.0\r\nProxy-Authorization : Basic " + secret + hdrEnd,
		"CONNECT svc.test:443 HTTP/1.0\r\nProxy-Authorization: Basic\r\n " + secret + hdrEnd,
		"CONNECT svc.test:443 HTTP/1.0\r\nBasic" + secret + hdrEnd,
		"CONNECT svc.test:443 HTTP/1.0\r\nProxy-Authorization: " + secret + "\x00" + hdrEnd,
		"CONNECT svc.test:443 HTTP/1.0\r\nProxy-Authorization: " + secret + "\r\nProxy-Authorization: " + secret + hdrEnd,
		"CONNECT svc.test:443 HTTP/1.1\r\nHost: a@" + secret + hdrEnd,
	} {
		g := serve(t, &Protocol{Auth: AnyOf{}}, &router{})
		out := exchange(t, g.addr, in)
		err := g.result(t)
		if err == nil || strings.Contains(err.Error(), secret) || strings.Contains(out, secret) {
			t.Errorf("%q: got error %q and answer %q, want some without the secret", in, err, out)
		}
	}
}
