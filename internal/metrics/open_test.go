package metrics

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"culvert.dev/tunnel"
)

// fakeRelay is what a Relay says of its open tunnels.
type fakeRelay struct {
	mu    sync.Mutex // guards what follows
	open  map[string]int
	bytes map[string]tunnel.ServiceBytes
	takes time.Duration // to say what they have carried
	reads int
	then  func() // called at the end of that
}

func (f *fakeRelay) count() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.open
}

func (f *fakeRelay) carried() map[string]tunnel.ServiceBytes {
	time.Sleep(f.takes)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads++
	bytes := f.bytes
	if f.then != nil {
		f.then()
	}
	return bytes
}

// series returns the values of the metrics about open tunnels, of a new scrape.
func series(t *testing.T, m *Metrics) map[string]float64 {
	t.Helper()
	families, err := m.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := make(map[string]float64)
	for _, f := range families {
		for _, s := range f.Metric {
			labels := ""
			for _, l := range s.Label {
				labels += " " + l.GetName() + "=" + l.GetValue()
			}
			switch f.GetName() {
			case "culvert_tunnels_open":
				values["open"+labels] = s.GetGauge().GetValue()
			case "culvert_tunnel_bytes_total":
				values["bytes"+labels] = s.GetCounter().GetValue()
			}
		}
	}
	return values
}

func expect(t *testing.T, when string, got map[string]float64, want map[string]float64) {
	t.Helper()
	for name, v := range want {
		if g, ok := got[name]; !ok || g != v {
			t.Errorf("%s: %s is %v, %v; want %v", when, name, g, ok, v)
		}
	}
}

func TestBytesCountWhileTunnelsAreOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRelay{}
		m := New()
		m.OpenTunnels(f.count, f.carried)
		expect(t, "at the start", series(t, m), map[string]float64{"open service=": 0, "bytes direction=in service=": 0})

		f.open, f.bytes = map[string]int{"orders": 2}, map[string]tunnel.ServiceBytes{"orders": {In: 100, Out: 3000}}
		expect(t, "with two tunnels", series(t, m), map[string]float64{"open service=orders": 2, "bytes direction=in service=orders": 100, "bytes direction=out service=orders": 3000})

		// One ends: it is in the list no more, and observed a moment later.
		f.open, f.bytes = map[string]int{"orders": 1}, map[string]tunnel.ServiceBytes{"orders": {In: 30, Out: 1500}}
		expect(t, "before it is observed", series(t, m), map[string]float64{"open service=orders": 1, "bytes direction=in service=orders": 100, "bytes direction=out service=orders": 3000})
		m.Observe(carried("orders")) // of 100 and 2000 bytes
		expect(t, "after that", series(t, m), map[string]float64{"bytes direction=in service=orders": 130, "bytes direction=out service=orders": 3500})

		// One ends while a scrape reads: it is not counted twice.
		f.then = func() { m.Observe(carried("orders")) }
		expect(t, "meanwhile", series(t, m), map[string]float64{"bytes direction=in service=orders": 130, "bytes direction=out service=orders": 3500})
		f.open, f.bytes, f.then = nil, nil, nil
		expect(t, "at the end", series(t, m), map[string]float64{"open service=orders": 0, "bytes direction=in service=orders": 200, "bytes direction=out service=orders": 4000})
	})
}

// However often it is scraped, a gateway with many tunnels does not only count them.
func TestReadingOpenTunnelsIsLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRelay{open: map[string]int{"orders": 1}, takes: 10 * time.Millisecond}
		m := New()
		m.OpenTunnels(f.count, f.carried)
		for range 1000 {
			series(t, m)
			time.Sleep(time.Millisecond)
		}
		if f.reads < 4 || f.reads > 6 {
			t.Errorf("%d readings of 10 ms in a second, want 5", f.reads)
		}
		f.open = map[string]int{"orders": 2}
		expect(t, "between readings", series(t, m), map[string]float64{"open service=orders": 2})
	})
}

// Services beyond the limit share a series, and one that is forgotten keeps its own
// while it has tunnels.
func TestSeriesOfOpenTunnelsAreLimited(t *testing.T) {
	f := &fakeRelay{open: map[string]int{}, bytes: map[string]tunnel.ServiceBytes{}}
	m := New()
	m.OpenTunnels(f.count, f.carried)
	for i := range MaxServices + 10 {
		name := fmt.Sprintf("s%d", i)
		f.open[name], f.bytes[name] = 1, tunnel.ServiceBytes{In: 1}
	}
	got := series(t, m)
	expect(t, "too many", got, map[string]float64{"open service=other": 10, "bytes direction=in service=other": 10})
	if len(got) != 3*(MaxServices+2) {
		t.Errorf("%d series, want %d", len(got), 3*(MaxServices+2))
	}
	kept := ""
	for name := range f.open {
		if _, ok := got["open service="+name]; ok {
			kept = name
			break
		}
	}
	f.open, f.bytes = map[string]int{kept: 1}, nil
	m.Forget(func(string) bool { return false })
	if got := testutil.CollectAndCount(&m.open, "culvert_tunnels_open"); got != 3 {
		t.Errorf("%d series after Forget, want those of %q, of other and of none", got, kept)
	}
}
