//go:build linux

package reliability

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/connect/h2"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// streamBytes of an idle tunnel that shares its connection, whatever the build.
const streamBytes = 4 << 10

// Many tunnels over few connections: one at rest holds no goroutine and no
// buffer either, be it new or has it been used, and works when it is wanted.
func TestIdleStreams(t *testing.T) {
	echo := startBackend(t, "echo")
	g := start(t, options{Services: service("echo.test", echo.addr)})
	g.holdStreams(t, *idleStreams, "echo.test:443")
}

// Nor does one hold a descriptor where it goes on to another gateway by HTTP/2:
// both of its ends are streams on connections of many. So there may be more of
// them than a process may have descriptors. The gateways behind
// have one for each, and are several, each with a service of its own.
func TestIdleStreamsOnward(t *testing.T) {
	const most = 16_000 // tunnels for a process that may have 20,000 descriptors
	var services string
	var targets []string
	for i := range 1 + *idleOnward/most {
		name := fmt.Sprintf("echo%d.test", i)
		far := start(t, options{
			Services: service(name, startBackend(t, "echo").addr),
			More:     "limits: {maxConnectionsPerClient: -1, connectionRatePerClient: -1}", // its one client is a gateway
		})
		services += fmt.Sprintf("  - {name: %s, ports: [443], via: [{connect-h2: \"%s\"}]}\n", name, far.addr)
		targets = append(targets, name+":443")
	}
	g := start(t, options{Services: services})
	g.holdStreams(t, *idleOnward, targets...)
}

// holdStreams opens n tunnels to the targets in turn, over as few connections as
// they fit on and over 50 at least, and weighs them.
func (g *gateway) holdStreams(t *testing.T, n int, targets ...string) {
	t.Helper()
	conns := max(50, (n+h2.DefaultStreams-1)/h2.DefaultStreams) // no more fit on one
	var source atomic.Int32
	d := &h2.Dialer{
		Proxy: g.addr, Parallel: conns, Ping: time.Hour,
		Dialer: dialFunc(func() (net.Conn, error) { return dialFrom(int(source.Add(1)), g.addr) }),
	}
	defer d.Close()
	open := func(i int) (*h2.Stream, error) {
		c, err := d.DialContext(t.Context(), "tcp", targets[i%len(targets)])
		if err != nil {
			return nil, err
		}
		return c.(*h2.Stream), nil
	}

	// What the connections and the first tunnels take is not what a tunnel does.
	// They are open at once, or a few connections would do.
	first := make([]*h2.Stream, 2*conns*8)
	crowd(t, len(first), 16, func(i int) (err error) {
		if first[i], err = open(i); err == nil {
			_, err = first[i].Write([]byte{7})
		}
		return err
	})
	if t.Failed() {
		t.FailNow()
	}
	crowd(t, len(first), 16, func(i int) error {
		defer first[i].Close()
		_ = first[i].SetDeadline(time.Now().Add(patience))
		if err := first[i].CloseWrite(); err != nil {
			return err
		}
		_, err := io.Copy(io.Discard, first[i])
		return err
	})
	testnet.Eventually(t, patience, func() bool { return g.metric("culvert_tunnels_open") == 0 }, "the first tunnels are gone")
	g.collectGarbage()
	rss, goroutines := g.rss(), g.metric("go_goroutines")
	threads := d.Conns()

	streams := make([]*h2.Stream, n)
	began := time.Now()
	crowd(t, n, 16, func(i int) (err error) {
		streams[i], err = open(i)
		return err
	})
	if t.Failed() {
		t.FailNow()
	}
	opened := time.Since(began)
	judge := func(what string) {
		t.Helper()
		var more float64
		testnet.Eventually(t, patience, func() bool { more = g.metric("go_goroutines") - goroutines; return more <= float64(20+2*conns) },
			"%d tunnels make no goroutines, but those of their connections", n)
		// What thousands of goroutines used at once comes back little by little.
		grew, left, began := g.rss()-rss, int64(0), time.Now()
		defer func() {
			t.Logf("%s: a tunnel %d B of RSS, %d B after %v; %v goroutines more", what, grew/int64(n), left/int64(n), time.Since(began).Round(time.Millisecond), more)
		}()
		testnet.Eventually(t, patience, func() bool { left = g.afterGarbage(g.rss, rss); return left <= int64(streamBytes*n) },
			"%d tunnels hold at most %d bytes each", n, streamBytes)
	}
	fds, counted := g.descriptors(), int(g.metric("culvert_descriptors_used"))
	t.Logf("%d tunnels over %d connections (%d before) in %v; %d descriptors, %d of them counted", n, d.Conns(), threads, opened.Round(time.Millisecond), fds, counted)
	if own := fds - counted; own < 0 || own > 40 {
		t.Errorf("%d descriptors are open and %d are counted, want the process's own between them", fds, counted)
	}
	judge("new")
	crowd(t, n, 16, func(i int) error {
		s := streams[i]
		_ = s.SetDeadline(time.Now().Add(patience))
		if _, err := s.Write([]byte{byte(i)}); err != nil {
			return err
		}
		_, err := io.ReadFull(s, make([]byte, 1))
		return err
	})
	judge("used")
	crowd(t, n, 16, func(i int) error {
		s := streams[i]
		_ = s.SetDeadline(time.Now().Add(patience))
		if err := s.CloseWrite(); err != nil {
			return err
		}
		_, err := io.Copy(io.Discard, s)
		_ = s.Close()
		return err
	})
	testnet.Eventually(t, patience, func() bool { return g.metric("culvert_tunnels_open") == 0 }, "the tunnels end in order")
}

// dialFunc is a Dialer that goes where it will.
type dialFunc func() (net.Conn, error)

func (f dialFunc) DialContext(context.Context, string, string) (net.Conn, error) { return f() }

var _ tunnel.Dialer = dialFunc(nil)
