package upstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"culvert.dev/internal/race"
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

	// answerDelay is how long a request may be without an answer before it is found out
	// whether the carrier still works. A connection that was there before the network
	// began to drop its packets looks like one whose gateway takes its time.
	answerDelay = time.Second
)

// A FallbackDialer opens connections to one gateway by one carrier, or by several in order of
// preference. Of several, if a carrier does not complete its handshakes within race.Delay, the next
// one starts, and the first that is ready sends the request. If that carrier then fails
// without an answer of the gateway, those that are left are tried: the client has been
// promised nothing yet.
//
// A carrier is down, which means that it is tried last, after two failures within
// failureWindow, after a refusal, and if it is over UDP and does not answer while one
// over TCP does. It is then probed in the background until it works: a probe makes the
// handshakes of a new connection and sends no request.
//
// Where no carrier completes its handshakes, the gateway is unreachable: requests are refused
// at once until a trial works (outage).
type FallbackDialer struct {
	gateway string
	made    time.Time
	probes  *probes

	mu       sync.Mutex // guards the state of the carriers, and outage
	carriers []fallbackCarrier
	outage   *outage // nil while the gateway is reachable by some carrier
}

// A fallbackCarrier is one transport of a FallbackDialer with its state.
type fallbackCarrier struct {
	tunnel.Transport
	name  string                      // "connect-h2"
	probe func(context.Context) error // makes the handshakes of a new connection, and closes it

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
	errSilent    = errors.New("it no longer answers, and another carrier does")
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
	a := fallbackAttempt{f: f, ctx: ctx, ep: ep, req: req, order: f.order()}
	if req.Datagrams != nil {
		a.order = slices.DeleteFunc(a.order, func(c *fallbackCarrier) bool { return !c.Info().Datagrams })
		if len(a.order) == 0 {
			return nil, tunnel.Refusef(tunnel.Unsupported, "gateway: no carrier to %q takes datagrams", f.gateway)
		}
	}
	if err := f.refuseUnreachable(ctx); err != nil {
		return nil, err
	}
	if len(f.carriers) == 1 {
		return f.dialOnly(ctx, ep, req)
	}
	begun, all := time.Now(), len(a.order) == len(f.carriers)
	for {
		conn, err := a.run()
		if err == nil {
			return conn, nil
		}
		a.errs = append(a.errs, err)
		if a.final || len(a.order) == 0 || ctx.Err() != nil {
			err = joinErrors(a.errs)
			if all && a.unreachable && (ctx.Err() == nil || time.Since(begun) >= answerDelay) && showsOutage(ctx, err) {
				f.beginOutage(err)
			}
			return nil, err
		}
	}
}

// A fallbackAttempt is one call of FallbackDialer.Dial.
type fallbackAttempt struct {
	f     *FallbackDialer
	ctx   context.Context
	ep    *tunnel.Endpoint
	req   *tunnel.Request
	order []*fallbackCarrier // that have not failed, in the order to try
	errs  []error
	final bool // no other carrier is to be tried

	// unreachable says that no carrier of the last run has completed its handshakes.
	unreachable bool

	// silent is the dial, of an earlier run, by a carrier that has stopped to answer.
	silent *fallbackDial
}

// A fallbackResult is the end of a dial.
type fallbackResult struct {
	dial int
	conn net.Conn
	err  error
}

// run dials by a.order until one carrier has sent the request and has got an answer or
// failed. It takes those that have failed out of a.order.
func (a *fallbackAttempt) run() (net.Conn, error) {
	order := a.order
	results := make(chan fallbackResult, len(order)) // a dial that lost never waits
	request := claim{taken: make(chan struct{})}
	dials := make([]fallbackDial, 0, len(order))
	defer func() {
		for i := range dials {
			dials[i].cancel()
		}
	}()
	start := func() {
		r := fallbackResult{dial: len(dials)}
		carrier := order[r.dial]
		dialCtx, cancel := context.WithCancel(a.ctx)
		dials = append(dials, fallbackDial{carrier: carrier, begun: time.Now(), cancel: cancel})
		go func() {
			defer func() {
				if v := recover(); v != nil {
					r.err = tunnel.Caught(v)
				}
				results <- r
			}()
			take := func() error { return request.take(r.dial) }
			r.conn, r.err = carrier.Dial(tunnel.WithHandshakeDone(dialCtx, take), a.ep, a.req)
			if r.err == nil && take() != nil { // a transport without handshakes
				_ = r.conn.Close()
				r.conn, r.err = nil, errOvertaken
			}
		}()
	}
	next := time.NewTimer(race.Delay)
	defer next.Stop()
	var errs []error
	start()
	for {
		select {
		case <-request.taken:
			return a.await(dials, request.by, results)
		case r := <-results:
			select {
			case <-request.taken:
				results <- r
				return a.await(dials, request.by, results)
			default:
			}
			dials[r.dial].ended = true
			errs = append(errs, r.err)
			a.f.failed(a.ctx, &dials[r.dial], r.err)
			if len(errs) == len(order) || a.ctx.Err() != nil {
				a.order, a.unreachable = nil, true
				return nil, joinErrors(errs)
			}
		case <-next.C:
		}
		if len(dials) < len(order) {
			start()
			next.Reset(race.Delay)
		}
	}
}

// await returns the result of the winner of dials, which sends the request. The others
// are canceled.
func (a *fallbackAttempt) await(dials []fallbackDial, winner int, results <-chan fallbackResult) (net.Conn, error) {
	a.f.overtaken(dials, winner)
	d := &dials[winner]
	if a.silent != nil {
		a.f.fail(a.silent, errSilent, a.silent.carrier.overUDP() && !d.carrier.overUDP())
		a.silent = nil
	}
	a.order = leftAfter(a.order, dials, winner)
	var silence <-chan time.Time
	if len(a.order) > 0 {
		late := time.NewTimer(answerDelay)
		defer late.Stop()
		silence = late.C
	}
	ctx, cancel := context.WithCancel(a.ctx)
	defer cancel()
	var dead <-chan bool
	gaveUp := false
	for {
		select {
		case r := <-results:
			switch {
			case r.dial != winner: // it has sent nothing, and has no connection
			case gaveUp && r.err != nil:
				a.silent = d
				return nil, &tunnel.Error{Reason: tunnel.DialTimeout, Err: fmt.Errorf("gateway: %s to %q: %w", d.carrier.name, a.f.gateway, errSilent)}
			default:
				a.final = a.f.answered(a.ctx, d, r.err)
				return r.conn, r.err
			}
		case <-silence:
			dead = a.check(ctx, d.carrier)
		case gaveUp = <-dead:
			if gaveUp {
				d.cancel() // its result follows
			}
			dead = nil
		}
	}
}

// leftAfter returns those of order that may be tried after the winner of dials: all that
// have not failed. Those that were too slow for it come last: a machine or a network that
// is busy makes every handshake slow, and the winner may be one that had a connection,
// which leads nowhere any more.
func leftAfter(order []*fallbackCarrier, dials []fallbackDial, winner int) []*fallbackCarrier {
	var left, slow []*fallbackCarrier
	for _, c := range order {
		switch at := slices.IndexFunc(dials, func(d fallbackDial) bool { return d.carrier == c }); {
		case at < 0 || at > winner && !dials[at].ended:
			left = append(left, c)
		case at < winner && !dials[at].ended:
			slow = append(slow, c)
		}
	}
	return append(left, slow...)
}

// check finds out whether c has stopped to work while others of a.order do. It makes new
// handshakes by all of them.
func (a *fallbackAttempt) check(ctx context.Context, c *fallbackCarrier) <-chan bool {
	own, others := make(chan error, 1), make(chan error, len(a.order))
	try := func(result chan<- error, handshakes func() error) {
		go func() {
			var err error
			defer func() {
				if v := recover(); v != nil {
					err = tunnel.Caught(v)
				}
				result <- err
			}()
			err = handshakes()
		}()
	}
	try(own, func() error { return c.probe(ctx) })
	for _, other := range a.order {
		try(others, func() error { return handshake(ctx, other, a.ep) })
	}
	dead, left := make(chan bool, 1), len(a.order)
	go func() {
		var grace <-chan time.Time // of c, after another one is ready
		failed := false            // c has
		for {
			select {
			case err := <-own:
				if err == nil || grace != nil {
					dead <- err != nil
					return
				}
				failed = true
			case err := <-others:
				left--
				switch {
				case err == nil && failed:
					dead <- true
					return
				case err == nil && grace == nil:
					grace = time.After(race.Delay)
				case left == 0 && grace == nil:
					dead <- false
					return
				}
			case <-grace:
				dead <- true
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	return dead
}

// joinErrors returns the error of a dial that failed by every carrier.
func joinErrors(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	return &tunnel.Error{Reason: tunnel.ReasonOf(errs[len(errs)-1]), Err: errors.Join(errs...)}
}

// order returns the carriers in the order to try, those that are down last.
func (f *FallbackDialer) order() []*fallbackCarrier {
	f.mu.Lock()
	defer f.mu.Unlock()
	up, down := make([]*fallbackCarrier, 0, len(f.carriers)), []*fallbackCarrier(nil)
	for i := range f.carriers {
		if c := &f.carriers[i]; c.down {
			down = append(down, c)
		} else {
			up = append(up, c)
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

// answered notes the end of the dial that has sent the request, and reports whether it is
// final. An answer of the gateway is, and shows that the carrier works, unless it is the
// carrier that the gateway refuses: one that it does not speak has been ready first where the
// others were slow, and those are tried.
func (f *FallbackDialer) answered(ctx context.Context, d *fallbackDial, err error) (final bool) {
	e, ok := errors.AsType[*tunnel.Error](err)
	switch {
	case ok && e.BehindHop && (e.Reason == tunnel.NoAuth || e.Reason == tunnel.BadMethod):
		f.fail(d, err, true)
		return e.Reason == tunnel.NoAuth
	case err == nil || ok && (e.BehindHop || e.Final):
		f.succeed(d.carrier)
	case countsAgainstCarrier(ctx, err):
		f.fail(d, err, false)
		return false
	}
	return true
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

// probeEndpoint is what a probe would ask for if it sent a request.
var probeEndpoint = tunnel.Endpoint{Host: "probe.culvert.alt", Addr: netip.AddrPortFrom(netip.Addr{}, 443)}

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

// States returns the states of the carriers of each gateway, by gateway and in order of
// preference.
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
