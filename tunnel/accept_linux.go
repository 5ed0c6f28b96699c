//go:build amd64 || arm64

package tunnel

import (
	"context"
	"net"
	"os"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

// A door is a listening socket at one loop. Each loop has one for each
// listener, and the kernel wakes one loop for each connection.
type door struct {
	server   *Server
	ctx      context.Context
	ln       *Listener
	sock     *poll.Listener
	deferred bool      // the kernel holds its connections back until they send: its protocols are all PreambleDetectors
	told     time.Time // when the kernel was told to keep clients that say nothing
	trouble  chan<- *door

	loop  *loop
	token poll.Token
	shut  bool  // it has no token
	err   error // why
}

const (
	acceptTurn = 4 // connections that one event accepts

	// acceptDefer is how long the kernel keeps a client that says nothing.
	acceptDefer = time.Second
)

// attend has the loops accept ln's connections until it is closed, and returns
// what Serve does then. It is false, at once, where they can't: ln is not one
// of Listen's, or there are no loops.
func (s *Server) attend(ctx context.Context, ln *Listener) (error, bool) {
	sock, ok := ln.Listener.(*poll.Listener)
	if !ok {
		return nil, false
	}
	loops := s.loops().running()
	if len(loops) == 0 {
		return nil, false
	}
	trouble := make(chan *door, len(loops))
	deferred := detectPreambles(ln.Protocols)
	if deferred {
		// The client speaks first: the kernel need not tell of it before it has.
		// One that does not is told of after a second (see deferred).
		sock.DeferAccept(acceptDefer)
	}
	told := time.Now()
	for _, l := range loops {
		d := &door{server: s, ctx: ctx, ln: ln, sock: sock, deferred: deferred, told: told, trouble: trouble, loop: l}
		defer d.close()
		d.open()
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
		case d := <-trouble:
			if time.Since(last) > 2*time.Second {
				backoff = 0
			}
			backoff, last = min(max(2*backoff, 5*time.Millisecond), time.Second), time.Now()
			s.log().Warn("accept failed, waiting", "listener", ln.Name, "err", d.err, "wait", backoff)
			if !s.wait(ctx, backoff) {
				return ErrServerClosed, true
			}
			d.open()
		}
	}
}

// open has the loop watch the door.
func (d *door) open() {
	l := d.loop
	l.Lock()
	defer l.Unlock()
	if l.Stopped() {
		return
	}
	d.token = l.Register(d)
	if err := d.sock.Control(func(fd int32) error { return l.Watch(fd, poll.In|poll.Exclusive, d.token, 0) }); err != nil {
		l.Unregister(d.token)
		d.shut, d.err = true, os.NewSyscallError("epoll_ctl", err)
		d.trouble <- d
		return
	}
	d.shut = false
}

// close has the loop watch it no longer.
func (d *door) close() {
	l := d.loop
	l.Lock()
	defer l.Unlock()
	if d.shut || l.Stopped() {
		return
	}
	d.shut = true
	l.Unregister(d.token)
	_ = d.sock.Control(l.Unwatch)
}

// deferred counts the time of k, which was accepted without a byte, from when
// it connected: that is how long the kernel had it, unless it was there before
// the kernel was told.
func (s *Server) deferred(k *slot, told time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k.accepted.Sub(told) >= acceptDefer {
		k.accepted = k.accepted.Add(-acceptDefer)
	}
}

// next accepts a connection, unless memory is so short that nobody is let in.
func (d *door) next() (*poll.Conn, error) {
	if d.server.Budget.Pressure() == Full {
		return nil, errFull
	}
	return d.sock.TryAccept()
}

// HandleEvent implements poll.Handler: it accepts a few connections, and serves those
// that have said all there is to say. Of a loop with nothing else to do it
// accepts one: the loop looks again before it sleeps.
func (d *door) HandleEvent(l *poll.Loop, _ int, _ uint32) bool {
	turn := acceptTurn
	if l.Alone() {
		turn = 1
	}
	for range turn {
		// The slot comes first: what it takes to serve a connection is there
		// before the connection is.
		room := d.server.Budget.Accept()
		s, err := d.next()
		if s == nil {
			if room {
				d.server.Budget.Give(1)
			}
			if err != nil {
				d.close()
				d.err = err
				d.trouble <- d // has room: a door is there once
			}
			return true
		}
		k := d.server.admit(d.ctx, d.ln, s, room, poll.Task{Loop: l})
		switch {
		case k == nil:
		case !d.deferred:
			go d.server.serve(k)
		default:
			s.Task = &k.task
			if !d.loop.receive(k, s, d.told) {
				return false
			}
		}
	}
	return true
}

// The lobby is where connections wait until what they have sent is worth a
// look: a connection there is its slot, its socket and the bytes it has sent,
// and no stack. A loop reads, asks the protocols' HasPreamble, and lets the
// connection out when that says yes, when the client is gone, when its time is
// up, or after a number of reads, since each asks from the first byte again.
//
// Nothing is decided here: a connection that is let out is served as if its
// bytes had just come.

// maxReads is how often a connection is read before it is served anyway.
const maxReads = 16

// A guest is one connection in the lobby.
type guest struct {
	k     *slot
	sock  *poll.Conn
	reads int
	token poll.Token
}

// receive serves k, or has it wait in the lobby until it should be; told is
// when the kernel was told to keep those who say nothing. It is false where the
// loop is another goroutine's afterwards.
func (l *loop) receive(k *slot, s *poll.Conn, told time.Time) bool {
	g := &guest{k: k, sock: s}
	if g.ready() {
		return l.serve(k)
	}
	if len(k.buf) == 0 {
		k.server.deferred(k, told)
	}
	if !l.hold(g) {
		return l.serve(k)
	}
	return true
}

// hold seats g. It is false where it should be served at once.
func (l *loop) hold(g *guest) bool {
	l.Lock()
	defer l.Unlock()
	if l.Stopped() || g.k.evicted.Load() { // out came first
		return false
	}
	g.token = l.Register(g)
	if err := g.sock.Control(func(fd int32) error { return l.Watch(fd, poll.In, g.token, 0) }); err != nil {
		l.Unregister(g.token)
		return false
	}
	g.k.guest = g
	return true
}

// ready reads what there is and reports whether g should be served.
func (g *guest) ready() bool {
	p := poll.NewScratch()
	n, err := g.sock.ReadNow(p[:])
	k := g.k
	if n > 0 && len(k.buf) == 0 {
		k.markBegun()
		if k.ln.hasPreamble(p[:n]) { // as nearly all are: the bytes stay where they are
			k.buf, k.scratch = p[:n:n], p
			return true
		}
	}
	k.buf = append(k.buf, p[:n]...)
	p.Free()
	if n > 0 {
		g.reads++
	}
	// After an error, whoever serves it will meet the same end.
	return err != nil || n > 0 && (g.reads >= maxReads || k.ln.hasPreamble(k.buf))
}

// HandleEvent implements poll.Handler.
func (g *guest) HandleEvent(l *poll.Loop, _ int, _ uint32) bool {
	l.Lock()
	out := g.k.guest == g && g.ready()
	if out {
		g.dismiss(l)
	}
	l.Unlock()
	return !out || loopOf(l).serve(g.k)
}

// leaveLobby lets k out if it is there: its time is up, or the server closes.
func (k *slot) leaveLobby() {
	l := k.task.Loop
	if l == nil {
		return
	}
	l.Lock()
	g := k.guest
	if g != nil {
		g.dismiss(l)
	}
	l.Unlock()
	if g != nil {
		go k.server.serve(k)
	}
}

// dismiss gives up g's token. The caller holds the lock.
func (g *guest) dismiss(l *poll.Loop) {
	g.k.guest = nil
	l.Unregister(g.token)
	_ = g.sock.Control(l.Unwatch)
}
