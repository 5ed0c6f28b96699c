package h2

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestNegativeWindow: a peer may lower the window of a stream below what it has
// taken already (RFC 9113 section 6.9.2). Whatever makes the writer look at the
// stream then, it sends no byte of data and the connection lives.
func TestNegativeWindow(t *testing.T) {
	type frame struct {
		t    http2.FrameType
		data string
		end  bool
		code http2.ErrCode
	}
	end := frame{t: http2.FrameData, end: true}
	for _, side := range []struct {
		name  string
		open  func(t *testing.T) (*raw, *Stream)
		abort http2.ErrCode // Abort's
		stop  http2.ErrCode // a closed stream's to a peer that is not done
	}{
		{"server", rawToServer, http2.ErrCodeConnect, http2.ErrCodeNo},
		{"dialer", rawToDialer, http2.ErrCodeCancel, http2.ErrCodeCancel},
	} {
		for _, c := range []struct {
			name string
			do   func(r *raw, s *Stream)
			want []frame
		}{
			{"CloseWrite", func(_ *raw, s *Stream) { _ = s.CloseWrite() }, []frame{end}},
			{"Close", func(_ *raw, s *Stream) { _ = s.Close() }, []frame{end, {t: http2.FrameRSTStream, code: side.stop}}},
			{"Close after the peer's end", func(r *raw, s *Stream) {
				_ = r.fr.WriteData(1, true, nil)
				_, _ = io.ReadAll(s)
				_ = s.Close()
			}, []frame{end}},
			{"Abort", func(_ *raw, s *Stream) { _ = s.Abort() }, []frame{{t: http2.FrameRSTStream, code: side.abort}}},
			{"a Write that waits", func(r *raw, s *Stream) {
				go func() { _, _ = s.Write([]byte("more")) }()
				waitPending(t, s)
				_ = r.fr.WriteWindowUpdate(1, 5+2)
			}, []frame{{t: http2.FrameData, data: "mo"}}},
			{"a Write that waits, and CloseWrite", func(r *raw, s *Stream) {
				go func() { _, _ = s.Write([]byte("more")) }()
				waitPending(t, s)
				_ = s.CloseWrite()
				_ = r.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 3})
				_ = r.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 65535})
			}, []frame{{t: http2.FrameData, data: "more", end: true}}},
			{"a Write that waits, and Close", func(_ *raw, s *Stream) {
				go func() { _, _ = s.Write([]byte("more")) }()
				waitPending(t, s)
				_ = s.Close()
			}, []frame{{t: http2.FrameRSTStream, code: http2.ErrCodeCancel}}},
			{"a frame that the stream is reset for", func(r *raw, _ *Stream) { _ = r.fr.WriteWindowUpdate(1, 0) },
				[]frame{{t: http2.FrameRSTStream, code: http2.ErrCodeProtocol}}},
			{"a reset of the peer's", func(r *raw, _ *Stream) { _ = r.fr.WriteRSTStream(1, http2.ErrCodeCancel) }, nil},
		} {
			t.Run(side.name+"/"+c.name, func(t *testing.T) {
				r, s := side.open(t)
				if _, err := s.Write([]byte("hello")); err != nil {
					t.Fatal(err)
				}
				if f, err := r.next(); err != nil || f.Header().Length != 5 {
					t.Fatalf("got %v and %v, want 5 bytes of DATA", f, err)
				}
				_ = r.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
				testnet.Eventually(t, patience, func() bool {
					s.c.mu.Lock()
					defer s.c.mu.Unlock()
					return s.allowed == -5
				}, "the window is negative")
				c.do(r, s)
				for i, want := range c.want {
					f, err := r.next()
					if err != nil {
						t.Fatalf("frame %d: %v", i, err)
					}
					got := frame{t: f.Header().Type}
					switch f := f.(type) {
					case *http2.DataFrame:
						got.data, got.end = string(f.Data()), f.StreamEnded()
					case *http2.RSTStreamFrame:
						got.code = f.ErrCode
					}
					if got != want {
						t.Errorf("frame %d: got %+v, want %+v", i, got, want)
					}
				}
				r.mum = true
				_ = r.fr.WritePing(false, [8]byte{1})
				for {
					f, err := r.fr.ReadFrame()
					if err != nil {
						t.Fatalf("the connection does not live: %v", err)
					}
					if p, ok := f.(*http2.PingFrame); ok && p.IsAck() {
						break
					}
				}
				_ = s.Close()
			})
		}
	}
}

// TestNegativeWindowOfARefusal: the text of a refused answer waits for the
// window as any data does, a negative one too.
func TestNegativeWindowOfARefusal(t *testing.T) {
	g := serve(t, tunneltest.Table{}, &Protocol{})
	r := rawClient(t, g.Addr)
	_ = r.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 5})
	_ = r.connect(1, "nobody:1")
	first := ""
	for first == "" {
		f, err := r.next()
		if err != nil {
			t.Fatal(err)
		}
		if d, ok := f.(*http2.DataFrame); ok {
			first = string(d.Data())
		}
	}
	_ = r.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	_ = r.fr.WriteWindowUpdate(1, 3)
	_ = r.fr.WriteWindowUpdate(1, 2)
	_ = r.fr.WriteWindowUpdate(1, 1000)
	if a := r.answer(1); len(first) != 5 || !strings.HasPrefix(first+a.body, "culvert: "+string(tunnel.NoRoute)) || a.reset != none {
		t.Errorf("got %q and then %+v", first, a)
	}
}

func waitPending(t *testing.T, s *Stream) {
	testnet.Eventually(t, patience, func() bool {
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		return len(s.pending) > 0 && !s.listed
	}, "the Write waits for the window")
}

// rawToServer returns a client and the server's end of its stream 1.
func rawToServer(t *testing.T) (*raw, *Stream) {
	ln := testnet.Listen(t)
	accepted := make(chan *Stream, 1)
	backendServe(t, ln, &Protocol{}, tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		s, err := req.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		accepted <- s.(*Stream)
	}))
	r := rawClient(t, ln.Addr().String())
	_ = r.connect(1, "svc:1")
	if a := r.answer(1); a.status != "200" {
		t.Fatalf("got %+v", a)
	}
	return r, <-accepted
}

// rawToDialer returns a server and the Dialer's end of its stream 1.
func rawToDialer(t *testing.T) (*raw, *Stream) {
	ln := testnet.Listen(t)
	served := make(chan *raw, 1)
	go func() {
		nc, err := ln.Accept()
		if err != nil {
			close(served)
			return
		}
		r := newRaw(t, nc)
		_, _ = io.ReadFull(nc, make([]byte, len(preface)))
		_ = r.fr.WriteSettings()
		for {
			f, err := r.next()
			if err != nil {
				close(served)
				_ = nc.Close()
				return
			}
			if f.Header().Type == http2.FrameHeaders {
				break
			}
		}
		_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: fieldList(":status", "200"), EndHeaders: true})
		served <- r
	}()
	d := &Dialer{Proxy: ln.Addr().String(), Idle: time.Minute}
	t.Cleanup(func() { _ = d.Close() })
	s := open(t, d, "svc:1")
	r := <-served
	if r == nil {
		t.Fatal("no request came")
	}
	t.Cleanup(func() { _ = net.Conn(r).Close() })
	return r, s
}
