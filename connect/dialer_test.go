package connect

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// canned is a proxy that reads a head and says reply, whatever was asked. It
// returns the heads it has read.
func canned(t *testing.T, reply string) (addr string, heads chan string) {
	t.Helper()
	heads = make(chan string, 10)
	return testnet.Service(t, func(c net.Conn) {
		br, head := bufio.NewReader(c), ""
		for !strings.HasSuffix(head, hdrEnd) {
			line, err := br.ReadString('\n')
			if err != nil {
				return
			}
			head += line
		}
		heads <- head
		_, _ = io.WriteString(c, reply)
		_, _ = io.Copy(io.Discard, c)
	}), heads
}

func TestDialerThroughProtocol(t *testing.T) {
	r := &router{table: map[string]string{"svc.test:443": testnet.Echo(t).Addr()}}
	g := serve(t, &Protocol{Auth: &BasicAuth{Verify: Passwords(map[string]string{"alice": "secret"})}}, r)
	d := &Dialer{Proxy: g.addr, Authorization: BasicCredentials("alice", "secret")}
	c, err := d.DialContext(t.Context(), "tcp", "SVC.test:443")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "there and back"); err != nil {
		t.Fatal(err)
	}
	if err := c.(tunnel.Stream).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); string(got) != "there and back" || err != nil {
		t.Errorf("got %q, %v, want what was sent", got, err)
	}
	if asked, _ := r.asked(); len(asked) != 1 || asked[0].Peer.ID != "alice" {
		t.Errorf("got requests %+v, want one by alice", asked)
	}
}

func TestDialerSends(t *testing.T) {
	proxy, heads := canned(t, established)
	d := &Dialer{
		Proxy: proxy, Via: "gw-2", Authorization: BearerCredentials("t0ken"),
		Header: func(_ context.Context, addr string) (Fields, error) { return Fields{{"X-For", addr}}, nil },
	}
	rows := []struct{ addr, want string }{
		{"Svc.Test.:443", "svc.test:443"},
		{"[2001:DB8::0:1]:8443", "[2001:db8::1]:8443"},
		{"[::ffff:192.0.2.1]:1", "192.0.2.1:1"},
	}
	for _, row := range rows {
		ctx := WithVia(t.Context(), []string{"gw-0", "gw-1"})
		c, err := d.DialContext(ctx, "tcp", row.addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		want := "CONNECT " + row.want + " HTTP/1.1\r\nHost: " + row.want + "\r\nVia: 1.1 gw-0, 1.1 gw-1, 1.1 gw-2\r\n" +
			"Proxy-Authorization: Bearer t0ken\r\nX-For: " + row.addr + hdrEnd
		if got := <-heads; got != want {
			t.Errorf("%q: got head\n%s\nwant\n%s", row.addr, got, want)
		}
	}
}

// Nothing of this is sent: the proxy does not exist.
func TestDialerRefusesToSend(t *testing.T) {
	header := func(f Field) *Dialer {
		return &Dialer{Header: func(context.Context, string) (Fields, error) { return Fields{f}, nil }}
	}
	rows := []struct {
		d             *Dialer
		network, addr string
		want          string
	}{
		{&Dialer{}, "udp", "svc.test:443", "unknown network udp"},
		{&Dialer{}, "tcp", "svc.test", `connect: authority "svc.test" has no port`},
		{&Dialer{}, "tcp", "svc.test:https", `connect: authority "svc.test:https": port "https" is not a number from 1 to 65535`},
		{&Dialer{}, "tcp", "a HTTP/1.1\r\nX: y:443", `connect: authority "a HTTP/1.1\r\nX: y:443": name has a byte that is not a letter, digit, hyphen, underscore or dot: "a HTTP/1.1\r\nX: y" at offset 1`},
		{&Dialer{Authorization: "Basic s3cret\r\nX: y"}, "tcp", "svc.test:443", "connect: field Proxy-Authorization has byte 0x0d at offset 12"},
		{&Dialer{Via: "gw\n"}, "tcp", "svc.test:443", "connect: field Via has byte 0x0a at offset 6"},
		{header(Field{"", "x"}), "tcp", "svc.test:443", `connect: "" is not a field name`},
		{header(Field{"X: y\r\nZ", "x"}), "tcp", "svc.test:443", `connect: "X: y\r\nZ" is not a field name`},
		{header(Field{"host", "x"}), "tcp", "svc.test:443", "connect: field host cannot be set"},
		{header(Field{"Content-Length", "5"}), "tcp", "svc.test:443", "connect: field Content-Length cannot be set"},
		{&Dialer{Header: func(context.Context, string) (Fields, error) { return nil, errors.New("no token") }}, "tcp", "svc.test:443", `connect: fields for "svc.test:443": no token`},
	}
	for _, row := range rows {
		row.d.Dialer = dialerFunc(func(context.Context, string, string) (net.Conn, error) {
			t.Errorf("%s %q: dialed", row.network, row.addr)
			return nil, errors.New("x")
		})
		if _, err := row.d.DialContext(t.Context(), row.network, row.addr); err == nil || err.Error() != row.want {
			t.Errorf("%s %q: got error %v, want %s", row.network, row.addr, err, row.want)
		}
	}
}

type dialerFunc func(ctx context.Context, network, addr string) (net.Conn, error)

func (f dialerFunc) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return f(ctx, network, addr)
}

// Answers that are a yes, and what stands behind their heads.
func TestDialerAnswers(t *testing.T) {
	for reply, want := range map[string]string{
		established + "early": "early",
		"HTTP/1.0 200\r\nContent-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\nSSH-2.0":                  "SSH-2.0",
		"HTTP/1.1 299 \xc3\xa9t\xc3\xa9\r\n\r\n\x00":                                                      "\x00",
		"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 102 \r\n\r\n" + established + "x":            "x",
		strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", maxInterim) + established + "HTTP/1.1 403 No\r\n": "HTTP/1.1 403 No\r\n",
	} {
		proxy, _ := canned(t, reply)
		c, err := (&Dialer{Proxy: proxy}).DialContext(t.Context(), "tcp", "svc.test:443")
		if err != nil {
			t.Errorf("%q: %v", reply, err)
			continue
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		if err := c.(tunnel.Stream).CloseWrite(); err != nil {
			t.Error(err)
		}
		if got, err := io.ReadAll(c); string(got) != want || err != nil {
			t.Errorf("%q: got %q, %v, want %q", reply, got, err, want)
		}
		_ = c.Close()
	}
}

func TestDialerRefusals(t *testing.T) {
	status := func(s string) string { return "HTTP/1.1 403 Forbidden\r\nProxy-Status: " + s + "\r\n\r\n" }
	big := strings.Repeat("X: "+strings.Repeat("y", 997)+"\r\n", 20)
	rows := []struct {
		reply string
		want  tunnel.Reason
		text  string // part of the error
	}{
		{refusal("403 Forbidden", "http_request_denied", tunnel.NotExposed, "x"), tunnel.NotExposed, `status 403, not-exposed: "culvert: not-exposed: x"`},
		{status(`gw; error=dns_timeout`), tunnel.LookupTime, "status 403, dns-timeout"},
		{status(`gw; error=destination_not_found; details="a, b; error=dns_timeout"`), tunnel.NoRoute, ""},
		{status(`inner; details="\"; error=x", "a, b";error=connection_refused, gw; error=http_request_denied`), tunnel.DialFailed, ""},
		{status(`gw; received-status=200`), tunnel.Denied, ""},
		{status(`gw; error=moon_phase`), tunnel.Denied, ""},
		{status(`gw; error=x; details="done"`), tunnel.Denied, ""},
		{status(`gw; error=x; details="drain"`), tunnel.Drain, ""},
		{status(`;,;;="`), tunnel.Denied, ""},
		{"HTTP/1.1 407 Auth\r\nContent-Length: 0\r\n\r\n", tunnel.NoAuth, "status 407, no-auth"},
		{"HTTP/1.0 503 \r\nContent-Length: 9\r\n\r\nno\x1b[31m\r\n!", tunnel.DialFailed, `503, dial-failed: "no\x1b[31m"`},
		{"HTTP/1.1 504 \r\n\r\n", tunnel.DialTimeout, ""},
		{"HTTP/1.1 405 \r\n\r\n", tunnel.Unsupported, ""},
		{"HTTP/1.1 302 Found\r\nLocation: http://login/\r\n\r\n", tunnel.Unsupported, ""},
		{"HTTP/1.1 101 Switching Protocols\r\n\r\n", tunnel.Unsupported, ""},
		{"HTTP/1.1 502 \r\nContent-Length: 99999\r\n\r\n" + strings.Repeat("a", 99999), tunnel.DialFailed, `: "` + strings.Repeat("a", maxQuote) + `"`},
		{"SSH-2.0-OpenSSH\r\n", tunnel.DialFailed, "gave no answer that can be read: connect: no HTTP version"},
		{"HTTP/2.0 200 \r\n\r\n", tunnel.DialFailed, `version "HTTP/2.0" is not HTTP/1.x`},
		{"HTTP/1.1 2000 OK\r\n\r\n", tunnel.DialFailed, "no three-digit status"},
		{"HTTP/1.1 200 OK\n\n", tunnel.DialFailed, "line feed without carriage return"},
		{"HTTP/1.1 200 OK\r\n folded\r\n\r\n", tunnel.DialFailed, "folded"},
		{"HTTP/1.1 200 OK\r\n" + big + "\r\n", tunnel.DialFailed, "limit 16384"},
		{"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20), tunnel.DialFailed, "limit 16384"},
		{"HTTP/1.1 100 \r\n" + big[:9*1002] + "\r\nHTTP/1.1 100 \r\n" + big[:9*1002] + "\r\n" + established, tunnel.DialFailed, "heads of more than 16384 bytes"},
		{strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", maxInterim+1) + established, tunnel.DialFailed, "more than 8 interim ones"},
	}
	for _, row := range rows {
		proxy, _ := canned(t, row.reply)
		c, err := (&Dialer{Proxy: proxy}).DialContext(t.Context(), "tcp", "svc.test:443")
		if err == nil {
			_ = c.Close()
		}
		name := tunnel.Clip(row.reply)
		var te *tunnel.Error
		if !errors.As(err, &te) || te.Reason != row.want || !strings.Contains(err.Error(), row.text) {
			t.Errorf("%q: got error %v (%s), want %s with %q", name, err, tunnel.ReasonOf(err), row.want, row.text)
		} else if len(err.Error()) > 500 || strings.ContainsAny(err.Error(), "\r\n\x1b") {
			t.Errorf("%q: got error %q, want a short line without controls", name, err)
		}
	}
}

// Every refusal of a Protocol comes out of a Dialer as the Reason it was.
func TestReasonsSurviveTheWay(t *testing.T) {
	for _, reason := range tunnel.Reasons() {
		if !refuses(reason) {
			continue
		}
		r := Answer(&tunnel.Request{Peer: tunnel.Peer{Method: "mtls"}}, tunnel.Refusef(reason, "x"))
		head, err := parseReply(r.append1(nil, r.Fields("a gateway")))
		if err != nil {
			t.Fatal(err)
		}
		if got := head.reason(); got != reason {
			t.Errorf("got reason %q, want %q", got, reason)
		}
	}
}

func TestDialerTimeouts(t *testing.T) {
	silent := func(net.Conn) {}
	endless := func(c net.Conn) { // a byte does not buy time
		time.Sleep(14 * time.Second)
		for _, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nX: "); err == nil; _, err = io.WriteString(c, "x") {
			time.Sleep(time.Second)
		}
	}
	late := func(c net.Conn) {
		time.Sleep(14 * time.Second)
		_, _ = io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n")
	}
	rows := []struct {
		name  string
		d     Dialer
		proxy func(net.Conn)
		took  time.Duration
	}{
		{"no answer", Dialer{}, silent, defaultWait},
		{"no answer for long", Dialer{Wait: time.Minute}, silent, time.Minute},
		{"no TLS handshake", Dialer{TLS: &tls.Config{ServerName: "gw.test"}}, silent, defaultWait},
		{"an endless answer", Dialer{}, endless, 14*time.Second + defaultTimeout},
		{"an endless answer cut early", Dialer{Timeout: time.Second}, endless, 15 * time.Second},
		{"nothing after an interim answer", Dialer{}, late, defaultWait},
	}
	for _, row := range rows {
		synctest.Test(t, func(t *testing.T) {
			var wg sync.WaitGroup
			defer wg.Wait()
			d := &row.d
			d.Dialer = dialerFunc(func(context.Context, string, string) (net.Conn, error) {
				client, server := net.Pipe()
				wg.Go(func() { _, _ = io.Copy(io.Discard, server) })
				wg.Go(func() { row.proxy(server) })
				return client, nil
			})
			start := time.Now()
			_, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
			tunneltest.WantReason(t, err, tunnel.DialTimeout)
			if took := time.Since(start); took != row.took {
				t.Errorf("%s: took %v, want %v", row.name, took, row.took)
			}
		})
	}
}

func TestDialerContext(t *testing.T) {
	arrived := make(chan struct{}, 10)
	silent := testnet.Service(t, func(c net.Conn) {
		arrived <- struct{}{}
		_, _ = io.Copy(io.Discard, c)
	})
	for _, cfg := range []*tls.Config{nil, {}} {
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-arrived
			cancel()
		}()
		_, err := (&Dialer{Proxy: silent, TLS: cfg}).DialContext(ctx, "tcp", "svc.test:443")
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got error %v, want context.Canceled", err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := (&Dialer{Proxy: silent}).DialContext(ctx, "tcp", "svc.test:443")
	if got := tunnel.ReasonOf(err); got != tunnel.DialTimeout || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got error %v (%s), want the context's deadline", err, got)
	}

	// Once the stream stands, the context has no say.
	r := &router{table: map[string]string{"svc.test:443": testnet.Echo(t).Addr()}}
	ctx, cancel = context.WithCancel(t.Context())
	c, err := (&Dialer{Proxy: serve(t, &Protocol{}, r).addr}).DialContext(ctx, "tcp", "svc.test:443")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	cancel()
	p := make([]byte, 5)
	if _, err := io.WriteString(c, "still"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, p); err != nil || string(p) != "still" {
		t.Errorf("after cancel: got %q, %v, want the echo", p, err)
	}
}

// A stopConn cancels once it has read something.
type stopConn struct {
	net.Conn
	cancel func()
}

func (c stopConn) Read(p []byte) (int, error) {
	defer c.cancel()
	return c.Conn.Read(p)
}

// A context that ends together with the answer leaves no connection behind.
func TestDialerContextEndsWithTheAnswer(t *testing.T) {
	proxy, _ := canned(t, established)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var raw net.Conn
	d := &Dialer{Proxy: proxy, Dialer: dialerFunc(func(ctx context.Context, network, addr string) (net.Conn, error) {
		var err error
		raw, err = new(net.Dialer).DialContext(ctx, network, addr)
		return stopConn{raw, cancel}, err
	})}
	if c, err := d.DialContext(ctx, "tcp", "svc.test:443"); c != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, %v, want context.Canceled", c, err)
	}
	if err := raw.SetDeadline(time.Now()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v, want a closed connection", err)
	}
}

// The limits of the answer are not those of the stream.
func TestDialerLiftsItsDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := net.Pipe()
		defer server.Close()
		go func() {
			_, _ = http.ReadRequest(bufio.NewReader(server))
			_, _ = io.WriteString(server, established)
			time.Sleep(time.Hour)
			_, _ = io.WriteString(server, "late")
		}()
		d := &Dialer{Dialer: dialerFunc(func(context.Context, string, string) (net.Conn, error) { return client, nil })}
		c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		p := make([]byte, 4)
		if _, err := io.ReadFull(c, p); err != nil || string(p) != "late" {
			t.Errorf("got %q, %v, want %q", p, err, "late")
		}
	})
}

func TestDialerWithoutProxy(t *testing.T) {
	_, err := (&Dialer{Proxy: testnet.ClosedPort(t)}).DialContext(t.Context(), "tcp", "svc.test:443")
	tunneltest.WantReason(t, err, tunnel.DialFailed)
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("got error %v, want ECONNREFUSED in it", err)
	}
	hangup := testnet.Service(t, func(net.Conn) {})
	_, err = (&Dialer{Proxy: hangup}).DialContext(t.Context(), "tcp", "svc.test:443")
	tunneltest.WantReason(t, err, tunnel.DialFailed)
}

// A chain of two gateways that lead to each other ends at the first that
// sees itself, and the client hears of it.
func TestLoopOverTwoGateways(t *testing.T) {
	chain := func(via string, next *string) tunnel.Handler {
		return tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
			c, err := (&Dialer{Proxy: *next, Via: via}).DialContext(ctx, "tcp", req.Target())
			if err == nil {
				_ = c.Close()
			}
			req.Refuse(err)
		})
	}
	var a, b, c string
	a = serve(t, &Protocol{Via: "gw-a"}, chain("gw-a", &b)).addr
	b = serve(t, &Protocol{Via: "gw-b"}, chain("gw-b", &c)).addr
	c = serve(t, &Protocol{}, chain("", &a)).addr // one that tells no name
	_, err := (&Dialer{Proxy: b}).DialContext(t.Context(), "tcp", "svc.test:443")
	tunneltest.WantReason(t, err, tunnel.Loop)
}

func TestDialerOverTLS(t *testing.T) {
	srv := httptest.NewUnstartedServer(nil)
	srv.StartTLS() // for its certificate
	defer srv.Close()
	roots := x509.NewCertPool()
	roots.AddCert(srv.Certificate())

	early := established + "early"
	addr := testnet.Service(t, func(c net.Conn) {
		s := tls.Server(c, &tls.Config{Certificates: srv.TLS.Certificates, NextProtos: []string{"h2", "http/1.1"}})
		if _, err := http.ReadRequest(bufio.NewReader(s)); err != nil {
			return
		}
		_, _ = io.WriteString(s, early)
		if got, err := io.ReadAll(s); len(got) > 0 || err == nil {
			t.Errorf("got %q, %v after an abort, want an error: the stream was cut", got, err)
		}
	})
	d := &Dialer{Proxy: addr, TLS: &tls.Config{RootCAs: roots, ServerName: "example.com"}}
	c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p := make([]byte, 5)
	if _, err := io.ReadFull(c, p); err != nil || string(p) != "early" {
		t.Errorf("got %q, %v, want %q", p, err, "early")
	}
	if _, ok := c.(tunnel.Unwrapper); ok {
		t.Error("a TLS stream is an Unwrapper: unwrapped it would lose its Abort")
	}
	if err := c.(tunnel.Aborter).Abort(); err != nil {
		t.Error(err)
	}

	// The name it asks for and verifies is the proxy's.
	_, err = (&Dialer{Proxy: "127.0.0.1:1", TLS: &tls.Config{RootCAs: x509.NewCertPool()}, Dialer: dialerFunc(
		func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, addr)
		})}).DialContext(t.Context(), "tcp", "svc.test:443")
	tunneltest.WantReason(t, err, tunnel.DialFailed)
	if unknown := (x509.UnknownAuthorityError{}); !errors.As(err, &unknown) {
		t.Errorf("got error %v, want an unknown authority", err)
	}
}
