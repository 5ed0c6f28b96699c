package bench

import (
	"fmt"
	"io"
	"time"
)

// A page is all that was measured.
type page struct {
	plan            plan
	load            string // of the machine, as it began
	loading         time.Duration
	quiet, busy     changes
	start           start
	after, end      usage
	idle            idle
	calm, disturbed []time.Duration
	perChange       time.Duration
}

const preface = `# Benchmarks in Kubernetes

Written by ` + "`make bench-kube`" + ` and not edited. One culvert with discovery and the Gateway API, as a process with the rights of its ServiceAccount,
and a real etcd and API server, that share the machine with it and with what measures. Times of changes begin before the request
that makes them, so that they contain the API server's part.

`

// goals are at full size.
const (
	goalMedian = 250 * time.Millisecond
	goalMost   = 600 * time.Millisecond
	goalStart  = 10 * time.Second
	goalMemory = 400 // MiB
)

func (p *page) write(w io.Writer) {
	io.WriteString(w, preface)
	fmt.Fprintf(w, "%s, %s; load average %s at the beginning. %d changes of each kind; full is %d Services, %d endpoints and %d TLSRoutes, loaded in %.0f s.\n\n",
		machine(), time.Now().Format(time.DateOnly), p.load, p.plan.changes, p.plan.full.services, p.plan.full.services*endpoints, p.plan.full.routes, p.loading.Seconds())

	short := 0
	mark := func(good bool) string {
		if good || p.plan.full.services < 10_000 {
			return ""
		}
		short++
		return " SHORT"
	}
	fmt.Fprintf(w, "| From a change to the first connection, ms | empty, p50 | p99 | full, p50 | p99 | goal |\n|---|---:|---:|---:|---:|---:|\n")
	for _, row := range []struct {
		title string
		of    func(*changes) []time.Duration
	}{
		{"a new TLSRoute", func(c *changes) []time.Duration { return c.route }},
		{"another backend of a TLSRoute", func(c *changes) []time.Duration { return c.backend }},
		{"another endpoint, by TLSRoute", func(c *changes) []time.Duration { return c.endpoint }},
		{"another endpoint, by name", func(c *changes) []time.Duration { return c.named }},
		{"a new Gateway", func(c *changes) []time.Duration { return c.gateway }},
		{"a new Gateway, until Programmed is True", func(c *changes) []time.Duration { return c.programmed }},
	} {
		quiet, busy := row.of(&p.quiet), row.of(&p.busy)
		p50, p99 := percentile(busy, 0.5), percentile(busy, 0.99)
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %d, %d%s |\n", row.title, ms(percentile(quiet, 0.5)), ms(percentile(quiet, 0.99)), ms(p50), ms(p99),
			goalMedian.Milliseconds(), goalMost.Milliseconds(), mark(p50 <= goalMedian && p99 <= goalMost))
	}

	s := &p.start
	fmt.Fprintf(w, "\n| With all of it | | goal |\n|---|---:|---:|\n")
	line := func(goal, title, format string, args ...any) {
		fmt.Fprintf(w, "| %s | %s | %s |\n", title, fmt.Sprintf(format, args...), goal)
	}
	startGoal := func(d time.Duration) string { return fmt.Sprintf("%.0f%s", goalStart.Seconds(), mark(d <= goalStart)) }
	line(startGoal(s.ready), "start to ready, s", "%.2f", s.ready.Seconds())
	line(startGoal(s.route), "start to first connection by TLSRoute, s", "%.2f", s.route.Seconds())
	line(startGoal(s.name), "start to first connection by name, s", "%.2f", s.name.Seconds())
	line("", "start to the status of every route, s", "%.2f", s.status.Seconds())
	line("", "CPU until then, s", "%.2f", s.cpu.Seconds())
	line("", "requests until then", "%d: %s", len(s.requests), counts(s.requests))
	line(fmt.Sprintf("%d%s", goalMemory, mark(p.after.rss <= goalMemory)), "resident after the start, MiB", "%.0f (PSS %.0f, live heap %.0f, at most %.0f)", p.after.rss, p.after.pss, p.after.heap, p.after.peak)
	line(fmt.Sprintf("%d%s", goalMemory, mark(p.end.rss <= goalMemory)), "resident after all changes, MiB", "%.0f (PSS %.0f, live heap %.0f, at most %.0f)", p.end.rss, p.end.pss, p.end.heap, p.end.peak)
	line("leases, watches", fmt.Sprintf("requests of %.0f s at rest", p.idle.d.Seconds()), "%d: %s", len(p.idle.requests), counts(p.idle.requests))
	line("", "CPU at rest, ms a second", "%.1f", float64(p.idle.cpu.Milliseconds())/p.idle.d.Seconds())
	line("", "CPU per change, ms", "%s", ms(p.perChange))
	line("", "round trip on 8 tunnels, 200 a second on each: p50, p99, most, ms", "%s, %s, %s", ms(percentile(p.calm, 0.5)), ms(percentile(p.calm, 0.99)), ms(percentile(p.calm, 1)))
	line("", "the same with 10 changes a second", "%s, %s, %s", ms(percentile(p.disturbed, 0.5)), ms(percentile(p.disturbed, 0.99)), ms(percentile(p.disturbed, 1)))
	if short > 0 {
		fmt.Fprintf(w, "\n%d fall short.\n", short)
	}
}

func ms(d time.Duration) string {
	v := float64(d) / float64(time.Millisecond)
	if v < 10 {
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.0f", v)
}
