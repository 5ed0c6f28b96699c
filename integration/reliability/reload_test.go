//go:build linux

package reliability

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// A reload takes effect, for good and for bad, within a second.
var effect = testnet.Deadline(time.Second)

// Twenty reloads in ten seconds, half of them by a file that is renamed into
// place and half by one that is rewritten and a SIGHUP: no tunnel notices, no
// new connection fails, and what each reload gives and takes holds within a
// second.
func TestReloadsAreNotNoticed(t *testing.T) {
	const (
		reloads = 20
		every   = 500 * time.Millisecond
		held    = 500
		fresh   = 2000
	)
	b := testnet.Echo(t)
	private := testnet.Discard(t) // behind flip.test only while that is not exposed
	table := func(n int) string {
		s := service("echo.test", b.Addr()) + service(fmt.Sprintf("g%d.test", n), b.Addr())
		if n%2 == 0 {
			return s + service("flip.test", b.Addr())
		}
		return s + fmt.Sprintf("  - {name: flip.test, exposed: false, endpoints: [\"%s\"]}\n", private.Addr())
	}
	g := start(t, options{Services: table(0)})
	ways := []way{bySNI, byConnect}

	conns := make([]*net.TCPConn, held)
	crowd(t, held, 8, func(i int) error {
		c, err := g.dial(i % 50)
		if err != nil {
			return err
		}
		conns[i] = c
		return ways[i%2].enter(c, "echo.test")
	})
	for _, c := range conns {
		defer c.Close()
	}
	if t.Failed() {
		t.FailNow()
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	// The tunnels that stand say something once a second or so.
	for part := range 4 {
		wg.Go(func() {
			for round := 0; ctx.Err() == nil; round++ {
				for i := part; i < held && ctx.Err() == nil; i += 4 {
					if err := echo(conns[i], "still here"); err != nil {
						t.Errorf("tunnel %d, round %d: %v", i, round, err)
						return
					}
				}
				pause(ctx, every)
			}
		})
	}
	// New ones come all the time, and one of them always asks for the service
	// that is exposed at one place and private at another: a decision made of
	// two tables would take it to the private one.
	var opened, flips atomic.Int64
	for w := range 4 {
		wg.Go(func() {
			tick := time.NewTicker(reloads * every * 4 / fresh)
			defer tick.Stop()
			for i := w; i < fresh; i += 4 {
				c, err := g.dial(100 + i%50)
				if err == nil {
					err = ways[i/4%2].enter(c, "echo.test")
					_ = c.Close()
				}
				if err != nil {
					t.Errorf("new connection %d: %v", i, err)
				}
				opened.Add(1)
				c, err = g.dial(200 + i%50)
				if err == nil {
					if ways[i/4%2].enter(c, "flip.test") == nil {
						flips.Add(1)
					}
					_ = c.Close()
				}
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}
			}
		})
	}

	pid := g.cmd.Process.Pid
	live := func() int64 { return int64(g.metric("go_gc_heap_live_bytes")) }
	var rss, heap int64
	var slowest time.Duration
	tick := time.NewTicker(every)
	defer tick.Stop()
	for n := 1; n <= reloads; n++ {
		<-tick.C
		began := time.Now()
		if n%2 == 0 {
			g.write(g.yaml(table(n)))
		} else {
			if err := os.WriteFile(g.config, []byte(g.yaml(table(n))), 0o600); err != nil {
				t.Fatal(err)
			}
			g.signal(syscall.SIGHUP)
		}
		w := ways[n%2]
		added, removed := fmt.Sprintf("g%d.test", n), fmt.Sprintf("g%d.test", n-1)
		testnet.Eventually(t, patience, func() bool { return g.reaches(w, added) && !g.reaches(w, removed) },
			"reload %d: %s is served and %s refused", n, added, removed)
		slowest = max(slowest, time.Since(began))
		if n == 4 { // the heap has its working size by then
			g.collectGarbage()
			rss, heap = g.rss(), live()
		}
	}
	g.collectGarbage()
	grew, kept := g.rss()-rss, live()-heap
	for opened.Load() < fresh && !t.Failed() {
		pause(ctx, every)
	}
	cancel()
	wg.Wait()

	t.Logf("%d reloads, the slowest took effect after %v; RSS %d KiB, %+d KiB since the fourth, live %d KiB, %+d KiB; %d new connections, flip.test reached by %d more",
		reloads, slowest.Round(time.Millisecond), rss>>10, grew>>10, heap>>10, kept>>10, opened.Load(), flips.Load())
	if slowest > effect {
		t.Errorf("a reload took effect after %v, limit %v", slowest, effect)
	}
	if grew > rss/reloadGrowth {
		t.Errorf("%d reloads made the gateway grow from %d by %d bytes, limit %d", reloads-4, rss, grew, rss/reloadGrowth)
	}
	if kept > heap/4 {
		t.Errorf("%d reloads made the live heap grow from %d by %d bytes, limit %d", reloads-4, heap, kept, heap/4)
	}
	if n := private.Accepted(); n != 0 {
		t.Errorf("the private endpoint was dialed %d times: a decision was made of two tables", n)
	}
	if got := g.metric("culvert_config_reloads_total"); got < reloads {
		t.Errorf("culvert_config_reloads_total = %v, want at least %d", got, reloads)
	}
	g.alive()
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		t.Fatal(err)
	}
	if s := strings.TrimSpace(string(children)); s != "" {
		t.Errorf("the gateway has child processes: %s", s)
	}
}

// reaches reports whether target, an echo, is served by way w at this moment.
func (g *gateway) reaches(w way, target string) bool {
	g.t.Helper()
	c, err := g.dial(250)
	if errors.Is(err, syscall.ECONNRESET) {
		return false // refused as it came
	} else if err != nil {
		g.t.Fatalf("dial: %v", err)
	}
	defer c.Close()
	return w.enter(c, target) == nil
}

// pause waits for d, or for the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// A table of 10,000 services takes effect as fast, and so does taking one away.
func TestLargeTableTakesEffectInASecond(t *testing.T) {
	b := testnet.Echo(t)
	var many strings.Builder
	for i := range 10_000 {
		many.WriteString(service(fmt.Sprintf("s%d.test", i), b.Addr()))
	}
	g := start(t, options{Services: service("echo.test", b.Addr())})
	var times []time.Duration
	change := func(services, appears, disappears string) {
		t.Helper()
		began := time.Now()
		g.write(g.yaml(services))
		testnet.Eventually(t, patience, func() bool { return g.reaches(bySNI, appears) && !g.reaches(bySNI, disappears) },
			"%s is served and %s is not", appears, disappears)
		took := time.Since(began)
		times = append(times, took.Round(time.Millisecond))
		if took > effect {
			t.Errorf("with 10,000 services: %s instead of %s after %v, limit %v", appears, disappears, took, effect)
		}
	}
	change(many.String()+service("one.test", b.Addr()), "s9999.test", "echo.test")
	change(many.String()+service("two.test", b.Addr()), "two.test", "one.test")
	change(service("echo.test", b.Addr()), "echo.test", "s0.test")
	t.Logf("10,000 services come after %v, change after %v and go after %v", times[0], times[1], times[2])
}

// A file with a mistake changes nothing, and the log says where the mistake is.
func TestBadFileChangesNothing(t *testing.T) {
	b := testnet.Echo(t)
	g := start(t, options{Services: service("echo.test", b.Addr())})
	c := g.tunnel(bySNI, 1, "echo.test")
	generation := g.metric("culvert_registry_generation")
	refusals := 0.0
	for _, tt := range []struct{ name, yaml, where string }{
		{"an unknown key", strings.Replace(g.yaml(service("new.test", b.Addr())), "name:", "nmae:", 1), ":7:6: "},
		{"no YAML", g.yaml(service("new.test", b.Addr())) + "\t- x", ":8:2: "},
		{"a bad endpoint", g.yaml(service("new.test", "127.0.0.1:99999")), ":7:36: "},
		{"the same name twice", g.yaml(service("new.test", b.Addr()) + service("new.test", b.Addr())), ":8:12: "},
		{"nothing", "", ":1:1: "},
	} {
		g.write(tt.yaml)
		g.signal(syscall.SIGHUP)
		refusals++
		testnet.Eventually(t, patience, func() bool { return g.metric("culvert_config_reload_failures_total") >= refusals },
			"%s: the failed reload is counted", tt.name)
		refusals = g.metric("culvert_config_reload_failures_total")
		var es []entry
		testnet.Eventually(t, patience, func() bool {
			es = g.entries(func(e entry) bool { return strings.HasPrefix(e.str("msg"), "configuration refused") })
			return len(es) > 0
		}, "%s: it is in the log", tt.name)
		if err := es[len(es)-1].str("err"); !strings.Contains(err, g.config+tt.where) {
			t.Errorf("%s: the log says %q, want the place %q in it", tt.name, err, tt.where)
		}
		if !g.reaches(bySNI, "echo.test") || !g.reaches(byConnect, "echo.test") || g.reaches(bySNI, "new.test") {
			t.Errorf("%s: the table has changed", tt.name)
		}
		if err := echo(c, "x"); err != nil {
			t.Errorf("%s: the tunnel that stood: %v", tt.name, err)
		}
	}
	if err := os.Remove(g.config); err != nil {
		t.Fatal(err)
	}
	g.signal(syscall.SIGHUP)
	testnet.Eventually(t, patience, func() bool { return g.metric("culvert_config_reload_failures_total") > refusals },
		"a file that is gone is counted")
	if !g.reaches(bySNI, "echo.test") {
		t.Error("with the file gone, what it said is gone too")
	}
	if got := g.metric("culvert_registry_generation"); got != generation {
		t.Errorf("the generation went from %v to %v", generation, got)
	}
	// And the next good one is taken up as if nothing had been.
	g.write(g.yaml(service("new.test", b.Addr())))
	testnet.Eventually(t, patience, func() bool { return g.reaches(bySNI, "new.test") }, "the next good file is taken up")
}
