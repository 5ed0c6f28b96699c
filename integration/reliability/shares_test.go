//go:build linux

package reliability

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// underLimit runs a gateway with so many descriptors.
func underLimit(n int) []string {
	return []string{"sh", "-c", fmt.Sprintf(`ulimit -n %d; exec "$0" "$@"`, n)}
}

// openSoon opens a tunnel to an echo service from the n-th client's address and
// uses it within a second (testnet.Deadline): an honest client is served while
// another one takes all it can.
func (g *gateway) openSoon(w way, n int, target string) (net.Conn, error) {
	began := time.Now()
	c, err := g.dial(n)
	if err != nil {
		return nil, err
	}
	if err := w.enter(c, target); err != nil {
		_ = c.Close()
		return nil, err
	}
	if took, limit := time.Since(began), testnet.Deadline(time.Second); took > limit {
		_ = c.Close()
		return nil, fmt.Errorf("it took %v, want %v at most", took, limit)
	}
	return c, nil
}

// othersAreServed opens a tunnel for each of n more clients, which all stand at
// once.
func (g *gateway) othersAreServed(t *testing.T, n int, target string) {
	t.Helper()
	var stay many
	defer stay.close()
	var failed atomic.Int32
	crowd(t, n, 4, func(i int) error {
		c, err := g.openSoon([]way{bySNI, byConnect}[i%2], 1000+i, target)
		if err != nil {
			failed.Add(1)
			return fmt.Errorf("another client: %w", err)
		}
		stay.add(c)
		return nil
	})
	if failed.Load() > 0 {
		m := g.metrics()
		t.Logf("%v of %v descriptors are taken, by %v tunnels", sum(m, "culvert_descriptors_used"), sum(m, "culvert_descriptors_limit"), sum(m, "culvert_tunnels_open"))
	}
}

// One address that takes all the tunnels it can get, by whatever carrier, gets
// most of what there is, is refused with a reason, and takes nothing from other clients.
func TestOneClientLeavesRoomForOthers(t *testing.T) {
	// The identity and the address of a client have a share each: double HBONE uses both.
	const limit, others, least = 700, 20, 200
	ca, keys := newCA(t)
	echo := startBackend(t, "echo")
	far := everyWay(t, ca, "127.1.0.0/16", onlyService)
	far.opts.Wrap = underLimit(limit)
	far.serve(service(onlyService, echo.addr))
	ways := carriers(t, far, relayed(t, ca, far), keys)
	ways = append(ways, carrier{"sni", dialFunc(func() (net.Conn, error) {
		c, err := far.dial(1)
		if err == nil {
			if err = bySNI.enter(c, onlyService); err != nil {
				_ = c.Close()
			}
		}
		return c, err
	}), true})
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			var stay many
			defer func() {
				stay.close()
				if c, ok := way.dialer.(io.Closer); ok {
					_ = c.Close()
				}
				testnet.Eventually(t, patience, func() bool { return far.metric("culvert_tunnels_open") == 0 }, "the tunnels are over")
			}()
			var opened atomic.Int32
			var refused atomic.Pointer[error]
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					for refused.Load() == nil && opened.Load() < limit {
						ctx, cancel := context.WithTimeout(t.Context(), patience)
						c, err := way.open(ctx, onlyService)
						cancel()
						if err == nil { // some carriers say no only now; and a tunnel that was never used would count as aborted
							if err = pinged(c); err != nil {
								_ = c.Close()
							}
						}
						if err != nil {
							refused.CompareAndSwap(nil, &err)
							return
						}
						stay.add(c)
						opened.Add(1)
					}
				})
			}
			wg.Wait()
			if refused.Load() == nil {
				t.Fatalf("%d tunnels of one client stand with %d descriptors, and none was refused", opened.Load(), limit)
			}
			t.Logf("%d tunnels, and then: %v", opened.Load(), *refused.Load())
			if opened.Load() < least {
				t.Errorf("one client by itself got %d tunnels, want %d at least", opened.Load(), least)
			}
			said := func(e entry) bool { return strings.Contains(e.str("err"), "descriptors are scarce") }
			testnet.Eventually(t, patience, func() bool { return len(far.entries(said)) > 0 }, "the log says what is scarce")
			far.othersAreServed(t, others, onlyService)
		})
	}
}

// pinged sends a byte and waits for its echo.
func pinged(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(patience))
	defer c.SetDeadline(time.Time{})
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

// Tunnels of one address stand that take four fifths of the descriptors, and a
// hundred other addresses are served meanwhile, without one failure.
func TestManyTunnelsOfOneClient(t *testing.T) {
	n := *oneClient
	others := min(100, n/8)
	echo := startBackend(t, "echo")
	g := start(t, options{Services: service("echo.test", echo.addr), Wrap: underLimit(n*5/2 + 300)})
	conns := make([]*net.TCPConn, n)
	began := time.Now()
	crowd(t, n, 8, func(i int) (err error) {
		if conns[i], err = g.dial(1); err != nil {
			return err
		}
		return []way{bySNI, byConnect}[i%2].enter(conns[i], "echo.test")
	})
	if t.Failed() {
		t.FailNow()
	}
	t.Logf("%d tunnels of one address in %v", n, time.Since(began).Round(time.Millisecond))
	g.othersAreServed(t, others, "echo.test")
	crowd(t, n, 8, func(i int) error {
		defer conns[i].Close()
		return pinged(conns[i])
	})
}

// At its defaults a gateway takes connections of one address as fast as it can:
// a load generator is not told that it is too fast.
func TestLoadOfOneClient(t *testing.T) {
	const n = 3000
	echo := startBackend(t, "echo")
	g := start(t, options{Services: service("echo.test", echo.addr)})
	began := time.Now()
	crowd(t, n, 8, func(i int) error {
		c, err := g.dial(1)
		if err != nil {
			return err
		}
		defer c.Close()
		return bySNI.enter(c, "echo.test")
	})
	took := time.Since(began)
	t.Logf("%d connections in %v, %.0f a second", n, took.Round(time.Millisecond), n/took.Seconds())
}

// A client that has its tunnels accepted and resets them before it could be of
// any use has each dialed and logged at no cost of its own: it is refused more
// of them, and others do not notice. A tunnel that was of use is nobody's abort.
func TestAbortsSoonAfterTheAnswer(t *testing.T) {
	const tries = 3000
	const most, perSecond = 500, 100 // as in docs/guides/gateway.md
	ca, keys := newCA(t)
	silent := startBackend(t, "discard")
	echo := startBackend(t, "echo")
	g := everyWay(t, ca, "127.1.0.0/16", onlyService)
	g.serve(service(onlyService, silent.addr) + service("echo.test", echo.addr))
	abort := func(c net.Conn) {
		if a, ok := c.(tunnel.Aborter); ok {
			_ = a.Abort()
			return
		}
		_ = c.Close()
	}
	for i, way := range []carrier{
		{"connect-h2", &h2.Dialer{Proxy: g.addr, Dialer: source(1)}, false},
		{"hbone", &hbone.Dialer{Gateway: g.ip + portHBONE, Dialer: source(2), TLS: keys, Verifier: verifier(t, keys)}, false},
		{overHTTP2, upstream.NewWebSocketDialer(&ws.Dialer{URL: "wss://" + g.ip + portTLS, Dialer: source(3), TLS: keys}), false},
		{"connect-h3", &h3.Dialer{Proxy: g.ip + portTLS, TLS: keys}, false},
	} {
		t.Run(way.name, func(t *testing.T) {
			defer way.dialer.(io.Closer).Close()
			var accepted, refused atomic.Int32
			began := time.Now()
			crowd(t, tries, 8, func(int) error {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				c, err := way.open(ctx, onlyService)
				switch {
				case err == nil:
					accepted.Add(1)
					abort(c)
				case tunnel.ReasonOf(err) == tunnel.Overload:
					refused.Add(1)
				default:
					return err
				}
				return nil
			})
			took := time.Since(began)
			t.Logf("in %v: %d accepted, %d refused", took.Round(time.Millisecond), accepted.Load(), refused.Load())
			// The ends of the last ones may not have been noticed as the next are accepted.
			if limit := most + perSecond*(1+took.Seconds()) + 8; float64(accepted.Load()) > limit || refused.Load() == 0 {
				t.Errorf("%d were accepted, want %.0f at most, and the others refused", accepted.Load(), limit)
			}
			g.othersAreServed(t, 10, "echo.test")
			// The same address, on a connection of its own.
			c, err := g.openSoon(byConnect, i+1, "echo.test")
			if err != nil {
				t.Fatalf("a connection of its own: %v", err)
			}
			_ = c.Close()
		})
	}
	t.Run("after an answer", func(t *testing.T) {
		d := &h2.Dialer{Proxy: g.addr, Dialer: source(9)}
		defer d.Close()
		crowd(t, 2*most, 8, func(int) error {
			c, err := d.DialContext(t.Context(), "tcp", "echo.test:443")
			if err != nil {
				return err
			}
			defer abort(c)
			return pinged(c)
		})
	})
}

// Connections that have asked for nothing yet, of one address, make room for
// those of others, not the other way round.
func TestPendingConnectionsOfOneClient(t *testing.T) {
	const room, mine = 200, 20
	b := testnet.Echo(t)
	g := start(t, options{Services: service("echo.test", b.Addr()), More: fmt.Sprintf("limits: {maxPendingConnections: %d}", room)})
	var honest []*net.TCPConn
	for i := range mine {
		c := g.mustDial(100 + i)
		if _, err := c.Write(hello("echo.test")[:20]); err != nil {
			t.Fatal(err)
		}
		honest = append(honest, c)
	}
	var stay many
	defer stay.close()
	for range 2 * room {
		c := g.mustDial(1)
		if _, err := c.Write(hello("echo.test")[:20]); err != nil && !wasReset(err) {
			t.Fatal(err)
		}
		stay.add(c)
	}
	testnet.Eventually(t, patience, func() bool {
		return g.metric("culvert_connections_refused_total", `reason="overload"`) >= room
	}, "%d of one address made room", room)
	for i, c := range honest {
		if _, err := c.Write(hello("echo.test")[20:]); err != nil {
			t.Errorf("honest client %d: %v", i, err)
		} else if err := expect(c, hello("echo.test")); err != nil {
			t.Errorf("honest client %d, whose hello came in two parts: %v", i, err)
		}
	}
}
