package tunneltest_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// opaque hides that a connection is TCP, so that the Relay copies.
type opaque struct{ net.Conn }

func (o opaque) CloseWrite() error { return o.Conn.(interface{ CloseWrite() error }).CloseWrite() }

func (o opaque) Abort() error {
	_ = o.Conn.(interface{ SetLinger(int) error }).SetLinger(0)
	return o.Close()
}

// A namedDialer reaches any address.
type namedDialer struct{ tunnel.NetDialer }

func (d *namedDialer) DialContext(ctx context.Context, _, addr string) (net.Conn, error) {
	return d.DialEndpoint(ctx, tunnel.Endpoint{Addr: netip.MustParseAddrPort(addr), Named: true})
}

// opaqueDialer is a namedDialer that hides what it dialed.
type opaqueDialer struct{ namedDialer }

func (d *opaqueDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := d.namedDialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return opaque{c}, nil
}

// DialEndpoint hides the one that would hand out the bare connection.
func (*opaqueDialer) DialEndpoint() {}

// gateway starts a gateway with one listener that leads to backend, and
// returns its address.
func gateway(t *testing.T, backend string, dialer tunnel.Dialer) string {
	t.Helper()
	ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	relay := &tunnel.Relay{}
	to := tunnel.Endpoint{Addr: netip.MustParseAddrPort(backend), Named: true}
	srv := &tunnel.Server{
		Handler: &tunnel.Router{Relay: relay, Dialer: dialer, Resolver: resolver{to}},
		Limits:  tunnel.Limits{ConnectionRatePerClient: -1},
	}
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&tunnel.Fixed{To: tunnel.MustParseName("svc"), Port: 1}}})
	}()
	t.Cleanup(func() {
		if err := srv.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		if err := <-served; err != tunnel.ErrServerClosed {
			t.Error(err)
		}
		_ = relay.Close()
	})
	return ln.Addr().String()
}

type resolver struct{ to tunnel.Endpoint }

func (r resolver) Resolve(context.Context, *tunnel.Request) (tunnel.Route, error) {
	return tunnel.Route{Service: "svc", Endpoints: []tunnel.Endpoint{r.to}}, nil
}

// TestRelay runs the suites over plain TCP through a whole gateway with a port
// per service, on each of the Relay's paths.
func TestRelay(t *testing.T) {
	for name, dialer := range map[string]tunnel.Dialer{"kernel": &namedDialer{}, "copy": &opaqueDialer{}} {
		t.Run(name, func(t *testing.T) {
			tunneltest.TestDialer(t, func(t *testing.T, backend net.Listener) tunneltest.Dialer {
				closed, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				_ = closed.Close()
				return tunneltest.Dialer{
					Dialer:  &namedDialer{},
					Addr:    gateway(t, backend.Addr().String(), dialer),
					Refused: map[string]tunnel.Reason{closed.Addr().String(): tunnel.DialFailed},
				}
			}, tunneltest.Options{Streams: 1000})
		})
	}
}

// TestNetDialer runs the suite without a gateway between, and with a guard.
func TestNetDialer(t *testing.T) {
	tunneltest.TestDialer(t, func(t *testing.T, backend net.Listener) tunneltest.Dialer {
		own := &tunnel.Guard{}
		own.OwnListener(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 443})
		return tunneltest.Dialer{
			Dialer: &namedDialer{tunnel.NetDialer{Guard: own}}, Addr: backend.Addr().String(),
			Refused: map[string]tunnel.Reason{"127.0.0.1:443": tunnel.Loop},
		}
	}, tunneltest.Options{Streams: 10, Bytes: 1 << 20})
}

// lengthProtocol has a preamble of one byte that says how long the name is
// that follows.
type lengthProtocol struct{ passed bool }

func (*lengthProtocol) Name() string { return "length" }

func (*lengthProtocol) Sniff(prefix []byte) tunnel.Verdict {
	switch {
	case prefix[0] > 63 || len(prefix) > 1 && prefix[1] != 'x':
		return tunnel.No
	case len(prefix) == 1:
		return tunnel.More
	}
	return tunnel.Yes
}

func (p *lengthProtocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	for len(c.Buffered()) == 0 || len(c.Buffered()) <= int(c.Buffered()[0]) {
		if err := c.Fill(100); err != nil {
			return tunnel.PreambleError(c, err)
		}
	}
	n := int(c.Buffered()[0])
	name, err := tunnel.ParseName(string(c.Buffered()[1 : 1+n]))
	if err != nil {
		return &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
	}
	if !p.passed {
		c.Discard(1 + n)
	}
	req := c.NewRequest("length")
	req.Name = name
	h.ServeTunnel(ctx, req)
	return nil
}

func TestProtocol(t *testing.T) {
	for _, passed := range []bool{true, false} {
		tunneltest.TestProtocol(t, &lengthProtocol{passed}, tunneltest.Preamble{
			Title: "named", Bytes: append([]byte{11}, "xyz.example"...), Name: tunnel.MustParseName("xyz.example"), Passed: passed,
		})
	}
	to := tunnel.MustParseName("svc")
	tunneltest.TestProtocol(t, &tunnel.Fixed{To: to, Port: 25}, tunneltest.Preamble{Title: "nothing", Name: to, Port: 25})
}

// TestStreamWithoutHalfClose runs the suite on streams that can do little.
func TestStreamWithoutHalfClose(t *testing.T) {
	tunneltest.TestStream(t, func() (a, b tunnel.Stream, stop func(), err error) {
		x, y := net.Pipe()
		return plain{x}, plain{y}, func() { _, _ = x.Close(), y.Close() }, nil
	}, tunneltest.Options{NoHalfClose: true, NoAbort: true, Streams: 10, Bytes: 1 << 20})
}

// plain is a Stream that can't half-close.
type plain struct{ net.Conn }

func (plain) CloseWrite() error { return errors.ErrUnsupported }

// TestDrain runs the suite for a port per service.
func TestDrain(t *testing.T) {
	tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
		g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{&tunnel.Fixed{To: tunnel.MustParseName("svc"), Port: 1}}, Resolver: routes})
		return tunneltest.Draining{Served: g.With(&namedDialer{}, g.Addr)}
	})
}

// TestEnds checks that every byte arrives once and in order, that an end stays an
// end and an abort an abort, in both directions.
func TestEnds(t *testing.T) {
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		return &namedDialer{}, gateway(t, service, &namedDialer{})
	}, nil)
}
