package h3

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// pipes returns a maker of streams between a Dialer and a Server, without a
// gateway's Relay between.
func pipes(t *testing.T, s *Server) tunneltest.MakePipe {
	return pipesOver(t, s, func(addr string) string { return addr })
}

// pipesOver is pipes over the path that leads to an address.
func pipesOver(t *testing.T, s *Server, path func(addr string) string) tunneltest.MakePipe {
	accepted := make(chan tunnel.Stream)
	h := tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		s, err := req.Accept()
		if err != nil {
			return
		}
		select {
		case accepted <- s:
		case <-ctx.Done():
		}
	})
	d := newDialer(t, path(serveHandler(t, s, h)))
	turn := make(chan struct{}, 1) // one at a time, so that the ends belong together
	return func() (a, b tunnel.Stream, stop func(), err error) {
		turn <- struct{}{}
		defer func() { <-turn }()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		c, err := d.DialContext(ctx, "tcp", "svc:1")
		if err != nil {
			return nil, nil, nil, err
		}
		a = c.(*Stream)
		b = <-accepted
		return a, b, func() { _, _ = a.Close(), b.Close() }, nil
	}
}

func TestStream(t *testing.T) {
	tunneltest.TestStream(t, pipes(t, &Server{}), tunneltest.Options{})
}

// TestDialer runs the suite through a whole gateway.
func TestDialer(t *testing.T) {
	tunneltest.TestDialer(t, func(t *testing.T, backend net.Listener) tunneltest.Dialer {
		closed := testnet.Listen(t)
		_ = closed.Close()
		g := serve(t, tunneltest.Table{"svc:1": backend.Addr().String(), "closed:1": closed.Addr().String()}, &Server{})
		return tunneltest.Dialer{
			Dialer: newDialer(t, g.addr), Addr: "svc:1",
			Refused: map[string]tunnel.Reason{"nobody:1": tunnel.NoRoute, "closed:1": tunnel.DialFailed, "svc:0": tunnel.BadRequest},
		}
	}, tunneltest.Options{})
}

// TestDrain: the end of a gateway.
func TestDrain(t *testing.T) {
	tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
		g := serve(t, routes, &Server{})
		d := newDialer(t, g.addr)
		d.Idle = time.Minute
		return tunneltest.Draining{
			Served: tunneltest.Served{Record: &g.Record, Relay: g.relay, Server: g.srv, Dialer: d, Addr: "svc:1"},
			Told:   func() bool { return d.Conns() == 0 },
			Late:   func(t *testing.T) func() { return late(t, g.addr) },
			Cut: func(err error) bool {
				re, ok := errors.AsType[*ResetError](err)
				return ok && re.Code == ConnectError
			},
		}
	})
}

// late has a raw client ask between the two GOAWAYs, which is served, and
// behind the last one, which is rejected.
func late(t *testing.T, addr string) (ask func()) {
	r := rawClient(t, addr)
	r.begin()
	if a := r.request(connectSvc...).answer(); a.status != 200 {
		t.Fatalf("got %+v", a)
	}
	return func() {
		in, err := r.qc.AcceptUniStream(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		f := frameReader{r: in}
		if kind, err := f.number(); err != nil || kind != streamControl {
			t.Fatalf("a stream of type %d, %v", kind, err)
		}
		goAway := func() uint64 {
			for {
				typ, err := f.next()
				if err != nil {
					t.Fatal(err)
				}
				if b, _ := f.payload(); typ == frameGoAway {
					id, _, _ := quicvarint.Parse(b)
					return id
				}
			}
		}
		if id := goAway(); id != lastID {
			t.Errorf("the first GOAWAY has stream %d, want %d", id, uint64(lastID))
		}
		if a := r.request(connectSvc...).answer(); a.status != 200 {
			t.Errorf("a request that is on its way: got %+v, want 200", a)
		}
		if id := goAway(); id != 8 {
			t.Errorf("the last GOAWAY has stream %d, want 8", id)
		}
		if a := r.request(connectSvc...).answer(); a.reset != RequestRejected || a.status != 0 {
			t.Errorf("a request behind the last GOAWAY: got %+v, want H3_REQUEST_REJECTED", a)
		}
		_ = r.qc.CloseWithError(quic.ApplicationErrorCode(NoError), "") // or the gateway gives it three seconds for that
	}
}
