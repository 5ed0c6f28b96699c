package registry

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"culvert.dev/tunnel"
)

// Where clusters export different ports of a service, each of its endpoints is
// asked for what its own cluster has.
func TestSetsOfDifferentPorts(t *testing.T) {
	of := func(cluster, addr string, ports ...uint16) *Service {
		return &Service{
			Name: cluster, ID: ID{Service: "db", Cluster: cluster}, Ports: ports, Exposed: true, Exported: true, Origin: cluster,
			Endpoints: []Endpoint{{Addr: netip.MustParseAddr(addr)}},
		}
	}
	r := &Registry{}
	r.Swap(table(t, of("west", "10.1.0.1", 443, 5432), of("east", "10.2.0.1", 443)))
	for port, want := range map[uint16][]string{443: {"10.1.0.1:443", "10.2.0.1:443"}, 5432: {"10.1.0.1:5432"}} {
		for range 4 { // whosever turn it is
			route, err := r.Resolve(context.Background(), byName("db.default.svc.clusterset.local", port, 443))
			if err != nil {
				t.Fatalf("port %d: %v", port, err)
			}
			var got []string
			for _, ep := range route.Endpoints {
				got = append(got, ep.Addr.String())
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("port %d: got %v, want %v", port, got, want)
			}
		}
	}
}

// A backend may stand for a service of the table, which it is only as long as
// that is there and exposed; and one with endpoints of its own never is.
func TestBackendsThatStandForOthers(t *testing.T) {
	set := tunnel.MustParseName("db.default.svc.clusterset.local")
	db := func(exposed bool) *Service {
		return &Service{
			Name: "db", ID: ID{Service: "db", Cluster: "west"}, Ports: []uint16{5432}, Exposed: exposed, Exported: true, Origin: "west",
			Endpoints: []Endpoint{{Addr: netip.MustParseAddr("10.1.0.1"), Port: 15432}},
		}
	}
	backend := func(port uint16, eps ...Endpoint) *Listener {
		return &Listener{Name: "gw", Protocol: TCP, Port: 5432, Sections: []*Section{{Name: "gw", Rules: []*Rule{{
			Name: "to db", Backends: []Backend{{Weight: 1, ServiceName: set, Service: &Service{Name: "import", Ports: []uint16{port}, Endpoints: eps}}},
		}}}}}
	}
	for _, tt := range []struct {
		name     string
		services []*Service
		listener *Listener
		want     string
	}{
		{"there", []*Service{db(true)}, backend(5432), "10.1.0.1:15432"},
		{"private", []*Service{db(false)}, backend(5432), "not-exposed"},
		{"another port", []*Service{db(true)}, backend(25), "no-endpoint"},
		{"gone", nil, backend(5432), "no-endpoint"},
		{"endpoints of its own", []*Service{db(true)}, backend(5432, Endpoint{Addr: netip.MustParseAddr("10.9.0.1"), Port: 1}), "10.9.0.1:1"},
	} {
		tab, err := Merge(Snapshot{Services: tt.services, Listeners: []*Listener{tt.listener}})
		if err != nil {
			t.Fatal(err)
		}
		r := &Registry{}
		r.Swap(tab)
		req := &tunnel.Request{Listener: "gw", ListenerOnly: true, LocalPort: 5432}
		route, err := r.Resolve(context.Background(), req)
		got := string(tunnel.ReasonOf(err))
		if err == nil {
			got = route.Endpoints[0].Addr.String()
		}
		if got != tt.want {
			t.Errorf("%s: got %s (%v), want %s", tt.name, got, err, tt.want)
		}
		if hopeless := tab.PrecheckRoute(req) != nil; hopeless != (err != nil) {
			t.Errorf("%s: hopeless %t, and the request ends with %v", tt.name, hopeless, err)
		}
	}
}

// What a backend stands for is closed to a client through a rule as it is by name:
// by the network that the client is in.
func TestBackendsThatStandForOthersAreExposedByNetwork(t *testing.T) {
	network := func(name, cidr string) Network {
		return Network{Name: name, CIDRs: []netip.Prefix{netip.MustParsePrefix(cidr)}}
	}
	db := &Service{
		Name: "db", ID: ID{Service: "db", Cluster: "west"}, Ports: []uint16{5432}, Exposed: true, ExposedTo: []string{"office"}, Exported: true, Origin: "west",
		Endpoints: []Endpoint{{Addr: netip.MustParseAddr("10.1.0.1"), Port: 5432}},
	}
	section := &Section{Name: "s", Rules: []*Rule{{Name: "to db", Backends: []Backend{{
		Weight: 1, ServiceName: tunnel.MustParseName("db.default.svc.clusterset.local"), Service: &Service{Name: "import", Ports: []uint16{5432}},
	}}}}}
	tab, err := Merge(Snapshot{
		Networks: []Network{network("office", "10.8.0.0/16"), network("lab", "10.9.0.0/16")},
		Services: []*Service{db}, Listeners: []*Listener{{Name: "gw", Protocol: TCP, Port: 5432, Sections: []*Section{section}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	r := &Registry{}
	r.Swap(tab)
	for source, want := range map[string]string{"10.8.0.1": "", "10.9.0.1": `network "lab"`, "192.0.2.1": "no network", "": "no network"} {
		req := confined("s", "")
		if source != "" {
			req.Source = netip.AddrPortFrom(netip.MustParseAddr(source), 1)
		}
		_, err := r.Resolve(t.Context(), req)
		hopeless := tab.PrecheckRoute(req)
		if want == "" {
			if err != nil || hopeless != nil {
				t.Errorf("source %s: got %v, hopeless %v", source, err, hopeless)
			}
			continue
		}
		if tunnel.ReasonOf(err) != tunnel.NotExposed || !strings.Contains(err.Error(), want) {
			t.Errorf("source %q: got %v, want not-exposed in %s", source, err, want)
		}
		if hopeless == nil {
			t.Errorf("source %q: a client would be shown a certificate", source)
		}
	}
}
