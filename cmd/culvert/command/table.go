package command

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// writeTable prints rows in columns, two blanks apart. The columns in right are
// aligned at the right, all others at the left. Marks of color take no room.
func writeTable(w io.Writer, rows [][]string, right ...int) error {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], width(cell))
		}
	}
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			line.WriteString(padded(cell, widths[i], slices.Contains(right, i)) + "  ")
		}
		if _, err := fmt.Fprintln(w, strings.TrimRight(line.String(), " ")); err != nil {
			return err
		}
	}
	return nil
}
