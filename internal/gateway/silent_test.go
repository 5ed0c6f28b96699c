package gateway

import (
	"context"
	"errors"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"testing"

	wire "github.com/miekg/dns"

	"culvert.dev/dns"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// A replica that has heard one of its sources and not the other serves what it
// knows, and is not ready: who comes from one that knew more would be refused.
func TestNotReadyBeforeEverySourceHasSpoken(t *testing.T) {
	api := make(toldSource)
	name, err := tunnel.ParsePattern("web.mesh.internal")
	if err != nil {
		t.Fatal(err)
	}
	web := registry.Snapshot{Services: []*registry.Service{{Name: "web", Names: []tunnel.Pattern{name}, Exposed: true,
		Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("10.1.0.1"), Port: 443}}}}}
	g, err := New(t.Context(), Config{
		Sources:    []registry.Source{registry.Static{Name: "file", Snapshot: web}, api},
		DNS:        &DNS{Listeners: []DNSListener{{Transport: dns.UDP, Address: "127.0.0.1:0"}}, Server: &dns.Server{Zones: []string{"mesh.internal"}}},
		Listeners:  []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&sni.Protocol{}}}},
		DrainDelay: -1, DrainTimeout: -1,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx, nil) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	api <- registry.Update{Source: "api", Err: errors.New("out of reach")}
	testnet.Eventually(t, soon, func() bool { return g.registry.Table() != nil }, "what the file says is served")
	if ok, why := g.Ready(); ok || !strings.Contains(why, "a source has not sent its configuration") || !strings.Contains(why, "source api: out of reach") {
		t.Errorf("Ready: %v %q, want no, and why", ok, why)
	}
	if got := asked(t, g, "web.mesh.internal."); got != "NOERROR 10.1.0.1" {
		t.Errorf("what is known: %s", got)
	}
	if got := asked(t, g, "db.mesh.internal."); got != "SERVFAIL extended error 14" {
		t.Errorf("what is not known: %s", got)
	}
	r, err := g.resolve(url.Values{"name": {"db.mesh.internal"}, "from": {"none"}})
	if err != nil || !strings.Contains(r.(*Resolution).Views[0].Detail, "DNS answers SERVFAIL") {
		t.Errorf("resolve: %+v, %v", r, err)
	}
	api <- registry.Update{Source: "api"}
	testnet.Eventually(t, soon, func() bool { ok, _ := g.Ready(); return ok }, "it is ready")
	if got := asked(t, g, "db.mesh.internal."); got != "NXDOMAIN" {
		t.Errorf("what is not there: %s", got)
	}
	api <- registry.Update{Source: "api", Err: errors.New("out of reach")}
	testnet.Eventually(t, soon, func() bool { ok, why := g.Ready(); return ok && why != "" }, "it stays ready where the source is lost later")
}

// asked returns what g answers by DNS, at its first listener, of an A record.
func asked(t *testing.T, g *Gateway, name string) string {
	t.Helper()
	m := new(wire.Msg).SetQuestion(name, wire.TypeA)
	m.SetEdns0(1232, false)
	_, addr, _ := strings.Cut(g.Status().DNS.Listeners[0].Address, "://")
	res, _, err := (&wire.Client{Timeout: soon}).Exchange(m, addr)
	if err != nil {
		t.Fatal(err)
	}
	s := wire.RcodeToString[res.Rcode]
	for _, rr := range res.Answer {
		s += " " + rr.(*wire.A).A.String()
	}
	for _, o := range res.IsEdns0().Option {
		if e, ok := o.(*wire.EDNS0_EDE); ok {
			s += " extended error " + strconv.Itoa(int(e.InfoCode))
		}
	}
	return s
}
