package hbone

import (
	"bytes"
	"context"
	"net/netip"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// verified is HBONE behind TLS in which alice has shown who she is.
type verified struct{ *Protocol }

func (p verified) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	c.Peer = tunnel.Peer{ID: id("alice"), Method: "mtls"}
	return p.Protocol.ServeConn(ctx, c, h)
}

// TestProtocol runs the suite on requests by name and by address.
func TestProtocol(t *testing.T) {
	opening := func(authority string) []byte {
		var list, b bytes.Buffer
		enc := hpack.NewEncoder(&list)
		for _, f := range [][2]string{{":method", "CONNECT"}, {":authority", authority}, {"baggage", "service.name=web"}} {
			_ = enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
		}
		b.WriteString(http2.ClientPreface)
		fr := http2.NewFramer(&b, nil)
		_ = fr.WriteSettings()
		_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: list.Bytes(), EndHeaders: true})
		return b.Bytes()
	}
	wrap := func(stream []byte) []byte {
		var b bytes.Buffer
		_ = http2.NewFramer(&b, nil).WriteData(1, false, stream)
		return b.Bytes()
	}
	tunneltest.TestProtocol(t, verified{&Protocol{}},
		tunneltest.Preamble{
			Title: "name", Bytes: opening("Svc.Test:443"),
			Name: tunnel.MustParseName("svc.test"), Port: 443, Wrap: wrap, Unwrap: unwrap,
		},
		tunneltest.Preamble{
			Title: "address", Bytes: opening("192.0.2.1:8443"),
			Addr: netip.MustParseAddr("192.0.2.1"), Port: 8443, Wrap: wrap, Unwrap: unwrap,
		},
	)
}

// unwrap finds the bytes of stream 1.
func unwrap(heard []byte) (stream []byte, over bool) {
	fr := http2.NewFramer(nil, bytes.NewReader(heard))
	for {
		f, err := fr.ReadFrame()
		if err != nil {
			return stream, over
		}
		if f.Header().StreamID != 1 {
			continue
		}
		if f, ok := f.(*http2.DataFrame); ok {
			stream = append(stream, f.Data()...)
		}
		over = over || f.Header().Type == http2.FrameRSTStream || f.Header().Flags.Has(http2.FlagDataEndStream)
	}
}
