package checks

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// behind dials in w what is behind the gateway at addr: "GATEWAY>ENDPOINT".
type behind struct {
	w    *world
	addr string
}

func (b behind) Dial(ctx context.Context, ep *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	return b.w.dialKey(ctx, b.addr+">"+ep.String(), ep.Named)
}
func (behind) Check(*tunnel.Endpoint) error { return nil }
func (b behind) Info() tunnel.TransportInfo {
	return tunnel.TransportInfo{Hops: []string{"connect " + b.addr}}
}

// swapBehind makes the table one of s, whose endpoints with a Via w dials over it.
func (w *world) swapBehind(s ...*registry.Service) {
	w.t.Helper()
	w.registry.NewTransport = func(_ *registry.Service, ep *registry.Endpoint, _ *registry.Gateway) (tunnel.Transport, error) {
		if ep == nil || len(ep.Hops()) == 0 {
			return nil, nil
		}
		return behind{w, ep.Hops()[0].Addresses[0]}, nil
	}
	t, err := w.registry.Merge(registry.Snapshot{Services: s})
	if err != nil {
		w.t.Fatal(err)
	}
	w.registry.Swap(t)
}

func via(gateway string) *[]registry.Hop {
	return &[]registry.Hop{{Proto: "connect", Addresses: []string{gateway}}}
}

// order returns the endpoints of a.test, in the order to try.
func (w *world) order() []string {
	w.t.Helper()
	route, err := w.registry.Resolve(w.t.Context(), &tunnel.Request{Proto: "sni", Name: tunnel.MustParseName("a.test"), Port: 443})
	if err != nil {
		w.t.Fatal(err)
	}
	var order []string
	for i := range route.Endpoints {
		ep := &route.Endpoints[i]
		key := ep.String()
		if ep.Transport != nil {
			key = ep.Transport.(behind).addr + ">" + key
		}
		order = append(order, key)
	}
	return order
}

// Endpoints that have a Via are checked over it, by the same thresholds as others. Three of
// them have one address, of which this gateway knows another host: one dies, and it alone
// is down.
func TestChecksBehindHops(t *testing.T) {
	within(t, registry.Mesh{}, func(w *world) {
		s := service("a.test", tcp, "10.0.0.1/443", "10.0.0.1/443", "10.0.0.1/443", "inner.test/443")
		s.Endpoints[1].Via, s.Endpoints[2].Via, s.Endpoints[3].Via = via("one:1"), via("two:1"), via("two:1")
		w.swapBehind(s)
		after(10 * time.Second)
		w.swapBehind(s) // which starts no check anew
		all := []string{"10.0.0.1:443", "one:1>10.0.0.1:443", "two:1>10.0.0.1:443", "two:1>inner.test:443"}
		for _, key := range all {
			w.dialed(key)
		}
		after(10 * time.Second)
		for _, key := range all {
			if n := w.dialed(key); n != 10 || !w.isNamed(key) {
				t.Errorf("%s: %d dials in 10 s, named %t; want 10, and named", key, n, w.isNamed(key))
			}
		}
		if w.asked["inner.test"] > 0 {
			t.Error("a name that the gateway before it knows was looked up here")
		}
		if got := w.checker.Counts(); got.Up != 4 || got.Down != 0 {
			t.Errorf("%+v, want 4 up", got)
		}
		for _, dead := range all {
			w.set(dead, errRefused)
			after(2 * time.Second)
			for range len(all) {
				if order := w.order(); len(order) != 4 || order[3] != dead {
					t.Fatalf("%s is dead: the order is %v, want it last", dead, order)
				}
			}
			if up := w.registry.Healthy(netip.MustParseAddrPort("10.0.0.1:443")); up != (dead != all[0]) {
				t.Errorf("%s is dead: the address that is dialed directly is healthy: %t", dead, up)
			}
			down := 0
			for _, h := range w.registry.Health() {
				if h.State == registry.StateDown {
					down++
				}
				if len(h.Services) != 1 {
					t.Errorf("%s is dead: %+v has services %v, want a.test", dead, h, h.Services)
				}
			}
			if down != 1 {
				t.Errorf("%s is dead: %d are down, want 1: %+v", dead, down, w.registry.Health())
			}
			w.set(dead, nil)
			after(3 * time.Second)
			if got := w.checker.Counts(); got.Up != 4 || got.Down != 0 {
				t.Fatalf("%s is back: %+v, want 4 up", dead, got)
			}
		}
		w.swapBehind()
		after(2 * time.Second)
		if got := w.checker.Counts(); got.Up != 0 || len(w.registry.Health()) != 0 {
			t.Errorf("without the service: %+v and %v, want nothing", got, w.registry.Health())
		}
	})
}

// Of 500 endpoints that stay silent behind hops, no more are asked at once than of others.
func TestChecksBehindHopsAreBounded(t *testing.T) {
	within(t, registry.Mesh{}, func(w *world) {
		s := service("a.test", tcp)
		for i := range 500 {
			ep := registry.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), Port: 443, Via: via("one:1")}
			s.Endpoints = append(s.Endpoints, ep)
			w.set("one:1>"+ep.String(), time.Hour)
		}
		w.swapBehind(s)
		after(time.Minute)
		if got := w.checker.Counts(); got.Down != 500 {
			t.Errorf("%+v, want all down", got)
		}
		if w.most == 0 || w.most > maxProbes {
			t.Errorf("%d were asked at once, want at most %d", w.most, maxProbes)
		}
	})
}

// A GET in the clear goes to no endpoint that plaintext may not go to.
func TestChecksBehindHopsInClear(t *testing.T) {
	http := registry.Check{Kind: "http", Statuses: "200"}
	for _, tt := range []struct {
		name    string
		check   registry.Check
		change  func(*registry.Service)
		checked bool
	}{
		{"tcp", tcp, func(*registry.Service) {}, true},
		{"tls", registry.Check{Kind: "tls"}, func(*registry.Service) {}, true},
		{"http", http, func(*registry.Service) {}, false},
		{"http inside of TLS", http, func(s *registry.Service) { s.TLS = &registry.BackendTLS{} }, true},
		{"http at another port", registry.Check{Kind: "http", Port: 8008}, func(s *registry.Service) { s.TLS = &registry.BackendTLS{} }, false},
		{"of an insecure service", http, func(s *registry.Service) { s.Insecure = true }, true},
		{"over an insecure hop", http, func(s *registry.Service) { (*s.Endpoints[0].Via)[0].Insecure = true }, true},
		{"over mutual TLS", http, func(s *registry.Service) {
			s.Endpoints[0].Via = &[]registry.Hop{{Proto: "connect", Addresses: []string{"https://gw.test:1"}, Certificate: "certificate"}}
		}, true},
	} {
		within(t, registry.Mesh{}, func(w *world) {
			s := service("a.test", tt.check, "10.0.0.1/443")
			s.Endpoints[0].Via = via("one:1")
			tt.change(s)
			w.swapBehind(s)
			after(5 * time.Second)
			n := 0
			w.mu.Lock()
			for _, dials := range w.dials {
				n += dials
			}
			w.mu.Unlock()
			if (n > 0) != tt.checked {
				t.Errorf("%s: %d dials, want some: %t", tt.name, n, tt.checked)
			}
		})
	}
}

// Endpoints behind the gateways of a network are for those to check. The gateways
// themselves are checked.
func TestNoChecksBehindGatewaysOfNetworks(t *testing.T) {
	within(t, registry.Mesh{Network: "west"}, func(w *world) {
		w.registry.NewTransport = func(_ *registry.Service, ep *registry.Endpoint, g *registry.Gateway) (tunnel.Transport, error) {
			if g == nil {
				return nil, nil
			}
			return behind{w, ep.String()}, nil
		}
		s := service("a.test", tcp, "10.1.0.1/443", "10.2.0.1/443")
		s.Ports = []uint16{443}
		s.Endpoints[1].Network = "east"
		table, err := w.registry.Merge(registry.Snapshot{Services: []*registry.Service{s}, Networks: []registry.Network{
			{Name: "west"},
			{Name: "east", Gateways: []registry.Gateway{{Address: registry.Endpoint{Addr: netip.MustParseAddr("192.0.2.9"), Port: 443}, Transports: registry.HopsBy("connect"), Check: tcp}}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		w.registry.Swap(table)
		after(5 * time.Second)
		want := map[string]bool{"10.1.0.1:443": true, "192.0.2.9:443": true}
		w.mu.Lock()
		defer w.mu.Unlock()
		for key, n := range w.dials {
			if !want[key] {
				t.Errorf("%s was dialed %d times", key, n)
			}
			delete(want, key)
		}
		if len(want) > 0 {
			t.Errorf("%v were not dialed", want)
		}
	})
}
