package registry

import (
	"fmt"
	"net/netip"
	"testing"

	"culvert.dev/tunnel"
)

// split is a headless service whose pods have a port each for its two ports, one
// of them at a number of its own.
func split(t testing.TB) *Service {
	pod := func(name, addr string, port, serves uint16) Endpoint {
		return Endpoint{Name: name, Addr: netip.MustParseAddr(addr), Port: port, ServicePort: serves}
	}
	s := service(t, "db.test", 80, 443)
	s.Headless = true
	s.Endpoints = []Endpoint{
		pod("db-0", "192.0.2.1", 8080, 80), pod("db-0", "192.0.2.1", 0, 443),
		pod("db-1", "192.0.2.2", 8080, 80), pod("db-1", "192.0.2.2", 0, 443),
		pod("db-2", "192.0.2.3", 0, 443), // which is not ready for 80
	}
	return s
}

// An endpoint for one port of a service is never used for another one.
func TestEndpointForPort(t *testing.T) {
	r := &Registry{}
	r.Swap(table(t, split(t)))
	count := map[string]int{}
	for _, port := range []uint16{80, 443} {
		for range 60 {
			route, err := r.Resolve(t.Context(), byName("db.test", port, 0))
			if err != nil {
				t.Fatal(err)
			}
			if want := map[uint16]int{80: 2, 443: 3}[port]; len(route.Endpoints) != want {
				t.Fatalf("port %d: got %v, want %d", port, route.Endpoints, want)
			}
			count[fmt.Sprintf("%d %s", port, route.Endpoints[0])]++
		}
	}
	if got := fmt.Sprint(count); got != "map[443 192.0.2.1:443:20 443 192.0.2.2:443:20 443 192.0.2.3:443:20 80 192.0.2.1:8080:30 80 192.0.2.2:8080:30]" {
		t.Errorf("they do not take turns: %v", got)
	}
	for _, test := range []struct {
		name string
		port uint16
		want string
	}{
		{"db-0.db.test", 80, "192.0.2.1:8080"}, {"db-0.db.test", 443, "192.0.2.1:443"},
		{"db-2.db.test", 443, "192.0.2.3:443"}, {"db-2.db.test", 80, "no-route"},
		{"1.db.test", 80, "192.0.2.2:8080"}, {"1.db.test", 443, "192.0.2.2:443"}, {"2.db.test", 80, "no-route"},
		{"192-0-2-2.db.test", 443, "192.0.2.2:443"}, {"192-0-2-2.db.test", 80, "192.0.2.2:8080"},
	} {
		route, err := r.Resolve(t.Context(), byName(test.name, test.port, 0))
		got := string(tunnel.ReasonOf(err))
		if err == nil {
			got = route.Endpoints[0].String()
		}
		if got != test.want {
			t.Errorf("%s, port %d: got %s, want %s", test.name, test.port, got, test.want)
		}
	}
	for addr, want := range map[string]string{"192.0.2.1:8080": "", "192.0.2.1:443": "", "192.0.2.3:443": "", "192.0.2.1:80": "no-route", "192.0.2.3:80": "no-route"} {
		ap := netip.MustParseAddrPort(addr)
		if _, err := r.Resolve(t.Context(), byAddr(ap.Addr().String(), ap.Port())); (err != nil || want != "") && string(tunnel.ReasonOf(err)) != want {
			t.Errorf("%s: got %v, want %q", addr, err, want)
		}
	}
	places, ok := r.Table().Locations(tunnel.MustParseName("db.test"), "")
	if !ok || len(places) != 2 || len(places[0].Endpoints) != 2 || len(places[1].Endpoints) != 3 {
		t.Errorf("places: %+v", places)
	}
}

// A backend's port is its service's first one.
func TestEndpointForPortOfBackend(t *testing.T) {
	s := split(t)
	s.Ports = s.Ports[:1]
	r := withListeners(t, listenerOf("l", 443, &Section{Name: "s", Rules: []*Rule{ruleOf(t, "r", nil, Backend{Weight: 1, Service: s})}}))
	route, err := r.Resolve(t.Context(), confined("s", ""))
	if got := fmt.Sprint(route.Endpoints); got != "[192.0.2.1:8080 192.0.2.2:8080]" || err != nil {
		t.Errorf("got %s, %v", got, err)
	}
}
