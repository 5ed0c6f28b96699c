package gateway

import (
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/hbone"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// endpointAt is an endpoint, that hops lead to if there are any.
func endpointAt(addr string, hops ...registry.Hop) registry.Endpoint {
	ap := netip.MustParseAddrPort(addr)
	ep := registry.Endpoint{Addr: ap.Addr(), Port: ap.Port()}
	if len(hops) > 0 {
		ep.Via = &hops
	}
	return ep
}

// saying is a server that says its name to each client.
func saying(t *testing.T, name string) (addr string) {
	return testnet.Service(t, func(c net.Conn) { _, _ = io.WriteString(c, name) })
}

// heard asks the gateway at addr for svc.test, and returns which server it has reached.
func heard(t *testing.T, addr string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := (&connect.Dialer{Proxy: addr}).DialContext(ctx, "tcp", "svc.test:443")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	name, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(name)
}

// pod runs a gateway that takes HBONE for 10.0.0.1:443, where the server name is, and
// returns the hop to it.
func pod(t *testing.T, ca *testca.CA, name string) registry.Hop {
	t.Helper()
	s := service(saying(t, name))
	s.Addresses = []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	return hop(t, ca, name, startTLS(t, ca, name, &hbone.Protocol{Via: name}, s))
}

// A service whose endpoints are reached in three ways: two in pods that take HBONE, two
// directly, and one behind a gateway. Three have one address, in networks of their own.
func TestEndpointsByTheirOwnTransports(t *testing.T) {
	ca := newCA(t)
	far := service(saying(t, "far"))
	far.Addresses = []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	s := service(saying(t, "plain-1"))
	s.Endpoints = append(s.Endpoints,
		endpointAt(saying(t, "plain-2")),
		endpointAt("10.0.0.1:443", pod(t, ca, "pod-1")),
		endpointAt("10.0.0.1:443", pod(t, ca, "pod-2")),
		endpointAt("10.0.0.1:443", byConnect(start(t, "far", far))),
	)
	addr, g := startGateway(t, Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&connect.Protocol{Via: "edge"}}}},
		Sources:   []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []*registry.Service{s}}}},
		Via:       "edge",
	})
	const each = 6
	got := map[string]int{}
	for range 5 * each {
		got[heard(t, addr)]++
	}
	for _, name := range []string{"plain-1", "plain-2", "pod-1", "pod-2", "far"} {
		if got[name] != each {
			t.Errorf("%s got %d tunnels of %d, want %d; all: %v", name, got[name], 5*each, each, got)
		}
	}

	var ways []string
	for range 5 {
		x := Explain(t.Context(), g.router, g.cfg.Listeners, Query{Host: "svc.test", Port: 443, Listener: g.cfg.Listeners[0].Address, Proto: "connect"})
		if len(x.Endpoints) == 0 {
			t.Fatalf("explain: %+v", x)
		}
		way := x.Endpoints[0].Security
		if len(x.Endpoints[0].Via) > 0 {
			proto, _, _ := strings.Cut(x.Endpoints[0].Via[0], " ")
			way += " " + x.Endpoints[0].Address + " over " + proto
		}
		ways = append(ways, way)
	}
	slices.Sort(ways)
	want := []string{"", "", "mutual 10.0.0.1:443 over hbone", "mutual 10.0.0.1:443 over hbone", "plain 10.0.0.1:443 over connect"}
	if !slices.Equal(ways, want) {
		t.Errorf("explain: %q, want %q", ways, want)
	}
}

// A check asks an endpoint through the gateways before it, and the status has what it found
// of each.
func TestEndpointsAreCheckedThroughTheirHops(t *testing.T) {
	t.Parallel()
	s := service(saying(t, "plain"))
	s.Check = registry.Check{Kind: "tcp", Interval: 2 * patience, Timeout: patience, UnhealthyThreshold: 1}
	alive, dead := service(saying(t, "alive")), service(testnet.ClosedPort(t))
	for _, far := range []*registry.Service{alive, dead} {
		far.Addresses = []netip.Addr{netip.MustParseAddr("10.0.0.1")}
		s.Endpoints = append(s.Endpoints, endpointAt("10.0.0.1:443", byConnect(start(t, "far", far))))
	}
	_, g := startGateway(t, Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&connect.Protocol{Via: "edge"}}}},
		Sources:   []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []*registry.Service{s}}}},
		Via:       "edge",
	})
	var got map[string]string
	testnet.Eventually(t, 6*patience, func() bool { // the first check comes within 5 s
		got = map[string]string{}
		for _, h := range g.health() {
			got[h.Via] = h.Address + " " + h.State
		}
		return got["connect "+(*s.Endpoints[1].Via)[0].Addresses[0]] == "10.0.0.1:443 up" && got["connect "+(*s.Endpoints[2].Via)[0].Addresses[0]] == "10.0.0.1:443 down"
	}, "the states by hops: want 10.0.0.1:443 up over the one and down over the other")
}

// A service with an endpoint here and one behind the gateway of another network goes to the
// one here while it works, and to the other one when it does not.
func TestEndpointsInSeveralNetworks(t *testing.T) {
	far := service(saying(t, "far"))
	farAddr := netip.MustParseAddrPort(start(t, "far", far))
	for want, near := range map[string]string{"near": saying(t, "near"), "far": testnet.ClosedPort(t)} {
		s := service(near)
		s.Ports = []uint16{443}
		s.Endpoints[0].Network = "home"
		s.Endpoints = append(s.Endpoints, registry.Endpoint{Addr: netip.MustParseAddr("10.0.0.1"), Port: 443, Network: "east"})
		addr, g := startGateway(t, Config{
			Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&connect.Protocol{Via: "edge"}}}},
			Mesh:      registry.Mesh{Network: "home"},
			Sources: []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []*registry.Service{s}, Networks: []registry.Network{
				{Name: "home"},
				{Name: "east", Gateways: []registry.Gateway{{Address: registry.Endpoint{Addr: farAddr.Addr(), Port: farAddr.Port()}, Transports: registry.HopsBy("connect")}}},
			}}}},
			Via: "edge",
		})
		for range 4 {
			if got := heard(t, addr); got != want {
				t.Errorf("reached %q, want %q", got, want)
			}
		}
		x := Explain(t.Context(), g.router, g.cfg.Listeners, Query{Host: "svc.test", Port: 443, Listener: g.cfg.Listeners[0].Address, Proto: "connect"})
		if len(x.Endpoints) != 2 {
			t.Errorf("explain: %+v, want both", x.Endpoints)
		}
	}
}

// An endpoint whose gateway is not there, is another one than it should be, or does not
// serve it, costs no request: the others are tried.
func TestEndpointsWhoseGatewayFails(t *testing.T) {
	ca := newCA(t)
	impostor := pod(t, newCA(t), "pod")
	impostor.Roots = string(ca.CertPEM)
	for name, h := range map[string]registry.Hop{
		"closed": byConnect(closed), "impostor": impostor,
		"one that has no route": byConnect(start(t, "other", service(closed))),
	} {
		s := service(saying(t, "plain"))
		s.Endpoints = append(s.Endpoints, endpointAt("10.0.0.1:443", h))
		addr := start(t, "edge", s)
		for range 4 {
			if got := heard(t, addr); got != "plain" {
				t.Errorf("%s: reached %q, want the plain one", name, got)
			}
		}
	}
}
