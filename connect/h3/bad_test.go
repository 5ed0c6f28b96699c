package h3

import (
	"context"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

var connectSvc = []string{":method", "CONNECT", ":authority", "svc:1"}

func with(more ...string) []string { return append(append([]string(nil), connectSvc...), more...) }

// TestEveryRefusal: each Reason has its answer.
func TestEveryRefusal(t *testing.T) {
	why := make(chan tunnel.Reason, 1)
	addr := serveHandler(t, &Server{}, tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		req.Refuse(tunnel.Refusef(<-why, "refused to see what happens"))
	}))
	r := rawClient(t, addr)
	for _, reason := range tunnel.Reasons() {
		why <- reason
		a := r.request(connectSvc...).answer()
		if want := connect.Answer(nil, tunnel.Refusef(reason, "")).Status; a.status != want || !a.end {
			t.Errorf("%s: got %+v, want status %d and the end", reason, a, want)
		}
	}
}

// TestRequestsInPieces: a request is the same however it is cut, what follows
// it is kept, no prefix of it is one, and its end comes too early anywhere.
func TestRequestsInPieces(t *testing.T) {
	type asked struct {
		target string
		first  string
	}
	got := make(chan asked, 1)
	g := tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		s, err := req.Accept()
		if err != nil {
			return
		}
		b := make([]byte, 5)
		_, _ = io.ReadFull(s, b)
		got <- asked{req.Target(), string(b)}
		_ = s.Close()
	})
	var told []tunnel.Reason
	tell := make(chan tunnel.Reason, 1)
	addr := serveHandler(t, &Server{Observe: func(o *tunnel.Outcome) { tell <- o.Reason }}, g)
	// With frames of an extension before and behind.
	whole := append(appendFrameHead(nil, 0x21, 3), "abc"...)
	whole = append(whole, headOf(":method", "CONNECT", ":authority", "Xyz.example:443")...)
	head := len(whole)
	whole = append(whole, append(appendFrameHead(nil, 0x40, 2), "xx"...)...)
	whole = append(whole, append(appendFrameHead(nil, frameData, 2), "ea"...)...)
	whole = append(whole, append(appendFrameHead(nil, frameData, 3), "rly"...)...)
	r := rawClient(t, addr)
	for _, size := range []int{1, 2, 3, 7, len(whole)} {
		s := r.open(nil)
		for b := whole; len(b) > 0; b = b[min(size, len(b)):] {
			_, _ = s.qs.Write(b[:min(size, len(b))])
			if size < 7 {
				runtime.Gosched() // most go in packets of their own
			}
		}
		if a := <-got; a != (asked{"xyz.example:443", "early"}) {
			t.Errorf("in pieces of %d bytes: got %+v", size, a)
		}
		s.reset(RequestCancelled)
	}
	for n := range head {
		r := rawClient(t, addr)
		s := r.open(whole[:n])
		_ = s.qs.Close()
		want := FrameError
		if n == 0 || n == 5 { // between frames
			if a := s.answer(); a.reset != RequestIncomplete {
				t.Errorf("ended after %d bytes: got %+v, want H3_REQUEST_INCOMPLETE", n, a)
			}
			want = 0
		}
		if want != 0 {
			if code := r.ended(); code != want {
				t.Errorf("ended after %d bytes: got %v, want %v", n, code, want)
			}
		}
		told = append(told, <-tell)
		_ = r.qc.CloseWithError(0, "")
	}
	for n, reason := range told {
		if want := map[bool]tunnel.Reason{true: tunnel.Gone, false: tunnel.BadRequest}[n == 0 || n == 5]; reason != want {
			t.Errorf("ended after %d bytes: told of %s, want %s", n, reason, want)
		}
	}
}

// TestBadConnections is the second table of docs/internals/protocols/connect-h3.md: what
// ends the connection, with its code.
func TestBadConnections(t *testing.T) {
	control := func(frames ...byte) func(r *raw) {
		return func(r *raw) { r.uni(append(appendSettings([]byte{streamControl}), frames...)) }
	}
	uni := func(b ...byte) func(r *raw) { return func(r *raw) { r.uni(b) } }
	first := func(b ...byte) func(r *raw) { return func(r *raw) { r.begin(); r.open(b) } }
	inTunnel := func(b ...byte) func(r *raw) {
		return func(r *raw) {
			s := r.request(connectSvc...)
			if a := s.answer(); a.status != 200 {
				r.t.Fatalf("got %+v", a)
			}
			_, _ = s.qs.Write(b)
		}
	}
	for _, c := range []struct {
		name   string
		send   func(r *raw)
		code   ErrCode
		reason tunnel.Reason
	}{
		{"control stream without SETTINGS", uni(varints(streamControl, frameGoAway, 1, 0)...), MissingSettings, tunnel.BadRequest},
		{"SETTINGS twice", control(appendSettings(nil)...), FrameUnexpected, tunnel.BadRequest},
		{"DATA on the control stream", control(varints(frameData, 0)...), FrameUnexpected, tunnel.BadRequest},
		{"HEADERS on the control stream", control(varints(frameHeaders, 0)...), FrameUnexpected, tunnel.BadRequest},
		{"PUSH_PROMISE on the control stream", control(varints(framePushPromise, 0)...), FrameUnexpected, tunnel.BadRequest},
		{"a frame of HTTP/2 on the control stream", control(varints(0x6, 0)...), FrameUnexpected, tunnel.BadRequest},
		{"a setting twice", uni(varints(streamControl, frameSettings, 4, 0x21, 1, 0x21, 1)...), SettingsError, tunnel.BadRequest},
		{"a setting of HTTP/2", uni(varints(streamControl, frameSettings, 2, 0x4, 1)...), SettingsError, tunnel.BadRequest},
		{"a setting out of its range", uni(varints(streamControl, frameSettings, 2, 0x8, 2)...), SettingsError, tunnel.BadRequest},
		{"SETTINGS cut short", uni(varints(streamControl, frameSettings, 1, 0x21)...), FrameError, tunnel.BadRequest},
		{"SETTINGS over 4 KiB", uni(varints(streamControl, frameSettings, 5000)...), ExcessiveLoad, tunnel.TooLarge},
		{"frame over 4 KiB on the control stream", control(varints(0x21, 5000)...), ExcessiveLoad, tunnel.TooLarge},
		{"GOAWAY that is no number", control(varints(frameGoAway, 2, 0, 0)...), FrameError, tunnel.BadRequest},
		{"CANCEL_PUSH", control(varints(frameCancelPush, 1, 0)...), IDError, tunnel.BadRequest},
		{"priority of a push", control(varints(framePriorityPush, 1, 0)...), IDError, tunnel.BadRequest},
		{"second control stream", func(r *raw) { r.begin(); r.begin() }, StreamCreation, tunnel.BadRequest},
		{"second encoder stream", func(r *raw) { r.uni(varints(streamEncoder)); r.uni(varints(streamEncoder)) }, StreamCreation, tunnel.BadRequest},
		{"push stream", uni(varints(streamPush, 0)...), StreamCreation, tunnel.BadRequest},
		{"end of the control stream", func(r *raw) { _ = r.begin().Close() }, ClosedCritical, tunnel.BadRequest},
		{"reset of the control stream", func(r *raw) {
			for began := time.Now(); time.Since(began) < testTimeout; {
				s := r.begin()
				r.request(connectSvc...).answer() // by then it has been read, as a rule
				s.CancelWrite(0)
				select {
				case <-r.qc.Context().Done():
					return
				case <-time.After(time.Second): // nobody knew yet which stream it was: it is begun again
				}
			}
			r.t.Fatal("the server does not mind that the control stream is reset")
		}, ClosedCritical, tunnel.BadRequest},
		{"end of the control stream inside of a frame", func(r *raw) { _ = r.uni(varints(streamControl, frameSettings, 2)).Close() }, FrameError, tunnel.BadRequest},
		{"end of the decoder stream", func(r *raw) { _ = r.uni(varints(streamDecoder)).Close() }, ClosedCritical, tunnel.BadRequest},
		{"entry for the dynamic table", uni(append(varints(streamEncoder), 0x20, 0x41, 'a', 1, 'b')...), EncoderStream, tunnel.BadRequest},
		{"DATA before HEADERS", first(varints(frameData, 0)...), FrameUnexpected, tunnel.BadRequest},
		{"SETTINGS before HEADERS", first(appendSettings(nil)...), FrameUnexpected, tunnel.BadRequest},
		{"a frame of HTTP/2 before HEADERS", first(varints(0x9, 0)...), FrameUnexpected, tunnel.BadRequest},
		{"QPACK with the dynamic table", first(append(varints(frameHeaders, 3), 0, 0, 0x80)...), DecompressionFailed, tunnel.BadRequest},
		{"QPACK that waits for the dynamic table", first(append(varints(frameHeaders, 3), 1, 0, 0xd1)...), DecompressionFailed, tunnel.BadRequest},
		{"QPACK cut short", first(append(varints(frameHeaders, 4), 0, 0, 0x5f, 0x1d)...), DecompressionFailed, tunnel.BadRequest},
		{"QPACK without a field", first(append(varints(frameHeaders, 1), 0)...), DecompressionFailed, tunnel.BadRequest},
		{"HEADERS in a tunnel", inTunnel(headOf("a", "b")...), FrameUnexpected, tunnel.BadRequest},
		{"a frame of HTTP/2 in a tunnel", inTunnel(varints(0x2, 0)...), FrameUnexpected, tunnel.BadRequest},
		{"end of a tunnel inside of a frame", func(r *raw) {
			s := r.request(connectSvc...)
			s.answer()
			_, _ = s.qs.Write(append(appendFrameHead(nil, frameData, 5), "cut"...))
			_ = s.qs.Close()
		}, FrameError, tunnel.BadRequest},
	} {
		t.Run(c.name, func(t *testing.T) {
			how := make(chan error, 1)
			to := testnet.Service(t, func(c net.Conn) {
				_, err := io.Copy(io.Discard, c)
				how <- err
			})
			g := serve(t, tunneltest.Table{"svc:1": to}, &Server{})
			r := rawClient(t, g.addr)
			c.send(r)
			if code := r.ended(); code != c.code {
				t.Errorf("the connection ended with %v, want %v", code, c.code)
			}
			o := g.Find(t, "of the connection", func(o *tunnel.Outcome) bool { return o.Reason == c.reason })
			if o.Proto != "connect-h3" {
				t.Errorf("outcome of %q", o.Proto)
			}
			if strings.Contains(c.name, "tunnel") {
				select {
				case err := <-how:
					if testnet.EndingOf(orEOF(err)) != testnet.RST {
						t.Errorf("the service saw %v, want a reset", err)
					}
				case <-time.After(testTimeout):
					t.Error("the service saw no end of the tunnel")
				}
			}
		})
	}
}

// orEOF gives the end that io.Copy hides its error again.
func orEOF(err error) error {
	if err == nil {
		return io.EOF
	}
	return err
}

// TestWhatIsIgnored: RFC 9114 has extensions be nothing, and a peer may have a
// dynamic table of its own.
func TestWhatIsIgnored(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{})
	r := rawClient(t, g.addr)
	r.uni(append(appendSettings([]byte{streamControl}), varints(0x21, 1, 0, frameGoAway, 1, 0, frameMaxPushID, 1, 7, framePriorityUpdate, 1, 0)...))
	r.uni(append(varints(streamEncoder), 0x20))
	r.uni(append(varints(streamDecoder), 0x40, 0x44))
	r.uni(varints(0x21, 1, 2, 3))
	_ = r.uni(nil).Close()
	s := r.open(append(varints(0x21, 0), headOf(connectSvc...)...))
	if a := s.answer(); a.status != 200 {
		t.Fatalf("got %+v", a)
	}
	_, _ = s.qs.Write(append(varints(0x21, 300), make([]byte, 300)...))
	_, _ = s.qs.Write(varints(frameData, 0))
	s.data("hello")
	typ, err := s.in.next()
	if err != nil || typ != frameData {
		t.Fatalf("got a frame of type %#x and %v", typ, err)
	}
	if b, err := s.in.payload(); string(b) != "hello" {
		t.Errorf("got %q and %v back", b, err)
	}
}

// TestBytesAfterARefusal is must-never N30: what follows a refused head is no
// request.
func TestBytesAfterARefusal(t *testing.T) {
	g := serve(t, tunneltest.Table{}, &Server{})
	r := rawClient(t, g.addr)
	s := r.open(append(headOf(":method", "CONNECT", ":authority", "nobody:1"), headOf(connectSvc...)...))
	s.data(strings.Repeat("CONNECT svc:1 HTTP/1.1\r\nHost: svc:1\r\n\r\n", 10))
	if a := s.answer(); a.status != 403 || !a.end {
		t.Errorf("got %+v, want 403", a)
	}
	testnet.Eventually(t, testTimeout, func() bool { _, err := s.qs.Write(make([]byte, 1000)); return err != nil }, "the client is told to stop")
	if a := r.request(":method", "CONNECT", ":authority", "nobody:1").answer(); a.status != 403 {
		t.Errorf("got %+v, want 403", a)
	}
	testnet.Eventually(t, testTimeout, func() bool { return len(g.Outcomes()) == 2 }, "both are told of")
}

// TestServerTimes has the time limits of a server's connection.
func TestServerTimes(t *testing.T) {
	t.Parallel()
	t.Run("no request", func(t *testing.T) {
		t.Parallel()
		g := serve(t, tunneltest.Table{}, &Server{Limits: tunnel.Limits{FirstByteTimeout: 50 * time.Millisecond, ConnectionRatePerClient: -1}})
		r := rawClient(t, g.addr)
		r.begin()
		if code := r.ended(); code != NoError {
			t.Errorf("got %v, want %v", code, NoError)
		}
		g.Reason(t, tunnel.HelloTimeout)
	})
	t.Run("no tunnel for long", func(t *testing.T) {
		t.Parallel()
		g := serve(t, tunneltest.Table{}, &Server{Idle: time.Second}) // there is time for a request
		r := rawClient(t, g.addr)
		r.request(":method", "CONNECT", ":authority", "nobody:1").answer()
		if code := r.ended(); code != NoError {
			t.Errorf("got %v, want %v", code, NoError)
		}
	})
	t.Run("a head that is not complete", func(t *testing.T) {
		t.Parallel()
		g := serve(t, tunneltest.Table{}, &Server{})
		r := rawClient(t, g.addr)
		b := headOf(connectSvc...)
		start := time.Now()
		a := r.open(b[:len(b)-1]).answer()
		if took := time.Since(start); a.status != 408 || took < headTimeout || took > headTimeout+testTimeout/2 {
			t.Errorf("after %v: got %+v, want 408", took, a)
		}
		g.Reason(t, tunnel.HelloTimeout)
	})
}
