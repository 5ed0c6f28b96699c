package h2

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestThousandStreams has 1,000 tunnels open at once, through a gateway that
// takes 100 on each connection.
func TestThousandStreams(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Protocol{})
	d := newDialer(t, g.Addr)
	d.Idle = time.Minute
	var wg sync.WaitGroup
	streams := make([]*Stream, 1000)
	for i := range streams {
		wg.Go(func() {
			c, err := d.DialContext(t.Context(), "tcp", "svc:1")
			if err != nil {
				t.Errorf("stream %d: %v", i, err)
				return
			}
			streams[i] = c.(*Stream)
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	if n := d.Conns(); n < 10 || n > 20 {
		t.Errorf("%d connections for 1000 streams of 100 each", n)
	}
	for i, s := range streams {
		wg.Go(func() {
			_ = s.SetDeadline(time.Now().Add(patience))
			want := random(5000, byte(i))
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

func random(n int, seed byte) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// TestStalledStreams: streams that nobody reads hold up no other on the same
// connection, and take no more than their own windows.
func TestStalledStreams(t *testing.T) {
	hold := make(chan struct{})
	big := testnet.Service(t, func(c net.Conn) { <-hold })
	t.Cleanup(func() { close(hold) })
	g := serve(t, tunneltest.Table{"big:1": big, "small:1": testnet.Echo(t).Addr()}, &Protocol{})
	d := newDialer(t, g.Addr)
	d.Parallel = 1
	for range 20 {
		s := open(t, d, "big:1")
		go func() { _, _ = s.Write(make([]byte, 64<<20)) }()
	}
	small := open(t, d, "small:1")
	worst := time.Duration(0)
	for range 200 {
		start := time.Now()
		testnet.Ping(t, small, "hello")
		worst = max(worst, time.Since(start))
	}
	if n := d.Conns(); n != 1 {
		t.Fatalf("%d connections, want all on one", n)
	}
	if worst > time.Second {
		t.Errorf("a round trip beside stalled streams took %v", worst)
	}
}

// TestBackPressure: who does not read stops who writes, at the stream's window
// and what the path's own buffers hold.
func TestBackPressure(t *testing.T) {
	makePipe := pipes(t, &Protocol{})
	a, b, stop, err := makePipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	_ = a.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
	n, err := a.Write(make([]byte, 1<<20))
	if n != streamWindow || err == nil {
		t.Errorf("wrote %d bytes and %v, want %d, the window, and a timeout", n, err, streamWindow)
	}
	_ = a.SetWriteDeadline(time.Time{})
	if _, err := io.ReadFull(b, make([]byte, n)); err != nil {
		t.Error(err)
	}
	go func() { _, _ = a.Write([]byte("on")) }()
	if _, err := io.ReadFull(b, make([]byte, 2)); err != nil {
		t.Error(err)
	}
}

// TestIntegrity moves bytes both ways at once, in pieces of any size, through
// a gateway.
func TestIntegrity(t *testing.T) {
	const size = 32 << 20
	down := random(size, 1)
	sums := make(chan [32]byte, 1)
	to := testnet.Service(t, func(c net.Conn) {
		sent := make(chan struct{})
		go func() { defer close(sent); _, _ = c.Write(down); _ = testnet.CloseWrite(c) }()
		h := sha256.New()
		_, _ = io.Copy(h, c)
		<-sent
		sums <- [32]byte(h.Sum(nil))
	})
	g := serve(t, tunneltest.Table{"svc:1": to}, &Protocol{})
	s := open(t, newDialer(t, g.Addr), "svc:1")
	up := random(size, 2)
	go func() {
		r := rand.New(rand.NewPCG(1, 2))
		for rest := up; len(rest) > 0; {
			n, err := s.Write(rest[:min(len(rest), 1+r.IntN(1<<r.IntN(21)))])
			if err != nil {
				t.Error(err)
				return
			}
			rest = rest[n:]
		}
		_ = s.CloseWrite()
	}()
	got, err := io.ReadAll(s)
	if err != nil || !bytes.Equal(got, down) {
		t.Errorf("down: %d bytes, %v", len(got), err)
	}
	if <-sums != sha256.Sum256(up) {
		t.Error("up: other bytes than were sent")
	}
}

// TestEndsThroughAGateway is promise P8: an end is an end and an abort an
// abort, in both directions.
func TestEndsThroughAGateway(t *testing.T) {
	how := make(chan error, 1)
	for _, c := range []struct {
		name    string
		backend func(net.Conn)
		client  func(*Stream) error // what the client sees
		want    func(error) bool
		far     func(error) bool // what the backend sees; nil if it does not look
	}{
		{"the client ends, the reply follows", func(c net.Conn) {
			b, _ := io.ReadAll(c)
			_, _ = c.Write(bytes.Repeat(b, 1<<20))
		}, func(s *Stream) error {
			_, _ = s.Write([]byte("x"))
			_ = s.CloseWrite()
			b, err := io.ReadAll(s)
			if len(b) != 1<<20 {
				t.Errorf("%d bytes", len(b))
			}
			return err
		}, func(err error) bool { return err == nil }, nil},
		{"the service ends, the upload follows", func(c net.Conn) {
			_ = testnet.CloseWrite(c)
			n, err := io.Copy(io.Discard, c)
			if n != 1<<20 {
				t.Errorf("%d bytes", n)
			}
			how <- err
		}, func(s *Stream) error {
			_, err := io.ReadAll(s)
			_, _ = s.Write(make([]byte, 1<<20))
			_ = s.CloseWrite()
			return err
		}, func(err error) bool { return err == nil }, func(err error) bool { return err == nil }},
		{"the service aborts", func(c net.Conn) {
			_, _ = c.Read(make([]byte, 1))
			_ = testnet.Abort(c)
		}, func(s *Stream) error {
			_, _ = s.Write([]byte("x"))
			_, err := io.ReadAll(s)
			return err
		}, func(err error) bool {
			re, ok := errors.AsType[*ResetError](err)
			return ok && re.Code == http2.ErrCodeConnect && errors.Is(err, syscall.ECONNRESET)
		}, nil},
		{"the client aborts", func(c net.Conn) {
			_, _ = c.Read(make([]byte, 1))
			_, err := c.Read(make([]byte, 1))
			how <- err
		}, func(s *Stream) error {
			_, _ = s.Write([]byte("x"))
			time.AfterFunc(10*time.Millisecond, func() { _ = s.Abort() })
			_, err := s.Read(make([]byte, 1))
			return err
		}, func(err error) bool { return errors.Is(err, net.ErrClosed) }, func(err error) bool { return errors.Is(err, syscall.ECONNRESET) }},
		{"the client's connection is cut", func(c net.Conn) {
			_, _ = c.Read(make([]byte, 1))
			_, err := c.Read(make([]byte, 1))
			how <- err
		}, func(s *Stream) error {
			_, _ = s.Write([]byte("x"))
			time.AfterFunc(10*time.Millisecond, func() { _ = s.c.nc.Close() })
			_, err := s.Read(make([]byte, 1))
			return err
		}, func(err error) bool { return errors.Is(err, syscall.ECONNRESET) }, func(err error) bool { return errors.Is(err, syscall.ECONNRESET) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := serve(t, tunneltest.Table{"svc:1": testnet.Service(t, c.backend)}, &Protocol{})
			s := open(t, newDialer(t, g.Addr), "svc:1")
			if err := c.client(s); !c.want(err) {
				t.Errorf("the client saw %v", err)
			}
			_ = s.Close()
			if c.far != nil {
				if err := <-how; !c.far(err) {
					t.Errorf("the service saw %v", err)
				}
			}
		})
	}
}

// TestCutAfterItsEnd: a client that has ended its stream and then goes away
// ends the tunnel, though nobody reads from it any more.
func TestCutAfterItsEnd(t *testing.T) {
	ended, done := make(chan error, 1), make(chan struct{})
	defer close(done)
	g := serve(t, tunneltest.Table{"svc:1": testnet.Service(t, func(c net.Conn) {
		_, err := io.ReadAll(c)
		ended <- err
		<-done
	})}, &Protocol{})
	s := open(t, newDialer(t, g.Addr), "svc:1")
	_ = s.CloseWrite()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	_ = s.c.nc.Close()
	g.Reason(t, tunnel.Reset)
}

// TestGoAway: streams a proxy still serves go on, new ones go elsewhere.
func TestGoAway(t *testing.T) {
	p := &Protocol{}
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, p)
	d := newDialer(t, g.Addr)
	d.Idle = time.Minute
	s := open(t, d, "svc:1")
	testnet.Ping(t, s, "before")
	p.Drain()
	testnet.Eventually(t, patience, func() bool { return d.Conns() == 0 }, "the connection left the pool")
	testnet.Ping(t, s, "after GOAWAY")
	done := make(chan error, 1)
	go func() { done <- g.Server.Shutdown(t.Context()) }()
	testnet.Ping(t, s, "during Shutdown")
	select {
	case err := <-done:
		t.Fatalf("Shutdown returned %v with a tunnel open", err)
	default:
	}
	_ = s.CloseWrite()
	if _, err := io.ReadAll(s); err != nil {
		t.Error(err)
	}
	_ = s.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestCloseAfterGoAway: Close ends the connections that take no more streams,
// too.
func TestCloseAfterGoAway(t *testing.T) {
	p := &Protocol{}
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, p)
	d := newDialer(t, g.Addr)
	s := open(t, d, "svc:1")
	testnet.Ping(t, s, "before")
	p.Drain()
	testnet.Eventually(t, patience, func() bool { return d.Conns() == 0 }, "the connection left the pool")
	_ = d.Close()
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after Close: %v, want a reset", err)
	}
}

// TestRefusedStreamIsTriedElsewhere: a request that a proxy says it did not
// look at goes to another connection before the caller hears of it.
func TestRefusedStreamIsTriedElsewhere(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Protocol{Streams: 1})
	d := newDialer(t, g.Addr)
	d.Idle = time.Minute
	first := open(t, d, "svc:1")
	// Whether or not the proxy's limit is known by now.
	second := open(t, d, "svc:1")
	testnet.Ping(t, first, "one")
	testnet.Ping(t, second, "two")
	if n := d.Conns(); n != 2 {
		t.Errorf("%d connections, want 2", n)
	}
}

// TestDeadPeerIsFound: a connection that does not answer a PING ends, and
// what is on it is reset. That takes Ping and Pong, 15 seconds by default.
func TestDeadPeerIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		d := &Dialer{Proxy: "proxy:1", Dialer: onePipe{near}}
		go func() { // answers the first request and then no PING
			r := newRaw(t, far)
			r.mum = true
			_ = far.SetDeadline(time.Time{})
			_, _ = io.ReadFull(far, make([]byte, len(preface)))
			_ = r.fr.WriteSettings()
			for {
				f, err := r.fr.ReadFrame()
				if err != nil {
					return
				}
				if h, ok := f.(*http2.HeadersFrame); ok {
					go func() {
						_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: h.StreamID, BlockFragment: fieldList(":status", "200"), EndHeaders: true})
					}()
				}
			}
		}()
		c, err := d.DialContext(t.Context(), "tcp", "svc:1")
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		_, err = c.Read(make([]byte, 1))
		if took := time.Since(start); !errors.Is(err, syscall.ECONNRESET) || !errors.Is(err.(*ResetError).Err, errDead) || took > 15*time.Second {
			t.Errorf("after %v: %v, want a reset within 15 s", took, err)
		}
		_ = c.Close()
		_ = d.Close()
		_ = far.Close()
	})
}

// onePipe dials once.
type onePipe struct{ c net.Conn }

func (p onePipe) DialContext(context.Context, string, string) (net.Conn, error) { return p.c, nil }

// TestServerTimes has the time limits of a server's connection.
func TestServerTimes(t *testing.T) {
	for _, c := range []struct {
		name   string
		send   func(r *raw)
		least  time.Duration
		most   time.Duration
		goAway http2.ErrCode
	}{
		{"no stream for long", func(r *raw) { _ = r.request(1, true, ":method", "GET", ":scheme", "http", ":path", "/") }, DefaultIdle, DefaultIdle + quiet, http2.ErrCodeNo},
		{"a header block that does not end", func(r *raw) {
			r.mum = true
			_ = r.connect(1, "nobody:1")
			r.answer(1)
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: fieldList(connectSvc...)})
		}, blockTime, blockTime + time.Second, http2.ErrCodeNo},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				done := make(chan struct{})
				go func() {
					defer close(done)
					_ = new(Protocol).ServeConn(t.Context(), tunnel.NewConn(far), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
						req.Refuse(tunnel.Refusef(tunnel.NoRoute, "no"))
					}))
				}()
				r := newRaw(t, near)
				_ = near.SetDeadline(time.Time{})
				start := time.Now()
				_, _ = io.WriteString(near, preface)
				_ = r.fr.WriteSettings()
				c.send(r)
				a := r.answer(0)
				<-done
				if took := time.Since(start); took < c.least || took > c.most || a.goAway != c.goAway {
					t.Errorf("ended after %v with %+v, want %v to %v", took, a, c.least, c.most)
				}
				_ = near.Close()
			})
		})
	}
}

// TestFields: what a Dialer sends arrives, and what a Protocol's hook answers
// is seen.
func TestFields(t *testing.T) {
	heads := make(chan *Head, 1)
	p := &Protocol{Head: func(_ context.Context, req *tunnel.Request, head *Head) error {
		head.Answer = connect.Fields{{Name: "Baggage", Value: "of=server"}}
		req.Peer = tunnel.Peer{ID: "x", Method: "test"}
		heads <- head
		return nil
	}}
	to := testnet.Echo(t).Addr()
	g := serve(t, tunneltest.Table{"*": to}, p)
	d := newDialer(t, g.Addr)
	answers := make(chan connect.Fields, 1)
	d.Via, d.Authorization = "me", connect.BearerCredentials("t")
	d.Header = func(context.Context, string) (connect.Fields, error) {
		return connect.Fields{{Name: "Forwarded", Value: `for="192.0.2.1:5"`}}, nil
	}
	d.Answer = func(_ context.Context, _ string, fields connect.Fields) { answers <- fields }
	s := open(t, d, "10.0.0.1:8080")
	testnet.Ping(t, s, "x")
	head := <-heads
	for name, want := range map[string]string{"via": "2 me", "proxy-authorization": "Bearer t", "forwarded": `for="192.0.2.1:5"`} {
		if got, n := head.Fields.Get(name); got != want || n != 1 {
			t.Errorf("%s: got %q (%d), want %q", name, got, n, want)
		}
	}
	if head.Authority != "10.0.0.1:8080" {
		t.Errorf("authority %q", head.Authority)
	}
	if got, _ := (<-answers).Get("baggage"); got != "of=server" {
		t.Errorf("baggage of the answer: %q", got)
	}
}

// TestPanicEndsOneTunnel: a fault in the Handler ends the stream it was about,
// and is told.
func TestPanicEndsOneTunnel(t *testing.T) {
	to := testnet.Echo(t).Addr()
	g := serve(t, panicky{tunneltest.Table{"svc:1": to}}, &Protocol{})
	d := newDialer(t, g.Addr)
	d.Parallel = 1
	s := open(t, d, "svc:1")
	testnet.Ping(t, s, "before")
	_, err := d.DialContext(t.Context(), "tcp", "panic:1")
	if re, ok := errors.AsType[*ResetError](err); !ok || re.Code != http2.ErrCodeInternal {
		t.Errorf("got %v, want a reset with INTERNAL_ERROR", err)
	}
	testnet.Ping(t, s, "after")
	g.Reason(t, tunnel.Internal)
}

// A panicky Resolver has a fault.
type panicky struct{ tunnel.Resolver }

func (p panicky) Resolve(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
	if req.Host() == "panic" {
		panic("a fault")
	}
	return p.Resolver.Resolve(ctx, req)
}

// TestPanicWithNobodyToTell: it goes on where the Server catches it.
func TestPanicWithNobodyToTell(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	caught := make(chan any, 1)
	go func() {
		defer func() { caught <- recover() }()
		_ = new(Protocol).ServeConn(t.Context(), tunnel.NewConn(far), tunnel.HandlerFunc(func(context.Context, *tunnel.Request) { panic("a fault") }))
	}()
	r := newRaw(t, near)
	_, _ = io.WriteString(near, preface)
	_ = r.fr.WriteSettings()
	_ = r.connect(1, "svc:1")
	r.answer(0)
	if v := <-caught; v == nil {
		t.Error("the panic was lost")
	}
}
