package gateway

import (
	"context"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/miekg/dns"

	"culvert.dev/dns"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// Names that lead back to the gateway by its own DNS end there: what asks itself
// for itself fails in time, and what is the gateway's own address is refused. That
// a name means the gateway, to those who reach no endpoint, is no loop.
func TestNamesThatLeadBack(t *testing.T) {
	t.Parallel()
	name := func(s string) []tunnel.Pattern { return []tunnel.Pattern{{Suffix: tunnel.MustParseName(s)}} }
	source := later{make(chan registry.Snapshot)}
	var resolver atomic.Pointer[dns.Resolver]
	g, err := New(t.Context(), Config{
		Mesh:      registry.Mesh{Network: "here"},
		Sources:   []registry.Source{source},
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&sni.Protocol{}}}},
		DNS: &DNS{
			Listeners: []DNSListener{{Transport: dns.UDP, Address: "127.0.0.1:0"}},
			Server:    &dns.Server{Zones: []string{"mesh.internal"}},
		},
		Lookup: func(ctx context.Context, host string) ([]netip.Addr, error) { return resolver.Load().Lookup(ctx, host) },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	own := netip.MustParseAddrPort(g.Addrs()[0].String())
	asked := g.dns.addrs()[0].String()
	resolver.Store(&dns.Resolver{Servers: []string{asked}})
	port := []uint16{own.Port()}
	snapshot := registry.Snapshot{
		Networks: []registry.Network{
			{Name: "here", CIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}},
			{Name: "there", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, Gateways: []registry.Gateway{{Address: registry.Endpoint{Addr: own.Addr(), Port: own.Port()}}}},
		},
		Services: []*registry.Service{
			{Name: "ring", Names: name("ring.mesh.internal"), Ports: port, Exposed: true, Endpoints: []registry.Endpoint{{Host: "ring.mesh.internal"}}},
			{Name: "one", Names: name("one.mesh.internal"), Ports: port, Exposed: true, Endpoints: []registry.Endpoint{{Host: "two.mesh.internal"}}},
			{Name: "two", Names: name("two.mesh.internal"), Ports: port, Exposed: true, Endpoints: []registry.Endpoint{{Host: "one.mesh.internal"}}},
			{Name: "back", Names: name("back.mesh.internal"), Ports: port, Exposed: true, Endpoints: []registry.Endpoint{{Host: "self.mesh.internal"}}},
			{Name: "self", Names: name("self.mesh.internal"), Ports: port, Exposed: true, Endpoints: []registry.Endpoint{{Addr: own.Addr(), Port: own.Port()}}},
			{Name: "far", Names: name("far.mesh.internal"), Ports: port, Exposed: true, Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("10.1.1.1")}}},
		},
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- g.Run(ctx, nil) }()
	defer func() {
		cancel()
		<-ended
	}()

	source.now <- snapshot
	testnet.Eventually(t, soon, func() bool { return g.registry.Table() != nil }, "the table is there")

	for host, want := range map[string]string{
		"ring.mesh.internal.": "SERVFAIL", "one.mesh.internal.": "SERVFAIL",
		"back.mesh.internal.": "SERVFAIL", // what is loopback by DNS is not told
		"self.mesh.internal.": "NOERROR",
		"far.mesh.internal.":  "NOERROR", // the gateway, and so be it
	} {
		began := time.Now()
		res, _, err := (&wire.Client{Timeout: soon}).Exchange(new(wire.Msg).SetQuestion(host, wire.TypeA), asked)
		if err != nil {
			t.Errorf("%s: %v", host, err)
			continue
		}
		if got := wire.RcodeToString[res.Rcode]; got != want || got == "NOERROR" && len(res.Answer) != 1 {
			t.Errorf("%s: %s with %d records, want %s", host, got, len(res.Answer), want)
		}
		if took := time.Since(began); took > soon/2 {
			t.Errorf("%s: answered after %v", host, took)
		}
	}
	for host, want := range map[string]tunnel.Reason{
		"ring.mesh.internal": tunnel.LookupError, "back.mesh.internal": tunnel.Loop, "self.mesh.internal": tunnel.Loop, "far.mesh.internal": tunnel.Loop,
	} {
		x := Explain(t.Context(), g.router, g.cfg.Listeners, Query{Host: host, Listener: "127.0.0.1:0", Proto: "sni"})
		if x.Reason != want {
			t.Errorf("%s: %s (%s), want %s", host, x.Reason, x.Detail, want)
		}
	}
}
