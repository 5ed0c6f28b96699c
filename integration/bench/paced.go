//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// Questions at a fixed pace to servers that have one core each: what is promised
// of ours is how long an answer takes then, and not how many there may be.
const (
	dnsPaced      = 20_000 // questions a second
	pacedP99      = 5000   // microseconds: the target for ours
	pacedPatience = 2      // seconds until a question is lost
)

// measures reports whether a part of the measurements of DNS servers is wanted.
func (b *dnsBench) measures(step string) bool { return b.only == nil || b.only.MatchString(step) }

// warm starts a server and asks it for everything once: then it is in its cache.
func (b *dnsBench) warm(ctx context.Context, p *peer) (*running, error) {
	run, err := p.start(ctx, b.rig)
	if err != nil {
		return nil, err
	}
	if _, err := b.perf(ctx, run, "cached", "-n", "1", "-q", "20"); err != nil {
		run.stop()
		return nil, err
	}
	return run, nil
}

// pinned is p on the last of our cores; the others are left to dnsperf, if there
// are more. A server that is written in Go takes one core for all it has.
func (b *dnsBench) pinned(p *peer) *peer {
	cores := allowed()
	last := cores[len(cores)-1]
	b.rest = strings.Join(cores[:len(cores)-1], ",")
	one := *p
	one.command = func(r rig) (*exec.Cmd, error) {
		cmd, err := p.command(r)
		if err != nil {
			return nil, err
		}
		return exec.Command("taskset", append([]string{"-c", last, cmd.Path}, cmd.Args[1:]...)...), nil
	}
	return &one
}

// allowed returns the numbers of the cores that this process may use.
func allowed() []string {
	status, _ := os.ReadFile("/proc/self/status")
	_, list, _ := strings.Cut(string(status), "Cpus_allowed_list:")
	list, _, _ = strings.Cut(list, "\n")
	return coresOf(strings.TrimSpace(list))
}

// coresOf returns the numbers in a list such as 0-3,8; never none.
func coresOf(list string) []string {
	var cores []string
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, err1 := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		for n := first; err1 == nil && err2 == nil && n <= last; n++ {
			cores = append(cores, strconv.Itoa(n))
		}
	}
	if len(cores) == 0 {
		return []string{"0"}
	}
	return cores
}

// pace asks each server on its own core, if that is to be measured.
func (b *dnsBench) pace(ctx context.Context, round int) error {
	if len(b.paced) == 0 {
		return nil
	}
	for _, questions := range []string{"local", "cached"} {
		fmt.Fprintf(b.log, "round %d of %d: dns, paced, %s\n", round+1, b.rounds, questions)
		for i := range b.paced {
			p := b.paced[(i+round)%len(b.paced)]
			before, seconds := cpu(p.pids), max(b.slice.Seconds(), 1)
			// As many under way as are asked in a second: a server that falls behind is asked
			// all the same, or its worst answers would be those nobody waited for.
			r, err := b.perf(ctx, p, questions, "-l", fmt.Sprint(seconds), "-Q", fmt.Sprint(dnsPaced), "-q", fmt.Sprint(dnsPaced),
				"-t", fmt.Sprint(pacedPatience),
				"-b", "4096", "-v") // the buffer of its sockets in KiB: what it loses itself counts, too
			if err != nil {
				return err
			}
			b.results.add("p99paced"+questions, p.name, 1e6*r.p99)
			b.results.add("cpupaced"+questions, p.name, micros(cpu(p.pids)-before)/r.count)
			b.results.add("lostpaced"+questions, p.name, 1e5*r.lost/(r.lost+r.count))
			// dnsperf falls behind: the machine has too little left for it.
			if asked := (r.count + r.lost) / seconds; asked < 0.98*dnsPaced {
				b.trouble = append(b.trouble, fmt.Sprintf("%s, paced, %s: %.0f questions a second were asked, and not %d", p.name, questions, asked, dnsPaced))
			}
		}
	}
	return nil
}

// judgePaced writes whether ours is as quick as is promised, where that was
// measured.
func (b *dnsBench) judgePaced(w io.Writer) {
	begin := "\n```\n"
	for _, row := range dnsRows() {
		v, _, ok := b.results.median(row.id, us)
		if !ok || row.limit == 0 {
			continue
		}
		lost, _, _ := b.results.median(strings.Replace(row.id, "p99", "lost", 1), us)
		word := "PASS "
		if rounded(v, row.digit) > row.limit || lost > 0 {
			word = "SHORT"
		}
		fmt.Fprintf(w, "%s%s  %s: %s, at most %.0f; none lost: %s of 100,000 are\n", begin, word, row.title, number(v, row.digit), row.limit, number(lost, 1))
		begin = ""
	}
	if begin == "" {
		io.WriteString(w, "```\n")
	}
}
