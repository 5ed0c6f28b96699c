package alloc

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/registry"
)

var (
	smallRange = registry.PortRange{First: 20000, Last: 20009}
)

func portKey(service string) PortKey { return PortKey{Protocol: "tcp", Service: service} }

func portKeysNamed(n int) []PortKey {
	keys := make([]PortKey, n)
	for i := range keys {
		keys[i] = portKey(fmt.Sprintf("s%d.example.com", i))
	}
	return keys
}

// portOf returns the port that stands for k, 0 for none.
func portOf(all []Port, k PortKey) uint16 {
	for _, a := range all {
		if a.PortKey == k && a.Gone.IsZero() {
			return a.Assigned
		}
	}
	return 0
}

// The ports of a fresh start hang on nothing but the names.
func TestFreshPortsAreTheSameEverywhere(t *testing.T) {
	p := PortPlan{Range: registry.PortRange{First: 20000, Last: 20099}, Now: noon}
	keys := portKeysNamed(60)
	first, failed := p.Assign(keys, nil)
	if len(first) != 60 || failed != nil {
		t.Fatalf("%d assignments, failures %v", len(first), failed)
	}
	for range 20 {
		rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		again, _ := p.Assign(append(keys, keys[0]), nil)
		if !slices.Equal(first, again) {
			t.Fatalf("in another order: got %v, want %v", again, first)
		}
	}
	// What the hash says is a promise: it is how a gateway that has lost its
	// state finds most ports again.
	if got := portOf(first, portKey("s0.example.com")); got != 20051 {
		t.Errorf("s0.example.com has port %d, and had 20051 in the first version", got)
	}
}

func TestSamePortForBothProtocols(t *testing.T) {
	p := PortPlan{Range: smallRange, Now: noon}
	tcp, udp := PortKey{"tcp", "dns.example.com", 53}, PortKey{"udp", "dns.example.com", 53}
	got, failed := p.Assign([]PortKey{tcp, udp}, nil)
	if len(got) != 2 || failed != nil || got[0].Assigned != got[1].Assigned {
		t.Errorf("got %v, %v, want one number for both", got, failed)
	}
}

// A service keeps its port while others come and go, gets it back when it
// returns, and nobody else gets it for as long as it is kept.
func TestAssignKeepsPorts(t *testing.T) {
	p := PortPlan{Range: registry.PortRange{First: 20000, Last: 20001}, Now: noon, ReuseAfter: time.Hour}
	a, b, c := portKey("a"), portKey("b"), portKey("c")
	all, failed := p.Assign([]PortKey{a, b}, nil)
	if failed != nil {
		t.Fatal(failed)
	}
	portA, portB := portOf(all, a), portOf(all, b)

	p.Now = noon.Add(time.Minute)
	all, failed = p.Assign([]PortKey{b, c}, all)
	if got := portOf(all, b); got != portB {
		t.Errorf("b moved from %d to %d", portB, got)
	}
	if len(failed) != 1 || failed[0].PortKey != c {
		t.Fatalf("failures %v, want c, as a's port is kept", failed)
	}
	var full *Exhausted
	want := "no tcp port is free in 20000-20001: 1 of 2 are other services', 1 are kept for services that are gone, the first until 2026-03-01T13:01:00Z"
	if !errors.As(failed[0].Err, &full) || failed[0].Err.Error() != want {
		t.Errorf("got %q\nwant %q", failed[0].Err, want)
	}

	p.Now = noon.Add(time.Minute + time.Hour - 1) // the last moment; and that it was missed again does not count
	if all, failed = p.Assign([]PortKey{b, c}, all); len(failed) != 1 {
		t.Errorf("a's port was given away after %v", p.Now.Sub(noon))
	}
	back, _ := p.Assign([]PortKey{a, b}, all)
	if got := portOf(back, a); got != portA {
		t.Errorf("a came back to %d, want %d", got, portA)
	}

	p.Now = noon.Add(time.Minute + time.Hour)
	all, failed = p.Assign([]PortKey{b, c}, all)
	if got := portOf(all, c); failed != nil || got != portA {
		t.Errorf("c has %d, %v, want a's %d, which is nobody's by now", got, failed, portA)
	}
	all, failed = p.Assign([]PortKey{a, b, c}, all)
	if len(failed) != 1 || failed[0].PortKey != a || portOf(all, c) != portA {
		t.Errorf("a took its old port from c: %v, %v", all, failed)
	}
}

// A port that never was anybody's goes before one that was, and of those that
// were the one that was left first.
func TestAssignPrefersPortsThatWereNobodys(t *testing.T) {
	p := PortPlan{Range: registry.PortRange{First: 20000, Last: 20002}, Now: noon, ReuseAfter: time.Nanosecond}
	start := int(portHash(portKey("new")) % uint64(p.Range.Len()))
	at := func(i int) uint16 { return 20000 + uint16((start+i)%3) }
	have := []Port{
		{PortKey: portKey("left late"), Assigned: at(0), Gone: noon.Add(-time.Hour)},
		{PortKey: portKey("left early"), Assigned: at(1), Gone: noon.Add(-2 * time.Hour)},
	}
	all, _ := p.Assign([]PortKey{portKey("new")}, have)
	if got := portOf(all, portKey("new")); got != at(2) {
		t.Errorf("got %d, want %d, which was nobody's", got, at(2))
	}
	all, _ = p.Assign([]PortKey{portKey("new"), portKey("newer")}, all)
	if got := portOf(all, portKey("newer")); got != at(1) {
		t.Errorf("got %d, want %d, which was left first", got, at(1))
	}
}

func TestAssignSkipsWhatIsTaken(t *testing.T) {
	p := PortPlan{Range: smallRange, Now: noon, Taken: func(protocol string, port uint16) bool { return protocol == "tcp" && port != 20004 }}
	all, failed := p.Assign([]PortKey{portKey("a"), portKey("b")}, []Port{{PortKey: portKey("old"), Assigned: 20001}})
	if got := portOf(all, portKey("a")); got != 20004 {
		t.Errorf("a has port %d, want 20004", got)
	}
	if len(failed) != 1 || !strings.Contains(failed[0].Err.Error(), "8 are taken by others, 1 are kept") {
		t.Errorf("failures: %v", failed)
	}
	// What stands is not asked about: it does not move.
	all, _ = p.Assign([]PortKey{portKey("old")}, []Port{{PortKey: portKey("old"), Assigned: 20001}})
	if got := portOf(all, portKey("old")); got != 20001 {
		t.Errorf("old moved to %d", got)
	}
}

func TestPortsMoveIntoAnotherRange(t *testing.T) {
	p := PortPlan{Range: smallRange, Now: noon}
	all, failed := p.Assign([]PortKey{portKey("a"), portKey("b")}, []Port{
		{PortKey: portKey("a"), Assigned: 19999}, {PortKey: portKey("b"), Assigned: 20003}, {PortKey: portKey("gone"), Assigned: 30000, Gone: noon},
	})
	if failed != nil || len(all) != 2 || portOf(all, portKey("b")) != 20003 || !smallRange.Contains(portOf(all, portKey("a"))) {
		t.Errorf("got %v, %v", all, failed)
	}
}

// A service that begins or ends to tell its only port is the same one.
func TestAssignKeepsThePortOfAServiceThatNamesIts(t *testing.T) {
	p := PortPlan{Range: smallRange, Now: noon}
	anyPort, one, two := PortKey{"tcp", "a", 0}, PortKey{"tcp", "a", 25}, PortKey{"tcp", "a", 587}
	all, _ := p.Assign([]PortKey{anyPort, portKey("b")}, nil)
	first := portOf(all, anyPort)
	for i, k := range []PortKey{one, anyPort, one, anyPort} {
		if all, _ = p.Assign([]PortKey{k, portKey("b")}, all); portOf(all, k) != first || len(all) != 2 {
			t.Errorf("change %d: %s has port %d of %v, want %d", i, k, portOf(all, k), all, first)
		}
	}
	// With two it can't be told which it is.
	all, _ = p.Assign([]PortKey{one, two, portKey("b")}, all)
	if portOf(all, one) == first || portOf(all, two) == first {
		t.Errorf("one of two ports has that of any: %v", all)
	}
	if all, _ := p.Assign([]PortKey{anyPort, portKey("b")}, all); portOf(all, anyPort) != first || len(all) != 4 {
		t.Errorf("any port does not have %d, which it had: %v", first, all)
	}
	// What it had before as one of two does not stand in the way.
	all, _ = p.Assign([]PortKey{two, portKey("b")}, all)
	second := portOf(all, two)
	all, _ = p.Assign([]PortKey{anyPort, portKey("b")}, all)
	if got := portOf(all, anyPort); got != second {
		t.Errorf("got %d, want %d: %v", got, second, all)
	}
	seen := map[PortKey]bool{}
	for _, a := range all {
		if seen[a.PortKey] {
			t.Errorf("%s is there twice: %v", a.PortKey, all)
		}
		seen[a.PortKey] = true
	}
}

// Whatever comes and goes: no two services share a port, what stays keeps its
// port, a port that is kept is nobody else's, a key fails only if there is no
// port, and neither a restart nor a second look changes anything.
func TestPortsByChance(t *testing.T) {
	const rounds, universe = 100, 40
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		p := PortPlan{Range: registry.PortRange{First: 20000, Last: 20000 + uint16(r.IntN(45))}, Now: noon, ReuseAfter: time.Hour}
		taken := map[uint16]bool{}
		p.Taken = func(_ string, port uint16) bool { return taken[port] }
		var all []Port
		names := portKeysNamed(universe)
		for i := range names {
			if i%4 == 3 {
				names[i].Protocol = "udp"
			}
			names[i].Port = uint16(i % 3)
		}
		for round := range rounds {
			p.Now = p.Now.Add(time.Duration(r.IntN(40)) * time.Minute)
			clear(taken)
			for range r.IntN(4) {
				taken[p.Range.First+uint16(r.IntN(p.Range.Len()))] = true
			}
			var keys []PortKey
			for _, k := range names {
				if r.IntN(3) > 0 {
					keys = append(keys, k)
				}
			}
			before := slices.Clone(all)
			next, failed := p.Assign(keys, all)
			if !slices.Equal(before, all) {
				t.Fatal("Assign changed what it was given")
			}
			again, failedAgain := p.Assign(keys, next)
			if !slices.Equal(next, again) || len(failed) != len(failedAgain) {
				t.Fatalf("seed %d, round %d: a second look changes\n%v to\n%v", seed, round, next, again)
			}
			checkPorts(t, &p, keys, all, next, failed)
			if t.Failed() {
				t.Fatalf("seed %d, round %d", seed, round)
			}
			all = next
		}
	}
}

func checkPorts(t *testing.T, p *PortPlan, keys []PortKey, before, after []Port, failed []PortFailure) {
	t.Helper()
	type port struct {
		protocol string
		number   uint16
	}
	owner := map[port]Port{}
	for _, a := range after {
		at := port{a.Protocol, a.Assigned}
		if other, ok := owner[at]; ok {
			t.Errorf("%s and %s share %d", a.PortKey, other.PortKey, a.Assigned)
		}
		if !p.Range.Contains(a.Assigned) {
			t.Errorf("%s has %d, outside of %s", a.PortKey, a.Assigned, p.Range)
		}
		if a.Gone.IsZero() != slices.Contains(keys, a.PortKey) {
			t.Errorf("%s: gone %v, and wanted %v", a.PortKey, a.Gone, slices.Contains(keys, a.PortKey))
		}
		owner[at] = a
	}
	for _, k := range keys {
		if (portOf(after, k) == 0) != slices.ContainsFunc(failed, func(f PortFailure) bool { return f.PortKey == k }) {
			t.Errorf("%s has port %d; failures are %v", k, portOf(after, k), failed)
		}
	}
	for _, a := range before {
		now := owner[port{a.Protocol, a.Assigned}]
		kept := a.Gone.IsZero() || p.Now.Sub(a.Gone) < p.ReuseAfter
		if kept && now.PortKey != a.PortKey && now.Service != a.Service {
			t.Errorf("port %d was %s's, gone %v, and is %s's", a.Assigned, a.PortKey, a.Gone, now.PortKey)
		}
		if slices.Contains(keys, a.PortKey) && now.PortKey == a.PortKey && now.Since != a.Since {
			t.Errorf("%s has been there since %v, not %v", a.PortKey, a.Since, now.Since)
		}
	}
	for _, f := range failed {
		for n := p.Range.First; n <= p.Range.Last; n++ {
			if a, ok := owner[port{f.Protocol, n}]; !p.Taken(f.Protocol, n) && (!ok || !a.Gone.IsZero() && p.Now.Sub(a.Gone) >= p.ReuseAfter) {
				t.Errorf("%s has none, and %d is free", f.PortKey, n)
			}
		}
	}
}

// Many services that a small range has no room for are told so in no time.
func TestAssignManyWithoutRoom(t *testing.T) {
	asked := 0
	p := PortPlan{Range: registry.PortRange{First: 20000, Last: 20999}, Now: noon, Taken: func(string, uint16) bool { asked++; return false }}
	all, failed := p.Assign(portKeysNamed(30000), nil)
	if len(all) != 1000 || len(failed) != 29000 {
		t.Errorf("%d assignments, %d failures", len(all), len(failed))
	}
	if asked > 100_000 {
		t.Errorf("the ports were looked at %d times", asked)
	}
}

func BenchmarkPorts(b *testing.B) {
	p := PortPlan{Range: registry.PortRange{First: 20000, Last: 20999}, Now: noon}
	keys := portKeysNamed(1000)
	have, _ := p.Assign(keys, nil)
	for b.Loop() {
		p.Assign(keys, have)
	}
}
