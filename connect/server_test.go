package connect

import (
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// The protocol in its place: behind the server's detection and deadlines, in
// front of the router and the relay.
func TestBehindServer(t *testing.T) {
	start := func(service string, timeout time.Duration) *tunneltest.Gateway {
		return tunneltest.Serve(t, tunneltest.Setup{
			Protocols: []tunnel.Protocol{&Protocol{}, &tunnel.Fixed{}}, // with a second one the first is asked
			Resolver:  tunneltest.Table{"svc.test:443": service},
			Limits:    tunnel.Limits{HandshakeTimeout: timeout},
			Socket:    testnet.Listen(t),
		})
	}
	up, down := start(testnet.Greeting(t, "welcome ").Addr(), patience), start(testnet.ClosedPort(t), patience)
	hasty := start(testnet.Greeting(t, "welcome ").Addr(), 200*time.Millisecond)
	rows := []struct {
		name     string
		gw       *tunneltest.Gateway
		in, want string
		reason   tunnel.Reason
		target   string
	}{
		{"a tunnel", up, "CONNECT svc.test:443 HTTP/1.0\r\n\r\nearly", established + "welcome early", tunnel.Done, "svc.test:443"},
		{"no route", up, "CONNECT svc.test:80 HTTP/1.0\r\n\r\nearly", hidden, tunnel.NoRoute, "svc.test:80"},
		{"refused dial", down, "CONNECT svc.test:443 HTTP/1.0\r\n\r\n",
			refusal("502 Bad Gateway", "connection_refused", tunnel.DialFailed, "no endpoint of the service took the connection"), tunnel.DialFailed, "svc.test:443"},
		{"slow head", hasty, "CONNECT svc.test:443 HTTP/1.0\r\n",
			refusal("408 Request Timeout", "http_request_error", tunnel.HelloTimeout, "the request was not complete in time"), tunnel.HelloTimeout, ""},
		{"bad head", up, "CONNECT svc.test HTTP/1.0\r\n\r\n",
			refusal("400 Bad Request", "http_request_error", tunnel.BadRequest, `authority "svc.test" has no port`), tunnel.BadRequest, ""},
	}
	for _, row := range rows {
		c := testnet.Connect(t, row.gw.Addr)
		if _, err := io.WriteString(c, row.in); err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(row.in, "early") {
			_ = c.CloseWrite()
		}
		if got, err := io.ReadAll(c); string(got) != row.want || err != nil {
			t.Errorf("%s: got answer %q, %v, want %q", row.name, got, err, row.want)
		}
		_ = c.Close()
		if o := row.gw.Outcome(t); o.Reason != row.reason || o.Proto != "connect" || o.Target != row.target {
			t.Errorf("%s: got outcome %+v, want reason %q, target %q", row.name, o, row.reason, row.target)
		}
	}
}

func TestProtocol(t *testing.T) {
	svc := tunnel.MustParseName("svc.test")
	tunneltest.TestProtocol(t, &Protocol{},
		tunneltest.Preamble{Title: "HTTP/1.1", Bytes: []byte("CONNECT SVC.test:443 HTTP/1.1\r\nHost: svc.test:443\r\n\r\n"), Name: svc, Port: 443},
		tunneltest.Preamble{Title: "HTTP/1.0 without Host", Bytes: []byte("CONNECT svc.test:443 HTTP/1.0\r\n\r\n"), Name: svc, Port: 443},
		tunneltest.Preamble{Title: "address", Bytes: []byte("CONNECT 192.0.2.7:443 HTTP/1.1\r\nHost: x\r\n\r\n"), Addr: netip.MustParseAddr("192.0.2.7"), Port: 443},
	)
}

// TestDialer runs the suite through a whole gateway.
func TestDialer(t *testing.T) {
	tunneltest.TestDialer(t, func(t *testing.T, backend net.Listener) tunneltest.Dialer {
		g := tunneltest.Serve(t, tunneltest.Setup{
			Protocols: []tunnel.Protocol{&Protocol{}},
			Resolver:  tunneltest.Table{"svc.test:443": backend.Addr().String(), "down.test:443": testnet.ClosedPort(t)},
		})
		return tunneltest.Dialer{Dialer: &Dialer{Proxy: g.Addr}, Addr: "svc.test:443", Refused: map[string]tunnel.Reason{
			"nobody.test:443": tunnel.NoRoute, "down.test:443": tunnel.DialFailed, "svc.test:0": tunnel.BadRequest, "svc.test": tunnel.BadRequest,
		}}
	}, tunneltest.Options{Streams: 1000})
}

// TestDrain: the end of a gateway.
func TestDrain(t *testing.T) {
	tunneltest.TestDrain(t, func(t *testing.T, routes tunnel.Resolver) tunneltest.Draining {
		g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{&Protocol{}}, Resolver: routes})
		return tunneltest.Draining{Served: g.With(&Dialer{Proxy: g.Addr}, "svc.test:443"), Socket: g.Addr, Begin: "CONN"}
	})
}

// TestEnds checks that every byte arrives once and in order, that an end stays an
// end and an abort an abort, in both directions.
func TestEnds(t *testing.T) {
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		g := tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{&Protocol{}}, Resolver: tunneltest.Table{"svc.test:443": service}})
		return &Dialer{Proxy: g.Addr}, "svc.test:443"
	}, nil)
}
