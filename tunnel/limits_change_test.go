package tunnel_test

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// A tunnel keeps the idle limit that it began with; the next one has that of its moment.
func TestTunnelsKeepTheirIdleLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var limits atomic.Pointer[tunnel.Limits]
		limits.Store(&tunnel.Limits{IdleTimeout: time.Hour})
		r := &tunnel.Relay{CurrentLimits: limits.Load, Limits: tunnel.Limits{IdleTimeout: time.Second}}
		defer r.Close()
		start := time.Now()
		_, _, _, _, first := carryMem(t, r, true, true, func(*tunnel.Tunnel) {})
		limits.Store(&tunnel.Limits{IdleTimeout: time.Minute})
		_, _, _, _, second := carryMem(t, r, true, true, func(*tunnel.Tunnel) {})
		<-second
		if got := time.Since(start); got < time.Minute || got > time.Minute+2*time.Second {
			t.Errorf("the tunnel that began with a minute was idle for %v", got)
		}
		<-first
		if got := time.Since(start); got < time.Hour || got > time.Hour+2*time.Second {
			t.Errorf("the tunnel that began with an hour was idle for %v", got)
		}
	})
}

// A limit that becomes lower ends no tunnel, and one that becomes higher holds for the
// next request.
func TestMaxTunnelsChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, routeTo("192.0.2.1:80"))
		var limits atomic.Pointer[tunnel.Limits]
		limits.Store(&tunnel.Limits{})
		b.CurrentLimits = limits.Load
		ask := func(want int) {
			t.Helper()
			a := &asker{}
			b.ServeTunnel(t.Context(), a.request())
			if got := b.Relay.Open(); got != want {
				t.Errorf("%d tunnels stand, want %d", got, want)
			}
		}
		ask(1)
		ask(2)
		limits.Store(&tunnel.Limits{MaxTunnels: 1})
		ask(2)
		limits.Store(&tunnel.Limits{MaxTunnels: 3})
		ask(3)
		ask(3)
		b.dialer.closeAll()
		b.stop()
	})
}

// A pending connection has the limits of the moment.
func TestPendingConnectionsHaveNewLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var limits atomic.Pointer[tunnel.Limits]
		limits.Store(&tunnel.Limits{FirstByteTimeout: time.Hour})
		g := serve(t, &tunnel.Server{CurrentLimits: limits.Load})
		start := time.Now()
		c, _ := g.dial("198.51.100.7:1")
		synctest.Wait()
		time.Sleep(time.Minute)
		limits.Store(&tunnel.Limits{FirstByteTimeout: 2 * time.Minute})
		_, _ = c.Read(make([]byte, 1))
		if got := time.Since(start); got < 2*time.Minute || got > 2*time.Minute+time.Second {
			t.Errorf("the connection was pending for %v, want two minutes", got)
		}
		g.stop(t)
	})
}
