package upstream

import (
	"bufio"
	"context"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A corporateProxy is an HTTP proxy that leads everywhere to one service.
type corporateProxy struct {
	mu       sync.Mutex
	password string
	asked    []string // destinations that it was asked for
	refused  int
	answer   string // in place of a 200
}

// seen returns what the proxy was asked for, and how many requests it has refused.
func (p *corporateProxy) seen() (asked []string, refused int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.asked), p.refused
}

// serve answers one connection.
func (p *corporateProxy) serve(service string) func(net.Conn) {
	return func(c net.Conn) {
		defer c.Close()
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		c2 := http.Request{Header: http.Header{"Authorization": r.Header["Proxy-Authorization"]}}
		user, password, _ := c2.BasicAuth()
		p.mu.Lock()
		p.asked = append(p.asked, r.Method+" "+r.Host+" "+r.Header.Get("Via"))
		wrong := p.password != "" && (user != "alice" || password != p.password)
		if wrong {
			p.refused++
		}
		answer := p.answer
		p.mu.Unlock()
		switch {
		case wrong:
			_, _ = io.WriteString(c, "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Negotiate\r\nProxy-Authenticate: NTLM, Basic realm=\"corp\"\r\nContent-Length: 0\r\n\r\n")
			return
		case answer != "":
			_, _ = io.WriteString(c, answer)
			return
		}
		to, err := net.Dial("tcp", service)
		if err != nil {
			return
		}
		defer to.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 200 Connection established\r\n\r\n")
		go func() { _, _ = io.Copy(to, c); _ = to.(*net.TCPConn).CloseWrite() }()
		_, _ = io.Copy(c, to)
	}
}

// dialEcho dials a gateway with a name by t and has it echo.
func dialEcho(ctx context.Context, t *testing.T, up *Transports) error {
	t.Helper()
	c, err := up.FirstHop().DialContext(ctx, "tcp", "gw.example.com:443")
	if err != nil {
		return err
	}
	defer c.Close()
	testnet.Ping(t, c, "through the proxy")
	return nil
}

// Gateways are dialed through the proxy by their names, and one on loopback is not.
func TestProxy(t *testing.T) {
	echo := testnet.Echo(t).Addr()
	proxy := &corporateProxy{password: "first"}
	at := testnet.Service(t, proxy.serve(echo))
	var password atomic.Pointer[string]
	runs := atomic.Int32{}
	set := func(s string) { password.Store(&s) }
	set("first\n")
	up := &Transports{Direct: &tunnel.NetDialer{}, RunCommand: func(_ context.Context, argv []string, limit int) ([]byte, error) {
		runs.Add(1)
		if strings.Join(argv, " ") != "secret-tool lookup proxy" || limit < maxPassword {
			t.Errorf("the command %q is run, with a limit of %d", argv, limit)
		}
		return []byte(*password.Load()), nil
	}}
	defer up.Close()
	settings := &Proxy{URL: "http://" + at, User: "alice", PasswordCommand: []string{"secret-tool", "lookup", "proxy"}}
	if err := up.UseProxy(settings); err != nil {
		t.Fatal(err)
	}
	handshakes := 0
	ctx := tunnel.WithHandshakeDone(t.Context(), func() error { handshakes++; return errors.New("not yet") })
	for range 3 {
		if err := dialEcho(ctx, t, up); err != nil {
			t.Fatal(err)
		}
	}
	asked, refused := proxy.seen()
	if runs.Load() != 1 || refused != 0 || len(asked) != 3 || asked[0] != "CONNECT gw.example.com:443 " {
		t.Errorf("the command ran %d times, %d requests were refused, the proxy was asked %q", runs.Load(), refused, asked)
	}
	if handshakes != 0 {
		t.Errorf("the proxy counts as the gateway, whose handshake is waited for")
	}
	copied := *settings
	if err := up.UseProxy(&copied); err != nil {
		t.Fatal(err)
	}

	// The password changes at the proxy: it is read again, and the request is sent again.
	proxy.mu.Lock()
	proxy.password = "second"
	proxy.mu.Unlock()
	set("second")
	err := dialEcho(t.Context(), t, up)
	if _, refused = proxy.seen(); err != nil || runs.Load() != 2 || refused != 1 {
		t.Errorf("after a new password: %v; the command ran %d times, %d requests were refused", err, runs.Load(), refused)
	}

	// A wrong one is sent once, and not with every dial: accounts are closed after a few.
	proxy.mu.Lock()
	proxy.password = "third"
	proxy.mu.Unlock()
	for range 5 {
		err := dialEcho(t.Context(), t, up)
		if tunnel.ReasonOf(err) != tunnel.DialFailed || !strings.Contains(err.Error(), "has refused the password") || strings.Contains(err.Error(), "second") {
			t.Errorf("a wrong password: got %v", err)
		}
	}
	if asked, refused = proxy.seen(); refused != 2 || runs.Load() != 3 {
		t.Errorf("a wrong password was sent %d times, and the command ran %d times", refused-1, runs.Load()-2)
	}

	// A gateway on loopback is none that a proxy leads to.
	n := len(asked)
	for _, to := range []string{echo, strings.Replace(echo, "127.0.0.1", "localhost", 1)} {
		c, err := up.FirstHop().DialContext(t.Context(), "tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		testnet.Ping(t, c, "directly")
		_ = c.Close()
	}
	if asked, _ = proxy.seen(); len(asked) != n {
		t.Errorf("a gateway on loopback was dialed through the proxy: %q", asked[n:])
	}

	// Carriers of UDP fail at once, so that a fallback dialer takes another one.
	if _, err := up.datagramAddresses(t.Context(), "gw.example.com"); !errors.Is(err, errNoDatagrams) {
		t.Errorf("the addresses of a gateway by connect-h3: %v", err)
	}
	if _, err := up.listenUDP(t.Context(), "192.0.2.1", netip.MustParseAddrPort("192.0.2.1:443")); !errors.Is(err, errNoDatagrams) {
		t.Errorf("a gateway by connect-h3 at an address: %v", err)
	}
	if err := up.UseProxy(nil); err != nil {
		t.Fatal(err)
	}
	if err := dialEcho(t.Context(), t, up); err == nil || tunnel.ReasonOf(err) != tunnel.LookupError {
		t.Errorf("without the proxy: %v, want the name to be looked up here", err)
	}
}

// What a proxy answers is told with what to do about it. None of it is a refusal of the
// gateway's.
func TestProxyRefuses(t *testing.T) {
	page := "Content-Type: text/html; charset=utf-8\r\nContent-Length: 12\r\n\r\n<html>hello\n"
	for name, row := range map[string]struct {
		answer string // "" for no proxy at all
		reason tunnel.Reason
		want   string
	}{
		"credentials":       {"HTTP/1.1 407 Auth\r\nProxy-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n", tunnel.DialFailed, "asks for credentials: set user"},
		"not allowed":       {"HTTP/1.1 403 Forbidden\r\nProxy-Status: culvert; error=http_request_denied; details=\"denied\"\r\nContent-Length: 0\r\n\r\n", tunnel.DialFailed, "does not allow CONNECT"},
		"a login page":      {"HTTP/1.1 302 Found\r\nLocation: http://login.corp/\r\nContent-Length: 0\r\n\r\n", tunnel.DialFailed, "captive portal"},
		"network login":     {"HTTP/1.1 511 Network Authentication Required\r\n" + page, tunnel.DialFailed, "captive portal"},
		"a page as a yes":   {"HTTP/1.1 200 OK\r\n" + page, tunnel.DialFailed, "captive portal"},
		"no HTTP":           {"SSH-2.0-OpenSSH\r\n\r\n", tunnel.DialFailed, "check that url of upstreamProxy is an HTTP proxy"},
		"cannot reach":      {"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", tunnel.DialFailed, "cannot reach the gateway"},
		"the proxy is away": {"", tunnel.DialFailed, "that it runs"},
	} {
		t.Run(name, func(t *testing.T) {
			at := testnet.ClosedPort(t)
			if row.answer != "" {
				at = testnet.Service(t, (&corporateProxy{answer: row.answer}).serve(""))
			}
			up := &Transports{Direct: &tunnel.NetDialer{}}
			defer up.Close()
			if err := up.UseProxy(&Proxy{URL: "http://" + at}); err != nil {
				t.Fatal(err)
			}
			err := dialEcho(t.Context(), t, up)
			if tunnel.ReasonOf(err) != row.reason || !strings.Contains(err.Error(), row.want) {
				t.Fatalf("got %v: %s, want %s: ...%s", err, tunnel.ReasonOf(err), row.reason, row.want)
			}
			if isFinal(err) {
				t.Error("the refusal of a proxy ends the request: another gateway may be let through")
			}
		})
	}
	for _, bad := range []string{"proxy.corp:3128", "ftp://proxy.corp:21", "http://proxy.corp", "http://a:b@proxy.corp:3128"} {
		if err := new(Transports).UseProxy(&Proxy{URL: bad}); err == nil {
			t.Errorf("the URL %q is accepted", bad)
		}
	}
}

// A proxy may be behind TLS.
func TestProxyTLS(t *testing.T) {
	echo := testnet.Echo(t).Addr()
	proxy := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		to, err := net.Dial("tcp", echo)
		if err != nil {
			return
		}
		defer to.Close()
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 200 Connection established\r\n\r\n")
		go func() { _, _ = io.Copy(to, rw); _ = to.(*net.TCPConn).CloseWrite() }()
		_, _ = io.Copy(c, to)
	}))
	proxy.StartTLS()
	defer proxy.Close()
	roots := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: proxy.Certificate().Raw})
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	for roots, ok := range map[string]bool{string(roots): true, "": false} {
		if err := up.UseProxy(&Proxy{URL: proxy.URL, Roots: roots}); err != nil {
			t.Fatal(err)
		}
		if err := dialEcho(t.Context(), t, up); (err == nil) != ok {
			t.Errorf("with %d bytes of roots: %v, want a connection: %v", len(roots), err, ok)
		}
	}
	if err := up.UseProxy(&Proxy{URL: proxy.URL, Roots: "no certificate"}); err == nil {
		t.Error("roots without a certificate are accepted")
	}
}

// A password that cannot be read, or was refused, is tried again less and less often, and
// one dial that gives up does not end the reading for others.
func TestPasswords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next, failure, runs := "one", error(nil), 0
		p := newPasswords(func(ctx context.Context) (string, error) {
			runs++
			select {
			case <-time.After(time.Second):
				return next, failure
			case <-ctx.Done():
				return "", ctx.Err()
			}
		})
		defer p.runs.Close()
		want := func(what, password string, n int) {
			t.Helper()
			got, err := p.get(t.Context())
			if got != password || (err == nil) != (password != "") || runs != n {
				t.Errorf("%s: got %q and %v after %d runs, want %q after %d", what, got, err, runs, password, n)
			}
		}
		short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := p.get(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a dial without time: %v", err)
		}
		want("the first", "one", 1)
		want("kept", "one", 1)
		p.refuse("another")
		want("another was refused", "one", 1)
		p.refuse("one")
		want("refused and the same", "", 2)
		want("at once", "", 2)
		time.Sleep(minPasswordRetry)
		want("tried again", "one", 3)
		p.refuse("one")
		want("refused again", "", 4)
		time.Sleep(minPasswordRetry)
		want("not yet", "", 4)
		time.Sleep(minPasswordRetry)
		next = "two"
		want("changed", "two", 5)
		p.accept("two")
		p.refuse("two")
		failure = errors.New("locked")
		want("cannot be read", "", 6)
		failure = nil
		time.Sleep(minPasswordRetry)
		want("can be read", "two", 7)
	})
	for content, want := range map[string]string{
		"secret": "secret", "secret\n": "secret", "secret\r\n": "secret", " s p ": " s p ", "": "", "\n": "", "two\nlines\n": "", "nul\x00": "", strings.Repeat("x", maxPassword+1): "",
	} {
		got, err := parsePassword([]byte(content))
		if got != want || (err == nil) != (want != "") || err != nil && strings.Contains(err.Error(), "two") {
			t.Errorf("%q: got %q and %v, want %q", content, got, err, want)
		}
	}
}
