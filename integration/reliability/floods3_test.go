//go:build linux

package reliability

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/quic-go/qpack"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"

	"culvert.dev/internal/testnet"
)

// Frames, streams and codes of HTTP/3: RFC 9114 sections 7.2, 6.2 and 8.1.
const (
	h3Data, h3Headers, h3Settings, h3PriorityUpdate = 0x00, 0x01, 0x04, 0xf0700
	h3Unknown                                       = 0x21 // a frame, and a stream
	h3Control                                       = 0x00
	h3ExcessiveLoad                                 = 0x107
	h3RequestCancelled                              = 0x10c
)

// h3Frame is a frame, or the beginning of a stream and one.
func h3Frame(payload []byte, types ...uint64) []byte {
	var b []byte
	for _, t := range types {
		b = quicvarint.Append(b, t)
	}
	return append(quicvarint.Append(b, uint64(len(payload))), payload...)
}

// h3Request is a HEADERS frame: a CONNECT to authority, and fields besides.
func h3Request(authority string, fields ...string) []byte {
	var b bytes.Buffer
	enc := qpack.NewEncoder(&b)
	_ = enc.WriteField(qpack.HeaderField{Name: ":method", Value: "CONNECT"})
	_ = enc.WriteField(qpack.HeaderField{Name: ":authority", Value: authority})
	for i := 0; i < len(fields); i += 2 {
		_ = enc.WriteField(qpack.HeaderField{Name: fields[i], Value: fields[i+1]})
	}
	return h3Frame(b.Bytes(), h3Headers)
}

// A flooder3 is a flooder that speaks HTTP/3.
type flooder3 struct {
	*quic.Conn
	control *quic.SendStream
	stream  *quic.Stream // the one there is, for floods of frames
}

// ask opens a stream that says b and is given up, or ended.
func (f *flooder3) ask(b []byte, giveUp bool) error {
	s, err := f.OpenStreamSync(f.Context())
	if err != nil {
		return err
	}
	_, _ = s.Write(b)
	s.CancelRead(h3RequestCancelled)
	if giveUp {
		s.CancelWrite(h3RequestCancelled)
		return nil
	}
	return s.Close()
}

// floods3 are those of HTTP/2 that HTTP/3 has a place for, and its own. Requests
// that are small and refused are none: an honest client may make many.
var floods3 = []struct {
	name   string
	repeat func(f *flooder3) error
}{
	{"rapid reset", func(f *flooder3) error { return f.ask(h3Request("echo.test:443"), true) }},
	{"resets without a request", func(f *flooder3) error { return f.ask(nil, true) }},
	{"malformed requests", func(f *flooder3) error { return f.ask(h3Request("echo.test:443", ":path", "/"), false) }},
	{"requests of 12 KiB", func(f *flooder3) error {
		return f.ask(h3Request("nobody.test:443", "x", strings.Repeat("~", 9<<10)), false)
	}},
	{"streams of unknown types", func(f *flooder3) error {
		s, err := f.OpenUniStreamSync(f.Context())
		if err == nil {
			_, err = s.Write([]byte{h3Unknown})
			s.CancelWrite(0)
		}
		return err
	}},
	{"frames on the control stream", func(f *flooder3) error {
		_, err := f.control.Write(h3Frame([]byte{0}, h3PriorityUpdate))
		return err
	}},
	{"empty DATA", func(f *flooder3) error { _, err := f.stream.Write(h3Frame(nil, h3Data)); return err }},
	{"unknown frames in a tunnel", func(f *flooder3) error { _, err := f.stream.Write(h3Frame(nil, h3Unknown)); return err }},
}

// Nor does a flood of HTTP/3 cost more, its handshake included.
func TestFloodsOverHTTP3AreCheap(t *testing.T) {
	ca, keys := newCA(t)
	echo := startBackend(t, "echo")
	g := everyWay(t, ca, "127.7.0.0/16", "echo.test")
	g.serve(service("echo.test", echo.addr))
	keys.NextProtos = []string{"h3"}
	for _, c := range floods3 {
		t.Run(c.name, func(t *testing.T) {
			g.cheap(t, func() error {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				qc, err := quic.DialAddr(ctx, g.ip+portTLS, keys, nil)
				if err != nil {
					return err
				}
				defer qc.CloseWithError(0, "")
				f := &flooder3{Conn: qc}
				if f.control, err = qc.OpenUniStream(); err != nil {
					return err
				}
				_, _ = f.control.Write(h3Frame(nil, h3Control, h3Settings))
				if f.stream, err = qc.OpenStream(); err != nil {
					return err
				}
				_, _ = f.stream.Write(h3Request("echo.test:443"))
				for n := 0; qc.Context().Err() == nil && n < 200_000; n++ {
					if ctx.Err() != nil {
						return errors.New("it goes on and on")
					}
					_ = c.repeat(f) // a stream that was reset says so until the connection ends
				}
				end, ok := errors.AsType[*quic.ApplicationError](context.Cause(qc.Context()))
				if !ok || !end.Remote || end.ErrorCode != h3ExcessiveLoad {
					return fmt.Errorf("the flood ended with %v, want H3_EXCESSIVE_LOAD", context.Cause(qc.Context()))
				}
				return nil
			})
		})
	}
	testnet.Eventually(t, patience, func() bool {
		return len(g.entries(func(e entry) bool { return e.str("reason") == "flood" })) >= floodConns*len(floods3)
	}, "the log has a line for each")
}
