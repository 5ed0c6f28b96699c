package registry_test

import (
	"context"
	"fmt"
	"net/netip"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A table answers where a request goes. The wildcard is private: its names are
// known, and are refused.
func Example() {
	pattern := func(s string) []tunnel.Pattern {
		p, err := tunnel.ParsePattern(s)
		if err != nil {
			panic(err)
		}
		return []tunnel.Pattern{p}
	}
	table, err := registry.Merge(registry.Snapshot{Services: []*registry.Service{
		{
			Name: "orders", Names: pattern("orders.example.com"), Exposed: true,
			Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("10.0.1.7"), Port: 8443}},
		},
		{
			Name: "other", Names: pattern("*.example.com"),
			Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("10.0.1.8"), Port: 8443}},
		},
	}})
	if err != nil {
		fmt.Println(err) // the table is usable: what conflicts is left out
	}
	reg := &registry.Registry{}
	reg.Swap(table)

	for _, name := range []string{"orders.example.com", "stock.example.com", "example.org"} {
		route, err := reg.Resolve(context.Background(), &tunnel.Request{Name: tunnel.MustParseName(name)})
		if err != nil {
			fmt.Println(name, tunnel.ReasonOf(err))
			continue
		}
		fmt.Println(name, route.Service, route.Endpoints)
	}
	// Output:
	// orders.example.com orders [10.0.1.7:8443]
	// stock.example.com not-exposed
	// example.org no-route
}
