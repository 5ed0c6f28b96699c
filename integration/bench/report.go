//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"time"
)

// preface stands before the figures of every page.
const preface = `# Benchmarks

Written by ` + "`make bench`" + ` and not edited. It runs culvert, HAProxy, nginx, a naive Go proxy and no proxy at all on the same work in
the same run, in turn within each round. Load generator and backend share the cores with what is measured, on loopback, so only ratios
mean something; a range says how noisy the machine was. Why a gigabyte costs what it does: [adr/0003](adr/0003-cost-of-bulk.md).

- **New connections**: connect, send a ClientHello of 1.5 KiB and 64 bytes, get the 64 back through the proxy, close.
- **Round trips**: 64 bytes to the service and back, one under way on each connection.
- **CPU** is the proxy's processor time, user and system, from /proc.
- **Memory** is PSS, as the slope from a quarter of the tunnels or hellos to all of them, each read once it stands still. Those with a
  garbage collector collect before; Go does that by itself every two minutes. Kernel memory is not in it.
- **Reload**: the file is replaced and SIGHUP is sent; it ends when /status shows the new table.

`

// report writes the whole page.
func (s *suite) report(ctx context.Context, w io.Writer, o options) {
	io.WriteString(w, preface)
	fmt.Fprintf(w, "%s, %s, %s. %d rounds of %v; %d tunnels, %d hellos.\n\n",
		machine(), runtime.Version(), time.Now().Format(time.DateOnly), s.rounds, s.slice, s.tunnels, s.half)
	if o.only != "" || o.measure != "" || o.quick {
		fmt.Fprintf(w, "A part of it: -only %q -measure %q -quick=%v.\n\n", o.only, o.measure, o.quick)
	}
	var names []string
	for _, p := range s.peers {
		names = append(names, p.name)
		fmt.Fprintf(w, "- %s: %s\n", p.name, p.version(ctx))
	}
	io.WriteString(w, "\n")
	s.results.print(w, names)
	io.WriteString(w, "\n## Targets\n\n```\n")
	short := s.results.judge(w)
	for _, t := range s.trouble {
		fmt.Fprintf(w, "TROUBLE  %s\n", t)
	}
	io.WriteString(w, "```\n")
	if short > 0 {
		fmt.Fprintf(w, "\n%d fall short.\n", short)
	}
}
