package dns

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/miekg/dns"
)

// FuzzQuery looks for messages that crash the server, that it reads in another
// way than the library does, or that are answered with more than they should.
func FuzzQuery(f *testing.F) {
	t := &testing.T{}
	for _, in := range badInput(t) {
		f.Add(in.b)
	}
	for name := range shop().names {
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeSRV, dns.TypeTXT, dns.TypeHTTPS, dns.TypePTR, dns.TypeSSHFP, dns.TypeANY} {
			m := q(name, qtype)
			m.SetEdns0(1232, qtype == dns.TypeA)
			b, err := m.Pack()
			if err != nil {
				continue // of a view
			}
			f.Add(b)
		}
	}
	table := shop()
	s := &Server{Zones: []string{"mesh.internal", "clusterset.local"}, Names: func() Names { return table }, RateLimit: -1}
	s.init()
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > maxQuery {
			return
		}
		for _, tr := range []Transport{UDP, TCP} {
			x := s.take(tr, "")
			x.in = append(x.in[:0], b...)
			if !x.begin(netip.MustParseAddrPort("192.0.2.1:4000")) {
				t.Fatal("asks others without a forwarder")
			}
			if len(x.out) == 0 {
				if len(b) >= headerLen && b[2]&0x80 == 0 {
					t.Fatalf("no answer to a question: %x", b)
				}
				continue
			}
			m := new(dns.Msg)
			if err := m.Unpack(x.out); err != nil {
				t.Fatalf("the answer can't be read: %v: %x", err, x.out)
			}
			if !bytes.Equal(x.out[:2], b[:2]) || !m.Response || x.out[2]&(bitTC>>8) != 0 && len(m.Answer) > 0 {
				t.Fatalf("%v", m)
			}
			if tr == UDP && len(x.out) > udpSize || m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError && m.Rcode != dns.RcodeServerFailure && len(x.out) > len(b) {
				t.Fatalf("%d bytes for %d, code %d", len(x.out), len(b), m.Rcode)
			}
			if m.Rcode == dns.RcodeFormatError || m.Rcode == dns.RcodeNotImplemented {
				continue
			}
			// What we took for a question is one to the library as well, and
			// the same.
			in := new(dns.Msg)
			if err := in.Unpack(b); err != nil {
				continue // it reads the data of records; nobody here does
			}
			if len(in.Question) != 1 || len(m.Question) != 1 || m.Question[0] != in.Question[0] {
				t.Fatalf("question %v, answered %v", in.Question, m.Question)
			}
			if (in.IsEdns0() != nil) != (m.IsEdns0() != nil) {
				t.Fatalf("OPT %v, answered %v", in.IsEdns0(), m.IsEdns0())
			}
		}
	})
}

// FuzzReply looks for answers of upstreams that crash the forwarder, or that
// it passes on with what was not asked for.
func FuzzReply(f *testing.F) {
	for _, list := range [][]string{
		{"a.test. 60 IN A 192.0.2.1"}, {"a.test. 60 IN CNAME b.test.", "b.test. 60 IN A 10.0.0.1"}, {"b.test. 60 IN A 192.0.2.1"},
		{"a.test. 60 IN HTTPS 1 . alpn=h2 ipv4hint=10.0.0.1"}, {"a.test. 60 IN CNAME a.test."},
	} {
		for _, qtype := range []uint16{dns.TypeA, dns.TypeHTTPS} {
			m := q("a.test", qtype)
			m.Response = true
			for _, s := range list {
				rr, err := dns.NewRR(s)
				if err != nil {
					f.Fatal(err)
				}
				m.Answer = append(m.Answer, rr)
			}
			m.Ns = []dns.RR{&dns.SOA{Hdr: dns.RR_Header{Name: "test.", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: 60}, Ns: "a.", Mbox: "b."}}
			m.Compress = true
			b, err := m.Pack()
			if err != nil {
				f.Fatal(err)
			}
			f.Add(b, qtype == dns.TypeA)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, a bool) {
		qtype := dns.TypeHTTPS
		if a {
			qtype = dns.TypeA
		}
		m := q("A.test", qtype)
		raw, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		var in query
		if parseQuery(raw, &in) != dns.RcodeSuccess || len(b) < len(raw) {
			return
		}
		copy(b[headerLen:], in.raw) // what does not repeat the question is not read
		b[0], b[1], b[2], b[4], b[5] = 0, 0, 0x80, 0, 1
		if matchQuestion(b, b, &in) != isAnswer {
			t.Fatal("an answer does not fit")
		}
		got := new(dns.Msg)
		if got.Unpack(b) != nil {
			return
		}
		c := check{name: in.name, qtype: qtype}
		if c.clean(got) != nil {
			return
		}
		e := newReply(got, len(in.raw))
		if e == nil {
			return
		}
		var w writer
		w.begin(nil, &in, bitRA, e.rcode, maxMessage)
		if !w.paste(e, 5, false) {
			return
		}
		out := new(dns.Msg)
		if err := out.Unpack(w.end(e.rcode)); err != nil {
			t.Fatalf("what is passed on can't be read: %v", err)
		}
		if len(out.Extra) > 0 || len(out.Answer) != len(got.Answer) {
			t.Fatalf("%v", out)
		}
		for _, rr := range out.Answer {
			if t2 := rr.Header().Rrtype; t2 != qtype && t2 != dns.TypeCNAME {
				t.Fatalf("a %s was not asked for", dns.TypeToString[t2])
			}
			if a, ok := rr.(*dns.A); ok {
				if addr, _ := netip.AddrFromSlice(a.A); isPrivateAddr(addr) {
					t.Fatalf("%v", a)
				}
			}
		}
	})
}
