//go:build unix

package interop

import (
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// A badConnect is a request that is refused, and how.
type badConnect struct {
	name   string
	raw    string
	status int
	error  string // of Proxy-Status; "" means http_request_error
	says   string // in the details of Proxy-Status, and in the body
	reason string // in the log; "" means says
	extra  string // a field line that must be there
}

// connectTo is a well-formed CONNECT.
func connectTo(authority string) string {
	return "CONNECT " + authority + " HTTP/1.1\r\nHost: " + svc + "\r\n\r\n"
}

func badConnects(closed string) []badConnect {
	rows := []badConnect{
		// Destinations. Strangers hear one and the same for what is not theirs.
		{"a name that is not registered", connectTo("nobody.example.org:443"), 403, "http_request_denied", "no-route", "", ""},
		{"a port the service does not have", connectTo("pinned.example.test:444"), 403, "http_request_denied", "no-route", "", ""},
		{"an address that is not registered", connectTo("192.0.2.1:443"), 403, "http_request_denied", "no-route", "", ""},
		{"loopback", connectTo("127.0.0.1:80"), 403, "destination_ip_prohibited", "prohibited", "", ""},
		{"loopback, IPv6", connectTo("[::1]:80"), 403, "destination_ip_prohibited", "prohibited", "", ""},
		{"loopback, IPv4-mapped", connectTo("[::ffff:127.0.0.1]:80"), 403, "destination_ip_prohibited", "prohibited", "", ""},
		{"this host", connectTo("0.0.0.0:80"), 403, "destination_ip_prohibited", "prohibited", "", ""},
		{"link-local", connectTo("[fe80::1]:80"), 403, "destination_ip_prohibited", "prohibited", "", ""},
		{"a cloud's metadata", connectTo("169.254.169.254:80"), 403, "destination_ip_prohibited", "prohibited", "", ""},
		{"NAT64 of metadata", connectTo("[64:ff9b::a9fe:a9fe]:80"), 403, "destination_ip_prohibited", "prohibited", "", ""},
		{"a service that is down", connectTo("down.example.test:443"), 502, "connection_refused", "dial-failed", "", ""},

		// Authorities.
		{"no port", connectTo(svc), 400, "", "bad-request", "", ""},
		{"an empty port", connectTo(svc + ":"), 400, "", "bad-request", "", ""},
		{"port 0", connectTo(svc + ":0"), 400, "", "bad-request", "", ""},
		{"port 65536", connectTo(svc + ":65536"), 400, "", "bad-request", "", ""},
		{"a port with a sign", connectTo(svc + ":+443"), 400, "", "bad-request", "", ""},
		{"a service name for a port", connectTo(svc + ":https"), 400, "", "bad-request", "", ""},
		{"user information", connectTo("alice:secret@" + svc + ":443"), 400, "", "bad-request", "", ""},
		{"a path", connectTo(svc + ":443/x"), 400, "", "bad-request", "", ""},
		{"a URL", connectTo("https://" + svc + ":443"), 400, "", "bad-request", "", ""},
		{"a bracket that stays open", connectTo("[::1:443"), 400, "", "bad-request", "", ""},
		{"a zone", connectTo("[fe80::1%25eth0]:443"), 400, "", "bad-request", "", ""},
		{"IPv6 without brackets", connectTo("2001:db8::1:443"), 400, "", "bad-request", "", ""},
		{"a short IPv4 address", connectTo("127.1:80"), 400, "", "bad-request", "", ""},
		{"an octal IPv4 address", connectTo("0177.0.0.1:80"), 400, "", "bad-request", "", ""},
		{"a hexadecimal IPv4 address", connectTo("0x7f.0.0.1:80"), 400, "", "bad-request", "", ""},
		{"an IPv4 address in one number", connectTo("2130706433:80"), 400, "", "bad-request", "", ""},
		{"a space in the target", "CONNECT svc.example.test :443 HTTP/1.1\r\nHost: a\r\n\r\n", 400, "", "bad-request", "", ""},
		{"an empty label", connectTo("svc..example.test:443"), 400, "", "bad-request", "", ""},
		{"an empty host", connectTo(":443"), 400, "", "bad-request", "", ""},

		// Heads.
		{"two Hosts", "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "", "bad-request", "", ""},
		{"no Host", "CONNECT " + svc + ":443 HTTP/1.1\r\n\r\n", 400, "", "bad-request", "", ""},
		{"a length", "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello", 400, "", "bad-request", "", ""},
		{"a length of 0", "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", 400, "", "bad-request", "", ""},
		{"chunks", "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "", "bad-request", "", ""},
		{"a bare line feed", "CONNECT " + svc + ":443 HTTP/1.1\nHost: a\n\n", 400, "", "bad-request", "", ""},
		{"a folded line", "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", 400, "", "bad-request", "", ""},
		{"a space before a colon", "CONNECT " + svc + ":443 HTTP/1.1\r\nHost : a\r\n\r\n", 400, "", "bad-request", "", ""},
		{"a NUL in a field", "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", 400, "", "bad-request", "", ""},
		{"HTTP/0.9", "GET /\r\n", 400, "", "bad-request", "", ""},
		{"HTTP/2 in HTTP/1", "CONNECT " + svc + ":443 HTTP/2.0\r\n\r\n", 505, "", "bad-request", "", ""},
		{"a long request line", "CONNECT " + strings.Repeat("a", 9<<10) + ":443 HTTP/1.1\r\nHost: a\r\n\r\n", 414, "", "too-large", "", ""},
		{"a long head", "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("X: "+strings.Repeat("y", 1000)+"\r\n", 20) + "\r\n", 431, "", "too-large", "", ""},
		{"a hundred fields too many", "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("X: y\r\n", 200) + "\r\n", 431, "", "too-large", "", ""},
		{"a loop", "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: a\r\n" + "Via: " + strings.TrimSuffix(strings.Repeat("1.1 other, ", 20), ", ") + "\r\n\r\n", 502, "proxy_loop_detected", "loop", "", ""},

		// Bytes behind a refused head are never read as a request.
		{"a request behind a refused one", connectTo("nobody.example.org:443") + connectTo(svc+":443"), 403, "http_request_denied", "no-route", "", ""},
		{"a request in the body of a bad one", "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n" + connectTo(svc+":443"), 400, "", "bad-request", "", ""},
	}
	for _, method := range []string{"GET", "POST", "HEAD", "OPTIONS", "PUT", "TRACE", "connect"} {
		for _, target := range []string{"/", "http://" + svc + "/", "*"} {
			raw := fmt.Sprintf("%s %s HTTP/1.1\r\nHost: %s\r\n\r\n", method, target, svc)
			rows = append(rows, badConnect{method + " " + target, raw, 405, "", "bad-method", "", "Allow: CONNECT"})
		}
	}
	return rows
}

// Each row gets its status line, Proxy-Status and one line of text, the
// connection ends, and nothing is dialed.
func TestBadConnectsAreAnsweredAndNothingIsDialed(t *testing.T) {
	t.Parallel()
	tap := testnet.NewTap(t)
	closed := "127.0.0.1:" + freePort(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(tap.Addr()), "--route", "pinned.example.test:443="+tap.Addr(),
		"--route", "down.example.test="+closed)
	_, tapPort, _ := net.SplitHostPort(tap.Addr())
	rows := append(badConnects(closed),
		badConnect{"a service's own endpoint on loopback", connectTo("127.0.0.1:" + tapPort), 403, "destination_ip_prohibited", "prohibited", "", ""},
		badConnect{"the gateway itself", connectTo(g.addr), 403, "destination_ip_prohibited", "prohibited", "", ""},
		badConnect{"the admin port", connectTo(g.admin), 403, "destination_ip_prohibited", "prohibited", "", ""},
	)
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			a := exchange(t, g.addr, []byte(row.raw))
			head, body, ok := strings.Cut(string(a.data), "\r\n\r\n")
			if !ok || a.ending != testnet.FIN {
				t.Fatalf("got %q and %s, want an answer and FIN", a.data, a.ending)
			}
			if !strings.HasPrefix(head, fmt.Sprintf("HTTP/1.1 %d ", row.status)) {
				t.Errorf("got %.60q, want status %d", head, row.status)
			}
			token := row.error
			if token == "" {
				token = "http_request_error"
			}
			if want := "\r\nProxy-Status: culvert; error=" + token + "; details=\"" + row.says + "\"\r\n"; !strings.Contains(head, want) {
				t.Errorf("got %q, want %q in it", head, want)
			}
			for _, want := range []string{row.extra, "Connection: close", fmt.Sprintf("Content-Length: %d", len(body))} {
				if want != "" && !strings.Contains(head+"\r\n", "\r\n"+want+"\r\n") {
					t.Errorf("got %q, want %q in it", head, want)
				}
			}
			if !strings.HasPrefix(body, "culvert: "+row.says+": ") || strings.Count(body, "\n") != 1 || !strings.HasSuffix(body, "\n") {
				t.Errorf("body: got %q, want one line that begins with %q", body, "culvert: "+row.says+": ")
			}
			for _, secret := range []string{"secret", closed, tap.Addr()} {
				if strings.Contains(string(a.data), secret) && !strings.Contains(row.raw, secret) {
					t.Errorf("the answer tells %q: %q", secret, a.data)
				}
			}
			reason := row.reason
			if reason == "" {
				reason = row.says
			}
			if l := g.outcome(t, a.source); l.Reason != reason || strings.Contains(l.Err, "secret") {
				t.Errorf("the log: got %+v, want reason %q", l, reason)
			}
		})
	}
	if n := tap.Accepted(); n != 0 {
		t.Errorf("%d connections reached a service, want 0", n)
	}
	if n := g.dials(t); n != 1 { // that of the service that is down
		t.Errorf("the gateway dialed %d times, want once", n)
	}
}

// What is legal is served: HTTP/1.0 without a Host, odd spellings of the name,
// and bytes that follow the head at once are the stream's first.
func TestGoodConnects(t *testing.T) {
	echo := testnet.Echo(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(echo.Addr()))
	for name, raw := range map[string]string{
		"HTTP/1.0 without a Host": "CONNECT " + svc + ":443 HTTP/1.0\r\n\r\n",
		"mixed case and a dot":    connectTo("Svc.eXample.TEST.:443"),
		"a Host of another":       "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: other\r\n\r\n",
		"fields nobody asked for": "CONNECT " + svc + ":443 HTTP/1.1\r\nHost: a\r\nUser-Agent: x\r\nProxy-Connection: keep-alive\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c := dial(t, g.addr)
			defer c.Close()
			must(t, c.SetDeadline(time.Now().Add(patience)))
			const early = "bytes that did not wait for the answer"
			_, err := io.WriteString(c, raw+early)
			must(t, err)
			must(t, c.CloseWrite())
			got, err := io.ReadAll(c)
			if want := "HTTP/1.1 200 Connection Established\r\n\r\n" + early; string(got) != want || err != nil {
				t.Errorf("got %q, %v, want %q", got, err, want)
			}
		})
	}
}

// A listener that wants credentials says so, and the same to everybody who
// has none that are right, whatever they ask for.
func TestCredentialsAreRequiredAndCompared(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	echo := testnet.Echo(t)
	hash, _, _ := runCmd(t, withInput(t, "wonderland\n", "config", "password", "alice"))
	port := freePort(t)
	w.write(t, "users.txt", hash)
	config := w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners:
  - address: 127.0.0.1:%s
    auth: {usersFile: users.txt}
admin: 127.0.0.1:%s
services:
  - {name: %s, endpoints: ["%s"]}
`, port, freePort(t), svc, echo.Addr()))
	g := startGateway(t, "--config", config, "--log-format", "json")

	ask := func(authority, fields string) answer {
		return exchange(t, g.addr, []byte("CONNECT "+authority+" HTTP/1.1\r\nHost: a\r\n"+fields+"\r\n"))
	}
	var first string
	for _, c := range []struct{ name, authority, fields string }{
		{"none", svc + ":443", ""},
		{"none, for nobody", "nobody.example.org:443", ""},
		{"none, for loopback", "127.0.0.1:80", ""},
		{"a wrong password", svc + ":443", "Proxy-Authorization: Basic YWxpY2U6d3Jvbmc=\r\n"},
		{"an unknown user", svc + ":443", "Proxy-Authorization: Basic Ym9iOndvbmRlcmxhbmQ=\r\n"},
		{"another scheme", svc + ":443", "Proxy-Authorization: Bearer wonderland\r\n"},
		{"no base64", svc + ":443", "Proxy-Authorization: Basic ===\r\n"},
	} {
		a := ask(c.authority, c.fields)
		if first == "" {
			first = string(a.data)
		}
		if !strings.HasPrefix(string(a.data), "HTTP/1.1 407 ") || !strings.Contains(string(a.data), "\r\nProxy-Authenticate: Basic ") || string(a.data) != first {
			t.Errorf("%s: got %q, want the same 407 with a challenge for all", c.name, a.data)
		}
		if l := g.outcome(t, a.source); l.Reason != "no-auth" {
			t.Errorf("%s: reason: got %q, want no-auth", c.name, l.Reason)
		}
	}
	if echo.Accepted() != 0 {
		t.Errorf("%d connections reached the service without credentials", echo.Accepted())
	}
	const alice = "Proxy-Authorization: Basic YWxpY2U6d29uZGVybGFuZA==\r\n"
	// Whom the gateway knows it tells more.
	if a := ask("nobody.example.org:443", alice); !strings.Contains(string(a.data), "error=destination_not_found") {
		t.Errorf("alice asks for nobody: got %q, want destination_not_found", a.data)
	}
	out, errs, code := command(t, "culvert", "probe", svc+":443", "--via", g.addr, "--mode", "connect", "--no-tls", "--user", "alice:wonderland")
	if code != 0 {
		t.Errorf("probe as alice: exit code %d\n%s%s", code, out, errs)
	}
	g.line(t, "logged alice's tunnel", func(l line) bool { return l.Peer == "alice" && l.Endpoint == echo.Addr() })
	for _, secret := range []string{"wonderland", "d29uZGVybGFuZA", "YWxpY2U6d3Jvbmc"} {
		if strings.Contains(g.output(), secret) {
			t.Errorf("the log has the secret %q", secret)
		}
	}
}
