package tunnel_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A bench is a Router whose every part is watched.
type bench struct {
	*tunnel.Router
	dialer fakeDialer
	told   eavesdropper
	stop   func()
}

// newBench returns a Router to route, which may be changed before its use.
func newBench(t *testing.T, resolver tunnel.Resolver) *bench {
	t.Helper()
	b := &bench{dialer: fakeDialer{answers: map[string]any{}}}
	relay := &tunnel.Relay{}
	b.Router = &tunnel.Router{
		Resolver: resolver, Dialer: &b.dialer, Relay: relay, Observe: b.told.observe, Budget: &tunnel.Budget{Limit: 1000},
	}
	b.stop = func() {
		b.dialer.closeAll()
		_ = relay.Close()
		if b.Budget.Used() != 0 || b.Reserved() != 0 || relay.Open() != 0 || relay.Counted() != 0 {
			t.Errorf("afterwards: %d descriptors, %d tunnels reserved, %d open, %d connections of services; want none", b.Budget.Used(), b.Reserved(), relay.Open(), relay.Counted())
		}
	}
	return b
}

// last returns the one outcome told.
func (b *bench) last(t *testing.T) tunnel.Outcome {
	t.Helper()
	synctest.Wait()
	all := b.told.all()
	if len(all) != 1 {
		t.Fatalf("%d outcomes, want exactly one: %+v", len(all), all)
	}
	return all[0]
}

func TestRouterCarries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, routeTo("192.0.2.1:80", "192.0.2.2:80"))
		b.dialer.answers["192.0.2.1:80"] = 2 * time.Second
		a := &asker{}
		a.onAccept = func() {
			if got := b.dialer.ends(); len(got) != 1 {
				t.Errorf("the client heard yes with %d services connected", len(got))
			}
		}
		req := a.request()
		req.Start = time.Now()
		time.Sleep(time.Second)
		b.ServeTunnel(t.Context(), req)
		if accepted, refused := a.answers(); accepted != 1 || refused != 0 {
			t.Errorf("%d times accepted, %d refused", accepted, refused)
		}
		if b.Budget.Used() != 1 || b.Reserved() != 1 || b.Relay.Open() != 1 {
			t.Errorf("while it stands: %d descriptors, %d reserved, %d open; want 1 each", b.Budget.Used(), b.Reserved(), b.Relay.Open())
		}
		server := b.dialer.ends()[0]
		go func() { _, _ = io.WriteString(a.client, "question") }()
		got := make([]byte, 8)
		if _, err := io.ReadFull(server, got); err != nil || string(got) != "question" {
			t.Errorf("service got %q, %v", got, err)
		}
		go func() { _, _ = io.WriteString(server, "answer") }()
		if _, err := io.ReadFull(a.client, got[:6]); err != nil || string(got[:6]) != "answer" {
			t.Errorf("client got %q, %v", got[:6], err)
		}
		if n := len(b.told.all()); n != 0 {
			t.Errorf("%d outcomes of a tunnel that stands", n)
		}
		time.Sleep(time.Minute)
		_ = server.Close()
		_ = a.client.Close()
		o := b.last(t)
		if o.Reason != tunnel.Done || o.Err != nil || !o.Carried() || o.BytesIn != 8 || o.BytesOut != 6 {
			t.Errorf("ended with %s, %v, in %d, out %d; want done, 8, 6", o.Reason, o.Err, o.BytesIn, o.BytesOut)
		}
		if o.Waited != time.Second || o.Dialed != 2*time.Second || o.Lasted != 63*time.Second || !o.Start.Equal(req.Start) {
			t.Errorf("waited %v, dialed %v, lasted %v", o.Waited, o.Dialed, o.Lasted)
		}
		if o.Proto != "fake" || o.Listener != "edge" || o.Source != req.Source || o.Peer != req.Peer || o.Target != "svc.example:443" ||
			!slices.Equal(o.ALPN, req.ALPN) || o.Service != "svc" || o.Pattern != "*.example" || o.Endpoint != "192.0.2.2:80" || o.ID == 0 {
			t.Errorf("outcome %+v", o)
		}
		if len(o.Attempts) != 2 || o.Attempts[0].Err == nil || o.Attempts[0].Took != 2*time.Second || o.Attempts[1].Err != nil ||
			o.Attempts[1].Endpoint.Addr != netip.MustParseAddrPort("192.0.2.2:80") {
			t.Errorf("attempts %+v", o.Attempts)
		}
		b.stop()
	})
}

// TestRouterRefuses is every way a request may fail: it is refused once, never
// accepted, told of once, and nothing stays taken.
func TestRouterRefuses(t *testing.T) {
	denied := tunnel.Refusef(tunnel.Denied, "bob may not")
	for _, tt := range []struct {
		name   string
		setup  func(*bench)
		want   tunnel.Reason
		text   string
		dialed int
		took   time.Duration
	}{
		{"no route", func(b *bench) { b.Resolver = noRoute }, tunnel.NoRoute, "no such", 0, 0},
		{"resolver's own fault", func(b *bench) {
			b.Resolver = resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
				return tunnel.Route{}, io.ErrUnexpectedEOF
			})
		}, tunnel.Internal, "unexpected EOF", 0, 0},
		{"resolver hangs", func(b *bench) {
			b.Resolver = resolverFunc(func(ctx context.Context, _ *tunnel.Request) (tunnel.Route, error) {
				<-ctx.Done()
				return tunnel.Route{}, tunnel.Refusef(tunnel.LookupTime, "no answer")
			})
		}, tunnel.LookupTime, "no answer", 0, 10 * time.Second},
		{"denied", func(b *bench) {
			b.Resolver = narrowed(b.Resolver, func(*tunnel.Route) error { return denied })
		}, tunnel.Denied, "bob", 0, 0},
		{"no endpoint", func(b *bench) { b.Resolver = routeTo() }, tunnel.NoEndpoint, "svc has no endpoint", 0, 0},
		{"no descriptor", func(b *bench) { b.Budget.Limit = 1 }, overload, "descriptors", 0, 0},
		{"refused", func(b *bench) { b.dialer.answers["192.0.2.1:80"] = errRefused }, tunnel.DialFailed, "192.0.2.1:80: connection refused", 1, 0},
		{"silent", func(b *bench) { b.dialer.answers["192.0.2.1:80"] = time.Hour }, tunnel.DialTimeout, "192.0.2.1:80", 1, 3 * time.Second},
		{"own timeout", func(b *bench) { b.dialer.answers["192.0.2.1:80"] = time.Hour; b.Limits.ConnectTimeout = time.Second }, tunnel.DialTimeout, "", 1, time.Second},
		{"own total", func(b *bench) {
			b.dialer.answers["192.0.2.1:80"] = time.Hour
			b.Limits.ConnectTotalTimeout = time.Second
		}, tunnel.DialTimeout, "", 1, time.Second},
		{"no timeout but the total", func(b *bench) { b.dialer.answers["192.0.2.1:80"] = time.Hour; b.Limits.ConnectTimeout = -1 }, tunnel.DialTimeout, "", 1, 10 * time.Second},
		{"three are tried", func(b *bench) {
			b.Resolver = routeTo("192.0.2.1:80", "192.0.2.1:80", "192.0.2.1:80", "192.0.2.1:80", "192.0.2.1:80")
			b.dialer.answers["192.0.2.1:80"] = errRefused
		}, tunnel.DialFailed, "", 3, 0},
		{"own number", func(b *bench) {
			b.Resolver = routeTo("192.0.2.1:80", "192.0.2.1:80", "192.0.2.1:80")
			b.dialer.answers["192.0.2.1:80"] = errRefused
			b.MaxDialAttempts = 2
		}, tunnel.DialFailed, "", 2, 0},
		{"the total ends it", func(b *bench) {
			b.Resolver = routeTo("192.0.2.1:80", "192.0.2.1:80", "192.0.2.1:80", "192.0.2.1:80", "192.0.2.1:80")
			b.dialer.answers["192.0.2.1:80"] = time.Hour
			b.MaxDialAttempts = 5
		}, tunnel.DialTimeout, "", 4, 10 * time.Second},
		{"a lookup takes of the total", func(b *bench) {
			next := b.Resolver
			b.Resolver = resolverFunc(func(ctx context.Context, r *tunnel.Request) (tunnel.Route, error) {
				time.Sleep(9 * time.Second)
				return next.Resolve(ctx, r)
			})
			b.dialer.answers["192.0.2.1:80"] = time.Hour
		}, tunnel.DialTimeout, "", 1, 10 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, routeTo("192.0.2.1:80"))
				tt.setup(b)
				a := &asker{}
				start := time.Now()
				req := a.request()
				b.ServeTunnel(t.Context(), req)
				if accepted, refused := a.answers(); accepted != 0 || refused != 1 {
					t.Errorf("%d times accepted, %d refused; want 0 and 1", accepted, refused)
				}
				o := b.last(t)
				if o.Reason != tt.want || o.Err == nil || !strings.Contains(o.Err.Error(), tt.text) || o.Carried() || o.Endpoint != "" {
					t.Errorf("outcome %s, %v; want %s with %q", o.Reason, o.Err, tt.want, tt.text)
				}
				if tunnel.ReasonOf(a.refused[0]) != tt.want || !errors.Is(a.refused[0], o.Err) {
					t.Errorf("the client was told %v, the log %v", a.refused[0], o.Err)
				}
				if d := time.Since(start); d != tt.took {
					t.Errorf("took %v, want %v", d, tt.took)
				}
				if got := b.dialer.calls(); len(got) != tt.dialed || len(o.Attempts) != tt.dialed {
					t.Errorf("dialed %v, attempts %+v; want %d", got, o.Attempts, tt.dialed)
				}
				// Decide says the same wherever it is not about dialing.
				if tt.dialed == 0 && tt.want != overload {
					ctx, cancel := context.WithTimeout(t.Context(), tt.took)
					defer cancel()
					if _, err := b.Decide(ctx, req); tunnel.ReasonOf(err) != tt.want || err.Error() != o.Err.Error() {
						t.Errorf("Decide: %v, want %v", err, o.Err)
					}
				}
				b.stop()
			})
		})
	}
}

// narrowed is a Resolver whose policy changes or refuses the routes of another one.
func narrowed(r tunnel.Resolver, policy func(*tunnel.Route) error) tunnel.Resolver {
	return resolverFunc(func(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
		route, err := r.Resolve(ctx, req)
		if err == nil {
			err = policy(&route)
		}
		return route, err
	})
}

var noRoute = resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
	return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "no such name")
})

// TestRouterDecide checks that Decide finds the route that ServeTunnel takes,
// and that a refusal still says which route it was about.
func TestRouterDecide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, routeTo("192.0.2.1:80", "192.0.2.2:80"))
		whole := b.Resolver
		b.Resolver = narrowed(whole, func(route *tunnel.Route) error {
			route.Endpoints = route.Endpoints[1:] // policy may narrow
			return nil
		})
		a := &asker{}
		req := a.request()
		route, err := b.Decide(t.Context(), req)
		if err != nil || route.Service != "svc" || route.Pattern != "*.example" || !reflect.DeepEqual(route.Endpoints, endpoints("192.0.2.2:80")) {
			t.Errorf("Decide: %+v, %v", route, err)
		}
		if len(b.dialer.calls()) != 0 || len(b.told.all()) != 0 || b.Budget.Used() != 0 {
			t.Error("Decide did more than decide")
		}
		b.ServeTunnel(t.Context(), req)
		if got := b.dialer.calls(); !slices.Equal(got, []string{"192.0.2.2:80"}) {
			t.Errorf("dialed %v", got)
		}
		_ = a.client.Close()
		b.dialer.closeAll()
		synctest.Wait()
		decision := &tunnel.PolicyDecision{Policy: "db", Rule: 1}
		b.Resolver = narrowed(whole, func(route *tunnel.Route) error {
			route.Policy = decision
			return tunnel.Refusef(tunnel.Denied, "no")
		})
		b.ServeTunnel(t.Context(), (&asker{}).request())
		all := b.told.all()
		if o := all[len(all)-1]; o.Reason != tunnel.Denied || o.Service != "svc" || o.Pattern != "*.example" || o.Policy != decision {
			t.Errorf("outcome of a denied request: %+v, want its service, its pattern and policy %+v", o, decision)
		}
		b.stop()
	})
}

// TestRouterReports checks what an endpoint's health hears: dials that worked,
// failed or took too long, and nothing that is not the endpoint's doing.
func TestRouterReports(t *testing.T) {
	refuse := func(r tunnel.Reason) error { return tunnel.Refusef(r, "%s", r) }
	for _, tt := range []struct {
		name   string
		answer any
		want   string // as reported; "" for nothing
	}{
		{"works", nil, "done"},
		{"refused", refuse(tunnel.DialFailed), "dial-failed"},
		{"refused in the dialer's own words", errRefused, "dial-failed"},
		{"timeout", time.Hour, "dial-timeout"},
		{"timeout in the dialer's own words", context.DeadlineExceeded, "dial-timeout"},
		{"loop", refuse(tunnel.Loop), ""},
		{"prohibited", refuse(tunnel.Prohibited), ""},
		{"overload", refuse(tunnel.Overload), ""},
		{"no local port", os.NewSyscallError("connect", syscall.EADDRNOTAVAIL), ""},
		{"no descriptor", os.NewSyscallError("socket", syscall.EMFILE), ""},
		{"no buffer", &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ENOBUFS)}, ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			var got []string
			b := newBench(t, resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
				return tunnel.Route{Endpoints: endpoints("192.0.2.1:80"), Report: func(ep tunnel.Endpoint, err error) {
					if ep.Addr.String() != "192.0.2.1:80" {
						t.Errorf("%s: reported of %s", tt.name, ep)
					}
					got = append(got, string(tunnel.ReasonOf(err)))
				}}, nil
			}))
			b.dialer.answers["192.0.2.1:80"] = tt.answer
			a := &asker{}
			b.ServeTunnel(t.Context(), a.request())
			if s := strings.Join(got, " "); s != tt.want {
				t.Errorf("%s: reported %q, want %q", tt.name, s, tt.want)
			}
			_ = a.client.Close()
			b.stop()
		})
	}
}

// TestRouterGivesUp checks that a dial the gateway itself gives up is told as
// that, ends at once, and is not held against the endpoint.
func TestRouterGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
			return tunnel.Route{Endpoints: endpoints("192.0.2.1:80", "192.0.2.2:80"), Report: func(ep tunnel.Endpoint, err error) {
				t.Errorf("reported of %s: %v", ep, err)
			}}, nil
		}))
		b.dialer.answers["192.0.2.1:80"] = time.Hour
		ctx, cancel := context.WithCancel(t.Context())
		go func() { time.Sleep(time.Second); cancel() }()
		start := time.Now()
		a := &asker{}
		b.ServeTunnel(ctx, a.request())
		if o := b.last(t); o.Reason != tunnel.Drain || time.Since(start) != time.Second || len(b.dialer.calls()) != 1 {
			t.Errorf("after %v and %d dials: %s, %v; want drain after a second and one", time.Since(start), len(b.dialer.calls()), o.Reason, o.Err)
		}
		b.stop()
	})
}

func TestRouterDialFailureReason(t *testing.T) {
	all := map[string]error{
		"failed": errRefused, "timeout": context.DeadlineExceeded,
		"overload": tunnel.Refusef(tunnel.Overload, "o"), "portless": syscall.EADDRNOTAVAIL, "prohibited": tunnel.Refusef(tunnel.Prohibited, "p"), "loop": tunnel.Refusef(tunnel.Loop, "l"),
	}
	for _, tt := range []struct {
		answers string
		want    tunnel.Reason
	}{
		{"failed failed", tunnel.DialFailed},
		{"failed timeout", tunnel.DialTimeout},
		{"timeout failed", tunnel.DialTimeout},
		{"overload timeout", tunnel.Overload},
		{"timeout overload failed", tunnel.Overload},
		{"portless", tunnel.Overload},
		{"failed portless", tunnel.Overload},
		{"failed prohibited timeout", tunnel.Prohibited},
		{"prohibited overload", tunnel.Prohibited},
		{"prohibited loop failed", tunnel.Loop},
		{"loop prohibited", tunnel.Loop},
	} {
		synctest.Test(t, func(t *testing.T) {
			addrs := []string{"192.0.2.1:1", "192.0.2.2:2", "192.0.2.3:3"}
			words := strings.Fields(tt.answers)
			b := newBench(t, routeTo(addrs[:len(words)]...))
			for i, w := range words {
				b.dialer.answers[addrs[i]] = all[w]
			}
			b.ServeTunnel(t.Context(), (&asker{}).request())
			o := b.last(t)
			if o.Reason != tt.want {
				t.Errorf("%s: got %s, want %s", tt.answers, o.Reason, tt.want)
			}
			for i, w := range words {
				if !errors.Is(o.Err, all[w]) {
					t.Errorf("%s: the error does not wrap that of endpoint %d: %v", tt.answers, i, o.Err)
				}
			}
			if got := b.dialer.calls(); !slices.Equal(got, addrs[:len(words)]) {
				t.Errorf("%s: dialed %v, want all in order", tt.answers, got)
			}
			b.stop()
		})
	}
}

func TestRouterAcceptFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, routeTo("192.0.2.1:80"))
		a := &asker{broken: errors.New("client has left")}
		b.ServeTunnel(t.Context(), a.request())
		if accepted, refused := a.answers(); accepted != 1 || refused != 0 {
			t.Errorf("%d times accepted, %d refused; want 1 and 0: one of the two, once", accepted, refused)
		}
		o := b.last(t)
		if o.Reason != tunnel.Gone || !errors.Is(o.Err, a.broken) || o.Carried() {
			t.Errorf("outcome %s, %v", o.Reason, o.Err)
		}
		if got := b.dialer.gateway[0].ending(); got != "aborted" {
			t.Errorf("the service's connection is %s, want aborted", got)
		}
		b.stop()
	})
}

// TestRouterPanics checks that a panic in any part leaves nothing taken.
func TestRouterPanics(t *testing.T) {
	boom := func() { panic("boom") }
	for _, where := range []string{"resolve", "dial", "accept"} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, routeTo("192.0.2.1:80"))
			a := &asker{}
			switch where {
			case "resolve":
				b.Resolver = resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) { boom(); return tunnel.Route{}, nil })
			case "dial":
				b.dialer.answers["192.0.2.1:80"] = boom
			case "accept":
				a.onAccept = boom
			}
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%s: the panic did not arrive", where)
					}
				}()
				b.ServeTunnel(t.Context(), a.request())
			}()
			for _, c := range b.dialer.gateway {
				if c.ending() != "aborted" {
					t.Errorf("%s: the service's connection is %s", where, c.ending())
				}
			}
			b.stop()
		})
	}
}

// A sharing is a Dialer whose connections are streams on one that is not its own.
type sharing struct{ *fakeDialer }

func (d sharing) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := d.fakeDialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return sharedConn{c.(*fakeConn)}, nil
}

type sharedConn struct{ *fakeConn }

func (sharedConn) IsMultiplexed() bool { return true }

// TestRouterCountsDescriptors checks what a tunnel takes beyond its client's
// descriptor: one, or none where its way to the service is shared. Whatever
// becomes of it, that is given back, once.
func TestRouterCountsDescriptors(t *testing.T) {
	for _, shared := range []bool{false, true} {
		want := map[bool]int64{false: 1, true: 0}[shared]
		for _, fate := range []string{"ends", "is not dialed", "is not accepted"} {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, routeTo("192.0.2.1:80"))
				if shared {
					b.Dialer = sharing{&b.dialer}
				}
				a := &asker{}
				switch fate {
				case "is not dialed":
					b.dialer.answers["192.0.2.1:80"] = errRefused
				case "is not accepted":
					a.broken = errors.New("client has left")
				}
				b.ServeTunnel(t.Context(), a.request())
				if fate == "ends" {
					if got := b.Budget.Used(); got != want {
						t.Errorf("shared %v: a tunnel takes %d descriptors, want %d", shared, got, want)
					}
				}
				_ = a.client.Close()
				b.dialer.closeAll()
				synctest.Wait()
				if got := b.Budget.Used(); got != 0 {
					t.Errorf("shared %v: a tunnel that %s leaves %d descriptors taken", shared, fate, got)
				}
				b.stop()
			})
		}
	}
}

// TestRouterMaxTunnels sends many requests at once: not one more tunnel than
// allowed comes to stand, and each that ends makes room for one.
func TestRouterMaxTunnels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, routeTo("192.0.2.1:80"))
		b.Limits.MaxTunnels = 3
		b.dialer.answers["192.0.2.1:80"] = func() { time.Sleep(time.Second) }
		askers := make([]*asker, 20)
		var wg sync.WaitGroup
		for i := range askers {
			askers[i] = &asker{}
			req := askers[i].request()
			wg.Go(func() { b.ServeTunnel(t.Context(), req) })
		}
		wg.Wait()
		if n := b.Relay.Open(); n != 3 {
			t.Errorf("%d tunnels stand, want 3", n)
		}
		for _, r := range b.told.reasons() {
			if r != overload {
				t.Errorf("refused with %s, want overload", r)
			}
		}
		for _, c := range b.dialer.ends()[:2] {
			_ = c.Close()
		}
		time.Sleep(time.Minute) // the fakes can't half-close, so the tunnels linger
		for range 3 {
			a := &asker{}
			askers = append(askers, a)
			b.ServeTunnel(t.Context(), a.request())
		}
		if n := b.Relay.Open(); n != 3 {
			t.Errorf("%d tunnels stand after two ended and three were asked for, want 3", n)
		}
		for _, a := range askers {
			_ = a.client.Close()
		}
		b.stop()
	})
}

// TestRouterRoute checks what a Route may say beyond its endpoints.
func TestRouterRoute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var own fakeDialer
		b := newBench(t, resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
			return tunnel.Route{Endpoints: []tunnel.Endpoint{{Addr: netip.MustParseAddrPort("192.0.2.1:80"), Host: "db.internal", Transport: tunneltest.Transport{Dialer: &own}}}, IdleTimeout: 5 * time.Second}, nil
		}))
		a := &asker{}
		b.ServeTunnel(t.Context(), a.request())
		if len(b.dialer.calls()) != 0 || len(own.calls()) != 1 {
			t.Errorf("the Router's dialer had %d dials, the endpoint's %d; want 0 and 1", len(b.dialer.calls()), len(own.calls()))
		}
		time.Sleep(4 * time.Second)
		if n := len(b.told.all()); n != 0 {
			t.Error("the tunnel ended before the route's idle limit")
		}
		time.Sleep(4 * time.Second)
		if o := b.last(t); o.Reason != tunnel.Idle || o.Endpoint != "db.internal (192.0.2.1:80)" || !o.Carried() {
			t.Errorf("outcome %+v, want idle at db.internal", o)
		}
		b.stop()
	})
}

// TestRouterNamesEndpoints checks that a dialer that can is told whether the
// route named the address.
func TestRouterNamesEndpoints(t *testing.T) {
	d := &endpointDialer{}
	relay := &tunnel.Relay{}
	defer relay.Close()
	want := tunnel.Endpoint{Addr: netip.MustParseAddrPort("127.0.0.1:80"), Named: true}
	router := &tunnel.Router{Dialer: d, Relay: relay, Resolver: resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
		return tunnel.Route{Endpoints: []tunnel.Endpoint{want}}, nil
	})}
	router.ServeTunnel(t.Context(), (&asker{}).request())
	if d.got != want {
		t.Errorf("dialed %+v, want %+v", d.got, want)
	}
}

type endpointDialer struct {
	fakeDialer
	got tunnel.Endpoint
}

func (d *endpointDialer) DialEndpoint(_ context.Context, ep tunnel.Endpoint) (net.Conn, error) {
	d.got = ep
	return nil, errRefused
}
