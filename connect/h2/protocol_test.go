package h2

import (
	"bytes"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// fieldList encodes a header list of names and values.
func fieldList(pairs ...string) []byte {
	var b bytes.Buffer
	enc := hpack.NewEncoder(&b)
	for i := 0; i < len(pairs); i += 2 {
		_ = enc.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]})
	}
	return b.Bytes()
}

// opening is all a client says until its first request is complete.
func opening(list []byte) []byte {
	var b bytes.Buffer
	b.WriteString(preface)
	fr := http2.NewFramer(&b, nil)
	_ = fr.WriteSettings()
	_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: list, EndHeaders: true})
	return b.Bytes()
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
		switch f := f.(type) {
		case *http2.DataFrame:
			stream = append(stream, f.Data()...)
			over = over || f.StreamEnded()
		case *http2.HeadersFrame:
			over = over || f.StreamEnded()
		case *http2.RSTStreamFrame:
			over = true
		}
	}
}

func TestProtocol(t *testing.T) {
	wrap := func(stream []byte) []byte {
		var b bytes.Buffer
		_ = http2.NewFramer(&b, nil).WriteData(1, false, stream)
		return b.Bytes()
	}
	addr, err := connect.ParseAuthority("192.0.2.1:8443")
	if err != nil {
		t.Fatal(err)
	}
	tunneltest.TestProtocol(t, &Protocol{},
		tunneltest.Preamble{
			Title: "name", Bytes: opening(fieldList(":method", "CONNECT", ":authority", "Xyz.example:443")),
			Name: tunnel.MustParseName("xyz.example"), Port: 443, Wrap: wrap, Unwrap: unwrap,
		},
		tunneltest.Preamble{
			Title: "address", Bytes: opening(fieldList(":method", "CONNECT", ":authority", "192.0.2.1:8443", "user-agent", "test")),
			Addr: addr.Addr, Port: 8443, Wrap: wrap, Unwrap: unwrap,
		},
	)
}
