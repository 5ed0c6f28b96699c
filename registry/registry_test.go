package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

func TestMergeConflicts(t *testing.T) {
	first, second := service(t, "a.test", 443), service(t, "a.test", 443, 8443)
	first.Addresses = []netip.Addr{netip.MustParseAddr("10.96.0.1")}
	second.Name, second.Origin = "second", "second.yaml:7"
	second.Addresses = []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.96.0.2")}
	second.Names = append(second.Names, tunnel.Pattern{})
	second.ExposedTo = []string{"office"}
	office := func(cidrs ...string) Network {
		n := Network{Name: "office"}
		for _, c := range cidrs {
			n.CIDRs = append(n.CIDRs, netip.MustParsePrefix(c))
		}
		return n
	}
	lab := office("192.0.2.0/24", "198.51.100.0/24")
	lab.Name = "lab"

	tab, err := Merge(
		Snapshot{Networks: []Network{office("192.0.2.0/24")}, Services: []*Service{first}},
		Snapshot{Networks: []Network{office("0.0.0.0/0"), lab}, Services: []*Service{second}},
	)
	var conflicts Conflicts
	if !errors.As(err, &conflicts) {
		t.Fatalf("Merge: %v, want Conflicts", err)
	}
	want := []string{
		`network "office" of a later one is left out: an earlier source has it already`,
		`range 192.0.2.0/24 of network "lab" is left out: network "office" has it already`,
		`name "a.test", port 443 of second.yaml:7 is left out: a.test.yaml:1 has it already`,
		`the empty name of second.yaml:7 is left out`,
		`address "10.96.0.1", port 443 of second.yaml:7 is left out`,
	}
	if len(conflicts) != len(want) {
		t.Errorf("%d conflicts, want %d: %v", len(conflicts), len(want), err)
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("conflicts lack %q:\n%v", w, err)
		}
	}
	// What is not disputed stands.
	req := byName("a.test", 443, 443)
	if f, err := tab.findVisible(req); err != nil || f.entry.Name != "a.test" {
		t.Errorf("the earlier source's claim: %v, %v", f.entry, err)
	}
	req = byName("a.test", 8443, 443)
	req.Source = netip.MustParseAddrPort("192.0.2.7:1")
	if f, err := tab.findVisible(req); err != nil || f.entry.Name != "second" {
		t.Errorf("the later source's undisputed claim: %v, %v", f.entry, err)
	}
	req.Source = netip.MustParseAddrPort("8.8.8.8:1")
	if _, err := tab.findVisible(req); err == nil {
		t.Error("a later source widened a network of an earlier one")
	}
}

func TestTableListing(t *testing.T) {
	var none *Table
	if none.Len() != 0 || none.Generation() != 0 {
		t.Error("the nil table is not empty")
	}
	for range none.Services() {
		t.Error("the nil table has a service")
	}
	var names []string
	for s := range table(t, service(t, "a.test"), service(t, "b.test")).Services() {
		names = append(names, s.Name)
	}
	if got := strings.Join(names, " "); got != "a.test b.test" {
		t.Errorf("Services: %s", got)
	}
}

// A script is a Source that does as it is told.
type script struct {
	name string
	do   chan any // a Snapshot to send, an error to return, nil to return nil, a string to panic with
}

func (s *script) Run(ctx context.Context, updates chan<- Update) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case what := <-s.do:
			switch what := what.(type) {
			case Snapshot:
				select {
				case updates <- Update{Source: s.name, Snapshot: what}:
				case <-ctx.Done():
					return ctx.Err()
				}
			case string:
				panic(what)
			case error:
				return what
			default:
				return nil
			}
		}
	}
}

func newScript(name string) *script { return &script{name: name, do: make(chan any)} }

func serves(t testing.TB, r *Registry, names ...string) {
	t.Helper()
	for _, n := range names {
		want := !strings.HasPrefix(n, "-")
		n = strings.TrimPrefix(n, "-")
		_, err := r.Resolve(t.Context(), byName(n, 443, 443))
		if got := err == nil; got != want {
			t.Errorf("%s is served: %v, want %v", n, got, want)
		}
	}
}

func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log syncBuffer
		r := &Registry{Log: slog.New(slog.NewTextHandler(&log, nil))}
		ctx, cancel := context.WithCancel(t.Context())
		a, b := newScript("a"), newScript("b")
		static := Static{Name: "flags", Snapshot: Snapshot{Services: []*Service{service(t, "flag.test")}}}
		done := make(chan error)
		go func() { done <- r.Run(ctx, a, b, static) }()
		synctest.Wait()

		if r.Table() != nil {
			t.Error("there is a table before every source has spoken")
		}
		a.do <- Snapshot{Services: []*Service{service(t, "a1.test"), service(t, "a2.test")}}
		synctest.Wait()
		if r.Table() != nil {
			t.Error("there is a table before the second source has spoken")
		}
		time.Sleep(firstTableTimeout)
		synctest.Wait()
		serves(t, r, "a1.test", "a2.test", "flag.test", "-b.test") // it has waited long enough

		b.do <- Snapshot{Services: []*Service{service(t, "b.test"), service(t, "a2.test")}}
		time.Sleep(minRebuildInterval)
		synctest.Wait()
		serves(t, r, "a1.test", "a2.test", "b.test", "flag.test")
		if !strings.Contains(log.String(), `name \"a2.test\" of a2.test.yaml:1 is left out`) {
			t.Errorf("the log does not tell of the conflict:\n%s", log.String())
		}

		// A source that fails, or panics, keeps what it said.
		a.do <- errors.New("disk on fire")
		synctest.Wait()
		serves(t, r, "a1.test", "a2.test", "b.test")
		time.Sleep(time.Second)
		a.do <- "bug"
		synctest.Wait()
		serves(t, r, "a1.test", "a2.test", "b.test")
		for _, w := range []string{"disk on fire", "panic: bug"} {
			if !strings.Contains(log.String(), w) {
				t.Errorf("the log lacks %q:\n%s", w, log.String())
			}
		}

		// And goes on when it is back.
		time.Sleep(2 * time.Second)
		a.do <- Snapshot{Services: []*Service{service(t, "a1.test")}}
		synctest.Wait()
		serves(t, r, "a1.test", "a2.test", "b.test") // a2 is b's now
		b.do <- Snapshot{}
		time.Sleep(minRebuildInterval)
		synctest.Wait()
		serves(t, r, "a1.test", "-a2.test", "-b.test", "flag.test")

		// A source that flaps makes few tables.
		before := r.Table().Generation()
		for i := range 1000 {
			b.do <- Snapshot{Services: []*Service{service(t, fmt.Sprintf("b%d.test", i))}}
			time.Sleep(time.Millisecond)
		}
		time.Sleep(minRebuildInterval)
		synctest.Wait()
		if n := r.Table().Generation() - before; n < 5 || n > 12 {
			t.Errorf("1000 updates in 1s made %d tables, want about 10", n)
		}
		serves(t, r, "b999.test", "-b998.test")
		b.do <- nil
		synctest.Wait()
		serves(t, r, "b999.test")

		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		serves(t, r, "a1.test", "b999.test") // the table outlives the sources
	})
}

func TestRunWithoutSources(t *testing.T) {
	if err := new(Registry).Run(t.Context()); err == nil {
		t.Error("Run without sources: no error")
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// While tables are swapped, every request sees one of them, whole: in table n
// each service leads to port n, and generations only go up.
func TestHotSwap(t *testing.T) {
	r := &Registry{}
	tableOf := func(n int) *Table {
		var services []*Service
		for i := range 50 {
			s := service(t, fmt.Sprintf("s%d.test", i))
			s.Endpoints = []Endpoint{{Addr: netip.MustParseAddr("192.0.2.1"), Port: uint16(n)}, {Addr: netip.MustParseAddr("192.0.2.2"), Port: uint16(n)}}
			services = append(services, s)
		}
		return table(t, services...)
	}
	r.Swap(tableOf(1))
	var stop atomic.Bool
	var wg sync.WaitGroup
	var requests atomic.Int64
	for w := range 4 {
		wg.Go(func() {
			last := uint64(0)
			for i := w; !stop.Load(); i++ {
				route, err := r.Resolve(t.Context(), byName(fmt.Sprintf("s%d.test", i%50), 443, 443))
				if err != nil {
					t.Errorf("Resolve: %v", err)
					return
				}
				if route.Generation < last {
					t.Errorf("generation %d after %d", route.Generation, last)
					return
				}
				last = route.Generation
				for _, ep := range route.Endpoints {
					if uint64(ep.Addr.Port()) != route.Generation {
						t.Errorf("endpoint %s in generation %d", ep, route.Generation)
						return
					}
				}
				route.Report(route.Endpoints[0], errRefused)
				requests.Add(1)
			}
		})
	}
	for n := 2; n <= 100; n++ {
		if got := r.Swap(tableOf(n)).Generation(); got != uint64(n) {
			t.Errorf("generation %d, want %d", got, n)
		}
		for at := requests.Load(); requests.Load() == at && !t.Failed(); { // some requests see each table
			runtime.Gosched()
		}
	}
	stop.Store(true)
	wg.Wait()
}
