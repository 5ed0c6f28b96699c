package gateway

import (
	"context"
	"testing"
	"time"

	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// Somebody at a terminal does not wait for load balancers to hear that the
// gateway is not ready any more.
func TestAnInterruptWithoutTunnelsEndsAtOnce(t *testing.T) {
	serving := make(chan struct{})
	g, err := New(t.Context(), Config{
		Listeners:  []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&sni.Protocol{}}}},
		Sources:    []registry.Source{registry.Static{Name: "none"}},
		DrainDelay: time.Minute, DrainTimeout: 3 * time.Minute,
		Serving: func() { close(serving) },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, interrupt := context.WithCancelCause(t.Context())
	defer interrupt(nil)
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx, nil) }()
	<-serving
	interrupt(ErrInterrupted)
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("it waits still")
	}
}
