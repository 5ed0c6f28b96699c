package tunnel_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// A caller asks a Router, in many ways.
type caller struct {
	bench *bench
	all   []*asker
}

func (c *caller) ask(t *testing.T, id, from string) error {
	t.Helper()
	a := &asker{}
	req := a.request()
	req.Source = netip.MustParseAddrPort(from)
	if req.Peer = (tunnel.Peer{}); id != "" {
		req.Peer = tunnel.Peer{ID: id, Method: "mtls"}
	}
	c.bench.ServeTunnel(t.Context(), req)
	if len(a.refused) > 0 {
		return a.refused[0]
	}
	c.all = append(c.all, a)
	return nil
}

func (c *caller) stop() {
	for _, a := range c.all {
		_ = a.client.Close()
	}
	c.bench.stop()
}

// TestTunnelsCountForTheirPrincipal has one principal ask from many addresses, and many
// from one address: each has its own share, and its address has another.
func TestTunnelsCountForTheirPrincipal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{bench: newBench(t, routeTo("192.0.2.1:80"))}
		defer c.stop()
		c.bench.Limits = tunnel.Limits{MaxConnectionsPerPrincipal: 3, MaxConnectionsPerClient: 2}
		want := func(err error, text string) {
			t.Helper()
			if text == "" && err != nil || text != "" && (tunnel.ReasonOf(err) != tunnel.Overload || !strings.Contains(err.Error(), text)) {
				t.Errorf("got %v, want %q", err, text)
			}
		}
		for i := range 3 {
			want(c.ask(t, "alice", fmt.Sprintf("198.51.100.%d:1", i)), "")
		}
		want(c.ask(t, "alice", "198.51.100.9:1"), "limits.maxConnectionsPerPrincipal: alice has 3 tunnels open, the limit is 3")
		for i := range 20 { // a cluster behind one address
			want(c.ask(t, fmt.Sprintf("agent-%d", i), "203.0.113.1:1"), "")
		}
		for range 2 {
			want(c.ask(t, "", "203.0.113.1:1"), "")
		}
		want(c.ask(t, "", "203.0.113.1:1"), "limits.maxConnectionsPerClient: 203.0.113.1 has 2 tunnels open, the limit is 2")
		want(c.ask(t, "agent-0", "203.0.113.1:1"), "")

		if address, principal := c.bench.Budget.Clients().MostTunnels(); address != 2 || principal != 3 {
			t.Errorf("most tunnels: %d of an address and %d of a principal, want 2 and 3", address, principal)
		}
		most := c.bench.Budget.Clients().Most(2)
		if len(most) != 2 || most[0] != (tunnel.ClientUse{Name: "alice", Principal: true, Tunnels: 3}) || most[1] != (tunnel.ClientUse{Name: "203.0.113.1", Tunnels: 2}) {
			t.Errorf("those that hold most: %+v", most)
		}
		c.bench.dialer.closeAll()
		for _, a := range c.all {
			_ = a.client.Close()
		}
		synctest.Wait()
		if err := c.bench.Budget.Clients().Idle(); err != nil {
			t.Error(err)
		}
		if most := c.bench.Budget.Clients().Most(2); len(most) != 0 {
			t.Errorf("when all is over: %+v hold something", most)
		}
	})
}

func TestRateOfPrincipals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{bench: newBench(t, routeTo("192.0.2.1:80"))}
		defer c.stop()
		c.bench.Limits = tunnel.Limits{ConnectionRatePerPrincipal: 2, ConnectionRatePerClient: 1}
		for _, id := range []string{"alice", "bob", "alice", "bob"} {
			if err := c.ask(t, id, "203.0.113.1:1"); err != nil {
				t.Errorf("%s: %v", id, err)
			}
		}
		const text = "limits.connectionRatePerPrincipal: bob opened more than 2 tunnels in a second"
		if err := c.ask(t, "bob", "203.0.113.2:1"); err == nil || err.Error() != text {
			t.Errorf("got %v, want %s", err, text)
		}
		// A stream without an identity counts for its address.
		if err := c.ask(t, "", "203.0.113.1:1"); err != nil {
			t.Error(err)
		}
		if err := c.ask(t, "", "203.0.113.1:1"); err == nil || !strings.Contains(err.Error(), "limits.connectionRatePerClient: 203.0.113.1 opened more than 1 tunnels") {
			t.Errorf("got %v, want the rate of its address", err)
		}
		time.Sleep(time.Second)
		if err := c.ask(t, "bob", "203.0.113.1:1"); err != nil {
			t.Errorf("a second later: %v", err)
		}
	})
}

// TestScarceDescriptorsAreSharedAmongPrincipals has one principal take all that it gets, as
// 10,000 streams of a connection would: another one at the same address still finds its
// share, and so does the address itself.
func TestScarceDescriptorsAreSharedAmongPrincipals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{bench: newBench(t, routeTo("192.0.2.1:80"))}
		defer c.stop()
		n := 0
		for ; n < 10_000 && c.ask(t, "greedy", "203.0.113.1:1") == nil; n++ {
		}
		if n < 700 || n > 960 { // of 968 that are not kept back
			t.Errorf("one principal alone has %d of 1,000 descriptors, want six sevenths", n)
		}
		for _, id := range []string{"alice", "bob", ""} {
			for i := range 5 {
				if err := c.ask(t, id, "203.0.113.1:1"); err != nil {
					t.Fatalf("tunnel %d of %q: %v", i, id, err)
				}
			}
		}
		if err := c.ask(t, "greedy", "203.0.113.99:1"); err == nil || !strings.Contains(err.Error(), "greedy holds") {
			t.Errorf("from another address the greedy one has more: %v", err)
		}
	})
}
