package capture

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

func TestNames(t *testing.T) { synctest.Test(t, testNames) }

func testNames(t *testing.T) {
	var n Names
	name := func(i int) tunnel.Name {
		name, err := tunnel.ParseName(fmt.Sprintf("s%d.example", i))
		if err != nil {
			t.Fatal(err)
		}
		return name
	}
	seen := map[netip.Addr]bool{}
	for i := range maxNames {
		v4, v6 := n.Addrs(name(i))
		if seen[v4] || seen[v6] || !namesRange4.Contains(v4) || !namesRange6.Contains(v6) {
			t.Fatalf("name %d has %s and %s", i, v4, v6)
		}
		seen[v4], seen[v6] = true, true
	}
	first4, first6 := n.Addrs(name(0))
	for _, a := range []netip.Addr{first4, first6, netip.AddrFrom16(first4.As16())} {
		if got, mine := n.Name(a); got != name(0) || !mine {
			t.Errorf("%s has the name %q, %v; want %q", a, got, mine, name(0))
		}
	}
	oldest, _ := n.Addrs(name(1)) // used now, so that 2 is the oldest
	lost, _ := n.Addrs(name(2))
	if lost == oldest {
		t.Fatal("two names have one address")
	}
	_, _ = n.Addrs(name(1))
	for i := 3; i < maxNames; i++ {
		_, _ = n.Addrs(name(i))
	}
	_, _ = n.Addrs(name(0))
	_, _ = n.Addrs(name(1))
	time.Sleep(minHeld - 1)
	if v4, v6 := n.Addrs(name(maxNames)); v4.IsValid() || v6.IsValid() {
		t.Errorf("another name has %s and %s, which a program may have as that of the last one", v4, v6)
	}
	if got, _ := n.Name(lost); got != name(2) {
		t.Errorf("%s has the name %q, want %q", lost, got, name(2))
	}
	time.Sleep(minHeld - 1)
	for i := 3; i < maxNames; i++ {
		_, _ = n.Addrs(name(i))
	}
	_, _ = n.Addrs(name(0))
	_, _ = n.Addrs(name(1))
	time.Sleep(time.Nanosecond)
	newest, _ := n.Addrs(name(maxNames))
	if got, mine := n.Name(newest); got != name(maxNames) || !mine {
		t.Errorf("%s has the name %q, %v", newest, got, mine)
	}
	if got, mine := n.Name(lost); !mine || lost != newest && !got.IsZero() {
		t.Errorf("%s has the name %q, %v; it was not used for the longest time", lost, got, mine)
	}
	for _, a := range []string{"10.0.0.1", "198.20.0.0", "fd00::1", "::1"} {
		if got, mine := n.Name(netip.MustParseAddr(a)); !got.IsZero() || mine {
			t.Errorf("%s has the name %q, %v; want none", a, got, mine)
		}
	}
	req := &tunnel.Request{Addr: first6}
	if err := n.Resolve(req); err != nil || req.Name != name(0) || req.Addr.IsValid() {
		t.Errorf("resolved to %q, %s, %v", req.Name, req.Addr, err)
	}
	req = &tunnel.Request{Addr: netip.MustParseAddr("198.19.255.255")}
	if err := n.Resolve(req); tunnel.ReasonOf(err) != tunnel.NoRoute {
		t.Errorf("an address without a name: %v", err)
	}
	req = &tunnel.Request{Addr: netip.MustParseAddr("10.0.0.1")}
	if err := n.Resolve(req); err != nil || req.Addr.String() != "10.0.0.1" {
		t.Errorf("another address: %s, %v", req.Addr, err)
	}
}

// A program that has the address of a name from before a restart gets no other one.
func TestNamesKeepTheirAddresses(t *testing.T) {
	var before, after Names
	names := make([]tunnel.Name, 100)
	for i := range names {
		names[i], _ = tunnel.ParseName(fmt.Sprintf("s%d.example", i))
		_, _ = before.Addrs(names[i])
	}
	for _, name := range slices.Backward(names) {
		_, _ = after.Addrs(name)
	}
	for _, name := range names {
		was4, was6 := before.Addrs(name)
		if is4, is6 := after.Addrs(name); is4 != was4 || is6 != was6 {
			t.Errorf("%s: %s and %s before, %s and %s after", name, was4, was6, is4, is6)
		}
	}
}
