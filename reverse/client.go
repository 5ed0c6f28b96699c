package reverse

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	mathrand "math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// Times of a Client.
const (
	openTimeout = 20 * time.Second // from the dial to the welcome
	firstRetry  = 250 * time.Millisecond
	lastRetry   = 30 * time.Second
	steadyAfter = time.Minute      // a session that lasted is followed by the next at once
	sameReplica = 10 * time.Second // after an attempt that led to a replica which has a session

	controlTimeout = 20 * time.Second      // until the gateway has opened the control stream
	replaceWithin  = 5 * time.Second       // a session whose gateway drains
	drainTick      = 50 * time.Millisecond // between two looks whether streams have ended
)

// A Gateway is one that a Client keeps sessions to.
type Gateway struct {
	Name      string           // for logs and for State: "gw1.example:443"
	Transport tunnel.Transport // to it, with what the client shows there

	// Replicas is how many distinct replicas behind the address get a session each; 0
	// means one. Behind a balancer of connections the client dials again and again until
	// it has met as many.
	Replicas int

	// Pool is how many pool connections a session has that wait, at most MaxPool; 0 means
	// none. DialPool opens one, by TCP and as it is: to where the session leads.
	Pool     int
	DialPool func(ctx context.Context) (net.Conn, error)
}

// A Client keeps sessions from a connector to gateways and serves the requests that come on
// them. Its fields are not to be changed once it runs. It must not be copied.
type Client struct {
	Gateways []Gateway

	// Handler serves the requests for Names.
	Handler tunnel.Handler

	// Via is what this process calls itself: a request that has been here is refused.
	Via func() string

	// Budget has the descriptors of pool connections; nil means no limit.
	Budget *tunnel.Budget

	// Changed is called after each change of State. It must not block. May be nil.
	Changed func()

	// Log receives which sessions begin, end and fail. Nil discards it.
	Log *slog.Logger

	once sync.Once
	id   string // of this process, set by once

	mu       sync.Mutex // guards what follows
	names    []Registration
	over     []Result // for names beyond the limits of a session
	changes  uint64   // of names
	slots    []*slot
	replicas map[string]*clientSession // the sessions that count, by replica
	draining bool
	stopped  bool // active gets no more
	open     map[*clientSession]struct{}
	active   sync.WaitGroup
}

// A SessionState is the state of one session of a Client.
type SessionState struct {
	Gateway   string    `json:"gateway"`
	Connected bool      `json:"connected"`
	Since     time.Time `json:"since,omitzero"` // of the session, or of the failure
	Replica   string    `json:"replica,omitempty"`
	Streams   int       `json:"streams"`
	Pool      int       `json:"pool,omitempty"`  // pool connections that wait
	Error     string    `json:"error,omitempty"` // why there is no session
	Names     []Result  `json:"names,omitempty"`
	Draining  bool      `json:"draining,omitempty"`

	Err error `json:"-"` // Error, for errors.Is and errors.As; nil where there is a session
}

// A slot is one session to one gateway, or the attempts to open it.
type slot struct {
	gateway *Gateway

	// Guarded by the Client's mu.
	session *clientSession // the newest; nil for none
	err     error
	since   time.Time
}

// SetNames makes list the names that the connector serves, on all sessions that are open
// and to come. It does not wait. A session has up to 1000 names, of 1 MiB in total with their
// Allow: the state of sessions lists the others as refused.
func (c *Client) SetNames(list []Registration) {
	names, over := sendable(list)
	c.mu.Lock()
	c.names, c.over = names, over
	c.changes++
	open := c.sessions()
	c.mu.Unlock()
	for _, x := range open {
		c.start(func() {
			x.sendNames()
		})
	}
}

// sessions returns those that are open. The caller holds mu.
func (c *Client) sessions() []*clientSession {
	all := make([]*clientSession, 0, len(c.open))
	for s := range c.open {
		all = append(all, s)
	}
	return all
}

// Run keeps the sessions until ctx is done, and has ended them when it returns.
func (c *Client) Run(ctx context.Context) error {
	c.once.Do(func() { c.id = rand.Text() })
	var running sync.WaitGroup
	c.mu.Lock()
	c.stopped, c.slots, c.replicas, c.open = false, nil, map[string]*clientSession{}, map[*clientSession]struct{}{}
	for i := range c.Gateways {
		for range max(c.Gateways[i].Replicas, 1) {
			c.slots = append(c.slots, &slot{gateway: &c.Gateways[i], since: time.Now()})
		}
	}
	slots := c.slots
	c.mu.Unlock()
	for _, s := range slots {
		running.Go(func() {
			defer c.recovered()
			c.keep(ctx, s)
		})
	}
	running.Wait()
	c.mu.Lock()
	c.stopped = true
	c.mu.Unlock()
	c.active.Wait()
	return nil
}

// start runs f in a goroutine that Run waits for.
func (c *Client) start(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return
	}
	c.active.Go(func() {
		defer c.recovered()
		f()
	})
}

func (c *Client) recovered() {
	if v := recover(); v != nil {
		c.caught(v)
	}
}

// caught logs a panic.
func (c *Client) caught(v any) {
	p := tunnel.Caught(v)
	c.log().Error("panic in a reverse session", "error", p.Error(), "stack", string(p.Stack))
}

func (c *Client) log() *slog.Logger {
	if c.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return c.Log
}

// keep keeps a session in slot s until ctx is done.
func (c *Client) keep(ctx context.Context, s *slot) {
	failures := 0
	for ctx.Err() == nil && !c.isDraining() {
		err := c.attempt(ctx, s, &failures)
		if ctx.Err() != nil || !sleep(ctx, retryIn(failures, err)) {
			return
		}
	}
}

// errPanicked is the error of an attempt that has panicked. The panic itself is logged.
var errPanicked = errors.New("reverse: the attempt ended with a panic, see the log")

// attempt opens a session in slot s and waits for its end. It returns why the session has ended, or
// why there is none. A panic is a failure like any other: the next attempt may succeed.
func (c *Client) attempt(ctx context.Context, s *slot, failures *int) (err error) {
	defer func() {
		if v := recover(); v != nil {
			c.caught(v)
			*failures++
			c.mu.Lock()
			s.session, s.err, s.since = nil, errPanicked, time.Now()
			c.mu.Unlock()
			err = errPanicked
		}
	}()
	started := time.Now()
	x, err := c.connect(ctx, s)
	if err == nil {
		*failures = 0
		err = x.wait(ctx) // until it ends, or its gateway drains
		lasted := time.Since(started)
		if ctx.Err() != nil {
			return err
		}
		c.failed(s, x, err)
		if c.isDraining() {
			return err
		}
		c.log().Warn("session to the gateway ended; connecting again", "gateway", s.gateway.Name, "lasted", lasted, "error", errorText(err))
		if lasted < steadyAfter {
			*failures = 1
		}
		return err
	}
	if ctx.Err() != nil {
		return err
	}
	*failures++
	c.failed(s, nil, err)
	if !errors.Is(err, ErrSameReplica) {
		c.log().Warn("no session to the gateway; trying again", "gateway", s.gateway.Name, "attempt", *failures, "error", err.Error())
	}
	return err
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// retryIn returns how long to wait after so many failures in a row: a random part of a time
// that doubles, so that the connectors of a gateway that restarts do not come all at once.
func retryIn(failures int, err error) time.Duration {
	most := firstRetry << min(failures, 7)
	if errors.Is(err, ErrSameReplica) {
		most = sameReplica
	}
	most = min(most, lastRetry)
	return most/4 + mathrand.N(most*3/4)
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// ErrSameReplica is the error for a session to a replica that another session leads to.
var ErrSameReplica = errors.New("reverse: it led to a replica that has a session")

// failed records that s has no session because of err. x is the one that it had, nil for none.
func (c *Client) failed(s *slot, x *clientSession, err error) {
	c.mu.Lock()
	if s.session == x || x == nil {
		s.session, s.since = nil, time.Now()
		if !errors.Is(err, ErrSameReplica) || s.err == nil {
			s.err = err
		}
	}
	c.mu.Unlock()
	c.changed()
}

func (c *Client) changed() {
	if c.Changed != nil {
		c.Changed()
	}
}

// connect opens a session for s and starts to serve it.
func (c *Client) connect(ctx context.Context, s *slot) (*clientSession, error) {
	opening, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	ep := &tunnel.Endpoint{Host: Name.String(), Addr: netip.AddrPortFrom(netip.Addr{}, 443)}
	conn, err := s.gateway.Transport.Dial(opening, ep, &tunnel.Request{Proto: "reverse", Name: Name, Port: 443, Start: time.Now()})
	if err != nil {
		return nil, err
	}
	x := &clientSession{client: c, slot: s, carrier: newCarrierConn(conn), since: time.Now(), drained: make(chan struct{}), ended: make(chan struct{})}
	if s.gateway.Pool > 0 && s.gateway.DialPool != nil {
		x.pool = newClientPool(x)
	}
	opened := false
	defer func() {
		if !opened { // also after a panic
			_ = x.carrier.Close()
		}
	}()
	stop := context.AfterFunc(opening, func() {
		defer c.recovered()
		_ = conn.SetDeadline(time.Unix(1, 0))
	})
	c.mu.Lock()
	first := hello{Version: version, Connector: c.id}
	for replica, other := range c.replicas {
		if !other.isDraining() {
			first.Have = append(first.Have, replica)
		}
	}
	if x.fillHello(&first, c.names) {
		x.sent = c.changes
	}
	c.mu.Unlock()
	w, err := x.begin(&first)
	stop()
	if err == nil && opening.Err() != nil {
		err = opening.Err()
	}
	if err == nil {
		err = c.add(x, w)
	}
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Time{})
	c.start(func() {
		x.serve(ctx)
	})
	c.log().Info("session to the gateway", "gateway", s.gateway.Name, "replica", w.Replica, "names", len(first.Register))
	x.logRefused(x.setResults(w.Names))
	c.changed()
	opened = true
	return x, nil
}

// add lists x, unless another session leads to its replica.
func (c *Client) add(x *clientSession, w *welcome) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	x.replica, x.names = w.Replica, w.Names
	if other := c.replicas[w.Replica]; other != nil && !other.isDraining() && w.Replica != "" {
		return ErrSameReplica
	}
	c.replicas[w.Replica] = x
	c.open[x] = struct{}{}
	x.slot.session, x.slot.err, x.slot.since = x, nil, x.since
	return nil
}

// remove takes x from the list.
func (c *Client) remove(x *clientSession) {
	c.mu.Lock()
	delete(c.open, x)
	if c.replicas[x.replica] == x {
		delete(c.replicas, x.replica)
	}
	c.mu.Unlock()
	c.changed()
}

func (c *Client) isDraining() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.draining
}

// Drain tells the gateways that this connector is about to stop, and ends each session with the
// last of its streams. It does not wait.
func (c *Client) Drain() {
	c.mu.Lock()
	c.draining = true
	open := c.sessions()
	c.mu.Unlock()
	for _, x := range open {
		c.start(func() {
			x.finish()
		})
	}
}

// State returns the state of each session.
func (c *Client) State() []SessionState {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]SessionState, len(c.slots))
	for i, s := range c.slots {
		one := SessionState{Gateway: s.gateway.Name, Since: s.since}
		if x := s.session; x != nil {
			one.Connected, one.Replica, one.Streams, one.Names, one.Draining = true, x.replica, int(x.streams.Load()), x.names, x.isDraining()
			if x.pool != nil {
				one.Pool = x.pool.idleCount()
			}
		} else if s.err != nil {
			one.Error, one.Err = s.err.Error(), s.err
		}
		list[i] = one
	}
	return list
}
