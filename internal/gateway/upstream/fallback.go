package upstream

import (
	"context"
	"errors"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"culvert.dev/tunnel"
)

const (
	// failureWindow is how close to each other two failures of a carrier must be for the
	// next one to be preferred. One failure is an accident.
	failureWindow = 10 * time.Second

	// A carrier that is down is probed after minRetryInterval, and after twice the time
	// with each failure, up to maxRetryInterval.
	minRetryInterval = 10 * time.Second
	maxRetryInterval = 10 * time.Minute

	// probeTimeout is how long the handshake of a probe may take.
	probeTimeout = 10 * time.Second
)

// A FallbackDialer opens connections to one gateway by several carriers, in order of
// preference. If a carrier does not complete its handshakes within raceDelay, the next
// one starts, and the first that is ready sends the request, which is sent once.
//
// A carrier is down, which means that it is tried last, after two failures within
// failureWindow, after a refusal, and if it is over UDP and does not answer while one
// over TCP does. Requests that arrive later have it probed in the background: a probe
// makes the handshakes and sends no request.
type FallbackDialer struct {
	gateway string
	made    time.Time
	probes  *probes

	mu       sync.Mutex // guards the state of the carriers
	carriers []fallbackCarrier
}

// A fallbackCarrier is one transport of a FallbackDialer with its state.
type fallbackCarrier struct {
	tunnel.Transport
	name string // "connect-h2"

	down          bool
	since         time.Time     // of down; zero from the start
	lastFailure   time.Time     // zero for none that counts
	lastErr       error         // why it is down
	retryInterval time.Duration // after which a probe is due; 0 if the carrier was never down
	retryAt       time.Time
	probing       bool
}

// overUDP reports whether the carrier is blocked where UDP is.
func (c *fallbackCarrier) overUDP() bool { return c.name == "connect-h3" }

func newFallbackDialer(gateway string, carriers ...fallbackCarrier) *FallbackDialer {
	return &FallbackDialer{gateway: gateway, made: time.Now(), carriers: carriers, probes: newProbes()}
}

// Info implements tunnel.Transport. The weakest carrier counts. It says which are down.
func (f *FallbackDialer) Info() tunnel.TransportInfo {
	info := tunnel.TransportInfo{Security: tunnel.Mutual}
	hops := make([]string, len(f.carriers))
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range f.carriers {
		c := &f.carriers[i]
		one := c.Info()
		info.Security = min(info.Security, one.Security)
		info.Datagrams = info.Datagrams || one.Datagrams
		hops[i] = strings.Join(one.Hops, ", ")
		if c.down {
			hops[i] += " (down)"
		}
	}
	info.Hops = []string{strings.Join(hops, " or ")}
	return info
}

// Check implements tunnel.Transport: it refuses where no carrier may be dialed.
func (f *FallbackDialer) Check(ep *tunnel.Endpoint) (err error) {
	for i := range f.carriers {
		if err = f.carriers[i].Check(ep); err == nil {
			return nil
		}
	}
	return err
}

var (
	errOvertaken = errors.New("another carrier was ready first")
	errProbe     = errors.New("a probe sends no request")
)

// A claim says which of several dials sends the request.
type claim struct {
	taken chan struct{} // closed by the first call of take
	once  sync.Once
	by    int // set before taken is closed
}

// take returns nil to the first dial that calls it, whenever that calls it again.
func (c *claim) take(dial int) error {
	c.once.Do(func() {
		c.by = dial
		close(c.taken)
	})
	if c.by != dial {
		return errOvertaken
	}
	return nil
}

// A fallbackDial is one dial by a carrier.
type fallbackDial struct {
	carrier *fallbackCarrier
	begun   time.Time
	cancel  context.CancelFunc
	ended   bool
}

// Dial implements tunnel.Transport.
func (f *FallbackDialer) Dial(ctx context.Context, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	order := f.order(ep)
	if req.Datagrams != nil {
		order = slices.DeleteFunc(order, func(c *fallbackCarrier) bool { return !c.Info().Datagrams })
	}
	type result struct {
		dial int
		conn net.Conn
		err  error
	}
	results := make(chan result, len(order)) // a dial that lost never waits
	request := claim{taken: make(chan struct{})}
	dials := make([]fallbackDial, 0, len(order))
	defer func() {
		for i := range dials {
			dials[i].cancel()
		}
	}()
	start := func() {
		r := result{dial: len(dials)}
		carrier := order[r.dial]
		dialCtx, cancel := context.WithCancel(ctx)
		dials = append(dials, fallbackDial{carrier: carrier, begun: time.Now(), cancel: cancel})
		go func() {
			defer func() {
				if v := recover(); v != nil {
					r.err = tunnel.Caught(v)
				}
				results <- r
			}()
			take := func() error { return request.take(r.dial) }
			r.conn, r.err = carrier.Dial(tunnel.WithHandshakeDone(dialCtx, take), ep, req)
			if r.err == nil && take() != nil { // a transport without handshakes
				_ = r.conn.Close()
				r.conn, r.err = nil, errOvertaken
			}
		}()
	}
	next := time.NewTimer(raceDelay)
	defer next.Stop()
	taken := request.taken
	claimed := func() {
		if taken == nil {
			return
		}
		taken = nil
		f.overtaken(dials, request.by)
	}
	var errs []error
	start()
	for {
		select {
		case <-taken:
			claimed()
		case r := <-results:
			select {
			case <-taken:
				claimed()
			default:
			}
			dials[r.dial].ended = true
			if taken == nil && r.dial == request.by {
				f.answered(ctx, &dials[r.dial], r.err)
				return r.conn, r.err
			}
			if taken == nil {
				continue
			}
			errs = append(errs, r.err)
			f.failed(ctx, &dials[r.dial], r.err)
			if len(errs) == len(order) || ctx.Err() != nil {
				return nil, joinErrors(errs)
			}
		case <-next.C:
		}
		if taken != nil && len(dials) < len(order) {
			start()
			next.Reset(raceDelay)
		}
	}
}

// joinErrors returns the error of a dial that failed by every carrier.
func joinErrors(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	return &tunnel.Error{Reason: tunnel.ReasonOf(errs[len(errs)-1]), Err: errors.Join(errs...)}
}

// order returns the carriers in the order to try, those that are down last. It starts
// the probes that are due.
func (f *FallbackDialer) order(ep *tunnel.Endpoint) []*fallbackCarrier {
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	up, down := make([]*fallbackCarrier, 0, len(f.carriers)), []*fallbackCarrier(nil)
	for i := range f.carriers {
		c := &f.carriers[i]
		if !c.down {
			up = append(up, c)
			continue
		}
		down = append(down, c)
		if !c.probing && !now.Before(c.retryAt) {
			to := *ep
			c.probing = f.probes.run(func(ctx context.Context) error { return handshake(ctx, c, &to) }, func(err error) { f.probed(c, err) })
		}
	}
	return append(up, down...)
}

// overtaken cancels the dials that are not the winner. Those that began before it and
// have not ended are failures.
func (f *FallbackDialer) overtaken(dials []fallbackDial, winner int) {
	for i := range dials {
		d := &dials[i]
		if i == winner || d.ended {
			continue
		}
		d.cancel()
		if i < winner {
			f.fail(d, errOvertaken, d.carrier.overUDP() && !dials[winner].carrier.overUDP())
		}
	}
}

// failed notes the end of a dial that has sent no request.
func (f *FallbackDialer) failed(ctx context.Context, d *fallbackDial, err error) {
	if countsAgainstCarrier(ctx, err) {
		f.fail(d, err, errors.Is(err, syscall.ECONNREFUSED))
	}
}

// answered notes the end of the dial that has sent the request. An answer of the gateway
// shows that the carrier works, unless it is the carrier that the gateway refuses.
func (f *FallbackDialer) answered(ctx context.Context, d *fallbackDial, err error) {
	e, ok := errors.AsType[*tunnel.Error](err)
	switch {
	case ok && e.BehindHop && (e.Reason == tunnel.NoAuth || e.Reason == tunnel.BadMethod):
		f.fail(d, err, true)
	case err == nil || ok && (e.BehindHop || e.Final):
		f.succeed(d.carrier)
	case countsAgainstCarrier(ctx, err):
		f.fail(d, err, false)
	}
}

// countsAgainstCarrier reports whether err may be the fault of the carrier: it is not
// that of a caller that gave up, of this gateway or of a lookup.
func countsAgainstCarrier(ctx context.Context, err error) bool {
	if errors.Is(ctx.Err(), context.Canceled) {
		return false
	}
	switch tunnel.ReasonOf(err) {
	case tunnel.Prohibited, tunnel.Overload, tunnel.Loop, tunnel.LookupError, tunnel.LookupTime, tunnel.BadRequest:
		return false
	}
	return true
}

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
	c.down, c.since, c.retryAt = true, now, now.Add(c.retryInterval)
}

// succeed makes a carrier one that is not down.
func (f *FallbackDialer) succeed(c *fallbackCarrier) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.down {
		c.down, c.since, c.lastFailure, c.lastErr = false, time.Now(), time.Time{}, nil
	}
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
		c.retryAt = time.Now().Add(c.retryInterval)
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

// A CarrierState is that of one carrier of a FallbackDialer.
type CarrierState struct {
	Gateway string
	Carrier string
	Down    bool
	Since   time.Time // of Down; zero if that has never changed
	RetryAt time.Time // from when a probe is due, while it is down
	Err     error     // why it is down
}

// States returns those of the carriers, in order of preference.
func (f *FallbackDialer) States() []CarrierState {
	f.mu.Lock()
	defer f.mu.Unlock()
	states := make([]CarrierState, len(f.carriers))
	for i := range f.carriers {
		c := &f.carriers[i]
		states[i] = CarrierState{Gateway: f.gateway, Carrier: c.name, Down: c.down, Since: c.since}
		if c.down {
			states[i].RetryAt, states[i].Err = c.retryAt, c.lastErr
		}
	}
	return states
}

// States returns the states of the carriers of each gateway that has several, by gateway
// and in order of preference.
func (t *Transports) States() []CarrierState {
	newest := make(map[string]*FallbackDialer) // one of an earlier table may not be forgotten yet
	for _, f := range t.fallbacks.all() {
		if before := newest[f.gateway]; before == nil || before.made.Before(f.made) {
			newest[f.gateway] = f
		}
	}
	var states []CarrierState
	for _, gateway := range slices.Sorted(maps.Keys(newest)) {
		states = append(states, newest[gateway].States()...)
	}
	return states
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
