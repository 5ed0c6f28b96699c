package edits

import "testing"

func TestDistance(t *testing.T) {
	for _, row := range []struct {
		a, b  string
		limit int
		want  int
	}{
		{"", "", 3, 0},
		{"gateway", "gateway", 3, 0},
		{"gatway", "gateway", 3, 1},
		{"gateawy", "gateway", 3, 2},
		{"kitten", "sitting", 9, 3},
		{"kitten", "sitting", 2, 2},
		{"", "abc", 9, 3},
		{"abc", "", 9, 3},
		{"a", "abcd", 3, 3},
		{"flaw", "lawn", 9, 2},
	} {
		if got := Distance(row.a, row.b, row.limit); got != row.want {
			t.Errorf("Distance(%q, %q, %d) = %d, want %d", row.a, row.b, row.limit, got, row.want)
		}
	}
}
