package ws

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long anything in these tests may take.
const patience = 10 * time.Second

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

func dial(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c.(*net.TCPConn)
}

// A table is a Resolver: targets and the addresses they lead to.
type table map[string]string

func (r table) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	addr, ok := r[req.Target()]
	if !ok {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no service has the name and port %q", req.Target())
	}
	ep := tunnel.Endpoint{Addr: netip.MustParseAddrPort(addr), Named: true}
	return tunnel.Route{Service: req.Target(), Endpoints: []tunnel.Endpoint{ep}}, nil
}

// A gateway is the Protocol in its place: behind the server's detection and
// deadlines, in front of the router and the relay.
type gateway struct {
	addr     string
	outcomes chan tunnel.Outcome
}

func (g *gateway) outcome(t *testing.T) tunnel.Outcome {
	t.Helper()
	select {
	case o := <-g.outcomes:
		return o
	case <-time.After(patience):
		t.Fatal("no outcome")
		return tunnel.Outcome{}
	}
}

func serve(t *testing.T, routes table, protocols ...tunnel.Protocol) *gateway {
	t.Helper()
	ln := listen(t)
	g := &gateway{addr: ln.Addr().String(), outcomes: make(chan tunnel.Outcome, 2000)}
	observe := func(o *tunnel.Outcome) { g.outcomes <- *o }
	relay := &tunnel.Relay{}
	srv := &tunnel.Server{
		Handler: &tunnel.Router{Resolver: routes, Dialer: &tunnel.NetDialer{}, Relay: relay, Observe: observe},
		Limits:  tunnel.Limits{Preamble: time.Second, HalfOpenPerSource: -1, OpenPerSource: -1, NewPerSource: -1},
		Observe: observe,
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{Listener: ln, Protocols: protocols}); !errors.Is(err, tunnel.ErrServerClosed) {
			t.Errorf("got %v from Serve", err)
		}
	})
	t.Cleanup(func() {
		_ = srv.Close()
		if err := relay.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
	})
	return g
}

// backend accepts connections and gives each to f.
func backend(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	ln := listen(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(patience))
				f(c)
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait()
	})
	return ln.Addr().String()
}

func echo(c net.Conn) {
	_, _ = io.Copy(c, c)
	_ = c.(*net.TCPConn).CloseWrite()
}

// The handshake of section 1.3 of RFC 6455, for svc.test:443.
const (
	sampleKey    = "dGhlIHNhbXBsZSBub25jZQ=="
	sampleAccept = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
)

var sample = handshake("/.culvert/tunnel/svc.test:443")

// handshake is a request for path. Further fields are added, "Name: value", or
// replace one: "Name:" alone takes it out.
func handshake(path string, fields ...string) string {
	lines := []string{"Host: gw.test", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: " + sampleKey, "Sec-WebSocket-Version: 13"}
	for _, f := range fields {
		name, value, _ := strings.Cut(f, ":")
		at := len(lines)
		for i, l := range lines {
			if n, _, _ := strings.Cut(l, ":"); n == name {
				at = i
			}
		}
		switch {
		case at == len(lines):
			lines = append(lines, f)
		case value == "":
			lines = append(lines[:at], lines[at+1:]...)
		default:
			lines[at] = f
		}
	}
	return "GET " + path + " HTTP/1.1\r\n" + strings.Join(lines, "\r\n") + "\r\n\r\n"
}
