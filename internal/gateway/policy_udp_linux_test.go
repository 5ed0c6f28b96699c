package gateway

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/policy"
	"culvert.dev/registry"
)

// Policies hold for datagrams: a range of addresses is let in and others are not, a rule by
// identity lets nobody in unless it is left to the service, and a standing session ends
// when a change denies it.
func TestPoliciesOfUDP(t *testing.T) {
	t.Parallel()
	e := newEdge(t)
	services := []*registry.Service{told("a.test", udpEcho(t, "a"))}
	strict, deferring := e.udpPort(e.port(), "a.test"), e.udpPort(e.port(), "a.test")
	deferring.Settings.DeferIdentity = true
	set := func(policies ...*policy.Policy) {
		t.Helper()
		e.say(registry.Snapshot{Services: services, Listeners: []*registry.Listener{strict, deferring}, Policies: policies})
	}
	from := func(address string, l *registry.Listener) net.Conn {
		t.Helper()
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(address)}, net.UDPAddrFromAddrPort(netip.AddrPortFrom(l.Address, l.Port)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	friend := policy.Source{CIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.2/32")}}
	allow := func(sources ...policy.Source) *policy.Policy {
		return &policy.Policy{Name: "a", Rules: []policy.Rule{{Sources: &sources}}}
	}

	set(allow(friend))
	stands := from("127.0.0.2", strict)
	if got := query(stands, soon); got != "a?" {
		t.Fatalf("the range that is let in: got %s", got)
	}
	if got := query(from("127.0.0.3", strict), time.Second); got != "silence" {
		t.Errorf("another address: got %s", got)
	}
	e.logs("proto=udp", "reason=denied", "source=127.0.0.3:")

	friend.Users = []string{"alice"}
	set(allow(friend))
	e.logs("proto=udp", "reason=revoked", "source=127.0.0.2:")
	testnet.Eventually(t, soon, func() bool { return e.relay.Open() == 0 }, "the session has ended")
	if got := query(stands, time.Second); got != "silence" {
		t.Errorf("a rule by identity: got %s", got)
	}
	if got := query(from("127.0.0.2", deferring), soon); got != "a?" {
		t.Errorf("a rule by identity that is left to the service: got %s", got)
	}
	if got := query(from("127.0.0.3", deferring), time.Second); got != "silence" {
		t.Errorf("another address, where identity is left to the service: got %s", got)
	}
}
