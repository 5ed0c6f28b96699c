package discovery

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// written is how a test has an endpoint: "name@address:port for 443".
func written(eps []registry.Endpoint) string {
	var all []string
	for _, e := range eps {
		s := e.String()
		if e.Name != "" {
			s = e.Name + "@" + s
		}
		if e.ServicePort != 0 {
			s += fmt.Sprintf(" for %d", e.ServicePort)
		}
		all = append(all, s)
	}
	return strings.Join(all, ", ")
}

func TestEndpoints(t *testing.T) {
	headless := svc("shop", "db")
	headless.Spec.ClusterIP = corev1.ClusterIPNone
	portless := headless.DeepCopy()
	portless.Spec.Ports = nil
	two := svc("shop", "web")
	two.Spec.Ports = []corev1.ServicePort{port("http", 80, ""), port("https", 443, corev1.ProtocolTCP)}
	mixed := svc("shop", "dns")
	mixed.Spec.Ports = []corev1.ServicePort{port("dns", 53, corev1.ProtocolUDP), port("dns-tcp", 53, corev1.ProtocolTCP)}
	six := svc("shop", "web")
	six.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}
	unnamed := svc("shop", "web")
	unnamed.Spec.Ports[0].Name = ""

	with := func(s *discoveryv1.EndpointSlice, ports ...discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
		s.Ports = ports
		return s
	}
	of := func(list ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
		s := eps("shop", "web", "web-1")
		s.Endpoints = list
		if len(list) > 0 && len(list[0].Addresses) > 0 && strings.Contains(list[0].Addresses[0], ":") {
			s.AddressType = discoveryv1.AddressTypeIPv6
		}
		return s
	}
	udp := eport("dns", 5353)
	udp.Protocol = ptr(corev1.ProtocolUDP)
	any := eport("https", 0)
	any.Port = nil
	fqdn := of(discoveryv1.Endpoint{Addresses: []string{"web.example.com"}})
	fqdn.AddressType = discoveryv1.AddressTypeFQDN
	stray := eps("shop", "web", "web-1", "10.1.0.1")
	stray.Labels = nil

	for _, tt := range []struct {
		name         string
		svc          *corev1.Service
		slices       []*discoveryv1.EndpointSlice
		zone, prefer string
		want         string
	}{
		{"none", svc("shop", "web"), nil, "", "", ""},
		{"the same port", svc("shop", "web"), []*discoveryv1.EndpointSlice{eps("shop", "web", "a", "10.1.0.2", "10.1.0.1")}, "", "", "10.1.0.1, 10.1.0.2"},
		{"another target", svc("shop", "web"), []*discoveryv1.EndpointSlice{with(eps("shop", "web", "a", "10.1.0.1"), eport("https", 8443))}, "", "", "10.1.0.1:8443 for 443"},
		{"a port without a name", unnamed, []*discoveryv1.EndpointSlice{with(eps("shop", "web", "a", "10.1.0.1"), eport("", 8443))}, "", "", "10.1.0.1:8443 for 443"},
		{"a target of any port", svc("shop", "web"), []*discoveryv1.EndpointSlice{with(eps("shop", "web", "a", "10.1.0.1"), any)}, "", "", "10.1.0.1"},
		{"a named target that differs", svc("shop", "web"), []*discoveryv1.EndpointSlice{
			with(eps("shop", "web", "a", "10.1.0.1"), eport("https", 8443)), with(eps("shop", "web", "b", "10.1.0.2"), eport("https", 9443)),
		}, "", "", "10.1.0.1:8443 for 443, 10.1.0.2:9443 for 443"},
		{"two ports as they are", two, []*discoveryv1.EndpointSlice{with(eps("shop", "web", "a", "10.1.0.1"), eport("http", 80), eport("https", 443))}, "", "", "10.1.0.1"},
		{"two ports, two targets", two, []*discoveryv1.EndpointSlice{with(eps("shop", "web", "a", "10.1.0.1"), eport("https", 8443), eport("http", 8080))}, "", "", "10.1.0.1:8080 for 80, 10.1.0.1:8443 for 443"},
		{"two ports, one target", two, []*discoveryv1.EndpointSlice{with(eps("shop", "web", "a", "10.1.0.1"), eport("https", 8080), eport("http", 8080))}, "", "", "10.1.0.1:8080 for 80, 10.1.0.1:8080 for 443"},
		{"one port of two", two, []*discoveryv1.EndpointSlice{with(eps("shop", "web", "a", "10.1.0.1"), eport("https", 443))}, "", "", "10.1.0.1:443 for 443"},
		{"one port of two in each slice", two, []*discoveryv1.EndpointSlice{
			with(eps("shop", "web", "a", "10.1.0.1"), eport("https", 443)), with(eps("shop", "web", "b", "10.1.0.1", "10.1.0.2"), eport("http", 80)),
		}, "", "", "10.1.0.1, 10.1.0.2:80 for 80"},
		{"a slice without ports", two, []*discoveryv1.EndpointSlice{with(eps("shop", "web", "a", "10.1.0.1"))}, "", "", ""},
		{"a slice of other ports", svc("shop", "web"), []*discoveryv1.EndpointSlice{with(eps("shop", "web", "a", "10.1.0.1"), eport("metrics", 9090))}, "", "", ""},
		{"UDP beside TCP", mixed, []*discoveryv1.EndpointSlice{with(eps("shop", "dns", "a", "10.1.0.1"), udp, eport("dns-tcp", 53))}, "", "", "10.1.0.1"},
		{"UDP that is called as TCP", svc("shop", "web"), []*discoveryv1.EndpointSlice{with(eps("shop", "web", "a", "10.1.0.1"), func() discoveryv1.EndpointPort {
			p := eport("https", 443)
			p.Protocol = ptr(corev1.ProtocolUDP)
			return p
		}())}, "", "", ""},

		{"not ready", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", conditions(false, false, false)), ep("10.1.0.2"))}, "", "", "10.1.0.2"},
		{"none ready", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", conditions(false, false, false)))}, "", "", ""},
		{"ready before draining", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", conditions(false, true, true)), ep("10.1.0.2", conditions(true, true, false)))}, "", "", "10.1.0.2"},
		{"draining where none is ready", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", conditions(false, true, true)), ep("10.1.0.2", conditions(false, false, true)), ep("10.1.0.3", conditions(false, true, false)))}, "", "", "10.1.0.1"},
		{"draining for the port where none is ready", two, []*discoveryv1.EndpointSlice{
			with(of(ep("10.1.0.1")), eport("http", 80)), with(of(ep("10.1.0.2", conditions(false, true, true))), eport("http", 80), eport("https", 443)),
		}, "", "", "10.1.0.1:80 for 80, 10.1.0.2:443 for 443"},
		{"ready and terminating, as told", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", conditions(true, true, true)))}, "", "", "10.1.0.1"},
		{"in two slices for a moment", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1")), of(ep("10.1.0.1", conditions(false, false, false)))}, "", "", "10.1.0.1"},

		{"hints without a zone", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", hint("a")), ep("10.1.0.2", hint("b")))}, "", "", "10.1.0.1, 10.1.0.2"},
		{"hints", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", hint("a")), ep("10.1.0.2", hint("b")), ep("10.1.0.3", hint("b", "a")))}, "a", "", "10.1.0.1, 10.1.0.3"},
		{"hints for all but one", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", hint("a")), ep("10.1.0.2"))}, "a", "", "10.1.0.1, 10.1.0.2"},
		{"one without that is not ready", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", hint("a")), ep("10.1.0.2", hint("b")), ep("10.1.0.3", conditions(false, false, false)))}, "a", "", "10.1.0.1"},
		{"hints for other zones", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", hint("a")), ep("10.1.0.2", hint("b")))}, "c", "", "10.1.0.1, 10.1.0.2"},
		{"hints of draining ones", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", hint("a"), conditions(false, true, true)), ep("10.1.0.2", hint("b"), conditions(false, true, true)))}, "a", "", "10.1.0.1, 10.1.0.2"},
		{"hints of a headless service", headless, []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", hint("a")), ep("10.1.0.2", hint("b")))}, "a", "", "10.1.0.1, 10.1.0.2"},

		{"two families", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", pod("p"))), of(ep("fd00::1", pod("p")))}, "", "", "10.1.0.1"},
		{"two families, IPv6 first", six, []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", pod("p"))), of(ep("fd00::1", pod("p")))}, "", "", "fd00::1"},
		{"IPv6 preferred", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", pod("p"))), of(ep("fd00::1", pod("p")))}, "", PreferIPv6, "fd00::1"},
		{"IPv4 preferred", six, []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", pod("p"))), of(ep("fd00::1", pod("p")))}, "", PreferIPv4, "10.1.0.1"},
		{"both", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", pod("p"))), of(ep("fd00::1", pod("p")))}, "", PreferBoth, "10.1.0.1, fd00::1"},
		{"one family each", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1", pod("p"))), of(ep("fd00::2", pod("q")))}, "", "", "10.1.0.1, fd00::2"},
		{"two families of nobody knows whom", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.1")), of(ep("fd00::1"))}, "", "", "10.1.0.1, fd00::1"},
		{"a mapped address", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("::ffff:10.1.0.1"))}, "", "", "10.1.0.1"},

		{"headless with hostnames", headless, []*discoveryv1.EndpointSlice{of(ep("10.1.0.9", hostname("db-2")), ep("10.1.0.1", hostname("DB-10")), ep("10.1.0.3", hostname("db-1")))}, "", "", "db-1@10.1.0.3, db-2@10.1.0.9, db-10@10.1.0.1"},
		{"headless with what is no hostname", headless, []*discoveryv1.EndpointSlice{of(ep("10.1.0.9", hostname("a.b")))}, "", "", "10.1.0.9"},
		{"headless without ports", portless, []*discoveryv1.EndpointSlice{with(eps("shop", "db", "a", "10.1.0.1"))}, "", "", "10.1.0.1"},
		{"a hostname of what is not headless", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(ep("10.1.0.9", hostname("web-0")))}, "", "", "10.1.0.9"},

		{"made by hand", svc("shop", "web"), []*discoveryv1.EndpointSlice{with(eps("shop", "web", "a", "192.0.2.9"), eport("https", 8443))}, "", "", "192.0.2.9:8443 for 443"},
		{"loopback", svc("shop", "web"), []*discoveryv1.EndpointSlice{eps("shop", "web", "a", "127.0.0.1", "10.1.0.1")}, "", "", "10.1.0.1"},
		{"metadata", svc("shop", "web"), []*discoveryv1.EndpointSlice{eps("shop", "web", "a", "169.254.169.254")}, "", "", ""},
		{"names", svc("shop", "web"), []*discoveryv1.EndpointSlice{fqdn}, "", "", ""},
		{"of no service", svc("shop", "web"), []*discoveryv1.EndpointSlice{stray}, "", "", ""},
		{"no address", svc("shop", "web"), []*discoveryv1.EndpointSlice{of(discoveryv1.Endpoint{}, ep("10.1.0.1"))}, "", "", "10.1.0.1"},
		{"an address that is none", svc("shop", "web"), []*discoveryv1.EndpointSlice{{
			ObjectMeta: eps("shop", "web", "a").ObjectMeta, Ports: eps("shop", "web", "a").Ports, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.0"}}, ep("10.1.0.1")},
		}}, "", "", "10.1.0.1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := view{cluster: "west", network: "net", zone: tt.zone, prefer: tt.prefer, rules: &Rules{}}
			var of []*endpoints.Slice
			for _, s := range tt.slices {
				if sl := endpoints.SliceOf(s); sl != nil {
					of = append(of, sl)
				}
			}
			got := v.endpoints(serviceOf(tt.svc), of)
			if written(got) != tt.want {
				t.Errorf("got  %s\nwant %s", written(got), tt.want)
			}
			slices.Reverse(of)
			if again := v.endpoints(serviceOf(tt.svc), of); !slices.Equal(again, got) {
				t.Errorf("slices in another order: got %s, want %s", written(again), written(got))
			}
			for _, e := range got {
				if e.Network != "net" || e.Cluster != "west" {
					t.Errorf("%s is in network %q and cluster %q, want net and west", e, e.Network, e.Cluster)
				}
			}
		})
	}
}
