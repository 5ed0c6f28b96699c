package termination

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestStream runs the suite over the two ends that this package makes.
func TestStream(t *testing.T) {
	ca := newCA(t, "example.test")
	keys := &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.example.test").TLS)}
	r, err := newKeySet(keys, nil, len(keys.Names) == 0)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	turn := make(chan struct{}, 1)
	tunneltest.TestStream(t, func() (a, b tunnel.Stream, stop func(), err error) {
		turn <- struct{}{}
		defer func() { <-turn }()
		ends := make(chan tunnel.Stream, 1)
		go func() {
			raw, err := ln.Accept()
			if err != nil {
				ends <- nil
				return
			}
			b := &tlsTransport{Conn: raw, left: MaxHandshake}
			s := tls.Server(b, r.config)
			if err := s.Handshake(); err != nil {
				t.Error(err)
			}
			b.carry()
			ends <- &stream{Conn: s, transport: b}
		}()
		near, err := tlsDialer{roots(ca, "gw.example.test")}.DialContext(context.Background(), "tcp", ln.Addr().String())
		if err != nil {
			return nil, nil, nil, err
		}
		far := <-ends
		return near.(tunnel.Stream), far, func() { _, _ = near.Close(), far.Close() }, nil
	}, tunneltest.Options{})
}

// TestDialers carries CONNECT of both versions inside, all the way to a
// service.
func TestDialers(t *testing.T) {
	ca := newCA(t, "example.test")
	keys := &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.example.test").TLS)}
	for name, make := range map[string]func(t *testing.T, addr string) tunnel.Dialer{
		"connect": func(_ *testing.T, addr string) tunnel.Dialer {
			return &connect.Dialer{Proxy: addr, Dialer: tlsDialer{roots(ca, "gw.example.test", "http/1.1")}}
		},
		"connect-h2": func(t *testing.T, addr string) tunnel.Dialer {
			d := &h2.Dialer{Proxy: addr, TLS: roots(ca, "gw.example.test"), Idle: 50 * time.Millisecond}
			t.Cleanup(func() { _ = d.Close() })
			return d
		},
	} {
		t.Run(name, func(t *testing.T) {
			tunneltest.TestDialer(t, func(t *testing.T, ln net.Listener) tunneltest.Dialer {
				g := serve(t, table{"svc.test": ln.Addr().String(), "down.test": "127.0.0.1:1"}, tunnel.Limits{}, terminating(t, keys, true))
				return tunneltest.Dialer{Dialer: make(t, g.Addr), Addr: "svc.test:443", Refused: map[string]tunnel.Reason{
					"other.test:443": tunnel.NoRoute, "down.test:443": tunnel.DialFailed,
				}}
			}, tunneltest.Options{})
		})
	}
}

// TestResting checks that a tunnel at rest holds no goroutine and no buffer, for
// CONNECT over HTTP/1 inside of TLS.
func TestResting(t *testing.T) {
	ca := newCA(t, "example.test")
	keys := &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.example.test").TLS)}
	tunneltest.TestResting(t, tunneltest.Resting{
		Serve: func(t *testing.T, routes tunnel.Resolver) tunneltest.Served {
			g := serve(t, routes, tunnel.Limits{}, terminating(t, keys, true))
			return g.With(&connect.Dialer{Proxy: g.Addr, Dialer: tlsDialer{roots(ca, "gw.example.test", "http/1.1")}}, "svc.test:443")
		},
		Bytes: 40 << 10,
	})
}

// TestThousandStreams has 1,000 tunnels at once, 100 on a TLS connection.
func TestThousandStreams(t *testing.T) {
	ca := newCA(t, "example.test")
	keys := &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.example.test").TLS)}
	g := serve(t, table{"svc": testnet.Echo(t).Addr()}, tunnel.Limits{}, terminating(t, keys, true))
	d := &h2.Dialer{Proxy: g.Addr, TLS: roots(ca, "gw.example.test"), Idle: 50 * time.Millisecond}
	t.Cleanup(func() { _ = d.Close() })
	tunneltest.TestThousand(t, g.With(d, "svc:1"))
}

// TestEnds checks that every byte arrives once and in order, that an end stays an
// end and an abort an abort, in both directions.
func TestEnds(t *testing.T) {
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		ca := newCA(t, "example.test")
		keys := &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.example.test").TLS)}
		g := serve(t, table{"svc.test": service}, tunnel.Limits{}, terminating(t, keys, true))
		return &connect.Dialer{Proxy: g.Addr, TLS: roots(ca, "gw.example.test")}, "svc.test:443"
	}, nil)
}

// TestEndings: close_notify is an end and nothing else is.
func TestEndings(t *testing.T) {
	ca := newCA(t, "example.test")
	keys := &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.example.test").TLS)}
	seen := make(chan error, 1)
	g := serve(t, table{"svc.test": testnet.Service(t, func(c net.Conn) {
		_, err := io.Copy(io.Discard, c)
		seen <- err
		_, _ = io.WriteString(c, "after your end")
	})}, tunnel.Limits{}, terminating(t, keys, true))
	c := tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr, Dialer: tlsDialer{roots(ca, "gw.example.test")}}, "svc.test:443").(tunnel.Stream)
	_, _ = io.WriteString(c, "hello")
	_ = c.CloseWrite()
	if err := <-seen; err != nil {
		t.Errorf("after close_notify the service saw %v, want the end", err)
	}
	if rest, err := io.ReadAll(c); string(rest) != "after your end" || err != nil {
		t.Errorf("after our end: %q and %v, want what the service sent, and its end", rest, err)
	}

	d := &rawDialer{}
	c = tunneltest.Dial(t, &connect.Dialer{Proxy: g.Addr, Dialer: tlsOver{d, roots(ca, "gw.example.test")}}, "svc.test:443").(tunnel.Stream)
	_, _ = io.WriteString(c, "hello")
	_ = d.last.(*net.TCPConn).CloseWrite() // a FIN, and nothing in TLS
	if err := <-seen; err == nil {
		t.Error("a connection that was cut looked to the service like one that had ended")
	}
	if o, want := g.Reason(t, tunnel.Reset), "the client ended TLS without close_notify"; o.Err == nil || o.Err.Error() != want {
		t.Errorf("the log says %v, want %q", o.Err, want)
	}
}

// A rawDialer knows what it dialed last.
type rawDialer struct{ last net.Conn }

func (d *rawDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	d.last = c
	return c, err
}

// tlsOver is a tlsDialer with a way of its own.
type tlsOver struct {
	way tunnel.Dialer
	cfg *tls.Config
}

func (d tlsOver) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	raw, err := d.way.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	b := &tlsTransport{Conn: raw, left: -1}
	t := tls.Client(b, d.cfg)
	return &stream{Conn: t, transport: b}, t.HandshakeContext(ctx)
}

// TestSlowReaderSeesTheEnd: an end waits for who reads slowly, longer than
// crypto/tls would.
func TestSlowReaderSeesTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := newCA(t, "example.test")
		r, err := newKeySet(&Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.example.test").TLS)}, nil, true)
		if err != nil {
			t.Fatal(err)
		}
		near, far := net.Pipe() // holds nothing
		transport := &tlsTransport{Conn: far, left: -1}
		server := &stream{Conn: tls.Server(transport, r.config), transport: transport}
		client := tls.Client(near, roots(ca, "gw.example.test"))
		go func() { _ = client.Handshake() }()
		if err := server.Handshake(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() {
			_, _ = server.Write([]byte("all of it"))
			ended <- server.CloseWrite()
		}()
		if _, err := io.ReadFull(client, make([]byte, 9)); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Hour)
		if got, err := io.ReadAll(client); len(got) > 0 || err != nil {
			t.Errorf("after an hour: %q and %v, want the end", got, err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
		_, _ = server.Close(), near.Close()
	})
}

// TestSocket: who looks below finds the socket, to keep it alive.
func TestSocket(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	raw, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	for _, transport := range []*tlsTransport{{Conn: raw}, {Conn: tunnel.NewConn(raw)}} {
		var c net.Conn = &stream{Conn: tls.Server(transport, &tls.Config{}), transport: transport}
		for {
			over, ok := c.(interface{ NetConn() net.Conn })
			if !ok {
				break
			}
			c = over.NetConn()
		}
		if c != raw {
			t.Errorf("below is a %T, want the socket", c)
		}
	}
}

// TestDrain: the end of a gateway, with both versions of CONNECT inside.
// Protocols inside are asked to end as those outside are.
func TestDrain(t *testing.T) {
	ca := newCA(t, "example.test")
	keys := &Keys{Certificates: keysOf(issue(t, ca, "gw", "gw.example.test").TLS)}
	start := func(t *testing.T, routes tunnel.Resolver) *tunneltest.Gateway {
		return serve(t, routes, tunnel.Limits{}, terminating(t, keys, true))
	}
	t.Run("connect", func(t *testing.T) {
		tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
			g := start(t, routes)
			d := &connect.Dialer{Proxy: g.Addr, Dialer: tlsDialer{roots(ca, "gw.example.test", "http/1.1")}}
			return tunneltest.Draining{Served: g.With(d, "svc.test:443"), Socket: g.Addr, Begin: "\x16\x03"}
		})
	})
	t.Run("connect-h2", func(t *testing.T) {
		tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
			g := start(t, routes)
			d := &h2.Dialer{Proxy: g.Addr, TLS: roots(ca, "gw.example.test")}
			t.Cleanup(func() { _ = d.Close() })
			return tunneltest.Draining{
				Served: g.With(d, "svc.test:443"), Socket: g.Addr, Begin: "\x16\x03",
				Told: func() bool { return d.Conns() == 0 },
			}
		})
	})
}
