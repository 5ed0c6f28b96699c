package dns

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"culvert.dev/internal/testnet"
)

// forwarding is a rig whose upstreams are the given ones, and its clock.
func forwarding(t *testing.T, ups ...*server) (*rig, *Forwarder, *clock) {
	t.Helper()
	f := &Forwarder{}
	for _, u := range ups {
		f.Upstreams = append(f.Upstreams, Upstream{Addr: u.addr})
	}
	c := withClock(f)
	return start(t, &Server{Forward: f, Recursion: loopback}), f, c
}

func withClock(f *Forwarder) *clock {
	c := &clock{now: time.Now()}
	f.now = func() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.now }
	return c
}

const testSOA = " ns: test. 3 IN SOA ns.test. root.test. 1 2 3 4 3600"

func TestForward(t *testing.T) {
	up := serve(t,
		"a.test. 60 IN A 192.0.2.1", "a.test. 60 IN AAAA 2001:db8::1", "alias.test. 30 IN CNAME a.test.", "t.test. 60 IN TXT hello",
		"mx.test. 60 IN MX 10 a.test.", "h.test. 60 IN HTTPS 1 . alpn=h2 ipv4hint=192.0.2.9")
	r, _, _ := forwarding(t, up)
	for _, c := range []struct {
		name  string
		qtype uint16
		want  string
	}{
		{"a.test", dns.TypeA, "NOERROR ra an: a.test. 60 IN A 192.0.2.1"},
		{"a.test", dns.TypeAAAA, "NOERROR ra an: a.test. 60 IN AAAA 2001:db8::1"},
		{"a.test", dns.TypeTXT, "NOERROR ra"},
		{"alias.test", dns.TypeA, "NOERROR ra an: a.test. 30 IN A 192.0.2.1, alias.test. 30 IN CNAME a.test."},
		{"t.test", dns.TypeTXT, `NOERROR ra an: t.test. 60 IN TXT "hello"`},
		{"mx.test", dns.TypeMX, "NOERROR ra an: mx.test. 60 IN MX 10 a.test."},
		{"h.test", dns.TypeHTTPS, `NOERROR ra an: h.test. 60 IN HTTPS 1 . alpn="h2" ipv4hint="192.0.2.9"`},
		{"nobody.test", dns.TypeA, "NXDOMAIN ra" + testSOA},
		{"a.test", dns.TypeANY, `NOERROR ra an: a.test. 5 IN HINFO "RFC8482" ""`},
		{"localhost", dns.TypeA, "NOERROR aa ra an: localhost. 5 IN A 127.0.0.1"},
		{"x.localhost", dns.TypeAAAA, "NOERROR aa ra an: x.localhost. 5 IN AAAA ::1"},
		{"x.invalid", dns.TypeA, "NXDOMAIN aa ra ns: invalid. 5 IN SOA ns.invalid. hostmaster.invalid. 1 3600 600 86400 5"},
		{"x.onion", dns.TypeA, "NXDOMAIN aa ra ns: onion. 5 IN SOA ns.onion. hostmaster.onion. 1 3600 600 86400 5"},
		{"nobody.mesh.internal", dns.TypeA, "NXDOMAIN aa ra ns: " + soa},
	} {
		for _, tr := range transports {
			r.expect(t, tr, q(c.name, c.qtype), c.want)
		}
	}
	for _, asked := range []string{"a.test. ANY", "localhost. A", "x.localhost. AAAA", "x.invalid. A", "x.onion. A", "nobody.mesh.internal. A"} {
		if n := up.count(asked); n != 0 {
			t.Errorf("%s went out", asked)
		}
	}
	// From the cache, by each asker's own letters.
	m := r.ask(t, UDP, q("aLiAs.TEST", dns.TypeA))
	if m.Answer[0].Header().Name != "aLiAs.TEST." || up.count("alias.test. A") != 1 {
		t.Errorf("%v, asked %d times", m.Answer, up.count("alias.test. A"))
	}
}

// Who is not on the list gets no recursion, from the cache neither.
func TestNoOpenResolver(t *testing.T) {
	up := serve(t, "a.test. 60 IN A 192.0.2.1")
	f := &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}}
	r := start(t, &Server{Forward: f, Recursion: prefixes("127.0.0.1/32")})
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.1")
	d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	for _, name := range []string{"a.test", "b.test", "localhost", "x.invalid"} {
		client := dns.Client{Dialer: &d}
		res, _, err := client.Exchange(q(name, dns.TypeA), r.addr[UDP])
		if err != nil || summary(res) != "REFUSED" {
			t.Errorf("%s: %v, %v, want REFUSED", name, res, err)
		}
	}
	client := dns.Client{Dialer: &d}
	if res, _, err := client.Exchange(q("four.shop.svc.mesh.internal", dns.TypeA), r.addr[UDP]); err != nil || summary(res) != "NOERROR aa an: four.shop.svc.mesh.internal. 5 IN A 10.0.0.4" {
		t.Errorf("the table's name: %v, %v", res, err)
	}
	// Without "recursion desired" nobody learns what is in the cache.
	m := q("a.test", dns.TypeA)
	m.RecursionDesired = false
	r.expect(t, UDP, m, "REFUSED")
	// No forwarder, no recursion, no prefix that is trusted by itself.
	r = start(t, &Server{Forward: f})
	r.expect(t, UDP, q("a.test", dns.TypeA), "REFUSED")
}

func TestForwardZones(t *testing.T) {
	everything := serve(t, "a.test. 60 IN A 192.0.2.1", "a.corp.test. 60 IN A 192.0.2.66", "legacy.mesh.internal. 60 IN A 192.0.2.66")
	corp := serve(t, "a.corp.test. 60 IN A 10.0.0.1", "xcorp.test. 60 IN A 192.0.2.66")
	deep := serve(t, "a.deep.corp.test. 60 IN A 10.0.0.2")
	legacy := serve(t, "old.legacy.mesh.internal. 60 IN A 10.0.0.3")
	f := &Forwarder{
		Upstreams: []Upstream{{Addr: everything.addr}},
		Zones: map[string][]Upstream{
			"Corp.Test.": {{Addr: corp.addr}}, "deep.corp.test": {{Addr: deep.addr}}, "legacy.mesh.internal": {{Addr: legacy.addr}},
		},
	}
	r := start(t, &Server{Forward: f, Recursion: loopback})
	for name, want := range map[string]string{
		"a.test": "192.0.2.1", "a.corp.test": "10.0.0.1", "a.deep.corp.test": "10.0.0.2", "A.DEEP.corp.test": "10.0.0.2",
		"old.legacy.mesh.internal": "10.0.0.3", // deeper than the server's own zone
	} {
		m := r.ask(t, UDP, q(name, dns.TypeA))
		if len(m.Answer) != 1 || m.Answer[0].(*dns.A).A.String() != want {
			t.Errorf("%s: %v, want %s", name, m.Answer, want)
		}
	}
	r.expect(t, UDP, q("xcorp.test", dns.TypeA), "NXDOMAIN ra"+testSOA) // labels, not letters
	r.expect(t, UDP, q("nolegacy.mesh.internal", dns.TypeA), "NXDOMAIN aa ra ns: "+soa)
}

func TestCacheTTL(t *testing.T) {
	for _, c := range []struct {
		ttl        int
		floor, cap time.Duration
		told       uint32
		kept       time.Duration
	}{
		{60, 0, 0, 60, time.Minute}, {0, 0, 0, 0, time.Second}, {1 << 30, 0, 0, 3600, time.Hour},
		{5, 30 * time.Second, 0, 5, 30 * time.Second}, {500, 0, time.Minute, 60, time.Minute}, {2, -1, 0, 2, 2 * time.Second},
	} {
		up := serve(t, fmt.Sprintf("a.test. %d IN A 192.0.2.1", c.ttl))
		f := &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}, MinTTL: c.floor, MaxTTL: c.cap}
		clk := withClock(f)
		r := start(t, &Server{Forward: f, Recursion: loopback})
		ask := func() uint32 { t.Helper(); return r.ask(t, UDP, q("a.test", dns.TypeA)).Answer[0].Header().Ttl }
		if got := ask(); got != c.told {
			t.Errorf("%+v: told %d", c, got)
		}
		clk.add(c.kept - time.Millisecond)
		want := c.told - min(c.told, uint32((c.kept-time.Millisecond)/time.Second))
		if got := ask(); got != want || up.count("a.test. A") != 1 {
			t.Errorf("%+v: at the end told %d, want %d, asked %d times", c, got, want, up.count("a.test. A"))
		}
		clk.add(time.Millisecond)
		if ask(); up.count("a.test. A") != 2 {
			t.Errorf("%+v: asked %d times after the end, want 2", c, up.count("a.test. A"))
		}
	}
	// TTL 0 and no floor: every question goes out.
	up := serve(t, "a.test. 0 IN A 192.0.2.1")
	r := start(t, &Server{Forward: &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}, MinTTL: -1}, Recursion: loopback})
	for range 3 {
		r.ask(t, UDP, q("a.test", dns.TypeA))
	}
	if n := up.count("a.test. A"); n != 3 {
		t.Errorf("asked %d times, want 3", n)
	}
}

func TestNegativeCache(t *testing.T) {
	up := serve(t, "empty.test.")
	r, _, clk := forwarding(t, up)
	for range 3 {
		r.expect(t, UDP, q("new.test", dns.TypeA), "NXDOMAIN ra"+testSOA)
	}
	if n := up.count("new.test. A"); n != 1 {
		t.Errorf("asked %d times, want 1", n)
	}
	up.set(t, "new.test. 60 IN A 192.0.2.1")
	clk.add(3 * time.Second) // the SOA's TTL
	r.expect(t, UDP, q("new.test", dns.TypeA), "NOERROR ra an: new.test. 60 IN A 192.0.2.1")
	// A no without SOA is not kept.
	up.set(t, "empty.test.")
	for range 3 {
		r.expect(t, UDP, q("empty.test", dns.TypeA), "NOERROR ra")
	}
	if n := up.count("empty.test. A"); n != 3 {
		t.Errorf("asked %d times, want 3", n)
	}
}

func TestServeStale(t *testing.T) {
	up := serve(t, "a.test. 60 IN A 192.0.2.1")
	r, f, clk := forwarding(t, up)
	ask := func() *dns.Msg {
		t.Helper()
		m := q("a.test", dns.TypeA)
		m.SetEdns0(1232, false)
		return r.ask(t, UDP, m)
	}
	ask()
	up.do(func(w dns.ResponseWriter, m *dns.Msg) bool {
		res := new(dns.Msg)
		_ = w.WriteMsg(res.SetRcode(m, dns.RcodeServerFailure))
		return true
	})
	clk.add(time.Hour)
	const stale = "NOERROR ra an: a.test. 30 IN A 192.0.2.1"
	for range 3 {
		if m := ask(); summary(m) != stale || edeOf(m) != int(dns.ExtendedErrorCodeStaleAnswer) {
			t.Errorf("%s, extended error %d", summary(m), edeOf(m))
		}
	}
	if n := up.count("a.test. A"); n != 1+tries {
		t.Errorf("asked %d times, want once more with %d tries", n, tries)
	}
	// Asked again after a moment, and what is new is taken.
	up.do(nil)
	up.set(t, "a.test. 60 IN A 192.0.2.2")
	clk.add(recheck)
	if m := ask(); summary(m) != "NOERROR ra an: a.test. 60 IN A 192.0.2.2" {
		t.Errorf("after the failure: %s", summary(m))
	}
	// Who says nothing is waited for, not for ever.
	up.do(func(dns.ResponseWriter, *dns.Msg) bool { return true })
	clk.add(time.Hour)
	begun := time.Now()
	if m := ask(); summary(m) != "NOERROR ra an: a.test. 30 IN A 192.0.2.2" {
		t.Errorf("a silent upstream: %s", summary(m))
	}
	if took := time.Since(begun); took < staleFrom || took > 5*time.Second {
		t.Errorf("a silent upstream: %v, want %v", took, staleFrom)
	}
	begun = time.Now()
	testnet.Eventually(t, 10*time.Second, func() bool { f.mu.Lock(); defer f.mu.Unlock(); return len(f.flights) == 0 }, "the question has come to its end")
	if m := ask(); summary(m) != "NOERROR ra an: a.test. 30 IN A 192.0.2.2" {
		t.Errorf("a silent upstream: %s", summary(m))
	}
	// After a day it is no answer any more.
	clk.add(24 * time.Hour)
	up.do(func(w dns.ResponseWriter, m *dns.Msg) bool {
		res := new(dns.Msg)
		_ = w.WriteMsg(res.SetRcode(m, dns.RcodeRefused))
		return true
	})
	if m := ask(); summary(m) != "SERVFAIL ra" || edeOf(m) != int(dns.ExtendedErrorCodeNoReachableAuthority) {
		t.Errorf("after a day: %s, extended error %d", summary(m), edeOf(m))
	}
}

// SERVFAIL comes within two seconds, and is remembered for one.
func TestUpstreamsDead(t *testing.T) {
	silent := serve(t)
	silent.do(func(dns.ResponseWriter, *dns.Msg) bool { return true })
	r, _, clk := forwarding(t, silent)
	begun := time.Now()
	m := q("a.test", dns.TypeA)
	m.SetEdns0(1232, false)
	res := r.ask(t, UDP, m)
	if took := time.Since(begun); summary(res) != "SERVFAIL ra" || edeOf(res) != int(dns.ExtendedErrorCodeNetworkError) || took > 4*time.Second {
		t.Errorf("%s, extended error %d after %v", summary(res), edeOf(res), took)
	}
	if n := silent.count("a.test. A"); n != tries {
		t.Errorf("%d tries, want %d", n, tries)
	}
	begun = time.Now()
	r.expect(t, UDP, q("a.test", dns.TypeA), "SERVFAIL ra")
	if took := time.Since(begun); took > time.Second {
		t.Errorf("the second question took %v", took)
	}
	// The zones do not care.
	r.expect(t, UDP, q("four.shop.svc.mesh.internal", dns.TypeA), "NOERROR aa ra an: four.shop.svc.mesh.internal. 5 IN A 10.0.0.4")
	silent.do(nil)
	silent.set(t, "a.test. 60 IN A 192.0.2.1")
	clk.add(failedFor)
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.1")
}

func TestNobodyToAsk(t *testing.T) {
	f := &Forwarder{ResolvConf: filepath.Join(t.TempDir(), "none")}
	r := start(t, &Server{Forward: f, Recursion: loopback})
	r.expect(t, UDP, q("a.test", dns.TypeA), "SERVFAIL ra")
}

// resolv.conf is read again when it changes.
func TestForwardByResolvConf(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(path, []byte("nameserver 192.0.2.53\nnameserver 2001:db8::53\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := &Forwarder{ResolvConf: path}
	c := withClock(f)
	f.init()
	list := func() (s []string) {
		for _, u := range f.upstreams("a.test") {
			s = append(s, u.addr)
		}
		return s
	}
	if got := fmt.Sprint(list()); got != "[192.0.2.53:53 [2001:db8::53]:53]" {
		t.Error(got)
	}
	f.upstreams("a.test")[0].told(net.ErrClosed, c.now)
	if got := fmt.Sprint(list()); got != "[[2001:db8::53]:53 192.0.2.53:53]" {
		t.Errorf("after a failure of the first: %s", got)
	}
	if up := f.Health(); up["192.0.2.53:53"] || !up["[2001:db8::53]:53"] {
		t.Errorf("health %v", up)
	}
	if err := os.WriteFile(path, []byte("nameserver 192.0.2.54\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.add(look)
	if got := fmt.Sprint(list()); got != "[192.0.2.54:53]" {
		t.Errorf("after the change: %s", got)
	}
}

func TestFailover(t *testing.T) {
	first, second := serve(t, "a.test. 1 IN A 192.0.2.1"), serve(t, "a.test. 1 IN A 192.0.2.2")
	r, f, clk := forwarding(t, first, second)
	ask := func() string {
		t.Helper()
		clk.add(2 * time.Second)
		return r.ask(t, UDP, q("a.test", dns.TypeA)).Answer[0].(*dns.A).A.String()
	}
	if got := ask(); got != "192.0.2.1" {
		t.Errorf("the first upstream is asked first: %s", got)
	}
	first.do(func(w dns.ResponseWriter, m *dns.Msg) bool {
		_ = w.WriteMsg(new(dns.Msg).SetRcode(m, dns.RcodeRefused))
		return true
	})
	if got := ask(); got != "192.0.2.2" {
		t.Errorf("the first refuses: %s", got)
	}
	// It is asked last for longer and longer, and again when it answers.
	for range 20 {
		clk.add(-1500 * time.Millisecond) // ask adds two seconds
		if got := ask(); got != "192.0.2.2" {
			t.Errorf("the first refuses: %s", got)
		}
	}
	if n := first.count("a.test. A"); n > 8 {
		t.Errorf("the first was asked %d times in 10 s", n)
	}
	first.do(nil)
	clk.add(downMost)
	if got := ask(); got != "192.0.2.1" {
		t.Errorf("the first is back: %s", got)
	}
	if up := f.Health(); !up[first.addr] || !up[second.addr] {
		t.Errorf("health %v", up)
	}
	// One that says nothing is soon in company.
	first.do(func(dns.ResponseWriter, *dns.Msg) bool { return true })
	begun := time.Now()
	if got := ask(); got != "192.0.2.2" || time.Since(begun) > 1700*time.Millisecond {
		t.Errorf("the first is silent: %s after %v", got, time.Since(begun))
	}
	clk.add(-2 * time.Second)
	if f.Health()[first.addr] {
		t.Error("the first, which is silent, is not down")
	}
}

// One question is on its way at a time, for whoever asks it; another is not
// held up.
func TestOneFlight(t *testing.T) {
	up := serve(t, "a.test. 60 IN A 192.0.2.1", "b.test. 60 IN A 192.0.2.2")
	arrived, release := make(chan struct{}, 100), make(chan struct{})
	let := sync.OnceFunc(func() { close(release) })
	defer let()
	up.do(func(_ dns.ResponseWriter, m *dns.Msg) bool {
		if strings.EqualFold(m.Question[0].Name, "a.test.") {
			arrived <- struct{}{}
			<-release
		}
		return false
	})
	r, f, _ := forwarding(t, up)
	var wg sync.WaitGroup
	const clients = 30 // of which TCP takes 16 at most
	for i := range clients {
		wg.Go(func() {
			r.expect(t, transports[i%2], q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.1")
		})
	}
	<-arrived
	r.expect(t, UDP, q("b.test", dns.TypeA), "NOERROR ra an: b.test. 60 IN A 192.0.2.2")
	testnet.Eventually(t, 10*time.Second, func() bool { r.forwards.mu.Lock(); defer r.forwards.mu.Unlock(); return r.forwards.taken == clients }, "all wait")
	f.mu.Lock()
	if n := len(f.flights); n != 1 {
		t.Errorf("%d flights, want 1", n)
	}
	f.mu.Unlock()
	let()
	wg.Wait()
	// Once, but for a machine so slow that the question was asked in company.
	if n := up.count("a.test. A"); n > tries {
		t.Errorf("asked %d times", n)
	}
	testnet.Eventually(t, 10*time.Second, func() bool {
		r.forwards.mu.Lock()
		defer r.forwards.mu.Unlock()
		return r.forwards.taken == 0 && len(r.forwards.by) == 0
	}, "all places are given back")
}

// A client has a hundred questions waiting, all together a thousand; the rest
// is refused at once.
func TestForwardLimits(t *testing.T) {
	up := serve(t)
	up.do(func(dns.ResponseWriter, *dns.Msg) bool { return true })
	f := &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}}
	s := &Server{Forward: f, Recursion: loopback, MaxForwards: 150}
	r := start(t, s)
	ask := func(from net.IP, n int) (refused int) {
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: from}, udpAddr(t, r.addr[UDP]))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for i := range n {
			if _, err := c.Write(message(t, q(fmt.Sprintf("n%d.%d.test", i, from[15]), dns.TypeA), nil)); err != nil {
				t.Fatal(err)
			}
		}
		buf := make([]byte, 1500)
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		for range n {
			k, err := c.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			switch rcode := buf[:k][3] & 15; rcode {
			case dns.RcodeRefused:
				refused++
			case dns.RcodeServerFailure:
			default:
				t.Errorf("code %d", rcode)
			}
		}
		return refused
	}
	var one, two int
	var wg sync.WaitGroup
	wg.Go(func() { one = ask(net.IPv4(127, 0, 0, 1), 120) })
	wg.Go(func() { two = ask(net.IPv4(127, 0, 0, 2), 120) })
	wg.Wait()
	if one < 20 || two < 20 || one+two != 240-150 {
		t.Errorf("%d and %d of 120 refused, want at least 20 of each and 90 in all", one, two)
	}
}

func udpAddr(t *testing.T, s string) *net.UDPAddr {
	t.Helper()
	a, err := net.ResolveUDPAddr("udp", s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// What an upstream sends that is not the answer is not taken, nor kept.
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

// Guesses in number end the question by UDP: it is asked by TCP, where there
// is nothing to guess.
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

// Who is not asked is not heard, whatever he knows.
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

// Ids, ports and letters are of chance.
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

// Of an answer only what was asked for is believed.
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

// A name of the world does not lead into this network (DNS rebinding).
func TestPrivateAddresses(t *testing.T) {
	records := []string{"ok.test. 60 IN A 192.0.2.1", "mixed.test. 60 IN A 192.0.2.1", "mixed.test. 60 IN A 10.0.0.1", "in.corp.test. 60 IN A 10.0.0.1", "in.zone.test. 60 IN A 10.0.0.2",
		"h.test. 60 IN HTTPS 1 . alpn=h2 ipv4hint=192.0.2.1,10.0.0.1 ipv6hint=2001:db8::1"}
	private := []string{"10.0.0.1", "127.0.0.1", "169.254.169.254", "172.31.255.255", "192.168.1.1", "100.64.0.1", "0.0.0.0", "240.0.0.1", "224.0.0.1"}
	private6 := []string{"::1", "::", "fd00::1", "fe80::1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "2002:a00:1::1", "ff02::1"}
	for i, a := range private {
		records = append(records, fmt.Sprintf("p%d.test. 60 IN A %s", i, a))
	}
	for i, a := range private6 {
		records = append(records, fmt.Sprintf("s%d.test. 60 IN AAAA %s", i, a))
	}
	up := serve(t, records...)
	f := &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}, Private: []string{"Corp.test."}, Zones: map[string][]Upstream{"zone.test": {{Addr: up.addr}}}}
	r := start(t, &Server{Forward: f, Recursion: loopback})
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
	f = &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}, Private: []string{"."}}
	r = start(t, &Server{Forward: f, Recursion: loopback})
	r.expect(t, UDP, q("p0.test", dns.TypeA), "NOERROR ra an: p0.test. 60 IN A 10.0.0.1")
}

// What does not fit is fetched by TCP, and told to have been cut.
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

// An upstream that is this server is no loop without end: the question waits
// for itself, once.
func TestForwardToOurselves(t *testing.T) {
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	f := &Forwarder{Upstreams: []Upstream{{Addr: c.LocalAddr().String()}}}
	var n atomic.Int32
	s := &Server{Forward: f, Recursion: loopback, Observe: func(*Result) { n.Add(1) }}
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.ServeUDP(t.Context(), c, "") })
	client := dns.Client{Timeout: 10 * time.Second}
	res, _, err := client.Exchange(q("a.test", dns.TypeA), c.LocalAddr().String())
	if err != nil || res.Rcode != dns.RcodeServerFailure {
		t.Errorf("%v, %v, want SERVFAIL", res, err)
	}
	_ = s.Shutdown(t.Context())
	wg.Wait()
	_ = f.Close()
	if n := n.Load(); n > 1+tries {
		t.Errorf("%d questions came of one", n)
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
	r := start(t, &Server{Forward: f, Recursion: loopback})
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 5 IN A 192.0.2.1")
	r.expect(t, UDP, q("b.test", dns.TypeA), "NOERROR ra an: b.test. 5 IN A 192.0.2.2")
	if counted.mu.Lock(); conns != 1 {
		t.Errorf("%d connections for two questions, want 1", conns)
	}
	counted.mu.Unlock()
	// A certificate of another name is not believed.
	bad := p.ClientConfig("other.example.test")
	f = &Forwarder{Upstreams: []Upstream{{Addr: ln.Addr().String(), TLS: bad}}}
	r = start(t, &Server{Forward: f, Recursion: loopback})
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

// DNSSEC records are for those who ask for them, and nobody says that they
// were checked.
func TestDNSSECPassesThrough(t *testing.T) {
	const sig = "a.test. 60 IN RRSIG A 8 2 60 20300101000000 20200101000000 1 test. AAAA"
	up := serve(t)
	up.do(func(w dns.ResponseWriter, m *dns.Msg) bool {
		res := new(dns.Msg).SetReply(m)
		res.AuthenticatedData = true
		for _, s := range []string{"a.test. 60 IN A 192.0.2.1", sig} {
			rr, err := dns.NewRR(s)
			if err != nil {
				t.Error(err)
			}
			if opt := m.IsEdns0(); rr.Header().Rrtype == dns.TypeA || opt != nil && opt.Do() {
				res.Answer = append(res.Answer, rr)
			}
		}
		_ = w.WriteMsg(res)
		return true
	})
	r, _, _ := forwarding(t, up)
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.1")
	m := q("a.test", dns.TypeA)
	m.SetEdns0(1232, true)
	res := r.ask(t, UDP, m)
	if len(res.Answer) != 2 || !res.IsEdns0().Do() || res.AuthenticatedData {
		t.Errorf("with DO: %v", res)
	}
}

func TestCacheIsBoundedByBytes(t *testing.T) {
	const limit = 64 << 10
	c := newCache(limit)
	e := &reply{wire: make([]byte, 500), ttls: make([]uint16, 3)}
	for i := range 1000 {
		c.put(fmt.Appendf(nil, "n%d.test", i), e)
		c.put(fmt.Appendf(nil, "n%d.test", i/2), e) // again
	}
	if n := c.bytes(); n > limit || n < limit/2 {
		t.Errorf("%d bytes, limit %d", n, limit)
	}
	total := 0
	for i := range c.shards {
		s := &c.shards[i]
		if len(s.by) != s.order.Len() {
			t.Errorf("%d keys, %d items", len(s.by), s.order.Len())
		}
		for el := s.order.Front(); el != nil; el = el.Next() {
			item := el.Value.(*cacheItem)
			total += item.reply.size(item.key)
		}
	}
	if total != c.bytes() {
		t.Errorf("%d bytes are counted, %d are there", c.bytes(), total)
	}
	c.put([]byte("huge"), &reply{wire: make([]byte, limit)})
	if e, _ := c.get([]byte("huge")); e != nil || c.bytes() > limit {
		t.Errorf("larger than the cache: %v, %d bytes", e != nil, c.bytes())
	}
	// The last used ones stay.
	c = newCache(cacheShards * (2*(overhead+500+6) + 100))
	var same [][]byte
	for i := 0; len(same) < 3; i++ {
		if key := fmt.Appendf(nil, "k%d", i); c.shard(key) == &c.shards[0] {
			same = append(same, key)
		}
	}
	c.put(same[0], e)
	c.put(same[1], e)
	c.put(same[0], &reply{wire: make([]byte, 500), ttls: make([]uint16, 3)})
	c.get(same[0])
	c.put(same[2], &reply{wire: make([]byte, 500), ttls: make([]uint16, 3)})
	if e, _ := c.get(same[0]); e == nil {
		t.Error("the one used last was let go")
	}
}

// The pieces of a cached answer are put together to what they were.
func TestReplyRoundTrip(t *testing.T) {
	m := new(dns.Msg)
	m.SetQuestion("www.example.test.", dns.TypeA)
	for _, s := range []string{"www.example.test. 60 IN CNAME web.example.test.", "web.example.test. 30 IN A 192.0.2.1", "web.example.test. 0 IN A 192.0.2.2"} {
		rr, _ := dns.NewRR(s)
		m.Answer = append(m.Answer, rr)
	}
	e := newReply(m, 17+1+4)
	if e == nil {
		t.Fatal("no reply")
	}
	var out, in query
	b := message(t, q("wWw.ExAmple.Test", dns.TypeA), nil)
	parseQuery(b, &in)
	var w writer
	w.begin(nil, &in, 0, 0, 512)
	if !w.paste(e, 10, false) {
		t.Fatal("does not fit")
	}
	b = w.end(0)
	res := new(dns.Msg)
	if err := res.Unpack(b); err != nil {
		t.Fatal(err)
	}
	if got, want := summary(res), "NOERROR an: wWw.ExAmple.Test. 50 IN CNAME web.ExAmple.Test., web.ExAmple.Test. 0 IN A 192.0.2.2, web.ExAmple.Test. 20 IN A 192.0.2.1"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	_ = out
	if bytes.Count(b, []byte("xAmple")) != 1 {
		t.Error("not compressed")
	}
}

// Close ends questions under way.
func TestForwarderClose(t *testing.T) {
	up := serve(t)
	arrived := make(chan struct{}, 10)
	up.do(func(dns.ResponseWriter, *dns.Msg) bool { arrived <- struct{}{}; return true })
	f := &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}}
	var in query
	parseQuery(message(t, q("a.test", dns.TypeA), nil), &in)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if e, _, _ := f.resolve(context.Background(), appendKey(nil, &in), &in); e != nil {
			t.Errorf("%+v", e)
		}
	}()
	<-arrived
	begun := time.Now()
	_ = f.Close()
	<-done
	if took := time.Since(begun); took > time.Second {
		t.Errorf("took %v", took)
	}
	if e, _, _ := f.resolve(context.Background(), appendKey(nil, &in), &in); e != nil {
		t.Errorf("after Close: %+v", e)
	}
}
