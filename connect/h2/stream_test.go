package h2

import (
	"context"
	"net"
	"testing"

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
	backendServe(t, ln, p, h)
	d := newDialer(t, path(ln.Addr().String()))
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
		closed := testnet.Listen(t)
		_ = closed.Close()
		g := serve(t, tunneltest.Table{"svc:1": backend.Addr().String(), "closed:1": closed.Addr().String()}, &Protocol{})
		return tunneltest.Dialer{
			Dialer: newDialer(t, g.Addr), Addr: "svc:1",
			Refused: map[string]tunnel.Reason{"nobody:1": tunnel.NoRoute, "closed:1": tunnel.DialFailed, "svc:0": tunnel.BadRequest},
		}
	}, tunneltest.Options{})
}
