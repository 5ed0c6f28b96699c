//go:build linux

package reliability

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// What a client may send before it is known where to has a limit, and the
// limit is exact.
func TestPreambleCaps(t *testing.T) {
	b := testnet.Echo(t)
	g := start(t, options{Services: service("echo.test", b.Addr()) +
		service(strings.Repeat("a.", 122)+"echo.test", b.Addr())}) // 253 bytes
	name := func(size int) string { return strings.Repeat("a.", 122)[:size-len("echo.test")] + "echo.test" }
	body := func(size int) []byte { return helloBody("echo.test", size-len(helloBody("echo.test", 0))) }
	head := func(size int) []byte {
		const start, end = "CONNECT echo.test:443 HTTP/1.1\r\nHost: x\r\nX: ", "\r\n\r\n"
		return []byte(start + strings.Repeat("x", size-len(start)-len(end)) + end)
	}
	line := func(size int) []byte {
		const start, end = "CONNECT ", " HTTP/1.1\r\n"
		return []byte(start + strings.Repeat("x", size-len(start)-len(end)) + end + "Host: x\r\n\r\n")
	}
	fields := func(n int) []byte {
		return []byte("CONNECT echo.test:443 HTTP/1.1\r\nHost: x\r\n" + strings.Repeat("X: x\r\n", n-1) + "\r\n")
	}
	const passes = 0
	for _, tt := range []struct {
		name string
		raw  []byte
		code int
	}{
		{"hello of 65,536 bytes", records(body(65536), 16<<10), passes},
		{"hello of 69,633 bytes", records(body(69633), 16<<10), 47},
		{"hello in 4,096 records", records(body(4092), 1), passes},
		{"hello in 4,097 records", records(body(4093), 1), 47},
		{"record of 16,384 bytes", records(body(20000), 16384), passes},
		{"record of 16,385 bytes", records(body(20000), 16385), 22},
		{"name of 253 bytes", hello(name(253)), passes},
		{"name of 254 bytes", hello("b" + name(253)), 47},
		{"head of 16,384 bytes", head(16384), passes},
		{"head of 16,385 bytes", head(16385), 431},
		{"request line of 8,192 bytes", line(8192), 400}, // too long for a name, but read
		{"request line of 8,193 bytes", line(8193), 414},
		{"100 fields", fields(100), passes},
		{"101 fields", fields(101), 431},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := b.Accepted()
			if tt.code != passes {
				if r := g.refusedRaw(1, tt.raw); r.code != tt.code {
					t.Errorf("got %v, want %d", r, tt.code)
				}
				if n := b.Accepted() - before; n != 0 {
					t.Errorf("the service was dialed %d times, want never", n)
				}
				return
			}
			c := g.mustDial(1)
			if _, err := c.Write(tt.raw); err != nil {
				t.Fatal(err)
			}
			want := tt.raw
			if tt.raw[0] == 'C' {
				want = []byte(byConnect.yes)
			}
			if err := expect(c, want); err != nil {
				t.Error(err)
			} else if err := echo(c, "x"); err != nil {
				t.Error(err)
			}
		})
	}
}

// A fixed limit on one source is exact, and taking all of it takes nothing from
// others.
func TestSourceCaps(t *testing.T) {
	refusedAtOnce := func(g *gateway, source int) error {
		c, err := g.dial(source)
		if errors.Is(err, syscall.ECONNRESET) {
			return nil
		} else if err != nil {
			return err
		}
		defer c.Close()
		_, _ = c.Write([]byte{22}) // or it would wait in the kernel for a second
		// Less than a preamble has, which ends by a reset as well.
		_ = c.SetReadDeadline(time.Now().Add(4 * time.Second))
		if _, err := c.Read(make([]byte, 1)); !wasReset(err) {
			return fmt.Errorf("it ended with %v, want a reset at once", err)
		}
		return nil
	}
	others := func(t *testing.T, g *gateway) {
		t.Helper()
		for i := range 20 {
			if !g.reaches([]way{bySNI, byConnect}[i%2], "echo.test") {
				t.Error("another source is refused too")
			}
		}
	}
	b := testnet.Echo(t)
	t.Run("256 unfinished preambles", func(t *testing.T) {
		g := start(t, options{Services: service("echo.test", b.Addr()), More: "limits: {maxPendingPerClient: 256, handshakeTimeout: 5m}"})
		var conns []net.Conn
		for i := range 256 {
			c := g.mustDial(1)
			if _, err := c.Write([]byte{22, 'C'}[i%2 : i%2+1]); err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
		last := g.mustDial(1)
		_, _ = last.Write([]byte{22})
		conns = append(conns, last)
		// One of them is one too many. Which is for the kernel to say: it hands
		// them over as their first bytes come, and those may be sent twice.
		ended := func() (n int) {
			for _, c := range conns {
				_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
				if _, err := c.Read(make([]byte, 1)); testnet.EndingOf(err) != testnet.Open {
					n++
				}
			}
			return n
		}
		testnet.Eventually(t, patience, func() bool { return ended() == 1 }, "one of 257 is refused")
		others(t, g)
		if n := ended(); n != 1 {
			t.Errorf("%d of 257 were ended, want 1", n)
		}
	})
	t.Run("2,000 connections", func(t *testing.T) {
		g := start(t, options{Services: service("echo.test", b.Addr()), More: "limits: {maxConnectionsPerClient: 2000}"})
		conns := make([]*net.TCPConn, 2000)
		crowd(t, len(conns), 8, func(i int) (err error) {
			if conns[i], err = g.dial(1); err != nil {
				return err
			}
			return []way{bySNI, byConnect}[i%2].enter(conns[i], "echo.test")
		})
		if err := refusedAtOnce(g, 1); err != nil {
			t.Errorf("number 2,001: %v", err)
		}
		others(t, g)
		for _, c := range conns[:10] {
			_ = c.Close()
		}
		testnet.Eventually(t, patience, func() bool { return refusedAtOnce(g, 1) != nil }, "there is room again")
		for _, c := range conns {
			_ = c.Close()
		}
	})
	t.Run("200 connections at once", func(t *testing.T) {
		const tries, share = 2000, 200
		g := start(t, options{Services: service("echo.test", b.Addr()), More: "limits: {connectionRatePerClient: 200}"})
		began := time.Now()
		for range tries {
			if c, err := g.dial(1); err == nil {
				_ = c.Close()
			}
		}
		var refused, gone float64
		testnet.Eventually(t, patience, func() bool {
			m := g.metrics()
			refused = sum(m, "culvert_connections_refused_total", `reason="overload"`)
			gone = sum(m, "culvert_connections_refused_total", `reason="no-hello"`)
			return refused+gone == tries
		}, "%d connections are counted", tries)
		took := time.Since(began) // the last of them may have waited to be accepted
		others(t, g)
		t.Logf("of %d connections in %v, %v were served", tries, took.Round(time.Millisecond), gone)
		if most := share * (1 + took.Seconds()); gone < share || gone > most+1 {
			t.Errorf("of %d connections in %v, %v were served, want %d to %.0f", tries, took, gone, share, most)
		}
	})
}

// What attackers choose makes no metrics: the set of time series is the
// configuration's.
func TestNamesMakeNoMetrics(t *testing.T) {
	b := testnet.Echo(t)
	g := start(t, options{Services: service("echo.test", b.Addr()) + service("*.wild.test", b.Addr())})
	visit := func(i int) error {
		c, err := g.dial(i % 50)
		if err != nil {
			return err
		}
		defer c.Close()
		w := []way{bySNI, byConnect}[i%2]
		if i%4 < 2 {
			return w.enter(c, fmt.Sprintf("s%d.wild.test", i))
		}
		r := request(c, w.preamble(fmt.Sprintf("s%d.absent.test", i)))
		if r.code != w.code["no-route"] {
			return fmt.Errorf("got %v", r)
		}
		return nil
	}
	crowd(t, 8, 1, visit)
	testnet.Eventually(t, patience, func() bool { return g.metric("culvert_tunnels_open") == 0 }, "the tunnels are over")
	before := len(g.metrics())
	crowd(t, 1000, 8, visit)
	testnet.Eventually(t, patience, func() bool { return g.metric("culvert_tunnels_open") == 0 }, "the tunnels are over")
	if after := len(g.metrics()); after != before {
		t.Errorf("1,000 names made %d time series of %d", after, before)
	}
	_, body, err := g.get("/metrics")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(body, "absent") || strings.Contains(body, "s4.wild") {
		t.Error("a name that a client chose is in the metrics")
	}
}
