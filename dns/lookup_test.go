package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"github.com/miekg/dns"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

func TestLookup(t *testing.T) {
	s := serve(t,
		"a.test. 60 IN A 192.0.2.1", "a.test. 60 IN A 192.0.2.2", "a.test. 60 IN AAAA 2001:db8::1",
		"four.test. 60 IN A 192.0.2.4", "six.test. 60 IN AAAA 2001:db8::6", "mapped.test. 60 IN AAAA ::ffff:192.0.2.7",
		"empty.test.", "alias.test. 60 IN CNAME a.test.", "dead.test. 60 IN CNAME nobody.test.", "twice.test. 60 IN CNAME alias.test.",
	)
	r, _ := resolver(t, s.addr)
	for host, want := range map[string]string{
		"a.test": "192.0.2.1 192.0.2.2 2001:db8::1", "A.Test.": "192.0.2.1 192.0.2.2 2001:db8::1",
		"four.test": "192.0.2.4", "six.test": "2001:db8::6", "mapped.test": "192.0.2.7",
		"alias.test": "192.0.2.1 192.0.2.2 2001:db8::1", "twice.test": "192.0.2.1 192.0.2.2 2001:db8::1",
		"empty.test": "not found", "nobody.test": "not found", "dead.test": "not found",
		"": "not found", strings.Repeat("a.", 127): "not found", strings.Repeat("x", 300): "not found",
		"192.0.2.9": "192.0.2.9", "2001:db8::9": "2001:db8::9",
		"localhost": "127.0.0.1 ::1", "x.LOCALHOST.": "127.0.0.1 ::1",
	} {
		expect(t, r, host, want)
	}
	if n := s.count("localhost. A") + s.count("x.localhost. A"); n != 0 {
		t.Errorf("the server was asked for localhost %d times", n)
	}
	if len(s.ids) < 10 || len(s.ports) < 10 {
		t.Errorf("%d ids and %d ports for some twenty questions", len(s.ids), len(s.ports))
	}
}

func TestTTL(t *testing.T) {
	for _, tt := range []struct {
		ttl  int
		kept time.Duration
	}{{60, time.Minute}, {0, minTTL}, {1, time.Second}, {1 << 30, maxTTL}} {
		s := serve(t, fmt.Sprintf("a.test. %d IN A 192.0.2.1", tt.ttl), fmt.Sprintf("a.test. %d IN AAAA 2001:db8::1", tt.ttl))
		r, c := resolver(t, s.addr)
		expect(t, r, "a.test", "192.0.2.1 2001:db8::1")
		s.set(t, fmt.Sprintf("a.test. %d IN A 192.0.2.99", tt.ttl))
		c.add(tt.kept - time.Millisecond)
		expect(t, r, "a.test", "192.0.2.1 2001:db8::1")
		if n := s.count("a.test. A"); n != 1 {
			t.Errorf("TTL %d: asked %d times before the end of its time, want once", tt.ttl, n)
		}
		c.add(time.Millisecond)
		expect(t, r, "a.test", "192.0.2.99")
	}
}

// After the machine was suspended, what was resolved before is asked for again, as it may be
// in another network now. Where no server answers it holds on. A clock that is set back
// keeps nothing for longer.
func TestSuspended(t *testing.T) {
	s := serve(t, "a.test. 60 IN A 192.0.2.1", "a.test. 60 IN AAAA 2001:db8::1")
	r, c := resolver(t, s.addr)
	expect(t, r, "a.test", "192.0.2.1 2001:db8::1")
	s.set(t, "a.test. 60 IN A 10.0.0.1")
	c.jump(59 * time.Second)
	expect(t, r, "a.test", "192.0.2.1 2001:db8::1")
	c.jump(time.Second)
	expect(t, r, "a.test", "10.0.0.1")
	c.jump(-12 * time.Hour)
	expect(t, r, "a.test", "10.0.0.1")
	s.set(t, "a.test. 60 IN A 10.0.0.2")
	c.add(time.Minute)
	expect(t, r, "a.test", "10.0.0.2")
	s.do(func(w dns.ResponseWriter, q *dns.Msg) bool {
		m := new(dns.Msg)
		m.SetRcode(q, dns.RcodeServerFailure)
		_ = w.WriteMsg(m)
		return true
	})
	c.jump(12 * time.Hour)
	expect(t, r, "a.test", "10.0.0.2")
}

// The shortest TTL of a chain and of both families counts.
func TestShortestTTL(t *testing.T) {
	s := serve(t, "a.test. 5 IN CNAME b.test.", "b.test. 60 IN A 192.0.2.1", "c.test. 60 IN A 192.0.2.1", "c.test. 7 IN AAAA 2001:db8::1")
	r, c := resolver(t, s.addr)
	for host, ttl := range map[string]time.Duration{"a.test": 5 * time.Second, "c.test": 7 * time.Second} {
		lookup(t, r, host)
		c.add(ttl - 1)
		lookup(t, r, host)
		if n := s.count(host + ". A"); n != 1 {
			t.Errorf("%s: asked %d times within %v", host, n, ttl)
		}
		c.add(1)
		lookup(t, r, host)
		if n := s.count(host + ". A"); n != 2 {
			t.Errorf("%s: asked %d times after %v, want 2", host, n, ttl)
		}
	}
}

func TestNegative(t *testing.T) {
	s := serve(t)
	r, c := resolver(t, s.addr)
	expect(t, r, "new.test", "not found")
	s.set(t, "new.test. 60 IN A 192.0.2.1")
	c.add(3*time.Second - 1) // the SOA's TTL
	expect(t, r, "new.test", "not found")
	c.add(1)
	expect(t, r, "new.test", "192.0.2.1")
	s.set(t) // gone: an answer that it is gone is not a failure
	c.add(time.Minute)
	expect(t, r, "new.test", "not found")
}

func TestStale(t *testing.T) {
	s := serve(t, "a.test. 60 IN A 192.0.2.1")
	r, c := resolver(t, s.addr)
	expect(t, r, "a.test", "192.0.2.1")
	s.do(func(w dns.ResponseWriter, q *dns.Msg) bool {
		m := new(dns.Msg)
		m.SetRcode(q, dns.RcodeServerFailure)
		_ = w.WriteMsg(m)
		return true
	})
	c.add(time.Hour)
	expect(t, r, "a.test", "192.0.2.1")
	before := s.count("a.test. A")
	expect(t, r, "a.test", "192.0.2.1")
	if n := s.count("a.test. A"); n != before {
		t.Error("a failing server is asked for every request")
	}
	expect(t, r, "b.test", "error") // nothing to fall back to
	c.add(staleTTL)
	s.do(nil)
	s.set(t, "a.test. 60 IN A 192.0.2.2")
	expect(t, r, "a.test", "192.0.2.2")
	s.do(func(dns.ResponseWriter, *dns.Msg) bool { return true })
	r.Timeout = 50 * time.Millisecond
	c.add(time.Minute + maxStale - 1)
	expect(t, r, "a.test", "192.0.2.2")
	c.add(staleTTL)
	expect(t, r, "a.test", "timeout") // too old
}

func TestFailures(t *testing.T) {
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	dead, gone := silent.LocalAddr().String(), testnet.ClosedUDPPort(t)
	good := serve(t, "a.test. 60 IN A 192.0.2.1")

	for name, tt := range map[string]struct {
		servers []string
		want    string
	}{
		"silent":           {[]string{dead}, "timeout"},
		"closed":           {[]string{gone}, "error"},
		"silent, good":     {[]string{dead, good.addr}, "192.0.2.1"},
		"closed, good":     {[]string{gone, good.addr}, "192.0.2.1"},
		"two of them":      {[]string{gone, dead, good.addr}, "192.0.2.1"},
		"silent and close": {[]string{dead, gone}, "timeout"},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := resolver(t, tt.servers...)
			r.Timeout = 2 * time.Second
			start := time.Now()
			expect(t, r, "a.test", tt.want)
			if took := time.Since(start); took > 20*time.Second {
				t.Errorf("took %v, limit %v", took, r.Timeout)
			}
			// Failures are remembered for a moment.
			start = time.Now()
			expect(t, r, "a.test", tt.want)
			if took := time.Since(start); took > r.Timeout*9/10 {
				t.Errorf("the second lookup took %v: it was not remembered", took)
			}
		})
	}
}

func TestDefaultTimeoutIsTwoSeconds(t *testing.T) {
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	r, _ := resolver(t, silent.LocalAddr().String())
	start := time.Now()
	expect(t, r, "a.test", "timeout")
	if took := time.Since(start); took < 1900*time.Millisecond || took > 20*time.Second {
		t.Errorf("took %v, want 2s", took)
	}
}

// A server that never answers for AAAA costs little.
func TestOneFamilyIsSilent(t *testing.T) {
	s := serve(t, "a.test. 3600 IN A 192.0.2.1", "a.test. 3600 IN AAAA 2001:db8::1")
	s.do(func(_ dns.ResponseWriter, q *dns.Msg) bool { return q.Question[0].Qtype == dns.TypeAAAA })
	r, c := resolver(t, s.addr)
	r.Timeout = time.Minute
	start := time.Now()
	expect(t, r, "a.test", "192.0.2.1")
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("took %v, want about %v", took, familyGrace)
	}
	s.do(nil)
	c.add(halfTTL)
	expect(t, r, "a.test", "192.0.2.1 2001:db8::1") // and is soon made good
}

// What is no answer to the question is dropped, and the true answer after it
// is taken.
func TestSpoofedAnswers(t *testing.T) {
	for name, spoof := range map[string]func(m *dns.Msg){
		"wrong id":       func(m *dns.Msg) { m.Id++ },
		"other name":     func(m *dns.Msg) { m.Question[0].Name = "b.test." },
		"other type":     func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeTXT },
		"other class":    func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS },
		"no question":    func(m *dns.Msg) { m.Question = nil },
		"two questions":  func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) },
		"a question":     func(m *dns.Msg) { m.Response = false },
		"another opcode": func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate },
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, "a.test. 60 IN A 192.0.2.1")
			s.do(func(w dns.ResponseWriter, q *dns.Msg) bool {
				m := s.answer(q)
				for i, rr := range m.Answer {
					evil, _ := dns.NewRR(rr.Header().Name + " 60 IN A 203.0.113.66")
					m.Answer[i] = evil
				}
				spoof(m)
				_ = w.WriteMsg(m)
				_, _ = w.Write([]byte("\x00garbage"))
				return false
			})
			r, _ := resolver(t, s.addr)
			expect(t, r, "a.test", "192.0.2.1")
			if n := s.count("a.test. A"); n != 1 {
				t.Errorf("asked %d times, want once", n)
			}
		})
	}
}

// Records of other names in an answer are not the name's.
func TestUnrelatedRecords(t *testing.T) {
	s := serve(t, "a.test. 60 IN A 192.0.2.1")
	s.do(func(w dns.ResponseWriter, q *dns.Msg) bool {
		m := s.answer(q)
		for _, r := range []string{"b.test. 60 IN A 203.0.113.66", "c.test. 60 IN CNAME b.test.", "a.test. 60 CH A 203.0.113.66"} {
			if rr, err := dns.NewRR(r); err == nil {
				m.Answer = append(m.Answer, rr)
			}
		}
		_ = w.WriteMsg(m)
		return true
	})
	r, _ := resolver(t, s.addr)
	expect(t, r, "a.test", "192.0.2.1")
}

func TestTruncation(t *testing.T) {
	var records []string
	for i := range 300 {
		records = append(records, fmt.Sprintf("big.test. 60 IN A 192.0.%d.%d", i>>8, i&0xff))
	}
	s := serve(t, records...)
	s.do(func(w dns.ResponseWriter, q *dns.Msg) bool {
		if w.LocalAddr().Network() != "udp" {
			return false
		}
		if opt := q.IsEdns0(); opt == nil || opt.UDPSize() != udpSize {
			t.Errorf("EDNS of the question: %v, want %d bytes", opt, udpSize)
		}
		m := s.answer(q)
		m.Truncate(512)
		_ = w.WriteMsg(m)
		return true
	})
	r, _ := resolver(t, s.addr)
	addrs, err := r.Lookup(t.Context(), "big.test")
	if err != nil || len(addrs) != maxAddrs {
		t.Errorf("%d addresses, %v, want %d", len(addrs), err, maxAddrs)
	}
}

func TestAliases(t *testing.T) {
	chain := func(n int) []string {
		records := []string{fmt.Sprintf("c%d.test. 60 IN A 192.0.2.1", n)}
		for i := range n {
			records = append(records, fmt.Sprintf("c%d.test. 60 IN CNAME c%d.test.", i, i+1))
		}
		return records
	}
	for name, tt := range map[string]struct {
		records []string
		want    string
	}{
		"11":        {chain(11), "192.0.2.1"},
		"12":        {chain(12), "error"},
		"to itself": {[]string{"c0.test. 60 IN CNAME c0.test."}, "error"},
		"loop":      {[]string{"c0.test. 60 IN CNAME c1.test.", "c1.test. 60 IN CNAME c0.test."}, "error"},
	} {
		s := serve(t, tt.records...)
		r, _ := resolver(t, s.addr)
		if got := lookup(t, r, "c0.test"); got != tt.want {
			t.Errorf("chain %s: %s, want %s", name, got, tt.want)
		}
		// The same from a server that gives one link at a time.
		s.do(func(w dns.ResponseWriter, q *dns.Msg) bool {
			m := s.answer(q)
			m.Answer = m.Answer[:min(1, len(m.Answer))]
			_ = w.WriteMsg(m)
			return true
		})
		r, _ = resolver(t, s.addr)
		if got := lookup(t, r, "c0.test"); got != tt.want {
			t.Errorf("chain %s, link by link: %s, want %s", name, got, tt.want)
		}
		if n := s.count("c0.test. A"); n > 20 {
			t.Errorf("chain %s: asked %d times", name, n)
		}
	}
}

// Many callers make one question.
func TestSingleFlight(t *testing.T) {
	s := serve(t, "a.test. 60 IN A 192.0.2.1")
	arrived, release := make(chan struct{}, 10), make(chan struct{})
	hold := func(release chan struct{}) {
		s.do(func(dns.ResponseWriter, *dns.Msg) bool {
			arrived <- struct{}{}
			<-release
			return false
		})
	}
	hold(release)
	r, c := resolver(t, s.addr)
	r.Timeout = 30 * time.Second
	first, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := r.Lookup(first, "a.test"); !errors.Is(err, context.Canceled) {
			t.Errorf("the first caller left with %v, want context.Canceled", err)
		}
	})
	<-arrived
	<-arrived
	for range 20 {
		wg.Go(func() { expect(t, r, "a.test", "192.0.2.1") })
	}
	cancel() // the next one asks
	<-arrived
	<-arrived
	close(release)
	wg.Wait()
	if n := s.count("a.test. A"); n != 2 {
		t.Errorf("22 callers, one of whom left, asked %d times, want 2", n)
	}

	// With an old answer at hand, nobody but the one who asks waits.
	release = make(chan struct{})
	hold(release)
	c.add(time.Hour)
	wg.Go(func() { expect(t, r, "a.test", "192.0.2.1") })
	<-arrived
	start := time.Now()
	expect(t, r, "a.test", "192.0.2.1")
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("a caller waited %v for the one who asks", took)
	}
	close(release)
	wg.Wait()
}

func TestCacheIsBounded(t *testing.T) {
	r, c := resolver(t, "127.0.0.1:1")
	r.mu.Lock()
	for i := range maxEntries * 2 {
		e := r.insert(fmt.Sprintf("n%d.test", i), c.now)
		e.expires = c.now.Add(time.Hour)
	}
	n := len(r.cache)
	r.mu.Unlock()
	if n > maxEntries {
		t.Errorf("%d entries, limit %d", n, maxEntries)
	}
}

// Answers that change between two lookups are never mixed (the caller dials
// what it was told, and is told once).
func TestFlippingAnswers(t *testing.T) {
	s := serve(t, "a.test. 0 IN A 192.0.2.1")
	r, c := resolver(t, s.addr)
	for i := range 6 {
		want := fmt.Sprintf("192.0.2.%d", i%2+1)
		s.set(t, "a.test. 0 IN A "+want)
		c.add(minTTL)
		expect(t, r, "a.test", want)
	}
	a, _ := r.Lookup(t.Context(), "a.test")
	b, _ := r.Lookup(t.Context(), "a.test")
	if len(a) != 1 || len(b) != 1 || a[0] != b[0] || a[0] != netip.MustParseAddr("192.0.2.2") {
		t.Errorf("two lookups within the TTL: %v and %v", a, b)
	}
}
