package reverse

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"culvert.dev/tunnel"
)

// What a stream to another replica is told of one change after the other is what a new stream
// is told.
func TestChangesAreWhatHasChanged(t *testing.T) {
	for seed := range uint64(4) {
		random := rand.New(rand.NewPCG(seed, 1))
		g := &Groups{Authorize: anything}
		links := []*replicaLink{{}, {}}
		var open []*Membership
		sent, next := map[tunnel.Pattern]*replicaName{}, uint64(0)
		full := 0
		for i := range 20000 {
			reg := named(fmt.Sprintf("n%d.example", random.IntN(40)))
			owner := fmt.Sprintf("owner-%d", random.IntN(3))
			switch random.IntN(8) {
			case 0, 1, 2:
				reg.Port = uint16(random.IntN(3))
				if random.IntN(4) == 0 {
					reg.Allow = []string{owner}
				}
				if m, err := g.Join(by(owner), &fakeSession{}, reg); err == nil {
					open = append(open, m)
				}
			case 3, 4:
				if len(open) > 0 {
					at := random.IntN(len(open))
					open[at].Leave()
					open = append(open[:at], open[at+1:]...)
				}
			case 5:
				if len(open) > 0 {
					open[random.IntN(len(open))].Drain()
				}
			case 6:
				n := &replicaName{Name: reg.Name, Owner: owner, Since: random.Int64N(1 << 50), Left: 60}
				if random.IntN(2) == 0 {
					n.Serves = []replicaGroup{{Weight: 1, Sessions: 1}}
				}
				g.setRemote(links[random.IntN(2)], n)
			case 7:
				g.dropRemote(links[random.IntN(2)], []tunnel.Pattern{reg.Name})
			}
			if seed > 0 && random.IntN(1<<(4*seed)) > 0 && i < 19999 { // seldom, with the seed: also after more changes than are remembered
				continue
			}
			now := g.local(next)
			if now.all {
				full++
			}
			changesOf(sent, &now)
			next = now.next
			want := g.local(0).names
			for name, n := range want {
				if sent[name] == nil || !sent[name].equal(n) {
					t.Fatalf("seed %d, step %d: %s is %+v, and %+v was sent", seed, i, name, n, sent[name])
				}
			}
			if len(want) != len(sent) {
				t.Fatalf("seed %d, step %d: %d names were sent, want %d", seed, i, len(sent), len(want))
			}
		}
		if want := 1; full < want || seed < 3 && full > want {
			t.Errorf("seed %d: all names were told %d times", seed, full)
		}
	}
}

// fullGroups returns Groups with as many names of one owner as all owners may have, each with a
// session.
func fullGroups(b *testing.B) *Groups {
	b.Helper()
	g := &Groups{Authorize: anything, NamesPerOwner: maxNames}
	for i := range maxNames - 1 {
		if _, err := g.Join(by("a"), &fakeSession{}, named(fmt.Sprintf("n%d.example", i))); err != nil {
			b.Fatal(err)
		}
	}
	return g
}

// BenchmarkTellReplica is what a stream to another replica costs for a name that comes and goes.
func BenchmarkTellReplica(b *testing.B) {
	g := fullGroups(b)
	sent := map[tunnel.Pattern]*replicaName{}
	now := g.local(0)
	changesOf(sent, &now)
	for b.Loop() {
		m, err := g.Join(by("b"), &fakeSession{}, named("one.more.test"))
		if err != nil {
			b.Fatal(err)
		}
		for range 2 {
			now = g.local(now.next)
			changesOf(sent, &now)
			m.Leave()
		}
	}
}

// BenchmarkEvict is a name that its owner loses to one at another replica.
func BenchmarkEvict(b *testing.B) {
	g := fullGroups(b)
	l := &replicaLink{}
	name := named("n500.example")
	for b.Loop() {
		g.setRemote(l, &replicaName{Name: name.Name, Owner: "z", Since: 1})
		b.StopTimer()
		g.mu.Lock()
		g.free(name.Name, g.names[name.Name])
		g.mu.Unlock()
		if _, err := g.Join(by("a"), &fakeSession{}, name); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// BenchmarkJoin is a session that comes and goes, for a name that stays its owner's.
func BenchmarkJoin(b *testing.B) {
	g := fullGroups(b)
	for b.Loop() {
		m, err := g.Join(by("b"), &fakeSession{}, named("one.more.test"))
		if err != nil {
			b.Fatal(err)
		}
		m.Leave()
	}
}

// BenchmarkSweep frees all names.
func BenchmarkSweep(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		g := fullGroups(b)
		g.mu.Lock()
		now := g.swept
		for _, h := range g.names {
			h.members = nil
		}
		b.StartTimer()
		g.sweep(now.Add(1 << 40))
		g.mu.Unlock()
	}
}
