package sni

import (
	"context"
	"net"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// suiteHello is what clients of the suites begin with.
var suiteHello = one(hello(sniExt("svc.test"), alpnExt("h2", "http/1.1")))

// helloDialer dials a gateway and says a hello. The TLS would come behind it.
type helloDialer struct{ gateway string }

func (d helloDialer) DialContext(ctx context.Context, network, _ string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, d.gateway)
	if err != nil {
		return nil, &tunnel.Error{Reason: tunnel.DialFailed, Err: err}
	}
	if _, err := c.Write(suiteHello); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func TestProtocol(t *testing.T) {
	pre := tunneltest.Preamble{Name: tunnel.MustParseName("svc.test"), ALPN: []string{"h2", "http/1.1"}, Passed: true}
	for title, b := range map[string][]byte{"one record": suiteHello, "several records": records(hello(sniExt("svc.test"), alpnExt("h2", "http/1.1")), 1, 5, 20)} {
		pre.Title, pre.Bytes = title, b
		tunneltest.TestProtocol(t, &Protocol{}, pre)
	}
}

// TestDialer runs the suite through a whole gateway, whose service gets the
// hello too.
func TestDialer(t *testing.T) {
	tunneltest.TestDialer(t, func(t *testing.T, backend net.Listener) tunneltest.Dialer {
		g := tunneltest.Serve(t, tunneltest.Setup{
			Protocols: []tunnel.Protocol{&Protocol{}}, Resolver: tunneltest.Table{"svc.test": backend.Addr().String()},
		})
		return tunneltest.Dialer{Dialer: helloDialer{g.Addr}, Preamble: suiteHello}
	}, tunneltest.Options{Streams: 1000})
}

// TestDrain: the end of a gateway.
func TestDrain(t *testing.T) {
	tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
		g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{&Protocol{}}, Resolver: routes})
		return tunneltest.Draining{
			Served: g.With(helloDialer{g.Addr}, "svc.test"), Socket: g.Addr, Begin: "\x16\x03",
			Preamble: suiteHello, No: alert(InternalError),
		}
	})
}

// TestEnds checks that every byte arrives once and in order, that an end stays an
// end and an abort an abort, in both directions.
func TestEnds(t *testing.T) {
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{&Protocol{}}, Resolver: tunneltest.Table{"svc.test": service}})
		return new(net.Dialer), g.Addr
	}, suiteHello)
}
