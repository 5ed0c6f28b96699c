//go:build unix

package interop

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

const echoALPN = "echo/1"

// A quicService is a quic-go server that wants a client certificate, says on
// each stream whose it was, and then echoes.
type quicService struct {
	addr string

	mu    sync.Mutex // guards conns
	conns []*quic.Conn
}

// serveQUIC starts one. change may alter what it listens with.
func (w *world) serveQUIC(t *testing.T, change func(*quic.Transport, *quic.Config)) *quicService {
	t.Helper()
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	must(t, err)
	tr, cfg := &quic.Transport{Conn: pc}, &quic.Config{Allow0RTT: true, MaxIdleTimeout: patience}
	if change != nil {
		change(tr, cfg)
	}
	s := &quicService{addr: pc.LocalAddr().String()}
	done := w.echo(t, tr, cfg, s)
	t.Cleanup(func() {
		_ = tr.Close()
		_ = pc.Close()
		<-done
	})
	return s
}

// echo serves on tr until it is closed.
func (w *world) echo(t *testing.T, tr *quic.Transport, cfg *quic.Config, s *quicService) (done chan struct{}) {
	t.Helper()
	tlsConf := w.service.ServerConfig()
	tlsConf.NextProtos = []string{echoALPN}
	ln, err := tr.ListenEarly(tlsConf, cfg)
	must(t, err)
	done = make(chan struct{})
	go func() {
		defer close(done)
		var wg sync.WaitGroup
		defer wg.Wait()
		for {
			c, err := ln.Accept(context.Background())
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, c)
			s.mu.Unlock()
			wg.Go(func() {
				for {
					str, err := c.AcceptStream(context.Background())
					if err != nil {
						return
					}
					wg.Go(func() {
						<-c.HandshakeComplete()
						id := "nobody"
						if peers := c.ConnectionState().TLS.PeerCertificates; len(peers) > 0 {
							id, _ = testca.PeerID(peers[0])
						}
						_, _ = io.WriteString(str, id+"\n")
						_, _ = io.Copy(str, str)
						_ = str.Close()
					})
				}
			})
		}
	}()
	return done
}

// count is how many connections there were.
func (s *quicService) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// last is the connection that was accepted last.
func (s *quicService) last() *quic.Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns[len(s.conns)-1]
}

// A quicClient is a socket with QUIC connections from it.
type quicClient struct {
	t    *testing.T
	w    *world
	tr   *quic.Transport
	conf *quic.Config
	tls  *tls.Config
}

func (w *world) quicClient(t *testing.T) *quicClient {
	t.Helper()
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	must(t, err)
	c := &quicClient{t: t, w: w, tr: &quic.Transport{Conn: pc}, conf: &quic.Config{MaxIdleTimeout: patience, HandshakeIdleTimeout: patience}}
	c.tls = w.client.ClientConfig(svc)
	c.tls.NextProtos = []string{echoALPN}
	t.Cleanup(func() {
		_ = c.tr.Close()
		_ = pc.Close()
	})
	return c
}

func (c *quicClient) source() string { return c.tr.Conn.LocalAddr().String() }

// dial connects to name by way of addr.
func (c *quicClient) dial(addr, name string) (*quic.Conn, error) {
	c.t.Helper()
	to, err := net.ResolveUDPAddr("udp", strings.TrimPrefix(addr, "udp://"))
	must(c.t, err)
	conf := c.tls.Clone()
	conf.ServerName = name
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	return c.tr.Dial(ctx, to, conf, c.conf)
}

func (c *quicClient) mustDial(addr, name string) *quic.Conn {
	c.t.Helper()
	conn, err := c.dial(addr, name)
	if err != nil {
		c.t.Fatalf("dial %s by %s: %v", name, addr, err)
	}
	return conn
}

// exchange sends n bytes on a stream of its own, compares what comes back, and
// returns whom the service took the client for.
func (c *quicClient) exchange(conn *quic.Conn, n int) (id string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*patience)
	defer cancel()
	str, err := conn.OpenStreamSync(ctx)
	must(c.t, err)
	_ = str.SetDeadline(time.Now().Add(2 * patience))
	var seed [32]byte
	seed[0] = byte(n)
	sent := sha256.New()
	wrote := make(chan error, 1)
	go func() {
		_, err := io.Copy(str, io.TeeReader(io.LimitReader(rand.NewChaCha8(seed), int64(n)), sent))
		wrote <- errors.Join(err, str.Close())
	}()
	got := sha256.New()
	b := make([]byte, 1)
	for {
		if _, err := io.ReadFull(str, b); err != nil {
			c.t.Fatalf("the service's greeting: %q, %v", id, err)
		}
		if b[0] == '\n' {
			break
		}
		id += string(b)
	}
	m, err := io.Copy(got, str)
	if err != nil {
		c.t.Fatalf("%d of %d bytes came back: %v", m, n, err)
	}
	must(c.t, <-wrote)
	if m != int64(n) || string(got.Sum(nil)) != string(sent.Sum(nil)) {
		c.t.Fatalf("%d of %d bytes came back, or others", m, n)
	}
	return id
}

// quicGateway starts a gateway with one listener of QUIC.
func quicGateway(t *testing.T, args ...string) *gateway {
	t.Helper()
	g := startGateway(t, append([]string{"--listen", "udp://127.0.0.1:0"}, args...)...)
	if !strings.HasPrefix(g.addr, "udp://127.0.0.1:") {
		t.Fatalf("the listener is at %q", g.addr)
	}
	return g
}

// udpGateway starts a gateway with the given listeners, and the service at addr.
func (w *world) udpGateway(t *testing.T, limits, listeners, addr string) *gateway {
	t.Helper()
	return startGateway(t, "--config", w.write(t, "udp.yaml", fmt.Sprintf(`
listeners:
  %s
admin: 127.0.0.1:%s
limits: {%s}
services:
  - name: %s
    endpoints: ["%s"]
`, listeners, freePort(t), limits, svc, addr)))
}

// A post-quantum hello over two Initials and more, mutual TLS between the ends,
// megabytes both ways, and one line in the log.
func TestQUICPassthrough(t *testing.T) {
	w := newWorld(t)
	s := w.serveQUIC(t, nil)
	g := w.udpGateway(t, "udpIdleTimeout: 500ms", "- address: udp://127.0.0.1:"+freePort(t), s.addr)
	r := newRelay(t, g, nil)
	c := w.quicClient(t)
	conn := c.mustDial(r.addr(), svc)
	if id := c.exchange(conn, 4<<20); id != clientID {
		t.Errorf("the service saw %q, want %q", id, clientID)
	}
	if n := r.first.Load(); n < 2 {
		t.Errorf("the hello was in %d datagrams: this test is for more", n)
	}
	source := r.back.LocalAddr().String()
	var list []struct {
		Source, Proto, Target, Service, Endpoint string
		Listener                                 string
	}
	must(t, g.ask("/tunnels", &list))
	if len(list) != 1 || list[0].Source != source || list[0].Proto != "quic" || list[0].Target != svc || list[0].Endpoint != s.addr || list[0].Listener != g.addr {
		t.Errorf("listed: %+v", list)
	}
	must(t, conn.CloseWithError(0, ""))
	l := g.outcome(t, source)
	if l.Proto != "quic" || l.Target != svc || l.Service != svc || l.Endpoint != s.addr || l.Reason != "idle" || l.In < 4<<20 || l.Out < 4<<20 || !strings.Contains(l.ALPN, echoALPN) {
		t.Errorf("the line: %+v", l)
	}
}

// Versions, token, early data.
func TestQUICVariants(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		name    string
		service func(*quic.Transport, *quic.Config)
		client  func(*quicClient)
	}{
		{"version 2", nil, func(c *quicClient) { c.conf.Versions = []quic.Version{quic.Version2} }},
		{"either version", nil, func(c *quicClient) { c.conf.Versions = []quic.Version{quic.Version2, quic.Version1} }},
		{"a service of version 1 only", func(_ *quic.Transport, c *quic.Config) { c.Versions = []quic.Version{quic.Version1} },
			func(c *quicClient) { c.conf.Versions = []quic.Version{quic.Version2, quic.Version1} }},
		{"Retry", func(tr *quic.Transport, _ *quic.Config) { tr.VerifySourceAddress = func(net.Addr) bool { return true } }, nil},
		{"ids of 20 bytes", func(tr *quic.Transport, _ *quic.Config) { tr.ConnectionIDLength = 20 }, nil},
		{"a classical hello", nil, func(c *quicClient) { c.tls.CurvePreferences = []tls.CurveID{tls.X25519} }},
		{"HelloRetryRequest", nil, func(c *quicClient) { c.tls.CurvePreferences = []tls.CurveID{tls.CurveP521, tls.X25519} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := w.serveQUIC(t, c.service)
			g := quicGateway(t, "--route", route(s.addr))
			cl := w.quicClient(t)
			if c.client != nil {
				c.client(cl)
			}
			if id := cl.exchange(cl.mustDial(g.addr, svc), 100_000); id != clientID {
				t.Errorf("the service saw %q, want %q", id, clientID)
			}
		})
	}

	t.Run("0-RTT", func(t *testing.T) {
		s := w.serveQUIC(t, nil)
		g := quicGateway(t, "--route", route(s.addr))
		c := w.quicClient(t)
		c.tls.ClientSessionCache = tls.NewLRUClientSessionCache(1)
		to, err := net.ResolveUDPAddr("udp", strings.TrimPrefix(g.addr, "udp://"))
		must(t, err)
		testnet.Eventually(t, patience, func() bool {
			conn, err := c.tr.DialEarly(t.Context(), to, c.tls, c.conf)
			must(t, err)
			defer func() { _ = conn.CloseWithError(0, "") }()
			c.exchange(conn, 5000)
			return conn.ConnectionState().Used0RTT
		}, "early data was taken")
	})
}

// Two services over one client's socket are two sessions.
func TestQUICManyNamesOfOneSocket(t *testing.T) {
	w := newWorld(t)
	one, two := w.serveQUIC(t, nil), w.serveQUIC(t, nil)
	g := quicGateway(t, "--route", route(one.addr), "--route", "two.example.test="+two.addr)
	c := w.quicClient(t)
	c.tls.InsecureSkipVerify = true // the certificate has one of the names
	var conns []*quic.Conn
	for i := range 10 {
		name := svc
		if i%2 == 1 {
			name = "two.example.test"
		}
		conns = append(conns, c.mustDial(g.addr, name))
	}
	for range 3 {
		for _, conn := range conns {
			c.exchange(conn, 20_000)
		}
	}
	if a, b := one.count(), two.count(); a != 5 || b != 5 {
		t.Errorf("the services have %d and %d connections, want 5 each", a, b)
	}
}

// The network reorders and repeats what the client says, from its hello on.
func TestQUICThroughAMess(t *testing.T) {
	w := newWorld(t)
	s := w.serveQUIC(t, nil)
	g := quicGateway(t, "--route", route(s.addr))
	rnd := rand.New(rand.NewPCG(1, 2))
	var held []byte
	mess := func(i int, b []byte) [][]byte {
		if h := held; h != nil {
			held = nil
			if rnd.IntN(4) == 0 {
				return [][]byte{b, h, h}
			}
			return [][]byte{b, h}
		}
		switch {
		case i == 0, i > 10 && rnd.IntN(20) == 0:
			held = b // until after the next
			return nil
		case rnd.IntN(10) == 0:
			return [][]byte{b, b}
		case i > 10 && rnd.IntN(50) == 0:
			return nil
		}
		return [][]byte{b}
	}
	r := newRelay(t, g, mess)
	c := w.quicClient(t)
	c.exchange(c.mustDial(r.addr(), svc), 2<<20)
}

// A NAT gives the client another port in the middle of a transfer: it goes on,
// and the service has seen and validated the new address.
func TestQUICRebinding(t *testing.T) {
	w := newWorld(t)
	for name, size := range map[string]int{"ids of 4 bytes": 4, "ids of 20 bytes": 20} {
		t.Run(name, func(t *testing.T) {
			s := w.serveQUIC(t, func(tr *quic.Transport, _ *quic.Config) { tr.ConnectionIDLength = size })
			g := quicGateway(t, "--route", route(s.addr))
			r := newRelay(t, g, nil)
			c := w.quicClient(t)
			conn := c.mustDial(r.addr(), svc)
			c.exchange(conn, 1000)
			before := s.last().RemoteAddr().String()
			for range 3 {
				r.rebind(t)
				c.exchange(conn, 500_000)
			}
			if after := s.last().RemoteAddr().String(); after == before {
				t.Errorf("the service sees %s as before", after)
			}
			var list []struct{ Source string }
			must(t, g.ask("/tunnels", &list))
			if len(list) != 1 {
				t.Errorf("%d sessions, want one: %+v", len(list), list)
			}
		})
	}
}

// Each refusal is an error that people can read, at once, and nothing reaches
// a service.
func TestQUICRefusals(t *testing.T) {
	w := newWorld(t)
	s := w.serveQUIC(t, nil)
	file := w.write(t, "refusals.yaml", fmt.Sprintf(`
listeners:
  - address: udp://127.0.0.1:%s
  - address: udp://127.0.0.1:%s
    refusal: close
admin: 127.0.0.1:%s
services:
  - name: %s
    endpoints: ["%s"]
  - name: private.example.test
    exposed: false
    endpoints: ["%s"]
  - name: gone.example.test
    ports: [1]
    endpoints: ["nowhere.invalid:1"]
  - name: far.example.test
    ports: [1]
    via: [{connect: "127.0.0.1:1"}]
`, freePort(t), freePort(t), freePort(t), svc, s.addr, s.addr))
	g := startGateway(t, "--config", file)
	const crypto = 0x100
	for _, c := range []struct {
		name   string
		code   quic.TransportErrorCode
		words  string
		reason string
	}{
		{"nobody.example.test", crypto + 112, "unrecognized name", "no-route"},
		{"private.example.test", crypto + 112, "unrecognized name", "not-exposed"},
		{"192.0.2.1", crypto + 112, "unrecognized name", "no-sni"},
		{"gone.example.test", quic.ConnectionRefused, "", "dns-failed"},
		{"far.example.test", quic.ConnectionRefused, "", "unsupported"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cl := w.quicClient(t)
			start := time.Now()
			_, err := cl.dial(g.addrs[0], c.name)
			var te *quic.TransportError
			if !errors.As(err, &te) || te.ErrorCode != c.code || !te.Remote || !strings.Contains(te.ErrorMessage, c.words) {
				t.Errorf("the client hears %v, want %#x %q", err, uint64(c.code), c.words)
			}
			if c.reason != "dns-failed" && time.Since(start) > patience/2 {
				t.Errorf("after %v", time.Since(start))
			}
			if l := g.outcome(t, cl.source()); l.Reason != c.reason || l.Proto != "quic" {
				t.Errorf("the line: %+v, want %s", l, c.reason)
			}
		})
	}
	t.Run("silently", func(t *testing.T) {
		cl := w.quicClient(t)
		cl.conf.HandshakeIdleTimeout = 500 * time.Millisecond
		_, err := cl.dial(g.addrs[1], "nobody.example.test")
		var idle *quic.IdleTimeoutError
		if !errors.As(err, &idle) {
			t.Errorf("the client hears %v, want nothing", err)
		}
		if l := g.outcome(t, cl.source()); l.Reason != "no-route" {
			t.Errorf("the line: %+v", l)
		}
	})
	if n := s.count(); n != 0 {
		t.Errorf("the service has %d connections", n)
	}
}

// A drain lets connections go on and refuses new ones.
func TestQUICDrain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveQUIC(t, nil)
	file := w.write(t, "drain.yaml", fmt.Sprintf(`
listeners: [{address: "udp://127.0.0.1:%s"}]
admin: 127.0.0.1:%s
drain: {delay: 0s, timeout: 10s}
services: [{name: %s, endpoints: ["%s"]}]
`, freePort(t), freePort(t), svc, s.addr))
	g := startGateway(t, "--config", file)
	c, late := w.quicClient(t), w.quicClient(t)
	conn := c.mustDial(g.addr, svc)
	g.signal(15)
	g.says(t, "draining")
	var te *quic.TransportError
	testnet.Eventually(t, patience, func() bool {
		_, err := late.dial(g.addr, svc)
		return errors.As(err, &te)
	}, "a new connection was refused")
	if te.ErrorCode != quic.ConnectionRefused {
		t.Errorf("a new connection hears %v, want CONNECTION_REFUSED", te)
	}
	c.exchange(conn, 100_000)
	g.awaitEnd(t)
	if g.err != nil {
		t.Errorf("the gateway ended with %v", g.err)
	}
	if l := g.outcome(t, c.source()); l.Reason != "drain" {
		t.Errorf("the line: %+v", l)
	}
}
