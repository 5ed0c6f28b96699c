//go:build amd64 || arm64

package tunnel

import (
	"context"
	"net"
	"os"
	"syscall"
	"time"
)

// A door is a listening socket at one loop. Each loop has one for each
// listener, and the kernel wakes one loop for each connection.
type door struct {
	server   *Server
	ctx      context.Context
	ln       *Listener
	sock     *sockListener
	deferred bool      // the kernel holds its connections back until they send: its protocols are all PreambleDetectors
	told     time.Time // when the kernel was told to keep clients that say nothing
	trouble  chan<- *door

	loop    *loop
	at, gen int32 // its seat
	shut    bool  // it has none
	err     error // why
}

const (
	acceptTurn     = 4       // connections that one event accepts
	epollExclusive = 1 << 28 // EPOLLEXCLUSIVE
	tcpDeferAccept = 9       // TCP_DEFER_ACCEPT

	// acceptDefer is how long the kernel keeps a client that says nothing.
	acceptDefer = time.Second
)

// attend has the loops accept ln's connections until it is closed, and returns
// what Serve does then. It is false, at once, where they can't: ln is not one
// of Listen's, or there are no loops.
func (s *Server) attend(ctx context.Context, ln *Listener) (error, bool) {
	sock, ok := ln.Listener.(*sockListener)
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
		_ = sock.control(func(fd int32) error {
			return syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpDeferAccept, int(acceptDefer/time.Second))
		})
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
		case <-sock.done:
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
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released {
		return
	}
	d.at, d.gen = l.seat(d)
	if err := d.sock.control(func(fd int32) error {
		return l.control(syscall.EPOLL_CTL_ADD, fd, syscall.EPOLLIN|epollExclusive, d.at, d.gen, 0)
	}); err != nil {
		l.vacate(d.at)
		d.shut, d.err = true, os.NewSyscallError("epoll_ctl", err)
		d.trouble <- d
		return
	}
	d.shut = false
}

// close has the loop watch it no longer.
func (d *door) close() {
	l := d.loop
	l.mu.Lock()
	defer l.mu.Unlock()
	if d.shut || l.released {
		return
	}
	d.shut = true
	l.vacate(d.at)
	_ = d.sock.control(func(fd int32) error { return l.control(syscall.EPOLL_CTL_DEL, fd, 0, 0, 0, 0) })
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
func (d *door) next() (*sock, error) {
	if d.server.Budget.Pressure() == Full {
		return nil, errFull
	}
	return d.sock.accept()
}

// event implements watched: it accepts a few connections, and serves those
// that have said all there is to say. Of a loop with nothing else to do it
// accepts one: the loop looks again before it sleeps.
func (d *door) event(l *loop, _ int, _ uint32) bool {
	turn := acceptTurn
	if len(l.ready) == 1 {
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
		k := d.server.admit(d.ctx, d.ln, s, room, l)
		switch {
		case k == nil:
		case !d.deferred:
			go d.server.serve(k)
		default:
			s.slot = k
			if !l.receive(k, s, d.told) {
				return false
			}
		}
	}
	return true
}
