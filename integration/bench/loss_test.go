//go:build linux && netns

// The test needs root, ip and /dev/net/tun.

package main

import (
	"context"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Bytes cross the path by TCP, by QUIC and through a gateway, and what the path
// loses makes them slower.
func TestLoss(t *testing.T) {
	bin := builtCulvert(t)
	withKeys(t)
	s := &suite{rig: rig{dir: t.TempDir(), culvert: bin}, slice: 250 * time.Millisecond, only: regexp.MustCompile("lossless|loss10000"), log: io.Discard}
	b, err := s.newLoss(options{loss: "alone, reno|quic|h3"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	if err := b.run(ctx); err != nil {
		t.Fatal(err)
	}
	if len(b.trouble) > 0 {
		t.Errorf("trouble: %q", b.trouble)
	}
	for _, way := range []string{"TCP alone, reno", "quic-go alone", "connect-h3"} {
		all, _, _ := b.results.median("lossless", way)
		some, _, ok := b.results.median("loss10000", way)
		if !ok || some <= 0 || some >= all/2 || all > pathRate/1e6 {
			t.Errorf("%s: %.2f MB/s, and %.2f of them at 1 %% loss; want less than half of at most %.0f", way, all, some, pathRate/1e6)
		}
	}
	var page strings.Builder
	b.report(&page)
	for _, want := range []string{"## Loss", "| | none lost | 0.1 % | 1 % |", "| connect-h3 | ", " | - | "} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("no %q in\n%s", want, page.String())
		}
	}
	if b, err := s.newLoss(options{loss: "none"}); err != nil || len(b.ways) > 0 {
		t.Errorf("-loss none: %v, %v, want nothing", b.ways, err)
	}
}
