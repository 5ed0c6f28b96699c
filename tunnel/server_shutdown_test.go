package tunnel_test

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

func TestServerShutdownIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := serve(t, &tunnel.Server{})
		synctest.Wait()
		var wg sync.WaitGroup
		for range 5 { // twice, and at once
			wg.Go(func() {
				if err := g.srv.Shutdown(t.Context()); err != nil {
					t.Errorf("shutdown: %v", err)
				}
			})
			wg.Go(func() { _ = g.srv.Close() })
		}
		wg.Wait()
		g.stop(t)
		ln := newMemListener()
		if err := g.srv.Serve(t.Context(), tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{line}}); err != tunnel.ErrServerClosed {
			t.Errorf("serve after shutdown: %v, want ErrServerClosed", err)
		}
		if _, err := ln.Accept(); err == nil {
			t.Error("serve after shutdown left the listener open")
		}
	})
}

// TestServerShutdownWaits checks that a preamble under way may be completed,
// and that one that is not is over at its deadline.
func TestServerShutdownWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var served sync.WaitGroup
		served.Add(1)
		srv := &tunnel.Server{Handler: tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
			defer served.Done()
			time.Sleep(time.Second)
			if ctx.Err() != nil {
				t.Errorf("the connection's context: %v, want it open", ctx.Err())
			}
			acceptAndClose(ctx, req)
		})}
		g := serve(t, srv)
		honest, _ := g.dial("198.51.100.1:1")
		stuck, _ := g.dial("198.51.100.2:1")
		synctest.Wait()
		go func() {
			time.Sleep(2 * time.Second)
			_, _ = io.WriteString(honest, "hello\n")
			served.Wait()
			wantEnd(t, honest)
		}()
		start := time.Now()
		if err := srv.Shutdown(t.Context()); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if d := time.Since(start); d < 10*time.Second || d > 10200*time.Millisecond {
			t.Errorf("shutdown took %v, want the ten seconds that the stuck one has", d)
		}
		wantEnd(t, stuck)
		g.wantReasons(t, tunnel.HelloTimeout)
		g.stop(t)
	})
}

func TestServerShutdownAtItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dialing := make(chan struct{})
		srv := &tunnel.Server{Handler: tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
			close(dialing)
			select { // a dial that takes long
			case <-ctx.Done():
				req.Refuse(&tunnel.Error{Reason: tunnel.Drain, Err: ctx.Err()})
			case <-time.After(time.Hour):
				t.Error("the connection's context did not end")
				req.Refuse(io.EOF)
			}
		})}
		g := serve(t, srv)
		_, stuck := g.dial("198.51.100.1:1")
		half, halfway := g.dial("198.51.100.2:1")
		third, thirdConn := g.dial("198.51.100.3:1")
		_, _ = io.WriteString(half, "hel")
		_, _ = io.WriteString(third, "hello\n")
		<-dialing
		start := time.Now()
		var wg sync.WaitGroup
		var expired atomic.Int32
		for _, after := range []time.Duration{time.Second, time.Second, 2 * time.Second} {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), after)
				defer cancel()
				if err := srv.Shutdown(ctx); errors.Is(err, context.DeadlineExceeded) {
					expired.Add(1)
				} else if err != nil {
					t.Errorf("shutdown: %v, want nil or the context's error", err)
				}
			})
		}
		wg.Wait()
		// Of two at the same deadline, one may find that the other has closed all.
		if n := expired.Load(); n < 1 || n > 2 {
			t.Errorf("%d of three shutdowns met their deadline, want those of the first second", n)
		}
		if d := time.Since(start); d < time.Second || d > 1200*time.Millisecond {
			t.Errorf("shutdown took %v, want a second", d)
		}
		for _, c := range []*fakeConn{stuck, halfway, thirdConn} {
			if c.ending() != "aborted" {
				t.Errorf("connection of %s is %s, want aborted", c.RemoteAddr(), c.ending())
			}
		}
		// The request's end is its handler's to tell of.
		g.wantReasons(t, tunnel.Drain, tunnel.Drain)
		g.stop(t)
	})
}

// TestServerCloseLeavesTunnels checks that what was handed over is the
// Relay's: neither Shutdown nor Close waits for it or ends it.
func TestServerCloseLeavesTunnels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		relay := &tunnel.Relay{}
		defer relay.Close()
		dialer := &fakeDialer{}
		g := serve(t, &tunnel.Server{Handler: &tunnel.Router{Resolver: routeTo("192.0.2.9:80"), Dialer: dialer, Relay: relay}})
		client, accepted := g.dial("198.51.100.1:1")
		_, _ = io.WriteString(client, "hello\n")
		synctest.Wait()
		if err := g.srv.Shutdown(t.Context()); err != nil {
			t.Errorf("shutdown with a tunnel open: %v", err)
		}
		_ = g.srv.Close()
		synctest.Wait()
		wantAlive(t, "the tunnel", accepted)
		server := dialer.ends()[0]
		go func() { _, _ = io.WriteString(client, "ping") }()
		got := make([]byte, 4)
		if _, err := io.ReadFull(server, got); err != nil || string(got) != "ping" {
			t.Errorf("through the tunnel: %q, %v", got, err)
		}
		if open, _, _ := g.srv.Account(); open != 1 {
			t.Errorf("%d places taken, want the tunnel's", open)
		}
		relay.Abort(t.Context(), tunnel.Drain, 0)
		synctest.Wait()
		if accepted.ending() != "aborted" {
			t.Errorf("after the relay's abort the client is %s", accepted.ending())
		}
		g.stop(t)
	})
}

// A lateListener hands over one connection after it was closed, as a kernel
// may.
type lateListener struct {
	*memListener
	conn net.Conn
}

func (l *lateListener) Accept() (net.Conn, error) {
	<-l.done
	if c := l.conn; c != nil {
		l.conn = nil
		return c, nil
	}
	return nil, net.ErrClosed
}

func TestServerConnectionAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, accepted := fakePair("198.51.100.1:1")
		var told eavesdropper
		budget := &tunnel.Budget{Limit: 10}
		srv := &tunnel.Server{Handler: tunnel.HandlerFunc(acceptAndClose), Observe: told.observe, Budget: budget}
		served := make(chan error, 1)
		go func() {
			served <- srv.Serve(t.Context(), tunnel.Listener{Listener: &lateListener{newMemListener(), accepted}, Protocols: []tunnel.Protocol{line}})
		}()
		synctest.Wait()
		_ = srv.Close()
		if err := <-served; err != tunnel.ErrServerClosed {
			t.Errorf("serve: %v", err)
		}
		if got := told.reasons(); len(got) != 1 || got[0] != tunnel.Drain || accepted.ending() != "aborted" || budget.Used() != 0 {
			t.Errorf("outcomes %q, connection %s, %d descriptors; want one drain, aborted, none", got, accepted.ending(), budget.Used())
		}
	})
}

// TestServerContext checks whose context a connection has.
func TestServerContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		seen := make(chan context.Context, 1)
		srv := &tunnel.Server{Handler: tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
			seen <- ctx
			<-ctx.Done()
			req.Refuse(ctx.Err())
		})}
		ln := newMemListener()
		served := make(chan error, 1)
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
		go func() {
			served <- srv.Serve(ctx, tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&tunnel.Fixed{}}})
		}()
		client, accepted := fakePair("198.51.100.1:1")
		ln.conns <- accepted
		if got := (<-seen).Value(key{}); got != "value" {
			t.Errorf("the context is not made of Serve's: %v", got)
		}
		cancel()
		wantEnd(t, client)
		if err := srv.Shutdown(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
		<-served
	})
}

// TestServerOverTCP is one walk over real sockets: detection, what a refused
// client sees, and a shutdown with a connection open.
func TestServerOverTCP(t *testing.T) {
	ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var told eavesdropper
	srv := &tunnel.Server{Observe: told.observe, Handler: tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		if req.Source.Addr().String() != "127.0.0.1" || req.LocalPort == 0 {
			t.Errorf("source %v, local port %d", req.Source, req.LocalPort)
		}
		c, err := req.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = io.Copy(c, c)
		_ = c.CloseWrite()
		_ = c.Close()
	})}
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(t.Context(), tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&lineProtocol{name: "a", magic: "AAAA"}, &lineProtocol{name: "b", magic: "B"}}})
	}()
	dial := func(send string) *net.TCPConn {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(patience))
		_, _ = io.WriteString(c, send)
		return c.(*net.TCPConn)
	}
	honest := dial("A")
	for _, b := range "AAA hello\nearly and" {
		_, _ = io.WriteString(honest, string(b))
	}
	_, _ = io.WriteString(honest, " late")
	_ = honest.CloseWrite()
	if got, err := io.ReadAll(honest); string(got) != "early and late" || err != nil {
		t.Errorf("honest client: %q, %v", got, err)
	}
	_, err = io.ReadAll(dial("nonsense"))
	wantReset(t, "a client of no protocol", err)
	await := func(want int) {
		for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			if open, _, _ := srv.Account(); open == want || time.Now().After(deadline) {
				return
			}
		}
	}
	await(0)
	stuck := dial("AA")
	await(1)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := srv.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("shutdown: %v", err)
	}
	_, err = io.ReadAll(stuck)
	wantReset(t, "a client that was stuck at shutdown", err)
	if err := <-served; err != tunnel.ErrServerClosed {
		t.Errorf("serve: %v", err)
	}
	if _, err := net.Dial("tcp", ln.Addr().String()); err == nil {
		t.Error("the listener is still open")
	}
	if got := told.reasons(); len(got) != 2 || got[0] != tunnel.BadPreamble || got[1] != tunnel.Drain {
		t.Errorf("outcomes %q", got)
	}
}
