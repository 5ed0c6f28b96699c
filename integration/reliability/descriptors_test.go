//go:build linux

package reliability

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"culvert.dev/internal/testnet"
)

// With 256 descriptors and none left for clients, the tunnels that stand
// don't notice, new ones are told no at once, everything an operator needs
// works, and nothing spins.
func TestDescriptorsRunOut(t *testing.T) {
	const limit = 256
	for _, w := range []way{bySNI, byConnect} {
		t.Run(w.name, func(t *testing.T) {
			b := testnet.Echo(t)
			g := start(t, options{
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

			// One after the other: each hears no in its own words, at once.
			testnet.Eventually(t, patience, func() bool { return overloads() == 1 }, "the one that did not fit is counted")
			slowest := time.Duration(0)
			for i := range 20 {
				r := g.refused(w, 100+i, "echo.test")
				slowest = max(slowest, r.after)
				if r.code != w.code["overload"] {
					t.Errorf("a new connection got %v, want %d", r, w.code["overload"])
				}
			}
			t.Logf("refused within %v", slowest)
			if slowest > 10*time.Millisecond+50*time.Millisecond {
				t.Errorf("a refusal took %v, limit 10 ms", slowest)
			}
			testnet.Eventually(t, patience, func() bool { return overloads() == 21 }, "20 more are counted")
			works("after refusals")

			// All at once, and they stay: there are too few descriptors even
			// to be polite.
			var stay []net.Conn
			defer func() {
				for _, c := range stay {
					_ = c.Close()
				}
			}()
			for i := range 400 {
				if c, err := g.dial(200 + i%10); err == nil {
					stay = append(stay, c)
				}
			}
			works("while 400 connect and say nothing")
			for _, path := range []string{"/healthz", "/readyz", "/metrics", "/status"} {
				if status, _, err := g.get(path); err != nil || status != http.StatusOK {
					t.Errorf("%s without descriptors for clients: %d, %v", path, status, err)
				}
			}
			// Reload, at its loudest: no free descriptor but the reserve.
			g.write(g.yaml(service("echo.test", b.Addr()) + service("new.test", b.Addr())))
			testnet.Eventually(t, effect, func() bool {
				_, body, err := g.get("/explain?name=new.test")
				return err == nil && strings.Contains(body, `"service": "new.test"`)
			}, "a reload takes effect")

			// Clients keep trying, ten a second; that is no work.
			cpu, began := g.cpu(), time.Now()
			tick := time.NewTicker(100 * time.Millisecond)
			defer tick.Stop()
			for time.Since(began) < 1500*time.Millisecond {
				<-tick.C
				if c, err := g.dial(300); err == nil {
					_ = c.Close()
				}
			}
			used := g.cpu() - cpu
			share := 100 * used.Seconds() / time.Since(began).Seconds()
			t.Logf("%.1f %% of a core while clients keep trying", share)
			if share > 10 {
				t.Errorf("%.1f %% of a core while clients keep trying, limit 5 and some noise", share)
			}

			// Some close, and all is as before.
			for _, c := range stay {
				_ = c.Close()
			}
			for _, c := range conns[:10] {
				_ = c.Close()
			}
			conns = conns[10:]
			testnet.Eventually(t, time.Second, func() bool { return g.reaches(w, "echo.test") }, "new tunnels are served again")
			works("in the end")
		})
	}
}

// fill opens tunnels until the gateway refuses one.
func fill(t *testing.T, g *gateway, w way) []*net.TCPConn {
	t.Helper()
	var conns []*net.TCPConn
	for i := range 1000 {
		c := g.mustDial(i % 50)
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
	if share > 5 {
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
	if took := time.Since(back); took > time.Second+500*time.Millisecond {
		t.Errorf("back to normal after %v, limit 1 s", took)
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
	g := start(t, options{Services: service("echo.test", b.Addr()) + service("closed.test", closed)})
	ways := []way{bySNI, byConnect}
	live := func(i int) error {
		c, err := g.dial(i % 250)
		if err != nil {
			return err
		}
		defer c.Close()
		w := ways[i/6%2]
		switch i % 6 {
		case 0: // ends in order, client first
			if err := w.enter(c, "echo.test"); err != nil {
				return err
			}
			_ = c.CloseWrite()
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
			if i%12 == 3 {
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
		if n >= 500_000 {
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
	if n < 500_000 {
		return
	}
	// At first it rises to what the most at once ever were: pools, and the
	// runtime's own of goroutines. Of the second half, none may be left.
	per := func(of func(leftover) float64) float64 {
		return slope(looks[parts/2:], of) * parts / float64(n) * 10_000
	}
	heap, rss := per(func(l leftover) float64 { return l.heap }), per(func(l leftover) float64 { return l.rss })
	t.Logf("for 10,000 tunnels the heap rises by %.0f bytes and RSS by %.0f", heap, rss)
	if heap > 1<<10 {
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
