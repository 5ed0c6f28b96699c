package dns

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// gateways is a table of names whose gateways have names.
func gateways() *fakeTable {
	lb := func(hosts ...string) (ts []Target) {
		for _, h := range hosts {
			ts = append(ts, Target{Host: h, Port: 443})
		}
		return ts
	}
	return newTable(map[string]Answer{
		"one.mesh.internal":     {Targets: lb("lb.test")},
		"both.mesh.internal":    {Targets: lb("lb.test", "other.test")},
		"same.mesh.internal":    {Targets: lb("lb.test", "twin.test")},
		"ranks.mesh.internal":   {Addrs: []Addr{{Addr: netip.MustParseAddr("10.0.0.5"), Rank: 1}}, Targets: []Target{{Host: "lb.test", Rank: 2}, {Host: "other.test", Rank: 0}}},
		"dead.mesh.internal":    {Targets: lb("dead.test")},
		"half.mesh.internal":    {Targets: lb("dead.test", "other.test")},
		"static.mesh.internal":  {Addrs: addrs("10.0.0.6"), Targets: lb("dead.test")},
		"slow.mesh.internal":    {Targets: lb("slow.test")},
		"late.mesh.internal":    {Addrs: addrs("10.0.0.7"), Targets: lb("slow.test")},
		"alias.mesh.internal":   {Alias: "one.mesh.internal"},
		"web.mesh.internal":     {Addrs: addrs("10.0.0.1")},
		"_x._tcp.mesh.internal": {Services: []Service{{Port: 443, Target: "one.mesh.internal"}}},
	})
}

// lookupOf answers from a map, and does not answer for slow.test until it is
// given up or told to.
func lookupOf(gate <-chan struct{}) func(context.Context, string) ([]netip.Addr, time.Duration, error) {
	known := map[string]string{"lb.test": "192.0.2.1 2001:db8::1", "twin.test": "192.0.2.1", "other.test": "192.0.2.2", "slow.test": "192.0.2.3"}
	return func(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
		if host == "slow.test" {
			select {
			case <-gate:
			case <-ctx.Done():
				return nil, 0, ctx.Err()
			}
		}
		if known[host] == "" {
			return nil, 0, errors.New("nobody knows")
		}
		var list []netip.Addr
		for s := range strings.FieldsSeq(known[host]) {
			list = append(list, netip.MustParseAddr(s))
		}
		ttl := time.Minute
		if host == "other.test" {
			ttl = 3 * time.Second
		}
		return list, ttl, nil
	}
}

func TestTargets(t *testing.T) {
	r := start(t, &Server{Lookup: lookupOf(nil)})
	r.table.Store(gateways())
	soa := " ns: mesh.internal. 5 IN SOA ns.mesh.internal. hostmaster.mesh.internal. 1700000000 3600 600 86400 5"
	eachTransport(t, func(t *testing.T, tr Transport) {
		for _, c := range []struct {
			name  string
			qtype uint16
			want  string
		}{
			{"one", dns.TypeA, "NOERROR aa an: one.mesh.internal. 5 IN A 192.0.2.1"},
			{"one", dns.TypeAAAA, "NOERROR aa an: one.mesh.internal. 5 IN AAAA 2001:db8::1"},
			{"one", dns.TypeTXT, "NOERROR aa" + soa},
			// The TTL of a target holds where it is shorter.
			{"both", dns.TypeA, "NOERROR aa an: both.mesh.internal. 3 IN A 192.0.2.1, both.mesh.internal. 3 IN A 192.0.2.2"},
			{"same", dns.TypeA, "NOERROR aa an: same.mesh.internal. 5 IN A 192.0.2.1"},
			// One that can't be found is left out; all of them are no NXDOMAIN.
			{"half", dns.TypeA, "NOERROR aa an: half.mesh.internal. 3 IN A 192.0.2.2"},
			{"half", dns.TypeAAAA, "NOERROR aa" + soa},
			{"static", dns.TypeA, "NOERROR aa an: static.mesh.internal. 5 IN A 10.0.0.6"},
			{"static", dns.TypeAAAA, "NOERROR aa" + soa},
			{"dead", dns.TypeA, "SERVFAIL"},
			{"dead", dns.TypeAAAA, "SERVFAIL"},
			{"alias", dns.TypeA, "NOERROR aa an: alias.mesh.internal. 5 IN CNAME one.mesh.internal., one.mesh.internal. 5 IN A 192.0.2.1"},
			{"_x._tcp", dns.TypeSRV, "NOERROR aa an: _x._tcp.mesh.internal. 5 IN SRV 0 0 443 one.mesh.internal."},
		} {
			r.expect(t, tr, q(c.name+".mesh.internal", c.qtype), c.want)
		}
		m := q("ranks.mesh.internal", dns.TypeA)
		var order []string
		for _, rr := range r.ask(t, tr, m).Answer {
			order = append(order, rr.(*dns.A).A.String())
		}
		if got := strings.Join(order, " "); got != "192.0.2.2 10.0.0.5 192.0.2.1" {
			t.Errorf("by rank: %s", got)
		}
	})
}

func TestTargetsWithoutLookup(t *testing.T) {
	r := start(t, &Server{})
	r.table.Store(gateways())
	r.expect(t, UDP, q("one.mesh.internal", dns.TypeA), "SERVFAIL")
	r.expect(t, UDP, q("static.mesh.internal", dns.TypeA), "NOERROR aa an: static.mesh.internal. 5 IN A 10.0.0.6")
}

func TestUsableTargets(t *testing.T) {
	var bad atomic.Pointer[string]
	bad.Store(new(string))
	r := start(t, &Server{Lookup: lookupOf(nil), Usable: func(a netip.AddrPort) bool {
		return !strings.Contains(*bad.Load(), a.String())
	}})
	r.table.Store(gateways())
	for without, want := range map[string]string{
		"":                            "both.mesh.internal. 3 IN A 192.0.2.1, both.mesh.internal. 3 IN A 192.0.2.2",
		"192.0.2.1:443":               "both.mesh.internal. 3 IN A 192.0.2.2",
		"192.0.2.1:444":               "both.mesh.internal. 3 IN A 192.0.2.1, both.mesh.internal. 3 IN A 192.0.2.2",
		"192.0.2.1:443 192.0.2.2:443": "both.mesh.internal. 3 IN A 192.0.2.1, both.mesh.internal. 3 IN A 192.0.2.2",
	} {
		bad.Store(&without)
		r.expect(t, UDP, q("both.mesh.internal", dns.TypeA), "NOERROR aa an: "+want)
	}
	// The other family's addresses are of no use to who asks for this one.
	without := "[2001:db8::1]:443"
	bad.Store(&without)
	r.expect(t, UDP, q("both.mesh.internal", dns.TypeAAAA), "NOERROR aa an: both.mesh.internal. 5 IN AAAA 2001:db8::1")
}

// Who waits for a target is in nobody's way, and is answered in time.
func TestSlowTargets(t *testing.T) {
	gate := make(chan struct{})
	var lookups atomic.Int32
	find := lookupOf(gate)
	r := start(t, &Server{Lookup: func(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
		if host == "slow.test" {
			lookups.Add(1)
		}
		return find(ctx, host)
	}})
	r.table.Store(gateways())
	done := make(chan string)
	for _, name := range []string{"slow", "slow", "late"} {
		go func() { done <- summary(r.ask(t, UDP, q(name+".mesh.internal", dns.TypeA))) }()
	}
	for range 20 {
		r.expect(t, UDP, q("web.mesh.internal", dns.TypeA), "NOERROR aa an: web.mesh.internal. 5 IN A 10.0.0.1")
	}
	if got, want := <-done, "NOERROR aa an: late.mesh.internal. 5 IN A 10.0.0.7"; got != want {
		t.Errorf("with something to tell:\n got %s\nwant %s", got, want)
	}
	close(gate)
	for range 2 {
		if got, want := <-done, "NOERROR aa an: slow.mesh.internal. 5 IN A 192.0.2.3"; got != want {
			t.Errorf("when it was found:\n got %s\nwant %s", got, want)
		}
	}
	if n := lookups.Load(); n != 1 {
		t.Errorf("looked up %d times, want once for all who waited", n)
	}
}

func TestDeadTargetsAreAnsweredInTime(t *testing.T) {
	r := start(t, &Server{Lookup: lookupOf(nil)})
	r.table.Store(gateways())
	begun := time.Now()
	r.expect(t, UDP, q("slow.mesh.internal", dns.TypeA), "SERVFAIL")
	if took := time.Since(begun); took > 20*time.Second || took < targetTimeout {
		t.Errorf("it took %v, want %v and a little", took, targetTimeout)
	}
}

// One client has so many places to wait in. Without one it is told what is
// known, or refused, and others are answered. By UDP, where a client may have
// any address, it is told to come by TCP, and the places are no others'.
func TestTargetLimits(t *testing.T) {
	for _, c := range []struct {
		by                    Transport
		askUDP, byTCP, atOnce string
	}{
		{UDP, "NOERROR tc", "SERVFAIL", "NOERROR ra an: a.test. 60 IN A 192.0.2.1"},
		{TCP, "SERVFAIL", "REFUSED", "REFUSED"},
	} {
		t.Run(string(c.by), func(t *testing.T) {
			gate, begun := make(chan struct{}), make(chan struct{}, 10)
			find := lookupOf(gate)
			up := serve(t, "a.test. 60 IN A 192.0.2.1")
			r := start(t, &Server{
				MaxForwards: 1, Forward: &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}}, RecursionClients: loopback,
				Lookup: func(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
					begun <- struct{}{}
					return find(ctx, host)
				},
			})
			r.table.Store(gateways())
			done := make(chan string)
			go func() { done <- summary(r.ask(t, c.by, q("slow.mesh.internal", dns.TypeA))) }()
			<-begun
			code := func(tr Transport, name string) string {
				text, _, _ := strings.Cut(summary(r.ask(t, tr, q(name, dns.TypeA))), " ra")
				return strings.Replace(text, "NOERROR aa tc", "NOERROR tc", 1)
			}
			if got := code(UDP, "dead.mesh.internal"); got != c.askUDP {
				t.Errorf("by UDP: %s, want %s", got, c.askUDP)
			}
			if got := code(TCP, "dead.mesh.internal"); got != c.byTCP {
				t.Errorf("by TCP: %s, want %s", got, c.byTCP)
			}
			r.expect(t, UDP, q("a.test", dns.TypeA), c.atOnce)
			r.expect(t, c.by, q("static.mesh.internal", dns.TypeA), "NOERROR aa ra an: static.mesh.internal. 5 IN A 10.0.0.6")
			close(gate)
			if got, want := <-done, "NOERROR aa ra an: slow.mesh.internal. 5 IN A 192.0.2.3"; got != want {
				t.Errorf("the first question:\n got %s\nwant %s", got, want)
			}
			r.expect(t, c.by, q("dead.mesh.internal", dns.TypeA), "SERVFAIL ra")
		})
	}
}

// An old address of a target is better than none: the Resolver's doing.
func TestStaleTargets(t *testing.T) {
	up := serve(t, "lb.test. 2 IN A 192.0.2.1")
	res, c := resolver(t, up.addr)
	res.Timeout = time.Second // less than targetTimeout
	r := start(t, &Server{Lookup: res.LookupTTL})
	r.table.Store(gateways())
	r.expect(t, UDP, q("one.mesh.internal", dns.TypeA), "NOERROR aa an: one.mesh.internal. 2 IN A 192.0.2.1")
	c.add(1500 * time.Millisecond)
	r.expect(t, UDP, q("one.mesh.internal", dns.TypeA), "NOERROR aa an: one.mesh.internal. 0 IN A 192.0.2.1")
	up.do(func(dns.ResponseWriter, *dns.Msg) bool { return true }) // says nothing more
	c.add(time.Hour)
	r.expect(t, UDP, q("one.mesh.internal", dns.TypeA), "NOERROR aa an: one.mesh.internal. 5 IN A 192.0.2.1")
}

// Close ends a lookup that nobody waits for any more.
func TestCloseEndsLookups(t *testing.T) {
	ended := make(chan struct{})
	r := start(t, &Server{Lookup: func(ctx context.Context, _ string) ([]netip.Addr, time.Duration, error) {
		defer close(ended)
		<-ctx.Done()
		if !errors.Is(ctx.Err(), context.Canceled) {
			t.Errorf("the lookup ended by %v", ctx.Err())
		}
		return nil, 0, ctx.Err()
	}})
	r.table.Store(gateways())
	r.expect(t, UDP, q("late.mesh.internal", dns.TypeA), "NOERROR aa an: late.mesh.internal. 5 IN A 10.0.0.7")
	_ = r.Close()
	<-ended
}
