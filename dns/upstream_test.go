package dns

import (
	"crypto/tls"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"
)

func TestUpstreamLies(t *testing.T) {
	evil, _ := dns.NewRR("a.test. 60 IN A 203.0.113.66")
	for name, c := range map[string]struct {
		forge func(m *dns.Msg)
		tcp   bool // the question is asked by TCP then
	}{
		"wrong id":       {func(m *dns.Msg) { m.Id++ }, false},
		"other name":     {func(m *dns.Msg) { m.Question[0].Name = "b.test." }, false},
		"longer name":    {func(m *dns.Msg) { m.Question[0].Name = "x." + m.Question[0].Name }, false},
		"other type":     {func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeTXT }, false},
		"other class":    {func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }, false},
		"no question":    {func(m *dns.Msg) { m.Question = nil }, false},
		"two questions":  {func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }, false},
		"a question":     {func(m *dns.Msg) { m.Response = false }, false},
		"another opcode": {func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }, false},
		"wrong case":     {func(m *dns.Msg) { m.Question[0].Name = flip(m.Question[0].Name) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			up := serve(t, "a.test. 60 IN A 192.0.2.1")
			tcp := false
			up.do(func(w dns.ResponseWriter, m *dns.Msg) bool {
				if _, ok := w.RemoteAddr().(*net.UDPAddr); !ok {
					tcp = true
					return false
				}
				forged := up.answer(m)
				forged.Answer = []dns.RR{evil}
				c.forge(forged)
				_ = w.WriteMsg(forged)
				return false // and then the true answer
			})
			r, _, _ := forwarding(t, up)
			for range 2 {
				r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.1")
			}
			up.mu.Lock()
			defer up.mu.Unlock()
			if tcp != c.tcp {
				t.Errorf("asked by TCP: %v, want %v", tcp, c.tcp)
			}
		})
	}
}

func flip(s string) string {
	b := []byte(s)
	for i, c := range b {
		if 'a' <= c|0x20 && c|0x20 <= 'z' {
			b[i] ^= 0x20
			break
		}
	}
	return string(b)
}

func TestFloodOfGuesses(t *testing.T) {
	up := serve(t, "a.test. 60 IN A 192.0.2.1")
	up.do(func(w dns.ResponseWriter, m *dns.Msg) bool {
		if _, ok := w.RemoteAddr().(*net.UDPAddr); !ok {
			return false
		}
		for i := range 100 {
			forged := up.answer(m)
			forged.Id += uint16(i + 1)
			_ = w.WriteMsg(forged)
		}
		return true
	})
	r, _, _ := forwarding(t, up)
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.1")
}

func TestAnswerFromElsewhere(t *testing.T) {
	other, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	up := serve(t, "a.test. 60 IN A 192.0.2.1")
	up.do(func(w dns.ResponseWriter, m *dns.Msg) bool {
		forged := up.answer(m)
		forged.Answer[0].(*dns.A).A = net.IPv4(203, 0, 113, 66)
		b, _ := forged.Pack()
		_, _ = other.WriteTo(b, w.RemoteAddr())
		return false
	})
	r, _, _ := forwarding(t, up)
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.1")
}

func TestQuestionsCantBeGuessed(t *testing.T) {
	var mu sync.Mutex
	cases := map[string]bool{}
	up := serve(t)
	up.do(func(w dns.ResponseWriter, m *dns.Msg) bool {
		mu.Lock()
		defer mu.Unlock()
		_, rest, _ := strings.Cut(m.Question[0].Name, ".")
		cases[rest] = true
		return false
	})
	r, _, _ := forwarding(t, up)
	const n = 60
	for i := range n {
		r.ask(t, UDP, q(fmt.Sprintf("n%d.abcdefghijklmnopqrstuvwxyz.test", i), dns.TypeA))
	}
	up.mu.Lock()
	defer up.mu.Unlock()
	if len(up.ids) < n-2 || len(up.ports) < n/2 || len(cases) < n-2 {
		t.Errorf("%d questions: %d ids, %d ports, %d ways to write the name", n, len(up.ids), len(up.ports), len(cases))
	}
	ones := 0
	for s := range cases {
		for _, c := range []byte(s) {
			if c >= 'A' && c <= 'Z' {
				ones++
			}
		}
	}
	if per := ones * 100 / (len(cases) * 30); per < 40 || per > 60 {
		t.Errorf("%d%% of the letters are capitals", per)
	}
}

func TestBailiwick(t *testing.T) {
	for name, c := range map[string]struct {
		answer, ns, extra []string
		want              string
	}{
		"records of others":      {[]string{"a.test. 60 IN A 192.0.2.1", "bank.test. 60 IN A 203.0.113.66"}, nil, nil, "NOERROR ra an: a.test. 60 IN A 192.0.2.1"},
		"alias of another":       {[]string{"a.test. 60 IN A 192.0.2.1", "bank.test. 60 IN CNAME evil.test."}, nil, nil, "NOERROR ra an: a.test. 60 IN A 192.0.2.1"},
		"another type":           {[]string{"a.test. 60 IN A 192.0.2.1", "a.test. 60 IN TXT x"}, nil, nil, "NOERROR ra an: a.test. 60 IN A 192.0.2.1"},
		"another class":          {[]string{"a.test. 60 IN A 192.0.2.1", "a.test. 60 CH A 203.0.113.66"}, nil, nil, "NOERROR ra an: a.test. 60 IN A 192.0.2.1"},
		"name servers and glue":  {[]string{"a.test. 60 IN A 192.0.2.1"}, []string{"test. 60 IN NS ns.evil.test."}, []string{"ns.evil.test. 60 IN A 203.0.113.66", "bank.test. 60 IN A 203.0.113.66"}, "NOERROR ra an: a.test. 60 IN A 192.0.2.1"},
		"only others":            {[]string{"bank.test. 60 IN A 203.0.113.66"}, nil, nil, "NOERROR ra"},
		"a referral":             {nil, []string{"test. 60 IN NS ns.evil.test."}, []string{"ns.evil.test. 60 IN A 203.0.113.66"}, "NOERROR ra"},
		"a SOA of another":       {nil, []string{"evil.test. 60 IN SOA a. b. 1 2 3 4 5"}, nil, "NOERROR ra"},
		"two aliases":            {[]string{"a.test. 60 IN CNAME b.test.", "a.test. 60 IN CNAME c.test.", "b.test. 60 IN A 192.0.2.1", "c.test. 60 IN A 203.0.113.66"}, nil, nil, "NOERROR ra an: a.test. 60 IN CNAME b.test., b.test. 60 IN A 192.0.2.1"},
		"an alias to nowhere":    {[]string{"a.test. 60 IN CNAME b.test."}, []string{"test. 60 IN SOA a. b. 1 2 3 4 5"}, nil, "NOERROR ra an: a.test. 5 IN CNAME b.test. ns: test. 5 IN SOA a. b. 1 2 3 4 5"},
		"a loop of aliases":      {[]string{"a.test. 60 IN CNAME b.test.", "b.test. 60 IN CNAME a.test."}, nil, nil, "SERVFAIL ra"},
		"an alias in capitals":   {[]string{"A.TEST. 60 IN CNAME B.TEST.", "b.Test. 60 IN A 192.0.2.1"}, nil, nil, "NOERROR ra an: a.test. 60 IN CNAME B.TEST., b.test. 60 IN A 192.0.2.1"},
		"signatures unasked for": {[]string{"a.test. 60 IN A 192.0.2.1", "a.test. 60 IN RRSIG A 8 2 60 20300101000000 20200101000000 1 test. AAAA"}, nil, nil, "NOERROR ra an: a.test. 60 IN A 192.0.2.1"},
	} {
		t.Run(name, func(t *testing.T) {
			up := serve(t)
			rrs := func(list []string) (out []dns.RR) {
				for _, s := range list {
					rr, err := dns.NewRR(s)
					if err != nil {
						t.Error(err)
					}
					out = append(out, rr)
				}
				return out
			}
			up.do(func(w dns.ResponseWriter, m *dns.Msg) bool {
				if strings.HasPrefix(strings.ToLower(m.Question[0].Name), "bank.") {
					return false
				}
				res := new(dns.Msg).SetReply(m)
				res.Authoritative, res.AuthenticatedData = true, true
				res.Answer, res.Ns, res.Extra = rrs(c.answer), rrs(c.ns), rrs(c.extra)
				_ = w.WriteMsg(res)
				return true
			})
			r, _, _ := forwarding(t, up)
			for _, tr := range transports {
				r.expect(t, tr, q("a.test", dns.TypeA), c.want)
			}
			r.expect(t, UDP, q("bank.test", dns.TypeA), "NXDOMAIN ra"+testSOA) // not poisoned
		})
	}
}

func TestLongAliases(t *testing.T) {
	chain := func(n int) []string {
		records := []string{fmt.Sprintf("c%d.test. 60 IN A 192.0.2.1", n)}
		for i := range n {
			records = append(records, fmt.Sprintf("c%d.test. 60 IN CNAME c%d.test.", i, i+1))
		}
		return records
	}
	for n, want := range map[int]int{maxChain: dns.RcodeSuccess, maxChain + 1: dns.RcodeServerFailure} {
		up := serve(t, chain(n)...)
		r, _, _ := forwarding(t, up)
		if m := r.ask(t, TCP, q("c0.test", dns.TypeA)); m.Rcode != want || want == 0 && len(m.Answer) != n+1 {
			t.Errorf("%d aliases: %s", n, summary(m))
		}
	}
}

func TestPrivateAddresses(t *testing.T) {
	records := []string{"ok.test. 60 IN A 192.0.2.1", "mixed.test. 60 IN A 192.0.2.1", "mixed.test. 60 IN A 10.0.0.1", "in.corp.test. 60 IN A 10.0.0.1", "in.zone.test. 60 IN A 10.0.0.2",
		"h.test. 60 IN HTTPS 1 . alpn=h2 ipv4hint=192.0.2.1,10.0.0.1 ipv6hint=2001:db8::1"}
	private := []string{"10.0.0.1", "127.0.0.1", "169.254.169.254", "172.31.255.255", "192.168.1.1", "100.64.0.1", "0.0.0.0", "240.0.0.1", "224.0.0.1"}
	private6 := []string{"::1", "::", "fd00::1", "fe80::1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "2002:a00:1::1", "ff02::1",
		"64:ff9b:1::10.0.0.1", "64:ff9b:1:a00:0:100::", "::ffff:0:10.0.0.1", "2001:0:c000:201:0:0:f5ff:fffe", "2001:0:a00:1::3fff:fdfe", "::10.0.0.1"}
	public6 := []string{"64:ff9b::c000:201", "64:ff9b:1::c000:201", "2002:c000:201::1", "2001:0:c000:201::3fff:fdfe", "2001:db8::1"}
	for i, a := range private {
		records = append(records, fmt.Sprintf("p%d.test. 60 IN A %s", i, a))
	}
	for i, a := range private6 {
		records = append(records, fmt.Sprintf("s%d.test. 60 IN AAAA %s", i, a))
	}
	for i, a := range public6 {
		records = append(records, fmt.Sprintf("w%d.test. 60 IN AAAA %s", i, a))
	}
	up := serve(t, records...)
	f := &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}, PrivateZones: []string{"Corp.test."}, Zones: map[string][]Upstream{"zone.test": {{Addr: up.addr}}}}
	r := start(t, &Server{Forward: f, RecursionClients: loopback})
	r.expect(t, UDP, q("ok.test", dns.TypeA), "NOERROR ra an: ok.test. 60 IN A 192.0.2.1")
	r.expect(t, UDP, q("mixed.test", dns.TypeA), "NOERROR ra an: mixed.test. 60 IN A 192.0.2.1")
	r.expect(t, UDP, q("in.corp.test", dns.TypeA), "NOERROR ra an: in.corp.test. 60 IN A 10.0.0.1")
	r.expect(t, UDP, q("in.zone.test", dns.TypeA), "NOERROR ra an: in.zone.test. 60 IN A 10.0.0.2")
	r.expect(t, UDP, q("h.test", dns.TypeHTTPS), `NOERROR ra an: h.test. 60 IN HTTPS 1 . alpn="h2" ipv6hint="2001:db8::1"`)
	for i := range private {
		m := q(fmt.Sprintf("p%d.test", i), dns.TypeA)
		m.SetEdns0(1232, false)
		if res := r.ask(t, UDP, m); summary(res) != "NOERROR ra" || edeOf(res) != int(dns.ExtendedErrorCodeFiltered) {
			t.Errorf("%s: %s, extended error %d", private[i], summary(res), edeOf(res))
		}
	}
	for i := range private6 {
		r.expect(t, UDP, q(fmt.Sprintf("s%d.test", i), dns.TypeAAAA), "NOERROR ra")
	}
	for i, a := range public6 {
		r.expect(t, UDP, q(fmt.Sprintf("w%d.test", i), dns.TypeAAAA), fmt.Sprintf("NOERROR ra an: w%d.test. 60 IN AAAA %s", i, a))
	}
	f = &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}, PrivateZones: []string{"."}}
	r = start(t, &Server{Forward: f, RecursionClients: loopback})
	r.expect(t, UDP, q("p0.test", dns.TypeA), "NOERROR ra an: p0.test. 60 IN A 10.0.0.1")
}

func TestForwardTruncated(t *testing.T) {
	var records []string
	for i := range 300 {
		records = append(records, fmt.Sprintf("big.test. 60 IN A 192.0.%d.%d", 2+i>>8, i&0xff))
	}
	up := serve(t, records...)
	up.do(func(w dns.ResponseWriter, m *dns.Msg) bool {
		if _, ok := w.RemoteAddr().(*net.UDPAddr); !ok {
			return false
		}
		res := up.answer(m)
		res.Truncate(512)
		_ = w.WriteMsg(res)
		return true
	})
	r, _, _ := forwarding(t, up)
	m := q("big.test", dns.TypeA)
	m.SetEdns0(4096, false)
	if res := r.ask(t, UDP, m); !res.Truncated || len(res.Answer) != 0 {
		t.Errorf("by UDP: truncated %v, %d records", res.Truncated, len(res.Answer))
	}
	for _, tr := range transports[1:] {
		if res := r.ask(t, tr, m); res.Truncated || len(res.Answer) != 300 {
			t.Errorf("by %s: truncated %v, %d records", tr, res.Truncated, len(res.Answer))
		}
	}
}

func TestUpstreamByTLS(t *testing.T) {
	p, err := pair()
	if err != nil {
		t.Fatal(err)
	}
	up := &Server{Zones: []string{"test"}, Names: func() Names {
		return newTable(map[string]Answer{"a.test": {Addrs: addrs("192.0.2.1")}, "b.test": {Addrs: addrs("192.0.2.2")}})
	}}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns int
	counted := &countingListener{Listener: ln, n: &conns}
	var wg sync.WaitGroup
	wg.Go(func() { _ = up.ServeTLS(t.Context(), counted, &tls.Config{Certificates: []tls.Certificate{p.TLS}}, "") })
	defer wg.Wait()
	defer up.Close()
	conf := p.ClientConfig("dns.example.test")
	f := &Forwarder{Upstreams: []Upstream{{Addr: ln.Addr().String(), TLS: conf}}}
	r := start(t, &Server{Forward: f, RecursionClients: loopback})
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 5 IN A 192.0.2.1")
	r.expect(t, UDP, q("b.test", dns.TypeA), "NOERROR ra an: b.test. 5 IN A 192.0.2.2")
	if counted.mu.Lock(); conns != 1 {
		t.Errorf("%d connections for two questions, want 1", conns)
	}
	counted.mu.Unlock()
	// A certificate of another name is not believed.
	bad := p.ClientConfig("other.example.test")
	f = &Forwarder{Upstreams: []Upstream{{Addr: ln.Addr().String(), TLS: bad}}}
	r = start(t, &Server{Forward: f, RecursionClients: loopback})
	r.expect(t, UDP, q("a.test", dns.TypeA), "SERVFAIL ra")
}

type countingListener struct {
	net.Listener
	mu sync.Mutex // guards n
	n  *int
}

func (l *countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.mu.Lock()
		*l.n++
		l.mu.Unlock()
	}
	return c, err
}

// Names in an answer have the case of the question, or lower case: the pattern of
// capitals of a question to an upstream is seen by nobody else,
// although the upstream's names are pointers into it.
func TestCapitalsAreNotPassedOn(t *testing.T) {
	for _, byTCP := range []bool{false, true} {
		up := serve(t)
		up.do(func(w dns.ResponseWriter, m *dns.Msg) bool {
			name := m.Question[0].Name
			res := new(dns.Msg).SetReply(m)
			if _, udp := w.RemoteAddr().(*net.UDPAddr); udp && byTCP {
				res.Truncated = true
				_ = w.WriteMsg(res)
				return true
			}
			if strings.EqualFold(name, "mx.up.test.") {
				_, zone, _ := strings.Cut(name, ".")
				res.Answer = []dns.RR{&dns.MX{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeMX, Class: dns.ClassINET, Ttl: 60}, Preference: 10, Mx: "www." + zone}}
			} else {
				res.Rcode = dns.RcodeNameError
				_, zone, _ := strings.Cut(name, ".")
				res.Ns = []dns.RR{&dns.SOA{Hdr: dns.RR_Header{Name: zone, Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: 60}, Ns: "ns." + zone, Mbox: "h." + zone, Minttl: 60}}
			}
			res.Compress = true
			_ = w.WriteMsg(res)
			return true
		})
		r, _, _ := forwarding(t, up)
		for _, tr := range transports {
			r.expect(t, tr, q("mx.up.test", dns.TypeMX), "NOERROR ra an: mx.up.test. 60 IN MX 10 www.up.test.")
			r.expect(t, tr, q("no.up.test", dns.TypeA), "NXDOMAIN ra ns: up.test. 60 IN SOA ns.up.test. h.up.test. 0 0 0 0 60")
		}
		r.expect(t, UDP, q("MX.up.TEST", dns.TypeMX), "NOERROR ra an: MX.up.TEST. 60 IN MX 10 www.up.TEST.")
	}
}
