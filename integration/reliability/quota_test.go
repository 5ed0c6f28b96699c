//go:build linux

package reliability

import (
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// A container's quota that leaves the gateway half a processor, of which it takes
// all, fails nobody: no endpoint that is checked is thought to be down, the probes
// of an orchestrator are answered, tunnels at rest stand by every carrier, and new
// ones are opened.
func TestHalfAProcessor(t *testing.T) {
	t.Parallel()
	group := cgroupOf(t, "cpu", setting{"cpu.cfs_quota_us", "50000"}, setting{"cpu.max", "50000 100000"})
	if group == nil {
		testnet.LeaveOut(t, "no cgroup can be made: the quota of processor time of a container")
		return
	}
	const busy = 6 * time.Second
	b := testnet.Echo(t)
	flood := startBackend(t, "flood")
	ca, keys := newCA(t)
	far := everyWay(t, ca, "127.1.0.0/16", onlyService)
	far.opts.Wrap = group.wrap()
	far.serve(service(onlyService, b.Addr()) + service("flood.test", flood.addr) +
		"  - {name: checked.test, endpoints: [\"" + b.Addr() + "\"], check: {kind: tcp, interval: 2s, timeout: 1s}}\n")
	outer := relayed(t, ca, far)
	outer.keys = keys
	ways := carriersAnd(t, far, outer)
	tunnels := hold(t, ways, 1)

	// Downloads without end, handshakes of TLS and requests take all there is.
	ctx, stop := context.WithTimeout(t.Context(), busy)
	defer stop()
	var load sync.WaitGroup
	for i := range 8 {
		c := far.mustDial(10 + i)
		if err := bySNI.ask(c, "flood.test"); err != nil {
			t.Fatal(err)
		}
		load.Go(func() { _, _ = io.Copy(io.Discard, c) })
		defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	}
	for range 4 {
		load.Go(func() {
			d := tls.Dialer{Config: keys}
			for ctx.Err() == nil {
				if c, err := d.DialContext(ctx, "tcp", far.ip+portTLS); err == nil {
					_ = c.Close()
				}
			}
		})
	}
	before, began := far.cpu(), time.Now()
	var slowest time.Duration
	probes, opened := 0, 0
	for ctx.Err() == nil {
		for _, path := range []string{"/healthz", "/readyz"} {
			asked := time.Now()
			if status, body, err := far.get(path); err != nil || status != http.StatusOK {
				t.Errorf("%s: %d, %v, %s", path, status, err, body)
			}
			slowest = max(slowest, time.Since(asked))
			probes++
		}
		way := ways[opened%len(ways)]
		if err := opens(t, way); err != nil {
			t.Errorf("%s: a new tunnel: %v", way.name, err)
		}
		opened++
		pause(ctx, 50*time.Millisecond)
	}
	load.Wait()
	share := (far.cpu() - before).Seconds() / time.Since(began).Seconds()
	periods, _ := os.ReadFile(group.file("cpu.stat"))
	t.Logf("%.2f processors taken, %d probes, the slowest in %v, %d tunnels opened; %s", share, probes, slowest.Round(time.Millisecond), opened,
		strings.ReplaceAll(strings.TrimSpace(string(periods)), "\n", ", "))
	if strings.Contains(string(periods), "nr_throttled 0\n") {
		testnet.LeaveOut(t, "too busy: half a processor, of which the gateway did not get so much")
	}
	if slowest > 5*time.Second { // of a kubelet's probe, five of which make a restart
		t.Errorf("a probe took %v", slowest)
	}
	echoes(t, "with half a processor", tunnels)
	if down := far.metric("culvert_checked", `state="down"`); down > 0 {
		t.Errorf("%v endpoints are thought to be down", down)
	}
	if failed := far.metric("culvert_dial_failures_total"); failed > 0 {
		t.Errorf("%v dials failed", failed)
	}
}

// opens opens a tunnel that carries, and closes it.
func opens(t *testing.T, way carrier) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := way.open(ctx, onlyService)
	if err != nil {
		return err
	}
	defer c.Close()
	return echo(c, "x")
}
