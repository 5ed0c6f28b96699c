package h2

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"culvert.dev/connect"
)

// A raw is a peer that says what it likes.
type raw struct {
	net.Conn
	t   testing.TB
	fr  *http2.Framer
	dec *hpack.Decoder
	mum bool // answers nothing by itself: somebody else writes
}

// rawClient connects to addr and says the preface and its settings.
func rawClient(t testing.TB, addr string) *raw {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	r := newRaw(t, c)
	_, _ = io.WriteString(c, preface)
	_ = r.fr.WriteSettings()
	return r
}

func newRaw(t testing.TB, c net.Conn) *raw {
	_ = c.SetDeadline(time.Now().Add(patience))
	r := &raw{Conn: c, t: t, fr: http2.NewFramer(c, c), dec: hpack.NewDecoder(4096, nil)}
	r.fr.AllowIllegalWrites = true
	return r
}

// request sends a header list on stream id.
func (r *raw) request(id uint32, end bool, pairs ...string) error {
	return r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fieldList(pairs...), EndHeaders: true, EndStream: end})
}

// connect asks for a tunnel on stream id.
func (r *raw) connect(id uint32, authority string, more ...string) error {
	return r.request(id, false, append([]string{":method", "CONNECT", ":authority", authority}, more...)...)
}

// next returns the next frame that is none of the connection's routine.
func (r *raw) next() (http2.Frame, error) {
	for {
		f, err := r.fr.ReadFrame()
		if err != nil {
			return nil, err
		}
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() && !r.mum {
				_ = r.fr.WriteSettingsAck()
			}
		case *http2.WindowUpdateFrame:
		case *http2.PingFrame:
			if !f.IsAck() && !r.mum {
				_ = r.fr.WritePing(true, f.Data)
			}
		default:
			return f, nil
		}
	}
}

// An answer is what came on a stream until it ended, or until the 200.
type answer struct {
	status string
	fields connect.Fields
	body   string
	reset  http2.ErrCode
	goAway http2.ErrCode
	closed bool // the connection
}

const none = http2.ErrCode(1 << 31)

// answer reads until the fate of stream id is known, or until the end of the
// connection where id is 0.
func (r *raw) answer(id uint32) answer {
	r.t.Helper()
	a := answer{reset: none, goAway: none}
	for {
		f, err := r.next()
		if err != nil {
			if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
				r.t.Fatalf("no answer on stream %d: %v", id, err)
			}
			a.closed = true
			return a
		}
		if g, ok := f.(*http2.GoAwayFrame); ok {
			a.goAway = g.ErrCode
		}
		if id == 0 || f.Header().StreamID != id {
			continue
		}
		switch f := f.(type) {
		case *http2.HeadersFrame:
			fields, err := r.dec.DecodeFull(f.HeaderBlockFragment())
			if err != nil {
				r.t.Fatal(err)
			}
			for _, h := range fields {
				if h.Name == ":status" {
					a.status = h.Value
				} else {
					a.fields = append(a.fields, connect.Field{Name: h.Name, Value: h.Value})
				}
			}
			if a.status == "200" || f.StreamEnded() {
				return a
			}
		case *http2.DataFrame:
			a.body += string(f.Data())
			if f.StreamEnded() {
				return a
			}
		case *http2.RSTStreamFrame:
			a.reset = f.ErrCode
			return a
		}
	}
}

// fillerBlock returns a header block of n bytes or a little more.
func fillerBlock(n int) []byte {
	var b bytes.Buffer
	enc := hpack.NewEncoder(&b)
	_ = enc.WriteField(hpack.HeaderField{Name: ":method", Value: "CONNECT"})
	_ = enc.WriteField(hpack.HeaderField{Name: ":authority", Value: "svc:1"})
	for b.Len() < n {
		_ = enc.WriteField(hpack.HeaderField{Name: "x-filler", Value: strings.Repeat("~", min(1000, n)), Sensitive: true})
	}
	return b.Bytes()
}
