package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

const patience = 10 * time.Second

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
	cfg.Lameduck, cfg.Grace, cfg.DialTimeout = -1, -1, time.Second
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
	return g.Addrs()[0].String(), g
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

func byConnect(to ...string) registry.Hop { return registry.Hop{Proto: "connect", To: to} }

func byWebSocket(to ...string) registry.Hop {
	h := registry.Hop{Proto: "websocket"}
	for _, addr := range to {
		h.To = append(h.To, "ws://"+addr)
	}
	return h
}

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
		"hop through hop":       service("", byWebSocket(first), byConnect("far.gw.test:8080")),
		"WebSocket in CONNECT":  service("", byConnect(first), byWebSocket("far.gw.test:8080")),
		"WebSocket in itself":   service("", byWebSocket(first), byWebSocket("far.gw.test:8080")),
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
	far := start(t, "far", service(testnet.Echo(t).Addr()))
	ignorant := start(t, "ignorant")
	rows := []struct {
		name string
		hops []registry.Hop
		want tunnel.Reason // Done if it works
	}{
		{"the first is down", []registry.Hop{byConnect(closed, far)}, tunnel.Done},
		{"the first is silent", []registry.Hop{byWebSocket(silent(t), far)}, tunnel.Done},
		{"the first is no gateway", []registry.Hop{byConnect(testnet.Echo(t).Addr(), far)}, tunnel.Done},
		{"all are down", []registry.Hop{byConnect(closed, alsoClosed)}, tunnel.DialFailed},
		{"all are silent", []registry.Hop{byConnect(silent(t), silent(t))}, tunnel.DialTimeout},
		{"the first knows no such service", []registry.Hop{byConnect(ignorant, far)}, tunnel.DialFailed},
	}
	for _, row := range rows {
		addr := start(t, "near", service("", row.hops...))
		for i, d := range []tunnel.Dialer{&connect.Dialer{Proxy: addr}, &ws.Dialer{URL: "ws://" + addr}} {
			if err := check(t, d); tunnel.ReasonOf(err) != row.want {
				t.Errorf("%s, %d: got %v, want %s", row.name, i, err, row.want)
			}
		}
	}
}

// Two gateways that each think the other knows: the first sees its own name.
func TestLoop(t *testing.T) {
	ln := testnet.Listen(t) // a port for the one that is not there yet
	for _, hop := range []func(...string) registry.Hop{byConnect, byWebSocket} {
		second := ""
		first := start(t, "first", service("", registry.Hop{Proto: "connect", To: []string{ln.Addr().String()}}))
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
	d := &Dialers{Direct: &tunnel.NetDialer{}, Lookup: func(_ context.Context, host string) ([]netip.Addr, error) {
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
			way, err := d.way([]registry.Hop{hop})
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
	d := &Dialers{}
	way := func(hops ...registry.Hop) tunnel.Dialer {
		t.Helper()
		w, err := d.way(hops)
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
	for _, other := range [][]registry.Hop{{byConnect("a.test:1")}, {byConnect("a.test:1"), byConnect("b.test:1")}, {byWebSocket("a.test:1", "b.test:1")}, {token}, {user}} {
		if way(other...) == a {
			t.Errorf("%+v is the same way as two alternatives by CONNECT", other)
		}
	}
	for _, bad := range [][]registry.Hop{{{Proto: "carrier pigeon", To: []string{"a.test:1"}}}, {{Proto: "connect"}}, {{Proto: "websocket", To: []string{"http://a.test/"}}}, {{Proto: "connect", To: []string{"https://a.test:1"}, Roots: "x"}}} {
		if _, err := d.way(bad); err == nil || strings.Contains(err.Error(), "t0ken") {
			t.Errorf("%+v: got %v, want an error", bad, err)
		}
	}
}
