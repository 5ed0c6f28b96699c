package ws

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A carrier is what a WebSocket's bytes go over.
type carrier struct {
	name     string
	protocol func() tunnel.Protocol                             // a new one for each gateway: with that it is drained
	open     func(t *testing.T, g *tunneltest.Gateway) net.Conn // on which the handshake is over
}

// carriers are a connection, with each subprotocol, and a stream of HTTP/2.
func carriers(t *testing.T) []carrier {
	var all []carrier
	for _, subprotocol := range []string{"", Subprotocol} {
		all = append(all, carrier{"over TCP " + subprotocol, func() tunnel.Protocol { return &Protocol{} }, func(t *testing.T, g *tunneltest.Gateway) net.Conn { return open(t, g, subprotocol) }})
	}
	return append(all, carrier{"over HTTP/2", extended, func(t *testing.T, g *tunneltest.Gateway) net.Conn {
		d := &h2.Dialer{Proxy: g.Addr}
		t.Cleanup(func() { _ = d.Close() })
		s, _, err := d.Open(t.Context(), &h2.Head{
			Protocol: "websocket", Scheme: "https", Authority: "gw.test", Path: "/.culvert/tunnel/svc.test:443",
			Fields: connect.Fields{{Name: "sec-websocket-version", Value: "13"}, {Name: "sec-websocket-protocol", Value: Subprotocol}},
		})
		if err != nil {
			t.Fatal(err)
		}
		_ = s.SetDeadline(time.Now().Add(patience))
		return s
	}})
}

// open does the handshake by hand.
func open(t *testing.T, g *tunneltest.Gateway, subprotocol string) net.Conn {
	t.Helper()
	c := testnet.Connect(t, g.Addr)
	var fields []string
	if subprotocol != "" {
		fields = append(fields, "Sec-WebSocket-Protocol: "+subprotocol)
	}
	_, _ = io.WriteString(c, handshake("/.culvert/tunnel/svc.test:443", fields...))
	var head []byte
	for b := make([]byte, 1); !bytes.HasSuffix(head, []byte("\r\n\r\n")); head = append(head, b...) {
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatalf("after %q: %v", head, err)
		}
	}
	if !bytes.HasPrefix(head, []byte("HTTP/1.1 101 ")) {
		t.Fatalf("got %q, want 101", head)
	}
	return c
}

// next reads one frame of a server's.
func next(t *testing.T, c io.Reader) (header, []byte) {
	t.Helper()
	var b []byte
	for {
		h, err := parseHeader(b, false)
		if err == nil {
			payload := make([]byte, h.length)
			if _, err := io.ReadFull(c, payload); err != nil {
				t.Fatal(err)
			}
			return h, payload
		}
		if err != errMore {
			t.Fatal(err)
		}
		b = append(b, 0)
		if _, err := io.ReadFull(c, b[len(b)-1:]); err != nil {
			t.Fatalf("after %x: %v", b[:len(b)-1], err)
		}
	}
}

// closeOf reads up to the close frame and returns its code.
func closeOf(t *testing.T, c io.Reader) int {
	t.Helper()
	for {
		if h, payload := next(t, c); h.opcode == opClose {
			code, _, err := parseClose(payload)
			if err != nil {
				t.Fatal(err)
			}
			return code
		}
	}
}

// extended takes WebSockets over HTTP/2.
func extended() tunnel.Protocol {
	return &h2.Protocol{Extended: []connect.ExtendedService{&Protocol{}}}
}

// overHTTP2 is a Dialer of WebSockets that share the connections of a pool.
func overHTTP2(t *testing.T, addr string) (*Dialer, *h2.Dialer) {
	pool := &h2.Dialer{Proxy: addr, Idle: time.Minute}
	t.Cleanup(func() { _ = pool.Close() })
	return &Dialer{URL: "ws://" + addr, Extended: pool.Open}, pool
}

// TestDrainOverHTTP2: the end of a gateway, over HTTP/2.
func TestDrainOverHTTP2(t *testing.T) {
	tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
		g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{extended()}, Resolver: routes})
		d, pool := overHTTP2(t, g.Addr)
		return tunneltest.Draining{
			Served: g.With(d, "svc.test:443"), Socket: g.Addr, Begin: "PRI * ",
			Told: func() bool { return pool.Conns() == 0 },
			Cut: func(err error) bool { // the code where the reset has not taken it back
				said, ok := errors.AsType[*closeError](err)
				re, reset := errors.AsType[*h2.ResetError](err)
				return ok && said.code == codeGoingAway || reset && re.Code == http2.ErrCodeConnect
			},
		}
	})
}

// An overExtended is an h2.Protocol with the name that its extended requests have.
type overExtended struct{ *h2.Protocol }

func (p overExtended) Name() string { return p.Extended[0].Name() }

// TestProtocolOverHTTP2 runs the suite on an extended CONNECT.
func TestProtocolOverHTTP2(t *testing.T) {
	framed := func(list []byte, data []byte) []byte {
		var b bytes.Buffer
		fr := http2.NewFramer(&b, nil)
		if list != nil {
			b.WriteString(http2.ClientPreface)
			_ = fr.WriteSettings()
			_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: list, EndHeaders: true})
		} else {
			_ = fr.WriteData(1, false, frame(0x82, true, data))
		}
		return b.Bytes()
	}
	var list bytes.Buffer
	enc := hpack.NewEncoder(&list)
	for _, f := range [][2]string{
		{":method", "CONNECT"}, {":protocol", "websocket"}, {":scheme", "https"}, {":authority", "gw.test"}, {":path", "/.culvert/tunnel/Svc.Test:443"},
		{"sec-websocket-version", "13"}, {"sec-websocket-protocol", Subprotocol},
	} {
		_ = enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
	}
	tunneltest.TestProtocol(t, overExtended{&h2.Protocol{Extended: []connect.ExtendedService{&Protocol{}}}}, tunneltest.Preamble{
		Title: "path", Bytes: framed(list.Bytes(), nil), Name: tunnel.MustParseName("svc.test"), Port: 443,
		Wrap: func(b []byte) []byte { return framed(nil, b) },
		Unwrap: func(heard []byte) (stream []byte, over bool) {
			var frames []byte
			fr := http2.NewFramer(nil, bytes.NewReader(heard))
			for {
				f, err := fr.ReadFrame()
				if err != nil {
					break
				}
				switch f := f.(type) {
				case *http2.DataFrame:
					frames = append(frames, f.Data()...)
					over = over || f.StreamEnded()
				case *http2.RSTStreamFrame:
					over = true
				}
			}
			stream, closed := messages(frames)
			return stream, over || closed
		},
	})
}
