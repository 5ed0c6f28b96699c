package tunnel_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A fakeCarrier carries nothing.
type fakeCarrier struct {
	end    func(tunnel.Reason)
	killed []tunnel.Reason
	moved  time.Time
}

func (c *fakeCarrier) Progress() (in, out int64, moved time.Time) { return 3, 4, c.moved }
func (c *fakeCarrier) Kill(why tunnel.Reason) {
	c.killed = append(c.killed, why)
	c.end(why)
}

// A sessionRig is a Router for datagrams.
type sessionRig struct {
	tunnel.Router
	dialer fakeDialer

	mu       sync.Mutex // guards what follows
	outcomes []*tunnel.Outcome
	reports  []error
}

func newSessionRig(t *testing.T, addrs ...string) *sessionRig {
	r := &sessionRig{}
	r.Router = tunnel.Router{
		Relay: &tunnel.Relay{}, Budget: &tunnel.Budget{Limit: 100}, Limits: tunnel.Limits{MaxTunnels: 1},
		Resolver: resolverFunc(func(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
			route, err := routeTo(addrs...)(ctx, req)
			route.Report = func(_ tunnel.Endpoint, err error) { r.reports = append(r.reports, err) }
			return route, err
		}),
		Observe: func(o *tunnel.Outcome) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.outcomes = append(r.outcomes, o)
		},
	}
	t.Cleanup(func() {
		r.dialer.closeAll()
		if err := r.Relay.Close(); err != nil {
			t.Error(err)
		}
		if n := r.Budget.Used(); n != 0 {
			t.Errorf("%d descriptors are taken at the end", n)
		}
		if n, counted := r.Relay.Open(), r.Relay.Counted(); n != 0 || counted != 0 {
			t.Errorf("%d open at the end, and %d connections of services", n, counted)
		}
	})
	return r
}

func (r *sessionRig) request() *tunnel.Request {
	return &tunnel.Request{
		Proto: "udp", Listener: "udp://:53", Name: tunnel.MustParseName("svc.example"), Port: 53,
		Source: netip.MustParseAddrPort("198.51.100.7:1000"), Datagrams: &r.dialer,
	}
}

func TestSessionIsListedAndEndedOnce(t *testing.T) {
	r := newSessionRig(t, "192.0.2.1:53")
	s, err := r.Open(t.Context(), r.request())
	if err != nil {
		t.Fatal(err)
	}
	if len(r.reports) != 0 {
		t.Errorf("the health of the endpoint hears %v of a socket that has said nothing", r.reports)
	}
	c := &fakeCarrier{moved: time.Now().Add(-time.Minute)}
	c.end = func(why tunnel.Reason) {
		_ = s.Conn.Close()
		for range 2 {
			s.End(tunnel.End{Reason: why, In: 3, Out: 4})
		}
	}
	s.Carry(c)
	if _, err := r.Open(t.Context(), r.request()); tunnel.ReasonOf(err) != tunnel.Overload {
		t.Errorf("a second one of one: %v, want %s", err, tunnel.Overload)
	}
	var id uint64
	for l := range r.Relay.List() {
		id = l.ID
		if l.Proto != "udp" || l.Target != "svc.example:53" || l.Endpoint != "192.0.2.1:53" || l.In != 3 || l.Out != 4 || l.Quiet < time.Minute || l.HalfClosed {
			t.Errorf("listed: %+v", l)
		}
	}
	if id == 0 || r.Relay.Open() != 1 {
		t.Fatalf("id %d, %d open", id, r.Relay.Open())
	}
	if !r.Relay.End(id, tunnel.Killed) || r.Relay.End(id, tunnel.Killed) {
		t.Error("End: want true and then false")
	}
	if len(r.outcomes) != 2 { // the refused one's is the first
		t.Fatalf("%d outcomes, want 2", len(r.outcomes))
	}
	o := r.outcomes[1]
	if o.Reason != tunnel.Killed || o.BytesIn != 3 || o.BytesOut != 4 || o.Endpoint != "192.0.2.1:53" || !o.Carried() || o.ID != id {
		t.Errorf("outcome %+v", o)
	}
	s.Failed(errors.New("port unreachable"))
	if len(r.reports) != 1 || tunnel.ReasonOf(r.reports[0]) != tunnel.DialFailed {
		t.Errorf("the health of the endpoint hears %v, want one failed dial", r.reports)
	}
}

func TestSessionIsAbortedWithTheTunnels(t *testing.T) {
	r := newSessionRig(t, "192.0.2.1:53")
	s, err := r.Open(t.Context(), r.request())
	if err != nil {
		t.Fatal(err)
	}
	c := &fakeCarrier{end: func(why tunnel.Reason) { _ = s.Conn.Close(); s.End(tunnel.End{Reason: why}) }}
	s.Carry(c)
	r.Relay.Abort(t.Context(), tunnel.Drain, 0)
	if err := r.Relay.Wait(t.Context()); err != nil || len(c.killed) != 1 || c.killed[0] != tunnel.Drain {
		t.Errorf("Wait = %v, killed %v, want once for %s", err, c.killed, tunnel.Drain)
	}
}

func TestSessionIsEndedByItsRecord(t *testing.T) {
	r := newSessionRig(t, "192.0.2.1:53")
	s, err := r.Open(t.Context(), r.request())
	if err != nil {
		t.Fatal(err)
	}
	c := &fakeCarrier{end: func(why tunnel.Reason) { _ = s.Conn.Close(); s.End(tunnel.End{Reason: why}) }}
	s.Carry(c)
	for _, want := range []int{0, 1, 0} {
		got := r.Relay.EndRecords(tunnel.Killed, func(rec tunnel.Record) bool {
			var req tunnel.Request
			_, ok := rec.Request(&req)
			return ok && want == 1 && req.Target() == "svc.example:53"
		})
		if got != want || r.Relay.Open() != 1-min(len(c.killed), 1) {
			t.Errorf("ended %d, %d open, want %d ended", got, r.Relay.Open(), want)
		}
	}
}

func TestSessionGivenUpBeforeItIsCarried(t *testing.T) {
	r := newSessionRig(t, "192.0.2.1:53")
	s, err := r.Open(t.Context(), r.request())
	if err != nil {
		t.Fatal(err)
	}
	_ = s.Conn.Close()
	s.End(tunnel.End{Reason: tunnel.Drain})
	if len(r.outcomes) != 1 || r.outcomes[0].Reason != tunnel.Drain {
		t.Errorf("outcomes %+v", r.outcomes)
	}
}

func TestSessionRefusals(t *testing.T) {
	r := newSessionRig(t)
	if _, err := r.Open(t.Context(), r.request()); tunnel.ReasonOf(err) != tunnel.NoEndpoint {
		t.Errorf("without endpoints: %v", err)
	}
	r = newSessionRig(t, "192.0.2.1:53")
	r.Resolver = resolverFunc(func(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
		route, err := routeTo("192.0.2.1:53")(ctx, req)
		tunneltest.WithTransport(route.Endpoints, tunneltest.Transport{Dialer: &fakeDialer{}})
		return route, err
	})
	if _, err := r.Open(t.Context(), r.request()); tunnel.ReasonOf(err) != tunnel.Unsupported {
		t.Errorf("through a dialer of streams: %v", err)
	}
	if len(r.outcomes) != 1 || r.outcomes[0].Reason != tunnel.Unsupported || r.outcomes[0].Service != "svc" {
		t.Errorf("outcomes %+v", r.outcomes)
	}
	if n := len(r.dialer.calls()); n != 0 {
		t.Errorf("%d dials", n)
	}
}

// A listener of UDP is no loop for TCP at the same address, nor the other way.
func TestGuardTellsUDPFromTCP(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:443")
	var tcp, udp tunnel.Guard
	tcp.OwnListener(net.TCPAddrFromAddrPort(at))
	udp.OwnListener(net.UDPAddrFromAddrPort(at))
	for _, c := range []struct {
		name string
		err  error
		want tunnel.Reason
	}{
		{"TCP to a listener of TCP", tcp.Check(at, true), tunnel.Loop},
		{"UDP to a listener of TCP", tcp.CheckUDP(at, true), tunnel.Done},
		{"TCP to a listener of UDP", udp.Check(at, true), tunnel.Done},
		{"UDP to a listener of UDP", udp.CheckUDP(at, true), tunnel.Loop},
		{"UDP to loopback that nobody named", udp.CheckUDP(netip.MustParseAddrPort("127.0.0.1:53"), false), tunnel.Prohibited},
	} {
		if got := tunnel.ReasonOf(c.err); got != c.want {
			t.Errorf("%s: %v, want %s", c.name, c.err, c.want)
		}
	}
}
