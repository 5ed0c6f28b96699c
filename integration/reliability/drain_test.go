//go:build linux

package reliability

import (
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// The drain is shorter here than by default, where it takes 30 seconds. On a busy machine it takes a
// second or two until a test has seen what it waits for.
const (
	drainDelay, drainTimeout = 3 * time.Second, 15 * time.Second
	drainConfig              = "drain: {delay: 3s, timeout: 15s}"
)

// After SIGTERM the gateway is no longer ready at once, accepts for the
// delay and then no more; tunnels that end in time end in order, and
// those that are left over are reset, spread over the last fifth.
func TestDrain(t *testing.T) {
	t.Parallel()
	const (
		delay, timeout = drainDelay, drainTimeout
		last           = timeout / 5
		left           = 40
	)
	slack := testnet.Deadline(300 * time.Millisecond)
	b := testnet.Echo(t)
	g := start(t, options{Services: service("echo.test", b.Addr()), More: drainConfig})
	ways := []way{bySNI, byConnect}
	var orderly, cut []*net.TCPConn
	for i := range 10 {
		orderly = append(orderly, g.tunnel(ways[i%2], i, "echo.test"))
	}
	for i := range left {
		cut = append(cut, g.tunnel(ways[i%2], i, "echo.test"))
	}

	began := time.Now()
	g.signal(syscall.SIGTERM)
	testnet.Eventually(t, patience, func() bool {
		status, _, err := g.get("/readyz")
		return err == nil && status == http.StatusServiceUnavailable
	}, "/readyz says no")
	if took, limit := time.Since(began), min(delay, testnet.Deadline(250*time.Millisecond)); took > limit {
		t.Errorf("/readyz said no after %v, want at most %v", took, limit)
	}
	if status, _, err := g.get("/healthz"); err != nil || status != http.StatusOK {
		t.Errorf("/healthz while draining: %d, %v; want 200", status, err)
	}

	// It accepts until the delay is over.
	var refusedAt, knownAt time.Duration // when the first one that was refused began, and was refused
	for n := 0; refusedAt == 0; n++ {
		at := time.Since(began)
		c, err := g.dial(50 + n%50)
		if err == nil {
			err = ways[n%2].enter(c, "echo.test")
			_ = c.Close()
		}
		switch {
		case err == nil && at > delay+slack:
			t.Fatalf("still accepting after %v, want %v", at, delay)
		case err != nil:
			refusedAt, knownAt = at, time.Since(began)
			if at > delay && !errors.Is(err, syscall.ECONNREFUSED) && !wasReset(err) {
				t.Errorf("a connection after the delay: %v, want it refused", err)
			}
		}
		pause(t.Context(), 10*time.Millisecond)
	}
	if knownAt < delay-50*time.Millisecond {
		t.Errorf("no longer accepting after %v, want %v", knownAt, delay)
	}

	// Tunnels still work, and end in order.
	for i, c := range orderly {
		if err := echo(c, "still here"); err != nil {
			t.Errorf("tunnel %d after the delay: %v", i, err)
		}
		_ = c.CloseWrite()
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := c.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("tunnel %d ended with %v, want an end in order", i, err)
		}
	}

	ends := make([]time.Duration, left)
	var wg sync.WaitGroup
	for i, c := range cut {
		wg.Go(func() {
			_ = c.SetReadDeadline(time.Now().Add(patience))
			_, err := c.Read(make([]byte, 1))
			ends[i] = time.Since(began)
			if !wasReset(err) {
				t.Errorf("a tunnel that was left over ended with %v, want a reset", err)
			}
		})
	}
	wg.Wait()
	g.awaitExit()
	exited := time.Since(began)
	slices.Sort(ends)
	t.Logf("refused from %v on; the rest reset from %v to %v; exit after %v", refusedAt.Round(time.Millisecond), ends[0].Round(time.Millisecond), ends[left-1].Round(time.Millisecond), exited.Round(time.Millisecond))
	if ends[0] < timeout-last-100*time.Millisecond || ends[left-1] > timeout+slack {
		t.Errorf("the rest was reset from %v to %v, want between %v and %v", ends[0], ends[left-1], timeout-last, timeout)
	}
	if spread := ends[left-1] - ends[0]; spread < last/2 {
		t.Errorf("the resets are spread over %v, want most of %v", spread, last)
	}
	if g.code != 0 || exited > timeout+2*slack {
		t.Errorf("exit code %d after %v, want 0 after %v", g.code, exited, timeout)
	}
	if n := len(g.entries(func(e entry) bool { return e.str("reason") == "drain" && e.str("msg") == "tunnel" })); n != left {
		t.Errorf("%d lines of the log say that a tunnel was drained, want %d", n, left)
	}
}

// With nothing left to wait for, a drain is over when the delay is.
func TestDrainEndsWithTheLastTunnel(t *testing.T) {
	t.Parallel()
	b := testnet.Echo(t)
	g := start(t, options{Services: service("echo.test", b.Addr()), More: drainConfig})
	c := g.tunnel(bySNI, 1, "echo.test")
	began := time.Now()
	g.signal(syscall.SIGTERM)
	if err := echo(c, "bye"); err != nil {
		t.Error(err)
	}
	_ = c.Close()
	g.awaitExit()
	if took := time.Since(began); g.code != 0 || took < drainDelay || took >= drainTimeout*4/5 {
		t.Errorf("exit code %d after %v, want 0 after the delay of %v and before tunnels are reset", g.code, took, drainDelay)
	}
}

// A second signal means now: tunnels are reset, and the exit code is 0.
func TestSecondSignalEndsTheDrain(t *testing.T) {
	t.Parallel()
	b := testnet.Echo(t)
	g := start(t, options{Services: service("echo.test", b.Addr())}) // delay 5 s, timeout 30 s
	var conns []*net.TCPConn
	for i := range 20 {
		conns = append(conns, g.tunnel([]way{bySNI, byConnect}[i%2], i, "echo.test"))
	}
	g.signal(syscall.SIGTERM)
	testnet.Eventually(t, patience, func() bool { status, _, _ := g.get("/readyz"); return status == http.StatusServiceUnavailable }, "/readyz says no")
	began := time.Now()
	g.signal(syscall.SIGTERM)
	g.awaitExit()
	if took := time.Since(began); g.code != 0 || took > testnet.Deadline(500*time.Millisecond) {
		t.Errorf("exit code %d, %v after the second signal, want 0 within %v", g.code, took, testnet.Deadline(500*time.Millisecond))
	}
	for i, c := range conns {
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := c.Read(make([]byte, 1)); !wasReset(err) {
			t.Errorf("tunnel %d ended with %v, want a reset", i, err)
		}
	}
}
