package h2

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// pipes returns a maker of streams between a Dialer and a Protocol, without a
// gateway's Relay between.
func pipes(t *testing.T, p *Protocol) tunneltest.MakePipe {
	return pipesOver(t, p, func(addr string) string { return addr })
}

// pipesOver is pipes over the path that leads to an address.
func pipesOver(t *testing.T, p *Protocol, path func(addr string) string) tunneltest.MakePipe {
	ln := testnet.Listen(t)
	return tunneltest.Pipes(t, func(h tunnel.Handler) tunnel.Dialer {
		backendServe(t, ln, p, h)
		return newDialer(t, path(ln.Addr().String()))
	}, "svc:1")
}

// backendServe serves p on ln without a Server.
func backendServe(t testing.TB, ln net.Listener, p tunnel.Protocol, h tunnel.Handler) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{})
	conns := make(chan struct{}, 1000)
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			conns <- struct{}{}
			go func() {
				defer func() { <-conns }()
				_ = p.ServeConn(ctx, tunnel.NewConn(c), h)
				_ = c.Close()
			}()
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		cancel()
		<-done
		testnet.Eventually(t, patience, func() bool { return len(conns) == 0 }, "the connections end")
	})
}

func TestStream(t *testing.T) {
	tunneltest.TestStream(t, pipes(t, &Protocol{}), tunneltest.Options{})
}

// TestDialer runs the suite through a whole gateway.
func TestDialer(t *testing.T) {
	tunneltest.TestDialer(t, func(t *testing.T, backend net.Listener) tunneltest.Dialer {
		g := serve(t, tunneltest.Table{"svc:1": backend.Addr().String(), "closed:1": testnet.ClosedPort(t)}, &Protocol{})
		return tunneltest.Dialer{
			Dialer: newDialer(t, g.Addr), Addr: "svc:1",
			Refused: map[string]tunnel.Reason{"nobody:1": tunnel.NoRoute, "closed:1": tunnel.DialFailed, "svc:0": tunnel.BadRequest},
		}
	}, tunneltest.Options{})
}

// TestDrain: the end of a gateway. A request behind the last GOAWAY is refused
// so that the client may try it elsewhere, RFC 9113 section 8.7.
func TestDrain(t *testing.T) {
	tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
		g := serve(t, routes, &Protocol{})
		d := newDialer(t, g.Addr)
		d.Idle = time.Minute
		return tunneltest.Draining{
			Served: g.With(d, "svc:1"), Socket: g.Addr, Begin: "PRI * ",
			Told: func() bool { return d.Conns() == 0 },
			Late: func(t *testing.T) func() { return late(t, g.Addr) },
			Cut: func(err error) bool {
				re, ok := errors.AsType[*ResetError](err)
				return ok && re.Code == http2.ErrCodeConnect
			},
		}
	})
}

// late has a raw client ask between the two GOAWAYs, which is served, and
// behind the last one, which is refused: it may try elsewhere, RFC 9113 section
// 8.7.
func late(t *testing.T, addr string) (ask func()) {
	r := rawClient(t, addr)
	_ = r.connect(1, "svc:1")
	if a := r.answer(1); a.status != "200" {
		t.Fatalf("got %+v", a)
	}
	goAway := func() uint32 {
		for {
			f, err := r.next()
			if err != nil {
				t.Fatal(err)
			}
			if f, ok := f.(*http2.GoAwayFrame); ok {
				return f.LastStreamID
			}
		}
	}
	return func() {
		if id := goAway(); id != 1<<31-1 {
			t.Errorf("the first GOAWAY has stream %d, want none that is not taken", id)
		}
		_ = r.connect(3, "svc:1")
		if a := r.answer(3); a.status != "200" {
			t.Errorf("a request that is on its way: got %+v, want 200", a)
		}
		if id := goAway(); id != 3 {
			t.Errorf("the last GOAWAY has stream %d, want 3", id)
		}
		_ = r.connect(5, "svc:1")
		if a := r.answer(5); a.reset != http2.ErrCodeRefusedStream || a.status != "" {
			t.Errorf("a request behind the last GOAWAY: got %+v, want REFUSED_STREAM", a)
		}
		_ = r.fr.WriteRSTStream(1, http2.ErrCodeCancel)
		_ = r.fr.WriteRSTStream(3, http2.ErrCodeCancel)
		_ = r.Close()
	}
}

// TestShared is of streams on one connection.
func TestShared(t *testing.T) {
	tunneltest.TestShared(t, tunneltest.Shared{
		Serve: func(t *testing.T, routes tunnel.Resolver, streams, conns int) tunneltest.Served {
			g := serve(t, routes, &Protocol{Streams: streams})
			d := newDialer(t, g.Addr)
			d.Idle, d.Parallel = time.Minute, conns
			return g.With(d, "svc:1")
		},
		Pipes: func(t *testing.T, streams int) tunneltest.MakePipe { return pipes(t, &Protocol{Streams: streams}) },
		Cut:   func(c net.Conn) { _ = c.(*Stream).c.nc.Close() },
		Least: streamWindow, Most: streamWindow, Idle: 2 << 10, Fair: true,
		Aborted: func(err error, byTheServer bool) bool {
			re, ok := errors.AsType[*ResetError](err)
			return ok && (byTheServer && re.Code == http2.ErrCodeConnect || !byTheServer && re.Code == http2.ErrCodeCancel)
		},
		Panicking: func(err error) bool {
			re, ok := errors.AsType[*ResetError](err)
			return ok && re.Code == http2.ErrCodeInternal
		},
	})
}

// TestEnds checks that every byte arrives once and in order, that an end stays an
// end and an abort an abort, in both directions.
func TestEnds(t *testing.T) {
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		return newDialer(t, serve(t, tunneltest.Table{"svc:1": service}, &Protocol{}).Addr), "svc:1"
	}, nil)
}
