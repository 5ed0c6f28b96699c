package registry

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"culvert.dev/tunnel"
)

func TestPortRule(t *testing.T) {
	tab := table(t,
		service(t, "any.test"),
		service(t, "one.test", 443),
		service(t, "two.test", 443, 8443),
		service(t, "mix.test", 443), &Service{Name: "mix-rest", Names: patterns(t, "mix.test"), Exposed: true, Origin: "mix:2"},
		service(t, "*.wild.test"),
		service(t, "exact.wild.test", 5432),
		service(t, "*.deep.wild.test", 22),
	)
	for _, tt := range []struct {
		name        string
		port, local uint16
		want        string // pattern and port known, or reason and a part of the text
	}{
		{"any.test", 443, 443, "any.test 443"},
		{"any.test", 1, 443, "any.test 1"},
		{"any.test", 0, 443, "any.test 0"},
		{"one.test", 443, 8443, "one.test:443 443"},
		{"one.test", 80, 443, "no-route has no port 80, it has 443"},
		{"one.test", 0, 9999, "one.test:443 443"},
		{"two.test", 8443, 443, "two.test:8443 8443"},
		{"two.test", 0, 8443, "two.test:8443 8443"},
		{"two.test", 0, 9999, "no-route has the ports 443, 8443 and none was asked for: listen on one of them (this is 9999)"},
		{"mix.test", 443, 443, "mix.test:443 443"},
		{"mix.test", 80, 443, "mix.test 80"},
		{"mix.test", 0, 443, "mix.test:443 443"},
		{"mix.test", 0, 9999, "mix.test 9999"},
		{"a.wild.test", 80, 443, "*.wild.test 80"},
		{"a.b.c.wild.test", 80, 443, "*.wild.test 80"},
		{"wild.test", 80, 443, "no-route no service is named \"wild.test\"; the routing table has 8 services"},
		{"exact.wild.test", 5432, 443, "exact.wild.test:5432 5432"},
		{"exact.wild.test", 80, 443, "no-route has no port 80, it has 5432"}, // and not *.wild.test
		{"a.deep.wild.test", 22, 443, "*.deep.wild.test:22 22"},
		{"a.deep.wild.test", 80, 443, "no-route has no port 80"}, // the longest suffix decides
		{"deep.wild.test", 80, 443, "*.wild.test 80"},
		{"a.exact.wild.test", 80, 443, "*.wild.test 80"},
		{"xwild.test", 80, 443, "no-route"},
		{"test", 80, 443, "no-route"},
		{"two.test", 0, 0, "no-route"},
	} {
		t.Run(fmt.Sprintf("%s:%d at %d", tt.name, tt.port, tt.local), func(t *testing.T) {
			f, err := tab.findVisible(byName(tt.name, tt.port, tt.local))
			if err != nil {
				reason, text, _ := strings.Cut(tt.want, " ")
				if string(err.Reason) != reason || !strings.Contains(err.Error(), text) {
					t.Errorf("got %s: %v, want %s", err.Reason, err, tt.want)
				}
				return
			}
			if got := fmt.Sprint(f.pattern, " ", f.port); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func TestByAddress(t *testing.T) {
	private := service(t, "private.test", 443)
	private.Exposed = false
	private.Endpoints = []Endpoint{{Addr: netip.MustParseAddr("192.0.2.66"), Port: 443}, {Addr: netip.MustParseAddr("192.0.2.1"), Port: 8443}}
	open := service(t, "open.test", 443)
	open.Addresses = []netip.Addr{netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("127.0.0.99"), netip.MustParseAddr("::ffff:10.96.0.11")}
	open.Endpoints = append(open.Endpoints,
		Endpoint{Addr: netip.MustParseAddr("127.0.0.1"), Port: 8443},
		Endpoint{Addr: netip.MustParseAddr("169.254.169.254"), Port: 80},
		Endpoint{Addr: netip.MustParseAddr("2001:db8::1")}, // the service's port
		Endpoint{Host: "name.test", Port: 8443},
	)
	tab := table(t, private, open)
	for _, tt := range []struct {
		addr string
		port uint16
		want string
	}{
		{"10.96.0.10", 443, "10.96.0.10:443"},
		{"::ffff:10.96.0.10", 443, "10.96.0.10:443"},
		{"10.96.0.11", 443, "10.96.0.11:443"},
		{"10.96.0.10", 80, "no-route"},
		{"10.96.0.10", 0, "10.96.0.10:443"},
		{"127.0.0.99", 443, "127.0.0.99:443"}, // explicit
		{"192.0.2.1", 8443, " 192.0.2.1:8443"},
		{"192.0.2.1", 443, "no-route"},
		{"192.0.2.1", 0, "no-route"},
		{"192.0.2.66", 443, "not-exposed"},
		{"2001:db8::1", 443, " [2001:db8::1]:443"},
		{"2001:db8::1%eth0", 443, " [2001:db8::1]:443"},
		{"2001:db8::1", 8443, "no-route"},
		{"127.0.0.1", 8443, "prohibited"},
		{"::ffff:127.0.0.1", 8443, "prohibited"},
		{"64:ff9b::127.0.0.1", 8443, "prohibited"},
		{"169.254.169.254", 80, "prohibited"},
		{"0.0.0.0", 8443, "prohibited"},
		{"198.51.100.1", 443, "no-route"},
	} {
		f, err := tab.findVisible(byAddr(tt.addr, tt.port))
		got := f.pattern
		if f.endpoint.IsValid() {
			got = " " + f.endpoint.String()
		}
		if err != nil {
			got = string(err.Reason)
		}
		if got != tt.want {
			t.Errorf("find(%s, port %d) = %q, want %q", tt.addr, tt.port, got, tt.want)
		}
		if err == nil && f.entry.Name != "open.test" {
			t.Errorf("find(%s, port %d) = service %q, want open.test", tt.addr, tt.port, f.entry.Name)
		}
	}
}

func TestExposure(t *testing.T) {
	prefixes := func(ss ...string) (ps []netip.Prefix) {
		for _, s := range ss {
			ps = append(ps, netip.MustParsePrefix(s))
		}
		return ps
	}
	everyone, office, both, unknown, private := service(t, "everyone.test"), service(t, "office.test"), service(t, "both.test"), service(t, "unknown.test"), service(t, "private.test")
	office.ExposedTo = []string{"office"}
	both.ExposedTo = []string{"lab", "office"}
	unknown.ExposedTo = []string{"nowhere"}
	private.Exposed = false
	tab, err := Merge(Snapshot{
		Networks: []Network{
			{Name: "office", CIDRs: prefixes("10.0.0.0/8", "2001:db8::/32", "::ffff:192.0.2.0/120")},
			{Name: "lab", CIDRs: prefixes("10.1.0.0/16", "2001:db8:1::/48")},
			{Name: "host", CIDRs: prefixes("10.1.2.3/32")},
		},
		Services: []*Service{everyone, office, both, unknown, private},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ source, network, sees string }{
		{"10.2.3.4:1", "office", "everyone office both"},
		{"[::ffff:10.2.3.4]:1", "office", "everyone office both"},
		{"192.0.2.200:1", "office", "everyone office both"},
		{"10.1.3.4:1", "lab", "everyone both"}, // the longest prefix only
		{"10.1.2.3:1", "host", "everyone"},
		{"[2001:db8:2::1]:1", "office", "everyone office both"},
		{"[2001:db8:1::1%eth0]:1", "lab", "everyone both"},
		{"203.0.113.9:1", "", "everyone"},
		{"127.0.0.1:1", "", "everyone"}, // nobody is trusted for being near
		{"[::1]:1", "", "everyone"},
		{"192.168.0.1:1", "", "everyone"},
		{"", "", "everyone"},
	} {
		var src netip.AddrPort
		if tt.source != "" {
			src = netip.MustParseAddrPort(tt.source)
		}
		if got, _ := tab.Network(src.Addr()); got != tt.network {
			t.Errorf("Network(%s) = %q, want %q", tt.source, got, tt.network)
		}
		var sees []string
		for _, name := range []string{"everyone", "office", "both", "unknown", "private"} {
			req := byName(name+".test", 443, 443)
			req.Source = src
			_, err := tab.findVisible(req)
			if err == nil {
				sees = append(sees, name)
			} else if err.Reason != tunnel.NotExposed {
				t.Errorf("%s asks for %s: %s, want not-exposed", tt.source, name, err.Reason)
			}
		}
		if got := strings.Join(sees, " "); got != tt.sees {
			t.Errorf("%s sees %q, want %q", tt.source, got, tt.sees)
		}
	}
}

// An endpoint of several services is asked for as any that the caller sees.
func TestSharedEndpoint(t *testing.T) {
	private, office, lab, open := service(t, "private.test"), service(t, "office.test"), service(t, "lab.test"), service(t, "open.test")
	private.Exposed = false
	office.ExposedTo, lab.ExposedTo = []string{"office"}, []string{"lab"}
	networks := []Network{
		{Name: "office", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}},
		{Name: "lab", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}},
	}
	for _, tt := range []struct {
		source   string
		services []*Service
		want     string
	}{
		{"10.0.0.1", []*Service{private, lab, office, open}, "office.test"},
		{"10.1.0.1", []*Service{private, lab, office, open}, "lab.test"},
		{"8.8.8.8", []*Service{private, lab, office, open}, "open.test"},
		{"8.8.8.8", []*Service{open, private, lab}, "open.test"},
		{"8.8.8.8", []*Service{private, lab, office}, "not-exposed"},
		{"10.0.0.1", []*Service{lab, office, private}, "office.test"},
	} {
		tab, err := Merge(Snapshot{Networks: networks, Services: tt.services})
		if err != nil {
			t.Fatal(err)
		}
		req := byAddr("192.0.2.1", 8443)
		req.Source = netip.AddrPortFrom(netip.MustParseAddr(tt.source), 1)
		f, refusal := tab.findVisible(req)
		got := ""
		if refusal != nil {
			got = string(refusal.Reason)
		} else {
			got = f.entry.Name
		}
		if got != tt.want {
			t.Errorf("from %s: %s, want %s", tt.source, got, tt.want)
		}
	}
}

func TestRefusals(t *testing.T) {
	for _, tt := range []struct {
		tab  *Table
		req  *tunnel.Request
		want string
	}{
		{nil, byName("a.test", 443, 443), "no table is loaded yet"},
		{table(t), byName("a.test", 443, 443), "the routing table has 0 services"},
		{table(t, service(t, "b.test")), byName("a.test", 443, 443), `no service is named "a.test"; the routing table has 1 service`},
		{table(t, service(t, "b.test")), &tunnel.Request{}, "names no destination"},
	} {
		_, err := tt.tab.findVisible(tt.req)
		if err == nil || err.Reason != tunnel.NoRoute || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("got %v, want no-route: %s", err, tt.want)
		}
	}
}

// reference finds a service by reading them all.
func reference(services []*Service, req *tunnel.Request) (int, bool) {
	best := -1 // the best pattern: exact is longer than any wildcard
	var at []int
	for i, s := range services {
		for _, p := range s.Names {
			if !p.Matches(req.Name) {
				continue
			}
			rank := len(p.Suffix.String())
			if !p.Wildcard {
				rank = 1000
			}
			if rank > best {
				best, at = rank, nil
			}
			if rank == best && !slices.Contains(at, i) {
				at = append(at, i)
			}
		}
	}
	port := req.Port
	if port == 0 {
		ports := 0
		for _, i := range at {
			ports += max(1, len(services[i].Ports))
		}
		if ports == 1 {
			return at[0], true
		}
		port = req.LocalPort
	}
	for _, i := range at {
		if slices.Contains(services[i].Ports, port) {
			return i, true
		}
	}
	for _, i := range at {
		if len(services[i].Ports) == 0 {
			return i, true
		}
	}
	return 0, false
}

func TestLookupAgainstReference(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	labels := []string{"a", "b", "c", "test", "xa"}
	name := func() string {
		parts := make([]string, 1+rng.IntN(4))
		for i := range parts {
			parts[i] = labels[rng.IntN(len(labels))]
		}
		return strings.Join(parts, ".")
	}
	found := 0
	for range 300 {
		var services []*Service
		claimed := map[string]bool{}
		for i := range rng.IntN(12) {
			s := &Service{Name: fmt.Sprint(i), Exposed: true}
			for port := range uint16(4) {
				if port > 0 && rng.IntN(3) == 0 {
					s.Ports = append(s.Ports, port)
				}
			}
			for range 1 + rng.IntN(3) {
				n := name()
				if rng.IntN(2) == 0 {
					n = "*." + n
				}
				free := true // conflicts have a test of their own
				for _, port := range append(slices.Clone(s.Ports), 0)[:max(1, len(s.Ports))] {
					k := fmt.Sprint(n, port)
					free = free && !claimed[k]
				}
				if !free {
					continue
				}
				for _, port := range append(slices.Clone(s.Ports), 0)[:max(1, len(s.Ports))] {
					claimed[fmt.Sprint(n, port)] = true
				}
				s.Names = append(s.Names, patterns(t, n)...)
			}
			services = append(services, s)
		}
		tab := table(t, services...)
		for range 200 {
			req := byName(name(), uint16(rng.IntN(5)), uint16(rng.IntN(5)))
			want, ok := reference(services, req)
			f, err := tab.findVisible(req)
			if ok != (err == nil) {
				t.Fatalf("%s at %d: got %v, want found %v\n%+v", req.Target(), req.LocalPort, err, ok, services)
			}
			if ok && f.entry.Name != services[want].Name {
				t.Fatalf("%s at %d: got service %s, want %s\n%+v", req.Target(), req.LocalPort, f.entry.Name, services[want].Name, services)
			}
			if ok {
				found++
			}
		}
	}
	if found < 5000 {
		t.Errorf("%d of 60000 random requests found a service: the test tests little", found)
	}
}

func TestLookupDoesNotAllocate(t *testing.T) {
	office := service(t, "office.test")
	office.ExposedTo = []string{"office"}
	tab, err := Merge(Snapshot{
		Networks: []Network{{Name: "office", CIDRs: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}}},
		Services: []*Service{service(t, "a.test", 443, 8443), service(t, "*.wild.test"), office},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, req := range []*tunnel.Request{byName("a.test", 443, 443), byName("a.b.c.d.e.wild.test", 443, 443), byName("office.test", 0, 443), byAddr("192.0.2.1", 8443)} {
		if n := testing.AllocsPerRun(100, func() {
			if _, err := tab.findVisible(req); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("find(%s): %v allocations, want 0", req.Target(), n)
		}
	}
}

func many(t testing.TB, n int) []*Service {
	services := make([]*Service, 0, n)
	for i := range n {
		name := fmt.Sprintf("svc-%d.example.com", i)
		if i%10 == 0 {
			name = fmt.Sprintf("*.svc-%d.example.com", i)
		}
		services = append(services, service(t, name, 443))
	}
	return services
}

func BenchmarkFind(b *testing.B) {
	for _, n := range []int{10, 100_000} {
		tab := table(b, many(b, n)...)
		for _, name := range []string{"svc-7.example.com", "a.b.svc-0.example.com", "nobody.example.com"} {
			req := byName(name, 0, 443)
			b.Run(fmt.Sprintf("routes=%d/%s", n, name), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					_, _ = tab.findVisible(req)
				}
			})
		}
	}
}

func BenchmarkMerge(b *testing.B) {
	snapshot := Snapshot{Services: many(b, 100_000)}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Merge(snapshot); err != nil {
			b.Fatal(err)
		}
	}
}

// A table of a large cluster, that is made again whenever a pod comes or goes.
func BenchmarkMergeEndpoints(b *testing.B) {
	all := many(b, 10_000)
	for i, s := range all {
		s.Endpoints = nil
		for j := range 10 {
			s.Endpoints = append(s.Endpoints, Endpoint{Addr: netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), byte(j)}), Network: "west"})
		}
	}
	snapshot := Snapshot{Services: all, Networks: []Network{{Name: "west"}}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Merge(snapshot); err != nil {
			b.Fatal(err)
		}
	}
}
