package tunnel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"culvert.dev/tunnel/internal/poll"
	"culvert.dev/tunnel/internal/relay"
)

// A Listener is a socket that accepts and the protocols it speaks.
type Listener struct {
	net.Listener
	Name string // as configured, for logs; "" means its address

	// Protocols are asked in order whose connection it is. A single one is
	// not asked: the listener is pinned to it, and its server may speak first.
	Protocols []Protocol

	ConnHeader ConnHeader // that every connection begins with; nil means none
	RequireTLS bool       // as of a ListenerConfig

	Proxies []netip.Prefix // as of a ListenerConfig

	// Current, if set, takes the place of what is above, where that may change while the
	// Listener is served. It is asked for each connection that comes.
	Current func() *ListenerConfig

	// Guarded by the Server's mu.
	cancel context.CancelFunc // ends the contexts of its connections
	conns  int                // that have such a context
	over   bool               // Serve has returned
}

// A ListenerConfig is what a Listener serves at one moment. It must not be changed.
type ListenerConfig struct {
	Name       string
	Protocols  []Protocol
	ConnHeader ConnHeader
	RequireTLS bool // of what clients send that did not come by TLS: see Request.RequireTLS

	// Proxies are the ranges of proxies in front that name the client in each request. They
	// alone may connect. A Protocol sets what they say as the Source of the request, which is
	// then charged to that client, and no limit on one client is held against the proxy.
	// Empty means that the connection's peer is the client.
	Proxies []netip.Prefix

	// PeerCredentials makes the user whose process connected the caller: see Process.Peer.
	// It is for listeners whose connections are LocalConns.
	PeerCredentials bool

	// AdmitPeer, if set, refuses the connections of some processes of this machine, by the
	// addresses of a connection's two ends: it returns an *Error. It is asked once, before
	// the first byte is looked at, and may make system calls.
	AdmitPeer func(client, server netip.AddrPort) error

	// AdmitProcess is AdmitPeer for LocalConns, by the process that has connected: nil where
	// it is not known.
	AdmitProcess func(*Process) error
}

// A Server accepts connections, holds them to limits until they have asked
// for something, finds out which protocol they speak and hands them over.
//
// The zero value serves with default limits.
type Server struct {
	Handler Handler
	Limits  Limits
	Budget  *Budget        // each connection takes one descriptor; nil means no limit
	Observe func(*Outcome) // told of connections that ended without a request; must not block. May be nil
	Log     *slog.Logger   // accept errors and panics; nil discards

	// CurrentLimits, if set, takes the place of Limits. Pending connections, too, have the
	// limits of the moment.
	CurrentLimits LimitsFunc

	// Loops accept from what Listen opened; nil means loops of the Server's own.
	Loops *Loops

	own     Loops
	clients Clients // of a Server without a Budget

	mu        sync.Mutex             // guards what follows
	listeners map[*Listener]struct{} // being served, or with connections left
	slots     slots
	closed    bool
	panics    relay.PanicLog
	wg        sync.WaitGroup
}

// Listen opens a listening socket for a Server. Keepalive is left to the
// Relay: until there is a tunnel, deadlines find a client that is gone.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	lc := net.ListenConfig{KeepAlive: -1}
	ln, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return poll.NewListener(ln), nil
}

// Adopt returns a listener at the socket of ln, of TCP, which another process has open, too.
// It owns ln. Serve accepts its connections by a goroutine: an event loop would go on
// watching a socket that is closed here and open elsewhere.
func Adopt(ln net.Listener) net.Listener { return adopted{poll.NewListener(ln)} }

// An adopted listener is no *poll.Listener.
type adopted struct{ net.Listener }

// Serve accepts connections on ln until Shutdown or Close, and then returns
// ErrServerClosed. It owns ln. Every connection's context is made of ctx and
// ends with Close.
//
// One listener of several may be closed by itself: Serve returns net.ErrClosed
// then, and the connections that came by it go on.
func (s *Server) Serve(ctx context.Context, ln Listener) error {
	defer ln.Close()
	if ln.Name == "" {
		ln.Name = ln.Addr().String()
	}
	if ln.Current == nil {
		fixed := &ListenerConfig{Name: ln.Name, Protocols: ln.Protocols, ConnHeader: ln.ConnHeader, RequireTLS: ln.RequireTLS, Proxies: ln.Proxies}
		ln.Current = func() *ListenerConfig { return fixed }
	}
	if c := ln.Current(); len(c.Protocols) == 0 {
		return fmt.Errorf("tunnel: listener %s speaks no protocol", c.Name)
	}
	ctx, ln.cancel = context.WithCancel(ctx)
	if !s.track(&ln) {
		ln.cancel()
		return ErrServerClosed
	}
	defer s.untrack(&ln)
	if err, done := s.serveOnLoops(ctx, &ln); done {
		return err
	}
	var backoff time.Duration
	for {
		// The slot comes first: what it takes to serve a connection is there
		// before the connection is.
		room := s.Budget.Accept()
		c, err := s.accept(ln.Listener)
		if err != nil {
			if room {
				s.Budget.Give(1)
			}
			if s.isClosing() {
				return ErrServerClosed
			}
			if errors.Is(err, net.ErrClosed) {
				return net.ErrClosed
			}
			backoff = min(max(2*backoff, 5*time.Millisecond), time.Second)
			s.log().Warn("accept failed, waiting", "listener", ln.Current().Name, "err", err, "wait", backoff)
			if !s.wait(ctx, backoff) {
				return ErrServerClosed
			}
			continue
		}
		backoff = 0
		if !room { // there may have come some while Accept was waiting
			room = s.Budget.Accept()
		}
		if k := s.admit(ctx, &ln, c, room, poll.Task{}); k != nil {
			go s.serve(k)
		}
	}
}

func (s *Server) limits() *Limits { return s.CurrentLimits.Or(&s.Limits) }

func (s *Server) loops() *Loops {
	if s.Loops != nil {
		return s.Loops
	}
	return &s.own
}

// accept accepts a connection, unless memory is so short that nobody is let
// in: who connects then waits in the kernel.
func (s *Server) accept(ln net.Listener) (net.Conn, error) {
	if s.Budget.Pressure() == Full {
		return nil, errFull
	}
	return ln.Accept()
}

// wait sleeps for d. It is false if the server or ctx is done.
func (s *Server) wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return !s.isClosing()
	}
}

// admit makes c a slot, which somebody must serve, or turns it away. task has
// the loop that accepted c, if one did.
func (s *Server) admit(ctx context.Context, ln *Listener, c net.Conn, room bool, task poll.Task) *slot {
	k := &slot{server: s, ln: ln, config: ln.Current(), task: task}
	k.ctx = slotContext{ctx, k}
	k.Conn.init(c)
	k.Conn.Listener, k.Conn.bare = k.config.Name, k.config.RequireTLS
	if p := k.Conn.process; p == nil {
		k.client = s.Budget.Client(&s.clients, k.Conn.source.Addr())
	} else {
		k.client = s.Budget.user(&s.clients, p)
		if k.config.PeerCredentials {
			k.Peer = p.Peer()
		}
	}
	s.mu.Lock()
	var refused error
	switch {
	case s.closed:
		refused = &Error{Reason: Drain, Err: ErrServerClosed}
	case ln.over: // it was closed as the connection came
		refused = &Error{Reason: Drain, Err: net.ErrClosed}
	case !room:
		refused = Refusef(Overload, "all %d descriptors for connections are taken", s.Budget.Limit)
	default:
		refused = s.slots.admit(k, s.limits(), s.Budget, time.Now())
	}
	if refused == nil {
		ln.conns++
		s.wg.Add(1)
		if !s.slots.sweeping {
			s.slots.sweeping = true
			s.wg.Add(1)
			go s.sweep()
		}
	}
	s.mu.Unlock()
	if refused != nil {
		if room {
			s.Budget.Give(1)
		}
		k.client.Release()
		_ = relay.Abort(c)
		s.report(k, nil, refused)
		return nil
	}
	return k
}

// serve is one connection from its first byte to its hand-over.
func (s *Server) serve(k *slot) {
	defer s.wg.Done()
	defer k.leave()
	var proto Protocol
	defer func() {
		if v := recover(); v != nil {
			p := Caught(v)
			s.panicking(p)
			_ = k.Abort()
			s.report(k, proto, &Error{Reason: Internal, Err: p})
		}
	}()
	err := k.admitPeer()
	var ctx context.Context
	if err == nil {
		ctx, err = k.readConnHeader()
	}
	if err == nil {
		proto, err = k.detect()
	}
	if err == nil {
		err = proto.ServeConn(ctx, &k.Conn, k)
	}
	if err != nil {
		s.report(k, proto, err)
	}
	if !k.handed {
		_ = k.Close()
	}
}

// admitPeer asks the listener's AdmitPeer or AdmitProcess. After an error it has ended k.
func (k *slot) admitPeer() error {
	var err error
	switch a := k.Conn.LocalAddr().(type) {
	case *net.TCPAddr:
		if admit := k.config.AdmitPeer; admit != nil {
			err = admit(k.Conn.source, a.AddrPort())
		}
	case *net.UnixAddr: // without AdmitProcess, its file or PeerCredentials says who may connect
		if admit := k.config.AdmitProcess; admit != nil {
			err = admit(k.Conn.process)
		}
	}
	if err != nil {
		_ = k.Abort()
	}
	return err
}

// report reports a connection that ended without a request.
func (s *Server) report(k *slot, proto Protocol, err error) {
	if s.Observe == nil {
		return
	}
	o := &Outcome{
		Start: k.accepted, Listener: k.Conn.Listener, Source: k.Conn.source, Process: k.Conn.process, Peer: k.Peer,
		Reason: ReasonOf(err), Err: err, Lasted: time.Since(k.accepted),
	}
	if proto != nil {
		o.Proto = proto.Name()
	}
	switch {
	case k.evicted.Load() && o.Reason == HelloTimeout:
		o.Reason, o.Err = Overload, fmt.Errorf("limits.maxPendingConnections: too many pending connections; of the client with most, this was the oldest: %w", err)
	case errors.Is(err, net.ErrClosed) && s.isClosing():
		o.Reason, o.Err = Drain, ErrServerClosed // it was Close that left, not the client
	}
	s.Observe(o)
}

// Refused implements Refuser.
func (k *slot) Refused(req *Request, err error) {
	s := k.server
	s.mu.Lock()
	s.slots.removePending(k)
	s.mu.Unlock()
	if s.Observe == nil {
		return
	}
	o := &Outcome{
		Start: req.Start, Proto: req.Proto, Listener: req.Listener, Source: req.Source, Process: req.Process, Peer: req.Peer, Unverified: req.Unverified,
		Reason: ReasonOf(err), Err: err, Lasted: time.Since(req.Start),
	}
	if req.Name != (Name{}) || req.Addr.IsValid() {
		o.Target = req.Target()
	}
	s.Observe(o)
}

// Panicked implements Refuser.
func (k *slot) Panicked(req *Request, v any) {
	p := Caught(v)
	k.server.panicking(p)
	k.Refused(req, &Error{Reason: Internal, Err: p})
}

// panicking logs a stack, once a minute at most: an attacker who found the
// input may send it often.
func (s *Server) panicking(p *Panic) { s.panics.Log(s.Log, p) }

// sweep ends preambles whose time is up, as long as there are any. It stands
// for a timer per connection.
func (s *Server) sweep() {
	defer s.wg.Done()
	const often = 100 * time.Millisecond
	t := time.NewTicker(often)
	defer t.Stop()
	for range t.C {
		s.mu.Lock()
		limits, busy := s.limits(), s.loops().engine().HandOffStalled()
		short := s.Budget.preamble(*limits)
		if !s.slots.expirePending(limits, &short, time.Now()) && !busy {
			s.slots.sweeping = false
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
	}
}

// Shutdown stops accepting and waits until every connection has been handed
// over or has ended; those that carry many requests are asked to (see
// Drainer). Tunnels that stand are the Relay's to wait for. When ctx ends
// first, Shutdown closes what is left and returns the context's error. It is
// safe to call again and at once with Close.
func (s *Server) Shutdown(ctx context.Context) error {
	for _, d := range s.stopListening() {
		d.Drain()
	}
	idle := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(idle)
	}()
	select {
	case <-idle:
		_ = s.own.Close()
		return nil
	case <-ctx.Done():
		_ = s.Close()
		<-idle
		return ctx.Err()
	}
}

// Close stops accepting and aborts every connection that was not handed over.
func (s *Server) Close() error {
	_ = s.stopListening()
	s.mu.Lock()
	for ln := range s.listeners {
		ln.cancel()
	}
	s.slots.each(func(k *slot) {
		_ = k.Abort()
		k.servePending()
	})
	s.mu.Unlock()
	_ = s.own.Close()
	return nil
}

// stopListening closes the listeners, and returns those of their protocols that are to
// be drained.
func (s *Server) stopListening() (drainers []Drainer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for ln := range s.listeners {
		for _, p := range ln.Current().Protocols {
			if d, ok := p.(Drainer); ok {
				drainers = append(drainers, d)
			}
		}
		_ = ln.Close() // again does no harm
	}
	return drainers
}

func (s *Server) track(ln *Listener) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	if s.listeners == nil {
		s.listeners = make(map[*Listener]struct{})
	}
	s.listeners[ln] = struct{}{}
	return true
}

func (s *Server) untrack(ln *Listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ln.over = true
	s.forget(ln)
}

// forget drops a listener that nobody needs any more: listeners that come and
// go leave nothing behind. The caller holds mu.
func (s *Server) forget(ln *Listener) {
	if ln.over && ln.conns == 0 {
		ln.cancel()
		delete(s.listeners, ln)
	}
}

func (s *Server) isClosing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

func (s *Server) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Log
}
