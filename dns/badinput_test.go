package dns

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"culvert.dev/internal/testnet"
)

// message is a question, changed by f as bytes.
func message(t *testing.T, m *dns.Msg, f func(b []byte) []byte) []byte {
	t.Helper()
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	if f != nil {
		b = f(b)
	}
	return b
}

const known = "web.shop.svc.mesh.internal"

// badInput are messages that are refused in the same way by every transport.
// Want is the response code, drop for none.
func badInput(t *testing.T) map[string]struct {
	b    []byte
	want int
} {
	withOPT := func(f func(o *dns.OPT)) *dns.Msg {
		m := q(known, dns.TypeA)
		m.SetEdns0(4096, false)
		f(m.IsEdns0())
		return m
	}
	set := func(at int, v ...byte) func([]byte) []byte {
		return func(b []byte) []byte { copy(b[at:], v); return b }
	}
	question := func(name ...byte) []byte { // a name as it stands
		b := []byte{0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}
		return append(append(b, name...), 0, 1, 0, 1)
	}
	extra := func(name ...byte) []byte { // a record with a name as it stands
		b := message(t, q(known, dns.TypeA), set(11, 1))
		return append(append(b, name...), 0, 1, 0, 1, 0, 0, 0, 0, 0, 0)
	}
	chaos := func(name string) *dns.Msg {
		m := q(name, dns.TypeTXT)
		m.Question[0].Qclass = dns.ClassCHAOS
		return m
	}
	class := func(c uint16) *dns.Msg {
		m := q(known, dns.TypeA)
		m.Question[0].Qclass = c
		return m
	}
	long := bytes.Repeat(append([]byte{63}, strings.Repeat("x", 63)...), 4) // 256 octets
	opt := []byte{0, 0, 41, 4, 0xd0, 0, 0, 0, 0, 0, 0}

	return map[string]struct {
		b    []byte
		want int
	}{
		"nothing":                        {nil, drop},
		"one byte":                       {[]byte{1}, drop},
		"short header":                   {message(t, q(known, dns.TypeA), func(b []byte) []byte { return b[:11] }), drop},
		"an answer":                      {message(t, q(known, dns.TypeA), set(2, 0x81)), drop},
		"an answer to something unknown": {message(t, q("nobody.test", dns.TypeA), set(2, 0x84)), drop},

		"opcode status":       {message(t, q(known, dns.TypeA), set(2, 2<<3)), dns.RcodeNotImplemented},
		"opcode inverse":      {message(t, q(known, dns.TypeA), set(2, 1<<3)), dns.RcodeNotImplemented},
		"opcode notify":       {message(t, q(known, dns.TypeA), set(2, 4<<3)), dns.RcodeNotImplemented},
		"opcode update":       {message(t, q(known, dns.TypeA), set(2, 5<<3)), dns.RcodeNotImplemented},
		"opcode 15":           {message(t, q(known, dns.TypeA), set(2, 15<<3)), dns.RcodeNotImplemented},
		"header only":         {[]byte{0x12, 0x34, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0}, dns.RcodeFormatError},
		"two questions":       {message(t, q(known, dns.TypeA), set(4, 0, 2)), dns.RcodeFormatError},
		"65535 questions":     {message(t, q(known, dns.TypeA), set(4, 0xff, 0xff)), dns.RcodeFormatError},
		"no type and class":   {message(t, q(known, dns.TypeA), func(b []byte) []byte { return b[:len(b)-4] }), dns.RcodeFormatError},
		"half a class":        {message(t, q(known, dns.TypeA), func(b []byte) []byte { return b[:len(b)-1] }), dns.RcodeFormatError},
		"answers missing":     {message(t, q(known, dns.TypeA), set(6, 0, 1)), dns.RcodeFormatError},
		"authority missing":   {message(t, q(known, dns.TypeA), set(8, 0xff, 0xff)), dns.RcodeFormatError},
		"additional missing":  {message(t, q(known, dns.TypeA), set(10, 0, 1)), dns.RcodeFormatError},
		"record cut short":    {append(extra(0), 0)[:len(extra(0))-1], dns.RcodeFormatError},
		"data cut short":      {message(t, q(known, dns.TypeA), func(b []byte) []byte { b[11] = 1; return append(b, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 1) }), dns.RcodeFormatError},
		"name without end":    {[]byte{0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 3, 'a', 'b', 'c'}, dns.RcodeFormatError},
		"label over the end":  {question(63, 'a'), dns.RcodeFormatError},
		"pointer to itself":   {question(0xc0, 12), dns.RcodeFormatError},
		"pointer forward":     {question(0xc0, 14), dns.RcodeFormatError},
		"pointer to header":   {question(0xc0, 0), dns.RcodeFormatError},
		"loop of pointers":    {question(0xc0, 14, 0xc0, 12), dns.RcodeFormatError},
		"pointer after label": {question(1, 'a', 0xc0, 12), dns.RcodeFormatError},
		"half a pointer":      {append(question(), 0xc0)[:13], dns.RcodeFormatError},
		"label type 01":       {question(0x40, 0), dns.RcodeFormatError},
		"label type 10":       {question(0x80, 0), dns.RcodeFormatError},
		"name of 256 octets":  {question(append(slices.Clone(long[:255]), 0)...), dns.RcodeFormatError},
		"name of 257 octets":  {question(append(slices.Clone(long), 0)...), dns.RcodeFormatError},

		"record: pointer to itself":     {extra(0xc0, byte(len(message(t, q(known, dns.TypeA), nil)))), dns.RcodeFormatError},
		"record: pointer forward":       {extra(0xc0, 0xff), dns.RcodeFormatError},
		"record: pointer to header":     {extra(0xc0, 0), dns.RcodeFormatError},
		"record: label and pointer":     {extra(1, 'a', 0xc0, byte(len(message(t, q(known, dns.TypeA), nil)))), dns.RcodeFormatError},
		"record: name of 256 octets":    {extra(append(slices.Clone(long[:255]), 0)...), dns.RcodeFormatError},
		"record: long by a pointer":     {extra(append(slices.Clone(long[:64*3+40-1]), 0xc0, 12)...), dns.RcodeFormatError},
		"two OPTs":                      {append(append(message(t, q(known, dns.TypeA), set(11, 2)), opt...), opt...), dns.RcodeFormatError},
		"OPT with a name":               {append(message(t, q(known, dns.TypeA), set(11, 1)), append([]byte{1, 'a'}, opt...)...), dns.RcodeFormatError},
		"OPT with a pointer for a name": {append(message(t, q(known, dns.TypeA), set(11, 1)), append([]byte{0xc0, 12}, opt[1:]...)...), dns.RcodeFormatError},
		"OPT as an answer":              {append(message(t, q(known, dns.TypeA), set(7, 1)), opt...), dns.RcodeFormatError},
		"OPT: option without length":    {append(message(t, q(known, dns.TypeA), set(11, 1)), append(append(slices.Clone(opt[:9]), 0, 3), 0, 10, 0)...), dns.RcodeFormatError},
		"OPT: option over the end":      {append(message(t, q(known, dns.TypeA), set(11, 1)), append(append(slices.Clone(opt[:9]), 0, 5), 0, 10, 0, 9, 1)...), dns.RcodeFormatError},
		"OPT: cookie of 7 octets":       {message(t, withOPT(func(o *dns.OPT) { o.Option = append(o.Option, &dns.EDNS0_LOCAL{Code: 10, Data: make([]byte, 7)}) }), nil), dns.RcodeFormatError},
		"OPT: cookie of 41 octets":      {message(t, withOPT(func(o *dns.OPT) { o.Option = append(o.Option, &dns.EDNS0_LOCAL{Code: 10, Data: make([]byte, 41)}) }), nil), dns.RcodeFormatError},

		"EDNS version 1":   {message(t, withOPT(func(o *dns.OPT) { o.SetVersion(1) }), nil), dns.RcodeBadVers},
		"EDNS version 255": {message(t, withOPT(func(o *dns.OPT) { o.SetVersion(255) }), nil), dns.RcodeBadVers},

		"class CHAOS":      {message(t, class(dns.ClassCHAOS), nil), dns.RcodeRefused},
		"class HESIOD":     {message(t, class(dns.ClassHESIOD), nil), dns.RcodeRefused},
		"class ANY":        {message(t, class(dns.ClassANY), nil), dns.RcodeRefused},
		"class NONE":       {message(t, class(dns.ClassNONE), nil), dns.RcodeRefused},
		"class 0":          {message(t, class(0), nil), dns.RcodeRefused},
		"version.bind":     {message(t, chaos("version.bind"), nil), dns.RcodeRefused},
		"version.server":   {message(t, chaos("version.server"), nil), dns.RcodeRefused},
		"id.server":        {message(t, chaos("id.server"), nil), dns.RcodeRefused},
		"hostname.bind":    {message(t, chaos("hostname.bind"), nil), dns.RcodeRefused},
		"AXFR":             {message(t, q("mesh.internal", dns.TypeAXFR), nil), dns.RcodeRefused},
		"IXFR":             {message(t, q("mesh.internal", dns.TypeIXFR), nil), dns.RcodeRefused},
		"IXFR with a SOA":  {message(t, new(dns.Msg).SetIxfr("mesh.internal.", 1, "ns.mesh.internal.", "h.mesh.internal."), nil), dns.RcodeRefused},
		"AXFR of the root": {message(t, q(".", dns.TypeAXFR), nil), dns.RcodeRefused},
		"type 0":           {message(t, q(known, 0), nil), dns.RcodeRefused},
		"type OPT":         {message(t, q(known, dns.TypeOPT), nil), dns.RcodeRefused},
		"type TKEY":        {message(t, q(known, dns.TypeTKEY), nil), dns.RcodeRefused},
		"type TSIG":        {message(t, q(known, dns.TypeTSIG), nil), dns.RcodeRefused},
		"type MAILA":       {message(t, q(known, dns.TypeMAILA), nil), dns.RcodeRefused},

		"not our zone":           {message(t, q("www.example.org", dns.TypeA), nil), dns.RcodeRefused},
		"not our zone, ANY":      {message(t, q("www.example.org", dns.TypeANY), nil), dns.RcodeRefused},
		"longest label, no zone": {message(t, q(strings.Repeat("x", 63)+".example.org", dns.TypeA), nil), dns.RcodeRefused},
		"longest name, no zone":  {question(append(slices.Clone(append(long[:192:192], append([]byte{61}, strings.Repeat("y", 61)...)...)), 0)...), dns.RcodeRefused},
		"binary label":           {question(3, 0, '.', 0xff, 0), dns.RcodeRefused},
	}
}

func TestBadInput(t *testing.T) {
	r := start(t, &Server{})
	for name, c := range badInput(t) {
		t.Run(name, func(t *testing.T) {
			for _, tr := range transports {
				if tr == UDP && c.want == drop {
					continue // there is nothing to wait for: see TestDropped
				}
				out := r.raw(t, tr, c.b)
				if c.want == drop {
					if out != nil {
						t.Errorf("%s: %x, want no answer", tr, out)
					}
					continue
				}
				if len(out) < headerLen || !bytes.Equal(out[:2], c.b[:2]) {
					t.Errorf("%s: %x, want an answer with the question's id", tr, out)
					continue
				}
				m := new(dns.Msg)
				if err := m.Unpack(out); err != nil {
					t.Errorf("%s: %v: %x", tr, err, out)
					continue
				}
				if m.Rcode != c.want || !m.Response || m.Opcode != int(c.b[2]>>3&15) {
					t.Errorf("%s: code %s, opcode %d, want %s", tr, rcodeWord(m.Rcode), m.Opcode, rcodeWord(c.want))
				}
				if len(m.Answer)+len(m.Ns) > 0 || m.Authoritative {
					t.Errorf("%s: a refusal with data: %v", tr, m)
				}
				if len(out) > len(c.b) {
					t.Errorf("%s: %d bytes for a question of %d", tr, len(out), len(c.b))
				}
				if o := m.IsEdns0(); o != nil && o.Version() != 0 {
					t.Errorf("%s: EDNS version %d in the answer, want 0", tr, o.Version())
				}
			}
		})
	}
	r.expect(t, UDP, q("four.shop.svc.mesh.internal", dns.TypeA), "NOERROR aa an: four.shop.svc.mesh.internal. 5 IN A 10.0.0.4")
}

// What is odd and no reason to refuse.
func TestOddInput(t *testing.T) {
	r := start(t, &Server{})
	const want = "NOERROR aa an: four.shop.svc.mesh.internal. 5 IN A 10.0.0.4"
	four := func() *dns.Msg { return q("four.shop.svc.mesh.internal", dns.TypeA) }
	withOPT := func(f func(o *dns.OPT)) *dns.Msg {
		m := four()
		m.SetEdns0(1232, false)
		f(m.IsEdns0())
		return m
	}
	flag := func(f func(m *dns.Msg)) *dns.Msg { m := four(); f(m); return m }
	for name, m := range map[string]*dns.Msg{
		"unknown option":       withOPT(func(o *dns.OPT) { o.Option = append(o.Option, &dns.EDNS0_LOCAL{Code: 100, Data: []byte{1}}) }),
		"empty unknown option": withOPT(func(o *dns.OPT) { o.Option = append(o.Option, &dns.EDNS0_LOCAL{Code: 65001}) }),
		"unknown EDNS flag":    withOPT(func(o *dns.OPT) { o.SetZ(0x40) }),
		"cookie":               withOPT(func(o *dns.OPT) { o.Option = append(o.Option, &dns.EDNS0_COOKIE{Code: 10, Cookie: "0123456789abcdef"}) }),
		"NSID":                 withOPT(func(o *dns.OPT) { o.Option = append(o.Option, &dns.EDNS0_NSID{Code: 3}) }),
		"DO":                   withOPT(func(o *dns.OPT) { o.SetDo() }),
		"size 0":               withOPT(func(o *dns.OPT) { o.SetUDPSize(0) }),
		"Z":                    flag(func(m *dns.Msg) { m.Zero = true }),
		"AD":                   flag(func(m *dns.Msg) { m.AuthenticatedData = true }),
		"TC":                   flag(func(m *dns.Msg) { m.Truncated = true }),
		"AA":                   flag(func(m *dns.Msg) { m.Authoritative = true }),
		"a response code":      flag(func(m *dns.Msg) { m.Rcode = dns.RcodeServerFailure }),
		"no recursion":         flag(func(m *dns.Msg) { m.RecursionDesired = false }),
		"a TSIG we do not know": flag(func(m *dns.Msg) {
			m.Extra = append(m.Extra, &dns.TXT{Hdr: dns.RR_Header{Name: "x.", Rrtype: dns.TypeTXT, Class: dns.ClassANY}, Txt: []string{"x"}})
		}),
	} {
		t.Run(name, func(t *testing.T) {
			for _, tr := range transports {
				r.expect(t, tr, m, want)
			}
		})
	}
	b := message(t, four(), func(b []byte) []byte { return append(b, "trailing"...) })
	if out := r.raw(t, UDP, b); out == nil || out[3]&15 != 0 {
		t.Errorf("trailing bytes: %x", out)
	}
}

// Nothing goes out for what is dropped.
func TestDropped(t *testing.T) {
	s := &Server{Zones: []string{"mesh.internal"}, Names: func() Names { return shop() }, RateLimit: -1}
	s.init()
	for name, c := range badInput(t) {
		if c.want != drop {
			continue
		}
		x := s.take(UDP, "")
		x.in = append(x.in[:0], c.b...)
		if !x.begin(netip.MustParseAddrPort("192.0.2.1:4000")) || len(x.out) != 0 || x.result.Rcode != rcodeDrop {
			t.Errorf("%s: answered %x", name, x.out)
		}
	}
	good := message(t, q(known, dns.TypeA), nil)
	for from, want := range map[string]bool{
		"192.0.2.1:0": false, "192.0.2.1:53": false, "192.0.2.1:123": false, "192.0.2.1:19": false, "192.0.2.1:7": false,
		"0.0.0.0:4000": false, "224.0.0.251:5353": false, "[ff02::fb]:5353": false, "255.255.255.255:4000": false,
		"192.0.2.1:4000": true, "192.0.2.1:1024": true, "[2001:db8::1]:4000": true,
	} {
		for _, tr := range transports {
			x := s.take(tr, "")
			x.in = append(x.in[:0], good...)
			x.begin(netip.MustParseAddrPort(from))
			if got := len(x.out) > 0; got != (want || tr != UDP) {
				t.Errorf("%s from %s: answered %v", tr, from, got)
			}
		}
	}
}

// On the wire too: the first answer is to the question behind what is dropped.
// The server's own socket is nobody to be answered.
func TestDroppedByUDP(t *testing.T) {
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var seen []Result
	s := &Server{Zones: []string{"mesh.internal"}, Names: func() Names { return shop() }, RateLimit: -1}
	s.Observe = func(r *Result) { mu.Lock(); seen = append(seen, *r); mu.Unlock() }
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.ServeUDP(t.Context(), c, "") })
	defer wg.Wait()
	defer s.Close()
	own := c.LocalAddr().(*net.UDPAddr).AddrPort()
	good := message(t, q(known, dns.TypeA), nil)
	if _, err := c.WriteToUDPAddrPort(good, own); err != nil {
		t.Fatal(err)
	}
	client, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(own))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	sent := 0
	for _, in := range badInput(t) {
		if in.want == drop {
			if _, err := client.Write(in.b); err != nil {
				t.Fatal(err)
			}
			sent++
		}
	}
	_, _ = client.Write(good)
	_ = client.SetReadDeadline(time.Now().Add(10 * time.Second))
	buf := make([]byte, 512)
	if n, err := client.Read(buf); err != nil || n < headerLen || !bytes.Equal(buf[:2], good[:2]) || buf[3]&15 != 0 {
		t.Errorf("%x, %v, want the answer to the good question", buf[:n], err)
	}
	testnet.Eventually(t, time.Minute, func() bool { mu.Lock(); defer mu.Unlock(); return len(seen) >= sent+1 }, "all messages are seen")
	mu.Lock()
	defer mu.Unlock()
	answered := 0
	for _, r := range seen {
		if r.From == own {
			t.Errorf("the own socket was heard: %+v", r)
		}
		if r.Rcode != rcodeDrop {
			answered++
		}
	}
	if answered != 1 || len(seen) != sent+1 {
		t.Errorf("%d answers to %d messages, want 1 to %d", answered, len(seen), sent+1)
	}
}

// Every prefix of a good question is dropped or FORMERR, and none is taken for
// a question.
func TestEveryPrefix(t *testing.T) {
	m := q(known, dns.TypeA)
	m.SetEdns0(1232, true)
	m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_COOKIE{Code: 10, Cookie: "0123456789abcdef"})
	b := message(t, m, nil)
	var got query
	for n := range len(b) {
		want := dns.RcodeFormatError
		if n < headerLen {
			want = drop
		}
		if rcode := parseQuery(b[:n], &got); rcode != want {
			t.Errorf("%d of %d bytes: %d, want %d", n, len(b), rcode, want)
		}
	}
	if rcode := parseQuery(b, &got); rcode != 0 || got.name != known || !got.do || got.size != 1232 || len(got.cookie) != 8 {
		t.Errorf("%d, %+v", rcode, got)
	}
}
