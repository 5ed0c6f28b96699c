package registry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"

	"culvert.dev/tunnel"
)

// nowhere is a Transport that leads there.
type nowhere struct{}

func (nowhere) Dial(context.Context, *tunnel.Endpoint, *tunnel.Request) (net.Conn, error) {
	return nil, errors.New("nowhere")
}
func (nowhere) Check(*tunnel.Endpoint) error { return nil }
func (nowhere) Info() tunnel.TransportInfo   { return tunnel.TransportInfo{} }

// merge makes a table of services by r, and has r serve it.
func merge(t testing.TB, r *Registry, services ...*Service) {
	t.Helper()
	tab, err := r.Merge(Snapshot{Services: services})
	if err != nil {
		t.Fatal(err)
	}
	r.Swap(tab)
}

// A service behind other gateways: its endpoints are names and addresses
// there, which are neither looked up nor remembered here.
func TestVia(t *testing.T) {
	hops := []Hop{{Proto: "connect", Addresses: []string{"gw.test:443"}}}
	rows := []struct {
		ports []uint16
		specs []string
		port  uint16 // asked for; 0 as SNI does
		want  string
	}{
		{[]uint16{443}, nil, 443, "[a.test:443]"},
		{[]uint16{443}, nil, 0, "[a.test:443]"},
		{nil, nil, 8443, "[a.test:8443]"},
		{[]uint16{443}, []string{"inner.test:8443", "inner.test", "10.0.0.1:1", "[2001:db8::1]"}, 443, "[inner.test:8443 inner.test:443 10.0.0.1:1 [2001:db8::1]:443]"},
	}
	for _, row := range rows {
		s := service(t, "a.test", row.ports...)
		s.Endpoints, s.Via = nil, hops
		for _, spec := range row.specs {
			ep := endpoints(spec)[0]
			if spec == "[2001:db8::1]" {
				ep = endpoints("[2001:db8::1]:1")[0]
				ep.Port = 0
			}
			s.Endpoints = append(s.Endpoints, ep)
		}
		a := &answers{}
		r := &Registry{Lookup: a.lookup, NewTransport: func(s *Service, _ *Endpoint, _ *Gateway) (tunnel.Transport, error) {
			got := s.Via
			if len(got) != 1 || got[0].Addresses[0] != "gw.test:443" {
				t.Errorf("asked for the way by %+v, want %+v", got, hops)
			}
			return nowhere{}, nil
		}}
		merge(t, r, s)
		route, err := r.Resolve(t.Context(), byName("a.test", row.port, 443))
		if err != nil {
			t.Errorf("%v: %v", row.specs, err)
			continue
		}
		if got := fmt.Sprint(route.Endpoints); got != row.want || route.Report != nil {
			t.Errorf("%v: got %s, reported: %t; want %s", row.specs, got, route.Report != nil, row.want)
		}
		for _, ep := range route.Endpoints {
			if ep.Transport != (nowhere{}) {
				t.Errorf("%v: %s is reached by %T, want what NewTransport made", row.specs, ep, ep.Transport)
			}
		}
		if len(a.asked) > 0 {
			t.Errorf("%v: %v were looked up", row.specs, a.asked)
		}
	}
}

func TestViaRefuses(t *testing.T) {
	s := service(t, "a.test", 443)
	s.Endpoints, s.Via = endpoints("10.0.0.1:443"), []Hop{{Proto: "connect", Addresses: []string{"gw.test:443"}}}
	portless := service(t, "b.test")
	portless.Endpoints, portless.Via = nil, s.Via
	r := &Registry{}
	r.Swap(table(t, s, portless))
	ask := func(req *tunnel.Request) tunnel.Reason {
		_, err := r.Resolve(t.Context(), req)
		return tunnel.ReasonOf(err)
	}
	if got := ask(byName("a.test", 443, 443)); got != tunnel.Unsupported {
		t.Errorf("without a NewTransport: got %s, want %s", got, tunnel.Unsupported)
	}
	r.NewTransport = func(*Service, *Endpoint, *Gateway) (tunnel.Transport, error) {
		return nil, errors.New("no such carrier")
	}
	merge(t, r, s, portless)
	if got := ask(byName("a.test", 443, 443)); got != tunnel.Internal {
		t.Errorf("a NewTransport that fails: got %s, want %s", got, tunnel.Internal)
	}
	r.NewTransport = func(*Service, *Endpoint, *Gateway) (tunnel.Transport, error) { return nowhere{}, nil }
	merge(t, r, s, portless)
	if got := ask(byName("b.test", 0, 0)); got != tunnel.NoEndpoint {
		t.Errorf("without a port: got %s, want %s", got, tunnel.NoEndpoint)
	}
	// The address is one of the far side, and another's here.
	if got := ask(&tunnel.Request{Addr: s.Endpoints[0].Addr, Port: 443}); got != tunnel.NoRoute {
		t.Errorf("by the address of an endpoint there: got %s, want %s", got, tunnel.NoRoute)
	}
}
