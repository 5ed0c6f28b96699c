package h2

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"golang.org/x/net/http2"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

var connectSvc = []string{":method", "CONNECT", ":authority", "svc:1"}

// TestEveryRefusal: each Reason has its answer, and ends its stream.
func TestEveryRefusal(t *testing.T) {
	near, far := net.Pipe()
	why := make(chan tunnel.Reason, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = new(Protocol).ServeConn(t.Context(), tunnel.NewConn(far), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			req.Refuse(tunnel.Refusef(<-why, "refused to see what happens"))
		}))
	}()
	defer func() { _ = near.Close(); <-done }()
	r := newRaw(t, near)
	_, _ = io.WriteString(near, preface)
	_ = r.fr.WriteSettings()
	for i, reason := range tunnel.Reasons() {
		id := uint32(2*i + 1)
		why <- reason
		_ = r.connect(id, "svc:1")
		a, want := r.answer(id), connect.Answer(nil, tunnel.Refusef(reason, ""))
		status, _ := a.fields.Get("proxy-status")
		if a.status != fmt.Sprint(want.Status) || status != fmt.Sprintf("culvert; error=%s; details=%q", want.Error, want.Reason) {
			t.Errorf("%s: got %+v, want %+v", reason, a, want)
		}
	}
}

// TestBadConnections is the second table of docs/internals/protocols/connect-h2.md: what
// ends the connection, with GOAWAY and its code.
func TestBadConnections(t *testing.T) {
	to := testnet.Echo(t).Addr()
	list := fieldList(connectSvc...)
	for _, c := range []struct {
		name   string
		send   func(r *raw)
		code   http2.ErrCode
		reason tunnel.Reason
	}{
		{"DATA on stream 0", func(r *raw) { _ = r.fr.WriteData(0, false, []byte("x")) }, http2.ErrCodeProtocol, tunnel.BadRequest},
		{"DATA on a stream never opened", func(r *raw) { _ = r.fr.WriteData(9, false, []byte("x")) }, http2.ErrCodeProtocol, tunnel.BadRequest},
		{"RST_STREAM on a stream never opened", func(r *raw) { _ = r.fr.WriteRSTStream(9, http2.ErrCodeCancel) }, http2.ErrCodeProtocol, tunnel.BadRequest},
		{"WINDOW_UPDATE on a stream never opened", func(r *raw) { _ = r.fr.WriteWindowUpdate(9, 1) }, http2.ErrCodeProtocol, tunnel.BadRequest},
		{"even stream", func(r *raw) { _ = r.connect(2, "svc:1") }, http2.ErrCodeProtocol, tunnel.BadRequest},
		{"stream opened twice", func(r *raw) {
			_ = r.connect(1, "svc:1")
			r.answer(1)
			_ = r.fr.WriteRSTStream(1, http2.ErrCodeCancel)
			_ = r.connect(1, "svc:1")
		}, http2.ErrCodeStreamClosed, tunnel.BadRequest},
		{"stream number that falls", func(r *raw) { _ = r.connect(5, "svc:1"); _ = r.connect(3, "svc:1") }, http2.ErrCodeStreamClosed, tunnel.BadRequest},
		{"PUSH_PROMISE", func(r *raw) {
			_ = r.fr.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, BlockFragment: list, EndHeaders: true})
		}, http2.ErrCodeProtocol, tunnel.BadRequest},
		{"frame over 16 KiB", func(r *raw) { _ = r.fr.WriteRawFrame(http2.FrameData, 0, 1, make([]byte, maxFrame+1)) }, http2.ErrCodeFrameSize, tunnel.BadRequest},
		{"more padding than frame", func(r *raw) {
			_ = r.connect(1, "svc:1")
			_ = r.fr.WriteRawFrame(http2.FrameData, http2.FlagDataPadded, 1, []byte{9, 1})
		}, http2.ErrCodeProtocol, tunnel.BadRequest},
		{"padded and empty", func(r *raw) {
			_ = r.connect(1, "svc:1")
			_ = r.fr.WriteRawFrame(http2.FrameData, http2.FlagDataPadded, 1, nil)
		}, http2.ErrCodeFrameSize, tunnel.BadRequest},
		{"window over 2^31-1", func(r *raw) { _ = r.fr.WriteWindowUpdate(0, 1<<31-1) }, http2.ErrCodeFlowControl, tunnel.BadRequest},
		{"window update of 0", func(r *raw) { _ = r.fr.WriteWindowUpdate(0, 0) }, http2.ErrCodeProtocol, tunnel.BadRequest},
		{"initial window over 2^31-1", func(r *raw) {
			_ = r.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 31})
		}, http2.ErrCodeFlowControl, tunnel.BadRequest},
		{"max frame size of 1", func(r *raw) { _ = r.fr.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1}) }, http2.ErrCodeProtocol, tunnel.BadRequest},
		{"SETTINGS of 5 bytes", func(r *raw) { _ = r.fr.WriteRawFrame(http2.FrameSettings, 0, 0, make([]byte, 5)) }, http2.ErrCodeFrameSize, tunnel.BadRequest},
		{"PING of 7 bytes", func(r *raw) { _ = r.fr.WriteRawFrame(http2.FramePing, 0, 0, make([]byte, 7)) }, http2.ErrCodeFrameSize, tunnel.BadRequest},
		{"CONTINUATION without HEADERS", func(r *raw) { _ = r.fr.WriteContinuation(1, true, list) }, http2.ErrCodeProtocol, tunnel.BadRequest},
		{"PING inside of a header block", func(r *raw) {
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: list})
			_ = r.fr.WritePing(false, [8]byte{})
		}, http2.ErrCodeProtocol, tunnel.BadRequest},
		{"HPACK that can't be read", func(r *raw) {
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0x80}, EndHeaders: true})
		}, http2.ErrCodeCompression, tunnel.BadRequest},
		{"HPACK cut short", func(r *raw) {
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: list[:len(list)-1], EndHeaders: true})
		}, http2.ErrCodeCompression, tunnel.BadRequest},
		{"header block over 32 KiB", func(r *raw) {
			b := fillerBlock(40 << 10)
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: b[:maxFrame]})
			for b = b[maxFrame:]; len(b) > 0; {
				n := min(len(b), maxFrame)
				_ = r.fr.WriteContinuation(1, n == len(b), b[:n])
				b = b[n:]
			}
		}, http2.ErrCodeEnhanceYourCalm, tunnel.TooLarge},
		{"header block in 17 frames", func(r *raw) {
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: list})
			for range 16 {
				_ = r.fr.WriteContinuation(1, false, []byte{0x82})
			}
		}, http2.ErrCodeEnhanceYourCalm, tunnel.TooLarge},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := serve(t, tunneltest.Table{"svc:1": to}, &Protocol{})
			r := rawClient(t, g.Addr)
			c.send(r)
			if a := r.answer(0); a.goAway != c.code || !a.closed {
				t.Errorf("got GOAWAY with %v, closed %v; want %v and a close", a.goAway, a.closed, c.code)
			}
			_ = r.Close()
			o := g.Find(t, "of the connection", func(o *tunnel.Outcome) bool { return o.Reason == c.reason })
			if o.Proto != "connect-h2" {
				t.Errorf("outcome of %q", o.Proto)
			}
		})
	}
}

// TestBadBeginnings has what is no HTTP/2 at all, at a port of its own.
func TestBadBeginnings(t *testing.T) {
	for _, c := range []struct {
		name, send string
		code       http2.ErrCode
		reason     tunnel.Reason
	}{
		{"HTTP/1", "CONNECT svc:1 HTTP/1.1\r\nHost: svc:1\r\n\r\n", http2.ErrCodeProtocol, tunnel.BadPreamble},
		{"preface with another end", "PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", http2.ErrCodeProtocol, tunnel.BadPreamble},
		{"PING first", preface + "\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678", http2.ErrCodeProtocol, tunnel.BadRequest},
		{"SETTINGS acknowledged first", preface + "\x00\x00\x00\x04\x01\x00\x00\x00\x00", http2.ErrCodeProtocol, tunnel.BadRequest},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := serve(t, tunneltest.Table{}, &Protocol{})
			conn, err := net.Dial("tcp", g.Addr)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			r := newRaw(t, conn)
			_, _ = io.WriteString(conn, c.send)
			if a := r.answer(0); a.goAway != c.code || !a.closed {
				t.Errorf("got %+v, want GOAWAY with %v and a close", a, c.code)
			}
			_ = conn.Close()
			g.Reason(t, c.reason)
		})
	}
}

// TestBadStreams has what ends a tunnel that stands, and nothing else.
func TestBadStreams(t *testing.T) {
	hold := make(chan struct{})
	to := testnet.Service(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c); <-hold })
	t.Cleanup(func() { close(hold) })
	for _, c := range []struct {
		name string
		send func(r *raw)
		code http2.ErrCode
	}{
		{"DATA after END_STREAM", func(r *raw) {
			_ = r.fr.WriteData(1, true, nil)
			_ = r.fr.WriteData(1, false, []byte("x"))
		}, http2.ErrCodeStreamClosed},
		{"HEADERS after END_STREAM", func(r *raw) {
			_ = r.fr.WriteData(1, true, nil)
			_ = r.connect(1, "svc:1")
		}, http2.ErrCodeStreamClosed},
		{"HEADERS in a tunnel", func(r *raw) { _ = r.request(1, true, "a", "b") }, http2.ErrCodeProtocol},
		{"more DATA than the window", func(r *raw) {
			for range 5 + maxWindow/maxFrame {
				_ = r.fr.WriteData(1, false, make([]byte, maxFrame))
			}
		}, http2.ErrCodeFlowControl},
		{"window over 2^31-1", func(r *raw) { _ = r.fr.WriteWindowUpdate(1, 1<<31-1) }, http2.ErrCodeFlowControl},
		{"window update of 0", func(r *raw) { _ = r.fr.WriteWindowUpdate(1, 0) }, http2.ErrCodeProtocol},
		{"stream that depends on itself", func(r *raw) {
			_ = r.fr.WritePriority(1, http2.PriorityParam{StreamDep: 1})
		}, http2.ErrCodeProtocol},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := tunnel.HandlerFunc(nil)
			addr := ""
			if c.code == http2.ErrCodeFlowControl && strings.HasPrefix(c.name, "more") {
				// A tunnel that nobody reads: its window stays as it is.
				h = func(_ context.Context, req *tunnel.Request) { _, _ = req.Accept() }
				ln := testnet.Listen(t)
				backendServe(t, ln, &Protocol{}, h)
				addr = ln.Addr().String()
			} else {
				addr = serve(t, tunneltest.Table{"svc:1": to}, &Protocol{}).Addr
			}
			r := rawClient(t, addr)
			_ = r.connect(1, "svc:1")
			if a := r.answer(1); a.status != "200" {
				t.Fatalf("got %+v", a)
			}
			r.mum = true
			go c.send(r)
			if a := r.answer(1); a.reset != c.code {
				t.Errorf("got %+v, want a reset with %v", a, c.code)
			}
		})
	}
}

// TestBytesAfterARefusal is must-never N30: what follows a refused head is no
// request.
func TestBytesAfterARefusal(t *testing.T) {
	g := serve(t, tunneltest.Table{}, &Protocol{})
	r := rawClient(t, g.Addr)
	_ = r.connect(1, "nobody:1")
	_ = r.fr.WriteData(1, false, bytes.Repeat([]byte("CONNECT svc:1 HTTP/1.1\r\nHost: svc:1\r\n\r\n"), 10))
	if a := r.answer(1); a.status != "403" {
		t.Errorf("got %+v, want 403", a)
	}
	if a := r.answer(1); a.reset != http2.ErrCodeNo {
		t.Errorf("after the refusal: got %+v, want a reset with NO_ERROR, for the client to stop", a)
	}
	_ = r.connect(3, "nobody:1")
	if a := r.answer(3); a.status != "403" {
		t.Errorf("got %+v, want 403", a)
	}
}
