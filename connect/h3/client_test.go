package h3

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func random(n int, seed byte) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// TestEndAfterACutWrite: a stream whose last write was cut short can't end as
// if it were whole, and no other one hears of it.
func TestEndAfterACutWrite(t *testing.T) {
	makePipe := pipes(t, &Server{})
	other, echoed, stop, err := makePipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	go func() { _, _ = io.Copy(echoed, echoed) }()
	for name, end := range map[string]func(tunnel.Stream) error{
		"CloseWrite": tunnel.Stream.CloseWrite,
		"Close":      func(s tunnel.Stream) error { return s.Close() },
	} {
		a, b, stop, err := makePipe()
		if err != nil {
			t.Fatal(err)
		}
		_ = a.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
		if _, err := a.Write(make([]byte, 1<<20)); err == nil {
			t.Fatal("a write beyond the window worked")
		}
		_ = end(a)
		_ = b.SetReadDeadline(time.Now().Add(testTimeout))
		if _, err := io.Copy(io.Discard, b); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: the other side saw %v, want a reset", name, err)
		}
		_ = other.SetDeadline(time.Now().Add(testTimeout))
		testnet.Ping(t, other, name)
		stop()
	}
}

// TestGoAway: streams a proxy still serves go on, new ones go elsewhere.
func TestGoAway(t *testing.T) {
	s1, s2 := &Server{}, &Server{}
	to := testnet.Echo(t).Addr()
	g1, g2 := serve(t, tunneltest.Table{"svc:1": to}, s1), serve(t, tunneltest.Table{"svc:1": to}, s2)
	addr := g1.addr
	d := newDialer(t, "gw.test:1")
	d.Idle = time.Minute
	var mu sync.Mutex
	d.Lookup = func(context.Context, string) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
	}
	d.Listen = func(ctx context.Context, _ string, to netip.AddrPort) (net.PacketConn, error) {
		pc, err := Listen(ctx, tunnel.Sockets{}, to)
		mu.Lock()
		defer mu.Unlock()
		return redirected{pc, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(addr))}, err
	}
	s := open(t, d, "svc:1")
	testnet.Ping(t, s, "before")
	mu.Lock()
	addr = g2.addr
	mu.Unlock()
	s1.Drain()
	testnet.Eventually(t, testTimeout, func() bool { return d.Conns() == 0 }, "the connection left the pool")
	testnet.Ping(t, s, "after GOAWAY")
	testnet.Ping(t, open(t, d, "svc:1"), "elsewhere")
	done := make(chan error, 1)
	go func() { done <- s1.Shutdown(t.Context()) }()
	testnet.Ping(t, s, "during Shutdown")
	select {
	case err := <-done:
		t.Fatalf("Shutdown returned %v with a tunnel open", err)
	default:
	}
	_ = s.CloseWrite()
	if _, err := io.ReadAll(s); err != nil {
		t.Error(err)
	}
	_ = s.Close()
	start := time.Now()
	if err := <-done; err != nil || time.Since(start) > drainedTimeout {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
}

// A redirected socket sends all it is given to one address, and has all come
// from where it was sent to.
type redirected struct {
	net.PacketConn
	to net.Addr
}

func (r redirected) WriteTo(p []byte, _ net.Addr) (int, error) { return r.PacketConn.WriteTo(p, r.to) }

// TestRejectedStreamIsTriedElsewhere has a proxy that resets the first request
// with H3_REQUEST_REJECTED.
func TestRejectedStreamIsTriedElsewhere(t *testing.T) {
	p := rawProxy(t)
	d := newDialer(t, p.addr)
	d.Idle = time.Minute
	go func() {
		first := p.accept(t)
		first.stream(t).reset(RequestRejected)
		s := p.accept(t).stream(t)
		_, _ = s.qs.Write(appendHead(nil, connect.Fields{{Name: ":status", Value: "200"}}))
		_, _ = s.qs.Write(append(appendFrameHead(nil, frameData, 2), "ok"...))
	}()
	s := open(t, d, "svc:1")
	if _, err := io.ReadFull(s, make([]byte, 2)); err != nil {
		t.Error(err)
	}
}

// TestDeadPeerIsFound: a connection that is silent ends, and what is on it is
// reset.
func TestDeadPeerIsFound(t *testing.T) {
	r := newRelay(t, serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{}).addr)
	d := newDialer(t, r.addr)
	d.Ping, d.Pong = 100*time.Millisecond, 2*time.Second
	s := open(t, d, "svc:1")
	testnet.Ping(t, s, "x")
	r.silence.Store(true)
	start := time.Now()
	_, err := s.Read(make([]byte, 1))
	if took := time.Since(start); !errors.Is(err, syscall.ECONNRESET) || took > testTimeout {
		t.Errorf("after %v: %v, want a reset", took, err)
	}
}

// TestAnswersThatAreNone: a proxy's mistakes are errors of the dial, soon.
func TestAnswersThatAreNone(t *testing.T) {
	status := func(s string, more ...connect.Field) []byte {
		return appendHead(nil, append(connect.Fields{{Name: ":status", Value: s}}, more...))
	}
	for _, c := range []struct {
		name   string
		answer []byte
		more   bool // goes on until it is stopped
		want   tunnel.Reason
	}{
		{"a request", appendHead(nil, connect.Fields{{Name: ":method", Value: "GET"}}), false, tunnel.DialFailed},
		{"status of two digits", status("20"), false, tunnel.DialFailed},
		{"interim without end", status("103"), true, tunnel.DialFailed},
		{"a list over 16 KiB", status("200", connect.Field{Name: "a", Value: string(bytes.Repeat([]byte("~"), 17<<10))}), false, tunnel.DialFailed},
		{"a section over 32 KiB", appendFrameHead(nil, frameHeaders, 33<<10), false, tunnel.DialFailed},
		{"DATA", appendFrameHead(nil, frameData, 5), false, tunnel.DialFailed},
		{"unknown frames without end", appendFrameHead(nil, 0x77, 0), true, tunnel.DialFailed},
		{"nothing", nil, false, tunnel.DialTimeout},
		{"half a head", status("200")[:3], false, tunnel.DialTimeout},
		{"QPACK that can't be decoded", append(appendFrameHead(nil, frameHeaders, 3), 0x7f, 0, 0), false, tunnel.DialFailed},
		{"a refusal with trailers", append(status("503", connect.Field{Name: "proxy-status", Value: "x; error=dns_error"}), appendHead(nil, connect.Fields{{Name: "a", Value: "b"}})...), false, tunnel.LookupError},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := rawProxy(t)
			d := newDialer(t, p.addr)
			d.Wait = time.Second
			go func() {
				s := p.accept(t).stream(t)
				for {
					if _, err := s.qs.Write(c.answer); err != nil || !c.more {
						return
					}
				}
			}()
			_, err := d.DialContext(t.Context(), "tcp", "svc:1")
			tunneltest.WantReason(t, err, c.want)
		})
	}
}

// TestTLSIsChecked: a proxy with another name, or with another protocol, is
// none.
func TestTLSIsChecked(t *testing.T) {
	g := serve(t, tunneltest.Table{}, &Server{})
	d := newDialer(t, g.addr)
	d.TLS.ServerName = "other.test"
	_, err := d.DialContext(t.Context(), "tcp", "svc:1")
	tunneltest.WantReason(t, err, tunnel.DialFailed)
	g.Reason(t, tunnel.BadHello)
}

// TestListenMayRefuse: the address of the proxy is looked at before anything is
// sent there, and every address in turn.
func TestListenMayRefuse(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{})
	to := netip.MustParseAddrPort(g.addr)
	d := newDialer(t, net.JoinHostPort("gw.test", g.addr[len("127.0.0.1:"):]))
	d.Lookup = func(context.Context, string) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr("192.0.2.1"), to.Addr()}, nil
	}
	var mu sync.Mutex // guards asked
	var asked []netip.AddrPort
	d.Listen = func(ctx context.Context, _ string, to netip.AddrPort) (net.PacketConn, error) {
		mu.Lock()
		asked = append(asked, to)
		mu.Unlock()
		if !to.Addr().IsLoopback() {
			return nil, tunnel.Refusef(tunnel.Prohibited, "%s is not to be dialed", to)
		}
		return Listen(ctx, tunnel.Sockets{}, to)
	}
	testnet.Ping(t, open(t, d, "svc:1"), "x")
	mu.Lock()
	defer mu.Unlock()
	if len(asked) != 2 || asked[1] != to {
		t.Errorf("asked for %v", asked)
	}
	_ = d.Close()
	d = newDialer(t, "192.0.2.1:443")
	d.Listen = func(_ context.Context, _ string, to netip.AddrPort) (net.PacketConn, error) {
		return nil, tunnel.Refusef(tunnel.Prohibited, "%s is not to be dialed", to)
	}
	_, err := d.DialContext(t.Context(), "tcp", "svc:1")
	tunneltest.WantReason(t, err, tunnel.Prohibited)
}

// A muteConn is a socket to an address from which nothing comes.
type muteConn struct {
	net.PacketConn
	closed atomic.Bool
}

func (c *muteConn) WriteTo(b []byte, _ net.Addr) (int, error) { return len(b), nil }

func (c *muteConn) Close() error {
	c.closed.Store(true)
	return c.PacketConn.Close()
}

// TestAddressesRace: an address that does not answer is still tried when the next one is dialed,
// and is given up when that one has answered.
func TestAddressesRace(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{})
	to := netip.MustParseAddrPort(g.addr)
	d := newDialer(t, net.JoinHostPort("gw.test", g.addr[len("127.0.0.1:"):]))
	mutes := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	d.Lookup = func(context.Context, string) ([]netip.Addr, error) { return append(mutes, to.Addr()), nil }
	var mu sync.Mutex // guards what follows
	var sockets []*muteConn
	d.Listen = func(ctx context.Context, _ string, to netip.AddrPort) (net.PacketConn, error) {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range sockets {
			if c.closed.Load() {
				t.Errorf("when %s was dialed, one before it was given up", to)
			}
		}
		c, err := Listen(ctx, tunnel.Sockets{}, netip.MustParseAddrPort("127.0.0.1:1"))
		if err != nil || to.Addr().IsLoopback() {
			return c, err
		}
		mute := &muteConn{PacketConn: c}
		sockets = append(sockets, mute)
		return mute, nil
	}
	testnet.Ping(t, open(t, d, "svc:1"), "x")
	mu.Lock()
	defer mu.Unlock()
	if len(sockets) != len(mutes) {
		t.Errorf("%d addresses that do not answer were dialed, want %d", len(sockets), len(mutes))
	}
	for i, c := range sockets {
		if !c.closed.Load() {
			t.Errorf("the socket to %s is open", mutes[i])
		}
	}
}

// TestDialedClose checks that a connection which lost a race is closed, and its socket with it.
func TestDialedClose(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{})
	cfg := clientTLS()
	cfg.NextProtos = []string{"h3"}
	c, err := newDialer(t, g.addr).dialOne(t.Context(), netip.MustParseAddrPort(g.addr), cfg)
	if err != nil {
		t.Fatal(err)
	}
	c.close()
	if c.qc.Context().Err() == nil {
		t.Error("the connection is open")
	}
	if _, err := c.tr.Conn.WriteTo(nil, c.qc.RemoteAddr()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a write to the socket got %v, want %v", err, net.ErrClosed)
	}
}

// TestHandshakeDone checks that no request is sent where the end of the handshake is
// refused, and that the connection then serves a dial that may send one.
func TestHandshakeDone(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{})
	d := newDialer(t, g.addr)
	d.Idle = time.Minute
	refused := errors.New("refused")
	for range 2 {
		_, err := d.DialContext(tunnel.WithHandshakeDone(t.Context(), func() error { return refused }), "tcp", "svc:1")
		if !errors.Is(err, refused) {
			t.Errorf("got error %v, want %v", err, refused)
		}
	}
	calls := 0
	s, err := d.DialContext(tunnel.WithHandshakeDone(t.Context(), func() error { calls++; return nil }), "tcp", "svc:1")
	if err != nil {
		t.Fatal(err)
	}
	testnet.Ping(t, s, "x")
	_ = s.Close()
	if n := d.Conns(); calls != 1 || n != 1 {
		t.Errorf("%d calls and %d connections, want 1 and 1", calls, n)
	}
	g.Outcome(t)
	if n := len(g.Outcomes()); n != 1 {
		t.Errorf("the proxy saw %d requests, want 1", n)
	}
}
