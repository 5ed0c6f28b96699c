package registry

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

var errDown = errors.New("it does not answer")

func checkOf(kind string) Check { return Check{Kind: kind}.complete(nil) }

func target(addr string, kind string) Target {
	return Target{Addr: netip.MustParseAddrPort(addr), Check: checkOf(kind)}
}

// What a check says is down is tried last, but tried; and first again when it
// is back.
func TestDownByCheckStandsLast(t *testing.T) {
	r := serving(t, nil, nil, "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1")
	r.ReportCheck(target("192.0.2.1:1", "tcp"), errDown)
	for range 4 {
		if got := order(t, r); !strings.HasSuffix(got, " 192.0.2.1:1") || strings.Count(got, " ") != 2 {
			t.Fatalf("got %s, want all three with 192.0.2.1:1 as the last", got)
		}
	}
	report(r, "192.0.2.2:1", errRefused)
	for range 4 {
		if got, want := order(t, r), "192.0.2.3:1 192.0.2.2:1 192.0.2.1:1"; got != want {
			t.Fatalf("got %s, want %s: a failed dial is less than a failed check", got, want)
		}
	}
	r.ReportCheck(target("192.0.2.2:1", "tcp"), errDown)
	r.ReportCheck(target("192.0.2.3:1", "tcp"), errDown)
	if got := order(t, r); strings.Count(got, " ") != 2 {
		t.Errorf("got %s, want all three: all are down, and all are tried", got)
	}
	for i := range 3 {
		r.ReportCheck(target(fmt.Sprintf("192.0.2.%d:1", i+1), "tcp"), nil)
	}
	if n := r.health.n.Load(); n != 0 {
		t.Errorf("%d addresses are not well, want none", n)
	}
	first := map[string]bool{}
	for range 3 {
		ap, _, _ := strings.Cut(order(t, r), " ")
		first[ap] = true
	}
	if len(first) != 3 {
		t.Errorf("first were %v, want each in turn", first)
	}
}

func TestHealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := serving(t, nil, nil, "192.0.2.1:1")
		ap := netip.MustParseAddrPort("192.0.2.1:1")
		want := func(want bool, when string) {
			t.Helper()
			if got := r.Healthy(ap); got != want {
				t.Errorf("%s: Healthy is %t, want %t", when, got, want)
			}
		}
		want(true, "at first")
		report(r, ap.String(), errRefused)
		want(false, "after a failed dial")
		time.Sleep(1100 * time.Millisecond)
		want(true, "after its penalty")
		report(r, ap.String(), errRefused)
		want(false, "after another")
		r.ReportCheck(target("192.0.2.1:1", "tcp"), nil)
		want(true, "after a check that found it well")
		r.ReportCheck(target("192.0.2.1:1", "tcp"), errDown)
		r.ReportCheck(target("192.0.2.1:1", "tcp"), errDown)
		r.ReportCheck(target("192.0.2.1:1", "tls"), errDown)
		want(false, "down by two checks")
		r.ReportCheck(target("192.0.2.1:1", "tcp"), nil)
		want(false, "down by one of two checks")
		r.ForgetCheck(target("192.0.2.1:1", "tls"))
		want(true, "when nobody looks any more")
		r.ForgetCheck(target("192.0.2.1:1", "tls"))
		r.ForgetCheck(target("192.0.2.1:1", "tcp"))
		if n, m := len(r.health.down), len(r.health.checked); n != 0 || m != 0 || r.health.n.Load() != 0 {
			t.Errorf("%d down, %d checked, want none", n, m)
		}
	})
}

// It costs nothing while all is well.
func TestHealthyTakesNoLock(t *testing.T) {
	r := serving(t, nil, nil, "192.0.2.1:1")
	r.ReportCheck(target("192.0.2.1:1", "tcp"), nil)
	r.health.mu.Lock() // whoever wants it now waits for ever
	defer r.health.mu.Unlock()
	ap := netip.MustParseAddrPort("192.0.2.1:1")
	if n := testing.AllocsPerRun(100, func() { r.Healthy(ap) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

// Checks that ask the same are equal in a table, and those that don't are not.
func TestChecksAreCompleted(t *testing.T) {
	for _, row := range []struct{ in, want Check }{
		{Check{}, Check{}},
		{Check{Host: "x", Interval: time.Second}, Check{}},
		{Check{Kind: "tcp", Host: "x", Path: "/x"}, Check{Kind: "tcp", Interval: time.Second, Timeout: time.Second / 2, HealthyThreshold: 2, UnhealthyThreshold: 2}},
		{Check{Kind: "tls", Path: "/x", Interval: 4 * time.Second}, Check{Kind: "tls", Interval: 4 * time.Second, Timeout: time.Second / 2, HealthyThreshold: 2, UnhealthyThreshold: 2}},
		{Check{Kind: "tls", Host: "x.test", Timeout: time.Minute}, Check{Kind: "tls", Host: "x.test", Interval: time.Second, Timeout: time.Second / 2, HealthyThreshold: 2, UnhealthyThreshold: 2}},
		{Check{Kind: "http"}, Check{Kind: "http", Host: "b.test", Path: "/", Statuses: "200-399", Interval: time.Second, Timeout: time.Second / 2, HealthyThreshold: 2, UnhealthyThreshold: 2}},
		{Check{Kind: "http", Host: "x.test", Path: "/up"}, Check{Kind: "http", Host: "x.test", Path: "/up", Statuses: "200-399", Interval: time.Second, Timeout: time.Second / 2, HealthyThreshold: 2, UnhealthyThreshold: 2}},
	} {
		s := service(t, "a.test")
		s.Names, s.Check = patterns(t, "*.a.test", "b.test"), row.in
		gateways := []Gateway{{Address: Endpoint{Host: "gw.test", Port: 1}, Check: row.in}}
		tab, err := Merge(Snapshot{Services: []*Service{s}, Networks: []Network{{Name: "west", Gateways: gateways}}})
		if err != nil {
			t.Fatal(err)
		}
		for got := range tab.Services() {
			if got.Check != row.want {
				t.Errorf("%+v becomes %+v, want %+v", row.in, got.Check, row.want)
			}
		}
		want := row.want
		if want.Host == "b.test" {
			want.Host = "" // a gateway is of no service
		}
		for n := range tab.Networks() {
			if got := n.Gateways[0].Check; got != want {
				t.Errorf("of a gateway: %+v becomes %+v, want %+v", row.in, got, want)
			}
		}
		if gateways[0].Check != row.in {
			t.Error("what the source has said was changed")
		}
	}
}

func TestHealthSaysWhoseAndSince(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var services []*Service
		for i := range maxServicesNamed + 3 {
			s := service(t, fmt.Sprintf("s%02d.test", i), 443)
			s.Endpoints = []Endpoint{{Addr: netip.MustParseAddr("192.0.2.1")}, {Addr: netip.MustParseAddr("192.0.2.1"), Port: 443}}
			services = append(services, s)
		}
		named := service(t, "named.test")
		named.Endpoints = []Endpoint{{Host: "db.test", Port: 5432, Network: "east"}}
		far := service(t, "far.test")
		far.Endpoints, far.Via = []Endpoint{{Addr: netip.MustParseAddr("192.0.2.1"), Port: 443}}, []Hop{{Proto: "connect", Addresses: []string{"x"}}}
		tab, err := Merge(Snapshot{
			Services: append(services, named, far),
			Networks: []Network{{Name: "east"}, {Name: "west", CIDRs: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Gateways: []Gateway{
				{Address: Endpoint{Addr: netip.MustParseAddr("192.0.2.9"), Port: 443}, Public: Endpoint{Host: "gw.test", Port: 443}},
			}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		var r Registry
		if got := r.Health(); got != nil {
			t.Errorf("without a table: %v, want nothing", got)
		}
		r.Swap(tab)
		time.Sleep(time.Second)
		r.ReportCheck(target("192.0.2.1:443", "tcp"), nil)
		r.ReportCheck(Target{Addr: netip.MustParseAddrPort("198.51.100.1:443"), Host: "gw.test", Check: checkOf("tcp")}, errDown)
		r.health.report(tunnel.Endpoint{Addr: netip.MustParseAddrPort("10.0.0.5:5432"), Host: "db.test"}, errRefused)
		report(&r, "192.0.2.9:443", errRefused)
		time.Sleep(1500 * time.Millisecond)
		r.ReportCheck(Target{Addr: netip.MustParseAddrPort("198.51.100.1:443"), Host: "gw.test", Check: checkOf("tcp")}, errRefused)
		r.health.report(tunnel.Endpoint{Addr: netip.MustParseAddrPort("10.0.0.5:5432"), Host: "db.test"}, errDown)

		var got []string
		for _, h := range r.Health() {
			got = append(got, fmt.Sprintf("%s %s %s %q %d %s/%s %q since %v: %v", h.State, h.Addr, h.Host, h.Services, h.More, h.Gateway, h.Network, h.Check.Kind, h.Since.Sub(start), h.Err))
		}
		want := []string{
			`down 198.51.100.1:443 gw.test [] 0 west/ "tcp" since 1s: connection refused`,
			`failing 10.0.0.5:5432 db.test ["named.test"] 0 /east "" since 1s: it does not answer`,
			`suspect 192.0.2.9:443  [] 0 west/west "" since 1s: connection refused`,
			`up 192.0.2.1:443  ["s00.test" "s01.test" "s02.test" "s03.test" "s04.test" "s05.test" "s06.test" "s07.test"] 3 /west "tcp" since 1s: <nil>`,
		}
		if !slices.Equal(got, want) {
			t.Errorf("got:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		// A gateway's failures outlive tables that still have it.
		r.Swap(tab)
		if _, ok := r.health.failing[healthKey{addr: netip.MustParseAddrPort("192.0.2.9:443")}]; !ok {
			t.Error("the failure of a gateway was forgotten with a table that has it")
		}
	})
}

func TestStatuses(t *testing.T) {
	for _, row := range []struct {
		items []string
		want  Statuses
	}{
		{[]string{"200"}, "200"},
		{[]string{"301-303", "200", "200"}, "200,301-303"},
		{[]string{"200-599"}, "200-599"},
		{[]string{"100"}, ""}, {[]string{"600"}, ""}, {[]string{"0200"}, ""}, {[]string{""}, ""}, {[]string{"300-200"}, ""},
		{[]string{"200-"}, ""}, {[]string{"-200"}, ""}, {[]string{"+20"}, ""}, {[]string{"200,300"}, ""},
	} {
		got, err := ParseStatuses(row.items...)
		if got != row.want || (err == nil) != (row.want != "") {
			t.Errorf("ParseStatuses(%q) = %q, %v; want %q", row.items, got, err, row.want)
		}
	}
	for _, row := range []struct {
		set  Statuses
		code int
		want bool
	}{
		{DefaultStatuses, 200, true}, {DefaultStatuses, 399, true}, {DefaultStatuses, 400, false}, {DefaultStatuses, 101, false},
		{"200,301-303", 302, true}, {"200,301-303", 300, false}, {"200", 0, false}, {"", 0, false}, {"", 200, false},
	} {
		if got := row.set.Has(row.code); got != row.want {
			t.Errorf("Statuses(%q).Has(%d) = %t, want %t", row.set, row.code, got, row.want)
		}
	}
}
