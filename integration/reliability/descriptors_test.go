//go:build linux

package reliability

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// With 256 descriptors and none left for clients, the tunnels that stand
// don't notice, new ones are told no at once, everything an operator needs
// works, certificates and the configuration are read again, and nothing spins.
func TestDescriptorsRunOut(t *testing.T) {
	const limit = 256
	ca, err := testca.New("example.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []way{bySNI, byConnect} {
		t.Run(w.name, func(t *testing.T) {
			b := testnet.Echo(t)
			keys := filepath.Join(t.TempDir(), "keys")
			pair := renew(t, ca, keys)
			g := start(t, options{
				Listener: fmt.Sprintf(", protocols: [sni, connect], tls: {certificateFile: %[1]s/gw.crt, keyFile: %[1]s/gw.key}", keys),
				Services: service("echo.test", b.Addr()),
				Wrap:     []string{"sh", "-c", fmt.Sprintf(`ulimit -n %d; exec "$0" "$@"`, limit)},
			})
			conns := fill(t, g, w)
			t.Logf("%d tunnels with %d descriptors", len(conns), limit)
			if len(conns) < 50 {
				t.Errorf("%d descriptors carry %d tunnels, want at least 50", limit, len(conns))
			}
			works := func(when string) {
				t.Helper()
				for i, c := range conns {
					if err := echo(c, "still here"); err != nil {
						t.Errorf("%s: tunnel %d of %d: %v", when, i, len(conns), err)
					}
				}
			}
			overloads := func() float64 {
				m := g.metrics()
				return sum(m, "culvert_requests_total", `reason="overload"`) + sum(m, "culvert_connections_refused_total", `reason="overload"`)
			}
			// refusals asks for tunnels, and each is told no with code, or by a
			// reset where that is 0, at once.
			refusals := func(when string, code int) {
				t.Helper()
				const n = 100
				was := overloads()
				took := make([]time.Duration, n)
				for i := range took {
					began, r := time.Now(), refusal{end: testnet.RST}
					if c, err := g.dial(100 + i); err == nil {
						r = request(c, w.preamble("echo.test"))
					} else if !errors.Is(err, syscall.ECONNRESET) { // refused as it came
						t.Fatal(err)
					}
					if took[i] = time.Since(began); r.code != code || code == 0 && r.end != testnet.RST {
						t.Fatalf("%s: a new connection got %v, want %d", when, r, code)
					}
				}
				t.Logf("%s: refused within %v, nine of ten within %v", when, percentile(took, 100), percentile(took, 90))
				if p90 := percentile(took, 90); testnet.Measuring && p90 > 10*time.Millisecond { // a busy machine may keep the others waiting
					t.Errorf("%s: one of ten refusals took %v and more, limit 10 ms", when, p90)
				}
				testnet.Eventually(t, patience, func() bool { return overloads() == was+n }, "%s: %d more are counted", when, n)
			}

			// One after the other: each hears no in its own words.
			testnet.Eventually(t, patience, func() bool { return overloads() == 1 }, "the one that did not fit is counted")
			refusals("no room for tunnels", w.code["overload"])
			works("after refusals")
			if shown := g.shows(ca, "own.test"); !shown.Equal(pair.TLS.Leaf) {
				t.Error("TLS that ends here, without room for a tunnel: not the certificate there is")
			}

			// All at once, and they stay: there are too few descriptors even
			// to be polite.
			var stay many
			defer stay.close()
			g.crowdOut(&stay)
			refusals("no room at all", 0)
			works("while the rest is taken by those who do not finish")
			for _, path := range []string{"/healthz", "/readyz", "/metrics", "/status"} {
				if status, _, err := g.get(path); err != nil || status != http.StatusOK {
					t.Errorf("%s without descriptors for clients: %d, %v", path, status, err)
				}
			}
			// Certificates and the configuration, at its loudest: no free
			// descriptor but the reserve.
			for _, reload := range []struct {
				what string
				do   func()
				done func() bool
			}{
				{"certificates", func() { pair = renew(t, ca, keys) }, func() bool { return g.metric("culvert_config_reloads_total") > 0 }},
				{"configuration", func() { g.write(g.yaml(service("echo.test", b.Addr()) + service("new.test", b.Addr()))) }, func() bool {
					_, body, err := g.get("/explain?name=new.test")
					return err == nil && strings.Contains(body, `"service": "new.test"`)
				}},
			} {
				g.crowdOut(&stay)
				reload.do()
				testnet.Eventually(t, effect, reload.done, "the %s are read again and take effect", reload.what)
				if m := g.metrics(); sum(m, "culvert_descriptors_used") < sum(m, "culvert_descriptors_limit") {
					t.Errorf("descriptors came free while the %s were read again: the test shows nothing", reload.what)
				}
			}
			if n := g.metric("culvert_config_reload_failures_total"); n > 0 {
				t.Errorf("%v reloads failed", n)
			}

			// Clients keep trying, ten a second; that is no work. A collection of
			// garbage may be, so the least of three counts.
			share := 100.0
			for i := 0; i < 3 && share > 5 && (i == 0 || testnet.Measuring); i++ {
				share = min(share, g.busyWhile(1500*time.Millisecond, func() {
					if c, err := g.dial(300); err == nil {
						_ = c.Close()
					}
				}))
			}
			t.Logf("%.1f %% of a core while clients keep trying", share)
			if testnet.Measuring && share > 5 {
				t.Errorf("%.1f %% of a core while clients keep trying, limit 5", share)
			}

			// There is room again to say no, and to show the new certificate.
			stay.close()
			g.roomAgain()
			if shown := g.shows(ca, "own.test"); !shown.Equal(pair.TLS.Leaf) {
				t.Error("TLS that ends here shows the certificate from before it was renewed")
			}

			// Some close, and all is as before.
			for _, c := range conns[:10] {
				_ = c.Close()
			}
			conns = conns[10:]
			testnet.Eventually(t, effect, func() bool { return g.reaches(w, "echo.test") && g.reaches(w, "new.test") }, "new tunnels are served again")
			works("in the end")
		})
	}
}

// renew makes a certificate for own.test and has the symbolic link at now lead to
// it and its key, both at once: as the kubelet does with a Secret.
func renew(t *testing.T, ca *testca.CA, now string) *testca.Pair {
	t.Helper()
	dir, next := t.TempDir(), now+".next"
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/gw", DNSNames: []string{"own.test"}, Usage: testca.ServerOnly})
	if err == nil {
		err = errors.Join(pair.Save(dir, "gw"), os.Symlink(dir, next), os.Rename(next, now))
	}
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// shows returns the certificate that a client of TLS for name is shown. There is
// no room for a tunnel, which it is told inside.
func (g *gateway) shows(ca *testca.CA, name string) *x509.Certificate {
	g.t.Helper()
	c := tls.Client(g.mustDial(302), &tls.Config{RootCAs: ca.Pool(), ServerName: name})
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if err := c.HandshakeContext(g.t.Context()); err != nil {
		g.t.Fatalf("TLS that ends here: %v", err)
	}
	if r := request(c, byConnect.preamble("echo.test")); r.code != byConnect.code["overload"] {
		g.t.Errorf("inside of TLS that ends here: %v, want %d", r, byConnect.code["overload"])
	}
	return c.ConnectionState().PeerCertificates[0]
}

// crowdOut has clients take every descriptor that the tunnels leave, by preambles
// that they begin and do not finish. It lasts for 5 seconds, and those of before
// make room first.
func (g *gateway) crowdOut(stay *many) {
	g.t.Helper()
	stay.close()
	g.roomAgain()
	testnet.Eventually(g.t, patience, func() bool {
		for i := range 40 {
			if c, err := g.dial(200 + i); err == nil {
				_, _ = c.Write(bySNI.preamble("echo.test")[:10])
				stay.add(c)
			}
		}
		m := g.metrics()
		return sum(m, "culvert_descriptors_used") >= sum(m, "culvert_descriptors_limit")
	}, "every descriptor for clients is taken")
}

// roomAgain waits until tunnels have two descriptors each, and nothing else has
// any but the listeners, of which there are fewer than ten.
func (g *gateway) roomAgain() {
	g.t.Helper()
	testnet.Eventually(g.t, patience, func() bool {
		m := g.metrics()
		return sum(m, "culvert_descriptors_used") < 2*sum(m, "culvert_tunnels_open")+10
	}, "only tunnels and listeners hold descriptors")
}

// busyWhile returns how much of a core the gateway takes, in percent, while f is
// called ten times a second.
func (g *gateway) busyWhile(d time.Duration, f func()) float64 {
	g.t.Helper()
	cpu, began := g.cpu(), time.Now()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for time.Since(began) < d {
		<-tick.C
		f()
	}
	return 100 * (g.cpu() - cpu).Seconds() / time.Since(began).Seconds()
}

// fill opens tunnels until the gateway refuses one, each from an address of its
// own: one with a share of its own is refused when there is nothing left.
func fill(t *testing.T, g *gateway, w way) []*net.TCPConn {
	t.Helper()
	var conns []*net.TCPConn
	for i := range 1000 {
		c := g.mustDial(1000 + i)
		if err := w.enter(c, "echo.test"); err != nil {
			_ = c.Close()
			return conns
		}
		conns = append(conns, c)
	}
	t.Fatal("the gateway never refused")
	return nil
}

// Even where the kernel refuses a descriptor to accept with, which the
// gateway's own accounts are there to prevent, accepting waits and does not
// spin, and comes back by itself.
func TestAcceptErrorsDoNotSpin(t *testing.T) {
	b := testnet.Echo(t)
	g := start(t, options{Services: service("echo.test", b.Addr())})
	c := g.tunnel(bySNI, 1, "echo.test")
	var was syscall.Rlimit
	if err := prlimit(g.cmd.Process.Pid, nil, &was); err != nil {
		t.Fatal(err)
	}
	if err := prlimit(g.cmd.Process.Pid, &syscall.Rlimit{Cur: 1, Max: was.Max}, nil); err != nil {
		t.Fatal(err)
	}
	var waiting []*net.TCPConn // in the kernel's queue
	for i := range 20 {
		waiting = append(waiting, g.mustDial(i))
	}
	cpu, began := g.cpu(), time.Now()
	if err := echo(c, "still here"); err != nil {
		t.Errorf("the tunnel that stood: %v", err)
	}
	pause(t.Context(), 1500*time.Millisecond)
	share := 100 * (g.cpu() - cpu).Seconds() / time.Since(began).Seconds()
	t.Logf("%.1f %% of a core while accept fails", share)
	if testnet.Measuring && share > 5 {
		t.Errorf("%.1f %% of a core while accept fails, limit 5", share)
	}
	if n := len(g.entries(func(e entry) bool { return strings.HasPrefix(e.str("msg"), "accept failed") })); n == 0 || n > 20 {
		t.Errorf("%d lines in the log about it, want a few", n)
	}
	if err := prlimit(g.cmd.Process.Pid, &was, nil); err != nil {
		t.Fatal(err)
	}
	back := time.Now()
	for i, c := range waiting {
		if err := bySNI.enter(c, "echo.test"); err != nil {
			t.Errorf("connection %d that waited: %v", i, err)
		}
	}
	if took, limit := time.Since(back), testnet.Deadline(1500*time.Millisecond); took > limit {
		t.Errorf("back to normal after %v, want at most %v", took, limit)
	}
}

// prlimit sets and reads another process's limit on descriptors.
func prlimit(pid int, set, get *syscall.Rlimit) error {
	const nofile = 7
	_, _, errno := syscall.RawSyscall6(syscall.SYS_PRLIMIT64, uintptr(pid), nofile,
		uintptr(unsafe.Pointer(set)), uintptr(unsafe.Pointer(get)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// Short tunnels of every fate leave nothing behind, and with a million of them
// ("make soak") it can be told a leak from noise: what is in use after each
// tenth must not rise.
func TestShortTunnelsLeaveNothing(t *testing.T) {
	const warm = 5_000
	n := *shortTunnels - warm
	b := testnet.Echo(t)
	closed := closedPort(t, 1)
	abrupt := testnet.Serve(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 1))
		_ = testnet.Abort(c)
	})
	g := start(t, options{Services: service("echo.test", b.Addr()) + service("closed.test", closed) + service("abrupt.test", abrupt.Addr())})
	ways := []way{bySNI, byConnect}
	live := func(i int) error {
		c, err := g.dial(i % 250)
		if err != nil {
			return err
		}
		defer c.Close()
		w := ways[i/7%2]
		switch i % 7 {
		case 0: // ends in order, client first
			if err := w.enter(c, "echo.test"); err != nil {
				return err
			}
			_ = c.CloseWrite()
			_ = c.SetReadDeadline(time.Now().Add(patience))
			_, err = io.Copy(io.Discard, c)
			return err
		case 1: // aborted
			if err := w.enter(c, "echo.test"); err != nil {
				return err
			}
			return testnet.Abort(c)
		case 2: // refused
			if r := request(c, w.preamble("nobody.test")); r.code != w.code["no-route"] {
				return fmt.Errorf("an unknown name got %v", r)
			}
		case 3: // half a preamble
			_, err = c.Write(w.preamble("echo.test")[:20])
			if i%14 == 3 {
				_ = testnet.Abort(c)
			}
			return err
		case 4: // the service refuses
			if r := request(c, w.preamble("closed.test")); r.code != w.code["dial-failed"] {
				return fmt.Errorf("a closed port got %v", r)
			}
		case 5: // aborted before the answer
			if _, err := c.Write(w.preamble("echo.test")); err != nil {
				return err
			}
			return testnet.Abort(c)
		case 6: // aborted by the service
			if _, err := c.Write(append(w.preamble("abrupt.test"), 'x')); err != nil {
				return err
			}
			_ = c.SetReadDeadline(time.Now().Add(patience))
			if _, err := io.Copy(io.Discard, c); !wasReset(err) {
				return fmt.Errorf("a service that aborts: the client's stream ended with %v", err)
			}
		}
		return nil
	}
	look := func() (l leftover) {
		testnet.Eventually(t, patience, func() bool {
			m := g.metrics()
			return sum(m, "culvert_tunnels_open") == 0 && sum(m, "culvert_descriptors_used") <= 2
		}, "nothing is open")
		// What a collection finds in use may have been for a moment only, such as
		// that for an answer of the admin port: the least of three counts.
		for range 3 {
			g.collectGarbage()
			m := g.metrics()
			if heap := sum(m, "go_gc_heap_live_bytes"); l.heap == 0 || heap < l.heap {
				l = leftover{float64(g.descriptors()), sum(m, "go_goroutines"), heap, float64(g.rss())}
			}
		}
		return l
	}
	crowd(t, warm, 32, live)
	const parts = 10
	looks := []leftover{look()}
	began := time.Now()
	for part := range parts {
		from, to := n*part/parts, n*(part+1)/parts
		crowd(t, to-from, 32, func(i int) error { return live(from + i) })
		looks = append(looks, look())
		if n >= 100_000 {
			t.Logf("%d tunnels in %v: %v", to, time.Since(began).Round(time.Second), looks[part+1])
		}
	}
	took := time.Since(began)
	before, after := looks[0], looks[parts]
	t.Logf("%d short tunnels in %v; at first %v; in the end %v", n, took.Round(time.Millisecond), before, after)
	if after.descriptors > before.descriptors+2 {
		t.Errorf("descriptors went from %v to %v", before.descriptors, after.descriptors)
	}
	if after.goroutines > before.goroutines+5 {
		t.Errorf("goroutines went from %v to %v", before.goroutines, after.goroutines)
	}
	// A leak of the least there is, 16 bytes, would be 234 KiB of the 15,000.
	if after.heap > before.heap+128<<10 {
		t.Errorf("the heap went from %.0f bytes to %.0f", before.heap, after.heap)
	}
	if after.rss > before.rss+4<<20 {
		t.Errorf("RSS went from %.0f to %.0f", before.rss, after.rss)
	}
	// At first it rises to what the most at once ever were: pools, and the
	// runtime's own of goroutines. Of the second half, none may be left. RSS
	// goes up and down with what the runtime keeps for later, by more than the
	// limit that a slope is held to: it is shown, and was held to a sum above.
	per := func(of func(leftover) float64) float64 {
		return slope(looks[parts/2:], of) * parts / float64(n) * 10_000
	}
	heap, rss := per(func(l leftover) float64 { return l.heap }), per(func(l leftover) float64 { return l.rss })
	t.Logf("for 10,000 tunnels of the second half the heap rises by %.0f bytes and RSS by %.0f", heap, rss)
	// In fewer, what a collection happens to find is more than that.
	if heap > 1<<10 && n >= 500_000 {
		t.Errorf("the heap rises by %.0f bytes for 10,000 tunnels, limit 1,024", heap)
	}
}

// A leftover is what the gateway holds when nothing is open.
type leftover struct {
	descriptors, goroutines float64
	heap, rss               float64 // bytes
}

func (l leftover) String() string {
	return fmt.Sprintf("%.0f descriptors, %.0f goroutines, heap %.1f KiB, RSS %.0f KiB", l.descriptors, l.goroutines, l.heap/1024, l.rss/1024)
}

// slope is by how much a value rises from one look to the next, by least
// squares.
func slope(looks []leftover, of func(leftover) float64) float64 {
	n := float64(len(looks))
	var x, y, xx, xy float64
	for i, l := range looks {
		fi, v := float64(i), of(l)
		x, y, xx, xy = x+fi, y+v, xx+fi*fi, xy+fi*v
	}
	return (n*xy - x*y) / (n*xx - x*x)
}

// closedPort returns the n-th address at which nobody listens.
func closedPort(t *testing.T, n int) string {
	t.Helper()
	// Below the ports that the system gives to clients, so nobody gets it.
	addr := fmt.Sprintf("127.0.0.%d:7", n)
	if c, err := net.Dial("tcp", addr); err == nil {
		_ = c.Close()
		t.Fatalf("somebody listens at %s", addr)
	} else if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatal(err)
	}
	return addr
}
