package h3

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A sourceNoter is plain CONNECT that notes where requests come from.
type sourceNoter struct {
	connect.Protocol
	sources chan netip.AddrPort
}

func (n *sourceNoter) AdmitList(ctx context.Context, req *tunnel.Request, list *Head) (context.Context, connect.Fields, error) {
	n.sources <- req.Source
	return n.Protocol.AdmitList(ctx, req, list)
}

// TestMigration: a client whose port changes keeps its tunnels, with what was
// on its way, and the gateway sees who it is now.
func TestMigration(t *testing.T) {
	sources := make(chan netip.AddrPort, 10)
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{Service: &sourceNoter{sources: sources}})
	r := newRelay(t, g.addr)
	d := newDialer(t, r.addr)
	d.Idle = time.Minute
	s := open(t, d, "svc:1")
	testnet.Ping(t, s, "before")
	want := random(4<<20, 1)
	go func() { _, _ = s.Write(want) }()
	got := make([]byte, len(want))
	for i := 0; i < len(got); i += 1 << 20 {
		r.rebind(t, nil) // in the middle of it
		if _, err := io.ReadFull(s, got[i:i+1<<20]); err != nil {
			t.Fatalf("after %d bytes and %d changes of port: %v", i, 1+i>>20, err)
		}
	}
	if string(got) != string(want) {
		t.Error("other bytes came back than were sent")
	}
	first := <-sources
	testnet.Ping(t, open(t, d, "svc:1"), "a new tunnel on the old connection")
	if second := <-sources; second == first || second.Addr() != first.Addr() {
		t.Errorf("the source was %v and is %v, want another port", first, second)
	}
	if n := d.Conns(); n != 1 {
		t.Errorf("%d connections, want the one", n)
	}
}

// TestUnprovenAddresses is must-never N28: who has not shown that it is at its
// address gets at most three times what it sent, and what is refused no more
// than it sent.
func TestUnprovenAddresses(t *testing.T) {
	t.Parallel()
	g := serve(t, tunneltest.Table{}, &Server{})
	// Each has a connection id of its own.
	changed := func(change func(p []byte) []byte) func(*testing.T) [][]byte {
		return func(t *testing.T) [][]byte { return [][]byte{change(firstPackets(t, 1)[0])} }
	}
	junk := func(p []byte) func(*testing.T) [][]byte {
		return func(*testing.T) [][]byte { return [][]byte{p} }
	}
	version := func(p []byte) []byte {
		binary.BigEndian.PutUint32(p[1:], 0x1a2a3a4a) // RFC 9000 section 15: reserved to be refused
		return p
	}
	for _, c := range []struct {
		name string
		send func(*testing.T) [][]byte
		most int  // times what was sent
		some bool // there has to be an answer, or the test shows nothing
	}{
		{"a byte", junk([]byte{0xff}), 0, false},
		{"text", junk([]byte("GET / HTTP/1.1\r\n\r\n")), 0, false},
		{"1,200 zeros", junk(make([]byte, 1200)), 0, false},
		{"1,200 bytes of 0xff", junk(bytes.Repeat([]byte{0xff}, 1200)), 1, false},
		{"a short header of no connection", junk(append([]byte{0x40}, make([]byte, 60)...)), 1, false},
		{"an Initial of fewer than 1,200 bytes", changed(func(p []byte) []byte { return p[:1100] }), 0, false},
		{"an Initial that is not whole", changed(func(p []byte) []byte { p[len(p)-1] ^= 1; return p }), 0, false},
		{"another version", changed(version), 1, true},
		{"another version, too short to be told of it", changed(func(p []byte) []byte { return version(p)[:1100] }), 0, false},
		{"a whole ClientHello, and then silence", func(t *testing.T) [][]byte { return firstPackets(t, 2) }, 3, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // each waits for nothing to come
			pc := socket(t)
			to, _ := net.ResolveUDPAddr("udp", g.addr)
			sent, back := 0, 0
			for _, p := range c.send(t) {
				if _, err := pc.WriteTo(p, to); err != nil {
					t.Fatal(err)
				}
				sent += len(p)
			}
			_ = pc.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
			for buf := make([]byte, 4096); ; {
				n, _, err := pc.ReadFrom(buf)
				if err != nil {
					break
				}
				back += n
			}
			if back > c.most*sent {
				t.Errorf("%d bytes came back for %d, want at most %d times as many", back, sent, c.most)
			}
			if c.some && back == 0 {
				t.Error("nothing came back: the test shows nothing")
			}
		})
	}
}

// firstPackets is what a client of this package begins with.
func firstPackets(t *testing.T, n int) [][]byte {
	t.Helper()
	pc := socket(t)
	d := &Dialer{Proxy: pc.LocalAddr().String(), TLS: clientTLS(), Wait: time.Second}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = d.DialContext(ctx, "tcp", "svc:1") })
	defer wg.Wait()
	defer d.Close()
	defer cancel()
	_ = pc.SetReadDeadline(time.Now().Add(testTimeout))
	var all [][]byte
	for range n {
		buf := make([]byte, 4096)
		n, _, err := pc.ReadFrom(buf)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, buf[:n])
	}
	return all
}

// TestRetry: from a number of unfinished handshakes on, a client has to show
// that it is at its address before it costs more than a packet; and then it is
// served.
func TestRetry(t *testing.T) {
	t.Parallel()
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{})
	half := func() int {
		g.srv.mu.Lock()
		defer g.srv.mu.Unlock()
		return g.srv.handshakes
	}
	to, _ := net.ResolveUDPAddr("udp", g.addr)
	for i := range retryFromSource {
		if _, err := socket(t).WriteTo(firstPackets(t, 1)[0], to); err != nil {
			t.Fatal(err)
		}
		testnet.Eventually(t, testTimeout, func() bool { return half() == i+1 }, "the handshake begins")
	}
	pc := socket(t)
	packet := firstPackets(t, 1)[0]
	_, _ = pc.WriteTo(packet, to)
	buf := make([]byte, 4096)
	_ = pc.SetReadDeadline(time.Now().Add(testTimeout))
	n, _, err := pc.ReadFrom(buf)
	if err != nil || n > len(packet)/3 || buf[0]&0xf0 != 0xf0 { // RFC 9000 section 17.2.5
		t.Errorf("got %d bytes that begin with %#x, and %v; want a Retry", n, buf[0], err)
	}
	if n := half(); n != retryFromSource {
		t.Errorf("%d unfinished handshakes, want %d: a Retry costs none", n, retryFromSource)
	}
	testnet.Ping(t, open(t, newDialer(t, g.addr), "svc:1"), "let in after a Retry")
	// What does not go on is forgotten, and told of.
	g.Reason(t, tunnel.HelloTimeout)
	testnet.Eventually(t, testTimeout, func() bool { return half() == 0 }, "the handshakes are given up")
}

// TestLimits: a source has its share of handshakes and connections.
func TestLimits(t *testing.T) {
	for name, limits := range map[string]tunnel.Limits{
		"connections":     {MaxConnectionsPerClient: 1},
		"new connections": {ConnectionRatePerClient: 1},
		"handshakes":      {MaxPendingConnections: 1, ConnectionRatePerClient: -1},
		"of a source":     {MaxPendingPerClient: 1, ConnectionRatePerClient: -1},
	} {
		t.Run(name, func(t *testing.T) {
			g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{Limits: limits})
			d := newDialer(t, g.addr)
			if limits.MaxConnectionsPerClient+limits.ConnectionRatePerClient > 0 {
				d.Idle = time.Minute
				testnet.Ping(t, open(t, d, "svc:1"), "the first")
			} else {
				to, _ := net.ResolveUDPAddr("udp", g.addr)
				_, _ = socket(t).WriteTo(firstPackets(t, 1)[0], to)
				testnet.Eventually(t, testTimeout, func() bool {
					g.srv.mu.Lock()
					defer g.srv.mu.Unlock()
					return g.srv.handshakes == 1
				}, "a handshake begins")
			}
			_, err := newDialer(t, g.addr).DialContext(t.Context(), "tcp", "svc:1")
			tunneltest.WantReason(t, err, tunnel.DialFailed)
			g.Reason(t, tunnel.Overload)
		})
	}
}

// TestMemoryIsFull: nobody is let in while it is.
func TestMemoryIsFull(t *testing.T) {
	b := new(tunnel.Budget)
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{Budget: b})
	b.SetPressure(tunnel.Full)
	_, err := newDialer(t, g.addr).DialContext(t.Context(), "tcp", "svc:1")
	tunneltest.WantReason(t, err, tunnel.DialFailed)
	g.Reason(t, tunnel.Overload)
	b.SetPressure(tunnel.Calm)
	testnet.Ping(t, open(t, newDialer(t, g.addr), "svc:1"), "again")
}

// TestNoEarlyData: a client that would send its request before the handshake is
// complete gets no ticket to do it with, whatever the TLS configuration says.
func TestNoEarlyData(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{})
	cfg := clientTLS()
	cfg.NextProtos = []string{"h3"}
	cache := &tickets{ClientSessionCache: tls.NewLRUClientSessionCache(10)}
	cfg.ClientSessionCache = cache
	tr := &quic.Transport{Conn: socket(t)}
	defer tr.Close()
	to, _ := net.ResolveUDPAddr("udp", g.addr)
	for range 2 {
		qc, err := tr.DialEarly(t.Context(), to, cfg, &quic.Config{Allow0RTT: true})
		if err != nil {
			t.Fatal(err)
		}
		r := &raw{t: t, qc: qc}
		if a := r.request(connectSvc...).answer(); a.status != 200 {
			t.Errorf("got %+v", a)
		}
		<-qc.HandshakeComplete()
		if cs := qc.ConnectionState(); cs.Used0RTT || cs.TLS.DidResume {
			t.Errorf("0-RTT %v, resumed %v", cs.Used0RTT, cs.TLS.DidResume)
		}
		_ = qc.CloseWithError(0, "")
	}
	if cache.put {
		t.Error("the server handed out a ticket")
	}
}

type tickets struct {
	tls.ClientSessionCache
	put bool
}

func (c *tickets) Put(key string, cs *tls.ClientSessionState) {
	c.put = c.put || cs != nil
	c.ClientSessionCache.Put(key, cs)
}

// TestTransportParameters: there are no datagrams, no server-initiated requests
// and no more streams than said.
func TestTransportParameters(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{Streams: 3})
	r := rawClient(t, g.addr)
	if cs := r.qc.ConnectionState(); cs.SupportsDatagrams.Remote || cs.TLS.NegotiatedProtocol != "h3" || cs.TLS.Version != tls.VersionTLS13 {
		t.Errorf("%+v", cs.SupportsDatagrams)
	}
	for range 3 {
		if a := r.request(connectSvc...).answer(); a.status != 200 {
			t.Fatalf("got %+v", a)
		}
	}
	if _, err := r.qc.OpenStream(); !errors.Is(err, &quic.StreamLimitReachedError{}) && err == nil {
		t.Errorf("a stream over the limit: %v", err)
	}
}

// TestOtherALPN: who does not speak HTTP/3 is told so in the handshake.
func TestOtherALPN(t *testing.T) {
	g := serve(t, tunneltest.Table{}, &Server{})
	cfg := clientTLS()
	cfg.NextProtos = []string{"doq"}
	tr := &quic.Transport{Conn: socket(t)}
	defer tr.Close()
	to, _ := net.ResolveUDPAddr("udp", g.addr)
	_, err := tr.Dial(t.Context(), to, cfg, nil)
	te, ok := errors.AsType[*quic.TransportError](err)
	if !ok || te.ErrorCode != 0x100+120 { // RFC 7301 section 3.2, RFC 9001 section 4.8
		t.Errorf("got %v, want the alert no_application_protocol", err)
	}
	g.Reason(t, tunnel.BadHello)
}

// TestSocketFails: Serve returns when its socket is no more, and all of its
// connections with it.
func TestSocketFails(t *testing.T) {
	pc := socket(t)
	s := &Server{TLS: serverTLS()}
	served := make(chan error, 1)
	go func() {
		served <- s.Serve(t.Context(), pc, tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			st, err := req.Accept()
			if err == nil {
				_, _ = io.Copy(st, st)
				_ = st.Close()
			}
		}))
	}()
	d := newDialer(t, pc.LocalAddr().String())
	testnet.Ping(t, open(t, d, "svc:1"), "x")
	_ = pc.Close()
	select {
	case err := <-served:
		if err == nil || err == tunnel.ErrServerClosed {
			t.Errorf("Serve returned %v", err)
		}
	case <-time.After(testTimeout):
		t.Error("Serve does not return")
	}
}

// TestContextEndsServe: the end of Serve's context is that of its connections.
func TestContextEndsServe(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := &Server{TLS: serverTLS()}
	pc := socket(t)
	served := make(chan error, 1)
	go func() {
		served <- s.Serve(ctx, pc, tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
			<-ctx.Done()
			req.Refuse(ctx.Err())
		}))
	}()
	d := newDialer(t, pc.LocalAddr().String())
	dialed := make(chan error, 1)
	go func() { _, err := d.DialContext(t.Context(), "tcp", "svc:1"); dialed <- err }()
	testnet.Eventually(t, testTimeout, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.conns) == 1
	}, "the request is made")
	cancel()
	if err := <-served; err != tunnel.ErrServerClosed {
		t.Errorf("Serve returned %v", err)
	}
	if err := <-dialed; err == nil {
		t.Error("the dial worked")
	}
	if err := s.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if err := s.Serve(t.Context(), socket(t), nil); err != tunnel.ErrServerClosed {
		t.Errorf("Serve after Shutdown returned %v", err)
	}
}

// TestWindowsGrowWithUse: the window of a stream whose reader keeps up grows,
// and so does that of its connection, within the Server's bound for all of them;
// the room is given back at the connection's end.
func TestWindowsGrowWithUse(t *testing.T) {
	srv := &Server{}
	makePipe := pipesOver(t, srv, func(addr string) string { return slowPath(t, addr, 10*time.Millisecond) })
	a, b, stop, err := makePipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	_ = b.SetReadDeadline(time.Now().Add(testTimeout))
	moved := make(chan struct{})
	go func() {
		defer close(moved)
		_, _ = a.Write(make([]byte, 4<<20))
	}()
	if _, err := io.CopyN(io.Discard, b, 4<<20); err != nil {
		t.Fatal(err)
	}
	<-moved
	_ = a.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
	n, err := a.Write(make([]byte, 32<<20)) // which nobody reads
	if err == nil || n < 4*streamWindow || n > maxStream {
		t.Errorf("%d bytes and %v, want a window of more than %d and at most %d", n, err, 4*streamWindow, maxStream)
	}
	t.Logf("a window of %d KiB", n>>10)
}

// TestGrowthIsBounded: all connections together grow by no more than Grow and what
// the Budget has for bytes that are not read, by nothing while memory is short, and
// what ends gives its part back.
func TestGrowthIsBounded(t *testing.T) {
	for _, limit := range []struct{ grow, backlogs int64 }{{10 << 20, 0}, {0, 10 << 20}} {
		b := &tunnel.Budget{Limit: 1000, Backlogs: limit.backlogs}
		g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{Grow: limit.grow, Budget: b})
		r := rawClient(t, g.addr)
		r.request(connectSvc...).answer()
		g.srv.mu.Lock()
		var qc *quic.Conn
		for qc = range g.srv.conns {
		}
		g.srv.mu.Unlock()
		if !g.srv.allowGrowth(qc, 6<<20) || g.srv.allowGrowth(qc, 6<<20) || !g.srv.allowGrowth(qc, 4<<20) {
			t.Error("of 10 MiB, 6 and 4 may be had, and 6 and 6 not")
		}
		_ = r.qc.CloseWithError(0, "")
		testnet.Eventually(t, testTimeout, func() bool { g.srv.mu.Lock(); defer g.srv.mu.Unlock(); return g.srv.grown == 0 }, "the room is given back")
		b.SetPressure(tunnel.Short)
		if g.srv.allowGrowth(qc, 1) {
			t.Error("a window grew while memory is short")
		}
	}
	if maxStream < 12_500_000 {
		t.Errorf("a window of %d bytes does not fill 1 Gbit/s over 100 ms", maxStream)
	}
}
