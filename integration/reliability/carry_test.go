//go:build linux

package reliability

import (
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// Every byte arrives, in order and once, whatever the sizes and the pauses; an
// abort leaves an exact prefix and never looks like an end.
func TestBytesArriveExactly(t *testing.T) {
	eachWay(t, func(t *testing.T, w way) {
		b := testnet.NewBackend(t)
		g := start(t, options{Services: service("chaos.test", b.Addr())})
		chaos(t, g, w, b, *volume<<20)
	})
}

// chaos is chaosOver by one of the two ways.
func chaos(t *testing.T, g *gateway, w way, b *testnet.Backend, total int64) {
	t.Helper()
	chaosOver(t, g.through(w, b, "chaos.test"), total)
}

// chaosOver runs seeded plans, four at a time, until total bytes have arrived.
func chaosOver(t *testing.T, dial testnet.Dial, total int64) {
	t.Helper()
	var seed atomic.Uint64
	var moved, aborts atomic.Int64
	crowd(t, 4, 4, func(int) error {
		for moved.Load() < total && !t.Failed() {
			p := testnet.Random(seed.Add(1), 8<<20)
			r := testnet.Run(t.Context(), t, dial, p)
			moved.Add(r.Up + r.Down)
			if p.Abort != testnet.Neither {
				aborts.Add(1)
			}
		}
		return nil
	})
	t.Logf("%d MiB in %d tunnels, %d of them aborted", moved.Load()>>20, seed.Load(), aborts.Load())
}

// An end of stream is carried as one, and a reset as a reset, both ways.
func TestEndingsAreCarried(t *testing.T) {
	eachWay(t, func(t *testing.T, w way) {
		b := testnet.NewBackend(t)
		g := start(t, options{Services: service("end.test", b.Addr())})
		testnet.TestEndings(t, g.through(w, b, "end.test"), testnet.Transparent())
	})
}

// A tunnel with one direction ended and the other silent is reset at its
// limit, and no other is touched. The limit is three seconds here: the default
// of a minute would make this a test of a minute.
func TestHalfClosedAndSilent(t *testing.T) {
	t.Parallel()
	const limit = 3 * time.Second
	b := testnet.NewBackend(t)
	g := start(t, options{Services: service("half.test", b.Addr()), More: "limits: {halfClosedTimeout: 3s}"})
	eachWay(t, func(t *testing.T, w way) {
		t.Parallel()
		dial := g.through(w, b, "half.test")
		open := func() (client, server net.Conn) {
			client, server, err := dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = client.Close()
				_ = server.Close()
			})
			return client, server
		}
		end := func(c net.Conn) testnet.Ending {
			_ = c.SetReadDeadline(time.Now().Add(patience))
			_, err := io.Copy(io.Discard, c)
			if err == nil {
				err = io.EOF
			}
			return testnet.EndingOf(err)
		}
		idleClient, idleServer := open()
		for _, half := range []string{"client", "service"} {
			closes, waits := open()
			if half == "service" {
				closes, waits = waits, closes
			}
			began := time.Now()
			if err := testnet.CloseWrite(closes); err != nil {
				t.Fatal(err)
			}
			if e := end(waits); e != testnet.FIN {
				t.Fatalf("%s: its end of stream came as %s", half, e)
			}
			if e := end(closes); e != testnet.RST {
				t.Errorf("%s half-closed and the other silent: it saw %s, want RST", half, e)
			}
			if took := time.Since(began); took < limit || took > limit+10*time.Second {
				t.Errorf("%s half-closed and the other silent: reset after %v, want %v", half, took, limit)
			}
		}
		// Bytes re-arm the limit.
		busyClient, busyServer := open()
		if err := testnet.CloseWrite(busyClient); err != nil {
			t.Fatal(err)
		}
		const often = limit / 8 // or a busy machine is late
		for i := range 12 {
			<-time.After(often)
			if _, err := busyServer.Write([]byte{byte(i)}); err != nil {
				t.Fatal(err)
			}
			if err := expect(busyClient, []byte{byte(i)}); err != nil {
				t.Fatalf("half-closed with a byte every %v: after %d: %v", often, i, err)
			}
		}
		// Open and idle is no matter of this limit.
		for _, pair := range [][2]net.Conn{{idleClient, idleServer}, {idleServer, idleClient}} {
			if _, err := fmt.Fprint(pair[0], "still here"); err != nil {
				t.Fatal(err)
			}
			if err := expect(pair[1], []byte("still here")); err != nil {
				t.Errorf("the idle tunnel: %v", err)
			}
		}
	})
}
