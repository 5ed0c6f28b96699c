//go:build unix

package interop

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"culvert.dev/internal/testnet"
)

// spellings are ways to say the loopback address, or this host, some of which
// some resolver takes.
var spellings = []string{
	"127.0.0.1", "127.0.0.2", "127.255.255.254", "localhost", "LOCALHOST", "localhost.", "localhost.localdomain", "ip6-localhost",
	"127.1", "127.0.1", "0177.0.0.1", "0x7f.0.0.1", "0x7f.1", "0x7f000001", "0x7F000001", "2130706433", "017700000001", "127.000.000.001",
	"127.0.0.1.", "127。0。0。1", "①②⑦.⓪.⓪.①", "0", "0.0.0.0", "00.0.0.0", "0x0", "000",
	"[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[0000::0001]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[::7f00:1]",
	"[::ffff:0:127.0.0.1]", "[64:ff9b::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]", "[2002:7f00:0001::1]",
	"[2001:0:7f00:1::]", "[2001:0:0:0:0:0:80ff:fffe]", "[fe80::1]", "[fe80::1%25lo]", "[fe80::1%lo]", "[::1%lo]", "::1", "[::1", "::1]", "[127.0.0.1]",
	"127.0.0.1%00", "127.0.0.1%2e", "%31%32%37.0.0.1", "127.0.0.1#", "127.0.0.1?", "a@127.0.0.1", "127.0.0.1\\", "127.0.0.1,svc.example.test",
	"169.254.169.254", "0xa9fea9fe", "2852039166", "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "metadata.google.internal", "100.100.100.200",
	"localtest.me", "127.0.0.1.nip.io", "localhost.example.test", "svc.example.test.localhost",
}

// targets makes n random destinations: names, addresses and ports that nobody
// has registered.
func targets(n int, port string) []string {
	r := rand.New(rand.NewPCG(2, 9))
	list := make([]string, 0, n)
	for _, s := range spellings {
		list = append(list, s+":"+port)
	}
	label := func() string {
		const bytes = "abcdefghijklmnopqrstuvwxyz0123456789-_"
		b := make([]byte, 1+r.IntN(20))
		for i := range b {
			b[i] = bytes[r.IntN(len(bytes))]
		}
		return string(b)
	}
	for len(list) < n {
		to := port
		if r.IntN(2) == 0 {
			to = fmt.Sprint(r.IntN(65536))
		}
		host := ""
		switch r.IntN(5) {
		case 0:
			host = label() + "." + label() + ".example"
		case 1: // beside what is registered
			host = label() + "." + svc
		case 2:
			host = fmt.Sprintf("127.%d.%d.%d", r.IntN(256), r.IntN(256), r.IntN(256))
		case 3:
			host = fmt.Sprintf("%d.%d.%d.%d", r.IntN(256), r.IntN(256), r.IntN(256), r.IntN(256))
		case 4:
			host = fmt.Sprintf("[%x:%x::%x]", r.IntN(65536), r.IntN(65536), r.IntN(65536))
		}
		list = append(list, host+":"+to)
	}
	return list
}

// With the default configuration and one route, a gateway reaches that route's
// service and nothing else, whatever is asked for and however it is spelled.
func TestTheGatewayIsNoOpenProxy(t *testing.T) {
	tap := testnet.NewTap(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(tap.Addr()))
	_, port, _ := net.SplitHostPort(tap.Addr())
	const n = 1000
	var refused atomic.Int32
	work := make(chan func())
	done := make(chan struct{})
	const workers = 4
	for range workers {
		go func() {
			defer func() { done <- struct{}{} }()
			for f := range work {
				f()
			}
		}()
	}
	for _, target := range targets(n, port) {
		work <- func() {
			a := exchange(t, g.addr, []byte("CONNECT "+target+" HTTP/1.1\r\nHost: a\r\n\r\n"))
			if status := string(a.data[:min(len(a.data), 10)]); status != "HTTP/1.1 4" {
				t.Errorf("CONNECT %q: got %.60q and %s, want 4xx", target, a.data, a.ending)
				return
			}
			refused.Add(1)
		}
		work <- func() {
			host, _, _ := strings.Cut(target, ":")
			a := exchange(t, g.addr, hello(host))
			if len(a.data) != 7 || a.data[0] != 21 {
				t.Errorf("a hello for %q: got % x and %s, want an alert", host, a.data, a.ending)
				return
			}
			refused.Add(1)
		}
	}
	close(work)
	for range workers {
		<-done
	}
	if refused.Load() != 2*n {
		t.Errorf("%d of %d were refused", refused.Load(), 2*n)
	}
	// The metrics know of a request once its line is written.
	g.await(t, "logged every refusal", func() bool { return strings.Count(g.output(), `"msg":"refused"`) == 2*n })
	if tap.Accepted() != 0 || g.dials(t) != 0 {
		t.Errorf("%d connections reached the service, %d were dialed, want 0", tap.Accepted(), g.dials(t))
	}
	// And the route itself works.
	exchangeWhole(t, g, tap)
	if tap.Accepted() != 1 || g.dials(t) != 1 {
		t.Errorf("the route: %d connections, %d dialed, want 1", tap.Accepted(), g.dials(t))
	}
}

// The admin port is not to be had through the gateway: not by address, not by
// a name of the host, not by a route, and not on a listener.
func TestTheAdminPortIsNotReachedThroughTheGateway(t *testing.T) {
	adminPort := freePort(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:"+adminPort,
		"--route", "admin.example.test=127.0.0.1:"+adminPort, "--route", "local.example.test=localhost:"+adminPort)
	for _, c := range []struct {
		host           string
		status, reason string
	}{
		{"127.0.0.1", "403", "prohibited"},
		{"[::1]", "403", "prohibited"},
		{"[::ffff:127.0.0.1]", "403", "prohibited"},
		{"localhost", "403", "no-route"},
		{"admin.example.test", "502", "prohibited"}, // a route, by mistake
		{"local.example.test", "502", "prohibited"},
	} {
		a := exchange(t, g.addr, []byte(connectTo(c.host+":"+adminPort)))
		l := g.outcome(t, a.source)
		if !strings.HasPrefix(string(a.data), "HTTP/1.1 "+c.status+" ") || l.Reason != c.reason {
			t.Errorf("CONNECT %s: got %.80q and reason %q, want %s and %q", c.host, a.data, l.Reason, c.status, c.reason)
		}
		if strings.HasSuffix(c.host, ".test") {
			a := exchange(t, g.addr, hello(c.host))
			if want := alert(49); string(a.data) != string(want) {
				t.Errorf("a hello for %s: got % x, want % x", c.host, a.data, want)
			}
		}
	}
	// The listener itself serves none of its pages.
	for _, path := range []string{"/metrics", "/healthz", "/readyz", "/status", "/explain?name=a", "/debug/pprof/"} {
		a := exchange(t, g.addr, []byte("GET "+path+" HTTP/1.1\r\nHost: localhost\r\n\r\n"))
		if !strings.HasPrefix(string(a.data), "HTTP/1.1 405 ") {
			t.Errorf("GET %s: got %.80q, want 405", path, a.data)
		}
		if _, err := g.get(path); err != nil {
			t.Errorf("on the admin port: %v", err)
		}
	}
	// A page of another site that has its name point here is turned away.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+g.admin+"/status", nil)
	must(t, err)
	req.Host = "attacker.example.org"
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	must(t, err)
	defer resp.Body.Close()
	if body, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusMisdirectedRequest {
		t.Errorf("asked as attacker.example.org: got %s %q, want 421", resp.Status, body)
	}
}
