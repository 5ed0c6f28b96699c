//go:build linux

package reliability

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/connect/h2"
	"culvert.dev/internal/testnet"
)

// writers open tunnels and write into each without end.
type writers struct {
	conns           many
	wg              sync.WaitGroup
	opened, refused atomic.Int32
	cut             atomic.Int32 // ended before stop
	stopping        atomic.Bool
	over            chan struct{}
	written         atomic.Int64
}

// mostWritten is what each writer writes at most: more than the gateway, and the
// kernel on the way from it to the service, keep for a tunnel.
const mostWritten = 512 << 10

// open opens n tunnels by way and begins to write into them.
func (w *writers) open(t *testing.T, n int, way carrier) {
	crowdMay(n, 16, func(int) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		c, err := way.open(ctx, onlyService)
		if err != nil {
			w.refused.Add(1)
			return
		}
		w.opened.Add(1)
		w.conns.add(c)
		w.wg.Go(func() {
			p := make([]byte, 16<<10)
			for n := 0; ; n += len(p) {
				if n >= mostWritten {
					n = 0
					<-w.over // the kernel takes it all
				}
				_, err := c.Write(p)
				w.written.Add(int64(len(p)))
				if err != nil {
					if !w.stopping.Load() {
						w.cut.Add(1)
					}
					_ = testnet.Abort(c)
					return
				}
			}
		})
	})
}

func (w *writers) stop() {
	w.stopping.Store(true)
	close(w.over)
	w.conns.abort()
	w.wg.Wait()
}

// An honest client opens tunnels, one after the other, and uses one that stands.
type honest struct {
	tries atomic.Int32
	late  atomic.Int32 // of them, which took more than a second
	worst atomic.Int64 // of a try, nanoseconds
	stop  func()
}

// honestly has a client at an address of its own be served, again and again, until
// stop is called: always within ten seconds and, where tests measure, nine times
// of ten within one.
func (g *gateway) honestly(t *testing.T, target string) *honest {
	stands := g.tunnel(byConnect, 2000, target)
	ctx, cancel := context.WithCancel(t.Context())
	h := &honest{}
	var wg sync.WaitGroup
	h.stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		// A busy machine has one or the other wait.
		if n, late := h.tries.Load(), h.late.Load(); testnet.Measuring && late > 1+n/10 {
			t.Errorf("an honest client: %d of %d tries took more than a second, the longest %v", late, n, time.Duration(h.worst.Load()).Round(time.Millisecond))
		}
	})
	t.Cleanup(h.stop)
	served := func(what string, f func() error) {
		began := time.Now()
		err := f()
		took := time.Since(began)
		h.tries.Add(1)
		h.worst.Store(max(h.worst.Load(), int64(took)))
		switch {
		case ctx.Err() != nil:
		case err != nil:
			t.Errorf("an honest client, %s: after %v: %v", what, took.Round(time.Millisecond), err)
		case took > 10*time.Second:
			t.Errorf("an honest client, %s: it took %v, want a second", what, took.Round(time.Millisecond))
		case took > time.Second:
			h.late.Add(1)
		}
	}
	wg.Go(func() {
		for n := 2001; ctx.Err() == nil; n++ {
			for _, w := range []way{bySNI, byConnect} {
				served(w.name, func() error {
					c, err := g.dial(n)
					if err != nil {
						return err
					}
					defer c.Close()
					return w.enter(c, target)
				})
			}
			served("connect-h2", func() error {
				d := &h2.Dialer{Proxy: g.addr, Dialer: source(n)}
				defer d.Close()
				c, err := d.DialContext(ctx, "tcp", target+":443")
				if err != nil {
					return err
				}
				defer c.Close()
				return pinged(c)
			})
			served("the tunnel that stands", func() error { return echo(stands, "still here") })
			pause(ctx, 50*time.Millisecond)
		}
	})
	return h
}

// muteWays are the carriers of tunnels into a service that does not read.
func muteWays(t *testing.T, far *gateway, keys *tls.Config) (ways []carrier) {
	for _, way := range carriers(t, far, far, keys) {
		if !way.fixed && way.name != "double hbone" {
			ways = append(ways, way)
		}
	}
	return append(ways, carrier{"sni", dialFunc(func() (net.Conn, error) {
		c, err := far.dial(1)
		if err == nil {
			_, err = c.Write(bySNI.preamble(onlyService))
		}
		return c, err
	}), true})
}

// A tunnel whose client writes and whose service does not read holds little of the
// gateway's memory, whatever carries it: no more than 64 KiB of bytes, and beside
// them what the process has to have for it and has not given back.
func TestMuteTunnelsHoldLittle(t *testing.T) {
	const n, most = 200, 192 << 10
	ca, keys := newCA(t)
	mute := startBackend(t, "mute")
	for i := range muteWays(t, everyWay(t, ca, "127.1.0.0/16", onlyService), keys) {
		far := everyWay(t, ca, "127.1.0.0/16", onlyService)
		way := muteWays(t, far, keys)[i]
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			far.t = t
			far.serve(service(onlyService, mute.addr))
			first := writers{over: make(chan struct{})}
			first.open(t, 4, way)
			testnet.Eventually(t, patience, func() bool { return far.metric("culvert_backlog_bytes") > 0 }, "the first ones are stuck")
			defer first.stop()
			far.collectGarbage()
			before := far.rss()
			w := writers{over: make(chan struct{})}
			defer w.stop()
			for range 5 { // on a busy machine some handshakes take too long
				w.open(t, n-int(w.opened.Load()), way)
			}
			if opened := w.opened.Load(); opened < n {
				t.Fatalf("%d of %d tunnels stand", opened, n)
			}
			written := int64(-1)
			testnet.Eventually(t, patience, func() bool {
				was := written
				written = w.written.Load()
				pause(t.Context(), 300*time.Millisecond)
				return was == written
			}, "they are stuck")
			left := int64(0)
			defer func() { t.Logf("a tunnel holds %d B", left/n) }()
			testnet.Eventually(t, patience, func() bool { left = far.afterGarbage(far.rss, before); return left <= n*most }, "a tunnel holds %d bytes at most", most)
		})
	}
}

// One client writes into a thousand tunnels whose service does not read, over
// each carrier, to a gateway in a container of 64 MiB: that is not killed, another
// client is served all the while, nine times of ten within a second, and the memory is
// free again afterwards.
func TestMuteTunnelsInASmallCgroup(t *testing.T) {
	const limit = 64 << 20
	group := newCgroup(t, limit)
	if group == nil {
		testnet.LeaveOut(t, "no cgroup can be made: the memory limit of a container")
		return
	}
	ca, keys := newCA(t)
	mute, honest := startBackend(t, "mute"), startBackend(t, "echo")
	far := everyWayOf(t, ca, "127.1.0.0/16", onlyService, options{Wrap: group.wrap()})
	far.serve(service(onlyService, mute.addr) + service("echo.test", honest.addr))
	for _, way := range muteWays(t, far, keys) {
		t.Run(way.name, func(t *testing.T) {
			client := far.honestly(t, "echo.test")
			w := writers{over: make(chan struct{})}
			began := time.Now()
			n := *muteTunnels
			if slices.Contains([]string{"connect-h2", "hbone", overHTTP2}, way.name) {
				n = max(n, 1000) // many by one connection, which is quick
			}
			w.open(t, n, way)
			opened := time.Since(began)
			most := 0.0
			for range 10 {
				far.alive()
				most = max(most, far.metric("culvert_backlog_bytes"))
				pause(t.Context(), 100*time.Millisecond)
			}
			rss := far.rss() >> 20
			m := far.metrics()
			t.Logf("%d tunnels in %v, %d refused, %d cut since; %.1f MiB written; backlogs up to %.1f MiB, pressure %v; the cgroup held %d MiB at most, RSS is %d MiB",
				w.opened.Load(), opened.Round(time.Millisecond), w.refused.Load(), w.cut.Load(), float64(w.written.Load())/(1<<20), most/(1<<20), sum(m, "culvert_memory_pressure"),
				group.number("max_usage_in_bytes", "peak")>>20, rss)
			w.stop()
			client.stop()
			t.Logf("the honest client: %d tries, the longest %v", client.tries.Load(), time.Duration(client.worst.Load()).Round(time.Millisecond))
			if most == 0 {
				t.Error("nothing was kept: the test tests nothing")
			}
			if c, ok := way.dialer.(io.Closer); ok {
				_ = c.Close()
			}
			testnet.Eventually(t, patience, func() bool { return far.metric("culvert_backlog_bytes") == 0 }, "no backlog is left")
			testnet.Eventually(t, patience, func() bool { return far.metric("culvert_memory_pressure") == 0 }, "there is memory again")
		})
	}
	if n := group.kills(); n > 0 {
		t.Errorf("the kernel killed %d processes of the cgroup", n)
	}
}
