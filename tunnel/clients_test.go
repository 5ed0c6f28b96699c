package tunnel

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// take is what Server and Router do for one descriptor of a client.
func take(b *Budget, c *Client) error {
	if err := b.checkDescriptors(c, 1); err != nil {
		return err
	}
	if !b.Accept() {
		return Refusef(Overload, "none is left")
	}
	c.addDescriptors(1)
	return nil
}

// fill takes as many as the client may have and returns how many those are.
func fill(b *Budget, c *Client) (n int64) {
	for take(b, c) == nil {
		n++
	}
	return n
}

func TestOneClientMayHaveNearlyAll(t *testing.T) {
	for _, limit := range []int64{100, 1000, 20_000, 1_000_000} {
		b := &Budget{Limit: limit}
		alone := b.Client(nil, netip.MustParseAddr("192.0.2.1"))
		n := fill(b, alone)
		if n < (limit-reservedForRefusals)*84/100 {
			t.Errorf("of %d descriptors one client gets %d", limit, n)
		}
		err := take(b, alone)
		if ReasonOf(err) != Overload || !strings.Contains(err.Error(), "192.0.2.1 holds") || !strings.HasPrefix(err.Error(), "descriptors are scarce") {
			t.Errorf("the refusal says %v", err)
		}
	}
	b := &Budget{Limit: math.MaxInt64}
	if c := b.Client(nil, netip.Addr{}); take(b, c) != nil {
		t.Error("there is a limit where there is none")
	}
}

// However many clients hold all that they may, the next one finds some.
func TestNewcomersFindTheirShare(t *testing.T) {
	const limit, newcomers, each = 20_000, 60, 2
	for _, hogs := range []int{1, 2, 10, 100} {
		b := &Budget{Limit: limit}
		for i := range hogs {
			fill(b, b.Client(nil, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})))
		}
		for i := range newcomers {
			c := b.Client(nil, netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}))
			for j := range each {
				if err := take(b, c); err != nil {
					t.Fatalf("%d clients took all they may: newcomer %d is refused descriptor %d: %v", hogs, i, j, err)
				}
			}
		}
	}
}

// Eight thousand tunnels of one address stand while a hundred others come.
func TestShareBesideEightThousandTunnels(t *testing.T) {
	b := &Budget{Limit: 20_000 - 64 - 16}
	one := b.Client(nil, netip.MustParseAddr("192.0.2.1"))
	for i := range 16_000 {
		if err := take(b, one); err != nil {
			t.Fatalf("descriptor %d: %v", i, err)
		}
	}
	for i := range 100 {
		c := b.Client(nil, netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}))
		for range 20 {
			if err := take(b, c); err != nil {
				t.Fatalf("client %d: %v", i, err)
			}
		}
	}
}

// Who has many /64s of one /48 has no more than who has one.
func TestClientsOfASite(t *testing.T) {
	addr := func(site, net uint16) netip.Addr {
		return netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, byte(site >> 8), byte(site), byte(net >> 8), byte(net), 15: 1})
	}
	b := &Budget{Limit: 20_000}
	var n int64
	for i := range 5000 {
		n += fill(b, b.Client(nil, addr(1, uint16(i))))
	}
	if want := fill(&Budget{Limit: 20_000}, b.Client(nil, netip.MustParseAddr("192.0.2.9"))); n > want {
		t.Errorf("the /64s of a /48 get %d descriptors together, one address %d", n, want)
	}
	if err := take(b, b.Client(nil, addr(1, 60_000))); err == nil || !strings.Contains(err.Error(), "2001:db8:1::/48 holds") {
		t.Errorf("one more of the /48: %v", err)
	}
	if err := take(b, b.Client(nil, addr(2, 1))); err != nil {
		t.Errorf("another /48: %v", err)
	}
	l := &Limits{MaxConnectionsPerClient: 2, MaxPendingPerClient: 2, ConnectionRatePerClient: 2}
	for what, one := range map[string]func(*Client) error{
		"open":    func(c *Client) error { defer c.AddOpen(1); return c.CheckOpen(l, "connections") },
		"pending": func(c *Client) error { defer c.AddPending(1); return c.CheckPending(l, 0, "connections") },
		"new":     func(c *Client) error { return c.CheckRate(l, time.Now(), "connections") },
		"tunnels": func(c *Client) error {
			defer c.AddTunnels(1)
			return c.CheckTunnels(&Limits{MaxConnectionsPerClient: 2})
		},
	} {
		b, n := &Budget{}, 0
		for i := range 100 {
			if one(b.Client(nil, addr(1, uint16(i)))) == nil {
				n++
			}
		}
		if n != 16 {
			t.Errorf("%s: the /48 gets %d, want eight times the limit of 2", what, n)
		}
		if err := one(b.Client(nil, addr(2, 0))); err != nil {
			t.Errorf("%s: another /48: %v", what, err)
		}
	}
}

func TestClientMessagesNameTheSetting(t *testing.T) {
	l := &Limits{MaxConnectionsPerClient: 3, MaxPendingPerClient: 4, ConnectionRatePerClient: 1, MaxPendingConnections: 5}
	b := &Budget{}
	c := b.Client(nil, netip.MustParseAddr("127.0.0.1"))
	c.AddOpen(3)
	c.AddPending(4)
	c.AddTunnels(3)
	_ = c.CheckRate(l, time.Now(), "connections")
	for _, tt := range []struct {
		err  error
		want string
	}{
		{c.CheckOpen(l, "connections"), "limits.maxConnectionsPerClient: 127.0.0.1 has 3 connections open, the limit is 3"},
		{c.CheckTunnels(&Limits{MaxConnectionsPerClient: 3}), "limits.maxConnectionsPerClient: 127.0.0.1 has 3 tunnels open, the limit is 3"},
		{c.CheckPending(l, 0, "pending connections"), "limits.maxPendingPerClient: 127.0.0.1 has 4 pending connections open, the limit is 4"},
		{c.CheckRate(l, time.Now(), "connections"), "limits.connectionRatePerClient: 127.0.0.1 opened more than 1 connections in a second"},
		{c.CheckPending(&Limits{MaxPendingConnections: 5}, 5, "unfinished handshakes"), "limits.maxPendingConnections: there are 5 unfinished handshakes, the limit"},
	} {
		if tt.err == nil || tt.err.Error() != tt.want || ReasonOf(tt.err) != Overload {
			t.Errorf("got %v, want %s", tt.err, tt.want)
		}
	}
}

// Unfinished handshakes are refused to those that have most first.
func TestCheckPendingLeavesSomeForOthers(t *testing.T) {
	b, l, pending := &Budget{}, &Limits{}, 0
	begin := func(c *Client) bool {
		if c.CheckPending(l, pending, "handshakes") != nil {
			return false
		}
		c.AddPending(1)
		pending++
		return true
	}
	one := b.Client(nil, netip.MustParseAddr("192.0.2.1"))
	n := 0
	for begin(one) {
		n++
	}
	if n < DefaultMaxPendingConnections*8/10 {
		t.Errorf("one client gets %d of %d", n, DefaultMaxPendingConnections)
	}
	for i := range 100 {
		if !begin(b.Client(nil, netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}))) {
			t.Fatalf("newcomer %d is refused", i)
		}
	}
}

func TestAbortsSoonAfterTheAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &Budget{}
		c := b.Client(nil, netip.MustParseAddr("192.0.2.1"))
		spend := func() (n int) {
			for c.checkAborts(time.Now()) == nil {
				c.countTunnelEnd(true, time.Now())
				n++
			}
			return n
		}
		if n := spend(); n != mostAborts {
			t.Errorf("%d at once, want %d", n, mostAborts)
		}
		if err := b.Client(nil, netip.MustParseAddr("192.0.2.2")).checkAborts(time.Now()); err != nil {
			t.Errorf("another client: %v", err)
		}
		time.Sleep(2 * time.Second)
		if n := spend(); n != 2*abortsPerSecond {
			t.Errorf("%d after two seconds, want %d", n, 2*abortsPerSecond)
		}
		for range 10 {
			c.countTunnelEnd(false, time.Now()) // tunnels of use
		}
		if n := spend(); n != 10 {
			t.Errorf("%d more after 10 tunnels that ended as they should, want 10", n)
		}
		for range 10_000 {
			c.countTunnelEnd(false, time.Now())
		}
		if n := spend(); n != mostAborts {
			t.Errorf("%d after any number of them, want %d", n, mostAborts)
		}
		c.Release()
		time.Sleep(time.Second)
		b.clients.mu.Lock()
		b.clients.forget(time.Now())
		n := len(b.clients.accounts)
		b.clients.mu.Unlock()
		if n == 0 {
			t.Error("what a client has spent is forgotten when it leaves")
		}
	})
}

func TestAccountsAreForgotten(t *testing.T) {
	b := &Budget{}
	for i := range 100_000 {
		b.Client(nil, netip.AddrFrom16([16]byte{0x20, 1, byte(i >> 16), byte(i >> 8), byte(i), 7: byte(i), 15: 1})).Release()
	}
	if n := b.clients.Len(); n > 3*minForget {
		t.Errorf("%d accounts of clients that left", n)
	}
	kept := b.Client(nil, netip.MustParseAddr("2001:db8::1"))
	kept.AddOpen(1)
	b.clients.mu.Lock()
	b.clients.forget(time.Now())
	b.clients.forget(time.Now())
	n := len(b.clients.accounts)
	b.clients.mu.Unlock()
	if again := b.Client(nil, netip.MustParseAddr("2001:db8::2")); n != 2 || again != kept {
		t.Errorf("%d accounts, want the one that is held and that of its /48", n)
	}
}

// TestQueue compares a Queue with one that looks at everything.
func TestQueue(t *testing.T) {
	type entry struct {
		p    *Place[int]
		site *Client
	}
	b := &Budget{}
	var clients []*Client
	for i := range 6 {
		clients = append(clients, b.Client(nil, netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})))
	}
	for i := range 3 { // one /48
		clients = append(clients, b.Client(nil, netip.AddrFrom16([16]byte{0x20, 1, 7: byte(i), 15: 1})))
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var q Queue[int]
	var all []entry
	check := func() {
		t.Helper()
		var listed []int
		for p := q.Oldest(); p != nil; p = p.Next() {
			listed = append(listed, p.Value)
		}
		var want []int
		count := map[*Client]int{}
		most := 0
		for _, e := range all {
			want = append(want, e.p.Value)
			count[e.site]++
			most = max(most, count[e.site])
		}
		if q.Len() != len(all) || !slices.Equal(listed, want) {
			t.Fatalf("%d listed: %v, want %v", q.Len(), listed, want)
		}
		v := q.Victim()
		if len(all) == 0 {
			if v != nil {
				t.Fatal("a victim in an empty queue")
			}
			return
		}
		i := slices.IndexFunc(all, func(e entry) bool { return e.p == v })
		if i < 0 || count[all[i].site] != most || slices.IndexFunc(all, func(e entry) bool { return e.site == all[i].site }) != i {
			t.Fatalf("victim %v is not the oldest of a client with %d", v.Value, most)
		}
	}
	for i := range 20_000 {
		switch remove := rng.IntN(100); {
		case len(all) > 0 && (len(all) >= 60 || remove < 45):
			j := rng.IntN(len(all))
			if remove < 5 {
				j = slices.IndexFunc(all, func(e entry) bool { return e.p == q.Victim() })
			}
			q.Remove(all[j].p)
			q.Remove(all[j].p) // does nothing
			all = slices.Delete(all, j, j+1)
		default:
			c := clients[rng.IntN(len(clients))]
			e := entry{&Place[int]{Value: i}, c}
			if c.site != nil {
				e.site = c.site
			}
			q.Add(e.p, c)
			all = append(all, e)
		}
		check()
	}
}

// Of those that have one place each, the oldest makes room.
func TestQueueOfEquals(t *testing.T) {
	var q Queue[int]
	b := &Budget{}
	places := make([]Place[int], 10)
	for i := range places {
		places[i].Value = i
		q.Add(&places[i], b.Client(nil, netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})))
	}
	for i := range places {
		if v := q.Victim(); v.Value != i {
			t.Fatalf("victim %d, want %d", v.Value, i)
		}
		q.Remove(q.Victim())
	}
}

func BenchmarkClientOfAConnection(b *testing.B) {
	budget, l, now := &Budget{Limit: 1 << 30}, &Limits{}, time.Now()
	addr := netip.MustParseAddr("192.0.2.1")
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			c := budget.Client(nil, addr)
			if c.checkConnect(l, budget, now) != nil {
				b.Error("refused")
			}
			c.AddOpen(1)
			c.addDescriptors(1)
			c.AddOpen(-1)
			c.addDescriptors(-1)
			c.Release()
		}
	})
}

func BenchmarkQueue(b *testing.B) {
	var q Queue[int]
	budget := &Budget{}
	c := budget.Client(nil, netip.MustParseAddr("192.0.2.1"))
	var p Place[int]
	b.ReportAllocs()
	for b.Loop() {
		q.Add(&p, c)
		q.Remove(&p)
	}
}
