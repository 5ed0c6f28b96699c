//go:build linux

package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// A row is a line of the table.
type row struct {
	id    string
	title string
	more  bool    // more is better
	digit int     // after the point
	even  bool    // nothing to be ahead in: any proxy has the same
	beat  string  // the peer that the target is about
	ratio float64 // target: at least (or at most) so many times that peer's value
	limit float64 // target: at most this
}

func rows() []row {
	return []row{
		{id: "conns1", title: "new connections/s, 1 worker", more: true, beat: "haproxy", ratio: 0.8},
		{id: "conns64", title: "new connections/s, 64 workers", more: true, beat: "haproxy", ratio: 0.8},
		{id: "cpuconns1", title: "CPU per connection, 1 worker, us", digit: 1},
		{id: "cpuconns64", title: "CPU per connection, 64 workers, us", digit: 1},
		{id: "trips1", title: "64-byte round trips/s, 1 connection", more: true},
		{id: "trips64", title: "64-byte round trips/s, 64 connections", more: true},
		{id: "p99trips1", title: "round trip p99, 1 connection, us", digit: 1},
		{id: "p99trips64", title: "round trip p99, 64 connections, us", digit: 1},
		{id: "cputrips1", title: "CPU per round trip, 1 connection, us", digit: 2},
		{id: "cputrips64", title: "CPU per round trip, 64 connections, us", digit: 2},
		{id: "up1", title: "upload, 1 flow, MB/s", more: true},
		{id: "up16", title: "upload, 16 flows, MB/s", more: true},
		{id: "down1", title: "download, 1 flow, MB/s", more: true},
		{id: "down16", title: "download, 16 flows, MB/s", more: true},
		{id: "cpuup1", title: "CPU per GB, upload, 1 flow, s", digit: 3, beat: "haproxy", ratio: 0.5},
		{id: "cpuup16", title: "CPU per GB, upload, 16 flows, s", digit: 3, beat: "haproxy", ratio: 0.5},
		{id: "cpudown1", title: "CPU per GB, download, 1 flow, s", digit: 3, beat: "haproxy", ratio: 0.5},
		{id: "cpudown16", title: "CPU per GB, download, 16 flows, s", digit: 3, beat: "haproxy", ratio: 0.5},
		{id: "idlemem", title: "memory per idle tunnel (PSS), KiB", digit: 2, limit: 12},
		{id: "idlefds", title: "descriptors per idle tunnel", digit: 2, limit: 2},
		{id: "halfmem", title: "memory per half-sent hello (PSS), KiB", digit: 2},
		{id: "halffds", title: "descriptors per half-sent hello", digit: 2, even: true},
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
	a, b := r[row][peer], r[row][other]
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

// print writes the table in Markdown. Each cell has the median of the rounds,
// the median ratio to the reference peer, and half the range.
func (r results) print(w io.Writer, peers []string) {
	reference := peers[0]
	if slices.Contains(peers, "haproxy") {
		reference = "haproxy"
	}
	fmt.Fprintf(w, "Each cell: median, median ratio to %s in the same round, half the range. More is better where a unit is per second.\n\n", reference)
	fmt.Fprintf(w, "| | %s |\n|---|%s\n", strings.Join(peers, " | "), strings.Repeat("---:|", len(peers)))
	for _, row := range rows() {
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
	for _, prefix := range []string{"cpu", "idle", "half"} {
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

// judge writes PASS or SHORT for every target that culvert has, and returns
// how many fall short.
func (r results) judge(w io.Writer) (short int) {
	const us = "culvert"
	line := func(ok bool, format string, args ...any) {
		word := "PASS"
		if !ok {
			word = "SHORT"
			short++
		}
		fmt.Fprintf(w, "%-5s  %s\n", word, fmt.Sprintf(format, args...))
	}
	for _, row := range rows() {
		v, _, ok := r.median(row.id, us)
		if !ok {
			continue
		}
		if row.limit > 0 {
			line(v <= row.limit, "%s: %s, at most %s", row.title, number(v, row.digit), number(row.limit, 0))
		}
		if ratio, ok := r.ratio(row.id, us, row.beat); ok {
			want, good := "at most", ratio <= row.ratio
			if row.more {
				want, good = "at least", ratio >= row.ratio
			}
			line(good, "%s: %.2f of %s's, %s %.2f", row.title, ratio, row.beat, want, row.ratio)
		}
		if ratio, ok := r.ratio(row.id, us, "naive"); ok && !row.even {
			good := ratio < 1
			if row.more {
				good = ratio > 1
			}
			line(good, "%s: %.2f of a naive proxy's", row.title, ratio)
		}
	}
	return short
}
