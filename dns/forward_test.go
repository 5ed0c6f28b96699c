package dns

import (
	"context"
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
	return start(t, &Server{Forward: f, RecursionClients: loopback}), f, c
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
		{"reverse.culvert.alt", dns.TypeA, "NXDOMAIN aa ra ns: culvert.alt. 5 IN SOA ns.culvert.alt. hostmaster.culvert.alt. 1 3600 600 86400 5"},
		{"nobody.mesh.internal", dns.TypeA, "NXDOMAIN aa ra ns: " + soa},
	} {
		for _, tr := range transports {
			r.expect(t, tr, q(c.name, c.qtype), c.want)
		}
	}
	for _, asked := range []string{"a.test. ANY", "localhost. A", "x.localhost. AAAA", "x.invalid. A", "x.onion. A", "reverse.culvert.alt. A", "nobody.mesh.internal. A"} {
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
	r := start(t, &Server{Forward: f, RecursionClients: prefixes("127.0.0.1/32")})
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
	r := start(t, &Server{Forward: f, RecursionClients: loopback})
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

// An answer in the cache grows older while the machine is suspended.
func TestForwardSuspended(t *testing.T) {
	up := serve(t, "a.test. 60 IN A 192.0.2.1")
	r, _, clk := forwarding(t, up)
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.1")
	up.set(t, "a.test. 60 IN A 192.0.2.2")
	clk.jump(20 * time.Second)
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 40 IN A 192.0.2.1")
	clk.jump(-time.Hour)
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.1")
	clk.jump(12 * time.Hour)
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.2")
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
	if took := time.Since(begun); summary(res) != "SERVFAIL ra" || edeOf(res) != int(dns.ExtendedErrorCodeNetworkError) || took > 20*time.Second {
		t.Errorf("%s, extended error %d after %v", summary(res), edeOf(res), took)
	}
	if n := silent.count("a.test. A"); n != tries {
		t.Errorf("%d tries, want %d", n, tries)
	}
	r.expect(t, UDP, q("a.test", dns.TypeA), "SERVFAIL ra")
	if n := silent.count("a.test. A"); n != tries {
		t.Errorf("the second question was asked: %d tries, want the %d of the first", n, tries)
	}
	// The zones do not care.
	r.expect(t, UDP, q("four.shop.svc.mesh.internal", dns.TypeA), "NOERROR aa ra an: four.shop.svc.mesh.internal. 5 IN A 10.0.0.4")
	silent.do(nil)
	silent.set(t, "a.test. 60 IN A 192.0.2.1")
	clk.add(failureTTL)
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.1")
}

func TestNobodyToAsk(t *testing.T) {
	f := &Forwarder{ResolvConf: filepath.Join(t.TempDir(), "none")}
	r := start(t, &Server{Forward: f, RecursionClients: loopback})
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
	f.upstreams("a.test")[0].noteResult(net.ErrClosed, c.now)
	if got := fmt.Sprint(list()); got != "[[2001:db8::53]:53 192.0.2.53:53]" {
		t.Errorf("after a failure of the first: %s", got)
	}
	if up := f.Health(); up["192.0.2.53:53"] || !up["[2001:db8::53]:53"] {
		t.Errorf("health %v", up)
	}
	if err := os.WriteFile(path, []byte("nameserver 192.0.2.54\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.add(fileCheckInterval)
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
	clk.add(maxDown)
	if got := ask(); got != "192.0.2.1" {
		t.Errorf("the first is back: %s", got)
	}
	if up := f.Health(); !up[first.addr] || !up[second.addr] {
		t.Errorf("health %v", up)
	}
	// One that says nothing is soon in company.
	first.do(func(dns.ResponseWriter, *dns.Msg) bool { return true })
	begun := time.Now()
	if got := ask(); got != "192.0.2.2" || time.Since(begun) > 20*time.Second {
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
	testnet.Eventually(t, time.Minute, func() bool { r.forwards.mu.Lock(); defer r.forwards.mu.Unlock(); return r.forwards.taken == clients }, "all wait")
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
	testnet.Eventually(t, time.Minute, func() bool {
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
	s := &Server{Forward: f, RecursionClients: loopback, MaxForwards: 150}
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
// Guesses in number end the question by UDP: it is asked by TCP, where there
// is nothing to guess.
// Who is not asked is not heard, whatever he knows.
// Ids, ports and letters are of chance.
// Of an answer only what was asked for is believed.
// A name of the world does not lead into this network (DNS rebinding).
// What does not fit is fetched by TCP, and told to have been cut.
// An upstream that is this server is no loop without end: the question waits
// for itself, once.
func TestForwardToOurselves(t *testing.T) {
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	f := &Forwarder{Upstreams: []Upstream{{Addr: c.LocalAddr().String()}}}
	var n atomic.Int32
	s := &Server{Forward: f, RecursionClients: loopback, Observe: func(*Result) { n.Add(1) }}
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

// An upstream that is known to be this server is not asked at all, be it configured or in
// resolv.conf, and others are.
func TestForwardNotToOurselves(t *testing.T) {
	up := serve(t, "a.test. 60 IN A 192.0.2.1")
	own := serve(t, "a.test. 60 IN A 192.0.2.2")
	f := &Forwarder{Upstreams: []Upstream{{Addr: own.addr}, {Addr: up.addr}}, Zones: map[string][]Upstream{"own.test": {{Addr: own.addr}}, "same.test": nil}}
	f.Own = func(address string) bool { return address == own.addr }
	r := start(t, &Server{Forward: f, RecursionClients: loopback})
	r.expect(t, UDP, q("a.test", dns.TypeA), "NOERROR ra an: a.test. 60 IN A 192.0.2.1")
	r.expect(t, UDP, q("a.own.test", dns.TypeA), "SERVFAIL ra")
	r.expect(t, UDP, q("a.same.test", dns.TypeA), "NXDOMAIN ra"+testSOA)
	for _, asked := range []string{"a.test. A", "a.own.test. A"} {
		if n := own.count(asked); n != 0 {
			t.Errorf("%s was asked of the server itself", asked)
		}
	}
}

// DNSSEC records are for those who ask for them, and nobody says that they
// were checked.
// The pieces of a cached answer are put together to what they were.
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
	if took := time.Since(begun); took > 20*time.Second {
		t.Errorf("took %v", took)
	}
	if e, _, _ := f.resolve(context.Background(), appendKey(nil, &in), &in); e != nil {
		t.Errorf("after Close: %+v", e)
	}
}
