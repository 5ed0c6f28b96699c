package gateway

import (
	"context"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// drain ends a gateway in order.
func (g *Gateway) drain(ctx context.Context, now <-chan struct{}, interrupted bool) {
	g.stopping.Store(true)
	settings := g.settings.Load()
	delay, timeout := settings.DrainDelay, settings.DrainTimeout
	if delay == 0 {
		delay = DefaultDrainDelay
	}
	if timeout == 0 {
		timeout = DefaultDrainTimeout
	}
	delay, timeout = max(delay, 0), max(timeout, 0)
	if interrupted && g.relay.Open() == 0 {
		delay = 0
	}
	deadline := time.Now().Add(timeout)
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	go func() {
		select {
		case <-now:
			cancel()
		case <-ctx.Done():
		}
	}()
	g.log.Info("draining", "tunnels", g.relay.Open(), "delay", delay, "timeout", timeout, "hint", "a second signal ends it now")
	g.sessions.Drain()
	g.replicas.Drain()
	g.connector.drain()
	sleep(ctx, min(delay, timeout/2))

	last := timeout / 5 // of the time is for aborts
	orderly, stopWaiting := context.WithDeadline(ctx, deadline.Add(-last))
	defer stopWaiting()
	g.datagrams.Drain()
	g.peers.Drain()
	g.replicas.End()
	// A connection of many tunnels ends with the last of them, so what is
	// aborted below is also what Shutdown waits for.
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		var ending sync.WaitGroup
		ending.Go(func() { g.http3.shutdown(ctx) })
		ending.Go(func() { g.dns.shutdown(ctx) })
		_ = g.server.Shutdown(ctx)
		ending.Wait()
	}()
	defer func() {
		cancel()
		<-stopped
	}()
	select {
	case <-stopped:
	case <-orderly.Done():
	}
	if g.relay.Wait(orderly) == nil {
		g.connector.wait(orderly)
		g.log.Info("drained")
		return
	}
	g.log.Warn("drain timeout: aborting the remaining tunnels", "tunnels", g.relay.Open(), "over", last)
	g.relay.Abort(ctx, tunnel.Drain, last*9/10)
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
