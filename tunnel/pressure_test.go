package tunnel_test

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

func TestRouterRefusesWhileMemoryIsShort(t *testing.T) {
	for _, p := range []tunnel.Pressure{tunnel.Calm, tunnel.Short, tunnel.Full, tunnel.Calm} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, routeTo("192.0.2.1:80"))
			defer b.stop()
			b.Budget.SetPressure(p)
			a := &asker{}
			b.ServeTunnel(t.Context(), a.request())
			want := 1
			if p != tunnel.Calm {
				want = 0
			}
			if accepted, refused := a.answers(); accepted != want || refused != 1-want {
				t.Errorf("memory is %v: %d accepted, %d refused", p, accepted, refused)
			}
			if want == 0 {
				if o := b.last(t); o.Reason != tunnel.Overload {
					t.Errorf("memory is %v: the reason is %q, want overload", p, o.Reason)
				}
				if calls := b.dialer.calls(); len(calls) != 0 {
					t.Errorf("memory is %v: dialed %q, want nobody", p, calls)
				}
			}
			_ = a.client.Close()
		})
	}
}

// What has begun gets two seconds in all, and what has them behind it goes at
// once.
func TestServerHurriesWhileMemoryIsShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		budget := &tunnel.Budget{Limit: 100}
		g := serve(t, &tunnel.Server{Limits: tunnel.Limits{FirstByteTimeout: none}, Budget: budget})
		old, first := g.dial("198.51.100.1:1")
		time.Sleep(4 * time.Second)
		said, second := g.dial("198.51.100.2:1")
		_, _ = io.WriteString(said, "half a li")
		time.Sleep(time.Second)
		synctest.Wait()
		wantAlive(t, "silent for 5 s while there is memory", first)
		wantAlive(t, "under way for 1 s", second)
		budget.SetPressure(tunnel.Short)
		time.Sleep(200 * time.Millisecond)
		synctest.Wait()
		if first.ending() == "open" {
			t.Error("silent for 5 s while memory is short: still there")
		}
		wantAlive(t, "under way for 1.2 s while memory is short", second)
		time.Sleep(time.Second)
		synctest.Wait()
		if second.ending() == "open" {
			t.Error("under way for 2.2 s while memory is short: still there")
		}
		_, _ = old.Close(), said.Close()
		g.stop(t)
		g.wantReasons(t, tunnel.HelloTimeout, tunnel.HelloTimeout)
	})
}

// A slow client has the time that is configured while memory is short for what another
// client holds.
func TestOneClientDoesNotHurryOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, routeTo("192.0.2.1:80"))
		var all []*asker
		for range 100 {
			a := &asker{}
			all = append(all, a)
			req := a.request()
			req.Peer, req.Source = tunnel.Peer{}, netip.MustParseAddrPort("198.51.100.1:1")
			b.ServeTunnel(t.Context(), req)
		}
		g := serve(t, &tunnel.Server{Limits: tunnel.Limits{FirstByteTimeout: 5 * time.Second}, Budget: b.Budget})
		b.Budget.SetPressure(tunnel.Short)
		theirs, most := g.dial("198.51.100.1:1")
		ours, other := g.dial("198.51.100.2:1")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if most.ending() == "open" {
			t.Error("the client that holds the memory: still there after 3 s")
		}
		wantAlive(t, "another client after 3 s", other)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if other.ending() == "open" {
			t.Error("another client: still there after 6 s, want 5")
		}
		_, _ = theirs.Close(), ours.Close()
		for _, a := range all {
			_ = a.client.Close()
		}
		b.dialer.closeAll()
		synctest.Wait()
		g.stop(t)
		b.stop()
	})
}

func TestServerAcceptsNobodyWhileMemoryIsFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		budget := &tunnel.Budget{Limit: 100}
		g := serve(t, &tunnel.Server{Limits: tunnel.Limits{FirstByteTimeout: none}, Budget: budget})
		synctest.Wait()
		budget.SetPressure(tunnel.Full)
		one, first := g.dial("198.51.100.1:1") // it was being waited for
		synctest.Wait()
		calls := g.ln.calls.Load()
		time.Sleep(time.Minute)
		if n := g.ln.calls.Load(); n != calls {
			t.Errorf("%d more calls of Accept in a minute, want none", n-calls)
		}
		if n := budget.Used(); n != 1 && n != 0 {
			t.Errorf("%d descriptors are taken while nobody is let in", n)
		}
		budget.SetPressure(tunnel.Short)
		begin := time.Now()
		two, second := g.dial("198.51.100.2:1")
		synctest.Wait()
		if d := time.Since(begin); d > time.Second {
			t.Errorf("let in after %v, want a second at most", d)
		}
		wantAlive(t, "after it was full", second)
		_, _ = one.Close(), two.Close()
		_ = first
		synctest.Wait()
		g.stop(t)
	})
}

func TestPressureOfNobody(t *testing.T) {
	var b *tunnel.Budget
	b.SetPressure(tunnel.Full)
	b.AddBuffered(1)
	if b.Pressure() != tunnel.Calm || b.Buffered() != 0 {
		t.Errorf("a nil Budget is %v and holds %d bytes", b.Pressure(), b.Buffered())
	}
}

// Whoever watches the memory hears of a crowd once, and when it is one by
// what is taken, not by who came and went.
func TestCrowd(t *testing.T) {
	b := &tunnel.Budget{Limit: 1000}
	heard := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	b.Take(7) // before anybody asked
	crowd := b.NotifyAt(10)
	for range 100 {
		b.Take(9)
		b.Give(9)
	}
	if heard(crowd) {
		t.Error("9 at once are no crowd of 10")
	}
	b.Take(9)
	b.Accept()
	if !heard(crowd) {
		t.Error("10 are, and nothing was heard")
	}
	for range 100 {
		b.Accept()
	}
	if heard(crowd) {
		t.Error("heard twice of the same")
	}
	b.NotifyAt(5)
	b.Take(5)
	if crowd = b.NotifyAt(5); heard(crowd) {
		t.Error("heard of what had been asked before")
	}
	if b.Take(1000) || heard(crowd) {
		t.Error("what is refused is not taken")
	}
}

// While memory is short because of one client, others may still have tunnels,
// and not that one; where no client has most, nobody may.
func TestShortMemoryIsHeldAgainstTheClientThatHasMost(t *testing.T) {
	ask := func(b *bench, from string, principals bool) (ok bool, a *asker) {
		a = &asker{}
		req := a.request()
		req.Peer = tunnel.Peer{}
		if principals { // all from one address
			req.Peer = tunnel.Peer{ID: from, Method: "mtls"}
		} else {
			req.Source = netip.MustParseAddrPort(from)
		}
		b.ServeTunnel(t.Context(), req)
		accepted, _ := a.answers()
		return accepted == 1, a
	}
	for _, tt := range []struct {
		name       string
		clients    int  // that hold as many each
		newcomers  int  // tunnels that the next client gets, 100 at most
		principals bool // they are principals, and not addresses
	}{
		{"one", 1, 400 / 8, false}, {"two", 2, 200 / 8, false}, {"many", 40, 0, false},
		{"one principal", 1, 400 / 8, true}, {"two principals", 2, 200 / 8, true}, {"many principals", 40, 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, routeTo("192.0.2.1:80"))
				var all []*asker
				defer func() {
					for _, a := range all {
						_ = a.client.Close()
					}
					b.stop()
				}()
				for i := range 400 {
					ok, a := ask(b, fmt.Sprintf("198.51.100.%d:1", i%tt.clients), tt.principals)
					if all = append(all, a); !ok {
						t.Fatal("refused while there is memory")
					}
				}
				b.Budget.SetPressure(tunnel.Short)
				got := 0
				for range 100 {
					ok, a := ask(b, "203.0.113.1:1", tt.principals)
					if all = append(all, a); !ok {
						break
					}
					got++
				}
				if got < tt.newcomers*9/10 || got > tt.newcomers {
					t.Errorf("a newcomer gets %d tunnels, want %d", got, tt.newcomers)
				}
				ok, a := ask(b, "198.51.100.0:1", tt.principals)
				if all = append(all, a); ok {
					t.Error("the client that has most gets more")
				}
				b.Budget.SetPressure(tunnel.Full)
				ok, a = ask(b, "203.0.113.2:1", tt.principals) // while tunnels of the largest are ended
				if all = append(all, a); ok != (tt.newcomers > 0) {
					t.Errorf("a newcomer gets one while memory is full: %v", ok)
				}
				ok, a = ask(b, "198.51.100.0:1", tt.principals)
				if all = append(all, a); ok {
					t.Error("the client that has most gets more while memory is full")
				}
			})
		})
	}
}

// Pending connections hold memory too: while it is short there are fewer, and
// those of the client with most go.
func TestFewerPendingWhileMemoryIsShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		budget := &tunnel.Budget{Limit: 1000}
		g := serve(t, &tunnel.Server{Limits: tunnel.Limits{MaxPendingConnections: 80}, Budget: budget})
		var clients []net.Conn
		dial := func(from string) *fakeConn {
			client, accepted := g.dial(from)
			clients = append(clients, client)
			synctest.Wait()
			return accepted
		}
		honest := dial("198.51.100.1:1")
		for range 79 {
			dial("198.51.100.2:1")
		}
		budget.SetPressure(tunnel.Short)
		time.Sleep(200 * time.Millisecond)
		synctest.Wait()
		if _, pending, _ := g.srv.Account(); pending != 10 {
			t.Errorf("%d pending connections while memory is short, want an eighth of 80", pending)
		}
		wantAlive(t, "of another client", honest)
		for _, c := range clients {
			_ = c.Close()
		}
		synctest.Wait()
		g.stop(t)
	})
}
