package tunnel_test

import (
	"context"
	"net"
	"net/netip"
	"testing"

	"culvert.dev/tunnel"
)

// A requestDialer is an endpointDialer that is told of requests.
type requestDialer struct {
	endpointDialer
	req *tunnel.Request
}

func (d *requestDialer) DialRequest(_ context.Context, ep tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	d.got, d.req = ep, req
	return nil, errRefused
}

func (*requestDialer) Check(ep tunnel.Endpoint) error {
	if ep.Named {
		return nil
	}
	return tunnel.Refusef(tunnel.Prohibited, "not named")
}

// TestRouterTellsOfTheRequest checks that a dialer that can is given the
// request it dials for, be it the Router's or the route's.
func TestRouterTellsOfTheRequest(t *testing.T) {
	want := tunnel.Endpoint{Addr: netip.MustParseAddrPort("127.0.0.1:80"), Named: true}
	for name, ofRoute := range map[string]bool{"the router's": false, "the route's": true} {
		t.Run(name, func(t *testing.T) {
			d, other := &requestDialer{}, &requestDialer{}
			relay := &tunnel.Relay{}
			defer relay.Close()
			router := &tunnel.Router{Dialer: d, Relay: relay}
			route := tunnel.Route{Endpoints: []tunnel.Endpoint{want}}
			if ofRoute {
				router.Dialer, route.Dialer = other, d
			}
			router.Resolver = resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) { return route, nil })
			req := (&asker{}).request()
			router.ServeTunnel(t.Context(), req)
			if d.got != want || d.req != req || other.req != nil {
				t.Errorf("dialed %+v for %p, and the other one for %p; want %+v for %p", d.got, d.req, other.req, want, req)
			}
		})
	}
}

// TestForecastAsksTheRoutesDialer checks that what may be dialed is asked of
// the dialer that would.
func TestForecastAsksTheRoutesDialer(t *testing.T) {
	route := tunnel.Route{Endpoints: endpoints("192.0.2.1:80"), Dialer: &requestDialer{}}
	router := &tunnel.Router{Dialer: &fakeDialer{}, Resolver: resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
		return route, nil
	})}
	_, attempts, err := router.Forecast(t.Context(), (&asker{}).request())
	if tunnel.ReasonOf(err) != tunnel.Prohibited || len(attempts) != 1 || tunnel.ReasonOf(attempts[0].Err) != tunnel.Prohibited {
		t.Errorf("got %v, attempts %+v; want it prohibited", err, attempts)
	}
}
