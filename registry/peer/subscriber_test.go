package peer

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// subscribe has agent read the catalog of a gateway by a link, as a caller with an id. It accepts
// zones.
func subscribe(t testing.TB, agent, gateway *site, id string, zones ...tunnel.Pattern) *link {
	t.Helper()
	l := &link{to: gateway, as: id}
	agent.peers.NewTransport = func(*registry.Service, *registry.Endpoint, *registry.Gateway) (tunnel.Transport, error) {
		return l, nil
	}
	if len(zones) == 0 {
		zones = []tunnel.Pattern{tunnel.AnyName}
	}
	c := Config{Name: "gateways", Network: "gateways", Zones: zones, Gateways: configOf("west", true).Gateways}
	if err := agent.peers.Configure([]Config{c}); err != nil {
		t.Fatal(err)
	}
	return l
}

const ofGateways = "catalog of gateways"

// laptop and phone are two callers that are no peers.
const laptop, phone = "spiffe://corp.example/laptop", "spiffe://corp.example/phone"

// sees lets callers see services.
func sees(services []string, ids ...string) *policy.Policy {
	p := &policy.Policy{Name: "sees-" + strings.Join(services, "-"), Verb: policy.Catalog, Action: policy.Allow, Targets: policy.Targets{Services: services}}
	p.Rules = []policy.Rule{{Sources: &[]policy.Source{{SPIFFE: ids}}}}
	return p
}

// Two agents read the catalog of a gateway that knows neither as a peer: each sees what policies
// let it see, in the network of its own gateways, and changes as they happen. It offers nothing.
func TestAgentsReadTheCatalog(t *testing.T) {
	west := newSite(t, "west")
	orders, hr, lan := service("orders.example"), service("hr.example"), service("printer.local")
	peers := service("far.south.example")
	peers.Origin = originPrefix + "south"
	west.set(t, orders, hr, lan, peers, sees([]string{"orders.example", "printer.local", "far.south.example"}, laptop, phone), sees([]string{"hr.example"}, phone))
	one, two := newSite(t, "west"), newSite(t, "") // the site of an agent may be that of its gateways
	one.set(t, service("own.example"), everybody)
	a := subscribe(t, one, west, laptop)
	subscribe(t, two, west, phone)
	start(t, west, one, two)
	one.awaitNames(t, ofGateways, "orders.example")
	two.awaitNames(t, ofGateways, "hr.example", "orders.example")
	one.mu.Lock()
	s := one.known[ofGateways]
	one.mu.Unlock()
	if e := s.Services[0].Endpoints; len(s.Networks) != 0 || len(e) != 1 || e[0].Network != "gateways" || s.Services[0].Origin != "the catalog of the gateways" {
		t.Errorf("the agent has %+v with networks %+v, want an endpoint in the network of its gateways", s.Services[0], s.Networks)
	}
	status := one.peers.Catalog()
	if !status.Connected || status.Services != 1 || len(status.LeftOut) != 1 || !strings.Contains(status.LeftOut[0], `"printer.local" is outside of the zones of the gateways`) {
		t.Errorf("the status is %+v, want printer.local left out", status)
	}
	if n := len(one.peers.Status()) + len(west.peers.Status()); n != 0 {
		t.Errorf("%d peers are listed, want none", n)
	}

	// A policy that changes takes names away, while the stream stands.
	west.set(t, orders, hr, sees([]string{"hr.example"}, laptop))
	one.awaitNames(t, ofGateways, "hr.example")
	two.awaitNames(t, ofGateways)

	// Names stay through an outage.
	a.cut(nil)
	one.await(t, "the loss", func() bool { return one.stale[ofGateways] != nil })
	if got := one.names(ofGateways); !slices.Equal(got, []string{"hr.example"}) {
		t.Errorf("in an outage the names are %q, want hr.example", got)
	}
	a.cut(west)
	one.awaitNames(t, ofGateways, "hr.example")

	// What an agent has from a catalog is no service for others.
	one.set(t, append([]any{everybody}, anyOf(one.known[ofGateways].Services)...)...)
	for s := range one.table.Table().Offered(tunnel.Peer{ID: laptop, Method: "mtls"}, netip.Addr{}) {
		if !isPeers(s) {
			t.Errorf("%s is offered on, which comes from a catalog", s.Name)
		}
	}
}

func anyOf(services []*registry.Service) (all []any) {
	for _, s := range services {
		all = append(all, s)
	}
	return all
}

// A gateway that has no catalog for an agent is no loss: the names of an earlier one go, nothing
// is stale, and it is asked again after a while.
func TestNoCatalogForAnAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		west, agent := newSite(t, "west"), newSite(t, "")
		orders := service("orders.example")
		west.set(t, orders, sees([]string{"orders.example"}, laptop))
		l := subscribe(t, agent, west, laptop)
		start(t, west, agent)
		agent.awaitNames(t, ofGateways, "orders.example")
		west.set(t, orders)
		agent.awaitNames(t, ofGateways)
		l.cut(west)
		time.Sleep(time.Minute)
		synctest.Wait()
		l.mu.Lock()
		dials := l.dials
		l.mu.Unlock()
		agent.mu.Lock()
		if err := agent.stale[ofGateways]; err != nil || dials > 3 {
			t.Errorf("after a refusal the catalog is stale: %v, and was asked for %d times", err, dials)
		}
		agent.mu.Unlock()
		if s := agent.peers.Catalog(); s.Connected || !strings.Contains(s.Problem, "no policy with the verb catalog") {
			t.Errorf("the status is %+v, want the refusal", s)
		}
		west.set(t, orders, sees([]string{"orders.example"}, laptop))
		time.Sleep(2 * absentRetry)
		agent.awaitNames(t, ofGateways, "orders.example")
	})
}

// The names that a gateway may offer an agent.
func TestZonesOfAnAgent(t *testing.T) {
	for name, want := range map[string]map[string]bool{
		"shop.example":              {"*": true, "*.example": true, "shop.example": true, "*.shop.example": false},
		"*.shop.example":            {"*": true, "*.example": true, "*.shop.example": true, "shop.example": false},
		"intranet":                  {"*": true, "intranet": true},
		"*.com":                     {"*": false, "*.com": true},
		"localhost":                 {"*": false, "localhost": false},
		"a.localhost":               {"*": false, "*.localhost": false},
		"printer.local":             {"*": false, "*.local": true, "printer.local": true},
		"local":                     {"*": false, "local": true},
		"*.x.local":                 {"*": false, "*.local": true},
		"db.a.svc.clusterset.local": {"*": false, "*.svc.clusterset.local": true},
		"catalog.culvert.alt":       {"*": false, "*.culvert.alt": false, "catalog.culvert.alt": false},
	} {
		p := patterns(name)[0]
		for zone, want := range want {
			z := tunnel.AnyName
			if zone != "*" {
				z = patterns(zone)[0]
			}
			c := &Config{Name: "gateways", Network: "gateways", Zones: []tunnel.Pattern{z}}
			if got := c.speaksFor(p); got != want {
				t.Errorf("gateways with the zone %q may offer %q: %v, want %v", zone, name, got, want)
			}
		}
	}
	im := &importer{Config: &Config{Name: "gateways", Network: "gateways", Zones: []tunnel.Pattern{tunnel.AnyName}}}
	for _, name := range []string{"*", "10.0.0.1", "[::1]", "127.1", "0x7f000001", "a..b", "", "*.*.example", "a b"} {
		if s, _ := im.service(&Service{Key: "k", Names: []string{name}}, "west"); s != nil {
			t.Errorf("the name %q is taken", name)
		}
	}
}

// raw opens a stream to a gateway as a caller, by hand.
func raw(t *testing.T, gateway *site, id string, source string) (net.Conn, *bufio.Reader, error) {
	t.Helper()
	a, b := net.Pipe()
	t.Cleanup(func() { _ = a.Close() })
	_ = a.SetDeadline(time.Now().Add(time.Minute))
	refused, accepted := make(chan error, 1), make(chan struct{})
	go gateway.peers.ServeTunnel(t.Context(), &tunnel.Request{
		Peer:   tunnel.Peer{ID: id, Method: "mtls", Auth: &tunnel.AuthInfo{TrustDomain: "corp.example"}},
		Source: netip.MustParseAddrPort(source),
		Accept: func() (tunnel.Stream, error) { close(accepted); return stream{b}, nil },
		Refuse: func(err error) { refused <- err },
	})
	select {
	case err := <-refused:
		return nil, nil, err
	case <-accepted:
	}
	return a, bufio.NewReader(a), nil
}

// A caller that is no peer may read, and nothing else: it is told why its stream ends.
func TestSubscribersOfferNothing(t *testing.T) {
	west := newSite(t, "west")
	west.peers.TakeBundle = func(*Config, []byte, uint64) error {
		t.Error("a bundle of a subscriber was taken")
		return nil
	}
	west.set(t, service("orders.example"), sees([]string{"orders.example"}, laptop))
	const hello = `{"version":1,"kind":"hello","instance":"i","reads":true,"gateways":[{"address":"gw.evil.example:443","transports":["connect-h2"]}]}` + "\n"
	for name, c := range map[string]struct{ say, want string }{
		"a peer that is not configured": {`{"version":1,"kind":"hello","instance":"i"}`, `is not the id of a peer's gateway`},
		"a snapshot":                    {hello + `{"version":1,"kind":"snapshot","generation":1,"services":[{"key":"k","names":["a.example"]}]}`, "may offer nothing"},
		"a change":                      {hello + `{"version":1,"kind":"change","generation":1,"removed":["k"]}`, "may offer nothing"},
		"a bundle, and no subscription": {hello + `{"version":1,"kind":"bundle","bundle":{}}` + "\n" + `{"version":1,"kind":"hello","instance":"i"}`, "a second hello"},
	} {
		c1, r, err := raw(t, west, laptop, "192.0.2.7:1")
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = c1.Write([]byte(c.say + "\n")) }()
		var last string
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				break
			}
			last = line
		}
		if !strings.Contains(last, c.want) {
			t.Errorf("%s: the last line is %q, want one with %q", name, last, c.want)
		}
	}
}

// One principal has so many streams, which share one catalog, and so many different catalogs. What
// it has had is given back.
func TestLimitsOfSubscribers(t *testing.T) {
	west := newSite(t, "west")
	west.set(t, append([]any{sees([]string{"orders.example"}, laptop)}, service("orders.example"))...)
	caller := tunnel.Peer{ID: laptop, Method: "jwt", Auth: &tunnel.AuthInfo{TrustDomain: "corp.example"}}
	one := west.peers.enter(&caller)
	var all []*session
	for i := range MaxSubscriptions {
		s, err := one.newSession(caller, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), false, "")
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	if len(one.offers) != 1 {
		t.Errorf("streams with the same credentials have %d catalogs, want one", len(one.offers))
	}
	if _, err := one.newSession(caller, netip.MustParseAddr("10.1.0.1"), false, ""); tunnel.ReasonOf(err) != tunnel.Overload {
		t.Errorf("one more stream: %v, want overload", err)
	}
	for _, s := range all {
		one.forget(s)
	}
	all = nil
	for i := range maxViews {
		c := caller
		c.Auth = &tunnel.AuthInfo{Claims: map[string][]string{"groups": {fmt.Sprint(i)}}}
		s, err := one.newSession(c, netip.MustParseAddr("10.1.0.1"), false, "")
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	if _, err := one.newSession(caller, netip.MustParseAddr("10.1.0.1"), false, ""); tunnel.ReasonOf(err) != tunnel.Overload {
		t.Errorf("one more catalog: %v, want overload", err)
	}
	for _, s := range all {
		one.forget(s)
	}
	if len(one.offers) != 0 {
		t.Errorf("%d catalogs are kept", len(one.offers))
	}
	west.peers.leave(&caller, one)
	if len(west.peers.others) != 0 {
		t.Error("a subscriber without a stream is kept")
	}
}

// A gateway that does not know everything yet has agents come back, as its first words would take
// names away.
func TestSubscribersWaitForTheTable(t *testing.T) {
	west := newSite(t, "west")
	west.set(t, service("orders.example"))
	settled := false
	west.peers.Settled = func() bool { return settled }
	if _, _, err := raw(t, west, laptop, "192.0.2.7:1"); tunnel.ReasonOf(err) != tunnel.Overload {
		t.Errorf("before the table is complete: %v, want overload", err)
	}
	settled = true
	if _, _, err := raw(t, west, laptop, "192.0.2.7:1"); tunnel.ReasonOf(err) != tunnel.Denied {
		t.Errorf("without a policy of the verb catalog: %v, want denied", err)
	}
}

// What a subscriber costs that is idle.
func TestIdleSubscribers(t *testing.T) {
	west := newSite(t, "west")
	west.set(t, service("orders.example"), sees([]string{"orders.example"}, laptop))
	const n = 200
	runtime.GC()
	before := liveHeap()
	for range n {
		c, r, err := raw(t, west, laptop, "192.0.2.7:1")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = c.Write([]byte(`{"version":1,"kind":"hello","instance":"i","reads":true}` + "\n" + `{"version":1,"kind":"subscribe"}` + "\n"))
		}()
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(line, "orders.example") {
				break
			}
		}
	}
	runtime.GC()
	each := (int64(liveHeap()) - int64(before)) / n
	t.Logf("an idle subscriber takes %d bytes of heap, with both ends", each)
	if each > 100<<10 {
		t.Errorf("an idle subscriber takes %d bytes, want less than 100 KiB", each)
	}
}

// What a subscriber sends, who may be anybody with an identity, is taken in as nothing.
func FuzzSubscriber(f *testing.F) {
	f.Add([]byte(hello + "\n" + first + "\n" + second + "\n"))
	f.Add([]byte(hello + "\n" + `{"version":1,"kind":"subscribe","generation":3,"instance":"x"}` + "\n" + `{"version":1,"kind":"heartbeat"}` + "\n" + `{"version":1,"kind":"drain"}` + "\n"))
	f.Add([]byte(hello + "\n" + `{"version":1,"kind":"snapshot","generation":1,"more":true,"services":[{"key":"a","names":["bank.example"]}]}` + "\n" + first + "\n"))
	f.Add([]byte(`{"version":1,"kind":"error","message":"x"}` + "\n"))
	f.Fuzz(func(t *testing.T, sent []byte) {
		owner := &Peers{Site: "east", Table: func() *registry.Table { return nil }}
		caller := tunnel.Peer{ID: laptop, Method: "mtls"}
		one := owner.enter(&caller)
		s, err := one.newSession(caller, netip.Addr{}, false, "")
		if err != nil {
			t.Fatal(err)
		}
		s.conn = &script{Reader: strings.NewReader(string(sent))}
		s.timeout = time.AfterFunc(time.Hour, func() {})
		defer s.timeout.Stop()
		if err := s.read(); err == nil {
			t.Error("the stream ends without an error")
		} else if strings.Contains(err.Error(), "panic") {
			t.Error(err)
		}
		if got := one.received(); got != nil && len(got.services) > 0 {
			t.Errorf("%d services of a subscriber are taken", len(got.services))
		}
		owner.leave(&caller, one)
		if len(owner.others) > 0 {
			t.Errorf("%d subscribers are left", len(owner.others))
		}
	})
}
