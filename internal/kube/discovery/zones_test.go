package discovery

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// zoned makes an EndpointSlice of shop/web.
func zoned(name string, list ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	s := eps("shop", "web", name)
	s.Endpoints = list
	return s
}

// Endpoints have the zones that EndpointSlices say, in whatever order those are read, and a zone alone
// leaves none of them out.
func TestEndpointsHaveZones(t *testing.T) {
	headless := svc("shop", "web")
	headless.Spec.ClusterIP = corev1.ClusterIPNone
	for _, tt := range []struct {
		name   string
		svc    *corev1.Service
		slices []*discoveryv1.EndpointSlice
		want   string
	}{
		{"two zones, and none", svc("shop", "web"), []*discoveryv1.EndpointSlice{zoned("a", ep("10.1.0.1", zone("a")), ep("10.1.0.2", zone("b")), ep("10.1.0.3"))}, "10.1.0.1 a, 10.1.0.2 b, 10.1.0.3 "},
		{"headless", headless, []*discoveryv1.EndpointSlice{zoned("a", ep("10.1.0.1", zone("a")), ep("10.1.0.2", zone("b")))}, "10.1.0.1 a, 10.1.0.2 b"},
		{"an address in two zones", svc("shop", "web"), []*discoveryv1.EndpointSlice{zoned("a", ep("10.1.0.1", zone("b"))), zoned("b", ep("10.1.0.1", zone("a")))}, "10.1.0.1 a"},
		{"an address in a zone and in none", svc("shop", "web"), []*discoveryv1.EndpointSlice{zoned("a", ep("10.1.0.1")), zoned("b", ep("10.1.0.1", zone("b")))}, "10.1.0.1 b"},
		{"hints of another zone", svc("shop", "web"), []*discoveryv1.EndpointSlice{zoned("a", ep("10.1.0.1", zone("b"), hint("a")), ep("10.1.0.2", zone("a"), hint("b")))}, "10.1.0.1 b"},
	} {
		var of []*endpoints.Slice
		for _, s := range tt.slices {
			of = append(of, endpoints.SliceOf(s))
		}
		for range 2 {
			v := view{cluster: "west", zone: "a", rules: &Rules{}}
			var got []string
			for _, e := range v.endpoints(serviceOf(tt.svc), of) {
				got = append(got, e.String()+" "+e.Zone)
			}
			if s := strings.Join(got, ", "); s != tt.want {
				t.Errorf("%s: got %q, want %q", tt.name, s, tt.want)
			}
			slices.Reverse(of)
		}
	}
}

// From the API server to the choice of an endpoint: the gateway's own zone is preferred while half of it
// can be dialed, and all are used where it cannot.
func TestOwnZoneIsPreferred(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web", "expose", "true"),
			zoned("web-1", ep("10.1.0.1", zone("a")), ep("10.1.0.2", zone("b"))), zoned("web-2", ep("10.1.0.3", zone("a")), ep("10.1.0.4", zone("b"))))
		r.start(&Source{Client: r.api, Cluster: "west"})
		reg := &registry.Registry{Mesh: registry.Mesh{TopologyZone: "a"}}
		swap := func() {
			t.Helper()
			table, err := reg.Merge(r.one(moment).Snapshot)
			if err != nil {
				t.Fatal(err)
			}
			reg.Swap(table)
		}
		resolve := func() tunnel.Route {
			t.Helper()
			to, err := reg.Resolve(t.Context(), &tunnel.Request{Name: tunnel.MustParseName("web.shop.svc.west.mesh.internal"), Port: 443, Source: netip.MustParseAddrPort("203.0.113.9:40000")})
			if err != nil {
				t.Fatal(err)
			}
			return to
		}
		firsts := func() string {
			t.Helper()
			set := map[string]bool{}
			for range 100 {
				to := resolve()
				set[to.Endpoints[0].Addr.Addr().String()] = true
			}
			return strings.Join(slices.Sorted(maps.Keys(set)), " ")
		}
		report := func(addr string, err error) {
			resolve().Report(tunnel.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(addr), 443)}, err)
		}
		refused := errors.New("connection refused")
		swap()
		if got, want := firsts(), "10.1.0.1 10.1.0.3"; got != want {
			t.Errorf("got %s first, want those of the zone, %s", got, want)
		}
		report("10.1.0.1", refused)
		if got, want := firsts(), "10.1.0.3"; got != want {
			t.Errorf("with half of the zone: got %s first, want %s", got, want)
		}
		report("10.1.0.3", refused)
		if got, want := firsts(), "10.1.0.2 10.1.0.4"; got != want {
			t.Errorf("without the zone: got %s first, want the others, %s", got, want)
		}

		report("10.1.0.1", nil)
		report("10.1.0.3", nil)
		r.put(zoned("web-2", ep("10.1.0.3", zone("b")), ep("10.1.0.4", zone("a")))) // the addresses are other pods' now
		swap()
		if got, want := firsts(), "10.1.0.1 10.1.0.4"; got != want {
			t.Errorf("with changed zones: got %s first, want %s", got, want)
		}
	})
}
