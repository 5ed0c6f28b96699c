//go:build linux

package reliability

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// A service that is killed in mid-stream is known to its clients at once, as
// an abort; the next tunnels go to the endpoint that is left.
func TestServiceKilled(t *testing.T) {
	const clients = 50
	eachWay(t, func(t *testing.T, w way) {
		dying, living := startBackend(t, "discard"), testnet.Discard(t)
		g := start(t, options{Services: service("dying.test", dying.addr) + service("both.test", dying.addr, living.Addr())})
		var (
			wg     sync.WaitGroup
			killed atomic.Int64 // when, since clock; 0 before
			moving atomic.Int64
			worst  atomic.Int64
		)
		clock := time.Now()
		for i := range clients {
			c := g.mustDial(i)
			if err := w.ask(c, "dying.test"); err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetWriteDeadline(time.Now().Add(patience))
				p := make([]byte, 16<<10)
				_, err := c.Write(p)
				moving.Add(1)
				for err == nil { // the machine is not to be busy with this
					pause(t.Context(), 2*time.Millisecond)
					_, err = c.Write(p)
				}
				after := time.Since(clock) - time.Duration(killed.Load())
				if killed.Load() == 0 || testnet.EndingOf(err) != testnet.RST {
					t.Errorf("client %d: its stream ended with %v, want a reset after the kill", i, err)
				}
				for {
					was := worst.Load()
					if int64(after) <= was || worst.CompareAndSwap(was, int64(after)) {
						return
					}
				}
			})
		}
		testnet.Eventually(t, patience, func() bool { return moving.Load() == clients }, "all streams move")
		killed.Store(int64(time.Since(clock)))
		if err := dying.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		t.Logf("the last of %d clients was reset %v after the kill", clients, time.Duration(worst.Load()).Round(time.Millisecond))
		if d, limit := time.Duration(worst.Load()), testnet.Deadline(300*time.Millisecond); d > limit {
			t.Errorf("the last client was reset %v after the kill, want at most %v", d, limit)
		}
		for i := range 20 {
			began := time.Now()
			c := g.mustDial(100 + i)
			if err := w.ask(c, "both.test"); err != nil {
				t.Fatalf("with one endpoint left: %v", err)
			}
			if _, err := c.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			if took, limit := time.Since(began), testnet.Deadline(time.Second); took > limit {
				t.Errorf("with one endpoint left a tunnel took %v, want at most %v", took, limit)
			}
		}
		testnet.Eventually(t, patience, func() bool { return living.Accepted() == 20 }, "the endpoint that is left has them all")
	})
}

// A service that aborts after any byte of its answer has its client get an
// exact prefix and then a reset, whether the client had all of it before or the
// reset came right behind.
func TestServiceAbortsAtEveryOffset(t *testing.T) {
	answer := []byte("an answer of a few bytes, and of every byte of it there is a first part")
	eachWay(t, func(t *testing.T, w way) {
		b := testnet.NewBackend(t)
		g := start(t, options{Services: service("abrupt.test", b.Addr())})
		dial := g.through(w, b, "abrupt.test")
		aborted := 0.0
		for n := range len(answer) + 1 {
			for _, heard := range []bool{true, false} {
				client, server, err := dial(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if _, err := server.Write(answer[:n]); err != nil {
					t.Fatal(err)
				}
				if heard {
					if err := expect(client, answer[:n]); err != nil {
						t.Fatal(err)
					}
				}
				_ = testnet.Abort(server)
				aborted++
				_ = client.SetReadDeadline(time.Now().Add(patience))
				got, err := io.ReadAll(client)
				if !wasReset(err) {
					t.Errorf("aborted after %d bytes, heard %v: the client got %q and %v, want a reset", n, heard, got, err)
				}
				if !bytes.HasPrefix(answer[:n], got) || heard && len(got) > 0 {
					t.Errorf("aborted after %d bytes, heard %v: the client got %q", n, heard, got)
				}
				_ = client.Close()
			}
		}
		testnet.Eventually(t, patience, func() bool {
			m := g.metrics()
			return sum(m, "culvert_requests_total", `reason="reset"`) == aborted && sum(m, "culvert_requests_total") == aborted
		}, "%v tunnels are told to have been reset, and nothing else", aborted)
	})
}

// So does a proxy on the way out that aborts after any byte of what it says: in
// its yes, and the client is told no; behind it, and the client gets an exact
// prefix and then a reset.
func TestProxyAbortsAtEveryOffset(t *testing.T) {
	b := testnet.Echo(t)
	far := start(t, options{Listener: detecting, More: "limits: {connectionRatePerClient: -1}",
		Services: "  - {names: [\"*.out.test\"], endpoints: [\"" + b.Addr() + "\"]}\n"})
	var passes atomic.Int64 // bytes of far's
	proxy := testnet.Serve(t, func(c net.Conn) {
		n := passes.Load()
		up, err := net.Dial("tcp", far.addr)
		if err != nil {
			t.Error(err)
			return
		}
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = io.Copy(up, c) })
		_, _ = io.CopyN(c, up, n)
		_, _ = testnet.Abort(c), up.Close()
		wg.Wait()
	})
	var services strings.Builder
	ways := []string{`connect: "PROXY"`, `connect-h2: "PROXY"`, `websocket: "ws://PROXY/"`, `socks5: "PROXY"`}
	for i, way := range ways {
		fmt.Fprintf(&services, "  - {name: way%d.out.test, ports: [443], via: [{%s}]}\n", i, strings.ReplaceAll(way, "PROXY", proxy.Addr()))
	}
	near := start(t, options{Services: services.String()})
	const text = "some bytes there and back"
	want := byConnect.yes + text
	for i, way := range ways {
		proto, _, _ := strings.Cut(way, ":")
		t.Run(proto, func(t *testing.T) {
			asks := append(byConnect.preamble(fmt.Sprintf("way%d.out.test", i)), text...)
			refused, cut := 0, 0
			for whole := false; !whole && !t.Failed(); {
				n := refused + cut
				passes.Store(int64(n))
				c := near.mustDial(n % 200)
				_ = c.SetDeadline(time.Now().Add(patience))
				if _, err := c.Write(asks); err != nil {
					t.Fatal(err)
				}
				p, err := io.ReadAll(io.LimitReader(c, int64(len(want))))
				_ = c.Close()
				switch got := string(p); {
				case got == want:
					whole = true
				case strings.HasPrefix(got, byConnect.yes) && strings.HasPrefix(want, got) && wasReset(err):
					cut++
				case strings.HasPrefix(got, "HTTP/1.1 502 ") && cut == 0:
					refused++
				default:
					t.Errorf("aborted after %d bytes: the client got %q and %v", n, got, err)
				}
			}
			t.Logf("refused after up to %d bytes of the proxy's, reset after up to %d more", refused, cut)
			if refused == 0 || cut < len(text) {
				t.Errorf("refused %d times and reset %d times, want both, and a reset after each of %d bytes", refused, cut, len(text))
			}
		})
	}
}

// A closed port is a refusal at once, in the client's protocol; where another
// endpoint is left the client hears nothing of it, and the closed one is asked
// ever more seldom.
func TestServicePortClosed(t *testing.T) {
	eachWay(t, func(t *testing.T, w way) {
		b := testnet.Echo(t)
		// Failures are held against an address, whichever service has it: so
		// there are two.
		g := start(t, options{Services: service("closed.test", closedPort(t, 1)) + service("both.test", closedPort(t, 2), b.Addr())})
		var slowest time.Duration
		for i := range 20 {
			r := g.refused(w, i, "closed.test")
			slowest = max(slowest, r.after)
			if r.code != w.code["dial-failed"] || r.end != testnet.FIN {
				t.Errorf("a closed port got %v, want %d and an end", r, w.code["dial-failed"])
			}
			if w.yes != "" && !strings.Contains(r.text, "error=connection_refused") {
				t.Errorf("a closed port got %v, want error=connection_refused", r)
			}
		}
		if limit := testnet.Deadline(250 * time.Millisecond); slowest > limit {
			t.Errorf("a refusal took %v, want at most %v", slowest, limit)
		}
		crowd(t, 200, 1, func(i int) error {
			c, err := g.dial(i % 50)
			if err != nil {
				return err
			}
			defer c.Close()
			return w.enter(c, "both.test")
		})
		failures := g.metric("culvert_dial_failures_total", `service="both.test"`)
		t.Logf("refused within %v; 200 tunnels to a service half of which is closed dialed the closed half %v times", slowest, failures)
		if failures < 1 || failures > 20 {
			t.Errorf("200 tunnels dialed the closed endpoint %v times, want once and then seldom", failures)
		}
	})
}

// An endpoint that swallows everything costs 3 seconds, and costs them once:
// the next requests go to the others first.
func TestServiceIsABlackHole(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, w way) {
		t.Parallel()
		b := testnet.Echo(t)
		g := start(t, options{Services: service("hole.test", blackHole(t)) + service("both.test", blackHole(t), b.Addr()) +
			service("holes.test", blackHole(t), blackHole(t), blackHole(t), blackHole(t))})
		for _, tt := range []struct {
			name  string
			least time.Duration
			most  time.Duration
		}{
			{"hole.test", 3 * time.Second, 6 * time.Second},
			{"holes.test", 9 * time.Second, 14 * time.Second}, // three are tried
		} {
			t.Run(tt.name, func(t *testing.T) {
				t.Parallel()
				r := g.refused(w, 1, tt.name)
				if r.code != w.code["dial-timeout"] || r.after < tt.least || r.after > tt.most {
					t.Errorf("a black hole got %v, want %d after %v to %v", r, w.code["dial-timeout"], tt.least, tt.most)
				}
				if w.yes != "" && !strings.Contains(r.text, "error=connection_timeout") {
					t.Errorf("a black hole got %v, want error=connection_timeout", r)
				}
			})
		}
		t.Run("both.test", func(t *testing.T) {
			t.Parallel()
			var slow []time.Duration
			start := time.Now()
			for i := range 20 {
				began := time.Now()
				c, err := g.dial(10 + i)
				if err != nil {
					t.Fatal(err)
				}
				if err := w.enter(c, "both.test"); err != nil {
					t.Errorf("request %d: %v", i, err)
				}
				_ = c.Close()
				if took := time.Since(began); took >= 3*time.Second {
					slow = append(slow, took)
				}
			}
			// It is tried again after 5 s at the earliest, should the requests take so long.
			if most := 2 + int(time.Since(start)/(5*time.Second)); len(slow) > most {
				t.Errorf("%d of 20 requests waited for the black hole: %v", len(slow), slow)
			}
		})
	})
}

// blackHole returns an address that swallows connections: a listener whose
// queue is full drops what comes.
func blackHole(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	for range 10 {
		d := net.Dialer{Timeout: 200 * time.Millisecond}
		c, err := d.DialContext(ctx, "tcp", addr)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { _ = c.Close() })
	}
	t.Fatalf("the queue of %s never fills", addr)
	return ""
}

// Clients whose service reads nothing wait, and cost the gateway next to
// nothing but what the kernel holds.
func TestServiceReadsNothing(t *testing.T) {
	const clients = 100
	release := make(chan struct{})
	b := testnet.Serve(t, func(c net.Conn) { <-release; _, _ = io.Copy(io.Discard, c) })
	defer close(release)
	g := start(t, options{Services: service("mute.test", b.Addr())})
	g.collectGarbage()
	rss := g.rss()
	crowd(t, clients, clients, func(i int) error {
		c, err := g.dial(i)
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = c.Close() })
		if err := bySNI.ask(c, "mute.test"); err != nil {
			return err
		}
		p := make([]byte, 1<<20)
		_ = c.SetWriteDeadline(time.Now().Add(2 * time.Second))
		for range 64 {
			if _, err := c.Write(p); err != nil {
				return nil // it waits, as it should
			}
		}
		return fmt.Errorf("64 MiB went into a service that reads nothing")
	})
	grew := (g.rss() - rss) / clients
	t.Logf("a tunnel with its service blocked is %d B", grew)
	if limit := int64(64<<10 + 6<<10); grew > limit {
		t.Errorf("a tunnel with its service blocked is %d bytes of the gateway's memory, limit %d", grew, limit)
	}
}
