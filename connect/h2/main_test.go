package h2

import (
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// patience is how long anything in these tests may take.
const patience = time.Minute

func serve(t testing.TB, routes tunnel.Resolver, protocols ...tunnel.Protocol) *tunneltest.Gateway {
	t.Helper()
	return tunneltest.Serve(t, tunneltest.Setup{Protocols: protocols, Resolver: routes})
}

// newDialer returns a Dialer that ends with the test.
func newDialer(t testing.TB, proxy string) *Dialer {
	d := &Dialer{Proxy: proxy, Idle: 50 * time.Millisecond}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// open dials addr.
func open(t testing.TB, d tunnel.Dialer, addr string) *Stream {
	t.Helper()
	return tunneltest.Dial(t, d, addr).(*Stream)
}
