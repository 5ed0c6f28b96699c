package tunnel_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A policyTable is a Rechecker whose table says which callers are denied.
type policyTable struct {
	current  atomic.Pointer[callers]
	rechecks atomic.Int32
	to       []tunnel.Endpoint
}

type callers struct {
	generation uint64
	denied     map[string]bool
}

// swap makes another table current, which denies some callers.
func (p *policyTable) swap(denied ...string) {
	next := &callers{generation: 1, denied: make(map[string]bool)}
	if old := p.current.Load(); old != nil {
		next.generation = old.generation + 1
	}
	for _, id := range denied {
		next.denied[id] = true
	}
	p.current.Store(next)
}

func (p *policyTable) decide(req *tunnel.Request) (uint64, error) {
	t := p.current.Load()
	if t.denied[req.Peer.ID] {
		return t.generation, tunnel.Refusef(tunnel.Denied, "generation %d denies %s", t.generation, req.Peer.ID)
	}
	return t.generation, nil
}

func (p *policyTable) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	generation, err := p.decide(req)
	return tunnel.Route{Service: "svc", Pattern: "*.example", Generation: generation, Endpoints: p.to}, err
}

func (p *policyTable) Generation() uint64 { return p.current.Load().generation }

func (p *policyTable) Recheck(req *tunnel.Request, route *tunnel.Route) error {
	p.rechecks.Add(1)
	if len(route.Endpoints) != 1 || route.Service != "svc" || req.Target() != "svc.example:443" {
		return errors.New("what was asked is not what was decided")
	}
	_, err := p.decide(req)
	return err
}

func TestTunnelOfAnOldTableIsCheckedAgain(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*policyTable) // while the request is under way
		want   tunnel.Reason
		asked  int32
	}{
		{"no other table", func(*policyTable) {}, tunnel.Done, 0},
		{"another table that allows it", func(p *policyTable) { p.swap("bob") }, tunnel.Done, 1},
		{"another table that denies it", func(p *policyTable) { p.swap("alice") }, tunnel.Revoked, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			table := &policyTable{to: endpoints("192.0.2.1:80")}
			table.swap()
			b := newBench(t, table)
			defer b.stop()
			a := &asker{onAccept: func() { c.change(table) }}
			b.ServeTunnel(t.Context(), a.request())
			if c.want == tunnel.Done {
				_ = a.client.Close()
				b.dialer.closeAll()
			}
			testnet.Eventually(t, patience, func() bool { return len(b.told.all()) == 1 }, "the tunnel has ended")
			if o := b.told.all()[0]; o.Reason != c.want || !o.Carried() || o.Err != nil {
				t.Errorf("ended by %s, %v, want %s", o.Reason, o.Err, c.want)
			}
			if got := table.rechecks.Load(); got != c.asked {
				t.Errorf("decided again %d times, want %d", got, c.asked)
			}
			_ = a.client.Close()
		})
	}
}

func TestSessionOfAnOldTableIsCheckedAgain(t *testing.T) {
	r := newSessionRig(t)
	table := &policyTable{to: endpoints("192.0.2.1:53")}
	table.swap()
	r.Resolver = table
	for _, denied := range []string{"bob", "alice"} {
		req := r.request()
		req.Name, req.Port, req.Peer = tunnel.MustParseName("svc.example"), 443, tunnel.Peer{ID: "alice", Method: "mtls"}
		s, err := r.Open(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		table.swap(denied)
		c := &fakeCarrier{end: func(why tunnel.Reason) { _ = s.Conn.Close(); s.End(tunnel.End{Reason: why}) }}
		s.Carry(c)
		s.Recheck()
		if got, want := fmt.Sprint(c.killed), map[string]string{"bob": "[]", "alice": "[revoked]"}[denied]; got != want {
			t.Errorf("%s is denied: the session was killed %s, want %s", denied, got, want)
		}
		if denied == "bob" {
			c.Kill(tunnel.Killed)
		}
	}
}

// TestRevokeEndsWhatIsDenied leaves what the table still allows, and asks about nothing
// that the change does not concern.
func TestRevokeEndsWhatIsDenied(t *testing.T) {
	table := &policyTable{to: endpoints("192.0.2.1:80")}
	table.swap()
	b := newBench(t, table)
	defer b.stop()
	ids := []string{"alice", "bob", "alice", "carol"}
	var clients []net.Conn
	for _, id := range ids {
		a := &asker{}
		req := a.request()
		req.Peer.ID = id
		b.ServeTunnel(t.Context(), req)
		clients = append(clients, a.client)
	}
	table.swap("alice", "carol")
	if n := b.Revoke(map[tunnel.ServiceKey]bool{{Service: "other"}: true}); n != 0 || table.rechecks.Load() != 0 {
		t.Errorf("a change of another service ended %d tunnels and asked about %d, want none", n, table.rechecks.Load())
	}
	if n := b.Revoke(map[tunnel.ServiceKey]bool{{Service: "svc"}: true}); n != 3 {
		t.Errorf("ended %d tunnels, want 3", n)
	}
	testnet.Eventually(t, patience, func() bool { return b.Relay.Open() == 1 }, "bob's tunnel is left")
	for l := range b.Relay.List() {
		if l.Peer.ID != "bob" {
			t.Errorf("the tunnel of %s stands", l.Peer.ID)
		}
	}
	for _, o := range b.told.all() {
		if o.Reason != tunnel.Revoked || o.Peer.ID == "bob" {
			t.Errorf("the tunnel of %s ended by %s, want revoked", o.Peer.ID, o.Reason)
		}
	}
	for _, c := range clients {
		_ = c.Close()
	}
}

// TestNoTunnelOutlivesItsPolicy swaps tables all the time while tunnels open, of sockets and
// of other streams. When all is quiet none stands that the last table denies, and
// every request was decided by one table as a whole.
func TestNoTunnelOutlivesItsPolicy(t *testing.T) {
	const workers, each, swaps = 4, 150, 200
	shop := newSocketShop(t)
	service := newSocketShop(t)
	table := &policyTable{to: []tunnel.Endpoint{{Addr: netip.MustParseAddrPort(service.ln.Addr().String()), Named: true}}}
	table.swap("alice")
	var told eavesdropper
	relay := &tunnel.Relay{}
	defer relay.Close()
	router := &tunnel.Router{Resolver: table, Dialer: &tunnel.NetDialer{}, Relay: relay, Observe: told.observe}

	var accepting, swapping, opening sync.WaitGroup
	var mu sync.Mutex // guards ends
	var ends []net.Conn
	keep := func(c net.Conn) {
		mu.Lock()
		defer mu.Unlock()
		ends = append(ends, c)
	}
	accepting.Go(func() {
		for {
			c, err := service.ln.Accept()
			if err != nil {
				return
			}
			keep(c)
		}
	})
	done := make(chan struct{})
	swapping.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				if i >= swaps {
					return
				}
			default:
			}
			table.swap([]string{"alice", "bob"}[i%2])
			router.Revoke(map[tunnel.ServiceKey]bool{{Service: "svc"}: true})
		}
	})
	var refused atomic.Int32
	for w := range workers {
		opening.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(w)))
			for i := range each {
				client, ours, err := shop.pair()
				if err != nil {
					t.Error(err)
					return
				}
				keep(client)
				stream := paths[(i+w)%len(paths)].wrap(ours)
				router.ServeTunnel(t.Context(), &tunnel.Request{
					Proto: "fake", Name: tunnel.MustParseName("svc.example"), Port: 443,
					Peer:   tunnel.Peer{ID: []string{"alice", "bob"}[rng.IntN(2)], Method: "mtls"},
					Accept: func() (tunnel.Stream, error) { return stream.(tunnel.Stream), nil },
					Refuse: func(err error) {
						if tunnel.ReasonOf(err) != tunnel.Denied {
							t.Errorf("refused: %v", err)
						}
						refused.Add(1)
						_ = ours.Close()
					},
				})
			}
		})
	}
	opening.Wait()
	close(done)
	swapping.Wait()
	denied := table.current.Load().denied
	standing := func() (wrong, right int) {
		for l := range relay.List() {
			if denied[l.Peer.ID] {
				wrong++
			} else {
				right++
			}
		}
		return wrong, right
	}
	testnet.Eventually(t, patience, func() bool { wrong, _ := standing(); return wrong == 0 }, "no tunnel stands that the last table denies")
	// A tunnel is off the list a moment before its end is told.
	revoked, right := 0, 0
	testnet.Eventually(t, patience, func() bool {
		_, right = standing()
		revoked = 0
		for _, o := range told.all() {
			if o.Reason == tunnel.Revoked {
				revoked++
			}
		}
		return revoked+int(refused.Load())+right == workers*each
	}, "all are revoked, refused or stand")
	if revoked == 0 {
		t.Errorf("none of %d was revoked", workers*each)
	}
	_ = service.ln.Close()
	accepting.Wait()
	for _, c := range ends {
		_ = c.Close()
	}
}
