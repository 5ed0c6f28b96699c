package h3

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/connect/internal/mux"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A script is a stream whose peer sends its bytes, in pieces of a size, and its
// end, and takes everything.
type script struct {
	in    []byte
	size  int
	out   bytes.Buffer
	ended bool
	codes []quic.StreamErrorCode
}

func (s *script) Read(p []byte) (int, error) {
	if len(s.in) == 0 {
		return 0, io.EOF
	}
	n := copy(p, s.in[:min(len(s.in), s.size)])
	s.in = s.in[n:]
	if len(s.in) == 0 {
		return n, io.EOF // as quic-go may
	}
	return n, nil
}

func (s *script) Write(p []byte) (int, error)        { return s.out.Write(p) }
func (s *script) Close() error                       { s.ended = true; return nil }
func (s *script) Peek([]byte) (int, error)           { return 0, nil }
func (s *script) StreamID() quic.StreamID            { return 4 }
func (s *script) Context() context.Context           { return context.Background() }
func (s *script) CancelRead(c quic.StreamErrorCode)  { s.codes = append(s.codes, c) }
func (s *script) CancelWrite(c quic.StreamErrorCode) { s.codes = append(s.codes, c) }
func (s *script) SetReadDeadline(time.Time) error    { return nil }
func (s *script) SetWriteDeadline(time.Time) error   { return nil }

// A fate is all that came of a stream.
type fate struct {
	asked   string // by the request; "" for none
	got     string // in the tunnel
	end     bool   // in order
	status  int    // of the answer
	reasons string // the Server was told

	reset bool
}

// FuzzRequest gives a request stream any bytes: it must come to an end when
// they do, however they are cut, to the same one, without a panic, and be
// counted out.
func FuzzRequest(f *testing.F) {
	seed := func(parts ...[]byte) { f.Add(bytes.Join(parts, nil)) }
	data := func(s string) []byte { return append(appendFrameHead(nil, frameData, uint64(len(s))), s...) }
	seed(headOf(connectSvc...), data("hello"), data(""), data("world"))
	seed(varints(0x21, 2, 1, 2), headOf(connectSvc...), varints(0x4000, 1, 5), data("x"))
	seed(headOf(":method", "GET", ":scheme", "https", ":path", "/", ":authority", "svc"), data("body"))
	seed(headOf(with(":protocol", "websocket", ":scheme", "https", ":path", "/")...))
	seed(headOf(with("proxy-authorization", "Basic YTpi", "via", "3 a, 2 b")...), data("cut")[:3])
	seed(headOf(connectSvc...), headOf("a", "b"))
	seed(varints(frameHeaders, 3), []byte{0, 0, 0x80})
	seed(varints(frameHeaders, 1<<40))
	seed(varints(frameData, 5), []byte("early"))

	addr := serveHandler(f, &Server{}, tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) { req.Refuse(io.EOF) }))
	qc := rawClient(f, addr).qc // any connection will do: nothing is sent on it

	f.Fuzz(func(t *testing.T, input []byte) {
		run := func(size int) fate {
			var is fate
			s := &Server{Observe: func(o *tunnel.Outcome) { is.reasons += string(o.Reason) + " " }}
			h := tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
				is.asked = req.Target()
				if req.Port == 2 {
					req.Refuse(tunnel.Refusef(tunnel.NoRoute, "no"))
					return
				}
				st, err := req.Accept()
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(st)
				is.got, is.end = string(b), err == nil
				_ = st.Close()
			})
			k := &serverConn{s: s, a: &attempt{}, requests: mux.Server{Service: s.service(), Handler: h}}
			k.c = &conn{qc: qc, side: k, err: io.EOF} // fail has been called, and calls no more
			stream := &script{in: bytes.Clone(input), size: size}
			k.serve(context.Background(), stream)
			if k.streams != 0 {
				t.Errorf("%d streams after the end of the only one", k.streams)
			}
			is.reset = !stream.ended
			out := &frameReader{r: &stream.out}
			if kind, err := out.next(); err == nil && kind == frameHeaders {
				section, _ := out.payload()
				r, err := decodeHead(section)
				if err != nil || !r.IsAnswer() {
					t.Errorf("an answer that is none: %x", section)
				} else {
					is.status = r.List.Status
				}
			}
			return is
		}
		var whole fate
		testnet.Bounded(t, 10*len(input)+64<<10, func() { whole = run(len(input) + 1) }) // with what the test takes
		for _, size := range []int{1, 3} {
			if pieces := run(size); pieces != whole {
				t.Errorf("in pieces of %d bytes: %+v, whole: %+v", size, pieces, whole)
			}
		}
		if whole.asked != "" && whole.status == 0 {
			t.Errorf("a request and no answer: %+v", whole)
		}
	})
}

// FuzzControl gives the three streams that a connection lives by any bytes.
func FuzzControl(f *testing.F) {
	for _, kind := range []uint64{streamControl, streamEncoder, streamDecoder} {
		f.Add(append(varints(kind), appendSettings(nil)...))
	}
	f.Add(append(appendSettings(varints(streamControl)), varints(frameGoAway, 1, 4, framePriorityUpdate, 2, 0, 0, 0x21, 3, 1, 2, 3)...))
	f.Add(varints(streamControl, frameSettings, 2, 0x8, 1))
	f.Add([]byte{streamEncoder, 0x20, 0x3f, 0xe1, 0x1f})
	qc := rawClient(f, serveHandler(f, &Server{}, tunnel.HandlerFunc(nil))).qc
	f.Fuzz(func(t *testing.T, input []byte) {
		run := func(size int, side side) *connError {
			c := &conn{qc: qc, side: side, err: io.EOF}
			r := &frameReader{r: &script{in: bytes.Clone(input), size: size}}
			kind, err := r.number()
			if err != nil {
				return nil
			}
			switch kind {
			case streamControl:
				return c.readControl(r)
			case streamEncoder:
				return c.readEncoder(r)
			case streamDecoder:
				return c.readDecoder(r)
			}
			return nil
		}
		for _, side := range []side{&serverConn{}, &client{d: &Dialer{}, firstRejected: -1, stopped: true}} {
			var whole *connError
			testnet.Bounded(t, 10*len(input)+8<<10, func() { whole = run(len(input)+1, side) })
			if c, ok := side.(*client); ok {
				c.firstRejected = -1
			}
			pieces := run(1, side)
			if (whole == nil) != (pieces == nil) || whole != nil && whole.code != pieces.code && whole.code != ExcessiveLoad && pieces.code != ExcessiveLoad {
				t.Errorf("whole: %v, in pieces: %v", whole, pieces)
			}
		}
	})
}

// TestMemoryGrowsAsBytesCome: what a frame's head announces is not believed.
func TestMemoryGrowsAsBytesCome(t *testing.T) {
	f := &frameReader{r: &script{in: append(varints(frameHeaders, maxSection), make([]byte, 100)...), size: 10}}
	if _, err := f.next(); err != nil {
		t.Fatal(err)
	}
	b, err := f.payload()
	if !errors.Is(err, io.ErrUnexpectedEOF) || len(b) != 100 || cap(b) > 2<<10 {
		t.Errorf("%d bytes in %d of memory, %v", len(b), cap(b), err)
	}
	f = &frameReader{r: &script{in: append(varints(frameHeaders, maxSection), make([]byte, maxSection)...), size: 1000}}
	_, _ = f.next()
	if b, err := f.payload(); err != nil || len(b) != maxSection {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}
