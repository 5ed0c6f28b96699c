package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"culvert.dev/internal/race"
	"culvert.dev/tunnel"
)

const (
	// trialInterval is how long after a trial the next one starts, while requests come.
	trialInterval = time.Second

	// trialWait is how long the request that starts a trial waits for it: a gateway that is
	// reachable again answers within that.
	trialWait = race.Delay
)

// An outage is a time in which a gateway completes handshakes by no carrier. A request that
// comes in it is refused at once, with the reason and the errors of the attempt that found the
// outage. While requests come, a trial by all carriers starts each trialInterval. The first
// carrier that works ends the outage.
type outage struct {
	since time.Time
	err   error // of the attempt that found it

	// Guarded by FallbackDialer.mu.
	nextTrial time.Time
}

// showsOutage reports whether err, of a dial that no carrier has completed, says that the gateway
// is unreachable. A lookup that fails does: a host without a network cannot look anything up.
func showsOutage(ctx context.Context, err error) bool {
	switch tunnel.ReasonOf(err) {
	case tunnel.LookupError, tunnel.LookupTime:
		return !errors.Is(ctx.Err(), context.Canceled)
	}
	return countsAgainstCarrier(ctx, err)
}

// beginOutage notes that no carrier has completed its handshakes. The next request starts a trial.
func (f *FallbackDialer) beginOutage(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.outage == nil {
		f.outage = &outage{since: time.Now(), err: err}
	}
}

// refuseUnreachable returns why a request is refused without a dial: the gateway is unreachable.
// The request that starts a trial waits for it up to trialWait.
func (f *FallbackDialer) refuseUnreachable(ctx context.Context) error {
	f.mu.Lock()
	o := f.outage
	if o == nil {
		f.mu.Unlock()
		return nil
	}
	now := time.Now()
	due := !now.Before(o.nextTrial)
	if due {
		o.nextTrial = now.Add(trialInterval)
	}
	f.mu.Unlock()
	if due && f.try(ctx) {
		return nil
	}
	return &tunnel.Error{
		Reason: tunnel.ReasonOf(o.err),
		Err:    fmt.Errorf("gateway: %q is unreachable for %v, and is tried again each %v: %w", f.gateway, time.Since(o.since).Round(time.Second), trialInterval, o.err),
	}
}

// try makes the handshakes of all carriers, in goroutines that outlive it, and reports whether
// one has worked within trialWait. A carrier that works later ends the outage, too.
func (f *FallbackDialer) try(ctx context.Context) bool {
	results := make(chan bool, len(f.carriers))
	started := 0
	for i := range f.carriers {
		c := &f.carriers[i]
		done := func(err error) {
			if err == nil {
				f.succeed(c)
			}
			results <- err == nil
		}
		probe := func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, probeTimeout)
			defer cancel()
			return c.probe(ctx)
		}
		if f.probes.run(probe, done) {
			started++
		}
	}
	late := time.NewTimer(trialWait)
	defer late.Stop()
	for range started {
		select {
		case ok := <-results:
			if ok {
				return true
			}
		case <-late.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
	return false
}

// dialOnly dials by the only carrier, without its handshakes apart from the request. Where the
// gateway made no connection, or cannot be looked up, it is unreachable. Any other failure without
// an answer of the gateway may be that of what is behind it: a probe finds out.
func (f *FallbackDialer) dialOnly(ctx context.Context, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	c := &f.carriers[0]
	begun := time.Now()
	conn, err := c.Dial(ctx, ep, req)
	e, ok := errors.AsType[*tunnel.Error](err)
	switch {
	case err == nil || ok && (e.BehindHop || e.Final):
		f.succeed(c)
	case !showsOutage(ctx, err):
	case e != nil && (e.Reason == tunnel.LookupError || e.Reason == tunnel.LookupTime) || madeNoConnection(err):
		f.lost(c, begun, err)
	default:
		f.mu.Lock()
		defer f.mu.Unlock()
		if !c.down && !c.probing {
			c.probing = f.probes.run(c.probe, func(failed error) {
				if failed != nil {
					f.lost(c, begun, failed)
				}
				f.mu.Lock()
				defer f.mu.Unlock()
				c.probing = false
			})
		}
	}
	return conn, err
}

// lost notes that the gateway is not reached by its only carrier.
func (f *FallbackDialer) lost(c *fallbackCarrier, begun time.Time, err error) {
	f.fail(&fallbackDial{carrier: c, begun: begun}, err, true)
	f.beginOutage(err)
}

// madeNoConnection reports whether err says that no TCP connection was made.
func madeNoConnection(err error) bool {
	for {
		e, ok := errors.AsType[*tunnel.Error](err)
		if !ok || e.Unconnected {
			return ok
		}
		err = e.Err
	}
}
