package gateway

import (
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/gateway/inbound"
	"culvert.dev/internal/termination"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// What there is once is what every part has: limits, the descriptors and the memory,
// the guard, the settings and who is told of the end. What a part does with it is
// tested where it is; that it has it, here.
func TestEveryPartIsPluggedIn(t *testing.T) {
	auth := &connect.Bearer{Verify: connect.Tokens(map[string]string{"ci": "t-one"})}
	h := &inbound.HTTP3{Auth: auth, CurrentVia: func() string { return "gw" }, TerminateAll: true}
	keys, _ := gatewayKeys(t)
	if err := h.Use(termination.Item{Keys: keys, Any: true}); err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Listeners: []Listener{
			{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&connect.Protocol{}}},
			{Address: "udp://127.0.0.1:0", Datagrams: &inbound.Datagrams{HTTP3: h}},
		},
		Sources: []registry.Source{registry.Static{Name: "test"}},
		Via:     "gw",
		Limits: tunnel.Limits{ConnectionRatePerClient: 11, MaxConnectionsPerClient: 12, MaxPendingPerClient: 13, MaxPendingConnections: 14, FirstByteTimeout: 15 * time.Second, HandshakeTimeout: 16 * time.Second,
			MaxTunnels: 17, IdleTimeout: 18 * time.Second, UDPIdleTimeout: 19 * time.Second, HalfClosedTimeout: 20 * time.Second, ConnectTimeout: 21 * time.Second, ConnectTotalTimeout: 22 * time.Second},
	}
	g, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	next := cfg
	next.Limits.MaxTunnels = 18
	for _, want := range []Config{cfg, next} {
		for who, limits := range map[string]tunnel.LimitsFunc{
			"streams": g.server.CurrentLimits, "datagrams": g.datagrams.CurrentLimits, "HTTP/3": h.Server.CurrentLimits, "requests": g.router.CurrentLimits, "tunnels": g.relay.CurrentLimits,
		} {
			if has := *limits(); has != want.Limits {
				t.Errorf("%s have the limits %+v, want %+v", who, has, want.Limits)
			}
		}
		if err := g.Reconfigure(next); err != nil {
			t.Fatal(err)
		}
	}
	budget := g.loops.Budget
	if budget == nil {
		t.Fatal("the loops have no budget")
	}
	for who, has := range map[string]*tunnel.Budget{
		"streams": g.server.Budget, "datagrams": g.datagrams.Budget, "HTTP/3": h.Server.Budget, "tunnels": g.router.Budget,
		"ways out": g.upstreams.Budget, "checks": g.checker.Budget, "listeners of sources": g.inbound.budget, "the memory's watch": g.memory.budget,
	} {
		if has != budget {
			t.Errorf("%s have a budget of their own, or none", who)
		}
	}
	guard := g.inbound.guard
	if guard == nil {
		t.Fatal("the listeners of sources have no guard")
	}
	direct, ok := g.router.Dialer.(*tunnel.NetDialer)
	if !ok {
		t.Fatalf("tunnels are dialed by a %T", g.router.Dialer)
	}
	datagrams := g.datagrams.Dialer
	if datagrams == nil {
		t.Fatal("datagrams have no dialer")
	}
	for who, has := range map[string]*tunnel.Guard{"tunnels": direct.Guard, "datagrams": datagrams.Guard, "ways out": g.upstreams.Direct.Guard} {
		if has != guard {
			t.Errorf("%s have a guard of their own, or none", who)
		}
	}
	for who, tells := range map[string]bool{
		"streams": g.server.Observe != nil, "datagrams": g.datagrams.Observe != nil, "HTTP/3": h.Server.Observe != nil, "tunnels": g.router.Observe != nil,
	} {
		if !tells {
			t.Errorf("nobody is told of the end of %s", who)
		}
	}
	if up, down := g.upstreams.CurrentVia(), h.Server.CurrentVia(); up != cfg.Via || down != "gw" {
		t.Errorf("this gateway calls itself %q and %q, want %q and gw", up, down, cfg.Via)
	}
	if h.Server.Auth != connect.Authenticator(auth) || h.Server.TLS.GetConfigForClient == nil {
		t.Errorf("HTTP/3 asks for %v, and knows clients by their certificates: %v", h.Server.Auth, h.Server.TLS.GetConfigForClient != nil)
	}
}
