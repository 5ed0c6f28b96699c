//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"
)

const (
	dnsNames   = 10      // of the servers' own, and as many services
	dnsMany    = 100_000 // services in a large table
	dnsForward = 1000    // names of others that are asked for
	dnsSteady  = 2000    // questions a second where the time of an answer is measured
)

// dnsSteps are what may be measured of DNS servers.
var dnsSteps = []string{"local", "cached", "paced", "many"}

// A dnsBench measures DNS servers beside each other.
type dnsBench struct {
	*suite
	questions map[string]string // files, by step
	paced     []*running        // as live, on one core each
	rest      string            // the cores they are not on, for dnsperf; "" means all
}

const dnsPreface = `
## DNS

dnsperf asks %d names of each server's own, and %d names of others that the server has in its cache; 100 questions are under way. The 99th percentile is
taken at %d questions a second. CPU is the server's processor time. All have two threads but dnsmasq, which has one. Each cell: median, median ratio to unbound in the
same round, half the range.

On one core, where that is said, servers have the last one and nothing else, and dnsperf has the others; there are %d questions a second then, whether those before are
answered or not, and what is not answered within %d s is lost.

`

func dnsRows() []row {
	return []row{
		{id: "local", title: "own names, questions/s", more: true},
		{id: "p99local", title: "own names, p99, us", digit: 1},
		{id: "cpulocal", title: "own names, CPU per question, us", digit: 1},
		{id: "cached", title: "cached names of others, questions/s", more: true},
		{id: "p99cached", title: "cached names of others, p99, us", digit: 1},
		{id: "cpucached", title: "cached names of others, CPU per question, us", digit: 1},
		{id: "p99pacedlocal", title: "own names on one core, p99, us", digit: 1, limit: pacedP99},
		{id: "cpupacedlocal", title: "own names on one core, CPU per question, us", digit: 1},
		{id: "lostpacedlocal", title: "own names on one core, lost of 100,000", digit: 1},
		{id: "p99pacedcached", title: "cached names of others on one core, p99, us", digit: 1, limit: pacedP99},
		{id: "cpupacedcached", title: "cached names of others on one core, CPU per question, us", digit: 1},
		{id: "lostpacedcached", title: "cached names of others on one core, lost of 100,000", digit: 1},
		{id: "many", title: "own names of 100,000 services, questions/s", more: true, own: true},
		{id: "cpumany", title: "own names of 100,000 services, CPU per question, us", digit: 1, own: true},
		{id: "memory", title: "memory of a service (PSS), KiB", digit: 2, own: true},
		{id: "reload", title: "one of 100,000 changed, to the first answer with it, s", digit: 3, own: true},
	}
}

// dnsPeers are who takes part.
func dnsPeers(culvert, coredns string) []*peer {
	first := func(name string, args ...string) func(context.Context) string {
		return func(ctx context.Context) string { return firstLine(ctx, name, args...) }
	}
	all := []*peer{
		{name: us, version: first(culvert, "version"), command: dnsCulvert, collect: collectCulvert},
		{name: "coredns", version: first(coredns, "-version"), command: func(r rig) (*exec.Cmd, error) {
			hosts, err := r.write("hosts", hosts(r.routes))
			if err != nil {
				return nil, err
			}
			host, port, _ := net.SplitHostPort(r.listen)
			conf, err := r.write("Corefile", fmt.Sprintf(".:%s {\n bind %s\n hosts %s {\n ttl 5\n reload 0\n fallthrough\n }\n cache 3600\n forward . %s\n}\n", port, host, hosts, r.origin))
			return exec.Command(coredns, "-conf", conf), err
		}},
		{name: "unbound", version: first("/usr/sbin/unbound", "-V"), command: func(r rig) (*exec.Cmd, error) {
			var b strings.Builder
			fmt.Fprintf(&b, "server:\n interface: %s\n do-daemonize: no\n use-syslog: no\n username: \"\"\n chroot: \"\"\n directory: %s\n pidfile: \"\"\n do-ip6: no\n module-config: \"iterator\"\n num-threads: 2\n do-not-query-localhost: no\n local-zone: \"mesh.internal\" static\n",
				strings.Replace(r.listen, ":", "@", 1), r.dir)
			for i := range r.routes {
				fmt.Fprintf(&b, " local-data: \"%s 5 A %s\"\n", dnsName(i), dnsAddr(i))
			}
			fmt.Fprintf(&b, "forward-zone:\n name: \".\"\n forward-addr: %s\nremote-control:\n control-enable: no\n", strings.Replace(r.origin, ":", "@", 1))
			conf, err := r.write("unbound.conf", b.String())
			return exec.Command("/usr/sbin/unbound", "-d", "-c", conf), err
		}},
		{name: "dnsmasq", version: first("/usr/sbin/dnsmasq", "--version"), command: func(r rig) (*exec.Cmd, error) {
			hosts, err := r.write("hosts", hosts(r.routes))
			host, port, _ := net.SplitHostPort(r.listen)
			return exec.Command("/usr/sbin/dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--addn-hosts="+hosts, "--user=", "--pid-file=",
				"--listen-address="+host, "--bind-interfaces", "--port="+port, "--cache-size=10000", "--local-ttl=5", "--dns-forward-max=1000", "--server="+strings.Replace(r.origin, ":", "#", 1)), err
		}},
	}
	for _, p := range all {
		p.ready = dnsReady
	}
	return all
}

func dnsName(i int) string { return fmt.Sprintf("s%d.shop.svc.west.mesh.internal", i) }
func dnsAddr(i int) string { return fmt.Sprintf("10.%d.%d.%d", 1+i>>16, i>>8&255, i&255) }

func hosts(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%s %s\n", dnsAddr(i), dnsName(i))
	}
	return b.String()
}

func dnsCulvert(r rig) (*exec.Cmd, error) {
	file, err := dnsConfig(r, r.routes, dnsAddr(0))
	return exec.Command(r.culvert, "dns", "--config", file), err
}

// dnsConfig writes a file of n services, the first of them at addr.
func dnsConfig(r rig, n int, addr string) (path string, err error) {
	var b strings.Builder
	fmt.Fprintf(&b, `admin: %s
networks: [{name: west, cidrs: [127.0.0.0/8, 10.0.0.0/8]}]
dns: {listen: ["udp://%[2]s", "tcp://%[2]s"], upstreams: [%[3]q], recursionClients: [127.0.0.0/8]}
log: {level: error}
services:
`, r.admin, r.listen, r.origin)
	for i := range n {
		at := dnsAddr(i)
		if i == 0 {
			at = addr
		}
		fmt.Fprintf(&b, "  - mesh: {service: s%d, namespace: shop, cluster: west}\n    ports: [443]\n    endpoints: [\"%s:443\"]\n", i, at)
	}
	next, err := r.write("culvert.yaml.next", b.String())
	if err != nil {
		return "", err
	}
	path = strings.TrimSuffix(next, ".next")
	return path, os.Rename(next, path)
}

// dnsAsk returns the first address of a name.
func dnsAsk(addr, name string) (string, error) {
	c := &dns.Client{Timeout: time.Second}
	m, _, err := c.Exchange(new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.TypeA), addr)
	if err != nil {
		return "", err
	}
	if len(m.Answer) == 0 {
		return "", fmt.Errorf("%s: %s without an answer", name, dns.RcodeToString[m.Rcode])
	}
	if a, ok := m.Answer[0].(*dns.A); ok {
		return a.A.String(), nil
	}
	return "", fmt.Errorf("%s: %s", name, m.Answer[0])
}

func dnsReady(_ context.Context, addr string) error {
	if _, err := dnsAsk(addr, "warm.example.net"); err != nil {
		return err
	}
	_, err := dnsAsk(addr, dnsName(0))
	return err
}

// origin answers for all names, an hour long, until it is stopped.
func origin() (addr string, stop func(), err error) {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	srv := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		m.RecursionAvailable = true
		if q.Question[0].Qtype == dns.TypeA {
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 3600}, A: net.IPv4(192, 0, 2, 1)}}
		}
		_ = w.WriteMsg(m)
	})}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = srv.ActivateAndServe() }()
	return pc.LocalAddr().String(), func() { _ = srv.Shutdown(); _ = pc.Close(); <-ended }, nil
}

// newDNS is the part of the suite that measures DNS servers. Its peers are
// nobody where nothing of theirs is to be measured.
func (s *suite) newDNS(o options) (*dnsBench, error) {
	re, err := regexp.Compile(o.dns)
	if err != nil {
		return nil, fmt.Errorf("-dns: %w", err)
	}
	b := &dnsBench{suite: &suite{}, questions: map[string]string{}}
	*b.suite = *s
	b.results, b.peers, b.live = make(results), nil, nil
	if o.dns == "none" || !slices.ContainsFunc(dnsSteps, b.measures) {
		return b, nil
	}
	coredns := filepath.Join(s.rig.dir, "coredns")
	for _, p := range dnsPeers(o.culvert, coredns) {
		if re.MatchString(p.name) {
			b.peers = append(b.peers, p)
		}
	}
	if slices.ContainsFunc(b.peers, func(p *peer) bool { return p.name == "coredns" }) {
		build := exec.Command("go", "build", "-o", coredns, ".")
		build.Dir = "coredns"
		if out, err := build.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("build CoreDNS (leave it out with -dns): %w\n%s", err, out)
		}
	}
	return b, nil
}

// run measures.
func (b *dnsBench) run(ctx context.Context) error {
	addr, stop, err := origin()
	if err != nil {
		return err
	}
	defer stop()
	b.rig.origin, b.rig.routes = addr, dnsNames
	var own, others strings.Builder
	for i := range dnsNames {
		fmt.Fprintln(&own, dnsName(i), "A")
	}
	for i := range dnsForward {
		fmt.Fprintf(&others, "www.n%d.example.net A\n", i)
	}
	for name, text := range map[string]string{"local": own.String(), "cached": others.String()} {
		if b.questions[name], err = b.rig.write("dns-"+name, text); err != nil {
			return err
		}
	}
	for _, p := range b.peers {
		if b.measures("local") || b.measures("cached") {
			run, err := b.warm(ctx, p)
			if err != nil {
				return err
			}
			defer run.stop()
			b.live = append(b.live, run)
		}
		if b.measures("paced") {
			run, err := b.warm(ctx, b.pinned(p))
			if err != nil {
				return err
			}
			defer run.stop()
			b.paced = append(b.paced, run)
		}
	}
	for round := range b.rounds {
		for _, step := range []string{"local", "cached"} {
			if !b.measures(step) {
				continue
			}
			fmt.Fprintf(b.log, "round %d of %d: dns, %s\n", round+1, b.rounds, step)
			for i := range b.live {
				if err := b.step(ctx, b.live[(i+round)%len(b.live)], step, step); err != nil {
					return err
				}
			}
		}
		if err := b.pace(ctx, round); err != nil {
			return err
		}
		if b.peers[0].name == us && b.measures("many") {
			fmt.Fprintf(b.log, "round %d of %d: dns, many\n", round+1, b.rounds)
			if err := b.many(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// step asks as fast as it can be answered, and then at a steady rate.
func (b *dnsBench) step(ctx context.Context, p *running, questions, id string) error {
	seconds := fmt.Sprint(max(b.slice.Seconds(), 1))
	before := cpu(p.pids)
	fast, err := b.perf(ctx, p, questions, "-l", seconds)
	if err != nil {
		return err
	}
	b.results.add(id, p.name, fast.rate)
	b.results.add("cpu"+id, p.name, micros(cpu(p.pids)-before)/fast.count)
	steady, err := b.perf(ctx, p, questions, "-l", seconds, "-Q", fmt.Sprint(dnsSteady), "-v")
	if err != nil {
		return err
	}
	b.results.add("p99"+id, p.name, 1e6*steady.p99)
	return nil
}

// many measures culvert alone with a large table, and how soon it has another.
func (b *dnsBench) many(ctx context.Context) error {
	var mem [2]float64
	for i, n := range []int{dnsNames, dnsMany} {
		r := b.rig
		r.routes = n
		p, err := b.peers[0].start(ctx, r)
		if err != nil {
			return err
		}
		defer p.stop()
		if mem[i], _, err = b.settled(ctx, p); err != nil {
			return err
		}
		if n != dnsMany {
			p.stop()
			continue
		}
		if err := b.step(ctx, p, "local", "many"); err != nil {
			return err
		}
		const changed = "10.255.255.1"
		if _, err := dnsConfig(p.rig, n, changed); err != nil {
			return err
		}
		begun := time.Now()
		_ = p.cmd.Process.Signal(syscall.SIGHUP)
		for got := ""; got != changed; {
			if time.Since(begun) > 20*time.Second {
				return errors.New("a changed table is not answered from")
			}
			if got, err = dnsAsk(p.rig.listen, dnsName(0)); err != nil {
				return err
			}
		}
		b.results.add("reload", us, time.Since(begun).Seconds())
	}
	b.results.add("memory", us, (mem[1]-mem[0])/(dnsMany-dnsNames))
	return nil
}

// A perf is what dnsperf found.
type perf struct{ rate, count, lost, p99 float64 }

var (
	perfRate  = regexp.MustCompile(`Queries per second:\s+([0-9.]+)`)
	perfCount = regexp.MustCompile(`Queries completed:\s+([0-9]+)`)
	perfLost  = regexp.MustCompile(`Queries lost:\s+([0-9]+)`)
	perfTime  = regexp.MustCompile(`(?m)^> NOERROR .* ([0-9.]+)$`)
)

func (b *dnsBench) perf(ctx context.Context, p *running, questions string, args ...string) (r perf, err error) {
	host, port, _ := net.SplitHostPort(p.rig.listen)
	what := questions
	command := append([]string{"dnsperf", "-s", host, "-p", port, "-d", b.questions[questions], "-c", "4"}, args...)
	if slices.Contains(b.paced, p) {
		what = "paced, " + questions
		if b.rest != "" {
			command = append([]string{"taskset", "-c", b.rest}, command...)
		}
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	// Into a file: who reads a pipe takes time of some core for each line.
	out, err := os.Create(filepath.Join(b.rig.dir, "dnsperf.out"))
	if err != nil {
		return r, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	err = cmd.Run()
	text, _ := os.ReadFile(out.Name())
	if err != nil {
		return r, fmt.Errorf("%s: %w\n%s", cmd, err, text[:min(len(text), 4096)])
	}
	number := func(re *regexp.Regexp) (v float64) {
		if m := re.FindSubmatch(text); m != nil {
			v, _ = strconv.ParseFloat(string(m[1]), 64)
		}
		return v
	}
	if r.rate, r.count = number(perfRate), number(perfCount); r.count == 0 {
		return r, fmt.Errorf("%s: no answer\n%s", cmd, text)
	}
	if r.lost = number(perfLost); r.lost > 0 {
		b.trouble = append(b.trouble, fmt.Sprintf("%s, %s: %.0f of %.0f questions were not answered", p.name, what, r.lost, r.lost+r.count))
	}
	var times []float64
	for _, m := range perfTime.FindAllSubmatch(text, -1) {
		v, _ := strconv.ParseFloat(string(m[1]), 64)
		times = append(times, v)
	}
	if slices.Sort(times); len(times) > 0 {
		r.p99 = times[len(times)*99/100]
	}
	return r, nil
}

// report writes the part of the page that is about DNS.
func (b *dnsBench) report(ctx context.Context, w io.Writer) {
	if len(b.peers) == 0 {
		return
	}
	fmt.Fprintf(w, dnsPreface, dnsNames, dnsForward, dnsSteady, dnsPaced, pacedPatience)
	var names []string
	for _, p := range b.peers {
		names = append(names, p.name)
		fmt.Fprintf(w, "- %s: %s\n", p.name, p.version(ctx))
	}
	reference := names[0]
	if slices.Contains(names, "unbound") {
		reference = "unbound"
	}
	io.WriteString(w, "\n")
	b.results.table(w, names, reference, dnsRows())
	b.judgePaced(w)
	for _, t := range b.trouble {
		fmt.Fprintf(w, "\nTROUBLE  %s\n", t)
	}
}
