package gateway

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// The health port tells how the gateway is, from the start to the drain, and
// does nothing else that the admin port does.
func TestTheHealthPortOnlyTells(t *testing.T) {
	source := make(toldSource)
	g, err := New(t.Context(), Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&sni.Protocol{}}}},
		Sources:   []registry.Source{source}, Health: "127.0.0.1:0", AdminControl: true, DrainDelay: time.Minute, DrainTimeout: 2 * time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	now := make(chan struct{})
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx, now) }()
	defer func() {
		cancel()
		close(now)
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	ask := func(method, path string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+g.HealthAddr().String()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		if !resp.Close {
			t.Errorf("%s %s: the connection is kept for another request, and whoever reaches the port could hold it", method, path)
		}
		return resp.StatusCode, string(b)
	}
	answers := func(path string, want int) func() bool {
		return func() bool { status, _ := ask("GET", path); return status == want }
	}
	if status, body := ask("GET", "/readyz"); status != 503 || !strings.HasPrefix(body, "not ready: no source") {
		t.Errorf("before the first table: %d %q", status, body)
	}
	source <- registry.Update{Source: "told"}
	testnet.Eventually(t, soon, answers("/readyz", 200), "it is ready")
	if status, body := ask("GET", "/healthz"); status != 200 || body != "ok\n" {
		t.Errorf("/healthz: %d %q", status, body)
	}
	if status, body := ask("GET", "/metrics"); status != 200 || !strings.Contains(body, "culvert_ready 1\n") {
		t.Errorf("/metrics: %d, without culvert_ready 1", status)
	}
	for _, path := range []string{"/status", "/explain", "/resolve", "/registry", "/tunnels", "/tunnels/1", "/debug/pprof/", "/debug/pprof/cmdline"} {
		if status, body := ask("GET", path); status != 404 {
			t.Errorf("%s: %d %q, want 404", path, status, body)
		}
	}
	for _, path := range []string{"/tunnels/1", "/tunnels?service=a"} {
		if status, _ := ask("DELETE", path); status < 400 {
			t.Errorf("DELETE %s: %d", path, status)
		}
	}
	cancel()
	testnet.Eventually(t, soon, answers("/readyz", 503), "it is not ready, while it drains")
	if status, _ := ask("GET", "/healthz"); status != 200 {
		t.Errorf("/healthz while it drains: %d", status)
	}
}

// A client does not reach the health port through the gateway.
func TestTheHealthPortIsNoDestination(t *testing.T) {
	guard := &tunnel.Guard{}
	g := &Gateway{cfg: Config{Health: "127.0.0.1:0"}}
	if err := g.listenHealth(t.Context(), guard); err != nil {
		t.Fatal(err)
	}
	defer g.healthLn.Close()
	d := &tunnel.NetDialer{Guard: guard}
	c, err := d.DialContext(t.Context(), "tcp", g.HealthAddr().String())
	if err == nil {
		c.Close()
	}
	if tunnel.ReasonOf(err) != tunnel.Prohibited {
		t.Errorf("got %v, want it prohibited", err)
	}
	if _, err := New(t.Context(), Config{Listeners: []Listener{{Address: "127.0.0.1:0"}}, Health: "9091"}); err == nil {
		t.Error("an address without a host and a colon is taken")
	}
}
