package leases

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func planOf(places uint64) *Plan[string] {
	return &Plan[string]{Places: places, Now: noon, Keep: time.Hour, Start: Hash, Compare: strings.Compare}
}

func keysNamed(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("s%d", i)
	}
	return keys
}

// model is Assign as it would be said: each key, in order, walks over the
// places from its own on.
func model(p *Plan[string], keys []string, have []Lease[string]) (all []Lease[string], without []string) {
	at := map[uint64]Lease[string]{}
	stands := map[string]bool{}
	for _, l := range have {
		if stands[l.Key] = slices.Contains(keys, l.Key); stands[l.Key] {
			l.Gone = time.Time{}
		} else if l.Gone.IsZero() {
			l.Gone = p.Now
		}
		at[l.Place] = l
	}
	taken := func(place uint64) bool {
		for from := range place + 1 {
			if from+p.Taken(from) > place {
				return true
			}
		}
		return false
	}
	for _, k := range slices.Compact(slices.Sorted(slices.Values(keys))) {
		if stands[k] {
			continue
		}
		best, found := Lease[string]{}, false
		for i := range p.Places {
			place := (p.Start(k) + i) % p.Places
			l, used := at[place]
			switch {
			case taken(place) || used && (l.Gone.IsZero() || Kept(l.Gone, p.Now, p.Keep)):
			case !found || !best.Gone.IsZero() && (!used || l.Gone.Before(best.Gone)):
				best, found = l, true
				best.Place = place
			}
		}
		if !found {
			without = append(without, k)
			continue
		}
		at[best.Place] = Lease[string]{Key: k, Place: best.Place, Since: p.Now}
	}
	return slices.SortedFunc(maps.Values(at), func(a, b Lease[string]) int { return cmp.Compare(a.Place, b.Place) }), without
}

// Whatever comes, goes and is taken by others, Assign does what the model does,
// in any order of its arguments; and a second look changes nothing.
func TestAssignByChance(t *testing.T) {
	names := keysNamed(30)
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 2))
		p := planOf(1 + r.Uint64N(40))
		var all []Lease[string]
		for round := range 30 {
			p.Now = p.Now.Add(time.Duration(r.IntN(30)) * time.Minute)
			blocks := map[uint64]uint64{}
			for range r.IntN(3) {
				blocks[r.Uint64N(p.Places)] = r.Uint64N(9)
			}
			p.Taken = func(place uint64) uint64 {
				most := uint64(0)
				for from, n := range blocks {
					if from <= place && place < from+n {
						most = max(most, from+n-place)
					}
				}
				return most
			}
			var keys []string
			for _, k := range names {
				if r.IntN(3) > 0 {
					keys = append(keys, k)
				}
			}
			want, wantWithout := model(p, keys, all)
			rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
			rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			before := slices.Clone(all)
			got, without, full := p.Assign(append(keys, keys...), all)
			if !slices.Equal(got, want) || !slices.Equal(without, wantWithout) || (full != nil) != (len(without) > 0) {
				t.Fatalf("seed %d, round %d, %d places: got %v, without %v, %v\nwant %v, without %v", seed, round, p.Places, got, without, full, want, wantWithout)
			}
			if !slices.Equal(before, all) {
				t.Fatal("Assign changed what it was given")
			}
			if again, _, _ := p.Assign(keys, got); !slices.Equal(got, again) {
				t.Fatalf("seed %d, round %d: a second look changes %v to %v", seed, round, got, again)
			}
			if full != nil {
				kept, others := uint64(0), uint64(0)
				for place := range p.Places {
					i := slices.IndexFunc(got, func(l Lease[string]) bool { return l.Place == place })
					switch {
					case i >= 0 && got[i].Gone.IsZero():
					case i >= 0 && Kept(got[i].Gone, p.Now, p.Keep):
						kept++
					default:
						others++
					}
				}
				if full.Kept != kept || full.Taken != others || full.Places != p.Places || kept > 0 && !full.Until.After(p.Now) {
					t.Fatalf("seed %d, round %d: exhausted %+v, want %d kept, %d taken of %v", seed, round, full, kept, others, got)
				}
			}
			all = got
		}
	}
}

// Where the places of keys are is a promise: it is how those who have lost their
// state come close to it.
func TestHash(t *testing.T) {
	for key, want := range map[string]uint64{"": 0xcbf29ce484222325, "db.example.com": 0x7e7401df91ab350} {
		if got := Hash(key); got != want {
			t.Errorf("%q: got %#x, want %#x", key, got, want)
		}
	}
}

// A range that is filled to the last place, and one of which others have nearly
// all, take no longer than they must: places are looked at a few times each.
func TestAssignLooksAtPlacesOnce(t *testing.T) {
	const n = 1 << 16
	for name, tt := range map[string]struct {
		places uint64
		taken  func(uint64) uint64
		start  func(string) uint64
		want   int
	}{
		"full":                {n, func(uint64) uint64 { return 0 }, Hash, n},
		"all at one place":    {1 << 28, func(uint64) uint64 { return 0 }, func(string) uint64 { return 7 }, n},
		"more than there are": {n / 2, func(uint64) uint64 { return 0 }, Hash, n / 2},
		"nearly all is others'": {1 << 62, func(at uint64) uint64 {
			if at < 1<<62-n {
				return 1<<62 - n - at
			}
			return 0
		}, Hash, n},
	} {
		asked := 0
		p := planOf(tt.places)
		p.Start = tt.start
		p.Taken = func(at uint64) uint64 { asked++; return tt.taken(at) }
		all, without, full := p.Assign(keysNamed(n), nil)
		if len(all) != tt.want || len(without) != n-tt.want || (full != nil) != (len(without) > 0) {
			t.Errorf("%s: %d leases, %d without, %v, want %d", name, len(all), len(without), full, tt.want)
		}
		if asked > 3*n {
			t.Errorf("%s: places were looked at %d times for %d keys", name, asked, n)
		}
	}
}

func BenchmarkAssign100k(b *testing.B) {
	p, keys := planOf(1<<28), keysNamed(100_000)
	have, _, _ := p.Assign(keys, nil)
	b.Run("fresh", func(b *testing.B) {
		for b.Loop() {
			p.Assign(keys, nil)
		}
	})
	b.Run("standing", func(b *testing.B) {
		for b.Loop() {
			p.Assign(keys, have)
		}
	})
	full := planOf(100_000)
	b.Run("filling", func(b *testing.B) {
		for b.Loop() {
			full.Assign(keys, nil)
		}
	})
}
