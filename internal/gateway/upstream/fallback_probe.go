package upstream

import (
	"context"
	"slices"
	"sync"
	"time"
	"weak"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// fail counts a failure of a carrier. A dial that began before the last failure does not
// count again: many dials may fail by one event.
func (f *FallbackDialer) fail(d *fallbackDial, err error, refused bool) {
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	c := d.carrier
	if c.down {
		return
	}
	first := c.lastFailure.IsZero() || now.Sub(c.lastFailure) > failureWindow
	if !refused && !first && d.begun.Before(c.lastFailure) {
		return
	}
	c.lastFailure, c.lastErr = now, err
	if first && !refused {
		return
	}
	// A carrier that goes up and down is probed less often.
	if c.retryInterval == 0 || now.Sub(c.since) > maxRetryInterval {
		c.retryInterval = minRetryInterval
	} else {
		c.retryInterval = min(2*c.retryInterval, maxRetryInterval)
	}
	c.down, c.since = true, now
	f.schedule(c)
}

// succeed makes a carrier one that is not down.
func (f *FallbackDialer) succeed(c *fallbackCarrier) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.outage = nil
	if c.down {
		c.down, c.since, c.lastFailure, c.lastErr = false, time.Now(), time.Time{}, nil
	}
}

// schedule has c, which is down, probed after its retryInterval. A FallbackDialer that
// nobody uses any more probes nothing. The caller holds mu.
func (f *FallbackDialer) schedule(c *fallbackCarrier) {
	c.retryAt = time.Now().Add(c.retryInterval)
	dialer, i := weak.Make(f), slices.IndexFunc(f.carriers, func(o fallbackCarrier) bool { return o.name == c.name })
	time.AfterFunc(c.retryInterval, func() {
		if f := dialer.Value(); f != nil {
			f.retry(&f.carriers[i])
		}
	})
}

// retry probes c if that is due.
func (f *FallbackDialer) retry(c *fallbackCarrier) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !c.down || c.probing || time.Now().Before(c.retryAt) { // it was up meanwhile
		return
	}
	c.probing = f.probes.run(c.probe, func(err error) { f.probed(c, err) })
}

// probed notes the result of a probe.
func (f *FallbackDialer) probed(c *fallbackCarrier, err error) {
	if err == nil {
		f.succeed(c)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c.probing = false
	if c.down {
		c.lastErr = err
		c.retryInterval = min(2*c.retryInterval, maxRetryInterval)
		f.schedule(c)
	}
}

// prober returns a fallbackCarrier's probe by hop. It has connections of its own: one that
// is kept may have been there before the network began to drop its packets.
func (t *Transports) prober(hop registry.Hop) func(context.Context) error {
	return func(ctx context.Context) error {
		n, pools, err := t.makeNextHop([]registry.Hop{hop})
		if err != nil {
			return err
		}
		defer func() {
			for _, p := range pools {
				_ = p.Close()
			}
		}()
		return handshake(ctx, n, &probeEndpoint)
	}
}

// handshake dials by t and sends no request.
func handshake(ctx context.Context, t tunnel.Transport, ep *tunnel.Endpoint) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	done := false
	conn, err := t.Dial(tunnel.WithHandshakeDone(ctx, func() error { done = true; return errProbe }), ep, &tunnel.Request{})
	if err == nil { // a transport without handshakes
		return conn.Close()
	}
	if done {
		return nil
	}
	return err
}

// probes are the goroutines of a FallbackDialer that outlive a dial.
type probes struct {
	ctx    context.Context
	cancel context.CancelFunc
	mu     sync.Mutex // guards closed, and wg against a run after Close
	closed bool
	wg     sync.WaitGroup
}

func newProbes() *probes {
	p := &probes{}
	// A probe outlives the request that started it: Close ends it.
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p
}

// run calls probe in a goroutine, and then done with its error. It returns false, and
// calls neither, after Close.
func (p *probes) run(probe func(context.Context) error, done func(error)) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.wg.Go(func() {
		var err error
		defer func() {
			if v := recover(); v != nil {
				err = tunnel.Caught(v)
			}
			done(err)
		}()
		err = probe(p.ctx)
	})
	return true
}

// Close ends the probes and waits for them.
func (p *probes) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cancel()
	p.wg.Wait()
	return nil
}
