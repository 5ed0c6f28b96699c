package tunnel_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// chosenEndpoints is a Balancer that is told what was chosen.
type chosenEndpoints []string

func (c *chosenEndpoints) Chosen(_ *tunnel.Request, ep *tunnel.Endpoint) {
	*c = append(*c, ep.Addr.String())
}

// TestEndpointLoad: an endpoint's load counts a dial from its beginning, and a tunnel up
// to its end, whatever becomes of either.
func TestEndpointLoad(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(*bench, *asker, *tunnel.Request)
		dialing int64 // the load of the second endpoint while that is dialed
		stands  int64 // and after it
	}{
		"carried":                {dialing: 1, stands: 1},
		"carried, of a stranger": {change: func(_ *bench, _ *asker, req *tunnel.Request) { req.Peer = tunnel.Peer{} }, dialing: 1, stands: 1},
		"the client has left":    {change: func(_ *bench, a *asker, _ *tunnel.Request) { a.broken = errors.New("gone") }, dialing: 1},
		"the dial panics": {dialing: 1, change: func(b *bench, _ *asker, _ *tunnel.Request) {
			dialing := b.dialer.answers["192.0.2.2:80"].(func())
			b.dialer.answers["192.0.2.2:80"] = func() { dialing(); panic("a fault") }
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var loads [2]tunnel.EndpointLoad
				var chosen chosenEndpoints
				b := newBench(t, resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
					eps := endpoints("192.0.2.1:80", "192.0.2.2:80")
					for i := range eps {
						eps[i].Load = &loads[i]
					}
					return tunnel.Route{Service: "svc", Endpoints: eps, Balancer: &chosen}, nil
				}))
				defer b.stop()
				b.dialer.answers["192.0.2.1:80"] = errRefused
				b.dialer.answers["192.0.2.2:80"] = func() {
					if one, two := loads[0].Tunnels(), loads[1].Tunnels(); one != 0 || two != c.dialing {
						t.Errorf("while the second is dialed: loads %d and %d, want 0 and %d", one, two, c.dialing)
					}
				}
				a := &asker{}
				req := a.request()
				if c.change != nil {
					c.change(b, a, req)
				}
				func() {
					defer func() { _ = recover() }() // as the Server does
					b.ServeTunnel(t.Context(), req)
				}()
				if got := loads[1].Tunnels(); got != c.stands {
					t.Errorf("load %d once it is dialed, want %d", got, c.stands)
				}
				if len(chosen) > 1 || len(chosen) == 1 && chosen[0] != "192.0.2.2:80" || c.stands == 1 && len(chosen) == 0 {
					t.Errorf("chosen are %v, want the second endpoint once", chosen)
				}
				_ = a.client.Close()
				b.dialer.closeAll()
				time.Sleep(time.Second) // of the bubble: the relay waits for a moment where both ends close
				synctest.Wait()
				if one, two := loads[0].Tunnels(), loads[1].Tunnels(); one != 0 || two != 0 {
					t.Errorf("loads %d and %d at the end, want none", one, two)
				}
			})
		})
	}
}

// TestLoadOfRefusedPlaintext: a tunnel that is dialed and then refused counts no more.
func TestLoadOfRefusedPlaintext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var load tunnel.EndpointLoad
		b := newBench(t, resolverFunc(func(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
			route, err := unencrypted(ctx, req)
			route.Endpoints[0].Load = &load
			return route, err
		}))
		defer b.stop()
		a := &asker{}
		req := a.request()
		go func() { _, _ = a.client.Write([]byte("GET / HTTP/1.1\r\n\r\n")) }()
		b.ServeTunnel(t.Context(), req)
		if o := b.last(t); o.Reason != tunnel.Insecure || load.Tunnels() != 0 {
			t.Errorf("outcome %s, load %d; want %s and none", o.Reason, load.Tunnels(), tunnel.Insecure)
		}
	})
}

// TestLoadOfSessions counts a session of datagrams up to its end, also where nothing was
// ever carried.
func TestLoadOfSessions(t *testing.T) {
	var load tunnel.EndpointLoad
	r := newSessionRig(t, "192.0.2.1:53")
	plain := r.Resolver
	r.Resolver = resolverFunc(func(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
		route, err := plain.Resolve(ctx, req)
		route.Endpoints[0].Load = &load
		return route, err
	})
	for _, carried := range []bool{false, true} {
		s, err := r.Open(t.Context(), r.request())
		if err != nil {
			t.Fatal(err)
		}
		if carried {
			s.Carry(&fakeCarrier{})
		}
		if got := load.Tunnels(); got != 1 {
			t.Errorf("carried %t: load %d of an open session, want 1", carried, got)
		}
		_ = s.Conn.Close()
		for range 2 {
			s.End(tunnel.End{Reason: tunnel.Idle})
		}
		if got := load.Tunnels(); got != 0 {
			t.Errorf("carried %t: load %d after its end, want 0", carried, got)
		}
	}
}
