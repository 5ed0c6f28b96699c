package command

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
)

// While limits, the log, DNS listeners and the admin port change under open tunnels and
// new ones, no tunnel ends, and nothing of the earlier ones is left.
func TestReloadsOfSettingsEndNoTunnel(t *testing.T) {
	const tunnels, before, reloads = 100, 4, 200 // with the same sockets before, between and after
	backend := testnet.Serve(t, func(c net.Conn) { _, _ = io.Copy(c, c) })
	hosts := []string{"127.0.0.1", "localhost"}
	// Each reload changes the admin port, and DNS by turns.
	yaml := func(i int) string {
		dns := []string{"", `dns: {listen: ["udp://127.0.0.1:3", "tcp://127.0.0.1:3"], zones: [a.test]}`,
			`dns: {listen: ["udp://localhost:3", "tcp://127.0.0.1:3"], zones: [b.test], upstreams: [192.0.2.53], recursionClients: [192.0.2.0/24]}`,
			`dns: {listen: ["udp://localhost:3"], ttl: 1s}`}[i%4]
		return fmt.Sprintf(`
listeners: [{address: "127.0.0.1:1", protocols: [connect]}]
admin: "%s:2"
limits: {maxTunnels: %d, idleTimeout: %dm, handshakeTimeout: %ds}
log: {level: %s, format: %s}
%s
services:
  - {name: svc.test, ports: [443], endpoints: ["%s"]}
`, hosts[i%2], []int{0, tunnels / 2, 10000}[i%3], 1+i, 1+i%5, []string{"info", "debug", "error"}[i%3], []string{"text", "json"}[i%2], dns, backend.Addr())
	}
	r := startFile(t, map[string]string{"culvert.yaml": yaml(0)})
	takenUp := func(i int) func() bool {
		return func() bool {
			s := r.Status()
			n := 0
			if s.DNS != nil {
				for _, l := range s.DNS.Listeners {
					if l.Address == "" || l.Problem != "" {
						return false
					}
					n++
				}
			}
			return n == []int{0, 2, 2, 1}[i%4] && (i%4 != 2 || slices.Equal(s.DNS.Zones, []string{"b.test"})) &&
				len(s.Admin) == 1 && s.Admin[0].Configured == hosts[i%2]+":0" && s.Admin[0].Address != "" && s.Admin[0].Problem == ""
		}
	}
	testnet.Eventually(t, patience, takenUp(0), "the first file is taken up")
	d := &connect.Dialer{Proxy: r.addrs[0]}
	var open []net.Conn
	for range tunnels {
		c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		open = append(open, c)
	}
	reload := func(i int) {
		r.write(t, "culvert.yaml", yaml(i))
		r.source.Reload()
		testnet.Eventually(t, patience, takenUp(i), "file %d is taken up", i)
	}
	for i := range before { // what is opened once is open then
		reload(1 + i)
	}
	goroutines, descriptors := runtime.NumGoroutine(), openDescriptors(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var carried, refused atomic.Int64
	var clients sync.WaitGroup
	for range 2 {
		clients.Go(func() {
			for ctx.Err() == nil {
				c, err := d.DialContext(ctx, "tcp", "svc.test:443")
				switch {
				case err == nil:
					carried.Add(1)
					_ = c.Close()
				case ctx.Err() == nil && !strings.Contains(err.Error(), "503"):
					t.Errorf("a new tunnel: %v", err)
					return
				default:
					refused.Add(1)
				}
			}
		})
	}
	for i := range reloads {
		reload(1 + before + i)
	}
	stop()
	clients.Wait()
	if carried.Load() == 0 || refused.Load() == 0 {
		t.Errorf("%d new tunnels were carried and %d refused, want some of both", carried.Load(), refused.Load())
	}
	for i, c := range open {
		if _, err := io.WriteString(c, "x"); err != nil {
			t.Fatalf("tunnel %d: %v", i, err)
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatalf("tunnel %d: %v", i, err)
		}
	}
	testnet.Eventually(t, patience, func() bool { return openDescriptors(t) <= descriptors }, "descriptors are given back")
	testnet.Eventually(t, patience, func() bool { return runtime.NumGoroutine() <= goroutines }, "goroutines end")
	if s := r.Status().Restart; len(s) > 0 {
		t.Errorf("a restart is needed for %+v", s)
	}
}

// openDescriptors returns how many this process has, where that can be told.
func openDescriptors(t *testing.T) int {
	t.Helper()
	if runtime.GOOS != "linux" {
		return 0
	}
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}
