package ws

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"
	"time"

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
	p := &Protocol{}
	extended := func() tunnel.Protocol {
		return &h2.Protocol{Extended: func(ctx context.Context, req *tunnel.Request, head *h2.Head) (context.Context, error) {
			ctx, subprotocol, _, err := p.AdmitExtended(ctx, req, &Extended{Scheme: head.Scheme, Host: head.Authority, Path: head.Path, Fields: head.Fields})
			head.Stream = func(s tunnel.Stream) tunnel.Stream { return NewStream(s, Server, subprotocol, p.Options) }
			return ctx, err
		}}
	}
	return append(all, carrier{"over HTTP/2", extended, func(t *testing.T, g *tunneltest.Gateway) net.Conn {
		d := &h2.Dialer{Proxy: g.Addr}
		t.Cleanup(func() { _ = d.Close() })
		s, err := d.Open(t.Context(), &h2.Head{
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
