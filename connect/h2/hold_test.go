package h2

import (
	"context"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// unreadSetup serves, within budget, streams that nobody reads, which it hands out.
func unreadSetup(t *testing.T, budget *tunnel.Budget, streams int) (addr string, accepted chan *Stream) {
	accepted = make(chan *Stream, 1000)
	srv := &tunnel.Server{Budget: budget, Handler: tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		s, err := req.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		accepted <- s.(*Stream)
	})}
	ln := testnet.Listen(t)
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{Listener: ln, Name: "test", Protocols: []tunnel.Protocol{&Protocol{Streams: streams}}})
	}()
	t.Cleanup(func() { _ = srv.Close(); <-served })
	return ln.Addr().String(), accepted
}

// TestUnreadBytesAreHeld: what came and was not read is in the Budget's account,
// until it is read or the stream has ended.
func TestUnreadBytesAreHeld(t *testing.T) {
	budget := &tunnel.Budget{Limit: 100}
	addr, accepted := unreadSetup(t, budget, 0)
	d := newDialer(t, addr)
	for _, end := range []func(near, far *Stream){
		func(_, far *Stream) { _, _ = far.Read(make([]byte, 1<<10)); _ = far.Close() },
		func(_, far *Stream) { _ = far.Abort() },
		func(near, far *Stream) { _ = near.Abort() },
		func(near, far *Stream) {
			for n := 0; n < 50<<10; {
				m, err := far.Read(make([]byte, 10<<10))
				if err != nil {
					t.Error(err)
					return
				}
				n += m
			}
		},
	} {
		near := open(t, d, "svc:1")
		far := <-accepted
		_, _ = near.Write(make([]byte, 50<<10))
		testnet.Eventually(t, patience, func() bool { return budget.Buffered() >= 40<<10 && budget.Buffered() <= 80<<10 }, "the bytes are held")
		end(near, far)
		testnet.Eventually(t, patience, func() bool { return budget.Buffered() == 0 }, "nothing is held")
		_, _ = near.Close(), far.Close()
	}
}

// TestNoCreditWhileMemoryIsShort: while memory is short the window of the
// connection is opened by what is read, and again when memory is short no more.
func TestNoCreditWhileMemoryIsShort(t *testing.T) {
	budget := &tunnel.Budget{Limit: 1000}
	addr, accepted := unreadSetup(t, budget, 500)
	d := newDialer(t, addr)
	d.Streams, d.Parallel = 500, 1
	open(t, d, "svc:1")
	c := (<-accepted).c
	// The streams' windows are 64 KiB each, of which 260 make more than the connection's.
	var all []*Stream
	const streams = 280
	for range streams {
		s := open(t, d, "svc:1")
		all = append(all, <-accepted)
		go func() { _, _ = s.Write(make([]byte, 64<<10)) }()
		if len(all) == 1 {
			budget.SetPressure(tunnel.Short)
		}
	}
	unread := func() int {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.credit+c.unacked != connWindow || c.unread > connWindow {
			t.Errorf("credit of %d and %d not told of, %d unread", c.credit, c.unacked, c.unread)
		}
		return c.unread
	}
	testnet.Eventually(t, patience, func() bool { return unread() == connWindow }, "the window is used up")
	for _, s := range all[:100] {
		_, _ = s.Read(make([]byte, 64<<10))
	}
	testnet.Eventually(t, patience, func() bool { return unread() >= streams*64<<10-100*64<<10-connWindow/8 }, "what was read may be sent again")
	budget.SetPressure(tunnel.Calm)
	for _, s := range all {
		_ = s.Close()
	}
}

// TestUnreadBytesAreBounded: a client whose streams nobody reads loses those that
// hold most when its share of the memory is used up; another one has its own.
func TestUnreadBytesAreBounded(t *testing.T) {
	const backlogs = 2 << 20
	budget := &tunnel.Budget{Limit: 1000, Backlogs: backlogs}
	addr, accepted := unreadSetup(t, budget, 100)
	d := newDialer(t, addr)
	d.Streams, d.Parallel = 100, 4
	const streams = 200 // of 64 KiB: 12.5 MiB
	cut := make(chan struct{}, streams)
	for range streams {
		s := open(t, d, "svc:1")
		<-accepted
		go func() {
			if _, err := s.Write(make([]byte, 64<<10)); err != nil {
				cut <- struct{}{}
				return
			}
			_, _ = s.Read(make([]byte, 1))
			cut <- struct{}{}
		}()
	}
	testnet.Eventually(t, patience, func() bool { return len(cut) >= streams/2 }, "streams are cut")
	if held := budget.Buffered(); held > 2*backlogs+1<<20 {
		t.Errorf("%d bytes are held, want about %d", held, 2*backlogs)
	}
	// Another client, from an address of its own.
	other := &Dialer{Proxy: addr, Dialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}}}
	defer other.Close()
	near := tunneltest.Dial(t, other, "svc:1").(*Stream)
	far := <-accepted
	for range 20 {
		if _, err := near.Write(make([]byte, 10<<10)); err != nil {
			t.Fatalf("another client: %v", err)
		}
		_ = far.SetReadDeadline(time.Now().Add(patience))
		for n := 0; n < 10<<10; {
			m, err := far.Read(make([]byte, 10<<10))
			if err != nil {
				t.Fatalf("another client: %v", err)
			}
			n += m
		}
	}
	_, _ = near.Close(), far.Close()
}

// TestWindowsOfAConnectionGrowTogether: all streams of a connection together have
// grown by no more than growth, however fast they are read.
func TestWindowsOfAConnectionGrowTogether(t *testing.T) {
	c := newConn(nil, &client{d: &Dialer{}}, true)
	c.rtt = time.Hour
	var sum int
	for id := uint32(1); id < 200; id += 2 {
		s := c.newStream(id)
		for range 20 {
			s.kept, s.credit, c.pinged = true, 0, 0
			c.took(s, s.window)
		}
		sum += s.window - streamWindow
		if s.window > maxWindow {
			t.Fatalf("a window of %d bytes", s.window)
		}
	}
	if sum != c.grown || sum > 16<<20 || sum < 8<<20 {
		t.Errorf("windows have grown by %d bytes in all, noted are %d, want no more than 16 MiB", sum, c.grown)
	}
}

// TestConnectionsWindowIsKept: a sender stops where the connection's window ends,
// with room left in those of its streams, and goes on when there is more.
func TestConnectionsWindowIsKept(t *testing.T) {
	r, s := rawToServer(t)
	_ = r.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
	testnet.Eventually(t, patience, func() bool {
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		return s.allowed == 1<<20
	}, "the stream's window is larger")
	go func() { _, _ = s.Write(make([]byte, 100_000)) }()
	take := func(want int) {
		t.Helper()
		for got := 0; got < want; {
			f, err := r.next()
			if err != nil {
				t.Fatal(err)
			}
			if d, ok := f.(*http2.DataFrame); ok {
				got += len(d.Data())
				if got > want {
					t.Fatalf("%d bytes, the connection's window has room for %d", got, want)
				}
			}
		}
		// A PING's answer comes behind all that could be sent.
		r.mum = true
		_ = r.fr.WritePing(false, [8]byte{1})
		for {
			f, err := r.fr.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			if d, ok := f.(*http2.DataFrame); ok {
				t.Fatalf("%d bytes more than the connection's window has room for", len(d.Data()))
			}
			if p, ok := f.(*http2.PingFrame); ok && p.IsAck() {
				return
			}
		}
	}
	take(65535)
	_ = r.fr.WriteWindowUpdate(0, 1000)
	take(1000)
	_ = r.fr.WriteWindowUpdate(0, 1<<20)
	take(100_000 - 66_535)
	_ = s.Close()
}
