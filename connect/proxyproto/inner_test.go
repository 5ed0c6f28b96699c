package proxyproto

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// pieces is a connection on which some bytes come, a few at a time.
type pieces struct {
	net.Conn
	left   []byte
	most   int
	closed bool
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.left) == 0 {
		return 0, errors.New("the end of what comes")
	}
	n := copy(b[:min(len(b), max(p.most, 1))], p.left)
	p.left = p.left[n:]
	return n, nil
}

func (*pieces) LocalAddr() net.Addr              { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 443} }
func (*pieces) RemoteAddr() net.Addr             { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 7), Port: 7} }
func (*pieces) SetDeadline(time.Time) error      { return nil }
func (*pieces) SetWriteDeadline(time.Time) error { return nil }
func (p *pieces) Close() error                   { p.closed = true; return nil }

// serveInner has an Inner serve what comes in TLS of the gateway "gw", and returns the one
// request that it made, or the error by which the connection was refused.
func serveInner(conn *pieces, caller func(*tunnel.Request, string) (tunnel.Peer, error)) (asked *tunnel.Request, rest []byte, said *Header, err error) {
	outer := tunnel.NewConn(conn)
	c := outer.Nest(conn, tunnel.EndedTLS{Peer: tunnel.Peer{ID: "gw", Method: "mtls"}})
	err = (&Inner{Caller: caller}).ServeConn(context.Background(), c, tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		asked, rest, said = req, bytes.Clone(c.Buffered()), FromContext(ctx)
	}))
	return asked, rest, said, err
}

// believing believes every assertion but "forged".
func believing(_ *tunnel.Request, assertion string) (tunnel.Peer, error) {
	if assertion == "forged" {
		return tunnel.Peer{}, errors.New("it is forged")
	}
	return tunnel.Peer{ID: "caller " + assertion, Method: "mtls"}, nil
}

func TestInner(t *testing.T) {
	for _, row := range []struct {
		name   string
		in     []byte
		caller func(*tunnel.Request, string) (tunnel.Peer, error)
		reason tunnel.Reason // "" means that it is served
	}{
		{"an assertion", withCRC(v2(0x21, 0x11, ends4, tlv(2, "a.test"), tlv(5, "id-7"), tlv(0x20, "\x07\x00\x00\x00\x00"+string(tlv(0x22, "root"))), tlv(0xe1, "a.b.c"), tlv(0xe2, "root"), place)), believing, ""},
		{"a wrong one", v2(0x21, 0x11, ends4, tlv(2, "a.test"), tlv(0xe1, "forged")), believing, tunnel.NoAuth},
		{"nobody to ask", v2(0x21, 0x11, ends4, tlv(2, "a.test"), tlv(0xe1, "a.b.c")), nil, tunnel.Internal},
		{"no name", v2(0x21, 0x11, ends4, tlv(0xe1, "a.b.c")), believing, tunnel.NoSNI},
		{"a bad name", v2(0x21, 0x11, ends4, tlv(2, "a..test")), believing, tunnel.NoSNI},
		{"LOCAL", v2(0x20, 0x11, ends4, tlv(2, "a.test")), believing, tunnel.NoHello},
		{"version 1", []byte("PROXY TCP4 198.51.100.7 192.0.2.1 56789 443\r\n"), believing, tunnel.BadPreamble},
		{"two assertions", v2(0x21, 0x11, ends4, tlv(2, "a.test"), tlv(0xe1, "a"), tlv(0xe1, "a")), believing, tunnel.BadPreamble},
	} {
		for _, most := range []int{1, 7, 1 << 20} {
			conn := &pieces{left: append(bytes.Clone(row.in), "early"...), most: most}
			req, rest, said, err := serveInner(conn, row.caller)
			if row.reason != "" {
				if req != nil || tunnel.ReasonOf(err) != row.reason || !conn.closed {
					t.Errorf("%s, %d bytes at a time: got %+v, %v, closed %v; want %s", row.name, most, req, err, conn.closed, row.reason)
				}
				continue
			}
			if err != nil || req == nil {
				t.Errorf("%s, %d bytes at a time: got %v", row.name, most, err)
				continue
			}
			if req.Proto != "proxy" || req.Name.String() != "a.test" || req.Source != ap("198.51.100.7:56789") || req.Peer.ID != "caller a.b.c" || req.TLS == nil {
				t.Errorf("%s: got %+v", row.name, req)
			}
			if !strings.HasPrefix("early", string(rest)) || said.UniqueID != "id-7" || said.SSL != nil || said.Assertion+said.Caller != "" {
				t.Errorf("%s: got %q behind the header, and %+v", row.name, rest, said)
			}
		}
	}
}

// FuzzInner reads anything, in pieces. What becomes a request is of a header that Parse
// takes, of the caller that was believed, and of nobody else.
func FuzzInner(f *testing.F) {
	for _, row := range goodRows {
		f.Add(row.in, byte(1))
	}
	for _, row := range badRows {
		f.Add(row.in, byte(9))
	}
	f.Add(v2(0x21, 0x11, ends4, tlv(2, "a.test"), tlv(0xe1, "forged")), byte(100))
	f.Fuzz(func(t *testing.T, in []byte, most byte) {
		conn := &pieces{left: bytes.Clone(in), most: int(most)}
		var req *tunnel.Request
		var err error
		testnet.Bounded(t, 60*len(in)+40<<10, func() { req, _, _, err = serveInner(conn, believing) })
		h, _, bad := Parse(in)
		switch {
		case (req == nil) == (err == nil):
			t.Fatalf("got %+v and %v", req, err)
		case req == nil && !conn.closed:
			t.Fatalf("refused with %v, and open", err)
		case req == nil:
			return
		case bad != nil || h.Local || h.Version != 2 || h.Assertion == "forged":
			t.Fatalf("a request of %+v, %v", h, bad)
		}
		if name, err := tunnel.ParseName(h.Authority); req.Peer.ID != "caller "+h.Assertion || req.Name != name || err != nil {
			t.Fatalf("got %+v of %+v", req, h)
		}
	})
}
