package proxyproto

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// receiver is a service that expects a header, tells of it, and says again
// what comes behind it.
func receiver(t *testing.T) (addr string, heard chan Header) {
	t.Helper()
	heard = make(chan Header, 10)
	return testnet.Service(t, func(c net.Conn) {
		conn := tunnel.NewConn(c)
		ctx, err := (&ConnHeader{}).Read(context.Background(), conn)
		if err != nil {
			t.Errorf("the service read no header: %v", err)
			return
		}
		heard <- *FromContext(ctx)
		_, _ = io.Copy(conn, conn)
		_ = testnet.CloseWrite(c)
	}), heard
}

// The service hears of the client first, then the client's early bytes.
func TestDialer(t *testing.T) {
	for _, row := range []struct {
		name    string
		version int
		in      []byte
		want    Header // without its destination, which is the service
		id      bool   // a unique id of the gateway's own
	}{
		{"v1", 1, v2(0x21, 0x11, ends4), Header{Version: 1, Source: ap("198.51.100.7:56789")}, false},
		{"v1 from IPv6", 1, v2(0x21, 0x21, ends6), Header{Version: 1, Source: ap("[2001:db8::7]:56789")}, false},
		{"v2", 2, v2(0x21, 0x11, ends4), Header{Version: 2, Source: ap("198.51.100.7:56789"), Authority: "svc.test"}, true},
		{"v2 from IPv6", 2, v2(0x21, 0x21, ends6), Header{Version: 2, Source: ap("[2001:db8::7]:56789"), Authority: "svc.test"}, true},
		{"v2 with an id", 2, v2(0x21, 0x11, ends4, tlv(5, "id-7")), Header{Version: 2, Source: ap("198.51.100.7:56789"), Authority: "svc.test", UniqueID: "id-7"}, false},
		{"v2 of a name that was stated", 2, v2(0x21, 0x11, ends4, tlv(2, "other.test")), Header{Version: 2, Source: ap("198.51.100.7:56789"), Authority: "svc.test"}, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			svc, heard := receiver(t)
			g := serve(t, &ConnHeader{From: loopback}, svc, &Dialer{Version: row.version, Dialer: straight}, word{"svc.test"})
			c := testnet.Connect(t, g.Addr)
			_, _ = c.Write(append(row.in, "svc.test early"...))
			_ = c.CloseWrite()
			if got, err := io.ReadAll(c); string(got) != "svc.test early" || err != nil {
				t.Errorf("got %q, %v, want what was sent", got, err)
			}
			got := <-heard
			if row.id != (len(got.UniqueID) == 32) {
				t.Errorf("unique id %q, want one of the gateway's: %v", got.UniqueID, row.id)
			}
			want := row.want
			want.Destination = ap(svc)
			if row.id {
				want.UniqueID = got.UniqueID
			}
			if got != want {
				t.Errorf("the service heard %+v, want %+v", got, want)
			}
			if o := g.Outcome(t); o.Reason != tunnel.Done || o.BytesIn != int64(len("svc.test early")) {
				t.Errorf("got %s, %d bytes in; want done, and the header not counted", o.Reason, o.BytesIn)
			}
		})
	}
}

// endpoint is what a NetDialer dials.
func endpoint(addr string) *tunnel.Endpoint { return &tunnel.Endpoint{Addr: ap(addr), Named: true} }

func TestDial(t *testing.T) {
	svc, heard := receiver(t)
	d := &Dialer{Version: 2, Dialer: straight}
	for _, row := range []struct {
		name string
		req  tunnel.Request
		want Header
	}{
		{"one protocol", tunnel.Request{Source: ap("198.51.100.7:1"), ALPN: []string{"h2"}}, Header{Version: 2, Source: ap("198.51.100.7:1"), Destination: ap(svc), ALPN: "h2"}},
		{"one of two", tunnel.Request{Source: ap("198.51.100.7:1"), ALPN: []string{"h2", "http/1.1"}}, Header{Version: 2, Source: ap("198.51.100.7:1"), Destination: ap(svc)}},
		{"mapped", tunnel.Request{Source: ap("[::ffff:198.51.100.7]:1")}, Header{Version: 2, Source: ap("198.51.100.7:1"), Destination: ap(svc)}},
		{"no source", tunnel.Request{Name: tunnel.MustParseName("svc.test")}, Header{Version: 2, Local: true}},
		{"an identity", tunnel.Request{Source: ap("198.51.100.7:1"), Peer: tunnel.Peer{ID: "alice", Method: "mtls"}}, Header{Version: 2, Source: ap("198.51.100.7:1"), Destination: ap(svc)}},
	} {
		c, err := d.Dial(t.Context(), endpoint(svc), &row.req)
		if err != nil {
			t.Fatalf("%s: %v", row.name, err)
		}
		_ = c.Close()
		got := <-heard
		if row.want.UniqueID = got.UniqueID; got != row.want {
			t.Errorf("%s: got %+v, want %+v", row.name, got, row.want)
		}
	}
	for _, version := range []int{1, 2} {
		c, err := (&Dialer{Version: version, Dialer: namedDialer{}}).DialContext(t.Context(), "tcp", svc)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		if got := <-heard; got != (Header{Version: version, Local: version == 2}) {
			t.Errorf("on our own behalf: got %+v, want nothing stated", got)
		}
	}
}

// A header that can't be written is no reason to dial.
func TestDialerDoesNotDialForNothing(t *testing.T) {
	d := &Dialer{Version: 3, Dialer: namedDialer{}}
	if _, err := d.Dial(t.Context(), endpoint("127.0.0.1:1"), &tunnel.Request{}); tunnel.ReasonOf(err) != tunnel.Internal {
		t.Errorf("got %v, want reason %s", err, tunnel.Internal)
	}
	if _, err := d.DialContext(t.Context(), "tcp", "127.0.0.1:1"); tunnel.ReasonOf(err) != tunnel.Internal {
		t.Errorf("got %v, want reason %s", err, tunnel.Internal)
	}
}

// The guard is the inner dialer's.
func TestDialerAsksTheGuard(t *testing.T) {
	d := &Dialer{Version: 2, Dialer: straight}
	ep := &tunnel.Endpoint{Addr: ap("127.0.0.1:1")} // not named
	if err := d.Check(ep); tunnel.ReasonOf(err) != tunnel.Prohibited {
		t.Errorf("Check: got %v, want reason %s", err, tunnel.Prohibited)
	}
	if _, err := d.Dial(t.Context(), ep, &tunnel.Request{}); tunnel.ReasonOf(err) != tunnel.Prohibited {
		t.Errorf("Dial: got %v, want reason %s", err, tunnel.Prohibited)
	}
}

// A service that does not take the header is one that can't be dialed.
func TestDialerEndpointGone(t *testing.T) {
	near, far := net.Pipe()
	_ = far.Close()
	d := &Dialer{Version: 2, Dialer: pipeDialer{near}}
	if _, err := d.Dial(t.Context(), endpoint("127.0.0.1:1"), &tunnel.Request{}); tunnel.ReasonOf(err) != tunnel.DialFailed {
		t.Errorf("got %v, want reason %s", err, tunnel.DialFailed)
	}
	if _, err := near.Write(nil); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("the connection is open: %v", err)
	}
}

type pipeDialer struct{ c net.Conn }

func (d pipeDialer) DialContext(context.Context, string, string) (net.Conn, error) { return d.c, nil }
func (d pipeDialer) DialEndpoint(context.Context, tunnel.Endpoint) (net.Conn, error) {
	return d.c, nil
}

// namedDialer reaches any address.
type namedDialer struct{ tunnel.NetDialer }

func (d namedDialer) DialContext(ctx context.Context, _, addr string) (net.Conn, error) {
	return d.DialEndpoint(ctx, *endpoint(addr))
}

func (d namedDialer) DialEndpoint(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
	return d.NetDialer.DialEndpoint(ctx, ep)
}

// A listener that accepts behind the header, for the suite.
func TestDialerSuite(t *testing.T) {
	tunneltest.TestDialer(t, func(t *testing.T, backend net.Listener) tunneltest.Dialer {
		g := serve(t, &ConnHeader{From: loopback}, backend.Addr().String(), straight, &tunnel.Fixed{To: tunnel.MustParseName("svc.test"), Port: 1})
		return tunneltest.Dialer{
			Dialer:  &Dialer{Version: 2, Dialer: namedDialer{}},
			Addr:    g.Addr,
			Refused: map[string]tunnel.Reason{testnet.ClosedPort(t): tunnel.DialFailed},
		}
	}, tunneltest.Options{Streams: 1000})
}

// Two gateways pass on whose connection it is.
func TestGatewaysInARow(t *testing.T) {
	svc, heard := receiver(t)
	far := serve(t, &ConnHeader{From: loopback}, svc, &Dialer{Version: 1, Dialer: straight}, word{"svc.test"})
	near := serve(t, nil, far.Addr, &Dialer{Version: 2, Dialer: straight}, word{"svc.test"})
	c := testnet.Connect(t, near.Addr)
	_, _ = c.Write([]byte("svc.test there and back"))
	_ = c.CloseWrite()
	if got, err := io.ReadAll(c); string(got) != "svc.test there and back" || err != nil {
		t.Errorf("got %q, %v, want what was sent", got, err)
	}
	local := c.LocalAddr().(*net.TCPAddr).AddrPort()
	if got := <-heard; got.Source != local {
		t.Errorf("the service heard of %s, want %s", got.Source, local)
	}
	if o := far.Outcome(t); o.Source != local {
		t.Errorf("the far gateway saw %s, want %s", o.Source, local)
	}
}

// TestDrain: the end of a gateway that reads headers.
func TestDrain(t *testing.T) {
	tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
		g := tunneltest.Serve(t, tunneltest.Setup{
			Protocols:  []tunnel.Protocol{&tunnel.Fixed{To: tunnel.MustParseName("svc.test"), Port: 1}},
			ConnHeader: &ConnHeader{From: loopback}, Resolver: routes,
		})
		return tunneltest.Draining{Served: g.With(&Dialer{Version: 2, Dialer: namedDialer{}}, g.Addr), Socket: g.Addr, Begin: "PROXY"}
	})
}

// TestEnds checks that every byte arrives once and in order, that an end stays an
// end and an abort an abort, in both directions.
func TestEnds(t *testing.T) {
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		g := serve(t, &ConnHeader{From: loopback}, service, straight, &tunnel.Fixed{To: tunnel.MustParseName("svc.test"), Port: 1})
		return &Dialer{Version: 2, Dialer: namedDialer{}}, g.Addr
	}, nil)
}
