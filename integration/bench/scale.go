//go:build linux

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"
)

// A member is one culvert of a scale run with a backend and a load generator
// of its own: each of the three has the descriptors of one process.
type member struct {
	suite
	run *running
}

// A reading is what the machine holds.
type reading struct {
	pss     float64 // KiB, of all culverts
	fds     int     // likewise
	slab    float64 // KiB, of the kernel's objects
	sockets int     // of TCP, of all processes
	buffers float64 // KiB, in sockets
	cpu     time.Duration
}

// A census is what a scale run found.
type census struct {
	members       int
	tunnels       int // in all
	took          time.Duration
	before, after reading
	rate          [2]float64 // new connections a second at one member, before and after
	idle          float64    // microseconds of processor time a second for each 1,000 tunnels
}

// scale holds as many tunnels as so many culverts can, and looks at what they
// cost the culverts and the kernel.
func (s *suite) scale(ctx context.Context, n int, w io.Writer) error {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return err
	}
	// Two for each tunnel, less what a gateway keeps back and some to measure with.
	each := min(s.tunnels, (int(min(lim.Cur, 1<<30))-600)/2)
	var all []*member
	for range n {
		m := &member{suite: *s}
		stop, err := m.cast()
		if err != nil {
			return err
		}
		defer stop()
		if m.run, err = peers(s.rig.culvert)[0].start(ctx, m.rig); err != nil {
			return err
		}
		defer m.run.stop()
		if _, err := m.load.do(ctx, job{Op: "hold", To: m.run.addr, N: min(100, each)}); err != nil { // what the first ones make is not what one costs
			return err
		}
		all = append(all, m)
	}
	c := census{members: n}
	var err error
	if c.rate[0], err = all[0].newConns(ctx); err != nil {
		return err
	}
	if c.before, err = take(ctx, all); err != nil {
		return err
	}
	begin := time.Now()
	for i, m := range all {
		fmt.Fprintf(s.log, "tunnels of %d of %d\n", i+1, n)
		r, err := m.load.do(ctx, job{Op: "hold", To: m.run.addr, N: each})
		c.tunnels += r.Count
		if err != nil {
			return fmt.Errorf("after %d tunnels: %w", c.tunnels, err)
		}
	}
	c.took = time.Since(begin)
	if c.after, err = take(ctx, all); err != nil {
		return err
	}
	if err := pause(ctx, 10*s.slice); err != nil {
		return err
	}
	c.idle = micros(cpuOf(all)-c.after.cpu) / (10 * s.slice.Seconds()) / float64(c.tunnels) * 1000
	for i, m := range all {
		if _, err := m.load.do(ctx, job{Op: "touch"}); err != nil {
			return fmt.Errorf("the tunnels of %d of %d don't all stand: %w", i+1, n, err)
		}
	}
	if c.rate[1], err = all[0].newConns(ctx); err != nil {
		return err
	}
	c.page(w)
	return nil
}

func (m *member) newConns(ctx context.Context) (float64, error) {
	r, err := m.load.do(ctx, job{Op: "conns", To: m.run.addr, N: 64, Time: m.slice})
	return float64(r.Count) / max(r.Took.Seconds(), 1e-9), err
}

func cpuOf(all []*member) (sum time.Duration) {
	for _, m := range all {
		sum += cpu(m.run.pids)
	}
	return sum
}

// take reads everything once it stands still.
func take(ctx context.Context, all []*member) (r reading, err error) {
	for _, m := range all {
		kib, fds, err := m.settled(ctx, m.run)
		if err != nil {
			return r, err
		}
		r.pss += kib
		r.fds += fds
	}
	if r.slab, err = field("/proc/meminfo", "Slab:", 0); err != nil {
		return r, err
	}
	inuse, err := field("/proc/net/sockstat", "TCP:", 1)
	if err != nil {
		return r, err
	}
	pages, err := field("/proc/net/sockstat", "TCP:", 9)
	r.sockets, r.buffers, r.cpu = int(inuse), pages*float64(os.Getpagesize())/1024, cpuOf(all)
	return r, err
}

// field returns a number of the line that begins with a word.
func field(file, word string, at int) (v float64, err error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); len(fields) > at+1 && fields[0] == word {
			_, err := fmt.Sscan(fields[at+1], &v)
			return v, err
		}
	}
	return 0, fmt.Errorf("%s: no %q", file, word)
}

// page writes what was found and what follows for a million.
func (c *census) page(w io.Writer) {
	const million = 1e6
	n := float64(c.tunnels)
	user := (c.after.pss - c.before.pss) / n
	sockets := float64(c.after.sockets - c.before.sockets)
	slab := (c.after.slab - c.before.slab) / sockets
	buffers := (c.after.buffers - c.before.buffers) / sockets
	gib := func(kib float64) string { return fmt.Sprintf("%.1f GiB", kib/(1<<20)) }
	fmt.Fprintf(w, `# A million tunnels

Written by `+"`make scale`"+`, which holds as many idle tunnels as one machine can stand in for, client, gateway and service at once, and
reckons from there.

## What was held

%s, %s. %d processes of culvert, each with a load generator and a backend of its own, since a process may
have %s descriptors here.

| | |
|---|---:|
| tunnels held | %s in %.0f s |
| every one of them passed 64 bytes both ways afterwards | yes |
| descriptors of the gateways for each | %.2f |
| memory of the gateways for each (PSS) | %.2f KiB |
| memory of the kernel for each socket (slab; there are four to a tunnel on one machine, two of them the gateway's) | %.2f KiB |
| socket buffers for each socket, idle | %.2f KiB |
| processor time while idle, for each 1,000 tunnels | %.0f µs a second |
| new connections/s at one gateway before, and with all held | %s, %s |

`, machine(), time.Now().Format(time.DateOnly), c.members, number(nofile(), 0),
		number(n, 0), c.took.Seconds(), float64(c.after.fds-c.before.fds)/n, user, slab, max(buffers, 0), c.idle,
		number(c.rate[0], 0), number(c.rate[1], 0))
	fmt.Fprintf(w, `## What a million takes

| | each | 1,000,000 idle |
|---|---:|---:|
| descriptors of the gateway | 2 | 2,000,000 |
| memory of the gateway | %.2f KiB | %s |
| memory of the kernel for the gateway's two sockets | %.2f KiB | %s |
| together | %.2f KiB | %s |
| processor time while idle | | %.1f %% of a core |

What tunnels do comes on top: a connection with bytes under way has socket buffers, of 128 KiB to receive and 16 KiB to send at first, and as
much as tcp_rmem and tcp_wmem allow later. A tunnel whose client does not read holds up to 64 KiB in the gateway, all of them a quarter of
`+"`limits.memory`"+`.

One process can hold them, or several can, on one address each or behind a load balancer. A process of 250,000 keeps a crash and a
restart small.

| what to set | to | why |
|---|---|---|
| `+"`LimitNOFILE`"+` | 2,001,000 | two for each tunnel, and what the gateway keeps back |
| `+"`fs.nr_open`"+` | more than that | the most that LimitNOFILE may be; 1,048,576 unless set |
| `+"`fs.file-max`"+` | more than all processes need | the machine's total |
| `+"`net.core.somaxconn`, `net.ipv4.tcp_max_syn_backlog`"+` | 16384 | clients that come back all at once wait here |
| `+"`net.ipv4.tcp_mem`"+` | pages for all buffers, of which idle tunnels need next to none | beyond the third number connections are cut off |
| `+"`net.ipv4.ip_local_port_range`"+` | 1024 65535 | see below |
| `+"`net.netfilter.nf_conntrack_max`"+` | 2,000,000, or no tracking of these ports | where there is a firewall that keeps state, two entries for each tunnel |

**Ports.** A connection is told apart by both addresses and both ports. Clients have their own addresses, so the listener's side needs
nothing. Towards a service all come from the gateway's address: one endpoint can be reached by as many tunnels as there are local ports, 28,232
unless set and 64,512 at most. A million tunnels need 36 endpoints, or 16 with the whole range. Beyond that the dial fails with `+"`overload`"+`
and says so; give the service more endpoints, or addresses.

**Reconnecting.** A million clients that lost their gateway come back within moments. At %s new connections/s for one gateway of two cores
that takes %.0f s; `+"`limits.maxPendingConnections`"+` holds as it always does, and the drain of an orderly restart spreads
the resets over a fifth of `+"`drain.timeout`"+`, which may be hours.
`, user, gib(user*million), 2*slab, gib(2*slab*million), user+2*slab, gib((user+2*slab)*million),
		c.idle*million/1000/1e6*100, number(c.rate[1], 0), million/max(c.rate[1], 1))
}

func nofile() float64 {
	var lim syscall.Rlimit
	_ = syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim)
	return float64(lim.Cur)
}
