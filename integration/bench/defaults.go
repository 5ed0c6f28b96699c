//go:build linux

package main

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// The defaults are measured beside HAProxy with a log line for each connection
// too: culvert with nothing but listeners and services in its file, and HAProxy
// with "option tcplog" to a local syslog.

const (
	usDefault   = "culvert-defaults"
	themLogging = "haproxy-tcplog"

	restTunnels = 3000
	restFor     = 5 * time.Second // in slices: see restStep
)

func culvertDefaultsCommand(r rig) (*exec.Cmd, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "listeners:\n  - address: %s\nadmin: %s\nservices:\n", r.listen, r.admin)
	for i := range r.routes {
		fmt.Fprintf(&b, "  - name: %s\n    endpoints: [\"%s\"]\n", serviceName(i), r.target(i))
	}
	file, err := r.write("culvert.yaml", b.String())
	if err != nil {
		return nil, err
	}
	return exec.Command(r.culvert, "gateway", "--config", file), nil
}

func haproxyLoggingCommand(r rig) (*exec.Cmd, error) {
	return haproxyWith(r, fmt.Sprintf("tune.pipesize %d\n\tlog %s local0", haproxyPipe, r.syslog), "log global\n\toption tcplog")
}

// startSyslog listens for datagrams, as a local syslog does, until stop.
func startSyslog() (addr string, stop func(), err error) {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4<<10)
		for {
			if _, _, err := pc.ReadFrom(buf); err != nil {
				return
			}
		}
	}()
	return pc.LocalAddr().String(), func() { _ = pc.Close(); <-done }, nil
}

// restStep holds idle tunnels and returns what they cost the proxy: CPU time in
// milliseconds a second. It waits until the first seconds, in which keepalive is
// set and dead peers are looked for, are over.
func restStep(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
	n, settle, during := restTunnels, 16*time.Second, restFor
	if s.tunnels < restTunnels { // a quick run
		n, settle, during = s.tunnels, 100*time.Millisecond, 100*time.Millisecond
	}
	if p.command == nil {
		return nil, nil
	}
	fresh, err := p.start(ctx, s.rig)
	if err != nil {
		return nil, err
	}
	defer fresh.stop()
	defer func() { _, _ = s.load.do(ctx, job{Op: "release"}) }()
	if _, err := s.do(ctx, fresh, job{Op: "hold", N: n}); err != nil {
		return nil, err
	}
	if err := pause(ctx, settle); err != nil {
		return nil, err
	}
	before, begin := cpu(fresh.pids), time.Now()
	if err := pause(ctx, during); err != nil {
		return nil, err
	}
	used := cpu(fresh.pids) - before
	return map[string]float64{"rest": float64(used) / 1e6 / time.Since(begin).Seconds()}, nil
}

// linePairs is how often a round measures the cost of a line of the access log.
const linePairs = 8

// linesStep measures what a line of the access log costs: the difference in CPU
// time per connection between culvert with its default settings and culvert
// that logs errors alone. The two take turns, and which is first alternates, so
// that what else the machine does falls on both alike.
func linesStep(ctx context.Context, s *suite, p *running) (map[string]float64, error) {
	i := slices.IndexFunc(s.live, func(r *running) bool { return r.name == usDefault })
	if i < 0 {
		return nil, nil
	}
	with := s.live[i]
	for _, n := range []int{1, 64} {
		per := func(p *running) (float64, error) {
			r, cpu, err := s.measure(ctx, p, job{Op: "conns", N: n})
			return micros(cpu) / float64(r.Count), err
		}
		for pair := range linePairs {
			order := []*running{with, p}
			if pair%2 == 1 {
				slices.Reverse(order)
			}
			cost := map[*running]float64{}
			for _, r := range order {
				v, err := per(r)
				if err != nil {
					return nil, err
				}
				cost[r] = v
			}
			s.results.add(fmt.Sprintf("line%d", n), us, cost[with]-cost[p])
		}
	}
	return nil, nil
}

// lostLines reports a log that lost lines.
func (s *suite) lostLines(ctx context.Context) error {
	for _, p := range s.live {
		if p.name != usDefault {
			continue
		}
		page, err := fetch(ctx, "http://"+p.rig.admin+"/metrics")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(page)) {
			if n, ok := strings.CutPrefix(line, "culvert_log_lines_dropped_total "); ok && strings.TrimSpace(n) != "0" {
				s.trouble = append(s.trouble, p.name+": lines of the log were lost: "+strings.TrimSpace(n))
			}
		}
	}
	return nil
}
