//go:build linux

package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// A row is a line of the table. A target is about culvert's value.
type row struct {
	id    string
	title string
	more  bool    // more is better
	digit int     // after the point
	own   bool    // of culvert alone
	limit float64 // target: at most this
	ratio float64 // target: at least (or at most) so many times what than says
	than  string  // another peer; or the id of another row, of which culvert's own value is meant
}

func rows() []row {
	const them = "haproxy"
	return []row{
		{id: "conns1", title: "new connections/s, 1 worker", more: true, than: them, ratio: 1},
		{id: "conns64", title: "new connections/s, 64 workers", more: true, than: them, ratio: 1},
		{id: "cpuconns1", title: "CPU per connection, 1 worker, us", digit: 1, than: them, ratio: 1},
		{id: "cpuconns64", title: "CPU per connection, 64 workers, us", digit: 1, than: them, ratio: 1},
		{id: "trips1", title: "64-byte round trips/s, 1 connection", more: true},
		{id: "trips64", title: "64-byte round trips/s, 64 connections", more: true},
		{id: "p99trips1", title: "round trip p99, 1 connection, us", digit: 1, than: them, ratio: 1},
		{id: "p99trips64", title: "round trip p99, 64 connections, us", digit: 1, than: them, ratio: 1},
		{id: "cputrips1", title: "CPU per round trip, 1 connection, us", digit: 2, than: them, ratio: 0.85},
		{id: "cputrips64", title: "CPU per round trip, 64 connections, us", digit: 2, than: them, ratio: 0.85},
		{id: "up1", title: "upload, 1 flow, MB/s", more: true},
		{id: "up16", title: "upload, 16 flows, MB/s", more: true},
		{id: "down1", title: "download, 1 flow, MB/s", more: true},
		{id: "down16", title: "download, 16 flows, MB/s", more: true},
		{id: "cpuup1", title: "CPU per GB, upload, 1 flow, s", digit: 3, than: them, ratio: 0.4},
		{id: "cpuup16", title: "CPU per GB, upload, 16 flows, s", digit: 3, than: them, ratio: 0.4},
		{id: "cpudown1", title: "CPU per GB, download, 1 flow, s", digit: 3, than: them, ratio: 0.4},
		{id: "cpudown16", title: "CPU per GB, download, 16 flows, s", digit: 3, than: them, ratio: 0.4},
		{id: "idlemem", title: "memory per idle tunnel (PSS), KiB", digit: 2, limit: 0.5},
		{id: "idlefds", title: "descriptors per idle tunnel", digit: 2, limit: 2},
		{id: "halfmem", title: "memory per half-sent hello (PSS), KiB", digit: 2, limit: 2},
		{id: "halffds", title: "descriptors per half-sent hello", digit: 2},
		{id: "rest", title: "CPU of 3,000 idle tunnels, ms/s", digit: 2, limit: 0.3},
		{id: "line1", title: "CPU of a line of the access log, 1 worker, us", digit: 1, own: true, limit: 3},
		{id: "line64", title: "CPU of a line of the access log, 64 workers, us", digit: 1, own: true, limit: 3},
		{id: "few", title: "new connections/s, 64 workers, 10 routes", more: true, own: true},
		{id: "many", title: "new connections/s, 64 workers, 100,000 routes", more: true, own: true, than: "few", ratio: 0.95},
		{id: "reload", title: "reload of 100,000 routes, from the signal, s", digit: 3, own: true, limit: 0.5},
		{id: "p99calm", title: "round trip p99, 64 connections, 100,000 routes, us", digit: 1, own: true},
		{id: "p99reload", title: "the same while they are reloaded all the time, us", digit: 1, own: true},
		{id: "mostcalm", title: "longest round trip, 64 connections, 100,000 routes, ms", digit: 1, own: true},
		{id: "mostreload", title: "the same while they are reloaded all the time, ms", digit: 1, own: true},
	}
}

// results holds the values of all rounds, by row and peer.
type results map[string]map[string][]float64

func (r results) add(row, peer string, v float64) {
	if r[row] == nil {
		r[row] = make(map[string][]float64)
	}
	r[row][peer] = append(r[row][peer], v)
}

// median returns the middle value and half the distance between the lowest
// and the highest, as a part of it.
func (r results) median(row, peer string) (v, spread float64, ok bool) {
	values := slices.Sorted(slices.Values(r[row][peer]))
	n := len(values)
	if n == 0 {
		return 0, 0, false
	}
	v = (values[(n-1)/2] + values[n/2]) / 2
	if v != 0 {
		spread = (values[n-1] - values[0]) / 2 / v
	}
	return v, spread, true
}

// ratio returns the median of the rounds' ratios of one peer's value to
// another's: what disturbed a round met both.
func (r results) ratio(row, peer, other string) (float64, bool) {
	return ratioOf(r[row][peer], r[row][other])
}

func ratioOf(a, b []float64) (float64, bool) {
	var ratios []float64
	for i := range min(len(a), len(b)) {
		if b[i] != 0 {
			ratios = append(ratios, a[i]/b[i])
		}
	}
	slices.Sort(ratios)
	n := len(ratios)
	if n == 0 {
		return 0, false
	}
	return (ratios[(n-1)/2] + ratios[n/2]) / 2, true
}

// printCarriers writes their table, a carrier in each line. Each cell has the
// median of the rounds, and its ratio to the first line's.
func (r results) printCarriers(w io.Writer, names []string) {
	var columns []row
	var titles []string
	for _, column := range carrierRows() {
		if r[column.id] != nil {
			columns, titles = append(columns, column), append(titles, column.title)
		}
	}
	fmt.Fprintf(w, "| | %s |\n|---|%s\n", strings.Join(titles, " | "), strings.Repeat("---:|", len(columns)))
	for _, name := range names {
		cells := []string{name}
		for _, column := range columns {
			v, _, ok := r.median(column.id, name)
			ratio, comparable := r.ratio(column.id, name, names[0])
			switch {
			case !ok:
				cells = append(cells, "")
			case !comparable:
				cells = append(cells, number(v, column.digit))
			default:
				cells = append(cells, fmt.Sprintf("%s ×%.2f", number(v, column.digit), ratio))
			}
		}
		fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | "))
	}
}

// print writes the table in Markdown. Each cell has the median of the rounds,
// the median ratio to the reference peer, and half the range.
func (r results) print(w io.Writer, peers []string) {
	reference := peers[0]
	if slices.Contains(peers, "haproxy") {
		reference = "haproxy"
	}
	fmt.Fprintf(w, "Each cell: median, median ratio to %s in the same round, half the range. More is better where a unit is per second.\n\n", reference)
	r.table(w, peers, reference, rows())
}

// table writes a line for each of rows that has values.
func (r results) table(w io.Writer, peers []string, reference string, rows []row) {
	fmt.Fprintf(w, "| | %s |\n|---|%s\n", strings.Join(peers, " | "), strings.Repeat("---:|", len(peers)))
	for _, row := range rows {
		if r[row.id] == nil {
			continue
		}
		cells := []string{row.title}
		for _, p := range peers {
			v, spread, ok := r.median(row.id, p)
			ratio, comparable := r.ratio(row.id, p, reference)
			switch {
			case !ok || p == "direct" && costs(row.id):
				cells = append(cells, "")
			case !comparable:
				cells = append(cells, number(v, row.digit))
			default:
				cells = append(cells, fmt.Sprintf("%s ×%.2f ±%.0f%%", number(v, row.digit), ratio, 100*math.Abs(spread)))
			}
		}
		fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | "))
	}
}

// costs reports whether a row is about what a proxy takes: a direct
// connection has none.
func costs(id string) bool {
	for _, prefix := range []string{"cpu", "idle", "half", "rest"} {
		if strings.HasPrefix(id, prefix) {
			return true
		}
	}
	return false
}

// number writes v with so many digits after the point, and commas between
// thousands.
func number(v float64, digits int) string {
	s := fmt.Sprintf("%.*f", digits, v)
	whole, rest, _ := strings.Cut(s, ".")
	for i := len(whole) - 3; i > 0 && whole[i-1] != '-'; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if rest != "" {
		return whole + "." + rest
	}
	return whole
}

// rounded returns v as it is printed: what a reader sees is what is judged.
func rounded(v float64, digits int) float64 {
	unit := math.Pow10(digits)
	return math.Round(v*unit) / unit
}

// judge writes PASS or SHORT for every target, and returns how many fall
// short.
func (r results) judge(w io.Writer) (short int) { return r.judgeRows(w, us, rows()) }

// judgeRows is judge for the targets in rows, which are about the values of one peer.
func (r results) judgeRows(w io.Writer, peer string, rows []row) (short int) {
	line := func(ok bool, format string, args ...any) {
		word := "PASS"
		if !ok {
			word = "SHORT"
			short++
		}
		fmt.Fprintf(w, "%-5s  %s\n", word, fmt.Sprintf(format, args...))
	}
	titles := make(map[string]string)
	for _, row := range rows {
		titles[row.id] = row.title
		v, _, ok := r.median(row.id, peer)
		if !ok {
			continue
		}
		if row.limit > 0 {
			line(rounded(v, row.digit) <= row.limit, "%s: %s, at most %s", row.title, number(v, row.digit), strconv.FormatFloat(row.limit, 'f', -1, 64))
		}
		if row.than == "" {
			continue
		}
		than, other := row.than+"'s", r[row.id][row.than]
		if title, ok := titles[row.than]; ok {
			than, other = "that with "+title[strings.LastIndex(title, ", ")+2:], r[row.than][peer]
		}
		if ratio, ok := ratioOf(r[row.id][peer], other); ok {
			ratio = rounded(ratio, 2)
			want, good := "at most", ratio <= row.ratio
			if row.more {
				want, good = "at least", ratio >= row.ratio
			}
			line(good, "%s: %.2f of %s, %s %.2f", row.title, ratio, than, want, row.ratio)
		}
	}
	return short
}
