package udp

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func name(t testing.TB, s string) tunnel.Name {
	t.Helper()
	n, err := tunnel.ParseName(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// plainRig is one for the service svc.test, which is svc.
func plainRig(t testing.TB, change func(*Server)) (r *rig, svc *peer) {
	t.Helper()
	r, svc = newRig(t, Listener{Service: name(t, "svc.test"), Port: 53}, change), newPeer(t)
	r.route("svc.test", svc.addr())
	return r, svc
}

func TestDatagramsGoBothWays(t *testing.T) {
	r, svc := plainRig(t, func(s *Server) { s.Limits.UDPIdleTimeout = time.Second })
	client := newPeer(t)
	big := bytes.Repeat([]byte("x"), 60_000)
	var from netip.AddrPort
	for _, b := range [][]byte{[]byte("one"), {}, big} {
		client.say(r.addr, b)
		from = svc.hear(b)
		svc.say(from, b)
		if gw := client.hear(b); gw != r.addr {
			t.Fatalf("the answer is from %s, want %s", gw, r.addr)
		}
	}
	o := r.outcome(1, tunnel.Idle)
	if o.Proto != "udp" || o.Source != client.addr() || o.Target != "svc.test:53" || o.Service != "svc.test" ||
		o.Endpoint != svc.addr().String() || o.BytesIn != 60_003 || o.BytesOut != 60_003 || !o.Carried() || o.ID == 0 {
		t.Errorf("outcome %+v", o)
	}
	if n := len(r.told()); n != 1 {
		t.Errorf("%d outcomes, want one", n)
	}
}

func TestEachClientHasItsOwnSocket(t *testing.T) {
	r, svc := plainRig(t, nil)
	seen := map[netip.AddrPort]*peer{}
	for i := range 20 {
		client := newPeer(t)
		client.say(r.addr, fmt.Append(nil, "hello ", i))
		seen[svc.hear(fmt.Append(nil, "hello ", i))] = client
	}
	if len(seen) != 20 {
		t.Fatalf("the service sees %d clients, want 20", len(seen))
	}
	for from, client := range seen {
		svc.say(from, []byte(from.String()))
		client.hear([]byte(from.String()))
	}
	if live := r.relay.Open(); live != 20 {
		t.Errorf("%d open, want 20", live)
	}
}

// What comes before the route is known waits, in order.
func TestFirstDatagramsAreKept(t *testing.T) {
	r, svc := plainRig(t, nil)
	client := newPeer(t)
	for i := range 10 {
		client.say(r.addr, []byte{byte(i)})
	}
	for i := range 10 {
		svc.hear([]byte{byte(i)})
	}
}

func TestSessionsAreListedAndEnded(t *testing.T) {
	r, svc := plainRig(t, nil)
	client := newPeer(t)
	client.say(r.addr, []byte("ping"))
	svc.say(svc.hear([]byte("ping")), []byte("pong!"))
	client.hear([]byte("pong!"))
	var id uint64
	testnet.Eventually(t, patience, func() bool {
		for l := range r.relay.List() {
			id = l.ID
			return l.Proto == "udp" && l.Source == client.addr() && l.In == 4 && l.Out == 5 && l.Target == "svc.test:53" && l.Quiet < time.Minute
		}
		return false
	}, "the counts")

	if !r.relay.End(id, tunnel.Killed) {
		t.Fatal("End = false")
	}
	r.outcome(1, tunnel.Killed)
	client.say(r.addr, []byte("again"))
	svc.hear([]byte("again"))
	r.relay.Abort(t.Context(), tunnel.Drain, 0)
	r.outcome(2, tunnel.Drain)
	if n := r.relay.Open(); n != 0 {
		t.Errorf("%d open", n)
	}
}

func TestDrainKeepsWhatIsOpen(t *testing.T) {
	r, svc := plainRig(t, nil)
	old, late := newPeer(t), newPeer(t)
	old.say(r.addr, []byte("before"))
	from := svc.hear([]byte("before"))
	r.s.Drain()
	late.say(r.addr, []byte("late"))
	if o := r.outcome(1, tunnel.Drain); o.Source != late.addr() {
		t.Errorf("drain is told of %s, want %s", o.Source, late.addr())
	}
	old.say(r.addr, []byte("after"))
	svc.hear([]byte("after"))
	svc.say(from, []byte("answer"))
	old.hear([]byte("answer"))
}

// A service whose port is closed: the kernel says so, the session ends, and the
// next one may get another endpoint.
func TestUnreachableServiceEndsTheSession(t *testing.T) {
	r, svc := plainRig(t, nil)
	gone := newPeer(t)
	_ = gone.Close()
	r.route("svc.test", gone.addr(), svc.addr())
	client := newPeer(t)
	client.say(r.addr, []byte("one"))
	o := r.outcome(1, tunnel.DialFailed)
	if !strings.Contains(fmt.Sprint(o.Err), "refused") || o.Endpoint != gone.addr().String() {
		t.Errorf("outcome %+v", o)
	}
	if err := <-r.health; tunnel.ReasonOf(err) != tunnel.DialFailed || !strings.Contains(err.Error(), gone.addr().String()) {
		t.Errorf("health hears %v, want a failed dial of %s", err, gone.addr())
	}
	client.say(r.addr, []byte("two"))
	svc.say(svc.hear([]byte("two")), []byte("yes"))
	client.hear([]byte("yes"))
	_ = svc.Close()
	testnet.Eventually(t, patience, func() bool { client.say(r.addr, []byte("three")); return len(r.told()) > 1 }, "the end")
	r.outcome(2, tunnel.Reset)
}

func TestRefusals(t *testing.T) {
	t.Run("nobody has the name", func(t *testing.T) {
		r, svc := newRig(t, Listener{Service: name(t, "svc.test")}, nil), newPeer(t)
		client := newPeer(t)
		for range 20 {
			client.say(r.addr, []byte("ping"))
		}
		r.outcome(1, tunnel.NoRoute)
		client.silent()
		svc.silent()
		if n := len(r.told()); n != 1 {
			t.Errorf("%d outcomes of one client at once, want one", n)
		}
	})
	for _, why := range []tunnel.Reason{tunnel.NotExposed, tunnel.NoEndpoint} {
		t.Run(string(why), func(t *testing.T) {
			r, svc := plainRig(t, func(s *Server) { s.Router.Resolver = refusing{why} })
			client := newPeer(t)
			client.say(r.addr, []byte("ping"))
			r.outcome(1, why)
			client.silent()
			svc.silent()
		})
	}
	t.Run("an address that must not be dialed", func(t *testing.T) {
		r, svc := plainRig(t, nil)
		r.mu.Lock()
		r.routes["svc.test"] = []tunnel.Endpoint{{Addr: svc.addr()}} // loopback, which nobody named
		r.mu.Unlock()
		newPeer(t).say(r.addr, []byte("ping"))
		r.outcome(1, tunnel.Prohibited)
		svc.silent()
	})
	t.Run("our own listener", func(t *testing.T) {
		r, _ := plainRig(t, nil)
		r.route("svc.test", r.addr)
		newPeer(t).say(r.addr, []byte("ping"))
		r.outcome(1, tunnel.Loop)
	})
	t.Run("a way out that carries streams", func(t *testing.T) {
		r, svc := plainRig(t, func(s *Server) { s.Router.Resolver = throughDialer{s.Router.Resolver} })
		newPeer(t).say(r.addr, []byte("ping"))
		r.outcome(1, tunnel.Unsupported)
		svc.silent()
	})
	t.Run("a panic", func(t *testing.T) {
		r := newRig(t, Listener{Service: name(t, "panic.test")}, nil)
		r.route("panic.test", r.addr)
		newPeer(t).say(r.addr, []byte("ping"))
		r.outcome(1, tunnel.Internal)
	})
	t.Run("no descriptor", func(t *testing.T) {
		r, svc := plainRig(t, func(s *Server) { s.Router.Budget = &tunnel.Budget{Limit: 1} })
		newPeer(t).say(r.addr, []byte("ping"))
		r.outcome(1, tunnel.Overload)
		svc.silent()
	})
	t.Run("memory is short", func(t *testing.T) {
		b := &tunnel.Budget{Limit: 1000}
		r, svc := plainRig(t, func(s *Server) { s.Budget = b })
		b.SetPressure(tunnel.Short)
		newPeer(t).say(r.addr, []byte("ping"))
		r.outcome(1, tunnel.Overload)
		svc.silent()
	})
}

// refusing has a no for everybody.
type refusing struct{ why tunnel.Reason }

func (r refusing) Resolve(context.Context, *tunnel.Request) (tunnel.Route, error) {
	return tunnel.Route{}, tunnel.Refusef(r.why, "not for you")
}

// throughDialer gives every route a way out of its own.
type throughDialer struct{ tunnel.Resolver }

func (d throughDialer) Resolve(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
	route, err := d.Resolver.Resolve(ctx, req)
	tunneltest.WithTransport(route.Endpoints, tunneltest.Transport{Dialer: &tunnel.NetDialer{}})
	return route, err
}

func TestLimits(t *testing.T) {
	for _, c := range []struct {
		name   string
		limits tunnel.Limits
		text   string
	}{
		{"not proven, of a source", tunnel.Limits{MaxPendingPerClient: 3}, "nothing is proven"},
		{"open, of a source", tunnel.Limits{MaxConnectionsPerClient: 3}, "sessions open"},
		{"new, of a source", tunnel.Limits{ConnectionRatePerClient: 3}, "limits.connectionRatePerClient: 127.0.0.1 opened more than 3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, svc := plainRig(t, func(s *Server) { s.Limits = c.limits })
			for i := range 3 {
				newPeer(t).say(r.addr, []byte{byte(i)})
				svc.hear([]byte{byte(i)})
			}
			newPeer(t).say(r.addr, []byte("one more"))
			if o := r.outcome(1, tunnel.Overload); !strings.Contains(o.Err.Error(), c.text) {
				t.Errorf("%v, want %q", o.Err, c.text)
			}
			svc.silent()
		})
	}

	t.Run("not proven, in all", func(t *testing.T) {
		r, svc := plainRig(t, func(s *Server) { s.Limits = tunnel.Limits{MaxPendingConnections: 2} })
		first, second, proven := newPeer(t), newPeer(t), newPeer(t)
		proven.say(r.addr, []byte("p"))
		svc.say(svc.hear([]byte("p")), []byte("q"))
		proven.hear([]byte("q"))
		testnet.Eventually(t, patience, func() bool { return r.s.Stats().HalfOpen == 0 }, "proof")
		for _, p := range []*peer{first, second} {
			p.say(r.addr, []byte("x"))
			svc.hear([]byte("x"))
		}
		newPeer(t).say(r.addr, []byte("y"))
		svc.hear([]byte("y"))
		if o := r.outcome(1, tunnel.Overload); o.Source != first.addr() {
			t.Errorf("%s made room, want the oldest, %s", o.Source, first.addr())
		}
		proven.say(r.addr, []byte("z"))
		svc.hear([]byte("z"))
		if st := r.s.Stats(); st.HalfOpen != 2 || st.Sessions != 3 {
			t.Errorf("%+v, want 3 sessions, 2 half open", st)
		}
	})
}

// A socket for every address answers from the one that was asked.
func TestAnswersComeFromWhereTheyWereAsked(t *testing.T) {
	if runtime.GOOS != "linux" {
		return // elsewhere 127.0.0.2 is no address, and nothing is promised
	}
	for _, at := range []string{"0.0.0.0:0", "[::]:0"} {
		t.Run(at, func(t *testing.T) {
			conn := listen(t, at)
			r, svc := newRig(t, Listener{Conn: conn, Service: name(t, "svc.test")}, nil), newPeer(t)
			r.route("svc.test", svc.addr())
			for _, ip := range []string{"127.0.0.1", "127.0.0.2", "127.3.2.1"} {
				client := newPeer(t)
				to := netip.AddrPortFrom(netip.MustParseAddr(ip), r.addr.Port())
				client.say(to, []byte(ip))
				svc.say(svc.hear([]byte(ip)), []byte("yes"))
				if from := client.hear([]byte("yes")); from != to {
					t.Errorf("the answer is from %s, want %s", from, to)
				}
			}
		})
	}
}

func TestIPv6(t *testing.T) {
	conn := listen(t, "[::1]:0")
	r := newRig(t, Listener{Conn: conn, Service: name(t, "svc.test")}, nil)
	svc, client := &peer{listen(t, "[::1]:0"), t}, &peer{listen(t, "[::1]:0"), t}
	t.Cleanup(func() { _, _ = svc.Close(), client.Close() })
	r.route("svc.test", svc.addr())
	client.say(r.addr, []byte("ping"))
	svc.say(svc.hear([]byte("ping")), []byte("pong"))
	if from := client.hear([]byte("pong")); from != r.addr {
		t.Errorf("the answer is from %s, want %s", from, r.addr)
	}
}

// Who sends for long and never hears is served; who asks once is soon forgotten.
func TestHowLongASessionMayBeQuiet(t *testing.T) {
	minute := time.Minute
	for _, c := range []struct {
		name     string
		opening  Opening
		half     bool
		sent     int64
		answered bool
		moved    time.Duration
		idle     time.Duration
		want     time.Duration
	}{
		{"a question", nil, true, 1, false, 0, minute, briefIdleTimeout},
		{"a question and its answer", nil, false, 1, true, 0, minute, briefIdleTimeout},
		{"a conversation", nil, false, 3, true, 0, minute, minute},
		{"a monologue", nil, true, 3, false, provenAfter, minute, minute},
		{"a burst", nil, true, 1000, false, provenAfter - 1, minute, briefIdleTimeout},
		{"a shorter limit of its own", nil, true, 1, false, 0, time.Second, time.Second},
		{"no limit, not proven", nil, true, 1, false, 0, 0, briefIdleTimeout},
		{"no limit", nil, false, 3, true, 0, 0, 0},
		{"QUIC, not proven", newOpening(), true, 1000, true, minute, minute, briefIdleTimeout},
		{"QUIC, proven", newOpening(), false, 1, true, 0, minute, minute},
	} {
		k := &session{opening: c.opening, half: c.half, idle: c.idle, state: carried}
		k.sent.Store(c.sent)
		k.answered.Store(c.answered)
		k.moved.Store(int64(c.moved))
		if got := k.idleTimeout(); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}
