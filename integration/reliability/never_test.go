//go:build linux

package reliability

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A service hears of a client only once the client has said all of where it
// wants to go: one that leaves at any byte before that is never dialed for.
func TestNothingIsDialedForHalfAPreamble(t *testing.T) {
	eachWay(t, func(t *testing.T, w way) {
		b := testnet.NewTap(t)
		g := start(t, options{Services: service("tap.test", b.Addr())})
		whole := w.preamble("tap.test")
		if w.yes == "" {
			whole = records(helloBody("tap.test", -1), 30) // three records
		}
		c := g.mustDial(1)
		if _, err := c.Write(whole); err != nil {
			t.Fatal(err)
		}
		testnet.Eventually(t, patience, func() bool { return b.Accepted() == 1 }, "the service is dialed for one who says all")
		_ = c.Close()
		testnet.Eventually(t, patience, func() bool { return g.metric("culvert_tunnels_open") == 0 }, "the tunnel is over")
		fds := g.descriptors()
		var silent, early atomic.Int64 // how many left with no byte sent, and with some
		crowd(t, 2*len(whole), 8, func(i int) error {
			c, err := g.dial(i % 50)
			if err != nil {
				return err
			}
			defer c.Close()
			n := i / 2
			switch {
			case n > 0:
				early.Add(1)
			case i%2 == 1: // the kernel never tells of one that resets before it has spoken
				silent.Add(1)
			}
			if _, err := c.Write(whole[:n]); err != nil {
				return err
			}
			if i%2 == 0 {
				return testnet.Abort(c)
			}
			_ = c.CloseWrite()
			readRefusal(c)
			return nil
		})
		// A reset may overtake the bytes before it.
		testnet.Eventually(t, patience, func() bool {
			m := g.metrics()
			const name = "culvert_connections_refused_total"
			return sum(m, name, `reason="gone"`)+sum(m, name, `reason="no-hello"`) == float64(silent.Load()+early.Load())
		}, "every client is counted as gone")
		if n := b.Accepted(); n != 1 {
			t.Errorf("the service was dialed %d times for clients that said less than all, want never", n-1)
		}
		testnet.Eventually(t, patience, func() bool { return g.descriptors() <= fds+2 }, "nothing is held of them")
	})
}

// The gateway listens where it was told to and nowhere else, and what is for
// operators is not to be had by clients.
func TestAdminIsNotForClients(t *testing.T) {
	b := testnet.Echo(t)
	g := start(t, options{Services: service("echo.test", b.Addr())})
	if got, want := g.listening(), []string{g.addr, g.admin}; !slices.Equal(got, want) {
		t.Errorf("it listens at %q, want %q", got, want)
	}
	for _, path := range []string{"/", "/metrics", "/healthz", "/readyz", "/status", "/debug/pprof/", "/debug/pprof/heap"} {
		for _, raw := range []string{
			"GET " + path + " HTTP/1.1\r\nHost: " + g.admin + "\r\n\r\n",
			"GET http://" + g.admin + path + " HTTP/1.1\r\nHost: " + g.admin + "\r\n\r\n",
		} {
			if r := g.refusedRaw(1, []byte(raw)); r.code != 405 {
				t.Errorf("%q got %v, want 405", raw, r)
			}
		}
	}
	// Neither is the listener itself.
	ip := net.ParseIP(g.ip).To4()
	for _, own := range []string{g.admin, g.addr} {
		_, port, _ := net.SplitHostPort(own)
		for _, host := range []string{
			g.ip, "[::ffff:" + g.ip + "]", "localhost", "127.0.0.1", "0.0.0.0", "[::1]", "[::]",
			fmt.Sprint(uint32(ip[0])<<24 | uint32(ip[1])<<16 | uint32(ip[2])<<8 | uint32(ip[3])),
			fmt.Sprintf("%d.%d", ip[0], uint32(ip[1])<<16|uint32(ip[2])<<8|uint32(ip[3])),
		} {
			r := g.refusedRaw(2, fmt.Appendf(nil, "CONNECT %s:%s HTTP/1.1\r\nHost: x\r\n\r\n", host, port))
			if r.code != 403 && r.code != 400 {
				t.Errorf("CONNECT to our own %s:%s got %v, want 403 or 400", host, port, r)
			}
		}
	}

	// A route that leads there is a mistake in a file, and refused at the
	// latest when it is dialed.
	own := func(addr func(*gateway) string, code int, status int) {
		t.Helper()
		g := prepare(t, options{})
		if text, code := g.check(g.yaml(service("own.test", addr(g)))); code != 2 || !strings.Contains(text, "leads back to this gateway") {
			t.Errorf("a file with a route to ourselves: exit code %d, %q", code, text)
		}
		g = prepare(t, options{Flags: []string{"--listen", "ADDR", "--admin", "ADMIN", "--route", "own.test=PLACE", "--log-format", "json"}})
		g.opts.Flags[5] = "own.test=" + addr(g)
		g.run()
		testnet.Eventually(t, patience, func() bool { g.alive(); status, _, err := g.get("/readyz"); return err == nil && status == 200 }, "it is ready")
		if r := g.refused(bySNI, 1, "own.test"); r.code != code {
			t.Errorf("a route to ourselves, by SNI, got %v, want %d", r, code)
		}
		if r := g.refused(byConnect, 1, "own.test"); r.code != status {
			t.Errorf("a route to ourselves, by CONNECT, got %v, want %d", r, status)
		}
	}
	own(func(g *gateway) string { return g.admin }, 49, 502)
	own(func(g *gateway) string { return g.addr }, 80, 502)

	// The admin port is asked for, and is on loopback.
	bare := prepare(t, options{Flags: []string{"--listen", "ADDR", "--route", "echo.test=" + b.Addr(), "--log-format", "json"}})
	bare.run()
	testnet.Eventually(t, patience, func() bool {
		bare.alive()
		c, err := bare.dial(1)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}, "it listens")
	if got := bare.listening(); !slices.Equal(got, []string{bare.addr}) {
		t.Errorf("without --admin it listens at %q, want %q", got, bare.addr)
	}
	open := prepare(t, options{})
	if text, code := open.try(strings.Replace(open.yaml(service("echo.test", b.Addr())), "admin: "+open.admin, "admin: 0.0.0.0:9090", 1)); code == 0 || !strings.Contains(text, "0.0.0.0:9090") {
		t.Errorf("an admin port for everyone: exit code %d, %q; want a refusal", code, text)
	}
}

// listening returns the TCP addresses the process listens at.
func (g *gateway) listening() []string {
	g.t.Helper()
	own := map[string]bool{}
	fds, err := os.ReadDir(g.proc("fd"))
	if err != nil {
		g.t.Fatal(err)
	}
	for _, fd := range fds {
		link, _ := os.Readlink(g.proc("fd/" + fd.Name()))
		if inode, ok := strings.CutPrefix(link, "socket:["); ok {
			own[strings.TrimSuffix(inode, "]")] = true
		}
	}
	var addrs []string
	for _, file := range []string{"net/tcp", "net/tcp6"} {
		b, err := os.ReadFile(g.proc(file))
		if err != nil {
			g.t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) < 10 || f[3] != "0A" || !own[f[9]] { // 0A is LISTEN
				continue
			}
			host, port, _ := strings.Cut(f[1], ":")
			a, err1 := strconv.ParseUint(host, 16, 32)
			p, err2 := strconv.ParseUint(port, 16, 16)
			if err1 != nil || err2 != nil {
				addrs = append(addrs, f[1]) // IPv6
				continue
			}
			addrs = append(addrs, fmt.Sprintf("%d.%d.%d.%d:%d", byte(a), byte(a>>8), byte(a>>16), byte(a>>24), p))
		}
	}
	slices.Sort(addrs)
	return addrs
}

// try starts the program with a configuration that it is to refuse, and
// returns what it says and its exit code.
func (g *gateway) try(yaml string, args ...string) (text string, code int) {
	g.t.Helper()
	bin, err := program()
	if err != nil {
		g.t.Fatal(err)
	}
	g.write(yaml)
	if args == nil {
		args = []string{"gateway", "--config", g.config}
	}
	cmd := exec.Command("timeout", append([]string{"10", bin}, args...)...)
	out, _ := cmd.CombinedOutput()
	return string(out), cmd.ProcessState.ExitCode()
}

// check is "culvert config check".
func (g *gateway) check(yaml string) (text string, code int) {
	g.t.Helper()
	return g.try(yaml, "config", "check", g.config)
}

// A configuration that is not understood to the last key starts nothing.
func TestConfigurationIsUnderstoodOrRefused(t *testing.T) {
	g := prepare(t, options{})
	good := g.yaml(service("echo.test", "127.0.0.1:1"))
	replace := func(old, with string) string {
		if !strings.Contains(good, old) {
			t.Fatalf("no %q in the configuration", old)
		}
		return strings.Replace(good, old, with, 1)
	}
	for _, tt := range []struct{ name, yaml, where string }{
		{"unknown key", good + "servces: []\n", ":8:1: "},
		{"unknown key of a listener", replace(`"}`, `", refusl: close}`), ":2:"},
		{"unknown key of a service", replace(`"]}`, `"], weight: 1}`), ":7:"},
		{"unknown limit", good + "limits: {tunels: 1}\n", ":8:10: "},
		{"limit without a unit", good + "limits: {handshakeTimeout: 5}\n", ":8:28: "},
		{"negative limit", good + "limits: {handshakeTimeout: -5s}\n", ":8:28: "},
		{"unknown word", replace("format: json", "format: jsn"), ":4:15: "},
		{"key given twice", good + "admin: 127.0.0.1:9\n", ":8:1: "},
		{"no port", replace("127.0.0.1:1", "127.0.0.1:0"), ":7:"},
		{"bad name", replace("echo.test", "echo..test"), ":7:"},
		{"wildcard in the middle", replace("echo.test", "e*.test"), ":7:"},
		{"no services", "listeners:\n  - {address: \"" + g.addr + "\"}\n", ":1:1: "},
		{"an alias", good + "drain: *x\n", ":8:"},
		{"a tab", good + "drain:\n\tgrace: 5s\n", ":9:2: "},
		{"two documents", good + "---\nservices: []\n", ":8:"},
		{"empty", "", ":1:1: "},
		{"binary", "\x00\x01", ":1:1: "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, args := range [][]string{nil, {"config", "check", g.config}} {
				text, code := g.try(tt.yaml, args...)
				if code != 2 || !strings.Contains(text, g.config+tt.where) {
					t.Errorf("%v: exit code %d, %q; want 2 and the place %q", args, code, text, tt.where)
				}
			}
		})
	}
	for _, args := range [][]string{
		{"gateway"}, {"gateway", "--confg", g.config}, {"gateway", "--config", g.config, "--listen", g.addr},
		{"gateway", "--listen", g.addr, "--route", "echo.test"}, {"gateway", g.config},
		{"gateway", "--config", filepath.Join(filepath.Dir(g.config), "absent.yaml")},
	} {
		if text, code := g.try(good, args...); code != 2 || !strings.Contains(text, "culvert: error: ") {
			t.Errorf("%q: exit code %d, %q; want 2 and an error", args, code, text)
		}
	}
}

// A log that nobody reads, or that nobody is left to read, stops the log and
// nothing else.
func TestStuckLogStopsNothing(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	b := testnet.Echo(t)
	g := start(t, options{Services: service("echo.test", b.Addr()), Stderr: w})
	_ = w.Close()
	held := g.tunnel(bySNI, 1, "echo.test")
	ways := []way{bySNI, byConnect}
	visit := func(i int) error {
		c, err := g.dial(i % 250)
		if err != nil {
			return err
		}
		defer c.Close()
		w := ways[i%2]
		if i%20 < 2 {
			return w.enter(c, "echo.test")
		}
		if r := request(c, w.preamble("absent.test")); r.code != w.code["no-route"] {
			return fmt.Errorf("got %v", r)
		}
		return nil
	}
	works := func(service string) {
		t.Helper()
		if err := echo(held, "still here"); err != nil {
			t.Errorf("the tunnel that stood: %v", err)
		}
		g.write(g.yaml(service))
		testnet.Eventually(t, effect, func() bool {
			_, body, _ := g.get("/status")
			return strings.Contains(body, `"services": 2`) == strings.Contains(service, "new.test")
		},
			"a reload takes effect")
	}
	began := time.Now()
	crowd(t, 11_000, 16, visit)
	lost := g.metric("culvert_log_lines_dropped_total")
	t.Logf("11,000 clients in %v, %v lines of the log lost", time.Since(began).Round(time.Millisecond), lost)
	if lost == 0 {
		t.Error("no line was lost: the log was not stuck")
	}
	works(service("echo.test", b.Addr()) + service("new.test", b.Addr()))

	_ = r.Close()
	crowd(t, 1000, 16, visit)
	works(service("echo.test", b.Addr()))
	if more := g.metric("culvert_log_lines_dropped_total"); more <= lost {
		t.Errorf("with the reader gone %v lines are lost, and %v before", more, lost)
	}
}

// A client on loopback is a client like any other: what it says of itself in
// headers is not believed, over HTTP/1 and HTTP/2 (must-nevers N5 and N36).
func TestLoopbackIsNotTrusted(t *testing.T) {
	b := testnet.Echo(t)
	g := start(t, options{
		More:     "networks:\n  - {name: office, cidrs: [127.5.0.0/16, 10.0.0.0/8]}",
		Services: fmt.Sprintf("  - {name: office.test, exposedTo: [office], endpoints: [\"%s\"]}\n", b.Addr()),
	})
	spoofs := []string{
		"X-Forwarded-For: 10.0.0.1", "X-Real-IP: 10.0.0.1", "Forwarded: for=10.0.0.1", "True-Client-IP: 10.0.0.1", "X-Envoy-External-Address: 10.0.0.1",
		"X-Forwarded-Client-Cert: URI=spiffe://office/admin", "Via: 1.1 10.0.0.1", "Proxy-Connection: keep-alive", "CF-Connecting-IP: 10.0.0.1",
	}
	for _, s := range spoofs {
		c := g.mustDial(1)
		source := c.LocalAddr().String()
		r := request(c, []byte("CONNECT office.test:443 HTTP/1.1\r\nHost: x\r\n"+s+"\r\n\r\n"))
		if r.code != 403 {
			t.Errorf("%q got %v, want 403", s, r)
		}
		testnet.Eventually(t, patience, func() bool {
			return len(g.entries(func(e entry) bool { return e.str("source") == source && e.str("reason") == "not-exposed" })) == 1
		}, "%q: the log has the source %s", s, source)
	}
	for _, s := range spoofs {
		name, value, _ := strings.Cut(s, ": ")
		if name == "Proxy-Connection" {
			continue // is malformed in HTTP/2
		}
		d := &h2.Dialer{Proxy: g.addr, Dialer: dialFunc(func() (net.Conn, error) { return g.dial(1) }), Header: func(context.Context, string) (connect.Fields, error) {
			return connect.Fields{{Name: strings.ToLower(name), Value: value}}, nil
		}}
		if _, err := d.DialContext(t.Context(), "tcp", "office.test:443"); tunnel.ReasonOf(err) != tunnel.NoRoute {
			t.Errorf("%q over HTTP/2 got %v, want %s", s, err, tunnel.NoRoute)
		}
		_ = d.Close()
	}
	if r := g.refused(bySNI, 1, "office.test"); r.code != 112 {
		t.Errorf("SNI got %v, want 112", r)
	}
	// A PROXY header is not sniffed for.
	v2 := append([]byte("\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c"), 10, 0, 0, 1, 10, 0, 0, 2, 0, 1, 0, 2)
	for _, head := range [][]byte{[]byte("PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n"), []byte("PROXY UNKNOWN\r\n"), v2} {
		for _, w := range []way{bySNI, byConnect} {
			if r := g.refusedRaw(1, append(head, w.preamble("office.test")...)); r.code != 0 || r.end != testnet.RST {
				t.Errorf("%q before %s got %v, want a reset", head, w.name, r)
			}
		}
	}
	if n := b.Accepted(); n != 0 {
		t.Errorf("the service was dialed %d times, want never", n)
	}
	// From the office itself it works.
	for _, w := range []way{bySNI, byConnect} {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 5, 0, 1)}}
		c, err := d.DialContext(t.Context(), "tcp", g.addr)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.enter(c, "office.test"); err != nil {
			t.Errorf("%s from the office: %v", w.name, err)
		}
		_ = c.Close()
	}
}

// The wall clock may jump; nothing that times a connection may read it. What
// strips the monotonic clock from a time is allowed where it is listed.
func TestTimesAreMonotonic(t *testing.T) {
	allowed := map[string]string{
		"internal/filewatch/watch.go UnixNano":     "the age of a file, compared for equality",
		"tunnel/record.go UnixNano":                "when a tunnel began, to be shown; its age is kept beside it",
		"internal/admin/tunnels.go UTC":            "likewise",
		"internal/admin/refusals.go UTC":           "when a client was refused, to be shown",
		"internal/gateway/admin.go Unix":           "a timestamp in a metric",
		"internal/gateway/health.go UTC":           "since when something is so, to be shown in the status",
		"dns/exchange.go Unix":                     "the SOA's serial number",
		"internal/gateway/assignments.go Truncate": "since when a service has its port or address, kept on disk for days",
		"internal/gateway/certificates.go Unix":    "when a certificate expires, in a metric: the wall clock's",
		"internal/gateway/certificates.go UTC":     "likewise, in the log",
		"internal/admin/handler.go Truncate":       "when a line of the log is written, to be shown",
		"internal/gateway/assignments.go UTC":      "likewise",
		"reverse/groups.go UnixMilli":              "since when an owner has a name, which replicas compare",
		"registry/alloc/alloc.go UTC":              "since when a service has its port or address, kept on disk for days",
		"registry/alloc/file.go UTC":               "likewise",
	}
	strips := map[string]bool{"Unix": true, "UnixNano": true, "UnixMilli": true, "UnixMicro": true, "Truncate": true, "UTC": true, "Local": true, "In": true, "AddDate": true}
	used := map[string]bool{}
	for _, folder := range []string{"tunnel", "tunnel/internal/poll", "tunnel/internal/relay", "sni", "connect", "connect/internal/mux", "connect/h2", "connect/h3", "connect/hbone", "connect/proxyproto", "connect/socks5", "connect/ssh", "connect/ws", "reverse", "nat",
		"internal/termination", "internal/udp", "registry", "registry/checks", "registry/file", "internal/filewatch", "registry/alloc", "internal/gateway", "internal/gateway/inbound", "internal/gateway/upstream", "internal/admin", "internal/metrics", "dns"} {
		files, err := filepath.Glob(filepath.Join("../..", folder, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no Go files in %s (%v)", folder, err)
		}
		for _, path := range files {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			fset := token.NewFileSet()
			file, err := parser.ParseFile(fset, path, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(file, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				sel, ok := call.Fun.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == "time" && len(call.Args) == 2 && isLiteral(call.Args[0]) {
					return true // time.Unix(1, 0): a fixed time in the past, to wake somebody
				}
				round := sel.Sel.Name == "Round" && len(call.Args) == 1 && isZero(call.Args[0])
				if !strips[sel.Sel.Name] && !round {
					return true
				}
				key := filepath.ToSlash(strings.TrimPrefix(path, "../../")) + " " + sel.Sel.Name
				used[key] = true
				if _, ok := allowed[key]; !ok {
					t.Errorf("%s: %s takes the monotonic clock off a time", fset.Position(call.Pos()), sel.Sel.Name)
				}
				return true
			})
		}
	}
	for key, why := range allowed {
		if !used[key] {
			t.Errorf("%s is allowed (%s) and not there any more", key, why)
		}
	}
}

func isLiteral(e ast.Expr) bool { _, ok := e.(*ast.BasicLit); return ok }

func isZero(e ast.Expr) bool { return isLiteral(e) && e.(*ast.BasicLit).Value == "0" }
