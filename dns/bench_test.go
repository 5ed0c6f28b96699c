package dns

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/miekg/dns"
)

// BenchmarkAnswer is one question from bytes to bytes, as a reader of UDP has
// it answered, without the two system calls.
func BenchmarkAnswer(b *testing.B) {
	for _, n := range []int{10, 100_000} {
		names := map[string]Answer{}
		for i := range n {
			names[fmt.Sprintf("svc%d.shop.svc.mesh.internal", i)] = Answer{Addrs: addrs("10.0.0.1", "10.0.0.2", "10.0.0.3")}
			names[fmt.Sprintf("_https._tcp.svc%d.shop.svc.mesh.internal", i)] = Answer{Services: []Service{{Port: 443, Target: fmt.Sprintf("svc%d.shop.svc.mesh.internal", i)}}}
		}
		table := newTable(names)
		s := &Server{Zones: []string{"mesh.internal"}, Names: func() Names { return table }, RateLimit: -1}
		s.init()
		from := netip.MustParseAddrPort("192.0.2.1:4000")
		run := func(name string, qtype uint16, what string) {
			b.Run(fmt.Sprintf("names=%d/%s", n, what), func(b *testing.B) {
				queries := make([][]byte, min(n, 1000))
				for i := range queries {
					m := new(dns.Msg).SetQuestion(fmt.Sprintf(name, i*(n/len(queries))), qtype)
					m.SetEdns0(1232, false)
					queries[i], _ = m.Pack()
				}
				x := s.take(UDP, "")
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					x.in = append(x.in[:0], queries[i%len(queries)]...)
					if !x.begin(from) || len(x.out) == 0 {
						b.Fatal("no answer")
					}
					x.done()
				}
			})
		}
		run("svc%d.shop.svc.mesh.internal.", dns.TypeA, "A")
		run("svc%d.shop.svc.mesh.internal.", dns.TypeAAAA, "NODATA")
		run("nobody%d.shop.svc.mesh.internal.", dns.TypeA, "NXDOMAIN")
		run("_https._tcp.svc%d.shop.svc.mesh.internal.", dns.TypeSRV, "SRV")
	}
}

// BenchmarkCached is an answer of others, from the cache.
func BenchmarkCached(b *testing.B) {
	f := &Forwarder{Upstreams: []Upstream{{Addr: "127.0.0.1:1"}}}
	s := &Server{Forward: f, RecursionClients: loopback, RateLimit: -1}
	s.init()
	f.init()
	m := new(dns.Msg).SetQuestion("www.example.test.", dns.TypeA)
	raw, _ := m.Pack()
	rr, _ := dns.NewRR("www.example.test. 300 IN A 192.0.2.1")
	m.Answer = []dns.RR{rr}
	e := newReply(m, len(raw)-headerLen)
	e.stored, e.expires = f.clock(), f.clock().Add(maxTTL)
	x := s.take(UDP, "")
	x.in = append(x.in[:0], raw...)
	parseQuery(x.in, &x.q)
	f.cache.put(appendKey(nil, &x.q), e)
	from := netip.MustParseAddrPort("127.0.0.1:4000")
	b.ReportAllocs()
	for b.Loop() {
		x.in = append(x.in[:0], raw...)
		if !x.begin(from) || x.result.Source != FromCache {
			b.Fatal(x.result)
		}
	}
}
