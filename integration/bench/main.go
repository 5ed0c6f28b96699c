//go:build linux

// Bench measures culvert beside HAProxy, nginx, a naive Go proxy and a direct
// connection, on the same work, and prints one table with ratios:
//
//	go run ./bench -culvert ../bin/culvert
//	go run ./bench -quick -only 'haproxy|naive'
//
// Everything runs on loopback and shares the machine's cores, so only ratios
// within a run mean anything. The load generator and the backend are
// processes of this same program; each proxy routes a ClientHello by one of
// 100 names. It needs haproxy and nginx with its stream module, on Linux.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
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
	out     string
}

func main() {
	// The children die with the thread that started them (PR_SET_PDEATHSIG),
	// so it must be the one that lasts.
	runtime.LockOSThread()
	var o options
	flag.StringVar(&o.culvert, "culvert", "../bin/culvert", "the culvert `binary`")
	flag.IntVar(&o.rounds, "rounds", 5, "how often to do everything")
	flag.BoolVar(&o.quick, "quick", false, "one short round, to see that it works")
	flag.StringVar(&o.only, "only", "", "peers that take part, a `regexp`: culvert, haproxy, nginx, naive, direct")
	flag.StringVar(&o.measure, "measure", "", "what to measure, a `regexp`: conns1, conns64, trips1, trips64, up1, up16, down1, down16, idle, half")
	flag.StringVar(&o.out, "o", "", "write the table to this `file` too")
	role := flag.String("role", "", "internal: what this process does for the benchmark")
	naive := flag.String("naive-config", "", "internal: the naive proxy's configuration")
	flag.Parse()
	var err error
	switch *role {
	case "":
		err = benchmark(o)
	case "backend":
		err = backendMain()
	case "load":
		err = loadMain()
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

func benchmark(o options) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	only, err := regexp.Compile(o.measure)
	if err != nil {
		return fmt.Errorf("-measure: %w", err)
	}
	chosen, err := choose(o)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "culvert-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	s := &suite{
		rig:     rig{dir: dir, culvert: o.culvert},
		peers:   chosen,
		rounds:  o.rounds,
		slice:   2 * time.Second,
		settle:  1500 * time.Millisecond,
		tunnels: 3000,
		half:    2000,
		only:    only,
		log:     os.Stderr,
		results: make(results),
	}
	if o.quick {
		s.rounds, s.slice, s.settle, s.tunnels, s.half = 1, 300*time.Millisecond, 300*time.Millisecond, 500, 200
	}
	var names []string
	var text strings.Builder
	fmt.Fprintf(&text, "%s, %s, %s. %d rounds of %v.\n\n", machine(), runtime.Version(), time.Now().Format(time.DateOnly), s.rounds, s.slice)
	for _, p := range chosen {
		names = append(names, p.name)
		fmt.Fprintf(&text, "- %s: %s\n", p.name, p.version(ctx))
	}
	text.WriteString("\n")
	if err := s.run(ctx); err != nil {
		return err
	}
	s.results.print(&text, names)
	text.WriteString("\n")
	for _, t := range s.trouble {
		fmt.Fprintf(&text, "TROUBLE  %s\n", t)
	}
	if short := s.results.judge(&text); short > 0 {
		fmt.Fprintf(&text, "\n%d targets fall short.\n", short)
	}
	if _, err := io.WriteString(os.Stdout, text.String()); err != nil {
		return err
	}
	if o.out != "" {
		return os.WriteFile(o.out, []byte(text.String()), 0o644)
	}
	return nil
}

// choose returns the peers that take part and checks that they are there.
func choose(o options) ([]*peer, error) {
	re, err := regexp.Compile(o.only)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	programs := map[string]string{"culvert": o.culvert, "haproxy": "haproxy", "nginx": "nginx"}
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
