package gateway

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/registry/alloc"
	"culvert.dev/tunnel"
)

// endpointOf is where a test server is.
func endpointOf(s *testnet.Server) registry.Endpoint {
	return registry.Endpoint{Addr: s.AddrPort().Addr(), Port: s.AddrPort().Port()}
}

// wantReset dials addr and wants to be cut off without a byte, for the reason.
func (r *running) wantReset(addr string, why tunnel.Reason) {
	r.t.Helper()
	c, err := net.Dial("tcp", addr)
	if err == nil {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(soon))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		r.t.Errorf("the client saw %v, want a reset", err)
	}
	testnet.Eventually(r.t, soon, func() bool { return strings.Contains(r.log.String(), "reason="+string(why)+" ") }, "the log has the reason %s", why)
}

// Nothing that a client sends is read: what other ports take for a name, or for
// a mistake, goes to the service as it is.
func TestServicePortsReadNothing(t *testing.T) {
	s := newSite(t, 3)
	r := s.start(published("a.test", endpointOf(testnet.Echo(t))), published("b.test", endpointOf(testnet.Discard(t))))
	for name, sent := range map[string][]byte{
		"TLS":      append([]byte("\x16\x03\x01\x00\x30\x01\x00\x00\x2c\x03\x03"), bytes.Repeat([]byte{7}, 42)...),
		"CONNECT":  []byte("CONNECT b.test:443 HTTP/1.1\r\nHost: b.test\r\n\r\n"),
		"HTTP/2":   []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
		"SOCKS5":   {5, 1, 0},
		"PROXY":    []byte("PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n"),
		"SSH":      []byte("SSH-2.0-OpenSSH_9.2\r\n"),
		"zeros":    make([]byte, 100_000),
		"one byte": {0x16},
		"nothing":  nil,
	} {
		t.Run(name, func(t *testing.T) {
			c, err := net.Dial("tcp", r.address("a.test"))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(soon))
			if _, err := c.Write(sent); err != nil {
				t.Fatal(err)
			}
			if err := c.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(c); !bytes.Equal(got, sent) || err != nil {
				t.Errorf("got %d bytes, %v, want the %d that were sent", len(got), err, len(sent))
			}
		})
	}
}

// Every byte is carried, and ends as they are, in both directions.
func TestServicePortsCarryEndings(t *testing.T) {
	testnet.TestPath(t, func(t *testing.T, service string) (testnet.Dialer, string) {
		r := newSite(t, 3).start(published("a.test", netipEndpoint(service)))
		return new(net.Dialer), r.address("a.test")
	}, nil)
}

func TestServicePortsOfServicesThatAreDown(t *testing.T) {
	s := newSite(t, 3)
	down := registry.Endpoint{Addr: s.cfg.Address, Port: 1} // an address of the test's own
	r := s.start(published("down.test", down), published("none.test", registry.Endpoint{Host: "unknown.test", Port: 25}))
	r.wantReset(r.address("down.test"), tunnel.DialFailed)
	r.wantReset(r.address("none.test"), tunnel.LookupError)
}

// A service that leads back to its own port is found out.
func TestServicePortsThatLeadToThemselves(t *testing.T) {
	s := newSite(t, 3)
	plan := alloc.PortPlan{Range: s.cfg.Range, Now: time.Now()}
	will, _ := plan.Assign([]alloc.PortKey{{Protocol: "tcp", Service: "a.test"}}, nil)
	r := s.start(published("a.test", registry.Endpoint{Addr: s.cfg.Address, Port: will[0].Assigned}))
	r.wantReset(r.address("a.test"), tunnel.Loop)
}

// The limits of one source hold for all ports together.
func TestServicePortsShareTheLimits(t *testing.T) {
	s := newSite(t, 3)
	s.limits.MaxConnectionsPerClient = 2
	r := s.start(published("a.test", greeter(t, "hello")), published("b.test", greeter(t, "hello")))
	r.greeted(r.address("a.test"), "hello")
	r.greeted(r.address("b.test"), "hello")
	r.wantReset(r.address("a.test"), tunnel.Overload)
}
