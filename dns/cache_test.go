package dns

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/miekg/dns"

	"culvert.dev/internal/testnet"
)

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
		r := start(t, &Server{Forward: f, RecursionClients: loopback})
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
	r := start(t, &Server{Forward: &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}, MinTTL: -1}, RecursionClients: loopback})
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
	clk.add(staleTTL)
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
	if took := time.Since(begun); took < staleAfter || took > 20*time.Second {
		t.Errorf("a silent upstream: %v, want %v", took, staleAfter)
	}
	testnet.Eventually(t, time.Minute, func() bool { f.mu.Lock(); defer f.mu.Unlock(); return len(f.flights) == 0 }, "the question has come to its end")
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
