package endpoints

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"culvert.dev/internal/testnet"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

func TestOf(t *testing.T) {
	yes, no := true, false
	host := func(s string) func(*discoveryv1.Endpoint) {
		return func(e *discoveryv1.Endpoint) { e.Hostname = &s }
	}
	states := func(ready, serving, terminating *bool) func(*discoveryv1.Endpoint) {
		return func(e *discoveryv1.Endpoint) {
			e.Conditions = discoveryv1.EndpointConditions{Ready: ready, Serving: serving, Terminating: terminating}
		}
	}
	for _, tt := range []struct {
		name, addr string
		change     func(*discoveryv1.Endpoint)
		ok         bool
		state      State
		host       string
	}{
		{name: "a pod", addr: "10.0.0.1", ok: true, state: Ready},
		{name: "of IPv6", addr: "fd00::1", ok: true, state: Ready},
		{name: "mapped", addr: "::ffff:10.0.0.1", ok: true, state: Ready},
		{name: "loopback", addr: "127.0.0.1"},
		{name: "loopback, mapped", addr: "::ffff:127.0.0.1"},
		{name: "metadata", addr: "169.254.169.254"},
		{name: "unspecified", addr: "0.0.0.0"},
		{name: "a name", addr: "web.example.com"},
		{name: "none", addr: ""},
		{name: "not ready", addr: "10.0.0.1", change: states(&no, nil, nil), ok: true},
		{name: "draining", addr: "10.0.0.1", change: states(&no, &yes, &yes), ok: true, state: Draining},
		{name: "ending, and not serving", addr: "10.0.0.1", change: states(&no, &no, &yes), ok: true},
		{name: "serving, and neither", addr: "10.0.0.1", change: states(&no, &yes, nil), ok: true},
		{name: "ready by default", addr: "10.0.0.1", change: states(nil, nil, &yes), ok: true, state: Ready},
		{name: "a hostname", addr: "10.0.0.1", change: host("DB-0"), ok: true, state: Ready, host: "db-0"},
		{name: "a hostname that is none", addr: "10.0.0.1", change: host("db.0"), ok: true, state: Ready},
	} {
		e := &discoveryv1.Endpoint{Addresses: []string{tt.addr}}
		if tt.addr == "" {
			e.Addresses = nil
		}
		if tt.change != nil {
			tt.change(e)
		}
		got, ok := Of(e)
		if ok != tt.ok || ok && (got.State != tt.state || got.Host != tt.host || got.Addr.Is4In6()) {
			t.Errorf("%s: got %+v, %t", tt.name, got, ok)
		}
	}
	by := func(ref corev1.ObjectReference) uint64 {
		e, _ := Of(&discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}, TargetRef: &ref})
		return e.Pod
	}
	if by(corev1.ObjectReference{UID: "a"}) == by(corev1.ObjectReference{UID: "b"}) || by(corev1.ObjectReference{UID: "a"}) != by(corev1.ObjectReference{UID: "a", Name: "x"}) ||
		by(corev1.ObjectReference{Kind: "Pod", Name: "a"}) == by(corev1.ObjectReference{Kind: "Pod", Name: "b"}) {
		t.Error("pods are not told apart by their UID, or by their name without one")
	}
}

func TestChoose(t *testing.T) {
	at := func(addr string, s State, hints ...string) Endpoint {
		return Endpoint{Addr: netip.MustParseAddr(addr), State: s, Hints: hints}
	}
	one, two := "10.0.0.1", "10.0.0.2"
	for _, tt := range []struct {
		name   string
		choice Choice
		parts  [][]Endpoint
		want   string
	}{
		{"nothing", Choice{}, nil, ""},
		{"none ready", Choice{}, [][]Endpoint{{at(one, NotReady)}}, ""},
		{"ready", Choice{}, [][]Endpoint{{at(one, Ready), at(two, Draining)}}, one},
		{"ready in another slice", Choice{}, [][]Endpoint{{at(two, Draining)}, {at(one, Ready)}}, one},
		{"draining", Choice{}, [][]Endpoint{{at(one, NotReady), at(two, Draining)}}, two},
		{"near", Choice{Zone: "a"}, [][]Endpoint{{at(one, Ready, "b"), at(two, Ready, "a", "b")}}, two},
		{"not all have hints", Choice{Zone: "a"}, [][]Endpoint{{at(one, Ready)}, {at(two, Ready, "a")}}, one + " " + two},
		{"nobody for our zone", Choice{Zone: "c"}, [][]Endpoint{{at(one, Ready, "b"), at(two, Ready, "a")}}, one + " " + two},
		{"no zone", Choice{}, [][]Endpoint{{at(one, Ready, "b"), at(two, Ready, "a")}}, one + " " + two},
		{"headless", Choice{Zone: "a", Headless: true}, [][]Endpoint{{at(one, Ready, "b"), at(two, Ready, "a")}}, one + " " + two},
		{"hints of those that end", Choice{Zone: "a"}, [][]Endpoint{{at(one, Draining, "b"), at(two, Draining, "a")}}, one + " " + two},
	} {
		var parts []Part
		for i, es := range tt.parts {
			parts = append(parts, Part{es, uint16(i + 1)})
		}
		var got []string
		tt.choice.Choose(parts, func(e *Endpoint, port uint16) {
			if !slices.ContainsFunc(parts[port-1].Endpoints, func(o Endpoint) bool { return o.Addr == e.Addr }) {
				t.Errorf("%s: %s has the port of another part", tt.name, e.Addr)
			}
			got = append(got, e.Addr.String())
		})
		if s := strings.Join(got, " "); s != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, s, tt.want)
		}
	}
}

func TestDoubles(t *testing.T) {
	v4, v6, alone := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2")
	pods := map[netip.Addr]uint64{v4: 1, v6: 1, alone: 2}
	for _, tt := range []struct {
		name   string
		choice Choice
		pods   map[netip.Addr]uint64
		want   []netip.Addr
	}{
		{"IPv4 first", Choice{}, pods, []netip.Addr{v6}},
		{"IPv6 first", Choice{V6: true}, pods, []netip.Addr{v4}},
		{"IPv4 preferred", Choice{V6: true, Prefer: PreferIPv4}, pods, []netip.Addr{v6}},
		{"IPv6 preferred", Choice{Prefer: PreferIPv6}, pods, []netip.Addr{v4}},
		{"both", Choice{Prefer: PreferBoth}, pods, nil},
		{"one family", Choice{}, map[netip.Addr]uint64{v6: 1, alone: 1}, nil},
		{"of nobody knows whom", Choice{}, map[netip.Addr]uint64{v4: 0, v6: 0}, nil},
	} {
		if got := tt.choice.Doubles(maps.All(tt.pods)); !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestChoiceOf(t *testing.T) {
	s := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone, IPFamilies: []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}}}
	if got, want := ChoiceOf(s, "z", "ipv4"), (Choice{Zone: "z", Prefer: "ipv4", V6: true, Headless: true}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := ChoiceOf(&corev1.Service{}, "", ""); got != (Choice{}) {
		t.Errorf("got %+v", got)
	}
}

func TestZones(t *testing.T) {
	zoneOf := func(zone *string) string {
		e, ok := Of(&discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}, Zone: zone})
		if !ok || e.Hints != nil {
			t.Errorf("got %+v, %t, want an endpoint without hints", e, ok)
		}
		return e.Zone
	}
	for zone, want := range map[string]string{
		"west-1a": "west-1a", "Zone_1.b": "Zone_1.b", strings.Repeat("z", 63): strings.Repeat("z", 63),
		"": "", strings.Repeat("z", 64): "", "west 1a": "", "west\n1a": "", "wést": "",
	} {
		if got := zoneOf(&zone); got != want {
			t.Errorf("zone %q: got %q, want %q", zone, got, want)
		}
	}
	if got := zoneOf(nil); got != "" {
		t.Errorf("without a zone: got %q, want none", got)
	}
	one, two := zoneOf(ref(strings.Clone("west-1a"))), zoneOf(ref(strings.Clone("west-1a")))
	if unsafe.StringData(one) != unsafe.StringData(two) {
		t.Error("two endpoints in one zone have a copy each of its name, want one for both")
	}
}

func TestCompareZones(t *testing.T) {
	zones := []string{"", "west-1b", "", "west-1a"}
	slices.SortFunc(zones, CompareZones)
	if want := []string{"west-1a", "west-1b", "", ""}; !slices.Equal(zones, want) {
		t.Errorf("got %q, want %q", zones, want)
	}
	known, unknown := Endpoint{Zone: "west-1a"}, Endpoint{}
	if !known.Before(&unknown) || unknown.Before(&known) {
		t.Error("an endpoint whose zone is known does not come before one whose zone is not")
	}
}
