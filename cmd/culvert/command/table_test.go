package command

import (
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	rows := [][]string{{"ID", "STATE", "WHY"}, {"4711", good("up"), ""}, {"8", "down", "refused"}, {"short"}}
	for _, tt := range []struct {
		name  string
		right []int
		want  string
	}{
		{"at the left", nil, "ID     STATE  WHY\n4711   " + good("up") + "\n8      down   refused\nshort\n"},
		{"numbers at the right", []int{0}, "   ID  STATE  WHY\n 4711  " + good("up") + "\n    8  down   refused\nshort\n"},
	} {
		var b strings.Builder
		if err := writeTable(&b, rows, tt.right...); err != nil || b.String() != tt.want {
			t.Errorf("%s: got %q, %v\nwant %q", tt.name, b.String(), err, tt.want)
		}
	}
}
