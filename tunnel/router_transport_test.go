package tunnel_test

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"

	"culvert.dev/tunnel"
)

// A fakeTransport refuses every dial, and keeps what it was asked for. It may dial
// named addresses alone.
type fakeTransport struct {
	got tunnel.Endpoint
	req *tunnel.Request
	err error // errRefused where it is nil
}

func (d *fakeTransport) Dial(_ context.Context, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	d.got, d.req = *ep, req
	if d.err != nil {
		return nil, d.err
	}
	return nil, errRefused
}

func (*fakeTransport) Check(ep *tunnel.Endpoint) error {
	if ep.Named {
		return nil
	}
	return tunnel.Refusef(tunnel.Prohibited, "not named")
}

func (*fakeTransport) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }

// serveRoute has a Router serve one request, which has the route and is refused.
func serveRoute(t *testing.T, router *tunnel.Router, route tunnel.Route) *tunnel.Request {
	t.Helper()
	router.Relay = &tunnel.Relay{}
	defer router.Relay.Close()
	router.Resolver = resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) { return route, nil })
	req := (&asker{}).request()
	router.ServeTunnel(t.Context(), req)
	return req
}

// TestRouterAsksTheEndpointsTransport checks that each endpoint is dialed by its own
// Transport, which is given the request, and others by the Router's Dialer.
func TestRouterAsksTheEndpointsTransport(t *testing.T) {
	one, two, other := &fakeTransport{}, &fakeTransport{}, &endpointDialer{}
	eps := endpoints("127.0.0.1:80", "127.0.0.1:81", "127.0.0.1:82")
	eps[0].Transport, eps[2].Transport = one, two
	req := serveRoute(t, &tunnel.Router{Dialer: other}, tunnel.Route{Endpoints: eps})
	if one.got != eps[0] || other.got != eps[1] || two.got != eps[2] || one.req != req || two.req != req {
		t.Errorf("dialed %v and %v by their transports and %v by the Router's dialer, want %v", one.got, two.got, other.got, eps)
	}
}

// TestRouterStopsAtFinalRefusal checks that no other endpoint is tried once a next
// hop has refused the request itself.
func TestRouterStopsAtFinalRefusal(t *testing.T) {
	for _, row := range []struct {
		err  error
		next bool
	}{
		{tunnel.HopRefusedf(tunnel.NoRoute, "no such service"), false},
		{tunnel.HopRefusedf(tunnel.Denied, "not for you"), false},
		{tunnel.HopRefusedf(tunnel.DialFailed, "its endpoint is down"), true},
		{tunnel.HopRefusedf(tunnel.NoAuth, "the token is wrong"), true},
		{tunnel.Refusef(tunnel.Prohibited, "our own guard refuses the address"), true},
		{tunnel.Refusef(tunnel.Loop, "our own guard refuses the address"), true},
	} {
		first, second := &fakeTransport{err: row.err}, &fakeTransport{}
		eps := endpoints("192.0.2.1:80", "192.0.2.2:80")
		eps[0].Transport, eps[1].Transport = first, second
		serveRoute(t, &tunnel.Router{}, tunnel.Route{Endpoints: eps})
		if first.req == nil || (second.req != nil) != row.next {
			t.Errorf("after %q: the next endpoint was tried: %t, want %t", row.err, second.req != nil, row.next)
		}
	}
}

// TestForecastAsksTheEndpointsTransport checks that what may be dialed is asked of
// the Transport that would.
func TestForecastAsksTheEndpointsTransport(t *testing.T) {
	eps := endpoints("192.0.2.1:80")
	eps[0].Transport, eps[0].Named = &fakeTransport{}, false
	router := &tunnel.Router{Dialer: &fakeDialer{}, Resolver: resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
		return tunnel.Route{Endpoints: eps}, nil
	})}
	_, attempts, err := router.Forecast(t.Context(), (&asker{}).request())
	if tunnel.ReasonOf(err) != tunnel.Prohibited || len(attempts) != 1 || tunnel.ReasonOf(attempts[0].Err) != tunnel.Prohibited {
		t.Errorf("got %v, attempts %+v; want it prohibited", err, attempts)
	}
}

// TestLogNamesTheNextHop checks that the log has the next hop that an endpoint is
// behind, and the endpoint itself where there is none.
func TestLogNamesTheNextHop(t *testing.T) {
	for key, want := range map[string]string{"": "192.0.2.9:443", "192.0.2.1:443": "192.0.2.1:443", "gw.test:443": "gw.test:443", "[2001:db8::1]:443": "[2001:db8::1]:443",
		"192.0.2.9:443 behind hbone 192.0.2.1:15008": "192.0.2.9:443"} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
				ep := tunnel.Endpoint{Addr: netip.MustParseAddrPort("192.0.2.9:443"), HealthKey: key}
				return tunnel.Route{Endpoints: []tunnel.Endpoint{ep}}, nil
			}))
			a := &asker{}
			b.ServeTunnel(t.Context(), a.request())
			_ = a.client.Close()
			b.dialer.closeAll()
			synctest.Wait()
			b.stop()
			if got := b.last(t).Endpoint; got != want {
				t.Errorf("with the health key %q: got endpoint %q, want %q", key, got, want)
			}
		})
	}
}
