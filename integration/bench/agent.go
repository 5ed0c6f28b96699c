//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"

	"culvert.dev/internal/capture"
)

// An agentBench measures the agent beside other ways from a program to a service.
type agentBench struct {
	*suite
	ways    []agentWay
	note    string // why nothing is measured
	gateway string // address of the gateway, without TLS
	outside string // further listeners of it, YAML
	live    map[string]*running
	gate    *running // the gateway
}

// newAgent is the part of the suite about the agent, for the ways that o names.
func (s *suite) newAgent(o options) (*agentBench, error) {
	re, err := regexp.Compile(o.agent)
	if err != nil {
		return nil, fmt.Errorf("-agent: %w", err)
	}
	part := *s
	part.results, part.trouble, part.slice, part.role = make(results), nil, min(s.slice, time.Second), "load"
	b := &agentBench{suite: &part, live: make(map[string]*running)}
	for _, w := range agentWays() {
		if !re.MatchString(w.name) {
			continue
		}
		if w.program != "" {
			if _, err := exec.LookPath(w.program); err != nil {
				return nil, fmt.Errorf("%s takes part and is not there (leave it out with -agent): %w", w.name, err)
			}
		}
		b.ways = append(b.ways, w)
	}
	if len(b.ways) > 0 && os.Geteuid() != 0 {
		b.ways, b.note = nil, "not measured: network namespaces need root"
	}
	return b, nil
}

func (b *agentBench) has(name string) bool {
	return slices.ContainsFunc(b.ways, func(w agentWay) bool { return w.name == name })
}

func (b *agentBench) run(ctx context.Context) error {
	if len(b.ways) == 0 {
		return nil
	}
	host, err := newNetwork()
	if err != nil {
		return err
	}
	defer host.close()
	for _, args := range []string{"addr add 10.75.0.1/32 dev lo", "route add " + capturedNet + " dev lo src 10.75.0.1", "route add " + redirectedNet + " dev lo src 10.75.0.1", "route add " + plainNet + " dev lo src 10.75.0.1", "route add " + floorNet + " dev lo src 10.75.0.1"} {
		if err := host.run("ip", strings.Fields(args)...); err != nil {
			return err
		}
	}
	// Processes are in the network of the thread that starts them.
	if err := host.do(func() error { return b.onHost(ctx) }); err != nil {
		return fmt.Errorf("the agent: %w", err)
	}
	if b.has("agent") && b.only.MatchString("path") {
		if err := b.overPath(ctx); err != nil {
			return fmt.Errorf("the agent, over a path: %w", err)
		}
	}
	return nil
}

// onHost measures what has all of its ends on one host.
func (b *agentBench) onHost(ctx context.Context) error {
	stop, err := b.cast()
	if err != nil {
		return err
	}
	defer stop()
	if err := b.startGateway(ctx); err != nil {
		return err
	}
	defer b.gate.stop()
	programs := make(map[string]*program)
	for _, w := range b.ways {
		if w.start != nil {
			run, err := (&peer{name: w.name, command: func(r rig) (*exec.Cmd, error) { return w.start(b, r) }, ready: listens}).start(ctx, b.rig)
			if err != nil {
				return err
			}
			defer run.stop()
			b.live[w.name] = run
		}
		var wrap []string
		if w.wrap != nil {
			if wrap, err = w.wrap(b); err != nil {
				return err
			}
		}
		p, err := startProgram(b.rig, wrap)
		if err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
		defer p.stop()
		programs[w.name] = p
		if err := b.warm(ctx, &w, p); err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
	}
	for round := range b.rounds {
		for _, op := range []string{"conns", "trips", "down"} {
			if !b.only.MatchString(op) {
				continue
			}
			fmt.Fprintf(b.log, "the agent, round %d of %d: %s\n", round+1, b.rounds, op)
			for i := range b.ways {
				w := &b.ways[(i+round)%len(b.ways)]
				if err := b.measureWay(ctx, w, programs[w.name], op); err != nil {
					return fmt.Errorf("%s: %w", w.name, err)
				}
			}
		}
		if b.has("agent") && b.only.MatchString("cold") {
			if err := b.cold(ctx); err != nil {
				return err
			}
		}
		if b.has("captured") && b.only.MatchString("vips") {
			if err := b.installVIPs(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// startGateway starts the gateway that most of the ways lead by.
func (b *agentBench) startGateway(ctx context.Context) (err error) {
	gate := &peer{name: "gateway", command: b.gatewayConfig, ready: listens}
	if b.gate, err = gate.start(ctx, b.rig); err == nil {
		b.gateway = b.gate.addr.String()
	}
	return err
}

// beside returns what stands beside the program, nil for nothing.
func (b *agentBench) beside(w *agentWay) *running {
	if w.as != "" {
		return b.live[w.as]
	}
	return b.live[w.name]
}

// job is what the program does for so long.
func (b *agentBench) job(w *agentWay, op string, d time.Duration) agentJob {
	j := agentJob{Op: op, To: w.to(b), Time: d}
	if w.proxy != nil {
		addr := ""
		if run := b.beside(w); run != nil {
			addr = run.addr.String()
		}
		j.Proxy = w.proxy(b, addr)
	}
	return j
}

// warm waits until a way carries: rules of a capture come after the listeners.
func (b *agentBench) warm(ctx context.Context, w *agentWay, p *program) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		_, err := p.do(ctx, b.job(w, "conns", 50*time.Millisecond))
		if err == nil {
			return nil
		}
		if pause(ctx, 50*time.Millisecond) != nil {
			return err
		}
	}
}

func (b *agentBench) measureWay(ctx context.Context, w *agentWay, p *program, op string) error {
	var pids []int
	if run := b.beside(w); run != nil {
		pids = append(pids, run.pids...)
	}
	if w.gate {
		pids = append(pids, b.gate.pids...)
	}
	before := cpu(pids)
	r, err := p.do(ctx, b.job(w, op, b.slice))
	if err != nil {
		return err
	}
	if err := pause(ctx, 50*time.Millisecond); err != nil { // what trails behind the answer
		return err
	}
	took := cpu(pids) - before
	switch {
	case op == "down":
		b.results.add("down", w.name, float64(r.Bytes)/1e6/r.Took.Seconds())
		b.results.add("cpudown", w.name, took.Seconds()/(float64(r.Bytes)/1e9))
	default:
		b.results.add(op, w.name, micros(r.P50))
		b.results.add("cpu"+op, w.name, micros(took)/float64(r.Count))
	}
	return nil
}

// cold measures programs that are started for one connection, as a ProxyCommand of ssh is.
func (b *agentBench) cold(ctx context.Context) error {
	fmt.Fprintln(b.log, "the agent: programs that are started for one connection")
	agent := b.live["agent"].addr.String()
	h, err := hello(serviceName(0))
	if err != nil {
		return err
	}
	sent := append(opening(h, cmdEcho, 0), make([]byte, payloadLen)...)
	for name, args := range map[string][]string{
		"agent": {b.rig.culvert, "connect", "--agent", agent, serviceName(0), "443"},
		"nc":    {"nc.openbsd", "-X", "connect", "-x", agent, serviceName(0), "443"},
	} {
		var times []float64
		for range 15 {
			took, err := firstByte(ctx, sent, args)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			times = append(times, micros(took)/1e3)
		}
		slices.Sort(times)
		b.results.add("cold", name, times[len(times)/2])
	}
	return nil
}

// firstByte returns how long a program takes from its start to the answer of a service.
func firstByte(ctx context.Context, sent []byte, args []string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	begin := time.Now()
	h, err := startCommand(exec.CommandContext(ctx, args[0], args[1:]...))
	if err != nil {
		return 0, err
	}
	defer func() {
		_ = h.cmd.Process.Kill()
		_ = h.cmd.Wait()
	}()
	if _, err := h.in.Write(sent); err != nil {
		return 0, err
	}
	_, err = io.ReadFull(h.out, make([]byte, payloadLen))
	return time.Since(begin), err
}

// manyVIPs is how many addresses a table of rules gets.
const manyVIPs = 10_000

// installVIPs measures how long it takes until rules lead many addresses to the agent, and how
// long nft takes for a set of as many.
func (b *agentBench) installVIPs(ctx context.Context) error {
	fmt.Fprintln(b.log, "the agent: rules for many virtual IPs")
	var addrs []netip.Addr
	for a := netip.AddrFrom4([4]byte{240, 0, 0, 1}); len(addrs) < manyVIPs; a = a.Next() {
		addrs = append(addrs, a)
	}
	begin := time.Now()
	c, err := capture.Install(capture.Rules{Name: "bench", VIPs: true, Port: 1})
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetVIPs(addrs); err != nil {
		return err
	}
	b.results.add("vips", "captured", micros(time.Since(begin))/1e3)
	var rules strings.Builder
	rules.WriteString("table inet bench-vips { set vips { type ipv4_addr; elements = { ")
	for _, a := range addrs {
		rules.WriteString(a.String() + ", ")
	}
	rules.WriteString("}; }; chain out { type nat hook output priority -100; ip daddr @vips tcp dport != 0 redirect to :1; }; }")
	file, err := b.rig.write("vips.nft", rules.String())
	if err != nil {
		return err
	}
	begin = time.Now()
	out, err := exec.CommandContext(ctx, "nft", "-f", file).CombinedOutput()
	if err != nil {
		return fmt.Errorf("nft: %w: %s", err, out)
	}
	b.results.add("vips", "nft", micros(time.Since(begin))/1e3)
	if out, err := exec.CommandContext(ctx, "nft", "delete table inet bench-vips").CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, out)
	}
	return nil
}

// overPath measures connections of a program near its agent to a gateway that is far.
func (b *agentBench) overPath(ctx context.Context) error {
	p, err := newPath()
	if err != nil {
		return err
	}
	defer p.close()
	far := &agentBench{suite: b.suite, live: make(map[string]*running)}
	plain, inside := net.JoinHostPort(farHost, "80"), net.JoinHostPort(farHost, "443")
	far.outside = fmt.Sprintf("  - {address: \"%s\", protocols: [connect]}\n  - {address: \"%s\", tls: {protocols: [connect-h2], certificateFile: %s, keyFile: %s, clientCAFile: {bench.test: %s}}}\n",
		plain, inside, keyFile("bench.crt"), keyFile("bench.key"), keyFile("ca.crt"))
	var stop func()
	err = p.far.do(func() (err error) {
		if stop, err = far.cast(); err == nil {
			err = far.startGateway(ctx)
		}
		return err
	})
	if stop != nil {
		defer stop()
	}
	if err != nil {
		return err
	}
	defer far.gate.stop()
	return p.near.do(func() error {
		program, err := startProgram(b.rig, nil)
		if err != nil {
			return err
		}
		defer program.stop()
		once := func(proxy, row, column string) error {
			r, err := program.do(ctx, agentJob{Op: "conns", To: byName(nil), Proxy: proxy, Time: 1})
			if err == nil {
				b.results.add(row, column, micros(r.P50)/1e3)
			}
			return err
		}
		for round := range b.rounds {
			fmt.Fprintf(b.log, "the agent, round %d of %d: a path of %v each way\n", round+1, b.rounds, pathDelay)
			for _, row := range []string{"first", "second"} {
				if err := once(plain, row, "gateway"); err != nil {
					return err
				}
			}
			command := func(r rig) (*exec.Cmd, error) { return agentCommand(r, inside, "") }
			run, err := (&peer{name: "agent", command: command, ready: listens}).start(ctx, b.rig)
			if err != nil {
				return err
			}
			for _, row := range []string{"first", "second"} {
				if err := once(run.addr.String(), row, "agent"); err != nil {
					run.stop()
					return err
				}
			}
			run.stop()
		}
		return nil
	})
}

// agentRows are the lines of the table.
func agentRows() []row {
	return []row{
		{id: "conns", title: "connection and first byte, us", digit: 1},
		{id: "cpuconns", title: "CPU per connection, us", digit: 1},
		{id: "trips", title: "round trip, us", digit: 1},
		{id: "cputrips", title: "CPU per round trip, us", digit: 1},
		{id: "down", title: "download, MB/s", more: true},
		{id: "cpudown", title: "CPU per GB, s", digit: 2},
		{id: "first", title: "connection and first byte over the path, ms", digit: 1},
		{id: "second", title: "the second one, ms", digit: 1},
		{id: "cold", title: "a program for one connection, to the first byte, ms", digit: 1},
		{id: "vips", title: "rules for 10,000 virtual IPs, ms", digit: 1},
	}
}

const agentPreface = `
## Agent

A program in Python, the same for all, reaches a service of its own host: it connects, sends 64 bytes after a ClientHello and gets them back, and
ends; makes round trips of 64 bytes on one connection; and downloads. CPU is of the agent, or what stands in its place, and of the gateway. **Over
the path** the program and its agent are %v each way from the gateway, and the agent has just started: a program that carries the packets one by
one delays them. **A program for one connection** is ` + "`culvert connect`, or `nc -X connect`" + `, to the agent: from its start, as a ProxyCommand of ssh. Each
cell: median, median ratio to the gateway alone in the same round, half the range. What the figures say: [adr/0023](internals/adr/0023-cost-of-the-agent.md).

`

// report writes the table.
func (b *agentBench) report(ctx context.Context, w io.Writer) {
	if b.note != "" {
		fmt.Fprintf(w, "\n## Agent\n\n%s.\n", b.note)
	}
	if len(b.ways) == 0 {
		return
	}
	fmt.Fprintf(w, agentPreface, pathDelay)
	var names []string
	for _, way := range b.ways {
		names = append(names, way.name)
		fmt.Fprintf(w, "- %s: %s\n", way.name, way.version(ctx))
	}
	if b.results["cold"] != nil {
		names = append(names, "nc")
		fmt.Fprintf(w, "- nc: %s\n", "netcat-openbsd, which asks the agent by CONNECT")
	}
	if b.results["vips"] != nil {
		names = append(names, "nft")
		fmt.Fprintf(w, "- nft: %s\n", firstLine(ctx, "nft", "--version"))
	}
	fmt.Fprintln(w)
	b.results.table(w, names, "gateway", agentRows())
	fmt.Fprint(w, "\n```\n")
	b.results.judgeRows(w, "agent", []row{
		{id: "conns", title: "CONNECT through the agent, connection and first byte, us", digit: 1, than: "in-its-place", ratio: 1.05},
		{id: "cpuconns", title: "CONNECT through the agent, CPU, us", digit: 1, than: "in-its-place", ratio: 1.05},
		{id: "second", title: "CONNECT through the agent over the path, connection and first byte, ms", digit: 1, than: "gateway", ratio: 1.05},
		{id: "cold", title: "a program for one connection, to the first byte, ms", digit: 1, limit: 25},
	})
	b.results.judgeRows(w, "agent", []row{{id: "conns", title: "CONNECT through the agent without a path, connection and first byte, us", digit: 1, than: "gateway", ratio: 1.05}})
	b.results.judgeDifference(w, "a captured connection is slower than by redsocks, without TLS, us", b.results["conns"]["captured-plain"], b.results["conns"]["redsocks"], 30, false)
	b.results.judgeDifference(w, "a captured connection is slower than by redsocks, us", b.results["conns"]["captured"], b.results["conns"]["redsocks"], 30, false)
	b.results.judgeDifference(w, "the second connection over the path is faster than the first, ms", b.results["first"]["agent"], b.results["second"]["agent"], 2*pathDelay.Seconds()*1e3, true)
	b.results.judgeRows(w, "captured", []row{{id: "vips", title: "rules for 10,000 virtual IPs, ms", digit: 1, limit: 200}})
	fmt.Fprint(w, "```\n")
}

// judgeDifference writes PASS or SHORT for the median of what lies between two values of each
// round: at most the limit, or at least.
func (r results) judgeDifference(w io.Writer, title string, a, b []float64, limit float64, atLeast bool) {
	var all []float64
	for i := range min(len(a), len(b)) {
		all = append(all, a[i]-b[i])
	}
	if len(all) == 0 {
		return
	}
	slices.Sort(all)
	n := len(all)
	v := rounded((all[(n-1)/2]+all[n/2])/2, 1)
	word, want, ok := "PASS ", "at most", v <= limit
	if atLeast {
		want, ok = "at least", v >= limit
	}
	if !ok {
		word = "SHORT"
	}
	fmt.Fprintf(w, "%s  %s: %s, %s %s\n", word, title, number(v, 1), want, number(limit, 0))
}
