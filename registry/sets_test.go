package registry

import (
	"context"
	"net/netip"
	"slices"
	"testing"
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
