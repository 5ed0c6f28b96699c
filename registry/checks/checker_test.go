package checks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

var errRefused = errors.New("connection refused")

// A world is what a Checker sees: addresses, each with what dialing it comes to.
type world struct {
	t        *testing.T
	registry *registry.Registry
	checker  *Checker
	log      bytes.Buffer

	mu    sync.Mutex     // guards what follows
	fate  map[string]any // of an address: an error, a duration without an answer, or nil
	dials map[string]int
	named map[string]bool
	open  int
	most  int // open at once
	dns   map[string]string
	asked map[string]int // names
}

func (w *world) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.Write(p)
}

// logged counts lines with a text.
func (w *world) logged(text string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Count(w.log.String(), text)
}

func (w *world) set(addr string, fate any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fate[addr] = fate
}

// dialed returns how often an address was, since it was last asked for.
func (w *world) dialed(addr string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.dials[addr]
	delete(w.dials, addr)
	return n
}

func (w *world) isNamed(addr string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.named[addr]
}

func (w *world) dial(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
	return w.dialKey(ctx, ep.Addr.String(), ep.Named)
}

// dialKey dials an address, or what a gateway is asked for.
func (w *world) dialKey(ctx context.Context, addr string, named bool) (net.Conn, error) {
	w.mu.Lock()
	w.open++
	w.most = max(w.most, w.open)
	w.dials[addr]++
	w.named[addr] = named
	fate := w.fate[addr]
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.open--
	}()
	switch fate := fate.(type) {
	case string:
		panic(fate)
	case error:
		return nil, fate
	case time.Duration:
		select {
		case <-time.After(fate):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	here, there := net.Pipe()
	_ = there.Close()
	return here, nil
}

func (w *world) lookup(_ context.Context, host string) ([]netip.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked[host]++
	text, ok := w.dns[host]
	if !ok {
		return nil, errors.New("no such host")
	}
	var addrs []netip.Addr
	for a := range strings.FieldsSeq(text) {
		addrs = append(addrs, netip.MustParseAddr(a))
	}
	return addrs, nil
}

func (w *world) down(addr string) bool {
	return !w.registry.Healthy(netip.MustParseAddrPort(addr))
}

// swap makes the table one of these services.
func (w *world) swap(snapshot registry.Snapshot) {
	w.t.Helper()
	t, err := w.registry.Mesh.Merge(snapshot)
	if err != nil {
		w.t.Fatal(err)
	}
	w.registry.Swap(t)
}

func service(name string, check registry.Check, endpoints ...string) *registry.Service {
	p, err := tunnel.ParsePattern(name)
	if err != nil {
		panic(err)
	}
	s := &registry.Service{Name: name, Names: []tunnel.Pattern{p}, Exposed: true, Check: check, Origin: name}
	for _, e := range endpoints {
		host, port, _ := strings.Cut(e, "/")
		ep := registry.Endpoint{Host: host}
		if a, err := netip.ParseAddr(host); err == nil {
			ep = registry.Endpoint{Addr: a}
		}
		_, _ = fmt.Sscan(port, &ep.Port)
		s.Endpoints = append(s.Endpoints, ep)
	}
	return s
}

// within runs a Checker in a bubble, where time is what it is told.
func within(t *testing.T, mesh registry.Mesh, f func(*world)) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{
			t: t, registry: &registry.Registry{Mesh: mesh},
			fate: map[string]any{}, dials: map[string]int{}, named: map[string]bool{}, dns: map[string]string{}, asked: map[string]int{},
		}
		w.checker = &Checker{Registry: w.registry, Dial: w.dial, Lookup: w.lookup, Budget: &tunnel.Budget{Limit: 1000}, Log: slog.New(slog.NewTextHandler(w, nil))}
		w.registry.OnTable = w.checker.Changed
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- w.checker.Run(ctx) }()
		f(w)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

var tcp = registry.Check{Kind: "tcp"}

// after lets time pass, and what is due at its end.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// What dies is down within one interval, one lost packet is nothing, and two
// answers in a row bring it back. The log says each of it once.
func TestDownAndBack(t *testing.T) {
	within(t, registry.Mesh{}, func(w *world) {
		const ap = "192.0.2.1:443"
		w.swap(registry.Snapshot{Services: []*registry.Service{service("a.test", tcp, "192.0.2.1/443")}})
		after(time.Second + time.Millisecond)
		if n := w.dialed(ap); n != 1 && n != 2 || !w.isNamed(ap) {
			t.Errorf("%d dials in the first second, named %t; want 1 or 2, and named", n, w.isNamed(ap))
		}
		if got, want := w.checker.Counts(), int64(1); got.Up != want || got.Down != 0 {
			t.Errorf("%+v, want one up", got)
		}
		after(10 * time.Second)
		if n := w.dialed(ap); n != 10 {
			t.Errorf("%d dials in 10 s, want 10", n)
		}
		// Refused: it is tried at once again.
		w.set(ap, errRefused)
		after(time.Second)
		if n := w.dialed(ap); !w.down(ap) || n != 2 {
			t.Errorf("down %t with %d dials one interval after it died, want true with 2", w.down(ap), n)
		}
		after(10 * time.Second)
		if n := w.dialed(ap); n != 10 {
			t.Errorf("%d dials in 10 s of what is down, want 10", n)
		}
		w.set(ap, nil)
		after(time.Second)
		if !w.down(ap) {
			t.Error("back after one answer, want two")
		}
		w.set(ap, errRefused)
		after(time.Second)
		w.set(ap, nil)
		after(time.Second)
		if !w.down(ap) {
			t.Error("back after two answers that were not in a row")
		}
		after(time.Second)
		if w.down(ap) {
			t.Error("down after two answers in a row")
		}
		if d, b := w.logged("endpoint is unhealthy"), w.logged("endpoint is healthy again"); d != 1 || b != 1 {
			t.Errorf("the log says %d times down and %d times back, want once each:\n%s", d, b, w.log.String())
		}
		// Silence: two tries have the time of one interval.
		w.set(ap, time.Hour)
		after(2 * time.Second)
		if !w.down(ap) || w.dialed(ap) == 0 {
			t.Error("not down one interval after the first probe without an answer")
		}
		if got := w.registry.Health()[0]; got.State != registry.StateDown || !errors.Is(got.Err, context.DeadlineExceeded) {
			t.Errorf("health %+v, want down by a deadline", got)
		}
	})
}

// Thresholds count probes in a row, and one result the other way starts the count
// again.
func TestThresholds(t *testing.T) {
	for _, row := range []struct {
		unhealthy, healthy int
		down, up           int // probes until the verdict changes
	}{
		{1, 1, 1, 1}, {0, 0, 2, 2}, {2, 1, 2, 1}, {3, 2, 3, 2}, {5, 4, 5, 4},
	} {
		within(t, registry.Mesh{}, func(w *world) {
			const ap = "192.0.2.1:443"
			check := registry.Check{Kind: "tcp", HealthyThreshold: row.healthy, UnhealthyThreshold: row.unhealthy}
			w.swap(registry.Snapshot{Services: []*registry.Service{service("a.test", check, "192.0.2.1/443")}})
			after(5 * time.Second)
			w.dialed(ap)
			probesUntil := func(down bool) (probes int) {
				for range 100 {
					if w.down(ap) == down {
						return probes
					}
					after(time.Second)
					probes += w.dialed(ap)
				}
				t.Fatalf("thresholds %d and %d: down is not %t after %d probes", row.unhealthy, row.healthy, down, probes)
				return 0
			}
			for range 2 { // again after it came back
				w.set(ap, errRefused)
				if got := probesUntil(true); got != row.down {
					t.Errorf("unhealthyThreshold %d: down after %d probes, want %d", row.unhealthy, got, row.down)
				}
				w.set(ap, nil)
				if got := probesUntil(false); got != row.up {
					t.Errorf("healthyThreshold %d: up after %d probes, want %d", row.healthy, got, row.up)
				}
			}
			if row.down < 3 {
				return
			}
			w.set(ap, errRefused)
			after(time.Second) // two probes
			w.set(ap, nil)
			after(time.Second)
			w.set(ap, errRefused)
			after(time.Second)
			if w.down(ap) {
				t.Errorf("unhealthyThreshold %d: down though a probe between succeeded", row.unhealthy)
			}
		})
	}
}

// An endpoint is probed at the check's port, and its verdict counts at its own.
func TestCheckAtAnotherPort(t *testing.T) {
	within(t, registry.Mesh{}, func(w *world) {
		check := registry.Check{Kind: "tcp", Port: 8008}
		w.swap(registry.Snapshot{Services: []*registry.Service{service("db.test", check, "192.0.2.1/5432", "192.0.2.2/5432")}})
		w.set("192.0.2.1:8008", errRefused)
		after(5 * time.Second)
		if n := w.dialed("192.0.2.1:5432"); n != 0 || w.dialed("192.0.2.1:8008") == 0 {
			t.Errorf("the endpoint's own port was dialed %d times, want the check's port alone", n)
		}
		if !w.down("192.0.2.1:5432") || w.down("192.0.2.2:5432") || w.down("192.0.2.1:8008") {
			t.Errorf("down: %t %t %t, want the first endpoint alone", w.down("192.0.2.1:5432"), w.down("192.0.2.2:5432"), w.down("192.0.2.1:8008"))
		}
	})
}

// One that fails and works at once is up all the time.
func TestOneLostPacket(t *testing.T) {
	within(t, registry.Mesh{}, func(w *world) {
		const ap = "192.0.2.1:443"
		var mu sync.Mutex
		n := 0
		w.checker.Dial = func(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
			mu.Lock()
			defer mu.Unlock()
			if n++; n%2 == 1 {
				return nil, errRefused
			}
			return w.dial(ctx, ep)
		}
		w.swap(registry.Snapshot{Services: []*registry.Service{service("a.test", tcp, "192.0.2.1/443")}})
		for range 100 {
			after(100 * time.Millisecond)
			if w.down(ap) {
				t.Fatal("down though every second try works")
			}
		}
		if got := w.checker.Counts(); got.Failed < 9 || got.Passed != got.Failed {
			t.Errorf("%+v, want as many that failed as passed", got)
		}
		if w.logged("check") != 0 {
			t.Errorf("the log speaks of it:\n%s", w.log.String())
		}
	})
}

// What is our own fault says nothing of an address, and a check that passes
// ends the penalty of a dial that failed.
func TestOurOwnFault(t *testing.T) {
	within(t, registry.Mesh{}, func(w *world) {
		const ap = "192.0.2.1:443"
		w.swap(registry.Snapshot{Services: []*registry.Service{service("a.test", tcp, "192.0.2.1/443")}})
		after(2 * time.Second)
		for _, err := range []error{tunnel.Refusef(tunnel.Loop, "ours"), tunnel.Refusef(tunnel.Prohibited, "no"), tunnel.Refusef(tunnel.Overload, "no descriptors")} {
			w.dialed(ap)
			w.set(ap, err)
			after(5 * time.Second)
			if n := w.dialed(ap); w.down(ap) || n != 5 {
				t.Errorf("%v: down %t with %d dials, want up with 5", err, w.down(ap), n)
			}
		}
		w.set(ap, nil)
		route, err := w.registry.Resolve(t.Context(), &tunnel.Request{Name: tunnel.MustParseName("a.test"), Port: 443})
		if err != nil {
			t.Fatal(err)
		}
		for range 5 {
			route.Report(route.Endpoints[0], errRefused)
			after(3 * time.Second)
			if w.down(ap) || len(w.registry.Health()) != 1 {
				t.Errorf("a failed dial counts though checks pass: %+v", w.registry.Health())
			}
		}
		for w.checker.Budget.Take(1) { // clients have them all
		}
		w.dialed(ap)
		after(3 * time.Second)
		if n := w.dialed(ap); n != 0 || w.down(ap) {
			t.Errorf("%d dials without a descriptor, down %t", n, w.down(ap))
		}
	})
}

// TestPanicInACheck: what an endpoint makes a check do is that endpoint's alone.
func TestPanicInACheck(t *testing.T) {
	within(t, registry.Mesh{}, func(w *world) {
		const bad, good = "192.0.2.1:443", "192.0.2.2:443"
		w.set(bad, "a fault")
		w.swap(registry.Snapshot{Services: []*registry.Service{service("a.test", tcp, "192.0.2.1/443", "192.0.2.2/443")}})
		after(5 * time.Second)
		if !w.down(bad) || w.down(good) {
			t.Errorf("down: the one whose checks panic %t, the other one %t", w.down(bad), w.down(good))
		}
		if w.logged("panic in a check") == 0 {
			t.Error("nothing is logged")
		}
		w.set(bad, nil)
		after(time.Minute)
		if w.down(bad) {
			t.Error("checks that pass do not count after one that panicked")
		}
	})
}

// Only what is in reach is asked, once for all who have it, for as long as a
// table has it.
func TestWhatIsAsked(t *testing.T) {
	networks := []registry.Network{
		{Name: "here", CIDRs: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Gateways: []registry.Gateway{
			{Address: registry.Endpoint{Addr: netip.MustParseAddr("192.0.2.9"), Port: 443}, Public: registry.Endpoint{Addr: netip.MustParseAddr("203.0.113.9"), Port: 443}, Check: tcp},
		}},
		{Name: "there", CIDRs: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}, Gateways: []registry.Gateway{
			{Address: registry.Endpoint{Addr: netip.MustParseAddr("198.51.100.9"), Port: 443}, Public: registry.Endpoint{Addr: netip.MustParseAddr("203.0.113.8"), Port: 443}, Check: tcp},
			{Address: registry.Endpoint{Addr: netip.MustParseAddr("203.0.113.7"), Port: 443}},
		}},
	}
	within(t, registry.Mesh{Network: "here"}, func(w *world) {
		asked := func(want ...string) {
			t.Helper()
			after(2 * time.Second)
			w.mu.Lock()
			clear(w.dials)
			w.mu.Unlock()
			after(10 * time.Second)
			w.mu.Lock()
			defer w.mu.Unlock()
			var got []string
			for ap, n := range w.dials {
				got = append(got, fmt.Sprintf("%s*%d", ap, n))
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("asked\n%v, want\n%v", got, want)
			}
		}
		portless := service("ports.test", tcp, "192.0.2.3/0")
		portless.Ports = []uint16{1, 2}
		via := service("via.test", tcp, "192.0.2.4/1")
		via.Via = []registry.Hop{{Proto: "connect", Addresses: []string{"x:1"}}}
		all := registry.Snapshot{Networks: networks, Services: []*registry.Service{
			service("a.test", tcp, "192.0.2.1/1", "198.51.100.1/1", "::ffff:192.0.2.1/1"),
			service("b.test", tcp, "192.0.2.1/1"),
			service("c.test", registry.Check{Kind: "tcp", Interval: 5 * time.Second}, "192.0.2.2/1"),
			service("none.test", registry.Check{}, "192.0.2.5/1"),
			portless, via,
		}}
		w.swap(all)
		asked("192.0.2.1:1*10", "192.0.2.2:1*2", "192.0.2.3:1*10", "192.0.2.3:2*10", "192.0.2.9:443*10", "203.0.113.8:443*10")
		if got := w.checker.Counts(); got.Up != 6 || got.Down != 0 {
			t.Errorf("%+v, want 6 up", got)
		}
		w.set("192.0.2.1:1", errRefused)
		w.set("192.0.2.2:1", errRefused)
		after(6 * time.Second)
		if !w.down("192.0.2.1:1") || !w.down("192.0.2.2:1") {
			t.Error("they are not down")
		}
		w.swap(registry.Snapshot{Services: all.Services[1:2]})
		asked("192.0.2.1:1*10")
		if got := w.registry.Health(); len(got) != 1 || got[0].Services[0] != "b.test" || got[0].State != registry.StateDown {
			t.Errorf("health %+v, want that of b.test", got)
		}
		if got := w.checker.Counts(); got.Up != 0 || got.Down != 1 {
			t.Errorf("%+v, want 1 down", got)
		}
		w.swap(registry.Snapshot{})
		asked()
		if got := w.registry.Health(); len(got) != 0 || w.down("192.0.2.1:1") {
			t.Errorf("health %+v of nothing", got)
		}
	})
}

// Every address of a name is asked, and goes when the name has it no more.
func TestNames(t *testing.T) {
	within(t, registry.Mesh{}, func(w *world) {
		w.dns["db.test"] = "192.0.2.1 ::ffff:192.0.2.2 192.0.2.1"
		w.set("192.0.2.2:5432", errRefused)
		s := service("a.test", tcp, "db.test/5432", "localhost/1", "nowhere.test/1")
		w.swap(registry.Snapshot{Services: []*registry.Service{s}})
		after(3 * time.Second)
		if w.down("192.0.2.1:5432") || !w.down("192.0.2.2:5432") {
			t.Errorf("down: %t %t, want false true", w.down("192.0.2.1:5432"), w.down("192.0.2.2:5432"))
		}
		if w.isNamed("192.0.2.1:5432") || !w.isNamed("127.0.0.1:1") || !w.isNamed("[::1]:1") {
			t.Error("what is named is not loopback alone")
		}
		w.mu.Lock()
		if w.asked["localhost"] != 0 {
			t.Error("DNS was asked for localhost")
		}
		w.mu.Unlock()
		h := w.registry.Health()
		if len(h) != 4 || h[0].Host != "db.test" || !slices.Equal(h[0].Services, []string{"a.test"}) {
			t.Errorf("health %+v, want 4 with db.test first", h)
		}
		w.mu.Lock()
		w.dns["db.test"] = "192.0.2.1 192.0.2.3"
		clear(w.asked)
		w.mu.Unlock()
		after(10 * time.Second)
		if w.down("192.0.2.2:5432") || w.dialed("192.0.2.3:5432") < 4 {
			t.Error("the addresses are not the new ones")
		}
		w.mu.Lock()
		if n := w.asked["db.test"]; n != 2 {
			t.Errorf("db.test was looked up %d times in 10 s, want 2", n)
		}
		delete(w.dns, "db.test")
		clear(w.dials)
		w.mu.Unlock()
		after(20 * time.Second)
		if n := w.dialed("192.0.2.3:5432"); n != 20 {
			t.Errorf("%d dials in 20 s while DNS fails, want 20: what was known is asked on", n)
		}
		s.Endpoints = s.Endpoints[1:]
		w.swap(registry.Snapshot{Services: []*registry.Service{s}})
		after(time.Second)
		w.dialed("192.0.2.3:5432")
		after(5 * time.Second)
		if n := w.dialed("192.0.2.3:5432"); n != 0 {
			t.Errorf("%d dials of an address whose name is gone", n)
		}
		if got := w.checker.Counts(); got.Up != 2 || got.Down != 0 {
			t.Errorf("%+v, want the two of localhost", got)
		}
	})
}

// Thousands don't go out at once, are asked in time, and those that are dead
// don't keep the others waiting.
func TestMany(t *testing.T) {
	const many, dead = 1500, 600
	within(t, registry.Mesh{}, func(w *world) {
		var services []*registry.Service
		addr := func(i int) string { return fmt.Sprintf("10.0.%d.%d", i>>8, i&255) }
		check := registry.Check{Kind: "tcp", Interval: 5 * time.Second, Timeout: time.Second}
		for i := range many {
			services = append(services, service(fmt.Sprintf("s%d.test", i), check, addr(i)+"/1"))
			if i >= dead {
				w.fate[addr(i)+":1"] = 2 * time.Millisecond
			}
		}
		w.swap(registry.Snapshot{Services: services})
		after(10 * time.Second)
		if got := w.checker.Counts(); got.Up != many {
			t.Errorf("%+v, want all up", got)
		}
		w.mu.Lock()
		if w.most > 20 { // 300 in a second, of 2 ms each
			t.Errorf("%d probes at once, want few", w.most)
		}
		for i := range dead {
			w.fate[addr(i)+":1"] = time.Hour
		}
		w.most = 0
		w.mu.Unlock()
		after(60 * time.Second)
		if got := w.checker.Counts(); got.Up != many-dead || got.Down != dead {
			t.Errorf("%+v, want %d down", got, dead)
		}
		w.mu.Lock()
		if w.most != maxProbes {
			t.Errorf("%d probes at once, want %d", w.most, maxProbes)
		}
		clear(w.dials)
		w.mu.Unlock()
		after(60 * time.Second)
		w.mu.Lock()
		defer w.mu.Unlock()
		for i := dead; i < many; i++ {
			if n := w.dials[addr(i)+":1"]; n < 11 || n > 13 {
				t.Fatalf("%s was asked %d times in a minute, want 12", addr(i), n)
			}
		}
	})
}
