package tunnel_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// descriptors returns how many this process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d) - 1 // the one that reads
}

// settles polls until f is at most want, and returns what it was last.
func settles(f func() int, want int) int {
	for deadline := time.Now().Add(patience); ; {
		n := f()
		if n <= want || time.Now().After(deadline) {
			return n
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// TestRelayShortTunnelsLeaveNothing opens and ends 2,000 tunnels in every way
// there is and counts what is left.
func TestRelayShortTunnelsLeaveNothing(t *testing.T) {
	const tunnels, atOnce = 2000, 16
	shop := newSocketShop(t)
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		warm := carry(t, r, p, nil) // starts what the Relay keeps
		warm.finish(t)
		data := random(100<<10, 16)
		fds, goroutines := descriptors(t), runtime.NumGoroutine()
		work := make(chan int)
		var wg sync.WaitGroup
		var mu sync.Mutex
		ends := map[tunnel.Reason]int{}
		for range atOnce {
			wg.Go(func() {
				for i := range work {
					c, err := shop.tunnel(r, p, func(tun *tunnel.Tunnel) {
						if i%10 == 0 {
							tun.IdleTimeout = time.Millisecond
						}
					})
					if err != nil {
						t.Error(err)
						return
					}
					e := fate(c, i, data)
					mu.Lock()
					ends[e.Reason]++
					mu.Unlock()
				}
			})
		}
		for i := range tunnels {
			work <- i
		}
		close(work)
		wg.Wait()
		if n := settles(func() int { return descriptors(t) }, fds); n > fds {
			t.Errorf("%d descriptors, %d before", n, fds)
		}
		if n := settles(runtime.NumGoroutine, goroutines); n > goroutines {
			t.Errorf("%d goroutines, %d before", n, goroutines)
		}
		if ends[tunnel.Done] < 100 || ends[tunnel.Reset] < 100 || ends[tunnel.Idle] < 10 {
			t.Errorf("ends %v: not every fate was tried", ends)
		}
		if n := settles(r.Open, 0); n > 0 { // a tunnel counts until its Ended has returned
			t.Errorf("%d tunnels are open", n)
		}
	})
}

// fate ends c in the way that i stands for.
func fate(c carried, i int, data []byte) tunnel.End {
	defer c.client.Close()
	defer c.server.Close()
	part := data[:rand.IntN(len(data))]
	switch i % 5 {
	case 0: // idle, or left alone until the client goes
		if i%10 != 0 {
			_ = c.client.Close()
			_, _ = io.Copy(io.Discard, c.server)
			_ = c.server.Close()
		}
	case 1: // question and answer
		_, _ = c.client.Write(part[:len(part)/10])
		_ = c.client.CloseWrite()
		_, _ = io.Copy(io.Discard, c.server)
		_, _ = c.server.Write([]byte("answer"))
		_ = c.server.Close()
		_, _ = io.Copy(io.Discard, c.client)
	case 2: // the client aborts
		_, _ = c.client.Write(part)
		_ = c.client.SetLinger(0)
		_ = c.client.Close()
	case 3: // the service aborts
		go func() { _, _ = c.client.Write(part) }()
		_, _ = io.CopyN(io.Discard, c.server, int64(len(part)/2))
		_ = c.server.SetLinger(0)
		_ = c.server.Close()
	case 4: // both close at once, with bytes on their way
		_, _ = c.client.Write(part[:len(part)/10])
		_, _ = c.server.Write(part[:len(part)/10])
		_ = c.client.Close()
		_ = c.server.Close()
	}
	return <-c.end
}

// cpu returns the processor time this process has used.
func cpu(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestRelayRestsOverALayer: tunnels between layers on sockets have no goroutine
// while nothing moves, and move what comes then.
func TestRelayRestsOverALayer(t *testing.T) {
	r := &tunnel.Relay{}
	defer r.Close()
	all := make([]carried, 10)
	carry(t, r, paths[1], nil) // starts the loops
	before := runtime.NumGoroutine()
	for i := range all {
		all[i] = carry(t, r, paths[1], nil)
	}
	for round := range 3 {
		for i, c := range all {
			for _, way := range [][2]*net.TCPConn{{c.client, c.server}, {c.server, c.client}} {
				want := random(1+i*round*1000, uint64(i))
				_, _ = way[0].Write(want)
				got := make([]byte, len(want))
				if _, err := io.ReadFull(way[1], got); err != nil || !bytes.Equal(got, want) {
					t.Fatalf("round %d: other bytes than were sent, %v", round, err)
				}
			}
		}
		if n := settles(runtime.NumGoroutine, before); n > before {
			t.Fatalf("round %d: %d goroutines more for %d tunnels", round, n-before, len(all))
		}
	}
	for _, c := range all {
		_ = c.client.CloseWrite()
		if _, err := io.ReadAll(c.server); err != nil {
			t.Error(err)
		}
		_ = c.server.Close()
		if e := c.wait(t); e.Reason != tunnel.Done {
			t.Errorf("got %+v", e)
		}
	}
}

// TestRelayDoesNotSpin puts a tunnel into each state in which epoll has
// something to say and nobody can act on it, and looks at the clock.
func TestRelayDoesNotSpin(t *testing.T) {
	data := random(32<<20, 18)
	block := func(c *net.TCPConn) {
		_ = c.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		if n, err := c.Write(data); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("wrote %d bytes, %v: want it to block", n, err)
		}
	}
	states := []func(c carried){
		func(carried) {},
		func(c carried) { _ = c.client.CloseWrite() },
		func(c carried) { block(c.client) },
		func(c carried) { block(c.client); block(c.server) },
		func(c carried) { block(c.client); _ = c.client.CloseWrite() },
		func(c carried) { block(c.client); _ = c.client.Close() },
		func(c carried) { // one side ended, the other is blocked and then ends
			_ = c.server.CloseWrite()
			_, _ = io.ReadAll(c.client)
			block(c.client)
			_ = c.client.CloseWrite()
		},
		func(c carried) {
			_ = c.client.CloseWrite()
			_, _ = io.ReadAll(c.server)
			block(c.server)
			_ = c.server.CloseWrite()
		},
	}
	// For epoll to report a hang-up that nobody can act on, the end of a stream
	// has to arrive behind bytes that wait for a backlog. How many the sockets
	// take before there is one can't be told, so many numbers are tried.
	for n := 32 << 10; n <= 2<<20; n += 32 << 10 {
		states = append(states, func(c carried) {
			_ = c.server.CloseWrite()
			_, _ = io.ReadAll(c.client)
			_, _ = c.client.Write(data[:n])
			_ = c.client.CloseWrite()
		})
	}
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		var wg sync.WaitGroup
		for _, do := range states {
			c := carryNarrow(t, r, p)
			wg.Go(func() { do(c) })
		}
		wg.Wait()
		// What is on its way may arrive first; one that spins never rests.
		const watch = 100 * time.Millisecond
		used := watch
		tick := time.NewTicker(watch)
		defer tick.Stop()
		for deadline := time.Now().Add(patience / 4); used > watch/6 && time.Now().Before(deadline); {
			before := cpu(t)
			<-tick.C
			used = cpu(t) - before
		}
		if used > watch/6 {
			t.Errorf("used %v of processor time in %v of rest", used, watch)
		}
		if r.Open() < 20 {
			t.Errorf("%d tunnels open, want more of the %d at rest", r.Open(), len(states))
		}
	})
}

// TestRelayAfterClose checks that a Carry that comes too late is told of and
// leaves no descriptor.
func TestRelayAfterClose(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		first := carry(t, r, p, nil)
		_ = r.Close()
		if e := first.wait(t); e.Reason != tunnel.Drain {
			t.Errorf("got %+v, want drain", e)
		}
		late := carry(t, r, p, nil)
		if e := late.wait(t); e.Reason != tunnel.Drain {
			t.Errorf("after Close: %+v, want drain", e)
		}
		_, err := late.client.Read(make([]byte, 1))
		wantReset(t, "client", err)
		_, err = late.server.Read(make([]byte, 1))
		wantReset(t, "service", err)
	})
}

// TestRelayInterrupted has signals rain on the process, as profilers and Go's
// own scheduler send them, while bulk moves.
func TestRelayInterrupted(t *testing.T) {
	data := random(8<<20, 26)
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGUSR1)
	defer signal.Stop(caught)
	stop := make(chan struct{})
	var rain sync.WaitGroup
	defer rain.Wait()
	defer close(stop)
	rain.Go(func() {
		threads := func() []os.DirEntry { d, _ := os.ReadDir("/proc/self/task"); return d }
		for tasks := threads(); ; tasks = threads() {
			for _, task := range tasks { // each thread, and so also the one in epoll_wait
				tid, _ := strconv.Atoi(task.Name())
				_ = syscall.Tgkill(os.Getpid(), tid, syscall.SIGUSR1)
				_ = syscall.Tgkill(os.Getpid(), tid, syscall.SIGURG)
			}
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Microsecond):
			}
		}
	})
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		c := carryNarrow(t, r, p)
		for range 2 {
			if err := bothWays(c, data, data); err != nil {
				t.Fatal(err)
			}
		}
		if len(caught) == 0 {
			t.Error("no signal was caught: the test shows nothing")
		}
		if e := c.finish(t); e.Reason != tunnel.Done || e.In != 16<<20 || e.Out != 16<<20 {
			t.Errorf("ended with %+v", e)
		}
	})
}
