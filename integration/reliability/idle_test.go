//go:build linux

package reliability

import (
	"io"
	"net"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// An idle tunnel is two descriptors and a few kilobytes: no goroutine, no
// pipe, no buffer. Half of the tunnels come by each way.
func TestIdleTunnels(t *testing.T) {
	const sources = 100
	n := *idleTunnels
	var endpoints []string
	for range 3 {
		endpoints = append(endpoints, startBackend(t, "echo").addr)
	}
	g := start(t, options{Services: service("echo.test", endpoints...)})
	ways := []way{bySNI, byConnect}
	open := func(i int) (*net.TCPConn, error) {
		c, err := g.dial(i % sources)
		if err != nil {
			return nil, err
		}
		if err := ways[i%2].enter(c, "echo.test"); err != nil {
			_ = c.Close()
			return nil, err
		}
		return c, nil
	}

	// What the first tunnels ever make is not what a tunnel costs.
	crowd(t, 200, 16, func(i int) error {
		c, err := open(i)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	testnet.Eventually(t, patience, func() bool { return g.metric("culvert_tunnels_open") == 0 }, "the first tunnels are gone")
	g.collectGarbage()
	fds, rss, pss, goroutines := g.descriptors(), g.rss(), g.pss(), g.metric("go_goroutines")

	began := time.Now()
	conns := make([]*net.TCPConn, n)
	defer func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close()
			}
		}
	}()
	crowd(t, n, 16, func(i int) (err error) {
		conns[i], err = open(i)
		return err
	})
	if t.Failed() {
		t.FailNow()
	}
	opened := time.Since(began)
	grew := g.rss() - rss
	if open := g.metric("culvert_tunnels_open"); open != float64(n) {
		t.Errorf("culvert_tunnels_open = %v, want %d", open, n)
	}
	// A scrape's own connection may stand a moment longer than the scrape.
	var held int
	testnet.Eventually(t, patience, func() bool { held = g.descriptors() - fds; return held <= 2*n+2 },
		"%d tunnels hold %d descriptors", n, &held)
	t.Logf("%d tunnels in %v: %d descriptors; a tunnel %d B of RSS, %d B after a collection, %d B of PSS",
		n, opened.Round(time.Millisecond), held, grew/int64(n), g.afterGarbage(g.rss, rss)/int64(n), g.afterGarbage(g.pss, pss)/int64(n))
	if grew > tunnelBytes*int64(n) {
		t.Errorf("%d tunnels made the gateway grow by %d bytes, %d each, limit %d", n, grew, grew/int64(n), tunnelBytes)
	}
	if more := g.metric("go_goroutines") - goroutines; more > float64(20+tunnelGoroutines*n) {
		t.Errorf("%d tunnels made %v goroutines, want %d each", n, more, tunnelGoroutines)
	}

	// Every one still works, all at once.
	for _, c := range conns {
		if _, err := c.Write([]byte{7}); err != nil {
			t.Fatal(err)
		}
	}
	dead := 0
	for _, c := range conns {
		var b [1]byte
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.ReadFull(c, b[:]); err != nil || b[0] != 7 {
			dead++
		}
	}
	if dead > 0 {
		t.Errorf("%d of %d tunnels did not return a byte", dead, n)
	}
	for _, c := range conns {
		_ = c.Close()
	}
	testnet.Eventually(t, patience, func() bool { return g.descriptors() <= fds+4 }, "the descriptors come back")
}

// afterGarbage collects the gateway's garbage and returns what of measure has
// been added to base.
func (g *gateway) afterGarbage(measure func() int64, base int64) int64 {
	g.t.Helper()
	g.collectGarbage()
	return measure() - base
}
