package h2

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/connect/internal/mux"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestWindowsGrowWithUse: over a path of 100 ms the window of a stream whose
// reader keeps up grows beyond what 1 Gbit/s takes, those of the others stay,
// and the room it took is given back at its end.
func TestWindowsGrowWithUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, before := testnet.Pipe()
		behind, far := testnet.Pipe()
		var path sync.WaitGroup
		path.Go(func() { slow(before, behind, 50*time.Millisecond, 0) })
		accepted := make(chan tunnel.Stream, 2)
		path.Go(func() {
			_ = new(Protocol).ServeConn(t.Context(), tunnel.NewConn(far), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
				if s, err := req.Accept(); err == nil {
					accepted <- s
				}
			}))
			_ = far.Close()
		})
		d := &Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(near)}
		dial := func() (a net.Conn, b tunnel.Stream) {
			a, err := d.DialContext(t.Context(), "tcp", "svc:1")
			if err != nil {
				t.Fatal(err)
			}
			return a, <-accepted
		}
		a, b := dial()
		idle, other := dial()
		go func() {
			_, _ = a.Write(make([]byte, 64<<20))
			_ = testnet.CloseWrite(a)
		}()
		if n, err := io.Copy(io.Discard, b); n != 64<<20 || err != nil {
			t.Fatalf("%d bytes and %v", n, err)
		}
		to := b.(*Stream)
		c := to.c
		c.mu.Lock()
		window, grown, others := to.window, c.grown, other.(*Stream).window
		c.mu.Unlock()
		if window < 12_500_000 || window > maxWindow || grown != window-streamWindow || others != streamWindow {
			t.Errorf("a window of %d bytes, %d grown in all, and one of %d for a stream that moved nothing", window, grown, others)
		}
		_, _ = a.Close(), b.Close()
		time.Sleep(time.Second)
		c.mu.Lock()
		if c.grown != 0 {
			t.Errorf("%d bytes were not given back at the end of the stream", c.grown)
		}
		c.mu.Unlock()
		_, _ = idle.Close(), other.Close()
		_ = d.Close()
		path.Wait()
	})
}

// slow carries between near and far until both have ended. It takes the given time for each
// way, and lets through rate bytes a second each way, 0 for any number.
func slow(near, far net.Conn, delay time.Duration, rate int) {
	type piece struct {
		due time.Time
		b   []byte
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
		pieces := make(chan piece, 10_000)
		wg.Go(func() {
			defer close(pieces)
			var sent time.Time // when the last piece has left
			for {
				b := make([]byte, 64<<10)
				n, err := way[0].Read(b)
				if err != nil {
					return
				}
				now := time.Now()
				due := now.Add(delay)
				if rate > 0 {
					// Sleep comes late; what that lost is made good.
					if idle := now.Add(-delay); sent.Before(idle) {
						sent = idle
					}
					sent = sent.Add(time.Duration(n) * time.Second / time.Duration(rate))
					time.Sleep(time.Until(sent))
				}
				pieces <- piece{due, b[:n]}
			}
		})
		wg.Go(func() {
			for p := range pieces {
				time.Sleep(time.Until(p.due))
				_, _ = way[1].Write(p.b)
			}
			_ = testnet.CloseWrite(way[1])
		})
	}
}

// TestSlowReadersGetNoLargerWindow: a window grows for those who read.
func TestSlowReadersGetNoLargerWindow(t *testing.T) {
	makePipe := pipes(t, &Protocol{})
	a, b, stop, err := makePipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	go func() { _, _ = a.Write(make([]byte, 1<<20)) }()
	to := b.(*Stream)
	for range 100 {
		testnet.Eventually(t, patience, func() bool {
			to.c.mu.Lock()
			defer to.c.mu.Unlock()
			return to.credit == 0 || to.in.size >= streamWindow/2
		}, "the window is used up")
		_, _ = b.Read(make([]byte, 1000))
	}
	to.c.mu.Lock()
	defer to.c.mu.Unlock()
	if to.window > streamWindow {
		t.Errorf("the window grew to %d bytes", to.window)
	}
}

// TestTLS: both ends work over any connection, and the Dialer insists on the
// ALPN.
func TestTLS(t *testing.T) {
	web := httptest.NewTLSServer(http.NotFoundHandler()) // for its certificate
	defer web.Close()
	client := web.Client().Transport.(*http.Transport).TLSClientConfig
	h := tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		s, err := req.Accept()
		if err != nil {
			return
		}
		_, _ = io.Copy(s, s)
		_ = s.Close()
	})
	for _, alpn := range []string{"h2", "http/1.1"} {
		ln := tls.NewListener(testnet.Listen(t), &tls.Config{Certificates: web.TLS.Certificates, NextProtos: []string{alpn}})
		backendServe(t, ln, &Protocol{}, h)
		d := newDialer(t, ln.Addr().String())
		d.TLS = client
		if alpn != "h2" {
			_, err := d.DialContext(t.Context(), "tcp", "svc:1")
			tunneltest.WantReason(t, err, tunnel.DialFailed)
			continue
		}
		s := open(t, d, "svc:1")
		testnet.Ping(t, s, "over TLS")
		_ = s.CloseWrite()
		if _, err := s.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("got %v, want io.EOF", err)
		}
	}
}

// TestStuckReaderHoldsLittle: a reader that has read megabytes over a short path,
// because something behind it took them, and then does not come back, keeps the
// peer from sending more than a small window.
func TestStuckReaderHoldsLittle(t *testing.T) {
	a, b, stop, err := pipes(t, &Protocol{})()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	to := b.(*Stream)
	to.c.mu.Lock()
	to.c.rtt = shortPath / 10
	to.c.mu.Unlock()
	go func() { _, _ = a.Write(make([]byte, minMovedToGrow)) }()
	if n, err := io.CopyN(io.Discard, b, minMovedToGrow*5/8); err != nil {
		t.Fatalf("%d bytes and %v", n, err)
	}
	buf := make([]byte, 16<<10)
	n, err := b.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	kept := func() (int, int) {
		to.c.mu.Lock()
		defer to.c.mu.Unlock()
		return to.in.size, to.credit
	}
	testnet.Eventually(t, patience, func() bool { _, credit := kept(); return credit < 1<<10 }, "the window is used up")
	if size, credit := kept(); size+credit+n > restWindow {
		t.Errorf("a stuck reader has %d bytes, %d more wait and %d may come, want %d in all", n, size, credit, restWindow)
	}
	// Where it comes back, all goes on.
	if n, err := io.Copy(io.Discard, io.LimitReader(b, minMovedToGrow*3/8-int64(n))); err != nil || n == 0 {
		t.Errorf("%d more bytes, and %v", n, err)
	}
}

// TestLongStreamOverAShortPath: over a short path the window of a stream grows once it has moved
// more than a kernel takes for a service that does not read: to busyWindow however slow it is, as
// many streams may share the path, and beyond as far as a path of some length needs it.
func TestLongStreamOverAShortPath(t *testing.T) {
	c := newConn(nil, &client{d: &Dialer{}}, true)
	c.rtt = shortPath / 10
	s := c.newStream(1)
	reads := func(within time.Duration) {
		s.kept, s.began, s.credit, c.pinged = true, mux.Clock()-int64(within), 0, 0
		c.took(s, s.window)
	}
	for s.moved < minMovedToGrow-streamWindow {
		reads(0)
	}
	if s.window > streamWindow {
		t.Errorf("a window of %d bytes after %d, want it to grow after %d", s.window, s.moved, minMovedToGrow)
	}
	for range 100 {
		reads(time.Second)
	}
	if s.window != busyWindow || c.grown != s.window-streamWindow {
		t.Errorf("a window of %d bytes after %d, noted are %d, want %d", s.window, s.moved, c.grown, busyWindow)
	}
	other := c.newStream(3) // whose window did not become smaller: the path was longer then
	other.moved, other.kept = minMovedToGrow, true
	for range 10 {
		other.kept, other.credit, c.pinged = true, 0, 0
		c.took(other, other.window)
	}
	if other.window != busyWindow || c.grown != 2*(busyWindow-streamWindow) {
		t.Errorf("windows of %d bytes and %d, noted are %d, want %d of both", s.window, other.window, c.grown, busyWindow)
	}
	c.grown = busyWindow - streamWindow
	reads(0)
	if s.window != busyWindow {
		t.Errorf("over a path of %v a window of %d bytes has grown to %d: more would only wait at the receiver", c.rtt, busyWindow, s.window)
	}
	c.rtt = shortPath * 9 / 10
	for range 10 {
		reads(c.rtt + 1)
	}
	if s.window != busyWindow {
		t.Errorf("a window of %d bytes, of which half is read in more than a round trip, has grown to %d", busyWindow, s.window)
	}
	for range 10 {
		reads(0)
	}
	if s.window != 2*busyWindow || c.grown != s.window-streamWindow {
		t.Errorf("over a path of %v a window of %d bytes, noted are %d, want %d, as 5 Gbit/s have 562 KB under way", c.rtt, s.window, c.grown, 2*busyWindow)
	}
}

// TestRoundTripIsMeasuredAgain: a window that has grown does not grow further before its PING was
// answered, which is sent for some of the growth of a connection.
func TestRoundTripIsMeasuredAgain(t *testing.T) {
	c := newConn(nil, &client{d: &Dialer{}}, true)
	c.rtt = time.Hour // as it was when the connection began
	grow := func(s *Stream) bool {
		before := s.window
		s.kept, s.credit = true, 0
		c.took(s, s.window)
		return s.window > before
	}
	s := c.newStream(1)
	if !grow(s) || c.pinged == 0 {
		t.Fatalf("a window of %d bytes, pinged %v; want it to have grown, and a PING", s.window, c.pinged != 0)
	}
	if grow(s) {
		t.Error("the window grows before the PING is answered")
	}
	c.noteAck()
	if c.rtt >= time.Hour {
		t.Errorf("the round trip is still %v", c.rtt)
	}
	c.rtt = time.Hour
	for id := uint32(3); id < 200; id += 2 {
		c.pinged = 0
		grow(c.newStream(id))
	}
	if c.pings != maxProbes {
		t.Errorf("%d PINGs were sent, want %d", c.pings, maxProbes)
	}
}

// TestReadsAtOnceOpenTheWindow: the bytes of Reads that wait at the same time all open the window
// again.
func TestReadsAtOnceOpenTheWindow(t *testing.T) {
	a, b, stop, err := pipes(t, &Protocol{})()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	near, far := a.(*Stream), b.(*Stream)
	_ = near.SetReadDeadline(time.Now().Add(patience))
	_ = far.SetWriteDeadline(time.Now().Add(patience))
	var reading sync.WaitGroup
	defer reading.Wait()
	const total = 16 * streamWindow
	var got atomic.Int64
	for range 8 {
		reading.Go(func() {
			buf := make([]byte, streamWindow/16)
			for got.Load() < total {
				n, err := near.Read(buf)
				if got.Add(int64(n)); err != nil {
					if err != io.EOF {
						t.Errorf("after %d bytes: %v", got.Load(), err)
					}
					return
				}
			}
		})
	}
	for range total / (streamWindow / 4) {
		if _, err := far.Write(make([]byte, streamWindow/4)); err != nil {
			t.Errorf("with %d bytes read: %v", got.Load(), err)
			break
		}
	}
	_ = far.CloseWrite()
}

// TestWindowShrinksOnce: over a short path a stream that reads its first window in
// halves has all of the smaller one after that.
func TestWindowShrinksOnce(t *testing.T) {
	c := newConn(nil, &client{d: &Dialer{}}, true)
	c.rtt = shortPath / 10
	s := c.newStream(1)
	s.credit = 0
	for range 2 {
		c.took(s, streamWindow/2)
	}
	if s.window != restWindow || s.credit != restWindow || c.grown != restWindow-streamWindow {
		t.Errorf("a window of %d bytes with a credit of %d, want %d of both", s.window, s.credit, restWindow)
	}
}
