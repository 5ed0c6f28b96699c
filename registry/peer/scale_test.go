package peer

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/policy"
	"culvert.dev/registry"
)

// everybody sees everything.
var everybody = &policy.Policy{Name: "all", Verb: policy.Catalog, Action: policy.Allow, Rules: []policy.Rule{{}}}

// many returns as many services as a catalog may have, and everybody.
func many() (all []any) {
	for i := range MaxServices {
		all = append(all, service(fmt.Sprintf("service-%d.west.example", i)))
	}
	return append(all, everybody)
}

// snapshots returns how many snapshots of a source have come. The caller holds mu.
func (s *site) snapshots(source string) (n int) {
	for _, u := range s.updates {
		if u.Source == source && u.Err == nil {
			n++
		}
	}
	return n
}

// The first snapshot of a large catalog is one update, which makes one table, and one change
// among many services sends less than 1 KiB.
func TestLargeCatalog(t *testing.T) {
	east, west := newSite(t, "east"), newSite(t, "west")
	all := many()
	west.set(t, all...)
	l := join(t, east, west)
	var sent atomic.Int64
	l.wrap = func(c net.Conn) net.Conn {
		return &recorder{Conn: c, line: func(line string) { sent.Add(int64(len(line))) }}
	}
	start(t, east, west)
	has := func(n int) func() bool {
		return func() bool { return len(east.known["peer/west"].Services) == n && east.stale["peer/west"] == nil }
	}
	east.await(t, "the snapshot", has(MaxServices))
	east.mu.Lock()
	if n := east.snapshots("peer/west"); n != 1 {
		t.Errorf("the first snapshot makes %d updates, want one", n)
	}
	east.mu.Unlock()
	before := sent.Load()
	west.set(t, all[1:]...)
	east.await(t, "the change", has(MaxServices-1))
	if n := sent.Load() - before; n >= 1<<10 {
		t.Errorf("one change among %d services sends %d bytes, want less than 1 KiB", MaxServices, n)
	}
}

// A site whose services have more names than a catalog may have offers those that fit, and the
// other side takes them.
func TestCatalogOfManyNames(t *testing.T) {
	const each = 250
	east, west := newSite(t, "east"), newSite(t, "west")
	all := []any{everybody}
	for i := range MaxNames/each + 2 {
		var names []string
		for n := range each {
			names = append(names, fmt.Sprintf("%x.%x.west.example", n, i))
		}
		all = append(all, service(names[0], names...))
	}
	west.set(t, all...)
	join(t, east, west)
	start(t, east, west)
	east.await(t, "what fits", func() bool { return len(east.known["peer/west"].Services) == MaxNames/each })
	if s := east.peers.Status()[0]; s.Problem != "" || s.Services != MaxNames/each {
		t.Errorf("the catalog has %d services, with the problem %q; want %d", s.Services, s.Problem, MaxNames/each)
	}
}

// A peer for which nothing changes costs one heartbeat in each HeartbeatInterval.
func TestIdlePeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		east, west := newSite(t, "east"), newSite(t, "west")
		west.set(t, service("a.west.example"), everybody)
		l := join(t, east, west)
		var lines, sent atomic.Int64
		l.wrap = func(c net.Conn) net.Conn {
			return &recorder{Conn: c, line: func(line string) { lines.Add(1); sent.Add(int64(len(line))) }}
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { east.run(ctx) })
		<-time.After(HeartbeatInterval / 2)
		synctest.Wait()
		lines.Store(0)
		sent.Store(0)
		const beats = 100
		<-time.After(beats * HeartbeatInterval)
		synctest.Wait()
		if n := lines.Load(); n != beats || sent.Load() > beats*100 {
			t.Errorf("in %v an idle peer is sent %d lines of %d bytes, want %d heartbeats of less than 100 bytes", beats*HeartbeatInterval, n, sent.Load(), beats)
		}
		cancel()
		_ = east.peers.Configure(nil)
		_ = west.peers.Configure(nil)
		wg.Wait()
	})
}

// BenchmarkCatalog measures how long the first snapshot of the largest catalog takes, and one
// change of it, without a delay and with 20 ms in each direction.
func BenchmarkCatalog(b *testing.B) {
	for _, delay := range []time.Duration{0, 20 * time.Millisecond} {
		b.Run(fmt.Sprintf("delay=%v", delay), func(b *testing.B) {
			all := many()
			var first, change time.Duration
			for b.Loop() {
				b.StopTimer()
				east, west := newSite(b, "east"), newSite(b, "west")
				west.set(b, all...)
				l := join(b, east, west)
				if delay > 0 {
					l.wrap = func(c net.Conn) net.Conn { return delayed(c, delay) }
				}
				has := func(n int) func() bool {
					return func() bool { return len(east.known["peer/west"].Services) == n && east.stale["peer/west"] == nil }
				}
				b.StartTimer()
				began := time.Now()
				start(b, east, west)
				east.await(b, "the snapshot", has(MaxServices))
				first += time.Since(began)
				next := west.tableOf(b, all[1:]...)
				began = time.Now()
				west.table.Swap(next)
				east.await(b, "the change", has(MaxServices-1))
				change += time.Since(began)
				b.StopTimer()
				_ = east.peers.Configure(nil)
				_ = west.peers.Configure(nil)
				b.StartTimer()
			}
			b.ReportMetric(first.Seconds()*1e3/float64(b.N), "ms/snapshot")
			b.ReportMetric(change.Seconds()*1e3/float64(b.N), "ms/change")
		})
	}
}

// tableOf returns the table that set would have the site serve.
func (s *site) tableOf(t testing.TB, what ...any) *registry.Table {
	t.Helper()
	table, err := registry.Merge(snapshotOf(what...))
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// delayed returns a stream by which all bytes of c come later, in both directions.
func delayed(c net.Conn, delay time.Duration) net.Conn {
	a, b := net.Pipe()
	carry := func(from, to net.Conn) {
		type part struct {
			due   time.Time
			bytes []byte
		}
		parts := make(chan part, 10_000)
		go func() {
			defer to.Close()
			for p := range parts {
				<-time.After(time.Until(p.due))
				if _, err := to.Write(p.bytes); err != nil {
					from.Close()
				}
			}
		}()
		go func() {
			defer close(parts)
			for {
				buf := make([]byte, 32<<10)
				n, err := from.Read(buf)
				if err != nil {
					return
				}
				parts <- part{time.Now().Add(delay), buf[:n]}
			}
		}()
	}
	carry(c, b)
	carry(b, c)
	return a
}
