package tunnel

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel/internal/relay"
)

// DefaultMaxDialAttempts is how many addresses a Router tries.
const DefaultMaxDialAttempts = 3

// A Router is the Handler that decides: it resolves the request, allows it,
// dials, tells the client yes, and gives both ends to the Relay. Everything
// that can fail has failed before the client hears yes.
type Router struct {
	Resolver Resolver
	Dialer   Dialer // for endpoints without a Transport
	Relay    *Relay
	Budget   *Budget        // a tunnel's second descriptor is taken here, if it has one; nil means no limit
	Observe  func(*Outcome) // told once of every request, at its end; must not block. May be nil

	Limits        Limits     // MaxConnectionsPerClient is for tunnels
	CurrentLimits LimitsFunc // if set, takes the place of Limits

	MaxHelloRepeats int // how often the same ClientHello may be on its way to services; 0 means DefaultMaxHelloRepeats, negative no limit
	MaxDialAttempts int // addresses tried; 0 means DefaultMaxDialAttempts

	ids     atomic.Uint64
	tunnels atomic.Int64 // reserved
	clients Clients      // of a Router without a Budget
	hellos  hellos
}

// ServeTunnel answers req. It returns once the Relay has the tunnel.
func (r *Router) ServeTunnel(ctx context.Context, req *Request) {
	o := r.newOutcome(req)
	lease := r.client(req)
	server, route, dialed, err := r.connect(ctx, req, &o, &lease)
	if err != nil {
		req.Refuse(err)
		r.refused(o, err)
		return
	}
	load, carried := dialed.Endpoint.Load, false
	defer func() {
		if !carried {
			load.add(-1)
		}
	}()
	client, err := r.accept(req, server, &lease)
	if err != nil {
		r.refused(o, err)
		return
	}
	accepted := client
	o.Dialed = time.Since(req.Start) - o.Waited
	if req.Datagrams != nil {
		req.slot.lend(&lease)
		r.carryDatagrams(req, client, server, &o, dialed, route, lease)
		return
	}
	if why := dialed.Endpoint.TLSOnly; why != nil {
		if client, err = r.mustBeTLS(ctx, why, client, server, &lease); err != nil {
			o.Attempts = append(o.Attempts, dialed)
			r.refused(o, err)
			return
		}
	}
	if u, ok := server.(Undecided); ok {
		if client, server, err = r.decide(ctx, u, client, &lease); err != nil {
			o.Attempts = append(o.Attempts, dialed)
			r.refused(o, err)
			return
		}
	}
	req.slot.lend(&lease)
	rec, watchers := watched(r.newRecord(req, &o, dialed, isMultiplexed(server), lease), accepted, server)
	carried = true
	var t relay.Tunnel
	r.Relay.carry(&t, client, server, route.IdleTimeout, route.HalfClosedTimeout, rec, req.slot)
	if watchers != nil {
		tellBegan(watchers, t)
	}
	if r.revoked(rec, route.Generation) {
		t.Kill(Revoked)
	}
}

// revoked reports whether the caller's identity was revoked, or the table has changed since
// rec's request was resolved, by the one of the given generation, and denies it now. It is
// asked once the Relay lists the tunnel: whoever looks for tunnels to end after a change
// either finds it there, or the change was before this.
func (r *Router) revoked(rec record, generation uint64) bool {
	if p := rec.peer(); p.Revoked() != nil {
		return true
	}
	c, ok := r.Resolver.(Rechecker)
	return ok && c.Generation() != generation && denies(c, rec)
}

func denies(c Rechecker, rec record) bool {
	var req Request
	route, ok := rec.request(&req)
	return ok && ReasonOf(c.Recheck(&req, &route)) == Denied
}

// Revoke ends the tunnels and sessions of some services which the Resolver, a
// Rechecker, denies by now. It is for after a change of what it decides by, and ends those
// that were decided by what was before, however late the Relay gets them. It returns how
// many it ends.
func (r *Router) Revoke(services map[ServiceKey]bool) int {
	c, ok := r.Resolver.(Rechecker)
	if !ok {
		return 0
	}
	return r.Relay.EndRecords(Revoked, func(rec Record) bool { return services[rec.Service()] && denies(c, rec.of) })
}

// connect takes req as far as a service that answers: resolve, allow, dial. l is
// for the tunnel; it is released where there is none.
func (r *Router) connect(ctx context.Context, req *Request, o *Outcome, l *lease) (server net.Conn, route Route, dialed Attempt, err error) {
	ctx, cancel := withLazyTimeout(ctx, time.Now(), limit(r.limits().ConnectTotalTimeout, DefaultConnectTotalTimeout))
	defer cancel()
	reserved := false
	defer func() {
		switch {
		case server != nil:
		case reserved: // refused, or a panic is on its way up
			r.giveBack(l, false)
		default:
			r.answered(l)
			l.load.leave()
			l.client.Release()
		}
	}()
	route, err = r.Decide(ctx, req)
	o.Service, o.Pattern, o.Policy = route.Service, route.Pattern, route.Policy
	if err != nil {
		return nil, route, dialed, err
	}
	if err := r.enter(l, req, &route); err != nil {
		return nil, route, dialed, err
	}
	if err := r.reserve(l, &route); err != nil {
		return nil, route, dialed, err
	}
	reserved = true
	if server, dialed, err = r.dial(ctx, req, &route, o); isMultiplexed(server) {
		r.Budget.Give(1)
		l.client.addDescriptors(-1)
	}
	req.FirstBytes = nil // a tunnel outlives its preamble by far
	return server, route, dialed, err
}

// accept tells the client yes, and ends server where that fails.
func (r *Router) accept(req *Request, server net.Conn, l *lease) (client Stream, err error) {
	defer func() {
		if client == nil {
			_ = relay.Abort(server)
			r.giveBack(l, isMultiplexed(server))
		}
	}()
	if client, err = req.Accept(); err != nil {
		return nil, errGone(err)
	}
	return client, nil
}

// errGone is the end of a request whose Accept failed with err.
func errGone(err error) error {
	return &Error{Reason: Gone, Err: fmt.Errorf("the client left before it was told yes: %w", err)}
}

// Forecast is what ServeTunnel would do, short of dialing: the route, and an
// attempt for each endpoint it would try with the reason why its address must
// not be dialed, nil if it may. The error is the refusal, also where no address
// may be dialed. It is how "culvert explain" knows.
func (r *Router) Forecast(ctx context.Context, req *Request) (Route, []Attempt, error) {
	route, err := r.Decide(ctx, req)
	if err != nil {
		return route, nil, err
	}
	if r.Relay != nil {
		if refusal := r.Relay.loads.find(route.loadKey()).check(route.Limits); refusal != nil {
			return route, nil, refusal
		}
	}
	var attempts, broken []Attempt // broken have an open circuit
	refused, left, circuits := 0, r.dialAttempts(), trials{route: &route}
	for i := range route.Endpoints {
		ep := &route.Endpoints[i]
		a := Attempt{Endpoint: *ep, Err: r.check(req, ep)}
		if a.Err == nil {
			if a.Err = circuits.admit(req, ep); a.Err != nil {
				broken = append(broken, a)
				continue
			}
		}
		if most := route.Limits.perEndpoint(); most > 0 && ep.Load.Tunnels() >= most {
			a.Err = endpointFull(route.Limits)
		} else if left--; left < 0 {
			break
		}
		if a.Err != nil {
			refused++
		}
		attempts = append(attempts, a)
	}
	broken = broken[:min(len(broken), r.dialAttempts())]
	refused += len(broken)
	attempts = append(attempts, broken...)
	switch {
	case left == r.dialAttempts() && len(broken) == 0:
		return route, attempts, route.errAllFull()
	case refused == len(attempts):
		return route, attempts, dialFailure(&route, attempts)
	}
	return route, attempts, nil
}

// dialAttempts is how many endpoints are tried. Those that are at their limit are passed over.
func (r *Router) dialAttempts() int {
	if r.MaxDialAttempts <= 0 {
		return DefaultMaxDialAttempts
	}
	return r.MaxDialAttempts
}

// A trials admits one endpoint with an open circuit to a request: several that are dead and
// due could take all of its attempts.
type trials struct {
	route *Route
	take  bool // whether the trial is made
	made  bool
}

// admit returns why ep is not dialed for req, as its circuit is open.
func (t *trials) admit(req *Request, ep *Endpoint) error {
	if t.route.Circuit == nil || req.Datagrams != nil {
		return nil
	}
	due, open := t.route.Circuit(ep, t.take && !t.made)
	if open == nil || due && !t.made {
		t.made = t.made || open != nil
		return nil
	}
	return open
}

// endpointFull is why an endpoint is passed over.
func endpointFull(l *ServiceLimits) error {
	return Refusef(Overload, "limits.connectionsPerEndpoint: it has %d connections, the limit", l.ConnectionsPerEndpoint)
}

// errAllFull refuses a request where every endpoint is at its limit.
func (r *Route) errAllFull() error {
	return Refusef(Overload, "service %s: limits.connectionsPerEndpoint: each of %d endpoints has %d connections, the limit", r.Service, len(r.Endpoints), r.Limits.ConnectionsPerEndpoint)
}

// RevokeIdentities ends the tunnels and sessions of callers whose identity is Revoked by
// now. It is for after a change of what that depends on, as Revoke is.
func (r *Router) RevokeIdentities() int {
	return r.Relay.EndRecords(Revoked, func(rec Record) bool {
		p := rec.Peer()
		return p.Revoked() != nil
	})
}

// Decide resolves req, without dialing. The Resolver asks the policies of the service.
func (r *Router) Decide(ctx context.Context, req *Request) (Route, error) {
	if err := req.Peer.Revoked(); err != nil { // of a connection from before
		return Route{}, err
	}
	route, err := r.Resolver.Resolve(ctx, req)
	if err != nil {
		return route, err
	}
	if len(route.Endpoints) == 0 {
		return route, Refusef(NoEndpoint, "service %s has no endpoint", route.Service)
	}
	if req.RequireTLS && req.Hello == 0 {
		route.requireTLS(req.Listener)
	}
	if req.Datagrams != nil {
		return route, route.datagrams()
	}
	return route, nil
}

// enter refuses a ClientHello that is on its way round.
func (r *Router) enter(l *lease, req *Request, route *Route) error {
	most := r.MaxHelloRepeats
	if most == 0 {
		most = DefaultMaxHelloRepeats
	}
	if req.Hello == 0 || most < 0 {
		return nil
	}
	if !r.hellos.enter(req.Hello, most) {
		return Refusef(Loop, "service %s: the same ClientHello has come %d times and has no answer: its endpoints lead back to this gateway", route.Service, most+1)
	}
	l.hello = req.Hello
	return nil
}

// answered notes that the service has sent something, or is not dialed any more.
func (r *Router) answered(l *lease) {
	if l.hello != 0 {
		r.hellos.leave(l.hello)
		l.hello = 0
	}
}

// reserve takes what a tunnel needs beyond its client's descriptor, and charges
// it to the client and to the service.
func (r *Router) reserve(l *lease, route *Route) (err error) {
	if p := r.Budget.Pressure(); p != Calm && !r.Budget.isOthersShortage(l.client) {
		return Refusef(Overload, "memory is %s: raise its limit or add a gateway", p)
	}
	limits := r.limits()
	if err := r.checkTunnels(l, limits); err != nil {
		return err
	}
	if r.Relay != nil { // which a Router that only refuses may lack
		if l.load, err = r.Relay.loads.take(route.loadKey(), route.Limits); err != nil {
			return err
		}
	}
	if n, most := r.tunnels.Add(1), limits.MaxTunnels; most > 0 && n > int64(most) {
		r.tunnels.Add(-1)
		return Refusef(Overload, "limits.maxTunnels: %d tunnels are open, and the limit is %d: raise it or add a gateway", n-1, most)
	}
	if !r.Budget.Take(1) {
		r.tunnels.Add(-1)
		return Refusef(Overload, "the %d descriptors for tunnels are taken", r.Budget.Limit)
	}
	l.client.AddTunnels(1)
	l.client.addDescriptors(1)
	return nil
}

func (r *Router) limits() *Limits { return r.CurrentLimits.Or(&r.Limits) }

// checkTunnels refuses one more tunnel of the client where it holds its share.
func (r *Router) checkTunnels(l *lease, limits *Limits) error {
	if l.exempt {
		return nil
	}
	c := l.client
	if err := c.CheckTunnels(limits); err != nil {
		return err
	}
	now := time.Now()
	if l.stream {
		if err := c.checkAborts(now); err != nil {
			return err
		}
	}
	if err := r.Budget.checkDescriptors(c, 1); err != nil {
		return err
	}
	if most := int64(limits.MaxTunnels); most > 0 {
		if err := c.fair("tunnels", most, most-r.tunnels.Load(), 1, func(c *Client) int64 { return c.Tunnels.Load() }, "raise limits.maxTunnels or add a gateway"); err != nil {
			return err
		}
	}
	if l.stream || c.principal { // else the connection was counted, and is the tunnel
		return c.CheckRate(limits, now, "tunnels")
	}
	return nil
}

// giveBack returns what reserve took, and the lease; of a way that is shared,
// the descriptor has been returned.
func (r *Router) giveBack(l *lease, multiplexed bool) {
	if !multiplexed {
		r.Budget.Give(1)
	}
	r.tunnels.Add(-1)
	r.answered(l)
	l.release(multiplexed)
}

// newOutcome begins the Outcome of req.
func (r *Router) newOutcome(req *Request) Outcome {
	if req.Start.IsZero() {
		req.Start = time.Now()
	}
	return Outcome{
		ID: r.ids.Add(1), Start: req.Start, Proto: req.Proto, Listener: req.Listener, Source: req.Source,
		Process: req.Process, Peer: req.Peer, Unverified: req.Unverified, Target: req.Target(), ALPN: req.ALPN, Waited: time.Since(req.Start),
	}
}

// Refuse tells the client of req no, for err, and reports the Outcome. It is for Handlers
// that answer some requests in front of the Router.
func (r *Router) Refuse(req *Request, err error) {
	o := r.newOutcome(req)
	req.Refuse(err)
	r.refused(o, err)
}

// refused tells of a request that came to no tunnel.
func (r *Router) refused(o Outcome, err error) {
	o.Reason, o.Err, o.Lasted = ReasonOf(err), err, time.Since(o.Start)
	r.report(&o)
}

func (r *Router) report(o *Outcome) {
	if r.Observe != nil {
		r.Observe(o)
	}
}
