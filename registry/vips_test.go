package registry

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"culvert.dev/tunnel"
)

func vipService(t testing.TB, name string, ports ...uint16) *Service {
	s := service(t, name, ports...)
	s.VIP = true
	return s
}

func TestWantVIPs(t *testing.T) {
	private, unwanted := vipService(t, "private.test"), vipService(t, "unwanted.test")
	private.Exposed, unwanted.VIP = false, false
	both := vipService(t, "*.both.test", 25)
	both.Names = append(both.Names, patterns(t, "mail.both.test", "other.both.test")...)
	meshed := vipService(t, "db.test")
	meshed.ID = ID{Service: "db", Cluster: "west"}
	only := vipService(t, "*.only.test")
	only.ID = ID{Service: "only", Namespace: "shop", Cluster: "west"}
	same := vipService(t, "same.test")
	same.ID = meshed.ID
	late := vipService(t, "one.test", 443, 8443) // 443 is the first's
	late.Name = "late"
	hidden := vipService(t, "one.test", 443) // all of it is
	hidden.Name = "hidden"
	tab, _ := Merge(Snapshot{Services: []*Service{
		vipService(t, "one.test", 443), vipService(t, "two.test", 1, 2), private, unwanted, vipService(t, "*.wild.test"), both, meshed, only, same,
	}}, Snapshot{Services: []*Service{late, hidden}})
	var got []string
	for _, w := range tab.VIPRequests() {
		got = append(got, w.Service+"="+strings.Join(w.Keys, ","))
	}
	want := []string{
		"one.test=one.test", "two.test=two.test", "*.both.test=mail.both.test,other.both.test", "db.test=west/default/db,db.test",
		"*.only.test=west/shop/only", "same.test=same.test", "late=one.test:8443",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	var none *Table
	v4, _ := none.VIPs(0)
	_, ok := none.ByVIP(netip.MustParseAddr("240.0.0.1"))
	if none.VIPRequests() != nil || none.AllVIPs() != nil || none.UsedAddresses(netip.MustParsePrefix("240.0.0.0/4")) != nil || v4.IsValid() || ok {
		t.Error("the nil table has VIPs")
	}
}

func vip(key, v4, v6 string) VIP {
	v := VIP{Key: key}
	if v4 != "" {
		v.V4 = netip.MustParseAddr(v4)
	}
	if v6 != "" {
		v.V6 = netip.MustParseAddr(v6)
	}
	return v
}

// saidVIPs is what a table says of VIPs, by service, both ways.
func saidVIPs(t *testing.T, tab *Table) []string {
	t.Helper()
	var out []string
	i := 0
	for s := range tab.Services() {
		v4, v6 := tab.VIPs(i)
		for _, a := range []netip.Addr{v4, v6} {
			if !a.IsValid() {
				continue
			}
			if back, ok := tab.ByVIP(a); !ok || back != i {
				t.Errorf("%s is said to be of service %d, %v, want %d", a, back, ok, i)
			}
			out = append(out, s.Name+" "+a.String())
		}
		i++
	}
	return out
}

// Addresses stay as tables change, as long as the service does.
func TestAssignVIPs(t *testing.T) {
	told := 0
	r := &Registry{OnTable: func() { told++ }}
	if r.AssignVIPs(nil) != nil {
		t.Error("assigned before there was a table")
	}
	a, b := vipService(t, "a.test", 1), vipService(t, "b.test")
	r.Swap(table(t, a, service(t, "none.test"), b))
	first := r.Table()
	list := []VIP{vip("b.test", "240.0.0.2", "fd00::2"), vip("a.test", "240.0.0.1", ""), vip("none.test", "240.0.0.3", ""), vip("gone.test", "240.0.0.4", "")}
	second := r.AssignVIPs(list)
	if second != r.Table() || second.Generation() != 2 || told != 1 {
		t.Errorf("generation %d, told %d times", second.Generation(), told)
	}
	if got := saidVIPs(t, first); got != nil {
		t.Errorf("the table before has changed: %q", got)
	}
	want := []string{"a.test 240.0.0.1", "b.test 240.0.0.2", "b.test fd00::2"}
	if got := saidVIPs(t, second); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := second.AllVIPs(); len(got) != 2 || got[0] != list[1] || got[1] != list[0] {
		t.Errorf("all: %v", got)
	}
	if _, ok := second.ByVIP(netip.MustParseAddr("::ffff:240.0.0.2")); !ok {
		t.Error("an address in its IPv6 form is not known")
	}
	if r.AssignVIPs(list[:2]) != second {
		t.Error("the same again is another table")
	}
	// It is not the place in the table that counts, nor which of its names. What
	// somebody lists is his.
	a.Names = append(patterns(t, "new.test"), a.Names...)
	lists := service(t, "lists.test")
	lists.Addresses = []netip.Addr{netip.MustParseAddr("240.0.0.2")}
	third := r.Swap(table(t, lists, b, a))
	if got, want := saidVIPs(t, third), []string{"b.test fd00::2", "a.test 240.0.0.1"}; !slices.Equal(got, want) || third.Generation() != 3 || told != 2 {
		t.Errorf("after a change: got %q, want %q; generation %d, told %d times", got, want, third.Generation(), told)
	}
	// Both of what stand beside the services stay when one changes.
	r.Publish(nil)
	a.Exposed = false
	if got, want := saidVIPs(t, r.Swap(table(t, a, b))), []string{"b.test fd00::2"}; !slices.Equal(got, want) {
		t.Errorf("one is private now: got %q, want %q", got, want)
	}
	r.AssignVIPs(nil)
	if got := saidVIPs(t, r.Table()); got != nil {
		t.Errorf("in the end: %q", got)
	}
}

// What two claim is the first's; the other goes without.
func TestAssignVIPsTwice(t *testing.T) {
	var r Registry
	r.Swap(table(t, vipService(t, "a.test"), vipService(t, "b.test")))
	r.AssignVIPs([]VIP{vip("b.test", "240.0.0.1", "fd00::2"), vip("a.test", "240.0.0.1", "fd00::1")})
	if got, want := saidVIPs(t, r.Table()), []string{"a.test 240.0.0.1", "a.test fd00::1", "b.test fd00::2"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A request by VIP goes by the port rule, and to those who may have the service.
func TestByVIP(t *testing.T) {
	var r Registry
	hidden := vipService(t, "hidden.test", 443)
	hidden.ExposedTo = []string{"office"}
	many := vipService(t, "many.test", 9000, 443, 80, 81, 82, 83, 84, 85, 86)
	lists := service(t, "lists.test")
	lists.Addresses = []netip.Addr{netip.MustParseAddr("240.0.0.6")}
	r.Swap(table(t, vipService(t, "any.test"), vipService(t, "one.test", 443), vipService(t, "two.test", 8443, 443), many, hidden, lists))
	r.AssignVIPs([]VIP{
		vip("any.test", "240.0.0.1", "fd00::1"), vip("one.test", "240.0.0.2", "fd00::2"), vip("two.test", "240.0.0.3", ""),
		vip("many.test", "127.0.0.9", ""), vip("hidden.test", "240.0.0.5", ""),
	})
	for _, tt := range []struct {
		addr string
		port uint16
		want string // service and port, or reason
	}{
		{"240.0.0.1", 22, "any.test 22"},
		{"::ffff:240.0.0.1", 22, "any.test 22"},
		{"fd00::1", 22, "any.test 22"},
		{"fd00::1%eth0", 22, "any.test 22"},
		{"240.0.0.2", 443, "one.test 443"},
		{"240.0.0.2", 0, "one.test 443"},
		{"240.0.0.2", 80, "no-route"},
		{"240.0.0.3", 0, "two.test 443"}, // as the listener's
		{"240.0.0.3", 8443, "two.test 8443"},
		{"127.0.0.9", 9000, "many.test 9000"}, // before what is forbidden, as Addresses are
		{"127.0.0.9", 87, "no-route"},
		{"127.0.0.8", 9000, "prohibited"},
		{"240.0.0.5", 443, "not-exposed"},
		{"240.0.0.6", 443, "lists.test 443"},
		{"240.0.0.7", 443, "no-route"},
		{"64:ff9b::240.0.0.1", 22, "no-route"},
	} {
		f, err := r.Table().findVisible(byAddr(tt.addr, tt.port))
		got := ""
		if err != nil {
			got = string(err.Reason)
		} else if got = fmt.Sprint(f.entry.Name, " ", f.port); f.pattern != "vip" && f.entry.Name != "lists.test" {
			t.Errorf("%s: pattern %q", tt.addr, f.pattern)
		}
		if got != tt.want {
			t.Errorf("find(%s, port %d) = %q, %v, want %q", tt.addr, tt.port, got, err, tt.want)
		}
	}
	for _, text := range []string{"240.0.0.1", "fd00::2"} {
		req, tab := byAddr(text, 443), r.Table()
		if n := testing.AllocsPerRun(100, func() {
			f, _ := tab.findVisible(req)
			v4, _ := tab.VIPs(int(f.entry.index))
			_, _ = tab.ByVIP(v4)
		}); n != 0 {
			t.Errorf("%s: %v allocations", text, n)
		}
	}
}

// Nobody but this gateway knows a VIP: the next one is asked for the name.
func TestByVIPThroughAGateway(t *testing.T) {
	r := &Registry{NewTransport: func(*Service, *Endpoint, *Gateway) (tunnel.Transport, error) { return nowhere{}, nil }}
	s := vipService(t, "*.far.test", 22)
	s.Names = append(s.Names, patterns(t, "db.far.test")...)
	s.Endpoints, s.Via = nil, []Hop{{Proto: "connect", Addresses: []string{"gw.test:443"}}}
	merge(t, r, s)
	r.AssignVIPs([]VIP{vip("db.far.test", "240.0.0.1", "")})
	route, err := r.Resolve(t.Context(), byAddr("240.0.0.1", 22))
	if err != nil || len(route.Endpoints) != 1 || route.Endpoints[0].Host != "db.far.test" || route.Endpoints[0].Addr.Port() != 22 || route.Endpoints[0].Addr.Addr().IsValid() {
		t.Errorf("got %+v, %v", route.Endpoints, err)
	}
}

func TestOccupied(t *testing.T) {
	a, far := service(t, "a.test", 443), service(t, "far.test")
	a.Addresses = []netip.Addr{netip.MustParseAddr("::ffff:10.9.0.7"), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("fd00::7")}
	a.Endpoints = append(a.Endpoints, Endpoint{Addr: netip.MustParseAddr("10.9.0.8")}, Endpoint{Host: "x.test", Port: 1})
	far.Endpoints, far.Via = []Endpoint{{Addr: netip.MustParseAddr("10.9.0.9"), Port: 1}}, []Hop{{}}
	networks := []Network{
		{Name: "world", CIDRs: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}},
		{Name: "ten", Gateways: []Gateway{{Address: Endpoint{Addr: netip.MustParseAddr("10.9.0.5"), Port: 443}, Public: Endpoint{Host: "gw.test", Port: 443}}}, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.9.0.16/28"), netip.MustParsePrefix("10.10.0.0/16")}},
	}
	tab, err := Merge(Snapshot{Networks: networks, Services: []*Service{a, far}})
	if err != nil {
		t.Fatal(err)
	}
	for of, want := range map[string]string{
		"10.9.0.0/24": "[10.0.0.0/8 10.9.0.5/32 10.9.0.7/32 10.9.0.8/32 10.9.0.16/28]",
		"240.0.0.0/4": "[]",
		"fd00::/64":   "[fd00::7/128]",
	} {
		got := tab.UsedAddresses(netip.MustParsePrefix(of))
		slices.SortFunc(got, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
		if fmt.Sprint(got) != want {
			t.Errorf("%s: got %v, want %s", of, got, want)
		}
	}
}

func TestVIPRanges(t *testing.T) {
	for text, want := range map[string]string{
		"240.0.0.0/4": "", "10.9.0.0/30": "", "100.64.0.0/10": "", "fd12:3456:789a::/64": "", "fd12:3456:789a::/126": "", "2001:db8::/64": "",
		"10.9.0.0/31":        "at most 30 bits",
		"fd00::/127":         "at most 126 bits",
		"10.9.0.1/24":        "not an address range",
		"::ffff:10.9.0.0/96": "not an address range",
		"0.0.0.0/0":          "0.0.0.0/8 are addresses of this host",
		"127.9.0.0/24":       "loopback",
		"224.0.0.0/3":        "multicast",
		"169.254.0.0/16":     "link-local",
		"fe80::/64":          "link-local",
		"::/64":              "forms of IPv4",
		"64:ff9b:1::/48":     "NAT64",
		"2002:a00::/24":      "6to4",
		"2001::/32":          "Teredo",
	} {
		err := CheckVIPRange(netip.MustParsePrefix(text))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
	if err := CheckVIPRange(netip.Prefix{}); err == nil {
		t.Error("the zero Prefix is a range")
	}
	seen := map[netip.Prefix]bool{}
	for _, cluster := range []string{"", "west", "east", "WEST"} {
		ranges := DefaultVIPRanges(cluster)
		for _, p := range ranges {
			if err := CheckVIPRange(p); err != nil {
				t.Errorf("%q: %s: %v", cluster, p, err)
			}
		}
		if b := ranges[1].Addr().As16(); len(ranges) != 2 || b[0] != 0xfd || ranges[1].Bits() != 64 {
			t.Errorf("%q: %v", cluster, ranges)
		}
		seen[ranges[1]] = true
	}
	if len(seen) != 3 {
		t.Errorf("%d ranges of IPv6 for three clusters: %v", len(seen), seen)
	}
}

// 65,000 services of one name are told apart by their ports in no time.
func TestWantVIPsOfOneName(t *testing.T) {
	var services []*Service
	for port := range 65000 {
		services = append(services, vipService(t, "a.test", uint16(port+1)))
	}
	wishes := table(t, services...).VIPRequests()
	if len(wishes) != len(services) || wishes[0].Keys[0] != "a.test" || wishes[1].Keys[0] != "a.test:2" {
		t.Errorf("%d wishes, %v", len(wishes), wishes[:2])
	}
}

func BenchmarkSwapWithVIPs100k(b *testing.B) {
	var services []*Service
	var list []VIP
	for i := range 100_000 {
		s := vipService(b, fmt.Sprintf("s%d.test", i))
		services = append(services, s)
		list = append(list, VIP{Key: s.Name, V4: netip.AddrFrom4([4]byte{240, byte(i >> 16), byte(i >> 8), byte(i)})})
	}
	tab, err := Merge(Snapshot{Services: services})
	if err != nil {
		b.Fatal(err)
	}
	var r Registry
	r.Swap(tab)
	r.AssignVIPs(list)
	b.Run("swap", func(b *testing.B) {
		for b.Loop() {
			r.Swap(tab)
		}
	})
	b.Run("occupied", func(b *testing.B) {
		for b.Loop() {
			r.Table().UsedAddresses(netip.MustParsePrefix("240.0.0.0/4"))
		}
	})
}

// The address of a name of the cluster set is the same whether one exports it or
// several.
func TestSetVIPs(t *testing.T) {
	exported := func(cluster string) *Service {
		return &Service{Name: "web." + cluster, ID: ID{Service: "web", Namespace: "shop", Cluster: cluster}, Exported: true, Exposed: true, VIP: true, Origin: cluster}
	}
	id := ID{Service: "web", Namespace: "shop"}
	for _, clusters := range [][]string{{"east"}, {"east", "west"}, {"west"}} {
		var all []*Service
		for _, c := range clusters {
			all = append(all, exported(c))
		}
		tab := table(t, all...)
		tab.assignVIPs([]VIP{vip("shop/web", "240.0.0.7", "fd12::7")})
		if v4, v6 := tab.SetVIPs(id); v4.String() != "240.0.0.7" || v6.String() != "fd12::7" {
			t.Errorf("exported by %s: %s and %s", clusters, v4, v6)
		}
		if v4, v6 := tab.SetVIPs(ID{Service: "other", Namespace: "shop"}); v4.IsValid() || v6.IsValid() {
			t.Errorf("nobody's: %s and %s", v4, v6)
		}
	}
	var none *Table
	if v4, _ := none.SetVIPs(id); v4.IsValid() {
		t.Error("the nil table has an address")
	}
}
