package connectudp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestDatagrams: datagrams go to the service and back as they are, whatever their size,
// and the Outcome has them.
func TestDatagrams(t *testing.T) {
	eachVersion(t, tunneltest.Table{"dns.test:53": echo(t)}, nil, func(t *testing.T, p *proxy) {
		c := p.dial(t, "dns.test:53")
		in := 0
		for _, size := range []int{1, 100, 1200, 0} {
			want := strings.Repeat("x", size)
			if got := c.ask(t, want); got != want {
				t.Errorf("of %d bytes, %d came back", size, len(got))
			}
			in += size
		}
		_ = c.Close()
		o := p.Outcome(t)
		if o.Proto != "connect-udp" || o.Target != "dns.test:53" || o.Service != "svc" || o.BytesIn < int64(in) || o.BytesOut < int64(in) || !o.Carried() {
			t.Errorf("got %+v", o)
		}
		testnet.Eventually(t, patience, func() bool { return p.relay.Open() == 0 }, "no tunnel is open")
	})
}

// TestTunnelsAreListed: a tunnel of datagrams is on the list of what is open, and ends
// when an operator ends it.
func TestTunnelsAreListed(t *testing.T) {
	eachVersion(t, tunneltest.Table{"dns.test:53": echo(t)}, nil, func(t *testing.T, p *proxy) {
		c := p.dial(t, "dns.test:53")
		c.ask(t, "hello")
		var live []tunnel.Live
		testnet.Eventually(t, patience, func() bool { // bytes count once they were sent
			live = slices.Collect(p.relay.List())
			return len(live) != 1 || live[0].In >= 5 && live[0].Out >= 5
		}, "the bytes both ways are counted")
		if len(live) != 1 || live[0].Proto != "connect-udp" {
			t.Fatalf("got %+v", live)
		}
		p.relay.End(live[0].ID, tunnel.Killed)
		if err := c.end(t); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the client sees %v, want a reset", err)
		}
		if o := p.Outcome(t); o.Reason != tunnel.Killed {
			t.Errorf("got %s", o.Reason)
		}
	})
}

// TestRefusals: a request for datagrams is refused as any other is.
func TestRefusals(t *testing.T) {
	for _, test := range []struct {
		title, addr string
		change      func(*proxy)
		want        tunnel.Reason
	}{
		{"a name that is no service", "other.test:53", nil, tunnel.NoRoute},
		{"a port that is none of the service's", "dns.test:54", nil, tunnel.NoRoute},
		{"an address that is no service", "192.0.2.1:53", nil, tunnel.NoRoute},
		{"a request that has been here", "dns.test:53", func(p *proxy) { p.p.Via = "far" }, tunnel.Loop},
	} {
		t.Run(test.title, func(t *testing.T) {
			eachVersion(t, tunneltest.Table{"dns.test:53": "127.0.0.1:1"}, test.change, func(t *testing.T, p *proxy) {
				ctx := connect.WithVia(t.Context(), []string{"far"})
				open := p.d.Open
				p.d.Open = func(_ context.Context, list *connect.HeaderList) (net.Conn, connect.Fields, error) {
					list.Fields = append(list.Fields, connect.Field{Name: "via", Value: "2 far"})
					return open(ctx, list)
				}
				if c, err := p.tryDial(t, test.addr); tunnel.ReasonOf(err) != test.want {
					t.Errorf("got %v and %v, want %s", c, err, test.want)
				}
				if o := p.Outcome(t); o.Reason != test.want || o.Proto != "connect-udp" {
					t.Errorf("the outcome is %s by %q", o.Reason, o.Proto)
				}
			})
		})
	}
}

// TestBadRequests: requests that RFC 9298 has no meaning for.
func TestBadRequests(t *testing.T) {
	eachVersion(t, tunneltest.Table{"dns.test:53": "127.0.0.1:1"}, nil, func(t *testing.T, p *proxy) {
		for _, test := range []struct {
			title string
			list  connect.HeaderList
			want  tunnel.Reason
		}{
			{"another path", connect.HeaderList{Protocol: "connect-udp", Scheme: "https", Path: "/udp/dns.test/53/"}, tunnel.BadRequest},
			{"any target", connect.HeaderList{Protocol: "connect-udp", Scheme: "https", Path: pathPrefix + "*/*/"}, tunnel.BadRequest},
			{"another scheme", connect.HeaderList{Protocol: "connect-udp", Scheme: "masque", Path: pathPrefix + "dns.test/53/"}, tunnel.BadRequest},
			{"another protocol", connect.HeaderList{Protocol: "connect-ip", Scheme: "https", Path: pathPrefix + "dns.test/53/"}, tunnel.Unsupported},
		} {
			test.list.Authority = "gw.test"
			if _, _, err := p.d.Open(t.Context(), &test.list); tunnel.ReasonOf(err) != test.want {
				t.Errorf("%s: got %v, want %s", test.title, err, test.want)
			}
		}
	})
}

// TestLargeDatagrams: over HTTP/2 all arrives that UDP can carry. Over HTTP/3, what is
// larger than a packet of the path is lost, and counted; 1,280 bytes always arrive.
func TestLargeDatagrams(t *testing.T) {
	const largest = 65507 // of UDP over IPv4
	answers := func(b []byte) [][]byte {
		n, err := strconv.Atoi(string(b))
		if err != nil {
			return [][]byte{[]byte(strconv.Itoa(len(b)))}
		}
		return [][]byte{bytes.Repeat([]byte("a"), n)}
	}
	eachVersion(t, tunneltest.Table{"svc.test:1": udpServer(t, answers)}, nil, func(t *testing.T, p *proxy) {
		c := p.dial(t, "svc.test:1")
		if got := c.ask(t, strings.Repeat("x", minPayload)); got != strconv.Itoa(minPayload) {
			t.Fatalf("the service got %s bytes, want %d", got, minPayload)
		}
		if got := c.ask(t, strconv.Itoa(minPayload)); len(got) != minPayload {
			t.Fatalf("got %d bytes, want %d", len(got), minPayload)
		}
		if c.frames == nil {
			if got := c.ask(t, strings.Repeat("x", largest)); got != "65507" {
				t.Errorf("the service got %s bytes, want 65507", got)
			}
			if got := c.ask(t, "65507"); len(got) != largest {
				t.Errorf("got %d bytes, want 65507", len(got))
			}
			return
		}
		lost := func(dropped *atomic.Uint64, send string) {
			t.Helper()
			before := dropped.Load()
			testnet.Eventually(t, patience, func() bool {
				if err := c.SendDatagram([]byte(send)); err != nil {
					t.Fatal(err)
				}
				return dropped.Load() > before
			}, "a datagram is counted as lost")
		}
		lost(p.d.Dropped, strings.Repeat("x", 16000))
		lost(p.p.Dropped, "16000")
		select {
		case got := <-c.datagrams:
			t.Errorf("%d bytes arrived", len(got))
		default:
		}
		if got := c.ask(t, "3"); got != "aaa" {
			t.Errorf("later: got %q", got)
		}
	})
}

// TestIdle: a tunnel without a datagram either way ends in order.
func TestIdle(t *testing.T) {
	eachVersion(t, tunneltest.Table{"dns.test:53": echo(t)}, func(p *proxy) { p.router.Limits.UDPIdleTimeout = 10 * time.Millisecond }, func(t *testing.T, p *proxy) {
		c := p.dial(t, "dns.test:53")
		if err := c.end(t); err != io.EOF {
			t.Errorf("the client sees %v, want the end", err)
		}
		if o := p.Outcome(t); o.Reason != tunnel.Idle || !o.Carried() {
			t.Errorf("got %s, %v", o.Reason, o.Err)
		}
	})
}

// TestServiceIsGone: the tunnel to a port where nobody listens is aborted.
func TestServiceIsGone(t *testing.T) {
	eachVersion(t, tunneltest.Table{"dns.test:53": testnet.ClosedUDPPort(t)}, nil, func(t *testing.T, p *proxy) {
		c := p.dial(t, "dns.test:53")
		if err := c.SendDatagram([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if err := c.end(t); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the client sees %v, want a reset", err)
		}
		if o := p.Outcome(t); o.Reason != tunnel.DialFailed {
			t.Errorf("got %s, %v", o.Reason, o.Err)
		}
	})
}

// TestHostileCapsules: what a client sends on the stream ends its own tunnel, or is passed
// over.
func TestHostileCapsules(t *testing.T) {
	huge := appendNumber(nil, 1<<62-1)
	for _, test := range []struct {
		title string
		sent  []byte
		more  bool // the stream is not ended behind it
		want  tunnel.Reason
	}{
		{"the end", nil, false, tunnel.Done},
		{"other capsules", capsule(0x2575, 1, 2, 3), false, tunnel.Done},
		{"a datagram of 2^62 bytes", append([]byte{0}, huge...), true, tunnel.Reset},
		{"a datagram without a context", []byte{0, 0}, true, tunnel.Reset},
		{"half a capsule", []byte{0, 5, 0, 'x'}, false, tunnel.Reset},
		{"half a capsule of another type", append([]byte{9}, huge...), false, tunnel.Reset},
	} {
		t.Run(test.title, func(t *testing.T) {
			eachVersion(t, tunneltest.Table{"dns.test:53": echo(t)}, nil, func(t *testing.T, p *proxy) {
				other := p.dial(t, "dns.test:53")
				to, _ := connect.ParseAuthority("dns.test:53")
				s, answer, err := p.d.Open(t.Context(), &connect.HeaderList{Protocol: protocolName, Scheme: "https", Authority: "gw.test", Path: pathOf(to)})
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				if v, _ := answer.Get("capsule-protocol"); v != "?1" {
					t.Errorf("capsule-protocol is %q", v)
				}
				if _, err := s.Write(test.sent); err != nil {
					t.Fatal(err)
				}
				if !test.more {
					_ = s.(tunnel.Stream).CloseWrite()
				}
				if o := p.Outcome(t); o.Reason != test.want {
					t.Errorf("got %s, %v, want %s", o.Reason, o.Err, test.want)
				}
				if got := other.ask(t, "other"); got != "other" {
					t.Errorf("another tunnel of the connection: %q", got)
				}
			})
		})
	}
}

// TestResetInTheMiddle: a client that aborts its stream ends the tunnel.
func TestResetInTheMiddle(t *testing.T) {
	eachVersion(t, tunneltest.Table{"dns.test:53": echo(t)}, nil, func(t *testing.T, p *proxy) {
		c := p.dial(t, "dns.test:53")
		c.ask(t, "hello")
		_ = c.Abort()
		if o := p.Outcome(t); o.Reason != tunnel.Reset {
			t.Errorf("got %s, %v", o.Reason, o.Err)
		}
		if err := c.end(t); !errors.Is(err, net.ErrClosed) {
			t.Errorf("the client sees %v", err)
		}
	})
}

// TestSlowReader: a client that does not read its stream loses datagrams, of which a
// bounded number waits, and other tunnels of its connection do not notice.
func TestSlowReader(t *testing.T) {
	const each, bursts = 1000, 200
	flood := udpServer(t, func(b []byte) [][]byte {
		var all [][]byte
		for range bursts {
			all = append(all, bytes.Repeat([]byte("x"), each))
		}
		return all
	})
	eachVersion(t, tunneltest.Table{"dns.test:53": echo(t), "flood.test:1": flood}, nil, func(t *testing.T, p *proxy) {
		c, err := p.tryDial(t, "flood.test:1")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		slow := c.(*Conn)
		other := p.dial(t, "dns.test:53")
		if slow.frames != nil { // DATAGRAM frames are not flow-controlled: the client loses them itself
			for range 100 {
				_ = slow.SendDatagram([]byte("go"))
			}
		} else {
			testnet.Eventually(t, patience, func() bool {
				_ = slow.SendDatagram([]byte("go"))
				return p.p.Dropped.Load() > 100
			}, "datagrams are counted as lost")
		}
		if got := other.ask(t, "other"); got != "other" {
			t.Errorf("another tunnel of the connection: %q", got)
		}
	})
}

// TestQueueIsBounded: what waits for a stream that takes nothing has a limit.
func TestQueueIsBounded(t *testing.T) {
	s := &stuckStream{wait: make(chan struct{})}
	var dropped atomic.Uint64
	budget := &tunnel.Budget{Backlogs: 1 << 30}
	c := newConn(s, &dropped, budget)
	b := make([]byte, 1000)
	for range 1000 {
		if err := c.SendDatagram(b); err != nil {
			t.Fatal(err)
		}
	}
	c.mu.Lock()
	if n := len(c.queue); n > maxQueued || budget.Buffered() < int64(n) {
		t.Errorf("%d bytes wait, limit %d, and %d are counted", n, maxQueued, budget.Buffered())
	}
	c.mu.Unlock()
	if n := dropped.Load(); n < 1000-2*maxQueued/1000 {
		t.Errorf("%d datagrams were lost of 1000", n)
	}
	close(s.wait)
	testnet.Eventually(t, patience, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return !c.writing && cap(c.queue) <= keptQueue && c.spare == nil
	}, "the writer has ended, and keeps next to nothing")
	if n := budget.Buffered(); n != 0 {
		t.Errorf("%d bytes are counted, and none wait", n)
	}
	if err := c.SendDatagram(b); err == nil {
		t.Error("a stream that takes no more takes another datagram")
	}
}

// TestMemoryIsShort: while memory is short, less waits.
func TestMemoryIsShort(t *testing.T) {
	s := &stuckStream{wait: make(chan struct{})}
	budget := &tunnel.Budget{}
	budget.SetPressure(tunnel.Short)
	c := newConn(s, nil, budget)
	for range 100 {
		_ = c.SendDatagram(make([]byte, 1000))
	}
	c.mu.Lock()
	if n := len(c.queue); n == 0 || n > scarceQueued {
		t.Errorf("%d bytes wait, limit %d", n, scarceQueued)
	}
	c.mu.Unlock()
	close(s.wait)
	testnet.Eventually(t, patience, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return !c.writing
	}, "the writer has ended")
}

// A stuckStream takes nothing until wait is closed, and then fails.
type stuckStream struct {
	tunnel.Stream
	wait chan struct{}
}

func (s *stuckStream) Write([]byte) (int, error) {
	<-s.wait
	return 0, errors.New("the stream is broken")
}

// TestConnectionIsLost: the loss of the connection to the proxy ends the tunnel.
func TestConnectionIsLost(t *testing.T) {
	eachVersion(t, tunneltest.Table{"dns.test:53": echo(t)}, nil, func(t *testing.T, p *proxy) {
		c := p.dial(t, "dns.test:53")
		c.ask(t, "hello")
		_ = p.carrier.Close()
		if err := c.end(t); err == nil || err == io.EOF {
			t.Errorf("the client sees %v, want an error", err)
		}
		if o := p.Outcome(t); o.Reason != tunnel.Reset {
			t.Errorf("got %s, %v", o.Reason, o.Err)
		}
	})
}

// TestPanics: a panic while a datagram is sent to the service ends that tunnel alone.
func TestPanics(t *testing.T) {
	faulty := func(p *proxy) { p.p.Dialer = faultyDialer{p.p.Dialer.(tunnel.EndpointDialer)} }
	eachVersion(t, tunneltest.Table{"dns.test:53": echo(t)}, faulty, func(t *testing.T, p *proxy) {
		c, other := p.dial(t, "dns.test:53"), p.dial(t, "dns.test:53")
		if err := c.SendDatagram([]byte("panic")); err != nil {
			t.Fatal(err)
		}
		if o := p.Outcome(t); o.Reason != tunnel.Internal {
			t.Errorf("got %s, %v", o.Reason, o.Err)
		}
		if got := other.ask(t, "other"); got != "other" {
			t.Errorf("another tunnel of the connection: %q", got)
		}
	})
}

// A faultyDialer makes connections that panic when they are to send "panic".
type faultyDialer struct{ tunnel.EndpointDialer }

func (d faultyDialer) DialEndpoint(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
	c, err := d.EndpointDialer.DialEndpoint(ctx, ep)
	if err != nil {
		return nil, err
	}
	return faultyConn{c.(tunnel.DatagramConn)}, nil
}

type faultyConn struct{ tunnel.DatagramConn }

func (c faultyConn) SendDatagram(b []byte) error {
	if string(b) == "panic" {
		panic("a fault")
	}
	return c.DatagramConn.SendDatagram(b)
}

// TestCredentials: clients show who they are as for a plain CONNECT, or as to an origin.
func TestCredentials(t *testing.T) {
	asked := func(p *proxy) {
		p.p.Auth = &connect.Bearer{Verify: func(token string) (string, bool) { return "alice", token == "secret" }}
	}
	eachVersion(t, tunneltest.Table{"dns.test:53": echo(t)}, asked, func(t *testing.T, p *proxy) {
		for _, test := range []struct {
			field connect.Field
			want  tunnel.Reason
		}{
			{connect.Field{Name: "x", Value: "y"}, tunnel.NoAuth},
			{connect.Field{Name: "proxy-authorization", Value: "Bearer wrong"}, tunnel.NoAuth},
			{connect.Field{Name: "authorization", Value: "Bearer wrong"}, tunnel.NoAuth},
			{connect.Field{Name: "proxy-authorization", Value: "Bearer secret"}, tunnel.Done},
			{connect.Field{Name: "authorization", Value: "Bearer secret"}, tunnel.Done},
		} {
			list := connect.HeaderList{Protocol: protocolName, Scheme: "https", Authority: "gw.test", Path: pathPrefix + "dns.test/53/", Fields: connect.Fields{test.field}}
			c, _, err := p.d.Open(t.Context(), &list)
			if tunnel.ReasonOf(err) != test.want {
				t.Errorf("%v: got %v, want %s", test.field, err, test.want)
			}
			if err == nil {
				_ = c.Close()
				if o := p.Outcome(t); o.Peer.ID != "alice" {
					t.Errorf("%v: the client is %q", test.field, o.Peer.ID)
				}
			} else if o := p.Outcome(t); o.Reason != test.want {
				t.Errorf("%v: the outcome is %s", test.field, o.Reason)
			}
		}
	})
}

// A framedStream is a stream in memory with DATAGRAM frames, none of which fits.
type framedStream struct {
	*pipeStream
	tooLarge chan func([]byte)
	refused  error // what SendDatagram returns; nil means that the frame is too large
}

func (s *framedStream) HandleDatagrams(_, tooLarge func([]byte)) { s.tooLarge <- tooLarge }

func (s *framedStream) SendDatagram(head, payload []byte) error {
	if s.refused != nil {
		return s.refused
	}
	f := <-s.tooLarge
	f(append(head, payload...))
	s.tooLarge <- f
	return nil
}

// TestTooLargeForAFrame: of what no frame can hold, the first packets of QUIC go in a
// capsule, and all that is larger is lost. What cannot go in frames at all goes in
// capsules, and datagrams that a full queue has no room for are dropped.
func TestTooLargeForAFrame(t *testing.T) {
	for _, test := range []struct {
		title   string
		size    int
		refused error
		arrives bool
	}{
		{"the largest that QUIC begins with", minPayload, nil, true},
		{"a byte more", minPayload + 1, nil, false},
		{"no frames", 60000, errors.ErrUnsupported, true},
		{"no room", 10, connect.ErrDatagramLost, false},
	} {
		near, far := newPipe()
		s := &framedStream{near, make(chan func([]byte), 1), test.refused}
		var dropped atomic.Uint64
		c := receive(t, newConn(s, &dropped, nil))
		testnet.Eventually(t, patience, func() bool { return len(s.tooLarge) == 1 }, "datagrams are handled")
		if err := c.SendDatagram(make([]byte, test.size)); err != nil {
			t.Errorf("%s: %v", test.title, err)
		}
		if n := dropped.Load(); (n == 0) != test.arrives {
			t.Errorf("%s: %d are lost", test.title, n)
			continue
		}
		if !test.arrives {
			continue
		}
		if b, err := newCapsuleReader(far).next(); err != nil || len(b) != test.size {
			t.Errorf("%s: %d bytes arrive, %v", test.title, len(b), err)
		}
	}
}

// A panickyStream panics when it is written to.
type panickyStream struct{ tunnel.Stream }

func (panickyStream) Write([]byte) (int, error) { panic("a fault") }

// TestPanicGivesMemoryBack: what waited for a writer that panicked is not counted any more.
func TestPanicGivesMemoryBack(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	var budget tunnel.Budget
	c := newConn(panickyStream{connStream{near}}, nil, &budget)
	if err := c.SendDatagram([]byte("one")); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, patience, func() bool { return c.SendDatagram([]byte("two")) != nil }, "the panic is the error of later datagrams")
	if n := budget.Buffered(); n != 0 {
		t.Errorf("got %d bytes counted, want none", n)
	}
}

// A connStream is a net.Conn as a tunnel.Stream.
type connStream struct{ net.Conn }

func (connStream) CloseWrite() error { return nil }
