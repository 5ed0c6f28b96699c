package names

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"culvert.dev/dns"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

func ep(s string) registry.Endpoint {
	ap := netip.MustParseAddrPort(s)
	return registry.Endpoint{Addr: ap.Addr(), Port: ap.Port()}
}

func hosted(s, name string) registry.Endpoint {
	e := ep(s)
	e.Name = name
	return e
}

func pattern(s string) []tunnel.Pattern {
	p, err := tunnel.ParsePattern(s)
	if err != nil {
		panic(err)
	}
	return []tunnel.Pattern{p}
}

// source has a cluster in east, one in west, and gateways in front of both.
func source(t *testing.T) *Source {
	t.Helper()
	s := registry.Snapshot{
		Networks: []registry.Network{
			{Name: "east", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd00:1::/32")}, Gateways: []registry.Gateway{
				{Address: ep("10.1.0.2:443"), Public: ep("192.0.2.1:443")},
				{Address: ep("10.1.0.3:443"), Public: ep("192.0.2.2:443"), Weight: 3},
				{Address: ep("10.1.0.4:80"), Public: ep("192.0.2.3:80"), Transports: registry.HopsBy("connect")},
			}},
			{Name: "west", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")}, Gateways: []registry.Gateway{
				{Address: ep("198.51.100.1:15443")}, {Address: registry.Endpoint{Host: "lb.example.net", Port: 15443}},
			}},
		},
		Services: []*registry.Service{
			{Name: "web", Names: pattern("web.example.com"), Ports: []uint16{443}, Exposed: true, ALPN: []string{"h2"},
				ID: registry.ID{Service: "web", Namespace: "shop", Cluster: "one"}, Exported: true,
				NamedPorts: []registry.NamedPort{{Name: "https", Protocol: "tcp", Port: 443}},
				Endpoints:  []registry.Endpoint{ep("10.1.5.1:8443"), ep("10.1.5.2:8443"), ep("[fd00:1::5]:8443")}},
			{Name: "db", Names: pattern("db.example.com"), Ports: []uint16{5432}, Exposed: true, Headless: true, Exported: true,
				ID:         registry.ID{Service: "db", Cluster: "two"},
				NamedPorts: []registry.NamedPort{{Name: "postgres", Protocol: "tcp", Port: 5432}},
				Endpoints:  []registry.Endpoint{hosted("10.2.5.1:5432", "db-0"), hosted("10.2.5.2:5432", "db-1"), ep("10.2.5.3:5432")}},
			{Name: "wild", Names: pattern("*.apps.example.com"), Exposed: true, Endpoints: []registry.Endpoint{ep("10.1.6.1:443")}},
			{Name: "secret", Names: pattern("secret.example.com"), Exposed: true, ExposedTo: []string{"west"}, Endpoints: []registry.Endpoint{ep("10.1.7.1:443")}},
			{Name: "empty", Names: pattern("empty.example.com"), Ports: []uint16{443}, Exposed: true, Headless: true, NamedPorts: []registry.NamedPort{{Name: "web", Protocol: "tcp", Port: 443}}},
			{Name: "hollow", Names: pattern("hollow.example.com"), Exposed: true},
			{Name: "private", ID: registry.ID{Cluster: "one", Namespace: "shop", Service: "private"}, Names: pattern("private.example.com"), Ports: []uint16{443}, Headless: true, Exported: true,
				NamedPorts: []registry.NamedPort{{Name: "web", Protocol: "tcp", Port: 443}}, Endpoints: []registry.Endpoint{hosted("10.1.8.1:443", "private-0")}},
			{Name: "hidden", Names: append(pattern("a.hidden.example.org"), pattern("*.b.hidden.example.org")...), Headless: true, Endpoints: []registry.Endpoint{hosted("10.1.8.2:443", "hidden-0")}},
			{Name: "theirs", Names: append(pattern("a.theirs.example.org"), pattern("*.b.theirs.example.org")...), Headless: true, Exposed: true, ExposedTo: []string{"west"},
				Endpoints: []registry.Endpoint{hosted("10.2.8.3:443", "theirs-0")}},
		},
	}
	ssh := &registry.SSHSettings{
		Names:        []tunnel.Name{tunnel.MustParseName("gw.example.com"), tunnel.MustParseName("web.example.com")},
		Fingerprints: []registry.SSHFingerprint{{Algorithm: 4, Hash: 1, Digest: "one"}, {Algorithm: 4, Hash: 2, Digest: "two"}},
	}
	for i, name := range []string{":443", ":444"} { // two ports with one key
		s.Listeners = append(s.Listeners, &registry.Listener{Name: name, Port: uint16(443 + i), Protocol: registry.Streams, Settings: &registry.ListenerSettings{Protocols: []string{"ssh"}, SSH: ssh}})
	}
	reg := &registry.Registry{Mesh: registry.Mesh{Network: "east"}}
	table, err := reg.Mesh.Merge(s)
	if err != nil {
		t.Fatal(err)
	}
	reg.Swap(table)
	return &Source{Registry: reg}
}

// said is an answer in a line.
func said(a *dns.Answer) string {
	var all []string
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	for _, x := range a.Addrs {
		s := fmt.Sprintf("%d:%s", x.Rank, x.Addr)
		if x.Weight > 1 {
			s += fmt.Sprintf("*%d", x.Weight)
		}
		all = append(all, s)
	}
	for _, x := range a.Targets {
		add("%d:%s:%d", x.Rank, x.Host, x.Port)
	}
	for _, x := range a.Services {
		add("%d %d %s:%d", x.Priority, x.Weight, x.Target, x.Port)
	}
	for _, x := range a.Bindings {
		add("%d %q alpn=%v port=%d hints=%v", x.Priority, x.Target, x.ALPN, x.Port, x.Hints)
	}
	all = append(all, a.Hosts...)
	all = append(all, a.Texts...)
	for _, k := range a.HostKeys {
		add("%d %d %x", k.Algorithm, k.Hash, k.Digest)
	}
	return [...]string{"absent", "above", "exists", "unknown"}[a.Status] + " " + strings.Join(all, ", ")
}

func TestAnswer(t *testing.T) {
	src := source(t)
	const shop = "web.shop.svc.one.mesh.internal"
	ask(t, src, []question{
		{"web.example.com", dns.TypeA, "east", "exists 0:10.1.5.1, 0:10.1.5.2, 0:fd00:1::5"},
		{"web.example.com", dns.TypeA, "west", "exists 0:192.0.2.1, 0:192.0.2.2*3"},
		{"web.example.com", dns.TypeA, "", "exists 0:192.0.2.1, 0:192.0.2.2*3"},
		{"web.example.com", dns.TypeTXT, "", "exists "},
		{shop, dns.TypeA, "east", "exists 0:10.1.5.1, 0:10.1.5.2, 0:fd00:1::5"},
		{"web.shop.svc.clusterset.local", dns.TypeA, "west", "exists 0:192.0.2.1, 0:192.0.2.2*3"},
		{"svc.one.mesh.internal", dns.TypeA, "east", "above "},
		{"nobody.shop.svc.one.mesh.internal", dns.TypeA, "east", "absent "},
		{"x.apps.example.com", dns.TypeA, "east", "exists 0:10.1.6.1"},
		{"secret.example.com", dns.TypeA, "east", "absent "},
		{"secret.example.com", dns.TypeA, "", "absent "},
		{"secret.example.com", dns.TypeA, "west", "exists 0:192.0.2.1, 0:192.0.2.2*3"},
		{"empty.example.com", dns.TypeA, "east", "absent "},
		{"empty.example.com", dns.TypeTXT, "east", "absent "},
		{"empty.example.com", dns.TypeHTTPS, "east", "absent "},
		{"_web._tcp.empty.example.com", dns.TypeSRV, "east", "absent "},
		{"_tcp.empty.example.com", dns.TypeSRV, "east", "absent "},
		{"_443._https.empty.example.com", dns.TypeHTTPS, "east", "absent "},
		{"0.empty.example.com", dns.TypeA, "east", "absent "},
		{"hollow.example.com", dns.TypeA, "east", "exists "}, // it is not headless
		{`a\032b.example.com`, dns.TypeA, "east", "absent "},

		// Behind a load balancer that has a name, and one by one.
		{"db.example.com", dns.TypeA, "east", "exists 0:198.51.100.1, 0:lb.example.net:15443"},
		{"db-1.db.two", dns.TypeA, "west", "exists 0:10.2.5.2"},
		{"db-1.db.two", dns.TypeA, "east", "exists 0:198.51.100.1, 0:lb.example.net:15443"},
		{"10-2-5-3.db.two", dns.TypeA, "west", "exists 0:10.2.5.3"},
		{"db-1.two.db.default.svc.clusterset.local", dns.TypeA, "west", "exists 0:10.2.5.2"},
		{"two.db.default.svc.clusterset.local", dns.TypeA, "west", "above "},

		{"_https._tcp." + shop, dns.TypeSRV, "east", "exists 0 1 " + shop + ":8443"},
		{"_https._tcp." + shop, dns.TypeSRV, "west", "exists 0 1 " + shop + ":443"},
		{"_https._udp." + shop, dns.TypeSRV, "east", "absent "},
		{"_http._tcp." + shop, dns.TypeSRV, "east", "absent "},
		{"_tcp." + shop, dns.TypeSRV, "east", "above "},
		{"_udp." + shop, dns.TypeSRV, "east", "absent "},
		{"_https._tcp." + shop, dns.TypeA, "east", "exists 0 1 " + shop + ":8443"},
		{"_postgres._tcp.db.default.svc.clusterset.local", dns.TypeSRV, "west", "exists " +
			"0 1 db-0.two.db.default.svc.clusterset.local:5432, 0 1 db-1.two.db.default.svc.clusterset.local:5432, 0 1 10-2-5-3.two.db.default.svc.clusterset.local:5432"},
		{"_postgres._tcp.db.two", dns.TypeSRV, "west", "exists 0 1 db-0.db.two:5432, 0 1 db-1.db.two:5432, 0 1 10-2-5-3.db.two:5432"},
		{"_postgres._tcp.db.two", dns.TypeSRV, "east", "exists 0 1 db.two:15443"},
		{"_postgres._tcp.db-0.db.two", dns.TypeSRV, "west", "exists 0 1 db-0.db.two:5432"},

		{"web.example.com", dns.TypeHTTPS, "east", `exists 0 "" alpn=[h2] port=8443 hints=[]`},
		{"web.example.com", dns.TypeHTTPS, "west", `exists 1 "" alpn=[h2] port=0 hints=[192.0.2.1 192.0.2.2]`},
		{"web.example.com", dns.TypeSVCB, "west", "exists "}, // it is for other schemes
		{"_443._https.web.example.com", dns.TypeSVCB, "west", "exists "},
		{"db.example.com", dns.TypeHTTPS, "east", "exists "},
		{"_5432._https.db.example.com", dns.TypeHTTPS, "east", `exists 1 "db.example.com" alpn=[] port=15443 hints=[198.51.100.1]`},
		{"_444._https.db.example.com", dns.TypeHTTPS, "east", "absent "},

		{"gw.example.com", dns.TypeSSHFP, "west", "exists 4 1 6f6e65, 4 2 74776f"},
		{"gw.example.com", dns.TypeA, "west", "above "}, // which another server has
		{"x.gw.example.com", dns.TypeSSHFP, "west", "absent "},
		{"web.example.com", dns.TypeSSHFP, "", "exists 4 1 6f6e65, 4 2 74776f"},
		{"db.example.com", dns.TypeSSHFP, "east", "exists "},

		{"dns-version.clusterset.local", dns.TypeTXT, "", "exists 1.0.0"},
		{"1.5.2.10.in-addr.arpa", dns.TypePTR, "west", "exists db-0.db.example.com"},
		{"1.5.2.10.in-addr.arpa", dns.TypePTR, "east", "absent "},
		{"1.5.1.10.in-addr.arpa", dns.TypePTR, "east", "absent "},
		{"01.5.2.10.in-addr.arpa", dns.TypePTR, "west", "absent "},
		{"x.1.5.2.10.in-addr.arpa", dns.TypePTR, "west", "absent "},
	})
}

// A question is one from a view, and what is said to it.
type question struct {
	name string
	typ  dns.Type
	view string
	want string
}

func ask(t *testing.T, src *Source, questions []question) {
	t.Helper()
	for _, q := range questions {
		var a dns.Answer
		src.Names().Answer(dns.Question{Name: q.name, Type: q.typ, View: q.view}, &a)
		if got := said(&a); got != q.want {
			t.Errorf("%s %s from %q:\n got %s\nwant %s", q.typ, q.name, q.view, got, q.want)
		}
	}
}

// A service that is not exposed has no record in DNS: by none of its names, from
// wherever it is asked for, of whatever kind. What is asked is answered as if
// there was no such name, and none below it.
func TestPrivateServicesAreNotAnswered(t *testing.T) {
	src := source(t)
	for _, name := range []string{
		"private.example.com", "private.shop.svc.one.mesh.internal", "private.shop.svc.clusterset.local",
		"private-0.private.shop.svc.one.mesh.internal", "private-0.one.private.shop.svc.clusterset.local", "10-1-8-1.private.shop.svc.one.mesh.internal",
		"_web._tcp.private.example.com", "_web._tcp.private.shop.svc.one.mesh.internal", "_443._https.private.example.com",
		"one.private.shop.svc.clusterset.local", "_tcp.private.example.com", "hidden.example.org",
		"a.hidden.example.org", "hidden-0.a.hidden.example.org", "b.hidden.example.org", "x.b.hidden.example.org",
	} {
		for _, view := range []string{"east", "west", ""} {
			for _, typ := range []dns.Type{dns.TypeA, dns.TypeAAAA, dns.TypeTXT, dns.TypeHTTPS, dns.TypeSRV} {
				var a dns.Answer
				src.Names().Answer(dns.Question{Name: name, Type: typ, View: view, From: netip.MustParseAddr("10.1.5.9")}, &a)
				if got := said(&a); got != "absent " {
					t.Errorf("%s %s from %q: %s, want what is said of a name that nobody has", typ, name, view, got)
				}
			}
		}
	}
}

// A name that is there for another network only is answered like one that
// nobody has, and so is what stands above it.
func TestNamesOfOtherNetworksAreNotTold(t *testing.T) {
	src := source(t)
	for name, exists := range map[string]string{
		"example.org": "above ", "theirs.example.org": "above ", "b.theirs.example.org": "above ",
		"a.theirs.example.org": "exists 0:10.2.8.3", "theirs-0.a.theirs.example.org": "exists 0:10.2.8.3", "x.b.theirs.example.org": "exists 0:10.2.8.3",
	} {
		for view, want := range map[string]string{"west": exists, "east": "absent ", "": "absent ", "nowhere": "absent "} {
			ask(t, src, []question{{name, dns.TypeA, view, want}})
		}
	}
}

// Without a view the address of who asks decides.
func TestAnswerByAddress(t *testing.T) {
	src := source(t)
	for from, want := range map[string]string{"10.1.200.1": "exists 0:10.1.6.1", "10.2.200.1": "exists 0:192.0.2.1, 0:192.0.2.2*3", "203.0.113.1": "exists 0:192.0.2.1, 0:192.0.2.2*3"} {
		var a dns.Answer
		src.Names().Answer(dns.Question{Name: "x.apps.example.com", Type: dns.TypeA, From: netip.MustParseAddr(from)}, &a)
		if got := said(&a); got != want {
			t.Errorf("from %s: %s, want %s", from, got, want)
		}
	}
}

// What does not work is left out, but never the last.
func TestAnswerLeavesOutWhatIsDown(t *testing.T) {
	src := source(t)
	ask := func(view string) string {
		var a dns.Answer
		src.Names().Answer(dns.Question{Name: "web.example.com", Type: dns.TypeA, View: view}, &a)
		return said(&a)
	}
	down := func(s string, err error) {
		src.Registry.ReportCheck(registry.Target{Addr: netip.MustParseAddrPort(s)}, err)
	}
	dead := errors.New("connection refused")
	for _, step := range []struct {
		addr       string
		err        error
		east, west string
	}{
		{"10.1.5.1:8443", dead, "exists 0:10.1.5.2, 0:fd00:1::5", "exists 0:192.0.2.1, 0:192.0.2.2*3"},
		{"192.0.2.2:443", dead, "exists 0:10.1.5.2, 0:fd00:1::5", "exists 0:192.0.2.1"},
		{"192.0.2.1:443", dead, "exists 0:10.1.5.2, 0:fd00:1::5", "exists 0:192.0.2.1, 0:192.0.2.2*3"},
		{"192.0.2.1:443", nil, "exists 0:10.1.5.2, 0:fd00:1::5", "exists 0:192.0.2.1"},
		{"10.1.5.1:8443", nil, "exists 0:10.1.5.1, 0:10.1.5.2, 0:fd00:1::5", "exists 0:192.0.2.1"},
	} {
		down(step.addr, step.err)
		if east, west := ask("east"), ask("west"); east != step.east || west != step.west {
			t.Errorf("%s %v:\n got %s, %s\nwant %s, %s", step.addr, step.err, east, west, step.east, step.west)
		}
	}
}

// Those in a network where somebody takes what is sent to VIPs are told of them,
// and nobody else is.
func TestAnswerVIPs(t *testing.T) {
	src := source(t)
	src.VIPs = func(network string) bool { return network == "east" }
	s := registry.Snapshot{Services: []*registry.Service{{Name: "web", Names: pattern("web.example.com"), Ports: []uint16{443}, Exposed: true, VIP: true, ALPN: []string{"h2"},
		NamedPorts: []registry.NamedPort{{Name: "https", Protocol: "tcp", Port: 443}}, Endpoints: []registry.Endpoint{ep("10.1.5.1:8443")}},
		{Name: "far", Names: pattern("far.example.com"), Ports: []uint16{443, 8080}, Exposed: true, VIP: true, Endpoints: []registry.Endpoint{ep("10.2.5.1:443")}}},
		Networks: []registry.Network{{Name: "east"}, {Name: "west", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")}, Gateways: []registry.Gateway{{Address: ep("198.51.100.1:443")}}}}}
	table, err := registry.Merge(s)
	if err != nil {
		t.Fatal(err)
	}
	src.Registry.Swap(table)
	want := src.Registry.Table().VIPRequests()
	src.Registry.AssignVIPs([]registry.VIP{{Key: want[0].Keys[0], V4: netip.MustParseAddr("240.1.2.3"), V6: netip.MustParseAddr("fd00::7")}, {Key: want[1].Keys[0], V4: netip.MustParseAddr("240.1.2.4")}})
	ask(t, src, []question{
		{"web.example.com", dns.TypeA, "east", "exists 0:240.1.2.3, 0:fd00::7"},
		{"web.example.com", dns.TypeA, "", "exists 0:10.1.5.1"},
		{"_https._tcp.web.example.com", dns.TypeSRV, "east", "exists 0 1 web.example.com:443"},
		{"_https._tcp.web.example.com", dns.TypeSRV, "", "exists 0 1 web.example.com:8443"},
		{"web.example.com", dns.TypeHTTPS, "east", `exists 0 "" alpn=[h2] port=0 hints=[240.1.2.3 fd00::7]`},
		{"web.example.com", dns.TypeHTTPS, "", `exists 0 "" alpn=[h2] port=8443 hints=[]`},
		{"far.example.com", dns.TypeA, "east", "exists 0:240.1.2.4"},
		{"far.example.com", dns.TypeHTTPS, "east", `exists 0 "" alpn=[] port=0 hints=[240.1.2.4]`},
		{"_8080._https.far.example.com", dns.TypeHTTPS, "east", `exists 0 "far.example.com" alpn=[] port=0 hints=[240.1.2.4]`},
		{"far.example.com", dns.TypeHTTPS, "", `exists 1 "" alpn=[] port=0 hints=[198.51.100.1]`},
		{"_8080._https.far.example.com", dns.TypeHTTPS, "", `exists 1 "far.example.com" alpn=[] port=443 hints=[198.51.100.1]`},
		{"3.2.1.240.in-addr.arpa", dns.TypePTR, "east", "exists web.example.com"},
		{"5.2.1.240.in-addr.arpa", dns.TypePTR, "east", "absent "},
	})
}

// A new table is in the next answer, and an old one is not kept.
func TestNamesFollowTheTable(t *testing.T) {
	src := &Source{Registry: &registry.Registry{}}
	if n := src.Names(); n != nil {
		t.Fatalf("names before there is a table: %v", n)
	}
	src = source(t)
	first := src.Names()
	if src.Names() != first {
		t.Error("names are made anew for each question")
	}
	src.Registry.Swap(&registry.Table{})
	if src.Names() == first {
		t.Error("names are those of the table before")
	}
}

// Addresses of the reverse zones read back.
func TestReverse(t *testing.T) {
	for _, s := range []string{"10.2.5.1", "255.0.0.9", "fd00:1::5", "2001:db8:1:2:3:4:5:6"} {
		a := netip.MustParseAddr(s)
		if got, ok := parseReverse(arpa(a)); !ok || got != a {
			t.Errorf("%s: %v, %t", arpa(a), got, ok)
		}
	}
	for _, s := range []string{"in-addr.arpa", "1.2.3.in-addr.arpa", "256.1.1.1.in-addr.arpa", "1.ip6.arpa", strings.Repeat("g.", 32) + "ip6.arpa", "example.com"} {
		if a, ok := parseReverse(s); ok {
			t.Errorf("%s is %v", s, a)
		}
	}
}

func arpa(a netip.Addr) string {
	var labels []string
	if a.Is4() {
		for _, b := range a.As4() {
			labels = append(labels, fmt.Sprint(b))
		}
		slices.Reverse(labels)
		return strings.Join(labels, ".") + ".in-addr.arpa"
	}
	for _, b := range a.As16() {
		labels = append(labels, fmt.Sprintf("%x", b>>4), fmt.Sprintf("%x", b&15))
	}
	slices.Reverse(labels)
	return strings.Join(labels, ".") + ".ip6.arpa"
}

func FuzzAnswer(f *testing.F) {
	for _, s := range []string{"web.example.com", "_https._tcp.web.example.com", "db-0.two.db.default.svc.clusterset.local", "10-2-5-3.db.two", "fd00--1.db.two", "1.5.2.10.in-addr.arpa", "_._.", "-.db.two", "0.db.two"} {
		f.Add(s, uint16(1), "west")
	}
	f.Fuzz(func(t *testing.T, name string, typ uint16, view string) {
		src := fuzzed
		if src == nil {
			src = source(t)
			fuzzed = src
		}
		var a dns.Answer
		src.Names().Answer(dns.Question{Name: name, Type: dns.Type(typ), View: view}, &a)
		if a.Status != dns.Exists && len(a.Addrs)+len(a.Targets)+len(a.Services)+len(a.Bindings)+len(a.Hosts)+len(a.Texts) > 0 {
			t.Errorf("%q: records of a name that is not there: %s", name, said(&a))
		}
		for _, x := range a.Addrs {
			if view != "east" && x.Addr.Is4() && x.Addr.As4()[0] == 10 && x.Addr.As4()[1] == 1 {
				t.Errorf("%q from %q: told %s", name, view, x.Addr)
			}
		}
	})
}

var fuzzed *Source

func BenchmarkAnswer(b *testing.B) {
	s := registry.Snapshot{}
	for i := range 100_000 {
		s.Services = append(s.Services, &registry.Service{Name: fmt.Sprint(i), Names: pattern(fmt.Sprintf("svc-%d.example.com", i)), Exposed: true, Endpoints: []registry.Endpoint{ep("10.1.5.1:443")}})
	}
	reg := &registry.Registry{}
	table, _ := registry.Merge(s)
	reg.Swap(table)
	src := &Source{Registry: reg}
	b.ReportAllocs()
	for b.Loop() {
		var a dns.Answer
		src.Names().Answer(dns.Question{Name: "svc-777.example.com", Type: dns.TypeA}, &a)
		if len(a.Addrs) != 1 {
			b.Fatal(said(&a))
		}
	}
}

// Those in the network of the cluster that has given a service of the cluster set an address are
// told of that, whatever VIPs there are, and nobody else is.
func TestAnswerSetAddresses(t *testing.T) {
	src := source(t)
	src.VIPs = func(string) bool { return true }
	s := registry.Snapshot{
		Services: []*registry.Service{{Name: "web", ID: registry.ID{Service: "web", Namespace: "shop", Cluster: "two"}, Exported: true, Ports: []uint16{443}, Exposed: true, VIP: true, ALPN: []string{"h2"},
			NamedPorts: []registry.NamedPort{{Name: "https", Protocol: "tcp", Port: 443}}, Endpoints: []registry.Endpoint{ep("10.2.5.1:8443")}}},
		Networks: []registry.Network{{Name: "east", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}}, {Name: "south"}, {Name: "west", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")}, Gateways: []registry.Gateway{{Address: ep("198.51.100.1:443")}}}},
		SetAddresses: []registry.SetAddress{
			{Name: tunnel.MustParseName("web.shop.svc.clusterset.local"), Network: "east", IPs: []netip.Addr{netip.MustParseAddr("10.96.0.9"), netip.MustParseAddr("fd00::9")}},
			{Name: tunnel.MustParseName("web.shop.svc.clusterset.local"), Network: "nowhere", IPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")}},
			{Name: tunnel.MustParseName("gone.shop.svc.clusterset.local"), Network: "east", IPs: []netip.Addr{netip.MustParseAddr("10.96.0.11")}},
		},
	}
	table, err := registry.Merge(s)
	if err != nil {
		t.Fatal(err)
	}
	src.Registry.Swap(table)
	const name = "web.shop.svc.clusterset.local"
	ask(t, src, []question{
		{name, dns.TypeA, "east", "exists 0:10.96.0.9, 0:fd00::9"},
		{name, dns.TypeA, "south", "exists 0:198.51.100.1"},
		{name, dns.TypeA, "", "exists 0:198.51.100.1"},
		{"_https._tcp." + name, dns.TypeSRV, "east", "exists 0 1 " + name + ":443"},
		{name, dns.TypeHTTPS, "east", `exists 0 "" alpn=[h2] port=0 hints=[10.96.0.9 fd00::9]`},
		{"web.shop.svc.two.mesh.internal", dns.TypeA, "east", "exists 0:198.51.100.1"},
		{"gone.shop.svc.clusterset.local", dns.TypeA, "east", "absent "},
	})
}
