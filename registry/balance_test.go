package registry

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// balanced makes a registry with one service a.test, whose endpoints are written as
// "192.0.2.1:1 weight zone".
func balanced(t testing.TB, l LoadBalancing, specs ...string) *Registry {
	t.Helper()
	r := &Registry{Mesh: Mesh{TopologyZone: "here"}}
	swapBalanced(t, r, l, specs...)
	return r
}

// swapBalanced replaces the endpoints of a.test.
func swapBalanced(t testing.TB, r *Registry, l LoadBalancing, specs ...string) {
	t.Helper()
	s := service(t, "a.test")
	s.LoadBalancing, s.Endpoints = l, nil
	for _, spec := range specs {
		f := append(strings.Fields(spec), "1", "")
		ep := endpoints(f[0])[0]
		var weight int
		if n, err := fmt.Sscan(f[1], &weight); n != 1 {
			t.Fatalf("endpoint %q: %v", spec, err)
		}
		ep.Weight, ep.Draining = uint16(weight), weight == 0
		if len(f) > 3 {
			ep.Zone = f[2]
		}
		s.Endpoints = append(s.Endpoints, ep)
	}
	tab, err := r.Merge(Snapshot{Services: []*Service{s}})
	if err != nil {
		t.Fatal(err)
	}
	r.Swap(tab)
}

// numbered returns n endpoints.
func numbered(n int) (specs []string) {
	for i := range n {
		specs = append(specs, fmt.Sprintf("192.0.2.%d:1", i+1))
	}
	return specs
}

// from is a request of the client at an address.
func from(client string) *tunnel.Request {
	req := byName("a.test", 443, 443)
	req.Source = netip.AddrPort{}
	if client != "" {
		req.Source = netip.AddrPortFrom(netip.MustParseAddr(client), 40000)
	}
	return req
}

// clientAt returns the i-th of many client addresses: of many /24s.
func clientAt(i int) string { return fmt.Sprintf("10.%d.%d.%d", i>>14&255, i>>6&255, i&63) }

// resolved returns where the endpoints of a request are, in their order.
func resolved(t testing.TB, r *Registry, req *tunnel.Request) []string {
	t.Helper()
	var at []string
	for _, ep := range route(t, r, req).Endpoints {
		at = append(at, ep.Addr.String())
	}
	return at
}

func route(t testing.TB, r *Registry, req *tunnel.Request) tunnel.Route {
	t.Helper()
	route, err := r.Resolve(t.Context(), req)
	if err != nil {
		t.Fatalf("Resolve: %v", err)
	}
	return route
}

// connected is resolved, and the first endpoint is dialed as the Router does.
func connected(t testing.TB, r *Registry, req *tunnel.Request) string {
	t.Helper()
	to := route(t, r, req)
	if to.Balancer != nil {
		to.Balancer.Chosen(req, &to.Endpoints[0])
	}
	return to.Endpoints[0].Addr.String()
}

// chiSquare returns the statistic of counts, whose shares ought to be as the weights.
func chiSquare(counts map[string]int, weights map[string]float64) float64 {
	n, total, sum := 0, 0.0, 0.0
	for _, c := range counts {
		n += c
	}
	for _, w := range weights {
		total += w
	}
	for k, w := range weights {
		want := float64(n) * w / total
		sum += (float64(counts[k]) - want) * (float64(counts[k]) - want) / want
	}
	return sum
}

// checkShares fails where counts are not shared as the weights say. By chance it would
// fail once in ten thousand times; the requests are always the same ones.
func checkShares(t *testing.T, counts map[string]int, weights map[string]float64) {
	t.Helper()
	k := float64(len(weights) - 1)
	limit := k + 3.72*math.Sqrt(2*k) + 8 // an upper bound of the quantile
	if x := chiSquare(counts, weights); x > limit || len(counts) > len(weights) {
		t.Errorf("shares %v for weights %v: chi-square %.1f, limit %.1f", counts, weights, x, limit)
	}
}

func TestWeightedTurns(t *testing.T) {
	r := balanced(t, LoadBalancing{}, "192.0.2.1:1 3", "192.0.2.2:1 1", "192.0.2.3:1 0", "192.0.2.4:1 6")
	counts := map[string]int{}
	for i := range 1000 {
		order := resolved(t, r, from("203.0.113.9"))
		counts[order[0]]++
		if slices.Sort(order); !slices.Equal(order, []string{"192.0.2.1:1", "192.0.2.2:1", "192.0.2.4:1"}) {
			t.Fatalf("request %d: endpoints %v, want the three with a weight", i, order)
		}
		if i == 19 && (counts["192.0.2.1:1"] < 5 || counts["192.0.2.1:1"] > 7 || counts["192.0.2.2:1"] < 1 || counts["192.0.2.2:1"] > 3) {
			t.Errorf("after 20 requests: %v, want about 6, 2 and 12", counts)
		}
	}
	for at, want := range map[string]int{"192.0.2.1:1": 300, "192.0.2.2:1": 100, "192.0.2.4:1": 600} {
		if got := counts[at]; got < want-3 || got > want+3 {
			t.Errorf("%s got %d of 1000 requests, want about %d", at, got, want)
		}
	}
}

// Those that remain share what an unhealthy endpoint had, as their weights say.
func TestWeightedTurnsWithoutTheUnhealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := balanced(t, LoadBalancing{}, "192.0.2.1:1 2", "192.0.2.2:1", "192.0.2.3:1", "192.0.2.4:1 2")
		report(r, "192.0.2.1:1", errRefused)
		counts := map[string]int{}
		for range 400 {
			order := resolved(t, r, from("203.0.113.9"))
			counts[order[0]]++
			if order[3] != "192.0.2.1:1" {
				t.Fatalf("order %v, want the one that fails last", order)
			}
		}
		if a, b, c := counts["192.0.2.2:1"], counts["192.0.2.3:1"], counts["192.0.2.4:1"]; a < 97 || a > 103 || b < 97 || b > 103 || c < 197 || c > 203 {
			t.Errorf("shares %v, want 100, 100 and 200", counts)
		}
	})
}

func TestAllWeightsAreZero(t *testing.T) {
	for _, policy := range []string{RoundRobin, LeastConnections, SourceHash} {
		r := balanced(t, LoadBalancing{Policy: policy}, "192.0.2.1:1 0", "192.0.2.2:1 0")
		_, err := r.Resolve(t.Context(), from("203.0.113.9"))
		if tunnel.ReasonOf(err) != tunnel.NoEndpoint || !strings.Contains(err.Error(), "all have the weight 0") {
			t.Errorf("%s: %v, want %s and why", policy, err, tunnel.NoEndpoint)
		}
		byAddress, err := r.Resolve(t.Context(), byAddr("192.0.2.2", 1))
		if err != nil || len(byAddress.Endpoints) != 1 {
			t.Errorf("%s: asked for by its address: %v, %v; want the endpoint", policy, byAddress.Endpoints, err)
		}
	}
}

func TestLeastConnections(t *testing.T) {
	r := balanced(t, LoadBalancing{Policy: LeastConnections}, "192.0.2.1:1", "192.0.2.2:1 3", "192.0.2.3:1")
	open := map[string]int{}
	dial := dialer(t, r)
	for range 50 {
		open[dial(from("203.0.113.9"))]++
	}
	if want := map[string]int{"192.0.2.1:1": 10, "192.0.2.2:1": 30, "192.0.2.3:1": 10}; !maps.Equal(open, want) {
		t.Errorf("open are %v, want %v", open, want)
	}
	// The tunnels are counted on over another table, and by it.
	swapBalanced(t, r, LoadBalancing{Policy: LeastConnections}, "192.0.2.4:1", "192.0.2.3:1", "192.0.2.2:1 3", "192.0.2.1:1")
	for range 10 {
		if got := dial(from("203.0.113.9")); got != "192.0.2.4:1" {
			t.Errorf("after a reload %s was chosen, want the new endpoint, which has no tunnel", got)
		}
	}
}

// dialer returns a function that opens a tunnel, as far as the endpoint's load goes.
func dialer(t testing.TB, r *Registry) func(*tunnel.Request) string {
	router := &tunnel.Router{Resolver: r, Dialer: nobody{}, Relay: &tunnel.Relay{}}
	t.Cleanup(func() { _ = router.Relay.Close() })
	return func(req *tunnel.Request) string {
		req.Datagrams = nobody{}
		s, err := router.Open(context.Background(), req)
		if err != nil {
			t.Fatal(err)
		}
		return s.Endpoint.Addr.String()
	}
}

func TestLeastConnectionsOfMany(t *testing.T) {
	const n = 200
	r := balanced(t, LoadBalancing{Policy: LeastConnections}, numbered(n)...)
	dial := dialer(t, r)
	open := map[string]int{}
	for range 20 * n {
		open[dial(from("203.0.113.9"))]++
	}
	least, most := math.MaxInt, 0
	for _, c := range open {
		least, most = min(least, c), max(most, c)
	}
	if len(open) != n || least < 17 || most > 23 { // one at random alone would be 8 to 35
		t.Errorf("%d of %d endpoints have tunnels, from %d to %d; want all, about 20 each", len(open), n, least, most)
	}
}

func TestSourceHashShares(t *testing.T) {
	for name, specs := range map[string][]string{
		"equal":    numbered(7),
		"weighted": {"192.0.2.1:1 1", "192.0.2.2:1 2", "192.0.2.3:1 4", "[2001:db8::1]:1 8", "192.0.2.5:2 1"},
	} {
		t.Run(name, func(t *testing.T) {
			r := balanced(t, LoadBalancing{Policy: SourceHash}, specs...)
			weights := map[string]float64{}
			for _, s := range specs {
				f := append(strings.Fields(s), "1")
				weights[f[0]] = float64(f[1][0] - '0')
			}
			first, second := map[string]int{}, map[string]int{}
			for i := range 20000 {
				order := resolved(t, r, from(clientAt(i)))
				first[order[0]]++
				second[order[1]]++
			}
			checkShares(t, first, weights)
			if name == "equal" {
				checkShares(t, second, weights)
			}
			first = map[string]int{}
			for i := range 20000 {
				first[resolved(t, r, from(fmt.Sprintf("2001:db8:%x:%x::%x", i>>8, i&255, i)))[0]]++
			}
			checkShares(t, first, weights)
		})
	}
}

// Gateways that know the same endpoints in another order agree, and a client is an IPv4
// address or the first 64 bits of an IPv6 address.
func TestSourceHashAgrees(t *testing.T) {
	l := LoadBalancing{Policy: SourceHash}
	one := balanced(t, l, "192.0.2.1:1 2", "192.0.2.2:1", "192.0.2.3:1 2", "192.0.2.4:1", "192.0.2.5:1")
	other := balanced(t, l, "192.0.2.5:1", "192.0.2.3:1 2", "192.0.2.1:1 2", "192.0.2.4:1", "192.0.2.2:1")
	for i := range 500 {
		a, b := resolved(t, one, from(clientAt(i))), resolved(t, other, from(clientAt(i)))
		if !slices.Equal(a[:maxOrdered], b[:maxOrdered]) {
			t.Fatalf("client %s: %v and %v, want the same order", clientAt(i), a, b)
		}
		mapped := resolved(t, one, from("::ffff:"+clientAt(i)))
		if !slices.Equal(a, mapped) {
			t.Fatalf("client %s: %v, and in IPv6 form %v", clientAt(i), a, mapped)
		}
	}
	net := map[string]bool{}
	for i := range 64 {
		a := resolved(t, one, from(fmt.Sprintf("2001:db8:1:%x::1", i)))
		b := resolved(t, one, from(fmt.Sprintf("2001:db8:1:%x:ffff::%x", i, i)))
		if !slices.Equal(a, b) {
			t.Fatalf("two addresses of one /64 have %v and %v", a, b)
		}
		net[a[0]] = true
	}
	if len(net) != 5 {
		t.Errorf("64 networks reach %d endpoints, want 5", len(net))
	}
	// The numbers are part of what gateways of different versions agree on.
	var got []string
	for i := range 8 {
		got = append(got, resolved(t, one, from(clientAt(i)))[0])
	}
	if want := "192.0.2.3:1 192.0.2.3:1 192.0.2.1:1 192.0.2.4:1 192.0.2.5:1 192.0.2.4:1 192.0.2.1:1 192.0.2.5:1"; strings.Join(got, " ") != want {
		t.Errorf("the first clients go to\n%s, want\n%s", strings.Join(got, " "), want)
	}
}

// An endpoint that leaves moves its own clients, and one that comes takes its share.
func TestSourceHashMovesFew(t *testing.T) { synctest.Test(t, testSourceHashMovesFew) }

func testSourceHashMovesFew(t *testing.T) {
	const n, clients = 10, 5000
	l := LoadBalancing{Policy: SourceHash}
	r := balanced(t, l, numbered(n)...)
	before := make([]string, clients)
	for i := range before {
		before[i] = resolved(t, r, from(clientAt(i)))[0]
	}
	const gone = "192.0.2.4:1"
	swapBalanced(t, r, l, slices.DeleteFunc(numbered(n), func(s string) bool { return s == gone })...)
	moved := 0
	for i, was := range before {
		now := resolved(t, r, from(clientAt(i)))[0]
		if now != was {
			moved++
		}
		if (now != was) != (was == gone) {
			t.Fatalf("client %s went from %s to %s as %s left", clientAt(i), was, now, gone)
		}
	}
	if moved < clients/n*8/10 || moved > clients/n*12/10 {
		t.Errorf("%d of %d clients moved, want about one of %d", moved, clients, n)
	}
	swapBalanced(t, r, l, append(numbered(n), "192.0.2.99:1")...)
	for i, was := range before {
		if now := resolved(t, r, from(clientAt(i)))[0]; now != was && now != "192.0.2.99:1" {
			t.Fatalf("client %s went from %s to %s as another one came", clientAt(i), was, now)
		}
	}
	// One that fails is as one that has left, and comes back.
	swapBalanced(t, r, l, numbered(n)...)
	report(r, gone, errRefused)
	for i, was := range before {
		if now := resolved(t, r, from(clientAt(i)))[0]; (now != was) != (was == gone) {
			t.Fatalf("client %s went from %s to %s as %s failed", clientAt(i), was, now, gone)
		}
	}
	report(r, gone, nil)
	for i, was := range before {
		if now := resolved(t, r, from(clientAt(i)))[0]; now != was {
			t.Fatalf("client %s goes to %s, and before the failure to %s", clientAt(i), now, was)
		}
	}
}

// Without a client's address sourceHash takes turns.
func TestSourceHashWithoutAnAddress(t *testing.T) {
	r := balanced(t, LoadBalancing{Policy: SourceHash, StickyFor: time.Hour}, numbered(4)...)
	counts := map[string]int{}
	for range 400 {
		counts[connected(t, r, from(""))]++
	}
	for at, n := range counts {
		if n < 97 || n > 103 {
			t.Errorf("%s got %d of 400, want about 100", at, n)
		}
	}
}

func TestStickyClients(t *testing.T) {
	for _, policy := range []string{RoundRobin, LeastConnections, SourceHash} {
		t.Run(policy, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const clients = 200
				l := LoadBalancing{Policy: policy, StickyFor: 10 * time.Minute}
				r := balanced(t, l, numbered(4)...)
				was := make([]string, clients)
				for i := range was {
					was[i] = connected(t, r, from(clientAt(i)))
				}
				check := func(when string, want func(i int) bool) {
					t.Helper()
					for i := range was {
						if got := resolved(t, r, from(clientAt(i)))[0]; !want(i) == (got == was[i]) {
							t.Fatalf("%s: client %d has %s, and had %s", when, i, got, was[i])
						}
					}
				}
				all := func(int) bool { return true }
				check("at once", all)
				swapBalanced(t, r, l, numbered(9)...)
				check("after endpoints were added", all)
				specs := numbered(9)
				specs[1] += " 0"
				swapBalanced(t, r, l, specs...)
				check("after one was drained", all)
				for i := range 100 {
					if got := resolved(t, r, from(clientAt(clients+i)))[0]; got == "192.0.2.2:1" {
						t.Fatal("a new client got the endpoint with the weight 0")
					}
				}
				time.Sleep(9 * time.Minute)
				connected(t, r, from(clientAt(0)))
				time.Sleep(2 * time.Minute)
				if got := resolved(t, r, from(clientAt(0)))[0]; got != was[0] {
					t.Errorf("a client that came back has %s, and had %s", got, was[0])
				}
				drained := 1 + slices.Index(was[1:], "192.0.2.2:1")
				if got := resolved(t, r, from(clientAt(drained))); slices.Contains(got, "192.0.2.2:1") {
					t.Errorf("a client has %v after its time, with an endpoint of weight 0", got)
				}
			})
		})
	}
}

// A client whose endpoint fails gets another one, which it keeps when the first one is
// back. What was never dialed is not kept, such as what was only explained.
func TestStickyMovesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := LoadBalancing{Policy: SourceHash, StickyFor: time.Hour}
		r := balanced(t, l, numbered(4)...)
		first := connected(t, r, from("203.0.113.9"))
		report(r, first, errRefused)
		second := connected(t, r, from("203.0.113.9"))
		if second == first {
			t.Fatalf("the client keeps %s, which fails", first)
		}
		report(r, first, nil)
		if got := resolved(t, r, from("203.0.113.9"))[0]; got != second {
			t.Errorf("the client has %s, want %s, which it went to last", got, second)
		}
		stranger := from("203.0.113.77")
		hashed := resolved(t, r, stranger)[0]
		report(r, hashed, errRefused)
		_ = resolved(t, r, stranger)
		report(r, hashed, nil)
		if got := resolved(t, r, stranger)[0]; got != hashed {
			t.Errorf("a client that never connected keeps %s, want %s", got, hashed)
		}
		// A drained endpoint that fails is not tried for the client that has it.
		specs := numbered(4)
		for i := range specs {
			if specs[i] == second {
				specs[i] += " 0"
			}
		}
		swapBalanced(t, r, l, specs...)
		report(r, second, errRefused)
		if got := resolved(t, r, from("203.0.113.9")); slices.Contains(got, second) {
			t.Errorf("the client is to try %v, with %s, which has the weight 0 and fails", got, second)
		}
	})
}

func TestStickyClientsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s stickyClients
		now := time.Now()
		const more = 1000
		for i := range uint64(maxSticky + more) {
			s.set(i, i+1, time.Hour, now)
		}
		if n := len(s.byClient); n != maxSticky || len(s.clients) != maxSticky {
			t.Errorf("%d clients in %d places, want %d", n, len(s.clients), maxSticky)
		}
		for i, want := range map[uint64]uint64{0: 0, more - 1: 0, more: more + 1, maxSticky: maxSticky + 1} {
			if got := s.find(i, time.Hour, now); got != want {
				t.Errorf("client %d has %d, want %d", i, got, want)
			}
		}
		s.set(more, 7, time.Hour, now) // is the newest again
		s.set(1<<40, 1, time.Hour, now)
		if a, b := s.find(more, time.Hour, now), s.find(more+1, time.Hour, now); a != 7 || b != 0 {
			t.Errorf("the clients have %d and %d, want 7 and 0: the oldest goes", a, b)
		}
		later := now.Add(time.Hour)
		if got := s.find(1<<40, time.Hour, later); got != 0 {
			t.Errorf("a client has %d after its time", got)
		}
		for range maxSticky {
			s.find(0, time.Hour, later)
		}
		if len(s.byClient) != 0 || s.clients != nil {
			t.Errorf("%d clients are left after their time, in %d places", len(s.byClient), len(s.clients))
		}
		s.set(1, 2, time.Hour, later)
		if got := s.find(1, time.Hour, later); got != 2 {
			t.Errorf("a client after all others have gone has %d, want 2", got)
		}
	})
}

func TestZonePreference(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, policy := range []string{RoundRobin, LeastConnections, SourceHash} {
			r := balanced(t, LoadBalancing{Policy: policy}, "192.0.2.1:1 1 here", "192.0.2.2:1 1 there", "192.0.2.3:1 2 here", "192.0.2.4:1", "192.0.2.5:1 1 here")
			firsts := func() string {
				set := map[string]bool{}
				for i := range 300 {
					order := resolved(t, r, from(clientAt(i)))
					if len(order) != 5 {
						t.Fatalf("%s: order %v, want all", policy, order)
					}
					set[order[0][len("192.0.2."):][:1]] = true
				}
				return strings.Join(slices.Sorted(maps.Keys(set)), "")
			}
			for _, step := range []struct {
				fails, want string
			}{
				{"", "135"},
				{"192.0.2.1:1", "35"},
				{"192.0.2.5:1", "3"},  // half of the weight is left
				{"192.0.2.3:1", "24"}, // nothing is
			} {
				if step.fails != "" {
					report(r, step.fails, errRefused)
				}
				if got := firsts(); got != step.want {
					t.Errorf("%s, after %q has failed: endpoints %s come first, want %s", policy, step.fails, got, step.want)
				}
			}
			report(r, "192.0.2.1:1", nil) // one of four
			if got := firsts(); got != "124" {
				t.Errorf("%s, with a quarter of the zone healthy: endpoints %s come first, want 124", policy, got)
			}
			for _, at := range []string{"192.0.2.3:1", "192.0.2.5:1"} {
				report(r, at, nil)
			}
			if got := firsts(); got != "135" {
				t.Errorf("%s, with the zone healthy again: endpoints %s come first, want 135", policy, got)
			}
		}
	})
}

// A DNS name has the share of its weight, whatever the number of its addresses, and its
// addresses of another family are for when nothing else is left.
func TestNamesDivideTheirWeight(t *testing.T) {
	dns := &answers{has: map[string]string{"two.test": "192.0.2.11 192.0.2.12 2001:db8::1", "one.test": "192.0.2.21"}}
	for _, policy := range []string{RoundRobin, SourceHash} {
		r := &Registry{Lookup: dns.lookup}
		swapBalanced(t, r, LoadBalancing{Policy: policy}, "two.test:1 4", "one.test:1 2", "192.0.2.1:1 2")
		counts := map[string]int{}
		for i := range 8000 {
			order := resolved(t, r, from(clientAt(i)))
			counts[order[0]]++
			if len(order) != 5 || slices.Index(order, "[2001:db8::1]:1") < 3 {
				t.Fatalf("%s: order %v, want the other family behind the rest", policy, order)
			}
		}
		checkShares(t, counts, map[string]float64{"192.0.2.11:1": 2, "192.0.2.12:1": 2, "192.0.2.21:1": 2, "192.0.2.1:1": 2})
	}
}

// nobody is a Dialer whose connections carry nothing.
type nobody struct{}

func (nobody) DialContext(context.Context, string, string) (net.Conn, error) {
	c, _ := net.Pipe()
	return c, nil
}

func TestParseLoadBalancing(t *testing.T) {
	for text, want := range map[string]any{
		"sourceHash":                      LoadBalancing{Policy: SourceHash},
		" leastConnections ":              LoadBalancing{Policy: LeastConnections},
		"sourceHash; stickyFor=30m":       LoadBalancing{SourceHash, 30 * time.Minute},
		"roundRobin;stickyFor = 1h30m":    LoadBalancing{RoundRobin, 90 * time.Minute},
		"":                                `"" is no policy: write roundRobin, `,
		"random":                          `"random" is no policy: write roundRobin, `,
		"SourceHash":                      `"SourceHash" is no policy`,
		"sourceHash, stickyFor=30m":       `"sourceHash, stickyFor=30m" is no policy`,
		"sourceHash;":                     `"" is unknown: write`,
		"sourceHash; sticky=30m":          `"sticky=30m" is unknown: write`,
		"sourceHash; stickyFor":           `"stickyFor" is unknown: write`,
		"sourceHash; stickyFor=1ms":       `stickyFor "1ms" is not a duration from 1s to 168h0m0s`,
		"sourceHash; stickyFor=-5m":       `stickyFor "-5m" is not a duration`,
		"sourceHash; stickyFor=99999h":    `stickyFor "99999h" is not a duration`,
		"sourceHash; stickyFor=1m; hop=2": `stickyFor "1m; hop=2" is not a duration`,
	} {
		got, err := ParseLoadBalancing(text)
		if wrong, ok := want.(string); ok {
			if err == nil || !strings.HasPrefix(err.Error(), wrong) {
				t.Errorf("%q: %+v, %v; want an error that begins with %s", text, got, err, wrong)
			}
		} else if err != nil || got != want {
			t.Errorf("%q: %+v, %v; want %+v", text, got, err, want)
		}
	}
}

func BenchmarkChoose(b *testing.B) {
	for _, policy := range []string{RoundRobin, LeastConnections, SourceHash} {
		for _, weighted := range []bool{false, true} {
			for _, n := range []int{10, 64, 100} {
				b.Run(fmt.Sprintf("%s/weighted=%t/%d", policy, weighted, n), func(b *testing.B) {
					specs := numbered(n)
					specs[0] += " 2"
					if weighted {
						for i := range specs[1:] {
							specs[i+1] += fmt.Sprint(" ", i%5+1)
						}
					}
					r := balanced(b, LoadBalancing{Policy: policy}, specs...)
					req := from("203.0.113.9")
					eps := route(b, r, req).Endpoints
					m, _ := r.Table().findVisible(req)
					x := resolution{Registry: r, table: r.Table(), req: req, match: m}
					all := make([]contender, n)
					for i := range all {
						all[i] = m.entry.balance.contenderOf(&m.entry.Endpoints[i], nil)
					}
					b.ReportAllocs()
					for b.Loop() {
						x.turn++
						x.choose(eps, all, Check{})
					}
				})
			}
		}
	}
}

func BenchmarkResolve(b *testing.B) {
	for _, l := range []LoadBalancing{{}, {Policy: LeastConnections}, {Policy: SourceHash}, {Policy: SourceHash, StickyFor: time.Hour}} {
		for _, n := range []int{1, 10, 100} {
			b.Run(fmt.Sprintf("%s,sticky=%t/%d", l.Policy, l.StickyFor > 0, n), func(b *testing.B) {
				r := balanced(b, l, numbered(n)...)
				req := from("203.0.113.9")
				b.ReportAllocs()
				for b.Loop() {
					_, _ = r.Resolve(b.Context(), req)
				}
			})
		}
	}
}

// A choice takes no memory beside the endpoints, of which there is one piece for each
// request.
func TestResolveAllocatesLittle(t *testing.T) {
	for _, l := range []LoadBalancing{{}, {Policy: LeastConnections}, {Policy: SourceHash, StickyFor: time.Hour}} {
		r := balanced(t, l, "192.0.2.1:1 2", "192.0.2.2:1", "192.0.2.3:1")
		req := from("203.0.113.9")
		connected(t, r, req)
		if n := testing.AllocsPerRun(100, func() { _, _ = r.Resolve(t.Context(), req) }); n > 2 {
			t.Errorf("%+v: %v allocations a request, want 2: the endpoints, and what reports of dials", l, n)
		}
	}
}

// Two services at the same addresses that check them in different ways, as for the
// leader and the replicas of a database, do not see each other's checks. One without a
// check sees all of them.
func TestServicesHaveTheirOwnChecks(t *testing.T) {
	named := func(name, path string) *Service {
		s := service(t, name)
		s.Endpoints = endpoints("192.0.2.1:1", "192.0.2.2:1")
		if path != "" {
			s.Check = Check{Kind: "http", Port: 8008, Path: path}
		}
		return s
	}
	r := &Registry{}
	r.Swap(table(t, named("leader.test", "/primary"), named("replica.test", "/replica"), named("any.test", "")))
	target := func(addr, name string) Target {
		m, err := r.Table().find(byName(name, 443, 443))
		if err != nil {
			t.Fatal(err)
		}
		return Target{Addr: netip.MustParseAddrPort(addr), Check: m.entry.Check}
	}
	firsts := func(name string) string {
		set := map[string]bool{}
		for range 10 {
			req := byName(name, 443, 443)
			set[resolved(t, r, req)[0]] = true
		}
		return strings.Join(slices.Sorted(maps.Keys(set)), " ")
	}
	check := func(when string, leader, replica, any string) {
		t.Helper()
		for name, want := range map[string]string{"leader.test": leader, "replica.test": replica, "any.test": any} {
			if got := firsts(name); got != want {
				t.Errorf("%s: %s has %s first, want %s", when, name, got, want)
			}
		}
	}
	const one, two = "192.0.2.1:1", "192.0.2.2:1"
	report := func(addr, name string, err error) { r.ReportCheck(target(addr, name), err) }
	report(one, "leader.test", nil)
	report(two, "leader.test", errRefused)
	check("with one check", one, one+" "+two, one)
	report(one, "replica.test", errRefused)
	report(two, "replica.test", nil)
	check("with a leader", one, two, one+" "+two)
	report(one, "leader.test", errRefused)
	report(one, "replica.test", nil)
	report(two, "leader.test", nil)
	report(two, "replica.test", errRefused)
	check("after a failover", two, one, one+" "+two)
	r.ForgetCheck(target(one, "leader.test"))
	r.ForgetCheck(target(two, "replica.test"))
	check("without the checks that failed", one+" "+two, one+" "+two, one+" "+two)
	if n := len(r.health.down) + len(r.health.downBy); n != 0 {
		t.Errorf("%d addresses are down still", n)
	}
}

// The gateways of another network are chosen by the service's policy, with their weights.
func TestGatewaysAreBalanced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gateway := func(addr string, weight uint16) Gateway { return Gateway{Address: endpoints(addr)[0], Weight: weight} }
		for _, l := range []LoadBalancing{{Policy: SourceHash}, {Policy: LeastConnections}, {StickyFor: time.Hour}} {
			s := service(t, "a.test", 443)
			s.Endpoints, s.LoadBalancing = endpoints("10.2.0.9:443"), l
			r := &Registry{Mesh: Mesh{Network: "home"}}
			tab, err := r.Merge(Snapshot{Services: []*Service{s}, Networks: []Network{{Name: "home"}, {
				Name: "there", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")},
				Gateways: []Gateway{gateway("198.51.100.1:443", 3), gateway("198.51.100.2:443", 0), gateway("198.51.100.3:443", 1)},
			}}})
			if err != nil {
				t.Fatal(err)
			}
			r.Swap(tab)
			request := func(i int) *tunnel.Request {
				req := from(clientAt(i))
				req.Proto = "sni"
				return req
			}
			counts := map[string]int{}
			loads := map[*tunnel.EndpointLoad]bool{}
			for i := range 5000 {
				to := route(t, r, request(i))
				counts[to.Endpoints[0].Addr.String()]++
				for j := range to.Endpoints {
					loads[to.Endpoints[j].Load] = true
				}
			}
			checkShares(t, counts, map[string]float64{"198.51.100.1:443": 3, "198.51.100.2:443": 1, "198.51.100.3:443": 1})
			if want := map[bool]int{true: 3, false: 1}[l.Policy == LeastConnections]; len(loads) != want || loads[nil] == (want == 3) {
				t.Errorf("%+v: %d counters of tunnels, want one for each of 3 gateways where they are compared, and none otherwise", l, len(loads))
			}
			report(r, "198.51.100.1:443", errRefused)
			for i := range 50 {
				if order := resolved(t, r, request(i)); len(order) != 3 || order[2] != "198.51.100.1:443" {
					t.Fatalf("%+v: gateways %v, want the one that fails last", l, order)
				}
			}
		}
	})
}

// Endpoints behind further gateways, whose addresses are not known here, are chosen by
// the policy, too.
func TestEndpointsBehindHopsAreBalanced(t *testing.T) {
	for _, policy := range []string{RoundRobin, LeastConnections, SourceHash} {
		r := &Registry{NewTransport: func(*Service, *Endpoint, *Gateway) (tunnel.Transport, error) { return nowhere{}, nil }}
		s := service(t, "a.test", 443)
		s.Via, s.LoadBalancing = []Hop{{Proto: "connect", Addresses: []string{"gw.test:443"}}}, LoadBalancing{Policy: policy}
		s.Endpoints = endpoints("one.test:443", "two.test:443", "10.0.0.1:443", "gone.test:443")
		s.Endpoints[1].Weight, s.Endpoints[3].Draining = 2, true
		s.Insecure = true
		merge(t, r, s)
		counts := map[string]int{}
		for i := range 4000 {
			to := route(t, r, from(clientAt(i)))
			if len(to.Endpoints) != 3 {
				t.Fatalf("%s: endpoints %v, want the three with a weight", policy, to.Endpoints)
			}
			counts[to.Endpoints[0].String()]++
		}
		checkShares(t, counts, map[string]float64{"one.test:443": 1, "two.test:443": 2, "10.0.0.1:443": 1})
	}
}
