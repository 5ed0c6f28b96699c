package tunneltest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A Pool is a Dialer that shares connections between streams.
type Pool interface {
	tunnel.Dialer
	Conns() int // that take streams
	Close() error
}

// Shared is a carrier of many streams over one connection.
type Shared struct {
	// Serve starts a gateway whose connections take as many tunnels at once as
	// given, 0 meaning 100. Its client is a Pool of at most so many connections,
	// 0 meaning its default, which keeps them.
	Serve func(t *testing.T, routes tunnel.Resolver, streams, conns int) Served

	// Pipes makes streams between a client and a server without a Relay.
	Pipes func(t *testing.T, streams int) MakePipe

	Cut       func(c net.Conn)                       // cuts the connection of a client's stream
	Least     int                                    // bytes that a stream takes whose reader does not read
	Most      int                                    // and that it takes at the most
	Fair      bool                                   // a stream that was read fast and is no more holds up no other
	Idle      int64                                  // bytes that a stream at rest may hold, on each side
	Aborted   func(err error, byTheServer bool) bool // whether err has the carrier's code for an abort
	Panicking func(err error) bool                   // whether err is a dial's whose Handler had a fault
}

// TestShared checks what streams may expect that share a connection: that they
// do not hold each other up, that room is found for many, and that what becomes
// of a connection or of another stream is not mistaken for an end of theirs.
func TestShared(t *testing.T, c Shared) {
	t.Run("Thousand", func(t *testing.T) {
		TestThousand(t, c.Serve(t, named{"svc": echoing(t)}, 0, 0))
	})
	t.Run("Stalled", c.stalled)
	if c.Fair {
		t.Run("StalledFast", c.stalledFast)
	}
	t.Run("BackPressure", c.backPressure)
	t.Run("Aborts", c.aborts)
	t.Run("Lost", c.lost)
	t.Run("LostAfterItsEnd", c.lostAfterItsEnd)
	t.Run("Elsewhere", c.elsewhere)
	t.Run("CloseAfterGoAway", c.closeAfterGoAway)
	t.Run("Panic", c.panics)
	t.Run("Idle", c.idle)
	t.Run("HonestTraffic", c.honest)
	t.Run("OfOneClientAlone", c.ofOneClient)
}

// Pipes makes streams between what serve returns, a client of a server that
// asks h, and that server.
func Pipes(t *testing.T, serve func(h tunnel.Handler) tunnel.Dialer, addr string) MakePipe {
	accepted := make(chan tunnel.Stream)
	d := serve(tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		s, err := req.Accept()
		if err != nil {
			return
		}
		select {
		case accepted <- s:
		case <-ctx.Done():
		}
	}))
	ctx := context.WithoutCancel(t.Context())
	turn := make(chan struct{}, 1) // one at a time, so that the ends belong together
	return func() (a, b tunnel.Stream, stop func(), err error) {
		turn <- struct{}{}
		defer func() { <-turn }()
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		c, err := d.DialContext(ctx, "tcp", addr)
		if err != nil {
			return nil, nil, nil, err
		}
		a, b = c.(tunnel.Stream), <-accepted
		return a, b, func() { _, _ = a.Close(), b.Close() }, nil
	}
}

// named is a Resolver by host alone: from a name to an address. It has a fault
// where that is "panic".
type named map[string]string

func (n named) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	to := n[req.Host()]
	switch to {
	case "panic":
		panic("a fault")
	case "":
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no route for %q", req.Target())
	}
	return RouteTo(to), nil
}

// serving starts a service whose connections are closed when f returns.
func serving(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(3 * patience))
				f(c)
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait()
	})
	return ln.Addr().String()
}

// echoing starts an echo.
func echoing(t *testing.T) string {
	return serving(t, func(c net.Conn) {
		if _, err := io.Copy(c, struct{ io.Reader }{c}); err == nil {
			_ = c.(tunnel.Stream).CloseWrite()
		}
	})
}

// open dials the echo or whatever else has that name.
func (s Served) open(t *testing.T, host string) tunnel.Stream {
	t.Helper()
	return Dial(t, s.Dialer, net.JoinHostPort(host, "1")).(tunnel.Stream)
}

func (s Served) pool() Pool { return s.Dialer.(Pool) }

// TestThousand has 1,000 tunnels open at once, through a gateway that takes 100
// on each connection. What is asked for "svc:1" is an echo.
func TestThousand(t *testing.T, g Served) {
	var wg sync.WaitGroup
	streams := make([]tunnel.Stream, 1000)
	// More than two connections take at once. A busy machine that is asked for all of them at once
	// may take longer for a handshake than a dialer waits.
	dialing := make(chan struct{}, 250)
	for i := range streams {
		dialing <- struct{}{}
		wg.Go(func() {
			defer func() { <-dialing }()
			c, err := g.Dialer.DialContext(t.Context(), "tcp", "svc:1")
			if err != nil {
				t.Errorf("stream %d: %v", i, err)
				return
			}
			streams[i] = c.(tunnel.Stream)
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	if n := g.pool().Conns(); n < 10 || n > 20 {
		t.Errorf("%d connections for 1000 streams of 100 each", n)
	}
	for i, s := range streams {
		wg.Go(func() {
			_ = s.SetDeadline(time.Now().Add(3 * patience))
			want := random(3000+i, byte(i))
			go func() { _, _ = s.Write(want); _ = s.CloseWrite() }()
			got, err := io.ReadAll(s)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("stream %d: %d bytes and %v back", i, len(got), err)
			}
			_ = s.Close()
		})
	}
	wg.Wait()
}

// stalled: streams that nobody reads hold up no other on the same connection,
// and take no more than their own windows.
func (c Shared) stalled(t *testing.T) {
	makePipe := c.Pipes(t, 0)
	small, echoed, stop, err := makePipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	go func() { _, _ = io.Copy(echoed, echoed) }()
	for range 60 {
		a, _, stop, err := makePipe()
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		_ = a.SetWriteDeadline(time.Now().Add(patience))
		go func() { _, _ = a.Write(make([]byte, 64<<20)) }()
	}
	pingsSoon(t, small)
}

// stalledFast: nor do streams whose readers were fast before they stopped.
func (c Shared) stalledFast(t *testing.T) {
	hold := make(chan struct{})
	routes := named{"big": serving(t, func(net.Conn) { <-hold }), "svc": echoing(t)}
	t.Cleanup(func() { close(hold) })
	g := c.Serve(t, routes, 0, 1)
	for range 20 { // the relay reads them into the service's socket until that is full
		s := g.open(t, "big")
		go func() { _, _ = s.Write(make([]byte, 64<<20)) }()
	}
	pingsSoon(t, g.open(t, "svc"))
	if n := g.pool().Conns(); n != 1 {
		t.Errorf("%d connections, want all on one", n)
	}
}

// pingsSoon has an echo answer 200 times, beside streams that are stalled.
func pingsSoon(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(patience))
	for range 200 {
		ping(t, c)
	}
}

// backPressure: who does not read stops who writes, at the stream's window. A
// write that was cut short by its deadline goes on behind it.
func (c Shared) backPressure(t *testing.T) {
	a, b, stop, err := c.Pipes(t, 0)()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	n := 0
	for more := -1; more != 0 && n <= c.Most; n += more { // a moment without a byte may be the machine's
		_ = a.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
		more, err = a.Write(make([]byte, 1<<20))
	}
	if ne := net.Error(nil); n < c.Least || n > c.Most || !errors.As(err, &ne) || !ne.Timeout() {
		t.Errorf("wrote %d bytes and %v, want %d to %d, the window, and a timeout", n, err, c.Least, c.Most)
	}
	_ = a.SetWriteDeadline(time.Time{})
	_ = b.SetReadDeadline(time.Now().Add(patience))
	if err := receive(b, make([]byte, n)); err != nil {
		t.Error(err)
	}
	want := random(3<<20, 1)
	go func() { _, _ = a.Write(want) }()
	if err := receive(b, want); err != nil {
		t.Errorf("after the deadline: %v", err)
	}
}

// aborts: an abort has the carrier's code, and is a reset to who does not know
// that.
func (c Shared) aborts(t *testing.T) {
	makePipe := c.Pipes(t, 0)
	for _, server := range []bool{false, true} {
		a, b, stop, err := makePipe()
		if err != nil {
			t.Fatal(err)
		}
		if server {
			a, b = b, a
		}
		_ = tunnel.Abort(a)
		_ = b.SetReadDeadline(time.Now().Add(patience))
		if _, err := b.Read(make([]byte, 1)); !c.Aborted(err, server) || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("an abort, by the server %v: the other side saw %v", server, err)
		}
		if _, err := a.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("an abort, by the server %v: this side reads %v, want net.ErrClosed", server, err)
		}
		stop()
	}
	g := c.Serve(t, named{"svc": serving(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 1))
		_ = tunnel.Abort(c)
	})}, 0, 0)
	s := g.open(t, "svc")
	_, _ = s.Write([]byte("x"))
	if _, err := s.Read(make([]byte, 1)); !c.Aborted(err, true) {
		t.Errorf("an abort by the service behind a gateway: the client saw %v", err)
	}
}

// lost: what is on a connection that is lost is aborted, on either side.
func (c Shared) lost(t *testing.T) {
	how, arrived := make(chan error, 1), make(chan struct{})
	g := c.Serve(t, named{"svc": serving(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 1))
		close(arrived)
		_, err := c.Read(make([]byte, 1))
		how <- err
	})}, 0, 0)
	s := g.open(t, "svc")
	_, _ = s.Write([]byte("x"))
	go func() {
		<-arrived
		time.AfterFunc(20*time.Millisecond, func() { c.Cut(s) }) // both wait for more by then
	}()
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client saw %v, want a reset", err)
	}
	if err := <-how; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the service saw %v, want a reset", err)
	}
}

// lostAfterItsEnd: a client that has ended its stream and then goes away ends
// the tunnel, though nobody reads from it any more.
func (c Shared) lostAfterItsEnd(t *testing.T) {
	ended, done := make(chan error, 1), make(chan struct{})
	g := c.Serve(t, named{"svc": serving(t, func(c net.Conn) {
		_, err := io.ReadAll(c)
		ended <- err
		<-done
	})}, 0, 0)
	defer close(done)
	s := g.open(t, "svc")
	_ = s.CloseWrite()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	c.Cut(s)
	g.Reason(t, tunnel.Reset)
}

// elsewhere: a request that a connection has no room for goes to another one
// before the caller hears of it, whether or not the limit is known by then.
func (c Shared) elsewhere(t *testing.T) {
	g := c.Serve(t, named{"svc": echoing(t)}, 1, 0)
	first, second := g.open(t, "svc"), g.open(t, "svc")
	ping(t, first)
	ping(t, second)
	if n := g.pool().Conns(); n != 2 {
		t.Errorf("%d connections, want 2", n)
	}
}

// closeAfterGoAway: Close ends the connections that take no more streams, too.
func (c Shared) closeAfterGoAway(t *testing.T) {
	g := c.Serve(t, named{"svc": echoing(t)}, 0, 0)
	s := g.open(t, "svc")
	ping(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stopped := make(chan error, 1)
	go func() { stopped <- g.Server.Shutdown(ctx) }()
	eventually(t, "the connection leaves the pool", func() bool { return g.pool().Conns() == 0 })
	_ = g.pool().Close()
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after Close: %v, want a reset", err)
	}
	if err := <-stopped; err != nil {
		t.Errorf("Shutdown: %v", err)
	}
}

// panics: a fault in the Handler ends the stream it was about, and is told.
func (c Shared) panics(t *testing.T) {
	g := c.Serve(t, named{"svc": echoing(t), "fault": "panic"}, 0, 1)
	s := g.open(t, "svc")
	ping(t, s)
	if _, err := g.Dialer.DialContext(t.Context(), "tcp", "fault:1"); !c.Panicking(err) {
		t.Errorf("a dial with a fault: got %v", err)
	}
	ping(t, s)
	g.Reason(t, tunnel.Internal)
}

// idle checks that a stream at rest holds little memory, on either side, and no
// goroutine.
func (c Shared) idle(t *testing.T) {
	const n = 500
	makePipe := c.Pipes(t, n+1)
	_, _, stop, err := makePipe() // what a connection takes
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	measure := func() (heap uint64, goroutines int) {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc, runtime.NumGoroutine()
	}
	heap, goroutines := measure()
	ends := make([]tunnel.Stream, 0, 2*n)
	for range n {
		a, b, stop, err := makePipe()
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		go func() { _, _ = a.Write([]byte("hello")) }() // has been used
		if err := receive(b, []byte("hello")); err != nil {
			t.Fatal(err)
		}
		ends = append(ends, a, b)
	}
	eventually(t, "the writers are done, and few connections more are there", func() bool {
		_, now := measure()
		return now-goroutines < 100
	})
	after, _ := measure()
	each := (int64(after) - int64(heap)) / (2 * n)
	t.Logf("%d bytes a stream and side", each)
	if each > c.Idle {
		t.Errorf("%d bytes for each stream and side, want at most %d", each, c.Idle)
	}
	runtime.KeepAlive(ends)
}
