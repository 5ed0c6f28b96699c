package admin

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func full() *Admin {
	return &Admin{
		Ready:   func() (bool, string) { return true, "" },
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "culvert_tunnels_open 3") }),
		Status:  func() any { return map[string]any{"tunnels": 3, "name": "a\u202e\u009bb"} },
		Explain: func(_ context.Context, q url.Values) (any, error) {
			if q.Get("name") == "" {
				return nil, fmt.Errorf("explain: no name in %v", q)
			}
			return map[string]string{"name": q.Get("name"), "port": q.Get("port"), "listener": q.Get("listener")}, nil
		},
		Pprof: true,
	}
}

// ask sends a request to a's Handler, as for a client on this host.
func ask(a *Admin, method, target string, edit func(*http.Request)) *http.Response {
	r := httptest.NewRequest(method, target, nil)
	r.Host = "127.0.0.1:9090"
	if edit != nil {
		edit(r)
	}
	w := httptest.NewRecorder()
	a.Handler().ServeHTTP(w, r)
	return w.Result()
}

func body(t *testing.T, r *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestEndpoints(t *testing.T) {
	notReady := full()
	notReady.Ready = func() (bool, string) { return false, "draining\r\n\x1b[31m" }
	amiss := full()
	amiss.Ready = func() (bool, string) { return true, "the table is 3m0s old\r\n" }
	broken := full()
	broken.Status = func() any { return func() {} }
	for _, tt := range []struct {
		name   string
		a      *Admin
		target string
		status int
		want   string // of the body; all of it where it ends in a line break
	}{
		{"index", full(), "/", 200, `<a href="/explain">`},
		{"health", full(), "/healthz", 200, "ok\n"},
		{"ready", full(), "/readyz", 200, "ok\n"},
		{"not ready", notReady, "/readyz", 503, "not ready: draining\\r\\n\\x1b[31m\n"},
		{"ready with something amiss", amiss, "/readyz", 200, "ok, but the table is 3m0s old\\r\\n\n"},
		{"not ready but alive", notReady, "/healthz", 200, "ok\n"},
		{"metrics", full(), "/metrics", 200, "culvert_tunnels_open 3\n"},
		{"status", full(), "/status", 200, "{\n  \"name\": \"a\\u202e\\u009bb\",\n  \"tunnels\": 3\n}\n"},
		{"status that can't be encoded", broken, "/status", 500, "the response cannot be encoded; the log says why\n"},
		{"explain", full(), "/explain?name=a.example.com&port=443&listener=:443", 200, "{\n  \"listener\": \":443\",\n  \"name\": \"a.example.com\",\n  \"port\": \"443\"\n}\n"},
		{"explain, no name", full(), "/explain?port=%1b", 400, "explain: no name in map[port:[\\x1b]]\n"},
		{"explain, bad query", full(), "/explain?name=%zz", 400, "query: invalid URL escape \"%zz\"\n"},
		{"pprof", full(), "/debug/pprof/", 200, "goroutine"},
		{"pprof by name", full(), "/debug/pprof/goroutine?debug=1", 200, "goroutine profile: total"},
		{"pprof cmdline", full(), "/debug/pprof/cmdline", 200, "admin.test"},
		{"unknown", full(), "/nothing", 404, "404 page not found\n"},
		{"below the index", full(), "/debug", 404, "404 page not found\n"},
		{"zero value, health", &Admin{}, "/healthz", 200, "ok\n"},
		{"zero value, ready", &Admin{}, "/readyz", 200, "ok\n"},
		{"zero value, metrics", &Admin{}, "/metrics", 404, "404 page not found\n"},
		{"zero value, status", &Admin{}, "/status", 404, "404 page not found\n"},
		{"zero value, explain", &Admin{}, "/explain?name=a", 404, "404 page not found\n"},
		{"zero value, pprof", &Admin{}, "/debug/pprof/", 404, "404 page not found\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := ask(tt.a, http.MethodGet, tt.target, nil)
			got := body(t, r)
			if r.StatusCode != tt.status || !strings.Contains(got, tt.want) || strings.HasSuffix(tt.want, "\n") && got != tt.want {
				t.Errorf("%d %q, want %d %q", r.StatusCode, got, tt.status, tt.want)
			}
			if h := r.Header.Get("X-Content-Type-Options"); h != "nosniff" {
				t.Errorf("X-Content-Type-Options is %q", h)
			}
			for h := range r.Header {
				if strings.HasPrefix(h, "Access-Control-") {
					t.Errorf("the answer has a CORS header: %s", h)
				}
			}
		})
	}
}

func TestIndexShowsWhatThereIs(t *testing.T) {
	got := body(t, ask(&Admin{}, http.MethodGet, "/", nil))
	if strings.Contains(got, "metrics") || strings.Contains(got, "pprof") || !strings.Contains(got, `href="/readyz"`) {
		t.Errorf("index of the zero value:\n%s", got)
	}
}

func TestGuard(t *testing.T) {
	host := func(h string) func(*http.Request) { return func(r *http.Request) { r.Host = h } }
	header := func(kv ...string) func(*http.Request) {
		return func(r *http.Request) {
			for i := 0; i < len(kv); i += 2 {
				r.Header.Set(kv[i], kv[i+1])
			}
		}
	}
	for _, tt := range []struct {
		name   string
		method string
		edit   func(*http.Request)
		want   int
	}{
		{"GET", "GET", nil, 200},
		{"HEAD", "HEAD", nil, 200},
		{"POST", "POST", nil, 405},
		{"PUT", "PUT", nil, 405},
		{"DELETE", "DELETE", nil, 405},
		{"OPTIONS", "OPTIONS", header("Origin", "https://evil.example"), 405},
		{"TRACE", "TRACE", nil, 405},
		{"CONNECT", "CONNECT", nil, 405},
		{"unknown method", "BREW", nil, 405},
		{"body", "GET", func(r *http.Request) { r.ContentLength = 5 }, 400},
		{"chunked body", "GET", func(r *http.Request) { r.ContentLength = -1 }, 400},
		{"POST with a body", "POST", func(r *http.Request) { r.ContentLength = 5 }, 405},

		{"localhost", "GET", host("localhost:9090"), 200},
		{"localhost in capitals, with a dot", "GET", host("LocalHost."), 200},
		{"IPv4", "GET", host("10.1.2.3"), 200},
		{"IPv6", "GET", host("[::1]:9090"), 200},
		{"IPv6 without port", "GET", host("[::1]"), 200},
		{"IPv6 with a zone", "GET", host("[fe80::1%eth0]:9090"), 200},
		{"no host, HTTP/1.0", "GET", host(""), 200},
		{"configured name", "GET", host("Gateway.Example.com:9090"), 200},
		{"rebound name", "GET", host("evil.example"), 421},
		{"rebound name with our port", "GET", host("evil.example:9090"), 421},
		{"looks like localhost", "GET", host("localhost.evil.example"), 421},
		{"looks like an address", "GET", host("127.0.0.1.evil.example"), 421},
		{"address for the lenient", "GET", host("127.1"), 421},
		{"number", "GET", host("2130706433"), 421},
		{"below a configured name", "GET", host("x.gateway.example.com"), 421},

		{"own page", "GET", header("Sec-Fetch-Site", "same-origin", "Sec-Fetch-Dest", "empty"), 200},
		{"typed", "GET", header("Sec-Fetch-Site", "none", "Sec-Fetch-Dest", "document"), 200},
		{"link on another site", "GET", header("Sec-Fetch-Site", "cross-site", "Sec-Fetch-Dest", "document"), 200},
		{"image on another site", "GET", header("Sec-Fetch-Site", "cross-site", "Sec-Fetch-Dest", "image"), 403},
		{"frame on another site", "GET", header("Sec-Fetch-Site", "cross-site", "Sec-Fetch-Dest", "iframe"), 403},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := full()
			a.Hosts = []string{"gateway.example.com"}
			for _, path := range []string{"/", "/healthz", "/status", "/explain?name=a", "/debug/pprof/"} {
				if path == "/debug/pprof/" && tt.name == "link on another site" {
					continue // see TestProfilesAreForNoPage
				}
				r := ask(a, tt.method, path, tt.edit)
				if r.StatusCode != tt.want {
					t.Errorf("%s %s: %d, want %d", tt.method, path, r.StatusCode, tt.want)
				}
				if allow := r.Header.Get("Allow"); tt.want == 405 && allow != "GET, HEAD" {
					t.Errorf("%s %s: Allow is %q", tt.method, path, allow)
				}
			}
		})
	}
}

// A page can't have profiles made: not one of another port of this host, and
// not one that opens a window.
func TestProfilesAreForNoPage(t *testing.T) {
	for _, tt := range []struct {
		site, dest string
		want       int
	}{
		{"", "", 200}, // curl, go tool pprof
		{"none", "document", 200},
		{"same-origin", "document", 200},
		{"same-site", "empty", 403},
		{"same-site", "document", 403},
		{"cross-site", "document", 403},
		{"cross-site", "image", 403},
		{"anything else", "", 403},
	} {
		for _, path := range []string{"/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/symbol"} {
			r := ask(full(), "GET", path, func(r *http.Request) {
				if tt.site != "" {
					r.Header.Set("Sec-Fetch-Site", tt.site)
					r.Header.Set("Sec-Fetch-Dest", tt.dest)
				}
			})
			if r.StatusCode != tt.want {
				t.Errorf("%s from %q for a %q: %d, want %d", path, tt.site, tt.dest, r.StatusCode, tt.want)
			}
		}
	}
}

// What the Host header says is echoed; it must not be as it came.
func TestHostIsEscaped(t *testing.T) {
	got := body(t, ask(full(), http.MethodGet, "/", func(r *http.Request) { r.Host = "evil\x1b[31m\u202e<b>" + strings.Repeat("a", 500) }))
	safe(t, strings.TrimSuffix(got, "\n"))
	if len(got) > 400 {
		t.Errorf("%d bytes of answer: %q", len(got), got)
	}
}

// serve runs a on loopback until the test's end.
func serve(t *testing.T, a *Admin) (addr string, stop func() error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- a.Serve(ctx, ln) }()
	stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-served:
			return err
		case <-time.After(20 * time.Second):
			return errors.New("Serve does not return")
		}
	})
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return ln.Addr().String(), stop
}

// send writes a raw request and returns the answer's status, 0 if there is none.
func send(t *testing.T, addr, raw string) int {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(c, raw); err != nil {
		t.Fatal(err)
	}
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0
	}
	defer r.Body.Close()
	return r.StatusCode
}

func TestServeRaw(t *testing.T) {
	addr, _ := serve(t, full())
	for _, tt := range []struct {
		name, raw string
		want      int
	}{
		{"HTTP/1.1", "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 200},
		{"HTTP/1.0 without host", "GET /readyz HTTP/1.0\r\n\r\n", 200},
		{"HTTP/1.1 without host", "GET /healthz HTTP/1.1\r\n\r\n", 400},
		{"rebound name", "GET /status HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421},
		{"rebound name in the target", "GET http://evil.example/status HTTP/1.1\r\nHost: localhost\r\n\r\n", 421},
		{"OPTIONS *", "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 405},
		{"CONNECT", "CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n", 405},
		{"a body that does not come", "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n", 400},
		{"a head of 15 KiB", "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + strings.Repeat("a", 15<<10) + "\r\n\r\n", 200},
		{"a head of 17 KiB", "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + strings.Repeat("a", 17<<10) + "\r\n\r\n", 431},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := send(t, addr, tt.raw); got != tt.want {
				t.Errorf("%d, want %d", got, tt.want)
			}
		})
	}
}

// Connections that are held open, whatever was sent on them, keep nobody from
// an answer, and no more of them are held than descriptors are kept back for.
func TestAFullPortAnswersNewcomers(t *testing.T) {
	const ask = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
	for _, brief := range []bool{false, true} {
		for _, tt := range []struct{ name, sent string }{
			{"silent", ""},
			{"half a head", "GET /healthz HTTP/1.1\r\nHost: local"},
			{"kept alive", ask},
			{"half a second request", ask + "GET /hea"},
		} {
			t.Run(fmt.Sprintf("%s, brief %v", tt.name, brief), func(t *testing.T) {
				a := full()
				a.Brief = brief
				addr, _ := serve(t, a)
				var held []net.Conn
				for range 3 * maxConns {
					c, err := net.Dial("tcp", addr)
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close()
					_, _ = io.WriteString(c, tt.sent)
					held = append(held, c)
					if len(held) < maxConns {
						continue
					}
					start := time.Now()
					if got := sendQuietly(addr, ask); got != 200 || time.Since(start) > briefTime*3/4 {
						t.Fatalf("with %d others: status %d after %v, want 200 at once", len(held), got, time.Since(start))
					}
				}
				open := 0
				for _, c := range held {
					_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
					if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
						open++
					}
				}
				if open > maxConns {
					t.Errorf("%d connections are open, want %d at most", open, maxConns)
				}
			})
		}
	}
}

// A port that everybody reaches ends each connection after its answer.
func TestABriefPortAnswersOnce(t *testing.T) {
	a := full()
	a.Brief = true
	addr, _ := serve(t, a)
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	_, _ = io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
	all, err := io.ReadAll(c)
	if err != nil || !strings.Contains(string(all), "200 OK") || !strings.Contains(string(all), "Connection: close") {
		t.Errorf("%q, %v: want an answer and the connection's end", all, err)
	}
}

// Where a port is full, the address with most of its connections loses one: an
// idle one first, and then the oldest.
func TestACrowdLosesOfTheAddressWithMost(t *testing.T) {
	w := newCrowd(4)
	come := func(address string) *fakeConn {
		c := &fakeConn{from: &net.TCPAddr{IP: net.ParseIP(address), Port: 1}}
		w.observe(c, http.StateNew)
		return c
	}
	closed := func(step string, c *fakeConn, others ...*fakeConn) {
		t.Helper()
		if !c.closed {
			t.Errorf("%s: the wrong one was closed", step)
		}
		for _, o := range others {
			if o.closed {
				t.Errorf("%s: another was closed", step)
			}
		}
	}
	probe := come("192.0.2.1")
	a, b, c := come("192.0.2.2"), come("192.0.2.2"), come("192.0.2.2")
	w.observe(a, http.StateActive)
	w.observe(c, http.StateActive)
	d := come("192.0.2.3")
	closed("one without a request", b, probe, a, c, d)
	e := come("192.0.2.2") // has most now, and comes last
	closed("the oldest", a, probe, c, d, e)
	w.observe(b, http.StateClosed) // was counted out before
	w.observe(d, http.StateClosed)
	f := come("192.0.2.4")
	if f.closed || c.closed || len(w.conns) != 4 {
		t.Errorf("with room one was closed; there are %d", len(w.conns))
	}
	for _, x := range []*fakeConn{probe, c, e, f} {
		w.observe(x, http.StateClosed)
	}
	if len(w.conns)+len(w.count) != 0 {
		t.Errorf("left behind: %v %v", w.conns, w.count)
	}
}

type fakeConn struct {
	net.Conn
	from   net.Addr
	closed bool
}

func (c *fakeConn) RemoteAddr() net.Addr { return c.from }
func (c *fakeConn) Close() error         { c.closed = true; return nil }

// sendQuietly is send for a connection that may be closed at any moment.
func sendQuietly(addr, raw string) int {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return 0
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	_, _ = io.WriteString(c, raw)
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0
	}
	defer r.Body.Close()
	return r.StatusCode
}

// An answer under way is finished; after two seconds it is not waited for, and
// its context ends.
func TestServeStops(t *testing.T) {
	for _, tt := range []struct {
		name   string
		within bool // the answer comes within the two seconds
	}{{"answers in time", true}, {"does not answer", false}} {
		t.Run(tt.name, func(t *testing.T) {
			asked, answer, left := make(chan struct{}), make(chan struct{}), make(chan struct{})
			a := &Admin{Explain: func(ctx context.Context, _ url.Values) (any, error) {
				defer close(left)
				close(asked)
				select {
				case <-answer:
					return "yes", nil
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}}
			addr, stop := serve(t, a)
			got := make(chan int, 1)
			go func() { got <- sendQuietly(addr, "GET /explain HTTP/1.0\r\n\r\n") }()
			<-asked
			stopped := make(chan error, 1)
			go func() { stopped <- stop() }()
			if tt.within {
				// It no longer accepts, and still answers.
				for deadline := time.Now().Add(time.Second); sendQuietly(addr, "GET /healthz HTTP/1.0\r\n\r\n") != 0 && time.Now().Before(deadline); {
					time.Sleep(time.Millisecond)
				}
				close(answer)
			}
			// What gives up because its context ended may still say so before it is cut.
			if status := <-got; (status == 200) != tt.within {
				t.Errorf("the answer under way: %d, want 200: %v", status, tt.within)
			}
			if err := <-stopped; err != nil {
				t.Errorf("Serve: %v", err)
			}
			<-left
		})
	}
}

func TestServeOnAClosedListener(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = ln.Close()
	if err := full().Serve(t.Context(), ln); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Serve = %v, want %v", err, net.ErrClosed)
	}
}

// A handler that panics costs its answer and a log line.
func TestServeSurvivesPanics(t *testing.T) {
	var out buffer
	a := &Admin{Status: func() any { panic("boom\x1b") }, Log: slog.New(slog.NewTextHandler(&out, nil))}
	addr, _ := serve(t, a)
	if got := send(t, addr, "GET /status HTTP/1.0\r\n\r\n"); got != 0 {
		t.Errorf("the panicking request got %d", got)
	}
	if got := send(t, addr, "GET /healthz HTTP/1.0\r\n\r\n"); got != 200 {
		t.Errorf("the next one got %d", got)
	}
	if !strings.Contains(out.String(), "boom") {
		t.Errorf("the log does not say it: %q", out.String())
	}
}

// pipeListener accepts what is sent on it, so that time can be synctest's.
type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}
func (l *pipeListener) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9090} }

func TestServeDeadlines(t *testing.T) {
	for _, tt := range []struct {
		name  string
		brief bool
		send  string
		want  time.Duration // until the connection is closed
	}{
		{"no byte", false, "", headTime},
		{"half a head", false, "GET / HTT", headTime},
		{"idle after an answer", false, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", idleTime},
		{"no byte to a brief port", true, "", briefTime},
		{"half a head to a brief port", true, "GET / HTT", briefTime},
		{"an answer of a brief port", true, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ln := &pipeListener{conns: make(chan net.Conn), closed: make(chan struct{})}
				ctx, cancel := context.WithCancel(t.Context())
				served := make(chan error, 1)
				a := full()
				a.Brief = tt.brief
				go func() { served <- a.Serve(ctx, ln) }()
				client, server := net.Pipe()
				ln.conns <- server
				start := time.Now()
				go func() { _, _ = io.WriteString(client, tt.send) }()
				_, _ = io.Copy(io.Discard, client)
				if got := time.Since(start); got != tt.want {
					t.Errorf("closed after %v, want %v", got, tt.want)
				}
				cancel()
				if err := <-served; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// N25: the admin port is for this host unless someone said otherwise.
func TestCheckAddr(t *testing.T) {
	for _, tt := range []struct {
		addr          string
		local, remote bool // accepted, without and with allowRemote
	}{
		{"127.0.0.1:9090", true, true},
		{"127.9.9.9:0", true, true},
		{"[::1]:9090", true, true},
		{"[::ffff:127.0.0.1]:9090", true, true},
		{"localhost:9090", true, true},
		{"LOCALHOST.:9090", true, true},
		{":9090", false, true},
		{"0.0.0.0:9090", false, true},
		{"[::]:9090", false, true},
		{"10.0.0.1:9090", false, true},
		{"169.254.1.1:9090", false, true},
		{"[::ffff:10.0.0.1]:9090", false, true},
		{"[fe80::1%eth0]:9090", false, true},
		{"gateway.example.com:9090", false, true},
		{"localhost.example.com:9090", false, true},
		{"127.1:9090", false, true},
		{"", false, false},
		{"9090", false, false},
		{"127.0.0.1", false, false},
		{"127.0.0.1:", false, false},
		{"127.0.0.1:http", false, false},
		{"127.0.0.1:65536", false, false},
		{"127.0.0.1:-1", false, false},
		{"::1:9090", false, false},
	} {
		for allow, want := range map[bool]bool{false: tt.local, true: tt.remote} {
			err := CheckAddr(tt.addr, allow)
			if (err == nil) != want {
				t.Errorf("CheckAddr(%q, %v) = %v, want accepted: %v", tt.addr, allow, err, want)
			}
			if err != nil && !strings.Contains(err.Error(), fmt.Sprintf("%q", tt.addr)) {
				t.Errorf("CheckAddr(%q, %v) does not quote it: %v", tt.addr, allow, err)
			}
		}
	}
}

func TestAnswersAreJSON(t *testing.T) {
	r := ask(full(), http.MethodGet, "/explain?name=%E2%80%AEx%C2%9B&port=1", nil)
	if ct := r.Header.Get("Content-Type"); ct != "application/json" {
		t.Errorf("Content-Type is %q", ct)
	}
	text := body(t, r)
	for line := range strings.Lines(text) {
		safe(t, strings.TrimSuffix(line, "\n"))
	}
	var v map[string]string
	if err := json.Unmarshal([]byte(text), &v); err != nil || v["name"] != "\u202ex\u009b" {
		t.Errorf("%v %v: %s", v, err, text)
	}
}
