package registry

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"culvert.dev/tunnel"
)

// backendOf makes a backend with one endpoint, which tells backends apart.
func backendOf(weight uint32, ep string) Backend {
	return Backend{Weight: weight, Service: &Service{Name: "to " + ep, Endpoints: endpoints(ep)}}
}

func ruleOf(t testing.TB, name string, names []string, backends ...Backend) *Rule {
	return &Rule{Name: name, Names: patterns(t, names...), Backends: backends, Origin: name + ".yaml"}
}

func listenerOf(name string, port uint16, sections ...*Section) *Listener {
	return &Listener{Name: name, Protocol: TLS, Port: port, Sections: sections, Origin: name + ".yaml"}
}

func host(t testing.TB, s string) tunnel.Pattern {
	t.Helper()
	if s == "" {
		return tunnel.Pattern{}
	}
	return patterns(t, s)[0]
}

func withListeners(t testing.TB, listeners ...*Listener) *Registry {
	t.Helper()
	tab, err := Merge(Snapshot{Listeners: listeners, Services: []*Service{service(t, "a.test")}})
	if err != nil {
		t.Fatal(err)
	}
	r := &Registry{}
	r.Swap(tab)
	return r
}

// confined is a request by a section.
func confined(section, name string) *tunnel.Request {
	req := &tunnel.Request{Proto: "sni", Listener: section, ListenerOnly: true}
	if name != "" {
		req.Name = tunnel.MustParseName(name)
	}
	return req
}

// Sections and rules are found as a simple model finds them, which looks at all
// of them.
func TestSectionsAndTheModel(t *testing.T) {
	names := []string{"test", "a.test", "b.test", "b.a.test", "c.b.a.test", "d.c.b.a.test", "x.test", "a.x.test"}
	var all []string
	for _, n := range names {
		all = append(all, n, "*."+n)
	}
	all = append(all, "")
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 0))
		pick := func() []string {
			var some []string
			for _, n := range all {
				if random.IntN(3) == 0 {
					some = append(some, n)
				}
			}
			return some
		}
		l := listenerOf("l", 443)
		for i, h := range pick() {
			s := &Section{Name: fmt.Sprintf("l/%d", i), Host: host(t, h)}
			taken := map[string]bool{}
			for j := range 3 {
				var mine []string
				for _, n := range pick() {
					if n != "" && !taken[n] && random.IntN(2) == 0 {
						mine, taken[n] = append(mine, n), true
					}
				}
				if len(mine) > 0 {
					s.Rules = append(s.Rules, ruleOf(t, fmt.Sprintf("%s/%d", s.Name, j), mine, backendOf(1, "192.0.2.1:1")))
				}
			}
			if random.IntN(3) == 0 {
				s.Rules = append(s.Rules, ruleOf(t, s.Name+"/any", nil, backendOf(1, "192.0.2.1:1")))
			}
			l.Sections = append(l.Sections, s)
		}
		r := withListeners(t, l)
		for _, n := range append(names, "") {
			section := r.Table().SectionOf("l", confined("", n).Name)
			want := bestSection(l.Sections, n)
			if section != want {
				t.Fatalf("seed %d, %q: got section %v, want %v", seed, n, section, want)
			}
			if section == nil {
				continue
			}
			route, err := r.Resolve(t.Context(), confined(section.Name, n))
			rule, pattern := bestRule(section.Rules, n)
			if rule == nil {
				if tunnel.ReasonOf(err) != tunnel.NoRoute || r.Table().PrecheckRoute(confined(section.Name, n)) == nil {
					t.Fatalf("seed %d, %q: got %v, %v, want no route", seed, n, route, err)
				}
			} else if err != nil || route.Service != rule.Name || route.Pattern != pattern {
				t.Fatalf("seed %d, %q: got rule %q by %q, %v, want %q by %q", seed, n, route.Service, route.Pattern, err, rule.Name, pattern)
			}
		}
	}
}

// rank is how well a pattern fits a name: 0 for not at all.
func rank(pattern, name string) int {
	suffix, wild := strings.CutPrefix(pattern, "*.")
	switch {
	case pattern == "":
		return 1
	case !wild && pattern == name:
		return 1000
	case wild && strings.HasSuffix(name, "."+suffix):
		return 1 + len(suffix)
	}
	return 0
}

func bestSection(sections []*Section, name string) (best *Section) {
	most := 0
	for _, s := range sections {
		h := ""
		if !s.Host.Suffix.IsZero() {
			h = s.Host.String()
		}
		if n := rank(h, name); n > most {
			best, most = s, n
		}
	}
	return best
}

func bestRule(rules []*Rule, name string) (best *Rule, by string) {
	most := 0
	for _, r := range rules {
		if len(r.Names) == 0 && most == 0 {
			best, by, most = r, "*", 1
		}
		for _, p := range r.Names {
			if n := rank(p.String(), name); n > most {
				best, by, most = r, p.String(), n
			}
		}
	}
	return best, by
}

// By a listener's name or a section's that is there no request reaches another
// service; and by any other name the listeners are not there.
func TestSectionsConfine(t *testing.T) {
	s := &Section{Name: "s", Rules: []*Rule{ruleOf(t, "r", []string{"b.test"}, backendOf(1, "192.0.2.9:1"))}}
	hosted := &Section{Name: "hosted", Host: host(t, "*.c.test"), Rules: []*Rule{ruleOf(t, "any", nil, backendOf(1, "192.0.2.8:1"))}}
	r := withListeners(t, listenerOf("l", 443, s, hosted))
	for _, test := range []struct {
		listener, name string
		confined       bool
		want           string
	}{
		{"s", "b.test", true, "192.0.2.9:1"},
		{"s", "b.test", false, "192.0.2.9:1"},
		{"s", "a.test", true, "no-route"},
		{"s", "a.test", false, "no-route"},
		{"hosted", "a.c.test", true, "192.0.2.8:1"},
		{"hosted", "c.test", true, "no-route"},
		{"l", "a.test", true, "no-route"},
		{"gone", "a.test", true, "no-route"},
		{":443", "a.test", false, "192.0.2.1:8443"},
		{":443", "b.test", false, "no-route"},
	} {
		req := confined(test.listener, test.name)
		req.ListenerOnly = test.confined
		route, err := r.Resolve(t.Context(), req)
		got := string(tunnel.ReasonOf(err))
		if err == nil {
			got = route.Endpoints[0].String()
		}
		if got != test.want {
			t.Errorf("%+v: got %s", test, got)
		}
	}
	req := confined("s", "")
	req.Addr, req.Port = netip.MustParseAddr("192.0.2.9"), 1
	if _, err := r.Resolve(t.Context(), req); tunnel.ReasonOf(err) != tunnel.NoRoute {
		t.Errorf("an address: got %v", err)
	}
	if _, err := (&Registry{}).Resolve(t.Context(), confined("s", "b.test")); tunnel.ReasonOf(err) != tunnel.NoRoute {
		t.Errorf("without a table: got %v", err)
	}
}

// Of 500 requests each backend gets its share to a point, from any place in the
// sequence on, also where many ask at once.
func TestWeights(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for i := range 300 {
		rule := ruleOf(t, "r", nil)
		var total float64
		for j := range 1 + random.IntN(16) {
			w := [...]uint32{0, 1, 1, 2, 10, 50, 100, 1000, 1_000_000, 1<<32 - 1}[random.IntN(10)]
			if i%3 == 0 {
				w %= 101
			}
			total += float64(w)
			rule.Backends = append(rule.Backends, backendOf(w, fmt.Sprintf("192.0.2.1:%d", j+1)))
		}
		r := withListeners(t, listenerOf("l", 443, &Section{Name: "s", Rules: []*Rule{rule}}))
		for range random.IntN(1000) {
			_, _ = r.Resolve(t.Context(), confined("s", "x.test"))
		}
		const n = 500
		counts := map[uint16]int{}
		for range n {
			route, err := r.Resolve(t.Context(), confined("s", "x.test"))
			if err != nil {
				if total != 0 || tunnel.ReasonOf(err) != tunnel.NoEndpoint {
					t.Fatal(err)
				}
				continue
			}
			counts[route.Endpoints[0].Addr.Port()]++
		}
		for j, b := range rule.Backends {
			got := counts[uint16(j+1)]
			if want := float64(b.Weight) / max(total, 1) * n; float64(got) < want-n/100 || float64(got) > want+n/100 || b.Weight == 0 && got > 0 {
				t.Errorf("%d: backend %d with %d of %.0f: got %d of %d, want %.1f", i, j, b.Weight, total, got, n, want)
			}
		}
	}
}

// A table that is swapped in goes on with the sequences of the one before.
func TestWeightsAreCarriedOver(t *testing.T) {
	rule := func() *Rule {
		two := &Service{Name: "two", Endpoints: endpoints("192.0.2.1:1", "192.0.2.1:2")}
		return ruleOf(t, "r", nil, Backend{Weight: 3, Service: two}, backendOf(1, "192.0.2.1:9"))
	}
	tab := func() *Table {
		tab, err := Merge(Snapshot{Listeners: []*Listener{listenerOf("l", 443, &Section{Name: "s", Rules: []*Rule{rule()}})}})
		if err != nil {
			t.Fatal(err)
		}
		return tab
	}
	sequence := func(swap bool) (got []string) {
		r := &Registry{}
		r.Swap(tab())
		for range 40 {
			if swap {
				r.Swap(tab())
			}
			route, err := r.Resolve(t.Context(), confined("s", ""))
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, route.Endpoints[0].String())
		}
		return got
	}
	if still, swapped := sequence(false), sequence(true); !slices.Equal(still, swapped) {
		t.Errorf("with swaps:    %v\nwithout swaps: %v", swapped, still)
	}
}

// A share that is broken is refused with the reason, and by the rule's name.
func TestBrokenBackends(t *testing.T) {
	r := withListeners(t, listenerOf("l", 443, &Section{Name: "s", Rules: []*Rule{
		ruleOf(t, "half", []string{"half.test"}, Backend{Weight: 1, Broken: "no grant"}, backendOf(1, "192.0.2.1:1")),
		ruleOf(t, "all", []string{"all.test"}, Backend{Weight: 1, Broken: "no grant"}),
		ruleOf(t, "nil", []string{"nil.test"}, Backend{Weight: 1}),
		ruleOf(t, "empty", []string{"empty.test"}, Backend{Weight: 1, Service: &Service{Name: "e"}}),
		ruleOf(t, "none", []string{"none.test"}),
	}}))
	refused := 0
	for range 10 {
		if route, err := r.Resolve(t.Context(), confined("s", "half.test")); err != nil {
			refused++
			if route.Service != "half" || tunnel.ReasonOf(err) != tunnel.NoEndpoint || !strings.Contains(err.Error(), "no grant") {
				t.Errorf("got %q, %v", route.Service, err)
			}
		}
	}
	if refused != 5 || r.Table().PrecheckRoute(confined("s", "half.test")) != nil {
		t.Errorf("%d of 10 are refused, want 5", refused)
	}
	for name, want := range map[string]string{"all.test": "no grant", "nil.test": "no service", "empty.test": "no endpoint", "none.test": "no backend"} {
		_, err := r.Resolve(t.Context(), confined("s", name))
		for _, err := range []error{err, r.Table().PrecheckRoute(confined("s", name))} {
			if tunnel.ReasonOf(err) != tunnel.NoEndpoint || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %s", name, err, want)
			}
		}
	}
}

// What two want to have the earlier one has, and Merge says so.
func TestListenerConflicts(t *testing.T) {
	to := func(name, ep string, names ...string) *Rule {
		return ruleOf(t, name, names, backendOf(1, ep))
	}
	first := listenerOf("first", 443, &Section{Name: "s", Rules: []*Rule{to("old", "192.0.2.1:1", "a.test"), to("new", "192.0.2.1:2", "a.test", "b.test")}},
		&Section{Name: "t"}, &Section{Name: "u", Host: host(t, "u.test")}, &Section{Name: "s", Host: host(t, "v.test")})
	tab, err := Merge(Snapshot{Listeners: []*Listener{first}}, Snapshot{Listeners: []*Listener{
		listenerOf("first", 444), listenerOf("port", 443), {Name: "udp", Protocol: UDP, Port: 443}, {Name: "odd", Protocol: "sctp", Port: 1},
		listenerOf("", 445), listenerOf("portless", 0), listenerOf("fine", 446, &Section{Name: "u", Host: host(t, "x.test")}),
		{Name: "tcp", Protocol: TCP, Port: 447, Sections: []*Section{{Name: "tcp/1", Rules: []*Rule{to("one", "192.0.2.1:3"), to("two", "192.0.2.1:4")}}, {Name: "tcp/2"}}},
	}})
	var conflicts Conflicts
	if !errors.As(err, &conflicts) {
		t.Fatalf("got %v, want Conflicts", err)
	}
	var listeners []string
	for l := range tab.Listeners() {
		listeners = append(listeners, l.Name)
	}
	if want := []string{"first", "udp", "fine", "tcp"}; !slices.Equal(listeners, want) {
		t.Errorf("listeners %v, want %v", listeners, want)
	}
	said := map[string]string{}
	for l, err := range tab.RefusedListeners() {
		said[l.Name] = err.Error()
	}
	if got := slices.Sorted(maps.Keys(said)); !slices.Equal(got, []string{"", "first", "odd", "port", "portless"}) {
		t.Errorf("refused: %v", said)
	}
	if !strings.Contains(said["port"], `listener "first" of first.yaml has it already`) {
		t.Errorf("got %q, want first of first.yaml named as the one that has it", said["port"])
	}
	text := ""
	for _, c := range conflicts {
		text += c.Error() + "\n"
	}
	for _, want := range []string{`name "a.test" of section "s" of new of new.yaml is left out: old of old.yaml has it`, `host "*" of listener "first"`, `section "s" of first.yaml`, `section "u" of fine.yaml`, `name "*" of section "tcp/1"`, `host "*" of listener "tcp"`} {
		if !strings.Contains(text, want) {
			t.Errorf("not said: %s\n%s", want, text)
		}
	}
	r := &Registry{}
	r.Swap(tab)
	for _, want := range [][3]string{{"s", "a.test", "old"}, {"s", "b.test", "new"}, {"tcp/1", "", "one"}} {
		route, err := r.Resolve(t.Context(), confined(want[0], want[1]))
		if err != nil || route.Service != want[2] {
			t.Errorf("%v: got %q, %v", want, route.Service, err)
		}
	}
	if tab.SectionOf("fine", tunnel.MustParseName("x.test")) != nil || tab.SectionOf("port", tunnel.Name{}) != nil {
		t.Error("what was left out is found")
	}
}

// Backends are found as services are: by network, via gateways, by health, by
// DNS; and their endpoints are remembered.
func TestBackendsAreServices(t *testing.T) {
	hops := []Hop{{Proto: "connect", Addresses: []string{"gw.test:443"}}}
	far := Network{Name: "far", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}, Gateways: []Gateway{{Address: Endpoint{Addr: netip.MustParseAddr("198.51.100.1"), Port: 15443}}}}
	beyond := Network{Name: "beyond", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")}, Via: hops}
	called := func(name string, eps ...string) *Service {
		return &Service{Name: name, Names: patterns(t, name), Ports: []uint16{8443}, Endpoints: endpoints(eps...), IdleTimeout: 5}
	}
	via := called("via.test")
	via.Via = hops
	nameless := called("x.test", "10.2.0.1:1")
	nameless.Names = nil
	l := listenerOf("l", 443, &Section{Name: "s"})
	for name, s := range map[string]*Service{
		"dns.test": called("d.test", "db.internal:5432", "192.0.2.1:1"), "portless.test": called("p.test", "192.0.2.2"), "far.test": called("f.test", "10.1.0.1:1"),
		"beyond.test": called("b.test", "10.2.0.1:1"), "via.test": via, "nameless.test": nameless, "local.test": called("l.test", "127.0.0.1:1"),
	} {
		l.Sections[0].Rules = append(l.Sections[0].Rules, ruleOf(t, "rule of "+name, []string{name}, Backend{Weight: 1, Service: s}))
	}
	l.Sections[0].Rules[0].IdleTimeout = 7
	lookup := &answers{has: map[string]string{"db.internal": "192.0.2.7"}}
	r := &Registry{Lookup: lookup.lookup, Mesh: Mesh{Network: "here"}, NewTransport: func(s *Service, _ *Endpoint, _ *Gateway) (tunnel.Transport, error) {
		if len(s.Via) > 0 {
			return nowhere{}, nil
		}
		return nil, nil
	}}
	tab, err := r.Merge(Snapshot{Networks: []Network{far, beyond, {Name: "here"}}, Listeners: []*Listener{l}})
	if err != nil {
		t.Fatal(err)
	}
	r.Swap(tab)
	ask := func(name, proto string) string {
		req := confined("s", name)
		req.Proto = proto
		route, err := r.Resolve(t.Context(), req)
		if err != nil {
			return string(tunnel.ReasonOf(err))
		}
		if want := map[bool]int{true: 7, false: 5}[route.Service == l.Sections[0].Rules[0].Name]; int(route.IdleTimeout) != want {
			t.Errorf("%s: idle %d, want %d", name, route.IdleTimeout, want)
		}
		return fmt.Sprint(route.Endpoints, route.Endpoints[0].Transport != nil)
	}
	for _, test := range [][3]string{
		{"dns.test", "sni", "[db.internal (192.0.2.7:5432) 192.0.2.1:1] false"},
		{"portless.test", "sni", "[192.0.2.2:8443] false"},
		{"far.test", "sni", "[198.51.100.1:15443] false"},
		{"far.test", "tls", "no-endpoint"}, // nobody could say there whom it is for
		{"beyond.test", "sni", "[b.test:8443] true"},
		{"beyond.test", "tls", "insecure"},
		{"via.test", "sni", "[via.test:8443] true"},
		{"via.test", "tls", "insecure"},
		{"via.test", "tcp", "[via.test:8443] true"},
		{"nameless.test", "tls", "no-endpoint"},
		{"local.test", "tls", "[127.0.0.1:1] false"},
	} {
		if got := ask(test[0], test[1]); got != test[2] {
			t.Errorf("%s by %s: got %s, want %s", test[0], test[1], got, test[2])
		}
	}
	// A failure is remembered, as long as a rule leads there.
	route, err := r.Resolve(t.Context(), confined("s", "dns.test"))
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort("192.0.2.1:1")
	for _, ep := range route.Endpoints {
		if ep.Addr == at {
			route.Report(ep, &tunnel.Error{Reason: tunnel.DialFailed, Err: errors.New("refused")})
		}
	}
	r.Swap(tab)
	if r.Healthy(at) || len(r.Health()) != 1 || fmt.Sprint(r.Health()[0].Services) != "[d.test]" {
		t.Errorf("got %v, want d.test down", r.Health())
	}
	for range 4 {
		if got := ask("dns.test", "sni"); !strings.HasPrefix(got, "[db.internal") {
			t.Errorf("what fails is tried first: %s", got)
		}
	}
	r.Swap(table(t))
	if len(r.Health()) != 0 {
		t.Errorf("what is in no table is remembered: %v", r.Health())
	}
}

// Finding a rule and its backend does not allocate.
func TestSectionAllocs(t *testing.T) {
	r := withListeners(t, listenerOf("l", 443, &Section{Name: "s", Rules: []*Rule{ruleOf(t, "r", []string{"*.a.test"}, backendOf(2, "192.0.2.1:1"), backendOf(1, "192.0.2.1:2"))}}))
	s, req := r.current.Load(), confined("s", "x.y.a.test")
	if n := testing.AllocsPerRun(100, func() {
		if f, err := s.find(req); err != nil || f.pattern != "*.a.test" {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
	if n := testing.AllocsPerRun(100, func() { r.Table().SectionOf("l", req.Name) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

// Many ask while tables are swapped.
func TestSectionsUnderSwaps(t *testing.T) {
	tab, err := Merge(Snapshot{Listeners: []*Listener{listenerOf("l", 443, &Section{Name: "s", Rules: []*Rule{ruleOf(t, "r", nil, backendOf(1, "192.0.2.1:1"), backendOf(1, "192.0.2.1:2"))}})}})
	if err != nil {
		t.Fatal(err)
	}
	r := &Registry{}
	r.Swap(tab)
	var asking sync.WaitGroup
	for range 4 {
		asking.Go(func() {
			for range 2000 {
				if _, err := r.Resolve(t.Context(), confined("s", "x.test")); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 50 {
		r.Swap(tab)
	}
	asking.Wait()
}
