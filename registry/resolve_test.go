package registry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// answers is a Lookup that counts.
type answers struct {
	mu    sync.Mutex
	asked map[string]int
	has   map[string]string // host to addresses, or an error in a word
}

func (a *answers) lookup(_ context.Context, host string) ([]netip.Addr, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.asked == nil {
		a.asked = map[string]int{}
	}
	a.asked[host]++
	switch s := a.has[host]; s {
	case "timeout":
		return nil, &net.DNSError{Err: "i/o timeout", Name: host, IsTimeout: true}
	case "error":
		return nil, &net.DNSError{Err: "server misbehaving", Name: host}
	case "":
		return nil, nil
	default:
		var out []netip.Addr
		for _, f := range strings.Fields(s) {
			out = append(out, netip.MustParseAddr(f))
		}
		return out, nil
	}
}

func endpoints(specs ...string) (eps []Endpoint) {
	for _, s := range specs {
		host, port, err := net.SplitHostPort(s)
		if err != nil {
			host, port = s, "0"
		}
		var ep Endpoint
		fmt.Sscan(port, &ep.Port)
		if a, err := netip.ParseAddr(host); err == nil {
			ep.Addr = a
		} else {
			ep.Host = host
		}
		eps = append(eps, ep)
	}
	return eps
}

// serving makes a registry with one service a.test.
func serving(t testing.TB, lookup func(context.Context, string) ([]netip.Addr, error), ports []uint16, specs ...string) *Registry {
	s := service(t, "a.test", ports...)
	s.Endpoints = endpoints(specs...)
	s.IdleTimeout, s.HalfClosedTimeout = time.Hour, time.Minute
	r := &Registry{Lookup: lookup}
	r.Swap(table(t, s))
	return r
}

func order(t testing.TB, r *Registry) string {
	t.Helper()
	route, err := r.Resolve(t.Context(), byName("a.test", 443, 443))
	if err != nil {
		t.Fatalf("Resolve: %v", err)
	}
	var parts []string
	for _, ep := range route.Endpoints {
		parts = append(parts, ep.Addr.String())
	}
	return strings.Join(parts, " ")
}

func report(r *Registry, addr string, err error) {
	r.health.report(tunnel.Endpoint{Addr: netip.MustParseAddrPort(addr)}, err)
}

var errRefused = errors.New("connection refused")

func TestResolveRoute(t *testing.T) {
	dns := &answers{has: map[string]string{"db.test": "10.0.0.7 ::ffff:10.0.0.8"}}
	r := serving(t, dns.lookup, []uint16{443}, "192.0.2.1:8443", "db.test", "localhost:9000", "[::ffff:192.0.2.2]:1")
	route, err := r.Resolve(t.Context(), byName("a.test", 443, 443))
	if err != nil {
		t.Fatal(err)
	}
	ap := netip.MustParseAddrPort
	want := tunnel.Route{
		Service: "a.test", Pattern: "a.test:443", Generation: 1, IdleTimeout: time.Hour, HalfClosedTimeout: time.Minute,
		Endpoints: []tunnel.Endpoint{
			{Addr: ap("192.0.2.1:8443"), Named: true},
			{Addr: ap("10.0.0.7:443"), Host: "db.test"},
			{Addr: ap("127.0.0.1:9000"), Host: "localhost", Named: true},
			{Addr: ap("192.0.2.2:1"), Named: true},
			{Addr: ap("10.0.0.8:443"), Host: "db.test"},
			{Addr: ap("[::1]:9000"), Host: "localhost", Named: true},
		},
	}
	if route.Report == nil {
		t.Error("Report is nil")
	}
	route.Report = nil
	if !reflect.DeepEqual(route, want) {
		t.Errorf("got  %+v\nwant %+v", route, want)
	}
}

func TestResolveByEndpointAddress(t *testing.T) {
	r := serving(t, nil, []uint16{443}, "192.0.2.1:8443", "192.0.2.2:8443")
	route, err := r.Resolve(t.Context(), byAddr("192.0.2.2", 8443))
	if err != nil {
		t.Fatal(err)
	}
	want := []tunnel.Endpoint{{Addr: netip.MustParseAddrPort("192.0.2.2:8443"), Named: true}}
	if !slices.Equal(route.Endpoints, want) || route.Service != "a.test" || route.Pattern != "192.0.2.2:8443" {
		t.Errorf("got %+v, want only %v", route, want)
	}
}

// One request asks DNS once for each name, whatever the answer.
func TestOneLookupPerRequest(t *testing.T) {
	dns := &answers{has: map[string]string{"a.internal": "10.0.0.1 10.0.0.2", "b.internal": "error"}}
	r := serving(t, dns.lookup, nil, "a.internal:1", "b.internal:1", "a.internal:2", "10.0.0.9:1", "localhost:1")
	for i := range 5 {
		order(t, r)
		if want := map[string]int{"a.internal": i + 1, "b.internal": i + 1}; !reflect.DeepEqual(dns.asked, want) {
			t.Fatalf("after %d requests: lookups %v, want %v", i+1, dns.asked, want)
		}
	}
	// A request that is refused asks nothing at all.
	for _, req := range []*tunnel.Request{byName("b.test", 443, 443), byAddr("127.0.0.1", 1), byAddr("10.0.0.1", 1)} {
		if _, err := r.Resolve(t.Context(), req); err == nil {
			t.Errorf("%s: no refusal", req.Target())
		}
	}
	if n := dns.asked["a.internal"]; n != 5 {
		t.Errorf("%d lookups after refusals, want 5", n)
	}
}

func TestLookupFailures(t *testing.T) {
	dns := &answers{has: map[string]string{"good.test": "10.0.0.1", "late.test": "timeout", "bad.test": "error"}}
	for _, tt := range []struct {
		endpoints string
		want      string // addresses, or reason and a part of the text
	}{
		{"late.test:1 good.test:1", "10.0.0.1:1"},
		{"bad.test:1 10.0.0.9:1", "10.0.0.9:1"},
		{"late.test:1", `dns-timeout lookup of "late.test": lookup late.test: i/o timeout`},
		{"late.test:1 late.test:2", "dns-timeout no endpoint of service"},
		{"late.test:1 bad.test:1", `dns-failed lookup of "bad.test"`},
		{"empty.test:1", "dns-failed the name has no address"},
		{"", "no-endpoint has no endpoint"},
		{"10.0.0.9 good.test", "no-endpoint have no port"},
	} {
		r := serving(t, dns.lookup, nil, strings.Fields(tt.endpoints)...)
		route, err := r.Resolve(t.Context(), byName("a.test", 0, 443))
		if err == nil {
			if got := fmt.Sprint(route.Endpoints[0].Addr); len(route.Endpoints) != 1 || got != tt.want {
				t.Errorf("%s: got %v, want %s", tt.endpoints, route.Endpoints, tt.want)
			}
			continue
		}
		reason, text, _ := strings.Cut(tt.want, " ")
		if n := strings.Count(err.Error(), `"late.test"`); n > 1 {
			t.Errorf("%s: one lookup is told %d times: %v", tt.endpoints, n, err)
		}
		if string(tunnel.ReasonOf(err)) != reason || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: got %s: %v, want %s", tt.endpoints, tunnel.ReasonOf(err), err, tt.want)
		}
	}
	r := serving(t, nil, nil, "good.test:1")
	if _, err := r.Resolve(t.Context(), byName("a.test", 0, 443)); tunnel.ReasonOf(err) != tunnel.LookupError {
		t.Errorf("without a Lookup: %v, want %s", err, tunnel.LookupError)
	}
}

// The names of one service are looked up side by side.
func TestLookupsAreConcurrent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := func(context.Context, string) ([]netip.Addr, error) {
			time.Sleep(time.Second)
			return []netip.Addr{netip.MustParseAddr("10.0.0.1")}, nil
		}
		r := serving(t, slow, nil, "a.internal:1", "b.internal:1", "c.internal:1")
		start := time.Now()
		order(t, r)
		if took := time.Since(start); took != time.Second {
			t.Errorf("three lookups of 1s took %v, want 1s", took)
		}
	})
}

func TestTurns(t *testing.T) {
	dns := &answers{has: map[string]string{"b.internal": "2001:db8::1 10.0.0.1 2001:db8::2 10.0.0.2 10.0.0.3"}}
	r := serving(t, dns.lookup, nil, "192.0.2.1:1", "b.internal:2", "192.0.2.3:3")
	for i, want := range []string{
		"192.0.2.1:1 [2001:db8::1]:2 192.0.2.3:3 10.0.0.1:2 [2001:db8::2]:2 10.0.0.2:2 10.0.0.3:2",
		"[2001:db8::1]:2 192.0.2.3:3 192.0.2.1:1 10.0.0.1:2 [2001:db8::2]:2 10.0.0.2:2 10.0.0.3:2",
		"192.0.2.3:3 192.0.2.1:1 [2001:db8::1]:2 10.0.0.1:2 [2001:db8::2]:2 10.0.0.2:2 10.0.0.3:2",
		"192.0.2.1:1 [2001:db8::2]:2 192.0.2.3:3 10.0.0.2:2 [2001:db8::1]:2 10.0.0.3:2 10.0.0.1:2",
	} {
		if got := order(t, r); got != want {
			t.Errorf("request %d:\ngot  %s\nwant %s", i, got, want)
		}
	}
	// A new table goes on where the old one was.
	s := service(t, "a.test")
	s.Endpoints = endpoints("192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1")
	r.Swap(table(t, service(t, "other.test"), s))
	if got, want := order(t, r), "192.0.2.2:1 192.0.2.3:1 192.0.2.1:1"; got != want { // the fifth request
		t.Errorf("after a swap: got %s, want %s", got, want)
	}
}

func TestEjection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := serving(t, nil, nil, "192.0.2.1:1", "192.0.2.2:1")
		const good = "192.0.2.2:1 192.0.2.1:1"
		for i, penalty := range []time.Duration{1, 2, 10, 20, 30, 30} {
			penalty *= time.Second
			report(r, "192.0.2.1:1", errRefused)
			report(r, "192.0.2.1:1", errRefused) // of a dial under way at the same time
			for range 4 {
				if got := order(t, r); got != good {
					t.Fatalf("after failure %d: %s, want %s", i+1, got, good)
				}
			}
			time.Sleep(penalty - time.Millisecond)
			if got := order(t, r) + " " + order(t, r); got != good+" "+good {
				t.Fatalf("failure %d, just before %v: %s, want the endpoint last", i+1, penalty, got)
			}
			time.Sleep(time.Millisecond)
			first := 0
			for range 6 {
				if order(t, r) != good {
					first++
				}
			}
			if first != 1 {
				t.Fatalf("failure %d, after %v: tried first by %d of 6 requests, want 1 on trial", i+1, penalty, first)
			}
		}
		report(r, "192.0.2.1:1", nil)
		if a, b := order(t, r), order(t, r); a == b {
			t.Errorf("after a dial that worked: %s twice, want turns", a)
		}
		report(r, "192.0.2.1:1", errRefused)
		time.Sleep(time.Second)
		if a, b := order(t, r), order(t, r); a == b {
			t.Errorf("a failure after a success lasts longer than 1s")
		}
	})
}

func TestTrialEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := serving(t, nil, nil, "192.0.2.1:1", "192.0.2.2:1")
		report(r, "192.0.2.1:1", errRefused)
		time.Sleep(time.Second)
		trials := func() (n int) {
			for range 4 {
				if strings.HasPrefix(order(t, r), "192.0.2.1") {
					n++
				}
			}
			return n
		}
		if a, b := trials(), trials(); a != 1 || b != 0 {
			t.Errorf("%d and %d trials, want 1 and 0", a, b)
		}
		time.Sleep(retryWindow) // nobody told how it went
		if n := trials(); n != 1 {
			t.Errorf("%d trials after the first came to nothing, want 1", n)
		}
	})
}

func TestAllEjected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := serving(t, nil, nil, "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1")
		report(r, "192.0.2.2:1", errRefused)
		time.Sleep(100 * time.Millisecond)
		report(r, "192.0.2.3:1", errRefused)
		time.Sleep(100 * time.Millisecond)
		report(r, "192.0.2.1:1", errRefused)
		for range 4 {
			if got, want := order(t, r), "192.0.2.2:1 192.0.2.3:1 192.0.2.1:1"; got != want {
				t.Fatalf("got %s, want %s: the soonest back first", got, want)
			}
		}
	})
}

func TestNotTheEndpointsFault(t *testing.T) {
	r := serving(t, nil, nil, "192.0.2.1:1", "192.0.2.2:1")
	for _, err := range []error{context.Canceled, &net.OpError{Op: "dial", Err: context.Canceled}, tunnel.Refusef(tunnel.Prohibited, "no"), tunnel.Refusef(tunnel.Loop, "no")} {
		report(r, "192.0.2.1:1", err)
		if n := r.health.n.Load(); n != 0 {
			t.Fatalf("%v counts as the endpoint's failure", err)
		}
	}
	report(r, "192.0.2.1:1", context.DeadlineExceeded)
	if n := r.health.n.Load(); n != 1 {
		t.Errorf("a timeout does not count")
	}
}

// Failures outlive tables, but not the endpoints they are of.
func TestFailuresAcrossTables(t *testing.T) {
	dns := &answers{has: map[string]string{"db.test": "10.0.0.1", "old.test": "10.0.0.2"}}
	r := serving(t, dns.lookup, nil, "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1", "db.test:1", "old.test:1")
	for _, ep := range []tunnel.Endpoint{
		{Addr: netip.MustParseAddrPort("192.0.2.1:1")}, {Addr: netip.MustParseAddrPort("192.0.2.3:1")},
		{Addr: netip.MustParseAddrPort("10.0.0.1:1"), Host: "db.test"}, {Addr: netip.MustParseAddrPort("10.0.0.2:1"), Host: "old.test"},
	} {
		r.health.report(ep, errRefused)
	}
	s := service(t, "a.test")
	s.Endpoints = endpoints("192.0.2.1:1", "192.0.2.2:1", "db.test:1")
	r.Swap(table(t, s))
	var left []string
	for key := range r.health.failing {
		left = append(left, key.addr.String())
	}
	slices.Sort(left)
	if got, want := fmt.Sprint(left), "[10.0.0.1:1 192.0.2.1:1]"; got != want {
		t.Errorf("failures after the swap: %s, want %s", got, want)
	}
	for range 4 {
		if got := order(t, r); !strings.HasPrefix(got, "192.0.2.2:1 ") {
			t.Errorf("after the swap: %s, want the one that works first", got)
		}
	}
}

func TestFailuresAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h health
		fail := func(i int) {
			a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
			h.report(tunnel.Endpoint{Addr: netip.AddrPortFrom(a, 1), Host: "db.test"}, errRefused)
		}
		for i := range maxFailing + 10 {
			fail(i)
		}
		if n := h.n.Load(); n != maxFailing {
			t.Errorf("%d failures are remembered, want at most %d", n, maxFailing)
		}
		time.Sleep(failureExpiry + 2*time.Second)
		fail(maxFailing + 11)
		if n := h.n.Load(); n != 1 {
			t.Errorf("%d failures are remembered after a while, want 1", n)
		}
	})
}

// An endpoint has the transport of its service, whether it was found by name or by
// its address.
func TestEndpointsHaveTheirTransport(t *testing.T) {
	asked := 0
	r := &Registry{NewTransport: func(s *Service, _ *Endpoint, _ *Gateway) (tunnel.Transport, error) {
		asked++
		if s.ProxyProtocol == 2 {
			return nowhere{}, nil
		}
		return nil, nil
	}}
	merge(t, r,
		&Service{Name: "told", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("told.test")}}, Exposed: true, ProxyProtocol: 2, Endpoints: []Endpoint{{Addr: netip.MustParseAddr("192.0.2.1"), Port: 80}}},
		&Service{Name: "plain", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("plain.test")}}, Exposed: true, Endpoints: []Endpoint{{Addr: netip.MustParseAddr("192.0.2.2"), Port: 80}}},
	)
	for _, row := range []struct {
		req  tunnel.Request
		want tunnel.Transport
	}{
		{tunnel.Request{Name: tunnel.MustParseName("told.test"), Port: 80}, nowhere{}},
		{tunnel.Request{Addr: netip.MustParseAddr("192.0.2.1"), Port: 80}, nowhere{}},
		{tunnel.Request{Name: tunnel.MustParseName("plain.test"), Port: 80}, nil},
		{tunnel.Request{Addr: netip.MustParseAddr("192.0.2.2"), Port: 80}, nil},
	} {
		route, err := r.Resolve(t.Context(), &row.req)
		if err != nil || len(route.Endpoints) != 1 || route.Endpoints[0].Transport != row.want {
			t.Errorf("%s: got endpoints %+v, %v, want one with transport %v", row.req.Target(), route.Endpoints, err, row.want)
		}
	}
	if asked != 1 {
		t.Errorf("a transport was asked for %d times, want once: by Merge, for the service that needs one", asked)
	}
}

// A name that was chosen by a stranger leads to no address that is refused.
func TestGuardedEndpoints(t *testing.T) {
	lookup := (&answers{has: map[string]string{"a.example.com.": "203.0.113.1 10.96.0.1", "b.example.com.": "::ffff:10.96.0.1"}}).lookup
	refuses := func(a netip.Addr) string {
		if a == netip.MustParseAddr("10.96.0.1") {
			return "it is the address of Service stock/db"
		}
		return ""
	}
	for _, tt := range []struct {
		name, host string
		guarded    bool
		refuses    func(netip.Addr) string
		want       string
	}{
		{"one of them is refused", "a.example.com.", true, refuses, "203.0.113.1:443"},
		{"all are", "b.example.com.", true, refuses, `error prohibited: "b.example.com." has the address ::ffff:10.96.0.1: it is the address of Service stock/db`},
		{"nobody knows", "a.example.com.", true, nil, "error prohibited: it is not known"},
		{"of an administrator", "a.example.com.", false, refuses, "203.0.113.1:443 10.96.0.1:443"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := serving(t, lookup, []uint16{443}, tt.host)
			for s := range r.Table().Services() {
				s.Endpoints[0].Guarded = tt.guarded
			}
			r.Refuses = tt.refuses
			route, err := r.Resolve(t.Context(), byName("a.test", 443, 443))
			var got []string
			for _, ep := range route.Endpoints {
				got = append(got, ep.Addr.String())
			}
			if what, ok := strings.CutPrefix(tt.want, "error prohibited: "); ok {
				if tunnel.ReasonOf(err) != tunnel.Prohibited || !strings.Contains(err.Error(), what) {
					t.Errorf("endpoints %v, error %v, want %q", got, err, tt.want)
				}
			} else if err != nil || strings.Join(got, " ") != tt.want {
				t.Errorf("endpoints %v, error %v, want %s", got, err, tt.want)
			}
		})
	}
}

// TestPanicInALookup: one of several lookups that panics leaves the others.
func TestPanicInALookup(t *testing.T) {
	r := serving(t, func(_ context.Context, host string) ([]netip.Addr, error) {
		if host == "bad.test" {
			panic("a fault")
		}
		return []netip.Addr{netip.MustParseAddr("10.0.0.7")}, nil
	}, []uint16{443}, "bad.test", "good.test")
	if got := order(t, r); got != "10.0.0.7:443" {
		t.Errorf("got %q, want 10.0.0.7:443", got)
	}
}
