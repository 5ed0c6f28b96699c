package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

const patience = 30 * time.Second

// start runs a gateway that serves services, by every protocol on one port.
func start(t *testing.T, name string, services ...*registry.Service) (addr string) {
	t.Helper()
	return startWith(t, name, []tunnel.Protocol{&sni.Protocol{}, &ws.Protocol{Via: name}, &connect.Protocol{Via: name}}, services...)
}

// startWith runs one with other protocols.
func startWith(t *testing.T, name string, protocols []tunnel.Protocol, services ...*registry.Service) (addr string) {
	t.Helper()
	return startConfig(t, Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: protocols}},
		Sources:   []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: services}}},
		Via:       name,
	})
}

// startConfig runs one that has all but what it dials and stops by.
func startConfig(t *testing.T, cfg Config) (addr string) {
	t.Helper()
	addr, _ = startGateway(t, cfg)
	return addr
}

func startGateway(t *testing.T, cfg Config) (addr string, g *Gateway) {
	t.Helper()
	cfg.DrainDelay, cfg.DrainTimeout, cfg.Limits.ConnectTimeout = -1, -1, time.Second
	var err error
	if g, err = New(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := g.Run(ctx, nil); err != nil {
			t.Errorf("gateway %s: %v", cfg.Via, err)
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	if !cfg.DialOnly {
		addr = g.Addrs()[0].String()
	}
	return addr, g
}

// service is svc.test:443, directly or by hops.
func service(addr string, hops ...registry.Hop) *registry.Service {
	s := &registry.Service{
		Name: "svc", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("svc.test")}}, Ports: []uint16{443}, Exposed: true, Via: hops,
	}
	if addr != "" {
		ap := netip.MustParseAddrPort(addr)
		s.Endpoints = []registry.Endpoint{{Addr: ap.Addr(), Port: ap.Port()}}
	}
	return s
}

func byConnect(to ...string) registry.Hop { return registry.Hop{Proto: "connect", Addresses: to} }

func byWebSocket(to ...string) registry.Hop {
	h := registry.Hop{Proto: "websocket"}
	for _, addr := range to {
		h.Addresses = append(h.Addresses, "ws://"+addr)
	}
	return h
}

// inTheClear is a hop that plaintext may go to without TLS.
func inTheClear(h registry.Hop) registry.Hop {
	h.Insecure = true
	return h
}

func byHTTP2(to ...string) registry.Hop { return registry.Hop{Proto: "connect-h2", Addresses: to} }

// closed and alsoClosed are addresses that nobody listens at: one that was
// free could be taken again.
const (
	closed     = "127.0.0.1:1"
	alsoClosed = "127.0.0.1:2"
)

// silent is an address that takes connections and says nothing.
func silent(t *testing.T) string { return testnet.Listen(t).Addr().String() }

// check sends a little to svc.test by d and wants it back, and its end.
func check(t *testing.T, d tunnel.Dialer) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", "svc.test:443")
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	const want = "there and back"
	_, _ = io.WriteString(c, want)
	if err := c.(tunnel.Stream).CloseWrite(); err != nil {
		return err
	}
	got, err := io.ReadAll(c)
	if string(got) != want || err != nil {
		return fmt.Errorf("got %q, %w, want %q and the end", got, err, want)
	}
	return nil
}

// Every way in, over chains that mix the ways out.
func TestChain(t *testing.T) {
	far := start(t, "far", service(testnet.Echo(t).Addr()))
	middle := start(t, "middle", service("", byConnect(far)))
	at := netip.MustParseAddrPort(far)
	first := start(t, "first", &registry.Service{ // carries to the far gateway, and knows nothing of its services
		Name: "far", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("far.gw.test")}}, Exposed: true,
		Endpoints: []registry.Endpoint{{Addr: at.Addr(), Port: at.Port()}},
	})
	for name, near := range map[string]*registry.Service{
		"one hop":               service("", byConnect(far)),
		"each gateway knows on": service("", byWebSocket(middle)),
		"hop through hop":       service("", byWebSocket(first), inTheClear(byConnect("far.gw.test:8080"))),
		"WebSocket in CONNECT":  service("", byConnect(first), inTheClear(byWebSocket("far.gw.test:8080"))),
		"WebSocket in itself":   service("", byWebSocket(first), inTheClear(byWebSocket("far.gw.test:8080"))),
	} {
		addr := start(t, "near", near)
		for how, d := range map[string]tunnel.Dialer{"connect": &connect.Dialer{Proxy: addr}, "websocket": &ws.Dialer{URL: "ws://" + addr}} {
			if err := check(t, d); err != nil {
				t.Errorf("%s, by %s: %v", name, how, err)
			}
		}
	}
}

// The next gateway is tried before the client hears anything, where one is
// down, silent, full or stopping; a no stands.
func TestAlternatives(t *testing.T) {
	all := []tunnel.Protocol{&ws.Protocol{Via: "far"}, &connect.Protocol{Via: "far"}, &h2.Protocol{Via: "far"}}
	far := startWith(t, "far", all, service(testnet.Echo(t).Addr()))
	farUDP, roots, _ := startHTTP3(t, true, 0, service(testnet.Echo(t).Addr()))
	dead, err := net.ListenPacket("udp", "127.0.0.1:0") // which answers nothing
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dead.Close() })
	refusing := func(why tunnel.Reason) (tcp, udp string) {
		refuse := resolverFunc(func(*tunnel.Request) (tunnel.Route, error) {
			return tunnel.Route{}, tunnel.Refusef(why, "whoever asks")
		})
		tcp = tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{&ws.Protocol{}, &connect.Protocol{}, &h2.Protocol{}}, Resolver: refuse}).Addr
		udp, pem := serveHTTP3(t, refuse)
		roots += pem
		return tcp, udp
	}
	full, fullUDP := refusing(tunnel.Overload)
	stopping, stoppingUDP := refusing(tunnel.Drain)
	ignorant, ignorantUDP := refusing(tunnel.NoRoute)
	for name, way := range map[string]struct {
		hop                                                  func(...string) registry.Hop
		far, closed, silent, other, full, stopping, ignorant string
	}{
		"connect":    {byConnect, far, closed, silent(t), testnet.Echo(t).Addr(), full, stopping, ignorant},
		"websocket":  {byWebSocket, far, closed, silent(t), testnet.Echo(t).Addr(), full, stopping, ignorant},
		"connect-h2": {byHTTP2, far, closed, silent(t), testnet.Echo(t).Addr(), full, stopping, ignorant},
		"connect-h3": {func(to ...string) registry.Hop { return byHTTP3(roots, to...) }, farUDP, "", dead.LocalAddr().String(), "", fullUDP, stoppingUDP, ignorantUDP},
	} {
		for _, row := range []struct {
			name  string
			first string
			next  string
			want  tunnel.Reason // Done if it works
		}{
			{"the first is down", way.closed, way.far, tunnel.Done},
			{"the first is silent", way.silent, way.far, tunnel.Done},
			{"the first is no gateway", way.other, way.far, tunnel.Done},
			{"the first is full", way.full, way.far, tunnel.Done},
			{"the first is stopping", way.stopping, way.far, tunnel.Done},
			{"all are down", way.closed, alsoClosed, tunnel.DialFailed},
			{"all are silent", way.silent, way.silent, tunnel.DialTimeout},
			{"the first knows no such service", way.ignorant, way.far, tunnel.NoRoute},
		} {
			if row.first == "" {
				continue // of UDP, no server that is none, and who is down is silent
			}
			t.Run(name+"/"+row.name, func(t *testing.T) {
				t.Parallel()
				addr := start(t, "near", service("", way.hop(row.first, row.next)))
				for i, d := range []tunnel.Dialer{&connect.Dialer{Proxy: addr}, &ws.Dialer{URL: "ws://" + addr}} {
					if err := check(t, d); tunnel.ReasonOf(err) != row.want {
						t.Errorf("%d: got %v, want %s", i, err, row.want)
					}
				}
			})
		}
	}
}

type resolverFunc func(*tunnel.Request) (tunnel.Route, error)

func (f resolverFunc) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	return f(req)
}

// Two gateways that each think the other knows: the first sees its own name.
func TestLoop(t *testing.T) {
	ln := testnet.Listen(t) // a port for the one that is not there yet
	for _, hop := range []func(...string) registry.Hop{byConnect, byWebSocket} {
		second := ""
		first := start(t, "first", service("", registry.Hop{Proto: "connect", Addresses: []string{ln.Addr().String()}}))
		second = start(t, "second", service("", hop(first)))
		forward(t, ln, second)
		for _, d := range []tunnel.Dialer{&connect.Dialer{Proxy: first}, &ws.Dialer{URL: "ws://" + first}} {
			if err := check(t, d); tunnel.ReasonOf(err) != tunnel.Loop {
				t.Errorf("got %v, want %s", err, tunnel.Loop)
			}
		}
		ln = testnet.Listen(t)
	}
}

// TestSNILoop: TLS has no place for what "Via" says. Where two gateways are each
// other's endpoint, or the way back is CONNECT, what one source may have ends
// the loop; the log of one of them says so, and nobody answers the client.
func TestSNILoop(t *testing.T) {
	const perSource = 20 // so few that a slow machine reaches it too
	for name, hop := range map[string]func(addr string) *registry.Service{
		"by TLS": func(addr string) *registry.Service { return service(addr) },
		"mixed":  func(addr string) *registry.Service { return service("", byConnect(addr)) },
	} {
		t.Run(name, func(t *testing.T) {
			var log logbook
			run := func(name string, s *registry.Service) (addr string) {
				return startConfig(t, Config{
					Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&sni.Protocol{}, &connect.Protocol{Via: name}}}},
					Sources:   []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []*registry.Service{s}}}},
					Limits:    tunnel.Limits{ConnectionRatePerClient: perSource},
					Log:       slog.New(slog.NewTextHandler(&log, nil)),
					Via:       name,
				})
			}
			ln := testnet.Listen(t) // a port for the one that is not there yet
			first := run("first", service(ln.Addr().String()))
			forward(t, ln, run("second", hop(first)))
			c, err := net.Dial("tcp", first)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(patience))
			err = tls.Client(c, &tls.Config{ServerName: "svc.test"}).HandshakeContext(t.Context())
			if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the handshake ended with %v, want that the loop ends it", err)
			}
			testnet.Eventually(t, patience, func() bool {
				return strings.Contains(log.String(), `err="limits.connectionRatePerClient: 127.0.0.1 opened more than 20 connections in a second"`)
			}, "a line of the log has the end of the loop")
			if n := strings.Count(log.String(), "target=svc.test:443"); n > 10*perSource {
				t.Errorf("%d tunnels were made, want %d for each gateway and not many more", n, perSource)
			}
		})
	}
}

// forward passes on what ln accepts.
func forward(t *testing.T, ln net.Listener, to string) {
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				out, err := net.Dial("tcp", to)
				if err != nil {
					return
				}
				defer out.Close()
				defer context.AfterFunc(t.Context(), func() { // those that are kept for others
					_ = c.Close()
					_ = out.Close()
				})()
				wg.Go(func() { _, _ = io.Copy(out, c); _ = out.(*net.TCPConn).CloseWrite() })
				_, _ = io.Copy(c, out)
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait()
	})
}

// The first hop is judged like every address that is dialed.
func TestFirstHopIsGuarded(t *testing.T) {
	d := &upstream.Transports{Direct: &tunnel.NetDialer{}, Lookup: func(_ context.Context, host string) ([]netip.Addr, error) {
		switch host {
		case "metadata.test":
			return []netip.Addr{netip.MustParseAddr("169.254.169.254")}, nil
		case "rebound.test":
			return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
		case "slow.test":
			return nil, &net.DNSError{IsTimeout: true}
		}
		return nil, errors.New("no such name")
	}}
	for to, want := range map[string]tunnel.Reason{
		"metadata.test:80": tunnel.Prohibited,
		"rebound.test:80":  tunnel.Prohibited,
		"slow.test:80":     tunnel.DialTimeout,
		"nobody.test:80":   tunnel.DialFailed,
		closed:             tunnel.DialFailed,
	} {
		for _, hop := range []registry.Hop{byConnect(to), byWebSocket(to), bySOCKS(to)} {
			way, err := d.NextHop([]registry.Hop{hop})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := way.DialContext(t.Context(), "tcp", "svc.test:443"); tunnel.ReasonOf(err) != want {
				t.Errorf("%s by %s: got %v (%s), want %s", to, hop.Proto, err, tunnel.ReasonOf(err), want)
			}
		}
	}
}

// Equal ways share one, so that what keeps connections can.
func TestWaysAreShared(t *testing.T) {
	d := &upstream.Transports{}
	way := func(hops ...registry.Hop) tunnel.Dialer {
		t.Helper()
		w, err := d.NextHop(hops)
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	a := way(byConnect("a.test:1", "b.test:1"))
	if way(byConnect("a.test:1", "b.test:1")) != a {
		t.Error("the same hops are two ways")
	}
	token, user := byConnect("a.test:1", "b.test:1"), byConnect("a.test:1", "b.test:1")
	token.Token, user.User, user.Password = "t0ken", "alice", "secret"
	token.Insecure, user.Insecure = true, true
	for _, other := range [][]registry.Hop{{byConnect("a.test:1")}, {byConnect("a.test:1"), byConnect("b.test:1")}, {byWebSocket("a.test:1", "b.test:1")}, {token}, {user}} {
		if way(other...) == a {
			t.Errorf("%+v is the same way as two alternatives by CONNECT", other)
		}
	}
	bare := token
	bare.Insecure = false
	for _, bad := range [][]registry.Hop{{bare}, {{Proto: "carrier pigeon", Addresses: []string{"a.test:1"}}}, {{Proto: "connect"}}, {{Proto: "websocket", Addresses: []string{"http://a.test/"}}}, {{Proto: "connect", Addresses: []string{"https://a.test:1"}, Roots: "x"}}} {
		if _, err := d.NextHop(bad); err == nil || strings.Contains(err.Error(), "t0ken") {
			t.Errorf("%+v: got %v, want an error", bad, err)
		}
	}
}
