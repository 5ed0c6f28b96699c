package tunneltest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// Served is a gateway as the suites see it, and a client of it.
type Served struct {
	*Record
	Relay  *tunnel.Relay
	Server interface { // of what listens
		Shutdown(context.Context) error
		Close() error
	}
	Closed <-chan struct{} // once it listens no more; nil where clients are told
	Dialer tunnel.Dialer
	Addr   string // what the Dialer is asked for; the Resolver given to the setup routes all
}

// With is g and a client of it.
func (g *Gateway) With(d tunnel.Dialer, addr string) Served {
	return Served{Record: &g.Record, Relay: g.Relay, Server: g.Server, Closed: g.closed, Dialer: d, Addr: addr}
}

// A Draining is a gateway that will be told to stop.
type Draining struct {
	Served

	// Begin is what a client may begin with at Socket that is not yet a request;
	// "" where to come is to ask, or where that is no TCP.
	Socket, Begin string

	Preamble []byte // that the service gets ahead of the client's bytes
	No       []byte // what a client hears whose dial was given up, from such a carrier

	// Told reports whether the client has heard that its connections take no
	// more tunnels. Late opens a tunnel, and what it returns has its client ask
	// for one more that is on its way while the gateway says so, which it gets,
	// and one that is late, checks the answers and aborts the two. Both nil for a
	// carrier of one tunnel a connection, which has no words for it.
	Told func() bool
	Late func(t *testing.T) (ask func())

	// Cut reports whether err is what a client reads whose tunnel the gateway
	// gave up, in the carrier's own words; nil means a reset.
	Cut func(err error) bool
}

// TestDrain checks how a carrier ends when its gateway is told to stop: no
// tunnel is let in any more; those that stand are told, where the carrier can
// say it, and go on, busy or idle, to their own end; what is left after the
// time for that is cut with the reason drain, which no client takes for the
// end of its stream; and so are those that had not yet got what they ask for.
func TestDrain(t *testing.T, setup func(t *testing.T, routes tunnel.Resolver) Draining) {
	before := runtime.NumGoroutine()
	for name, f := range map[string]func(*drainSuite, *testing.T){
		"Ends": (*drainSuite).end, "Cut": (*drainSuite).cut, "Unasked": (*drainSuite).unasked,
	} {
		t.Run(name, func(t *testing.T) { f(newDrainSuite(t, setup), t) })
	}
	wantNoMore(t, before)
}

type drainSuite struct {
	Draining
	routes *oneRoute
	ended  chan error // what each connection of the service ended with
}

func newDrainSuite(t *testing.T, setup func(t *testing.T, routes tunnel.Resolver) Draining) *drainSuite {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &drainSuite{routes: &oneRoute{to: ln.Addr().String(), asked: make(chan struct{}, 10)}, ended: make(chan error, 10)}
	var serving sync.WaitGroup
	t.Cleanup(func() { // after the gateway's own
		_ = ln.Close()
		serving.Wait()
	})
	s.Draining = setup(t, s.routes)
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { s.ended <- s.echo(c) })
		}
	})
	return s
}

// echo serves c, and returns what ended its client's stream.
func (s *drainSuite) echo(c net.Conn) error {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if err := receive(c, s.Preamble); err != nil {
		return err
	}
	_, err := io.Copy(c, struct{ io.Reader }{c})
	if err == nil {
		_ = c.(tunnel.Stream).CloseWrite()
	}
	return err
}

// oneRoute is a Resolver that takes everybody to one service, or, once it
// holds, has them wait for it.
type oneRoute struct {
	to    string
	hold  atomic.Bool
	count atomic.Int64
	asked chan struct{} // by those who have to wait
}

func (r *oneRoute) Resolve(context.Context, *tunnel.Request) (tunnel.Route, error) {
	r.count.Add(1)
	route := RouteTo(r.to)
	if r.hold.Load() {
		WithTransport(route.Endpoints, Transport{nowhere{r.asked}})
	}
	return route, nil
}

// nowhere dials for as long as its caller waits.
type nowhere struct{ asked chan struct{} }

func (n nowhere) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	n.asked <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

// open opens a tunnel and uses it.
func (s *drainSuite) open(t *testing.T) tunnel.Stream {
	t.Helper()
	c := stream(Dial(t, s.Dialer, s.Addr))
	ping(t, c)
	return c
}

// ping has the service say something.
func ping(t *testing.T, c net.Conn) {
	t.Helper()
	_, _ = c.Write([]byte("hello"))
	if err := receive(c, []byte("hello")); err != nil {
		t.Fatal(err)
	}
}

// stop tells the gateway to stop and returns once it takes nobody in any more,
// and its clients know. Of the two channels the first has what Shutdown
// returns; the second ends the time that it has.
func (s *drainSuite) stop(t *testing.T) (stopped chan error, now context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	t.Cleanup(cancel)
	stopped = make(chan error, 1)
	go func() { stopped <- s.Server.Shutdown(ctx) }()
	if s.Closed != nil {
		select {
		case <-s.Closed:
		case <-ctx.Done():
			t.Fatal("the gateway still listens")
		}
	}
	if s.Told != nil {
		eventually(t, "the client is told", s.Told)
	}
	return stopped, cancel
}

// eventually waits for ok.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("in vain: %s", what)
		}
	}
}

// reasons waits until n outcomes of tunnels have the reason.
func (s *drainSuite) reasons(t *testing.T, n int, want tunnel.Reason) {
	t.Helper()
	eventually(t, "outcomes "+string(want), func() bool {
		got := 0
		for _, o := range s.Outcomes() {
			if o.Target != "" && o.Reason == want {
				got++
			}
		}
		return got == n
	})
}

// end has all tunnels end by themselves.
func (s *drainSuite) end(t *testing.T) {
	idle, busy := s.open(t), s.open(t)
	var late func()
	if s.Late != nil {
		late = s.Late(t)
	}
	stopped, _ := s.stop(t)
	before := s.routes.count.Load()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := s.Dialer.DialContext(ctx, "tcp", s.Addr)
	if err == nil {
		_ = c.Close()
	}
	WantReason(t, err, tunnel.DialFailed)
	if n := s.routes.count.Load() - before; n > 0 {
		t.Errorf("%d requests were made of a gateway that stops", n)
	}
	if late != nil {
		late()
		for range 2 {
			if err := <-s.ended; err == nil {
				t.Error("the service saw the end of a stream that was aborted")
			}
		}
		s.Find(t, "of the late request", func(o *tunnel.Outcome) bool { return o.Reason == tunnel.Drain })
	}
	data := random(1<<20, 1)
	go func() { _, _ = busy.Write(data); _ = busy.CloseWrite() }()
	if err := receive(busy, data); err != nil {
		t.Errorf("the busy tunnel: %v", err)
	}
	wantEnd(t, busy)
	ping(t, idle)
	_ = idle.CloseWrite()
	wantEnd(t, idle)
	_, _ = busy.Close(), idle.Close()
	for range 2 {
		if err := <-s.ended; err != nil {
			t.Errorf("the service saw %v, want the end of the stream", err)
		}
	}
	if err := <-stopped; err != nil {
		t.Errorf("Shutdown: %v", err)
	}
	if err := s.Relay.Wait(ctx); err != nil {
		t.Errorf("%d tunnels are left: %v", s.Relay.Open(), err)
	}
	s.reasons(t, 2, tunnel.Done)
}

// cut has the time for that run out.
func (s *drainSuite) cut(t *testing.T) {
	idle, busy := s.open(t), s.open(t)
	written := make(chan error, 1)
	go func() {
		for data := make([]byte, 64<<10); ; {
			if _, err := busy.Write(data); err != nil {
				written <- err
				return
			}
		}
	}()
	stopped, _ := s.stop(t)
	s.Relay.Abort(t.Context(), tunnel.Drain, 0)
	cut := s.Cut
	if cut == nil {
		cut = func(err error) bool { return errors.Is(err, syscall.ECONNRESET) }
	}
	if _, err := io.Copy(io.Discard, idle); err == nil || !cut(err) {
		t.Errorf("the client of the idle tunnel saw %v, want what the carrier has for a tunnel that was cut", err)
	}
	// Of a socket's two sides only the first to look hears of a reset.
	if _, err := io.Copy(io.Discard, busy); err == nil || !cut(err) {
		if werr := <-written; !cut(werr) && !errors.Is(werr, syscall.EPIPE) {
			t.Errorf("the client of the busy tunnel saw %v, and %v as it wrote, want what the carrier has for a tunnel that was cut", err, werr)
		}
	}
	for range 2 {
		if err := <-s.ended; err == nil {
			t.Error("the service saw the end of the stream, want an abort")
		}
	}
	s.reasons(t, 2, tunnel.Drain)
	_, _ = idle.Close(), busy.Close()
	if err := <-stopped; err != nil {
		t.Errorf("Shutdown: %v", err)
	}
}

// unasked has those cut who have no tunnel yet.
func (s *drainSuite) unasked(t *testing.T) {
	var begun net.Conn
	if s.Begin != "" {
		begun = Dial(t, new(net.Dialer), s.Socket)
		_, _ = io.WriteString(begun, s.Begin)
	}
	s.routes.hold.Store(true)
	dialed := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		c, err := s.Dialer.DialContext(ctx, "tcp", s.Addr)
		if err == nil {
			// The Dialer of a carrier that passes on what it reads can't know.
			_ = c.SetDeadline(time.Now().Add(patience))
			var heard []byte
			if heard, err = io.ReadAll(c); err == nil && (len(heard) == 0 || bytes.Equal(heard, s.No)) {
				err = io.EOF
			}
			_ = c.Close()
		}
		dialed <- err
	}()
	<-s.routes.asked
	stopped, now := s.stop(t)
	now()
	if err := <-stopped; !errors.Is(err, context.Canceled) {
		t.Errorf("Shutdown: %v, want that its time was over", err)
	}
	if err := <-dialed; err == nil {
		t.Error("a dial worked that had to wait for longer than the gateway")
	}
	s.reasons(t, 1, tunnel.Drain)
	if begun != nil {
		n, err := io.Copy(io.Discard, begun)
		if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
			t.Errorf("a client that had only begun heard %d bytes and %v, want the end of its connection", n, err)
		}
		s.Find(t, "of the client that had only begun", func(o *tunnel.Outcome) bool { return o.Target == "" && o.Reason == tunnel.Drain })
	}
}
