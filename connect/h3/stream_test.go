package h3

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
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
	return tunneltest.Pipes(t, func(h tunnel.Handler) tunnel.Dialer {
		return newDialer(t, path(serveHandler(t, s, h)))
	}, "svc:1")
}

func TestStream(t *testing.T) {
	tunneltest.TestStream(t, pipes(t, &Server{}), tunneltest.Options{})
}

// TestDialer runs the suite through a whole gateway.
func TestDialer(t *testing.T) {
	tunneltest.TestDialer(t, func(t *testing.T, backend net.Listener) tunneltest.Dialer {
		g := serve(t, tunneltest.Table{"svc:1": backend.Addr().String(), "closed:1": testnet.ClosedPort(t)}, &Server{})
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
			Served: g.with(d),
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

// TestShared is of streams on one connection.
func TestShared(t *testing.T) {
	tunneltest.TestShared(t, tunneltest.Shared{
		Serve: func(t *testing.T, routes tunnel.Resolver, streams, conns int) tunneltest.Served {
			g := serve(t, routes, &Server{Streams: streams})
			d := newDialer(t, g.addr)
			d.Idle, d.Parallel = time.Minute, conns
			return g.with(d)
		},
		Pipes: func(t *testing.T, streams int) tunneltest.MakePipe { return pipes(t, &Server{Streams: streams}) },
		Cut:   func(c net.Conn) { _ = c.(*Stream).c.qc.CloseWithError(0x177, "") },
		Least: streamWindow - 100, Most: streamWindow + 2<<10, // with the head of the request, and a packet
		Idle: 4 << 10,
		Aborted: func(err error, byTheServer bool) bool { // RFC 9114 sections 4.1.1 and 4.4
			re, ok := errors.AsType[*ResetError](err)
			return ok && (byTheServer && re.Code == ConnectError || !byTheServer && re.Code == RequestCancelled)
		},
		Panicking: func(err error) bool {
			re, ok := errors.AsType[*ResetError](err)
			return ok && re.Code == InternalError
		},
	})
}

// TestResting checks that a tunnel at rest holds no buffer, and one small
// goroutine, which waits.
func TestResting(t *testing.T) {
	tunneltest.TestResting(t, tunneltest.Resting{
		Serve: func(t *testing.T, routes tunnel.Resolver) tunneltest.Served {
			g := serve(t, routes, &Server{})
			d := newDialer(t, g.addr)
			d.Idle, d.Parallel = time.Minute, 1
			return g.with(d)
		},
		Goroutines: 1, Bytes: 24 << 10,
	})
}

// TestEnds checks that every byte arrives once and in order, that an end stays an
// end and an abort an abort, in both directions.
func TestEnds(t *testing.T) {
	var g *gateway
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		g = serve(t, tunneltest.Table{"svc:1": service}, &Server{})
		return newDialer(t, g.addr), "svc:1"
	}, nil)
	testnet.Eventually(t, testTimeout, func() bool { return g.relay.Open() == 0 }, "the tunnels end")
}

// A slowScript is a script that a deadline interrupts after each Read.
type slowScript struct {
	script
	late bool
}

func (s *slowScript) Read(p []byte) (int, error) {
	if s.late = !s.late; s.late {
		return 0, os.ErrDeadlineExceeded
	}
	return s.script.Read(p)
}

// TestDeadlineInsideOfASkippedFrame: what is left of a frame of an unknown type
// when a read deadline comes is no data of the stream.
func TestDeadlineInsideOfASkippedFrame(t *testing.T) {
	in := append(appendFrameHead(nil, 0x21, 40), strings.Repeat("skip", 10)...)
	in = append(append(in, appendFrameHead(nil, frameData, 5)...), "hello"...)
	in = append(append(in, appendFrameHead(nil, 0x40, 3)...), "end"...)
	for _, size := range []int{1, 3, 100} {
		s := newStream(&conn{side: &serverConn{}}, &slowScript{script: script{in: bytes.Clone(in), size: size}})
		var got []byte
		for {
			b := make([]byte, 16)
			n, err := s.Read(b)
			got = append(got, b[:n]...)
			if err == io.EOF {
				break
			} else if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal(err)
			}
		}
		if string(got) != "hello" {
			t.Errorf("in pieces of %d: got %q, want hello", size, got)
		}
	}
}

// TestBrokenTellsAnAbortFromAClose: a Relay that does not read hears of a peer that
// has aborted its stream, and goes on to deliver what one has sent that has closed it.
func TestBrokenTellsAnAbortFromAClose(t *testing.T) {
	makePipe := pipes(t, &Server{})
	for _, abort := range []bool{true, false} {
		a, b, stop, err := makePipe()
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		near, far := a.(*Stream), b.(*Stream)
		if _, err := near.Write([]byte("sent before")); err != nil {
			t.Fatal(err)
		}
		if err := far.Broken(); err != nil {
			t.Errorf("a stream that stands: %v", err)
		}
		if abort {
			_ = near.Abort()
			testnet.Eventually(t, testTimeout, func() bool { return errors.Is(far.Broken(), syscall.ECONNRESET) }, "the abort is told")
			continue
		}
		_ = near.Close()
		testnet.Eventually(t, testTimeout, func() bool { return far.Broken() != nil }, "the close is told")
		if err := far.Broken(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a peer that has closed: %v", err)
		}
		if got, err := io.ReadAll(far); err != nil || string(got) != "sent before" {
			t.Errorf("what it sent: %q, %v", got, err)
		}
	}
}
