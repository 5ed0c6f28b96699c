//go:build linux

package reliability

import (
	"context"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// The deadline of a preamble counts from its first byte and no other: 5
// seconds, and more for a busy machine; one that each byte prolongs lasts for minutes.
const preambleDeadline, preambleSlack = 5 * time.Second, 7 * time.Second

// One process plays 5,000 clients that are all ended at once, and is late to
// notice.
var crowdSlack = testnet.Deadline(2 * time.Second)

// A flood of clients that begin and never finish costs little, ends on time,
// and shuts nobody out.
func TestSlowClientsShutNobodyOut(t *testing.T) {
	const (
		attackers = 5000 // more than the 4,096 unfinished preambles that are kept
		kept      = 4096
		honest    = 1000
		drippers  = 20 // of the attackers send a byte a second
		cost      = 5 << 10
	)
	eachWay(t, func(t *testing.T, w way) {
		b := testnet.Echo(t)
		g := start(t, options{Services: service("echo.test", b.Addr())})
		visit := func(i int) (time.Duration, error) {
			began := time.Now()
			c, err := g.dial(1000 + i%50)
			if err != nil {
				return 0, err
			}
			defer c.Close()
			err = w.enter(c, "echo.test")
			return time.Since(began), err
		}
		calm := make([]time.Duration, 200)
		crowd(t, len(calm), 4, func(i int) (err error) { calm[i], err = visit(i); return err })
		g.collectGarbage()
		fds, rss := g.descriptors(), g.rss()

		part := w.preamble(strings.Repeat("long.", 20) + "echo.test")[:100]
		var (
			wg    sync.WaitGroup
			lived = make([]time.Duration, attackers) // from accept, as far as a client can tell
			conns = make([]*net.TCPConn, attackers)
		)
		defer func() {
			for _, c := range conns {
				if c != nil {
					_ = c.Close()
				}
			}
		}()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		crowd(t, attackers, 32, func(i int) error {
			c, err := g.dial(i % 100)
			if err != nil {
				return err
			}
			conns[i] = c
			accepted := time.Now()
			send := part
			if i%(attackers/drippers) == attackers/drippers-1 {
				send = part[:1]
				wg.Go(func() { drip(ctx, c, part[1:]) })
			}
			if _, err := c.Write(send); err != nil {
				return err
			}
			wg.Go(func() {
				_ = c.SetReadDeadline(time.Now().Add(patience))
				_, _ = io.Copy(io.Discard, c)
				lived[i] = time.Since(accepted)
			})
			return nil
		})
		// Those that are too many have been accepted, and are ended as the gateway
		// comes to it.
		open := 0
		testnet.Eventually(t, crowdSlack, func() bool { open = g.descriptors() - fds; return open <= kept+50 }, "of %d unfinished preambles about %d are kept", attackers, kept)
		grew := g.rss() - rss
		if open < kept*9/10 {
			t.Errorf("%d of %d unfinished preambles are kept, want about %d", open, attackers, kept)
		}
		t.Logf("an unfinished preamble is %d B of RSS, %d B after a collection", grew/int64(open), g.afterGarbage(g.rss, rss)/int64(open))
		if grew > cost*int64(open) {
			t.Errorf("%d unfinished preambles made the gateway grow by %d bytes, %d each, limit %d", open, grew, grew/int64(open), cost)
		}

		times := make([]time.Duration, honest)
		crowd(t, honest, 4, func(i int) (err error) { times[i], err = visit(i); return err })
		usual, p99 := percentile(calm, 99), percentile(times, 99)
		t.Logf("honest clients: p99 %v, %v with nobody else there", p99, usual)
		if testnet.Measuring && p99 > 2*usual+200*time.Millisecond { // the attackers' own process is busy, too
			t.Errorf("honest clients waited %v, twice %v is the limit", p99, usual)
		}

		wg.Wait()
		slices.Sort(lived)
		t.Logf("attackers lived for %v to %v", lived[0].Round(time.Millisecond), lived[attackers-1].Round(time.Millisecond))
		if last := lived[attackers-1]; last > preambleDeadline+crowdSlack {
			t.Errorf("an unfinished preamble was held for %v, limit %v", last, preambleDeadline)
		}
		// Not one of them has closed its end.
		testnet.Eventually(t, preambleSlack, func() bool { return g.descriptors() <= fds+4 }, "the gateway holds nothing of them any more")
		// What is promised is between the gateway's accept and its close: by its
		// own account, which no crowd in another process makes late. A machine
		// that is busy for a while makes some late, and a wrong limit all.
		ages := g.timedOut()
		median := percentile(ages, 50)
		t.Logf("the gateway held %d of them for %v to %v, half of them for %v at most", len(ages),
			ages[0].Round(time.Millisecond), ages[len(ages)-1].Round(time.Millisecond), median.Round(time.Millisecond))
		if len(ages) < kept*9/10 || ages[0] < preambleDeadline || median > preambleDeadline+testnet.Deadline(500*time.Millisecond) {
			t.Errorf("%d preambles were held for %v and more, half of them for %v at most; want about %d, for %v and no half second more",
				len(ages), ages[0], median, kept, preambleDeadline)
		}
		if got := b.Accepted(); got != honest+int64(len(calm)) {
			t.Errorf("the service was dialed %d times, want %d", got, honest+len(calm))
		}
	})
}

// timedOut returns how long each connection was held whose preamble was not
// complete in time, the shortest first.
func (g *gateway) timedOut() (ages []time.Duration) {
	g.t.Helper()
	told := func() []entry { return g.entries(func(e entry) bool { return e.str("reason") == "hello-timeout" }) }
	testnet.Eventually(g.t, patience, func() bool {
		m := g.metrics()
		return float64(len(told())) >= sum(m, "culvert_connections_refused_total", `reason="hello-timeout"`)-sum(m, "culvert_log_lines_dropped_total")
	}, "the log has a line of each preamble that was not complete in time")
	for _, e := range told() {
		lasted, _ := e["lasted"].(float64) // nanoseconds
		ages = append(ages, time.Duration(lasted))
	}
	slices.Sort(ages)
	return ages
}

// drip sends a byte a second.
func drip(ctx context.Context, c net.Conn, p []byte) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for i := range p {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if _, err := c.Write(p[i : i+1]); err != nil {
			return
		}
	}
}

// The deadlines are absolute in every phase: bytes don't renew them, and
// neither does going from one phase to the next.
func TestDeadlinesAreAbsolute(t *testing.T) {
	t.Parallel()
	const second = time.Second
	b := testnet.Echo(t)
	g := start(t, options{Services: service("echo.test", b.Addr())})
	pinned := start(t, options{Services: service("echo.test", b.Addr()), Listener: ", protocols: [sni]"})
	pinnedHTTP := start(t, options{Services: service("echo.test", b.Addr()), Listener: ", protocols: [connect]"})
	whole := hello("echo.test")
	head := byConnect.preamble("echo.test")
	fragments := records(helloBody("echo.test", -1), 1)
	for _, tt := range []struct {
		name  string
		to    *gateway
		first time.Duration // of silence
		bytes []byte        // then one of them a second
		want  time.Duration // from accept to the end
	}{
		{"silence", g, 0, nil, 10 * second},
		{"silence where only TLS is spoken", pinned, 0, nil, 10 * second},
		{"silence where only CONNECT is spoken", pinnedHTTP, 0, nil, 10 * second},
		{"a hello by the byte", g, 0, whole, 5 * second},
		{"a hello in records of a byte", g, 0, fragments, 5 * second},
		{"a head by the byte", g, 0, head, 5 * second},
		{"a hello by the byte where only TLS is spoken", pinned, 0, whole, 5 * second},
		{"a head by the byte where only CONNECT is spoken", pinnedHTTP, 0, head, 5 * second},
		{"an undecided method by the byte", g, 0, []byte("CONNECTCONNECT"), 5 * second},
		{"silence and then a hello by the byte", g, 4 * second, whole, 9 * second},
		{"silence and then a head by the byte", g, 9 * second, head, 14 * second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			began := time.Now() // the gateway's time begins between this and accepted
			c, err := tt.to.dial(1)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			accepted := time.Now()
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() {
				select {
				case <-ctx.Done():
				case <-time.After(tt.first):
					if len(tt.bytes) > 0 {
						_, _ = c.Write(tt.bytes[:1])
						drip(ctx, c, tt.bytes[1:])
					}
				}
			})
			_ = c.SetReadDeadline(time.Now().Add(patience))
			_, _ = io.Copy(io.Discard, c)
			if lived := time.Since(accepted); time.Since(began) < tt.want-100*time.Millisecond || lived > tt.want+preambleSlack {
				t.Errorf("ended after %v, want %v", lived, tt.want)
			}
			cancel()
			wg.Wait()
		})
	}
}

// Who takes a byte a second and sends one is carried like anybody else, be it a
// client or a service: each byte arrives, what the other side pours meanwhile
// waits, and none of it is lost.
func TestByteASecond(t *testing.T) {
	t.Parallel()
	const (
		poured = 64 << 20 // more than sockets take
		stream = testnet.Stream(7)
	)
	b := testnet.NewBackend(t)
	g := start(t, options{Services: service("slow.test", b.Addr())})
	eachWay(t, func(t *testing.T, w way) {
		t.Parallel()
		for _, side := range []testnet.Side{testnet.ClientSide, testnet.ServerSide} {
			t.Run(side.String(), func(t *testing.T) {
				t.Parallel()
				slow, fast, err := g.through(w, b, "slow.test")(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if side == testnet.ServerSide {
					slow, fast = fast, slow
				}
				defer slow.Close()
				defer fast.Close()
				var wg sync.WaitGroup
				defer wg.Wait()
				done := make(chan error, 1)
				go func() {
					p := make([]byte, 1<<20)
					_ = fast.SetWriteDeadline(time.Now().Add(2 * patience))
					for off := int64(0); off < poured; off += int64(len(p)) {
						stream.Fill(p, off)
						if _, err := fast.Write(p); err != nil {
							done <- err
							return
						}
					}
					done <- testnet.CloseWrite(fast)
				}()
				text := []byte("slowly") // a byte for each second
				wg.Go(func() {
					drip(t.Context(), slow, text)
					_ = testnet.CloseWrite(slow)
				})
				one := make([]byte, 1)
				for i := range text {
					if err := expect(fast, text[i:i+1]); err != nil {
						t.Fatalf("byte %d of the slow side: %v", i, err)
					}
					_ = slow.SetReadDeadline(time.Now().Add(patience))
					if _, err := io.ReadFull(slow, one); err != nil {
						t.Fatalf("byte %d for the slow side: %v", i, err)
					}
					if err := stream.Check(one, int64(i)); err != nil {
						t.Fatal(err)
					}
				}
				select {
				case err := <-done:
					t.Fatalf("%d MiB went to one who took %d bytes, %v", poured>>20, len(text), err)
				default:
				}
				p, off := make([]byte, 1<<20), int64(len(text))
				for err == nil {
					var n int
					_ = slow.SetReadDeadline(time.Now().Add(patience))
					n, err = slow.Read(p)
					if err := stream.Check(p[:n], off); err != nil {
						t.Fatal(err)
					}
					off += int64(n)
				}
				if err != io.EOF || off != poured {
					t.Errorf("the slow side got %d of %d bytes in the end, %v", off, poured, err)
				}
				if err := <-done; err != nil {
					t.Error(err)
				}
				_ = fast.SetReadDeadline(time.Now().Add(patience))
				if n, err := fast.Read(one); n != 0 || err != io.EOF {
					t.Errorf("the other side read %d bytes more and %v, want the end", n, err)
				}
			})
		}
	})
}
