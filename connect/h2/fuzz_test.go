package h2

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// FuzzServer gives a server any bytes behind the preface: it must come to an
// end when they do, without a panic, and hold no stream.
func FuzzServer(f *testing.F) {
	seed := func(say func(fr *http2.Framer)) {
		var b bytes.Buffer
		fr := http2.NewFramer(&b, nil)
		fr.AllowIllegalWrites = true
		_ = fr.WriteSettings()
		say(fr)
		f.Add(b.Bytes())
	}
	connect := func(fr *http2.Framer, id uint32, end bool) {
		_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fieldList(connectSvc...), EndHeaders: true, EndStream: end})
	}
	seed(func(*http2.Framer) {})
	seed(func(fr *http2.Framer) { connect(fr, 1, false); _ = fr.WriteData(1, false, []byte("hello")) })
	seed(func(fr *http2.Framer) { connect(fr, 1, true); connect(fr, 3, false); _ = fr.WriteRSTStream(3, 8) })
	seed(func(fr *http2.Framer) {
		_ = fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1})
		connect(fr, 1, false)
		_ = fr.WriteWindowUpdate(1, 100)
		_ = fr.WriteDataPadded(1, true, []byte("hello"), make([]byte, 10))
	})
	seed(func(fr *http2.Framer) {
		b := fieldList(":method", "GET", ":scheme", "http", ":path", "/", "content-length", "3")
		_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: b[:5]})
		_ = fr.WriteContinuation(1, true, b[5:])
		_ = fr.WriteData(1, true, []byte("abc"))
		_ = fr.WriteGoAway(0, 0, nil)
		_ = fr.WritePing(false, [8]byte{})
		_ = fr.WritePriority(3, http2.PriorityParam{StreamDep: 1})
	})
	serve := func(t *testing.T, input []byte) {
		p := &Protocol{}
		c := &script{in: bytes.NewReader(append([]byte(preface), input...))}
		h := tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			if req.Port == 2 {
				req.Refuse(tunnel.Refusef(tunnel.NoRoute, "no"))
				return
			}
			s, err := req.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(s, s)
				_ = s.Close()
			}()
		})
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = p.ServeConn(t.Context(), tunnel.NewConn(c), h)
		}()
		select {
		case <-done:
		case <-time.After(patience):
			t.Fatal("ServeConn does not return")
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.conns) != 0 {
			t.Error("the connection is still listed")
		}
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		// A request is a few bytes and gets a stream and a Handler, which take
		// more than ten times its size. The limit of streams bounds them.
		testnet.Bounded(t, 1000*len(input)+256<<10, func() { serve(t, input) })
	})
}

// FuzzClient has a server answer a Dialer's request with any bytes: the dial comes
// to an end, and with the bytes its stream does.
func FuzzClient(f *testing.F) {
	seed := func(say func(fr *http2.Framer)) {
		var b bytes.Buffer
		fr := http2.NewFramer(&b, nil)
		fr.AllowIllegalWrites = true
		_ = fr.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 10})
		say(fr)
		f.Add(b.Bytes())
	}
	answer := func(fr *http2.Framer, end bool, fields ...string) {
		_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: fieldList(fields...), EndHeaders: true, EndStream: end})
	}
	seed(func(fr *http2.Framer) {
		answer(fr, false, ":status", "200")
		_ = fr.WriteData(1, false, []byte("hello"))
		_ = fr.WriteData(1, true, nil)
	})
	seed(func(fr *http2.Framer) {
		answer(fr, false, ":status", "103")
		answer(fr, false, ":status", "404", "proxy-status", "gw; error=destination_not_found")
		_ = fr.WriteDataPadded(1, true, []byte("no-route: no\n"), make([]byte, 3))
		_ = fr.WriteRSTStream(1, http2.ErrCodeNo)
	})
	seed(func(fr *http2.Framer) {
		answer(fr, true, ":status", "407")
		_ = fr.WriteRSTStream(1, http2.ErrCodeCancel)
	})
	seed(func(fr *http2.Framer) { _ = fr.WriteRSTStream(1, http2.ErrCodeRefusedStream) })
	seed(func(fr *http2.Framer) { _ = fr.WriteGoAway(0, http2.ErrCodeEnhanceYourCalm, []byte("calm")) })
	seed(func(fr *http2.Framer) {
		answer(fr, false, ":status", "200")
		_ = fr.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, BlockFragment: fieldList(connectSvc...), EndHeaders: true})
	})
	dial := func(t *testing.T, input []byte) {
		c := &answering{script: script{in: bytes.NewReader(input)}, asked: make(chan struct{})}
		d := &Dialer{Proxy: "proxy:443", Dialer: c, Wait: patience, Parallel: 1}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		s, err := d.DialContext(ctx, "tcp", "svc:1")
		if err == nil {
			_ = s.SetDeadline(time.Now().Add(patience))
			if _, err := io.Copy(io.Discard, s); err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the stream has no end")
			}
			_ = s.Close()
		} else if ctx.Err() != nil || errors.Is(err, answerTimeoutError{}) {
			t.Errorf("the dial has no end: %v", err)
		}
		_ = d.Close()
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		testnet.Bounded(t, 1000*len(input)+512<<10, func() { dial(t, input) })
	})
}

// An answering is a script that says nothing before it has been asked. It is
// the way there, too, once: each further connection is cut off at once.
type answering struct {
	script
	sent  []byte
	asked chan struct{}
	mu    sync.Mutex
	open  bool // asked is closed
	used  bool
}

func (a *answering) DialContext(context.Context, string, string) (net.Conn, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.used {
		return nil, net.ErrClosed
	}
	a.used = true
	return a, nil
}

func (a *answering) Read(p []byte) (int, error) {
	<-a.asked
	return a.script.Read(p)
}

func (a *answering) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.say()
	return nil
}

// say lets the answer come. The caller holds mu.
func (a *answering) say() {
	if !a.open {
		a.open = true
		close(a.asked)
	}
}

func (a *answering) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sent = append(a.sent, p...)
	for rest := bytes.TrimPrefix(a.sent, []byte(preface)); len(rest) >= 9; {
		size := int(rest[0])<<16 | int(rest[1])<<8 | int(rest[2])
		if http2.FrameType(rest[3]) == http2.FrameHeaders {
			a.say()
		}
		rest = rest[min(9+size, len(rest)):]
	}
	return len(p), nil
}

// A script is a connection whose peer sends its bytes, takes everything and
// is gone.
type script struct{ in io.Reader }

func (s *script) Read(p []byte) (int, error)       { return s.in.Read(p) }
func (s *script) Write(p []byte) (int, error)      { return len(p), nil }
func (s *script) Close() error                     { return nil }
func (s *script) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (s *script) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }
