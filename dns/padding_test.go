package dns

import (
	"fmt"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// By TLS and HTTPS a client that pads its question gets a padded answer, all of one
// length; elsewhere, and for others, answers are as short as they can be.
func TestPadding(t *testing.T) {
	names := map[string]Answer{}
	for i := range 5 {
		names[fmt.Sprintf("%s.mesh.internal", strings.Repeat("x", 1+12*i))] = Answer{Addrs: addrs("10.0.0.1", "10.0.0.2")[:1+i%2]}
	}
	var many []string
	for i := range 60 {
		many = append(many, fmt.Sprintf("10.1.0.%d", i))
	}
	names["many.mesh.internal"] = Answer{Addrs: addrs(many...)}
	r := start(t, &Server{})
	r.table.Store(newTable(names))
	for _, tr := range transports {
		padded := tr == TLS || tr == HTTPS
		for name := range names {
			for _, asks := range []bool{false, true} {
				m := q(name, dns.TypeA)
				m.SetEdns0(4096, false)
				if asks {
					m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_PADDING{Padding: make([]byte, 10)})
				}
				b, err := m.Pack()
				if err != nil {
					t.Fatal(err)
				}
				out := r.raw(t, tr, b)
				res := new(dns.Msg)
				if err := res.Unpack(out); err != nil || res.Rcode != 0 || len(res.Answer) == 0 {
					t.Fatalf("%s %s: %v, %s", tr, name, err, summary(res))
				}
				has := false
				for _, o := range res.IsEdns0().Option {
					_, is := o.(*dns.EDNS0_PADDING)
					has = has || is
				}
				if has != (padded && asks) || has && len(out)%padTo != 0 {
					t.Errorf("%s %s, asked for padding %v: %d bytes, padded %v", tr, name, asks, len(out), has)
				}
			}
		}
		// A no, too.
		m := q("nobody.mesh.internal", dns.TypeA)
		m.SetEdns0(4096, false)
		m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_PADDING{})
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		if out := r.raw(t, tr, b); padded != (len(out) == padTo) {
			t.Errorf("%s: NXDOMAIN of %d bytes", tr, len(out))
		}
	}
}

// An answer near the limit is padded up to it.
func TestPaddingEndsAtTheLimit(t *testing.T) {
	qu := query{edns: true, pad: true, raw: []byte("\x01a\x00\x00\x01\x00\x01"), labels: 3}
	for limit := headerLen + len(qu.raw) + 11; limit < 2*padTo; limit++ {
		var w writer
		w.begin(nil, &qu, 0, 0, limit)
		out := w.end(0)
		if len(out) > limit || limit >= padTo && len(out) != padTo {
			t.Fatalf("limit %d: %d bytes", limit, len(out))
		}
		if err := new(dns.Msg).Unpack(out); err != nil {
			t.Fatalf("limit %d: %v", limit, err)
		}
	}
}
