package dns

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

const soa = "mesh.internal. 5 IN SOA ns.mesh.internal. hostmaster.mesh.internal. 1700000000 3600 600 86400 5"

func TestAnswers(t *testing.T) {
	r := start(t, &Server{})
	for _, c := range []struct {
		name  string
		qtype uint16
		want  string
	}{
		{"web.shop.svc.mesh.internal", dns.TypeA, "NOERROR aa an: web.shop.svc.mesh.internal. 5 IN A 10.0.0.1, web.shop.svc.mesh.internal. 5 IN A 10.0.0.2"},
		{"web.shop.svc.mesh.internal", dns.TypeAAAA, "NOERROR aa an: web.shop.svc.mesh.internal. 5 IN AAAA fd00::1"},
		{"four.shop.svc.mesh.internal", dns.TypeAAAA, "NOERROR aa ns: " + soa}, // NODATA
		{"web.shop.svc.mesh.internal", dns.TypeMX, "NOERROR aa ns: " + soa},
		{"empty.shop.svc.mesh.internal", dns.TypeA, "NOERROR aa ns: " + soa},
		{"nobody.shop.svc.mesh.internal", dns.TypeA, "NXDOMAIN aa ns: " + soa},
		{"a.web.shop.svc.mesh.internal", dns.TypeA, "NXDOMAIN aa ns: " + soa},
		{"shop.svc.mesh.internal", dns.TypeA, "NOERROR aa ns: " + soa}, // has names below, RFC 8020
		{"_tcp.web.shop.svc.mesh.internal", dns.TypeA, "NOERROR aa ns: " + soa},
		{"mesh.internal", dns.TypeA, "NOERROR aa ns: " + soa},
		{"mesh.internal", dns.TypeSOA, "NOERROR aa an: " + soa},
		{"mesh.internal", dns.TypeNS, "NOERROR aa an: mesh.internal. 5 IN NS ns.mesh.internal."},
		{"later.shop.svc.mesh.internal", dns.TypeA, "SERVFAIL"},
		{"_https._tcp.web.shop.svc.mesh.internal", dns.TypeSRV, "NOERROR aa an: _https._tcp.web.shop.svc.mesh.internal. 5 IN SRV 1 5 443 web.shop.svc.mesh.internal. " +
			"ar: web.shop.svc.mesh.internal. 5 IN A 10.0.0.1, web.shop.svc.mesh.internal. 5 IN A 10.0.0.2, web.shop.svc.mesh.internal. 5 IN AAAA fd00::1"},
		{"txt.shop.svc.mesh.internal", dns.TypeTXT, `NOERROR aa an: txt.shop.svc.mesh.internal. 5 IN TXT "", txt.shop.svc.mesh.internal. 5 IN TXT "1.0.0", txt.shop.svc.mesh.internal. 5 IN TXT "` +
			strings.Repeat("x", 255) + `" "` + strings.Repeat("x", 45) + `"`},
		{"https.shop.svc.mesh.internal", dns.TypeHTTPS, `NOERROR aa an: https.shop.svc.mesh.internal. 5 IN HTTPS 1 . alpn="h2,h3" port="8443" ipv4hint="10.0.0.1" ech="AQID" ipv6hint="fd00::1"`},
		{"https.shop.svc.mesh.internal", dns.TypeSVCB, `NOERROR aa an: https.shop.svc.mesh.internal. 5 IN SVCB 1 . alpn="h2,h3" port="8443" ipv4hint="10.0.0.1" ech="AQID" ipv6hint="fd00::1"`},
		{"gw.shop.svc.mesh.internal", dns.TypeSSHFP, "NOERROR aa an: gw.shop.svc.mesh.internal. 5 IN SSHFP 3 2 0304, gw.shop.svc.mesh.internal. 5 IN SSHFP 4 1 0102"},
		{"gw.shop.svc.mesh.internal", dns.TypeA, "NOERROR aa ns: " + soa},
		{"alias.shop.svc.mesh.internal", dns.TypeAAAA, "NOERROR aa an: alias.shop.svc.mesh.internal. 5 IN CNAME web.shop.svc.mesh.internal., web.shop.svc.mesh.internal. 5 IN AAAA fd00::1"},
		{"alias.shop.svc.mesh.internal", dns.TypeCNAME, "NOERROR aa an: alias.shop.svc.mesh.internal. 5 IN CNAME web.shop.svc.mesh.internal."},
		{"out.shop.svc.mesh.internal", dns.TypeA, "NOERROR aa an: out.shop.svc.mesh.internal. 5 IN CNAME elsewhere.test."},
		{"1.0.0.10.in-addr.arpa", dns.TypePTR, "NOERROR aa an: 1.0.0.10.in-addr.arpa. 5 IN PTR web.shop.svc.mesh.internal."},
		{"web.shop.svc.mesh.internal", dns.TypeANY, `NOERROR aa an: web.shop.svc.mesh.internal. 5 IN HINFO "RFC8482" ""`},
		{"nobody.mesh.internal", dns.TypeANY, "NXDOMAIN aa ns: " + soa},
		{"host.example.com", dns.TypeA, "NOERROR aa an: host.example.com. 90 IN A 10.0.0.7"},
		{"host.example.com", dns.TypeTXT, "NOERROR aa ns: host.example.com. 5 IN SOA ns.host.example.com. hostmaster.host.example.com. 1700000000 3600 600 86400 5"},
		{"other.example.com", dns.TypeA, "REFUSED"},
		{"internal", dns.TypeA, "REFUSED"},
		{"example.com", dns.TypeA, "REFUSED"}, // a host of the table's does not make its parents ours
		{"com", dns.TypeNS, "REFUSED"},
		{"xmesh.internal", dns.TypeA, "REFUSED"},
		{".", dns.TypeNS, "REFUSED"},
		{"zero.shop.svc.mesh.internal", dns.TypeA, "NOERROR aa an: zero.shop.svc.mesh.internal. 0 IN A 10.0.0.8"},
		{"dns-version.clusterset.local", dns.TypeTXT, `NOERROR aa an: dns-version.clusterset.local. 5 IN TXT "1.0.0"`},
		{`web\.shop.svc.mesh.internal`, dns.TypeA, "NXDOMAIN aa ns: " + soa}, // a dot within a label is no dot
		{`\000.mesh.internal`, dns.TypeA, "NXDOMAIN aa ns: " + soa},
	} {
		for _, tr := range transports {
			r.expect(t, tr, q(c.name, c.qtype), c.want)
		}
	}
	m := r.ask(t, TCP, q("loop.shop.svc.mesh.internal", dns.TypeA))
	if len(m.Answer) != maxChain || m.Rcode != dns.RcodeSuccess {
		t.Errorf("an alias of itself: %d records, code %d, want %d, 0", len(m.Answer), m.Rcode, maxChain)
	}
}

// The letters of a question come back as they were sent.
func TestCaseIsKept(t *testing.T) {
	r := start(t, &Server{})
	eachTransport(t, func(t *testing.T, tr Transport) {
		const name = "wEB.shOP.Svc.MeSH.InTErNaL."
		m := r.ask(t, tr, q(name, dns.TypeAAAA))
		if m.Question[0].Name != name || len(m.Answer) != 1 || m.Answer[0].Header().Name != name {
			t.Errorf("got %v, want all by the name %s", m, name)
		}
	})
}

func TestViews(t *testing.T) {
	r := start(t, &Server{Views: []View{
		{Name: "west", Sources: prefixes("127.0.2.0/24", "127.0.3.0/24")},
		{Name: "east", Sources: prefixes("127.0.1.0/24", "127.0.3.7/32")},
	}})
	for from, want := range map[string]string{
		"127.0.0.1": "203.0.113.1", "127.0.1.1": "10.1.0.1", "127.0.2.9": "10.2.0.1",
		"127.0.3.1": "10.2.0.1", "127.0.3.7": "10.1.0.1", // the longest prefix
	} {
		for _, network := range []string{"udp", "tcp"} {
			d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}
			addr := r.addr[UDP]
			if network == "tcp" {
				d.LocalAddr, addr = &net.TCPAddr{IP: net.ParseIP(from)}, r.addr[TCP]
			}
			client := dns.Client{Net: network, Dialer: &d, Timeout: 10 * time.Second}
			m := q("api.shop.svc.mesh.internal", dns.TypeA)
			// What a client says of itself is not believed.
			m.SetEdns0(1232, false)
			opt := m.IsEdns0()
			opt.Option = append(opt.Option, &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: net.IPv4(127, 0, 1, 0)})
			res, _, err := client.Exchange(m, addr)
			if err != nil {
				t.Fatal(err)
			}
			if len(res.Answer) != 1 || res.Answer[0].(*dns.A).A.String() != want {
				t.Errorf("%s by %s: %v, want %s", from, network, res.Answer, want)
			}
		}
	}
	// A name of one view does not exist in another.
	r.expect(t, TCP, q("only.shop.svc.mesh.internal", dns.TypeA), "NXDOMAIN aa ns: "+soa)
}

// A listener may be of one view, whoever asks.
func TestViewOfAListener(t *testing.T) {
	s := &Server{Zones: []string{"mesh.internal"}, Names: func() Names { return shop() }, Views: []View{{Name: "west", Sources: loopback}}}
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.ServeUDP(t.Context(), c, "east") })
	defer wg.Wait()
	defer s.Close()
	res, _, err := (&dns.Client{Timeout: 20 * time.Second}).Exchange(q("api.shop.svc.mesh.internal", dns.TypeA), c.LocalAddr().String())
	if err != nil || len(res.Answer) != 1 || res.Answer[0].(*dns.A).A.String() != "10.1.0.1" {
		t.Errorf("%v, %v, want 10.1.0.1", res, err)
	}
}

func TestTruncation512And1232(t *testing.T) {
	r := start(t, &Server{})
	for _, c := range []struct {
		size      uint16 // of EDNS, 0 means none
		name      string
		truncated bool
	}{
		{0, "many", true}, {512, "many", true}, {100, "web", false}, {1232, "many", true}, {65535, "many", true}, {1232, "web", false}, {0, "web", false},
	} {
		m := q(c.name+".shop.svc.mesh.internal", dns.TypeA)
		if c.size > 0 {
			m.SetEdns0(c.size, false)
		}
		res := r.ask(t, UDP, m)
		limit := 512
		if c.size > 512 {
			limit = 1232
		}
		if res.Truncated != c.truncated || res.Truncated && len(res.Answer) != 0 || res.Len() > limit {
			t.Errorf("size %d, %s: truncated %v with %d records, %d bytes, want truncated %v, limit %d", c.size, c.name, res.Truncated, len(res.Answer), res.Len(), c.truncated, limit)
		}
		if (c.size > 0) != (res.IsEdns0() != nil) {
			t.Errorf("size %d: OPT in the answer: %v", c.size, res.IsEdns0())
		}
		for _, tr := range transports[1:] {
			if res := r.ask(t, tr, m); c.name == "many" && (res.Truncated || len(res.Answer) != 100) {
				t.Errorf("%s: truncated %v with %d records, want all 100", tr, res.Truncated, len(res.Answer))
			}
		}
	}
	// Additional records that do not fit are left out, and that is no loss.
	tab := newTable(map[string]Answer{
		"_a._tcp.mesh.internal": {Services: []Service{{Port: 1, Target: "many.mesh.internal"}}},
		"many.mesh.internal":    shop().names["many.shop.svc.mesh.internal"],
	})
	r.table.Store(tab)
	if res := r.ask(t, UDP, q("_a._tcp.mesh.internal", dns.TypeSRV)); res.Truncated || len(res.Answer) != 1 || len(res.Extra) == 0 || len(res.Extra) == 100 {
		t.Errorf("SRV: truncated %v, %d answers, %d additional", res.Truncated, len(res.Answer), len(res.Extra))
	}
}

// With the OPT too no answer is over the limit, and none is cut that fits.
func TestEverySize(t *testing.T) {
	r := start(t, &Server{})
	m := q("t.mesh.internal", dns.TypeTXT)
	m.SetEdns0(1232, false)
	matchQuestion := 0
	for n := 1100; n < 1240; n++ {
		r.table.Store(newTable(map[string]Answer{"t.mesh.internal": {Texts: []string{strings.Repeat("x", n)}}}))
		b := r.raw(t, UDP, message(t, m, nil))
		if len(b) > udpSize {
			t.Fatalf("%d bytes, limit %d", len(b), udpSize)
		}
		if b[2]&(bitTC>>8) == 0 {
			matchQuestion = len(b)
		}
	}
	if matchQuestion != udpSize {
		t.Errorf("the longest answer that is not cut is %d bytes, limit %d", matchQuestion, udpSize)
	}
}

// Names at the end of an answer are not written twice.
func TestCompression(t *testing.T) {
	r := start(t, &Server{})
	for _, c := range []struct {
		m    *dns.Msg
		most int
	}{
		{q("web.shop.svc.mesh.internal", dns.TypeA), 12 + 28 + 4 + 2*16},
		{q("alias.shop.svc.mesh.internal", dns.TypeA), 12 + 30 + 4 + (12 + 6) + 2*(6+14)},
		{q("nobody.mesh.internal", dns.TypeA), 12 + 22 + 4 + 12 + (3 + 2) + (11 + 2) + 20},
	} {
		b, _ := c.m.Pack()
		if out := r.raw(t, UDP, b); len(out) > c.most {
			t.Errorf("%s: %d bytes, want at most %d", c.m.Question[0].Name, len(out), c.most)
		}
	}
}

func TestRoundRobin(t *testing.T) {
	s := &Server{}
	s.init()
	x := &exchange{s: s}
	list := []Addr{
		{Addr: netip.MustParseAddr("10.0.0.1"), Weight: 2}, {Addr: netip.MustParseAddr("10.0.0.2")}, {Addr: netip.MustParseAddr("fd00::1"), Weight: 100}, {},
		{Addr: netip.MustParseAddr("10.0.1.1"), Rank: 1}, {Addr: netip.MustParseAddr("10.0.1.2"), Rank: 1}, {Addr: netip.MustParseAddr("::ffff:10.0.1.3"), Rank: 1},
	}
	first, second := map[string]int{}, map[string]int{}
	const n = 6000
	for range n {
		got := x.order(list, false)
		if len(got) != 5 {
			t.Fatalf("%v, want 5 addresses", got)
		}
		seen := map[netip.Addr]bool{}
		for i, a := range got {
			if seen[a] || (a.As4()[2] == 1) != (i > 1) {
				t.Fatalf("%v: the ranks are mixed, or an address is twice there", got)
			}
			seen[a] = true
		}
		first[got[0].String()]++
		second[got[2].String()]++
	}
	near := func(got, want int) bool { return got > want-300 && got < want+300 } // about 8 deviations
	if !near(first["10.0.0.1"], n*2/3) || !near(first["10.0.0.2"], n/3) {
		t.Errorf("first: %v, want 2 to 1", first)
	}
	for a, c := range second {
		if !near(c, n/3) {
			t.Errorf("%s is the first of the second rank %d times of %d", a, c, n)
		}
	}
	if got := x.order(list, true); len(got) != 1 || got[0] != list[2].Addr {
		t.Errorf("IPv6: %v", got)
	}
}

func TestTTLs(t *testing.T) {
	for _, c := range []struct {
		ttl, no   time.Duration
		want, neg uint32
	}{{0, 0, 5, 5}, {-1, -1, 0, 0}, {30 * time.Second, time.Hour, 30, 60}, {time.Hour * 5, 20 * time.Second, 3600, 20}} {
		r := start(t, &Server{TTL: c.ttl, NegativeTTL: c.no})
		if m := r.ask(t, TCP, q("four.shop.svc.mesh.internal", dns.TypeA)); m.Answer[0].Header().Ttl != c.want {
			t.Errorf("TTL %v: %v, want %d", c.ttl, m.Answer, c.want)
		}
		m := r.ask(t, TCP, q("x.mesh.internal", dns.TypeA))
		if s := m.Ns[0].(*dns.SOA); s.Hdr.Ttl != c.neg || s.Minttl != c.neg {
			t.Errorf("NegativeTTL %v: %v, want %d", c.no, s, c.neg)
		}
	}
}

// Every answer is of one table, and after the swap of the new one.
func TestSwap(t *testing.T) {
	r := start(t, &Server{})
	table := func(n int) *fakeTable {
		a := fmt.Sprintf("10.0.%d.", n)
		return newTable(map[string]Answer{
			"_a._tcp.mesh.internal": {Services: []Service{{Port: uint16(n), Target: "a.mesh.internal"}}},
			"a.mesh.internal":       {Addrs: addrs(a+"1", a+"2", a+"3")},
		})
	}
	one, two := table(1), table(2)
	r.table.Store(one)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				r.table.Store([]*fakeTable{one, two}[i%2])
			}
		}
	})
	for range 300 {
		m := r.ask(t, UDP, q("_a._tcp.mesh.internal", dns.TypeSRV))
		port := m.Answer[0].(*dns.SRV).Port
		for _, rr := range m.Extra {
			if rr.(*dns.A).A.To4()[2] != byte(port) {
				t.Fatalf("tables are mixed: %v", m)
			}
		}
	}
	close(stop)
	wg.Wait()
	for i := range 20 {
		r.table.Store([]*fakeTable{one, two}[i%2])
		m := r.ask(t, UDP, q("a.mesh.internal", dns.TypeA))
		if got := m.Answer[0].(*dns.A).A.To4()[2]; got != byte(i%2+1) {
			t.Errorf("right after the swap to %d: %d", i%2+1, got)
		}
	}
}

// An old table is served; how old it is can be seen.
func TestAge(t *testing.T) {
	c := &clock{now: time.Unix(1_700_000_000, 0)}
	s := &Server{now: func() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.now }}
	r := start(t, s)
	c.add(49 * time.Hour)
	r.expect(t, UDP, q("four.shop.svc.mesh.internal", dns.TypeA), "NOERROR aa an: four.shop.svc.mesh.internal. 5 IN A 10.0.0.4")
	if age, ok := s.Age(); age != 49*time.Hour || !ok {
		t.Errorf("age %v, %v, want 49h", age, ok)
	}
	r.table.Store(nil)
	if age, ok := s.Age(); ok {
		t.Errorf("age of no table: %v", age)
	}
}

// Before a table was ever loaded nothing is known not to exist.
func TestNeverLoaded(t *testing.T) {
	up := serve(t, "there.test. 60 IN A 192.0.2.1")
	r := start(t, &Server{Claimed: []string{"test"}, Forward: &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}}, RecursionClients: loopback})
	r.table.Store(nil)
	eachTransport(t, func(t *testing.T, tr Transport) {
		m := q("web.shop.svc.mesh.internal", dns.TypeA)
		m.SetEdns0(1232, false)
		res := r.ask(t, tr, m)
		if got := summary(res); got != "SERVFAIL ra" || edeOf(res) != int(dns.ExtendedErrorCodeNotReady) {
			t.Errorf("a zone's name: %s, extended error %d", got, edeOf(res))
		}
		r.expect(t, tr, q("there.test", dns.TypeA), "NOERROR ra an: there.test. 60 IN A 192.0.2.1")
		r.expect(t, tr, q("custom.test", dns.TypeA), "SERVFAIL ra") // the table might have it
		r.expect(t, tr, q("there.test", dns.TypeTXT), "SERVFAIL ra")
	})
	r.table.Store(shop())
	r.expect(t, UDP, q("custom.test", dns.TypeA), "NXDOMAIN ra ns: test. 3 IN SOA ns.test. root.test. 1 2 3 4 3600")
}

// What the table can't know is not said to be absent: in a zone by SERVFAIL, and
// elsewhere not before others have been asked.
func TestTableThatCannotKnow(t *testing.T) {
	up := serve(t, "there.later.test. 60 IN A 192.0.2.1")
	r := start(t, &Server{Claimed: []string{"later.test"}, Forward: &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}}, RecursionClients: loopback})
	eachTransport(t, func(t *testing.T, tr Transport) {
		m := q("later.shop.svc.mesh.internal", dns.TypeA)
		m.SetEdns0(1232, false)
		res := r.ask(t, tr, m)
		if got := summary(res); got != "SERVFAIL ra" || edeOf(res) != int(dns.ExtendedErrorCodeNotReady) {
			t.Errorf("a zone's name: %s, extended error %d", got, edeOf(res))
		}
		r.expect(t, tr, q("there.later.test", dns.TypeA), "NOERROR ra an: there.later.test. 60 IN A 192.0.2.1")
		r.expect(t, tr, q("there.later.test", dns.TypeTXT), "SERVFAIL ra")
		r.expect(t, tr, q("later.test", dns.TypeA), "SERVFAIL ra")
		// What can't be the table's is answered as ever, or search lists end there.
		r.expect(t, tr, q("later.elsewhere.test", dns.TypeA), "NXDOMAIN ra"+testSOA)
		r.expect(t, tr, q("four.shop.svc.mesh.internal", dns.TypeA), "NOERROR aa ra an: four.shop.svc.mesh.internal. 5 IN A 10.0.0.4")
	})
}

func TestObserve(t *testing.T) {
	up := serve(t, "a.test. 60 IN A 192.0.2.1")
	r := start(t, &Server{Forward: &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}}, RecursionClients: loopback, Views: []View{{"east", loopback}}})
	next := func(m *dns.Msg) Result {
		t.Helper()
		r.ask(t, TCP, m)
		select {
		case res := <-r.results:
			if res.View != "east" || res.Transport != TCP || !res.From.IsValid() || res.Size == 0 {
				t.Errorf("%+v", res)
			}
			return res
		case <-time.After(10 * time.Second):
			t.Fatal("no result")
		}
		return Result{}
	}
	for _, c := range []struct {
		m    *dns.Msg
		want Source
		why  string
	}{
		{q("four.shop.svc.mesh.internal", dns.TypeA), FromTable, ""},
		{q("a.test", dns.TypeA), FromUpstream, ""},
		{q("a.test", dns.TypeA), FromCache, ""},
		{q("a.test", dns.TypeAXFR), "", "unsupported"},
		{q("later.shop.svc.mesh.internal", dns.TypeA), "", "dns-failed"},
	} {
		if res := next(c.m); res.Source != c.want || string(res.Reason) != c.why || res.Type != Type(c.m.Question[0].Qtype) {
			t.Errorf("%v: %+v, want %q %q", c.m.Question, res, c.want, c.why)
		}
	}
}

// Of questions that are under way at Shutdown none is lost, and no more are
// taken.
// Shutdown does not wait for longer than it is told to.
// What tells where a message was sent to makes its answer leave from there. A
// socket of all addresses needs it: clients take an answer from another
// address for somebody else's.
