package h2

import (
	"bytes"
	"context"
	"io"
	"net"
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
		// A request is a few bytes and has a stream and a Handler: promise P17's
		// ten times are not to be had. The limit of streams holds what stays.
		testnet.Bounded(t, 1000*len(input)+256<<10, func() { serve(t, input) })
	})
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
