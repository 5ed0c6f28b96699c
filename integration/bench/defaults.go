//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
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
	n, before, during := restTunnels, 16*time.Second, restFor
	if s.tunnels < restTunnels { // a quick run
		n, before, during = s.tunnels, 100*time.Millisecond, 100*time.Millisecond
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
	if err := pause(ctx, before); err != nil {
		return nil, err
	}
	began, begin := scheduled(fresh.pids), time.Now()
	if err := pause(ctx, during); err != nil {
		return nil, err
	}
	used := scheduled(fresh.pids) - began
	return map[string]float64{"rest": float64(used) / 1e6 / time.Since(begin).Seconds()}, nil
}

// scheduled returns the CPU time of the processes' threads, in nanoseconds: the
// ticks of /proc/PID/stat are too coarse for what a proxy at rest takes.
func scheduled(pids []int) (sum int64) {
	for _, pid := range pids {
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				continue // a thread that has ended
			}
			if first := bytes.Fields(text); len(first) > 0 {
				n, _ := strconv.ParseInt(string(first[0]), 10, 64)
				sum += n
			}
		}
	}
	return sum
}

// logLines adds what a line of the access log costs, by round: the difference
// between the defaults and a log without it.
func (r results) logLines() {
	for _, n := range []string{"1", "64"} {
		with, without := r["cpuconns"+n][usDefault], r["cpuconns"+n][us]
		for i := range min(len(with), len(without)) {
			r.add("line"+n, us, with[i]-without[i])
		}
	}
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
