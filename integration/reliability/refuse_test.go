//go:build linux

package reliability

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// A bad input, and all that is said of it.
type refusalCase struct {
	name   string
	raw    []byte
	code   int    // what the client hears: TLS alert or HTTP status; 0 for nothing
	reason string // what log and metrics say
	target string // what the log says was asked for; "" where nothing was
	level  string // of the line; "" for none at the default level
}

func refusalCases() []refusalCase {
	sni := func(name string) []byte { return hello(name) }
	connect := func(authority string) []byte {
		return fmt.Appendf(nil, "CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\n", authority)
	}
	const quiet, warn = "INFO", "WARN"
	return []refusalCase{
		{"unknown name by SNI", sni("nobody.test"), 112, "no-route", "nobody.test", quiet},
		{"unknown name by CONNECT", connect("nobody.test:443"), 403, "no-route", "nobody.test:443", quiet},
		{"private name by SNI", sni("private.test"), 112, "not-exposed", "private.test", quiet},
		{"private name by CONNECT", connect("private.test:443"), 403, "not-exposed", "private.test:443", quiet},
		{"port nobody has", connect("ports.test:444"), 403, "no-route", "ports.test:444", quiet},
		{"service is down, by SNI", sni("closed.test"), 80, "dial-failed", "closed.test", warn},
		{"service is down, by CONNECT", connect("closed.test:443"), 502, "dial-failed", "closed.test:443", warn},
		{"loopback", connect("127.0.0.1:22"), 403, "prohibited", "127.0.0.1:22", quiet},
		{"metadata", connect("169.254.169.254:80"), 403, "prohibited", "169.254.169.254:80", quiet},
		{"mapped loopback", connect("[::ffff:127.0.0.1]:22"), 403, "prohibited", "", quiet},
		{"no SNI", records(helloWith(), 16<<10), 112, "no-sni", "", quiet},
		{"address as SNI", sni("192.0.2.1"), 112, "no-sni", "", quiet},
		{"bad byte in SNI", sni("a b.test"), 47, "bad-hello", "", quiet},
		{"two names in SNI", records(helloWith(serverName("echo.test", "echo.test")), 16<<10), 47, "bad-hello", "", quiet},
		{"over-long record", []byte{22, 3, 1, 0x48, 1, 1}, 22, "bad-hello", "", quiet},
		{"zero-length record", []byte{22, 3, 1, 0, 0}, 10, "bad-hello", "", quiet},
		{"alert before the hello", []byte{21, 3, 1, 0, 2, 2, 80}, 10, "bad-hello", "", quiet},
		{"GET", []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), 405, "bad-method", "", quiet},
		{"no port", connect("echo.test"), 400, "bad-request", "", quiet},
		{"userinfo", connect("u@echo.test:443"), 400, "bad-request", "", quiet},
		{"HTTP/1.1 without Host", []byte("CONNECT echo.test:443 HTTP/1.1\r\n\r\n"), 400, "bad-request", "", quiet},
		{"body", []byte("CONNECT echo.test:443 HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"), 400, "bad-request", "", quiet},
		{"head of 17 KiB", []byte("CONNECT echo.test:443 HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 17<<10) + "\r\n\r\n"), 431, "too-large", "", quiet},
		{"neither TLS nor HTTP", []byte("\x00\x01\x02\x03"), 0, "bad-preamble", "", quiet},
		{"SSH", []byte("SSH-2.0-x\r\n"), 0, "bad-preamble", "", quiet},
		{"PROXY protocol", []byte("PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n"), 0, "bad-preamble", "", quiet},
		{"HTTP/2 without SETTINGS", []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678"), 0, "bad-request", "", quiet},
	}
}

// Every refusal is one line of the log with its reason, its source and what
// was asked for, and one more in the metric with the same reason.
func TestEveryRefusalSaysWhy(t *testing.T) {
	b := testnet.NewTap(t)
	g := start(t, options{Services: service("echo.test", b.Addr()) + service("closed.test", closedPort(t, 1)) +
		fmt.Sprintf("  - {name: private.test, exposed: false, endpoints: [\"%s\"]}\n", b.Addr()) +
		fmt.Sprintf("  - {name: ports.test, ports: [443], endpoints: [\"%s\"]}\n", b.Addr())})
	reasons := func() map[string]float64 {
		by := map[string]float64{}
		for series, v := range g.metrics() {
			name, labels, _ := strings.Cut(series, "{")
			if name != "culvert_requests_total" && name != "culvert_connections_refused_total" {
				continue
			}
			_, rest, _ := strings.Cut(labels, `reason="`)
			reason, _, _ := strings.Cut(rest, `"`)
			if v > 0 {
				by[reason] += v
			}
		}
		return by
	}
	want := reasons()
	for i, tt := range refusalCases() {
		c, err := g.dial(i)
		if err != nil {
			t.Fatal(err)
		}
		source := c.LocalAddr().String()
		r := request(c, tt.raw)
		if r.code != tt.code {
			t.Errorf("%s: the client got %v, want %d", tt.name, r, tt.code)
		}
		if r.code != 0 && r.end != testnet.FIN {
			t.Errorf("%s: the answer ended with %s, want FIN: a reset may eat it", tt.name, r.end)
		}
		want[tt.reason]++
		var lines []entry
		testnet.Eventually(t, patience, func() bool {
			lines = g.entries(func(e entry) bool { return e.str("source") == source })
			return len(lines) > 0
		}, "%s: a line in the log", tt.name)
		if len(lines) != 1 {
			t.Fatalf("%s: %d lines in the log, want 1: %v", tt.name, len(lines), lines)
		}
		e := lines[0]
		if e.str("reason") != tt.reason || e.str("level") != tt.level || e.str("msg") != "refused" || e.str("err") == "" || e.str("listener") != g.addr {
			t.Errorf("%s: the log says %v, want refused, %s, %s, the listener and an error", tt.name, e, tt.level, tt.reason)
		}
		if tt.target != "" && e.str("target") != tt.target {
			t.Errorf("%s: the log says target %q, want %q", tt.name, e.str("target"), tt.target)
		}
	}
	var got map[string]float64
	testnet.Eventually(t, patience, func() bool { got = reasons(); return maps.Equal(got, want) },
		"reasons counted %v, want %v", &got, want)
	if n := b.Accepted(); n != 0 {
		t.Errorf("the service was dialed %d times, want never", n)
	}
}

// What clients send is never in the log as it came: one event is one line, and
// the line is plain text, in both formats.
func TestLogIsEscaped(t *testing.T) {
	hostile := []string{
		"a\nlevel=INFO msg=forged", "a\r\n{\"msg\":\"forged\"}", "a\x1b[2J\x1b]0;title\x07", "a\x00b", "caf\xc3\xa9", "a\xff\xfe",
		"a\u202eb", "a\u2028b", "a\u009bb", "a\"b\\c", "a b", strings.Repeat("long.", 1000), "a\tb", "a\x7fb",
	}
	for _, text := range []bool{false, true} {
		t.Run(fmt.Sprintf("text=%v", text), func(t *testing.T) {
			b := testnet.NewTap(t)
			g := start(t, options{Services: service("echo.test", b.Addr()), Text: text})
			sent := 0
			send := func(raw []byte) {
				g.refusedRaw(sent%50, raw)
				sent++
			}
			for _, s := range hostile {
				send(hello(s[:min(len(s), 300)]))
				send(fmt.Appendf(nil, "CONNECT %s:443 HTTP/1.1\r\nHost: x\r\n\r\n", s))
				send(fmt.Appendf(nil, "%s nobody.test:443 HTTP/1.1\r\nHost: x\r\n\r\n", s))
				send(fmt.Appendf(nil, "CONNECT nobody.test:443 HTTP/1.1\r\nHost: x\r\nUser-Agent: %s\r\n\r\n", s))
				send(fmt.Appendf(nil, "CONNECT nobody.test:443 HTTP/1.1\r\nHost: %s\r\n\r\n", s))
				send(fmt.Appendf(nil, "CONNECT nobody.test:443 HTTP/1.1\r\nHost: x\r\nVia: 1.1 %s\r\n\r\n", s))
				send([]byte(s + s + s + "\r\n\r\n"))
				alpn := s[:min(len(s), 200)]
				send(records(helloWith(serverName("nobody.test"), extension(16, vec16(append([]byte{byte(len(alpn))}, alpn...)))), 16<<10))
			}
			var lines []string
			testnet.Eventually(t, patience, func() bool {
				lines = slices.DeleteFunc(slices.Clone(g.logged()), func(l string) bool {
					return strings.Contains(l, "configuration read") || strings.Contains(l, "table changed") || strings.Contains(l, "serving")
				})
				return len(lines) >= sent
			}, "%d lines in the log", sent)
			if len(lines) != sent {
				t.Errorf("%d clients made %d lines:\n%s", sent, len(lines), strings.Join(lines, "\n"))
			}
			for _, l := range lines {
				if r, bad := unprintable(l); bad {
					t.Errorf("%q in a line of the log: %q", r, l)
				}
				if strings.HasPrefix(l, "level=") || strings.Contains(l, `msg=forged `) || len(l) > 4<<10 {
					t.Errorf("a client wrote a line, or a long one: %.300q", l)
				}
			}
			if n := b.Accepted(); n != 0 {
				t.Errorf("the service was dialed %d times, want never", n)
			}
		})
	}
}

// Credentials, right or wrong, are never seen again.
func TestSecretsAreNotRepeated(t *testing.T) {
	const secret = "planted-5ecret"
	tokens := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, fmt.Appendf(nil, "ci:%x\n", sha256.Sum256([]byte(secret))), 0o600); err != nil {
		t.Fatal(err)
	}
	b := testnet.Echo(t)
	g := start(t, options{
		Services: service("echo.test", b.Addr()),
		Listener: fmt.Sprintf(", protocols: [sni, connect, connect-h2], auth: {tokensFile: %s, users: {alice: \"$2a$04$EI5jXTvnLf0z8JQnHUY4EuRtWKUVsuDUF6Gtch6jPVoTrfLKqsvAK\"}}", tokens),
	})
	basic := func(user, password string) string {
		return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
	}
	planted := []string{secret, "wrong-" + secret}
	for _, authorization := range []string{
		"Bearer " + secret, "Bearer wrong-" + secret, basic("alice", secret), basic("mallory\n\x1b", "wrong-"+secret),
		basic(secret, ""), "Digest " + secret, secret, "Basic " + secret, "Basic !!" + secret,
	} {
		planted = append(planted, strings.TrimPrefix(authorization, "Basic "))
		c := g.mustDial(1)
		fmt.Fprintf(c, "CONNECT echo.test:443 HTTP/1.1\r\nHost: x\r\nProxy-Authorization: %s\r\n\r\n", authorization)
		_ = c.CloseWrite()
		r := readRefusal(c)
		if want := map[bool]int{true: 200, false: 407}[authorization == "Bearer "+secret]; r.code != want {
			t.Errorf("%q got %v, want %d", authorization, r, want)
		}
	}
	// And where the head itself is wrong.
	for _, head := range []string{
		"CONNECT echo.test:443 HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Bearer " + secret + "\r\nProxy-Authorization: Bearer " + secret + "\r\n\r\n",
		"CONNECT echo.test:443 HTTP/1.1\r\nHost: x\r\nProxy-Authorization : Bearer " + secret + "\r\n\r\n",
		"CONNECT echo.test:443 HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Bearer " + secret + "\x01\r\n\r\n",
		"CONNECT echo.test:443 HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Bearer " + secret + strings.Repeat("x", 20<<10) + "\r\n\r\n",
	} {
		if r := g.refusedRaw(1, []byte(head)); strings.Contains(r.text, secret) {
			t.Errorf("the answer has the secret: %q", r.text)
		}
	}
	testnet.Eventually(t, patience, func() bool {
		return len(g.entries(func(e entry) bool { return e.str("reason") == "no-auth" })) == 8 &&
			len(g.entries(func(e entry) bool { return e.str("peer") == "ci" })) == 1
	}, "8 lines without credentials and 1 with")
	places := map[string]string{"the log": strings.Join(g.logged(), "\n")}
	for _, path := range []string{"/metrics", "/status", "/explain?name=echo.test&port=443", "/debug/pprof/goroutine?debug=2", "/debug/pprof/cmdline"} {
		_, body, err := g.get(path)
		if err != nil {
			t.Fatal(err)
		}
		places[path] = body
	}
	for _, place := range slices.Sorted(maps.Keys(places)) {
		for _, s := range planted {
			if strings.Contains(places[place], s) {
				t.Errorf("%s has %q in it", place, s)
			}
		}
	}
}

// A private name and an absent one get the same answer, and, where tests
// measure, in the same time.
func TestPrivateNamesAreNotTold(t *testing.T) {
	b := testnet.NewTap(t)
	g := start(t, options{Services: fmt.Sprintf("  - {name: private.test, exposed: false, endpoints: [\"%s\"]}\n", b.Addr())})
	eachWay(t, func(t *testing.T, w way) {
		times := map[string][]time.Duration{}
		texts := map[string]string{}
		for i := range 100 {
			for _, name := range []string{"private.test", "absence.test"} {
				r := g.refused(w, i, name)
				times[name] = append(times[name], r.after)
				texts[name] = r.text
			}
		}
		if texts["private.test"] != texts["absence.test"] {
			t.Errorf("the answers differ: %q and %q", texts["private.test"], texts["absence.test"])
		}
		private, absent := percentile(times["private.test"], 50), percentile(times["absence.test"], 50)
		t.Logf("private after %v, absent after %v", private, absent)
		if testnet.Measuring && (private > 2*absent+time.Millisecond || absent > 2*private+time.Millisecond) {
			t.Errorf("a private name is refused after %v and an absent one after %v", private, absent)
		}
	})
	if n := b.Accepted(); n != 0 {
		t.Errorf("the private service was dialed %d times", n)
	}
}
