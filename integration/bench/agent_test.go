//go:build linux && netns

// The test needs root, ip, nft, redsocks, proxychains4 and /dev/net/tun.

package main

import (
	"context"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// Every way from a program to a service carries, and fills the table.
func TestAgent(t *testing.T) {
	bin := builtCulvert(t)
	withKeys(t)
	s := &suite{rig: rig{dir: t.TempDir(), culvert: bin}, rounds: 1, slice: 100 * time.Millisecond, only: regexp.MustCompile(""), log: io.Discard}
	b, err := s.newAgent(options{agent: ""})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	if err := b.run(ctx); err != nil {
		t.Fatal(err)
	}
	for _, row := range agentRows() {
		columns := map[string][]string{"first": {"gateway", "agent"}, "second": {"gateway", "agent"}, "cold": {"agent", "nc"}, "vips": {"captured", "nft"}}[row.id]
		for _, w := range agentWays() {
			if columns == nil || slices.Contains(columns, w.name) {
				if v, _, ok := b.results.median(row.id, w.name); !ok || v <= 0 && w.name != "direct" {
					t.Errorf("%s: %s is %v, %v; want more than 0", w.name, row.title, v, ok)
				}
			}
		}
	}
	trip := 2 * pathDelay.Seconds() * 1e3 // there and back, ms
	if v, _, _ := b.results.median("second", "agent"); v < trip {
		t.Errorf("over the path: %.1f ms, want at least %.0f", v, trip)
	}
	var page strings.Builder
	b.report(ctx, &page)
	for _, want := range []string{"## Agent", "| proxychains | nc | nft |", "a captured connection is slower than by redsocks, us: ", "the second connection over the path"} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("no %q in\n%s", want, page.String())
		}
	}
	if b, err := s.newAgent(options{agent: "none"}); err != nil || len(b.ways) > 0 {
		t.Errorf("-agent none: %v, %v, want nothing", b.ways, err)
	}
	if _, err := s.newAgent(options{agent: "("}); err == nil || !strings.Contains(err.Error(), "-agent") {
		t.Errorf("-agent (: error %v, want one with -agent", err)
	}
}
