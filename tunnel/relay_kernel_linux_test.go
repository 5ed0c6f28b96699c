//go:build !copyrelay && (amd64 || arm64)

package tunnel_test

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// What only the event loop promises: pipes that come back, and tunnels that
// cost next to nothing.

// TestRelayGivesPipesBack kills tunnels whose pipes are full.
func TestRelayGivesPipesBack(t *testing.T) {
	budget := &tunnel.Budget{Limit: 1000}
	lps := loops(t, budget)
	r := &tunnel.Relay{Loops: lps}
	var all []carried
	for range 4 {
		c := carryNarrow(t, r, paths[0])
		_ = c.client.SetWriteDeadline(time.Now().Add(150 * time.Millisecond))
		if _, err := c.client.Write(random(32<<20, 13)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("write into a blocked tunnel: %v", err)
		}
		all = append(all, c)
	}
	_ = all[0].client.SetLinger(0)
	_ = all[0].client.Close()
	if e := all[0].wait(t); e.Reason != tunnel.Reset {
		t.Errorf("got %+v", e)
	}
	r.Abort(t.Context(), tunnel.Killed, 0)
	for _, c := range all[1:] {
		if e := c.wait(t); e.Reason != tunnel.Killed {
			t.Errorf("got %+v", e)
		}
	}
	_ = r.Close()
	_ = lps.Close()
	if n := budget.Used(); n != 0 {
		t.Errorf("%d descriptors still taken after Close", n)
	}
}

// TestRelayRestsWithoutPipes checks that bulk leaves no pipe behind.
func TestRelayRestsWithoutPipes(t *testing.T) {
	budget := &tunnel.Budget{Limit: 1000}
	r := &tunnel.Relay{Loops: loops(t, budget)}
	defer r.Close()
	data := random(8<<20, 17)
	c := carry(t, r, paths[0], nil)
	if err := bothWays(c, data[:1], data[:1]); err != nil {
		t.Fatal(err)
	}
	before := descriptors(t)
	if err := bothWays(c, data, data); err != nil {
		t.Fatal(err)
	}
	if budget.Used() == 0 {
		t.Error("16 MiB went without a pipe: the test shows nothing")
	}
	for _, open := range []bool{true, false} { // with the tunnel at rest, and after its end
		if !open {
			if err := bothWays(c, data, data); err != nil {
				t.Fatal(err)
			}
			c.finish(t)
			before -= 4
		}
		if n := settles(func() int { return int(budget.Used()) }, 0); n != 0 {
			t.Errorf("tunnel open %v: %d descriptors still counted for pipes", open, n)
		}
		if n := settles(func() int { return descriptors(t) }, before); n > before {
			t.Errorf("tunnel open %v: %d descriptors, want %d", open, n, before)
		}
	}
}

// TestRelayIdleTunnelsCost counts what 1,000 tunnels at rest take beyond
// their two sockets.
func TestRelayIdleTunnelsCost(t *testing.T) {
	const tunnels = 1000
	r := &tunnel.Relay{}
	defer r.Close()
	carry(t, r, paths[0], nil).finish(t)
	shop := newSocketShop(t)
	var inner [2 * tunnels]net.Conn
	outer := make([]*net.TCPConn, 0, 2*tunnels)
	defer func() {
		for _, c := range outer {
			_ = c.Close()
		}
	}()
	for i := range inner {
		a, b, err := shop.pair()
		if err != nil {
			t.Fatal(err)
		}
		outer, inner[i] = append(outer, a), b
	}
	memory := func() int {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapInuse + m.StackInuse)
	}
	ended := func(tunnel.End) {}
	fds, goroutines, bytes := descriptors(t), runtime.NumGoroutine(), memory()
	for i := 0; i < len(inner); i += 2 {
		r.Carry(tunnel.Tunnel{Client: inner[i], Server: inner[i+1], Ended: ended})
	}
	if n := descriptors(t); n > fds {
		t.Errorf("%d tunnels: %d descriptors, want the %d their sockets had", tunnels, n, fds)
	}
	if n := runtime.NumGoroutine(); n > goroutines {
		t.Errorf("%d tunnels: %d goroutines, want the %d from before", tunnels, n, goroutines)
	}
	each := (memory() - bytes) / tunnels
	t.Logf("%d bytes for each idle tunnel, less what its two net.Conns had", each)
	if each > 4<<10 {
		t.Errorf("%d bytes for each idle tunnel, want 4 KiB at most", each)
	}
	runtime.KeepAlive(inner)
	// They are not forgotten: a byte passes through each.
	for i := 0; i < len(outer); i += 2 {
		_ = outer[i+1].SetReadDeadline(time.Now().Add(patience))
		if err := transfer(outer[i], outer[i+1], []byte{byte(i)}); err != nil {
			t.Fatalf("tunnel %d: %v", i/2, err)
		}
	}
}

// A service that answers and closes altogether, and a client that says goodbye
// to nobody: half of all TLS connections end like this.
func TestRelayDoneWithLateBytes(t *testing.T) {
	for _, tc := range []struct {
		late int
		want tunnel.Reason
	}{{0, tunnel.Done}, {31, tunnel.Done}, {64 << 10, tunnel.Reset}} {
		r := &tunnel.Relay{}
		c := carry(t, r, paths[0], nil)
		_, _ = c.server.Write([]byte("answer"))
		_ = c.server.Close()
		if got, err := io.ReadAll(c.client); string(got) != "answer" || err != nil {
			t.Fatalf("got %q, %v", got, err)
		}
		_, _ = c.client.Write(make([]byte, tc.late))
		if tc.late == 0 {
			_ = c.client.Close()
		}
		if e := c.wait(t); e.Reason != tc.want || (e.Err == nil) != (tc.want == tunnel.Done) {
			t.Errorf("%d late bytes: ended with %+v, want %s", tc.late, e, tc.want)
		}
		if tc.late > 0 {
			_, err := c.client.Write([]byte("more"))
			for deadline := time.Now().Add(patience); err == nil && time.Now().Before(deadline); {
				_, err = c.client.Write([]byte("more"))
			}
			wantReset(t, "a client that goes on", err)
		}
		_ = r.Close()
	}
}

// TestRelayRunsOutOfPipes has more bulk than pipes: the Budget has room for
// few, or, from the middle on, the process has no descriptor left to make one
// of. Bulk goes on without.
func TestRelayRunsOutOfPipes(t *testing.T) {
	const flows, size = 6, 4 << 20
	data := random(size+flows, 24)
	shop := newSocketShop(t)
	for _, tt := range []struct {
		name  string
		limit int64 // of the Budget; 32 are never for pipes
		files bool  // none are left, once the first flows have theirs
	}{{"one", 34, false}, {"three", 38, false}, {"no descriptors", 1000, true}} {
		t.Run(tt.name, func(t *testing.T) {
			r := &tunnel.Relay{Loops: loops(t, &tunnel.Budget{Limit: tt.limit})}
			all := make([]carried, flows)
			for i := range all {
				var err error
				if all[i], err = shop.tunnel(r, paths[0], nil); err != nil {
					t.Fatal(err)
				}
			}
			pour := func(i int) error { return bothWays(all[i], data[i:i+size], data[flows-i:flows-i+size]) }
			if err := pour(0); err != nil {
				t.Error(err)
			}
			had := r.Loops.Budget.Used()
			if had == 0 {
				t.Error("no pipe was used: the test shows nothing")
			}
			if tt.files {
				noMoreFiles(t)
			}
			var wg sync.WaitGroup
			for i := range all {
				wg.Go(func() {
					if err := pour(i); err != nil {
						t.Errorf("flow %d: %v", i, err)
					}
				})
			}
			wg.Wait()
			if n := r.Loops.Budget.Used(); n > tt.limit-32 || tt.files && n > had {
				t.Errorf("%d descriptors for pipes, %d before: there was no room", n, had)
			}
			for i, c := range all {
				want := int64(size)
				if i == 0 {
					want = 2 * size
				}
				if e := c.finish(t); e.Reason != tunnel.Done || e.In != want || e.Out != want {
					t.Errorf("flow %d: %+v", i, e)
				}
			}
			_ = r.Close()
			_ = r.Loops.Close()
			if n := r.Loops.Budget.Used(); n != 0 {
				t.Errorf("%d descriptors still taken after Close", n)
			}
		})
	}
}

// noMoreFiles takes all descriptors that are free until the test ends.
func noMoreFiles(t *testing.T) {
	t.Helper()
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	null, err := os.Open(os.DevNull) // its number is the lowest that is free
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: uint64(null.Fd()), Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was) })
}

// TestRelayCarriesWithoutDescriptors hands over a pair of sockets that can't
// be taken, for want of a descriptor to take one with.
func TestRelayCarriesWithoutDescriptors(t *testing.T) {
	r := &tunnel.Relay{}
	defer r.Close()
	carry(t, r, paths[0], nil).finish(t) // the loop stands
	c := carry(t, r, paths[0], func(*tunnel.Tunnel) { noMoreFiles(t) })
	data := random(1<<20, 25)
	if err := bothWays(c, data, data); err != nil {
		t.Error(err)
	}
	if e := c.finish(t); e.Reason != tunnel.Done || e.In != 1<<20 || e.Out != 1<<20 {
		t.Errorf("ended with %+v", e)
	}
}
