package ws

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// pair returns the two sides of a WebSocket over TCP.
func pair(subprotocol string, o Options) (client, server *Stream, err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer ln.Close()
	out, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		return nil, nil, err
	}
	in, err := ln.Accept()
	if err != nil {
		return nil, nil, err
	}
	return NewStream(out, Client, subprotocol, o), NewStream(in, Server, subprotocol, o), nil
}

// TestPingsThatWaited: those that a peer sent while nobody read from it come at
// once, and are no flood. What comes behind them is.
func TestPingsThatWaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := testnet.Pipe()
		s := NewStream(far, Client, Subprotocol, Options{Ping: -1})
		defer near.Close()
		defer s.Abort()
		for range 2 {
			for range 180 { // an hour's
				time.Sleep(20 * time.Second)
				_, _ = near.Write(frame(0x89, false, nil))
			}
			_, _ = near.Write(frame(0x82, false, []byte("x")))
			if n, err := s.Read(make([]byte, 1)); n != 1 || err != nil {
				t.Fatalf("after the pings of an hour: %v", err)
			}
		}
		_, _ = near.Write(bytes.Repeat(frame(0x89, false, nil), 4000))
		if _, err := s.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "frames without data") {
			t.Errorf("a flood ends with %v", err)
		}
	})
}

// TestBrokenByAPing: where a ping was the first to hear of a reset, a relay that does not read
// hears of it all the same.
func TestBrokenByAPing(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	peer, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	s := NewStream(conn, Server, Subprotocol, Options{Ping: 5 * time.Millisecond})
	defer s.Abort()
	if err := s.Broken(); err != nil {
		t.Errorf("a stream that stands is broken: %v", err)
	}
	_ = testnet.Abort(peer)
	testnet.Eventually(t, patience, func() bool { return s.Broken() != nil }, "a ping has failed")
	if err := s.Broken(); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("broken by %v, want the reset", err)
	}
}

func TestStream(t *testing.T) {
	for name, row := range map[string]struct {
		subprotocol string
		opts        tunneltest.Options
	}{
		"culvert.v1": {Subprotocol, tunneltest.Options{}},
		"strangers":  {"", tunneltest.Options{NoHalfClose: true, Streams: 1000}},
	} {
		t.Run(name, func(t *testing.T) {
			tunneltest.TestStream(t, func() (a, b tunnel.Stream, stop func(), err error) {
				client, server, err := pair(row.subprotocol, Options{})
				if err != nil {
					return nil, nil, nil, err
				}
				return client, server, func() { _, _ = client.Close(), server.Close() }, nil
			}, row.opts)
		})
	}
}

func TestDialer(t *testing.T) {
	setup := func(d *Dialer) func(t *testing.T, backend net.Listener) tunneltest.Dialer {
		return func(t *testing.T, backend net.Listener) tunneltest.Dialer {
			const closed = "127.0.0.1:1" // nobody's, where a port that was free may be taken again
			g := serve(t, tunneltest.Table{"svc.test:443": backend.Addr().String(), "down.test:443": closed}, &Protocol{})
			here := *d
			here.URL += "ws://" + g.Addr
			return tunneltest.Dialer{Dialer: &here, Addr: "svc.test:443", Refused: map[string]tunnel.Reason{
				"nobody.test:443": tunnel.NoRoute,
				"down.test:443":   tunnel.DialFailed,
				"svc.test":        tunnel.BadRequest,
			}}
		}
	}
	t.Run("path", func(t *testing.T) { tunneltest.TestDialer(t, setup(&Dialer{}), tunneltest.Options{}) })
	t.Run("field", func(t *testing.T) {
		tunneltest.TestDialer(t, setup(&Dialer{InField: true}), tunneltest.Options{Streams: 1000})
	})
}

// wss, to something that ends the TLS and passes on what is in it.
func TestDialerTLS(t *testing.T) {
	ca, err := testca.New("ws.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://ws.test/lb", DNSNames: []string{"lb.test"}, Usage: testca.ServerOnly})
	if err != nil {
		t.Fatal(err)
	}
	g := serve(t, tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()}, &Protocol{Path: "/edge/"})
	front := terminate(t, g.Addr, &tls.Config{Certificates: cert.ServerConfig().Certificates})
	d := &Dialer{URL: "wss://lb.test/edge/", TLS: &tls.Config{RootCAs: ca.Pool()}, Dialer: via(front)}
	open := func() *Stream {
		t.Helper()
		c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		return c.(*Stream)
	}
	want := strings.Repeat("there and back ", 10000)
	c := open()
	go func() {
		_, _ = io.WriteString(c, want)
		_ = c.CloseWrite()
	}()
	if got, err := io.ReadAll(c); string(got) != want || err != nil {
		t.Errorf("got %d bytes, %v, want the %d that were sent and their end", len(got), err, len(want))
	}
	_ = c.Close()
	if o := g.Outcome(t); o.Reason != tunnel.Done {
		t.Errorf("got outcome %s, %v, want %s", o.Reason, o.Err, tunnel.Done)
	}

	c = open()
	_, _ = io.WriteString(c, "x")
	_, _ = io.ReadFull(c, make([]byte, 1))
	_ = c.Abort()
	if o := g.Outcome(t); o.Reason != tunnel.Reset {
		t.Errorf("after an abort: got outcome %s, %v, want %s", o.Reason, o.Err, tunnel.Reset)
	}

	d.TLS = nil // the system's roots do not know the CA
	if _, err := d.DialContext(t.Context(), "tcp", "svc.test:443"); tunnel.ReasonOf(err) != tunnel.DialFailed {
		t.Errorf("with a certificate of nobody's: got %v, want %s", err, tunnel.DialFailed)
	}
}

// via dials one address, whatever is asked for.
type via string

func (v via) DialContext(ctx context.Context, network, _ string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, string(v))
}

// terminate is a load balancer at its simplest: bytes in TLS in, bytes out.
func terminate(t *testing.T, to string, cfg *tls.Config) string {
	return testnet.Service(t, func(c net.Conn) {
		in := tls.Server(c, cfg)
		out, err := net.Dial("tcp", to)
		if err != nil {
			return
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			if _, err := io.Copy(in, out); err == nil {
				_ = in.CloseWrite()
			}
			_ = c.Close()
		}()
		if _, err := io.Copy(out, in); err == nil {
			_ = out.(*net.TCPConn).CloseWrite()
			<-done
		}
		_ = out.Close()
		<-done
	})
}

// TestDrain: the end of a gateway.
func TestDrain(t *testing.T) {
	tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
		g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{&Protocol{}}, Resolver: routes})
		return tunneltest.Draining{
			Served: g.With(&Dialer{URL: "ws://" + g.Addr}, "svc.test:443"), Socket: g.Addr, Begin: "GET /",
			Cut: func(err error) bool { // the code where it could be said
				said, ok := errors.AsType[*closeError](err)
				return ok && said.code == codeGoingAway || errors.Is(err, syscall.ECONNRESET)
			},
		}
	})
}

// TestResting checks that a tunnel at rest holds no goroutine and no buffer, over
// TCP and over HTTP/2.
func TestResting(t *testing.T) {
	t.Run("over TCP", func(t *testing.T) {
		tunneltest.TestResting(t, tunneltest.Resting{
			Serve: func(t *testing.T, routes tunnel.Resolver) tunneltest.Served {
				g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{&Protocol{}}, Resolver: routes})
				return g.With(&Dialer{URL: "ws://" + g.Addr}, "svc.test:443")
			},
			Bytes: 16 << 10, Aborted: aborted,
		})
	})
	t.Run("over HTTP2", func(t *testing.T) {
		tunneltest.TestResting(t, tunneltest.Resting{
			Serve: func(t *testing.T, routes tunnel.Resolver) tunneltest.Served {
				g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{extended()}, Resolver: routes})
				d, pool := overHTTP2(t, g.Addr)
				pool.Parallel = 1
				return g.With(d, "svc.test:443")
			},
			Bytes: 16 << 10, Aborted: aborted,
		})
	})
}

// aborted reports whether err is an abort, with its code where that could be
// said.
func aborted(err error) bool {
	said, ok := errors.AsType[*closeError](err)
	return ok && said.code == codeInternal || errors.Is(err, syscall.ECONNRESET)
}

// TestEnds checks that every byte arrives once and in order, that an end stays an
// end and an abort an abort, in both directions.
func TestEnds(t *testing.T) {
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		return &Dialer{URL: "ws://" + serve(t, tunneltest.Table{"svc.test:443": service}, &Protocol{}).Addr}, "svc.test:443"
	}, nil)
}
