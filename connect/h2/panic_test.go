package h2

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A faultyConn panics in the goroutine that reads it, or in the one that writes
// to it, once it is told to.
type faultyConn struct {
	net.Conn
	read, write atomic.Bool
}

func (c *faultyConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.read.Load() {
		panic("a fault")
	}
	return n, err
}

func (c *faultyConn) Write(p []byte) (int, error) {
	if c.write.Load() {
		panic("a fault")
	}
	return c.Conn.Write(p)
}

// TestPanicInAConnection: a panic in any goroutine of a connection ends that
// connection, of a server where the Server hears of it, of a dialer with its
// streams.
func TestPanicInAConnection(t *testing.T) {
	for _, c := range []struct {
		name  string
		begin func(f *faultyConn, s *Stream)
	}{
		{"reader", func(f *faultyConn, _ *Stream) { f.read.Store(true) }},
		{"writer, below", func(f *faultyConn, _ *Stream) { f.write.Store(true) }},
		{"writer, holding the lock", func(_ *faultyConn, s *Stream) {
			s.c.mu.Lock()
			defer s.c.mu.Unlock()
			s.c.ready.push(&Stream{c: s.c, finish: true, closed: true, ended: true}) // its end panics
			s.c.streams[0] = s.c.ready.first
			s.c.side = &faultySide{side: s.c.side}
			s.c.work.Signal()
		}},
		{"the timer of a deadline", func(_ *faultyConn, s *Stream) {
			_ = s.SetReadDeadline(time.Now().Add(time.Millisecond))
			s.WaitRead(func() { panic("a fault") })
		}},
	} {
		for _, dialer := range []bool{false, true} {
			name := c.name + ", server"
			if dialer {
				name = c.name + ", dialer"
			}
			t.Run(name, func(t *testing.T) {
				ln := testnet.Listen(t)
				accepted, faults := make(chan *Stream, 1), make(chan *faultyConn, 1)
				ended := make(chan any, 1)
				go func() {
					nc, err := ln.Accept()
					if err != nil {
						return
					}
					f := &faultyConn{Conn: nc}
					if !dialer {
						faults <- f
					}
					defer func() {
						ended <- recover()
						_ = nc.Close()
					}()
					_ = new(Protocol).ServeConn(context.WithoutCancel(t.Context()), tunnel.NewConn(f), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
						s, err := req.Accept()
						if err != nil {
							t.Error(err)
							return
						}
						accepted <- s.(*Stream)
					}))
				}()
				d := &Dialer{Proxy: ln.Addr().String(), Dialer: dialFunc(func(ctx context.Context) (net.Conn, error) {
					nc, err := new(net.Dialer).DialContext(ctx, "tcp", ln.Addr().String())
					f := &faultyConn{Conn: nc}
					if dialer {
						faults <- f
					}
					return f, err
				})}
				defer d.Close()
				near := open(t, d, "svc:1")
				far := <-accepted
				ours, theirs := far, near
				if dialer {
					ours, theirs = near, far
				}
				c.begin(<-faults, ours)
				_, _ = theirs.Write([]byte("hello")) // something to read, and to write back
				go func() { _, _ = ours.Write([]byte("hello")) }()
				testnet.Eventually(t, patience, func() bool { return ours.Broken() != nil }, "the stream has ended")
				err := ours.Broken()
				if p, ok := errors.AsType[*tunnel.Panic](err); !ok || len(p.Stack) == 0 || !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("the stream ended by %v, want a reset for the panic", err)
				}
				switch v := (<-ended).(type) {
				case *tunnel.Panic:
					if dialer {
						t.Error("the server panicked")
					}
				case nil:
					if !dialer {
						t.Error("the panic was lost")
					}
				default:
					t.Errorf("panic: %v", v)
				}
				_, _ = near.Close(), far.Close()
			})
		}
	}
}

// A faultySide panics when a stream has ended, for the first time.
type faultySide struct {
	side
	done bool
}

func (f *faultySide) dropped(s *Stream) {
	if !f.done {
		f.done = true
		panic("a fault")
	}
	f.side.dropped(s)
}

type dialFunc func(ctx context.Context) (net.Conn, error)

func (f dialFunc) DialContext(ctx context.Context, _, _ string) (net.Conn, error) { return f(ctx) }
