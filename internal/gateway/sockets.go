package gateway

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// A socketSet keeps sockets open that the configuration names beside the listeners of
// the table: those of DNS, and the admin port. At a reload they come, go and move as
// listeners do.
type socketSet[K comparable] struct {
	tableWatcher
	g      *Gateway
	guard  *tunnel.Guard
	admin  bool // tunnels to the sockets are refused as those to the admin port
	wanted func() []K
	listen func(ctx context.Context, key K) (*ownSocket[K], error)
	run    func(func() error) // serves in the background, set by Run

	opened func(s *ownSocket[K])    // logs
	failed func(key K, err error)   // logs
	closed func(key K, addr string) // logs

	// Of New's goroutine, and then of watchSockets' alone.
	open   []*ownSocket[K]
	logged errorLog[K]

	mu    sync.Mutex // guards what follows
	state []socketState[K]
}

// An ownSocket is an open socket.
type ownSocket[K comparable] struct {
	key  K
	addr net.Addr

	serve func(ctx context.Context) error // owns the socket; returns once it is closed
	drain func()                          // has serve take nothing new and end
	close func()                          // gives back what is not served, and ends serve at once

	cancel context.CancelFunc // of the context of serve
	done   chan struct{}      // closed when serve has returned
}

// A socketState is what /status shows of a socket.
type socketState[K comparable] struct {
	key     K
	addr    net.Addr // nil where it is not open
	problem error
}

// openAll opens what is wanted, for the start of the gateway.
func (s *socketSet[K]) openAll(ctx context.Context) error {
	for _, key := range s.wanted() {
		o, err := s.listenAt(ctx, key)
		if err != nil {
			return err
		}
		s.open = append(s.open, o)
	}
	s.publish(nil)
	return nil
}

func (s *socketSet[K]) listenAt(ctx context.Context, key K) (*ownSocket[K], error) {
	o, err := s.listen(ctx, key)
	if err != nil {
		return nil, err
	}
	o.done = make(chan struct{})
	if s.admin {
		s.guard.OwnAdmin(o.addr)
	} else {
		s.guard.OwnListener(o.addr)
	}
	return o, nil
}

// closeAll gives back sockets that were never served.
func (s *socketSet[K]) closeAll() {
	for _, o := range s.open {
		o.close()
	}
}

// serveAll serves what openAll has opened.
func (s *socketSet[K]) serveAll(ctx context.Context) {
	for _, o := range s.open {
		s.begin(ctx, o)
	}
}

func (s *socketSet[K]) begin(ctx context.Context, o *ownSocket[K]) {
	s.opened(o)
	ctx, o.cancel = context.WithCancel(ctx)
	s.run(func() error {
		defer o.cancel()
		err := o.serve(ctx)
		close(o.done)
		if err != nil && ctx.Err() == nil {
			s.failed(o.key, err)
			s.tableChanged() // it is opened again
		}
		return nil
	})
}

// watchSockets follows the configuration until ctx is done.
func (s *socketSet[K]) watchSockets(ctx context.Context) error {
	s.watch(ctx, &s.g.stopping, s.update)
	return nil
}

// update opens and closes sockets by the configuration of the moment. As long as one of
// the new ones can't be opened, those that leave stay open: what moves is served at one
// of its addresses. It is false where one is to be tried again.
func (s *socketSet[K]) update(ctx context.Context) (complete bool) {
	leaving := slices.DeleteFunc(s.open, func(o *ownSocket[K]) bool {
		select {
		case <-o.done:
			s.guard.Disown(o.addr)
			return true
		default:
			return false
		}
	})
	s.open = nil
	var missing []K
	for _, key := range s.wanted() {
		if i := slices.IndexFunc(leaving, func(o *ownSocket[K]) bool { return o.key == key }); i >= 0 {
			s.open = append(s.open, leaving[i])
			leaving = slices.Delete(leaving, i, i+1)
		} else {
			missing = append(missing, key)
		}
	}
	errs := map[K]error{}
	for _, key := range missing {
		o, err := s.listenAt(ctx, key)
		if i := inTheWay(leaving, err); i >= 0 && !heldByOthers(err, leaving[i].addr) {
			old := leaving[i]
			s.end(old)
			if o, err = s.listenAt(ctx, key); err != nil {
				if old, again := s.listenAt(ctx, old.key); again == nil {
					leaving[i] = old
					s.begin(ctx, old)
				} else {
					leaving = slices.Delete(leaving, i, i+1)
				}
			} else {
				leaving = slices.Delete(leaving, i, i+1)
			}
		}
		if err != nil {
			errs[key] = err
			continue
		}
		s.open = append(s.open, o)
		s.begin(ctx, o)
	}
	if len(errs) == 0 {
		for _, o := range leaving {
			s.guard.Disown(o.addr)
			s.closed(o.key, o.addr.String())
			o.drain()
		}
		leaving = nil
	}
	s.open = append(s.open, leaving...)
	s.logErrors(errs)
	s.publish(errs)
	return len(errs) == 0
}

// inTheWay returns which of the sockets has the port that err says is taken, at the
// same or at other addresses, or -1.
func inTheWay[K comparable](leaving []*ownSocket[K], err error) int {
	wants, ok := errors.AsType[*net.OpError](err)
	if !ok || !inUse(err) || wants.Addr == nil {
		return -1
	}
	_, port, splitErr := net.SplitHostPort(wants.Addr.String())
	return slices.IndexFunc(leaving, func(o *ownSocket[K]) bool {
		_, has, err := net.SplitHostPort(o.addr.String())
		return splitErr == nil && err == nil && has == port && o.addr.Network() == wants.Addr.Network()
	})
}

// maxSocketDrain is how long a socket that is in the way may take to answer what it was
// asked.
const maxSocketDrain = 3 * time.Second

// end closes a socket that is in the way of another.
func (s *socketSet[K]) end(o *ownSocket[K]) {
	s.guard.Disown(o.addr)
	s.closed(o.key, o.addr.String())
	o.drain()
	late := time.NewTimer(maxSocketDrain)
	defer late.Stop()
	select {
	case <-o.done:
	case <-late.C:
		o.close()
	}
}

// logErrors logs errors that were not logged before.
func (s *socketSet[K]) logErrors(errs map[K]error) {
	keys := make([]K, 0, len(errs))
	for key := range errs {
		keys = append(keys, key)
	}
	s.logged.logNew(len(keys),
		func(i int) (K, error) { return keys[i], errs[keys[i]] },
		func(i int) { s.failed(keys[i], errs[keys[i]]) },
		func(n int) { s.g.log.Warn("cannot open more sockets", "sockets", n) })
}

// publish stores the state for readers.
func (s *socketSet[K]) publish(errs map[K]error) {
	wanted := s.wanted()
	rest := slices.Clone(s.open)
	var state []socketState[K]
	for _, key := range wanted {
		st := socketState[K]{key: key, problem: errs[key]}
		if i := slices.IndexFunc(rest, func(o *ownSocket[K]) bool { return o.key == key }); i >= 0 {
			st.addr = rest[i].addr
			rest = slices.Delete(rest, i, i+1)
		}
		state = append(state, st)
	}
	for _, o := range rest {
		state = append(state, socketState[K]{o.key, o.addr, errMoving})
	}
	s.mu.Lock()
	s.state = state
	s.mu.Unlock()
}

// states returns the state of the sockets.
func (s *socketSet[K]) states() []socketState[K] {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// problems returns how many sockets are not as they are configured.
func (s *socketSet[K]) problems() (n int) {
	for _, st := range s.states() {
		if st.problem != nil {
			n++
		}
	}
	return n
}

// addrs returns the addresses of the open sockets.
func (s *socketSet[K]) addrs() (all []net.Addr) {
	for _, st := range s.states() {
		if st.addr != nil {
			all = append(all, st.addr)
		}
	}
	return all
}

func (st *socketState[K]) problemText() string {
	if st.problem == nil {
		return ""
	}
	return st.problem.Error()
}
