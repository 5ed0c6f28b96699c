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
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeSRV, dns.TypeTXT, dns.TypeHTTPS, dns.TypePTR, dns.TypeANY} {
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
	s := &Server{Zones: []string{"mesh.internal", "clusterset.local"}, Names: func() Names { return table }, Rate: -1}
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
