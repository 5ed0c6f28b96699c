package gateway

import (
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/connect/socks5"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

func bySOCKS(to ...string) registry.Hop {
	return registry.Hop{Proto: "socks5", Addresses: to, User: "alice", Password: "secret", Insecure: true}
}

// startSOCKS runs a gateway that speaks nothing but SOCKS5, to alice.
func startSOCKS(t *testing.T, name string, services ...*registry.Service) (addr string) {
	t.Helper()
	return startWith(t, name, []tunnel.Protocol{&socks5.Protocol{Verify: connect.Passwords(map[string]string{"alice": "secret"})}}, services...)
}

// leadsTo is a service that a hop in the middle asks for: another gateway.
func leadsTo(name, addr string) *registry.Service {
	at := netip.MustParseAddrPort(addr)
	return &registry.Service{
		Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name)}}, Ports: []uint16{1080}, Exposed: true,
		Endpoints: []registry.Endpoint{{Addr: at.Addr(), Port: at.Port()}},
	}
}

// TestChainSOCKS has SOCKS5 as the first, the middle and the last of three
// gateways, and as all of them.
func TestChainSOCKS(t *testing.T) {
	t.Parallel()
	echo := service(testnet.Echo(t).Addr())
	far, farSOCKS := start(t, "far", echo), startSOCKS(t, "far", echo)
	to := []*registry.Service{leadsTo("far.gw.test", far), leadsTo("fars.gw.test", farSOCKS)}
	middle, middleSOCKS := start(t, "middle", to...), startSOCKS(t, "middle", to...)
	to = []*registry.Service{leadsTo("middle.gw.test", middle), leadsTo("middles.gw.test", middleSOCKS)}
	first, firstSOCKS := start(t, "first", to...), startSOCKS(t, "first", to...)
	for name, hops := range map[string][]registry.Hop{
		"alone":  {bySOCKS(farSOCKS)},
		"first":  {bySOCKS(firstSOCKS), byWebSocket("middle.gw.test:1080"), inTheClear(byConnect("far.gw.test:1080"))},
		"middle": {byConnect(first), bySOCKS("middles.gw.test:1080"), inTheClear(byWebSocket("far.gw.test:1080"))},
		"last":   {byWebSocket(first), byConnect("middle.gw.test:1080"), bySOCKS("fars.gw.test:1080")},
		"all":    {bySOCKS(firstSOCKS), bySOCKS("middles.gw.test:1080"), bySOCKS("fars.gw.test:1080")},
		"second": {bySOCKS(closed, farSOCKS)},
	} {
		near := start(t, "near", service("", hops...))
		if err := check(t, &connect.Dialer{Proxy: near}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	wrong := bySOCKS(farSOCKS)
	wrong.Password = "guess"
	way, err := (&upstream.Transports{Direct: &tunnel.NetDialer{}}).NextHop([]registry.Hop{wrong})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := way.DialContext(t.Context(), "tcp", "svc.test:443"); tunnel.ReasonOf(err) != tunnel.NoAuth {
		t.Errorf("with a wrong password: got %v, want %s", err, tunnel.NoAuth)
	}
}

// TestUserByCONNECT: other gateways are shown a user as well.
func TestUserByCONNECT(t *testing.T) {
	alice := &connect.Protocol{Auth: &connect.BasicAuth{Verify: connect.Passwords(map[string]string{"alice": "secret"})}}
	far := startWith(t, "far", []tunnel.Protocol{alice}, service(testnet.Echo(t).Addr()))
	h := byConnect(far)
	h.User, h.Password = "alice", "secret"
	if err := check(t, &connect.Dialer{Proxy: start(t, "near", service("", h))}); err != nil {
		t.Error(err)
	}
}

// TestSOCKSLoop: SOCKS5 says nothing of those a request came through. A
// gateway is stopped at its own listener; where two lead to each other, what a
// source may have ends it, and the log of one of them says so.
func TestSOCKSLoop(t *testing.T) {
	own := testnet.Listen(t)
	guard := &tunnel.Guard{}
	guard.OwnListener(own.Addr())
	way, err := (&upstream.Transports{Direct: &tunnel.NetDialer{Guard: guard}}).NextHop([]registry.Hop{bySOCKS(own.Addr().String())})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := way.DialContext(t.Context(), "tcp", "svc.test:443"); tunnel.ReasonOf(err) != tunnel.Loop {
		t.Errorf("to its own listener: got %v, want %s", err, tunnel.Loop)
	}

	const perSource = 20 // so few that a slow machine reaches it too
	var log logbook
	run := func(hop registry.Hop) (addr string) {
		return startConfig(t, Config{
			Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&socks5.Protocol{}}}},
			Sources:   []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []*registry.Service{service("", hop)}}}},
			Limits:    tunnel.Limits{ConnectionRatePerClient: perSource},
			Log:       slog.New(slog.NewTextHandler(&log, nil)),
		})
	}
	ln := testnet.Listen(t) // a port for the one that is not there yet
	first := run(bySOCKS(ln.Addr().String()))
	forward(t, ln, run(bySOCKS(first)))
	if err := check(t, &socks5.Dialer{Proxy: first}); tunnel.ReasonOf(err) != tunnel.DialFailed {
		t.Errorf("got %v, want %s", err, tunnel.DialFailed)
	}
	const end = `err="limits.connectionRatePerClient: 127.0.0.1 opened more than 20 connections in a second"`
	// The line is written after the connection has ended.
	testnet.Eventually(t, patience, func() bool { return strings.Contains(log.String(), end) }, "a line of the log has the end of the loop, of %s", &log)
	if n := strings.Count(log.String(), "target=svc.test:443"); n > 10*perSource {
		t.Errorf("%d requests were made, want %d for each gateway and not many more", n, perSource)
	}
}
