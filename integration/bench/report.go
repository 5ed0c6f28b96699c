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
mean something; a range says how noisy the machine was. Why a gigabyte costs what it does: [adr/0003](internals/adr/0003-cost-of-bulk.md); and a
round trip: [adr/0006](internals/adr/0006-cost-of-a-round-trip.md); and a new connection: [adr/0007](internals/adr/0007-cost-of-a-connection.md).

- **New connections**: connect, send a ClientHello of 1.5 KiB and 64 bytes, get the 64 back through the proxy, close.
- **Round trips**: 64 bytes to the service and back, one under way on each connection.
- **CPU** is the proxy's processor time, user and system, from /proc.
- **Memory** is PSS, as the slope from a quarter of the tunnels or hellos to all of them, each read once it stands still. Those with a
  garbage collector collect before; Go does that by itself every two minutes. Kernel memory is not in it.
- **Idle CPU** is that of a proxy with 3,000 tunnels that have been silent for 16 s, measured once, for 5 s.
- **A line of the access log** is the difference in CPU per connection between culvert with its default settings, which log each
  connection, and with the log level error.
- **Reload**: the file is replaced and SIGHUP is sent; it ends when /status shows the new table.

`

// report writes the whole page.
func (s *suite) report(ctx context.Context, w io.Writer, o options, ways *suite) {
	io.WriteString(w, preface)
	fmt.Fprintf(w, "%s, %s, %s. %d rounds of %v; %d tunnels, %d hellos.\n\n",
		machine(), runtime.Version(), time.Now().Format(time.DateOnly), s.rounds, s.slice, s.tunnels, s.half)
	if o.only != "" || o.measure != "" || o.carrier != "" || o.dns != "" || o.loss != "" || o.tls != "" || o.policy != "" || o.reverse != "" || o.agent != "" || o.sites != "" || o.quick {
		fmt.Fprintf(w, "A part of it: -only %q -measure %q -carrier %q -dns %q -loss %q -tls %q -policy %q -reverse %q -agent %q -sites %q -quick=%v.\n\n", o.only, o.measure, o.carrier, o.dns, o.loss, o.tls, o.policy, o.reverse, o.agent, o.sites, o.quick)
	}
	defer ways.reportCarriers(w)
	if len(s.peers) == 0 {
		return
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

const carriersPreface = `
## Carriers

The same work by every way through culvert, and by the nearest thing that HAProxy does: it passes CONNECT on to services that answer it, over
HTTP/1.1. The load generator dials as programs do and costs more than the one above, so these figures are to be compared with each other
and not with those. 1 and 64 are tunnels at once; connect-h2, connect-h3 and websocket
over h2 have all 64 on one connection, hbone on up to four, the others have one each.
UDP is echoed datagram by datagram, so twice its trips are datagrams a second; nginx passes datagrams on by their port and reads no names. In
QUIC passthrough a tunnel is a connection of quic-go's, from client to service: what it takes is mostly theirs.

- **Memory** is of %d idle tunnels (400 of QUIC), that have each carried something a few seconds before: what the proxy
  holds for them, and not their services.
- **Beside a stalled one**: round trips on one tunnel while the service of another on the same connection takes nothing of what is
  sent to it. A trip that has not come back when the measurement ends (%v) counts as long as it was waited for.

Each cell: median, and median ratio to %s in the same round.

`

// reportCarriers writes the part of the page that is about them.
func (s *suite) reportCarriers(w io.Writer) {
	if len(s.peers) == 0 {
		return
	}
	var names []string
	for _, p := range s.peers {
		names = append(names, p.name)
	}
	fmt.Fprintf(w, carriersPreface, s.tunnels, s.slice, names[0])
	s.results.printCarriers(w, names)
	for _, t := range s.trouble {
		fmt.Fprintf(w, "\nTROUBLE  %s\n", t)
	}
}
