package relay

import (
	"slices"
	"testing"
)

// TestSeatsShowWhatStays goes through seats in pieces while items come and go: those that
// stay are all seen, once each.
func TestSeatsShowWhatStays(t *testing.T) {
	const n = 3*seatsPiece + 7
	var s Seats[int]
	var at []int32
	for i := range n {
		at = append(at, s.Add(i))
	}
	seen := make(map[int]int)
	for from, turn := 0, 0; ; turn++ {
		var items []int
		from, items = s.Piece(from, nil)
		if len(items) > seatsPiece {
			t.Fatalf("a piece has %d items, want %d at most", len(items), seatsPiece)
		}
		for _, i := range items {
			seen[i]++
		}
		if from == 0 {
			break
		}
		for i := turn; i < n; i += 10 { // those that end in turn, and their seats go to others
			if i%10 < 3 {
				s.Remove(at[i])
				at[i] = s.Add(n + i)
			}
		}
	}
	for i := range n {
		if got := seen[i]; got != 1 && (i%10 >= 3 || got > 1) {
			t.Errorf("item %d was seen %d times, want once", i, got)
		}
	}
	if got := s.Len(); got != n {
		t.Errorf("there are %d items, want %d", got, n)
	}
	all := s.All()
	if len(all) != n || slices.Contains(all, 0) || !slices.Contains(all, n) {
		t.Errorf("All returns %d items, want %d without those that went", len(all), n)
	}
	for _, i := range at {
		s.Remove(i)
	}
	if next, items := s.Piece(0, nil); s.Len() != 0 || next != 0 || len(items) != 0 || s.seats != nil {
		t.Errorf("when all are gone: %d items, a piece of %d, seats %v", s.Len(), len(items), s.seats)
	}
}
