package registry

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"culvert.dev/tunnel"
)

// spreadNetworks are home, lab, which is reached directly, and two behind gateways, of
// which east is the nearer one.
func spreadNetworks() []Network {
	gateway := func(at string, protocols ...string) Gateway {
		hops := HopsBy(protocols...)
		for i := range hops {
			hops[i].TLS, hops[i].Certificate = true, "certificate"
		}
		return Gateway{Address: endpoints(at)[0], Transports: hops, Check: Check{Kind: "tcp"}}
	}
	return []Network{
		{Name: "home", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}, Near: []string{"east"}},
		{Name: "lab", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}, Insecure: true},
		{Name: "west", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.8.0.0/16")}, Gateways: []Gateway{gateway("192.0.2.8:443", "connect")}},
		{Name: "east", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.7.0.0/16")}, Gateways: []Gateway{gateway("192.0.2.7:443", "connect"), gateway("gw.east.test:443", "sni", "connect-h2")}},
	}
}

// A toGateway is a Transport over a gateway.
type toGateway struct {
	nowhere
	at string
}

func (o toGateway) Info() tunnel.TransportInfo {
	return tunnel.TransportInfo{Hops: []string{o.at}, Security: tunnel.Mutual}
}

// spreadRegistry has a.test at specs, seen from home, and b.test in the east alone.
func spreadRegistry(t testing.TB, change func(*Service), specs ...string) *Registry {
	t.Helper()
	a, b := service(t, "a.test", 443), service(t, "b.test", 443)
	a.Endpoints, b.Endpoints = endpoints(specs...), endpoints("10.7.0.9:443")
	if change != nil {
		change(a)
	}
	r := &Registry{
		Mesh: Mesh{Network: "home"},
		Lookup: func(context.Context, string) ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("192.0.2.77")}, nil
		},
		NewTransport: func(_ *Service, ep *Endpoint, g *Gateway) (tunnel.Transport, error) {
			if g == nil {
				return nil, nil
			}
			return toGateway{at: ep.String()}, nil
		},
	}
	tab, err := r.Merge(Snapshot{Services: []*Service{a, b}, Networks: spreadNetworks()})
	if err != nil {
		t.Fatal(err)
	}
	r.Swap(tab)
	return r
}

var spreadSpecs = []string{"10.8.0.1:443", "10.0.0.1:443", "10.9.0.1:443", "10.7.0.1:443", "10.0.0.2:443"}

// spreadOrder returns where a request for host may go, in order.
func spreadOrder(t testing.TB, r *Registry, proto, host string) []tunnel.Endpoint {
	t.Helper()
	req := byName(host, 443, 443)
	req.Proto = proto
	route, err := r.Resolve(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return route.Endpoints
}

func spreadText(eps []tunnel.Endpoint) string {
	var all []string
	for i := range eps {
		all = append(all, way(&eps[i]))
	}
	return strings.Join(all, "; ")
}

const (
	eastOne = "a.test:443 over 192.0.2.7:443"
	eastTwo = "a.test:443 over gw.east.test:443"
	west    = "a.test:443 over 192.0.2.8:443"
)

// The endpoints of a service in several networks are one list: those of the gateway's own
// network, others that are dialed directly, and then gateways, the nearest first. Each has
// its share beside those that are as near.
func TestSpreadOrder(t *testing.T) {
	for _, tt := range []struct{ proto, gateway string }{{"connect", eastTwo}, {"sni", "gw.east.test (192.0.2.77:443)"}} {
		r := spreadRegistry(t, nil, spreadSpecs...)
		first, third := map[string]int{}, map[string]int{}
		for range 40 {
			eps := spreadOrder(t, r, tt.proto, "a.test")
			var got []string
			for i := range eps {
				got = append(got, way(&eps[i]))
			}
			first[got[0]]++
			third[got[3]]++
			slices.Sort(got[:2])
			slices.Sort(got[3:5])
			if want := []string{"10.0.0.1:443", "10.0.0.2:443", "10.9.0.1:443", eastOne, tt.gateway, west}; !slices.Equal(got, want) {
				t.Fatalf("%s: got %q, want %q", tt.proto, got, want)
			}
		}
		if n := first["10.0.0.1:443"]; n < 18 || n > 22 {
			t.Errorf("%s: the first are %v, want about 20 of each in the own network", tt.proto, first)
		}
		if len(third) != 2 {
			t.Errorf("%s: the first gateways are %v, want both of the east in turn", tt.proto, third)
		}
	}
}

// What is nearer is used as long as any of it is healthy, and again when it is back.
func TestSpreadFailsOver(t *testing.T) {
	r := spreadRegistry(t, nil, spreadSpecs...)
	down := errors.New("down")
	check := func(addr string, err error) {
		r.ReportCheck(Target{Addr: netip.MustParseAddrPort(addr), Check: checkOf("tcp")}, err)
	}
	want := func(what, first string) {
		t.Helper()
		for range 4 {
			if eps := spreadOrder(t, r, "connect", "a.test"); !strings.Contains(first, way(&eps[0])) {
				t.Errorf("%s: got %s, want %s first", what, spreadText(eps), first)
			}
		}
	}
	check("10.0.0.1:443", down)
	want("one of two is down", "10.0.0.2:443")
	check("10.0.0.2:443", down)
	want("the own network is down", "10.9.0.1:443")
	check("10.9.0.1:443", down)
	want("what is dialed directly is down", eastOne+eastTwo)
	check("192.0.2.7:443", down)
	want("a gateway is down", eastTwo)
	r.ReportCheck(Target{Addr: netip.MustParseAddrPort("192.0.2.77:443"), Host: "gw.east.test", Check: checkOf("tcp")}, down)
	want("the east is down", west)
	check("192.0.2.8:443", down)
	check("10.0.0.2:443", nil)
	want("one is back", "10.0.0.2:443")
}

// What a gateway says of a service is said of that service there: for others it works.
// A gateway that cannot be reached is down for all.
func TestSpreadHealthBehindGateways(t *testing.T) {
	dead := &tunnel.Error{Reason: tunnel.DialFailed, Err: errors.New("refused")}
	behindHop := &tunnel.Error{Reason: tunnel.DialFailed, Err: errors.New("its endpoint refused"), BehindHop: true}
	for _, tt := range []struct {
		name   string
		err    error
		others bool // have it last, too
	}{{"the endpoint behind it", behindHop, false}, {"the gateway", dead, true}} {
		r := spreadRegistry(t, nil, spreadSpecs...)
		for _, ep := range spreadOrder(t, r, "connect", "a.test") {
			if way(&ep) == eastOne {
				r.health.report(ep, tt.err)
			}
		}
		tab, err := r.Merge(Snapshot{Services: slices.Collect(r.Table().Services()), Networks: spreadNetworks()})
		if err != nil {
			t.Fatal(err)
		}
		r.Swap(tab) // a reload does not forget it
		last, last9 := 0, 0
		for range 8 {
			eps := spreadOrder(t, r, "connect", "a.test")
			if way(&eps[len(eps)-1]) == eastOne {
				last++
			}
			eps = spreadOrder(t, r, "connect", "b.test")
			if way(&eps[len(eps)-1]) == "b.test:443 over 192.0.2.7:443" {
				last9++
			}
		}
		if last != 8 || (last9 == 8) != tt.others {
			t.Errorf("%s fails: it is last for a.test %d times of 8, want 8, and for b.test %d times, want always: %t", tt.name, last, last9, tt.others)
		}
		if h := r.Health(); len(h) != 1 || h[0].Err == nil {
			t.Errorf("%s fails: Health() is %+v, want one entry", tt.name, h)
		}
		for _, ep := range spreadOrder(t, r, "connect", "a.test") {
			if way(&ep) == eastOne {
				r.health.report(ep, nil)
			}
		}
		if h := r.Health(); len(h) != 0 {
			t.Errorf("%s is back: Health() is %+v, want nothing", tt.name, h)
		}
	}
}

// A gateway of another network that asks for the service gets what is here: it has tried
// the others.
func TestSpreadForTheOtherGateway(t *testing.T) {
	r := spreadRegistry(t, nil, "10.0.0.1:443", "10.8.0.1:443")
	req := byName("a.test", 443, 443)
	req.Proto, req.Source = "connect", netip.MustParseAddrPort("192.0.2.8:5555")
	route, err := r.Resolve(t.Context(), req)
	if err != nil || spreadText(route.Endpoints) != "10.0.0.1:443" {
		t.Errorf("got %s, %v; want the own endpoint alone", spreadText(route.Endpoints), err)
	}
}

// Plaintext goes to no gateway by a weak transport, and to the near endpoints as before.
func TestSpreadInsecure(t *testing.T) {
	networks := spreadNetworks()
	networks[2].Gateways[0].Transports[0].TLS = false
	a := service(t, "a.test", 443)
	a.Endpoints = endpoints("10.0.0.1:443", "10.8.0.1:443")
	r := &Registry{Mesh: Mesh{Network: "home"}, NewTransport: func(_ *Service, ep *Endpoint, g *Gateway) (tunnel.Transport, error) {
		if g == nil {
			return nil, nil
		}
		return over{hops: ep.String()}, nil
	}}
	tab, err := r.Merge(Snapshot{Services: []*Service{a}, Networks: networks})
	if err != nil {
		t.Fatal(err)
	}
	// over says that it is Mutual, and the gateway's transports are asked where there is none.
	tab.networks[2].transports.gateways[0].security = tunnel.Plain
	r.Swap(tab)
	for proto, want := range map[string]string{"tls": "10.0.0.1:443", "sni": "10.0.0.1:443; " + west, "connect": "10.0.0.1:443; " + west} {
		eps := spreadOrder(t, r, proto, "a.test")
		if got := spreadText(eps); got != want {
			t.Errorf("%s: got %s, want %s", proto, got, want)
		}
		if len(eps) == 2 && (eps[1].TLSOnly != nil) != (proto == "connect") {
			t.Errorf("%s: TLS alone: %v", proto, eps[1].TLSOnly)
		}
	}
}

// A zone counts within a network: an endpoint in another zone of the own network comes
// before gateways. A policy and weights hold among endpoints that are as near.
func TestSpreadZonesAndPolicies(t *testing.T) {
	r := spreadRegistry(t, func(s *Service) { s.Endpoints[1].Zone = "a"; s.Endpoints[4].Zone = "b" }, spreadSpecs...)
	r.Mesh.TopologyZone = "a"
	tab, err := r.Merge(Snapshot{Services: slices.Collect(r.Table().Services()), Networks: spreadNetworks()})
	if err != nil {
		t.Fatal(err)
	}
	r.Swap(tab)
	for range 4 {
		got := spreadText(spreadOrder(t, r, "connect", "a.test"))
		if !strings.HasPrefix(got, "10.0.0.1:443; 10.0.0.2:443; 10.9.0.1:443; ") {
			t.Errorf("with zones: got %s", got)
		}
	}
	for _, policy := range []string{LeastConnections, SourceHash} {
		r := spreadRegistry(t, func(s *Service) { s.LoadBalancing.Policy = policy }, spreadSpecs...)
		for range 4 {
			eps := spreadOrder(t, r, "connect", "a.test")
			if got := way(&eps[0]); got != "10.0.0.1:443" && got != "10.0.0.2:443" {
				t.Errorf("%s: got %s first, want one of the own network", policy, got)
			}
		}
	}
	r = spreadRegistry(t, func(s *Service) { s.Endpoints[1].Draining, s.Endpoints[4].Draining = true, true }, spreadSpecs...)
	if got := spreadText(spreadOrder(t, r, "connect", "a.test")); !strings.HasPrefix(got, "10.9.0.1:443; ") || strings.Contains(got, "10.0.0.") {
		t.Errorf("while the own ones drain: got %s", got)
	}
}

// explain says what is in another network.
func TestSpreadExplained(t *testing.T) {
	r := spreadRegistry(t, nil, "10.0.0.1:443", "10.9.0.1:443", "10.8.0.1:443")
	req := byName("a.test", 443, 443)
	req.Proto = "connect"
	route, err := r.Resolve(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	var why []string
	for _, c := range r.Explain(req, &route).Endpoints {
		why = append(why, c.Why)
	}
	if want := []string{"its turn", "in another network", "in another network"}; !slices.Equal(why, want) {
		t.Errorf("got %q, want %q", why, want)
	}
}

// A gateway that refuses the service does not keep others from being tried, but a loop does.
func TestSpreadIsNotRefusedByOneGateway(t *testing.T) {
	for reason, final := range map[tunnel.Reason]bool{tunnel.NoRoute: false, tunnel.NotExposed: false, tunnel.Denied: false, tunnel.Loop: true} {
		_, err := NotFinal(refusing{reason: reason}).Dial(t.Context(), &tunnel.Endpoint{}, &tunnel.Request{})
		e, ok := errors.AsType[*tunnel.Error](err)
		if !ok || e.Reason != reason || !e.BehindHop || e.Final != final {
			t.Errorf("%s: got %#v, want it behind a hop and final: %t", reason, err, final)
		}
	}
	r := spreadRegistry(t, nil, "10.0.0.1:443", "10.8.0.1:443")
	if eps := spreadOrder(t, r, "connect", "a.test"); eps[1].Transport != NotFinal(toGateway{at: "192.0.2.8:443"}) {
		t.Errorf("the gateway is asked by %T", eps[1].Transport)
	}
}

// refusing is a Transport whose gateway refuses the request.
type refusing struct {
	nowhere
	reason tunnel.Reason
}

func (r refusing) Dial(context.Context, *tunnel.Endpoint, *tunnel.Request) (net.Conn, error) {
	return nil, &tunnel.Error{Reason: r.reason, Err: errors.New("no"), BehindHop: true, Final: true}
}
