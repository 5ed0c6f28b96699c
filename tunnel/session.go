package tunnel

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel/internal/poll"
	"culvert.dev/tunnel/internal/relay"
)

// A Session is what a Router has let through for somebody else than its Relay
// to carry: datagrams, which have no end of stream and no order. It is decided
// as any request is, it is on the Relay's list of what is open, counts there
// and is ended there, and it has one Outcome.
type Session struct {
	Conn     net.Conn // to the service; whoever called Open closes it, before End
	Endpoint Endpoint
	Route    Route

	relay   *Relay
	record  record
	carrier Carrier
	ended   atomic.Bool
}

// A Carrier is asked about the Session that it carries. Its methods may be
// called at any time, by anyone, until End has returned and for a moment after.
type Carrier interface {
	// Progress returns the bytes that were taken to the service and to the
	// client, and when one last was.
	Progress() (in, out int64, moved time.Time)

	// Kill ends the session: End is called with why, before Kill returns or
	// soon after.
	Kill(why Reason)
}

// Open takes req, which is for datagrams, as far as a service: resolve, allow,
// dial, by the same steps as ServeTunnel. It calls neither req.Accept nor
// req.Refuse. After an error the Outcome has been told, and the client is the
// caller's to tell; after none the caller calls Carry, and End once.
//
// A successful dial of UDP does not show that a server is there, so the route's
// Report gets failures only. See Session.Failed.
func (r *Router) Open(ctx context.Context, req *Request) (*Session, error) {
	o := r.newOutcome(req)
	lease := r.client(req)
	server, route, dialed, err := r.connect(ctx, req, &o, &lease)
	if err != nil {
		r.refused(o, err)
		return nil, err
	}
	o.Dialed = time.Since(req.Start) - o.Waited
	s := &Session{Conn: server, Endpoint: dialed.Endpoint, Route: route, relay: r.Relay}
	s.record = r.newRecord(&o, dialed, isMultiplexed(server), lease)
	return s, nil
}

// datagrams leaves out the endpoints to which datagrams cannot go, or must not.
func (r *Route) datagrams() error {
	if slices.ContainsFunc(r.Endpoints, carriesNoDatagrams) {
		r.Endpoints = slices.DeleteFunc(slices.Clone(r.Endpoints), carriesNoDatagrams)
	}
	if len(r.Endpoints) == 0 {
		return Refusef(Unsupported, "service %s is reached by a proxy protocol or through gateways that carry no datagrams: those asked by connect-h2 and connect-h3 do", r.Service)
	}
	if report := r.Report; report != nil {
		r.Report = func(ep Endpoint, err error) {
			if err != nil {
				report(ep, err)
			}
		}
	}
	return nil
}

// carriesNoDatagrams reports whether ep carries streams alone. Of datagrams nobody can tell
// whether they are encrypted, as TLSOnly demands.
func carriesNoDatagrams(ep Endpoint) bool {
	return ep.Transport != nil && !ep.Transport.Info().Datagrams || ep.TLSOnly != nil
}

// Carry puts s on the list of what is open.
func (s *Session) Carry(c Carrier) {
	s.carrier = c
	s.relay.loads.opened(s.record.countedIn())
	s.relay.sessions.add(s)
}

// Failed reports that the endpoint turned out not to be there, as an ICMP
// message says.
func (s *Session) Failed(err error) {
	if s.Route.Report != nil {
		s.Route.Report(s.Endpoint, &Error{Reason: DialFailed, Err: fmt.Errorf("dial %s: %w", s.Endpoint, err)})
	}
}

// End takes s from the list, gives back what it had taken, and tells its
// Outcome. Calls after the first do nothing.
func (s *Session) End(e End) {
	if s.ended.Swap(true) {
		return
	}
	if s.carrier == nil { // it was given up before Carry
		s.relay.loads.opened(s.record.countedIn())
	}
	s.relay.sessions.remove(s)
	s.record.Ended(e)
}

// listedSession is a Session on the Relay's list. It implements relay.Live.
type listedSession struct{ s *Session }

func (l listedSession) Owner() relay.Owner { return l.s.record }

func (l listedSession) Progress() (p relay.Progress, open bool) {
	in, out, moved := l.s.carrier.Progress()
	return relay.Progress{In: in, Out: out, Moved: poll.Clock() - int64(time.Since(moved))}, !l.s.ended.Load()
}

func (l listedSession) Kill(why Reason, _ error) { l.s.carrier.Kill(why) }

// sessions are those that a Relay lists.
type sessions struct {
	mu  sync.Mutex // guards all
	all map[*Session]struct{}
}

func (l *sessions) add(s *Session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all == nil {
		l.all = make(map[*Session]struct{})
	}
	l.all[s] = struct{}{}
}

func (l *sessions) remove(s *Session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.all, s)
}

func (l *sessions) appendAll(to []relay.Live) []relay.Live {
	l.mu.Lock()
	defer l.mu.Unlock()
	for s := range l.all {
		to = append(to, listedSession{s})
	}
	return to
}
