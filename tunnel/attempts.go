package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
)

// An EndpointDialer is a Dialer that learns whether the route named the address
// and from which DNS name it came: a NetDialer.
type EndpointDialer interface {
	Dialer
	DialEndpoint(ctx context.Context, ep Endpoint) (net.Conn, error)
}

// dial tries the route's endpoints in order and returns the first connection
// and how it came about. The attempts before it go to o.
func (r *Router) dial(ctx context.Context, req *Request, route *Route, o *Outcome) (net.Conn, Attempt, error) {
	left, most := r.dialAttempts(), route.Limits.perEndpoint()
	circuits := trials{route: route, take: true}
	for i := range route.Endpoints {
		ep := &route.Endpoints[i]
		if left == 0 {
			break
		}
		if !ep.Load.enter(most) {
			continue
		}
		if err := circuits.admit(req, ep); err != nil { // which costs nothing: others may work
			ep.Load.add(-1)
			if len(o.Attempts) < r.dialAttempts() {
				o.Attempts = append(o.Attempts, Attempt{Endpoint: *ep, Err: err})
			}
			continue
		}
		left--
		c, a := r.dialOne(ctx, req, route, ep)
		if a.Err == nil {
			if route.Balancer != nil {
				route.Balancer.Chosen(req, ep)
			}
			return c, a, nil
		}
		o.Attempts = append(o.Attempts, a)
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, a, &Error{Reason: Drain, Err: fmt.Errorf("service %s: the dial was canceled: %w", route.Service, a.Err)}
		}
		if e, ok := errors.AsType[*Error](a.Err); ctx.Err() != nil || ok && e.Final {
			break
		}
	}
	if len(o.Attempts) == 0 {
		return nil, Attempt{}, route.errAllFull()
	}
	return nil, Attempt{}, dialFailure(route, o.Attempts)
}

// dialOne dials ep, whose Load counts the tunnel already. Where that works, the count
// stays.
func (r *Router) dialOne(ctx context.Context, req *Request, route *Route, ep *Endpoint) (c net.Conn, _ Attempt) {
	start, whole := time.Now(), ctx
	ctx, cancel := withLazyTimeout(ctx, start, limit(r.limits().ConnectTimeout, DefaultConnectTimeout))
	defer cancel()
	defer func() {
		if c == nil { // it failed, or a panic is on its way up
			ep.Load.add(-1)
		}
	}()
	c, err := r.dialEndpoint(ctx, req, ep)
	if err != nil {
		c, err = nil, dialError(*ep, err)
	}
	if e, ok := errors.AsType[*Error](err); ok && e.Reason == DialTimeout && whole.Err() != nil {
		e.Unconnected = false // it had less than its time
	}
	// A dial that we gave up, refused or had no descriptor for says nothing of the endpoint.
	why := ReasonOf(err)
	tried := err == nil || (why == DialFailed || why == DialTimeout) && !errors.Is(ctx.Err(), context.Canceled)
	if route.Report != nil && tried {
		route.Report(*ep, err)
	}
	return c, Attempt{Endpoint: *ep, Took: time.Since(start), Err: err}
}

// dialEndpoint dials ep by its Transport, or else by the dialer of all endpoints.
func (r *Router) dialEndpoint(ctx context.Context, req *Request, ep *Endpoint) (net.Conn, error) {
	if ep.Transport != nil {
		return ep.Transport.Dial(ctx, ep, req)
	}
	d := r.dialer(req)
	if d, ok := d.(EndpointDialer); ok {
		return d.DialEndpoint(ctx, *ep)
	}
	return d.DialContext(ctx, "tcp", ep.Addr.String())
}

// dialer returns what dials endpoints without a Transport.
func (r *Router) dialer(req *Request) Dialer {
	if req.Datagrams != nil {
		return req.Datagrams
	}
	return r.Dialer
}

// check returns why ep must not be dialed for req.
func (r *Router) check(req *Request, ep *Endpoint) error {
	if ep.Transport != nil {
		return ep.Transport.Check(ep)
	}
	if d, ok := r.dialer(req).(interface{ Check(Endpoint) error }); ok {
		return d.Check(*ep)
	}
	return nil
}

// dialFailure sums up failed attempts. An address that must not be dialed
// outweighs what went wrong in the gateway, that a timeout, and a timeout a plain
// failure.
func dialFailure(route *Route, attempts []Attempt) error {
	why, texts := DialFailed, make([]string, 0, len(attempts))
	rank := func(x Reason) int {
		switch x {
		case Loop:
			return 5
		case Prohibited:
			return 4
		case Overload:
			return 3
		case Internal:
			return 2
		case DialTimeout:
			return 1
		}
		return 0
	}
	errs := make([]error, 0, len(attempts))
	for _, a := range attempts {
		if w := ReasonOf(a.Err); rank(w) > rank(why) {
			why = w
		}
		errs = append(errs, a.Err)
		texts = append(texts, a.Err.Error())
	}
	if refused := hopsRefusal(attempts); refused != "" {
		why = refused
	}
	return &Error{Reason: why, Err: &dialErrors{
		text: fmt.Sprintf("service %s: none of %d endpoints answered: %s", route.Service, len(route.Endpoints), strings.Join(texts, "; ")),
		errs: errs,
	}}
}

// hopsRefusal returns why the next hops refuse the request, where all of them do for one
// reason that is about the service: it is then the client's, too. It is "" otherwise, and
// where a hop refuses this gateway and not the request.
func hopsRefusal(attempts []Attempt) (why Reason) {
	for i, a := range attempts {
		var e *Error
		if !errors.As(a.Err, &e) || !e.BehindHop || i > 0 && e.Reason != why {
			return ""
		}
		why = e.Reason
	}
	switch why {
	case NoRoute, NotExposed, Denied, NoEndpoint:
		return why
	}
	return ""
}

// dialErrors is several failures with one text; errors.Is finds each.
type dialErrors struct {
	text string
	errs []error
}

func (e *dialErrors) Error() string { return e.text }

func (e *dialErrors) Unwrap() []error { return e.errs }
