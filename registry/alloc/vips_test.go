package alloc

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

var (
	smallRanges = prefixes("10.9.0.0/28", "fd12:3456:789a::/124") // 14 and 15
)

func prefixes(texts ...string) []netip.Prefix {
	list := make([]netip.Prefix, len(texts))
	for i, s := range texts {
		list[i] = netip.MustParsePrefix(s)
	}
	return list
}

func vipRequest(keys ...string) registry.VIPRequest {
	return registry.VIPRequest{Service: keys[0], Keys: keys}
}

func vipRequests(n int) []registry.VIPRequest {
	list := make([]registry.VIPRequest, n)
	for i := range list {
		list[i] = vipRequest(fmt.Sprintf("s%d.example.com", i))
	}
	return list
}

// vipsOf returns what stands for a service, "V4 V6".
func vipsOf(all []VIP, service string) string {
	for _, v := range AssignedVIPs(all) {
		if v.Key == service {
			return fmt.Sprint(v.V4, " ", v.V6)
		}
	}
	return ""
}

// The addresses of a fresh start hang on nothing but the names, and on the name
// of the cluster.
func TestFreshVIPsAreTheSameEverywhere(t *testing.T) {
	p := VIPPlan{Ranges: registry.DefaultVIPRanges("west"), Now: noon}
	wishes := vipRequests(500)
	first, failed := p.Assign(wishes, nil)
	if len(first) != 1000 || failed != nil {
		t.Fatalf("%d assignments, failures %v", len(first), failed)
	}
	for range 5 {
		rand.Shuffle(len(wishes), func(i, j int) { wishes[i], wishes[j] = wishes[j], wishes[i] })
		slices.Reverse(p.Ranges)
		if again, _ := p.Assign(wishes, nil); !slices.Equal(first, again) {
			t.Fatalf("in another order: got %v, want %v", again, first)
		}
	}
	// These are promises: who has lost its state comes close to it.
	for service, want := range map[string]string{
		"s0.example.com": "253.155.31.198 fd6a:e1f0:dcf1:0:63f:eebf:459d:44c6",
		"s1.example.com": "243.162.135.255 fd6a:e1f0:dcf1:0:e12:9b21:14f:20a7",
	} {
		if got := vipsOf(first, service); got != want {
			t.Errorf("%s has %s, want %s", service, got, want)
		}
	}
	// Who comes alone has what it has among others, but for collisions.
	alone, _ := p.Assign(vipRequests(1), nil)
	if got, want := vipsOf(alone, "s0.example.com"), vipsOf(first, "s0.example.com"); got != want {
		t.Errorf("alone: got %s, want %s", got, want)
	}
}

// A service keeps its addresses while others come and go, gets them back when it
// returns, and nobody else gets them for as long as they are kept.
func TestAssignKeepsAddresses(t *testing.T) {
	p := VIPPlan{Ranges: prefixes("10.9.0.0/30"), Now: noon, ReuseAfter: time.Hour} // two addresses
	a, b, c := vipRequest("a"), vipRequest("b"), vipRequest("c")
	all, failed := p.Assign([]registry.VIPRequest{a, b}, nil)
	if failed != nil {
		t.Fatal(failed)
	}
	hadA, hadB := vipsOf(all, "a"), vipsOf(all, "b")
	p.Now = noon.Add(time.Minute)
	all, failed = p.Assign([]registry.VIPRequest{b, c}, all)
	want := "no address is free in 10.9.0.0/30: 1 of 2 are other services', 1 are kept for services that are gone, the first until 2026-03-01T13:01:00Z"
	var full *Exhausted
	if len(failed) != 1 || failed[0].Service != "c" || failed[0].Family != "IPv4" || failed[0].Err.Error() != want || !errors.As(failed[0].Err, &full) {
		t.Errorf("got %+v\nwant %q", failed, want)
	}
	if got := vipsOf(all, "b"); got != hadB {
		t.Errorf("b moved from %s to %s", hadB, got)
	}
	if back, _ := p.Assign([]registry.VIPRequest{a, b}, all); vipsOf(back, "a") != hadA {
		t.Errorf("a came back to %s, want %s", vipsOf(back, "a"), hadA)
	}
	p.Now = noon.Add(time.Minute + time.Hour)
	if all, failed = p.Assign([]registry.VIPRequest{b, c}, all); failed != nil || vipsOf(all, "c") != hadA {
		t.Errorf("c has %s, %v, want a's %s, which is nobody's by now", vipsOf(all, "c"), failed, hadA)
	}
}

// A service that is known by another name, too, or by another one of its names,
// is the same.
func TestAssignKnowsServicesByAnyKey(t *testing.T) {
	p := VIPPlan{Ranges: smallRanges, Now: noon}
	all, _ := p.Assign([]registry.VIPRequest{vipRequest("db.example.com"), vipRequest("x")}, nil)
	want := vipsOf(all, "db.example.com")
	for _, keys := range [][]string{{"west/default/db", "db.example.com"}, {"db.test", "db.example.com", "x.test"}} {
		next, _ := p.Assign([]registry.VIPRequest{vipRequest(keys...), vipRequest("x")}, all)
		if got := vipsOf(next, "db.example.com"); got != want || len(next) != 4 {
			t.Errorf("%q: %s of %v, want %s", keys, got, next, want)
		}
	}
	// What stands goes before what is kept.
	next, _ := p.Assign([]registry.VIPRequest{vipRequest("db.test"), vipRequest("x")}, all)
	next, _ = p.Assign([]registry.VIPRequest{vipRequest("db.example.com", "db.test"), vipRequest("x")}, next)
	if vipsOf(next, "db.test") == "" || vipsOf(next, "db.example.com") != "" {
		t.Errorf("the kept one goes first: %v", next)
	}
	// And what is kept before what is new.
	next, _ = p.Assign([]registry.VIPRequest{vipRequest("x")}, all)
	next, _ = p.Assign([]registry.VIPRequest{vipRequest("new", "db.example.com"), vipRequest("x")}, next)
	if got := vipsOf(next, "db.example.com"); got != want {
		t.Errorf("came back as %v, want %s", next, want)
	}
}

func TestAssignLeavesOutWhatMeansSomething(t *testing.T) {
	p := VIPPlan{Ranges: smallRanges, Now: noon}
	all, failed := p.Assign(vipRequests(20), nil)
	for _, a := range all {
		if s := a.Address.String(); s == "10.9.0.0" || s == "10.9.0.15" || s == "fd12:3456:789a::" || !smallRanges[0].Contains(a.Address) && !smallRanges[1].Contains(a.Address) {
			t.Errorf("%s has %s", a.Service, s)
		}
	}
	if len(all) != 14+15 || len(failed) != 6+5 {
		t.Errorf("%d assignments, %d failures, want 29 and 11", len(all), len(failed))
	}
	// A metadata service in the middle of a range, and broadcast at its end.
	for _, text := range []string{"100.100.100.192/28", "fd00:ec2::200/119", "255.255.255.240/28"} {
		p.Ranges = prefixes(text)
		all, _ := p.Assign(vipRequests(2000), nil)
		for _, a := range all {
			if why, bad := tunnel.Forbidden(a.Address); bad {
				t.Errorf("%s: %s is given to %s: %s", text, a.Address, a.Service, why)
			}
		}
		if len(all) < 13 {
			t.Errorf("%s: only %d assignments", text, len(all))
		}
	}
}

// What others have is given to nobody, and who has it moves: others of its
// family, and its own other address, stay.
func TestAssignGivesWayToOthers(t *testing.T) {
	p := VIPPlan{Ranges: smallRanges, Now: noon}
	all, _ := p.Assign(vipRequests(5), nil)
	v4, v6, _ := strings.Cut(vipsOf(all, "s0.example.com"), " ")
	p.Taken = prefixes(v4+"/32", "10.9.0.0/31", "192.0.2.0/24", "fd12:3456:789b::/48")
	next, failed := p.Assign(vipRequests(5), all)
	now4, now6, _ := strings.Cut(vipsOf(next, "s0.example.com"), " ")
	if failed != nil || now4 == v4 || now6 != v6 {
		t.Errorf("s0 has %s and %s, %v, and had %s and %s, of which the first is another's", now4, now6, failed, v4, v6)
	}
	for _, a := range all {
		others := slices.ContainsFunc(p.Taken, func(p netip.Prefix) bool { return p.Contains(a.Address) })
		if slices.Contains(next, a) == others {
			t.Errorf("%s has %s still: %v; it is another's: %v", a.Service, a.Address, !others, others)
		}
	}
	// All of a range, as a network of more says.
	p.Taken = prefixes("10.0.0.0/8")
	next, failed = p.Assign(vipRequests(5), all)
	if len(next) != 5 || len(failed) != 5 || failed[0].Err.Error() != "no address is free in 10.9.0.0/28: 0 of 14 are other services', 14 are taken by others" {
		t.Errorf("got %v, %v", next, failed)
	}
}

func TestVIPsMoveIntoOtherRanges(t *testing.T) {
	p := VIPPlan{Ranges: smallRanges, Now: noon}
	all, _ := p.Assign(vipRequests(3), nil)
	p.Ranges = prefixes("10.9.1.0/28", "fd12:3456:789a::/124")
	next, failed := p.Assign(vipRequests(2), all)
	for _, a := range next {
		if !p.Ranges[0].Contains(a.Address) && !slices.Contains(all, a) && a.Gone.IsZero() {
			t.Errorf("%+v was not there before", a)
		}
	}
	if len(next) != 5 || failed != nil { // two of IPv4, and three of IPv6, one of them kept
		t.Errorf("got %v, %v", next, failed)
	}
	p.Ranges = p.Ranges[:1]
	if next, _ = p.Assign(vipRequests(2), next); len(next) != 2 {
		t.Errorf("without IPv6: %v", next)
	}
}

// Whatever comes, goes and is taken: no two services share an address, what
// stays keeps its own, what is kept is nobody else's, nobody has what is taken,
// a service fails only where there is none, and neither a second look nor the
// way over the disk changes anything.
func TestVIPsByChance(t *testing.T) {
	state := VIPFile(t.TempDir() + "/vips.json")
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 3))
		p := VIPPlan{Ranges: prefixes(fmt.Sprintf("10.9.0.0/%d", 26+r.IntN(4)), fmt.Sprintf("fd00:1:2:3::/%d", 120+r.IntN(6))), Now: noon, ReuseAfter: time.Hour}
		var all []VIP
		for round := range 40 {
			p.Now = p.Now.Add(time.Duration(r.IntN(40)) * time.Minute)
			p.Taken = nil
			for range r.IntN(4) {
				a := netip.AddrFrom4([4]byte{10, 9, 0, byte(r.IntN(64))})
				if r.IntN(2) == 0 {
					b := [16]byte{0xfd, 0, 0, 1, 0, 2, 0, 3}
					b[15] = byte(r.IntN(256))
					a = netip.AddrFrom16(b)
				}
				p.Taken = append(p.Taken, netip.PrefixFrom(a, a.BitLen()-r.IntN(3)).Masked())
			}
			var wishes []registry.VIPRequest
			for _, w := range vipRequests(30) {
				if r.IntN(3) > 0 {
					wishes = append(wishes, w)
				}
			}
			next, failed := p.Assign(wishes, all)
			checkVIPs(t, &p, wishes, all, next, failed)
			if again, _ := p.Assign(wishes, next); !slices.Equal(next, again) {
				t.Errorf("a second look changes\n%v to\n%v", next, again)
			}
			if round%10 == 9 {
				if err := state.Save(next); err != nil {
					t.Fatal(err)
				}
				if loaded, err := state.Load(); err != nil || !slices.Equal(loaded, next) {
					t.Errorf("over the disk: %v, %v, want %v", loaded, err, next)
				}
			}
			if t.Failed() {
				t.Fatalf("seed %d, round %d", seed, round)
			}
			all = next
		}
	}
}

func checkVIPs(t *testing.T, p *VIPPlan, wishes []registry.VIPRequest, before, after []VIP, failed []VIPFailure) {
	t.Helper()
	taken := func(a netip.Addr) bool {
		return slices.ContainsFunc(p.Taken, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	type has struct{ service, family string }
	owner, of := map[netip.Addr]VIP{}, map[has]VIP{}
	for _, a := range after {
		if other, ok := owner[a.Address]; ok {
			t.Errorf("%s and %s share %s", a.Service, other.Service, a.Address)
		}
		if taken(a.Address) {
			t.Errorf("%s has %s, which is another's", a.Service, a.Address)
		}
		if a.Gone.IsZero() != slices.ContainsFunc(wishes, func(w registry.VIPRequest) bool { return w.Service == a.Service }) {
			t.Errorf("%+v is there or gone, and should not be", a)
		}
		owner[a.Address], of[has{a.Service, Family(a.Address)}] = a, a
	}
	for _, a := range before {
		kept := a.Gone.IsZero() || isHeld(a.Gone, p.Now, p.ReuseAfter)
		if now := owner[a.Address]; kept && !taken(a.Address) && now.Service != a.Service {
			t.Errorf("%s was %s's, gone %v, and is %s's", a.Address, a.Service, a.Gone, now.Service)
		}
	}
	for _, w := range wishes {
		for _, fam := range []string{"IPv4", "IPv6"} {
			_, ok := of[has{w.Service, fam}]
			if ok == slices.ContainsFunc(failed, func(f VIPFailure) bool { return f.Service == w.Service && f.Family == fam }) {
				t.Errorf("%s has an %s address: %v, and failures are %v", w.Service, fam, ok, failed)
			}
		}
	}
	for _, f := range failed {
		r := p.Ranges[0]
		last := netip.AddrFrom4([4]byte{10, 9, 0, 1<<(32-r.Bits()) - 1})
		if f.Family == "IPv6" {
			r, last = p.Ranges[1], netip.Addr{}
		}
		for a := r.Addr().Next(); r.Contains(a) && a != last; a = a.Next() {
			if now, ok := owner[a]; !taken(a) && (!ok || !now.Gone.IsZero() && !isHeld(now.Gone, p.Now, p.ReuseAfter)) {
				t.Errorf("%s has no %s address, and %s is free", f.Service, f.Family, a)
			}
		}
	}
}

// Services that come and go for years leave a state of no more than so many
// that are gone; the last of them, and those that come back, have their own.
func TestAssignForgets(t *testing.T) {
	p := VIPPlan{Ranges: registry.DefaultVIPRanges("west"), Now: noon, ReuseAfter: time.Hour}
	var all []VIP
	at := func(i int) registry.VIPRequest { return vipRequest(fmt.Sprintf("s%d.example.com", i)) }
	for round := range 40 {
		p.Now = p.Now.Add(2 * time.Hour)
		wishes := []registry.VIPRequest{vipRequest("stays")}
		for i := range 500 {
			wishes = append(wishes, at(500*round+i))
		}
		if round == 39 {
			wishes = append(wishes, at(0))
		}
		before := all
		all, _ = p.Assign(wishes, all)
		for _, name := range []string{"stays", at(500*round - 1).Service, at(500*round - 500).Service} {
			i := slices.IndexFunc(before, func(a VIP) bool { return a.Service == name })
			if i >= 0 && !slices.ContainsFunc(all, func(a VIP) bool { return a.Service == name && a.Address == before[i].Address }) {
				t.Errorf("round %d: %s, which was there a while ago, is forgotten", round, name)
			}
		}
	}
	if n := len(all); n < maxHeldVIPs || n > maxHeldVIPs+2*(2*500+2) {
		t.Errorf("%d assignments, want about %d", n, maxHeldVIPs)
	}
	first, _ := p.Assign([]registry.VIPRequest{at(0)}, nil)
	if vipsOf(all, at(0).Service) != vipsOf(first, at(0).Service) {
		t.Errorf("who came back after all has %s, want %s", vipsOf(all, at(0).Service), vipsOf(first, at(0).Service))
	}
}

// Addresses of a range and places of a block are the same thing.
func TestBlocks(t *testing.T) {
	for text, want := range map[string]struct {
		places      uint64
		first, last string
	}{
		"240.0.0.0/4":     {1<<28 - 2, "240.0.0.1", "255.255.255.254"},
		"10.9.0.0/30":     {2, "10.9.0.1", "10.9.0.2"},
		"fd00::/126":      {3, "fd00::1", "fd00::3"},
		"fd00:0:0:1::/66": {1<<62 - 1, "fd00:0:0:1::1", "fd00::1:3fff:ffff:ffff:ffff"},
		"fd00:0:0:1::/64": {1 << 62, "fd00:0:0:1::1", "fd00:0:0:1:4000::"},
		"fd00::/48":       {1 << 62, "fd00::1", "fd00::4000:0:0:0"},
	} {
		b := newAddrBlock(netip.MustParsePrefix(text), nil)
		if b.size != want.places || b.at(0).String() != want.first || b.at(b.size-1).String() != want.last {
			t.Errorf("%s: %d places from %s to %s, want %+v", text, b.size, b.at(0), b.at(b.size-1), want)
		}
		for _, place := range []uint64{0, 1, b.size / 2, b.size - 1} {
			if got, ok := b.index(b.at(place)); got != place || !ok {
				t.Errorf("%s: place %d is %s, which is %d, %v", text, place, b.at(place), got, ok)
			}
		}
		for _, outside := range []netip.Addr{b.prefix.Addr(), b.at(b.size), netip.MustParseAddr("192.0.2.1"), {}} {
			if got, ok := b.index(outside); ok {
				t.Errorf("%s: %s has the place %d", text, outside, got)
			}
		}
	}
}

// 100,000 services, from nothing and as they stand.
func BenchmarkVIPs100k(b *testing.B) {
	p := VIPPlan{Ranges: registry.DefaultVIPRanges("west"), Now: noon}
	wishes := vipRequests(100_000)
	have, failed := p.Assign(wishes, nil)
	if failed != nil {
		b.Fatal(failed[0])
	}
	for name, have := range map[string][]VIP{"fresh": nil, "standing": have} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				p.Assign(wishes, have)
			}
		})
	}
	b.Run("save", func(b *testing.B) {
		s := VIPFile(b.TempDir() + "/vips.json")
		for b.Loop() {
			if err := s.Save(have); err != nil {
				b.Fatal(err)
			}
		}
	})
}
