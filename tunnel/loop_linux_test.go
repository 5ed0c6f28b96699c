//go:build amd64 || arm64

package tunnel

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

// A waiter is a protocol of one word: "quick" is answered at once, and any
// other names a way to wait until released.
type waiter struct {
	release chan struct{}
	served  atomic.Int32
}

func (*waiter) Name() string         { return "waiter" }
func (*waiter) Sniff([]byte) Verdict { return Yes }

func (*waiter) HasPreamble(prefix []byte) bool {
	if string(prefix) == "panics on the loop\n" {
		panic("as asked")
	}
	return bytes.IndexByte(prefix, '\n') >= 0
}

func (w *waiter) ServeConn(ctx context.Context, c *Conn, h Handler) error {
	w.served.Add(1)
	word, _, _ := bytes.Cut(c.Buffered(), []byte("\n"))
	switch string(word) {
	case "says so":
		WillCompute(ctx)
		<-w.release
	case "asks for Done":
		ctx.Done()
		<-w.release
	case "asks a child for Done":
		ctx, cancel := withLazyTimeout(ctx, time.Now(), time.Minute)
		defer cancel()
		ctx.Done()
		ctx.Done()
		<-w.release
	case "says nothing":
		<-w.release
	case "reads":
		if err := c.Fill(1 << 10); err != nil {
			return PreambleError(c, err)
		}
	case "panics":
		panic("as asked")
	case "tunnel":
		c.Discard(len(word) + 1)
		h.ServeTunnel(ctx, c.NewRequest("waiter"))
		return nil
	}
	_, err := io.WriteString(c, "served\n")
	return err
}

// TestLoopGoesOnWithoutTheOneThatWaits has one loop serve a connection that
// waits, a tunnel, and others that must not wait for it.
func TestLoopGoesOnWithoutTheOneThatWaits(t *testing.T) {
	for _, way := range []string{"says so", "asks for Done", "asks a child for Done", "says nothing", "reads", "panics", "panics on the loop"} {
		t.Run(way, func(t *testing.T) {
			loops := &Loops{Count: 1}
			relay := &Relay{Loops: loops}
			w := &waiter{release: make(chan struct{})}
			srv := &Server{Loops: loops, Limits: Limits{ConnectionRatePerClient: -1}, Handler: HandlerFunc(func(_ context.Context, req *Request) {
				service, mine := net.Pipe()
				go func() { _, _ = io.Copy(service, service) }()
				client, err := req.Accept()
				if err != nil {
					t.Error(err)
				}
				relay.Carry(Tunnel{Client: client, Server: mine, Ended: func(End) { service.Close() }})
			})}
			ln, err := Listen(t.Context(), "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			served := make(chan error, 1)
			go func() { served <- srv.Serve(t.Context(), Listener{Listener: ln, Protocols: []Protocol{w}}) }()
			say := func(word string) (net.Conn, *bufio.Reader) {
				c, err := net.Dial("tcp", ln.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { c.Close() })
				_ = c.SetDeadline(time.Now().Add(20 * time.Second))
				_, _ = io.WriteString(c, word+"\n")
				return c, bufio.NewReader(c)
			}
			want := func(r *bufio.Reader, line string) {
				t.Helper()
				if got, err := r.ReadString('\n'); got != line || err != nil {
					t.Fatalf("got %q, %v, want %q", got, err, line)
				}
			}
			tunnel, echo := say("tunnel")
			_, _ = io.WriteString(tunnel, "before\n")
			want(echo, "before\n")

			waiting, answer := say(way)
			for range 20 { // more than once around the loop
				_, r := say("quick")
				want(r, "served\n")
			}
			_, _ = io.WriteString(tunnel, "meanwhile\n")
			want(echo, "meanwhile\n")
			stalls := uint64(0)
			if way == "says nothing" {
				stalls = 1
			}
			if n := loops.Stalls(); n != stalls {
				t.Errorf("%d stalls, want %d", n, stalls)
			}
			close(w.release)
			_, _ = io.WriteString(waiting, "more\n")
			if way != "panics" {
				want(answer, "served\n")
			}
			_, _ = io.WriteString(tunnel, "after\n")
			want(echo, "after\n")

			_ = srv.Close()
			if err := <-served; err != ErrServerClosed {
				t.Errorf("serve: %v", err)
			}
			_ = srv.Shutdown(t.Context())
			_ = relay.Close()
			_ = loops.Close()
		})
	}
}

// TestThoseWhoWaitKeepNoThread has many connections wait at once.
func TestThoseWhoWaitKeepNoThread(t *testing.T) {
	const waiting = 200
	threads := func() int {
		d, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(d)
	}
	w := &waiter{release: make(chan struct{})}
	srv := &Server{Limits: Limits{ConnectionRatePerClient: -1}}
	ln, err := Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(t.Context(), Listener{Listener: ln, Protocols: []Protocol{w}}) }()
	before := threads()
	var conns []net.Conn
	for i := range waiting {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		_, _ = io.WriteString(c, []string{"says so\n", "reads\n"}[i%2])
		conns = append(conns, c)
	}
	for deadline := time.Now().Add(10 * time.Second); w.served.Load() < waiting && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	if n := threads() - before; n > waiting/4 {
		t.Errorf("%d more threads for %d connections that wait", n, waiting)
	}
	close(w.release)
	for i, c := range conns {
		if i%2 == 1 {
			_, _ = io.WriteString(c, "more\n")
		}
		if got, err := io.ReadAll(c); string(got) != "served\n" || err != nil {
			t.Fatalf("got %q, %v", got, err)
		}
	}
	_ = srv.Close()
	<-served
	_ = srv.Shutdown(t.Context())
}

// TestLoopsAcceptOnceTheClientHasSpoken leaves clients that say nothing to the
// kernel for a second, where every protocol is one that they begin.
func TestLoopsAcceptOnceTheClientHasSpoken(t *testing.T) {
	r := newPendingRig(t, Limits{})
	talk := func() {
		c := r.dial(t)
		_, _ = io.WriteString(c, "Line\n")
		if got, err := io.ReadAll(c); string(got) != "you said Line\n" || err != nil {
			t.Fatalf("got %q, %v", got, err)
		}
	}
	talk() // the server is there
	r.dial(t)
	talk()
	if n := r.pending(); n != 0 {
		t.Errorf("%d connections wait, want the silent one to be with the kernel still", n)
	}
	r.await(t, 1) // but not for long: its time runs
}

// TestTunnelAtRestIsSmall holds the promise of half a KiB for a tunnel at rest: it has
// 352 bytes, of which 128 are the socketTunnel of package relay, the destination as it
// was asked, and a third more that the heap takes for itself.
func TestTunnelAtRestIsSmall(t *testing.T) {
	if size := unsafe.Sizeof(tunnelInfo{}); size > 224 {
		t.Errorf("a tunnelInfo has %d bytes, want 224 at most, its size class", size)
	}
}

// fixedRoute is a Resolver that knows one address.
type fixedRoute netip.AddrPort

func (r fixedRoute) Resolve(context.Context, *Request) (Route, error) {
	return Route{Service: "svc", Endpoints: []Endpoint{{Addr: netip.AddrPort(r), Named: true}}}, nil
}

// TestRouterStaysOnTheLoop: from accept to the Relay no goroutine is started
// where the preamble has come and the service accepts at once.
func TestRouterStaysOnTheLoop(t *testing.T) {
	service, err := Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	loops := &Loops{Count: 1}
	defer loops.Close()
	relay := &Relay{Loops: loops}
	defer relay.Close()
	router := &Router{Resolver: fixedRoute(service.Addr().(*net.TCPAddr).AddrPort()), Dialer: &NetDialer{}, Relay: relay}
	srv := &Server{Loops: loops, Handler: router}
	ln, err := Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(t.Context(), Listener{Listener: ln, Protocols: []Protocol{&waiter{}}}) }()
	for range 20 {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.WriteString(c, "tunnel\nhello"); err != nil {
			t.Fatal(err)
		}
		s, err := service.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if got, err := io.ReadAll(io.LimitReader(s, 5)); string(got) != "hello" || err != nil {
			t.Fatalf("the service read %q, %v, want hello", got, err)
		}
	}
	// The guard against stalls hands a loop off on a busy machine. What waits in
	// the Router would do so for each tunnel.
	if n := loops.engine().Running()[0].HandOffs(); n > 10 {
		t.Errorf("the loop was handed to another goroutine %d times in 20 tunnels, want none but for stalls", n)
	}
	_ = srv.Close()
	if err := <-served; err != ErrServerClosed {
		t.Errorf("Serve returned %v", err)
	}
}
