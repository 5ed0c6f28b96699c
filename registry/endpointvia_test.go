package registry

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// over is a Transport that leads nowhere, over hops.
type over struct {
	nowhere
	hops string
}

func (o over) Info() tunnel.TransportInfo {
	return tunnel.TransportInfo{Hops: []string{o.hops}, Security: tunnel.Mutual}
}

// newOver is a NewTransport that makes them.
func newOver(s *Service, ep *Endpoint, _ *Gateway) (tunnel.Transport, error) {
	if ep == nil || len(ep.Hops()) == 0 {
		return nil, nil
	}
	how := ep.Hops()[0].Proto + " " + ep.Hops()[0].Addresses[0]
	if s.TLS != nil {
		how += " by TLS"
	}
	return over{hops: how}, nil
}

// behind is an endpoint behind a gateway of its own, that is asked by mutual TLS.
func behind(spec, proto, gateway string) Endpoint {
	ep := endpoints(spec)[0]
	ep.Via = &[]Hop{{Proto: proto, Addresses: []string{gateway}, Certificate: "certificate", Key: "key"}}
	return ep
}

// mixed is a service of two endpoints behind HBONE, two plain ones, and one behind a
// gateway that is asked by CONNECT and knows an address that is another host's here.
func mixed(t testing.TB) *Service {
	s := service(t, "a.test", 443)
	s.Endpoints = []Endpoint{
		behind("10.0.0.1:443", "hbone", "10.0.0.1:15008"), behind("10.0.0.2:443", "hbone", "10.0.0.2:15008"),
		endpoints("10.0.0.3:443")[0], endpoints("10.0.0.4:443")[0],
		behind("10.0.0.3:443", "connect", "https://gw.test:443"),
	}
	return s
}

// way says how an endpoint is reached.
func way(ep *tunnel.Endpoint) string {
	if ep.Transport == nil {
		return ep.String()
	}
	return ep.String() + " over " + strings.Join(ep.Transport.Info().Hops, ", ")
}

var mixedWays = []string{
	"10.0.0.1:443 over hbone 10.0.0.1:15008", "10.0.0.2:443 over hbone 10.0.0.2:15008", "10.0.0.3:443", "10.0.0.4:443",
	"10.0.0.3:443 over connect https://gw.test:443",
}

// Endpoints that are reached in different ways have equal shares, whatever chooses.
func TestEndpointViasTakeTurns(t *testing.T) {
	const picks = 5000
	for _, l := range []LoadBalancing{{}, {Policy: LeastConnections}} {
		s := mixed(t)
		s.LoadBalancing = l
		r := &Registry{NewTransport: newOver}
		merge(t, r, s)
		got := map[string]int{}
		for range picks {
			route, err := r.Resolve(t.Context(), byName("a.test", 443, 443))
			if err != nil {
				t.Fatal(err)
			}
			if len(route.Endpoints) < 2 {
				t.Fatalf("%q: got %v, want others to try", l.Policy, route.Endpoints)
			}
			got[way(&route.Endpoints[0])]++
		}
		for _, w := range mixedWays {
			slack := 0
			if l.Policy == LeastConnections {
				slack = picks / 500 // equals take turns at random
			}
			if off := got[w] - picks/len(mixedWays); off < -slack || off > slack {
				t.Errorf("%q: %s was first %d times of %d, want %d; all: %v", l.Policy, w, got[w], picks, picks/len(mixedWays), got)
			}
		}
	}
}

// A weight is that of the endpoint, and explain says it of the right one: two of them
// have the same address.
func TestEndpointViaWeights(t *testing.T) {
	s := mixed(t)
	s.Endpoints[4].Weight = 4
	r := &Registry{NewTransport: newOver}
	merge(t, r, s)
	const picks = 4000
	got := map[string]int{}
	for range picks {
		route, err := r.Resolve(t.Context(), byName("a.test", 443, 443))
		if err != nil {
			t.Fatal(err)
		}
		got[way(&route.Endpoints[0])]++
	}
	for i, w := range mixedWays {
		want := picks / 8 * int(s.Endpoints[i].weight())
		if got[w] < want-picks/100 || got[w] > want+picks/100 {
			t.Errorf("%s was first %d times of %d, want about %d", w, got[w], picks, want)
		}
	}
	req := byName("a.test", 443, 443)
	route, err := r.Resolve(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range r.Explain(req, &route).Endpoints {
		want := int(s.Endpoints[slices.Index(mixedWays, way(&route.Endpoints[i]))].weight())
		if c.Weight != want {
			t.Errorf("%s: weight %d, want %d", way(&route.Endpoints[i]), c.Weight, want)
		}
	}
}

// An endpoint that fails comes last, and not the one with its address that is reached in
// another way.
func TestEndpointViaHealth(t *testing.T) {
	for _, fails := range mixedWays {
		r := &Registry{NewTransport: newOver}
		merge(t, r, mixed(t))
		resolve := func() []tunnel.Endpoint {
			route, err := r.Resolve(t.Context(), byName("a.test", 443, 443))
			if err != nil {
				t.Fatal(err)
			}
			return route.Endpoints
		}
		for _, ep := range resolve() {
			if way(&ep) == fails {
				r.health.report(ep, &tunnel.Error{Reason: tunnel.DialFailed, Err: errors.New("refused"), BehindHop: ep.Transport != nil})
			}
		}
		merge(t, r, mixed(t)) // a reload does not forget it
		for range 2 * len(mixedWays) {
			eps := resolve()
			if got := way(&eps[len(eps)-1]); got != fails {
				t.Fatalf("the last is %s, want %s", got, fails)
			}
		}
		h := r.Health()
		if host, _, _ := strings.Cut(fails, ":"); len(h) != 1 || !slices.Equal(h[0].Services, []string{"a.test"}) || h[0].Addr.Port() != 443 || h[0].Host != host && h[0].Addr.Addr().String() != host {
			t.Errorf("%s fails: Health() is %+v", fails, h)
		}
	}
}

// Endpoints behind hops are neither looked up nor checked from here, and are no address
// that a client could ask for: it would be another host's.
func TestEndpointViaIsElsewhere(t *testing.T) {
	s := mixed(t)
	s.Endpoints = append(s.Endpoints, behind("inner.test:443", "connect", "https://gw.test:443"), behind("10.9.9.9:443", "connect", "https://gw.test:443"))
	a := &answers{}
	r := &Registry{Lookup: a.lookup, NewTransport: newOver}
	merge(t, r, s)
	route, err := r.Resolve(t.Context(), byName("a.test", 443, 443))
	if err != nil {
		t.Fatal(err)
	}
	if len(a.asked) > 0 {
		t.Errorf("%v were looked up", a.asked)
	}
	if !slices.ContainsFunc(route.Endpoints, func(ep tunnel.Endpoint) bool { return way(&ep) == "inner.test:443 over connect https://gw.test:443" }) {
		t.Errorf("got %v, want inner.test among them", route.Endpoints)
	}
	if _, err := r.Resolve(t.Context(), byAddr("10.9.9.9", 443)); tunnel.ReasonOf(err) != tunnel.NoRoute {
		t.Errorf("by the address of one behind a gateway: got %v, want %s", err, tunnel.NoRoute)
	}
	if route, err := r.Resolve(t.Context(), byAddr("10.0.0.3", 443)); err != nil || len(route.Endpoints) != 1 || way(&route.Endpoints[0]) != "10.0.0.3:443" {
		t.Errorf("by the address of a plain one: got %v, %v", route.Endpoints, err)
	}
}

// Clients in other networks ask the gateways of ours, which are the ones that know the hops.
func TestEndpointViaFromOtherNetworks(t *testing.T) {
	r := &Registry{Mesh: Mesh{Network: "home"}, NewTransport: newOver}
	tab, err := r.Merge(Snapshot{Services: []*Service{mixed(t)}, Networks: []Network{
		{Name: "home", Gateways: []Gateway{{Address: endpoints("192.0.2.9:443")[0]}}}, {Name: "west"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	r.Swap(tab)
	for _, from := range []string{"west", "home"} {
		places, ok := tab.Locations(tunnel.MustParseName("a.test"), from)
		if !ok || len(places) != 1 || len(places[0].Endpoints) != 0 || len(places[0].Gateways) != 1 {
			t.Errorf("from %s: got %+v, want the gateway alone", from, places)
		}
	}
	route, err := r.Resolve(t.Context(), byName("a.test", 443, 443))
	if err != nil || len(route.Endpoints) != len(mixedWays) {
		t.Errorf("the gateway itself: got %v, %v, want all endpoints", route.Endpoints, err)
	}
}

// A transport that cannot be made makes the service refuse, and so does none.
func TestEndpointViaRefuses(t *testing.T) {
	r := &Registry{}
	merge(t, r, mixed(t))
	if _, err := r.Resolve(t.Context(), byName("a.test", 443, 443)); tunnel.ReasonOf(err) != tunnel.Unsupported {
		t.Errorf("without a NewTransport: got %v, want %s", err, tunnel.Unsupported)
	}
	r.NewTransport = func(_ *Service, ep *Endpoint, _ *Gateway) (tunnel.Transport, error) {
		return nil, errors.New("no such carrier")
	}
	merge(t, r, mixed(t))
	if _, err := r.Resolve(t.Context(), byName("a.test", 443, 443)); tunnel.ReasonOf(err) != tunnel.Internal {
		t.Errorf("a NewTransport that fails: got %v, want %s", err, tunnel.Internal)
	}
	s := mixed(t)
	s.Ports = nil
	for i := range s.Endpoints {
		s.Endpoints[i].Port = 0
	}
	r.NewTransport = newOver
	merge(t, r, s)
	if _, err := r.Resolve(t.Context(), byName("a.test", 0, 0)); tunnel.ReasonOf(err) != tunnel.NoEndpoint {
		t.Errorf("without a port: got %v, want %s", err, tunnel.NoEndpoint)
	}
	if route, err := r.Resolve(t.Context(), byName("a.test", 8443, 443)); err != nil || route.Endpoints[0].Addr.Port() != 8443 {
		t.Errorf("for a port: got %v, %v", route.Endpoints, err)
	}
}

// Plaintext goes to the endpoints that are protected, and only TLS to the others.
func TestEndpointViaInsecure(t *testing.T) {
	weak := func(insecure bool) *[]Hop {
		return &[]Hop{{Proto: "connect", Addresses: []string{"gw.test:443"}, Insecure: insecure}}
	}
	for _, tt := range []struct {
		name     string
		change   func(*Service)
		proto    string
		want     int
		tlsOnly  int
		insecure int
		refused  bool
	}{
		{"all protected", func(*Service) {}, "tls", 5, 0, 0, false},
		{"a weak one, TLS of the client", func(s *Service) { s.Endpoints[4].Via = weak(false) }, "sni", 5, 0, 0, false},
		{"a weak one, CONNECT", func(s *Service) { s.Endpoints[4].Via = weak(false) }, "connect", 5, 1, 0, false},
		{"a weak one, TLS ended", func(s *Service) { s.Endpoints[4].Via = weak(false) }, "tls", 4, 0, 0, false},
		{"a weak one that may be", func(s *Service) { s.Endpoints[4].Via = weak(true) }, "tls", 5, 0, 1, false},
		{"a weak one of a service that may be", func(s *Service) { s.Endpoints[4].Via, s.Insecure = weak(false), true }, "tls", 5, 0, 1, false},
		{"weak ones alone, CONNECT", func(s *Service) { s.Endpoints = s.Endpoints[4:]; s.Endpoints[0].Via = weak(false) }, "connect", 1, 1, 0, false},
		{"weak ones alone, TLS ended", func(s *Service) { s.Endpoints = s.Endpoints[4:]; s.Endpoints[0].Via = weak(false) }, "tls", 0, 0, 0, true},
	} {
		s := mixed(t)
		tt.change(s)
		r := &Registry{NewTransport: newOver}
		merge(t, r, s)
		req := byName("a.test", 443, 443)
		req.Proto = tt.proto
		route, err := r.Resolve(t.Context(), req)
		if tt.refused {
			const want = `endpoint 10.0.0.3:443 of service "a.test" is behind gateway "gw.test:443", and what may be plaintext would go there without TLS`
			if tunnel.ReasonOf(err) != tunnel.Insecure || !strings.Contains(fmt.Sprint(err), want) {
				t.Errorf("%s: got %v, want %s", tt.name, err, want)
			}
			if err := r.Table().precheckService(req); tunnel.ReasonOf(err) != tunnel.Insecure {
				t.Errorf("%s: before the handshake: got %v, want %s", tt.name, err, tunnel.Insecure)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		tlsOnly, insecure := 0, 0
		for _, ep := range route.Endpoints {
			if ep.TLSOnly != nil {
				tlsOnly++
			}
			if ep.Insecure {
				insecure++
			}
		}
		if len(route.Endpoints) != tt.want || tlsOnly != tt.tlsOnly || insecure != tt.insecure {
			t.Errorf("%s: got %d endpoints, %d for TLS alone, %d insecure; want %d, %d and %d", tt.name, len(route.Endpoints), tlsOnly, insecure, tt.want, tt.tlsOnly, tt.insecure)
		}
		if tt.proto == "tls" {
			if err := r.Table().precheckService(req); err != nil {
				t.Errorf("%s: before the handshake: %v", tt.name, err)
			}
		}
	}
}

// A client keeps its endpoint behind a gateway, across a reload too.
func TestEndpointViaSticks(t *testing.T) {
	s := mixed(t)
	s.LoadBalancing.StickyFor = time.Minute
	r := &Registry{NewTransport: newOver}
	merge(t, r, s)
	req := byName("a.test", 443, 443)
	for {
		route, err := r.Resolve(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if way(&route.Endpoints[0]) == mixedWays[4] {
			route.Balancer.Chosen(req, &route.Endpoints[0])
			break
		}
	}
	merge(t, r, s)
	for range len(mixedWays) {
		route, err := r.Resolve(t.Context(), req)
		if err != nil || way(&route.Endpoints[0]) != mixedWays[4] {
			t.Fatalf("got %v, %v, want %s first", route.Endpoints, err, mixedWays[4])
		}
	}
}

// The gateway's own TLS goes to endpoints of both kinds, and TLS that clients speak with
// the service is passed on to both.
func TestEndpointViaLayers(t *testing.T) {
	s := mixed(t)
	s.TLS = &BackendTLS{}
	r := &Registry{NewTransport: newOver}
	merge(t, r, s)
	for proto, want := range map[string]bool{"sni": false, "connect": true} {
		req := byName("a.test", 443, 443)
		req.Proto = proto
		route, err := r.Resolve(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		for i := range route.Endpoints {
			ep := &route.Endpoints[i]
			if ep.Transport != nil && strings.Contains(way(ep), "by TLS") != want {
				t.Errorf("%s: %s, want TLS of the gateway: %v", proto, way(ep), want)
			}
		}
	}
}

// Beside endpoints with a Via those are used that are dialed directly: of the gateway's own
// network, or else of networks without gateways. All others come after them.
func TestEndpointViaBesideNetworks(t *testing.T) {
	networks := []Network{
		{Name: "home", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}, {Name: "lab", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}},
		{Name: "west", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.8.0.0/16")}, Gateways: []Gateway{{Address: endpoints("192.0.2.9:443")[0]}}},
	}
	const via, west = "10.8.0.1:443 over connect https://gw.test:443", "192.0.2.9:443"
	for _, tt := range []struct {
		own   string
		plain []string
		want  []string
		later []string
	}{
		{"home", []string{"10.0.0.1:443", "10.9.0.1:443", "10.8.0.1:443"}, []string{"10.0.0.1:443", via}, []string{"10.9.0.1:443", west}},
		{"home", []string{"10.9.0.1:443", "10.8.0.1:443"}, []string{via, "10.9.0.1:443"}, []string{west}},
		{"home", []string{"10.8.0.1:443"}, []string{via}, []string{west}},
		{"home", []string{"10.0.0.1:443"}, []string{"10.0.0.1:443", via}, nil},
		{"", []string{"10.0.0.1:443", "10.9.0.1:443", "10.8.0.1:443"}, []string{"10.0.0.1:443", via, "10.9.0.1:443"}, []string{west}},
	} {
		r := &Registry{Mesh: Mesh{Network: tt.own}, NewTransport: newOver}
		s := service(t, "a.test", 443)
		s.Endpoints = append(endpoints(tt.plain...), behind("10.8.0.1:443", "connect", "https://gw.test:443"))
		tab, err := r.Merge(Snapshot{Services: []*Service{s}, Networks: networks})
		if err != nil {
			t.Fatal(err)
		}
		r.Swap(tab)
		req := byName("a.test", 443, 443)
		req.Proto = "sni"
		route, err := r.Resolve(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for i := range route.Endpoints {
			got = append(got, way(&route.Endpoints[i]))
		}
		n := min(len(tt.want), len(got))
		slices.Sort(got[:n])
		if want := slices.Concat(tt.want, tt.later); !slices.Equal(got, want) {
			t.Errorf("in %q, with %v: got %q, want %q", tt.own, tt.plain, got, want)
		}
	}
}
