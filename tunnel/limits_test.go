package tunnel_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// limitedTo is routeTo with limits that are read for every request. Every second request
// comes by a rule.
func limitedTo(limits *tunnel.ServiceLimits, addrs ...string) resolverFunc {
	n := 0
	return func(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
		route, err := routeTo(addrs...)(ctx, req)
		now := *limits
		route.Limits = &now
		if n++; n%2 == 0 {
			route.Service, route.Backend = "rule", "svc"
		}
		return route, err
	}
}

// TestServiceLimit checks that a service has no more connections than its limit, by
// whatever route they come, that the next one is refused as any overload is, and that a
// change of the limit counts the connections from before it.
func TestServiceLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limits := tunnel.ServiceLimits{}
		b := newBench(t, limitedTo(&limits, "192.0.2.1:80"))
		ask := func() (a *asker, err error) {
			a = &asker{}
			b.ServeTunnel(t.Context(), a.request())
			if len(a.refused) > 0 {
				return a, a.refused[0]
			}
			return a, nil
		}
		var open []*asker
		for range 3 {
			a, err := ask()
			if err != nil {
				t.Fatal(err)
			}
			open = append(open, a)
		}
		limits.Connections = 3
		for i := range 4 {
			_, err := ask()
			if tunnel.ReasonOf(err) != tunnel.Overload || !strings.Contains(err.Error(), "service svc: limits.connections: 3 connections are open or being dialed, the limit") {
				t.Errorf("request %d over the limit: %v, want %s", i, err, tunnel.Overload)
			}
			if _, _, err := b.Forecast(t.Context(), (&asker{}).request()); tunnel.ReasonOf(err) != tunnel.Overload {
				t.Errorf("Forecast: %v, want %s", err, tunnel.Overload)
			}
		}
		if n := b.Relay.Connections("svc"); n != 3 {
			t.Errorf("the service has %d connections, want 3", n)
		}
		if len(b.dialer.calls()) != 3 {
			t.Errorf("dialed %v, want no dial for what is refused", b.dialer.calls())
		}
		_ = open[0].client.Close()
		_ = b.dialer.ends()[0].Close()
		synctest.Wait()
		if _, _, err := b.Forecast(t.Context(), (&asker{}).request()); err != nil {
			t.Errorf("Forecast with a free place: %v", err)
		}
		a, err := ask()
		if err != nil {
			t.Errorf("after one has ended: %v", err)
		}
		open[0] = a
		b.dialer.answers["192.0.2.1:80"] = errRefused
		limits = tunnel.ServiceLimits{Connections: 4, NewPerSecond: 2}
		for i, want := range []tunnel.Reason{tunnel.DialFailed, tunnel.DialFailed, tunnel.Overload} {
			if _, err := ask(); tunnel.ReasonOf(err) != want {
				t.Errorf("new connection %d of 2 a second: %v, want %s", i, err, want)
			}
		}
		time.Sleep(time.Second)
		if _, err := ask(); tunnel.ReasonOf(err) != tunnel.DialFailed {
			t.Errorf("a second later: %v, want %s", err, tunnel.DialFailed)
		}
		for _, a := range open {
			_ = a.client.Close()
		}
		b.stop()
	})
}

// TestServiceLimitOfSessions checks that sessions of datagrams count as connections do.
func TestServiceLimitOfSessions(t *testing.T) {
	r := newSessionRig(t)
	r.Limits.MaxTunnels = 0
	r.Resolver = limitedTo(&tunnel.ServiceLimits{Connections: 2}, "192.0.2.1:53")
	var all []*tunnel.Session
	for range 2 {
		s, err := r.Open(t.Context(), r.request())
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	if _, err := r.Open(t.Context(), r.request()); tunnel.ReasonOf(err) != tunnel.Overload {
		t.Errorf("a third one of two: %v, want %s", err, tunnel.Overload)
	}
	for _, s := range all {
		_ = s.Conn.Close()
		for range 2 { // the second time does nothing
			s.End(tunnel.End{Reason: tunnel.Idle})
		}
		if next, err := r.Open(t.Context(), r.request()); err != nil {
			t.Errorf("after one has ended: %v", err)
		} else {
			_ = next.Conn.Close()
			next.End(tunnel.End{Reason: tunnel.Idle})
		}
	}
}
