package gateway

import (
	"context"
	"errors"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// A replica that has heard one of its sources and not the other serves what it
// knows, and is not ready: who comes from one that knew more would be refused.
func TestNotReadyBeforeEverySourceHasSpoken(t *testing.T) {
	api := make(toldSource)
	g, err := New(t.Context(), Config{
		Sources:   []registry.Source{registry.Static{Name: "file"}, api},
		Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&sni.Protocol{}}}},
		Lameduck:  -1, Grace: -1,
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
	api <- registry.Update{Source: "api", Err: errors.New("out of reach")}
	testnet.Eventually(t, soon, func() bool { return g.registry.Table() != nil }, "what the file says is served")
	if ok, why := g.Ready(); ok || !strings.Contains(why, "a source has not yet said") || !strings.Contains(why, "source api: out of reach") {
		t.Errorf("Ready: %v %q, want no, and why", ok, why)
	}
	api <- registry.Update{Source: "api"}
	testnet.Eventually(t, soon, func() bool { ok, _ := g.Ready(); return ok }, "it is ready")
	api <- registry.Update{Source: "api", Err: errors.New("out of reach")}
	testnet.Eventually(t, soon, func() bool { ok, why := g.Ready(); return ok && why != "" }, "it stays ready where the source is lost later")
}
