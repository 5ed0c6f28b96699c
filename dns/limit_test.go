package dns

import (
	"bytes"
	"hash/maphash"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"culvert.dev/tunnel"
)

func TestRateLimit(t *testing.T) {
	c := &clock{now: time.Unix(1_700_000_000, 0)}
	s := &Server{Zones: []string{"mesh.internal"}, Names: func() Names { return shop() }, RateLimit: 10, RecursionClients: prefixes("192.0.3.0/24"), RateLimitExempt: prefixes("192.0.4.0/24")}
	s.now = func() time.Time { return c.now }
	s.init()
	s.rules.Load().rate.seed = seedWithoutSharing("192.0.2.1", "192.0.5.1", "2001:db8::1", "2001:db8:0:100::1")
	b := message(t, q(known, dns.TypeA), nil)
	bad := message(t, q(known, dns.TypeA), func(b []byte) []byte { b[5] = 0; return b })
	ask := func(tr Transport, from string, b []byte) (answered, slipped int) {
		for range 50 {
			x := s.take(tr, "")
			x.in = append(x.in[:0], b...)
			x.begin(netip.MustParseAddrPort(from))
			switch {
			case len(x.out) == 0:
				if x.result.Reason != tunnel.Flood && len(b) > 5 && b[5] == 1 {
					t.Errorf("%s: dropped for %q", from, x.result.Reason)
				}
			case x.out[2]&(bitTC>>8) != 0:
				slipped++
				if len(x.out) > len(b) {
					t.Errorf("a slip of %d bytes for %d", len(x.out), len(b))
				}
			default:
				answered++
			}
		}
		return answered, slipped
	}
	for _, tt := range []struct {
		tr                Transport
		from              string
		b                 []byte
		answered, slipped int
	}{
		{UDP, "192.0.2.1:4000", b, 10, 20},
		{UDP, "192.0.2.200:4000", b, 0, 25}, // the same /24
		{UDP, "192.0.5.1:4000", bad, 10, 0}, // what is bad does not slip
		{UDP, "[2001:db8::1]:4000", b, 10, 20},
		{UDP, "[2001:db8:0:ff::1]:4000", b, 0, 25}, // the same /56
		{UDP, "[2001:db8:0:100::1]:4000", b, 10, 20},
		{UDP, "192.0.3.1:4000", b, 50, 0}, // trusted
		{UDP, "192.0.4.1:4000", b, 50, 0},
		{TCP, "192.0.2.1:4000", b, 50, 0}, // seen to be there
		{HTTPS, "192.0.2.1:4000", b, 50, 0},
	} {
		if answered, slipped := ask(tt.tr, tt.from, tt.b); answered != tt.answered || slipped != tt.slipped {
			t.Errorf("%s by %s: %d answered, %d slipped, want %d, %d", tt.from, tt.tr, answered, slipped, tt.answered, tt.slipped)
		}
	}
	c.add(time.Second)
	if answered, _ := ask(UDP, "192.0.2.1:4000", b); answered != 10 {
		t.Errorf("a second later: %d answered, want 10", answered)
	}
}

// A flood from anywhere takes no memory.
func TestFloodTakesNoMemory(t *testing.T) {
	table := shop()
	s := &Server{Zones: []string{"mesh.internal"}, Names: func() Names { return table }, RateLimit: 10}
	s.init()
	x := s.take(UDP, "")
	b := message(t, q(known, dns.TypeA), nil)
	n := byte(0)
	perQuery := testing.AllocsPerRun(5000, func() {
		n++
		x.in = append(x.in[:0], b...)
		x.begin(netip.AddrPortFrom(netip.AddrFrom4([4]byte{n, n ^ 0x55, n + 3, n}), 4000))
	})
	if perQuery > 3 { // the name, and the fake table's keys
		t.Errorf("%v allocations for a query", perQuery)
	}
	if len(s.forwards.by) != 0 {
		t.Error("sources are remembered")
	}
}

func TestShares(t *testing.T) {
	s := shares{all: 5, each: 2}
	a, b, c := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
	for i, tt := range []struct {
		from netip.Addr
		want bool
	}{{a, true}, {a, true}, {a, false}, {b, true}, {c, true}, {b, false}} { // b and c are of one /64
		if got := s.take(tt.from); got != tt.want {
			t.Errorf("%d: %v gets a place: %v, want %v", i, tt.from, got, tt.want)
		}
	}
	if !s.crowded() {
		t.Error("4 of 5 places taken, and not crowded")
	}
	if !s.take(netip.MustParseAddr("192.0.2.2")) || s.take(netip.MustParseAddr("192.0.2.3")) {
		t.Error("places are not five")
	}
	s.give(a)
	if !s.take(a) || len(s.by) != 3 {
		t.Errorf("%v", s.by)
	}
}

// One line for each kind of refusal, with a count, and no name in it.
func TestComplaints(t *testing.T) {
	var buf bytes.Buffer
	c := &clock{now: time.Unix(1_700_000_000, 0)}
	s := &Server{Zones: []string{"mesh.internal"}, Log: slog.New(slog.NewTextHandler(&buf, nil)), RateLimit: -1}
	s.now = func() time.Time { return c.now }
	s.init()
	ask := func(name string, n int) {
		b := message(t, q(name, dns.TypeA), nil)
		for range n {
			x := s.take(UDP, "")
			x.in = append(x.in[:0], b...)
			x.begin(netip.MustParseAddrPort("192.0.2.77:4000"))
			x.done()
		}
	}
	ask("Secret.example.com", 100)
	c.add(refusalLogInterval)
	ask("secret.example.com", 1)
	lines := strings.Split(strings.TrimSpace(buf.String()), "\n")
	if len(lines) != 2 || !strings.Contains(lines[0], "reason=denied count=1 ") || !strings.Contains(lines[1], "count=100 ") {
		t.Errorf("lines:\n%s", buf.String())
	}
	if strings.Contains(strings.ToLower(buf.String()), "secret") || strings.Contains(buf.String(), "192.0.2.77") {
		t.Errorf("a name or a full address is logged:\n%s", buf.String())
	}
}

// seedWithoutSharing returns a seed by which none of the addresses shares a slot with another, as
// two of them may by chance.
func seedWithoutSharing(addrs ...string) maphash.Seed {
	for {
		seed, slots := maphash.MakeSeed(), map[uint64]bool{}
		for _, a := range addrs {
			slots[maphash.Comparable(seed, network(netip.MustParseAddr(a)))%rateSlots] = true
		}
		if len(slots) == len(addrs) {
			return seed
		}
	}
}
