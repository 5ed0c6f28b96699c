package checks

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// serve gives every connection of a loopback address to f, which need not close
// it.
func serve(t *testing.T, f func(net.Conn)) netip.AddrPort {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			f(c)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = ln.Close(); <-done })
	return netip.MustParseAddrPort(ln.Addr().String())
}

// says answers with a text after it has heard the beginning of something.
func says(text string) func(net.Conn) {
	return func(c net.Conn) {
		_, _ = c.Read(make([]byte, 4096))
		_, _ = io.WriteString(c, text)
	}
}

func ask(t *testing.T, ap netip.AddrPort, check registry.Check, name string) error {
	t.Helper()
	d := &tunnel.NetDialer{}
	c := &Checker{Dial: d.DialEndpoint}
	if check.Timeout == 0 {
		check.Timeout = 10 * time.Second
	}
	check.Statuses = cmp.Or(check.Statuses, registry.DefaultStatuses)
	return c.probe(t.Context(), &item{Target: registry.Target{Addr: ap, Check: check}, name: name})
}

// wants fails where err is not what a text says, "" for none.
func wants(t *testing.T, what string, err error, want string) {
	t.Helper()
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("%s: got %v, want %q", what, err, want)
	}
}

func TestProbeTCP(t *testing.T) {
	ended := make(chan error, 1)
	ap := serve(t, func(c net.Conn) {
		_, err := c.Read(make([]byte, 1))
		ended <- err
	})
	wants(t, "a server", ask(t, ap, registry.Check{Kind: "tcp"}, ""), "")
	if err := <-ended; err != io.EOF {
		t.Errorf("the server saw %v, want the end in order", err)
	}
	if err := ask(t, netip.MustParseAddrPort(testnet.ClosedPort(t)), registry.Check{Kind: "tcp"}, ""); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("nobody there: got %v, want refused", err)
	}
}

// Who expects a PROXY header gets one, before anything else.
func TestProbeSendsAProxyHeader(t *testing.T) {
	heard := make(chan string, 1)
	ap := serve(t, func(c net.Conn) {
		b := make([]byte, 4096)
		n, _ := io.ReadAtLeast(c, b, 17) // of either header, and more
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		heard <- string(b[:n])
	})
	c := &Checker{Dial: (&tunnel.NetDialer{}).DialEndpoint}
	for version, want := range map[int]string{0: "", 1: "PROXY UNKNOWN\r\n", 2: "\r\n\r\n\x00\r\nQUIT\n\x20\x00\x00\x00"} {
		for kind, after := range map[string]string{"tcp": "", "http": "GET /up HTTP/1.1\r\n"} {
			it := &item{Target: registry.Target{Addr: ap, ProxyProtocol: version, Check: registry.Check{Kind: kind, Path: "/up", Statuses: "200", Timeout: 10 * time.Second}}}
			wants(t, kind, c.probe(t.Context(), it), "")
			if got := <-heard; !strings.HasPrefix(got, want+after) || after == "" && got != want {
				t.Errorf("%s, version %d: the server heard %q, want %q", kind, version, got, want+after)
			}
		}
	}
}

// Where the header is inside TLS, that of a check is there, too, and not before.
func TestProbeSendsAHeaderInsideTLS(t *testing.T) {
	ca, err := testca.New("check.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://check.test/db", DNSNames: []string{"db.test"}})
	if err != nil {
		t.Fatal(err)
	}
	heard := make(chan string, 1)
	server := testnet.ServeTLS(t, &tls.Config{Certificates: []tls.Certificate{pair.TLS}}, func(c *tls.Conn) {
		b := make([]byte, 16)
		_, _ = io.ReadFull(c, b)
		heard <- string(b)
	})
	c := &Checker{Dial: (&tunnel.NetDialer{}).DialEndpoint}
	it := &item{Target: registry.Target{
		Addr: netip.MustParseAddrPort(server.Addr()), ProxyProtocol: 2, ProxyInsideTLS: true, TLS: &tlsLayer{&tls.Config{ServerName: "db.test", RootCAs: ca.Pool()}},
		Check: registry.Check{Kind: "tls", Timeout: 30 * time.Second},
	}}
	wants(t, "tls", c.probe(t.Context(), it), "")
	if got := <-heard; got != proxyHeaders[2] {
		t.Errorf("the server heard %q inside TLS, want %q", got, proxyHeaders[2])
	}
}

// The guard has the last word, and its word is not the address's fault.
func TestProbeAsksTheGuard(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	guard := &tunnel.Guard{}
	guard.OwnListener(ln.Addr())
	d := &tunnel.NetDialer{Guard: guard}
	c := &Checker{Dial: d.DialEndpoint}
	for _, row := range []struct {
		host string
		ap   string
		want tunnel.Reason
	}{
		{"", ln.Addr().String(), tunnel.Loop},
		{"evil.test", "127.0.0.1:1", tunnel.Prohibited},
		{"evil.test", "169.254.169.254:80", tunnel.Prohibited},
	} {
		it := &item{Target: registry.Target{Addr: netip.MustParseAddrPort(row.ap), Host: row.host, Check: registry.Check{Kind: "tcp", Timeout: time.Second}}}
		if err := c.probe(t.Context(), it); tunnel.ReasonOf(err) != row.want || registry.IsEndpointError(err) {
			t.Errorf("%s %s: got %v, want %s, which blames nobody", row.host, row.ap, err, row.want)
		}
	}
}

func TestProbeTLS(t *testing.T) {
	ca, err := testca.New("example.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/server", DNSNames: []string{"a.test"}})
	if err != nil {
		t.Fatal(err)
	}
	cert := pair.TLS
	type seen struct {
		name string
		err  error
	}
	heard := make(chan seen, 1)
	server := func(cfg *tls.Config) netip.AddrPort {
		return serve(t, func(c net.Conn) {
			var s seen
			cfg := cfg.Clone()
			cfg.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) { s.name = h.ServerName; return nil, nil }
			s.err = tls.Server(c, cfg).Handshake()
			heard <- s
		})
	}
	for what, cfg := range map[string]*tls.Config{
		"any":                {Certificates: []tls.Certificate{cert}},
		"TLS 1.2":            {Certificates: []tls.Certificate{cert}, MaxVersion: tls.VersionTLS12},
		"TLS 1.0 alone":      {Certificates: []tls.Certificate{cert}, MaxVersion: tls.VersionTLS10, MinVersion: tls.VersionTLS10},
		"client's":           {Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca.Pool()},
		"another group":      {Certificates: []tls.Certificate{cert}, CurvePreferences: []tls.CurveID{tls.CurveP256}},
		"no group in common": {Certificates: []tls.Certificate{cert}, CurvePreferences: []tls.CurveID{tls.X25519MLKEM768}},
		"no certificate":     {GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return nil, errors.New("unknown name") }},
	} {
		ap := server(cfg)
		wants(t, what, ask(t, ap, registry.Check{Kind: "tls"}, "a.test"), "")
		if s := <-heard; s.name != "a.test" || s.err == nil {
			t.Errorf("%s: the server heard of %q and ended with %v, want a.test and no handshake", what, s.name, s.err)
		}
		wants(t, what, ask(t, ap, registry.Check{Kind: "tls", Host: "b.test"}, "a.test"), "")
		if s := <-heard; s.name != "b.test" {
			t.Errorf("%s: the server heard of %q, want b.test", what, s.name)
		}
		wants(t, what, ask(t, ap, registry.Check{Kind: "tls"}, ""), "")
		if s := <-heard; s.name != "" {
			t.Errorf("%s: the server heard of %q, want no name", what, s.name)
		}
	}
	for _, row := range []struct{ answer, want string }{
		{"\x15\x03\x01\x00\x02\x02\x28", ""},
		{"\x15\x03\x03\x00\x02\x01\x00", ""},
		{"\x16\x03\x03\x00\x7a\x02", ""},
		{"", "no answer to a hello: EOF"},
		{"\x16\x03", "ends after 2 bytes"},
		{"\x16\x03\x03\x00\x7a\x01", "is not TLS"}, // a ClientHello: it echoes
		{"\x16\x03\x03\x00\x00\x02", "is not TLS"},
		{"\x16\x03\x03\xff\xff\x02", "is not TLS"},
		{"\x16\x02\x03\x00\x7a\x02", "is not TLS"},
		{"\x15\x03\x03\x00\x03\x02\x28", "is not TLS"},
		{"\x15\x03\x03\x00\x02\x03\x28", "is not TLS"},
		{"\x17\x03\x03\x00\x7a\x02", "is not TLS"},
		{"HTTP/1.1 400 Bad Request\r\n\r\n", `is not TLS, it begins with "HTTP/1"`},
		{"SSH-2.0-OpenSSH_9.9\r\n", "is not TLS"},
	} {
		ap := serve(t, says(row.answer))
		wants(t, fmt.Sprintf("%q", row.answer), ask(t, ap, registry.Check{Kind: "tls"}, "a.test"), row.want)
	}
	ended := make(chan error, 1)
	ap := serve(t, func(c net.Conn) {
		says("\x16\x03\x03\x00\x7a\x02")(c)
		_, err := c.Read(make([]byte, 1))
		ended <- err
	})
	wants(t, "no more than it takes", ask(t, ap, registry.Check{Kind: "tls"}, "a.test"), "")
	if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after its answer the server saw %v, want a reset and no byte", err)
	}
	echo := serve(t, func(c net.Conn) { _, _ = io.Copy(c, c) })
	wants(t, "an echo", ask(t, echo, registry.Check{Kind: "tls"}, "a.test"), "is not TLS")
}

func TestProbeHTTP(t *testing.T) {
	mux := http.NewServeMux()
	for code, status := range map[string]int{"200": 200, "204": 204, "302": 302, "399": 399, "404": 404, "500": 500, "503": 503} {
		mux.HandleFunc("/"+code, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/500")
			w.WriteHeader(status)
		})
	}
	cut := make(chan error, 1)
	mux.HandleFunc("/large", func(w http.ResponseWriter, _ *http.Request) {
		var err error
		for range 10000 { // more than the sockets hold
			if _, err = w.Write(make([]byte, 10000)); err != nil {
				break
			}
		}
		cut <- err
	})
	mux.HandleFunc("/early", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusOK)
	})
	mux.HandleFunc("/host", func(w http.ResponseWriter, r *http.Request) {
		if r.Host != "a.test" || r.URL.RawQuery != "full=1" || r.Method != http.MethodGet || r.UserAgent() != "culvert-check" {
			w.WriteHeader(http.StatusTeapot)
		}
	})
	srv := httptest.NewServer(mux)
	defer srv.Close()
	ap := netip.MustParseAddrPort(srv.Listener.Addr().String())
	for _, row := range []struct{ path, want string }{
		{"/200", ""}, {"/204", ""}, {"/302", ""}, {"/399", ""}, {"/large", ""}, {"/early", ""}, {"/host?full=1", ""},
		{"/404", "the status is 404, want 200-399"}, {"/500", "500"}, {"/503", "503"}, {"/nothing", "404"},
	} {
		wants(t, row.path, ask(t, ap, registry.Check{Kind: "http", Host: "a.test", Path: row.path}, ""), row.want)
	}
	for _, row := range []struct {
		path     string
		statuses registry.Statuses
		want     string
	}{
		{"/200", "200", ""}, {"/503", "200", "the status is 503, want 200"}, {"/503", "200,500-503", ""}, {"/204", "200,500-503", "204"},
	} {
		wants(t, row.path, ask(t, ap, registry.Check{Kind: "http", Host: "a.test", Path: row.path, Statuses: row.statuses}, ""), row.want)
	}
	wants(t, "another port", ask(t, netip.AddrPortFrom(ap.Addr(), 1), registry.Check{Kind: "http", Port: ap.Port(), Path: "/200"}, ""), "")
	if err := <-cut; err == nil {
		t.Error("a body of 100 MB was read to its end")
	}
	wants(t, "two lines", ask(t, ap, registry.Check{Kind: "http", Host: "a.test\r\nX: y", Path: "/200"}, ""), "has a space or control character")
	for _, row := range []struct{ answer, want string }{
		{"HTTP/1.0 200 OK\r\n\r\nwell", ""},
		{"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", ""},
		{"HTTP/1.1 101 Switching Protocols\r\n\r\n", "the status is 101"},
		{"", "no answer that can be read"},
		{"SSH-2.0-OpenSSH_9.9\r\n", "no answer that can be read"},
		{"HTTP/1.1 200 OK\r\n" + strings.Repeat("X: y\r\n", 5000), "no head of an answer in 16384 bytes"},
		{strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 5000), "no head of an answer in 16384 bytes"},
	} {
		ap := serve(t, says(row.answer))
		wants(t, fmt.Sprintf("%.50q", row.answer), ask(t, ap, registry.Check{Kind: "http", Path: "/"}, ""), row.want)
	}
}

// Whoever is silent is given up in time, and a probe that is given up says so.
func TestProbeEndsInTime(t *testing.T) {
	ap := serve(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	for _, kind := range []string{"tls", "http"} {
		start := time.Now()
		err := ask(t, ap, registry.Check{Kind: kind, Path: "/", Timeout: time.Second}, "a.test")
		wants(t, kind, err, kind+": nothing that ends the check came within 1s")
		if !registry.IsEndpointError(err) {
			t.Errorf("%s: %v blames nobody", kind, err)
		}
		if took := time.Since(start); took > 20*time.Second {
			t.Errorf("%s: it took %v", kind, took)
		}
		ctx, cancel := context.WithCancel(t.Context())
		c := &Checker{Dial: (&tunnel.NetDialer{}).DialEndpoint}
		time.AfterFunc(10*time.Millisecond, cancel)
		err = c.probe(ctx, &item{Target: registry.Target{Addr: ap, Check: registry.Check{Kind: kind, Path: "/", Timeout: time.Minute}}})
		if !errors.Is(err, context.Canceled) || registry.IsEndpointError(err) {
			t.Errorf("%s, given up: %v, want canceled, which blames nobody", kind, err)
		}
	}
}

// A tlsLayer speaks TLS as a client.
type tlsLayer struct{ *tls.Config }

func (l *tlsLayer) Handshake(ctx context.Context, c net.Conn, _ *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	if req != nil {
		return nil, errors.New("a probe has no request")
	}
	inside := tls.Client(c, l.Config)
	if err := inside.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		return nil, err
	}
	return inside, nil
}

// Where TLS is spoken to a service, probes speak it, too: what they ask is inside, and a
// certificate that does not pass is a failure.
func TestChecksInsideTLS(t *testing.T) {
	ca, err := testca.New("checks.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://checks.test/db", DNSNames: []string{"db.test"}})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/healthz" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{pair.TLS}}
	server.StartTLS()
	defer server.Close()
	at := netip.MustParseAddrPort(server.Listener.Addr().String())
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	layer := func(name string) *tlsLayer {
		return &tlsLayer{&tls.Config{ServerName: name, RootCAs: ca.Pool()}}
	}
	dialer := &tunnel.NetDialer{}
	c := &Checker{Dial: dialer.DialEndpoint}
	for _, row := range []struct {
		name  string
		at    netip.AddrPort
		check registry.Check
		layer *tlsLayer
		want  string
	}{
		{"http", at, registry.Check{Kind: "http", Path: "/healthz"}, layer("db.test"), ""},
		{"another status", at, registry.Check{Kind: "http", Path: "/"}, layer("db.test"), "the status is 503"},
		{"tls", at, registry.Check{Kind: "tls"}, layer("db.test"), ""},
		{"another name", at, registry.Check{Kind: "tls"}, layer("other.test"), "certificate is valid for db.test, not other.test"},
		{"no TLS", netip.MustParseAddrPort(plain.Listener.Addr().String()), registry.Check{Kind: "tls"}, layer("db.test"), "does not look like a TLS handshake"},
	} {
		row.check.Timeout, row.check.Statuses = 10*time.Second, registry.DefaultStatuses
		err := c.probe(t.Context(), &item{Target: registry.Target{Addr: row.at, Check: row.check, TLS: row.layer}})
		wants(t, row.name, err, row.want)
	}
}

// Probes speak TLS at the service's own port alone, and those by tcp not at all. Equal
// settings are one target.
func TestTargetsInsideTLS(t *testing.T) {
	shared := &tlsLayer{}
	c := &Checker{TLS: func(b *registry.BackendTLS) (registry.TLSLayer, error) {
		if b.ServerName == "" {
			return nil, errors.New("no server name")
		}
		return shared, nil
	}}
	own := &registry.BackendTLS{ServerName: "db.test"}
	for _, row := range []struct {
		s    registry.Service
		want bool
	}{
		{registry.Service{TLS: own, Check: registry.Check{Kind: "http"}}, true},
		{registry.Service{TLS: own, Check: registry.Check{Kind: "tls"}}, true},
		{registry.Service{TLS: own, Check: registry.Check{Kind: "tcp"}}, false},
		{registry.Service{TLS: own, Check: registry.Check{Kind: "http", Port: 8008}}, false},
		{registry.Service{Check: registry.Check{Kind: "http"}}, false},
	} {
		got, err := c.layerOf(&row.s)
		if err != nil || (got != nil) != row.want || row.want && got != registry.TLSLayer(shared) {
			t.Errorf("%+v: got %v, %v, want a layer: %t", row.s.Check, got, err, row.want)
		}
	}
	if _, err := c.layerOf(&registry.Service{TLS: &registry.BackendTLS{}, Check: registry.Check{Kind: "tls"}}); err == nil {
		t.Error("settings that can't be used have a layer")
	}
}
