package gateway

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// toldSource says what it is told.
type toldSource chan registry.Update

func (s toldSource) Run(ctx context.Context, updates chan<- registry.Update) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case u := <-s:
			select {
			case updates <- u:
			case <-ctx.Done():
			}
		}
	}
}

// A running gateway checks what it serves, and says on its admin port what it
// has found, and how old what it serves is.
func TestHealthOfARunningGateway(t *testing.T) {
	up, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer up.Close()
	at := netip.MustParseAddrPort(up.Addr().String())
	source := make(toldSource)
	g, err := New(t.Context(), Config{
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&sni.Protocol{}}}},
		Sources:   []registry.Source{source}, Admin: "127.0.0.1:0", DrainDelay: -1, DrainTimeout: -1,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx, nil) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	get := func(path string) string {
		resp, err := client.Get("http://" + g.AdminAddr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return string(b)
	}
	ours := netip.MustParseAddrPort(g.Addrs()[0].String())
	p, err := tunnel.ParsePattern("a.test")
	if err != nil {
		t.Fatal(err)
	}
	check := registry.Check{Kind: "tcp", Interval: registry.DefaultCheckInterval / 10}
	there := registry.Snapshot{
		Services: []*registry.Service{{Name: "a.test", Names: []tunnel.Pattern{p}, Exposed: true, Check: check, Endpoints: []registry.Endpoint{{Addr: at.Addr(), Port: at.Port()}}}},
		Networks: []registry.Network{{Name: "west", Gateways: []registry.Gateway{{Address: registry.Endpoint{Addr: ours.Addr(), Port: ours.Port()}, Check: check}}}},
	}
	source <- registry.Update{Source: "told", Err: errors.New("not yet")}
	testnet.Eventually(t, soon, func() bool {
		ok, why := g.Ready()
		return !ok && why == "no source has sent its configuration; source told: not yet"
	}, "it is said why there is no table")
	source <- registry.Update{Source: "told"} // with nothing to check
	testnet.Eventually(t, soon, func() bool { return g.Status().Generation == 1 }, "the first table is there")
	source <- registry.Update{Source: "told", Snapshot: there}
	// Our own listener is never dialed, so nothing is known of it.
	state := func(want string) func() bool {
		return func() bool {
			h := g.Status().Health
			return len(h) == 1 && h[0].State == want && h[0].Address == at.String() && h[0].By == "tcp" && slices.Equal(h[0].Services, []string{"a.test"})
		}
	}
	testnet.Eventually(t, soon, state(registry.StateUp), "the service is up")
	if got := get("/metrics"); !strings.Contains(got, "culvert_checked{state=\"up\"} 1\n") || !strings.Contains(got, "culvert_table_age_seconds 0\n") {
		t.Errorf("the metrics lack a checked address that is up, or the table's age of 0")
	}
	if got := get("/readyz"); got != "ok\n" {
		t.Errorf("readyz says %q, want ok", got)
	}
	_ = up.Close()
	testnet.Eventually(t, soon, state(registry.StateDown), "the service is down")
	if got := get("/metrics"); !strings.Contains(got, "culvert_checked{state=\"down\"} 1\n") || !regexp.MustCompile(`culvert_checks_total\{result="failed"\} [1-9]`).MatchString(got) {
		t.Errorf("the metrics lack a checked address that is down, or failed checks")
	}
	if got := get("/status"); !strings.Contains(got, `"state": "down"`) || !strings.Contains(got, "refused") {
		t.Errorf("status lacks the address that is down:\n%s", got)
	}

	source <- registry.Update{Source: "told", Err: errors.New("no sight\nof west")}
	testnet.Eventually(t, soon, func() bool { return g.Status().Stale != nil }, "the source is lost")
	if got := get("/readyz"); !regexp.MustCompile(`^ok, but the table is \d+s old: source told: no sight\n$`).MatchString(got) {
		t.Errorf("readyz says %q, want ok, with how old the table is", got)
	}
	if s := g.Status(); !s.Ready || !strings.Contains(s.Why, "source told") || s.Stale.Source != "told" || s.Services != 1 {
		t.Errorf("status %+v, want ready with a table that may be old", s)
	}
	if got := get("/metrics"); strings.Contains(got, "culvert_table_age_seconds 0\n") || !strings.Contains(got, "culvert_ready 1\n") {
		t.Errorf("the metrics say that the table is fresh, or that the gateway is not ready")
	}
	source <- registry.Update{Source: "told", Snapshot: there}
	testnet.Eventually(t, soon, func() bool { return g.Status().Stale == nil }, "the source is back")
	if got := g.Status(); got.Generation != 2 || got.Why != "" {
		t.Errorf("status %+v, want generation 2 still", got)
	}
}
