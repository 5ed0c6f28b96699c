//go:build amd64 || arm64

package tunnel

import (
	"context"
	"net"
	"os"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

// A loopListener is a listening socket at one loop. Each loop has one for each
// listener, and the kernel wakes one loop for each connection.
type loopListener struct {
	server        *Server
	ctx           context.Context
	ln            *Listener
	sock          *poll.Listener
	deferredSince time.Time // since when the kernel keeps clients that send nothing
	failed        chan<- *loopListener

	loop      *poll.Loop
	token     poll.Token
	unwatched bool  // it has no token
	err       error // why
}

const (
	acceptTurn = 4 // connections that one event accepts

	// acceptDefer is how long the kernel keeps a client that sends nothing.
	acceptDefer = time.Second
)

// serveOnLoops has the loops accept ln's connections until ln is closed, and
// returns the result of Serve. It is false, at once, where they can't: ln was not
// opened by Listen, or there are no loops.
func (s *Server) serveOnLoops(ctx context.Context, ln *Listener) (error, bool) {
	sock, ok := ln.Listener.(*poll.Listener)
	if !ok {
		return nil, false
	}
	loops := s.loops().engine().Running()
	if len(loops) == 0 {
		return nil, false
	}
	failed := make(chan *loopListener, len(loops))
	// A client that sends first need not be heard of before. One that sends nothing is
	// heard of after a second (see countFromConnect).
	DeferAccept(sock, ln.Current().Protocols)
	since := time.Now()
	for _, l := range loops {
		d := &loopListener{server: s, ctx: ctx, ln: ln, sock: sock, deferredSince: since, failed: failed, loop: l}
		defer d.unwatch()
		d.watch()
	}
	var backoff time.Duration
	var last time.Time
	for {
		select {
		case <-sock.Done():
			if s.isClosing() {
				return ErrServerClosed, true
			}
			return net.ErrClosed, true
		case d := <-failed:
			if time.Since(last) > 2*time.Second {
				backoff = 0
			}
			backoff, last = min(max(2*backoff, 5*time.Millisecond), time.Second), time.Now()
			s.log().Warn("accept failed, waiting", "listener", ln.Current().Name, "err", d.err, "wait", backoff)
			if !s.wait(ctx, backoff) {
				return ErrServerClosed, true
			}
			d.watch()
		}
	}
}

// DeferAccept has the kernel keep back the clients of ln, which was opened by Listen, until
// they send something, or for a second: if all protocols are PreambleDetectors and none is a
// FirstSpeaker. Serve does
// that for the protocols that a Listener begins with. It must be called where they change.
func DeferAccept(ln net.Listener, protocols []Protocol) {
	if sock, ok := ln.(*poll.Listener); ok {
		d := time.Duration(0)
		if detectPreambles(protocols) && !hasFirstSpeaker(protocols) {
			d = acceptDefer
		}
		sock.DeferAccept(d)
	}
}

// watch has the loop watch the socket.
func (d *loopListener) watch() {
	l := d.loop
	l.Lock()
	defer l.Unlock()
	if l.Stopped() {
		return
	}
	d.token = l.Register(d)
	if err := d.sock.Control(func(fd int32) error { return l.Watch(fd, poll.In|poll.Exclusive, d.token, 0) }); err != nil {
		l.Unregister(d.token)
		d.unwatched, d.err = true, os.NewSyscallError("epoll_ctl", err)
		d.failed <- d
		return
	}
	d.unwatched = false
}

// unwatch ends watch.
func (d *loopListener) unwatch() {
	l := d.loop
	l.Lock()
	defer l.Unlock()
	if d.unwatched || l.Stopped() {
		return
	}
	d.unwatched = true
	l.Unregister(d.token)
	_ = d.sock.Control(l.Unwatch)
}

// countFromConnect counts the time of k, which was accepted without a byte, from
// when it connected: the kernel has kept it for acceptDefer, unless it connected
// before the kernel did so, which is since the given time.
func (s *Server) countFromConnect(k *slot, since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k.accepted.Sub(since) >= acceptDefer {
		k.accepted = k.accepted.Add(-acceptDefer)
	}
}

// accept accepts a connection, unless memory is full.
func (d *loopListener) accept() (*poll.Conn, error) {
	if d.server.Budget.Pressure() == Full {
		return nil, errFull
	}
	return d.sock.TryAccept()
}

// HandleEvent implements poll.Handler: it accepts a few connections, and serves
// those whose preamble is complete. On a loop with nothing else to do it accepts
// one: the loop looks for events again before it sleeps.
func (d *loopListener) HandleEvent(l *poll.Loop, _ int, _ uint32) bool {
	turn := acceptTurn
	if l.Alone() {
		turn = 1
	}
	for range turn {
		// The descriptor is reserved before the connection is accepted.
		room := d.server.Budget.Accept()
		s, err := d.accept()
		if s == nil {
			if room {
				d.server.Budget.Give(1)
			}
			if err != nil {
				d.unwatch()
				d.err = err
				d.failed <- d // has room: each loopListener is in it once at most
			}
			return true
		}
		k := d.server.admit(d.ctx, d.ln, s, room, poll.Task{Loop: l})
		switch {
		case k == nil:
		case !detectPreambles(k.config.Protocols):
			go d.server.serve(k)
		default:
			s.Task = &k.task
			since := d.deferredSince
			if !d.sock.Deferred() {
				since = k.accepted
			}
			if !serveOrWait(l, k, s, since) {
				return false
			}
		}
	}
	return true
}

// maxReads is how often a pending connection is read before it is served anyway,
// since HasPreamble begins at the first byte each time.
const maxReads = 16

// A pendingConn is an accepted connection whose preamble is not complete. It holds
// its slot, its socket and the bytes it has sent, and no goroutine. A loop reads
// it, and serves it once HasPreamble of its protocols says yes, the client is
// gone, or its time is up.
//
// It decides nothing: the connection is served as if its bytes had just arrived.
type pendingConn struct {
	k     *slot
	conn  *poll.Conn
	reads int
	token poll.Token
}

// serveOrWait serves k, or has it pending until its preamble is complete; since is
// when the kernel began to keep clients that send nothing. It is false where the
// loop is another goroutine's afterwards.
func serveOrWait(l *poll.Loop, k *slot, s *poll.Conn, since time.Time) bool {
	g := &pendingConn{k: k, conn: s}
	if g.readMore() {
		return serveOn(l, k)
	}
	if len(k.buf) == 0 {
		k.server.countFromConnect(k, since)
	}
	if !g.watch(l) {
		return serveOn(l, k)
	}
	return true
}

// watch has the loop watch g. It is false where g is to be served at once.
func (g *pendingConn) watch(l *poll.Loop) bool {
	l.Lock()
	defer l.Unlock()
	if l.Stopped() || g.k.evicted.Load() { // servePending came first
		return false
	}
	g.token = l.Register(g)
	if err := g.conn.Control(func(fd int32) error { return l.Watch(fd, poll.In, g.token, 0) }); err != nil {
		l.Unregister(g.token)
		return false
	}
	g.k.waiting = g
	return true
}

// readMore reads what has arrived and reports whether g is to be served.
func (g *pendingConn) readMore() bool {
	p := poll.NewScratch()
	n, err := g.conn.ReadNow(p[:])
	k := g.k
	if n > 0 && len(k.buf) == 0 {
		k.markBegun()
		if k.config.hasPreamble(p[:n]) { // as nearly all are: the bytes stay where they are
			k.buf, k.scratch = p[:n:n], p
			return true
		}
	}
	k.buf = append(k.buf, p[:n]...)
	p.Free()
	if n > 0 {
		g.reads++
	}
	// After an error, the goroutine that serves it gets the same error.
	return err != nil || n > 0 && (g.reads >= maxReads || k.config.hasPreamble(k.buf))
}

// HandleEvent implements poll.Handler.
func (g *pendingConn) HandleEvent(l *poll.Loop, _ int, _ uint32) bool {
	l.Lock()
	serve := g.k.waiting == g && g.readMore()
	if serve {
		g.unwatch(l)
	}
	l.Unlock()
	return !serve || serveOn(l, g.k)
}

// serveOn serves k on the loop's own goroutine, as any goroutine would. It is
// false where k had to wait: the loop is another goroutine's by then.
func serveOn(l *poll.Loop, k *slot) bool {
	l.Begin(&k.task)
	k.server.serve(k)
	return l.End(&k.task)
}

// servePending serves k if it is pending: its time is up, or the server closes.
func (k *slot) servePending() {
	l := k.task.Loop
	if l == nil {
		return
	}
	l.Lock()
	g := k.waiting
	if g != nil {
		g.unwatch(l)
	}
	l.Unlock()
	if g != nil {
		go k.server.serve(k)
	}
}

// unwatch ends watch. The caller holds the lock.
func (g *pendingConn) unwatch(l *poll.Loop) {
	g.k.waiting = nil
	l.Unregister(g.token)
	_ = g.conn.Control(l.Unwatch)
}
