package proxyproto

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// patience is how long anything in these tests may take.
const patience = 30 * time.Second

// word is a protocol whose preamble is a name that ends with a space. Its
// connections wait on the loop.
type word struct{ name string }

func (w word) Name() string { return w.name }

func (w word) Sniff(prefix []byte) tunnel.Verdict {
	_ = prefix[0] // a protocol is asked about one byte at least
	switch n := min(len(prefix), len(w.name)); {
	case string(prefix[:n]) != w.name[:n]:
		return tunnel.No
	case n < len(w.name):
		return tunnel.More
	}
	return tunnel.Yes
}

func (w word) HasPreamble(prefix []byte) bool { return bytes.IndexByte(prefix, ' ') >= 0 }

func (w word) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	for {
		if said, _, ok := bytes.Cut(c.Buffered(), []byte(" ")); ok {
			req := c.NewRequest(w.name)
			req.Name = tunnel.MustParseName(string(said))
			h.ServeTunnel(ctx, req)
			return nil
		}
		if err := c.Fill(100); err != nil {
			_ = c.Abort()
			return tunnel.PreambleError(c, err)
		}
	}
}

// notDetector is a protocol without HasPreamble.
type notDetector struct{ tunnel.Protocol }

// serve starts a gateway that takes every request to backend, by way, and whose
// connections end by themselves.
func serve(t *testing.T, p tunnel.ConnHeader, backend string, way tunnel.Dialer, ps ...tunnel.Protocol) *tunneltest.Gateway {
	t.Helper()
	transport, _ := way.(tunnel.Transport)
	return tunneltest.Serve(t, tunneltest.Setup{
		Protocols: ps, ConnHeader: p, Resolver: everybody{backend, transport}, Dialer: way, Limits: tunnel.Limits{ConnectionRatePerClient: -1}, Drained: true,
	})
}

// everybody is a Resolver by which all but nobody.test lead to one service.
type everybody struct {
	service   string
	transport tunnel.Transport // may be nil
}

func (e everybody) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	if req.Name.String() == "nobody.test" {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "nobody")
	}
	route := tunneltest.RouteTo(e.service)
	tunneltest.WithTransport(route.Endpoints, e.transport)
	return route, nil
}

// talk sends in and returns what comes until the end. Where the other side is
// gone already the write may be what hears of it.
func talk(c *net.TCPConn, in []byte) ([]byte, error) {
	if _, err := c.Write(in); err != nil {
		return nil, err
	}
	return io.ReadAll(c)
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

var (
	loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	straight = &tunnel.NetDialer{}
)

// Each header, whole and cut anywhere, before a protocol that waits on a loop,
// one that does not, and one of two.
func TestConnHeader(t *testing.T) {
	svc := testnet.Echo(t).Addr()
	p := &ConnHeader{From: loopback}
	for name, ps := range map[string][]tunnel.Protocol{
		"judge":     {word{"svc.test"}},
		"two":       {word{"other.test"}, word{"svc.test"}},
		"not judge": {notDetector{word{"svc.test"}}},
	} {
		t.Run(name, func(t *testing.T) {
			g := serve(t, p, svc, straight, ps...)
			for _, row := range goodRows {
				for _, cut := range []int{0, 1, len(row.in) - 1, len(row.in), len(row.in) + 3} {
					c := testnet.Connect(t, g.Addr)
					local := c.LocalAddr().(*net.TCPAddr).AddrPort()
					in := append(bytes.Clone(row.in), "svc.test there and back"...)
					_, _ = c.Write(in[:cut])
					time.AfterFunc(time.Millisecond, func() {
						_, _ = c.Write(in[cut:])
						_ = c.CloseWrite()
					})
					got, err := io.ReadAll(c)
					if string(got) != "svc.test there and back" || err != nil {
						t.Errorf("%s, cut after %d bytes: got %q, %v", row.name, cut, got, err)
					}
					want := row.want.Source
					if !want.IsValid() {
						want = local
					}
					if o := g.Outcome(t); o.Source != want || o.Reason != tunnel.Done {
						t.Errorf("%s, cut after %d bytes: got %s from %s, want it done from %s", row.name, cut, o.Reason, o.Source, want)
					}
				}
			}
			for _, req := range g.Requests() {
				if req.Peer != (tunnel.Peer{}) {
					t.Errorf("a header gave the caller the identity %+v", req.Peer)
				}
			}
		})
	}
}

// Each bad header is answered with a reset, and nothing of it, or behind it, is
// a request (must-never N30).
func TestConnHeaderRefuses(t *testing.T) {
	g := serve(t, &ConnHeader{From: loopback}, testnet.Echo(t).Addr(), straight, word{"svc.test"})
	for _, row := range badRows {
		c := testnet.Connect(t, g.Addr)
		if got, err := talk(c, append(bytes.Clone(row.in), "svc.test "...)); len(got) > 0 || !isReset(err) {
			t.Errorf("%s: got %q, %v, want a reset", row.name, got, err)
		}
		if o := g.Outcome(t); o.Reason != tunnel.BadPreamble || o.Err == nil || o.Source != c.LocalAddr().(*net.TCPAddr).AddrPort() {
			t.Errorf("%s: got %s from %s, %v; want %s from the socket's peer", row.name, o.Reason, o.Source, o.Err, tunnel.BadPreamble)
		}
	}
	if n := len(g.Requests()); n > 0 {
		t.Errorf("%d requests, want none", n)
	}
}

// Who leaves in a header, or behind one, is told nothing and asks nothing.
func TestConnHeaderCutShort(t *testing.T) {
	g := serve(t, &ConnHeader{From: loopback}, testnet.Echo(t).Addr(), straight, word{"svc.test"})
	whole := withCRC(v2(0x21, 0x11, ends4, tlv(2, "svc.test"), place))
	for n := range len(whole) + 1 {
		c := testnet.Connect(t, g.Addr)
		_, _ = c.Write(whole[:n])
		_ = c.Close()
		want := tunnel.Gone
		if n == 0 || n == len(whole) {
			want = tunnel.NoHello // behind a header a client may leave, as any may
		}
		if o := g.Outcome(t); o.Reason != want {
			t.Errorf("left after %d of %d bytes: got %s, %v, want %s", n, len(whole), o.Reason, o.Err, want)
		}
	}
	if n := len(g.Requests()); n > 0 {
		t.Errorf("%d requests, want none", n)
	}
}

// A peer that is not trusted is reset whatever it sends, and without a header
// nobody is served: nobody says where another connection comes from whom the
// listener does not trust with it (must-never N5).
func TestConnHeaderTrustsNobodyElse(t *testing.T) {
	for _, row := range []struct {
		name   string
		from   []netip.Prefix
		in     []byte
		reason tunnel.Reason
	}{
		{"untrusted", []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("::/0")}, v2(0x21, 0x11, ends4), tunnel.Denied},
		{"untrusted, without a header", []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}, nil, tunnel.Denied},
		{"nobody is trusted", nil, v2(0x21, 0x11, ends4), tunnel.Denied},
		{"trusted, without a header", loopback, nil, tunnel.BadPreamble},
	} {
		t.Run(row.name, func(t *testing.T) {
			g := serve(t, &ConnHeader{From: row.from}, testnet.Echo(t).Addr(), straight, word{"svc.test"})
			c, err := net.DialTimeout("tcp", g.Addr, patience)
			if err == nil { // it may be reset before this returns
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(patience))
				var got []byte
				if got, err = talk(c.(*net.TCPConn), append(row.in, "svc.test "...)); len(got) > 0 {
					t.Errorf("got %q, want nothing", got)
				}
			}
			if !isReset(err) {
				t.Errorf("got %v, want a reset", err)
			}
			if o := g.Outcome(t); o.Reason != row.reason || !o.Source.Addr().IsLoopback() {
				t.Errorf("got %s from %s, %v; want %s from the socket's peer", o.Reason, o.Source, o.Err, row.reason)
			}
		})
	}
}

func TestTrusts(t *testing.T) {
	p := &ConnHeader{From: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")}}
	for addr, want := range map[string]bool{
		"192.0.2.7": true, "::ffff:192.0.2.7": true, "192.0.3.7": false, "2001:db8::7": true, "2001:db9::7": false, "127.0.0.1": false, "10.0.0.1": false,
	} {
		if got := p.Trusts(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: got %v, want %v", addr, got, want)
		}
	}
	if p.Trusts(netip.Addr{}) {
		t.Error("no address is trusted")
	}
}

// On a listener that does not expect one, a header is nobody's protocol.
func TestHeaderWhereNoneIsExpected(t *testing.T) {
	g := serve(t, nil, testnet.Echo(t).Addr(), straight, word{"svc.test"}, word{"other.test"})
	for _, row := range goodRows {
		c := testnet.Connect(t, g.Addr)
		if got, err := talk(c, append(bytes.Clone(row.in), "svc.test "...)); len(got) > 0 || !isReset(err) {
			t.Errorf("%s: got %q, %v, want a reset", row.name, got, err)
		}
		if o := g.Outcome(t); o.Reason != tunnel.BadPreamble {
			t.Errorf("%s: got %s, want %s", row.name, o.Reason, tunnel.BadPreamble)
		}
	}
}

// A header behind a header is the client's, and no protocol's here.
func TestSecondHeaderIsData(t *testing.T) {
	g := serve(t, &ConnHeader{From: loopback}, testnet.Echo(t).Addr(), straight, word{"svc.test"}, word{"other.test"})
	c := testnet.Connect(t, g.Addr)
	if got, err := talk(c, append(append(v2(0x21, 0x11, ends4), v2(0x21, 0x21, ends6)...), "svc.test "...)); len(got) > 0 || !isReset(err) {
		t.Errorf("got %q, %v, want a reset", got, err)
	}
	if o := g.Outcome(t); o.Reason != tunnel.BadPreamble || o.Source != ap("198.51.100.7:56789") {
		t.Errorf("got %s from %s, want %s from the source of the first", o.Reason, o.Source, tunnel.BadPreamble)
	}
}

// The stated name routes, and the server speaks first.
func TestProtocol(t *testing.T) {
	svc := testnet.Greeting(t, "welcome\n").Addr()
	g := serve(t, &ConnHeader{From: loopback}, svc, straight, &Protocol{})
	c := testnet.Connect(t, g.Addr)
	_, _ = c.Write(withCRC(v2(0x21, 0x11, ends4, tlv(2, "SVC.test."), tlv(1, "h2"), place)))
	got := make([]byte, len("welcome\n"))
	if _, err := io.ReadFull(c, got); string(got) != "welcome\n" || err != nil {
		t.Fatalf("got %q, %v, want the server's greeting", got, err)
	}
	_, _ = io.WriteString(c, "there and back")
	_ = c.CloseWrite()
	if rest, err := io.ReadAll(c); string(rest) != "there and back" || err != nil {
		t.Errorf("got %q, %v, want what was sent", rest, err)
	}
	o := g.Outcome(t)
	if o.Proto != "proxy" || o.Target != "svc.test" || o.Source != ap("198.51.100.7:56789") || !slices.Equal(o.ALPN, []string{"h2"}) || o.Reason != tunnel.Done {
		t.Errorf("got outcome %+v, want it done by proxy to svc.test with h2", o)
	}
	for _, row := range []struct {
		name   string
		in     []byte
		reason tunnel.Reason
		fin    bool // instead of a reset
	}{
		{"health check", v2(0x20, 0), tunnel.NoHello, true},
		{"no name", v2(0x21, 0x11, ends4), tunnel.NoSNI, false},
		{"version 1 has no name", []byte("PROXY TCP4 198.51.100.7 192.0.2.1 56789 443\r\n"), tunnel.NoSNI, false},
		{"empty name", v2(0x21, 0x11, ends4, tlv(2, "")), tunnel.NoSNI, false},
		{"address", v2(0x21, 0x11, ends4, tlv(2, "127.0.0.1")), tunnel.NoSNI, false},
		{"two dots", v2(0x21, 0x11, ends4, tlv(2, "a..test")), tunnel.NoSNI, false},
		{"NUL", v2(0x21, 0x11, ends4, tlv(2, "svc.test\x00.evil")), tunnel.NoSNI, false},
		{"port", v2(0x21, 0x11, ends4, tlv(2, "svc.test:25")), tunnel.NoSNI, false},
		{"unknown name", v2(0x21, 0x11, ends4, tlv(2, "nobody.test")), tunnel.NoRoute, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			c := testnet.Connect(t, g.Addr)
			got, err := talk(c, row.in)
			if len(got) > 0 || (err == nil) != row.fin || !row.fin && !isReset(err) {
				t.Errorf("got %q, %v, want an orderly end: %v", got, err, row.fin)
			}
			if o := g.Outcome(t); o.Reason != row.reason || o.Proto != "proxy" {
				t.Errorf("got %s by %s, %v; want %s by proxy", o.Reason, o.Proto, o.Err, row.reason)
			}
		})
	}
}

// Without a header there is no name, and no client is believed.
func TestProtocolWithoutConnHeader(t *testing.T) {
	g := serve(t, nil, testnet.Echo(t).Addr(), straight, &Protocol{})
	if c, err := net.DialTimeout("tcp", g.Addr, patience); err == nil { // it may be reset before this returns
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if got, err := talk(c.(*net.TCPConn), withCRC(v2(0x21, 0x11, ends4, tlv(2, "svc.test"), place))); len(got) > 0 || !isReset(err) {
			t.Errorf("got %q, %v, want a reset", got, err)
		}
	}
	if o := g.Outcome(t); o.Reason != tunnel.Internal || len(g.Requests()) > 0 {
		t.Errorf("got %s and %d requests, want %s and none", o.Reason, len(g.Requests()), tunnel.Internal)
	}
}

// fronted is a Protocol with its ConnHeader in one, for the suite.
type fronted struct {
	ConnHeader
	Protocol
}

func (f *fronted) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	ctx, err := f.ConnHeader.Read(ctx, c)
	if err != nil {
		return err
	}
	return f.Protocol.ServeConn(ctx, c, h)
}

func TestProtocolSuite(t *testing.T) {
	tunneltest.TestProtocol(t, &fronted{},
		tunneltest.Preamble{Title: "name", Bytes: withCRC(v2(0x21, 0x11, ends4, tlv(2, "svc.test"), place)), Name: tunnel.MustParseName("svc.test")},
		tunneltest.Preamble{Title: "name and ALPN", Bytes: v2(0x21, 0, tlv(2, "svc.test"), tlv(1, "h2")), Name: tunnel.MustParseName("svc.test"), ALPN: []string{"h2"}},
	)
}
