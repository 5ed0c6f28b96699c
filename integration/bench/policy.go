//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"time"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// A policyKind is one of the ways to tell callers apart, and a table of its own.
type policyKind struct {
	carrier
	title string
}

// policies are what a peer has to look through, and what they are written to.
type policies struct {
	rig
	kind  *policyKind
	rules int  // that admit others, but for the last one; 0 means that everybody is admitted
	late  bool // another caller is admitted, too: what a reload changes
}

// lateCaller is a client that only a reload admits.
const lateCaller = "127.0.0.9"

// callers returns what the rules admit: n-1 that never call, and the one that does.
func (p *policies) callers() []string {
	var all []string
	for i := range p.rules - 1 {
		if p.kind.name == policyIdentity {
			all = append(all, fmt.Sprintf("workload-%06d", i))
		} else {
			all = append(all, fmt.Sprintf("10.%d.%d.0/24", i>>8, i&255))
		}
	}
	if p.rules > 0 {
		if p.kind.name == policyIdentity {
			all = append(all, "bench") // the path of identity, and the common name
		} else {
			all = append(all, "127.0.0.1/32")
		}
	}
	if p.late {
		all = append(all, lateCaller+"/32")
	}
	return all
}

// Kinds of policies, which are carriers of the load generator.
const (
	policyAddress   = "policies by address"
	policyIdentity  = "policies by identity"
	policyElsewhere = "policies of others"
)

// policyKinds lists them.
func policyKinds() []policyKind {
	return []policyKind{
		{
			carrier: carrier{name: policyAddress, prefix: "svc", dial: func(to string) tunnel.Dialer { return &connect.Dialer{Proxy: to} }},
			title:   "By the address of the client, which the last rule admits, by CONNECT. HAProxy has the addresses in a file, and Squid an `acl` and an `http_access` for each.",
		},
		{
			carrier: carrier{name: policyIdentity, prefix: "svc", dial: func(to string) tunnel.Dialer { return &connect.Dialer{Proxy: to, TLS: toProxy()} }},
			title:   "By the client certificate, by CONNECT inside TLS: culvert by its SPIFFE ID, and HAProxy by the common name (`ssl_c_s_dn(CN)`), from a file. Most of it is the handshake.",
		},
		{
			carrier: carrier{name: policyElsewhere, prefix: "svc"},
			title:   "By SNI, where policies are about other services alone. `none` and `10,000` have to be the same.",
		},
	}
}

// peers are who decides, each with no rules, with few and with many.
func (k *policyKind) peers() []*peer {
	var all []*peer
	ready := func(ctx context.Context, addr string) error {
		return (&caller{carrier: &k.carrier, to: addr}).echo(ctx)
	}
	add := func(program string, command func(p *policies) (*exec.Cmd, error)) {
		for _, rules := range []int{0, 10, 10_000} {
			if k.name == policyElsewhere && rules == 10 {
				continue
			}
			one := &peer{name: policyPeer(program, rules), carrier: &k.carrier, ready: ready}
			one.command = func(r rig) (*exec.Cmd, error) { return command(&policies{rig: r, kind: k, rules: rules, late: r.late}) }
			if program == us {
				one.collect = collectCulvert
			}
			all = append(all, one)
		}
	}
	add(us, (*policies).culvert)
	if k.name != policyElsewhere {
		add("haproxy", (*policies).haproxy)
	}
	if k.name == policyAddress {
		add("squid", (*policies).squid)
	}
	return all
}

func policyPeer(program string, rules int) string {
	if rules == 0 {
		return program + ", none"
	}
	return program + ", " + number(float64(rules), 0)
}

func (p *policies) culvert() (*exec.Cmd, error) {
	listener, b := "protocols: [sni, connect]", strings.Builder{}
	if p.kind.name == policyIdentity {
		listener = fmt.Sprintf("tls: {protocols: [connect], certificateFile: %s, keyFile: %s, clientCAFile: {bench.test: %s}}", keyFile("bench.crt"), keyFile("bench.key"), keyFile("ca.crt"))
	}
	fmt.Fprintf(&b, `listeners:
  - {address: "%s", %s}
admin: %s
limits: {maxPendingConnections: -1, maxPendingPerClient: -1, maxConnectionsPerClient: -1, connectionRatePerClient: -1, firstByteTimeout: 60s, handshakeTimeout: 60s}
log: {level: error}
`, p.listen, listener, p.admin)
	if p.rules > 0 {
		b.WriteString("policies:\n")
	}
	for i, caller := range p.callers() {
		source, targets := fmt.Sprintf("cidrs: [%s]", caller), ""
		switch p.kind.name {
		case policyIdentity:
			source = fmt.Sprintf("spiffe: [spiffe://bench.test/%s]", caller)
		case policyElsewhere:
			targets = fmt.Sprintf("targets: {names: [other%d.test]}, ", i)
		}
		fmt.Fprintf(&b, "  - {name: p%d, action: allow, %srules: [{sources: [{%s}]}]}\n", i, targets, source)
	}
	b.WriteString("services:\n")
	for i := range services {
		fmt.Fprintf(&b, "  - name: %s\n    endpoints: [\"%s\"]\n", serviceName(i), p.target(i))
	}
	file, err := p.replace("culvert.yaml", b.String())
	if err != nil {
		return nil, err
	}
	return exec.Command(p.rig.culvert, "gateway", "--config", file), nil
}

// replace puts a file in place at once.
func (p *policies) replace(name, text string) (string, error) {
	next, err := p.write(name+".next", text)
	if err != nil {
		return "", err
	}
	path := strings.TrimSuffix(next, ".next")
	return path, os.Rename(next, path)
}

func (p *policies) haproxy() (*exec.Cmd, error) {
	list, err := p.replace("callers.lst", strings.Join(p.callers(), "\n")+"\n")
	if err != nil {
		return nil, err
	}
	bind, rule := "", ""
	if p.kind.name == policyIdentity {
		var both []byte // HAProxy wants the key in the same file
		for _, name := range []string{"bench.crt", "bench.key"} {
			pem, err := os.ReadFile(keyFile(name))
			if err != nil {
				return nil, err
			}
			both = append(both, pem...)
		}
		file, err := p.write("both.pem", string(both))
		if err != nil {
			return nil, err
		}
		bind = fmt.Sprintf("ssl crt %s ca-file %s verify required", file, keyFile("ca.crt"))
	}
	switch {
	case p.rules > 0 && p.kind.name == policyIdentity:
		rule = fmt.Sprintf("http-request deny unless { ssl_c_s_dn(CN) -f %s }", list)
	case p.rules > 0:
		rule = fmt.Sprintf("http-request deny unless { src -f %s }", list)
	}
	var b strings.Builder
	fmt.Fprintf(&b, `global
	nbthread 2
	maxconn 8500
defaults
	mode http
	timeout connect 5s
	timeout client 1h
	timeout server 1h
	timeout tunnel 1h
frontend http
	bind %s %s
	%s
	default_backend all
backend all
	server s %s
`, p.listen, bind, rule, p.target(0))
	file, err := p.replace("haproxy.cfg", b.String())
	if err != nil {
		return nil, err
	}
	return exec.Command("haproxy", "-W", "-db", "-q", "-f", file), nil
}

// squid passes CONNECT on to a service that answers it itself, as haproxy does.
func (p *policies) squid() (*exec.Cmd, error) {
	target, port, err := net.SplitHostPort(p.target(0))
	if err != nil {
		return nil, err
	}
	var b strings.Builder
	fmt.Fprintf(&b, `http_port %s
pid_filename none
access_log none
cache_log /dev/null
coredump_dir none
cache deny all
cache_mem 0
pinger_enable off
client_db off
max_filedescriptors 16384
shutdown_lifetime 0 seconds
visible_hostname bench.test
never_direct allow all
cache_peer %s parent %s 0 no-query no-digest no-netdb-exchange
`, p.listen, target, port)
	for i, caller := range p.callers() {
		fmt.Fprintf(&b, "acl c%d src %s\nhttp_access allow c%[1]d\n", i, caller)
	}
	rest := "deny"
	if p.rules == 0 {
		rest = "allow"
	}
	fmt.Fprintf(&b, "http_access %s all\n", rest)
	file, err := p.replace("squid.conf", b.String())
	if err != nil {
		return nil, err
	}
	return exec.Command("squid", "-N", "-f", file), nil
}

// A policyBench measures what authorization takes, beside other programs.
type policyBench struct {
	*suite
	kinds     []policyPart
	decisions []decision // what Go's benchmarks say; nil where they were not asked
	decide    bool
}

type policyPart struct {
	policyKind
	suite *suite
}

// newPolicies is the part of the suite about policies, for the kinds that o names.
func (s *suite) newPolicies(o options) (*policyBench, error) {
	re, err := regexp.Compile(o.policy)
	if err != nil {
		return nil, fmt.Errorf("-policy: %w", err)
	}
	only, err := regexp.Compile(o.only)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	b := &policyBench{suite: s, decide: re.MatchString("decisions")}
	for _, kind := range policyKinds() {
		if !re.MatchString(kind.name) {
			continue
		}
		part := *s
		part.steps, part.role, part.results, part.trouble, part.live, part.peers = policySteps(), "carry", make(results), nil, nil, nil
		if kind.name == policyElsewhere {
			part.role = "load"
		}
		for _, p := range kind.peers() {
			if !only.MatchString(p.name) {
				continue
			}
			if program, _, _ := strings.Cut(p.name, ","); program != us {
				if _, err := exec.LookPath(program); err != nil {
					return nil, fmt.Errorf("%s takes part and is not there (leave it out with -only): %w", p.name, err)
				}
			}
			part.peers = append(part.peers, p)
		}
		if len(part.peers) > 0 {
			b.kinds = append(b.kinds, policyPart{kind, &part})
		}
	}
	return b, nil
}

func (b *policyBench) run(ctx context.Context) (err error) {
	for _, kind := range b.kinds {
		if err := kind.suite.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", kind.name, err)
		}
	}
	if b.decide {
		fmt.Fprintln(b.log, "decisions by themselves")
		b.decisions, err = benchmarkDecisions(ctx)
	}
	return err
}

// policySteps are what is done. The ids are those of policyRows.
func policySteps() []step {
	return []step{
		{name: "conns64", run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			r, cpu, err := s.measure(ctx, p, job{Op: "conns", N: 64})
			return map[string]float64{"conns64": float64(r.Count) / r.Took.Seconds(), "cpuconns64": micros(cpu) / float64(r.Count)}, err
		}},
		{name: "admit", run: func(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
			if p.carrier.name != policyAddress || strings.HasSuffix(p.name, ", none") {
				return nil, nil
			}
			took, err := p.admitLate(ctx, s.rig)
			return map[string]float64{"admit": took.Seconds()}, err
		}},
	}
}

// admitLate starts the peer once more, has it read a configuration by which another client
// is admitted, and returns how long that takes to be so.
func (p *running) admitLate(ctx context.Context, r rig) (time.Duration, error) {
	fresh, err := p.start(ctx, r)
	if err != nil {
		return 0, err
	}
	defer fresh.stop()
	dialer := &connect.Dialer{Proxy: fresh.addr.String(), Dialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(lateCaller)}}}
	try := func() error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		c, err := dialer.DialContext(ctx, "tcp", serviceName(0)+":443")
		if err == nil {
			_ = c.Close()
		}
		return err
	}
	if try() == nil {
		return 0, fmt.Errorf("%s is admitted before the reload", lateCaller)
	}
	sig := syscall.SIGHUP
	if strings.HasPrefix(p.name, "haproxy") {
		sig = syscall.SIGUSR2
	}
	begin := time.Now()
	next := fresh.rig
	next.late = true
	if _, err := p.command(next); err != nil {
		return 0, err
	}
	for signals := 0; ; {
		// HAProxy may lose a signal that comes while it still starts.
		if time.Since(begin) > time.Duration(signals)*2*time.Second {
			signals++
			if err := fresh.cmd.Process.Signal(sig); err != nil {
				return 0, err
			}
		}
		if err = try(); err == nil {
			return time.Since(begin), nil
		}
		if time.Since(begin) > 3*patience {
			return 0, fmt.Errorf("%s is not admitted: %w", lateCaller, err)
		}
		if err := pause(ctx, 2*time.Millisecond); err != nil {
			return 0, err
		}
	}
}

const policyPreface = `
## Policies

Policies are evaluated for each new connection. In front of the one rule that admits the client there are others: 9, or 9,999. "none"
admits everybody without a rule. HAProxy and Squid pass CONNECT on to services that answer it.
**Reload** is from the change of the files, and the signal, to the first CONNECT of a client that the new ones admit.
Each cell: median, median ratio to culvert without a policy in the same round, half the range.
`

// report writes the tables.
func (b *policyBench) report(w io.Writer) {
	if len(b.kinds) > 0 || len(b.decisions) > 0 {
		_, _ = io.WriteString(w, policyPreface)
	}
	for _, kind := range b.kinds {
		fmt.Fprintf(w, "\n%s\n\n", kind.title)
		var names []string
		for _, p := range kind.suite.peers {
			names = append(names, p.name)
		}
		kind.suite.results.table(w, names, policyPeer(us, 0), policyRows())
		for _, t := range kind.suite.trouble {
			fmt.Fprintf(w, "\nTROUBLE  %s\n", t)
		}
	}
	if len(b.decisions) == 0 {
		return
	}
	_, _ = io.WriteString(w, "\nBy themselves, from Go's benchmarks of these packages:\n\n| | ns | allocations | target, ns |\n|---|---:|---:|---:|\n")
	for _, d := range b.decisions {
		target := ""
		if d.limit > 0 {
			target = number(d.limit, 0)
			if d.ns > d.limit || d.free && d.allocations > 0 {
				target += ", missed"
			}
		}
		fmt.Fprintf(w, "| %s | %s | %s | %s |\n", d.title, number(d.ns, 0), number(d.allocations, 0), target)
	}
}

// policyRows are the lines of a table.
func policyRows() []row {
	return []row{
		{id: "conns64", title: "new connections/s, 64 workers", more: true},
		{id: "cpuconns64", title: "CPU per connection, 64 workers, us", digit: 1},
		{id: "admit", title: "reload, s", digit: 3},
	}
}
