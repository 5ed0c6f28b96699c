package alloc

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

func poolOf(places uint64) *pool[string] {
	return &pool[string]{Size: places, Now: noon, ReuseAfter: time.Hour, Start: hashOf, Compare: strings.Compare}
}

func stringKeys(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("s%d", i)
	}
	return keys
}

// modelAssign is Assign as it would be said: each key, in order, walks over the
// places from its own on.
func modelAssign(p *pool[string], keys []string, have []allocation[string]) (all []allocation[string], without []string) {
	at := map[uint64]allocation[string]{}
	stands := map[string]bool{}
	for _, l := range have {
		if stands[l.Key] = slices.Contains(keys, l.Key); stands[l.Key] {
			l.Gone = time.Time{}
		} else if l.Gone.IsZero() {
			l.Gone = p.Now
		}
		at[l.Index] = l
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
		best, found := allocation[string]{}, false
		for i := range p.Size {
			place := (p.Start(k) + i) % p.Size
			l, used := at[place]
			switch {
			case taken(place) || used && (l.Gone.IsZero() || isHeld(l.Gone, p.Now, p.ReuseAfter)):
			case !found || !best.Gone.IsZero() && (!used || l.Gone.Before(best.Gone)):
				best, found = l, true
				best.Index = place
			}
		}
		if !found {
			without = append(without, k)
			continue
		}
		at[best.Index] = allocation[string]{Key: k, Index: best.Index, Since: p.Now}
	}
	return slices.SortedFunc(maps.Values(at), func(a, b allocation[string]) int { return cmp.Compare(a.Index, b.Index) }), without
}

// Whatever comes, goes and is taken by others, Assign does what the model does,
// in any order of its arguments; and a second look changes nothing.
func TestPoolByChance(t *testing.T) {
	names := stringKeys(30)
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 2))
		p := poolOf(1 + r.Uint64N(40))
		var all []allocation[string]
		for round := range 30 {
			p.Now = p.Now.Add(time.Duration(r.IntN(30)) * time.Minute)
			blocks := map[uint64]uint64{}
			for range r.IntN(3) {
				blocks[r.Uint64N(p.Size)] = r.Uint64N(9)
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
			want, wantWithout := modelAssign(p, keys, all)
			rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
			rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			before := slices.Clone(all)
			got, without, full := p.assign(append(keys, keys...), all)
			if !slices.Equal(got, want) || !slices.Equal(without, wantWithout) || (full != nil) != (len(without) > 0) {
				t.Fatalf("seed %d, round %d, %d places: got %v, without %v, %v\nwant %v, without %v", seed, round, p.Size, got, without, full, want, wantWithout)
			}
			if !slices.Equal(before, all) {
				t.Fatal("Assign changed what it was given")
			}
			if again, _, _ := p.assign(keys, got); !slices.Equal(got, again) {
				t.Fatalf("seed %d, round %d: a second look changes %v to %v", seed, round, got, again)
			}
			if full != nil {
				kept, others := uint64(0), uint64(0)
				for place := range p.Size {
					i := slices.IndexFunc(got, func(l allocation[string]) bool { return l.Index == place })
					switch {
					case i >= 0 && got[i].Gone.IsZero():
					case i >= 0 && isHeld(got[i].Gone, p.Now, p.ReuseAfter):
						kept++
					default:
						others++
					}
				}
				if full.Held != kept || full.Taken != others || full.Size != p.Size || kept > 0 && !full.Until.After(p.Now) {
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
		if got := hashOf(key); got != want {
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
		"full":                {n, func(uint64) uint64 { return 0 }, hashOf, n},
		"all at one place":    {1 << 28, func(uint64) uint64 { return 0 }, func(string) uint64 { return 7 }, n},
		"more than there are": {n / 2, func(uint64) uint64 { return 0 }, hashOf, n / 2},
		"nearly all is others'": {1 << 62, func(at uint64) uint64 {
			if at < 1<<62-n {
				return 1<<62 - n - at
			}
			return 0
		}, hashOf, n},
	} {
		asked := 0
		p := poolOf(tt.places)
		p.Start = tt.start
		p.Taken = func(at uint64) uint64 { asked++; return tt.taken(at) }
		all, without, full := p.assign(stringKeys(n), nil)
		if len(all) != tt.want || len(without) != n-tt.want || (full != nil) != (len(without) > 0) {
			t.Errorf("%s: %d leases, %d without, %v, want %d", name, len(all), len(without), full, tt.want)
		}
		if asked > 3*n {
			t.Errorf("%s: places were looked at %d times for %d keys", name, asked, n)
		}
	}
}

func BenchmarkPool100k(b *testing.B) {
	p, keys := poolOf(1<<28), stringKeys(100_000)
	have, _, _ := p.assign(keys, nil)
	b.Run("fresh", func(b *testing.B) {
		for b.Loop() {
			p.assign(keys, nil)
		}
	})
	b.Run("standing", func(b *testing.B) {
		for b.Loop() {
			p.assign(keys, have)
		}
	})
	full := poolOf(100_000)
	b.Run("filling", func(b *testing.B) {
		for b.Loop() {
			full.assign(keys, nil)
		}
	})
}
