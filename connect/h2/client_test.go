package h2

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestDeadPeerIsFound: a connection that does not answer a PING ends, and
// what is on it is reset. That takes Ping and Pong, 30 seconds by default, also where
// a PING that measures the round trip was sent just before.
func TestDeadPeerIsFound(t *testing.T) {
	t.Run("at rest", func(t *testing.T) { deadPeer(t, false) })
	t.Run("while windows grow", func(t *testing.T) { deadPeer(t, true) })
}

func deadPeer(t *testing.T, measures bool) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		d := &Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(near)}
		go func() { // answers the first request and then no PING
			r := newRaw(t, far)
			r.mum = true
			_ = far.SetDeadline(time.Time{})
			_, _ = io.ReadFull(far, make([]byte, len(preface)))
			_ = r.fr.WriteSettings()
			var mu sync.Mutex // a Framer writes one frame at a time
			write := func(f func() error) {
				go func() {
					mu.Lock()
					defer mu.Unlock()
					_ = f()
				}()
			}
			for {
				f, err := r.fr.ReadFrame()
				if err != nil {
					return
				}
				if f, ok := f.(*http2.SettingsFrame); ok && !f.IsAck() {
					write(r.fr.WriteSettingsAck)
				}
				if h, ok := f.(*http2.HeadersFrame); ok {
					id := h.StreamID
					write(func() error {
						return r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fieldList(":status", "200"), EndHeaders: true})
					})
				}
			}
		}()
		c, err := d.DialContext(t.Context(), "tcp", "svc:1")
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		start := time.Now()
		if measures {
			h := c.(*Stream).c
			h.mu.Lock()
			h.sendPing()
			h.mu.Unlock()
		}
		_, err = c.Read(make([]byte, 1))
		if took := time.Since(start); !errors.Is(err, syscall.ECONNRESET) || !errors.Is(err.(*ResetError).Err, errDead) || took < 25*time.Second || took > 30*time.Second {
			t.Errorf("after %v: %v, want a reset after 25 to 30 s", took, err)
		}
		_ = c.Close()
		_ = d.Close()
		_ = far.Close()
	})
}

// TestServerTimes has the time limits of a server's connection.
func TestServerTimes(t *testing.T) {
	for _, c := range []struct {
		name   string
		send   func(r *raw)
		least  time.Duration
		most   time.Duration
		goAway http2.ErrCode
	}{
		{"no stream for long", func(r *raw) { _ = r.request(1, true, ":method", "GET", ":scheme", "http", ":path", "/") }, DefaultIdle, DefaultIdle + pingInterval, http2.ErrCodeNo},
		{"a header block that does not end", func(r *raw) {
			r.mum = true
			_ = r.connect(1, "nobody:1")
			r.answer(1)
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: fieldList(connectSvc...)})
		}, requestTimeout, requestTimeout + time.Second, http2.ErrCodeNo},
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

func BenchmarkBulk(b *testing.B) {
	g := serve(b, tunneltest.Table{"svc:1": testnet.Echo(b).Addr()}, &Protocol{})
	s := open(b, newDialer(b, g.Addr), "svc:1")
	buf := make([]byte, 64<<10)
	b.SetBytes(int64(len(buf)))
	go func() {
		for range b.N {
			if _, err := s.Write(buf); err != nil {
				return
			}
		}
		_ = s.CloseWrite()
	}()
	in := make([]byte, 64<<10)
	for {
		if _, err := s.Read(in); err != nil {
			break
		}
	}
}

// TestAnswersThatAreNone: a proxy's mistakes are errors of the dial, soon.
func TestAnswersThatAreNone(t *testing.T) {
	answer := func(r *raw, id uint32, end bool, pairs ...string) error {
		return r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fieldList(pairs...), EndHeaders: true, EndStream: end})
	}
	for _, c := range []struct {
		name   string
		answer func(r *raw, id uint32) error
		more   bool // goes on until it is stopped
		want   tunnel.Reason
	}{
		{"a request", func(r *raw, id uint32) error { return answer(r, id, false, ":method", "GET") }, false, tunnel.DialFailed},
		{"status of two digits", func(r *raw, id uint32) error { return answer(r, id, false, ":status", "20") }, false, tunnel.DialFailed},
		{"two statuses", func(r *raw, id uint32) error { return answer(r, id, false, ":status", "200", ":status", "200") }, false, tunnel.DialFailed},
		{"interim without end", func(r *raw, id uint32) error { return answer(r, id, false, ":status", "103") }, true, tunnel.DialFailed},
		{"a list over 16 KiB", func(r *raw, id uint32) error {
			return answer(r, id, false, ":status", "200", "a", strings.Repeat("a", 17<<10))
		}, false, tunnel.DialFailed},
		{"a block over 32 KiB", func(r *raw, id uint32) error {
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fillerBlock(15 << 10)})
			_ = r.fr.WriteContinuation(id, false, fillerBlock(15<<10))
			return r.fr.WriteContinuation(id, false, fillerBlock(15<<10))
		}, false, tunnel.DialFailed},
		{"empty parts without end", func(r *raw, id uint32) error {
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fieldList(":status", "200")})
			for range 100 {
				_ = r.fr.WriteContinuation(id, false, nil)
			}
			return nil
		}, false, tunnel.DialFailed},
		{"DATA", func(r *raw, id uint32) error { return r.fr.WriteData(id, false, []byte("hello")) }, false, tunnel.DialFailed},
		{"the end", func(r *raw, id uint32) error { return answer(r, id, true, ":status", "200") }, false, ""},
		{"unknown frames without end", func(r *raw, id uint32) error { return r.fr.WriteRawFrame(0x77, 0, id, nil) }, true, tunnel.DialFailed},
		{"nothing", func(*raw, uint32) error { return nil }, false, tunnel.DialTimeout},
		{"half a head", func(r *raw, id uint32) error {
			return r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fieldList(":status", "200")})
		}, false, tunnel.DialTimeout},
		{"HPACK that can't be decoded", func(r *raw, id uint32) error {
			return r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: []byte{0xff, 0xff, 0xff, 0xff}, EndHeaders: true})
		}, false, tunnel.DialFailed},
		{"a refusal with trailers", func(r *raw, id uint32) error {
			_ = answer(r, id, false, ":status", "503", "proxy-status", "x; error=dns_error")
			return answer(r, id, true, "a", "b")
		}, false, tunnel.LookupError},
	} {
		t.Run(c.name, func(t *testing.T) {
			addr := testnet.Service(t, func(nc net.Conn) {
				r := newRaw(t, nc)
				if _, err := io.ReadFull(nc, make([]byte, len(preface))); err != nil {
					return
				}
				_ = r.fr.WriteSettings()
				for {
					f, err := r.fr.ReadFrame()
					if err != nil {
						return
					}
					if h, ok := f.(*http2.HeadersFrame); ok {
						for c.answer(r, h.StreamID) == nil && c.more {
						}
					}
				}
			})
			d := newDialer(t, addr)
			d.Wait = time.Second
			s, err := d.DialContext(t.Context(), "tcp", "svc:1")
			if err == nil {
				_ = s.Close()
			}
			if c.want == "" && err == nil {
				return
			}
			tunneltest.WantReason(t, err, c.want)
		})
	}
}

// TestSettingsAreNotAcknowledged: a peer that goes on to speak and never
// acknowledges our SETTINGS is no reason to believe in it for ever.
func TestSettingsAreNotAcknowledged(t *testing.T) {
	const most = settingsTimeout + 6*time.Second
	// goAwayDelay sends PINGs, which it has answered, until the connection ends, and
	// returns the code of the GOAWAY.
	// It calls first before the first of them: a Framer writes one frame at a time.
	goAwayDelay := func(r *raw, first func()) (code http2.ErrCode) {
		r.mum = true
		_ = r.SetDeadline(time.Time{})
		defer time.AfterFunc(2*most, func() { _ = r.Close() }).Stop() // a failure, and no wait for ever
		stop := make(chan struct{})
		defer close(stop)
		go func() {
			first()
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Second):
					_ = r.fr.WritePing(false, [8]byte{})
				}
			}
		}()
		return r.answer(0).goAway
	}
	t.Run("server", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			done := make(chan error, 1)
			go func() {
				done <- new(Protocol).ServeConn(t.Context(), tunnel.NewConn(far), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) { _, _ = req.Accept() }))
			}()
			r := newRaw(t, near)
			start := time.Now()
			code := goAwayDelay(r, func() {
				_, _ = io.WriteString(near, preface)
				_ = r.fr.WriteSettings()
				_ = r.connect(1, "svc:1")
			})
			if took := time.Since(start); code != http2.ErrCodeSettingsTimeout || took < settingsTimeout || took > most {
				t.Errorf("GOAWAY with %v after %v, want SETTINGS_TIMEOUT after %v", code, took, settingsTimeout)
			}
			_ = near.Close()
			tunneltest.WantReason(t, <-done, tunnel.BadRequest)
		})
	})
	t.Run("dialer", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			d := &Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(near)}
			code := make(chan http2.ErrCode, 1)
			go func() {
				r := newRaw(t, far)
				_, _ = io.ReadFull(far, make([]byte, len(preface)))
				written := make(chan struct{})
				go func() {
					defer close(written)
					_ = r.fr.WriteSettings()
				}()
				for asked := false; !asked; {
					f, err := r.fr.ReadFrame()
					if err != nil {
						t.Errorf("no request came: %v", err)
						code <- none
						return
					}
					asked = f.Header().Type == http2.FrameHeaders
				}
				code <- goAwayDelay(r, func() { // an answer before the request would be an error of the protocol
					<-written
					_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: fieldList(":status", "200"), EndHeaders: true})
				})
			}()
			c, err := d.DialContext(t.Context(), "tcp", "svc:1")
			if err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			_, err = c.Read(make([]byte, 1))
			if took := time.Since(start); !errors.Is(err, syscall.ECONNRESET) || took < settingsTimeout || took > most {
				t.Errorf("after %v: %v, want a reset after %v", took, err, settingsTimeout)
			}
			if code := <-code; code != http2.ErrCodeSettingsTimeout {
				t.Errorf("GOAWAY with %v, want SETTINGS_TIMEOUT", code)
			}
			_ = c.Close()
			_ = d.Close()
			_ = far.Close()
		})
	})
}

// TestPausedPeer: a proxy that stands still for ten seconds, or a path that does,
// loses no tunnel that was idle, whenever that begins.
func TestPausedPeer(t *testing.T) {
	for begins := range 12 {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			paused := &pausedConn{Conn: far}
			d := &Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(near)}
			done := make(chan struct{})
			go func() {
				defer close(done)
				_ = new(Protocol).ServeConn(t.Context(), tunnel.NewConn(paused), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
					s, err := req.Accept()
					if err != nil {
						return
					}
					go func() { _, _ = io.Copy(s, s); _ = s.Close() }()
				}))
			}()
			c, err := d.DialContext(t.Context(), "tcp", "svc:1")
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(begins) * time.Second)
			paused.until.Store(time.Now().Add(10 * time.Second).UnixNano())
			time.Sleep(40 * time.Second)
			_ = c.SetDeadline(time.Now().Add(time.Second))
			testnet.Ping(t, c, "still here")
			_ = c.Close()
			_ = d.Close()
			<-done
		})
	}
}

// A pausedConn hands out nothing until a time.
type pausedConn struct {
	net.Conn
	until atomic.Int64
}

func (c *pausedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	time.Sleep(time.Until(time.Unix(0, c.until.Load())))
	return n, err
}

// TestHandshakeDone checks that no request is sent where the end of the handshake is
// refused, and that the connection then serves a dial that may send one.
func TestHandshakeDone(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Protocol{})
	d := newDialer(t, g.Addr)
	d.Idle = time.Minute
	refused := errors.New("refused")
	for range 2 {
		_, err := d.DialContext(tunnel.WithHandshakeDone(t.Context(), func() error { return refused }), "tcp", "svc:1")
		if !errors.Is(err, refused) {
			t.Errorf("got error %v, want %v", err, refused)
		}
	}
	calls := 0
	s, err := d.DialContext(tunnel.WithHandshakeDone(t.Context(), func() error { calls++; return nil }), "tcp", "svc:1")
	if err != nil {
		t.Fatal(err)
	}
	testnet.Ping(t, s, "x")
	_ = s.Close()
	if n := d.Conns(); calls != 1 || n != 1 {
		t.Errorf("%d calls and %d connections, want 1 and 1", calls, n)
	}
	g.Outcome(t)
	if n := len(g.Outcomes()); n != 1 {
		t.Errorf("the proxy saw %d requests, want 1", n)
	}
}
