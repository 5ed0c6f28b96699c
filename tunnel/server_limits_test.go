package tunnel_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

const (
	none     = -1
	overload = tunnel.Overload
)

// unmetered has no limit on new connections, so that the others can be seen.
var unmetered = tunnel.Limits{ConnectionRatePerClient: none}

func TestServerHalfOpenEvictsTheOldest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := serve(t, &tunnel.Server{Limits: tunnel.Limits{MaxPendingConnections: 3}})
		var clients []net.Conn
		var conns []*fakeConn
		dial := func() {
			client, accepted := g.dial(fmt.Sprintf("198.51.100.%d:1000", len(conns)))
			clients, conns = append(clients, client), append(conns, accepted)
			synctest.Wait()
		}
		dial()
		dial()
		dial()
		_, _ = io.WriteString(clients[0], "bytes don't help")
		_, _ = io.WriteString(clients[1], "done\n") // this one is half-open no longer
		synctest.Wait()
		dial()
		for i, c := range conns {
			if want := i != 1; (c.ending() == "open") != want {
				t.Errorf("with three unfinished: connection %d is %s", i, c.ending())
			}
		}
		dial()
		if conns[0].ending() == "open" || conns[2].ending() != "open" || conns[3].ending() != "open" || conns[4].ending() != "open" {
			t.Errorf("with a fourth: %s %s %s %s, want the first one closed", conns[0].ending(), conns[2].ending(), conns[3].ending(), conns[4].ending())
		}
		if all := g.told.all(); len(all) != 1 || all[0].Source.String() != "198.51.100.0:1000" || !strings.Contains(all[0].Err.Error(), "oldest") {
			t.Errorf("outcomes %+v, want one of the first connection that says why", all)
		}
		if _, half, _ := g.srv.Account(); half != 3 {
			t.Errorf("%d half-open, want 3", half)
		}
		_, _ = io.WriteString(clients[3], "done\n") // out of the middle of the list
		synctest.Wait()
		dial()
		wantAlive(t, "in the room that made", conns[2])
		for _, c := range clients {
			_ = c.Close()
		}
		synctest.Wait()
		g.wantReasons(t, overload, tunnel.NoHello, tunnel.NoHello, tunnel.NoHello)
		g.stop(t)
	})
}

func TestServerLimitsPerClient(t *testing.T) {
	type step struct {
		from string
		ok   bool
	}
	same := func(from string, oks ...bool) (s []step) {
		for _, ok := range oks {
			s = append(s, step{from, ok})
		}
		return s
	}
	for _, tt := range []struct {
		name   string
		limits tunnel.Limits
		steps  []step
	}{
		{"half-open", tunnel.Limits{MaxPendingPerClient: 2}, append(same("198.51.100.7:1", true, true, false), step{"198.51.100.8:1", true})},
		{"open", tunnel.Limits{MaxConnectionsPerClient: 2}, append(same("198.51.100.7:1", true, true, false), step{"198.51.100.8:1", true})},
		{"new", tunnel.Limits{ConnectionRatePerClient: 2}, append(same("198.51.100.7:1", true, true, false), step{"198.51.100.8:1", true})},
		{"mapped is IPv4", tunnel.Limits{MaxConnectionsPerClient: 2}, []step{
			{"198.51.100.7:1", true}, {"[::ffff:198.51.100.7]:1", true}, {"[::ffff:198.51.100.7]:1", false}, {"[::ffff:198.51.100.8]:1", true},
		}},
		{"IPv6 by /64", tunnel.Limits{MaxConnectionsPerClient: 2}, []step{
			{"[2001:db8:0:1::1]:1", true}, {"[2001:db8:0:1:ffff:ffff:ffff:ffff]:1", true}, {"[2001:db8:0:1::2]:1", false}, {"[2001:db8:0:2::1]:1", true},
		}},
		{"a zone does not matter", tunnel.Limits{MaxConnectionsPerClient: 1}, []step{{"[fe80::1%a]:1", true}, {"[fe80::2%b]:1", false}}},
		{"none", tunnel.Limits{MaxPendingPerClient: none, MaxConnectionsPerClient: none, ConnectionRatePerClient: none, MaxPendingConnections: none}, same("198.51.100.7:1", make300()...)},
		{"none by default", tunnel.Limits{}, same("198.51.100.7:1", make300()...)},
		{"IPv6 by /48, eight times as much", tunnel.Limits{MaxConnectionsPerClient: 1}, []step{
			{"[2001:db8:0:1::1]:1", true}, {"[2001:db8:0:2::1]:1", true}, {"[2001:db8:0:3::1]:1", true}, {"[2001:db8:0:4::1]:1", true},
			{"[2001:db8:0:5::1]:1", true}, {"[2001:db8:0:6::1]:1", true}, {"[2001:db8:0:7::1]:1", true}, {"[2001:db8:0:8::1]:1", true},
			{"[2001:db8:0:9::1]:1", false}, {"[2001:db8:1:1::1]:1", true},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := serve(t, &tunnel.Server{Limits: tt.limits})
				var clients []net.Conn
				refused := 0
				for i, s := range tt.steps {
					client, accepted := g.dial(s.from)
					clients = append(clients, client)
					synctest.Wait()
					if ok := accepted.ending() == "open"; ok != s.ok {
						t.Fatalf("connection %d, from %s: admitted %v, want %v", i, s.from, ok, s.ok)
					}
					if !s.ok {
						refused++
						wantEnd(t, client)
						all := g.told.all()
						if len(all) != refused || all[refused-1].Reason != overload || all[refused-1].Err == nil {
							t.Errorf("outcomes %+v, want one overload for each refusal", all)
						}
					}
				}
				for _, c := range clients {
					_ = c.Close()
				}
				synctest.Wait()
				// What was given back can be had again.
				time.Sleep(time.Second)
				client, accepted := g.dial(tt.steps[0].from)
				synctest.Wait()
				wantAlive(t, "once all have left", accepted)
				_ = client.Close()
				g.stop(t)
				if n, want := len(g.told.all()), len(tt.steps)+1; n != want {
					t.Errorf("%d outcomes for %d connections", n, want)
				}
			})
		})
	}
}

// make300 is 300 times true.
func make300() []bool {
	b := make([]bool, 300)
	for i := range b {
		b[i] = true
	}
	return b
}

func TestServerMetersNewConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := serve(t, &tunnel.Server{Limits: tunnel.Limits{ConnectionRatePerClient: 5}})
		burst := func(n int) (admitted int) {
			for range n {
				client, accepted := g.dial("198.51.100.7:1000")
				synctest.Wait()
				if accepted.ending() == "open" {
					admitted++
				}
				_ = client.Close()
				synctest.Wait()
			}
			return admitted
		}
		for _, tt := range []struct {
			pause time.Duration
			want  int
		}{{0, 5}, {0, 0}, {time.Second / 5, 1}, {time.Second / 10, 0}, {time.Second / 10, 1}, {time.Second, 5}, {time.Hour, 5}} {
			time.Sleep(tt.pause)
			if got := burst(8); got != tt.want {
				t.Errorf("after a pause of %v: %d of 8 admitted, want %d", tt.pause, got, tt.want)
			}
		}
		g.stop(t)
	})
}

// TestServerHoldsTunnelsAgainstTheirSource checks that a tunnel counts until
// its end, and not only until it is handed over.
func TestServerHoldsTunnelsAgainstTheirSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		relay := &tunnel.Relay{}
		defer relay.Close()
		budget := &tunnel.Budget{Limit: 100}
		var told eavesdropper
		dialer := &fakeDialer{}
		router := &tunnel.Router{Resolver: routeTo("192.0.2.9:80"), Dialer: dialer, Relay: relay, Budget: budget, Observe: told.observe}
		g := serve(t, &tunnel.Server{Handler: router, Limits: tunnel.Limits{MaxConnectionsPerClient: 2}, Budget: budget})
		first, _ := g.dial("198.51.100.7:1")
		second, _ := g.dial("198.51.100.7:2")
		_, _ = io.WriteString(first, "one\n")
		_, _ = io.WriteString(second, "two\n")
		synctest.Wait()
		if n := relay.Open(); n != 2 {
			t.Fatalf("%d tunnels, want 2", n)
		}
		if open, half, waiting := g.srv.Account(); open != 2 || half != 0 || waiting != 0 {
			t.Errorf("%d open, %d half-open, %d waiting; want 2, 0, 0", open, half, waiting)
		}
		if n := budget.Used(); n != 5 { // two for each tunnel, one for the accept to come
			t.Errorf("%d descriptors taken, want 5", n)
		}
		third, accepted := g.dial("198.51.100.7:3")
		synctest.Wait()
		if accepted.ending() != "aborted" {
			t.Errorf("third connection of the source is %s, want aborted", accepted.ending())
		}
		_ = third.Close()
		_ = first.Close()
		time.Sleep(2 * time.Minute) // the fake service does not answer the end with its own
		synctest.Wait()
		fourth, accepted := g.dial("198.51.100.7:4")
		synctest.Wait()
		wantAlive(t, "after a tunnel's end", accepted)
		_ = fourth.Close()
		_ = second.Close()
		dialer.closeAll()
		synctest.Wait()
		g.stop(t)
		g.wantReasons(t, overload, tunnel.NoHello)
		if n := len(told.all()); n != 2 {
			t.Errorf("%d outcomes of the router, want 2", n)
		}
	})
}

func TestServerForgetsClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := serve(t, &tunnel.Server{})
		for i := range 5000 {
			client, _ := g.dial(fmt.Sprintf("[2001:db8:%x:%x::1]:1", i>>8, i&0xff))
			_ = client.Close()
			if i%100 == 0 {
				time.Sleep(time.Second)
			}
			synctest.Wait()
		}
		if n := g.srv.Clients(); n > 2048 {
			t.Errorf("%d clients are remembered long after they left", n)
		}
		g.stop(t)
	})
}

func TestServerBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := serve(t, &tunnel.Server{Limits: tunnel.Limits{FirstByteTimeout: none}, Budget: &tunnel.Budget{Limit: 2}})
		one, first := g.dial("198.51.100.1:1")
		two, second := g.dial("198.51.100.2:1")
		synctest.Wait()
		start := time.Now()
		for range 10 {
			three, third := g.dial("198.51.100.3:1")
			wantEnd(t, three)
			synctest.Wait()
			if third.ending() != "aborted" {
				t.Errorf("beyond the limit: connection is %s, want aborted", third.ending())
			}
		}
		if d := time.Since(start); d != 0 {
			t.Errorf("refusing took %v, want no time", d)
		}
		wantAlive(t, "first", first)
		wantAlive(t, "second", second)
		_ = one.Close()
		synctest.Wait()
		time.Sleep(time.Hour) // the accept that waits was begun when there was no room
		four, fourth := g.dial("198.51.100.4:1")
		synctest.Wait()
		wantAlive(t, "after one has left", fourth)
		_ = two.Close()
		_ = four.Close()
		synctest.Wait()
		want := []tunnel.Reason{tunnel.NoHello, tunnel.NoHello, tunnel.NoHello}
		for range 10 {
			want = append(want, overload)
		}
		g.wantReasons(t, want...)
		g.stop(t)
	})
}

func TestBudget(t *testing.T) {
	var unlimited *tunnel.Budget
	if !unlimited.Take(1<<40) || !unlimited.Accept() || unlimited.Used() != 0 {
		t.Error("a nil budget has a limit")
	}
	unlimited.Give(1)
	b := &tunnel.Budget{Limit: 100}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				if b.Take(2) {
					b.Give(2)
				}
			}
		})
	}
	wg.Wait()
	if b.Used() != 0 {
		t.Errorf("%d used after all was given back", b.Used())
	}
	taken := 0
	for b.Take(1) {
		taken++
	}
	accepted := 0
	for b.Accept() {
		accepted++
	}
	if taken == 0 || accepted == 0 || taken+accepted != 100 || b.Used() != 100 {
		t.Errorf("%d taken and %d accepted of 100, %d used", taken, accepted, b.Used())
	}
}

// TestServerCounts runs many connections of every fate at once and looks at
// the accounts afterwards: each has one outcome, and all is given back.
func TestServerCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told eavesdropper // stands for the Router's
		srv := &tunnel.Server{Limits: unmetered}
		srv.Handler = tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
			told.observe(&tunnel.Outcome{Reason: tunnel.Done})
			if req.ALPN[0] == "no" {
				req.Refuse(io.EOF)
				return
			}
			acceptAndClose(ctx, req)
		})
		g := serve(t, srv, &lineProtocol{name: "a", magic: "AAA"}, &lineProtocol{name: "panic", magic: "!", serve: func(context.Context, *tunnel.Conn, tunnel.Handler) error { panic("!") }}, &lineProtocol{name: "n", magic: "n"})
		sends := []string{"", "A", "AAA", "AAA ok\n", "no\n", "xyz", "!"}
		const each = 30
		for i := range each * len(sends) {
			client, _ := g.dial(fmt.Sprintf("198.51.100.%d:1", i%250))
			go func() {
				_, _ = io.WriteString(client, sends[i%len(sends)])
				if i%3 > 0 {
					_ = client.Close()
					return
				}
				_, _ = io.Copy(io.Discard, client)
			}()
		}
		time.Sleep(time.Minute)
		counts := map[tunnel.Reason]int{}
		for _, r := range g.told.reasons() {
			counts[r]++
		}
		for _, r := range told.reasons() {
			counts["requests"]++
			_ = r
		}
		sum := 0
		for _, n := range counts {
			sum += n
		}
		if sum != each*len(sends) || counts["requests"] != 2*each || counts[tunnel.BadPreamble] != each || counts[tunnel.Internal] != each {
			t.Errorf("outcomes %v, want %d of each of %d kinds", counts, each, len(sends))
		}
		g.stop(t)
	})
}

// The client that has most pending makes room, however old others' are.
func TestServerHalfOpenEvictsTheClientWithMost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := serve(t, &tunnel.Server{Limits: tunnel.Limits{MaxPendingConnections: 5}})
		var clients []net.Conn
		dial := func(from string) *fakeConn {
			client, accepted := g.dial(from)
			clients = append(clients, client)
			synctest.Wait()
			return accepted
		}
		old := dial("198.51.100.1:1")
		var most []*fakeConn
		for range 8 {
			most = append(most, dial("198.51.100.7:1"))
		}
		other := dial("198.51.100.2:1")
		for i, c := range most {
			if want := i >= 5; (c.ending() == "open") != want {
				t.Errorf("connection %d of the client with most is %s", i, c.ending())
			}
		}
		wantAlive(t, "older than all", old)
		wantAlive(t, "the newcomer", other)
		for _, o := range g.told.all() {
			if o.Reason != overload || !strings.Contains(o.Err.Error(), "limits.maxPendingConnections") {
				t.Errorf("outcome %s, %v, want overload and the setting", o.Reason, o.Err)
			}
		}
		for _, c := range clients {
			_ = c.Close()
		}
		synctest.Wait()
		g.stop(t)
	})
}
