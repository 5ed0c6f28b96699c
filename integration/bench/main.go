//go:build linux

// Bench measures culvert beside HAProxy, nginx, a naive Go proxy and a direct
// connection, on the same work, and prints one table with ratios; and culvert's
// carriers beside each other, in a second one; and DNS servers, in a third; and bulk
// through a path that loses packets, in a fourth; and what policies take; and reverse sessions; and the agent:
//
//	go run ./bench -culvert ../bin/culvert -o ../docs/BENCHMARKS.md
//	go run ./bench -only 'culvert|^haproxy$' -measure 'trips|cpu' -slice 1s
//	go run ./bench -carrier 'connect-h2|^sni$' -measure idle -rounds 1
//	go run ./bench -dns 'culvert|unbound' -rounds 1
//	go run ./bench -dns . -measure paced
//	go run ./bench -loss 'quic|h3|cubic'
//	go run ./bench -policy 'by address|decisions'
//	go run ./bench -reverse 'culvert|^frp$' -slice 1s
//	go run ./bench -agent . -slice 1s
//	go run ./bench -profile ../bin/profile
//
// Everything runs on loopback and shares the machine's cores, so only ratios
// within a run mean anything. The load generator and the backend are
// processes of this same program; each proxy routes a ClientHello by one of
// 100 names. It needs haproxy and nginx with its stream module, on Linux.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"
)

type options struct {
	culvert string
	rounds  int
	quick   bool
	only    string
	measure string
	slice   time.Duration
	out     string
	profile string
	scale   int
	carrier string
	dns     string
	loss    string
	tls     string
	policy  string
	reverse string
	agent   string
	sites   string
}

func main() {
	// The children die with the thread that started them (PR_SET_PDEATHSIG),
	// so it must be the one that lasts.
	runtime.LockOSThread()
	var o options
	flag.StringVar(&o.culvert, "culvert", "../bin/culvert", "the culvert `binary`")
	flag.IntVar(&o.rounds, "rounds", 5, "how often to do everything")
	flag.BoolVar(&o.quick, "quick", false, "one short round, to see that it works")
	flag.StringVar(&o.only, "only", "", "peers that take part, a `regexp`: culvert, culvert-defaults, haproxy, haproxy-tcplog, haproxy-default, nginx, naive, bare, floor, direct")
	flag.StringVar(&o.measure, "measure", "", "what to measure, a `regexp`: conns1, conns64, trips1, trips64, up1, up16, down1, down16, idle, half, rest, routes, reload; of DNS servers: local, cached, paced, many; of the agent: conns, trips, down, cold, vips, path")
	flag.DurationVar(&o.slice, "slice", 0, "length of one measurement (default 2s, or 5s of a profile)")
	flag.StringVar(&o.out, "o", "", "write all of it to this `file` too, as a page")
	flag.StringVar(&o.profile, "profile", "", "profile culvert instead, into this `folder`")
	flag.StringVar(&o.carrier, "carrier", "", "carriers to measure, a `regexp` of lines of their table, or none: sni, connect, connect-h2, ...")
	flag.StringVar(&o.dns, "dns", "", "DNS servers to measure, a `regexp`, or none: culvert, coredns, unbound, dnsmasq")
	flag.StringVar(&o.loss, "loss", "", "ways through a path that loses packets to measure, a `regexp`, or none: TCP alone, quic-go alone, port per service, connect-h2, connect-h3; as root")
	flag.StringVar(&o.tls, "tls", "", "TLS at the proxy to measure, a `regexp`, or none: terminated, originated, re-encrypted, identity")
	flag.StringVar(&o.policy, "policy", "", "policies to measure, a `regexp`, or none: policies by address, policies by identity, policies of others, decisions")
	flag.StringVar(&o.reverse, "reverse", "", "reverse sessions to measure, a `regexp`, or none: culvert, frp, frp-nomux, chisel, sshd, culvert-ssh")
	flag.StringVar(&o.agent, "agent", "", "ways from a program to a service to measure beside the agent, a `regexp`, or none: direct, gateway, agent, in-its-place, captured, captured-plain, captured-floor, redsocks, proxychains; as root")
	flag.StringVar(&o.sites, "sites", "", "catalogs in which a site has the services of another one, by how many these are, a `regexp`, or none: 1, 1000, 9900")
	flag.IntVar(&o.scale, "scale", 0, "hold as many idle tunnels as so `many` culverts can, instead")
	role := flag.String("role", "", "internal: what this process does for the benchmark")
	naive := flag.String("naive-config", "", "internal: the naive proxy's configuration")
	flag.Parse()
	var err error
	switch *role {
	case "":
		err = begin(o)
	case "backend":
		err = backendMain()
	case "tlsservice":
		err = tlsServiceMain(false)
	case "identityservice":
		err = tlsServiceMain(true)
	case "load":
		err = loadMain()
	case "carry":
		err = carryMain()
	case "connectors":
		err = connectorsMain()
	case "source":
		err = sourceMain()
	case "naive":
		err = naiveMain(*naive)
	default:
		err = fmt.Errorf("no such role: %q", *role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench: error:", err)
		os.Exit(1)
	}
}

func begin(o options) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	only, err := regexp.Compile(o.measure)
	if err != nil {
		return fmt.Errorf("-measure: %w", err)
	}
	dir, err := os.MkdirTemp("", "culvert-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := makeKeys(filepath.Join(dir, "keys")); err != nil {
		return err
	}
	s := &suite{
		rig:     rig{dir: dir, culvert: o.culvert},
		rounds:  o.rounds,
		slice:   2 * time.Second,
		settle:  500 * time.Millisecond,
		tunnels: 8000,
		half:    8000,
		routes:  100_000,
		only:    only,
		log:     os.Stderr,
		steps:   steps(),
		role:    "load",
		results: make(results),
	}
	if o.quick {
		s.rounds, s.slice, s.settle, s.tunnels, s.half = 1, 300*time.Millisecond, 100*time.Millisecond, 1000, 1000
	}
	if o.profile != "" {
		s.slice = 5 * time.Second
	}
	if o.slice > 0 {
		s.slice = o.slice
	}
	if o.profile != "" {
		return s.profile(ctx, o.profile, os.Stdout)
	}
	if o.scale > 0 {
		s.tunnels = 9000
		var page strings.Builder
		if err := s.scale(ctx, o.scale, &page); err != nil {
			return err
		}
		return deliver(page.String(), o.out)
	}
	return s.benchmark(ctx, o)
}

// deliver prints a page, and writes it to a file if there is one.
func deliver(page, file string) error {
	if _, err := io.WriteString(os.Stdout, page); err != nil || file == "" {
		return err
	}
	return os.WriteFile(file, []byte(page), 0o644)
}

// benchmark measures, and prints what came of it.
func (s *suite) benchmark(ctx context.Context, o options) (err error) {
	// A run that names a part of the benchmark is of that part alone.
	named := func(s string) bool { return s != "" && s != "none" }
	part := named(o.carrier) || named(o.dns) || named(o.loss) || named(o.tls) || named(o.policy) || named(o.reverse) || named(o.agent) || named(o.sites)
	if part {
		o.carrier = cmp.Or(o.carrier, "none")
	}
	if part || o.only != "" {
		for _, other := range []*string{&o.dns, &o.loss, &o.tls, &o.policy, &o.reverse, &o.agent, &o.sites} {
			*other = cmp.Or(*other, "none")
		}
	}
	ways, err := s.carriers(o)
	if err != nil {
		return err
	}
	answers, err := s.newDNS(o)
	if err != nil {
		return err
	}
	lossy, err := s.newLoss(o)
	if err != nil {
		return err
	}
	encrypted, err := s.newTLS(o)
	if err != nil {
		return err
	}
	authorized, err := s.newPolicies(o)
	if err != nil {
		return err
	}
	hidden, err := s.newReverse(o)
	if err != nil {
		return err
	}
	programs, err := s.newAgent(o)
	if err != nil {
		return err
	}
	catalogs, err := s.newSites(o)
	if err != nil {
		return err
	}
	if !part {
		if s.peers, err = choose(o); err != nil {
			return err
		}
		if err := s.run(ctx); err != nil {
			return err
		}
	}
	if len(ways.peers) > 0 {
		if err := ways.run(ctx); err != nil {
			return err
		}
	}
	if err := encrypted.run(ctx); err != nil {
		return err
	}
	if err := authorized.run(ctx); err != nil {
		return err
	}
	if err := hidden.run(ctx); err != nil {
		return err
	}
	if err := programs.run(ctx); err != nil {
		return err
	}
	if err := catalogs.run(ctx); err != nil {
		return err
	}
	if len(answers.peers) > 0 {
		if err := answers.run(ctx); err != nil {
			return err
		}
	}
	if len(lossy.ways) > 0 {
		if err := lossy.run(ctx); err != nil {
			return err
		}
	}
	var page strings.Builder
	s.report(ctx, &page, o, ways)
	encrypted.report(&page)
	authorized.report(&page)
	hidden.report(ctx, &page)
	programs.report(ctx, &page)
	catalogs.report(&page)
	answers.report(ctx, &page)
	lossy.report(&page)
	return deliver(page.String(), o.out)
}

// carriers is the part of the suite that measures them.
func (s *suite) carriers(o options) (*suite, error) {
	lines, err := regexp.Compile(o.carrier)
	if err != nil {
		return nil, fmt.Errorf("-carrier: %w", err)
	}
	only, err := regexp.Compile(o.only)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	ways := *s
	ways.steps, ways.role, ways.results, ways.tunnels = carrierSteps(), "carry", make(results), min(s.tunnels, 4000)
	ways.rest = 4 * s.settle
	ways.peers = contestants(func(line, proxy string) bool { return lines.MatchString(line) && only.MatchString(proxy) })
	return &ways, nil
}

// choose returns the peers that take part and checks that they are there.
func choose(o options) ([]*peer, error) {
	re, err := regexp.Compile(o.only)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	programs := map[string]string{us: o.culvert, "haproxy": "haproxy", "haproxy-default": "haproxy", usDefault: o.culvert, themLogging: "haproxy", "nginx": "nginx"}
	var chosen []*peer
	for _, p := range peers(o.culvert) {
		if !re.MatchString(p.name) {
			continue
		}
		if program := programs[p.name]; program != "" {
			if _, err := exec.LookPath(program); err != nil {
				return nil, fmt.Errorf("%s takes part and is not there (leave it out with -only): %w", p.name, err)
			}
		}
		chosen = append(chosen, p)
	}
	if len(chosen) == 0 {
		return nil, errors.New("-only leaves nobody to measure")
	}
	return chosen, nil
}
