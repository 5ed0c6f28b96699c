package reverse

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// scanned is what conflicting is to find, by a look at all names.
func (g *Groups) scanned(m *Membership, now time.Time) bool {
	for name, h := range g.names {
		if h.owner != m.Owner && h.heldAt(now) && (name == m.Name || m.Name.Wildcard && m.Name.Matches(name.Suffix) || name.Wildcard && name.Matches(m.Name.Suffix)) {
			return true
		}
	}
	return false
}

// Whatever names owners have had, and whatever of them is free again, a name is refused if and
// only if another owner has it, one below it, or one above it.
func TestConflictsAreThoseOfAScan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for seed := range uint64(20) {
			random := rand.New(rand.NewPCG(seed, 1))
			pick := func() Registration {
				var labels []string
				for range 1 + random.IntN(4) {
					labels = append(labels, []string{"a", "b", "ab", "a-b", "b0"}[random.IntN(5)])
				}
				name := strings.Join(append(labels, "example"), ".")
				if random.IntN(3) == 0 {
					name = "*." + name
				}
				return named(name)
			}
			g := &Groups{Authorize: anything, HoldFor: time.Minute}
			var open []*Membership
			refused := 0
			for range 2000 {
				switch random.IntN(10) {
				case 0:
					time.Sleep(time.Duration(random.IntN(30)) * time.Second)
				case 1, 2, 3:
					if len(open) > 0 {
						at := random.IntN(len(open))
						open[at].Leave()
						open = slices.Delete(open, at, at+1)
					}
				default:
					reg, owner := pick(), string(rune('a'+random.IntN(4)))
					want := g.scanned(&Membership{Registration: reg, Owner: owner}, time.Now())
					m, err := g.Join(by(owner), &fakeSession{}, reg)
					if got := reasonOf(err) == tunnel.Denied; got != want || err != nil && !got {
						t.Fatalf("seed %d: %s joins %s: %v; by a scan it is refused: %v", seed, owner, reg.Name, err, want)
					}
					if err != nil {
						refused++
						continue
					}
					open = append(open, m)
				}
				of := 0
				for owner, some := range g.owned {
					of += len(some)
					for _, h := range some {
						if h.owner != owner || g.names[h.name] != h {
							t.Fatalf("seed %d: %s is listed as one of %s", seed, h.name, owner)
						}
					}
				}
				if len(g.sorted) != len(g.names) || of != len(g.names) || !slices.IsSortedFunc(g.sorted, compareHeld) {
					t.Fatalf("seed %d: there are %d names, %d are sorted and %d have an owner", seed, len(g.names), len(g.sorted), of)
				}
			}
			if refused == 0 || refused > 1500 {
				t.Errorf("seed %d: %d names were refused", seed, refused)
			}
		}
	})
}

// BenchmarkWildcard is a wildcard above as many names of its owner as all owners may have.
func BenchmarkWildcard(b *testing.B) {
	g := &Groups{Authorize: anything, NamesPerOwner: maxNames}
	for i := range maxNames - 1 {
		m, err := g.Join(by("a"), &fakeSession{}, named(fmt.Sprintf("n%d.example", i)))
		if err != nil {
			b.Fatal(err)
		}
		m.Leave()
	}
	for b.Loop() {
		m, err := g.Join(by("a"), &fakeSession{}, named("*.example"))
		if err != nil {
			b.Fatal(err)
		}
		m.Leave()
	}
}
