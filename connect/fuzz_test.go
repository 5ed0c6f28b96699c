package connect

import (
	"bufio"
	"bytes"
	"errors"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// Heads as the named clients send them.
var clientHeads = []string{
	"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\nUser-Agent: curl/7.88.1\r\nProxy-Connection: Keep-Alive\r\n\r\n",
	"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\nProxy-Authorization: Basic YWxpY2U6c2VjcmV0\r\nUser-Agent: git/2.39.5\r\nProxy-Connection: Keep-Alive\r\n\r\n",
	"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\nUser-Agent: Go-http-client/1.1\r\n\r\n",
	"CONNECT example.com:443 HTTP/1.0\r\n\r\n",                                                    // openssl s_client, Python 3.11
	"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\nConnection: keep-alive\r\n\r\n", // node
}

func FuzzHead(f *testing.F) {
	for _, s := range append(clientHeads,
		"GET http://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n", "GET /\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"CONNECT [::1]:1 HTTP/1.1\r\nHost:\t[::1]:1 \r\nA: b\r\n c\r\n\r\n", "CONNECT a:1 HTTP/1.1\nHost: a\n\n",
		"CONNECT a:1 HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0",
		"CONNECT a:1 HTTP/1.0\r\n"+strings.Repeat("A:\r\n", 101)+"\r\n") {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var head Head
		var err error
		testnet.Bounded(t, 2*len(b)+12<<10, func() { head, err = ParseHead(b) }) // with the list of 100 fields

		// Piece by piece it is the same head, or the same error.
		var p parser
		var pieces error
		for i := 0; i <= len(b); i++ {
			if pieces = p.parse(b[:i]); pieces != ErrMore {
				break
			}
		}
		if (pieces == nil) != (err == nil) || err != nil && pieces.Error() != err.Error() {
			t.Fatalf("whole: %v; in pieces: %v", err, pieces)
		}

		var he *HeadError
		switch {
		case err == ErrMore:
			if len(b) >= MaxHead {
				t.Fatalf("asks for more than %d bytes", MaxHead)
			}
			return
		case err != nil:
			if !errors.As(err, &he) || he.Status < 400 || he.Offset > len(b) {
				t.Fatalf("got error %#v, want a HeadError inside of %d bytes", err, len(b))
			}
			return
		case head.Len > MaxHead || head.Len > len(b) || !bytes.HasSuffix(b[:head.Len], []byte(hdrEnd)):
			t.Fatalf("got a head of %d bytes of %d, want the end to be an empty line", head.Len, len(b))
		}
		for i := range min(head.Len, 256) { // the rest by piece, above
			if _, err := ParseHead(b[:i]); err != ErrMore {
				t.Fatalf("the first %d bytes: got %v, want ErrMore", i, err)
			}
		}
		if again, err := ParseHead(b[:head.Len]); err != nil || again.Len != head.Len {
			t.Fatalf("without what follows: got %+v, %v, want %+v", again, err, head)
		}

		// Where the standard library reads a head too, it is the same one.
		br := bufio.NewReaderSize(bytes.NewReader(b), MaxHead)
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		if req.Method != head.Method || req.RequestURI != head.Target || req.ProtoMinor != head.Minor {
			t.Fatalf("got %s %q 1.%d, net/http reads %s %q 1.%d", head.Method, head.Target, head.Minor, req.Method, req.RequestURI, req.ProtoMinor)
		}
		for name, values := range req.Header {
			v, n := head.Fields.Get(name)
			if name == "Content-Length" && n > 1 {
				n = 1 // of several that say the same, net/http keeps one
			}
			if n != len(values) || v != values[0] {
				t.Fatalf("field %q: got %d, first %q, net/http reads %q", name, n, v, values)
			}
		}
	})
}

func FuzzAuthority(f *testing.F) {
	for _, s := range []string{
		"svc.test:443", "SVC.test.:1", "192.0.2.1:80", "[2001:db8::1]:65535", "[::ffff:1.2.3.4]:1", "outbound_.443_._.host:1",
		"a@b:1", "127.1:1", "0x7f.1:1", "[::1%25lo]:1", "[::1]", "::1:1", ":1", "a:", "a:0", "[127.0.0.1]:1", "a:00001", "%61:1",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var a Authority
		var err error
		testnet.Bounded(t, 2*len(s)+4<<10, func() { a, err = ParseAuthority(s) })
		if err != nil {
			if strings.ContainsAny(err.Error(), "\r\n\x00\x1b") {
				t.Fatalf("error %q has controls", err)
			}
			return
		}
		if a.Port == 0 || a.Name.IsZero() != a.Addr.IsValid() || a.Addr.Is4In6() || a.Addr.Zone() != "" {
			t.Fatalf("%q: got %+v", s, a)
		}
		if !a.Name.IsZero() {
			if _, err := netip.ParseAddr(a.Name.String()); err == nil {
				t.Fatalf("%q: got the name %q, which is an address", s, a.Name)
			}
			if again, err := tunnel.ParseName(a.Name.String()); err != nil || again != a.Name {
				t.Fatalf("%q: the name %q is not normal: %v, %v", s, a.Name, again, err)
			}
		}
		if again, err := ParseAuthority(a.String()); err != nil || again != a {
			t.Fatalf("%q: got %+v, and from %q %+v, %v", s, a, a.String(), again, err)
		}
	})
}

func FuzzReply(f *testing.F) {
	for _, s := range []string{
		established, established + "\x16\x03\x03", "HTTP/1.0 200\r\n\r\n", "HTTP/1.1 100 \r\n\r\n" + established,
		refusal("403 Forbidden", "http_request_denied", tunnel.NoRoute, "x"), refusal("503 X", "connection_limit_reached", tunnel.Drain, "x", "Retry-After: 1"),
		"HTTP/1.1 502 Bad Gateway\r\nProxy-Status: a; error=dns_error; details=\"\\\"\", \"b,\"; x=?1\r\nContent-Length: 5\r\n\r\nhello",
		"HTTP/1.1 407 Proxy Authentication Required\r\nServer: squid/5.7\r\nProxy-Authenticate: Basic realm=\"x\"\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.1 200 OK\n\n", "HTTP/1.1 999 \xff\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var r reply
		var err error
		testnet.Bounded(t, 2*len(b)+4<<10, func() { r, err = parseReply(b) })
		if err != nil {
			return
		}
		if r.status < 100 || r.status > 999 || r.Len > len(b) {
			t.Fatalf("got status %d, %d bytes of %d", r.status, r.Len, len(b))
		}
		for i := range min(r.Len, 256) {
			if _, err := parseReply(b[:i]); err != ErrMore {
				t.Fatalf("the first %d bytes: got %v, want ErrMore", i, err)
			}
		}
		if _, ok := answers[r.reason()]; !ok {
			t.Fatalf("got reason %q, which is none", r.reason())
		}
		if n := r.bodyLen(maxQuote); n < 0 || n > maxQuote {
			t.Fatalf("got a body of %d bytes", n)
		}
		std, err := http.ReadResponse(bufio.NewReaderSize(bytes.NewReader(b), MaxHead), &http.Request{Method: "CONNECT"})
		if err != nil {
			return
		}
		_ = std.Body.Close()
		if std.StatusCode != r.status {
			t.Fatalf("got status %d, net/http reads %d", r.status, std.StatusCode)
		}
	})
}
