package ssh

import (
	"net"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestStream runs the suite of streams. An abort is a close of the channel, which looks like
// an end: see the package's documentation.
func TestStream(t *testing.T) {
	key := newKey(t)
	makePipe := tunneltest.Pipes(t, func(h tunnel.Handler) tunnel.Dialer {
		ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		p := newProtocol(t, key.PublicKey(), "")
		p.Streams = 1000
		s := &tunnel.Server{Handler: h}
		done := make(chan error, 1)
		go func() { done <- s.Serve(t.Context(), tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{p}}) }()
		t.Cleanup(func() {
			_ = s.Close()
			<-done
		})
		return newDialer(t, ln.Addr().String(), key)
	}, "svc:1")
	tunneltest.TestStream(t, makePipe, tunneltest.Options{NoAbort: true})
}

// TestDialer runs the suite of dialers through a whole gateway.
func TestDialer(t *testing.T) {
	key := newKey(t)
	tunneltest.TestDialer(t, func(t *testing.T, backend net.Listener) tunneltest.Dialer {
		g := serve(t, tunneltest.Table{"svc:1": backend.Addr().String(), "closed:1": testnet.ClosedPort(t)}, newProtocol(t, key.PublicKey(), ""))
		return tunneltest.Dialer{
			Dialer: newDialer(t, g.Addr, key), Addr: "svc:1",
			Refused: map[string]tunnel.Reason{"nobody:1": tunnel.NoRoute, "closed:1": tunnel.DialFailed, "svc:0": tunnel.BadRequest},
		}
	}, tunneltest.Options{NoAbort: true})
}
